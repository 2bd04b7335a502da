"""torchrun as alstlib starts it, `python -m alstlib.train.agent` with torchrun's flags: it listens on one address only.

torchrun's own rendezvous listen on all interfaces, and `c10d` (also behind `--standalone`) unpickles what it finds in
its store, so that a stranger on the network can run code. Here the first node's agent binds the store's socket itself,
to the address of `--rdzv-endpoint` (port 0 takes a free one), and everybody's rank comes from `--rdzv-conf rank=N`:
nothing is unpickled. Ended by a signal, the agent says so by its exit status, 128 and the signal's number.

On several nodes a launcher such as srun starts it once on each, with `--attempt` and a `torchrun.Attempt` in place of
torchrun's flags. What it says to the head of the run goes through the launcher's output, a line of JSON at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from alstlib.planner import devices
from alstlib.runs import results, torchrun
from alstlib.runs.processes import ask_where, cores, oom_kills, signal_with_parent
from alstlib.runs.progress import root_cause
from alstlib.sizing import host_free

BACKEND = "alst"
PATIENCE_SECONDS = 600
"""Seconds that nodes wait for each other."""
BEAT_SECONDS = 1.0
SILENT_SECONDS, LOST_SECONDS = 3.5, 20.0
"""Seconds without a beat after which a node is gone: where the head's ranks failed, and where they did not."""


class BoundRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, whose store listens on the address of the endpoint and on no other."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and not self._store:
            try:
                where = socket.getaddrinfo(self.master_addr, self.master_port, type=socket.SOCK_STREAM)[0]
                server = socket.create_server(where[4][:2], family=where[0], backlog=1024)
            except OSError as e:
                raise ValueError(
                    f"this node has rank 0 and cannot listen on {self.master_addr}, port {self.master_port} "
                    f"({e.strerror}): the launcher must give rank 0 to one node only, the one where `alst run` runs. "
                    "Name that node first in its list of hosts"
                ) from e
            self.master_addr, self.master_port = server.getsockname()[:2]
            self._store = TCPStore(
                self.master_addr, self.master_port, self.world_size, True, self.timeout,
                master_listen_fd=server.detach(),
            )  # fmt: skip
        return super().next_rendezvous()


def _create(given: RendezvousParameters) -> BoundRendezvous:
    host, port = parse_rendezvous_endpoint(given.endpoint, 0)
    return BoundRendezvous(host, port, int(given.config["rank"]), given.max_nodes, given.run_id, PATIENCE_SECONDS)


def numa_binding(nodes: Path = Path("/sys/devices/system/node")) -> list[str]:
    """torchrun's flag that binds each rank to the cores next to its GPU, on a machine with several NUMA nodes. Where a
    scheduler has bound this process already, or numactl is missing, nothing is bound."""
    several = len(list(nodes.glob("node[0-9]*"))) > 1 and cores() == os.cpu_count()
    return ["--numa-binding", "node"] if several and devices.device_count() and shutil.which("numactl") else []


def start(arguments: list[str]) -> None:
    """Run torchrun. It raises what torchrun raises."""
    run.main(["--rdzv-backend", BACKEND, *numa_binding(), *arguments])


# One of several nodes


def facts() -> dict[str, Any]:
    """What a node tells the head when it starts: what must be the same on all nodes, and what it has free."""
    there = results.environment()
    agree = {name: there[name] for name in ("python", "torch", "transformers", "deepspeed")}
    agree |= {"commit": results.git_state()["sha"], "GPUs": devices.device_count()}
    return {"agree": agree, "host": host_free(), "gpu": devices.least_free()}


