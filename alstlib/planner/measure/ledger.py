"""The byte ledger counts how much device and host memory a run takes, on a GPU or on a CPU that stands in for one.

The device peak comes from the allocator of the device (CUDA's or another's). On a CPU an instrument watches every
operation and counts the storages alive: what a GPU would hold. Host memory is what checkpoint stores have taken and
what an engine keeps on the host (`mark_host`), which on a CPU is taken out of the device's count.

With a budget, a CPU run stops with `DeviceOutOfMemory` at the operation that goes beyond it, as a GPU would. The
instrument costs time for each operation: time steps without it. Workspaces inside an operator are not seen (they are
small: a test holds the reading against PyTorch's own allocation events to 1%).
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from alstlib.base.mesh import accelerator
from alstlib.offload.host_store import HostStore

DEVICE = torch.ops.prim.device.default


class DeviceOutOfMemory(MemoryError):
    """A run went beyond its device budget."""


RAN_OUT = ("out of memory", "_STATUS_ALLOC_FAILED", "Failed to CUDA calloc", "can't allocate memory")
"""Texts in the plain RuntimeErrors of CUDA, cuDNN and cuBLAS, NCCL, and PyTorch on the host that ran out of memory."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that device or host memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text.lower() in str(error).lower() for text in RAN_OUT)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of what an operation takes or makes: lists and tuples alone, because `pytree`, which knows every
    container, is slow, and each operation asks."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


class _CpuInstrument(TorchDispatchMode):
    """Counts the bytes of CPU storages alive, from the operations that make them."""

    def __init__(self, budget: int | None, record: bool) -> None:
        super().__init__()
        self.budget, self.record = budget, record
        self.place: Callable[[], str] | None = None
        self.live: dict[int, tuple[Any, int, str | None]] = {}  # without a place: on the host
        self.hosting = False
        self.bytes = self.peak = 0
        self.places: Counter[str] = Counter()
        self.curve: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # which most calls under fake tensors ask for
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor | list | tuple):
            return out
        on_host, operation = self.hosting and self._on_host(args), str(func)
        for tensor in tensors_in(out):
            if on_host and tensor.untyped_storage()._cdata not in self.live:
                self.host(tensor)
            else:
                self.see(tensor, operation)
        self.ran(operation)
        return out

    def ran(self, operation: str) -> None:
        """An operation that made tensors has run."""

    def _on_host(self, args: Any) -> bool:
        """Whether an operation computes on host memory only, as an offloaded optimizer does: so are its results."""
        places = [self.live.get(a.untyped_storage()._cdata, (None, 0, ""))[2] for a in tensors_in(args) if a.ndim > 0]
        return {*places} == {None}

    def see(self, tensor: Tensor, operation: str = "") -> None:
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.live:
            if self.live[key][1] == nbytes:
                return
            self._drop(key)
        place = self.place() if self.place is not None else ""
        self._keep(storage, place)
        self._count(place, nbytes)
        self.peak = max(self.peak, self.bytes)
        if self.budget is not None and self.bytes > self.budget:
            raise DeviceOutOfMemory(
                f"out of device memory: {self.bytes:,} bytes at {operation or 'the start'} go beyond the budget of "
                f"{self.budget:,} bytes"
            )

    def _keep(self, storage: Any, place: str | None) -> None:
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._drop(key))
        self.live[key] = (gone, storage.nbytes(), place)

    def _drop(self, key: int) -> None:
        _, nbytes, place = self.live.pop(key, (None, 0, None))
        if place is not None and nbytes:
            self._count(place, -nbytes)

    def _count(self, place: str, nbytes: int) -> None:
        self.bytes += nbytes
        self.places[place] += nbytes
        if self.record:
            self.curve.append(self.bytes)

    def move(self, tensor: Tensor, place: str | None) -> None:
        """Count this tensor's storage under another place from now on; None: as host memory."""
        reference, nbytes, before = self.live.get(key := tensor.untyped_storage()._cdata, (None, 0, None))
        if before is None:
            return
        self.live[key] = (reference, nbytes, place)
        self.places[before] -= nbytes
        if place is None:
            self.bytes -= nbytes
        else:
            self.places[place] += nbytes

    def host(self, tensor: Tensor) -> None:
        """Count this tensor's storage as host memory from now on."""
        self.hosting, storage = True, tensor.untyped_storage()
        if storage._cdata in self.live:
            self.move(tensor, None)
        else:
            self._keep(storage, None)


