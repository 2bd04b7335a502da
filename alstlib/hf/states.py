"""An attached model's layers with a state: their convolution and their recurrence run over all ranks' tokens.

A mixer's own forward runs, with other functions in the place of those by which it mixes tokens (`mixers`): a copy of
the function whose globals differ in these names. So projections, gates and norms are transformers' own, in every
version, and so is each kernel on one device: `causal-conv1d`, `flash-linear-attention` or PyTorch, as transformers
chooses.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.hf.handle import Handle
from alstlib.hf.mixers import CONVOLUTION, GATED_DELTA, MAMBA2, MAMBA2_FUSED, called_by, mixers_of, plain_forward
from alstlib.kernels.spans import Documents
from alstlib.ulysses.convolution import causal_convolution
from alstlib.ulysses.states import GatedDeltaRule, Recurrence, over_ranks


def attach_states(handle: Handle) -> None:
    """Give each known mixer of the decoder layers the functions that work over ranks and restart at documents."""
    for layer in handle.facts.layers:
        for mixer in mixers_of(layer):
            _attach(handle, mixer)


def _attach(handle: Handle, mixer: nn.Module) -> None:
    own, original = plain_forward(mixer), mixer.forward
    names = {
        name: functools.partial(OURS[name], handle, own.__globals__[name]) for name in called_by(own) & OURS.keys()
    }
    over: Any = types.FunctionType(
        own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
    )
    over.__kwdefaults__ = own.__kwdefaults__

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if handle.plain else over(mixer, *args, **kwargs)

    handle.set_forward(mixer, forward)


def _documents(handle: Handle) -> Documents:
    if handle.call is None:
        raise ValueError("call the model that apply() was given, not a part of it: documents and labels go with it")
    return handle.call.documents


def _convolution(
    handle: Handle, theirs: Callable[..., Tensor], hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    def convolve(x: Tensor) -> Tensor:
        return theirs(x, weight, bias, activation=activation)

    exchange = handle.attention.exchange
    return causal_convolution(convolve, hidden_states, weight.shape[-1], exchange, _documents(handle))[0]


def _gated_delta_rule(
    handle: Handle, theirs: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
        q, k, v, g, beta = tensors
        return theirs(
            q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip

    tokens = (query, key, value, g, beta)
    return over_ranks(GatedDeltaRule(kernel), tokens, (), handle.attention.exchange, _documents(handle))[0], None


def _mamba2(
    handle: Handle, theirs: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    chunk_size: int, D: Tensor, dt_bias: Tensor, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> Tensor:  # fmt: skip
    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
        x, dt, B, C, A, D, dt_bias = tensors
        return theirs(
            x, dt, A, B, C, chunk_size=chunk_size, D=D, z=None, dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=dt_limit, initial_states=initial_state, return_final_states=True,
        )  # fmt: skip

    def decay(*tensors: Tensor) -> Tensor:
        _, dt, _, _, A, _, dt_bias = tensors
        step = dt + dt_bias.to(dt.dtype)
        step = (nn.functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        return step.to(torch.promote_types(step.dtype, A.dtype)) * A

    tokens, weights = (hidden_states, dt, B, C), (A, D, dt_bias)
    return over_ranks(Recurrence(kernel, decay), tokens, weights, handle.attention.exchange, _documents(handle))[0]


def _not_fused(*_: Any, **__: Any) -> None:
    """Convolution, scan, norm and projection in one kernel: it takes no state, and transformers goes on without it."""


OURS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: _convolution,
    GATED_DELTA: _gated_delta_rule,
    MAMBA2: _mamba2,
    MAMBA2_FUSED: _not_fused,
}
"""What takes the place of each function: (handle, the function, *its arguments)."""