class Watch(threading.Thread):
    """What an agent does besides torchrun: it counts beats in the head's store, so that the head knows that it lives.
    It ends when the head is gone, and the head's agent ends when the launcher's process is gone or another node is: a
    launcher may pass on no signal.
    """

    def __init__(self, attempt: torchrun.Attempt, rank: int, say: Callable[..., None]) -> None:
        super().__init__(daemon=True)
        self.attempt, self.rank, self.say = attempt, rank, say
        self.store: TCPStore | None = None
        self.beats: dict[int, tuple[int, float]] = {}
        """For each other node, on the head: its count, and when it changed."""
        self.asked = False

    def run(self) -> None:
        while (self.rank or psutil.pid_exists(self.attempt.launcher)) and not self.silent(LOST_SECONDS):
            time.sleep(BEAT_SECONDS)
            try:
                self.beat()
            except RuntimeError:  # every error of the store
                if self.store is not None:
                    break
        if lost := self.silent(LOST_SECONDS):
            self.say(silent=lost)
        os.kill(os.getpid(), signal.SIGTERM)

    def beat(self) -> None:
        if self.store is None:  # apart from torchrun's own connection, which torchrun may wait on
            timeout = datetime.timedelta(seconds=PATIENCE_SECONDS if self.rank else 5 * BEAT_SECONDS)
            self.store = TCPStore(self.attempt.head, self.attempt.port, None, False, timeout, wait_for_workers=False)
        if self.rank:
            self.store.add(f"beat{self.rank}", 1)
        # the launcher's question is a file that the head's agent sees at once, and a shared file system shows late
        elif self.attempt.question.exists():
            self.store.set("where", "1")
        for node in range(1, 1 if self.rank else self.attempt.nodes):
            if (count := self.store.add(f"beat{node}", 0)) != self.beats.get(node, (0, 0.0))[0]:
                self.beats[node] = count, time.monotonic()
        if not self.asked and self.store.check(["where"]):
            self.asked = True
            self.say(stopped=ask_where(os.getpid(), self.attempt.id))

    def silent(self, seconds: float) -> list[int]:
        """Nodes whose agents have not counted for so long, and have not said that they ended."""
        late = [node for node, (_, when) in self.beats.items() if time.monotonic() - when > seconds]
        return [node for node in late if self.store is not None and not self.store.check([f"ended{node}"])]

    def end(self) -> list[int]:
        """This node failed: the head need not wait for it. Returns nodes that are gone, where this is the head."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.rank:
                self.store.set(f"ended{self.rank}", "1")
            elif self.rank == 0:
                time.sleep(SILENT_SECONDS)
                return self.silent(SILENT_SECONDS)
        return []


def take_part(attempt: torchrun.Attempt) -> int:
    """This node's part of an attempt; returns its exit status."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler may send its warning to every process of a job
    signal_with_parent(signal.SIGTERM)
    heard_by_head, rank = os.dup(sys.stdout.fileno()), -1
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()

    def say(**fields: Any) -> None:
        line = json.dumps({"node": rank, "name": name, **fields})
        os.write(heard_by_head, f"{torchrun.SAYS}{line}\n".encode())

    try:
        rank = torchrun.node_rank(attempt.nodes)
    except ValueError as e:
        say(code=1, kind="NodeFailed", why=str(e))
        return 1
    say(**facts())
    os.chdir(attempt.folder)
    with tempfile.TemporaryDirectory(prefix="alst-", ignore_cleanup_errors=True) as temporary:
        config, logs = Path(temporary, "config.json"), attempt.logs(rank)
        results.write_json(config, dict(attempt.config))
        logs.mkdir(parents=True, exist_ok=True)
        with open(logs / torchrun.AGENT_LOG, "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        variables = attempt.environment(temporary)
        os.environ.clear()
        os.environ.update(variables)
        watch, kills = Watch(attempt, rank, say), oom_kills()
        watch.start()
        try:
            start(attempt.arguments(rank, str(config)))
            say(code=0)
            return 0
        except SignalException as e:
            say(code=128 + e.sigval)
            return 128 + e.sigval
        except BaseException as e:
            traceback.print_exc()
            sys.stderr.flush()
            now = oom_kills()
            kind, why = root_cause(logs, None if kills is None or now is None else now - kills)
            if not isinstance(e, ChildFailedError):
                kind, why = "NodeFailed", f"{type(e).__name__}: {e}"
            say(code=1, kind=kind, why=why, silent=watch.end())
            return 1


def main() -> None:
    rendezvous_handler_registry.register(BACKEND, _create)
    if sys.argv[1:2] == [torchrun.ATTEMPT_FLAG]:
        sys.exit(take_part(torchrun.read_attempt(sys.argv[2])))
    try:
        start(sys.argv[1:])
    except SignalException as e:
        sys.exit(128 + e.sigval)


if __name__ == "__main__":
    main()
