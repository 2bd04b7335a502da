"""Ulysses attention: exchange, core attention on whole sequences of some heads, exchange back (ALST, section 3.2).

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D width.

One autograd function holds the exchange and the kernel, so that backward moves only what it needs: with attention
recomputed under checkpointing it keeps q, k, v, output and logsumexp in head layout and exchanges dO, dq, dk, dv. With
the output *saved* by the first pass (`Saved`), the recompute runs neither kernel nor exchange, and backward exchanges
q, k, v and dO together. The saved output itself is not exchanged: a kernel's backward reads it only through
delta = rowsum(dO * O), one number for each row and head, and O' = delta / |dO|^2 * dO has the same delta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alstlib.alltoall import Exchange, check_heads
from alstlib.groups import SPContext
from alstlib.kernels import Backend, Documents, attention_backward, attention_forward, choose_backend
from alstlib.offload import Saved
from alstlib.tiled import default_tile


class UlyssesAttention:
    """Causal attention over a sequence that is sharded over an SP group.

    Args:
        ctx: the mesh; with sp = 1 this is plain attention.
        attention: `sdpa`, `flash_attention_2`, `eager`, or the name of one kernel of `kernels.BACKENDS`.
    """

    def __init__(self, ctx: SPContext, attention: str = "sdpa") -> None:
        self.exchange = Exchange(ctx.sp_group)
        self.attention = attention
        self.backend_name = ""
        """The kernel that ran last."""
        self.forward_calls = 0
        """Number of times that core attention ran forward."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        documents: Documents = None,
        saved: Saved | None = None,
        release: bool = False,
    ) -> Tensor:
        """q [B, H, L, D], k and v [B, K, L, D], this rank's rows after RoPE -> [B, H, L, D].

        Args:
            scale: of the scores; None for D ** -0.5.
            documents: global offsets into the flattened [B * S] batch; None makes every batch row one document.
            saved: where a checkpoint's first pass leaves the output, and where its recompute takes it from.
            release: in backward, let each tensor go as soon as it has been read. For a recompute, whose graph is
                gone after its one backward; otherwise tensors are kept as autograd keeps them (and its hooks see them).

        Raises:
            ValueError: heads that the SP degree cannot split, shapes that do not belong together, a kernel that
                cannot run here.
        """
        self.check(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return _Attention.apply(q, k, v, self, float(scale), documents, saved, release)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError for shapes that do not belong together or heads that the ranks cannot split."""
        if q.ndim != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
            shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
            raise ValueError(f"attention needs q [B, H, L, D] and k, v [B, K, L, D] of one width, got {shapes}")
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
        check_heads(q.shape[1], k.shape[1], self.exchange.ranks)

    def backend_for(self, q: Tensor) -> Backend:
        """The kernel for this tensor's device, dtype and head width."""
        backend = choose_backend(self.attention, q.device, q.dtype, q.shape[-1])
        self.backend_name = backend.name
        return backend

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
        """q, k, v and tensors with q's heads, from sequence to head layout, in as few exchanges as possible."""
        if k.shape[1] % self.exchange.ranks == 0:
            return self.exchange.to_heads(q, k, v, *more)
        q, *rest = self.exchange.to_heads(q, *more)
        return [q, *self.exchange.shared_to_heads(k, v), *rest]

    def keys_to_heads(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """k and v alone, from sequence to head layout."""
        split = k.shape[1] % self.exchange.ranks == 0
        return self.exchange.to_heads(k, v) if split else self.exchange.shared_to_heads(k, v)

    def grads_to_seq(self, dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int) -> list[Tensor]:
        if kv_heads % self.exchange.ranks == 0:
            return self.exchange.to_seq(dq, dk, dv)
        return [*self.exchange.to_seq(dq), *self.exchange.shared_to_seq(kv_heads, dk, dv)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        op: UlyssesAttention,
        scale: float,
        documents: Documents,
        saved: Saved | None,
        release: bool,
    ) -> Tensor:
        ctx.op, ctx.scale, ctx.documents, ctx.kv_heads, ctx.release = op, scale, documents, k.shape[1], release
        ctx.backend = op.backend_for(q)
        ctx.from_saved = saved is not None and saved.replaying
        if saved is not None and saved.replaying:
            out, lse = saved.take()
            _keep(ctx, q, k, v, out, lse)
            return out.view_as(out)  # a tensor of its own: autograd must not mark the saved one as an output
        qh, kh, vh = op.to_heads(q, k, v)
        out_heads, lse = attention_forward(ctx.backend, qh, kh, vh, scale=scale, documents=documents)
        op.forward_calls += 1
        (out,) = op.exchange.to_seq(out_heads)
        if saved is not None:
            saved.tensors.append((out, lse))
        if any(ctx.needs_input_grad):
            _keep(ctx, qh, kh, vh, out_heads, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        op: UlyssesAttention = ctx.op
        q, k, v, out, lse = ctx.__dict__.pop("kept") if ctx.release else ctx.saved_tensors
        if not ctx.from_saved:
            (dout,) = op.exchange.to_heads(dout)
        elif op.exchange.ranks > 1:
            (delta,) = op.exchange.to_heads(row_delta(dout, out))
            q, k, v, dout = op.to_heads(q, k, v, dout)
            out = output_with(delta, dout)
        grads = attention_backward(ctx.backend, dout, q, k, v, out, lse, scale=ctx.scale, documents=ctx.documents)
        del dout, q, k, v, out, lse
        return (*op.grads_to_seq(*grads, ctx.kv_heads), None, None, None, None, None)


def _keep(ctx: Any, *tensors: Tensor) -> None:
    if ctx.release:
        ctx.kept = [t.detach() for t in tensors]  # detached: the output itself would keep the graph alive
    else:
        ctx.save_for_backward(*tensors)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out) in fp32, [B, H, S, 1]: all that a kernel's backward reads of its output."""
    wide = torch.promote_types(dout.dtype, torch.float32)
    delta = dout.new_empty(*dout.shape[:3], 1, dtype=wide)
    for rows in _row_tiles(dout):
        torch.sum(dout[rows].to(wide) * out[rows], -1, keepdim=True, out=delta[rows])
    return delta


def output_with(delta: Tensor, dout: Tensor) -> Tensor:
    """A stand-in output whose rowsum(dO * O) is `delta`; zero where dO is (then delta is zero too)."""
    made = torch.empty_like(dout)
    for rows in _row_tiles(dout):
        part = dout[rows].to(delta.dtype)
        norm = torch.linalg.vecdot(part, part)[..., None]
        made[rows] = part * torch.where(norm > 0, delta[rows] / norm, 0.0)
    return made


def _row_tiles(x: Tensor) -> list[tuple[slice, slice, slice]]:
    """Slices of x [B, H, S, D] that cut S, so that fp32 intermediates are small."""
    step = default_tile(x.shape[1] * x.shape[3], 4, x.device)
    return [(slice(None), slice(None), slice(lo, lo + step)) for lo in range(0, x.shape[2], step)]
