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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.live import Live
from rich.text import Text

from alstlib.base.units import format_seconds, printable
from alstlib.planner.tables import console
from alstlib.runs.results import Json, as_json

TAIL_CHARACTERS = 4000
TRACEBACK = "Traceback (most recent call last)"
SEARCHED_BYTES = 100_000
"""The part at the end of a log in which a traceback is looked for."""
RANK_LOGS = "attempt_*/*/std*.log"
"""torchrun's files of its ranks, below a folder of its own."""


class Progress:
    """Writer for the worker: `emit` appends one line. Ranks other than 0 write nothing.

    Progress is not worth a run: a line that cannot be written (a full disk) is dropped, with a warning.
    """

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        self.path, self.rank = Path(path), rank

    def emit(self, event: str, **fields: Any) -> None:
        if self.rank:
            return
        line = as_json({"time": round(time.time(), 3), "event": event, **fields})
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as e:
            warnings.warn(f"progress is not recorded: {e}", stacklevel=1)  # Python shows it once


class ProgressReader:
    """`read` returns the events that were appended since the last call, whole lines only."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.offset = Path(path), 0

    def read(self) -> list[Json]:
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(self.offset if self.offset <= size else 0)  # it is shorter where a new run began
                lines = file.readlines()
                self.offset = file.tell()
        except OSError:
            return []
        if lines and not lines[-1].endswith(b"\n"):
            self.offset -= len(lines.pop())
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # half a line, from when the disk was full
                events.append(json.loads(line))
        return events


class Pace:
    """Says at most once a second how far a long piece of work is and how long it will still take. Called with what is
    done of `total`; `emit` gets `message` and `eta_seconds`."""

    def __init__(self, emit: Callable[..., Any], message: str, total: float) -> None:
        self.emit, self.message, self.total = emit, message, total
        self.began = self.said = time.monotonic()

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if now - self.said >= 1.0 and 0 < done <= self.total:
            self.said = now
            left = (now - self.began) * (self.total - done) / done
            self.emit(message=f"{self.message}, {done / self.total:.0%}", eta_seconds=left)


# One line about an event

SAID = {
    "seq_len": "length {seq_len:,}",
    "step": "step {step}/{steps}",
    "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
    "loss": "loss {loss:.4f}",
    "message": "{message}",
    "status": "{status}",
}
"""The fields of an event that are shown, in their order, with their format."""


def describe(event: Json, now: float = 0.0) -> str:
    """One line: length tried, step, tokens/s, loss, message, how it ended; and the time left, or how long it has been
    so, at `now` (seconds since the epoch)."""
    parts = [text.format(**{"steps": "?", **event}) for name, text in SAID.items() if event.get(name) not in (None, "")]
    if (left := time_left(event, now)) is not None:
        parts.append(f"{format_seconds(left)} left")
    elif (waited := now - event.get("time", now)) >= 5:
        parts.append(f"for {format_seconds(waited)}")
    return "  ".join(parts)


def time_left(event: Json, now: float = 0.0) -> float | None:
    """Remaining seconds of what an event names, at `now`; None when unknown."""
    eta = event.get("eta_seconds")
    return None if eta is None else max(0.0, eta - max(0.0, now - event.get("time", now)))


# The ranks' logs and errors

KILLED = "Linux sends SIGKILL where the host's memory runs out; else a crash in compiled code, a person, or a scheduler"


def _tails(logs: Path) -> list[tuple[Path, str]]:
    """The ranks' logs and what they end with: first those with a traceback, in the order in which they ended. Where the
    ranks said nothing, the agent's log."""
    files = [*logs.glob(f"**/{RANK_LOGS}")] or [*logs.glob("agent.log")]
    tails = [(file, text) for file in files if (text := _tail(file))]
    return sorted(tails, key=lambda tail: (TRACEBACK not in tail[1], tail[0].stat().st_mtime))


def _tail(file: Path) -> str:
    with open(file, "rb") as log:
        log.seek(max(0, file.stat().st_size - SEARCHED_BYTES))
        return log.read().decode(errors="replace").strip()


def rank_of(log: Path) -> int:
    """The rank that a log of torchrun is of. On nodes other than the first its folder names a rank of that node, and
    the folder above says which is the node's first (`torchrun.Attempt.logs`)."""
    first = re.fullmatch(r"node\d+\.rank(\d+)", log.parents[3].name)
    return int(log.parent.name) + (int(first[1]) if first else 0)


def first_failed(logs: Path) -> Path | None:
    """The log of the rank that failed first in an attempt, as far as it is known; None where there is nothing."""
    return next((file for file, _ in _tails(logs)), None)


def log_tail(logs: Path) -> str:
    """The last `TAIL_CHARACTERS` of the ranks' logs: half of them are of `first_failed`, half of the next."""
    tails = _tails(logs)[:2]
    heads = [f"--- {file.relative_to(logs)} ---\n" for file, _ in tails]
    each = TAIL_CHARACTERS // max(1, len(tails)) - 1
    return "\n".join(head + text[len(head) - each :] for head, (_, text) in zip(heads, tails))


