"""The packages flash-attn 2, 3 and 4, where they are installed, as kernels of `backends`, and their layout of sequences
of different lengths.

Shape legend: B batch, S queries, H query heads, D head width. Their tensors are [B, S, H, D] or, for variable
lengths, [B * S, H, D]; causal is aligned at the end. Scores s become c * tanh(s / c) with a `softcap` c. The test
`tests/cuda/test_flash_attn.py` says which releases were read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.rule import Attended


def flat(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B * S, H, D], as kernels for variable lengths take it."""
    return x.transpose(1, 2).flatten(0, 1)


def unflat(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def flat_lse(lse: Tensor) -> Tensor:
    """[B, H, S] -> [H, B * S]."""
    return lse.transpose(0, 1).flatten(1).contiguous()


def unflat_lse(lse: Tensor, like: Tensor) -> Tensor:
    """[H, B * S] -> [B, H, S]."""
    return lse.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)


def sides(window: int | None) -> tuple[int, int]:
    return (-1, -1) if window is None else (window - 1, 0)


def fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_forward(qt, kt, vt, 0.0, scale, causal, -1, -1, softcap or 0.0, None, False)
    return out.transpose(1, 2), lse


def fa2_backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    q, k, v, out, lse = kept
    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t) for t in (qt, kt, vt))
    lse = lse.contiguous()
    _flash_attn_backward(
        dt.contiguous(),
        qt,
        kt,
        vt,
        ot,
        lse,
        dq,
        dk,
        dv,
        0.0,
        scale,
        causal,
        -1,
        -1,
        softcap or 0.0,
        None,
        False,
        None,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def fa2_packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    left, right = sides(window)
    out, lse, *_ = _flash_attn_varlen_forward(
        flat(q), flat(k), flat(v), offsets, offsets, longest, longest, 0.0, scale, True, left, right, softcap or 0.0
    )
    return unflat(out, q), unflat_lse(lse, q)


def fa2_packed_backward(
    dout: Tensor,
    kept: Attended,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    q, k, v, out, lse = kept
    left, right = sides(window)
    dt, qt, kt, vt, ot = (flat(t) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (qt, kt, vt))
    _flash_attn_varlen_backward(
        dt, qt, kt, vt, ot, flat_lse(lse), dq, dk, dv, offsets, offsets, longest, longest, 0.0, scale, True, left,
        right, softcap or 0.0, None, False,
    )  # fmt: skip
    return unflat(dq, q), unflat(dk, k), unflat(dv, v)


def fa3_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_forward(qt, kt, vt, softmax_scale=scale, causal=causal, softcap=softcap or 0.0)
    return out.transpose(1, 2), lse


def fa3_backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward

    q, k, v, out, lse = kept
    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (qt, kt, vt))
    _flash_attn_backward(
        dt,
        qt,
        kt,
        vt,
        ot,
        lse.contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=causal,
        softcap=softcap or 0.0,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def fa3_packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    left, right = sides(window)
    out, lse, *_ = _flash_attn_forward(
        flat(q), flat(k), flat(v), cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
        max_seqlen_k=longest, softmax_scale=scale, causal=True, window_size_left=left, window_size_right=right,
        softcap=softcap or 0.0,
    )  # fmt: skip
    return unflat(out, q), unflat_lse(lse, q)


def fa3_packed_backward(
    dout: Tensor,
    kept: Attended,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward

    q, k, v, out, lse = kept
    left, right = sides(window)
    dt, qt, kt, vt, ot = (flat(t) for t in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (qt, kt, vt))
    _flash_attn_backward(
        dt, qt, kt, vt, ot, flat_lse(lse), cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
        max_seqlen_k=longest, dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=True, window_size_left=left,
        window_size_right=right, softcap=softcap or 0.0,
    )  # fmt: skip
    return unflat(dq, q), unflat(dk, k), unflat(dv, v)


def fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(qt, kt, vt, softmax_scale=scale, causal=causal, softcap=softcap, return_lse=True)
    return out.transpose(1, 2), lse


def fa4_backward(
    dout: Tensor, kept: Attended, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, lse = kept
    dt, qt, kt, vt, ot = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv, *_ = _flash_attn_bwd(
        qt, kt, vt, ot, dt, lse.contiguous(), softmax_scale=scale, causal=causal, softcap=softcap or 0.0
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _fa4_packed(offsets: Tensor, longest: int, window: int | None) -> dict[str, Any]:
    """How flash-attn 4 is told of documents and a window."""
    return {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "causal": True, "window_size_left": None if window is None else window - 1,
    }  # fmt: skip


def fa4_packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    packed = _fa4_packed(offsets, longest, window)
    out, lse, *_ = _flash_attn_fwd(
        flat(q), flat(k), flat(v), softmax_scale=scale, softcap=softcap, return_lse=True, **packed
    )
    return unflat(out, q), unflat_lse(lse, q)


def fa4_packed_backward(
    dout: Tensor,
    kept: Attended,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, lse = kept
    dt, qt, kt, vt, ot = (flat(t) for t in (dout, q, k, v, out))
    packed = _fa4_packed(offsets, longest, window)
    dq, dk, dv, *_ = _flash_attn_bwd(
        qt, kt, vt, ot, dt, flat_lse(lse), softmax_scale=scale, softcap=softcap or 0.0, **packed
    )
    return unflat(dq, q), unflat(dk, k), unflat(dv, v)
