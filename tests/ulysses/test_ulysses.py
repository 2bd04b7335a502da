"""Ulysses attention on real ranks against plain attention on one, with and without a saved output."""

import pytest
import torch
import torch.distributed as dist
import yaml
from cases import check_refusals, on_ranks
from operators import EXACT, counted, gradients, leaf, nan_memory, randn, strided, worst

from alstlib import SPContext
from alstlib.base import reference
from alstlib.base.recompute import Saved
from alstlib.ulysses.attention import UlyssesAttention

WIDTH = 8


def one_call(rank, world, h=4, kv=2, batch=1, rows=5, zero_rows=(), replay=False, **given):
    """One attention call on this rank's rows.

    Args:
        rows: of each rank.
        zero_rows: whose upstream gradient is zero.
        replay: it runs as a checkpoint does, without a graph, and then again.
        given: which of q, k and v need a gradient, the dtype, the kernel; documents, a window, another scale.
    """
    needs, dtype = given.pop("needs", (True, True, True)), given.pop("dtype", torch.float64)
    op = UlyssesAttention(SPContext.create(world), given.pop("attention", "sdpa"))
    whole = [randn(batch, n, rows * world, WIDTH, seed=i, dtype=dtype) for i, n in enumerate((h, kv, kv, h))]
    whole[3][:, :, list(zero_rows)] = 0
    how = {"scale": WIDTH**-0.5, **given}
    inputs = [leaf(t, needs=n) for t, n in zip(whole, needs)]
    want = gradients(lambda *qkv: reference.attention(*qkv, **how)[0], inputs, whole[3], torch.float64)
    mine = slice(rank * rows, (rank + 1) * rows)
    *qkv, dout = (strided(t[:, :, mine]) for t in whole)
    qkv, saved, first = [leaf(t, needs=n) for t, n in zip(qkv, needs)], None, None
    with nan_memory(), counted(dist, "all_to_all", "all_to_all_single") as calls:
        if replay:
            saved = Saved()
            with torch.no_grad():
                op(*qkv, saved=saved, **how)
            saved.rewind([t.clone() for t in saved.tensors[0]])
            first = calls.total(), op.exchange.bytes_sent
        out = op(*qkv, saved=saved, **how)
        # a recompute neither exchanges nor attends: all of it is left to backward
        assert first in (None, (calls.total(), op.exchange.bytes_sent))
        out.backward(dout)
    assert op.forward_calls == 1
    got = [out, *(t.grad for t in qkv)]
    assert {t.dtype for t in got if t is not None} == {dtype}
    # the stand-in output is made in fp64 or fp32: as exact as the rest
    error = worst(got, [None if t is None else t[:, :, mine] for t in want], want)
    assert error < {torch.bfloat16: 0.02, **EXACT}[dtype]


HEADS = yaml.safe_load("""
[[2, 4, 4], [2, 4, 2], [2, 4, 1], [2, 8, 2], [4, 4, 4], [4, 4, 2], [4, 4, 1], [4, 8, 2], [4, 3, 1], [2, 3, 3],
 [2, 6, 3], [2, 5, 1], [3, 4, 2], [3, 7, 1], [3, 8, 8], [4, 9, 3], [4, 7, 7]]
""")
"""Ranks, query heads, key/value heads: a whole number of heads for each rank, and none."""


REPLAY = pytest.mark.parametrize("replay", [False, True], ids=["recomputed", "saved"])


@pytest.mark.parametrize("i, case", enumerate(HEADS))
def test_any_heads_on_any_ranks(pools, i, case):
    world, heads, kv = case
    dtype = (torch.float64, torch.float32)[i % 2]
    for replay in (False, True):
        on_ranks(pools, world, one_call, heads, kv, 2, dtype=dtype, replay=replay)


DOCUMENTS = yaml.safe_load("""
[[1, [0, 1, 7, 8, 13, 20]], [1, [0, 19, 20]], [2, [0, 3, 17, 20, 21, 33, 40]], [2, [0, 20, 40]], [2, [0, 30, 40]]]
""")
"""Samples, and offsets of their documents."""


@REPLAY
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch, documents", DOCUMENTS, ids=str)
def test_documents_that_span_ranks(pools, batch, documents, attention, replay):
    """Defect 6: tokens of packed documents attend inside their own document only, wherever ranks cut them."""
    on_ranks(pools, 4, one_call, batch=batch, documents=documents, attention=attention, replay=replay)


FEW = yaml.safe_load("""
# in the stand-in output, 0 / 0
rows without gradient on 2: [2, {rows: 4, scale: 0.7, zero_rows: [0, 3, 7]}]
a rank without gradient on 2: [2, {rows: 4, scale: 0.7, zero_rows: [0, 1, 2, 3, 7]}]
rows without gradient on 4: [4, {rows: 4, scale: 0.7, zero_rows: [0, 3, 7]}]
a rank without gradient on 4: [4, {rows: 4, scale: 0.7, zero_rows: [0, 1, 2, 3, 7]}]
q alone needs a gradient: [2, {needs: [true, false, false]}]
k alone needs a gradient: [2, {needs: [false, true, false]}]
v alone needs a gradient: [2, {needs: [false, false, true]}]
one row a rank: [4, {kv: 1, rows: 1}]
# one rank has a whole batch row of a head, and the keys of both rows
short rows, eager: [2, {h: 3, kv: 1, rows: 6, batch: 2, attention: eager}]
short rows, blockwise: [2, {h: 3, kv: 1, rows: 6, batch: 2, attention: blockwise}]
# documents long enough to be shared by the ranks, and short ones that are dealt out
documents, uneven heads: [3, {h: 7, kv: 1, rows: 200, documents: [0, 200, 203, 210, 211, 400, 450, 600]}]
documents, uneven heads, batch: [3, {h: 7, kv: 1, rows: 200, batch: 2, window: 50,
  documents: [0, 200, 203, 210, 211, 400, 450, 600, 1190, 1200]}]
""")
FEW["bf16"] = (2, {"rows": 16, "dtype": torch.bfloat16})


@REPLAY
@pytest.mark.parametrize("world, case", FEW.values(), ids=FEW)
def test_a_few_of_a_kind(pools, world, case, replay):
    on_ranks(pools, world, one_call, **case, replay=replay)


REFUSED = r"""
op(q, k, k[:, :1])               | k \[B, K, L, D\] and v \[B, K, L, V\], H a multiple of K, and sinks
op(q, k[:, :, 1:], k[:, :, 1:])  | k \[B, K, L, D\] and v \[B, K, L, V\], H a multiple of K, and sinks
op(q[..., 1:], k, k)             | k \[B, K, L, D\] and v \[B, K, L, V\], H a multiple of K, and sinks
op(q[0], k, k)                   | k \[B, K, L, D\] and v \[B, K, L, V\], H a multiple of K, and sinks
op(q[:, :3], k, k)               | k \[B, K, L, D\] and v \[B, K, L, V\], H a multiple of K, and sinks
op(q, k, k, sinks=torch.ones(1)) | \[1, 2, 5, 8\], \[1\]
op(q, k, k, window=0)            | window=0 hides every key
UlyssesAttention(SPContext(), "fast")(q, k, k) | attention='fast' is unknown
"""


def test_shapes_that_do_not_belong_together_are_refused():
    op, q, k = UlyssesAttention(SPContext()), randn(1, 4, 5, WIDTH), randn(1, 2, 5, WIDTH)
    check_refusals(REFUSED, {**globals(), **locals()})
