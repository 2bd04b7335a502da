"""Checkpoints that leave for the host: a layer keeps only its input, and that on the CPU (ALST, section 3.3).

`checkpoint` runs a function without a graph and recomputes it in backward. What it keeps in between (the input and, if
asked, attention outputs) lies in a `HostStore`:

- `none`: it stays on the device;
- `sync`: copied on the compute stream (the paper's way);
- `async`: on CUDA copied on streams of its own, out of and into pinned memory, and the previous layer's tensors start
  coming back before a layer is recomputed. Where there is no stream (CPU), the same as `sync`.

Host memory is taken in slabs of the exact size, reused from step to step (PyTorch's pinned allocator rounds up to
powers of two, up to twice what is needed).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from alstlib.tiled import Replay

Mode = Literal["none", "sync", "async"]
MODES = ("none", "sync", "async")


class HostOutOfMemory(MemoryError):
    """The host has too little memory for what is to be kept there."""


def host_available() -> int:
    """Bytes of host memory that this process may still take: free memory (or its control group's rest), shared evenly
    by the ranks of this machine (LOCAL_WORLD_SIZE)."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as top, open("/sys/fs/cgroup/memory.current") as now:
            if (text := top.read().strip()) != "max":
                free = min(free, int(text) - int(now.read()))
    except (OSError, ValueError):
        pass
    return max(0, free) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Slab:
    """`nbytes` of host memory outside PyTorch's allocators, pinned for a CUDA device."""

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)
        self.pinned = pin
        if pin:
            failed = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
            if int(failed):
                raise HostOutOfMemory(f"cannot pin {nbytes:,} bytes of host memory (CUDA error {int(failed)})")

    def view(self, like: Tensor) -> Tensor:
        return self.bytes[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def __del__(self) -> None:
        if getattr(self, "pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class Ticket:
    """What one checkpoint keeps. Its slabs return to the store when it is read or when its graph is dropped."""

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self.kept: list[tuple[Tensor, _Slab | None]] = []  # (host tensor, slab), or (device tensor, None)
        self.fetched: tuple[list[Tensor], Any] | None = None
        self.previous = store.latest
        store.latest = weakref.ref(self)

    def release(self) -> None:
        if self.fetched is not None and self.fetched[1] is not None:  # dropped while its tensors are on their way back
            torch.cuda.current_stream(self.fetched[0][0].device).wait_event(self.fetched[1])
        for _, slab in self.kept:
            if slab is not None:
                self.store.free.append(slab)
        self.kept = []

    def __del__(self) -> None:
        self.release()


class HostStore:
    """Keeps tensors between forward and backward; last in, first out.

    Args:
        mode: `none`, `sync` or `async` (see the module).
        budget: host bytes this store may take; None for what the machine has left for this rank.
    """

    def __init__(self, mode: Mode = "none", *, budget: int | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"offload={mode!r} is not one of {', '.join(MODES)}")
        self.mode, self.budget = mode, budget
        self.free: list[_Slab] = []
        self.latest: Callable[[], Ticket | None] = lambda: None
        self.nbytes = 0
        """Host bytes taken now."""
        self.peak_nbytes = 0
        self.on_slab: Callable[[Tensor], None] | None = None
        """Told of each slab that is taken (a ledger counts it as host memory)."""
        self._streams: tuple[Any, Any] | None = None
        self._leaving: list[tuple[Tensor, Any]] = []

    def room(self) -> int:
        """Host bytes that this store may still take."""
        return (self.budget - self.nbytes) if self.budget is not None else host_available()

    def ticket(self) -> Ticket:
        return Ticket(self)

    def put(self, ticket: Ticket, x: Tensor) -> None:
        """Keep x under a ticket."""
        x = x.detach()
        if self.mode == "none":
            ticket.kept.append((x, None))
            return
        x = x.contiguous()
        slab = self._slab(x.numel() * x.element_size(), x.is_cuda)
        host = slab.view(x)
        ticket.kept.append((host, slab))
        if not (x.is_cuda and self.mode == "async"):
            host.copy_(x)
            return
        compute, (out, _) = torch.cuda.current_stream(x.device), self._cuda_streams(x.device)
        out.wait_stream(compute)
        with torch.cuda.stream(out):
            host.copy_(x, non_blocking=True)
        self._leaving.append((x, out.record_event()))  # x lives until its copy is done, in the compute stream's order
        while len(self._leaving) > 2:
            _, done = self._leaving.pop(0)
            compute.wait_event(done)

    def get(self, ticket: Ticket, device: torch.device) -> list[Tensor]:
        """The tensors of a ticket, on the device; starts bringing back those of the ticket before it."""
        if self.mode == "none":
            return [x for x, _ in ticket.kept]
        self._fetch(ticket, device)
        assert ticket.fetched is not None
        (tensors, event), ticket.fetched = ticket.fetched, None
        if event is not None:
            compute = torch.cuda.current_stream(device)
            compute.wait_event(event)
            for _, done in self._leaving:
                compute.wait_event(done)
            self._leaving.clear()
            if (before := ticket.previous()) is not None and before.kept:
                self._fetch(before, device)
        ticket.release()
        return tensors

    def _fetch(self, ticket: Ticket, device: torch.device) -> None:
        if ticket.fetched is not None:
            return
        tensors = [torch.empty(host.shape, dtype=host.dtype, device=device) for host, _ in ticket.kept]
        if not (device.type == "cuda" and self.mode == "async"):
            for tensor, (host, _) in zip(tensors, ticket.kept):
                tensor.copy_(host)
            ticket.fetched = (tensors, None)
            return
        out, back = self._cuda_streams(device)
        back.wait_stream(torch.cuda.current_stream(device))  # the buffers' memory may still be in use there
        back.wait_stream(out)
        with torch.cuda.stream(back):
            for tensor, (host, _) in zip(tensors, ticket.kept):
                tensor.copy_(host, non_blocking=True)
        ticket.fetched = (tensors, back.record_event())

    def _cuda_streams(self, device: torch.device) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams

    def _slab(self, nbytes: int, pin: bool) -> _Slab:
        fits = [slab for slab in self.free if nbytes <= slab.bytes.numel() <= nbytes * 5 // 4]
        if fits:
            best = min(fits, key=lambda slab: slab.bytes.numel())
            self.free.remove(best)
            return best
        self.trim()  # what is free belongs to another length
        if (room := self.room()) < nbytes:
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
        self.nbytes -= sum(slab.bytes.numel() for slab in self.free)
        self.free.clear()

    def check_room(self, nbytes: int) -> None:
        """Raise HostOutOfMemory, before anything is taken, when `nbytes` for one whole forward will not fit."""
        have = self.room() + sum(slab.bytes.numel() for slab in self.free)
        if self.mode != "none" and nbytes > have:
            raise HostOutOfMemory(
                f"offload needs {nbytes:,} bytes of host memory for this rank, and {have:,} are left; "
                "use a shorter sequence, more ranks, a larger host_memory, or offload='none'"
            )


class Saved:
    """Attention outputs that a checkpoint keeps from its first pass for its recompute: (output, logsumexp) in order
    of the calls, output in sequence layout [B, H, L, D], logsumexp [B, H / P, S] in head layout."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.replaying = False
        self.position = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """The next call's output and logsumexp."""
        self.position += 1
        return self.tensors[self.position - 1]

    def rewind(self, tensors: list[Tensor]) -> None:
        """Start a recompute over these tensors (output, logsumexp, output, ...)."""
        self.tensors, self.replaying, self.position = list(zip(tensors[::2], tensors[1::2])), True, 0


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Any],
        store: HostStore,
        saved: Saved | None,
        accept: Callable[[Any], bool],
        x: Tensor,
        *rest: Tensor,
    ) -> Any:
        ctx.run, ctx.store, ctx.saved, ctx.accept, ctx.device = run, store, saved, accept, x.device
        ctx.needs = (x.requires_grad, *(t.requires_grad for t in rest))
        ctx.replay = Replay(x.device)
        ctx.ticket = store.ticket()
        store.put(ctx.ticket, x)
        out = run(x, *rest)
        if saved is not None:
            for pair in saved.tensors:
                for t in pair:
                    store.put(ctx.ticket, t)
            saved.tensors = []
        ctx.save_for_backward(*rest)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.ticket is None:
            raise RuntimeError("checkpoint: backward a second time; what it kept is gone after the first")
        x, *kept = ctx.store.get(ctx.ticket, ctx.device)
        ctx.ticket = None
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *ctx.saved_tensors), ctx.needs)]
        del x
        out = _recompute(ctx, leaves, kept)
        if not ctx.accept(out):
            del out
            out = _recompute(ctx, leaves, kept)
        del kept
        if ctx.saved is not None:
            ctx.saved.tensors = []
        outs = (out,) if isinstance(out, Tensor) else out
        pairs = [(o, g) for o, g in zip(outs, grads) if isinstance(o, Tensor) and o.requires_grad and g is not None]
        del out, outs
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return (None, None, None, None, *(leaf.grad for leaf in leaves))


