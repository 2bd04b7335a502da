"""The attention kernels, each as a pair of functions, and which of them run where: PyTorch's own operators on CPU and
CUDA, flash-attn 2, 3 and 4 where they are installed, and the plain formulas.

What `sdpa` chooses, and who takes the documents of a batch, and windows, in one call for variable lengths:

| device and dtype                                     | kernel      | documents and windows |
|------------------------------------------------------|-------------|-----------------------|
| CPU                                                  | cpu         | one call for each     |
| CUDA 9.0, 16 bits, width to 256 divisible by 8       | cudnn       | flash                 |
| CUDA from 10.0, the same, but width to 128           | cudnn       | flash                 |
| CUDA, 16 bits, other widths to 256 (padded to 8s)    | flash       | flash                 |
| CUDA, fp32, or wider heads                           | efficient   | one call for each     |
| soft caps, and fp64 on CUDA                          | blockwise   | one call for each     |

`auto` takes flash-attn 3 (compute capability 9 alone) or else 4 (from 9) where one is installed and has the width, and
the table where none is. These and flash-attn 2, by its name, take documents, windows and soft caps themselves. cudnn,
which is built for each shape, leaves short and ragged calls to `flash` too.

Shape legend: B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), D head width.
q, dout, out [B, H, S, D]; k, v [B, K, N, D]; lse [B, H, S] (logsumexp of the scaled scores, fp32). Any strides with a
contiguous last dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.base import reference
from alstlib.base.sizing import kernel_device, sdpa_kernel
from alstlib.base.types import OutputAndLse
from alstlib.kernels import blockwise
from alstlib.kernels.flash import FLASH, PACKAGES
from alstlib.kernels.rule import Attended
from alstlib.kernels.user_attention import UserAttention, differentiated

aten = torch.ops.aten

LONG = 65_536
"""Shortest whole sequence (tokens) that a kernel which is built for each shape computes whatever its length: from there
on most of its tokens are one call."""


@dataclass(frozen=True)
class Backend:
    """A pair of kernels, forward(q, k, v, scale=, causal=) -> (out, lse) and backward(dout, kept, scale=, causal=) ->
    (dq, dk, dv); causal with as many queries as keys. `out` and `lse` of `kept` may be those over more keys than its
    `k` holds: then the gradients are these keys' share."""

    name: str
    forward: Callable[..., Sequence[Tensor]]
    backward: Callable[..., Sequence[Tensor]]
    on: Literal["any", "cpu", "accelerator"] = "any"
    """Kind of device that it runs on. (What flash-attn's packages need, `_lacks` says.)"""
    softcap: bool = False
    """Whether both functions take `softcap=`."""
    widths: bool = False
    """Whether values may have another width than keys."""
    multiple: int = 1
    """Number to a multiple of which head widths are padded with zeros."""
    absent: tuple[int, int] = (0, 0)
    """Two widths, between which all others are padded to the second."""
    granule: int = 1
    """Number of which the queries and keys of a call must be multiples, for a kernel that is built for each shape.
    Other calls are left to `packed_by`, and so are the last tokens of a whole sequence of at least `LONG` that is no
    multiple."""
    packed_by: str = ""
    """Name of the kernel that takes all documents of a batch, and a window, in one call. Both functions of that kernel
    take `packed=` (`rule.Packed`)."""

    def width(self, width: int) -> int:
        """The width to which heads of this one are padded."""
        width += -width % self.multiple
        return self.absent[1] if self.absent[0] < width < self.absent[1] else width


# ----- PyTorch on CPU: native grouped-query attention, lse [B, H, S]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> OutputAndLse:
    return aten._scaled_dot_product_flash_attention_for_cpu(*_in_line(q, k, v), 0.0, causal, scale=scale)


def _cpu_backward(dout: Tensor, kept: Attended, scale: float, causal: bool) -> tuple[Tensor, ...]:
    *tensors, lse = kept
    heads = _in_line(dout, *tensors)  # the logsumexp is read by its strides
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse, 0.0, causal, scale=scale)


def _in_line(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where a head's numbers do not lie side by side: the kernel reads them as if they did."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


# ----- PyTorch on CUDA


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> OutputAndLse:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.reshape(q.shape[:3])


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """x [B, H, S, D] with its dimensions in memory in q's order and without gaps; a copy where they are not."""
    order = [*sorted(range(3), key=q.stride, reverse=True), 3]
    return x.permute(order).contiguous().permute([order.index(d) for d in range(4)])


def _cudnn_backward(dout: Tensor, kept: Attended, scale: float, causal: bool) -> tuple[Tensor, ...]:
    q, k, v, out, lse = kept
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    # PyTorch up to 2.13 knows a graph by the strides of q, k and v; those of dout and out must follow from them
    dout, out = _laid_out_like(q, dout), _laid_out_like(q, out)
    lse = lse.contiguous()
    lse = (lse.clone() if lse.storage_offset() % 4 else lse)[..., None]  # cuDNN wants 16 bytes
    queries, keys = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, queries, keys, 0.0, causal, scale=scale
    )


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> OutputAndLse:
    groups = q.shape[1] // k.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeat(k, groups), _repeat(v, groups), None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the kernel pads its logsumexp to a multiple of 32 queries


