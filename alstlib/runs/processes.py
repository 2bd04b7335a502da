"""Starting torchrun so that it never outlives its parent, and ending all of it.

The agent (torchrun) gets a session of its own; its ranks sit in sessions of their own too, where a signal to the
agent's group misses them. So the agent is told to end with its parent, each rank to end with its agent, and whatever
is left is found by an environment variable, `ALST_RUN_ID`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RUN_ID_VARIABLE = "ALST_RUN_ID"
DEADLINE_VARIABLE = "ALST_DEADLINE"
"""When the launcher will end the run, in seconds since the epoch."""
DUMP_SECONDS = 1.0  # before the deadline
GRACE_SECONDS = 35.0  # longer than the 30 s that torchrun gives its ranks

# Runs before torchrun, in its process: `preexec_fn` would run Python between fork and exec of a threaded kernel.
_SHIM = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the launcher is gone")
os.execv(command[0], command)
"""


def start(command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, its output in the file `log`. It gets SIGTERM when this thread ends."""
    shim = [command[0], "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]
    with open(log, "wb") as out:
        return subprocess.Popen(
            shim, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def die_with_parent() -> None:
    """Called by a rank at its start: the kernel kills this process when its torchrun ends, however that ends.

    Linux only (elsewhere a rank outlives a torchrun that was killed with SIGKILL).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    run = os.environ.get(RUN_ID_VARIABLE)
    if run and not _belongs(os.getppid(), run):  # torchrun ended before the line above
        print("torchrun is gone; this rank ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def seconds_left() -> float:
    """Seconds until the launcher ends this rank's run; infinite where none does."""
    return float(os.environ.get(DEADLINE_VARIABLE, "inf")) - time.time()


def dump_before_deadline() -> None:
    """Called by a rank at its start: shortly before its time is up, it writes to its log where it is
    (`progress.whereabouts` reads that)."""
    if (left := seconds_left()) < threading.TIMEOUT_MAX:
        faulthandler.dump_traceback_later(max(0.1, left - DUMP_SECONDS))


def _belongs(pid: int, run: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{RUN_ID_VARIABLE}={run}".encode() in environ.split(b"\0")


def processes(run: str) -> list[int]:
    """Processes that were started with this value of `ALST_RUN_ID`, without this one."""
    pids = [int(p.name) for p in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and _belongs(pid, run)]


def stop(agent: subprocess.Popen[bytes] | None, run: str) -> None:
    """End the agent, then whatever of the run is left. A second interruption only shortens the wait."""
    try:
        if agent is not None and agent.poll() is None:
            agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(GRACE_SECONDS)
    finally:
        if agent is not None and agent.poll() is None:
            agent.kill()
            agent.wait()
        deadline = time.monotonic() + 10
        while (left := processes(run)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in this block (in the main thread; elsewhere it does nothing)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
