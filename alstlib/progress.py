"""What a run says while it runs: logs, and `progress.jsonl`: rank 0 appends, the launcher reads, a person sees a line.

An event is an object with `time` (seconds since the epoch) and `event`, and any of row, seq_len, step, steps,
tokens_per_second, loss, eta_seconds, message, status.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alstlib.results import format_seconds, format_tokens, strict

TAIL_CHARACTERS = 4000


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


def describe(event: Mapping[str, Any]) -> str:
    """One line: row, length tried, step, tokens/s, loss, time left, message."""
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
    if event.get("eta_seconds") is not None:
        parts.append(f"{format_seconds(event['eta_seconds'])} left")
    if event.get("message"):
        parts.append(str(event["message"]))
    return "  ".join(parts if len(parts) > 1 else [*parts, str(event.get("event", ""))])


def log_tail(logs: Path, limit: int = TAIL_CHARACTERS) -> str:
    """The last `limit` characters of the ranks' logs: the rank whose traceback came first gets half of it.

    The agent's log stands in where the ranks said nothing.
    """
    files = [f for f in logs.glob("*/attempt_*/*/std*.log") if f.stat().st_size]
    tails = []
    for file in files or [f for f in [logs / "agent.log"] if f.exists()]:
        with open(file, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - limit))
            text = log.read().decode(errors="replace").strip()
        tails.append(("Traceback (most" not in text, file.stat().st_mtime, file, text))
    parts, room = [], limit
    for _, _, file, text in sorted(tails):
        name = f"--- rank {file.parent.name}, {file.stem} ---\n" if files else "--- torchrun ---\n"
        share = room if len(tails) == 1 else room // 2
        if share > len(name) + 80:
            parts.append(name + text[-(share - len(name)) :])
            room -= len(parts[-1]) + 1
    return "\n".join(parts)


def root_cause(logs: Path) -> str:
    """The rank that failed first, as torchrun's own summary in agent.log names it; '' when it names none."""
    try:
        summary = (logs / "agent.log").read_text(errors="replace").rpartition("Root Cause")[2]
    except OSError:
        return ""
    found = re.search(r"\brank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", summary, re.DOTALL)
    if not found:
        return ""
    killed = " (killed: is the host short of memory?)" if found[2] == "-9" else ""
    return f"rank {found[1]} ended with exit status {found[2]}{killed}"


def _notebook_display() -> Any:
    """A display handle when this is a Jupyter kernel, else None."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if not getattr(shell, "kernel", None):
        return None
    from IPython.display import display

    return display({"text/plain": "starting"}, raw=True, display_id=True)


def progress_printer(log_seconds: float = 10.0) -> Callable[[Mapping[str, Any]], None]:
    """An `on_progress` that keeps one line up to date: in a terminal, in a notebook, or every 10 s in a log file.

    A terminal and a notebook are updated at most once a second; the event `end` is always shown.
    """
    shown, every, width, handle = 0.0, 1.0, 0, _notebook_display()
    terminal = handle is None and sys.stdout.isatty()
    if handle is None and not terminal:
        every = log_seconds

    def show(event: Mapping[str, Any]) -> None:
        nonlocal shown, width
        end = event.get("event") == "end"
        if not end and time.monotonic() - shown < every:
            return
        shown, line = time.monotonic(), describe(event)
        if handle is not None:
            handle.update({"text/plain": line}, raw=True)
        elif terminal:
            room = os.get_terminal_size(sys.stdout.fileno()).columns - 1
            print("\r" + line[:room].ljust(min(width, room)), end="\n" if end else "", flush=True)
            width = 0 if end else len(line)
        else:
            print(line, flush=True)

    return show
