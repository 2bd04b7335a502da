"""A run on several nodes: the launcher is on the head, and on every other node a follower starts that node's part.

`alst run` is started once on each node. The head, node 0, runs the sweep. A follower connects to the launcher of the
row that runs, says what its node has, gets attempts (`torchrun.Attempt`), and says how its ranks ended. When the
launcher is gone, so are the follower's ranks. Only the head judges a run and writes its result.

Where they meet is said by a file in the sweep's folder that nobody but the user can read: a port of the head, and a key
that both sides ask for. Messages are JSON. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from alstlib.planner import devices
from alstlib.runs import locks, results
from alstlib.runs.cluster import Nodes
from alstlib.runs.torchrun import Attempt
from alstlib.sizing import host_free
from alstlib.units import format_seconds

VARIABLE = "ALST_NODES_FILE"
"""Names the file where the nodes meet, to the launchers that a sweep's head starts."""
FILE = ".nodes.json"
POLL_SECONDS = 0.5
ANSWER_SECONDS = 20
"""That the other side may take in the middle of a message."""
PARTING_SECONDS = 20.0
"""That the head waits for followers which it tells that the sweep is over."""
ASKED_SECONDS = 3.0
"""That followers may take to ask their ranks where they are."""
LARGEST = 2**24
LOST = ("RankKilled", "NodeLost", "NodeFailed")
"""Kinds of errors that end the ranks of other nodes too, and that their errors do not tell."""
AGREE = ("commit", "python", "torch", "transformers", "deepspeed", "gpus")
"""What must be the same on every node."""


class NodeError(RuntimeError):
    """A node that did not appear, is gone, or cannot take part; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the nodes of a sweep meet."""

    count: int = 1
    head: str = "127.0.0.1"
    """Name or address of the head, as this node reaches it."""
    port: int = 0
    key: str = field(default="", repr=False)
    patience: float = 600.0
    """Seconds that nodes wait for each other."""

    def free_port(self) -> int:
        """A free port of the head; 0 where there is one node, whose torchrun takes one."""
        if self.count == 1:
            return 0
        with contextlib.closing(_server(self.head, 0)) as server:
            return server.getsockname()[1]


