"""Stand-ins for CUDA's attention operators beneath PyTorch's ring attention, which knows no others.

PyTorch's own ring (`_templated_ring_attention`, forward and backward) sends keys and values and merges the parts; only
the attention of one part is plain PyTorch here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def _probabilities(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, scores.logsumexp(-1)


def _forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """In place of `aten._scaled_dot_product_flash_attention`: the output, and the logsumexp."""
    scores, lse = _probabilities(query, key, is_causal, scale)
    return ((scores - lse[..., None]).exp() @ value.float()).to(query.dtype), lse


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """In place of `aten._scaled_dot_product_flash_attention_backward`: out and logsumexp are those of all keys."""
    scores, _ = _probabilities(query, key, is_causal, scale)
    p, g = (scores - logsumexp[..., None]).exp(), grad_out.float()
    ds = p * (g @ value.float().transpose(-1, -2) - (g * out.float()).sum(-1, keepdim=True)) * scale
    return ds @ key.float(), ds.transpose(-1, -2) @ query.float(), p.transpose(-1, -2) @ g


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, is_causal: bool, scale: float) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        ring: Any = _attention._templated_ring_attention
        out, lse = ring(group, 2, _forward, q, k, v, is_causal=is_causal, scale=scale)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = group, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, out, lse = ctx.saved_tensors
        group, is_causal, scale = ctx.how
        ring: Any = _attention._templated_ring_attention_backward
        made = ring(group, 2, _backward, grads[0].contiguous(), "grad_out", q, k, v, out, lse, is_causal, scale=scale)
        return *made[:3], None, None, None


def stand_in() -> None:
    """Let `scaled_dot_product_attention` of tensors that a ring has spread run on a CPU."""
    original = F.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not isinstance(query, DTensor):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None:  # as PyTorch's ring answers
            raise NotImplementedError("attn_bias is not supported yet")
        mesh, placements = query.device_mesh, query.placements
        q, k, v = (t.to_local().contiguous() for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = _Ring.apply(q, k, v, mesh.get_group(), is_causal, scale or 1 / math.sqrt(q.shape[-1]))
        return DTensor.from_local(out, mesh, placements, run_check=False)

    F.scaled_dot_product_attention = scaled_dot_product_attention
