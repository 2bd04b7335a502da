"""Copies tensors that are kept on the host to the device part by part: hidden states, keys and values of layers in
chunks.

On a device with streams (CUDA) and with offload `async` parts are copied on streams of their own, one part ahead of the
computation in each direction; otherwise they are copied when they are asked for. A `Courier` serves one pass over one
layer; after `finish` everything that it sent is on the host, so that whatever reads a host tensor next finds it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alstlib.mesh import accelerator
from alstlib.offload.storage import Storage, copy


class Arrival:
    """Parts on their way to the device."""

    def __init__(self, courier: Courier, parts: Sequence[Tensor], after: Any) -> None:
        self.courier, self.parts = courier, list(parts)
        if courier.copies is not None:
            self.parts = courier.rooms(parts)
            self.event = courier.copies.fetch(self.parts, parts, after)

    def get(self) -> list[Tensor]:
        """The parts, on the device."""
        if (copies := self.courier.copies) is not None:
            copies.compute.wait_event(self.event)
            return self.parts
        made = self.courier.rooms(self.parts)
        for to, part in zip(made, self.parts):
            copy(to, part)
        return made


class Courier:
    """Copies parts of host tensors to a device and back.

    Args:
        store: holds them, and says whether copies run beside the computation.
        device: where the computation runs.
    """

    def __init__(self, store: Storage, device: torch.device) -> None:
        self.store, self.device = store, device
        self.here, self.copies = accelerator(device), store.copies(device)
        self._used = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host tensor, not yet written."""
        return self.store.lease(shape, dtype, pin=None if self.here is None else self.device)

    def rooms(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the device for these parts, not yet written."""
        return [torch.empty(part.shape, dtype=part.dtype, device=self.device) for part in parts]

    def fetch(self, *parts: Tensor, after: Any = None) -> Arrival:
        """Start bringing parts of host tensors to the device; `after` is what `send` returned for them, if it was in
        this pass."""
        self._used = True
        self.store.bytes_fetched += sum(part.numel() * part.element_size() for part in parts)
        return Arrival(self, parts, after)

    def send(self, part: Tensor, x: Tensor) -> Any:
        """Write x, from the device, into a part of a host tensor. Returns what `fetch` has to wait for."""
        x, self._used = x.detach(), True
        self.store.bytes_sent += x.numel() * x.element_size()
        return copy(part, x) if self.copies is None else self.copies.send(part, x.contiguous())

    def each(self, parts: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Each of these groups of parts on the device, the next one on its way meanwhile."""
        coming = None
        for group in parts:
            following = self.fetch(*group)
            if coming is not None:
                yield coming.get()
            coming = following
        if coming is not None:
            yield coming.get()

    def finish(self) -> None:
        """Wait until everything that was sent is on the host, and nothing that was fetched is read any more."""
        if self._used and self.copies is not None:
            self.copies.finish()
        elif self._used and self.here is not None:
            self.here.current_stream(self.device).synchronize()
        self._used = False


def parts_of(courier: Courier | None, tiles: Sequence[slice], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """For each tile, these rows [B, rows, ...] of the tensors on the device: as views, or with a courier fetched from
    the host."""
    if courier is None:
        return ([t[:, rows] for t in tensors] for rows in tiles)
    return courier.each([t[:, rows] for t in tensors] for rows in tiles)


def room_like(courier: Courier | None, x: Tensor) -> Tensor:
    """A tensor like x for tiles to be put into: where x is, or with a courier on the host."""
    return torch.empty_like(x) if courier is None else courier.empty(x.shape, x.dtype)


def put_part(courier: Courier | None, to: Tensor, rows: slice, part: Tensor) -> None:
    """Write these rows [B, rows, ...] of a tensor: there, or with a courier by sending them to the host."""
    if courier is None:
        to[:, rows] = part
    else:
        courier.send(to[:, rows], part)


@dataclass(frozen=True)
class Travel:
    """A token-wise function whose input, or output, or both lie on the host (with their gradients).

    Args:
        store: where they lie.
        device: where the function runs.
    """

    store: Storage
    device: torch.device
    x: bool = True
    out: bool = True

    def courier(self) -> Courier:
        return Courier(self.store, self.device)
