"""One batch is made ready for sequence parallelism: labels are shifted, samples padded, documents found, slices cut. It
needs no process group.

Shape legend: B samples of a micro-batch, S tokens of a sample before and P after padding, L = P / sp tokens of
one rank.

Labels are shifted before they are cut, so that no slice loses its last label (ALST paper, section 4.3), and document
boundaries are found once, on the whole batch: a slice of packed positions no longer tells where its document began.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from alstlib.base.options import Record
from alstlib.base.units import IGNORE
from alstlib.data.images import IMAGE_KEYS, ImageLayout

Batch = dict[str, Any]
DOCUMENTS = ("position_ids", "document_lengths", "cu_seqlens")
"""Fields of which one may say where documents start."""
KEYS = ("input_ids", "labels", "attention_mask", *DOCUMENTS)
SLICED = ("input_ids", "position_ids", "shift_labels")
"""Fields that are cut along the sequence, in the order in which they are sent."""
WHOLE = ("cu_seqlens", "sample_tokens")
"""Fields that every rank of a group has whole."""


def _integers(batch: Record, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
    """A field as int64; with `ids`, of their shape and on their device."""
    try:
        value = torch.as_tensor(batch[name])
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} is no rectangular array of integers ({error}); pad samples in the collate_fn"
        ) from error
    if value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; it must be an integer type, such as torch.int64")
    if ids is None:
        return value.long()
    if value.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must be input_ids' shape {list(ids.shape)}")
    return value.to(ids.device, torch.int64)


def _starts_from_positions(positions: torch.Tensor) -> torch.Tensor:
    """[B, S] positions -> [B, S] bool, True where a document starts; refuses what is no run of 0, 1, 2, ..."""
    starts = positions == 0
    good = starts | (positions == F.pad(positions[:, :-1] + 1, (1, 0)))
    if not good.all():
        sample, column = (~good).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{sample}, {column}]={positions[sample, column].item()} must be 0, where a sample or a "
            "document starts, or one more than the position before it"
        )
    return starts


def _starts_from_offsets(offsets: torch.Tensor, samples: int, length: int) -> torch.Tensor:
    flat, total = offsets.flatten().cpu(), samples * length
    if flat[0] != 0 or flat[-1] != total or (flat.diff() <= 0).any():
        raise ValueError(f"cu_seqlens={flat.tolist()[:8]} must rise from 0 to B * S = {total}")
    starts = torch.zeros(total, dtype=torch.bool).index_fill(0, flat[:-1], True).view(samples, length)
    if not starts[:, 0].all():
        raise ValueError(f"cu_seqlens must have the start of each sample: every multiple of S={length}")
    return starts


def _offsets_from_lengths(lengths: Any, real: list[int], length: int) -> torch.Tensor:
    """Offsets of documents in the flattened batch, where the padding of a sample is one more document."""
    if len(lengths) != len(real):
        raise ValueError(f"document_lengths has {len(lengths)} samples; input_ids has {len(real)}")
    flat = [0]
    for sample, documents in enumerate(lengths):
        sizes = [int(n) for n in documents if n]
        if sum(sizes) not in (length, real[sample]):
            raise ValueError(f"document_lengths[{sample}]={sizes[:8]} must sum to the sample's {real[sample]} tokens")
        flat += sizes if sum(sizes) == length else [*sizes, length - sum(sizes)]
    return torch.tensor(flat).cumsum(0)


def _document_starts(given: Record, real: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """[B, S] bool: where documents start, besides the first of each sample."""
    told = [name for name in DOCUMENTS if name in given]
    if len(told) > 1:
        raise ValueError(f"{' and '.join(told)} all say where documents start: give one of them")
    starts = torch.zeros_like(tail)
    if "position_ids" in given:
        starts = _starts_from_positions(_integers(given, "position_ids", tail).masked_fill(tail, 0))
    elif told:
        lengths = given.get("document_lengths")
        offsets = (
            _integers(given, "cu_seqlens") if lengths is None
            else _offsets_from_lengths(lengths, real.tolist(), tail.shape[1])
        )  # fmt: skip
        starts = _starts_from_offsets(offsets, *tail.shape).to(tail.device)
    return starts & ~tail


def prepare(batch: Record, multiple: int, images: ImageLayout | None = None) -> Batch:
    """Check a batch, shift its labels and pad its samples to a `multiple` of tokens: `shard_batch` before the
    cut.

    Returns: int64 [B, P] input_ids, position_ids, shift_labels; int32 cu_seqlens and sample_tokens on the CPU; where
        the
    layout of `images` is told, `images`: those of the batch.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"the loader yields {type(batch).__name__}; it must yield dicts with input_ids and labels")
    for name in ("input_ids", "labels"):
        if batch.get(name) is None:
            raise ValueError(f"the batch has no '{name}', only {sorted(map(str, batch))}; every batch needs it")
    known = KEYS if images is None else (*KEYS, *IMAGE_KEYS)
    if unknown := [str(key) for key in batch if key not in known]:
        hint = "; of a model that reads images give images=handle.images" if {*unknown} & {*IMAGE_KEYS} else ""
        raise ValueError(
            f"keys {unknown} cannot be sharded; drop them in the collate_fn (known: {', '.join(known)}){hint}"
        )
    given = {key: value for key, value in batch.items() if value is not None}
    ids = _integers(given, "input_ids")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"input_ids has shape {list(ids.shape)}; it must be [B, S] with at least one token")
    samples, length = ids.shape
    labels = _integers(given, "labels", ids)
    if (lowest := int(ids.min())) < 0:
        raise ValueError(f"input_ids holds {lowest}; tokens are 0 or more (only labels may be {IGNORE})")
    if (wrong := labels[(labels < 0) & (labels != IGNORE)]).numel():
        raise ValueError(f"labels hold {int(wrong[0])}; a label that is to be ignored is {IGNORE}")

    mask = _integers(given, "attention_mask", ids) if "attention_mask" in given else torch.ones_like(ids)
    real = mask.sum(1)  # tokens of each sample that are not padding
    column = torch.arange(length + -length % multiple, device=ids.device).expand(samples, -1)
    tail = column >= real[:, None]
    if not torch.equal(mask, (~tail[:, :length]).long()):
        raise ValueError("attention_mask must be ones, with zeros only as padding on the right of a sample")
    starts = _document_starts(given, real, tail[:, :length])
    packed = bool(starts[:, 1:].any())
    starts[:, 0] = True

    labels = labels.masked_fill(tail[:, :length], IGNORE)
    shifted = labels[:, 1:].masked_fill(starts[:, 1:], IGNORE)  # no loss across a document's end
    extra = column.shape[1] - length
    starts = F.pad(starts, (0, extra))
    if packed:  # padding is a document of its own, so that no real document grows
        starts |= column == real[:, None]
    if starts.numel() >= 2**31:
        raise ValueError(f"B * S = {starts.numel()} tokens do not fit int32 offsets; the most is {2**31 - 1}")
    first = torch.where(starts, column, 0).cummax(1).values
    offsets = F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel())
    whole = {
        "input_ids": F.pad(ids, (0, extra)),
        "position_ids": (column - first).masked_fill(tail, 0),
        "shift_labels": F.pad(shifted, (0, extra + 1), value=IGNORE),
        "cu_seqlens": offsets.to("cpu", torch.int32),
        "sample_tokens": real.to("cpu", torch.int32),
    }
    return whole if images is None else {**whole, "images": images.read(given, whole)}


