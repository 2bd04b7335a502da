"""The progress of a run: rank 0 appends to `progress.jsonl`, the launcher reads it, and a person sees one line; also
the logs of ranks.

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

from alstlib.runs.results import strict
from alstlib.units import format_seconds, format_tokens, printable

TAIL_CHARACTERS = 4000
SEARCHED_BYTES = 100_000
"""Of the end of a log, in which a traceback is looked for."""


class Progress:
    """Writer for the worker: `emit` appends one line. Ranks other than 0 write nothing.

    Progress is not worth a run: a line that cannot be written (a full disk) is dropped, with one warning.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.path, self.rank, self.warned = Path(path), rank, False

    def emit(self, event: str, **fields: Any) -> None:
        if self.rank:
            return
        line = json.dumps(strict({"time": round(time.time(), 3), "event": event, **fields}, [])) + "\n"
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
            try:
                events.append(json.loads(line))
            except ValueError:  # half a line, from when the disk was full
                continue
        return [e for e in events if isinstance(e, dict)]


class Pace:
    """Says how far a long piece of work is and how long it will take on: nothing in its first second, then ever less
    often. Called with what is done of `total`; `emit` gets `message` and `eta_seconds`."""

    def __init__(self, emit: Callable[..., Any], message: str, total: float) -> None:
        self.emit, self.message, self.total = emit, message, total
        self.began = self.said = time.monotonic()

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if now - self.said < max(1.0, (now - self.began) / 50) or not 0 < done <= self.total:
            return
        self.said = now
        left = (now - self.began) * (self.total - done) / done
        self.emit(message=f"{self.message}, {done / self.total:.0%}", eta_seconds=left)


def describe(event: Mapping[str, Any], now: float | None = None) -> str:
    """One line: row, length tried, step, tokens/s, loss, message, time left (at `now`, seconds since the epoch)."""
    parts = [str(event.get("row") or "run")]
    if event.get("event") == "end":
        return f"{parts[0]}  {event.get('status', 'ended')}"
    if event.get("seq_len"):
        parts.append(f"length {format_tokens(int(event['seq_len']))}")
    if event.get("step") is not None:
        parts.append(f"step {event['step']}" + (f"/{event['steps']}" if event.get("steps") else ""))
    if event.get("tokens_per_second"):
        parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.4f}")
    if event.get("message"):
        parts.append(str(event["message"]))
    parts = parts if len(parts) > 1 else [*parts, str(event.get("event", ""))]
    waited = max(0.0, now - event["time"]) if now and event.get("time") else 0.0
    if (left := time_left(event, now)) is not None:
        over = -left >= 5
        parts.append(f"{format_seconds(-left)} over the estimate" if over else f"{format_seconds(max(0.0, left))} left")
    elif waited >= 5:
        parts.append(f"for {format_seconds(waited)}")
    return "  ".join(parts)


def time_left(event: Mapping[str, Any], now: float | None = None) -> float | None:
    """Seconds that what an event names takes on, at `now`; negative when it should have ended; None when unknown."""
    if event.get("eta_seconds") is None:
        return None
    waited = max(0.0, now - event["time"]) if now and event.get("time") else 0.0
    return event["eta_seconds"] - waited


def _tails(logs: Path) -> list[tuple[Path, str]]:
    """The ranks' logs and what they end with: first those with a traceback, in the order in which they ended. Where the
    ranks said nothing, the agent's log."""
    files = [f for f in logs.glob(f"**/{RANK_LOGS}") if f.stat().st_size]
    tails = []
    for file in files or [f for f in [logs / "agent.log"] if f.exists() and f.stat().st_size]:
        text = _tail(file).strip()
        tails.append(("Traceback (most" not in text, file.stat().st_mtime, file, text))
    return [(file, text) for _, _, file, text in sorted(tails)]


RANK_LOGS = "attempt_*/*/std*.log"
"""torchrun's files of its ranks, below a folder of its own."""


def rank_of(log: Path) -> int:
    """The rank that a log of torchrun is of. On nodes other than the first its folder names a rank of that node, and
    the folder above says which is the node's first (`torchrun.Attempt.logs`)."""
    first = re.fullmatch(r"node\d+\.rank(\d+)", log.parents[3].name)
    return int(log.parent.name) + (int(first[1]) if first else 0)


def _tail(file: Path) -> str:
    with open(file, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - SEARCHED_BYTES))
        return log.read().decode(errors="replace")


