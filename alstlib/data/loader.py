"""`SPDataLoader` reads every rank's batches, one after another, and cuts each for the ranks of its SP group.

Shape legend: B samples of a micro-batch, P tokens of a padded sample, L = P / sp tokens of one rank.

Sequence parallelism over data parallelism (ALST paper, section 4.2): each rank's loader yields a batch of its own, and
the ranks of an SP group take turns as the source of a micro-batch that all of them compute together. One batch from
each rank is called a round. `alstlib.data.shard` holds what happens to a single batch.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from alstlib.base.mesh import SPContext
from alstlib.base.options import Json, Record
from alstlib.data.agreement import check_same, read_together
from alstlib.data.images import ImageLayout
from alstlib.data.prefetch import Reader
from alstlib.data.shard import SLICED, WHOLE, Batch, check_pad_to, cut

logger = logging.getLogger(__name__)


class SPDataLoader:
    """Iterates over this rank's slices of the batches that the ranks' loaders yield.

    The ranks of an SP group take turns: each batch of each rank's `dataloader` becomes one micro-batch of the whole
    group, and every rank receives only its own slice of it (one scatter for each micro-batch). The loader reads whole
    optimizer steps, of a batch or more from each rank. One small all-reduce each time tells all ranks the shapes, the
    number of valid tokens, errors and the end of the data.

    Args:
        dataloader: yields dicts as `shard_batch` takes them; each rank needs different ones (a distributed sampler).
        ctx: the mesh. With sp=1 nothing is cut; without torch.distributed nothing is sent.
        accumulation: the number of micro-batches in one optimizer step. A DeepSpeed engine has the number already:
            `accumulation=engine.gradient_accumulation_steps()`.
        replicated: the ranks of an SP group read the same data. Then each batch is one micro-batch and only a
            fingerprint is sent, by which batches that differ are refused.
        pad_to: samples are padded on the right to a multiple of this many tokens (default: sp).
        device: where the yielded tensors are; default: the current CUDA device where the process group has NCCL only,
            otherwise the CPU.
        images: how the model takes images (`Handle.images`), where it reads some. With sp > 1 it needs
            `replicated=True`, and each rank keeps the images that it is dealt.

    Yields:
        Dicts as `shard_batch` returns them, and in them `step_tokens` (int64 scalar on the CPU): the number of valid
        labels of the whole optimizer step, over all ranks and all `accumulation` micro-batches. It can be 0, so clamp
        it before dividing. `accumulation` (int64 scalar on the CPU) is the number of micro-batches. Lengths may differ
        between ranks. All ranks stop together, after the last optimizer step that is complete on all of them; a warning
        says what was dropped.

    Raises:
        ValueError: `pad_to` is not a multiple of sp. On every rank, naming the rank that failed: a batch that cannot be
            used, ranks that disagree about accumulation or position, or (replicated) batches that differ in a group.
        RuntimeError: on every rank, naming the rank whose loader raised something else.
    """

    def __init__(
        self, dataloader: Any, ctx: SPContext, accumulation: int = 1, *, replicated: bool = False,
        pad_to: int | None = None, device: torch.device | str | None = None, images: ImageLayout | None = None,
    ) -> None:  # fmt: skip
        if accumulation < 1:
            raise ValueError(f"accumulation={accumulation} must be at least 1")
        check_pad_to(ctx.sp, pad_to)
        if images is not None and ctx.sp > 1 and not replicated:
            raise ValueError(
                "images are not sent between ranks: let the ranks of a group read the same data (the sampler's "
                "num_replicas=dp, rank=dp_rank), with replicated=True"
            )
        self.images = images
        self.dataloader, self.ctx, self.accumulation = dataloader, ctx, accumulation
        self.replicated, self.pad_to = replicated, pad_to
        self.received_bytes = 0
        """Bytes of other ranks' batches that this rank has received since it was made."""
        self._turns = 1 if replicated else ctx.sp  # micro-batches of a round
        # micro-batches that are read at once: of whole rounds and of whole steps
        self._window = math.lcm(accumulation, self._turns)
        self.device = ctx.wire if device is None else torch.device(device)
        self._position = 0  # micro-batches of this pass
        self._epoch: int | None = None
        self._resume: Record | None = None
        self._reader: Reader | None = None
        self._warned = False

    def __len__(self) -> int:
        """The number of micro-batches in one pass, from this rank's loader; a rank with less data ends it earlier."""
        return len(self.dataloader) * self._turns // self.accumulation * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the sampler or dataset that shuffles by it."""
        if self._resume is not None and self._resume["epoch"] not in (None, epoch):
            self._resume, self._position = None, 0
        self._epoch = epoch
        loader, batches = self.dataloader, getattr(self.dataloader, "batch_sampler", None)
        inside = [getattr(loader, name, None) for name in ("sampler", "dataset")]
        for owner in (loader, batches, *inside, getattr(batches, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def _layout(self) -> Json:
        return {"accumulation": self.accumulation, "sp": self.ctx.sp, "dp": self.ctx.dp, "replicated": self.replicated}

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank in its data, to be saved for each rank: JSON values."""
        if self._resume is not None:
            return dict(self._resume)
        reader = self._reader and (self._reader.before if self._position % self._window else self._reader.state())
        return {"micro_batches": self._position, "epoch": self._epoch, **self._layout(), "reader": reader}

    def load_state_dict(self, state: Record) -> None:
        """Continue after the micro-batch at which `state` was taken, with the next iteration.

        A loader without a state of its own is advanced batch by batch, in the order it drew then: every random
        generator of PyTorch that the loader or its samplers hold is set back for that. The next iteration checks that
        the batches are those that were read, and raises ValueError where they are not: an order that comes from
        elsewhere cannot be continued.

        Raises:
            ValueError: the state comes from another accumulation, sp, dp or replicated.
        """
        for name, value in self._layout().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved state has {name}={state.get(name)!r}, but this loader has {value!r}: make them equal"
                )
        self._resume, self._position = dict(state), state["micro_batches"]
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])

    def __iter__(self) -> Iterator[Batch]:
        resume, self._resume = self._resume or {"micro_batches": 0, "reader": None}, None
        done = self._position = resume["micro_batches"]
        first = done - done % self._window
        reader = self._reader = Reader(self.dataloader, resume["reader"], first // self._turns)
        # ranks that differ here would exchange tables of different sizes, and hang
        mine = {"accumulation": self.accumulation, "micro_batches": done, "replicated": int(self.replicated)}
        check_same(self.ctx, mine, "give the loaders of all ranks the same arguments and states")
        alike = "give the ranks of a group the same sampler (num_replicas=dp, rank=dp_rank), or use replicated=False"
        rounds = complete = self._window // self._turns
        while complete == rounds:
            got, told = read_together(
                self.ctx, reader.read(rounds), rounds, self.pad_to or self.ctx.sp, alike if self.replicated else "",
                self.images,
            )  # fmt: skip
            complete = min(map(len, told))
            usable = complete * self._turns // self.accumulation * self.accumulation
            if complete < rounds:
                self._warn_dropped([len(mine) for mine in told], first, complete * self._turns - usable)
            # by micro-batch and group: what its source told of it
            sizes = [[mine[i // self._turns] for mine in told[i % self._turns :: self.ctx.sp]] for i in range(usable)]
            for index, groups in enumerate(sizes):
                turn, step = index % self._turns, index - index % self.accumulation
                whole = got.pop(0) if self.replicated or turn == self.ctx.sp_rank else None
                if first + index >= done:
                    batch = self._share(whole, groups[self.ctx.dp_rank], turn)
                    of_step = itertools.chain(*sizes[step : step + self.accumulation])
                    batch["step_tokens"] = torch.tensor(sum(tokens for *_, tokens, _ in of_step))
                    batch["accumulation"] = torch.tensor(self.accumulation)
                    self._position = first + index + 1
                    yield batch
            first += self._window
        self._position, self._reader = 0, None

    def _warn_dropped(self, counts: list[int], first: int, partial: int) -> None:
        """Say once what nobody trains on, of the data that ended in the window at `first`."""
        least = min(counts)
        if not self._warned and (partial or max(counts) > least):
            short = [rank for rank, count in enumerate(counts) if count == least]
            logger.warning(
                f"the data ended after {first // self._turns + least} batches on ranks {short}: dropped are further "
                f"batches of other ranks and {partial} micro-batches of an incomplete optimizer step"
            )
            self._warned = True

    def _share(self, whole: Batch | None, shape: list[int], turn: int) -> Batch:
        """This rank's slices of the micro-batch whose source is the group's rank `turn`."""
        sp = self.ctx.sp
        if self._turns == 1:
            assert whole is not None
            batch = cut(whole, sp, self.ctx.sp_rank)
            return {name: t.to(self.device) if name in SLICED else t for name, t in batch.items()}
        samples, padded, offsets, *_ = shape
        sizes = [samples * padded // sp] * len(SLICED) + [offsets, samples]
        # all fields travel in one buffer; uninitialised memory, every element of which the scatter writes
        mine = torch.empty(sum(sizes), dtype=torch.int64, device=self.ctx.wire)
        parts = None
        if whole is not None:
            ends = [whole[name].to(self.ctx.wire, torch.int64) for name in WHOLE]
            cuts = zip(*(whole[name].to(self.ctx.wire).chunk(sp, 1) for name in SLICED))
            parts = [torch.cat([*(t.flatten() for t in slices), *ends]) for slices in cuts]
        else:
            self.received_bytes += mine.nbytes
        dist.scatter(mine, parts, group=self.ctx.sp_group, group_src=turn)
        fields = mine.split(sizes)
        batch = {name: field.view(samples, -1).to(self.device) for name, field in zip(SLICED, fields)}
        return batch | {name: t.to("cpu", torch.int32) for name, t in zip(WHOLE, fields[len(SLICED) :])}
