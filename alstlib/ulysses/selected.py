"""Attention of queries to keys that were selected for each of them, over a sequence of which each rank has a slice.

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D key width, V value width, N
selected keys of a query.

Rows stay where they are, and keys and values travel: those of a few heads at a time are gathered, and tile by tile each
row's selected keys are fetched from them. So no tensor has [S, S] or [L, S] numbers, any number of heads works, and
products are O(L N). What lies on the device at a time is one group of K / P heads of the whole sequence, as in head
layout, and the fetched keys of a tile. What it costs: each rank receives the keys and values of all heads, P times the
bytes of Ulysses' exchange; and keys are fetched for each query and head apart, so that memory traffic, not the
products, takes the time. A GPU needs a kernel that fetches selected keys inside, with a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alstlib.base.recompute import Saved, sum_dtype
from alstlib.base.sizing import tiles_of, tokens_in_tile
from alstlib.base.types import OutputAndLse
from alstlib.ulysses.alltoall import Exchange
from alstlib.ulysses.attention import CoreAttention, delta_of
from alstlib.ulysses.head_layouts import WholeHeads


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, exchange: Exchange, *, scale: float,
    sinks: Tensor | None = None, saved: Saved | None = None,
) -> Tensor:  # fmt: skip
    """The attention output [B, H, L, V] of this rank's tokens, from q [B, H, L, D], k [B, K, L, D] and v [B, K, L, V]
    of this rank's tokens. Collective over the SP group.

    Args:
        indices: [B, L, N] int32, the places in the sequence [0, S) of the keys that each token attends to, each once;
            -1 for none. A token has one at least.
        scale: the factor of the scores.
        sinks: [H], the score of a further key without a value for each head, or none.
        saved: as `UlyssesAttention` takes it.
    """
    here = WholeHeads(Exchange(), q.shape[1], k.shape[1])  # queries stay where they are
    call = _Selected(indices, exchange, scale, q.dtype if sinks is None else sum_dtype(q))
    return CoreAttention.apply(q, k, v, sinks, here, call, saved or Saved(keep=False))


def _groups(
    exchange: Exchange, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:  # fmt: skip
    """(query heads, key/value heads, their keys and their values [B, n, S, ..]) of each part that is computed at a
    time."""
    kv_heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    for kv in tiles_of(kv_heads, max(1, kv_heads // exchange.ranks)):
        keys, values = (exchange.gather(t[:, kv]).permute(1, 2, 0, 3, 4).flatten(2, 3) for t in (k, v))
        yield slice(kv.start * shared, kv.stop * shared), kv, keys, values


def _tiles(indices: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows whose fetched keys and values are about as large as an intermediate of a tile, the places of their keys, and
    these with 0 in place of -1."""
    batch, rows, count = indices.shape
    token = batch * count * k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
    for at in tiles_of(rows, tokens_in_tile(token, indices.device.type)):
        chosen = indices[:, at].long()
        yield at, chosen, chosen.clamp(min=0)


def _fetched(x: Tensor, at: Tensor) -> Tensor:
    """Of x [B, n, S, D] the rows at [B, t, N] -> [B, n, t, N, D]."""
    return torch.stack([one[:, rows] for one, rows in zip(x, at)])


def _scores(q: Tensor, k: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Scores [B, n, g, t, N] of q [B, n, g, t, D] with its keys k [B, n, t, N, D], in fp32 at least."""
    made = torch.einsum("bngtd,bntkd->bngtk", q, k)
    return (made.to(sum_dtype(q)) * scale).masked_fill(indices[:, None, None] < 0, float("-inf"))


@dataclass
class _Selected:
    """What attends (`CoreAttention`)."""

    indices: Tensor | None
    """Until they are kept with the keys, and freed with these."""
    exchange: Exchange
    scale: float
    dtype: torch.dtype
    """Precision of the output."""

    def keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        indices, self.indices = self.indices, None
        assert indices is not None
        return [k, v, indices]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> OutputAndLse:
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=self.dtype)
        lse = q.new_empty(q.shape[:3], dtype=sum_dtype(q))
        for heads, _, keys, values in _groups(self.exchange, q, k, v):
            n = keys.shape[1]
            for rows, chosen, at in _tiles(indices, keys, values):
                scores = _scores(q[:, heads, rows].unflatten(1, (n, -1)), _fetched(keys, at), chosen, self.scale)
                total = scores.logsumexp(-1)
                weights = (scores - total[..., None]).exp().to(v.dtype)
                made = torch.einsum("bngtk,bntkv->bngtv", weights, _fetched(values, at))
                out[:, heads, rows], lse[:, heads, rows] = made.flatten(1, 2), total.flatten(1, 2)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, out: Tensor, lse: Tensor
    ) -> Sequence[Tensor]:  # fmt: skip
        delta, dq = delta_of(dout, out)[..., 0], torch.empty_like(q)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for heads, kv, keys, values in _groups(self.exchange, q, k, v):
            sums = [torch.zeros_like(t, dtype=lse.dtype) for t in (keys, values)]
            n = keys.shape[1]
            for rows, chosen, at in _tiles(indices, keys, values):
                ours, above, total, row = (t[:, heads, rows].unflatten(1, (n, -1)) for t in (q, dout, lse, delta))
                fetched = _fetched(keys, at)
                weights = (_scores(ours, fetched, chosen, self.scale) - total[..., None]).exp()
                into = torch.einsum("bngtv,bntkv->bngtk", above, _fetched(values, at)).to(weights.dtype)
                slopes = (weights * (into - row[..., None]) * self.scale).to(q.dtype)
                dq[:, heads, rows] = torch.einsum("bngtk,bntkd->bngtd", slopes, fetched).flatten(1, 2)
                parts = [
                    torch.einsum("bngtk,bngtd->bntkd", slopes, ours),
                    torch.einsum("bngtk,bngtv->bntkv", weights.to(v.dtype), above),
                ]
                for added, part in zip(sums, parts):
                    for one, places, grad in zip(added, at, part):  # keys that are not there add zeros
                        one.index_add_(1, places.flatten(), grad.flatten(1, 2).to(one.dtype))
            for grad, added in zip((dk, dv), sums):
                by_rank = added.unflatten(2, (self.exchange.ranks, -1)).permute(2, 0, 1, 3, 4)
                grad[:, kv] = self.exchange.sum_parts(by_rank)
        return dq, dk, dv