def open_meeting(path: Path, nodes: Nodes, patience: float) -> Meeting:
    """On the head: choose port and key, and write them to `path`.

    Raises:
        ValueError: the head's name means an address that no other node can reach, or one of another machine.
    """
    host, _, port = nodes.head.partition(":")
    with contextlib.closing(_server(host, int(port or 0))) as server:
        found = Meeting(
            count=nodes.count, head=host, port=server.getsockname()[1], key=secrets.token_hex(32), patience=patience
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(vars(found), file)
    return found


def read_meeting(path: str | os.PathLike[str]) -> Meeting | None:
    """What the head wrote; None where nothing (whole) is there yet."""
    found = locks.read_object(Path(path))
    return Meeting(**found) if found else None


def this_meeting() -> Meeting:
    """Of the sweep that started this process; of one node where none says so."""
    path = os.environ.get(VARIABLE)
    return (read_meeting(path) if path else None) or Meeting()


@contextlib.contextmanager
def lead(path: Path, nodes: Nodes, patience: float) -> Iterator[list[int]]:
    """On the head: what is launched in this block meets the other nodes by the file `path`. Afterwards they are told
    the exit status, which the block puts into the list. One node has nobody to meet."""
    status = [1]
    if nodes.count == 1:
        yield status
        return
    meeting = open_meeting(path, nodes, patience)
    os.environ[VARIABLE] = str(path)
    try:
        yield status
    finally:
        os.environ.pop(VARIABLE)
        dismiss(meeting, status[0])
        path.unlink(missing_ok=True)


# Connections


def _server(host: str, port: int) -> socket.socket:
    where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = where[4][0]
    if str(address).startswith("127.") and host != "localhost" and not host.startswith("127."):
        raise ValueError(
            f"--head {host} means {address} on this node, which no other node can reach: give the address of node 0"
        )
    try:
        return socket.create_server((str(address), port), family=where[0], backlog=128)
    except OSError as e:
        raise ValueError(f"--head {host}: this node cannot listen on {address}, port {port} ({e.strerror})") from e


def connect(sock: socket.socket, key: str, server: bool) -> Connection:
    """A connection whose other side knows the key. It fails when the other machine does not answer for a minute."""
    sock.settimeout(None)
    for name in ("SO_RCVTIMEO", "SO_SNDTIMEO"):  # in the middle of a message
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), struct.pack("ll", ANSWER_SECONDS, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    made = Connection(sock.detach())
    try:
        for ask in (deliver_challenge, answer_challenge) if server else (answer_challenge, deliver_challenge):
            ask(made, bytes.fromhex(key))
    except BaseException:
        made.close()
        raise
    return made


def send(to: Connection, **message: Any) -> None:
    to.send_bytes(json.dumps(message).encode())


def receive(of: Connection) -> dict[str, Any]:
    return json.loads(of.recv_bytes(LARGEST))


def facts() -> dict[str, Any]:
    """What a node says of itself: what must agree, and what it has free."""
    there = results.environment()
    return {
        "host": socket.gethostname(), "commit": results.git_state()["sha"], "gpus": devices.device_count(),
        **{name: there[name] for name in AGREE if name in there},
        "host_free": host_free(), "gpu_free": devices.least_free(),
    }  # fmt: skip


# The head


@dataclass
class Follower:
    """Another node, as the head knows it."""

    rank: int
    connection: Connection
    facts: Mapping[str, Any]
    code: int | None = None
    """Exit status of its torchrun in this attempt; None while it runs."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """What it said about how its ranks ended."""

    def __str__(self) -> str:
        return f"node {self.rank} ({self.facts.get('host')})"


class Followers:
    """The other nodes of a run. Without any, nothing listens and nothing is waited for."""

    def __init__(self, meeting: Meeting, warned: Callable[[], None] = lambda: None) -> None:
        """`warned` is called when a follower is told that its node will end soon."""
        self.meeting, self.warned = meeting, warned
        self.nodes: dict[int, Follower] = {}
        self.own = facts() if meeting.count > 1 else {}
        self.server: socket.socket | None = None
        self.stopped: list[int] = []

    def __enter__(self) -> Followers:
        if self.meeting.count > 1:
            self.server = _server(self.meeting.head, self.meeting.port)
        return self

    def __exit__(self, *_: object) -> None:
        for follower in self.nodes.values():
            follower.connection.close()
        if self.server is not None:
            self.server.close()

    def gather(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all nodes are there.

        Raises:
            NodeError: one does not appear in time, or cannot take part.
        """
        deadline = time.monotonic() + self.meeting.patience
        while missing := [n for n in range(1, self.meeting.count) if n not in self.nodes]:
            if time.monotonic() > deadline:
                named = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                raise NodeError(
                    f"{named} of {self.meeting.count} did not connect to {self.meeting.head}:{self.meeting.port} "
                    f"within {format_seconds(self.meeting.patience)} (--patience): start the same command on each node"
                )
            self.accept()
            tick()

    def accept(self) -> None:
        """Take in a node that comes within half a second."""
        assert self.server is not None
        if not select.select([self.server], [], [], POLL_SECONDS)[0]:
            return
        try:
            connection = connect(self.server.accept()[0], self.meeting.key, server=True)
            told = receive(connection)
        except (OSError, EOFError, ValueError, AuthenticationError):  # a stranger, or a node of an earlier sweep
            return
        follower = Follower(int(told.get("node", 0)), connection, told)
        if why := self._refusal(follower):
            with contextlib.suppress(OSError):
                send(connection, refused=why)
            raise NodeError(why)
        self.nodes[follower.rank] = follower

    def _refusal(self, node: Follower) -> str:
        if node.rank not in range(1, self.meeting.count):
            return f"{node} has a wrong rank: it must be from 1 to {self.meeting.count - 1}"
        if node.rank in self.nodes:
            return f"{node} has the rank of {self.nodes[node.rank]}: each node needs a rank of its own"
        other = [n for n in AGREE if node.facts.get(n) != self.own.get(n)]
        what = ", ".join(f"{n} {node.facts.get(n)} (the head: {self.own.get(n)})" for n in other)
        return f"{node} differs from the head in {what}: all nodes of a run must agree" if what else ""

    def least(self, name: str) -> int | None:
        """The least that a node, the head among them, has of `host_free` or `gpu_free`; None where none says so."""
        told = [f[name] for f in (self.own, *(node.facts for node in self.nodes.values())) if f.get(name) is not None]
        return min(told, default=None)

    def begin(self, attempt: Attempt) -> None:
        for follower in self.nodes.values():
            follower.code, follower.said = None, {}
        self.tell(attempt=attempt.as_json())

    def poll(self) -> list[int | None]:
        """The exit status of each follower's torchrun so far; 1 of a node that is gone."""
        for node in self.nodes.values():
            while node.code is None:
                try:
                    if not node.connection.poll():
                        break
                    told = receive(node.connection)
                except (OSError, EOFError, ValueError):
                    why = "its launcher ended, or it cannot be reached"
                    node.code, node.said = 1, {"kind": "NodeLost", "why": why}
                    break
                if told.get("warned"):
                    self.warned()
                self.stopped += told.get("stopped", [])
                if (code := told.get("ended")) is not None:
                    node.code, node.said = int(code), told
        return [node.code for node in self.nodes.values()]

    def failed(self, first: int) -> Follower | None:
        """Of the nodes that failed one that lost a rank or is lost itself, because others fail when they lose a rank;
        else the one that is known as the first."""
        failed = [node for node in self.nodes.values() if node.code]
        return min(failed, key=lambda f: (f.said.get("kind") not in LOST, f.rank != first, f.rank), default=None)

    def tell(self, **message: Any) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(OSError):  # `poll` finds out
                send(node.connection, **message)

    def ask_where(self) -> list[int]:
        """Have the other nodes' ranks write down where they are (`processes.ask_where`)."""
        self.tell(where=True)
        time.sleep(ASKED_SECONDS if self.nodes else 0)
        self.poll()
        return self.stopped


def dismiss(meeting: Meeting, status: int) -> None:
    """Tell the followers that the sweep is over, and the exit status of its command."""
    with contextlib.suppress(ValueError), Followers(meeting) as followers:
        deadline = time.monotonic() + min(PARTING_SECONDS if status == 0 else PARTING_SECONDS / 4, meeting.patience)
        while len(followers.nodes) < meeting.count - 1 and time.monotonic() < deadline:
            with contextlib.suppress(NodeError):
                followers.accept()
        followers.tell(over=status)