def slice_of(samples: torch.Tensor, sp: int, sp_rank: int) -> torch.Tensor:
    """[B, L] of one rank, of samples [B, S] that get -100 on the right up to a multiple of sp; a copy."""
    return F.pad(samples, (0, -samples.shape[1] % sp), value=IGNORE).chunk(sp, 1)[sp_rank].clone()


def cut(whole: Batch, sp: int, sp_rank: int) -> Batch:
    """The slices of `prepare`'s batch for one rank; copies, so that the whole batch is not kept alive."""
    local = {name: slice_of(whole[name], sp, sp_rank) for name in SLICED}
    pictures = whole["images"].cut(sp, sp_rank) if "images" in whole else {}
    return {**local, **{name: whole[name] for name in WHOLE}, **pictures}


def documents_of(part: Batch, sp: int) -> list[int]:
    """Tokens of each document of a micro-batch, without padding, from one rank's slice of it."""
    length, real = part["input_ids"].shape[1] * sp, part["sample_tokens"].tolist()
    found = itertools.pairwise(part["cu_seqlens"].tolist())
    sizes = (min(end, begin // length * length + real[begin // length]) - begin for begin, end in found)
    return [size for size in sizes if size > 0]


def valid_tokens(whole: Batch) -> int:
    return int((whole["shift_labels"] != IGNORE).sum())


def check_pad_to(sp: int, pad_to: int | None) -> None:
    if pad_to is not None and (pad_to < 1 or pad_to % sp):
        raise ValueError(f"pad_to={pad_to} must be a multiple of sp={sp}; use {max(round(pad_to / sp), 1) * sp}")


def shard_batch(
    batch: Record, sp: int, sp_rank: int, pad_to: int | None = None, images: ImageLayout | None = None
) -> Batch:  # fmt: skip
    """One rank's slice of a batch that every rank of its group holds, as `SPDataLoader` yields it. No process group is
    needed.

    `step_tokens` counts this batch alone. Where an optimizer step has several micro-batches or replicas, replace it by
    the sum over all of them: the loss is the mean over the whole step.

    B: samples of the micro-batch; S: tokens of a sample, P after padding; L = P / sp: tokens of one rank.

    Args:
        batch: input_ids and labels [B, S] (any integer type), and optionally attention_mask [B, S] (zeros only as
            padding on the right, whose labels become -100) and one of position_ids [B, S] (0, 1, 2, ..., which begin at
            0 with each packed document), document_lengths (the tokens of each document, a list for each sample) and
            cu_seqlens (offsets of documents in the flattened batch).
        sp: the number of ranks that share the batch.
        sp_rank: the rank whose slice is returned, from 0 to sp - 1.
        pad_to: samples are padded on the right to a multiple of this many tokens, itself a multiple of `sp` (default:
            sp). In a sample of fewer tokens than ranks some ranks have nothing but padding.
        images: how the model takes images (`Handle.images`); the batch may then have the fields of its processor, such
            as pixel_values and image_grid_thw.

    Returns:
        input_ids, position_ids and shift_labels, int64 [B, L]; cu_seqlens, int32 on the CPU: the offsets from 0 to
        B * P of the documents in the padded batch, with the start of each sample; sample_tokens, int32 [B] on the CPU:
        the tokens of each sample that are not padding; step_tokens, an int64 scalar on the CPU: the valid labels of the
        whole batch. Padding has token 0, position 0 and label -100. In a packed batch it is a document of its own. With
        `images` also pixel_values and sizes of the images that this rank is dealt, the plan of their features
        (`image_plan`), and image_positions [B, L, 3] of a model whose positions have several dimensions.

    Raises:
        ValueError: keys are missing or unknown, shapes or dtypes do not fit, or positions or masks cannot be written as
            document boundaries.
    """
    check_pad_to(sp, pad_to)
    whole = prepare(batch, pad_to or sp, images)
    return {**cut(whole, sp, sp_rank), "step_tokens": torch.tensor(valid_tokens(whole))}


def checksum(parts: Iterable[torch.Tensor], before: int = 0) -> int:
    """A number of 32 bits of these values, in their order, and of `before`."""
    for part in parts:
        before = zlib.crc32(part.cpu().numpy().tobytes(), before)
    return before
