"""What keeps tensors between forward and backward (`Storage`), and copies that run beside the computation (`Copies`).

Checkpoints and couriers know no more of the place than `Storage`. `host_store.HostStore` is the first; another place,
such as a disk, is one more file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from alstlib.mesh import accelerator


class Storage(Protocol):
    """A place for tensors between forward and backward: whole tensors under tickets, last in, first out; and tensors
    that are leased, whose parts are written and read one by one (`courier.Courier`)."""

    bytes_sent: int
    """Bytes that were copied from the device to this place since it was made."""
    bytes_fetched: int
    """Bytes that were copied back to the device."""

    def room(self) -> int:
        """Bytes that may still be taken."""

    def ticket(self, after: Any = None) -> Any:
        """A ticket for what one checkpoint keeps; `after` is the ticket that is read just before it. What a ticket
        holds is given up when the ticket is."""

    def put(self, ticket: Any, x: Tensor) -> None:
        """Keep x under a ticket."""

    def get(self, ticket: Any, device: torch.device) -> list[Tensor]:
        """The tensors of a ticket, on the device, for the only time."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype, pin: torch.device | None) -> Tensor:
        """A tensor of the CPU that is not yet written, stored here until nobody has it or a view of it; `pin` is the
        device that copies it, if one does."""

    def copies(self, device: torch.device) -> Copies | None:
        """What copies leased tensors beside the computation of a device; None where copies wait for each other."""


class Copies:
    """Copies between a device and host memory on streams of their own, in the order of the compute stream.

    Args:
        streams: the streams out of the device and back.
    """

    def __init__(self, device: torch.device, streams: tuple[Any, Any]) -> None:
        self.here, self.device, (self.out, self.back) = accelerator(device), device, streams
        self._leaving: list[tuple[Tensor, Any]] = []

    @property
    def compute(self) -> Any:
        """The stream of the computation."""
        return self.here.current_stream(self.device)

    def send(self, to: Tensor, x: Tensor) -> Any:
        """Copy x, from the device, to host memory. Returns the event after which it is there."""
        compute = self.compute
        self.out.wait_stream(compute)
        with self.here.stream(self.out):
            copy(to, x)
        done = self.out.record_event()
        self._leaving.append((x, done))  # x lives until its copy is done, in the compute stream's order
        while len(self._leaving) > 2:
            _, done_before = self._leaving.pop(0)  # its tensor is freed after the wait
            compute.wait_event(done_before)
        return done

    def fetch(self, to: Sequence[Tensor], parts: Sequence[Tensor], after: Any) -> Any:
        """Copy parts of host memory, which are there after an event, into tensors of the device that nobody has used.
        Returns the event after which they are there."""
        compute = self.compute
        self.back.wait_stream(compute)  # the tensors' memory may still be in use there
        if after is not None:
            self.back.wait_event(after)
        with self.here.stream(self.back):
            for mine, part in zip(to, parts):
                copy(mine, part)
        return self.back.record_event()

    def forget_sent(self) -> None:
        """Let go of what was sent, after its copies in the compute stream's order."""
        for _, done in self._leaving:
            self.compute.wait_event(done)
        self._leaving.clear()

    def finish(self) -> None:
        """Wait until all copies are done."""
        for stream in (self.out, self.back):
            stream.synchronize()
        self._leaving.clear()


@torch.no_grad()  # a generator may be asked for its next part inside a recompute, which makes a graph
def copy(to: Tensor, source: Tensor) -> None:
    """Copy without a stop where both lie in one piece: slices of the sequence do, in each micro-batch row."""
    if to.stride() == source.stride() or to.ndim < 2 or to.shape[0] == 1:
        to.copy_(source, non_blocking=True)
        return
    for i in range(to.shape[0]):
        to[i].copy_(source[i], non_blocking=True)
