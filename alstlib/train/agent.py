"""torchrun as alstlib starts it, `python -m alstlib.train.agent` with torchrun's flags: it listens on one address only.

torchrun's own rendezvous listen on all interfaces, and `c10d` (also behind `--standalone`) unpickles what it finds in
its store, so that a stranger on the network can run code. Here the first node's agent binds the store's socket itself,
to the address of `--rdzv-endpoint` (port 0 takes a free one), and everybody's rank comes from `--rdzv-conf rank=N`:
nothing is unpickled. Ended by a signal, the agent says so by its exit status, 128 and the signal's number.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from alstlib.planner import devices
from alstlib.runs.progress import FAILURES
from alstlib.sizing import cores

BACKEND = "alst"
PATIENCE_SECONDS = 600
"""That nodes wait for each other."""


class BoundRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, whose store listens on the address of the endpoint and on no other."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and not self._store:
            where = socket.getaddrinfo(self.master_addr, self.master_port, type=socket.SOCK_STREAM)[0]
            server = socket.create_server(where[4][:2], family=where[0], backlog=1024)
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


def write_failures(failed: ChildFailedError, logs: Path) -> None:
    """Write beside the logs how each rank failed, and whether torchrun itself ended it because another one had failed:
    by SIGTERM, and 30 seconds later by SIGKILL. torchrun lists these ranks after those that it found failed."""
    found, (first, *_) = [], failed.failures.values()
    for rank, failure in failed.failures.items():
        ended = {-signal.SIGTERM, -signal.SIGKILL} if failure.timestamp >= first.timestamp + 30 else {-signal.SIGTERM}
        by_agent = failure is not first and failure.exitcode in ended
        told = failure.error_file_data["message"]  # a string where the rank wrote no error (torch's `record`)
        error = told["message"] if isinstance(told, dict) else ""
        about = {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
        found.append({**about, "by_agent": by_agent, "error": error})
    (logs / FAILURES).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    rendezvous_handler_registry.register(BACKEND, _create)
    argv = ["--rdzv-backend", BACKEND, *numa_binding(), *sys.argv[1:]]
    try:
        run.main(argv)
    except ChildFailedError as e:
        write_failures(e, Path(run.parse_args(argv).log_dir))
        raise
    except SignalException as e:
        sys.exit(128 + e.sigval)


if __name__ == "__main__":
    main()
