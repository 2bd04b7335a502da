"""What is looked at or simulated now, and how much of it is left, for who waits: lines on standard error that change in
a terminal and in a notebook and go when it is done; elsewhere a line every `EVERY` seconds. Without torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from alstlib.base.units import format_seconds

Part = TypeVar("Part")
EVERY = 10.0
"""Seconds between two lines where they cannot change."""


class _Loops(Progress):
    """One line for each loop that is under way, the outermost first."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        stored = bool(os.environ.get("ALST_STATIC"))  # a notebook that is stored to be read
        changes = (console.is_terminal or console.is_jupyter) and not stored
        columns = (SpinnerColumn(), TextColumn("alst: {task.description}", markup=False), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, redirect_stdout=False, disable=not changes)
        self.plain, self.said = not changes and not stored, time.monotonic()

    def say(self) -> None:
        """Print the lines where they cannot change, from time to time."""
        if self.plain and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(f"alst: {'; '.join(task.description for task in self.tasks)}", file=sys.stderr, flush=True)


_SHOWN: ContextVar[_Loops | None] = ContextVar("shown", default=None)


@contextmanager
def watched(what: str, parts: Collection[Part] = ()) -> Iterator[Iterator[Part]]:
    """The parts, of which is shown which one is under way and about how long it takes until all are done, while the
    block goes through them."""
    outer, began = _SHOWN.get(), time.monotonic()
    shown = outer or _Loops()
    token, line = _SHOWN.set(shown), shown.add_task(what)

    def each() -> Iterator[Part]:
        for done, part in enumerate(parts):
            left = (time.monotonic() - began) / done * (len(parts) - done) if done else 0.0
            about = f", about {format_seconds(left)} left" if left >= 1 else ""
            shown.update(line, description=f"{what}: {done + 1} of {len(parts)}{about}")
            shown.say()
            yield part

    with nullcontext() if outer or shown.disable else shown:  # before rich 15 a disabled one prints an empty line
        try:
            yield each()
        finally:
            shown.remove_task(line)
            _SHOWN.reset(token)
