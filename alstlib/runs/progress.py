"""The progress of a run: rank 0 appends to `progress.jsonl`, the launcher reads it, and a person sees one line; also
the ranks' logs and errors.

An event is an object with `time` (seconds since the epoch) and `event`, and any of row, seq_len, step, steps,
tokens_per_second, loss, eta_seconds (of what the event names), message, status.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alstlib.runs.results import strict
from alstlib.tables import console
from alstlib.units import format_seconds, format_tokens, printable

TAIL_CHARACTERS = 4000
TRACEBACK = "Traceback (most recent call last)"
SEARCHED_BYTES = 100_000
"""The part at the end of a log in which a traceback is looked for."""
RANK_LOGS = "attempt_*/*/std*.log"
"""torchrun's files of its ranks, below a folder of its own."""
FAILURES = "failures.json"
"""Written by `train.agent` beside its ranks' logs: the ranks that failed, in the order in which it saw them."""


class Progress:
    """Writer for the worker: `emit` appends one line. Ranks other than 0 write nothing.

    Progress is not worth a run: a line that cannot be written (a full disk) is dropped, with one warning.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.path, self.rank, self.warned = Path(path), rank, False

    def emit(self, event: str, **fields: Any) -> None:
        if self.rank:
            return
        line = json.dumps(strict({"time": round(time.time(), 3), "event": event, **fields})) + "\n"
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as e:
            if not self.warned:
                warnings.warn(f"progress is not recorded: {e}", stacklevel=2)
            self.warned = True


class ProgressReader:
    """`read` returns the events that were appended since the last call, whole lines only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.offset = Path(path), 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as file:
                if self.offset > os.fstat(file.fileno()).st_size:
                    self.offset = 0  # a new run began
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self.offset += len(whole) + len(newline)
        events = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # half a line, from when the disk was full
                events.append(json.loads(line))
        return [e for e in events if isinstance(e, dict)]


class Pace:
    """Says how far a long piece of work is and how long it will take on: nothing in its first second, then ever less
    often. Called with what is done of `total`; `emit` gets `message` and `eta_seconds`."""

    def __init__(self, emit: Callable[..., Any], message: str, total: float) -> None:
        self.emit, self.message, self.total = emit, message, total
        self.began = self.said = time.monotonic()

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        passed = now - self.began
        if now - self.said >= max(1.0, passed / 50) and 0 < done <= self.total:
            self.said = now
            left = passed * (self.total - done) / done
            self.emit(message=f"{self.message}, {done / self.total:.0%}", eta_seconds=left)


# One line about an event

SAID: dict[str, Callable[[Any], str]] = {
    "seq_len": lambda n: f"length {format_tokens(int(n))}", "step": "step {}".format,
    "tokens_per_second": "{:,.0f} tokens/s".format, "loss": "loss {:.4f}".format, "message": str,
}  # fmt: skip
"""The fields of an event that are shown, in their order, with their format."""


def describe(event: Mapping[str, Any], now: float = 0.0) -> str:
    """One line: row, length tried, step, tokens/s, loss, message, time left (at `now`, seconds since the epoch)."""
    row = event.get("row") or "run"
    if event.get("event") == "end":
        return f"{row}  {event.get('status', 'ended')}"
    step = {"step": f"{event['step']}/{event['steps']}"} if event.get("steps") and "step" in event else {}
    known = {name: value for name, value in {**event, **step}.items() if value not in (None, "")}
    parts = [said(known[name]) for name, said in SAID.items() if name in known] or [str(event.get("event", ""))]
    left = time_left(event, now)
    if left is not None:
        over = left <= -5
        parts.append(f"{format_seconds(-left)} over the estimate" if over else f"{format_seconds(max(0.0, left))} left")
    elif (waited := _waited(event, now)) >= 5:
        parts.append(f"for {format_seconds(waited)}")
    return "  ".join([row, *parts])


def time_left(event: Mapping[str, Any], now: float = 0.0) -> float | None:
    """Remaining seconds of what an event names, at `now`; negative when it should have ended; None when unknown."""
    return None if event.get("eta_seconds") is None else event["eta_seconds"] - _waited(event, now)


def _waited(event: Mapping[str, Any], now: float) -> float:
    return max(0.0, now - (event.get("time") or now))


# The ranks' logs and errors


