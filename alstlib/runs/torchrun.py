"""torchrun (`alstlib.train.agent`) on one node: its command line, its environment, and where its logs are."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alstlib.planner import devices
from alstlib.runs import results
from alstlib.runs.processes import DEADLINE_VARIABLE, RUN_ID_VARIABLE, start
from alstlib.sizing import cores

SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface."""

_INHERITED = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|NODE_RANK|MASTER_\w+|TORCHELASTIC_\w+|PET_\w+"
    r"|MPLBACKEND"  # a notebook's inline backend does not exist in a rank
)


def import_path(inherited: str | None = None) -> str:
    """PYTHONPATH under which another process imports this very package, `inherited` after it."""
    root = str(Path(__file__).resolve().parents[2])
    installed = root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return os.pathsep.join(p for p in ("" if installed else root, inherited or "") if p)


def environment(run: str, ranks: int, extra: Mapping[str, str] | None = None, nnodes: int = 1) -> dict[str, str]:
    """Environment of torchrun: this one without what another launcher left, plus what the ranks need.

    Sets only what is not set: threads of each rank, the allocator on CUDA, and DeepSpeed's accelerator without CUDA. On
    one node gloo and NCCL use the loopback, whatever is set for several: nobody else has to reach them.
    """
    env = {k: v for k, v in os.environ.items() if not _INHERITED.fullmatch(k)}
    if nnodes == 1:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    env.update(extra or {})
    env["PYTHONPATH"] = import_path(env.get("PYTHONPATH"))
    env[RUN_ID_VARIABLE] = run
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not devices.device_count():
        defaults["DS_ACCELERATOR"] = "cpu"
    elif not set(devices.ALLOCATOR) & set(env):
        exact = [devices.EXACT] if devices.pins_exactly() else []
        defaults |= dict.fromkeys(devices.ALLOCATOR, ",".join(["expandable_segments:True", *exact]))
    return {**defaults, **env}


def interface(head: str) -> str | None:
    """Name of the network interface by which this node reaches another, or itself; None where that is unknown."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        asks.connect((head, 9))  # sends nothing
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(asks.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == asks.getsockname()[0]:
                    return name
    return None


def bound(ranks: int) -> str:
    """Why ranks on GPUs would have few threads for AdamW on the host; empty where nothing binds this launcher."""
    if not devices.device_count() or cores() // ranks > 1 or (os.cpu_count() or 1) < 2 * cores():
        return ""
    return (
        f"this process may use only {cores()} of {os.cpu_count()} cores, so AdamW on the host will be slow for the "
        f"{ranks} ranks: ask the scheduler for more cores (Slurm: --cpus-per-task)"
    )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's ranks, as every node is told it."""

    id: str
    """Of this attempt alone: of the rendezvous, of its logs, and of its processes."""
    config: Mapping[str, Any]
    """Of the run, resolved."""
    out: str
    worker: str
    nodes: int = 1
    port: int = 0
    """Of torchrun's store on the head; 0 takes a free one, for one node."""
    seconds: float = math.inf
    """That it may take."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Of a node."""
        return int(self.config["engine"]["world_size"]) // self.nodes

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def logs(self, node: int = 0) -> Path:
        """Where a node's logs go. The name says which rank is the first of another node (`progress.rank_of`)."""
        logs = Path(self.out, "logs", self.id)
        return logs / f"node{node}.rank{node * self.ranks}" if node else logs

    def command(self, node: int = 0, head: str = "127.0.0.1", config: str = "", python: str = "") -> list[str]:
        """torchrun for a node, as a list."""
        meets = ["--nnodes", str(self.nodes), "--rdzv-endpoint", f"{head}:{self.port}", "--rdzv-id", self.id]
        ranks = ["--rdzv-conf", f"rank={node}", "--nproc-per-node", str(self.ranks), "--max-restarts", "0"]
        files = ["--log-dir", str(self.logs(node)), "--redirects", "3"]
        run = ["-m", self.worker, "--config", config or str(Path(self.out, "config.json")), "--out", self.out]
        return [python or sys.executable, "-m", "alstlib.train.agent", *meets, *ranks, *files, *run]

    def begin(
        self, temporary: str, node: int = 0, head: str = "127.0.0.1", python: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start it on a node. The configuration is not read through the file system that the nodes share, which may
        show an older one to all but the head.

        Args:
            temporary: a folder of this node for the ranks' temporary files.
        """
        config = ""
        if node:
            results.write_json(Path(temporary, "config.json"), dict(self.config))
            config = str(Path(temporary, "config.json"))
        self.logs(node).mkdir(parents=True, exist_ok=True)
        extra = {"TMPDIR": temporary, DEADLINE_VARIABLE: str(time.time() + self.seconds), **self.env}
        if self.nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(head)):
            extra = {"GLOO_SOCKET_IFNAME": name, **extra}  # a node's own name may mean an address of the loopback
        env = environment(self.id, self.ranks, extra, self.nodes)
        argv = self.command(node, head, config, python)
        return start(argv, env, self.logs(node) / "agent.log")
