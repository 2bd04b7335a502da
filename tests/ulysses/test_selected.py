"""Attention to selected keys against attention with a mask."""

import weakref

import pytest
import torch
from operators import Operations

from alstlib.base.recompute import Saved
from alstlib.base.sizing import TILE_BYTES
from alstlib.ulysses.alltoall import Exchange
from alstlib.ulysses.selected import selected_attention

BATCH, ROWS, COUNT = 2, 17, 5


def inputs(rows, heads=4, kv_heads=2):
    g = torch.Generator().manual_seed(0)
    shapes = (heads, 6), (kv_heads, 6), (kv_heads, 3)
    made = [torch.randn(BATCH, n, rows, width, generator=g, dtype=torch.float64) for n, width in shapes]
    sinks = torch.randn(heads, generator=g, dtype=torch.float64)
    scores = torch.rand(BATCH, rows, rows, generator=g).masked_fill(torch.ones(rows, rows).triu(1).bool(), -1)
    found, places = scores.topk(COUNT, -1)
    return [t.requires_grad_() for t in (*made, sinks)], places.masked_fill(found < 0, -1).int()


def masked(q, k, v, sinks, indices):
    """The plain formulas."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    seen = torch.zeros(BATCH, q.shape[2], q.shape[2] + 1, dtype=torch.bool)
    seen = seen.scatter(2, indices.long() % (q.shape[2] + 1), True)[:, None, :, :-1]
    scores = (0.3 * q @ k.mT).masked_fill(~seen, float("-inf"))
    further = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, further], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("room", [1, 2_000, 2**20])
def test_output_and_gradients_are_those_of_a_mask(monkeypatch, room):
    monkeypatch.setitem(TILE_BYTES, "cpu", room)
    leaves, indices = inputs(ROWS)
    q, k, v, sinks = leaves
    want = masked(*leaves, indices)
    dout = torch.randn_like(want)
    saved = Saved()
    for again in (False, True):
        if again:
            saved.rewind(saved.leave())
        got = selected_attention(q, k, v, indices, Exchange(), scale=0.3, sinks=sinks, saved=saved)
        made, right = ((out, *torch.autograd.grad(out, leaves, dout, retain_graph=True)) for out in (got, want))
        torch.testing.assert_close(made, right, rtol=0, atol=1e-12)


def test_nothing_has_the_square_of_the_sequence(monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 1)
    (q, k, v, _), indices = inputs(96, heads=1, kv_heads=1)
    with Operations() as operations:
        selected_attention(q, k, v, indices, Exchange(), scale=1.0).sum().backward()
    assert operations.largest < 96 * 96


@pytest.mark.parametrize("score", [2.0, 11.0])
def test_large_sinks_take_no_digits(score):
    """They leave little of the output, of which fp32 has as many digits as of a large one."""
    leaves, indices = inputs(ROWS)
    exact = [t.detach() for t in leaves[:3]] + [torch.full_like(leaves[3], score)]
    q, k, v, sinks = (t.float() for t in exact)
    got, want = selected_attention(q, k, v, indices, Exchange(), scale=0.3, sinks=sinks), masked(*exact, indices)
    assert (got - want).norm() / want.norm() < 2e-6


def test_what_backward_needs_is_freed_with_it():
    (q, k, v, _), indices = inputs(ROWS)
    made, alive = selected_attention(q, k, v, indices, Exchange(), scale=0.3), weakref.ref(indices)
    made.sum().backward()
    del indices
    assert alive() is None
    del made