def _recompute(ctx: Any, leaves: list[Tensor], kept: list[Tensor]) -> Any:
    if ctx.saved is not None:
        ctx.saved.rewind(kept)
    with ctx.replay(), torch.enable_grad():
        return ctx.run(*leaves)


def checkpoint(
    fn: Callable[..., Any],
    x: Tensor,
    *args: Any,
    store: HostStore | None = None,
    saved: Saved | None = None,
    trains: bool = True,
    accept: Callable[[Any], bool] = lambda out: True,
    **kwargs: Any,
) -> Any:
    """Run fn(x, *args, **kwargs) keeping only x, and recompute it in backward (ALST, section 3.3).

    Gradients of weights inside `fn` are added up by the recompute's own backward, as in PyTorch's re-entrant
    checkpointing, so that engines' hooks see them; dropout and autocast are replayed.

    Args:
        fn: returns a tensor or a tuple of tensors.
        x: kept in `store`; other tensors in `args` and `kwargs` stay where they are.
        store: where x is kept; None keeps it on its device.
        saved: attention outputs to keep beside x; the same object must reach the attention inside `fn`.
        trains: `fn` has weights that train: x is made to need a gradient where it does not.
        accept: looks at what a recompute returned, before its backward; where it says False, `fn` runs once more.

    Returns:
        What `fn` returned. Without gradients (`no_grad`), `fn` is simply run.
    """
    if not torch.is_grad_enabled():
        return fn(x, *args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    where = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
    if not (x.requires_grad or where):
        if not trains:
            return fn(x, *args, **kwargs)
        x = x.detach().requires_grad_()
    needing = [flat[i] for i in where]
    for i in where:
        flat[i] = None  # held by autograd below

    def run(x: Tensor, *tensors: Tensor) -> Any:
        filled = list(flat)
        for i, t in zip(where, tensors):
            filled[i] = t
        a, kw = tree_unflatten(filled, spec)
        return fn(x, *a, **kw)

    return _Checkpoint.apply(run, store or HostStore(), saved, accept, x, *needing)
