"""What a layer with a state hands from one chunk to the next, and the gradients that come back.

To attention, a chunk needs the keys and values of all tokens before it. To a layer with a state (`linear.pass_state`)
it needs one state, and to its convolution the few tokens before the chunk: their size is constant. Forward hands them
on. Backward, which goes from the last chunk to the first, needs those before *each* chunk: they are made once more, and
kept. A chunk is recomputed from what it began with; its backward begins with the gradient of what it handed on, which
the chunk after it has left, and ends with the gradient of what it began with, which it leaves for the chunk before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from alstlib.offload.courier import Courier
from alstlib.ulysses.alltoall import Moved

Step = Callable[..., tuple[Tensor, Any]]
"""(start= what the chunk begins with or None for zeros, first= its first token of the whole sequence, length= S) -> its
output, what it hands on."""


class Carried:
    """What the parts of a layer (or of a model) hand from chunk to chunk. Each part has a key of its own."""

    def __init__(self) -> None:
        self.before: dict[Hashable, dict[int, tuple[Tensor, Any]]] = {}
        """What chunks begin with, by their first token; on the host with what a fetch has to wait for."""
        self.grads: dict[tuple[Hashable, int], Tensor] = {}
        """Gradients of what a chunk handed on whose turn in backward comes, by the token after its last."""
        self.courier: Courier | None = None
        """Takes what chunks begin with to the host, and brings it back; None: it stays on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept of all chunks."""
        return sum(tensor.nbytes for parts in self.before.values() for tensor, _ in parts.values())

    def run(
        self, key: Hashable, step: Step, inputs: Sequence[Tensor], place: tuple[int, int], length: int, *, graph: bool,
        forget: bool = False, keep: bool = True,
    ) -> Tensor:  # fmt: skip
        """One part's output for the chunk of tokens [first, last).

        Args:
            inputs: the step's.
            graph: a backward of this chunk follows.
            forget: nobody will ask for what this chunk begins with again.
            keep: a later chunk will ask for what this one hands on.
        """
        (first, last), before, start, courier = place, self.before.setdefault(key, {}), None, self.courier
        if first:
            start, sent = before.pop(first) if forget else before[first]
            start = start if courier is None else courier.fetch(start, after=sent)()[0]
        count = len(inputs)

        def begins(grad: Tensor) -> tuple[None, ...]:
            known = self.grads.get((key, first))  # several chunks may begin with what one handed on (`trees`)
            self.grads[key, first] = grad if known is None else known + grad
            return (None,) * (1 + count)

        def hands_on(grad: Tensor) -> tuple[Tensor, Tensor | None]:
            return grad, self.grads.pop((key, last), None)  # left by the chunk after

        if graph and start is not None:  # with an edge to the inputs, so that backward comes here whatever it is for
            (start,) = Moved.apply(_first, begins, start, *inputs)
        out, end = step(start=start, first=first, length=length)
        if graph:
            return Moved.apply(_first, hands_on, out, end)[0]
        if keep and last < length:
            held = end if courier is None else courier.empty(end.shape, end.dtype)
            before[last] = held, None if courier is None else courier.send(held, end)
        return out

    def drop(self, first: int) -> None:
        """Let go of what the chunk began with whose tokens begin here."""
        for parts in self.before.values():
            parts.pop(first, None)


def _first(x: Tensor, *_: Tensor) -> list[Tensor]:
    return [x.view_as(x)]
