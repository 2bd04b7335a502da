"""The machine of a run: its GPUs, their memory and rates, its host, and the memory that is in use before the first
tensor."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from alstlib.base.config import RunConfig
from alstlib.base.sizing import host_free
from alstlib.base.units import GIB
from alstlib.planner import devices
from alstlib.planner.gpus import Rates, measured_rates, rates_named, rates_of

UNKNOWN = "a GPU of unknown rates"
CPU_PROCESS = 500 * 2**20
"""Host bytes of a rank's process on a CPU before its first tensor, as measured: Python, PyTorch, transformers,
DeepSpeed. Pages of libraries, which processes share, do not count."""


DISK_RATE = 5e9
"""Bytes a second of a disk that nothing is known of: what an NVMe drive of PCIe 4 writes."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Memory that no tensor of ours takes. Each is a round figure with a reason, none is fitted to a result."""

    context: int = GIB
    """Device bytes of a CUDA context with its kernels ("typically around 1 GiB per GPU", ALST, section 2.1)."""
    nccl: int = 2 * GIB
    """Device bytes of NCCL's buffers, with more than one GPU ("multiple gigabytes", ALST, section 2.1)."""
    fragmentation: float = 0.03
    """Share of the device that the allocator cannot use: with expandable segments, the unused ends of its blocks."""
    process: int = 4 * GIB
    """Host bytes of a rank's process: Python, PyTorch, CUDA's libraries and what they map."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run is to run on."""

    gpus: int = 8
    per_node: int = 8
    gpu_memory: int | None = int(79.1 * GIB)
    """Bytes that PyTorch finds on a GPU (`gpus.label_bytes` knows labels); None for no limit."""
    host_memory: int | None = None
    """Bytes of a node's memory; None for no limit."""
    disk: int | None = None
    """Bytes of each node's disk, for states in files and for checkpoints; None: no limit for states, and no disk for
    checkpoints."""
    checkpoints_on_disk: bool = True
    """Whether checkpoints may go to the disk too."""
    disk_rate: float = DISK_RATE
    """Bytes a second that a node's disk writes, and that it reads."""
    disk_life: int | None = None
    """Bytes that may be written to it in its life; None: not known."""
    rates: Rates = field(default_factory=lambda: rates_of("H100"))
    device: str = "cuda"
    """`cpu`: ranks on a CPU that stand in for GPUs. What is on their device lies in the host's memory too, and has no
    overheads."""
    overheads: Overheads = field(default_factory=Overheads)

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_node < 1:
            raise ValueError(f"gpus={self.gpus} and per_node={self.per_node} must be at least 1")
        if self.disk_rate <= 0:
            raise ValueError(f"disk-rate={self.disk_rate:g} must be more than 0")

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def ranks_of_node(self) -> int:
        return min(self.gpus, self.per_node)

    def overhead(self) -> dict[str, int]:
        """Device bytes that are gone before the first tensor, by name."""
        if self.device == "cpu":
            return {}
        terms = self.overheads
        fragments = 0 if self.gpu_memory is None else int(terms.fragmentation * self.gpu_memory)
        return {"CUDA context": terms.context, "NCCL": terms.nccl if self.gpus > 1 else 0, "fragments": fragments}


def rates_known(machine: Machine) -> bool:
    """Whether a predicted time says something: not of a CPU, nor of a GPU that is not in the table."""
    return machine.device != "cpu" and machine.rates.name != UNKNOWN


def machine_of(run: RunConfig, nodes: int, gpus: int) -> Machine:
    """This machine and others like it, for a resolved run. `gpus` are those that it has; with none, ranks run on its
    CPU, and `device_memory` stands in for a device's."""
    memory, ranks, disk = run.limits.device_memory, run.engine.world_size, run.options.disk
    here = Machine(gpus=ranks, per_node=max(1, ranks // nodes), gpu_memory=memory, host_memory=host_free())
    room = {}
    if disk is not None and Path(disk.folder).is_dir():
        room[os.stat(disk.folder).st_dev] = shutil.disk_usage(disk.folder).free
    if (files := run.engine.nvme_path) is not None and Path(files).is_dir():  # where a killed attempt's still are
        room[os.stat(files).st_dev] = shutil.disk_usage(files).total
    if room:  # of two disks their sum, so that nothing is refused that either would take
        here = replace(here, disk=sum(room.values()), checkpoints_on_disk=disk is not None)
    if not gpus:
        return replace(here, device="cpu", overheads=Overheads(process=CPU_PROCESS))
    name, found = devices.first_gpu()
    return replace(here, gpu_memory=memory or found, rates=rates_named(name) or replace(rates_of("H100"), name=UNKNOWN))


def read_machine(path: str | Path) -> Machine:
    """The machine that `alst check` measured, from its folder or the result.json there. The host memory that was free
    is free beside the ranks' processes, which ran: they take nothing more.

    Raises:
        ValueError: no such result.
    """
    file = Path(path) / "result.json" if Path(path).is_dir() else Path(path)
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
        rates, overheads = measured_rates(metrics), metrics["overheads"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"machine='{path}' holds no measured machine ({e!r}): name a result of `alst check`") from e
    disk = [min(metrics["rates"].get(name, [0])) for name in ("disk_write", "disk_read")]  # of each rank
    return Machine(
        disk_rate=min(disk) * metrics["ranks_of_node"] or DISK_RATE,
        gpus=metrics["ranks"], per_node=metrics["ranks_of_node"], gpu_memory=metrics["gpu_memory"],
        host_memory=metrics["host_memory"], rates=rates, device="cuda" if metrics["gpu_memory"] else "cpu",
        overheads=Overheads(context=overheads["context"], nccl=overheads["nccl"], process=0),
    )  # fmt: skip
