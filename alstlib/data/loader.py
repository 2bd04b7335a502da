"""`SPDataLoader` reads every rank's batches, one after another, and cuts each for the ranks of its SP group.

Shape legend: B rows of a micro-batch, P tokens of a padded micro-batch row, L = P / sp tokens of one rank.

Sequence parallelism over data parallelism (ALST paper, section 4.2): each rank's loader yields a batch of its own, and
the ranks of an SP group take turns as the source of a micro-batch that all of them compute together. One batch from
each rank is called a round. `alstlib.data.shard` holds what happens to a single batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from alstlib.data.agreement import check_alike, everyones, kind_of, mark_of, raise_failure
from alstlib.data.prefetch import Reader
from alstlib.data.shard import SLICED, WHOLE, Batch, check_pad_to, cut, prepare, valid_tokens
from alstlib.mesh import SPContext

logger = logging.getLogger(__name__)

_FIXED = 5  # numbers that a rank puts in the step's table before the shapes of its batches


class SampleOrder(DistributedSampler[Any]):
    """A distributed sampler whose epoch any other number of replicas goes on with: each sample comes once.

    The first `start` samples of the epoch's order are left out, and the replicas take turns with the others. Samples
    that are not enough for a turn of all are dropped.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        whole: DistributedSampler[Any] = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        return iter(list(whole)[self.start :][self.rank : len(self) * self.num_replicas : self.num_replicas])

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self.start) // self.num_replicas  # type: ignore[arg-type]


