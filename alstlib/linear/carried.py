"""What a layer with a state hands from one chunk to the next, and the gradients that come back.

To attention, a chunk needs the keys and values of all rows before it. To a layer with a state (`linear.pass_state`) it
needs one state, and to its convolution the few tokens before the chunk: their size is constant. Forward hands them on.
Backward, which goes from the last chunk to the first, needs those before *each* chunk: they are made once more, and
kept. A chunk is recomputed from what it began with; its backward begins with the gradient of what it handed on, which
the chunk after it has left, and ends with the gradient of what it began with, which it leaves for the chunk before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.offload.courier import Courier
from alstlib.recompute import first_order

Step = Callable[[Tensor | None, int, int], tuple[Tensor, Tensor]]
"""(what the chunk begins with or None for zeros, its first row of the whole sequence, S) -> its output, what it hands
on."""


class Carried:
    """What the parts of a layer (or of a model) hand from chunk to chunk. Each part has a key of its own."""

    def __init__(self) -> None:
        self.before: dict[Hashable, dict[int, _EndState]] = {}
        """What chunks begin with, by their first row."""
        self.grads: dict[Hashable, Tensor] = {}
        """Gradients of what the chunk handed on that is next in backward."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept of all chunks."""
        return sum(held.nbytes for parts in self.before.values() for held in parts.values())

    def run(
        self, key: Hashable, step: Step, inputs: Sequence[Tensor], rows: tuple[int, int], length: int, *, graph: bool,
        forget: bool = False, keep: bool = True, courier: Courier | None = None,
    ) -> Tensor:  # fmt: skip
        """One part's output for the chunk of rows [first, last).

        Args:
            inputs: the step's.
            graph: a backward of this chunk follows.
            forget: nobody will ask for what this chunk begins with again.
            keep: a later chunk will ask for what this one hands on.
            courier: takes that to the host, and brings it back; None: it stays on the device.
        """
        (first, last), before = rows, self.before.setdefault(key, {0: _EndState(None, None)})
        start = (before.pop(first) if forget else before[first]).get()
        if graph and start is not None:
            start = _Begins.apply(self, key, start, *inputs)
        out, end = step(start, first, length)
        if graph:
            return _HandsOn.apply(out, end, self, key)
        if keep and last < length:
            before[last] = _EndState(end, courier)
        return out

    def drop(self, first: int) -> None:
        """Let go of what the chunk began with whose rows begin here."""
        for parts in self.before.values():
            parts.pop(first, None)


class _EndState:
    """What a chunk begins with: zeros (None), or a tensor on the device or on the host."""

    def __init__(self, tensor: Tensor | None, courier: Courier | None) -> None:
        self.tensor, self.courier, self.sent = tensor, courier, None
        if tensor is not None and courier is not None:
            self.tensor = courier.empty(tensor.shape, tensor.dtype)
            self.sent = courier.send(self.tensor, tensor)

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def get(self) -> Tensor | None:
        """The tensor, on the device."""
        if self.tensor is None or self.courier is None:
            return self.tensor
        return self.courier.fetch(self.tensor, after=self.sent)()[0]


class _Begins(torch.autograd.Function):
    """What a chunk begins with; backward leaves its gradient for the chunk before. It is an edge to the step's inputs,
    without a gradient for them, so that backward comes here whatever it differentiates for."""

    @staticmethod
    def forward(ctx: Any, carried: Carried, key: Hashable, start: Tensor, *inputs: Tensor) -> Tensor:
        ctx.carried, ctx.key = carried, key
        return start.view_as(start)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.carried.grads[ctx.key] = grad
        return (None,) * len(ctx.needs_input_grad)


class _HandsOn(torch.autograd.Function):
    """A chunk's output; backward begins with the gradient of what it handed on too, left by the chunk after."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, end: Tensor, carried: Carried, key: Hashable) -> Tensor:
        ctx.carried, ctx.key = carried, key
        return out.view_as(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, ctx.carried.grads.pop(ctx.key, None), None, None
