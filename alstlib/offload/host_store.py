"""Host memory for what is kept between forward and backward (ALST, section 3.3). In a `HostStore` of mode

- `none`: it stays on the device;
- `sync`: copied on the compute stream (the paper's way);
- `async`: on a device with streams (CUDA) copied on streams of its own, out of and into pinned memory, and the previous
  layer's tensors start coming back before a layer is recomputed. Where there is no stream (CPU), the same as `sync`.

Host memory is taken in slabs of the exact size, reused from step to step (PyTorch's pinned allocator rounds up to
powers of two, up to twice what is needed).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from alstlib.base.mesh import accelerator
from alstlib.base.sizing import host_free, ranks_here
from alstlib.offload.courier import Coming, Courier, gapless

Mode = Literal["none", "sync", "async"]


class HostOutOfMemory(MemoryError):
    """The host has too little memory for what is to be kept there."""


def host_available() -> int:
    """Bytes of host memory that this process may still take: what is free, shared evenly by the ranks of this
    machine."""
    return host_free() // ranks_here()


_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""Value of the flag `MAP_NORESERVE`: room was asked for before, and a simulation maps more than there is."""


class _Slab:
    """`nbytes` of host memory outside PyTorch's allocators, pinned where a device is given that is no CPU.

    It is a private mapping in huge pages where the system has them (shared memory has none by default), and a process
    that is forked has no part in it: it would be handed a copy of what a GPU still writes.
    """

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        here = None if device is None else accelerator(device)
        self.mapped: Any
        self.pinned_by: Any = None
        if here is not None and not hasattr(here, "cudart"):
            # PyTorch pins memory that is there with CUDA's runtime alone: for other devices its allocator gives it
            self.mapped = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
            self.pinned_by = here
        else:
            self.mapped = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                with contextlib.suppress(AttributeError, OSError):  # a system without it
                    self.mapped.madvise(getattr(mmap, advice))
        self.bytes = torch.frombuffer(self.mapped, dtype=torch.uint8)
        if here is not None and self.pinned_by is None:
            if failed := int(here.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)):
                raise HostOutOfMemory(f"cannot pin {nbytes:,} bytes of host memory (CUDA error {failed})")
            self.pinned_by = here

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, told: Callable[[Tensor], None] | None) -> Tensor:
        """A tensor in this memory, with a storage of its own that ends when nobody has it or a view of it."""
        flat = torch.frombuffer(self.mapped, dtype=dtype, count=math.prod(shape))
        if told is not None:
            told(flat)
        if active_fake_mode() is not None:
            return flat.view(tuple(shape))
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage()).resize_(tuple(shape))  # not a view

    def __del__(self) -> None:
        if (here := getattr(self, "pinned_by", None)) is not None:
            here.synchronize()  # a copy may still run
            if hasattr(here, "cudart"):
                here.cudart().cudaHostUnregister(self.bytes.data_ptr())


