"""Mamba-1 (arXiv 2312.00752): a number for each entry of the state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.base.types import OutputAndState
from alstlib.linear.adapter import Adapter, LayerPart, in_order
from alstlib.linear.pass_state import pass_state
from alstlib.linear.rule import Kernel, StateRule
from alstlib.tiled.compute import tiled_compute


class SelectiveScan(StateRule):
    """Mamba-1: a number for each entry of the state. Its kernels begin with zeros, and their backward may leave out the
    gradient of the state (mamba-ssm's does).

    The output is affine in the state too: token t sees of the state that comes in what the tokens up to t have left,
    exp(A (dt_1 + ... + dt_t)) of each entry. The state after the last token is read by N further tokens with a step of
    zero, of which each reads a column: their outputs bring its gradient. That costs N more tokens to scan, and a copy
    of the scan's inputs.

    Args:
        scan: (x [b, n, E], dt [b, n, E], B [b, n, N], C [b, n, N], A [E, N], D [E], bias [E]) -> (output [b, n, E],
            state [b, E, N]), where a step is dt + bias.
        softplus: whether a step is softplus(dt + bias) instead.
        hands_on: whether the state goes to another rank or chunk; otherwise it needs no gradient.
    """

    def __init__(self, scan: Kernel, softplus: bool, hands_on: bool = True) -> None:
        super().__init__(self._run, self._decay)
        self.scan, self.softplus, self.hands_on = scan, softplus, hands_on

    def from_zeros(self, *tensors: Tensor) -> Tensor:
        return self.scan(*tensors)[0]

    def _steps(self, dt: Tensor, A: Tensor, bias: Tensor) -> Tensor:
        step = dt.to(torch.promote_types(dt.dtype, A.dtype)) + bias
        return F.softplus(step) if self.softplus else step

    def _decay(self, *tensors: Tensor) -> Tensor:
        _, dt, _, _, A, _, bias = tensors
        return self._steps(dt, A, bias).sum(1)[..., None] * A

    def _run(self, *tensors: Tensor, initial_state: Tensor | None) -> OutputAndState:
        _, dt, _, C, A, _, bias = tensors
        out, state = self._with_state(*tensors)
        if initial_state is None:
            return out, state
        since, width = self._steps(dt, A, bias).cumsum(1), dt.shape[2]

        def seen(x: Tensor) -> Tensor:
            left = (x[..., :width, None] * A).exp() * initial_state[:, None]
            return (left * x[..., None, width:]).sum(-1)

        both = torch.cat([since, C.to(since.dtype)], -1)
        more = tiled_compute(seen, both, [t for t in (A, initial_state) if t.requires_grad], tile=64)
        return out + more.to(out.dtype), state + (since[:, -1, :, None] * A).exp() * initial_state

    def _with_state(self, *tensors: Tensor) -> OutputAndState:
        if not (self.hands_on and torch.is_grad_enabled()):
            return self.scan(*tensors)
        *tokens, A, D, bias = tensors
        length, none, columns = tokens[0].shape[1], bias.new_zeros(1), torch.eye(A.shape[1], device=A.device)
        still = torch.full_like(bias, -1e4) if self.softplus else -bias
        tokens = [
            torch.cat([t, more.to(t.dtype).expand(t.shape[0], A.shape[1], t.shape[2])], 1)
            for t, more in zip(tokens, (none, still, none, columns))
        ]
        out, state = self.scan(*tokens, A, D, bias)
        read = out[:, length:].transpose(1, 2).to(state.dtype)
        return out[:, :length], state.detach() + (read - read.detach())


class Mamba1(Adapter):
    family, recurrence, heads = "Mamba-1", "mamba_selective_scan", False

    @staticmethod
    def mix(
        part: LayerPart, theirs: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor, z: Tensor, delta_bias: Tensor, delta_softplus: bool = False, return_last_state: bool = False,
        **how: Any,
    ) -> Tensor:  # fmt: skip
        """It has no heads: its state is passed."""

        def scan(*tensors: Tensor) -> OutputAndState:
            (x, dt, B, C), (A, D, bias) = (t.transpose(1, 2) for t in tensors[:4]), tensors[4:]
            out, state = theirs(
                x, dt, A, B, C, D=D, z=None, delta_bias=bias, delta_softplus=delta_softplus, return_last_state=True,
                **how,
            )  # fmt: skip
            return out.transpose(1, 2), state

        tokens, weights = [t.transpose(1, 2) for t in (hidden_states, dt, B, C)], in_order((A, D, delta_bias))
        rule = SelectiveScan(scan, delta_softplus, part.hands_on)
        over = functools.partial(pass_state, rule, tokens, weights)
        out = part.run((*tokens, *weights), over)
        return out.transpose(1, 2) * F.silu(z)
