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
import ctypes
import functools
import math
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from alstlib.mesh import accelerator
from alstlib.offload.storage import Copies
from alstlib.sizing import host_free

Mode = Literal["none", "sync", "async"]


class HostOutOfMemory(MemoryError):
    """The host has too little memory for what is to be kept there."""


def host_available() -> int:
    """Bytes of host memory that this process may still take: what is free, shared evenly by the ranks of this machine
    (LOCAL_WORLD_SIZE)."""
    return host_free() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@functools.cache
def numa_node(device: int, buses: str = "/sys/bus/pci/devices") -> int | None:
    """The NUMA node that one of NVIDIA's GPUs is attached to, by its PCI bus; None where this cannot be known, or where
    there is only one."""
    about: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        with open(f"{buses}/{bus}/numa_node") as text:
            node = int(text.read())
    except (AttributeError, OSError, ValueError):
        return None
    return node if 0 <= node < 64 else None


_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call `mbind` by the machine's architecture, because libc does not have it."""
_PREFERRED = 1
_NO_RESERVE = 0x4000
"""Value of the flag `MAP_NORESERVE`: room was asked for before, and a simulation maps more than there is."""


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Take the pages of a mapping that nobody has touched from a NUMA node, and from others where it is full; returns
    whether the system does so."""
    if sys.platform != "linux" or (number := _MBIND.get(platform.machine())) is None:
        return False
    mask = ctypes.c_ulong(1 << node)
    end = (address + nbytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    arguments = (address, end - address, _PREFERRED, ctypes.addressof(mask), 65, 0)
    return ctypes.CDLL(None, use_errno=True).syscall(number, *(ctypes.c_ulong(a) for a in arguments)) == 0


class _Slab:
    """`nbytes` of host memory outside PyTorch's allocators, pinned for a device where one is given.

    It is a private mapping in huge pages where the system has them (shared memory has none by default), near the GPU,
    and a process that is forked has no part in it: it would be handed a copy of what a GPU still writes.
    """

    def __init__(self, nbytes: int, pin: torch.device | None) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if sys.platform == "linux" else 0)
        mapped = mmap.mmap(-1, max(1, nbytes), flags=flags)
        self.mapped: Any = mapped
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):  # a system without it
                mapped.madvise(getattr(mmap, advice))
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.pinned_for: Any = None
        if pin is not None:
            here = accelerator(pin)
            if pin.type == "cuda" and (node := numa_node(here.current_device())) is not None:
                prefer_node(self.bytes.data_ptr(), self.bytes.numel(), node)
            if hasattr(here, "cudart"):
                failed = here.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
                if int(failed):
                    raise HostOutOfMemory(f"cannot pin {nbytes:,} bytes of host memory (CUDA error {int(failed)})")
            else:  # PyTorch pins memory that is there with CUDA's runtime alone: for others its allocator gives it
                pinned = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cpu", pin_memory=True)
                self.mapped = pinned.numpy()
                self.bytes = torch.frombuffer(self.mapped, dtype=torch.uint8)
            self.pinned_for = here

    def view(self, like: Tensor) -> Tensor:
        """A tensor in this memory with the shape and the strides of `like`, which has no gaps."""
        flat = self.bytes[: like.numel() * like.element_size()].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, told: Callable[[Tensor], None] | None) -> Tensor:
        """A tensor in this memory, with a storage of its own that ends when nobody has it or a view of it."""
        flat = torch.frombuffer(self.mapped, dtype=dtype, count=math.prod(shape))
        if told is not None:
            told(flat)
        if active_fake_mode() is not None:
            return flat.view(tuple(shape))
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage()).resize_(tuple(shape))  # not a view

    def __del__(self) -> None:
        if (here := getattr(self, "pinned_for", None)) is not None:
            here.synchronize()  # a copy may still run
            if hasattr(here, "cudart"):
                here.cudart().cudaHostUnregister(self.bytes.data_ptr())


def _without_gaps(x: Tensor) -> Tensor:
    """x, or a copy of it where its elements do not lie side by side in memory, in whatever order."""
    size = 1
    for stride, n in sorted((stride, n) for stride, n in zip(x.stride(), x.shape) if n > 1):
        if stride != size:
            return x.contiguous()
        size *= n
    return x


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
        self.fetched: tuple[list[Tensor], Any] | None = None
        if after is None:
            self.next, store.latest = store.latest, weakref.ref(self)
        else:
            self.next, after.next = after.next, weakref.ref(self)

    def release(self) -> None:
        if self.fetched is not None and self.fetched[1] is not None:  # dropped while its tensors are on their way back
            device = self.fetched[0][0].device
            accelerator(device).current_stream(device).wait_event(self.fetched[1])
        for _, slab in self.kept:
            if slab is not None:
                self.store.free.append(slab)
        self.kept = []

    def __del__(self) -> None:
        self.release()


class HostStore:
    """Keeps tensors between forward and backward; last in, first out (see `Ticket`).

    Args:
        mode: `none`, `sync` or `async` (see the module).
        budget: host bytes this store may take; None for what the machine has left for this rank.
    """

    def __init__(self, mode: Mode = "none", *, budget: int | None = None) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"offload={mode!r} is not one of {', '.join(get_args(Mode))}")
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
        self._first = self._most = 0
        """Bytes of the longest step's first tensor, and bytes that this step was granted."""
        self._shorter = False
        """Whether this step is shorter than another was."""
        self._granted = self._spare = 0
        """Bytes of this forward that may be taken without asking for room, and bytes by which its slabs may be larger
        than what they hold."""
        self._streams: Any = None
        self._own: Copies | None = None

    def room(self) -> int:
        """Host bytes that this store may still take."""
        return (self.budget - self.nbytes) if self.budget is not None else host_available()

    def ticket(self, after: Ticket | None = None) -> Ticket:
        return Ticket(self, after)

    def put(self, ticket: Ticket, x: Tensor) -> None:
        """Keep x under a ticket. It comes back with the strides that it has: a permuted one is not copied first."""
        x = x.detach()
        if self.mode == "none":
            ticket.kept.append((x, None))
            return
        x = _without_gaps(x)
        self.bytes_sent += x.numel() * x.element_size()
        slab = self._slab(x.numel() * x.element_size(), None if accelerator(x.device) is None else x.device)
        host = slab.view(x)
        ticket.kept.append((host, slab))
        if (copies := self._copies(x.device)) is None:
            host.copy_(x)
        else:
            ticket.sent = copies.send(host, x)

    def get(self, ticket: Ticket, device: torch.device) -> list[Tensor]:
        """The tensors of a ticket, on the device; starts bringing back those of the ticket that is read next."""
        if self.mode == "none":
            return [x for x, _ in ticket.kept]
        self._fetch(ticket, device)
        assert ticket.fetched is not None
        (tensors, event), ticket.fetched = ticket.fetched, None
        if (copies := self._copies(device)) is not None:
            copies.compute.wait_event(event)
            copies.forget_sent()
            if (following := ticket.next()) is not None and following.kept:
                self._fetch(following, device)
        ticket.release()
        return tensors

    def _fetch(self, ticket: Ticket, device: torch.device) -> None:
        if ticket.fetched is not None:
            return
        hosts = [host for host, _ in ticket.kept]
        self.bytes_fetched += sum(host.numel() * host.element_size() for host in hosts)
        tensors = [torch.empty_strided(h.shape, h.stride(), dtype=h.dtype, device=device) for h in hosts]
        if (copies := self._copies(device)) is None:
            for tensor, host in zip(tensors, hosts):
                tensor.copy_(host)
            ticket.fetched = (tensors, None)
        else:  # waits for the ticket's own, and not for all that is leaving: sums of pages may have been sent since
            ticket.fetched = (tensors, copies.fetch(tensors, hosts, ticket.sent))

    def copies(self, device: torch.device) -> Copies | None:
        """What copies beside the computation of a device, on streams that all of them share; None where nothing
        does."""
        if self.mode != "async" or (here := accelerator(device)) is None:
            return None
        if self._streams is None:
            self._streams = (here.Stream(device), here.Stream(device))
        return Copies(device, self._streams)

    def _copies(self, device: torch.device) -> Copies | None:
        """The copies of the tickets."""
        self._own = self._own or self.copies(device)
        return self._own

    def lease(self, shape: Sequence[int], dtype: torch.dtype, pin: torch.device | None) -> Tensor:
        """A tensor on the host that is not yet written, in a slab that returns to the store when nobody has the tensor
        or a view of it any more; pinned for a device where one is given.

        Raises:
            HostOutOfMemory: there is no room for it.
        """
        slab = self._slab(math.prod(shape) * dtype.itemsize, pin)
        made = slab.tensor(shape, dtype, self.on_slab)
        self.leased += slab.bytes.numel()
        weakref.finalize(made.untyped_storage(), self._take_back, slab).atexit = False
        return made

    def _take_back(self, slab: _Slab) -> None:
        self.leased -= slab.bytes.numel()
        self.free.append(slab)

    def _slab(self, nbytes: int, pin: torch.device | None) -> _Slab:
        granted = nbytes <= self._granted
        if not granted and self.nbytes == self.unused:  # hidden states, before the layers are granted theirs
            self._first, self._shorter = max(self._first, nbytes), nbytes < self._first
        # A shorter sample takes what the longest has left: to pin slabs anew takes longer than the copies of a step.
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
        if not self._shorter or self.room() < nbytes:
            self.trim()  # what is free belongs to another length
        if not granted and (room := self.room()) < nbytes:
            raise HostOutOfMemory(
                f"offload needs {nbytes:,} more bytes of host memory for this rank, and {room:,} are left; "
                "use a shorter sequence, more ranks, or a larger host_memory"
            )
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        slab = _Slab(nbytes, pin)
        if self.on_slab is not None:
            self.on_slab(slab.bytes)
        return slab

    def trim(self) -> None:
        """Give back the slabs that hold nothing."""
        self.nbytes -= self.unused
        self.free.clear()

    @property
    def unused(self) -> int:
        """Bytes of slabs that hold nothing."""
        return sum(slab.bytes.numel() for slab in self.free)

    def reserve(self, nbytes: int, room: int | None = None) -> None:
        """Grant a whole forward `nbytes` of the `room` that there is (None: now), before anything is taken: then no
        rank runs out of memory in the middle, where the others would wait for it.

        Raises:
            HostOutOfMemory: they do not fit.
        """
        room = self.room() + self.unused if room is None else room
        if nbytes > room:
            raise HostOutOfMemory(
                f"offload needs {nbytes:,} bytes of host memory for this rank, and {room:,} are left; "
                "use a shorter sequence, more ranks, a larger host_memory, or offload=False"
            )
        self._shorter = nbytes < self._most
        self._most = max(self._most, nbytes)
        self._granted, self._spare = nbytes + nbytes // 64, room - nbytes  # heads that are shared unevenly take more