def laid_out(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor in this memory, of bytes, with the shape and the strides of `like`, which has no gaps."""
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


class Ticket:
    """What one checkpoint keeps. Its slabs return to the store when it is read or when its graph is dropped.

    Args:
        after: the ticket that is read just before this one; None: the reading begins here, and goes on with what the
            last such ticket before this one began (last in, first out).
    """

    def __init__(self, store: HostStore, after: Ticket | None = None) -> None:
        self.store = store
        self.kept: list[tuple[Tensor, _Slab | None]] = []  # (host tensor, slab), or (device tensor, None)
        self.sent: Any = None
        """Event after which all of it is on the host; None where nothing has to be waited for."""
        self.coming: Coming | None = None
        """Function that gives its tensors on the device, where they are on their way."""
        if after is None:
            self.next, store.latest = store.latest, weakref.ref(self)
        else:
            self.next, after.next = after.next, weakref.ref(self)

    @property
    def there(self) -> bool:
        """Whether its tensors are on the host, to be brought to the device."""
        return bool(self.kept)

    def fetch(self, courier: Courier) -> Coming:
        # waits for the ticket's own, and not for all that is leaving: sums of pages may have been sent since
        return courier.fetch(*(host for host, _ in self.kept), after=self.sent)

    def release(self) -> None:
        if self.coming is not None:
            self.coming()  # the device's memory is given back after the copies
        self.store.free += [slab for _, slab in self.kept if slab is not None]
        self.kept = []

    def __del__(self) -> None:
        self.release()


class HostStore:
    """Keeps tensors between forward and backward: whole tensors under tickets, last in, first out; and tensors that are
    leased, whose parts are written and read one by one (`courier.Courier`).

    Args:
        mode: `none`, `sync` or `async` (see the module).
        budget: host bytes this store may take; None for what the machine has left for this rank.
    """

    def __init__(self, mode: Mode = "none", *, budget: int | None = None) -> None:
        self.mode, self.budget = mode, budget
        self.free: list[_Slab] = []
        self.latest: Callable[[], Ticket | None] = lambda: None
        self.nbytes = 0
        """Bytes of host memory that are taken now."""
        self.peak_nbytes = 0
        self.bytes_sent = self.bytes_fetched = 0
        """Bytes that were copied from the device to the host, and back, since the store was made."""
        self.on_slab: Callable[[Tensor], None] | None = None
        """Function that is called with each slab that is taken (a ledger counts it as host memory)."""
        self.leased = 0
        """Bytes of tensors that somebody has from `lease`."""
        self._longest, self._longer, self._shorter = 0, True, False
        """Bytes of the hidden states of the longest step, and how this step compares with it."""
        self._granted = self._spare = 0
        """Bytes of this forward that may be taken without asking for room, and bytes by which its slabs may be larger
        than what they hold."""
        self._streams: Any = None
        self._leaving: list[tuple[Tensor, Any]] = []
        """What of the tickets is on its way to the host."""

    def room(self) -> int:
        """Host bytes that this store may still take."""
        return (self.budget - self.nbytes) if self.budget is not None else host_available()

    def disk_room(self) -> int:
        """Bytes that a disk under the host may still take."""
        return 0

    def ticket(self, after: Ticket | None = None, part: bool = False) -> Ticket:
        return Ticket(self, after)

    def park(self, x: Tensor) -> Any:
        return x.detach()

    def unpark(self, held: Any, device: torch.device) -> Tensor:
        return held

    def put(self, ticket: Ticket, x: Tensor) -> None:
        """Keep x under a ticket. It comes back with the strides that it has: a permuted one is not copied first."""
        if self.mode == "none":
            ticket.kept.append((x.detach(), None))
            return
        x = gapless(x)
        slab = self._slab(x.nbytes, x.device)
        ticket.kept.append((laid_out(slab.bytes, x), slab))
        ticket.sent = Courier(self, x.device, self._leaving).send(ticket.kept[-1][0], x)

    def get(self, ticket: Ticket, device: torch.device) -> list[Tensor]:
        """The tensors of a ticket, on the device; starts bringing back those of the ticket that is read next."""
        if self.mode == "none":
            return [x for x, _ in ticket.kept]
        courier = Courier(self, device, self._leaving)
        tensors = (ticket.coming or ticket.fetch(courier))()
        ticket.coming = None
        courier.forget_sent()
        following = ticket.next() if courier.streams else None
        if following is not None and following.there:
            following.coming = following.coming or following.fetch(courier)
        ticket.release()
        return tensors

    def streams(self, device: torch.device) -> tuple[Any, Any] | None:
        """The streams out of a device and back, which all couriers share; None where copies run in the computation's
        stream, or on a CPU."""
        if self.mode != "async" or (here := accelerator(device)) is None:
            return None
        self._streams = self._streams or (here.Stream(device), here.Stream(device))
        return self._streams

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """A tensor on the host that is not yet written, in a slab that returns to the store when nobody has the tensor
        or a view of it any more; pinned for the device that copies it, where one does.

        Raises:
            HostOutOfMemory: there is no room for it.
        """
        slab = self._slab(math.prod(shape) * dtype.itemsize, device)
        made = slab.tensor(shape, dtype, self.on_slab)
        self.leased += slab.bytes.numel()
        weakref.finalize(made.untyped_storage(), self._take_back, slab).atexit = False
        return made

    def _take_back(self, slab: _Slab) -> None:
        self.leased -= slab.bytes.numel()
        self.free.append(slab)

    def _slab(self, nbytes: int, device: torch.device | None) -> _Slab:
        granted = nbytes <= self._granted
        if not granted:  # hidden states, before the layers are granted theirs
            self._begin(nbytes)
        # A shorter step takes what the longest has left, and only a longer one gives back what it does not use: to pin
        # slabs anew takes longer than the copies of a step (150 ms for each GB on an H200).
        slack = self.nbytes if self._shorter else nbytes // 4
        slack = min(slack, self._spare) if granted else slack
        fits = [slab for slab in self.free if nbytes <= slab.bytes.numel() <= nbytes + slack]
        best = min(fits, key=lambda slab: slab.bytes.numel(), default=None)
        if granted:
            self._granted -= nbytes
            self._spare -= 0 if best is None else best.bytes.numel() - nbytes
        if best is not None:
            self.free.remove(best)
            return best
        if self._longer or self.room() < nbytes:
            self.trim()  # what is free belongs to another length
        if not granted:
            _check(nbytes, self.room())
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        slab = _Slab(nbytes, device)
        if self.on_slab is not None:
            self.on_slab(slab.bytes)
        return slab

    def _begin(self, nbytes: int) -> None:
        """With hidden states of so many bytes, where nothing is kept, a step begins."""
        if self.nbytes == self.unused:
            self._longer, self._shorter = nbytes > self._longest, nbytes < self._longest
            self._longest = max(self._longest, nbytes)

    def trim(self) -> None:
        """Give back the slabs that hold nothing."""
        self.nbytes -= self.unused
        self.free.clear()

    @property
    def unused(self) -> int:
        """Bytes of slabs that hold nothing."""
        return sum(slab.bytes.numel() for slab in self.free)

    def reserve(self, nbytes: int, room: int | None = None, hidden: int = 0) -> None:
        """Grant a whole forward `nbytes` of the `room` that there is (None: now), before anything is taken: then no
        rank runs out of memory in the middle, where the others would wait for it.

        Args:
            hidden: bytes of the hidden states, where the forward begins here.

        Raises:
            HostOutOfMemory: they do not fit.
        """
        room = self.room() + self.unused if room is None else room
        _check(nbytes, room)
        if hidden:
            self._begin(hidden)
        self._granted, self._spare = nbytes + nbytes // 64, room - nbytes  # heads that are shared unevenly take more


def _check(nbytes: int, room: int) -> None:
    if nbytes > room:
        raise HostOutOfMemory(
            f"offload needs {nbytes:,} bytes of host memory for this rank, and {room:,} are left; use a shorter "
            "sequence, more ranks, a larger host_memory, or offload=False"
        )
