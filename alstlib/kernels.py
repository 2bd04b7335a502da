"""Causal attention inside documents as (output, logsumexp) and its gradients, over any kernel of `backends`.

Shape legend: B batch, S sequence, N keys, H query heads, K key/value heads (H a multiple of K), D head width.
q [B, H, S, D]; k, v [B, K, N, D]; out [B, H, S, D]; lse [B, H, S] (logsumexp of the scaled scores, fp32). Nothing of
shape [S, S] is made (except by the kernel `eager`, which is there for checking).

Documents are offsets into the flattened [B * S] batch (0 first, B * S last); None makes every batch row one document.
They are attended one after the other: exact for every kernel, and the cost of a document is its own square. Queries may
be the last rows of the keys: then what lies before them and their own triangle are merged by their logsumexps.

Keeping the logsumexp is what lets a backward run without a second forward (DistFlashAttn, arXiv 2310.03294).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from alstlib.backends import BACKENDS, Backend, choose_backend

__all__ = [
    "BACKENDS", "Backend", "Documents", "attention_backward", "attention_backward_rows", "attention_forward",
    "choose_backend", "merge",
]  # fmt: skip

Documents = Sequence[int] | None

KEYS_PER_QUERY = 4
"""Keys in one call of a backward over chunks, for each query row in it."""


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the same queries over two disjoint sets of keys -> over both; `out` and `lse` are overwritten.

    out and other [B, H, S, D], lse and other_lse [B, H, S] in fp32. A set without any key has a logsumexp of -inf.
    """
    gap = other_lse - lse
    share = torch.sigmoid(gap)[..., None]  # of the other set in the sum of both
    out.add_((other.to(share.dtype) - out) * share) if out.dtype == share.dtype else out.copy_(
        torch.lerp(out.to(share.dtype), other.to(share.dtype), share)
    )
    return out, torch.logaddexp(lse, other_lse)


def _causal_forward(backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries are the last rows of the keys: everything before them, and their own triangle."""
    before = k.shape[2] - q.shape[2]
    if before == 0 or backend.bottom_right:
        return backend.forward(q, k, v, scale, True)
    out, lse = backend.forward(q, k[:, :, before:], v[:, :, before:], scale, True)
    return merge(out, lse, *backend.forward(q, k[:, :, :before], v[:, :, :before], scale, False))


def _causal_pieces(backend: Backend, rows: int, keys: int) -> list[tuple[slice, bool]]:
    """Keys that one backward call takes, and whether it is causal: a kernel makes gradients (and with grouped heads
    some make them for every query head) as long as its keys, so these are cut to a few times the queries."""
    if rows == keys:
        return [(slice(0, keys), True)]
    own = keys - rows
    step = max(rows * KEYS_PER_QUERY, 1)
    pieces = [(slice(lo, min(lo + step, own)), False) for lo in range(0, own, step)]
    return [*pieces, (slice(own, keys), True)]


def _blocks(documents: Documents, batch: int, length: int, first: int, last: int) -> list[tuple[int, slice, slice]]:
    """The documents that queries [first, last) of every batch row see: (batch row, their queries counted from `first`,
    their keys)."""
    offsets = range(0, batch * length + 1, length) if documents is None else [int(o) for o in documents]
    total = batch * length
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or sorted(offsets) != list(offsets):
        raise ValueError(f"documents={list(offsets[:8])} must rise from 0 to batch * sequence = {total}")
    bounds = sorted({*offsets, *range(0, total + 1, length)})
    found = []
    for lo, hi in itertools.pairwise(bounds):
        b, begin, end = lo // length, lo % length, (hi - 1) % length + 1
        if max(begin, first) < (end := min(end, last)):
            found.append((b, slice(max(begin, first) - first, end - first), slice(begin, end)))
    return found


def attention_forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    documents: Documents = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents -> (out [B, H, S, D], lse [B, H, S] in fp32).

    Args:
        k, v: [B, K, N, D] with N >= S: the queries are the last S of N rows.
        documents: offsets into the flattened [B * length] batch.
        length: rows of a whole batch row where k and v hold only its first N; None: they hold it whole.
    """
    rows, keys = q.shape[2], k.shape[2]
    if documents is None:
        return _causal_forward(backend, q, k, v, scale)
    blocks = _blocks(documents, q.shape[0], length or keys, keys - rows, keys)
    if len(blocks) == q.shape[0] and all(ks == slice(0, keys) for _, _, ks in blocks):
        return _causal_forward(backend, q, k, v, scale)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for b, qs, ks in blocks:
        at, kv = (slice(b, b + 1), slice(None), qs), (slice(b, b + 1), slice(None), ks)
        out[at], lse[at] = _causal_forward(backend, q[at], k[kv], v[kv], scale)
    return out, lse


def attention_backward(
    backend: Backend,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    documents: Documents = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_forward` over a whole sequence, from what it returned -> (dq, dk, dv)."""
    blocks = _blocks(documents, q.shape[0], q.shape[2], 0, q.shape[2])
    if len(blocks) == q.shape[0]:
        return backend.backward(dout, q, k, v, out, lse, scale, True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for b, qs, _ in blocks:
        at = (slice(b, b + 1), slice(None), qs)
        dq[at], dk[at], dv[at] = backend.backward(dout[at], q[at], k[at], v[at], out[at], lse[at], scale, True)
    return dq, dk, dv


def attention_backward_rows(
    backend: Backend,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    documents: Documents = None,
    length: int | None = None,
) -> Tensor:
    """Gradient of `attention_forward` for queries that are the last rows of the keys -> dq [B, H, S, D].

    What these rows contribute to the gradients of the keys and values they saw is added to dk and dv [B, K, N, D]
    (fp32: a key collects from many calls). `out` and `lse` are over all keys of a row: with them each set of keys gives
    its own share of the gradients, exactly (FlashAttention-2, section 3.1.2).
    """
    rows, keys = q.shape[2], k.shape[2]
    dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    for b, qs, ks in _blocks(documents, q.shape[0], length or keys, keys - rows, keys):
        at = (slice(b, b + 1), slice(None), qs)
        for piece, causal in _causal_pieces(backend, qs.stop - qs.start, ks.stop - ks.start):
            kv = (slice(b, b + 1), slice(None), slice(ks.start + piece.start, ks.start + piece.stop))
            grads = backend.backward(dout[at], q[at], k[kv], v[kv], out[at], lse[at], scale, causal)
            dq[at].add_(grads[0])
            dk[kv].add_(grads[1])
            dv[kv].add_(grads[2])
    return dq.to(q.dtype)
