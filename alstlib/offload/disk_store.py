"""A disk under the host: a `HostStore` that keeps on a local disk what the host has no room for.

Of the checkpoints of one forward a share goes to the disk, spread evenly over the layers, so that writing and reading
run beside all of the computation. A tensor is copied to the host first and written from there by threads; backward
reads the layers in its own order, two ahead. Pieces are large, aligned to pages, and pass by the page cache (O_DIRECT)
where the file system lets them: what waits for backward is read once, and a cache of it would take the memory that the
disk is there to save. The file has no name, so that it ends with the process.

On a virtual disk (ext4, single runs) O_DIRECT wrote and read about 2 GB/s with one to eight threads, and a buffered
file was written with 0.15 GB/s.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alstlib.base.mesh import SPContext, accelerator
from alstlib.base.options import Disk
from alstlib.base.sizing import PAGE, STAGED, Spread, padded, ranks_here
from alstlib.offload.courier import Courier, gapless
from alstlib.offload.host_store import HostStore, Mode, Ticket, laid_out

PIECE = 16 * 2**20
"""Bytes that one call reads or writes."""
THREADS = 4
Ready = Callable[[], None]
"""Function that returns once memory may be read or written."""
Moves = list[Future[None]]
"""Pieces that are written or read, each with whether it is done."""
PATIENCE = 120.0
"""Seconds without a piece read or written, after which the disk counts as failed: engines' own limits are longer."""


class DiskFailed(OSError):
    """The disk that holds checkpoints is full, too slow or broken."""


