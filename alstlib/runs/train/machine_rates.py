"""The worker of `alst check`: the ranks of a run measure how fast this machine is and what its memory holds.

`python -m alstlib.runs.train.machine_rates --config config.json --out DIR` under torchrun. Matrix products and
attention with the shapes of the run's model, copies between device and host, AdamW on the host, an all-to-all and an
all-reduce, and what a GPU lacks before the first tensor. All ranks measure at the same time, as they work in a step,
and the slowest one counts. `alst plan --machine DIR` plans with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.base.config import RunConfig
from alstlib.base.mesh import accelerator, from_all
from alstlib.base.options import Json
from alstlib.base.sizing import cores, host_free
from alstlib.kernels.attention import attention_backward, attention_forward
from alstlib.kernels.backends import choose_backend
from alstlib.kernels.rule import Attended, Rule
from alstlib.offload.disk_store import DiskFile
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.step_time import ADAM_BYTES
from alstlib.runs.train.worker import Job, node_count, run_worker, wait_for

MIB = 2**20
LENGTH = {"cuda": 65_536, "cpu": 4096}
"""Tokens at which attention is timed: many, because kernels are better the longer they run."""
ROWS = {"cuda": 16_384, "cpu": 1024}
"""Rows of the matrix products."""
MESSAGE = {"cuda": 512 * MIB, "cpu": 16 * MIB}
"""Bytes of a rank in a collective, and of a copy between device and host."""
WEIGHTS = {"cuda": 64 * MIB, "cpu": 4 * MIB}
"""Weights of a rank's AdamW on the host."""
DISK_BYTES, DISK_SECONDS = 256 * MIB, 2.0
"""Bytes of a rank's turn on a disk, and about how long all of them take at most."""
REPEATS = 5


def numa_node(device: int, buses: str = "/sys/bus/pci/devices") -> int | None:
    """The NUMA node that one of NVIDIA's GPUs is attached to, by its PCI bus; None where this cannot be known, or where
    there is only one."""
    about: Any = torch.cuda.get_device_properties(device)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        bus = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        node = int(Path(buses, bus, "numa_node").read_text())
        return node if node >= 0 else None
    return None


