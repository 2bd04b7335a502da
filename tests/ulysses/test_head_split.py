"""Uneven heads: the layout itself, and attention of any head count with all ranks emulated in one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from operators import attend_by_heads, gradients, leaf, randn, worst

from alstlib import reference
from alstlib.kernels.backends import BACKENDS
from alstlib.kernels.rule import Rule
from alstlib.ulysses.alltoall import whole_heads
from alstlib.ulysses.head_layouts import Layouts, SplitRows, WholeHeads
from alstlib.ulysses.head_split import Plan, Sample, Shares, balance, folded_rows, parts_of

LAYOUTS = [
    (9, 3, 8),
    (40, 8, 16),
    (8, 2, 16),
    (7, 1, 4),
    (28, 4, 8),
    (14, 2, 4),
    (7, 7, 4),
    (25, 5, 8),
    (6, 3, 2),
    (3, 1, 5),
]
DOCUMENTS = {
    "one": None,
    "uneven": [0, 1, 5, 700, 701, 3000, 4096],
    "short": [*range(0, 4096, 31), 4096],
    "one long": [0, *range(3000, 4096, 16), 4096],
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv", "ranks"), LAYOUTS)
def test_every_rank_has_the_same_work(heads: int, kv: int, ranks: int, documents: list[int] | None) -> None:
    rows, areas = balance(heads, kv, ranks, 4096, documents)
    assert rows <= 1.01
    assert areas <= (1.01 if documents is None or len(documents) < 100 else 1.02)


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv", "ranks"), LAYOUTS)
def test_every_row_of_every_head_is_somewhere_once(heads: int, kv: int, ranks: int, documents: Any) -> None:
    length = 4096 if ranks != 5 else 4095
    documents = documents and [min(d, length) for d in documents]
    plans = [Plan(heads, kv, ranks, r, Sample(1, length, documents)) for r in range(ranks)]
    for source in plans:
        sent = torch.cat([m.sent for m in source.messages])
        assert torch.equal(sent.sort().values, torch.arange(heads * source.own))
        for r, plan in enumerate(plans):
            assert source.messages[r].sent.numel() == plan.messages[source.rank].received.numel()
    for plan in plans:
        got = torch.cat([m.received for m in plan.messages])
        assert torch.equal(got.sort().values, torch.arange(plan.stored))
        parts = parts_of(heads, ranks, plan.rank)
        assert sum(not p.whole for p in parts) <= 2
        assert {p.head * kv // heads for p in parts} == set(range(plan.kv.start, plan.kv.stop))


def test_shares_are_a_partition() -> None:
    cuts = [Fraction(i, 7) for i in range(8)]
    for rows in ([1], [2], [3], [129], [200, 1, 5, 300, 7, 7, 128], [6] * 40, list(range(1, 150, 3))):
        shares = Shares(rows)
        seen = {(i, row) for i, n in enumerate(rows) for row in range(n)}
        for lo, hi in itertools.pairwise(cuts):
            for i, a, b in shares.between(lo, hi):
                for first, last in folded_rows(rows[i], a, b):
                    for row in range(first, last):
                        seen.remove((i, row))  # raises for a row that is there twice
        assert not seen


class Board:
    """What the emulated ranks, one thread each, pass to each other."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)


class Emulated:
    """`Exchange` without a process group."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.ranks, self.bytes_sent = board, rank, len(board.sent), 0

    def swap_unequal(self, send: torch.Tensor, to: Sequence[int], came: Sequence[int]) -> torch.Tensor:
        self.board.sent[self.rank] = send.split(list(to))
        self.board.barrier.wait()
        got = torch.cat([parts[self.rank] for parts in self.board.sent])
        assert got.numel() == sum(came)
        self.board.barrier.wait()
        return got


def attend(exchange: Emulated, given: dict[str, Any], results: list[Any]) -> None:
    rows = given["tensors"][0].shape[2] // exchange.ranks
    mine = [t[:, :, exchange.rank * rows : (exchange.rank + 1) * rows] for t in given["tensors"]]
    try:
        layout = Layouts(exchange, split_rows=True).of(mine[0], mine[1], given["documents"])  # type: ignore[arg-type]
        assert isinstance(layout, SplitRows)
        results[exchange.rank] = attend_by_heads(layout, BACKENDS["cpu"], mine, given["rule"])
    except BaseException:
        exchange.board.barrier.abort()  # the other ranks need not wait
        raise


WAYS = [(1, None, None), (1, [0, 1, 40, 41, 100, 180, 200, 384], 9), (2, None, 9),
        (2, [0, 1, 40, 41, 100, 180, 200, 300, 384, 500, 768], None)]  # fmt: skip
"""Batch, documents and window: every pair of values is there."""


@pytest.mark.parametrize(("batch", "documents", "window"), WAYS, ids=str)
@pytest.mark.parametrize(("heads", "kv", "ranks"), [layout for layout in LAYOUTS if layout[2] != 5])
def test_emulated_ranks_are_the_oracle(
    heads: int, kv: int, ranks: int, batch: int, documents: list[int] | None, window: int | None
) -> None:
    """The output and the gradients of all ranks together."""
    tensors = [randn(batch, n, 384, 4, seed=i) for i, n in enumerate((heads, kv, kv, heads))]
    inputs = [leaf(t, needs=True) for t in tensors[:3]]
    how = {"scale": 0.5, "documents": documents, "window": window}
    want = gradients(lambda *qkv: reference.attention(*qkv, **how)[0], inputs, tensors[3])
    board, results = Board(ranks), [None] * ranks
    given = {"tensors": tensors, "documents": documents, "rule": Rule(0.5, window)}
    threads = [threading.Thread(target=attend, args=(Emulated(board, r), given, results)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(r is not None for r in results), "a rank has raised"
    got = [torch.cat([r[i] for r in results], 2) for i in range(4)]  # type: ignore[index]
    assert worst(got, want) < 1e-12


def test_whole_heads_where_they_can_be() -> None:
    """Divisible heads keep the plain exchange: no plan, no index, no copy more."""
    assert [whole_heads(*c) for c in ((8, 2, 2), (8, 2, 4), (8, 2, 8), (9, 3, 3))] == [True] * 4
    assert not any(whole_heads(*c) for c in LAYOUTS)
    layouts = Layouts(Emulated(Board(4), 0))  # type: ignore[arg-type]
    assert isinstance(layouts.of(torch.ones(1, 8, 5, 2), torch.ones(1, 2, 5, 2), None), WholeHeads)
    assert not layouts._plans


def test_plans_are_made_once_for_all_layers() -> None:
    layouts: Any = Layouts(Emulated(Board(2), 0))  # type: ignore[arg-type]
    q, k = torch.ones(1, 3, 4, 2), torch.ones(1, 1, 4, 2)
    one, two, other = (layouts.of(q, k, documents).plan for documents in ([0, 3, 8], (0, 3, 8), [0, 4, 8]))
    assert one is two
    assert other is not one
    assert len(layouts._plans) == 1  # those of other documents are gone


def test_many_documents_are_handed_out_whole() -> None:
    """A rank calls its kernel for its own documents, not for a part of every one."""
    documents = [*range(0, 65_536, 256), 65_536]
    plan = Plan(28, 4, 8, 3, Sample(1, 65_536, documents))
    parts = [len(g.spans) for g in plan.groups if g.spans is not None]
    assert parts
    assert all(n < 0.6 * len(documents) for n in parts)
    assert balance(28, 4, 8, 65_536, documents)[1] < 1.01