def first_failed(logs: Path) -> Path | None:
    """The log of the rank that failed first in an attempt, as far as it is known; None where there is nothing."""
    return next((file for file, _ in _tails(logs)), None)


def log_tail(logs: Path, limit: int = TAIL_CHARACTERS) -> str:
    """The last `limit` characters of the ranks' logs: that of `first_failed` gets half of it."""
    parts, room, tails = [], limit, _tails(logs)
    for file, text in tails:
        ranks = file.name != "agent.log"
        name = f"--- rank {rank_of(file)}, {file.stem} ---\n" if ranks else "--- torchrun ---\n"
        share = room if len(tails) == 1 else room // 2
        if share > len(name) + 80:
            parts.append(name + text[-(share - len(name)) :])
            room -= len(parts[-1]) + 1
    return "\n".join(parts)


def root_cause(logs: Path, oom_kills: int | None = None) -> tuple[str, str]:
    """The rank that failed first, by agent.log: the type of the error, `RankKilled` where a signal from outside ended
    the rank, and what happened. `oom_kills` counts the processes that the kernel ended meanwhile for lack of memory.

    A rank that was killed comes before ranks that ended by themselves, because these lost the connection to it.
    """
    text = ""
    with contextlib.suppress(OSError):
        text = (logs / "agent.log").read_text(errors="replace")
    failures, _, root = text.rpartition("Root Cause")
    ended = [(rank, int(code), pid) for rank, code, pid in re.findall(ENDED, f"{root}\n{failures}", re.DOTALL)]
    by_agent = set(re.findall(r"Sending process (\d+) closing signal", text))
    for rank, code, pid in ended:
        if code < 0 and -code != signal.SIGABRT and pid not in by_agent:  # a library aborts when others are gone
            return "RankKilled", f"rank {rank} was ended by {_signal_name(-code)}{_sender(-code, oom_kills)}"
    if not ended:
        return "RankFailed", ""
    rank, code, _ = ended[0]
    raised = "".join(f": {line}" for line in [_last_error(logs, rank)] if line)
    return "RankFailed", f"rank {rank} ended with exit status {code}{raised}"


def _last_error(logs: Path, rank: str) -> str:
    """The line of the last traceback in a rank's log that says what was raised; empty where there is none."""
    for file in (f for f in logs.glob("**/attempt_*/*/stderr.log") if rank_of(f) == int(rank)):
        text = re.sub(r"^\[rank\d+\]: ?", "", _tail(file), flags=re.MULTILINE)  # PyTorch's own mark
        if raised := re.findall(r"^Traceback \(most .*\n(?:\s.*\n)*(\S.*)", text, re.MULTILINE):
            return raised[-1]
    return ""


ENDED = r"\brank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)"
"""A rank in the summary that torchrun writes of the ranks that failed."""


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _sender(number: int, oom_kills: int | None) -> str:
    """Who usually sends a signal."""
    if number == signal.SIGKILL and oom_kills:
        return f": the host ran out of memory, and its kernel ended {oom_kills} process{'es' if oom_kills > 1 else ''}"
    if number == signal.SIGKILL:
        counted = ", but this host's kernel counts none during the run" if oom_kills == 0 else ""
        return f" (as the kernel does when the host's memory runs out{counted}; else a person or a scheduler)"
    crash = {int(signal.SIGSEGV): "a crash in compiled code", int(signal.SIGBUS): "often a full /dev/shm or disk"}
    return f" ({crash.get(number, 'from outside the run')})"


def whereabouts(progress: Path, logs: Path, stopped: Sequence[int] = ()) -> str:
    """The last step that ended, the ranks that are stopped or gave no answer, and where each of the others was when it
    wrote that down (`processes.ask_where`): first the ranks that did not wait for others."""
    steps = [e for e in ProgressReader(progress).read() if e.get("step") is not None]
    told = [f"the last step was {steps[-1]['step']} of {steps[-1].get('steps', '?')}" if steps else "it ended no step"]
    ranks: dict[tuple[bool, str], list[int]] = {}
    silent = []
    for file in logs.glob("**/attempt_*/*/stderr.log"):
        main_thread = _tail(file).rpartition("(most recent call first)")[2]
        frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', main_thread)
        if not frames:
            silent.append(rank_of(file))
        elif rank_of(file) not in stopped:
            waits = "/torch/distributed/" in frames[0][0]
            path, line, name = next((f for f in frames if "/alstlib/" in f[0]), frames[0])
            ranks.setdefault((waits, f"{name} ({Path(path).name}, line {line})"), []).append(rank_of(file))
    if stopped:
        told.append(f"{_ranks(stopped)} stopped (SIGSTOP, or a debugger)")
    if silent := sorted(set(silent) - set(stopped)):
        told.append(f"{_ranks(silent, 'gave')} no answer (not started, or hanging in a driver or on a disk)")
    for (waits, place), members in sorted(ranks.items(), key=lambda item: (item[0][0], len(item[1])))[:4]:
        told.append(f"{_ranks(members, 'waited' if waits else '')} in {place}")
    return "; ".join(told)


