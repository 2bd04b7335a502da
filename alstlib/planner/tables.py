"""Tables and their console, for terminals and log files. Without torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alstlib.base.units import printable


def console(width: int | None = None) -> Console:
    """rich's console on standard output, also where that is `runs.progress.Plain`: what it prints must be `printable`.
    Where standard output is no terminal it writes plain lines of up to 100 columns. It takes nothing in a text for
    markup."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    terminal = stream.isatty()
    return Console(
        file=stream, markup=False, highlight=False, emoji=False, force_terminal=terminal, force_jupyter=False,
        width=width or (None if terminal else 100),
    )  # fmt: skip


COLORS = {
    **dict.fromkeys(("ok", "equal"), "green"), **dict.fromkeys(("oom", "stale", "timeout", "cancelled"), "yellow"),
    **dict.fromkeys(("error", "interrupted", "unreadable", "differs", "crash"), "red"), "running": "cyan",
}  # fmt: skip
"""The colors of words in tables."""


def listed(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> Table:
    """A table of texts without lines between them. Its last column takes the room that is left, and is folded there;
    columns of `numbers` are flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(head))
    for name in head:
        table.add_column(
            name, no_wrap=name != head[-1], overflow="fold", justify="right" if name in numbers else "left"
        )
    for row in rows:
        table.add_row(*(Text(printable(cell), COLORS.get(cell, "")) for cell in row))
    return table
