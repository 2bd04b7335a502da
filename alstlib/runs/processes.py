"""Start torchrun so that it never outlives its parent, and end all of its processes.

The agent (torchrun) gets a session of its own; its ranks sit in sessions of their own too, where a signal to the
agent's group misses them. So the agent is told to end with its parent, each rank to end with its agent, and whatever
is left is found by an environment variable, `ALST_RUN_ID`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

RUN_ID_VARIABLE = "ALST_RUN_ID"
DEADLINE_VARIABLE = "ALST_DEADLINE"
"""When the launcher will end the run, in seconds since the epoch."""
WARNED = "warned"
"""A file in a run's folder: its time is nearly up, so it saves its state after the step that runs, and ends."""
ANSWER_SECONDS = 1.0
"""That a rank has to write down where it is."""
STOPPED = "Tt"
"""States of a process that was stopped, by a signal or a debugger."""
OPEN_FILES = 256
"""That a process may have open, at least: a kernel that may open 40 ends without a word, and with 60 it hangs."""
MORE_FILES = "allow more with `ulimit -n 4096`"
GRACE_SECONDS = 35.0  # longer than the 30 s that torchrun gives its ranks

# Runs before torchrun, in its process: `preexec_fn` would run Python between fork and exec of a threaded kernel.
_SHIM = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler may send its warning to every process of a job
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


def allow_open_files() -> None:
    """Let this process, and all that it starts, have `OPEN_FILES` open at least.

    Raises:
        ValueError: that is more than it may allow.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < OPEN_FILES:  # no limit is -1, or a very large number
        raise ValueError(
            f"a process may have {soft} files open here, and a run needs {OPEN_FILES}: {MORE_FILES}, where "
            "`ulimit -Hn` says that a shell may"
        )
    if 0 <= soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def seconds_left() -> float:
    """Seconds until the launcher ends this rank's run; infinite where none does."""
    return float(os.environ.get(DEADLINE_VARIABLE, "inf")) - time.time()


def answer_where() -> None:
    """Called by a rank at its start: at SIGUSR1 it writes to its log where it is, for `progress.whereabouts`."""
    faulthandler.register(signal.SIGUSR1)


def ask_where(agent: int, run: str) -> list[int]:
    """Have the ranks of an agent write down where they are. Returns those that cannot, because they are stopped."""
    stopped = []
    for pid in processes(run):
        with contextlib.suppress(OSError, KeyError):
            state, parent = _state(pid)
            if parent == agent:
                os.kill(pid, signal.SIGUSR1)
                if state in STOPPED:
                    stopped.append(int(_environment(pid)["RANK"]))
    time.sleep(ANSWER_SECONDS)
    return sorted(stopped)


def oom_kills() -> int | None:
    """Processes that the kernel of this machine has ended since it started because memory ran out; None if unknown."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))
    return None


def _state(pid: int) -> tuple[str, int]:
    """A process's state, one letter, and its parent."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def _environment(pid: int) -> dict[str, str]:
    """What a process was started with."""
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _belongs(pid: int, value: str, variable: str = RUN_ID_VARIABLE) -> bool:
    with contextlib.suppress(OSError):
        return _environment(pid).get(variable) == value
    return False


def processes(value: str, variable: str = RUN_ID_VARIABLE) -> dict[int, str]:
    """Processes that were started with this value of an environment variable, without this one: their command lines."""
    found = {}
    for pid in (int(place.name) for place in Path("/proc").glob("[0-9]*")):
        if pid != os.getpid() and _belongs(pid, value, variable):
            with contextlib.suppress(OSError):
                found[pid] = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
                )
    return found


def stop(agent: subprocess.Popen[bytes] | None, run: str) -> None:
    """End the agent, then whatever of the run is left. A second interruption only shortens the wait.

    Processes that are stopped would wait for SIGCONT before they end at SIGTERM: they are killed at once.
    """
    try:
        for pid in processes(run):
            with contextlib.suppress(OSError):
                if _state(pid)[0] in STOPPED:
                    os.kill(pid, signal.SIGKILL)
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
    """SIGTERM raises KeyboardInterrupt in this block (in the main thread, and not inside `warnings_call`; elsewhere it
    does nothing)."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) in _WARNED:
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


_WARNED: list[Any] = []
"""Handlers of `warnings_call`."""


@contextlib.contextmanager
def warnings_call(told: Callable[[], None], grace: float = 0.0) -> Iterator[None]:
    """SIGUSR1 calls `told` in this block, and so does SIGTERM with `grace`: KeyboardInterrupt follows after so many
    seconds. In the main thread; elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def warned(number: int, _: Any) -> None:
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, grace)
        told()

    numbers = [signal.SIGUSR1, *([signal.SIGTERM] if grace else [])]
    before = {number: signal.signal(number, warned) for number in numbers}
    if grace:
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _interrupt)
        _WARNED.append(warned)
    try:
        yield
    finally:
        if grace:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _WARNED.remove(warned)
        for number, handler in before.items():
            signal.signal(number, handler)
