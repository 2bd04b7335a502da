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
    """A pair of causal kernels: forward(q, k, v, scale) -> (out, lse), backward(dout, q, k, v, out, lse, scale) ->
    (dq, dk, dv)."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# ----- PyTorch on CPU: native grouped-query attention, lse [B, H, S]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, True, scale=scale)


# ----- PyTorch on CUDA


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    size = q.shape[2]
    out, lse, *_ = aten._flash_attention_forward(qt, kt, vt, None, None, size, size, 0.0, True, False, scale=scale)
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    size = q.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's state, unread without dropout
    grads = aten._flash_attention_backward(
        dt, qt, kt, vt, ot, lse, None, None, size, size, 0.0, True, seed, seed.new_empty(0), scale=scale
    )
    return tuple(g.transpose(1, 2) for g in grads)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = lse.contiguous()[..., None]
    size = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, size, size, 0.0, True, scale=scale
    )


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeat(k, groups), _repeat(v, groups), None, True, 0.0, True, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the kernel pads its logsumexp to a multiple of 32 rows


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, size, width), groups = q.shape, q.shape[1] // k.shape[1]
    padded = torch.nn.functional.pad(lse, (0, -size % 32), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    need = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, _repeat(k, groups), _repeat(v, groups), None, out, padded, seed, seed, 0.0, need, True, scale=scale
    )
    if groups > 1:
        dk, dv = (g.reshape(batch, heads // groups, groups, size, width).sum(2) for g in (dk, dv))
    return dq, dk, dv


# ----- flash-attn 2, where it is installed


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_forward(qt, kt, vt, 0.0, scale, True, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def _fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t) for t in (qt, kt, vt))
    _flash_attn_backward(
        dt.contiguous(), qt, kt, vt, ot, lse, dq, dk, dv, 0.0, scale, True, -1, -1, 0.0, None, False, None
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# ----- the oracle as a kernel


def _eager_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return reference.attention(q, k, v, scale=scale)


def _eager_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        result, _ = reference.attention(*leaves, scale=scale)
        return torch.autograd.grad(result, leaves, dout)  # type: ignore[return-value]


BACKENDS = {
    b.name: b
    for b in (
        Backend("cpu", _cpu_forward, _cpu_backward),
        Backend("cudnn", _cudnn_forward, _cudnn_backward),
        Backend("flash", _flash_forward, _flash_backward),
        Backend("efficient", _efficient_forward, _efficient_backward),
        Backend("flash_attention_2", _fa2_forward, _fa2_backward),
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


def _document_slices(documents: Documents, batch: int, length: int) -> list[tuple[int, int, int]] | None:
    """Documents as (batch row, first, last + 1), or None where every batch row is one document."""
    if documents is None:
        return None
    offsets = [int(o) for o in documents]
    total = batch * length
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or sorted(offsets) != offsets:
        raise ValueError(f"documents={offsets[:8]} must rise from 0 to batch * sequence = {total}")
    bounds = sorted({*offsets, *range(0, total + 1, length)})
    if len(bounds) == batch + 1:
        return None
    return [(lo // length, lo % length, (hi - 1) % length + 1) for lo, hi in itertools.pairwise(bounds)]


def attention_forward(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, scale: float, documents: Documents = None
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents -> (out [B, H, S, D], lse [B, H, S] in fp32)."""
    slices = _document_slices(documents, q.shape[0], q.shape[2])
    if slices is None:
        return backend.forward(q, k, v, scale)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for b, lo, hi in slices:
        at = (slice(b, b + 1), slice(None), slice(lo, hi))
        out[at], lse[at] = backend.forward(q[at], k[at], v[at], scale)
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
    """Gradients of `attention_forward` from what it returned -> (dq, dk, dv), shaped as q, k, v."""
    slices = _document_slices(documents, q.shape[0], q.shape[2])
    if slices is None:
        return backend.backward(dout, q, k, v, out, lse, scale)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for b, lo, hi in slices:
        at = (slice(b, b + 1), slice(None), slice(lo, hi))
        dq[at], dk[at], dv[at] = backend.backward(dout[at], q[at], k[at], v[at], out[at], lse[at], scale)
    return dq, dk, dv
