"""A follower, a node of a run that is not its head: it starts its part of each attempt, and ends it when the head is
gone."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from alstlib.runs import locks, progress, results
from alstlib.runs.cluster import Nodes
from alstlib.runs.nodes import ANSWER_SECONDS, POLL_SECONDS, Meeting, connect, facts, read_meeting, receive, send
from alstlib.runs.processes import ask_where, sigterm_interrupts, stop, warnings_call
from alstlib.runs.torchrun import Attempt
from alstlib.units import format_seconds


def follow(path: Path, nodes: Nodes, patience: float, grace: float = 0.0) -> int:
    """Take part in the runs of the sweep whose head writes `path`, until it says that the sweep is over. Returns the
    exit status that it says too.

    Raises:
        ValueError: the head does not appear within `patience` seconds, or refuses this node.
    """
    host, why = nodes.head.partition(":")[0], f"the head has not written {path}"
    began, told = time.monotonic(), [False]
    with warnings_call(lambda: told.__setitem__(0, True), grace), sigterm_interrupts():
        while time.monotonic() < began + patience:
            found = read_meeting(path)
            try:
                if found is not None:
                    with _to_head(host, found) as head:
                        send(head, node=nodes.rank, **facts())
                        if (status := _Part(head, host, nodes.rank, told).serve()) is not None:
                            return status
                        began = time.monotonic()
            except (OSError, EOFError, AuthenticationError) as e:
                why = str(e) or type(e).__name__
            time.sleep(POLL_SECONDS)
    raise ValueError(
        f"node {nodes.rank} waited {format_seconds(patience)} (--patience) in vain for the head, {nodes.head}: {why}. "
        "Start the same command there, with its results in the same folder"
    )


def _to_head(host: str, meeting: Meeting) -> Connection:
    return connect(socket.create_connection((host, meeting.port), timeout=ANSWER_SECONDS), meeting.key, server=False)


class _Part:
    """What a follower does for one launcher."""

    def __init__(self, head: Connection, host: str, rank: int, told: list[bool]) -> None:
        self.head, self.host, self.rank, self.told = head, host, rank, told
        self.agent: subprocess.Popen[bytes] | None = None
        self.attempt: Attempt | None = None
        self.before: Any = None

    def serve(self) -> int | None:
        """Do what the launcher says until it is gone; the exit status where it says that the sweep is over."""
        with tempfile.TemporaryDirectory(prefix="alst-", ignore_cleanup_errors=True) as self.temporary:
            try:
                while True:
                    if self.head.poll(POLL_SECONDS):
                        message = receive(self.head)
                        if "refused" in message:
                            raise ValueError(message["refused"])
                        if "over" in message:
                            return int(message["over"])
                        self.obey(message)
                    self.report()
            except (OSError, EOFError):
                return None
            finally:
                self.stop()

    def obey(self, message: Mapping[str, Any]) -> None:
        if "where" in message:
            pid = self.agent.pid if self.agent else 0
            send(self.head, stopped=ask_where(pid, self.attempt.id) if self.attempt else [])
            return
        self.stop()
        if "attempt" in message:
            self.attempt = Attempt(**message["attempt"])
            self.before = results.version(self.result)
            try:
                self.agent = self.attempt.begin(self.temporary, self.rank, self.host)
            except OSError as e:
                send(self.head, ended=1, kind="NodeFailed", why=f"torchrun could not be started: {e}")

    @property
    def result(self) -> Path:
        assert self.attempt is not None
        return Path(self.attempt.out, "result.json")

    def report(self) -> None:
        """Say that the node will end soon, and how the ranks ended. The result that one of them wrote is sent too: the
        head might see it late."""
        if self.told[0]:
            self.told[0] = False
            send(self.head, warned=True)
        if self.agent is None or self.attempt is None or (code := self.agent.poll()) is None:
            return
        kind, why = progress.root_cause(self.attempt.logs(self.rank)) if code else ("", "")
        made = results.version(self.result) != self.before
        send(
            self.head, ended=code, kind=kind, why=why, result=locks.read_object(self.result) if made and code else None
        )
        self.agent = None

    def stop(self) -> None:
        if self.attempt is not None:
            stop(self.agent, self.attempt.id)
        self.agent = self.attempt = None
