"""torchrun (`train.agent`) on a run's nodes: its command line and variables, its logs, and what it says."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from alstlib.base.sizing import cores
from alstlib.planner import devices
from alstlib.runs.processes import DEADLINE_VARIABLE, RUN_ID_VARIABLE, start
from alstlib.runs.results import Json, write_json

AGENT = "alstlib.runs.train.agent"
AGENT_LOG, LAUNCHER_LOG, ATTEMPT, CONFIG = "agent.log", "launcher.log", "attempt.json", "config.json"
RANK_VARIABLES = ("ALST_NODE_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers say the rank of a node. The first is for those that set none of the others."""
SAYS = "alst-node "
"""Begins what a node's agent says to the head; JSON follows."""

_INHERITED = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|NODE_RANK|MASTER_\w+|TORCHELASTIC_\w+|PET_\w+"
    r"|MPLBACKEND"  # a notebook's inline backend does not exist in a rank
    rf"|{'|'.join(RANK_VARIABLES)}"  # of another launcher, which may have started this one
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
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        asks.connect((head, 9))  # sends nothing
        own = asks.getsockname()[0]
        return next((name for name, has in psutil.net_if_addrs().items() if own in [a.address for a in has]), None)
    return None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's ranks, on one node or on several."""

    id: str
    """Name of this attempt alone: of its logs, and of its processes by `ALST_RUN_ID`."""
    ranks: int
    """Number of ranks on each node."""
    out: str
    worker: str
    """What every rank runs: a module, or the path of a file that ends in `.py`."""
    nodes: int = 1
    head: str = "127.0.0.1"
    """Address on which the head's agent listens."""
    port: int = 0
    """Port on which it listens; 0 takes a free one, which only one node can do."""
    deadline: float = math.inf
    """When the head will end it, in seconds since the epoch. Nodes are taken to have the same time, because a launcher
    may need many seconds to start an agent."""
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    """Folder in which the ranks run."""

    def logs(self, node: int = 0) -> Path:
        """The folder of a node's logs. Its name says which rank is the first of another node (`progress.rank_of`)."""
        logs = Path(self.out, "logs", self.id)
        return logs / f"node{node}.rank{node * self.ranks}" if node else logs

    @property
    def launcher_log(self) -> Path:
        """What agents and, on several nodes, their launcher said."""
        return self.logs() / LAUNCHER_LOG

    def arguments(self, node: int) -> list[str]:
        """The arguments of torchrun on a node."""
        worker = [self.worker] if self.worker.endswith(".py") else ["-m", self.worker]
        return [
            "--nnodes", str(self.nodes), "--rdzv-endpoint", f"{self.head}:{self.port}", "--rdzv-id", self.id,
            "--rdzv-conf", f"rank={node}", "--nproc-per-node", str(self.ranks), "--max-restarts", "0",
            "--log-dir", str(self.logs(node)), "--redirects", "3",
            *worker, "--config", str(self.logs() / CONFIG), "--out", self.out,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """The variables of torchrun on this node."""
        extra = {DEADLINE_VARIABLE: str(self.deadline), **self.env}
        if self.nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(self.head)):
            extra = {"GLOO_SOCKET_IFNAME": name, **extra}  # a node's own name may mean an address of the loopback
        return environment(self.id, self.ranks, extra, self.nodes)

    def begin(self, launcher: Sequence[str], config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start it: the agent of one node, or a launcher that starts one on each node.

        Agent and ranks read files of this attempt, because shared file systems may keep an older version of a file that
        other nodes have read. What a process needs before it can read them comes by `env`, because some launchers hand
        on no variables.
        """
        self.logs().mkdir(parents=True, exist_ok=True)
        here = replace(self, port=free_port(self.head) if launcher else 0)
        write_json(self.logs() / CONFIG, config)
        (self.logs() / ATTEMPT).write_text(json.dumps(vars(here)))  # where a deadline may be infinite
        path = import_path(os.environ.get("PYTHONPATH"))
        variables = [f"{RUN_ID_VARIABLE}={self.id}", *([f"PYTHONPATH={path}"] if path else [])]
        command = [*launcher, "env", *variables, sys.executable, "-m", AGENT, str(self.logs() / ATTEMPT)]
        return start(command, environment(self.id, self.ranks, self.env, self.nodes), self.launcher_log)


def node_rank(nodes: int, env: Mapping[str, str] = os.environ) -> int:
    """The rank of this node, as the launcher says.

    Raises:
        ValueError: the launcher does not say, or what it says is no rank.
    """
    name = next((name for name in RANK_VARIABLES if name in env), RANK_VARIABLES[0])
    if (value := env.get(name, "")) not in map(str, range(nodes)):
        raise ValueError(
            f"{name}={value} must be the rank of this node, from 0 to {nodes - 1}. The launcher must start one process "
            f"on each node and set one of {', '.join(RANK_VARIABLES)}: to 0 on the node of `alst run`"
        )
    return int(value)


def free_port(head: str) -> int:
    """A free port of the head's address.

    Raises:
        ValueError: other nodes cannot reach this address, or this node cannot listen on it.
    """
    try:
        address = socket.getaddrinfo(head, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[4][:2], family=address[0]) as server:
            own, port = server.getsockname()[:2]
    except OSError as e:
        raise ValueError(f"--head {head}: this node cannot listen there ({e.strerror}): give another address") from e
    if own.startswith("127.") and head != "localhost" and not head.startswith("127."):
        raise ValueError(
            f"{head} means {own} on this node, which no other node can reach: give the address of this node on their "
            "network with --head"
        )
    return port


# What the agents say to the head, in lines of the output of what it started (`train.agent`)

LOST = ("RankKilled", "NodeLost", "NodeFailed")
"""Kinds of errors that end the ranks of other nodes too, and that their errors do not tell."""


def read_reports(log: Path) -> list[Json]:
    """All that was said so far, in this order. Launchers may put words of their own before and between the lines."""
    found = []
    with contextlib.suppress(OSError):
        for line in re.findall(rf"{SAYS}(\{{.*\}})", log.read_text(errors="replace")):
            with contextlib.suppress(ValueError):  # half a line
                found.append(json.loads(line))
    return found


def failures(reports: list[Json]) -> list[Json]:
    """What the agents said whose ranks failed and were not ended by a signal: first what the others follow from."""
    failed = [report for report in reports if 0 < report.get("code", 0) < 128]
    return sorted(failed, key=lambda report: report["kind"] not in LOST)


def lost(reports: list[Json]) -> list[int]:
    """Nodes that have started and have not said how they ended."""
    ended = {report["node"] for report in reports if "code" in report}
    return sorted({report["node"] for report in reports} - ended)


def cause(log: Path, nodes: int, ended: str) -> tuple[str, str]:
    """The kind of the error that ended a run, and its words, on several nodes with the node's name.

    `ended` says how the launcher ended by itself, so that nodes which have not said how they ended will not say it any
    more. It is empty where the launcher was ended because of a failure.
    """
    reports = read_reports(log)
    names = {report["node"]: f"node {report['node']} ({report['name']})" for report in reports}
    failed, gone = failures(reports)[:1], [names[node] for node in lost(reports)]
    words = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and SAYS not in line][:8]
    for first in failed:
        if first["kind"] in LOST or not (ended and gone):
            return first["kind"], f"{names[first['node']]}: {first['why']}" if nodes > 1 else first["why"]
    if ended and gone:
        return "NodeLost", "; ".join([f"{' and '.join(gone)} ended without a word", ended, *words])
    missing = [f"node {node} never started" for node in range(nodes) if node not in names]
    return "LauncherFailed", "; ".join([ended, *missing, *words])
