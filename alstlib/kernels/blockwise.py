"""Attention computed block by block with matrix products, for what fused kernels do not compute, on any device and
dtype.

Shape legend: B batch, S queries, N keys, H query heads, K key/value heads, G = H / K, D and V widths of keys and
values, T queries or keys of a block.

It takes soft caps (scores c * tanh(s / c), Gemma 2) and values of another width than the keys. Scores exist for one
block [T, T] at a time, in fp32 (fp64 for fp64); everything is summed there. The algorithm is FlashAttention-2's (arXiv
2307.08691) with PyTorch's matrix products for its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from alstlib.base.recompute import sum_dtype
from alstlib.base.sizing import kernel_device, tiles_of
from alstlib.base.types import OutputAndLse
from alstlib.kernels.rule import Attended

BLOCK_BYTES = 32 * 2**20
"""Bytes of one block of scores in fp32 over all heads, which bounds the temporary memory."""


def _block(q: Tensor) -> int:
    """Queries and keys of a block."""
    side = math.isqrt(BLOCK_BYTES // (4 * q.shape[0] * q.shape[1]))
    return max(64, min(1024, side - side % 64))


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a [B, K, m, n] @ b [B, K, n, o] summed and given in `wide`."""
    if a.dtype == b.dtype == wide:
        return a @ b
    if kernel_device(a.device.type)[0] == "cuda" and a.dtype == b.dtype:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=wide).unflatten(0, a.shape[:2])
    return a.to(wide) @ b.to(wide)


def _scores(
    q: Tensor, k: Tensor, at: slice, step: int, scale: float, causal: bool, softcap: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of keys of k [B, K, N, D], and the capped and masked scores [B, K, G * t, T] of q [B, K, G, t, D], which
    are the queries at these places, with them."""
    for ks in tiles_of(min(k.shape[2], at.stop) if causal else k.shape[2], step):
        s = _product(q.flatten(2, 3), k[:, :, ks].transpose(-1, -2), sum_dtype(q)).mul_(scale)
        if softcap is not None:
            s = s.div_(softcap).tanh_().mul_(softcap)
        if causal and ks.stop > at.start + 1:  # some queries must not attend to some of them
            queries, keys = (torch.arange(places.start, places.stop, device=q.device) for places in (at, ks))
            s.unflatten(2, q.shape[2:4]).masked_fill_(keys > queries[:, None], float("-inf"))
        yield ks, s


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None) -> OutputAndLse:
    """q [B, H, S, D], k [B, K, N, D], v [B, K, N, V] -> out [B, H, S, V], lse [B, H, S] (fp32)."""
    grouped, wide = q.unflatten(1, (k.shape[1], -1)), sum_dtype(q)
    out = q.new_empty(*grouped.shape[:4], v.shape[-1])
    lse = q.new_empty(out.shape[:4], dtype=wide)
    for at in tiles_of(q.shape[2], step := _block(q)):
        mine = grouped[:, :, :, at]
        size = (*mine.shape[:2], mine.shape[2] * mine.shape[3])
        total, norm = (q.new_zeros(*size, n, dtype=wide) for n in (v.shape[-1], 1))
        top = torch.full_like(norm, float("-inf"))
        for ks, s in _scores(mine, k, at, step, scale, causal, softcap):
            high = torch.maximum(top, s.amax(-1, keepdim=True))
            fade = (top - high).exp_()
            top, p = high, s.sub_(high).exp_()
            norm = norm * fade + p.sum(-1, keepdim=True)
            total = total.mul_(fade).add_(_product(p.to(v.dtype), v[:, :, ks], wide))
        out[:, :, :, at] = (total / norm).unflatten(2, mine.shape[2:4])
        lse[:, :, :, at] = (top + norm.log()).squeeze(-1).unflatten(2, mine.shape[2:4])
    return out.flatten(1, 2), lse.flatten(1, 2)


def backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients -> dq, dk, dv, of the dtypes of q, k and v."""
    q, k, v, out, lse = kept
    wide = sum_dtype(q)
    grouped, douts, outs, lses = (t.unflatten(1, (k.shape[1], -1)) for t in (q, dout, out, lse.to(wide)))
    dq = torch.empty_like(grouped)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for at in tiles_of(q.shape[2], step := _block(q)):
        mine, grad = grouped[:, :, :, at], douts[:, :, :, at].flatten(2, 3)
        delta = (grad.to(wide) * outs[:, :, :, at].flatten(2, 3)).sum(-1, keepdim=True)
        norm = lses[:, :, :, at].flatten(2, 3)[..., None]
        total = q.new_zeros(*grad.shape[:3], q.shape[-1], dtype=wide)
        for ks, s in _scores(mine, k, at, step, scale, causal, softcap):
            slope = None if softcap is None else 1 - (s / softcap).square().nan_to_num_(posinf=1.0)
            p = s.sub_(norm).exp_()
            dv[:, :, ks] += _product(p.to(v.dtype).transpose(-1, -2), grad, wide)
            ds = _product(grad, v[:, :, ks].transpose(-1, -2), wide).sub_(delta).mul_(p).mul_(scale)
            if slope is not None:
                ds.mul_(slope)
            ds = ds.to(q.dtype)
            total += _product(ds, k[:, :, ks], wide)
            dk[:, :, ks] += _product(ds.transpose(-1, -2), mine.flatten(2, 3), wide)
        dq[:, :, :, at] = total.unflatten(2, mine.shape[2:4])
    return dq.flatten(1, 2), dk.to(k.dtype), dv.to(v.dtype)
