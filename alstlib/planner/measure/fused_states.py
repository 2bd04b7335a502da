"""Stand-ins for the fused kernels of layers with a state, which take no fake tensors and run on no CPU.

Each takes the arguments of transformers' own function of that name, makes no values, and holds what the published
kernels hold: what their autograd functions keep for backward, and what backward makes besides, where it takes most.
Forward makes less than that besides, so that a step's peak is never there, and it is left out. (As read in
flash-linear-attention `fla/ops/gated_delta_rule/chunk.py`, mamba-ssm `ops/triton/ssd_combined.py` and
`ops/selective_scan_interface.py`, and causal-conv1d.) What a compiled kernel takes for itself is not seen: no GPU ran.

Shape legend: B batch, S tokens, H heads of queries and keys, J heads of the state, K and V (P and N) its two widths,
G groups, C channels, W the convolution's width.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from alstlib.linear.adapter import CONVOLUTION, plain_forward
from alstlib.linear.adapters import mixers_of
from alstlib.linear.adapters.gated_delta import GatedDelta, KimiDelta
from alstlib.linear.adapters.mamba1 import Mamba1
from alstlib.linear.adapters.mamba2 import Mamba2
from alstlib.linear.ways import CHUNK_SIZE

SCAN = 2048
"""Tokens that Mamba-1's kernel works on at a time."""


@contextlib.contextmanager
def fused_states(model: nn.Module) -> Iterator[None]:
    """Give the model's mixers these kernels, as on a GPU that has their packages."""
    modules = {sys.modules[plain_forward(m).__module__] for m in mixers_of(model)}
    with contextlib.ExitStack() as patches:
        for module, name in itertools.product(modules, STAND_INS):
            if hasattr(module, name):
                patches.enter_context(mock.patch.object(module, name, STAND_INS[name]))
        yield


def some(like: Tensor, numbers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for so many numbers."""
    return like.new_empty(int(numbers), dtype=dtype)


def alike(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Any]:
    """Room for as much as each, where there is one."""
    return [None if t is None else torch.empty_like(t, dtype=dtype) for t in tensors]


def packed(*tensors: Tensor) -> list[Tensor]:
    """The tensors, or copies where their last dimension does not lie one after the other."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def with_unit_stride(x: Tensor) -> Tensor:
    """x, or a copy where neither its channels nor its tokens lie one after the other."""
    return x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()


class _Convolution(torch.autograd.Function):
    """[B, C, S] -> [B, C, S]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        x = with_unit_stride(x)
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x), None

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dend: None) -> Any:
        x, weight, bias = ctx.saved_tensors
        dout = with_unit_stride(dout)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)
        return dx, dweight.to(weight.dtype), *alike(bias)


class _FusedGatedDelta(torch.autograd.Function):
    """q, k [B, S, H, K], v [B, S, J, V], gates [B, S, J] -> [B, S, J, V] and the state [B, J, K, V] in fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: Tensor | None, norm: bool | None
    ) -> Any:
        q, k, v, g, beta = (t.contiguous() for t in (q, k, v, g, beta))
        rstd: tuple[Tensor, ...] = ()
        if norm:
            rstd = some(q, q.numel() // q.shape[-1]), some(k, k.numel() // k.shape[-1])
            q, k = torch.empty_like(q), torch.empty_like(k)
        solved, g = some(k, CHUNK_SIZE * beta.numel(), k.dtype), torch.empty_like(g, dtype=torch.float32)
        out, end = torch.empty_like(v), v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, g, beta, solved, start, *rstd)
        return out, end

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dend: Tensor) -> Any:
        q, k, v, g, beta, _, start, *_ = ctx.saved_tensors
        keys = v.numel() // v.shape[3] * k.shape[3]  # for each head of the state
        states = keys * v.shape[3] // CHUNK_SIZE  # before each chunk
        dout, between = dout.contiguous(), some(k, 5 * keys + 4 * v.numel() + 2 * states, k.dtype)
        dstart, dbeta = alike(start, beta, dtype=torch.float32)
        dv, dg = alike(v, g)
        del between
        return *alike(q, k), dv, dg, dbeta.to(beta.dtype), dstart, None