class MeasureRates(Job):
    """Measures on one rank; rank 0's metrics are the result."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        self.here, self.world = accelerator(self.device), dist.get_world_size()
        self.kind = "cpu" if self.here is None else "cuda"
        self.shape = read_shape(run.model.name, run.model.config)
        self.local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.gone = {"context": self._gone()}
        self._all_to_all(dist.group.WORLD, self.world)  # NCCL takes its buffers
        self.gone["nccl"] = self._gone() - self.gone["context"]

    def _gone(self) -> int:
        """Device bytes that are gone, other than tensors."""
        if self.here is None:
            return 0
        torch.zeros(1, device=self.device)
        wait_for(self.device)
        free, whole = self.here.mem_get_info(self.device)
        return whole - free - self.here.memory_reserved(self.device)

    def seconds(self, step: Callable[[], Any]) -> float:
        """The median of a few, after one that warms up; ranks begin together."""
        found = []
        for _ in range(1 + REPEATS):
            wait_for(self.device)
            dist.barrier()
            began = time.perf_counter()
            step()
            wait_for(self.device)
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def __call__(self) -> Json:
        began = time.monotonic()
        rates: dict[str, list[float]] = {}
        for i, measure in enumerate((self.matmul, self.attention, self.copies, self.adam, self.disk, self.collectives)):
            self.say(f"measurement {i + 1} of 6: {measure.__name__}")
            for key, value in measure().items():
                rates[key] = from_all(value)
        links = self.links()
        hosts = from_all(f"{socket.gethostname()} {self._numa()}")
        free, here = host_free(), self.here
        nvidia = self.device.type == "cuda"  # others have no such numbers of what they can
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device_name": platform.machine() + " CPU" if here is None else here.get_device_name(self.device),
            "capability": torch.cuda.get_device_capability(self.device)[0] if nvidia else 0,
            "ranks": self.world, "ranks_of_node": self.local, "nodes": node_count(self.world),
            "gpu_memory": None if here is None else here.get_device_properties(self.device).total_memory,
            "host_memory": None if free is None else min(from_all(free)),
            "overheads": {name: max(from_all(nbytes)) for name, nbytes in self.gone.items()},
            "rates": rates, "links": links, "places": hosts, "seconds": time.monotonic() - began,
            "torch": torch.__version__, "cuda": torch.version.cuda, "driver": _driver() if self.gpu else None,
            "cores": cores(),
        }  # fmt: skip

    def matmul(self) -> dict[str, float]:
        """FLOPs a second of the products of an MLP, forward."""
        rows, shape = ROWS[self.kind], self.shape
        x, w = self._random(rows, shape.width), self._random(shape.width, shape.mlp)
        return {"matmul": 2 * rows * shape.width * shape.mlp / self.seconds(lambda: x @ w)}

    def attention(self) -> dict[str, float]:
        """FLOPs a second of the causal half."""
        dim, shape, length = self.shape.head_dim, self.shape, LENGTH[self.kind]
        kv = max(1, shape.kv_heads // self.world)
        heads = kv * max(1, shape.heads // shape.kv_heads)
        backend, rule = choose_backend("sdpa", self.device, self.dtype, dim), Rule(dim**-0.5)
        # as they come out of an exchange: views of [S, 1, heads, D]
        q, dout, k, v = (self._random(length, 1, n, dim).permute(1, 2, 0, 3) for n in (heads, heads, kv, kv))
        forward = partial(attention_forward, backend, q, k, v, rule=rule)
        backward = partial(attention_backward, backend, dout, Attended(q, k, v, *forward()), rule=rule)
        product = length**2 * dim * heads
        return {
            "attention_forward": 2 * product / self.seconds(forward),
            "attention_backward": 5 * product / self.seconds(backward),
        }

    def copies(self) -> dict[str, float]:
        """Bytes a second, each way, of all ranks at once; from memory that is not pinned too."""
        here = torch.empty(MESSAGE[self.kind], dtype=torch.uint8, device=self.device)
        pinned = torch.zeros(MESSAGE[self.kind], dtype=torch.uint8, pin_memory=self.gpu)
        found = {
            "to_host": here.numel() / self.seconds(lambda: pinned.copy_(here, non_blocking=True)),
            "from_host": here.numel() / self.seconds(lambda: here.copy_(pinned, non_blocking=True)),
        }
        if self.gpu:
            paged = torch.zeros(MESSAGE[self.kind], dtype=torch.uint8)
            found["from_host_not_pinned"] = here.numel() / self.seconds(lambda: here.copy_(paged))
        return {**found, "host": min(found["to_host"], found["from_host"])}

    def adam(self) -> dict[str, float]:
        """Bytes a second of the host's memory that AdamW reaches."""
        weight = torch.nn.Parameter(torch.zeros(WEIGHTS[self.kind]))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return {"host_memory": ADAM_BYTES * weight.numel() / self.seconds(optimizer.step)}

    def disk(self) -> dict[str, float]:
        """Bytes a second that the folder of `options.disk`, else of the result, writes and reads past the page cache,
        as checkpoints are (`offload.disk_store`): as many pieces as about `DISK_SECONDS` take, all ranks at once."""
        folder = self.run.options.disk.folder if self.run.options.disk else str(self.out)
        file, found = DiskFile(folder), dict[str, float]()
        memory = torch.frombuffer(mmap.mmap(-1, DISK_BYTES), dtype=torch.uint8)
        memory.random_()
        if min(from_all(file.room())) < 4 * DISK_BYTES or not all(from_all(file.direct)):
            return {}  # the page cache would be measured
        file.allocate(3 * DISK_BYTES)
        for name, move in (("disk_write", file.write), ("disk_read", file.fill)):
            dist.barrier()
            began, moved = time.perf_counter(), 0
            while moved < 3 and (moved == 0 or time.perf_counter() - began < DISK_SECONDS / 3):
                for one in move(memory, moved * DISK_BYTES, lambda: None):
                    one.result()
                moved += 1
            found[name] = moved * DISK_BYTES / (time.perf_counter() - began)
        file.close()
        return found

    def collectives(self) -> dict[str, float]:
        """Bytes a second that a rank sends in an all-to-all: among the ranks of a node, and among all."""
        if self.world == 1:
            return {}
        found = {}
        nodes = [list(range(first, first + self.local)) for first in range(0, self.world, self.local)]
        groups = [dist.new_group(node) for node in nodes] if len(nodes) > 1 else [dist.group.WORLD]
        if self.local > 1:
            found["link"] = self._all_to_all(groups[self.rank // self.local], self.local)
        if len(nodes) > 1:
            found["network"] = self._all_to_all(dist.group.WORLD, self.world)
        x = torch.zeros(MESSAGE[self.kind] // 4, device=self.device)
        sent = 2 * x.numel() * 4 * (self.world - 1) / self.world
        return {**found, "all_reduce": sent / self.seconds(lambda: dist.all_reduce(x))}

    def _all_to_all(self, group: Any, ranks: int) -> float:
        x = torch.zeros(MESSAGE[self.kind] // 4 // ranks * ranks, device=self.device)
        y = torch.empty_like(x)
        return x.numel() * 4 * (ranks - 1) / ranks / self.seconds(lambda: dist.all_to_all_single(y, x, group=group))

    def links(self) -> list[float]:
        """Bytes a second from each rank to the next one, one pair at a time: a slow link shows here."""
        x = torch.zeros(MESSAGE[self.kind] // 4, device=self.device)
        found = []
        for sender in range(self.world if self.world > 1 else 0):
            receiver = (sender + 1) % self.world
            passes_on: dict[int, Callable[[], Any]] = {
                sender: partial(dist.send, x, receiver),
                receiver: partial(dist.recv, x, sender),
            }
            found.append(x.numel() * 4 / max(from_all(self.seconds(passes_on.get(self.rank, lambda: None)))))
        return found

    def _numa(self) -> str:
        """The NUMA nodes of this rank's GPU (NVIDIA's) and of the cores that it may use, as `gpu/cores`; `-` is not
        known."""
        gpu = numa_node(self.device.index) if self.device.type == "cuda" else None
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        nodes = {node.name for core in mine for node in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")}
        return f"{'-' if gpu is None else gpu}/{','.join(sorted(nodes)).replace('node', '') or '-'}"

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype)


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return None


if __name__ == "__main__":
    run_worker(__doc__, MeasureRates)
