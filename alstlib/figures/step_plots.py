"""Figures of one training step: its memory over time, the parts of its memory and time, and who works when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from alstlib.base.units import format_bytes
from alstlib.figures.lines import INK, PLACES
from alstlib.figures.plots import _area, _ink, draw_areas, finish, legend_beside, looks, new_axes


def step_memory(
    phases: Sequence[str], points: Sequence[Mapping[str, int]], title: str = "", order: Sequence[str] = ()
) -> Figure:
    """Bytes by category over one training step (`memory_profile` of the lessons), its phases and its peak written in.

    Args:
        order: categories from the bottom up; others follow.
    """
    figure, axes = new_axes(9, 4.2)
    names = list(dict.fromkeys([*order, *(name for point in points for name in point)]))
    names = [name for name in names if any(point.get(name) for point in points)]
    totals = [sum(point.values()) / 2**20 for point in points]
    x = [i / max(1, len(points) - 1) for i in range(len(points))]
    draw_areas(axes, x, [{name: nbytes / 2**20 for name, nbytes in point.items()} for point in points], names, 0.3)
    top = max(totals)
    starts = [i for i, phase in enumerate(phases) if not i or phase != phases[i - 1]]
    for n, i in enumerate(starts):
        at = top * (1.21 - 0.07 * (n % 2))  # a line ends below its phase's name, which may be longer than the phase
        axes.plot((x[i], x[i]), (0, at - 0.02 * top), color=INK, linestyle="--", linewidth=0.8)
        axes.text(x[i], at, phases[i], fontsize=9)
    peak = totals.index(top)
    axes.plot(x[peak], top, "v", color=INK, markersize=7)
    side, text = "right" if x[peak] > 0.5 else "left", f"  peak {format_bytes(top * 2**20)}  "
    axes.text(x[peak], top, text, fontsize=9, fontweight="bold", ha=side, va="bottom")
    axes.set(xlim=(0, 1), ylim=(0, 1.3 * top))
    xlabel = "progress of one training step [share of its allocations and releases]"
    return finish(figure, title, xlabel=xlabel, ylabel="live device memory [MiB]")


def parts(
    bars: Mapping[str, Mapping[str, float]], xlabel: str, title: str = "", limit: tuple[float, str] | None = None,
    ends: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """One bar for each row, made of named parts, with their sum (or the row's text in `ends`) at its end. `limit` is
    the place and the name of a line."""
    names = list(dict.fromkeys(name for bar in bars.values() for name in bar))
    names = [name for name in names if any(bar.get(name) for bar in bars.values())]
    look = looks(names)
    figure, axes = new_axes(9, 0.5 * len(bars) + 1.7)
    for y, bar in enumerate(bars.values()):
        left = 0.0
        for name in names:
            label = name if y == 0 else None
            axes.barh(y, bar.get(name, 0.0), 0.7, left=left, label=label, linewidth=0.4, **look[name])
            left += bar.get(name, 0.0)
        end = ends[y] if ends else f"{left:,.3g}" if left < 1000 else f"{left:,.0f}"
        axes.text(left, y, f" {end}", va="center", fontsize=9)
    if limit is not None:
        axes.axvline(limit[0], color=INK, linestyle="--", linewidth=1)
        axes.text(limit[0], -0.62, f" {limit[1]}", fontsize=8, va="bottom")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.5, -0.9 if limit is not None else -0.5)
    axes.set_xlim(0, 1.12 * max(sum(bar.values()) for bar in bars.values()))
    legend_beside(axes, fontsize=8)
    return finish(figure, title, xlabel=xlabel)


def timeline(
    panels: Mapping[str, Sequence[tuple[str, str, float, float]]], title: str = "", kinds: Sequence[str] = ()
) -> Figure:
    """Who works when: for each panel, bars (lane, what, start, length) in seconds. Lanes of one name are of one colour;
    one that has "host" in its name is of the host's.

    Args:
        kinds: lanes from the top down; others follow.
    """
    lanes = list(dict.fromkeys([*kinds, *(lane for spans in panels.values() for lane, *_ in spans)]))
    figure, axes = new_axes(
        9.5, (0.42 * len(lanes) + 0.9) * len(panels) + 0.3, rows=len(panels), squeeze=False, sharex=True
    )
    end = max(start + length for spans in panels.values() for *_, start, length in spans)
    scale, unit = (1.0, "s") if end >= 1 else (1e3, "ms") if end >= 1e-3 else (1e6, "\u00b5s")
    for ax, (name, spans) in zip(axes[:, 0], panels.items()):
        for lane, what, start, length in spans:
            i = lanes.index(lane)
            color: int | str = "host" if "host" in lane else i + (i > 0)  # the second colour is the host's
            look = _area(0) | (PLACES[color] if isinstance(color, str) else _area(color))
            ax.barh(i, length * scale, 0.8, left=start * scale, linewidth=1, **look)
            if length > 0.011 * len(what) * end:
                look = {"ha": "center", "va": "center", "fontsize": 8, "color": _ink(color)}
                ax.text((start + length / 2) * scale, i, what, **look)
        over = max((start + length for *_, start, length in spans), default=0.0)
        ax.axvline(over * scale, color=INK, linestyle="--", linewidth=1)
        ax.text(over * scale, -0.55, f" {over * scale:,.3g} {unit}", fontsize=8, va="bottom")
        ax.set_yticks(range(len(lanes)), lanes, fontsize=9)
        ax.set_ylim(len(lanes) - 0.5, -0.5)
        ax.set_title(name, loc="left", fontsize=10, pad=14)
    axes[-1, 0].set_xlim(0, end * scale * 1.09)
    axes[-1, 0].set_xlabel(f"time [{unit}]")
    figure.suptitle(title, fontsize=11)
    return finish(figure)