class SPDataLoader:
    """Iterates over this rank's slices of the batches that the ranks' loaders yield.

    The ranks of an SP group take turns: each batch of each rank's `dataloader` becomes one micro-batch of the whole
    group, and every rank receives only its own slice of it (one scatter for each micro-batch). The loader reads one
    optimizer step ahead. One small all-reduce for each optimizer step tells all ranks the shapes, the number of valid
    tokens, errors and the end of the data.

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
        pad_to: int | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(accumulation, int) or isinstance(accumulation, bool) or accumulation < 1:
            raise ValueError(f"accumulation={accumulation!r} must be an integer of at least 1")
        check_pad_to(ctx.sp, pad_to)
        self.dataloader, self.ctx, self.accumulation = dataloader, ctx, accumulation
        self.replicated, self.pad_to = replicated, pad_to
        self.received_bytes = 0
        """Bytes of other ranks' batches that this rank has received since it was made."""
        self._turns = 1 if replicated else ctx.sp  # micro-batches of a round
        self._wire = ctx.wire
        self.device = torch.device(device) if device is not None else self._wire
        self._position = self._start = 0  # micro-batches of this pass, after so many samples of the epoch
        self._epoch: int | None = None
        self._resume: Mapping[str, Any] | None = None
        self._reader: Reader | None = None
        self._warned = False

    def __len__(self) -> int:
        """The number of micro-batches in one pass, from this rank's loader; a rank with less data ends it earlier."""
        return len(self.dataloader) * self._turns // self.accumulation * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the sampler or dataset that shuffles by it."""
        if self._resume is not None and self._resume["epoch"] not in (None, epoch):
            self._resume, self._position, self._start = None, 0, 0
        self._epoch = epoch
        batches = getattr(self.dataloader, "batch_sampler", None)
        owners: list[Any] = [getattr(self.dataloader, name, None) for name in ("sampler", "dataset")]
        owners += [self.dataloader, batches, getattr(batches, "sampler", None)]
        for owner in {id(o): o for o in owners}.values():
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def _layout(self) -> dict[str, Any]:
        return {"accumulation": self.accumulation, "sp": self.ctx.sp, "dp": self.ctx.dp, "replicated": self.replicated}

    def _samples(self) -> int | None:
        """Samples of the epoch that all groups have seen, if these are the first of a `SampleOrder`."""
        order = getattr(self.dataloader, "sampler", None)
        if not isinstance(order, SampleOrder) or self._position % self.accumulation or self._position % self._turns:
            return None
        seen = self._position * self.ctx.dp * (self.dataloader.batch_size or 1)
        return min(self._start + seen, len(order.dataset))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank in its data, to be saved for each rank: JSON values."""
        if self._resume is not None:
            return dict(self._resume)
        state: dict[str, Any] = {"micro_batches": self._position, "start": self._start, "samples": self._samples()}
        state |= {"epoch": self._epoch, **self._layout(), "reader": None}
        if self._reader is not None:
            step_start = self._position - self._position % self.accumulation
            state["reader"] = self._reader.state(step_start // self._turns)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the micro-batch at which `state` was taken, with the next iteration.

        A loader without a state of its own is advanced batch by batch, in the order it drew then: every random
        generator that the loader or its samplers hold is set back for that. The next iteration checks that the batches
        are those that were read, and raises ValueError where they are not: an order that comes from elsewhere cannot
        be continued.

        With a `SampleOrder` as the sampler of both loaders, a state that was taken between two optimizer steps is also
        continued under another sp and by another number of groups: any rank's will do. The loader then begins at the
        first sample that no group had seen; that its batches are those of then is not checked.

        Raises:
            ValueError: the state comes from another accumulation; from another sp, dp or replicated, without a
                `SampleOrder` or from the middle of a step.
        """
        layout, seen = self._layout(), state.get("samples")
        ordered = seen is not None and isinstance(getattr(self.dataloader, "sampler", None), SampleOrder)
        for name, value in layout.items():
            if state.get(name) != value and (name == "accumulation" or not ordered):
                raise ValueError(
                    f"the saved state has {name}={state.get(name)!r}, but this loader has {value!r}: make them equal"
                )
        if any(state.get(name) != value for name, value in layout.items()):
            state = {**state, **layout, "micro_batches": 0, "start": seen, "reader": None}
        self._reader, self._resume, self._position = None, None, state["micro_batches"]
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        if state["reader"] or state["start"]:
            self._start, self._resume = state["start"], dict(state)

    def __iter__(self) -> Iterator[Batch]:
        resume, self._resume = self._resume, None
        done = self._position = resume["micro_batches"] if resume else 0
        self._start = resume["start"] if resume else 0
        if isinstance(order := getattr(self.dataloader, "sampler", None), SampleOrder):
            order.start = self._start
        first = done - done % self.accumulation  # of the present optimizer step, in micro-batches
        known = first // self._turns  # rounds that all ranks have read
        multiple = self.pad_to or self.ctx.sp
        before = resume and resume["reader"]
        reader = self._reader = Reader(self.dataloader, lambda batch: prepare(batch, multiple), before, known)
        self._agree(done)
        own: dict[int, Batch] = {}  # this rank's batches that still have to be shared, by round
        shapes: dict[int, list[list[int]]] = {}  # by round and rank: B, P, number of offsets
        while True:
            last = first + self.accumulation
            count = -(-last // self._turns) - known
            got, error = reader.read(count)
            own.update({known + i: whole for i, whole in enumerate(got)})
            table = self._exchange(own, got, error, first, count, reader.left())
            agreed = min(row[0] for row in table)
            if agreed < count:
                self._warn_dropped(table, known, agreed, first)
                break
            for i in range(count):
                shapes[known + i] = [row[_FIXED + 3 * i : _FIXED + 3 * i + 3] for row in table]
            known += count
            tokens = torch.tensor(sum(row[2] for row in table))
            for index in range(first, last):
                round_, turn = divmod(index, self._turns)
                mine = self.replicated or self.ctx.sp_rank == turn
                whole = own.pop(round_) if mine else None
                if index >= done:
                    batch = self._share(whole, shapes[round_], turn)
                    self._position = index + 1
                    yield {**batch, "step_tokens": tokens.clone(), "accumulation": torch.tensor(self.accumulation)}
            first = last
            for old in [r for r in shapes if r < first // self._turns]:
                del shapes[old]
                reader.begun.pop(old, None)
        self._position, self._start, self._reader = 0, 0, None

    def _agree(self, done: int) -> None:
        """Ranks that differ here would later exchange tables of different sizes, and hang."""
        mine = {"accumulation": self.accumulation, "micro_batches": done, "replicated": int(self.replicated)}
        for name, values in zip(mine, zip(*everyones(self.ctx, list(mine.values()), len(mine)))):
            if len(set(values)) > 1:
                raise ValueError(f"ranks disagree about {name}: {list(values)} by rank; it must be the same on all")

    def _exchange(
        self, own: dict[int, Batch], got: list[Batch], error: Exception | None, first: int, count: int, left: int
    ) -> list[list[int]]:
        """By rank: batches read, error, valid tokens of the step, fingerprint, batches left; B, P, offsets of each."""
        turn = 0 if self.replicated else self.ctx.sp_rank
        step = [w for r, w in own.items() if first <= r * self._turns + turn < first + self.accumulation]
        tokens = sum(valid_tokens(whole) for whole in step)
        mark = mark_of(step) if self.replicated else 0
        if self.replicated and self.ctx.sp_rank > 0:
            tokens = 0  # the group's first rank counts for all of it
        row = [len(got), kind_of(error), tokens, mark, left]
        for whole in got:
            row += [*whole["input_ids"].shape, whole["cu_seqlens"].numel()]
        table = everyones(self.ctx, row, _FIXED + 3 * count)

        raise_failure(self.ctx, [row[1] for row in table], error)
        if self.replicated and min(row[0] for row in table) == count:
            check_alike(
                self.ctx, [row[3] for row in table],
                "give the ranks of a group the same sampler (num_replicas=dp, rank=dp_rank), or use replicated=False",
            )  # fmt: skip
        return table

    def _warn_dropped(self, table: list[list[int]], known: int, agreed: int, first: int) -> None:
        surplus = [row[0] - agreed + max(row[4], 0) for row in table]
        partial = (known + agreed) * self._turns - first
        if self._warned or not (any(surplus) or partial):
            return
        self._warned = True
        short = [rank for rank, row in enumerate(table) if row[0] == agreed]
        least = "at least " if any(row[4] < 0 for row in table) else ""
        logger.warning(
            f"the data ended after {known + agreed} batches on ranks {short}: dropped are {least}{sum(surplus)} "
            f"further batches ({surplus} by rank) and {partial} micro-batches of an incomplete optimizer step "
            f"(accumulation={self.accumulation})"
        )

    def _share(self, whole: Batch | None, shapes: list[list[int]], turn: int) -> Batch:
        """This rank's slices of the micro-batch whose source is the group's rank `turn`."""
        sp = self.ctx.sp
        if self.replicated or sp == 1:
            assert whole is not None
            batch = cut(whole, sp, self.ctx.sp_rank)
            return {name: t.to(self.device) if name in SLICED else t for name, t in batch.items()}
        rows, padded, offsets = shapes[self.ctx.dp_rank * sp + turn]
        size = len(SLICED) * rows * padded // sp
        # all fields travel in one buffer; uninitialised memory, every element of which the scatter writes
        mine = torch.empty(size + offsets + rows, dtype=torch.int64, device=self._wire)
        parts = None
        if whole is not None:
            cu = torch.cat([whole[name] for name in WHOLE]).to(self._wire, torch.int64)
            fields = torch.stack([whole[name].to(self._wire) for name in SLICED])
            parts = [torch.cat([part.flatten(), cu]) for part in fields.chunk(sp, 2)]
        else:
            self.received_bytes += mine.numel() * mine.element_size()
        dist.scatter(mine, parts, group=self.ctx.sp_group, group_src=turn)
        slices = mine[:size].view(len(SLICED), rows, padded // sp).to(self.device)
        both = mine[size:].to("cpu", torch.int32).split([offsets, rows])
        return {**dict(zip(SLICED, slices)), **dict(zip(WHOLE, both))}
