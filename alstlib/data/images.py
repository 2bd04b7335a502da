"""The images of a batch are dealt to the ranks of an SP group, and a plan says which feature goes to which rank. It is
made on the CPU, from the tokens and the images' sizes alone.

A model that reads images has a placeholder token for each feature that its vision tower makes. Each rank runs the tower
on the images that it is dealt (whole images, and single frames of videos), and sends each feature to the rank whose
slice has the feature's placeholder (`alstlib.hf.vision`). So no rank holds the embeddings of the whole sequence.

Shape legend: B samples of a micro-batch, P tokens of a padded sample, L = P / sp tokens of one rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alstlib.base.mesh import striped
from alstlib.base.options import Record

Fields = dict[str, Tensor]
PIXELS = ("pixel_values", "pixel_values_videos")
IMAGE_KEYS = (
    *PIXELS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes", "pixel_attention_mask",
    "mm_token_type_ids",
)  # fmt: skip
"""Fields of a processor's batch that are about images; the types of tokens are made again from the tokens."""
DEALT = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_plan", "image_positions")
"""Fields of one rank's slice that are about images."""


@dataclass(frozen=True, kw_only=True)
class ImageLayout:
    """How a model takes images. `Handle.images` has that of an attached model, for `SPDataLoader(images=...)`."""

    token: int
    """The placeholder of one feature of an image."""
    blank: Callable[[], Fields]
    """Makes the smallest image, which the tower of a rank without one runs on."""
    video_token: int | None = None
    """The placeholder of one feature of a video; None: the model takes none, or as images."""
    sizes: str = ""
    """The field with the size of each image: image_grid_thw in patches, or image_sizes in pixels. Empty: each image of
    a batch has equally many features."""
    unit: int = 1
    """Number of patches that become one feature (image_grid_thw), or of pixels along its side (image_sizes)."""
    nested: bool = False
    """Whether pixel_values are [B, images, ...], where the samples of a batch are filled up with images of zeros."""
    width: int = 1
    """Width of the vision tower, by which the cost of its attention is weighed."""
    positions: Callable[..., Tensor] | None = None
    """The model's own function of the positions of several dimensions: of tokens and their types [1, n] and the sizes
    of images it makes [3, 1, n]. None: positions have one dimension."""

    def read(self, given: Record, whole: Record) -> BatchImages:
        """The images of a batch.

        Args:
            given: the batch as a processor made it.
            whole: the same after `prepare`: input_ids [B, P], position_ids and cu_seqlens.

        Raises:
            ValueError: images and placeholders do not fit, or the model takes no such field.
        """
        ids = whole["input_ids"].cpu()
        fields = {n: torch.as_tensor(given[n]).cpu() for n in IMAGE_KEYS if given.get(n) is not None}
        taken = {"pixel_values", "mm_token_type_ids", self.sizes} - {""}
        taken |= {"pixel_attention_mask"} if self.nested else set()
        taken |= (
            {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"} if self.video_token is not None else set()
        )
        if unknown := sorted(fields.keys() - taken):
            raise ValueError(f"{', '.join(unknown)}: this model takes images as {', '.join(sorted(taken))}")
        images = self._pieces(fields, ids, "image", self.token)
        frames = [] if self.video_token is None else self._pieces(fields, ids, "video", self.video_token)
        made = BatchImages(layout=self, pieces=[*images, *frames], padded=ids.shape[1])
        if self.positions is not None:
            made.positions = self._positions(fields, whole, images, frames)
        return made

    def joined(self, images: list[Fields]) -> Fields:
        """The fields of these images, one after another, as the model takes them; of a blank one where there are
        none."""
        images = images or [self.blank()]
        made = {name: torch.cat([one[name] for one in images]) for name in images[0]}
        return {name: value[None] for name, value in made.items()} if self.nested else made

    def chosen(self, given: Fields, lengths: list[int], places: list[int]) -> Fields:
        """Of the fields of a rank's images, which have so many place in pixel_values, those of the images at these
        places."""
        fields = {name: value[0] if self.nested else value for name, value in given.items()}
        each = {
            name: value.split(lengths if name == "pixel_values" else [1] * len(lengths))
            for name, value in fields.items() if places
        }  # fmt: skip
        return self.joined([{name: parts[i] for name, parts in each.items()} for i in places])

    def _pieces(self, fields: Fields, ids: Tensor, kind: str, token: int) -> list[ImagePiece]:
        """What the tower runs at once, one after another: images, or frames of videos."""
        at = (ids == token).flatten().nonzero().flatten()
        pixels = fields.get("pixel_values" if kind == "image" else "pixel_values_videos")
        if pixels is None:
            if len(at):
                raise ValueError(f"the batch has {len(at)} placeholders of the token {token}, but no {kind}")
            return []
        each: dict[str, Any] = {"pixel_values": pixels}
        if kind == "video":
            grid = _needed(fields, "video_grid_thw")
            each[self.sizes] = torch.repeat_interleave(grid, grid[:, 0], 0).index_fill(1, torch.tensor([0]), 1)
        elif self.sizes:
            each[self.sizes] = _needed(fields, self.sizes)
        if self.nested:
            real = (pixels != 0).flatten(2).any(2)
            each |= {n: fields[n] for n in ("pixel_attention_mask",) if n in fields}
            each = {name: value[real] for name, value in each.items()}
        if self.sizes == "image_grid_thw":
            patches = each[self.sizes].prod(1)
            if int(patches.sum()) != len(pixels):
                raise ValueError(f"{kind}s of {int(patches.sum())} patches by their sizes have {len(pixels)} in pixels")
            each["pixel_values"] = pixels.split(patches.tolist())
            features = (patches // self.unit).tolist()
        elif self.sizes:
            features = (each[self.sizes] // self.unit).prod(1).tolist()
        else:
            count = len(each["pixel_values"])
            features = [len(at) // count] * count
        if sum(features) != len(at):
            raise ValueError(
                f"the batch has {len(at)} placeholders of the token {token}, but its {len(features)} {kind}s have "
                f"{sum(features)} features"
            )
        split = {n: t if isinstance(t, tuple) else t.split(1) for n, t in each.items()}
        return [
            ImagePiece(at=mine, fields={name: parts[i] for name, parts in split.items()})
            for i, mine in enumerate(at.split(features))
        ]

    def _positions(
        self, fields: Fields, whole: Record, images: list[ImagePiece], frames: list[ImagePiece]
    ) -> Tensor:  # fmt: skip
        """[B, P, 3]: those of each document by itself, by the model's own function where it has images."""
        assert self.positions is not None
        ids, offsets = whole["input_ids"].cpu().flatten(), whole["cu_seqlens"].long()
        made = whole["position_ids"].cpu().flatten()[:, None].repeat(1, 3)

        def documents(pieces: list[ImagePiece]) -> Tensor:
            first = torch.tensor([int(one.at[0]) for one in pieces], dtype=torch.int64)
            return torch.searchsorted(offsets, first, right=True) - 1

        given: dict[str, tuple[Tensor, Tensor]] = {}  # what is told of each image or video, and its document
        if (grid := fields.get("image_grid_thw")) is not None:
            given["image_grid_thw"] = grid, documents(images)
        if (videos := fields.get("video_grid_thw")) is not None:
            of = documents([frames[i] for i in [0, *videos[:, 0].cumsum(0).tolist()][:-1]])
            given |= {n: (fields[n], of) for n in ("video_grid_thw", "second_per_grid_ts") if n in fields}
        for one in sorted({document for _, of in given.values() for document in of.tolist()}):
            place = slice(int(offsets[one]), int(offsets[one + 1]))
            types = torch.zeros_like(ids[place])
            for number, token in enumerate((self.token, self.video_token), 1):
                types[ids[place] == token] = number
            inside = {name: value[of == one] for name, (value, of) in given.items() if bool((of == one).any())}
            made[place] = self.positions(ids[place][None], types[None], **inside)[:, 0].T.to(made.dtype)
        return made.view(*whole["input_ids"].shape, 3)


def _needed(fields: Fields, name: str) -> Tensor:
    if name not in fields:
        raise ValueError(f"the batch has images but no {name}, which the model's processor makes with them")
    return fields[name]


@dataclass(frozen=True)
class ImagePiece:
    """What the tower runs on by itself: an image, or a frame of a video."""

    at: Tensor
    """[n] places of its placeholders in the flattened batch [B * P], in order."""
    fields: Fields
    """What the tower is given of it."""


@dataclass(frozen=True)
class FeaturePlan:
    """Which features of one rank go where, and in which order others arrive."""

    send: Tensor
    """Places of the features that are sent, among those that this rank's tower makes, in order of the ranks."""
    to_ranks: list[int]
    """Number of features that each rank is sent."""
    from_ranks: list[int]
    """Number of features that each rank sends."""
    order: Tensor
    """Places, among the features that arrive, of those of this rank's placeholders, in order."""
    images: list[int]
    """Places of the images that this rank's tower runs on, among those that it is dealt."""


@dataclass(frozen=True, kw_only=True)
class DealtImages:
    """Which rank runs which image of a batch, and where its placeholders are, as one rank knows it."""

    at: list[Tensor]
    """For each image, the places of its placeholders in the flattened batch [B * P]."""
    owners: list[int]
    """For each image, the rank that it is dealt to."""
    lengths: list[int]
    """For each image of this rank, the place that it has in pixel_values."""
    padded: int
    """Tokens of a padded sample: P."""
    sp: int
    sp_rank: int
    plans: dict[tuple[int | None, int | None], FeaturePlan] = field(default_factory=dict)
    """What `plan` has made."""

    def plan(self, stripe: int | None = None, block: int | None = None) -> FeaturePlan:
        """The plan of this rank, made once.

        Args:
            stripe: the tokens of a rank in each stripe, where tokens are dealt out (`alltoall.stripe`); None: each rank
                has its slice.
            block: only the placeholders of this stripe of all ranks count, and only their images run; None: all.
        """
        if (stripe, block) not in self.plans:
            self.plans[stripe, block] = plan_features(
                self.at, self.owners, self.padded, self.sp, self.sp_rank, stripe, block
            )
        return self.plans[stripe, block]


@dataclass
class BatchImages:
    """The images of a whole batch."""

    layout: ImageLayout
    pieces: list[ImagePiece]
    padded: int
    """Tokens of a padded sample: P."""
    positions: Tensor | None = None
    """[B, P, 3] positions of several dimensions; None where the model has one."""

    def cut(self, sp: int, sp_rank: int) -> dict[str, Any]:
        """What one rank is given of the images: pixel_values and sizes of those that it is dealt (a blank one, where it
        is dealt none), `image_plan`, which is `DealtImages`, and image_positions [B, L, 3], where the model has
        such."""
        width = 6 * self.layout.width  # products with weights take 24 n width^2 of a layer, attention 4 n^2 width
        owners = deal([len(p.fields["pixel_values"]) * (len(p.at) + width) for p in self.pieces], sp)
        mine = [p.fields for p, owner in zip(self.pieces, owners) if owner == sp_rank]
        dealt = DealtImages(
            at=[p.at for p in self.pieces], owners=owners, lengths=[len(one["pixel_values"]) for one in mine],
            padded=self.padded, sp=sp, sp_rank=sp_rank,
        )  # fmt: skip
        dealt.plan()  # here, where a loader may run ahead, and not in the step
        given: dict[str, Any] = {**self.layout.joined(mine), "image_plan": dealt}
        if self.positions is not None:
            given["image_positions"] = self.positions.chunk(sp, 1)[sp_rank].clone()
        return given


def deal(costs: list[int], ranks: int) -> list[int]:
    """The rank of each piece: the most expensive ones first, each to the rank that has least to do."""
    owners, loads = [0] * len(costs), [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = loads[0]
        heapq.heapreplace(loads, (load + costs[i], owners[i]))
    return owners


def plan_features(
    at: list[Tensor], owners: list[int], padded: int, sp: int, sp_rank: int, stripe: int | None = None,
    block: int | None = None,
) -> FeaturePlan:  # fmt: skip
    """The plan of one rank; the arguments are those of `DealtImages`, and of its `plan`."""
    places = torch.cat([*at, torch.empty(0, dtype=torch.int64)])
    image = torch.repeat_interleave(torch.arange(len(at)), torch.tensor([*map(len, at)], dtype=torch.int64))
    dealt = torch.tensor(owners, dtype=torch.int64)
    source = dealt[image]
    target, local, of_block = _owned(places, padded, sp, stripe)
    inside = torch.ones_like(places, dtype=torch.bool) if block is None else of_block == block
    runs = torch.bincount(image[inside], minlength=len(at)) > 0 if block is not None else torch.ones(len(at)).bool()
    made = (source == sp_rank) & runs[image]
    here = inside & (target == sp_rank)
    most = int(local.max()) + 1 if len(places) else 1
    sent = inside[made].nonzero().flatten()
    to, by = target[made][sent], local[made][sent]
    arrival = torch.argsort(source[here] * most + local[here])
    return FeaturePlan(
        send=sent[torch.argsort(to * most + by)],
        to_ranks=torch.bincount(to, minlength=sp).tolist(),
        from_ranks=torch.bincount(source[here], minlength=sp).tolist(),
        order=torch.argsort(local[here][arrival]),
        images=runs[dealt == sp_rank].nonzero().flatten().tolist(),
    )


def _owned(places: Tensor, padded: int, sp: int, stripe: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The rank that has each of these tokens, their places there in the flattened [B * L], and their stripes."""
    each = padded // sp
    owner, local, index = striped(places % padded, each, each if stripe is None else min(stripe, each), sp)
    return owner, places // padded * each + local, index
