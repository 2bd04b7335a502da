"""torchrun as alstlib starts it, `python -m alstlib.runs.train.agent ATTEMPT`: it listens on one address only.

torchrun's own rendezvous listen on all interfaces, and `c10d` (also behind `--standalone`) unpickles what it finds in
its store, so that a stranger on the network can run code. Here the first node's agent binds the store's socket itself,
to the address of `--rdzv-endpoint` (port 0 takes a free one), and everybody's rank comes from `--rdzv-conf rank=N`:
nothing is unpickled. Ended by a signal, the agent says so by its exit status, 128 and the signal's number.

The head of the run starts it with a `torchrun.Attempt`, on several nodes through a launcher such as srun, once on each.
What it says to the head goes to its output, a line of JSON at a time, and the head's signals come through the launcher,
where there is one: SIGUSR1 asks where the ranks are, and SIGUSR2 ends them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from alstlib.base.options import Json
from alstlib.base.sizing import cores
from alstlib.planner import devices
from alstlib.runs import torchrun
from alstlib.runs.processes import ask_where, signal_with_parent
from alstlib.runs.progress import root_cause

BACKEND = "alst"
PATIENCE_SECONDS = 600
"""Seconds that nodes wait for each other."""


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


def take_part(attempt: torchrun.Attempt) -> int:
    """One node's part of an attempt; returns its exit status."""
    heard_by_head, rank = os.dup(sys.stdout.fileno()), 0 if attempt.nodes == 1 else -1
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()

    def say(**fields: Any) -> None:
        line = json.dumps({"node": rank, "name": name, **fields})
        os.write(heard_by_head, f"{torchrun.SAYS}{line}\n".encode())

    if attempt.nodes > 1:
        try:
            rank = torchrun.node_rank(attempt.nodes)
        except ValueError as e:
            say(code=1, kind="NodeFailed", why=str(e))
            return 1
    say()
    signal.signal(signal.SIGUSR1, lambda *_: ask_where())
    signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal_with_parent(signal.SIGTERM)  # the launcher's process on this node
    os.chdir(attempt.folder)
    logs = attempt.logs(rank)
    logs.mkdir(exist_ok=True)
    with open(logs / torchrun.AGENT_LOG, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    variables = attempt.environment()
    os.environ.clear()
    os.environ.update(variables)
    end: Json = {"code": 1, "kind": "NodeFailed"}
    try:
        run.main(["--rdzv-backend", BACKEND, *numa_binding(), *attempt.arguments(rank)])
        end = {"code": 0}
    except SignalException as e:
        end = {"code": 128 + e.sigval}
    except ChildFailedError as e:
        traceback.print_exc()
        end["kind"], end["why"] = root_cause(e.failures, logs)
    except Exception as e:
        traceback.print_exc()
        end["why"] = f"{type(e).__name__}: {e}"
    say(**end)
    return int(end["code"])


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, _create)
    sys.exit(take_part(torchrun.Attempt(**json.loads(Path(sys.argv[1]).read_text()))))