def _efficient_backward(dout: Tensor, kept: Attended, scale: float, causal: bool) -> tuple[Tensor, ...]:
    q, k, v, out, lse = kept
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    if out.itemsize == 2:  # the kernel takes the heads of a token to lie together, whatever the strides say
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    padded = F.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    need = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, _repeat(k, groups), _repeat(v, groups), None, out, padded, seed, seed, 0.0, need, causal, scale=scale
    )
    if groups > 1:
        dk, dv = (g.unflatten(1, (heads // groups, groups)).sum(2) for g in (dk, dv))
    return dq, dk, dv


_ALL = [
    Backend("cpu", _cpu_forward, _cpu_backward, on="cpu"),
    Backend("cudnn", _cudnn_forward, _cudnn_backward, on="accelerator", multiple=8, granule=256, widths=True,
            packed_by="flash"),
    # PyTorch since 2.11 has backward for no width between 128 and 192, but sums of dQ with a width of 160 for one
    Backend("flash", *FLASH, on="accelerator", multiple=8, absent=(128, 192), packed_by="flash"),
    Backend("efficient", _efficient_forward, _efficient_backward, on="accelerator", multiple=8),
    *(Backend(name, *pair, softcap=True, packed_by=name) for name, (*_, pair) in PACKAGES.items()),
    Backend("blockwise", blockwise.forward, blockwise.backward, softcap=True, widths=True),
    # the plain formulas, which make [S, S]: for checking
    Backend("eager", reference.attention, partial(differentiated, reference.attention), softcap=True, widths=True),
]  # fmt: skip
BACKENDS = {backend.name: backend for backend in _ALL}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its parent is not there, or does not load here
        return False


def of_user(attention: Callable[..., object]) -> Backend:
    """The user's own core attention (`user_attention`) as a pair of kernels."""
    own = UserAttention(attention)
    return Backend(own.name, own.forward, own.backward)


def choose_backend(
    attention: str | Backend, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
) -> Backend:
    """The kernel for `attention`: `sdpa` picks PyTorch's best for the hardware and dtype, `auto` prefers an installed
    flash-attn 3 or 4 to it; any other name is taken at its word, and so is a kernel. With a `softcap`, only kernels
    that compute it: flash-attn's packages, and `blockwise`, which is several times as slow. In a simulation, the device
    that is simulated counts (`sizing.as_on`).

    Raises:
        ValueError: an unknown name, or a kernel that cannot run here, with what can.
    """
    kind, capability = kernel_device(device.type)
    if capability is None:
        capability = torch.cuda.get_device_capability(device)[0] if kind == "cuda" else 0
    asked = (kind, capability, dtype, head_dim, softcap)
    if attention == "auto":
        for name in ("flash_attention_3", "flash_attention_4"):
            if _lacks(name, *asked) is None:
                return BACKENDS[name]
    if attention in ("auto", "sdpa"):
        return BACKENDS[sdpa_kernel(kind, dtype.itemsize, head_dim, softcap, capability)]
    named = attention if isinstance(attention, Backend) else BACKENDS.get(attention)
    if named is None:
        raise ValueError(f"attention='{attention}' is unknown; known: sdpa, auto, {', '.join(BACKENDS)}")
    why = None
    if softcap and not named.softcap:
        can = ", ".join(b.name for b in BACKENDS.values() if b.softcap)
        why = f"does not compute a soft cap of scores, as {can} do"
    elif named.name in PACKAGES and (lacks := _lacks(named.name, *asked)):
        why = f"needs {lacks}"
    elif named.on != "any" and (named.on == "cpu") != (kind == "cpu"):
        why = f"does not run on {kind}"
    if why is not None:
        raise ValueError(f"attention='{named.name}' {why}; attention='sdpa' chooses what runs")
    return named


def _lacks(name: str, kind: str, capability: int, dtype: torch.dtype, width: int, softcap: bool) -> str | None:
    """What one of flash-attn's packages needs and does not find here, or None."""
    module, package, least, _ = PACKAGES[name]
    if not _installed(module):
        return f"the package {package}"
    fits, widths = width % 8 == 0 and width <= 256, "a width up to 256 that divides by 8"
    if name == "flash_attention_4" and capability in (10, 11):
        fits = fits and (width <= 128 or (width == 256 and not softcap))
        widths += " (on this GPU up to 128, or 256 without a soft cap)"
    alone = name == "flash_attention_3"  # for which it is built
    right = capability == least if alone else capability >= least
    if kind == "cuda" and dtype.itemsize == 2 and right and fits:
        return None
    return (
        f"CUDA of compute capability {least}{' alone' if alone else ' or newer'}, fp16 or bf16, and heads of {widths}, "
        f"not {kind} {capability}, {dtype} and {width}"
    )
