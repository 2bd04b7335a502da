"""Before the ranks compute an optimizer step, they tell each other about its batches, in one small all-reduce; and
before each call of a model, whether it is the same call on all of them (`Agreement`).

Whatever goes wrong on one rank is raised on all of them, so that none waits for a rank that has stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist

from alstlib.data.shard import Batch, cut, fingerprint, prepare, valid_tokens
from alstlib.mesh import SPContext

logger = logging.getLogger(__name__)

_MESSAGE = 2048  # bytes of an error's text that reach the other ranks


def everyones(ctx: SPContext, row: list[int], width: int) -> list[list[int]]:
    """The `width` integers of every rank, in the order of ranks."""
    table = torch.zeros(ctx.world_size, width, dtype=torch.int64)
    table[ctx.rank, : len(row)] = torch.tensor(row, dtype=torch.int64)
    if ctx.world_size > 1:
        table = table.to(ctx.wire)
        dist.all_reduce(table, group=ctx.world_group)
    return table.tolist()


def kind_of(error: Exception | None) -> int:
    """0 for none, 1 for a ValueError, 2 for any other: what a rank puts in the table for `raise_failure`."""
    return 0 if error is None else 1 if isinstance(error, ValueError) else 2


def raise_failure(ctx: SPContext, kinds: list[int], error: Exception | None) -> None:
    """Raise on every rank what the first rank with an error met, naming that rank (ValueError or RuntimeError)."""
    failed = next((rank for rank, kind in enumerate(kinds) if kind), None)
    if failed is None:
        return
    message = _texts(ctx, f"{type(error).__name__}: {error}" if ctx.rank == failed else "")[failed]
    raised = ValueError if kinds[failed] == 1 else RuntimeError
    raise raised(f"the data of rank {failed} failed: {message}") from error


def _texts(ctx: SPContext, text: str) -> list[str]:
    """Every rank's text, or as much of it as is sent, in the order of ranks."""
    rows = everyones(ctx, list(text.encode()[:_MESSAGE]), _MESSAGE)
    return [bytes(c for c in row if c).decode(errors="replace") for row in rows]


class Agreement:
    """Inside, a rank checks what it is about to compute together with others. Where one of them refuses it, all raise
    an error with the reason; where they are about to compute different things, all are told what differs.

    Collective over `ctx`: one all-reduce of four integers for each rank, and a second one where something is wrong.
    With what a call checks before it, that took 1.7 ms of a step of 3.8 s (0.04%; two ranks on two cores, 2,048
    tokens of the model `small`). Where a process group can send from CUDA only (NCCL without gloo), reading the answer
    would wait for the device. Then nothing is sent, unless `waits`, and a rank raises only what it sees itself.

    Args:
        call: what is called; it must be the same on all ranks of `ctx`.
        arguments: what it is called with, by name; the same on all ranks.
        waits: whether to ask the others also where that waits for the device.
    """

    def __init__(self, ctx: SPContext, call: str, arguments: Mapping[str, Any], waits: bool) -> None:
        self.ctx, self.waits = ctx, waits
        self.call = {"the call": call, **arguments}
        self.in_group: dict[str, Any] = {}
        """Values by name that must be the same on the ranks of an SP group."""
        self.count = 0
        """A number, of which all ranks get the largest."""

    def __enter__(self) -> Self:
        return self

    @property
    def silent(self) -> bool:
        """Whether no other rank is asked."""
        if self.ctx.world_size == 1 or self.ctx.world_group is None or dist.get_backend(self.ctx.world_group) == "fake":
            return True
        return not self.waits and self.ctx.wire.type != "cpu"

    @torch.compiler.disable
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        ctx = self.ctx
        if self.silent or not isinstance(error, Exception | None):
            return
        facts = [self.call, self.in_group]
        row = [kind_of(error), *(int(_digest(part), 16) for part in facts), self.count]
        kinds, calls, batches, counts = zip(*everyones(ctx, row, len(row)))
        if any(kinds):
            texts = _texts(ctx, f"rank {dist.get_rank()} refused: {type(error).__name__}: {error}" if error else "")
            if error is None:
                first = next(rank for rank, failed in enumerate(kinds) if failed)
                raise (ValueError if kinds[first] == 1 else RuntimeError)(texts[first])
            return
        groups = [range(first, first + ctx.sp) for first in range(0, ctx.world_size, ctx.sp)]
        if len(set(calls)) > 1 or any(len({batches[rank] for rank in group}) > 1 for group in groups):
            known = [
                json.loads(text) for text in _texts(ctx, json.dumps([list(map(_shown, p.items())) for p in facts]))
            ]
            everywhere = _difference([of_call for of_call, _ in known])
            inside = (_difference([known[rank][1] for rank in group]) for group in groups)
            raise ValueError(everywhere or next(filter(None, inside)))
        self.count = max(counts)


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=7).hexdigest()