def root_cause(failures: Mapping[int, Any], logs: Path) -> tuple[str, str]:
    """The rank that failed first, of those in torchrun's `ChildFailedError.failures`: the type of the error,
    `RankKilled` where a signal from outside ended the rank, and what happened.

    Ranks that torchrun itself ended because another one had failed, by SIGTERM and 30 seconds later by SIGKILL, do not
    count; it lists them after those that it found failed. A rank that was killed comes before ranks that ended by
    themselves, because these lost the connection to it.
    """
    first = next(iter(failures.values()))

    def by_torchrun(failure: Any) -> bool:
        late = failure.timestamp >= first.timestamp + 30
        return failure is not first and (
            failure.exitcode == -signal.SIGTERM or (late and failure.exitcode == -signal.SIGKILL)
        )

    found = {rank: failure for rank, failure in failures.items() if not by_torchrun(failure)}
    for rank, failure in found.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT:  # a library aborts when others are gone
            return "RankKilled", f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name} ({KILLED})"
    rank, failure = min(found.items(), key=lambda item: item[1].timestamp)
    told = failure.error_file_data["message"]  # a string where the rank wrote no error (torch's `record`)
    said = (told["message"] if isinstance(told, dict) else "") or _last_error(logs, rank)
    first_line = said.partition("\n")[0]
    return "RankFailed", f"rank {rank} ended with exit status {failure.exitcode}: {first_line}".removesuffix(": ")


def _last_error(logs: Path, rank: int) -> str:
    """The last line of a rank's log that ends with a traceback: of a worker without torch's `record`, or of one that
    could not be imported. Empty where there is none."""
    tails = (text for file, text in _tails(logs) if file.name == "stderr.log" and rank_of(file) == rank)
    return next((text.splitlines()[-1] for text in tails if TRACEBACK in text), "")


def whereabouts(progress: Path, logs: Path) -> str:
    """The last step that ended, and where the ranks were that the others waited for, at the place that they wrote down
    (`processes.ask_where`). Where all waited for each other, all places."""
    steps = [event for event in ProgressReader(progress).read() if "step" in event]
    told = "the last step was {step} of {steps}".format(**steps[-1]) if steps else "it ended no step"
    files = sorted(logs.glob("**/attempt_*/*/stderr.log"), key=rank_of)
    found = [f"rank {rank_of(file)}: {_place(_tail(file))}" for file in files]
    return "; ".join([told, *([place for place in found if ": waited " not in place] or found)])


def _place(log: str) -> str:
    """Where a rank was by what Python's faulthandler wrote, the innermost frame first."""
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', log.rpartition("(most recent call first)")[2])
    if not frames:
        return "gave no answer (stopped, not started, or hanging in a driver or on a disk)"
    path, line, name = next((frame for frame in frames if "/alstlib/" in frame[0]), frames[0])
    waited = "waited " if "/torch/distributed/" in frames[0][0] else ""
    return f"{waited}in {name} ({Path(path).name}, line {line})"


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

    def __init__(self) -> None:
        self.event: Json = {}
        self.display, self.live, self.log = None, None, None
        screen = console()
        if in_kernel():
            from IPython.display import display

            self.display, self.log = display(Text("starting"), display_id=True), _papermill_log()
        elif screen.is_terminal and not screen.is_dumb_terminal:
            self.live = Live(console=screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        else:
            self.log = sys.stdout
        self.began = time.monotonic()
        self.shown = self.logged = -math.inf
        self.tenth = 0

    def __call__(self, event: Json) -> None:
        self.event = event
        self.tick()
        if event.get("event") == "end":
            self.close()

    def tick(self) -> None:
        """Called about once a second while nothing happens: time passes."""
        if not self.event:
            return
        now, ends = time.monotonic(), self.event.get("event") == "end"
        line = printable(f"{self.event.get('row') or 'run'}  {describe(self.event, time.time())}").replace("\n", " ")
        if ends or now - self.shown >= 1.0:
            self.shown, shown = now, Text(line, overflow="fold")
            if self.live:
                self.live.start()
                self.live.update(shown, refresh=True)
            elif self.display:
                self.display.update(shown)
        every = min(self.LOG_SECONDS, max(1.0, self.logged - self.began))
        tenth = 10 * (self.event.get("step") or 0) // (self.event.get("steps") or 1)
        if self.log and (ends or now - self.logged >= every or tenth > self.tenth):
            self.logged, self.tenth = now, tenth
            bar = self.display is not None and self.log.isatty()  # papermill's, which it draws again
            print(f"\r\x1b[2K{line}" if bar else line, file=self.log, flush=True)

    def close(self) -> None:
        """Nothing follows: what is printed next begins a line of its own."""
        if self.live:
            self.live.stop()
        self.event = {}
