"""How lines look and how they are named; and which numbers of an axis are named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

INK = "#767676"
"""The grey of texts, axes and marks: it is read on white and on JupyterLab's dark theme (contrast 4.5 and 4.2)."""
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", INK)
"""Okabe and Ito's colours, which people with any colour vision can tell apart, with a grey in the place of black."""
PLACES: dict[str, Any] = {
    "device": {"facecolor": PALETTE[0], "hatch": ""},
    "host": {"facecolor": PALETTE[1], "hatch": "//"},
    "disk": {"facecolor": PALETTE[2], "hatch": ".."},
    "gone": {"facecolor": "#bdbdbd", "hatch": "xx"},
}
"""How each place looks in every figure: where a tensor is kept, or that it is done with. Hatches tell them apart in
grey."""
MARKERS = "osD^vPX"
MANY = 20
"""Lines that a legend can name."""
NAMED = 10
"""Numbers that an axis can name, wherever they lie; lines that are named of those that are too many."""


def look(i: int) -> dict[str, str]:
    """Colour and marker of the i-th line: after 7 each colour comes again with another marker."""
    return {"color": PALETTE[i % 7], "marker": MARKERS[(i + i // 7) % 7]}


def name_lines(axes: Any) -> None:
    """Say which line is which: a legend, of many lines of the first ones, in the order of the table."""
    lines, names = axes.get_legend_handles_labels()
    named = len(names) if len(names) <= MANY else NAMED
    more = f"and {len(names) - named} more" if named < len(names) else None
    axes.legend(lines[:named], names[:named], frameon=False, fontsize=9, title=more)


def apart(numbers: Sequence[float], log: bool) -> list[float]:
    """Those among ascending numbers that an axis has room to name."""
    at = [math.log2(x) if log else x for x in numbers]
    kept = [0]
    for i, place in enumerate(at):
        if place - at[kept[-1]] >= (at[-1] - at[0]) / 8:
            kept.append(i)
    return [numbers[i] for i in kept]
