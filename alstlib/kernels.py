"""Core attention as (output, logsumexp) kernels: one interface over PyTorch's operators, flash-attn and the oracle.

Shape legend: B batch, S sequence, H query heads, K key/value heads (H a multiple of K), D head width.
q [B, H, S, D]; k, v [B, K, S, D]; out [B, H, S, D]; lse [B, H, S] (logsumexp of the scaled scores, fp32). Any strides
with a contiguous last dimension. Attention is causal inside each document, and nothing of shape [S, S] is made
(except by `eager`, which is there for checking).

Documents are offsets into the flattened [B * S] batch (0 first, B * S last); None makes every batch row one document.
They are attended one after the other: exact for every kernel, and the cost of a document is its own square.

Keeping the logsumexp is what lets a backward run without a second forward (DistFlashAttn, arXiv 2310.03294).
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alstlib import reference

aten = torch.ops.aten
Documents = Sequence[int] | None


@dataclass(frozen=True)
class Backend:
    """A pair of kernels, forward(q, k, v, scale, causal) -> (out, lse) and backward(dout, q, k, v, out, lse, scale,
    causal) -> (dq, dk, dv); causal with as many queries as keys. `out` and `lse` may be those over more keys than `k`
    holds: then the gradients are these keys' share."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    bottom_right: bool = False
    """Forward takes fewer causal queries than keys, as the last rows."""


KEYS_PER_QUERY = 4
"""Keys in one call of a backward over chunks, for each query row in it."""


# ----- PyTorch on CPU: native grouped-query attention, lse [B, H, S]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)


# ----- PyTorch on CUDA


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    out, lse, *_ = aten._flash_attention_forward(qt, kt, vt, None, None, rows, keys, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    rows, keys = q.shape[2], k.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's state, unread without dropout
    grads = aten._flash_attention_backward(
        dt, qt, kt, vt, ot, lse.contiguous(), None, None, rows, keys, 0.0, causal, seed, seed.new_empty(0), scale=scale
    )
    return tuple(g.transpose(1, 2) for g in grads)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = lse.contiguous()[..., None]
    rows, keys = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, rows, keys, 0.0, causal, scale=scale
    )


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeat(k, groups), _repeat(v, groups), None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the kernel pads its logsumexp to a multiple of 32 rows


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    padded = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    need = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, _repeat(k, groups), _repeat(v, groups), None, out, padded, seed, seed, 0.0, need, causal, scale=scale
    )
    if groups > 1:
        dk, dv = (g.unflatten(1, (heads // groups, groups)).sum(2) for g in (dk, dv))
    return dq, dk, dv


# ----- flash-attn 2, where it is installed


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_forward(qt, kt, vt, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def _fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t) for t in (qt, kt, vt))
    lse = lse.contiguous()
    _flash_attn_backward(
        dt.contiguous(), qt, kt, vt, ot, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False, None
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# ----- the plain formulas as a kernel: [S, S] is made, for checking


def _eager_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return reference.attention(q, k, v, scale=scale, causal=causal)


def _eager_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.attention_backward(dout, q, k, v, out, lse, scale=scale, causal=causal)


BACKENDS = {
    b.name: b
    for b in (
        Backend("cpu", _cpu_forward, _cpu_backward),
        Backend("cudnn", _cudnn_forward, _cudnn_backward),
        Backend("flash", _flash_forward, _flash_backward),
        Backend("efficient", _efficient_forward, _efficient_backward),
        Backend("flash_attention_2", _fa2_forward, _fa2_backward, bottom_right=True),
        Backend("eager", _eager_forward, _eager_backward),
    )
}


def choose_backend(attention: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The kernel for `attention`: `sdpa` picks PyTorch's best for the hardware and dtype; any other name is taken
    at its word.

    Raises:
        ValueError: an unknown name, or a kernel that cannot run here, with what can.
    """
    if attention == "sdpa":
        if device.type != "cuda":
            return BACKENDS["cpu"]
        if dtype not in (torch.float16, torch.bfloat16) or head_dim > 256:
            return BACKENDS["efficient"]
        major, _ = torch.cuda.get_device_capability(device)
        return BACKENDS["cudnn" if major >= 9 and head_dim <= 128 and head_dim % 8 == 0 else "flash"]
    if attention not in BACKENDS:
        raise ValueError(f"attention='{attention}' is unknown; known: sdpa, {', '.join(BACKENDS)}")
    if attention == "flash_attention_2":
        if importlib.util.find_spec("flash_attn") is None:
            raise ValueError("attention='flash_attention_2' needs the package flash-attn; 'sdpa' needs nothing")
        if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"attention='{attention}' needs CUDA and fp16 or bf16, not {device.type} and {dtype}")
    elif attention != "eager" and (attention == "cpu") != (device.type == "cpu"):
        raise ValueError(f"attention='{attention}' does not run on {device.type}; attention='sdpa' chooses what does")
    return BACKENDS[attention]


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
