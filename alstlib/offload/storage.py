"""What keeps tensors between forward and backward (`Storage`): the device or the host (`host_store`), or the host with
a disk under it (`disk_store`). Another place is one more file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Storage(Protocol):
    """A place for tensors between forward and backward: whole tensors under tickets, last in, first out; and tensors
    that are leased, whose parts are written and read one by one (`courier.Courier`)."""

    bytes_sent: int
    """Bytes that were copied from the device to this place since it was made."""
    bytes_fetched: int
    """Bytes that were copied back to the device."""

    def room(self) -> int:
        """Bytes that may still be taken."""

    def ticket(self, after: Any = None, part: bool = False) -> Any:
        """A ticket for what one checkpoint keeps; `after` is the ticket that is read just before it, and `part` says
        that it has no layer's input. What a ticket holds is given up when the ticket is."""

    def put(self, ticket: Any, x: Tensor) -> None:
        """Keep x under a ticket."""

    def get(self, ticket: Any, device: torch.device) -> list[Tensor]:
        """The tensors of a ticket, on the device, for the only time."""

    def park(self, x: Tensor) -> Any:
        """Keep a tensor that lies on the host, a layer's input, until `unpark` is called with what this returns."""

    def unpark(self, held: Any, device: torch.device) -> Tensor:
        """A parked tensor, on the host, for the only time; chunks of it will visit the device."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """A tensor of the CPU that is not yet written, stored here until nobody has it or a view of it; `device` is the
        one that copies it, if one does."""

    def streams(self, device: torch.device) -> tuple[Any, Any] | None:
        """The streams on which a courier copies out of a device and back; None: on the computation's own."""
