"""How lines look and how they are named, from two to some hundreds of them; and which numbers of an axis are named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's colours, which people with any colour vision can tell apart."""
MARKERS = "osD^vPX"
MANY = 20
"""Lines that a legend can name."""
NAMED = 10
"""Numbers that an axis can name, wherever they lie."""
SCALE = "viridis"


def look(i: int) -> dict[str, str]:
    """Colour and marker of the i-th line: after 7 each colour comes again with another marker."""
    return {"color": PALETTE[i % 7], "marker": MARKERS[(i + i // 7) % 7]}


def look_of_many(i: int, count: int, most: int = MANY) -> dict[str, Any]:
    """The look of the i-th of `count` lines: of more than `most`, a colour of the scale that `name_lines` draws."""
    if count <= most:
        return look(i)
    return {"color": plt.get_cmap(SCALE)(i / (count - 1)), "marker": "", "linestyle": "-", "linewidth": 0.8}


def name_lines(axes: Any, names: Sequence[str], most: int = MANY) -> None:
    """Say which line is which: a legend, or for more than `most` names a scale of colours with some of them."""
    if len(names) <= most:
        axes.legend(frameon=False, fontsize=9)
        return
    count = len(names)
    scale = axes.figure.colorbar(ScalarMappable(Normalize(0, count - 1), SCALE), ax=axes)
    places = [round(i * (count - 1) / 5) for i in range(6)]
    scale.set_ticks(places, labels=[_clipped(names[at]) for at in places], fontsize=8)
    scale.set_label(f"{count} rows, in the order of the table", fontsize=9)


def _clipped(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def apart(numbers: Sequence[float], log: bool) -> list[float]:
    """Those among ascending numbers that an axis has room to name."""
    at = [math.log2(x) if log else x for x in numbers]
    kept = [0]
    for i, place in enumerate(at):
        if place - at[kept[-1]] >= (at[-1] - at[0]) / 8:
            kept.append(i)
    return [numbers[i] for i in kept]
