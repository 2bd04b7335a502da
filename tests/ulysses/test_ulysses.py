"""Ulysses attention on real ranks against plain attention on one, with and without a saved output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from operators import EXACT, leaf, nan_memory, randn, strided, worst
from torch import Tensor

from alstlib import SPContext, reference
from alstlib.offload.checkpoints import Saved, checkpoint
from alstlib.offload.host_store import HostStore
from alstlib.ulysses.attention import UlyssesAttention

WIDTH = 8


class CountedCalls:
    """Counts torch.distributed's all-to-alls inside `with`."""

    def __enter__(self) -> CountedCalls:
        self.calls = 0
        self.plain = {name: getattr(dist, name) for name in ("all_to_all", "all_to_all_single")}
        for name, fn in self.plain.items():
            setattr(dist, name, self.counted(fn))
        return self

    def counted(self, fn: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return fn(*args, **kwargs)

        return run

    def __exit__(self, *error: Any) -> None:
        for name, fn in self.plain.items():
            setattr(dist, name, fn)


def one_call(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """One attention call on this rank's rows; `replay` runs it as a checkpoint does: without a graph, then again."""
    h, kv, batch, rows = case["heads"], case["kv"], case.get("batch", 1), case.get("rows", 5)
    dtype, documents, scale = case.get("dtype", torch.float64), case.get("documents"), case.get("scale")
    size = rows * world
    widths = (WIDTH, WIDTH, case.get("values", WIDTH), case.get("values", WIDTH))
    whole = [randn(batch, n, size, d, seed=i, dtype=dtype) for i, (n, d) in enumerate(zip((h, kv, kv, h), widths))]
    rule = {n: case.get(n) for n in ("window", "softcap")}
    sinks = leaf(randn(h, seed=9, dtype=dtype)) if case.get("sinks") else None
    exact_sinks = None if sinks is None else leaf(sinks, torch.float64)
    whole[3][:, :, case.get("zero_rows", [])] = 0
    if (rank_without := case.get("zero_rank")) is not None:
        whole[3][:, :, rank_without * rows : (rank_without + 1) * rows] = 0
    needs = case.get("needs", (True, True, True))
    leaves = [leaf(t, torch.float64, n) for t, n in zip(whole, needs)]
    want, lse = reference.attention(*leaves, scale=scale or WIDTH**-0.5, documents=documents, sinks=exact_sinks, **rule)
    want.backward(whole[3].double())
    mine = slice(rank * rows, (rank + 1) * rows)
    uncut = [want, *(t.grad for t in leaves[:3])]
    oracle = [None if t is None else t[:, :, mine] for t in uncut]

    op = UlyssesAttention(SPContext.create(world), case.get("attention", "sdpa"))
    q, k, v, dout = (strided(t[:, :, mine]) for t in whole)
    q, k, v = (leaf(t, needs=n) for t, n in zip((q, k, v), needs))
    inputs = [t.detach().clone() for t in (q, k, v, dout)]
    result: dict[str, Any] = {}
    with nan_memory(), CountedCalls() as counted:
        saved = None
        if case.get("replay"):
            saved = Saved()
            with torch.no_grad():
                op(q, k, v, scale=scale, documents=documents, saved=saved, sinks=sinks, **rule)
            ((out, kept_lse),) = saved.tensors
            heads = h // world
            even = kept_lse.shape == (batch, heads, size)
            result["lse"] = worst([kept_lse], [lse[:, rank * heads : (rank + 1) * heads]]) if even else 0.0
            saved.rewind([out.clone(), kept_lse])
            result["first calls"], result["first bytes"] = counted.calls, op.exchange.bytes_sent
        out = op(q, k, v, scale=scale, documents=documents, saved=saved, sinks=sinks, **rule)
        result["calls"], result["bytes"] = counted.calls, op.exchange.bytes_sent
        out.backward(dout)
        result["all bytes"] = op.exchange.bytes_sent
    result["error"] = worst([out, q.grad, k.grad, v.grad], oracle, uncut)
    if sinks is not None and exact_sinks is not None:
        assert sinks.grad is not None
        dist.all_reduce(sinks.grad)  # each rank has its heads' share
        result["error"] = max(result["error"], worst([sinks.grad], [exact_sinks.grad]))
    result["forward calls"] = op.forward_calls
    result["dtypes"] = {t.dtype for t in (out, q.grad, k.grad, v.grad) if t is not None}
    result["untouched"] = all(torch.equal(a, b) for a, b in zip(inputs, (q, k, v, dout)))
    return result


def check(pool: Any, case: dict[str, Any], tolerance: float | None = None) -> list[dict[str, Any]]:
    dtype = case.get("dtype", torch.float64)
    results = pool(one_call, case)
    for rank, result in enumerate(results):
        # the stand-in output is made in fp64 or fp32: as exact as the rest
        assert result["error"] < (tolerance or EXACT[dtype]), (rank, result)
        assert result["forward calls"] == 1, (rank, result)
        assert result["dtypes"] == {dtype}, (rank, result)
        assert result["untouched"], rank
        if case.get("replay"):
            assert result["lse"] < (tolerance or EXACT[dtype]), (rank, result)
            # the recompute neither exchanges nor attends: all of it is left to backward
            assert result["calls"] == result["first calls"], (rank, result)
            assert result["bytes"] == result["first bytes"], (rank, result)
    return results


UNEVEN = [(2, 3, 3), (2, 6, 3), (2, 5, 1), (3, 4, 2), (3, 7, 1), (3, 8, 8), (4, 9, 3), (4, 7, 7), (5, 4, 1), (6, 9, 3)]
"""Ranks, query heads, key/value heads: no whole number of heads for each rank."""


REPLAY = pytest.mark.parametrize("replay", [False, True], ids=["recomputed", "saved"])


@REPLAY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("world", [2, 4])
def test_attention_is_the_oracle(pools: Any, world: int, heads: int, kv: int, dtype: torch.dtype, replay: bool) -> None:
    check(pools(world), {"heads": heads, "kv": kv, "dtype": dtype, "replay": replay, "batch": 2})


@REPLAY
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("batch", "documents"),
    [(1, [0, 1, 7, 8, 13, 20]), (1, [0, 19, 20]), (2, [0, 3, 17, 20, 21, 33, 40]), (2, [0, 20, 40]), (2, [0, 30, 40])],
    ids=str,
)
def test_documents_that_span_ranks(ranks4: Any, batch: int, documents: list[int], attention: str, replay: bool) -> None:
    """Defect 6: tokens of packed documents attend inside their own document only, wherever ranks cut them."""
    case = {"heads": 4, "kv": 2, "batch": batch, "documents": documents, "attention": attention, "replay": replay}
    check(ranks4, case)


@REPLAY
@pytest.mark.parametrize("world", [2, 4])
def test_rows_without_gradient(pools: Any, world: int, replay: bool) -> None:
    """Rows of dO that are zero (0 / 0 in the stand-in output), and a whole rank of them."""
    case = {"heads": 4, "kv": 2, "rows": 4, "replay": replay, "scale": 0.7}
    check(pools(world), {**case, "zero_rows": [0, 3, 7]})
    check(pools(world), {**case, "zero_rows": [7], "zero_rank": 0})


@REPLAY
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_inputs_without_grad(ranks2: Any, needs: tuple[bool, ...], replay: bool) -> None:
    check(ranks2, {"heads": 4, "kv": 2, "needs": needs, "replay": replay})


@REPLAY
def test_one_row_a_rank(ranks4: Any, replay: bool) -> None:
    check(ranks4, {"heads": 4, "kv": 1, "rows": 1, "replay": replay})


@REPLAY
def test_bf16(ranks2: Any, replay: bool) -> None:
    check(ranks2, {"heads": 4, "kv": 2, "rows": 16, "dtype": torch.bfloat16, "replay": replay}, tolerance=0.02)


@pytest.mark.parametrize(("world", "kv"), [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_bytes_on_the_wire(pools: Any, world: int, kv: int) -> None:
    """With 8 query heads, 2 key/value heads and sp 2, each layer and step moves 52 heads of [S, D], and delta; the
    reference moves 60. A key/value head that ranks share travels once to each of them."""
    rows = 5
    head = rows * WIDTH * 8 * (world - 1)  # bytes that a rank sends for each of its P-th of the heads
    q, k = 8 // world, max(1, kv // world)
    forward = (q + 2 * k) + q
    delta = q / WIDTH
    for replay, more in ((False, 0), (True, delta + q + 2 * k)):
        expected = (forward + q + q + 2 * k + more) * head
        for result in check(pools(world), {"heads": 8, "kv": kv, "rows": rows, "replay": replay}):
            assert result["bytes"] == forward * head
            assert result["all bytes"] == expected
    if (world, kv) == (2, 2):
        assert expected == (52 + 8 / WIDTH) * rows * WIDTH * 8 * (world - 1) / world


def stacked(rank: int, world: int, save: bool) -> dict[str, Any]:
    """Two layers, each a projection and attention under a checkpoint, with a residual; weights' gradients summed."""
    heads, kv, rows = 4, 2, 4
    documents = [0, 6, 7, rows * world]
    width = heads * WIDTH
    whole = randn(1, rows * world, width)
    upstream = randn(1, rows * world, width, seed=1, scale=3.0)
    weights = [randn((heads + 2 * kv) * WIDTH, width, seed=2 + i, scale=0.3) for i in range(2)]

    def layer(x: Tensor, weight: Tensor, attend: Any) -> Tensor:
        qkv = (x @ weight.T).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        q, k, v = qkv.split([heads, kv, kv], 1)
        return x + attend(q, k, v).transpose(1, 2).flatten(2)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, scale=WIDTH**-0.5, documents=documents)[0]

    x, ws = leaf(whole), [leaf(w) for w in weights]
    want = layer(layer(x, ws[0], plain), ws[1], plain)
    want.backward(upstream)

    mine = slice(rank * rows, (rank + 1) * rows)
    ops = [UlyssesAttention(SPContext.create(world)) for _ in ws]
    own, own_ws, store = leaf(whole[:, mine]), [leaf(w) for w in weights], HostStore("sync")
    with nan_memory():
        out = own
        for op, w in zip(ops, own_ws):
            saved = Saved() if save else None

            def attend(q: Tensor, k: Tensor, v: Tensor, op: Any = op, saved: Any = saved) -> Tensor:
                return op(q, k, v, documents=documents, saved=saved)

            out = checkpoint(layer, out, w, attend, store=store, saved=saved)
        out.backward(upstream[:, mine])
    for w in own_ws:
        assert w.grad is not None
        dist.all_reduce(w.grad)
    assert x.grad is not None
    got = [out, own.grad, *(w.grad for w in own_ws)]
    error = worst(got, [want[:, mine], x.grad[:, mine], *(w.grad for w in ws)])
    return {"error": error, "calls": [op.forward_calls for op in ops]}


@pytest.mark.parametrize("save", [False, True], ids=["recomputed", "saved"])
@pytest.mark.parametrize("world", [2, 4])
def test_two_checkpointed_layers(pools: Any, world: int, save: bool) -> None:
    """Weights' gradients too; with the output saved, attention runs forward once a layer and step, else twice."""
    for result in pools(world)(stacked, save):
        assert result["error"] < 1e-12
        assert result["calls"] == ([1, 1] if save else [2, 2])


def test_two_calls_share_one_saved() -> None:
    """A layer with two attentions under one checkpoint takes its outputs back in order."""
    op, saved = UlyssesAttention(SPContext.create(1)), Saved()

    def twice(x: Tensor, keep: Saved | None) -> Tensor:
        x = op(x, x, x, saved=keep)
        return op(x * 2, x, x, saved=keep)

    x, y = (leaf(randn(1, 2, 5, WIDTH)) for _ in range(2))
    upstream = randn(1, 2, 5, WIDTH, seed=1)
    out = checkpoint(twice, x, saved, saved=saved)
    out.backward(upstream)
    assert op.forward_calls == 2
    twice(y, None).backward(upstream)
    assert worst([x.grad], [y.grad]) < 1e-12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("documents", [None, [0, 3, 7, 8, 14]])
def test_one_rank_without_torch_distributed(attention: str, documents: list[int] | None) -> None:
    result = one_call(
        0, 1, {"heads": 4, "kv": 2, "rows": 7, "batch": 2, "documents": documents, "attention": attention}
    )
    assert result["error"] < 1e-12
    assert (result["calls"], result["all bytes"]) == (0, 0)


def test_without_grad_nothing_is_kept() -> None:
    op = UlyssesAttention(SPContext.create(1))
    x = randn(1, 2, 5, WIDTH)
    assert op(x, x, x).grad_fn is None
    with torch.no_grad():
        assert op(leaf(x), x, x).grad_fn is None


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    op = UlyssesAttention(SPContext.create(1))
    q, k = randn(1, 4, 5, WIDTH), randn(1, 2, 5, WIDTH)
    for bad in ((q, k, k[:, :1]), (q, k[:, :, 1:], k[:, :, 1:]), (q[..., 1:], k, k), (q[0], k, k), (q, k[..., 2:], k)):
        with pytest.raises(ValueError, match=r"attention needs q \[B, H, L, D\], k \[B, K, L, D\] and v"):
            op(*bad)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        op(q[:, :3], k, k)
    with pytest.raises(ValueError, match="attention='fast' is unknown"):
        UlyssesAttention(SPContext.create(1), "fast")(q, k, k)


@REPLAY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("world", "heads", "kv"), UNEVEN)
def test_any_heads_on_any_ranks(pools: Any, world: int, heads: int, kv: int, dtype: torch.dtype, replay: bool) -> None:
    check(pools(world), {"heads": heads, "kv": kv, "dtype": dtype, "replay": replay, "batch": 2})


@REPLAY
@pytest.mark.parametrize("attention", ["eager", "blockwise"])
def test_short_rows_of_uneven_heads(ranks2: Any, attention: str, replay: bool) -> None:
    """One rank has a whole batch row of a head, and the keys of both rows."""
    check(ranks2, {"heads": 3, "kv": 1, "rows": 6, "batch": 2, "attention": attention, "replay": replay})


VARIANTS = [
    {"window": 4}, {"window": 1, "sinks": True}, {"softcap": 1.5}, {"sinks": True}, {"values": 12}, {"values": 3},
    {"window": 4, "sinks": True, "values": 3, "scale": 0.6}, {"window": 4, "softcap": 1.5, "sinks": True},
]  # fmt: skip


@REPLAY
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("documents", [None, [0, 1, 7, 8, 13, 30, 40]], ids=["one", "documents"])
@pytest.mark.parametrize(("world", "heads", "kv"), [(2, 4, 2), (4, 4, 2), (2, 3, 1), (4, 6, 3)])
def test_variants_on_ranks(
    pools: Any, world: int, heads: int, kv: int, documents: list[int] | None, variant: dict[str, Any], replay: bool
) -> None:
    rows = 40 // world
    check(pools(world), {"heads": heads, "kv": kv, "rows": rows, "documents": documents, "replay": replay, **variant})


@REPLAY
def test_long_and_short_documents_with_uneven_heads(pools: Any, replay: bool) -> None:
    """Documents long enough to be shared by the ranks, and short ones that are dealt out."""
    documents = [0, 200, 203, 210, 211, 400, 450, 600]
    case = {"heads": 7, "kv": 1, "rows": 200, "documents": documents, "replay": replay}
    check(pools(3), case)
    check(pools(3), {**case, "batch": 2, "documents": [*documents[:-1], 600, 1190, 1200], "window": 50})


def test_bytes_of_uneven_heads(pools: Any) -> None:
    """Query rows travel as with whole heads; a key/value head to each rank that has a part of its query heads."""
    world, heads, kv, rows = 4, 6, 3, 8
    results = check(pools(world), {"heads": heads, "kv": kv, "rows": rows})
    needed = [len({h * kv // heads for h in range(r * 6 // 4, -(-(r + 1) * 6 // 4))}) for r in range(world)]
    queries = 2 * heads * rows * (world - 1)  # to their ranks, and their outputs back; a few stay where they are
    keys = 2 * rows * (world - 1) * sum(needed)
    assert sum(r["bytes"] for r in results) == pytest.approx((queries + keys) * WIDTH * 8, rel=0.05)
