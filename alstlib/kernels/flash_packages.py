"""The packages flash-attn 2, 3 and 4, where they are installed, as kernels of `backends`, and their layout of sequences
of different lengths.

Shape legend: B batch, S queries, H query heads, D head width. Their tensors are [B, S, H, D] or, for variable
lengths, [B * S, H, D]; causal is aligned at the end. Scores s become c * tanh(s / c) with a `softcap` c. With `packed`
one call takes all documents. The test `tests/cuda/test_flash_attn.py` says which releases were read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.rule import Attended, Packed


def to_rows(packed: Packed | None, *tensors: Tensor) -> list[Tensor]:
    """Tensors [B, H, S, D] as [B, S, H, D], or for variable lengths as [B * S, H, D]."""
    rows = [t.transpose(1, 2) for t in tensors]
    return rows if packed is None else [t.flatten(0, 1) for t in rows]


def to_heads(packed: Packed | None, rows: Tensor, like: Tensor) -> Tensor:
    """The way back, for the batch and the length of `like` [B, H, S, D]."""
    return (rows if packed is None else rows.unflatten(0, like.shape[::2][:2])).transpose(1, 2)


def lse_to_rows(packed: Packed | None, lse: Tensor) -> Tensor:
    """[B, H, S], or for variable lengths [H, B * S], contiguous."""
    return (lse if packed is None else lse.transpose(0, 1).flatten(1)).contiguous()


def lse_to_heads(packed: Packed | None, lse: Tensor, like: Tensor) -> Tensor:
    """The way back, for the batch and the length of `like` [B, H, S, D]."""
    return lse if packed is None else lse.unflatten(1, like.shape[::2][:2]).transpose(0, 1)


def lengths(packed: Packed | None) -> tuple[Any, ...]:
    """Offsets of the queries and of the keys, and the longest of each; nothing without `packed`."""
    return () if packed is None else (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)


def sides(packed: Packed | None) -> tuple[int, int]:
    """Keys of a window before and after a query's own; -1 for all."""
    return (-1, -1) if packed is None or packed.window is None else (packed.window - 1, 0)


def _named(packed: Packed | None) -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths(packed)))


def fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

    run = _flash_attn_forward if packed is None else _flash_attn_varlen_forward
    rule = (0.0, scale, causal, *sides(packed), softcap or 0.0, None, False)
    out, lse, *_ = run(*to_rows(packed, q, k, v), *lengths(packed), *rule)
    return to_heads(packed, out, q), lse_to_heads(packed, lse, q)


def fa2_backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward

    run = _flash_attn_backward if packed is None else _flash_attn_varlen_backward
    rows, grads = _for_backward(packed, dout, kept)
    rule = (0.0, scale, causal, *sides(packed), softcap or 0.0, None, False)
    run(*rows, lse_to_rows(packed, kept.lse), *grads, *lengths(packed), *rule)
    return tuple(to_heads(packed, g, t) for g, t in zip(grads, kept))


def _for_backward(packed: Packed | None, dout: Tensor, kept: Attended) -> tuple[list[Tensor], list[Tensor]]:
    """dout, q, k, v and out as rows, and room for the gradients of q, k and v."""
    rows = to_rows(packed, dout, *kept[:4])
    return rows, [torch.empty_like(t, memory_format=torch.contiguous_format) for t in rows[1:4]]


def fa3_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn_interface import _flash_attn_forward

    left, right = sides(packed)
    out, lse, *_ = _flash_attn_forward(
        *to_rows(packed, q, k, v), softmax_scale=scale, causal=causal, softcap=softcap or 0.0, window_size_left=left,
        window_size_right=right, **_named(packed),
    )  # fmt: skip
    return to_heads(packed, out, q), lse_to_heads(packed, lse, q)


def fa3_backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    from flash_attn_interface import _flash_attn_backward

    (left, right), (rows, grads) = sides(packed), _for_backward(packed, dout, kept)
    _flash_attn_backward(
        *rows, lse_to_rows(packed, kept.lse), **dict(zip(("dq", "dk", "dv"), grads)), softmax_scale=scale,
        is_causal=causal, softcap=softcap or 0.0, window_size_left=left, window_size_right=right, **_named(packed),
    )  # fmt: skip
    return tuple(to_heads(packed, g, t) for g, t in zip(grads, kept))


def _fa4_rule(packed: Packed | None, scale: float, causal: bool) -> dict[str, Any]:
    """Arguments that both functions of flash-attn 4 take by name."""
    window = None if packed is None or packed.window is None else packed.window - 1
    return {"softmax_scale": scale, "causal": causal, "window_size_left": window, **_named(packed)}


def fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_fwd

    rows, rule = to_rows(packed, q, k, v), _fa4_rule(packed, scale, causal)
    out, lse, *_ = _flash_attn_fwd(*rows, softcap=softcap, return_lse=True, **rule)
    return to_heads(packed, out, q), lse_to_heads(packed, lse, q)


def fa4_backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    upstream, *rows = to_rows(packed, dout, *kept[:4])
    lse, rule = lse_to_rows(packed, kept.lse), _fa4_rule(packed, scale, causal)
    grads = _flash_attn_bwd(*rows, upstream, lse, softcap=softcap or 0.0, **rule)
    return tuple(to_heads(packed, g, t) for g, t in zip(grads, kept[:3]))
