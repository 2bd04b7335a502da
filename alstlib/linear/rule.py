"""What one layer does to its state, as the operators over ranks need to know it.

Shape legend: B batch, n tokens, H heads, K and V widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alstlib.base.types import OutputAndState

Kernel = Callable[..., OutputAndState]
"""Runs some tokens on one device, given a state or None for zeros -> their output and the state after them."""


class StateRule:
    """What one layer does to its state, as the operator over ranks needs to know it. This one multiplies it.

    Args:
        kernel: (*tokens, *weights, initial_state=) -> (output [b, n, ..], state [b, H, ..]), which autograd can
            differentiate.
        decay: (*tokens, *weights) -> the log of what all of these tokens multiply the state by: [b, H, 1, 1] for a
            number for each head, or the state's own shape for one for each entry.
        packed: (*tokens [1, n, ..], *weights, offsets=) -> output [1, n, ..] of several documents that begin at these
            offsets, each from a state of zeros; None: the kernel cannot.
    """

    matrix = False
    """Whether M is a matrix for each head."""

    def __init__(self, kernel: Kernel, decay: Any = None, packed: Any = None) -> None:
        self.kernel, self.decay, self.packed = kernel, decay, packed

    def from_zeros(self, *tensors: Tensor) -> Tensor:
        """The output of tokens after which nobody needs the state."""
        return self.kernel(*tensors, initial_state=None)[0]

    def pair(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """(M, U) of these tokens."""
        state = self.kernel(*tensors, initial_state=None)[1]
        return self.decay(*tensors).exp().to(state.dtype), state

    def forgets(self, after: Tensor, *tensors: Tensor) -> Tensor:
        """The M of tokens after which nothing is left of the state that comes in; `after` is the state after them."""
        if self.matrix:
            return after.new_zeros(*after.shape[:3], after.shape[2])
        return torch.zeros_like(self.decay(*tensors))

    def times(self, m: Tensor, state: Tensor) -> Tensor:
        return m @ state if self.matrix else m * state
