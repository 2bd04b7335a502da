"""One call of a kernel, cut where the kernel cannot take it in one piece, its heads padded to widths that it has.

Shape legend: B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), D key width, V value
width. q, dout [B, H, S, D]; k [B, K, N, D]; v [B, K, N, V]; out [B, H, S, V]; lse [B, H, S] (logsumexp, fp32).

A call is cut for two reasons. Kernels count elements in 32 bits, so no tensor of a call may have 2^31 of them, which
600K tokens of 32 heads of 128 do. And a kernel that is built for each shape (`Backend.granule`) gets few shapes: of a
long sequence whose length is ragged it gets the largest part that is not, and another kernel gets the last rows. The
parts are those that chunks of rows have: own triangles, and everything before them, merged by their logsumexps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from alstlib.kernels.backends import BACKENDS, LONG, Backend
from alstlib.kernels.rule import Attended, Rule
from alstlib.sizing import kernel_device, tile_for

ELEMENTS = 2**31
"""Number of elements in memory that no tensor of a call may span."""


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the same queries over two disjoint sets of keys -> over both; `out` is overwritten.

    out and other [..., S, V], lse and other_lse [..., S] in fp32. A set without any key has a logsumexp of -inf.
    """
    share = torch.sigmoid(other_lse - lse)[..., None]  # of the other set in the sum of both
    for rows in row_tiles(out):
        theirs = other[rows].to(share.dtype)
        if out.dtype == share.dtype:
            out[rows].lerp_(theirs, share[rows])
        else:
            out[rows] = out[rows].to(share.dtype).lerp_(theirs, share[rows])
    return out, torch.logaddexp(lse, other_lse)


def row_tiles(x: Tensor, step: int | None = None) -> list[tuple[EllipsisType, slice, slice]]:
    """Slices of x [..., S, D] that cut S, so that fp32 intermediates are small: `step` rows each, or as many as
    `sizing.TILE_BYTES` hold."""
    step = step or tile_for(prod(x.shape[:-2]) * x.shape[-1], 4, kernel_device(x.device.type)[0])
    return [(..., slice(lo, lo + step), slice(None)) for lo in range(0, x.shape[-2], step)]


def padded(backend: Backend, *tensors: Tensor) -> list[Tensor]:
    """Zeros beside heads that are narrower, for a kernel that knows one width, or only some."""
    widest = max(t.shape[-1] for t in tensors)
    lacking = [backend.width(t.shape[-1] if backend.widths else widest) - t.shape[-1] for t in tensors]
    return [pad(t, (0, n)) if n else t for t, n in zip(tensors, lacking)]


