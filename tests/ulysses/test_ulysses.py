"""Ulysses attention on real ranks against plain attention on one, with and without a saved output."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from operators import EXACT, counted, error_of, gradients, leaf, nan_memory, randn, strided, worst

from alstlib import SPContext, reference
from alstlib.offload.checkpoints import Saved
from alstlib.ulysses.attention import UlyssesAttention

WIDTH = 8


def one_call(rank, world, case):
    """One attention call on this rank's rows; `replay` runs it as a checkpoint does: without a graph, then again."""
    h, kv, batch, rows = case["heads"], case["kv"], case.get("batch", 1), case.get("rows", 5)
    dtype, size = case.get("dtype", torch.float64), rows * world
    whole = [randn(batch, n, size, WIDTH, seed=i, dtype=dtype) for i, n in enumerate((h, kv, kv, h))]
    how = {n: case.get(n) for n in ("window", "scale", "documents")}
    whole[3][:, :, case.get("zero_rows", [])] = 0
    needs = case.get("needs", (True, True, True))

    def exact(*qkv):
        return reference.attention(*qkv, **{**how, "scale": how["scale"] or WIDTH**-0.5})[0]

    inputs = [leaf(t, needs=n) for t, n in zip(whole, needs)]
    want = gradients(exact, inputs, whole[3], torch.float64)
    mine = slice(rank * rows, (rank + 1) * rows)
    op = UlyssesAttention(SPContext.create(world), case.get("attention", "sdpa"))
    *qkv, dout = (strided(t[:, :, mine]) for t in whole)
    qkv = [leaf(t, needs=n) for t, n in zip(qkv, needs)]
    result = dict[str, Any]()
    with nan_memory(), counted(dist, "all_to_all", "all_to_all_single") as calls:
        saved = None
        if case.get("replay"):
            saved = Saved()
            with torch.no_grad():
                op(*qkv, saved=saved, **how)
            saved.rewind([t.clone() for t in saved.tensors[0]])
            result["first"] = calls.total(), op.exchange.bytes_sent
        out = op(*qkv, saved=saved, **how)
        result["calls"] = calls.total(), op.exchange.bytes_sent
        out.backward(dout)
    got = [out, *(t.grad for t in qkv)]
    return {**result, "error": worst(got, [None if t is None else t[:, :, mine] for t in want], want),
            "forward calls": op.forward_calls,
            "dtypes": {t.dtype for t in got if t is not None}}  # fmt: skip


def check(pool, case):
    for rank, result in enumerate(pool(one_call, case)):
        dtype = case.get("dtype", torch.float64)
        # the stand-in output is made in fp64 or fp32: as exact as the rest
        assert result["error"] < {torch.bfloat16: 0.02, **EXACT}[dtype], (rank, result)
        assert result["forward calls"] == 1, (rank, result)
        assert result["dtypes"] == {dtype}, (rank, result)
        # a recompute neither exchanges nor attends: all of it is left to backward
        assert not case.get("replay") or result["calls"] == result["first"], (rank, result)


HEADS = [*((world, *heads) for world in (2, 4) for heads in ((4, 4), (4, 2), (4, 1), (8, 2))), (4, 3, 1),
         (2, 3, 3), (2, 6, 3), (2, 5, 1), (3, 4, 2), (3, 7, 1), (3, 8, 8), (4, 9, 3), (4, 7, 7)]  # fmt: skip
"""Ranks, query heads, key/value heads: a whole number of heads for each rank, and none."""


REPLAY = pytest.mark.parametrize("replay", [False, True], ids=["recomputed", "saved"])


@pytest.mark.parametrize("i, case", enumerate(HEADS))
def test_any_heads_on_any_ranks(pools, i, case):
    world, heads, kv = case
    dtype = (torch.float64, torch.float32)[i % 2]
    for replay in (False, True):
        check(pools(world), {"heads": heads, "kv": kv, "dtype": dtype, "replay": replay, "batch": 2})


@REPLAY
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("batch", "documents"),
    [(1, [0, 1, 7, 8, 13, 20]), (1, [0, 19, 20]), (2, [0, 3, 17, 20, 21, 33, 40]), (2, [0, 20, 40]), (2, [0, 30, 40])],
    ids=str,
)
def test_documents_that_span_ranks(ranks4, batch, documents, attention, replay):
    """Defect 6: tokens of packed documents attend inside their own document only, wherever ranks cut them."""
    case = {"heads": 4, "kv": 2, "batch": batch, "documents": documents, "attention": attention, "replay": replay}
    check(ranks4, case)


LONG = [0, 200, 203, 210, 211, 400, 450, 600]
"""Documents long enough to be shared by the ranks, and short ones that are dealt out."""
FEW = {
    # in the stand-in output, 0 / 0
    **{f"{n} without gradient on {p}": (p, {"rows": 4, "scale": 0.7, "zero_rows": rows})
       for p in (2, 4) for n, rows in (("rows", [0, 3, 7]), ("a rank", [0, 1, 2, 3, 7]))},
    **{f"{n} alone needs a gradient": (2, {"needs": [n == m for m in "qkv"]}) for n in "qkv"},
    "one row a rank": (4, {"kv": 1, "rows": 1}),
    "bf16": (2, {"rows": 16, "dtype": torch.bfloat16}),
    # one rank has a whole batch row of a head, and the keys of both rows
    **{f"short rows, {n}": (2, {"heads": 3, "kv": 1, "rows": 6, "batch": 2, "attention": n})
       for n in ("eager", "blockwise")},
    "documents, uneven heads": (3, {"heads": 7, "kv": 1, "rows": 200, "documents": LONG}),
    "documents, uneven heads, batch": (3, {
        "heads": 7, "kv": 1, "rows": 200, "batch": 2, "documents": [*LONG[:-1], 600, 1190, 1200], "window": 50}),
}  # fmt: skip


@REPLAY
@pytest.mark.parametrize(("world", "case"), FEW.values(), ids=FEW)
def test_a_few_of_a_kind(pools, world, case, replay):
    check(pools(world), {"heads": 4, "kv": 2, **case, "replay": replay})


def test_shapes_that_do_not_belong_together_are_refused():
    op = UlyssesAttention(SPContext.create(1))
    q, k = randn(1, 4, 5, WIDTH), randn(1, 2, 5, WIDTH)
    for bad in ((q, k, k[:, :1]), (q, k[:, :, 1:], k[:, :, 1:]), (q[..., 1:], k, k), (q[0], k, k), (q[:, :3], k, k)):
        assert "k [B, K, L, D] and v [B, K, L, V], H a multiple of K, and sinks" in error_of(op, *bad)
    assert "[1, 2, 5, 8], [1]" in error_of(op, q, k, k, sinks=torch.ones(1))
    assert "window=0 hides every key" in error_of(op, q, k, k, window=0)
    assert "attention='fast' is unknown" in error_of(UlyssesAttention(SPContext.create(1), "fast"), q, k, k)
