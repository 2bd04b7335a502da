"""A stand-in for FlashAttention 2 in plain PyTorch, for stacks whose sequence parallelism knows no other attention.

Shape legend: B batch, T tokens of all documents, S tokens of a sample, H heads, D width of a head.
"""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(  # noqa: PLR0913 - transformers asks for FlashAttention's own parameters
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of [T, H, D], within each document."""
    ends_q, ends_k = itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist())
    how = softmax_scale, causal, window_size, softcap
    return torch.cat([_attend(q[a:b], k[c:d], v[c:d], *how) for (a, b), (c, d) in zip(ends_q, ends_k)])


def flash_attn_func(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of [B, S, H, D]."""
    return torch.stack([_attend(*one, softmax_scale, causal, window_size, softcap) for one in zip(q, k, v)])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int], softcap: float
) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # The last query and the last key are at the same position; a causal query sees no later key, however wide a window.
    after = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    left, right = window[0], 0 if causal else window[1]
    hidden = (after > right) if right >= 0 else torch.zeros_like(after, dtype=torch.bool)
    if left >= 0:
        hidden |= after < -left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype), v)


def stand_in(model: Any) -> None:
    """Let a model run with `flash_attention_2` on a CPU, unless transformers refuses that for its type."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    utils: Any = modeling_flash_attention_utils
    anything: Any = PreTrainedModel
    functions = flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
    utils._lazy_imports = lambda *_, **__: functions
    anything._flash_attn_import_error = lambda *_, **__: None
    utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"] = ((lambda: True, "cpu"),)
    model.set_attn_implementation("flash_attention_2")


def _varlen_forward(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None,
    return_softmax: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """In place of FlashAttention's `_flash_attn_varlen_forward`. The logsumexp is empty: backward makes its own."""
    window = window_size_left, window_size_right
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0, dropout_p, softmax_scale, causal, window, softcap
    )
    return out, q.new_zeros(q.shape[1], len(q), dtype=torch.float32), None, None


def _varlen_backward(  # noqa: PLR0913
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
) -> None:  # fmt: skip
    """In place of FlashAttention's `_flash_attn_varlen_backward`, which writes the gradients into dq, dk and dv."""
    window = window_size_left, window_size_right
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        made = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0, dropout_p, softmax_scale, causal, window, softcap
        )
        for kept, grad in zip((dq, dk, dv), torch.autograd.grad(made, (q, k, v), dout)):
            kept.copy_(grad)


def stand_in_for_package() -> None:
    """Put in a package `flash_attn` with what ring-flash-attn takes from it. Only what packed samples need runs."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    made: Any = interface
    made._flash_attn_forward = made._flash_attn_backward = None
    made._flash_attn_varlen_forward, made._flash_attn_varlen_backward = _varlen_forward, _varlen_backward
    sys.modules.update({package.__name__: package, interface.__name__: interface})
    anywhere: Any = torch.cuda
    anywhere.current_device = lambda: "cpu"  # where Axolotl puts the offsets of documents