class Ledger:
    """Device and host bytes of what runs inside `with Ledger(...) as ledger:`; everything alive at entry counts.

    Args:
        device: the run's device.
        stores: checkpoint stores whose bytes are host memory.
        budget: device bytes after which a run ends with `DeviceOutOfMemory` (not on a CPU: PyTorch's OutOfMemoryError).
        record: keep the curve of live device bytes (CPU only), for a figure.
        place: says where in the model an operation runs (CPU only), for an instrument that tells bytes apart.
    """

    instrument = _CpuInstrument

    def __init__(
        self,
        device: torch.device | str = "cpu",
        stores: Sequence[HostStore] = (),
        budget: int | None = None,
        record: bool = False,
        place: Callable[[], str] | None = None,
    ) -> None:
        device = torch.device(device)
        self._here = accelerator(device)
        if self._here is not None and device.index is None:  # PyTorch limits the memory of a numbered device only
            device = torch.device(device.type, self._here.current_device())
        self.device, self.stores, self.budget = device, list(stores), budget
        self._place = place
        self._cpu = self.instrument(None, record) if self._here is None else None
        self._watching = False
        self._engine_host: list[Tensor] = []

    def __enter__(self) -> Ledger:
        gc.collect()  # what only dead cycles hold would be freed inside: a peak over the start would be too small
        if self._cpu is None:
            self.start()
            return self
        for thing in gc.get_objects():
            if type(thing) in (Tensor, torch.nn.Parameter, FakeTensor):
                self._cpu.see(thing)
                if thing.is_leaf and thing.grad is not None:
                    self._cpu.see(thing.grad)
        self._cpu.place = self._place  # what was there before belongs to no place
        self._cpu.__enter__()
        self._watching = True
        self.mark_host(())
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching before the end of the `with` block: what follows runs at full speed, without a budget."""
        if self._cpu is not None:
            if self._watching:
                self._cpu.__exit__(None, None, None)
            self._watching = False
        else:
            self._limit(None)

    def _limit(self, budget: int | None) -> None:
        """Let PyTorch's allocator hand out `budget` bytes of the device, or all of them."""
        total = self._here.get_device_properties(self.device).total_memory
        share = 1.0 if budget is None else min(1.0, budget / total)
        self._here.set_per_process_memory_fraction(share, self.device)

    def mark_host(self, tensors: Iterable[Tensor]) -> None:
        """These tensors live on the host: an engine's offloaded optimizer state or weights, and stores' slabs."""
        tensors = list(tensors)
        self._engine_host += tensors
        if self._cpu is not None:
            for tensor in tensors:
                self._cpu.host(tensor)
            for store in self.stores:
                store.on_slab = self._cpu.host
                for slab in store.free:  # taken by an earlier step
                    self._cpu.host(slab.bytes)

    def start(self) -> None:
        """Begin a measurement: the peaks start from what is alive now, and the budget holds from now on."""
        for store in self.stores:
            store.peak_nbytes = store.nbytes
        if self._cpu is None:
            self._limit(self.budget)
            self._here.reset_peak_memory_stats(self.device)
        else:
            self._cpu.budget = self.budget
            self._cpu.peak, self._cpu.curve = self._cpu.bytes, []

    @property
    def device_bytes(self) -> int:
        return self._cpu.bytes if self._cpu is not None else self._here.memory_allocated(self.device)

    @property
    def device_peak(self) -> int:
        return self._cpu.peak if self._cpu is not None else self._here.max_memory_allocated(self.device)

    @property
    def host_peak(self) -> int:
        """Peak bytes of the stores, and what the engine keeps on the host."""
        return sum(store.peak_nbytes for store in self.stores) + storage_bytes(self._engine_host)

    @property
    def curve(self) -> list[int]:
        """Live device bytes after each allocation and release since `start` (CPU, with `record`)."""
        return self._cpu.curve if self._cpu is not None else []

    def move(self, tensor: Tensor, place: str) -> None:
        """Count this tensor under another place from now on (CPU)."""
        if self._cpu is not None:
            self._cpu.move(tensor, place)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())
