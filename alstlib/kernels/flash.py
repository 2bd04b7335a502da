"""The kernels of flash-attn as pairs of functions: PyTorch's own, and those of the packages flash-attn 2, 3 and 4,
where they are installed.

Shape legend: B batch, S queries, H query heads, D head width. Their tensors are [B, S, H, D] or, for variable lengths,
[B * S, H, D]: with `packed` one call takes all documents. The test `tests/cuda/test_flash_attn.py` says which releases
of the packages were read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.base.types import OutputAndLse
from alstlib.kernels.rule import Attended, Packed

aten = torch.ops.aten


def by_token(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A pair for `backends.Backend` from two functions on tensors [B, S, H, D], which are told what `_told` names."""

    def run(q: Tensor, k: Tensor, v: Tensor, *, packed: Packed | None = None, **how: Any) -> OutputAndLse:
        out, lse, *_ = forward(*_by_token(packed, q, k, v), **_told(packed, **how))
        if packed is not None:  # [H, B * S]
            lse = lse.unflatten(1, q.shape[::2][:2]).transpose(0, 1)
        return _heads(packed, out, q), lse

    def back(dout: Tensor, kept: Attended, *, packed: Packed | None = None, **how: Any) -> tuple[Tensor, ...]:
        lse = (kept.lse if packed is None else kept.lse.transpose(0, 1).flatten(1)).contiguous()
        grads = backward(*_by_token(packed, dout, *kept[:4]), lse, **_told(packed, **how))
        return tuple(_heads(packed, g, t) for g, t in zip(grads, kept))

    return run, back


def _by_token(packed: Packed | None, *tensors: Tensor) -> list[Tensor]:
    tokens = [t.transpose(1, 2) for t in tensors]
    return tokens if packed is None else [t.flatten(0, 1) for t in tokens]


def _heads(packed: Packed | None, tokens: Tensor, like: Tensor) -> Tensor:
    """The way back, for the batch and the length of `like` [B, H, S, D]."""
    return (tokens if packed is None else tokens.unflatten(0, like.shape[::2][:2])).transpose(1, 2)


def _told(packed: Packed | None, scale: float, causal: bool, softcap: float | None = None) -> dict[str, Any]:
    """Arguments by the names that all packages know. A window is the keys before and after a query's own; -1 for
    all."""
    left, right = (-1, -1) if packed is None or packed.window is None else (packed.window - 1, 0)
    window = {"window_size_left": left, "window_size_right": right}
    told: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "softcap": softcap or 0.0, **window}
    if packed is not None:
        told |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), packed.cu_seqlens)
        told |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), packed.longest)
    return told


# ----- forward of q, k and v; backward of dout, q, k, v, out and lse


def _aten(q: Tensor, k: Tensor, told: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """PyTorch's arguments, without names and with."""
    offsets = [told.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    longest = told.get("max_seqlen_q", q.shape[1]), told.get("max_seqlen_k", k.shape[1])
    window = {name: told[name] for name in ("window_size_left", "window_size_right")}
    return [*offsets, *longest, 0.0, told["causal"]], {"scale": told["softmax_scale"], **window}


def _torch_forward(*given: Tensor, **told: Any) -> Any:
    how, named = _aten(given[0], given[1], told)
    return aten._flash_attention_forward(*given, *how, False, **named)


def _torch_backward(*given: Tensor, **told: Any) -> Any:
    how, named = _aten(given[1], given[2], told)
    seed = torch.zeros(2, dtype=torch.uint64, device=given[0].device)  # dropout's random state, unread without dropout
    return aten._flash_attention_backward(*given, *how, seed, seed.new_empty(0), **named)


def _room(given: Sequence[Tensor]) -> list[Tensor]:
    """For dq, dk and dv."""
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given[1:4]]


def _fa2_forward(*given: Tensor, **told: Any) -> Any:
    from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

    run = _flash_attn_varlen_forward if "cu_seqlens_q" in told else _flash_attn_forward
    return run(*given, dropout_p=0.0, alibi_slopes=None, return_softmax=False, **told)


def _fa2_backward(*given: Tensor, **told: Any) -> Any:
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward

    run = _flash_attn_varlen_backward if "cu_seqlens_q" in told else _flash_attn_backward
    run(*given, *(grads := _room(given)), dropout_p=0.0, alibi_slopes=None, deterministic=False, **told)
    return grads


def _fa3_forward(*given: Tensor, **told: Any) -> Any:
    from flash_attn_interface import _flash_attn_forward

    return _flash_attn_forward(*given, **told)


def _fa3_backward(*given: Tensor, causal: bool, **told: Any) -> Any:
    from flash_attn_interface import _flash_attn_backward

    dq, dk, dv = grads = _room(given)
    _flash_attn_backward(*given, dq=dq, dk=dk, dv=dv, is_causal=causal, **told)
    return grads


def _fa4_forward(*given: Tensor, softcap: float, window_size_left: int, window_size_right: int, **told: Any) -> Any:
    from flash_attn.cute.interface import _flash_attn_fwd

    left = None if window_size_left < 0 else window_size_left  # causal: no key is after a query's own
    return _flash_attn_fwd(*given, softcap=softcap or None, window_size_left=left, return_lse=True, **told)


def _fa4_backward(*given: Tensor, window_size_left: int, window_size_right: int, **told: Any) -> Any:
    from flash_attn.cute.interface import _flash_attn_bwd

    (dout, *tokens, lse), left = given, None if window_size_left < 0 else window_size_left
    return _flash_attn_bwd(*tokens, dout, lse, window_size_left=left, **told)


FLASH = by_token(_torch_forward, _torch_backward)
PACKAGES = {
    "flash_attention_2": ("flash_attn.flash_attn_interface", "flash-attn", 8, by_token(_fa2_forward, _fa2_backward)),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3", 9, by_token(_fa3_forward, _fa3_backward)),
    "flash_attention_4": ("flash_attn.cute.interface", "flash-attn-4", 9, by_token(_fa4_forward, _fa4_backward)),
}
"""Module and package of each flash-attn, the least compute capability that it needs, and its functions."""
