"""The exchange on real ranks against the oracle on one: values, gradients, bytes, and no replicated heads."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import check_refused, lines_of, same
from operators import gradients, leaf, nan_memory, randn, strided, worst

from alstlib.base import reference
from alstlib.planner.measure.simulate import fake_ranks
from alstlib.ulysses import alltoall
from alstlib.ulysses.alltoall import Exchange, heads_to_seq, seq_to_heads, stripe, whole_head_degrees

ROWS, WIDTH = 3, 5


def there(rank, world, heads, dtype):
    """An exchange of rows for heads, and its gradient, are those of the oracle run on all shards; there and back is
    nothing. The way there and its gradient send each of the other ranks 1/P of the heads, or the one head it needs."""
    shards, upstream = (
        [leaf(randn(2, *shape, WIDTH, seed=seed + r, dtype=dtype)) for r in range(world)]
        for shape, seed in (((heads, ROWS), 0), ((max(1, heads // world), ROWS * world), 10))
    )
    whole = torch.stack(upstream)
    out, *grads = gradients(lambda *ts: torch.stack(reference.seq_to_heads(ts)), shards, whole, torch.float64)
    exchange = Exchange(dist.group.WORLD)
    with nan_memory():
        got = gradients(lambda x: seq_to_heads(x, exchange), [leaf(strided(shards[rank]))], strided(upstream[rank]))
    assert {t.dtype for t in got} == {dtype}
    # copies are exact; gradients of what was shared are summed in fp32 or wider, and rounded once
    error = worst(got, [t.to(dtype) for t in (out[rank], grads[rank])])
    assert error <= ({torch.float64: 1e-15, torch.bfloat16: 5e-4}[dtype] if heads < world else 0.0)
    if heads >= world:
        x, again = shards[rank], randn(*shards[rank].shape, seed=20, dtype=dtype)
        back = gradients(lambda x: heads_to_seq(seq_to_heads(x, dist.group.WORLD), dist.group.WORLD), [leaf(x)], again)
        assert worst(back, [x, again]) == 0
    one = max(1, heads // world) * 2 * ROWS * WIDTH * dtype.itemsize
    assert exchange.bytes_sent == 2 * (world - 1) * one


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_exchange_is_the_oracle(pools, world, heads):
    """Heads that split, and heads fewer than ranks, which P / K neighbours share (their gradients add up)."""
    for dtype in (torch.float64, torch.bfloat16):
        pools(world)(there, heads, dtype)


def send_buffers(rank, world, heads):
    """What `dist.all_to_all` is handed by `to_heads` of two tensors (K and V)."""
    seen = []

    def spy(receive, parts, group=None):
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts}
        seen.append(([p.data_ptr() for p in parts], [*storages.values()], sum(r.numel() for r in receive)))

    with mock.patch.object(dist, "all_to_all", spy):
        Exchange(dist.group.WORLD).to_heads(*(randn(2, heads, ROWS, WIDTH, seed=rank + i) for i in (0, 100)))
    return seen


def without_lists(rank, world):
    """Shared heads are the same with PyTorch's gloo before 2.12, which exchanges no lists."""
    tensors = [randn(2, world // 2, ROWS, WIDTH, seed=rank + i) for i in (0, 100)]
    want = Exchange(dist.group.WORLD).to_heads(*tensors)
    with mock.patch.object(alltoall, "GLOO_TAKES_LISTS", False), mock.patch.object(dist, "all_to_all", None):
        got = Exchange(dist.group.WORLD).to_heads(*tensors)
    assert same(got, want)


@pytest.mark.parametrize("world", [2, 4])
def test_shared_heads_need_no_lists(pools, world):
    pools(world)(without_lists)


@pytest.mark.parametrize("world, heads", [(2, 1), (4, 1), (4, 2)])
def test_shared_heads_are_not_replicated_before_they_are_sent(pools, world, heads):
    """Defect 9: the reference copies each K/V head P / K times into its send buffer. Here the parts for the ranks that
    share a head are one and the same memory, and a rank receives the one head of K and of V that it needs."""
    one_head, shared_by = 2 * 2 * ROWS * WIDTH, world // heads  # K and V, batch 2
    for ((starts, nbytes, received),) in pools(world)(send_buffers, heads):
        assert len(set(starts)) == heads
        assert all(len(set(starts[r : r + shared_by])) == 1 for r in range(0, world, shared_by))
        assert (nbytes, received) == ([heads * one_head * 8], world * one_head)


def bad_shapes(rank, world):
    group = dist.group.WORLD
    says = "^3 heads neither divide over 2 ranks nor are shared evenly by them$"
    check_refused(says, seq_to_heads, randn(1, 3, ROWS, WIDTH), group)
    check_refused("^a sequence of 5 does not divide over 2 ranks; 6 does$", heads_to_seq, randn(1, 1, 5, WIDTH), group)


def test_shapes_that_do_not_divide_are_refused(ranks2):
    ranks2(bad_shapes)


def test_degrees():
    assert [whole_head_degrees(*heads) for heads in ((9, 3), (14, 2))] == [[1, 3, 9], [1, 2, 14]]


COMES = """
exchange.to_heads(whole)[0]                                          | whole
exchange.to_seq(whole[:, :, :2].repeat(1, 1, 2, 1))[0]               | whole[:, :, :2]
exchange.to_heads(one)[0]                                            | one
exchange.to_seq(one.repeat(1, 1, 4, 1), heads=1)[0]                  | 4 * one
exchange.swap_unequal(torch.arange(5.0), [2, 1, 1, 1], [3, 3, 3, 3]) | torch.arange(5.0)
stripe([ids], 2, ctx)[0]                                             | ids
stripe([ids], 10, ctx)[0]                                            | ids
"""


def test_from_emulated_ranks_comes_what_is_sent():
    """And not whatever lies in memory, nor zeros, on which a GPU draws less power and computes faster."""
    whole, one, ids = randn(2, 8, ROWS, WIDTH), randn(1, 1, ROWS, WIDTH), torch.arange(10)[None]
    with fake_ranks(4) as ctx, nan_memory():
        names = {**globals(), **locals(), "exchange": Exchange(ctx.sp_group), "stripe": stripe}
        for came, sent in lines_of(COMES, "|"):
            assert same(*([eval(text, names).unique()] for text in (came, sent))), came