def _tails(logs: Path) -> list[tuple[Path, str]]:
    """The ranks' logs and what they end with: first those with a traceback, in the order in which they ended. Where the
    ranks said nothing, the agent's log."""
    for pattern in (f"**/{RANK_LOGS}", "agent.log"):
        if tails := [(file, text) for file in logs.glob(pattern) if (text := _tail(file))]:
            break
    return sorted(tails, key=lambda tail: (TRACEBACK not in tail[1], tail[0].stat().st_mtime))


def _tail(file: Path) -> str:
    with open(file, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - SEARCHED_BYTES))
        return log.read().decode(errors="replace").strip()


def rank_of(log: Path) -> int:
    """The rank that a log of torchrun is of. On nodes other than the first its folder names a rank of that node, and
    the folder above says which is the node's first (`torchrun.Attempt.logs`)."""
    first = re.fullmatch(r"node\d+\.rank(\d+)", log.parents[3].name)
    return int(log.parent.name) + (int(first[1]) if first else 0)


def first_failed(logs: Path) -> Path | None:
    """The log of the rank that failed first in an attempt, as far as it is known; None where there is nothing."""
    return next((file for file, _ in _tails(logs)), None)


def log_tail(logs: Path, limit: int = TAIL_CHARACTERS) -> str:
    """The last `limit` characters of the ranks' logs: half of them are of `first_failed`, half of the next."""
    parts, tails = [], _tails(logs)[:2]
    for file, text in tails:
        head = f"--- rank {rank_of(file)}, {file.stem} ---\n" if file.name != "agent.log" else "--- torchrun ---\n"
        parts.append(head + text[len(head) + 1 - limit // len(tails) :])
    return "\n".join(parts)


def root_cause(logs: Path, oom_kills: int | None = None) -> tuple[str, str]:
    """The rank that failed first, by what an agent wrote (FAILURES): the type of the error, `RankKilled` where a signal
    from outside ended the rank, and what happened. `oom_kills` counts the processes that the kernel ended meanwhile for
    lack of memory.

    A rank that was killed comes before ranks that ended by themselves, because these lost the connection to it.
    """
    try:
        failures = json.loads((logs / FAILURES).read_text())
    except (OSError, ValueError):
        return "RankFailed", ""
    for failure in failures:
        number = -failure["exitcode"]
        if number > 0 and number != signal.SIGABRT and not failure["by_agent"]:  # a library aborts when others are gone
            return "RankKilled", f"rank {failure['rank']} was ended by {_by_signal(number, oom_kills)}"
    first = min((f for f in failures if not f["by_agent"]), key=lambda f: f["time"])
    said = first["error"] or _last_error(logs, first["rank"])
    error = f": {said.splitlines()[0]}" if said else ""
    return "RankFailed", f"rank {first['rank']} ended with exit status {first['exitcode']}{error}"


def _last_error(logs: Path, rank: int) -> str:
    """The last line of a rank's log that ends with a traceback: of a worker without torch's `record`, or of one that
    could not be imported. Empty where there is none."""
    tails = [text for file, text in _tails(logs) if file.name == "stderr.log" and rank_of(file) == rank]
    return tails[0].splitlines()[-1] if tails and TRACEBACK in tails[0] else ""


def _by_signal(number: int, oom_kills: int | None) -> str:
    """The name of a signal, and who usually sends it."""
    if number == signal.SIGKILL and oom_kills:
        return f"SIGKILL: the host ran out of memory, and its kernel ended {oom_kills} processes meanwhile"
    counted = ", but this host's kernel counts none during the run" if oom_kills == 0 else ""
    senders: dict[int, str] = {
        signal.SIGKILL: f"as the kernel does when the host's memory runs out{counted}; else a person or a scheduler",
        signal.SIGSEGV: "a crash in compiled code", signal.SIGBUS: "often a full /dev/shm or disk",
    }  # fmt: skip
    names = {int(known): known.name for known in signal.Signals}
    return f"{names.get(number, f'signal {number}')} ({senders.get(number, 'from outside the run')})"


def whereabouts(progress: Path, logs: Path, stopped: Sequence[int] = ()) -> str:
    """The last step that ended, the ranks that are stopped or gave no answer, and where each of the others was when it
    wrote that down (`processes.ask_where`): first the ranks that did not wait for others."""
    steps = [e for e in ProgressReader(progress).read() if e.get("step") is not None]
    told = [f"the last step was {steps[-1]['step']} of {steps[-1].get('steps', '?')}" if steps else "it ended no step"]
    places: dict[tuple[int, str], list[str]] = {}
    for file in sorted(logs.glob("**/attempt_*/*/stderr.log"), key=rank_of):
        rank, said = rank_of(file), _tail(file).rpartition("(most recent call first)")[2]
        frames = re.findall(
            r'File "(.*)", line (\d+) in (\S+)', said
        )  # Python's faulthandler writes the innermost first
        where = (1, "gave no answer (not started, or hanging in a driver or on a disk)")
        if frames:
            path, line, name = next((f for f in frames if "/alstlib/" in f[0]), frames[0])
            waits = "/torch/distributed/" in frames[0][0]
            where = (2 + waits, f"{'waited ' if waits else ''}in {name} ({Path(path).name}, line {line})")
        if rank in stopped:
            where = (0, "stopped (SIGSTOP, or a debugger)")
        places.setdefault(where, []).append(str(rank))
    for (_, place), ranks in sorted(places.items())[:6]:
        told.append(f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}: {place}")
    return "; ".join(told)


# What a person sees


class Plain:
    """A stream that shows what is not printable as spaces: texts of errors come from data, models and results of
    others."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return bool(getattr(shell, "kernel", None))


def _papermill_log() -> TextIO | None:
    """What the terminal (or log file) of a papermill that runs this kernel shows, where the display does not show."""
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process().parent()
        if parent and "papermill" in [Path(word).name for word in parent.cmdline()]:
            return open(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")  # a kernel's fileno is its first output
    return None


class Printer:
    """Keeps one line up to date in a terminal or a notebook, at most once a second. In a log file it prints lines: at
    growing intervals, from a second to ten minutes, and for each tenth of the steps. papermill's output gets the same
    lines, because it shows nothing of a display. The event `end` is always shown.

    An instance is an `on_progress` for `launch.launch`; notebooks know the class as `launch.progress_printer`."""

    LOG_SECONDS = 600.0

    def __init__(self, also: Callable[[], str] = lambda: "") -> None:
        """`also` is said at the end of each line."""
        self.also, self.event = also, dict[str, Any]()
        self.display, self.live, self.log = None, None, None
        terminal = console()
        if in_kernel():
            from IPython.display import display

            self.display, self.log = display(Text("starting"), display_id=True), _papermill_log()
        elif terminal.is_terminal and not terminal.is_dumb_terminal:
            self.live = Live(console=terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        else:
            self.log = sys.stdout
        self.began = time.monotonic()
        self.shown = self.logged = -math.inf
        self.line, self.tenth = "", 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.event = dict(event)
        self.tick()
        if event.get("event") == "end":
            self.close()

    def tick(self) -> None:
        """Called about once a second while nothing happens: time passes."""
        if not self.event:
            return
        now, ends = time.monotonic(), self.event.get("event") == "end"
        line = printable(f"{describe(self.event, time.time())}  {self.also()}").strip().replace("\n", " ")
        step, steps = self.event.get("step") or 0, self.event.get("steps") or 0
        if ends or now - self.shown >= 1.0:
            self.shown = now
            self._show(line, step, steps)
        every = min(self.LOG_SECONDS, max(1.0, self.logged - self.began))
        tenth = 10 * step // steps if steps else 0
        if self.log and line != self.line and (ends or now - self.logged >= every or tenth > self.tenth):
            self.logged, self.tenth, self.line = now, tenth, line
            bar = self.display is not None and self.log.isatty()  # papermill's, which it draws again
            print(f"\r\x1b[2K{line}" if bar else line, file=self.log, flush=True)

    def _show(self, line: str, step: int, steps: int) -> None:
        """Replace what the terminal or the notebook shows: a bar where the number of steps is known, and the line."""
        shown = Table.grid(padding=(0, 1))
        shown.add_row(*([ProgressBar(steps, step, 20)] if steps else []), Text(line, overflow="fold"))
        if self.live:
            self.live.start()
            self.live.update(shown, refresh=True)
        elif self.display:
            self.display.update(shown)

    def close(self) -> None:
        """Nothing follows: what is printed next begins a line of its own."""
        if self.live:
            self.live.stop()
        self.event = {}
