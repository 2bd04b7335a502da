"""Before the ranks compute an optimizer step, they tell each other about its batches, in one small all-reduce.

Whatever goes wrong on one rank is raised on all of them, so that none waits for a rank that has stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

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
    text = list(f"{type(error).__name__}: {error}".encode()[:_MESSAGE]) if ctx.rank == failed else []
    message = bytes(c for c in everyones(ctx, text, _MESSAGE)[failed] if c).decode(errors="replace")
    raised = ValueError if kinds[failed] == 1 else RuntimeError
    raise raised(f"the data of rank {failed} failed: {message}") from error


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
            wholes.append(prepare(batch, multiple or ctx.sp, ctx.sp))
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
