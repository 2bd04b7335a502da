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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

RUN_ID_VARIABLE = "ALST_RUN_ID"
DEADLINE_VARIABLE = "ALST_DEADLINE"
"""When the launcher will end the run, in seconds since the epoch."""
WARNED = "warned"
"""A file in a run's folder: its time is nearly up, so it saves its state after the step that runs, and ends."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

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
os.execvp(command[0], command)
"""


def start(command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, its output in the file `log`. It gets SIGTERM when this thread ends."""
    shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]
    with open(log, "wb") as out:
        return subprocess.Popen(
            shim, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def signal_with_parent(number: int) -> None:
    """Linux sends this process a signal when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def die_with_parent() -> None:
    """Called by a rank at its start: the kernel kills this process when its torchrun ends, however that ends.

    Linux only (elsewhere a rank outlives a torchrun that was killed with SIGKILL).
    """
    if sys.platform != "linux":
        return
    signal_with_parent(signal.SIGKILL)
    run = os.environ.get(RUN_ID_VARIABLE)
    if run and os.getppid() not in [process.pid for process in _found(run)]:  # torchrun ended before the line above
        print("torchrun is gone; this rank ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def seconds_left() -> float:
    """Seconds until the launcher ends this rank's run; infinite where none does."""
    return float(os.environ.get(DEADLINE_VARIABLE, "inf")) - time.time()


def answer_where() -> None:
    """Called by a rank at its start: at SIGUSR1 it writes to its log where it is, for `progress.whereabouts`."""
    faulthandler.register(signal.SIGUSR1)


def ask_where() -> None:
    """Called by an agent: its ranks write down where they are."""
    for rank in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            rank.send_signal(signal.SIGUSR1)


def _found(run: str) -> Iterator[psutil.Process]:
    """Processes of a run, other than this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run:
                yield process


def stop(agent: subprocess.Popen[bytes] | None, run: str) -> None:
    """End the agent, then whatever of the run is left. A second interruption only shortens the wait.

    Processes that are stopped would wait for SIGCONT before they end at SIGTERM: they are killed at once.
    """
    try:
        for process in _found(run):
            with contextlib.suppress(psutil.Error):
                if process.status() in STOPPED:
                    process.kill()
        if agent is not None and agent.poll() is None:
            agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(GRACE_SECONDS)
    finally:
        if agent is not None and agent.poll() is None:
            agent.kill()
            agent.wait()
        deadline = time.monotonic() + 10
        while (left := list(_found(run))) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)


@contextlib.contextmanager
def _handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Signals have these handlers in this block. Nothing changes outside of the main thread."""
    mine = handlers if threading.current_thread() is threading.main_thread() else {}
    before = {number: signal.signal(number, does) for number, does in mine.items()}
    try:
        yield
    finally:
        for number, does in before.items():
            signal.signal(number, does)


def _interrupt(number: int, _: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def sigterm_interrupts() -> contextlib.AbstractContextManager[None]:
    """SIGTERM raises KeyboardInterrupt in this block, unless it has a handler already, such as that of `warnings_call`
    with a grace."""
    return _handled({signal.SIGTERM: _interrupt} if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else {})


@contextlib.contextmanager
def warnings_call(told: Callable[[], None], grace: float = 0.0) -> Iterator[None]:
    """SIGUSR1 calls `told` in this block, and so does SIGTERM with `grace`: KeyboardInterrupt follows after so many
    seconds. In the main thread; elsewhere it does nothing."""

    def warned(number: int, _: Any) -> None:
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, grace)
        told()

    ends: dict[int, Any] = {signal.SIGTERM: warned, signal.SIGALRM: _interrupt} if grace else {}
    with _handled({signal.SIGUSR1: warned, **ends}):
        try:
            yield
        finally:
            if grace:
                signal.setitimer(signal.ITIMER_REAL, 0)