def _ranks(ranks: Sequence[int], verb: str = "") -> str:
    many = len(ranks) > 1
    return f"rank{'s' if many else ''} {', '.join(map(str, sorted(ranks)))} {verb or ('were' if many else 'was')}"


def _notebook_display() -> Any:
    """A display handle when this is a Jupyter kernel, else None."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if not getattr(shell, "kernel", None):
        return None
    from IPython.display import display

    return display({"text/plain": "starting"}, raw=True, display_id=True)


def _papermill_log() -> TextIO | None:
    """What the terminal (or log file) of a papermill that runs this kernel shows, where the display does not show."""
    import psutil  # a part of every kernel

    with contextlib.suppress(OSError, psutil.Error, AttributeError, ValueError):
        if "papermill" in [Path(word).name for word in psutil.Process().parent().cmdline()]:
            return open(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")  # a kernel's fileno is its first output
    return None


class Plain:
    """A stream that shows what is not printable as spaces: texts of errors come from data, models and results of
    others. A carriage return that begins what is written is the `Printer`'s."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        begins = text[:1] if text.startswith("\r") else ""
        return self.stream.write(begins + printable(text.removeprefix("\r")))


class Printer:
    """Keeps one line up to date in a terminal or a notebook, at most once a second. In a log file it prints lines: at
    growing intervals, from a second to ten minutes, and for each tenth of the steps. papermill's output gets the same
    lines, because it shows nothing of a display. The event `end` is always shown.

    An instance is an `on_progress` for `launch.launch`; notebooks know the class as `launch.progress_printer`."""

    LOG_SECONDS = 600.0

    def __init__(self, also: Callable[[], str] = lambda: "") -> None:
        """`also` is said at the end of each line."""
        self.also = also
        self.handle = _notebook_display()
        self.terminal = self.handle is None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        live = self.handle is not None or self.terminal
        self.log = _papermill_log() if self.handle is not None else None if live else sys.stdout
        self.event: Mapping[str, Any] | None = None
        self.began, self.width = time.monotonic(), 0
        self.shown = self.logged = -math.inf
        self.line, self.tenth = "", 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.event = event
        self.tick()
        if event.get("event") == "end":
            self.close()

    def tick(self) -> None:
        """Called about once a second while nothing happens: time passes."""
        if self.event is None:
            return
        now, ends = time.monotonic(), self.event.get("event") == "end"
        if (self.handle is not None or self.terminal) and (ends or now - self.shown >= 1.0):
            self.shown = now
            self._show(self._line())
        every = min(self.LOG_SECONDS, max(1.0, self.logged - self.began))
        tenth = 10 * int(self.event.get("step") or 0) // int(self.event.get("steps") or 1)
        if self.log is not None and (ends or now - self.logged >= every or tenth > self.tenth):
            self.logged, self.tenth = now, tenth
            line = self._line()
            if line != self.line:
                print(f"{self.wipe}{line}", file=self.log, flush=True)
            self.line = line

    def _line(self) -> str:
        said = "  ".join(part for part in (describe(self.event or {}, time.time()), self.also()) if part)
        return printable(said).replace("\n", " ")

    @property
    def wipe(self) -> str:
        """Removes papermill's bar from its terminal, which draws it again."""
        return "\r\x1b[2K" if self.log is not None and self.handle is not None and self.log.isatty() else ""

    def _show(self, line: str) -> None:
        if self.handle is not None:
            self.handle.update({"text/plain": line}, raw=True)
            return
        room = max(20, os.get_terminal_size(sys.stdout.fileno()).columns or 80) - 1
        line = line if len(line) <= room else f"{line[: room - 1]}…"
        print("\r" + line.ljust(min(self.width, room)), end="", flush=True)
        self.width = len(line)

    def close(self) -> None:
        """Nothing follows: what is printed next begins a line of its own."""
        if self.terminal and self.width:
            print(flush=True)
        self.event, self.width = None, 0
