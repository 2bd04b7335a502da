"""Copies between a device and tensors that are kept on the host, part by part: checkpoints, hidden states, keys and
values of layers in chunks.

On a device with streams (CUDA) and with offload `async` parts are copied on streams of their own, one part ahead of the
computation in each direction; otherwise they are copied when they are asked for, and what is fetched when it is read.
A `Courier` serves one pass over one layer; after `finish` everything that it sent is on the host, so that whatever
reads a host tensor next finds it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alstlib.base.mesh import accelerator
from alstlib.offload.storage import Storage

Coming = Callable[[], list[Tensor]]
"""Function that gives tensors which are on their way to the device."""


class Courier:
    """Copies parts of host tensors to a device and back, in the order of the device's computation.

    Args:
        store: holds them, and says whether copies run beside the computation.
        device: where the computation runs.
        leaving: what others have sent before and what is sent, with the events after which it is there.
    """

    def __init__(self, store: Storage, device: torch.device, leaving: list[tuple[Tensor, Any]] | None = None) -> None:
        self.store, self.device, self.here, self.streams = store, device, accelerator(device), store.streams(device)
        self.leaving = [] if leaving is None else leaving
        self._used = False

    @property
    def compute(self) -> Any:
        """The stream of the computation."""
        return self.here.current_stream(self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host tensor, not yet written."""
        return self.store.lease(shape, dtype, self.device)

    def send(self, part: Tensor, x: Tensor) -> Any:
        """Write x, from the device, into a part of a host tensor. Returns the event after which it is there."""
        x, self._used = x.detach(), True
        self.store.bytes_sent += x.nbytes
        if self.streams is None:
            return _copy(part, x)
        x = x if x.stride() == part.stride() else x.contiguous()
        (out, _), compute = self.streams, self.compute
        out.wait_stream(compute)
        with self.here.stream(out):
            _copy(part, x)
        done = out.record_event()
        self.leaving.append((x, done))  # x lives until its copy is done, in the compute stream's order
        while len(self.leaving) > 2:
            _, done_before = self.leaving.pop(0)  # its tensor is freed after the wait
            compute.wait_event(done_before)
        return done

    def fetch(self, *parts: Tensor, after: Any = None) -> Coming:
        """Start to bring parts of host tensors to the device; `after` is what `send` returned for them, if it was in
        this pass. Returns a function that gives the parts on the device."""
        self._used = True
        self.store.bytes_fetched += sum(part.nbytes for part in parts)
        if self.streams is None:
            return lambda: self._bring(parts, self._rooms(parts))
        (_, back), compute, rooms = self.streams, self.compute, self._rooms(parts)
        back.wait_stream(compute)  # the tensors' memory may still be in use there
        if after is not None:
            back.wait_event(after)
        with self.here.stream(back):
            self._bring(parts, rooms)
        done = back.record_event()

        def arrived() -> list[Tensor]:
            self.compute.wait_event(done)
            return rooms

        return arrived

    def _rooms(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # not by `empty_like`: a ledger on a CPU takes what is made of host memory for the host's
        how: Any = {"device": self.device}
        return [
            torch.empty(t.shape, dtype=t.dtype, **how) if has_gaps(t)
            else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, **how)
            for t in parts
        ]  # fmt: skip

    def _bring(self, parts: Sequence[Tensor], rooms: list[Tensor]) -> list[Tensor]:
        for part, room in zip(parts, rooms):
            _copy(room, part)
        return rooms

    def each(self, groups: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Each of these groups of parts on the device, the next one on its way meanwhile."""
        return one_ahead(self.fetch(*group) for group in groups)

    def forget_sent(self) -> None:
        """Let go of what was sent, after its copies in the compute stream's order."""
        for _, done in self.leaving:
            self.compute.wait_event(done)
        self.leaving.clear()

    def finish(self) -> None:
        """Wait until everything that was sent is on the host, and nothing that was fetched is read any more."""
        if self._used and self.here is not None:
            for stream in self.streams or (self.compute,):
                stream.synchronize()
        self.leaving.clear()
        self._used = False


def one_ahead(fetches: Iterable[Coming]) -> Iterator[list[Tensor]]:
    """What each of these fetches brings, of which the next begins before one is waited for."""
    coming = None
    for following in fetches:
        if coming is not None:
            yield coming()
        coming = following
    if coming is not None:
        yield coming()


def gapless(x: Tensor) -> Tensor:
    """x without its graph, and copied where its elements do not lie side by side."""
    return x.detach().contiguous() if has_gaps(x) else x.detach()


def has_gaps(x: Tensor) -> bool:
    """Whether the elements do not lie side by side in memory, in whatever order."""
    size = 1
    for stride, n in sorted((stride, n) for stride, n in zip(x.stride(), x.shape) if n > 1):
        if stride != size:
            return True
        size *= n
    return False


@torch.no_grad()  # a generator may be asked for its next part inside a recompute, which makes a graph
def _copy(to: Tensor, source: Tensor) -> None:
    """Copy without a stop where both lie in one piece: slices of the sequence do, in each sample."""
    if to.stride() == source.stride() or to.ndim < 2 or to.shape[0] == 1:
        to.copy_(source, non_blocking=True)
        return
    for i in range(to.shape[0]):
        to[i].copy_(source[i], non_blocking=True)


def parts_of(courier: Courier | None, tiles: Sequence[slice], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """For each tile, these tokens [B, s, ...] of the tensors on the device: as views, or with a courier fetched from
    the host."""
    groups = ([t[:, at] for t in tensors] for at in tiles)
    return groups if courier is None else courier.each(groups)


def room_like(courier: Courier | None, x: Tensor) -> Tensor:
    """A tensor like x for tiles to be put into: where x is, or with a courier on the host."""
    return torch.empty_like(x) if courier is None else courier.empty(x.shape, x.dtype)


def put_part(courier: Courier | None, to: Tensor, at: slice, part: Tensor) -> None:
    """Write these tokens [B, s, ...] of a tensor: there, or with a courier by sending them to the host."""
    if courier is None:
        to[:, at] = part
    else:
        courier.send(to[:, at], part)


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