def most_rows(backend: Backend, tensors: Sequence[Tensor]) -> int:
    """Tokens of a call, of the whole batch, whose tensors [B, heads, tokens, width] stay below `ELEMENTS`. A kernel may
    have a key and a value for each query head, and a token's row may lie between those of other tensors."""
    heads, width = tensors[0].shape[1], max(t.shape[-1] for t in tensors)
    each = max(heads * backend.width(width), *(t.stride(2) for t in tensors if t.shape[2] > 1), 1)
    most = max(1, (ELEMENTS - 1) // each)
    return most - most % backend.granule or most


class _Part(NamedTuple):
    batch: slice
    rows: slice
    keys: slice
    kind: str
    new_rows: bool
    """Whether it is the first part of these rows."""
    new_keys: bool
    """Whether it is the first part of these keys."""


def _parts(backend: Backend, kind: str, tensors: Sequence[Tensor], q: Tensor, k: Tensor) -> list[_Part]:
    """What a call `causal` or `full` is cut into, in order; empty where it stays whole."""
    (batch, _, rows, _), keys, most = q.shape, k.shape[2], most_rows(backend, tensors)
    tail = 0
    if kind == "causal" and rows == keys >= LONG and rows % backend.granule:
        tail = rows % max(backend.granule, 1 << (rows.bit_length() - 7))  # 64 shapes for each doubling of the length
    if batch * max(rows, keys) <= most and not tail:
        return []
    whole = rows - tail
    step = -(-whole // -(-whole // most))  # equal parts: few shapes
    bounds = [*range(0, whole, min(most, step + -step % backend.granule)), whole, *([rows] if tail else [])]
    found, many = [], max(1, most // max(rows, keys))
    for b in range(0, batch, many):
        for lo, hi in pairwise(bounds):
            group, mine = slice(b, min(b + many, batch)), slice(lo, hi)
            before = keys if kind == "full" else keys - rows + lo
            if kind == "causal":
                found.append(_Part(group, mine, slice(before, before + hi - lo), kind, True, True))
            for at in range(0, before, most):
                first = kind == "full"
                seen = slice(at, min(at + most, before))
                found.append(_Part(group, mine, seen, "full", first and at == 0, first and lo == 0))
    return found


def _room(x: Tensor, width: int) -> Tensor:
    """A tensor like x [B, H, S, D] with heads of this width, not yet written; the heads of a token lie together, so
    that a part of the rows does not span the others."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


def _near(x: Tensor) -> Tensor:
    """x [B, H, S, D], or a copy of it where it spans too many elements, most of which are not its own."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return x if span < ELEMENTS else x.transpose(1, 2).contiguous().transpose(1, 2)


def _taking(backend: Backend, q: Tensor, k: Tensor) -> Backend:
    """The kernel for one call: for a short or ragged shape not one that is built for each shape."""
    ragged = q.shape[2] % backend.granule or k.shape[2] % backend.granule
    return BACKENDS[backend.packed_by] if ragged else backend


def forward(backend: Backend, q: Tensor, k: Tensor, v: Tensor, rule: Rule, kind: str) -> tuple[Tensor, Tensor]:
    """One call -> (out [B, H, S, V], lse [B, H, S]).

    Args:
        kind: `causal`, `full` or `upper` (`spans.Piece`).
    """
    if kind == "upper":  # backwards, this triangle is a causal one
        out, lse = forward(backend, q.flip(2), k.flip(2), v.flip(2), rule, "causal")
        return out.flip(2), lse.flip(2)
    assert q.shape[0] == k.shape[0] == v.shape[0]  # not every kernel looks
    if parts := _parts(backend, kind, (q, k, v), q, k):
        out = _room(q, v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in parts:
            to, to_lse = out[part.batch, :, part.rows], lse[part.batch, :, part.rows]
            keys, values = (t[part.batch, :, part.keys] for t in (k, v))
            made, made_lse = forward(backend, q[part.batch, :, part.rows], keys, values, rule, part.kind)
            if part.new_rows:
                to.copy_(made)
                to_lse.copy_(made_lse)
            else:
                to_lse.copy_(merge(to, to_lse, made, made_lse)[1])
        return out, lse
    backend, width = _taking(backend, q, k), v.shape[-1]
    q, k, v = padded(backend, *(_near(t) for t in (q, k, v)))
    out, lse = backend.forward(q, k, v, rule.scale, kind == "causal", **rule.given)
    return out[..., :width], lse


def backward(backend: Backend, dout: Tensor, kept: Attended, rule: Rule, kind: str) -> tuple[Tensor, ...]:
    """Gradients of one call -> (dq, dk, dv). The parts of a call that is cut are added up in the tensors' dtype: they
    are few."""
    if kind == "upper":
        turned = Attended(*(t.flip(2) for t in kept))
        return tuple(g.flip(2) for g in backward(backend, dout.flip(2), turned, rule, "causal"))
    q, k, v, out, lse = kept
    assert q.shape[0] == k.shape[0] == v.shape[0]
    if parts := _parts(backend, kind, (q, k, v, out, dout), q, k):
        sums: list[Tensor] = []
        for part in parts:
            rows, keys = (part.batch, slice(None), part.rows), (part.batch, slice(None), part.keys)
            mine = Attended(q[rows], k[keys], v[keys], out[rows], lse[rows])
            grads = backward(backend, dout[rows], mine, rule, part.kind)
            sums = sums or [_room(t, t.shape[-1]) for t in (q, k, v)]  # when the kernel's own memory is free again
            for total, at, new, g in zip(
                sums, (rows, keys, keys), (part.new_rows, part.new_keys, part.new_keys), grads
            ):
                total[at].copy_(g) if new else total[at].add_(g)
        return tuple(sums)
    backend, widths = _taking(backend, q, k), (q.shape[-1], k.shape[-1], v.shape[-1])
    dout, q, k, v, out = padded(backend, *(_near(t) for t in (dout, q, k, v, out)))
    grads = backend.backward(dout, Attended(q, k, v, out, lse), rule.scale, kind == "causal", **rule.given)
    return tuple(g[..., :width] for g, width in zip(grads, widths))
