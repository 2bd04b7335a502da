"""Copies tensors that are kept on the host to the device part by part: hidden states, keys and values of layers in
chunks.

On a device with streams (CUDA) and with offload `async` parts travel on streams of their own, one part ahead of the
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
from alstlib.offload.host_store import HostStore


class Arrival:
    """Parts on their way to the device."""

    def __init__(self, courier: Courier, parts: Sequence[Tensor], after: Any) -> None:
        self.courier, self.parts, self.event = courier, list(parts), None
        if not courier.beside:
            return
        here = courier.here
        compute, back = here.current_stream(courier.device), courier.streams()[1]
        self.parts = [_room_for(part, courier.device) for part in parts]
        back.wait_stream(compute)  # the buffers' memory may still be in use there
        if after is not None:
            back.wait_event(after)
        with here.stream(back):
            for to, part in zip(self.parts, parts):
                _copy(to, part)
        self.event = back.record_event()

    def get(self) -> list[Tensor]:
        """The parts, on the device."""
        if self.event is not None:
            self.courier.here.current_stream(self.courier.device).wait_event(self.event)
            return self.parts
        made = [_room_for(part, self.courier.device) for part in self.parts]
        for to, part in zip(made, self.parts):
            _copy(to, part)
        return made


class Courier:
    """Copies parts of host tensors to a device and back.

    Args:
        store: whose slabs hold them, and whose mode says whether copies run beside the computation.
        device: where the computation runs.
    """

    def __init__(self, store: HostStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self.here = accelerator(device)
        self.beside = store.mode == "async" and self.here is not None
        self._leaving: list[tuple[Tensor, Any]] = []
        self._used = False

    def streams(self) -> tuple[Any, Any]:
        """The streams out of the device and back."""
        return self.store.streams(self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host tensor, not yet written."""
        return self.store.lease(shape, dtype, pin=None if self.here is None else self.device)

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
        if not self.beside:
            _copy(part, x)
            return None
        x, compute, (out, _) = x.contiguous(), self.here.current_stream(self.device), self.streams()
        out.wait_stream(compute)
        with self.here.stream(out):
            _copy(part, x)
        done = out.record_event()
        self._leaving.append((x, done))  # x lives until its copy is done, in the compute stream's order
        while len(self._leaving) > 2:
            _, done_before = self._leaving.pop(0)  # its tensor is freed after the wait
            compute.wait_event(done_before)
        return done

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
        if self._used and self.here is not None:
            for stream in self.streams() if self.beside else [self.here.current_stream(self.device)]:
                stream.synchronize()
        self._used = False
        self._leaving.clear()


def _room_for(part: Tensor, device: torch.device) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device=device)


@torch.no_grad()  # a generator may be asked for its next part inside a recompute, which makes a graph
def _copy(to: Tensor, source: Tensor) -> None:
    """Without a stop where both lie in one piece: slices of the sequence do, in each micro-batch row."""
    if (to.is_contiguous() and source.is_contiguous()) or to.ndim < 2 or to.shape[0] == 1:
        to.copy_(source, non_blocking=True)
        return
    for i in range(to.shape[0]):
        to[i].copy_(source[i], non_blocking=True)


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

    store: HostStore
    device: torch.device
    x: bool = True
    out: bool = True

    def courier(self) -> Courier:
        return Courier(self.store, self.device)