def unnamed_file(folder: str) -> int:
    """The descriptor of a new file in a folder, which has no name there and ends with the process.

    Raises:
        ValueError: the folder takes no file.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as e:
        raise ValueError(f"disk.folder={folder!r} takes no file ({e.strerror}): give a folder on a local disk") from e


def goes_direct(descriptor: int) -> bool:
    """Have a new file pass by the page cache from now on, and return whether its file system does that."""
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, before | os.O_DIRECT)
        os.pwrite(descriptor, mmap.mmap(-1, PAGE), 0)
    except (AttributeError, OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, before)
        return False
    return True


class DiskFile:
    """One rank's file: room is taken from its beginning to its end, and all of it is given back together.

    Args:
        limit: bytes that it may have; None: an even share of what is free.
    """

    def __init__(self, folder: str, limit: int | None = None) -> None:
        self.folder, self.limit, self.descriptor = folder, limit, unnamed_file(folder)
        self.direct = goes_direct(self.descriptor)
        self.size = self.end = self.held = self.peak = 0
        """Bytes that are allocated, up to where room is taken, that hold something, and that held most."""
        self.written = self.read = 0
        """Bytes since the file was made."""
        self.threads = ThreadPoolExecutor(THREADS, "alst-disk")
        self.close = weakref.finalize(self, _close, self.threads, self.descriptor)

    def room(self) -> int:
        """Bytes that may still be taken."""
        about = os.fstatvfs(self.descriptor)
        free = about.f_bavail * about.f_frsize // ranks_here() + self.size - self.end
        return free if self.limit is None else min(free, self.limit - self.end)

    def allocate(self, nbytes: int) -> None:
        """Have room for so many bytes more than are taken. OSError: the disk is full."""
        if (lacking := self.end + nbytes - self.size) > 0:
            os.posix_fallocate(self.descriptor, self.size, lacking)
            self.size += lacking

    def take(self, nbytes: int) -> int:
        """The place of room for so many bytes."""
        place, self.end = self.end, self.end + nbytes
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return place

    def write(self, memory: Tensor, place: int, ready: Ready) -> Moves:
        """Write memory, whole pages of it, once `ready` returns."""
        self.written += padded(memory.nbytes)
        return self._pieces(lambda view, at: os.pwrite(self.descriptor, view, at), memory, place, ready)

    def fill(self, memory: Tensor, place: int, ready: Ready) -> Moves:
        """Read into memory, once `ready` returns."""
        self.read += padded(memory.nbytes)
        return self._pieces(lambda view, at: os.preadv(self.descriptor, [view], at), memory, place, ready)

    def _pieces(self, move: Callable[[memoryview, int], int], memory: Tensor, place: int, ready: Ready) -> Moves:
        # by its address: a thread that had the tensor could be the last to have it, and would give its slab back
        if self.direct and memory.data_ptr() % PAGE:  # pinned by PyTorch, for accelerators other than CUDA's
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False
        nbytes = padded(memory.nbytes)
        view = memoryview((ctypes.c_char * nbytes).from_address(memory.data_ptr())).cast("B")

        def piece(first: int) -> None:
            ready()
            last = min(nbytes, first + PIECE)
            while first < last:
                moved = move(view[first:last], place + first)
                if moved <= 0:
                    raise OSError(errno.EIO, "the file ends early")
                first += moved

        return [self.threads.submit(piece, first) for first in range(0, nbytes, PIECE)]


def _close(threads: ThreadPoolExecutor, descriptor: int) -> None:
    threads.shutdown()
    os.close(descriptor)


@dataclass
class _Away:
    """A tensor on the disk; in its place the ticket has one without memory."""

    place: int
    reads: Moves = field(default_factory=list)
    memory: Tensor | None = None
    """Where it is read to."""


class DiskTicket(Ticket):
    """What one checkpoint keeps, of which some may be on the disk.

    Args:
        leads: whether a layer's backward begins with it.
    """

    store: DiskStore

    def __init__(self, store: DiskStore, after: Ticket | None, leads: bool) -> None:
        super().__init__(store, after)
        self.leads, self.used = leads, store.used
        self.away: dict[int, _Away] = {}
        """By their place in `kept`."""
        self.parked = False

    @property
    def there(self) -> bool:
        return bool(self.kept) and not self.away and not self.parked

    def release(self) -> None:
        self.store.file.held -= sum(padded(self.kept[place][0].nbytes) for place in self.away)
        self.away = {}
        super().release()


class DiskStore(HostStore):
    """Keeps on the host what it has room for, and the rest of the checkpoints on a disk. What is leased stays on the
    host. The share that goes to the disk is set for each forward (`share`).

    A disk that fails is not told where it is noticed, in the middle of a layer, where other ranks would wait: all ranks
    ask each other before each layer's backward, and stop together with `DiskFailed`.
    """

    def __init__(self, mode: Mode, disk: Disk, ctx: SPContext, *, budget: int | None = None) -> None:
        super().__init__(mode, budget=budget)
        self.ctx, self.file, self.failed = ctx, DiskFile(disk.folder, disk.bytes), ""
        self.used = False
        """Whether this forward uses the disk, on some rank."""
        self._spread, self._staged = Spread(0, 1), 0
        self._writing: list[tuple[Moves, Tensor]] = []
        """What is written, and its memory, which must stay until then."""
        self._reading: list[tuple[Moves, Tensor]] = []

    def disk_room(self) -> int:
        if self.file.held == 0:  # after writes of graphs that were dropped, the file begins anew
            self._finish([*self._writing, *self._reading])
            self.file.end = 0
        return max(0, self.file.room())

    def share(self, spread: Spread, away: int, staged: int) -> None:
        """A forward begins, of which so many bytes go `away` to the disk, as `spread` says of each tensor; up to
        `staged` bytes are on their way. Collective.

        Raises:
            DiskFailed: on every rank, where one has no room on its disk.
        """
        try:
            self.file.allocate(padded(away))
        except OSError as e:
            self._fail(f"has no room for {away:,} bytes", e)
        self.used = self._agree(away > 0)
        self._spread, self._staged = spread, staged

    def ticket(self, after: Ticket | None = None, part: bool = False) -> DiskTicket:
        return DiskTicket(self, after, after is None and not part)

    def put(self, ticket: Any, x: Tensor) -> None:
        if self._spread.stays(x.nbytes):
            super().put(ticket, x)
            return
        x = gapless(x)
        if not self._has_room(ticket, x):
            return
        memory = self.lease((padded(x.nbytes),), torch.uint8, x.device)
        courier = Courier(self, x.device, self._leaving)
        sent = courier.send(laid_out(memory, x), x)
        if sent is None and courier.here is not None:
            sent = courier.compute.record_event()
        self._write(ticket, x, memory, _nothing if sent is None else sent.synchronize)

    def park(self, x: Tensor) -> Any:
        ticket = self.ticket()
        ticket.parked = True
        if self._spread.stays(x.nbytes):
            ticket.kept.append((x, None))
            return ticket
        if not self._has_room(ticket, x):
            return ticket
        memory = x.detach()
        if not x.is_contiguous() or x.data_ptr() % PAGE:
            memory = self.lease(x.shape, x.dtype, None)
            memory.copy_(x)
        self._write(ticket, memory, memory, _nothing)
        return ticket

    def get(self, ticket: Any, device: torch.device) -> list[Tensor]:
        self._bring(ticket, device)
        return super().get(ticket, device)

    def unpark(self, held: Any, device: torch.device) -> Tensor:
        self._bring(held, device)
        ((x, _),), held.kept = held.kept, []
        return x

    def close(self) -> None:
        """Give the disk's room back. Of a disk that failed the process's end does: a call may still hang in it."""
        if not self.failed:
            self.file.close()
            self._reap()  # memory that is on its way has this store

    # ----- on its way

    def _write(self, ticket: DiskTicket, like: Tensor, memory: Tensor, ready: Ready) -> None:
        place = self.file.take(padded(like.nbytes))
        writes = self.file.write(memory, place, ready)
        self._writing.append((writes, memory))
        ticket.away[len(ticket.kept)] = _Away(place)
        ticket.kept.append((like.to("meta"), None))

    def _bring(self, ticket: DiskTicket, device: torch.device) -> None:
        """Have what a ticket keeps on the host, and start to read for the next two layers. What is still to be written
        comes first: there is memory for three layers, and not for three in each direction."""
        self._finish(self._writing)
        here, own, layers = accelerator(device), [ticket], 1
        # memory that was given back may still be copied from, up to here in the device's order
        ready = _nothing if here is None else here.current_stream(device).record_event().synchronize
        self._read(ticket, device, ready)
        following = ticket.next() if ticket.leads and ticket.used else None
        while isinstance(following, DiskTicket) and (layers := layers + following.leads) <= STAGED:
            self._read(following, device, ready)
            own += [following] * (layers == 1)
            following = following.next()
        for one in own:
            for place, away in one.away.items():
                self._wait(away.reads)
                if away.memory is None:  # the disk has failed
                    continue
                one.kept[place] = (laid_out(away.memory, one.kept[place][0]), None)
                self.file.held -= padded(one.kept[place][0].nbytes)
            one.away = {}
        if ticket.leads and ticket.used:
            self._agree()
        elif self.failed:
            raise DiskFailed(self.failed)
        self._reap()

    def _read(self, ticket: DiskTicket, device: torch.device, ready: Ready) -> None:
        for place, away in ticket.away.items():
            if away.memory is None and not self.failed:
                away.memory = self.lease((padded(ticket.kept[place][0].nbytes),), torch.uint8, device)
                away.reads = self.file.fill(away.memory, away.place, ready)
                self._reading.append((away.reads, away.memory))

    def _has_room(self, ticket: DiskTicket, x: Tensor) -> bool:
        """Wait until what is on its way leaves room for x: then the disk is slower than the computation. False: the
        disk has failed, and x is lost, which all ranks hear in backward."""
        self._reap()
        while self._writing and x.nbytes + sum(memory.nbytes for _, memory in self._writing) > self._staged:
            self._wait(self._writing[0][0])
            self._reap()
            if self.failed:
                ticket.kept.append((x.new_empty(0, device="cpu"), None))
                return False
        return True

    def _wait(self, moves: Sequence[Future[None]]) -> None:
        """Wait for reads or writes, and remember what failed."""
        left = set(moves)
        while left and not self.failed:
            done, left = wait(left, PATIENCE, FIRST_COMPLETED)
            if not done:
                self._fail(f"has moved nothing for {PATIENCE:g} s")
            for one in done:
                if (error := one.exception()) is not None:
                    self._fail("failed", error)

    def _reap(self) -> None:
        """Let memory go that is written or read; the oldest comes first."""
        for moving in (self._writing, self._reading):
            while moving and all(move.done() for move in moving[0][0]):
                self._wait(moving.pop(0)[0])

    def _finish(self, moving: Sequence[tuple[Moves, Tensor]]) -> None:
        for moves, _ in moving:
            self._wait(moves)
        self._reap()

    def _fail(self, what: str, error: BaseException | None = None) -> None:
        why = "" if error is None else f" ({getattr(error, 'strerror', None) or error})"
        self.failed = self.failed or (
            f"the disk in {self.file.folder!r} {what}{why}; use a shorter sequence, another folder, or disk=None"
        )

    def _agree(self, flag: bool = False) -> bool:
        """Whether the flag is set on some rank, where no rank's disk has failed."""
        failed, found = self.ctx.largest([(self.ctx.rank + 1) * bool(self.failed), int(flag)])
        if failed:
            raise DiskFailed(self.failed or f"the disk of rank {failed - 1} failed: its own message says why")
        return bool(found)

    def _take_back(self, slab: Any) -> None:
        super()._take_back(slab)
        self._granted += slab.bytes.numel()  # memory on the way to the disk is taken many times in a step


def _nothing() -> None:
    pass


def check_disk(disk: Disk) -> str:
    """Look at whether a folder takes a file, and return a note where its file system refuses direct access.

    Raises:
        ValueError: it takes none.
    """
    file = DiskFile(disk.folder)
    file.close()
    return "" if file.direct else (
        f"the file system of disk.folder={disk.folder!r} refuses direct access (O_DIRECT): checkpoints go through "
        "the page cache, which is slower and takes memory"
    )  # fmt: skip