class _FusedMamba2(torch.autograd.Function):
    """x [B, S, J, P], dt [B, S, J], B and C [B, S, G, N] -> [B, S, J, P] and the state [B, J, P, N] in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int, D: Tensor | None,
        bias: Tensor | None, start: Tensor | None,
    ) -> Any:  # fmt: skip
        x, B, C = packed(x, B, C)
        end = x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float32)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(x, dt, B, C, A, D, bias, start, some(dt, dt.numel()))
        ctx.out, ctx.chunk = out.detach(), chunk
        return out, end

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dend: Tensor) -> Any:
        x, dt, B, C, A, D, bias, start, _ = ctx.saved_tensors
        states = x.numel() * B.shape[3] // ctx.chunk  # before each chunk
        products = B.numel() // B.shape[3] * ctx.chunk  # of the tokens of each chunk
        dout, (ddt, dB, dC, dstart) = dout.contiguous(), alike(dt, B, C, start)
        again = torch.empty_like(dt), some(dt, 2 * dt.numel() + products)
        half, wide = some(x, 2 * states, x.dtype), some(x, 2 * states)
        del wide
        dx, wide = torch.empty_like(x), some(x, dt.numel() + 2 * B.numel() + products)
        del again, half, wide
        ctx.out = None
        dA, dD, dbias = alike(A, D, bias)
        return dx, ddt, dA, dB, dC, None, dD, dbias, dstart


class _FusedMamba1(torch.autograd.Function):
    """x and dt [B, C, S], A [C, N], B and C [B, N, S] -> [B, C, S] and the state [B, C, N] in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None
    ) -> Any:
        x, dt, B, C = packed(x, dt, B, C)
        blocks = -(-x.shape[2] // SCAN)
        states = x.new_empty(*x.shape[:2], blocks, 2 * A.shape[1], dtype=torch.float32)
        ctx.save_for_backward(x, dt, A, B, C, D, bias, states)
        return torch.empty_like(dt), states[:, :, -1, 1::2]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dend: Tensor) -> Any:
        x, dt, A, B, C, D, bias, _ = ctx.saved_tensors
        (dout,), (dx, ddt, dA), (dB, dC) = packed(dout), alike(x, dt, A), alike(B, C, dtype=torch.float32)
        return dx, ddt, dA, dB.to(B.dtype), dC.to(C.dtype), *alike(D, bias)


def stand_in(kernel: Any, takes: str, asks: str = "", pair: bool = False) -> Callable[..., Any]:
    """A function of transformers that this kernel computes: its output, and its last state where an argument asks.

    Args:
        takes: the function's arguments in their order, as the kernel takes them; it has others that change no size.
        asks: the argument that asks for the state.
        pair: whether it returns None in place of a state that nothing asks for.
    """

    def call(*given: Any, **named: Any) -> Any:
        named |= zip(takes.split(), given)
        out, end = kernel.apply(*map(named.get, takes.split()))
        state = end if named.get(asks) else None
        return (out, state) if pair or state is not None else out

    return call


convolution = stand_in(_Convolution, "hidden_states weight bias")
gated_delta_rule = stand_in(
    _FusedGatedDelta, "query key value g beta initial_state use_qk_l2norm_in_kernel", "output_final_state", pair=True
)
mamba2 = stand_in(_FusedMamba2, "hidden_states dt A B C chunk_size D dt_bias initial_states", "return_final_states")
mamba1 = stand_in(_FusedMamba1, "hidden_states dt A B C D delta_bias", "return_last_state")
STAND_INS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: convolution, GatedDelta.recurrence: gated_delta_rule, KimiDelta.recurrence: gated_delta_rule,
    Mamba2.recurrence: mamba2, Mamba1.recurrence: mamba1,
}  # fmt: skip
"""The stand-in for each function of transformers (`linear.adapters`), by its name."""