def _shown(fact: tuple[str, Any]) -> list[str]:
    name, text = fact[0], str(fact[1])
    return [name, text if len(text) <= 60 else f"{text[:40]}... ({_digest(text)})"]


def _difference(known: list[list[list[str]]]) -> str:
    """What the first fact is of which these ranks have different values, if there is one."""
    for facts in zip(*known):
        values = [value for _, value in facts]
        if len(set(values)) > 1:
            return (
                f"ranks that compute together have different values of {facts[0][0]}: [{', '.join(values)}], in the "
                "order of the ranks"
            )
    return ""


def check_alike(ctx: SPContext, marks: list[int], remedy: str) -> None:
    """Refuse a step of which the ranks of a group hold different batches (ValueError, on every rank)."""
    for first in range(0, ctx.world_size, ctx.sp):
        if len(set(marks[first : first + ctx.sp])) > 1:
            ranks = list(range(first, first + ctx.sp))
            raise ValueError(f"ranks {ranks} hold different batches, but compute the same samples together; {remedy}")


def mark_of(wholes: Iterable[Batch]) -> int:
    """A number that differs when the batches of a step do."""
    mark = 0
    for whole in wholes:
        mark = (31 * mark + fingerprint(whole)) % (2**61 - 1)
    return mark


def share_step(batches: Iterable[Mapping[str, Any]], ctx: SPContext, multiple: int | None = None) -> list[Batch]:
    """This rank's slices of the micro-batches of one optimizer step, which every rank of a group reads whole.

    Collective. For a training loop that reads its own batches, such as Trainer's; `SPDataLoader` is the loader for an
    explicit loop. Each slice is as `shard_batch` returns it, with step_tokens of the whole step: all micro-batches, all
    replicas. The first has seen_tokens too, all tokens of the step that are not padding (the others: 0). Where a
    replica's data end in the middle of the step, all replicas stop where it stops.

    Args:
        batches: at most one optimizer step of them; an iterator may end early.
        multiple: micro-batch rows are padded to a multiple of it (default: sp).

    Raises:
        ValueError: on every rank, naming the failing one: a batch that cannot be used, or ranks of a group that read
            different batches.
        RuntimeError: on every rank, when reading raised something else.
    """
    wholes: list[Batch] = []
    error: Exception | None = None
    try:
        for batch in batches:
            wholes.append(prepare(batch, multiple or ctx.sp))
    except Exception as e:
        error = e
    row = [len(wholes), kind_of(error), mark_of(wholes), *_tokens_of(wholes)]
    table = everyones(ctx, row, len(row))
    counts, kinds, marks = ([row[i] for row in table] for i in range(3))
    raise_failure(ctx, kinds, error)
    check_alike(
        ctx, marks,
        "seed all ranks alike (Python, NumPy and PyTorch), also in workers and collators, and give samplers the "
        "replica (num_replicas=dp, rank=dp_rank) and not the rank",
    )  # fmt: skip
    if (least := min(counts)) < len(wholes):  # here or elsewhere, tokens that nobody trains on were counted
        logger.warning(
            "the data of another rank ended: %d of its step's micro-batches are dropped", len(wholes) - least
        )
    if least < max(counts):
        wholes = wholes[:least]
        table = everyones(ctx, _tokens_of(wholes), 2)
    valid, seen = (sum(column) for column in zip(*(row[-2:] for row in table[:: ctx.sp])))  # each group counts once
    return [
        {**cut(whole, ctx.sp, ctx.sp_rank), "step_tokens": torch.tensor(valid), "seen_tokens": torch.tensor(n)}
        for whole, n in zip(wholes, [seen] + [0] * len(wholes))
    ]


def _tokens_of(wholes: list[Batch]) -> list[int]:
    """Tokens of these batches with a label, and tokens that are not padding."""
    return [sum(map(valid_tokens, wholes)), sum(int(whole["row_tokens"].sum()) for whole in wholes)]
