"""Figures that show results, with a colour-blind palette, markers, and log2 ticks for numbers of tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator

from alstlib.base.units import format_bytes, format_tokens
from alstlib.figures.lines import INK, NAMED, PALETTE, PLACES, apart, look, name_lines

PAGE = 8.5  # inches that JupyterLab has for an output on a laptop with its side bar open
AREAS = (*PALETTE, "#F0E442", "#8B5A2B", "#882255")
"""Colours of parts that lie on each other: more of them, so that no two parts differ only by a hatch."""

_STYLE: Any = {
    "figure.facecolor": "none", "axes.facecolor": "none", "figure.constrained_layout.use": True,
    "axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 11,
}  # fmt: skip
"""What is behind a figure is seen through it, be it light or dark."""


def new_axes(width: float, height: float, columns: int = 1, rows: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    """A figure of so many inches in the style of all, and its axes."""
    with plt.rc_context(_STYLE):
        return plt.subplots(rows, columns, figsize=(width, height), dpi=110, **kwargs)


def data_uri(figure: Figure, dpi: int) -> str:
    """The figure as a PNG in a `data:` address."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def finish(figure: Figure, title: str = "", **labels: str) -> Figure:
    """Name the first axes and what they show; what is black gets a grey that is read on light and dark."""
    axes: Any = figure.axes[0]
    axes.set(**labels)
    if title:
        axes.set_title(title, loc="left")
    for text in figure.findobj(Text):
        if to_hex(text.get_color()) == "#000000":
            text.set_color(INK)
    for ax in figure.axes:
        ax.tick_params(which="both", color=INK, labelcolor=INK)
        ax.spines[:].set_color(INK)
    plt.close(figure)  # a notebook shows what a cell returns; an open figure would be shown twice
    return figure


def draw_lines(axes: Any, series: Mapping[str, Mapping[Any, float]]) -> None:
    """One marked line for each name."""
    for i, (name, points) in enumerate(series.items()):
        axes.plot(list(points), list(points.values()), label=name, **look(i))


def draw_areas(
    axes: Any, x: Sequence[float], parts: Sequence[Mapping[str, float]], names: Sequence[str], line: float
) -> None:
    """Stack named parts at each x, with a legend to the right of the axes in the same order."""
    look, heights = looks(names), [[part.get(n, 0.0) for part in parts] for n in names]
    for name, area in zip(names, axes.stackplot(x, heights, labels=names)):
        area.set(**look[name], linewidth=line)
    legend_beside(axes, fontsize=8, reverse=True)


def legend_beside(axes: Any, fontsize: int, reverse: bool = False) -> None:
    axes.legend(frameon=False, fontsize=fontsize, bbox_to_anchor=(1.01, 1), loc="upper left", reverse=reverse)


def draw_marks(axes: Any, marks: Mapping[str, float] | None, at: float, step: float = 0.0) -> None:
    """Vertical lines, each named at a share of the axis' height, the next one `step` lower."""
    for i, (name, x) in enumerate((marks or {}).items()):
        axes.axvline(x, color=INK, linestyle="--", linewidth=1, zorder=0)
        y = at - step * i
        axes.text(x, y, f" {name}", fontsize=8, color=INK, transform=axes.get_xaxis_transform())


class Doublings(Locator):
    """Ticks at few of ..., 256, 512, 1K, 2K, ..., 512K, 1M, 2M, ...: round numbers, each about twice the one before."""

    def __call__(self) -> Any:
        return self.tick_values(*self.axis.get_view_interval())  # type: ignore[union-attr]

    def tick_values(self, vmin: float, vmax: float) -> Any:
        low, high = sorted((vmin, vmax))
        inside = [i for i in range(40) if low <= 1000 ** (i // 10) * 2 ** (i % 10) <= high]
        every = -(-len(inside) // 7)
        return [1000 ** (i // 10) * 2 ** (i % 10) for i in inside if i % max(1, every) == 0]


def token_axis(axis: Any, label: str = "sequence length [tokens]") -> None:
    """An axis with few ticks, labelled such as 32K and 1M."""
    axis.set_label_text(label)
    if axis.get_scale() == "log":
        axis.set_major_locator(Doublings())
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: _short(x)))


def _ink(i: int | str) -> str:
    """For text on the i-th colour of PALETTE, or on one of PLACES: white on the two dark ones."""
    color = PLACES[i]["facecolor"] if isinstance(i, str) else PALETTE[i % 7]
    return "white" if color in (PALETTE[0], INK) else "#111111"


def _short(x: float) -> str:
    return f"{x / 1e6:.3g}M" if x >= 999_500 else f"{x / 1e3:.3g}K" if x >= 1000 else f"{x:.0f}"


def ablation(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Longest sequence of each row that `results.table` made: measured here (left) and stated by the paper (right)."""
    figure, (left, right) = new_axes(10, 0.55 * len(rows) + 1.4, 2, sharey=True)
    names = [row["row"] for row in rows]
    modes = "/".join(sorted({str(row["mode"]) for row in rows}))
    _length_bars(left, names, [row.get("seq_len") for row in rows], PALETTE[0], f"here ({modes})")
    paper = [row.get("paper_seq_len") for row in rows]
    _length_bars(right, names, paper, PALETTE[1], "the paper: Llama-3.1-8B on 8 H100")
    left.invert_yaxis()
    return finish(figure)


def _length_bars(axes: Any, names: Sequence[str], lengths: Sequence[int | None], color: str, title: str) -> None:
    base = next((n for n in lengths if n), None)
    axes.barh(names, [n or 0 for n in lengths], color=color)
    axes.set_xlim(0, 1.4 * max((n for n in lengths if n), default=1))  # from zero: a bar is as long as the sequence
    axes.xaxis.set_major_locator(MaxNLocator(5))
    token_axis(axes.xaxis)
    axes.set_title(title, loc="left")
    for i, n in enumerate(lengths):
        text = f" {format_tokens(n)} ({n / base:.1f}x)" if n and base else " not in the paper's table"
        axes.text(n or 0, i, text, va="center", fontsize=9)


def peaks(
    tried: Mapping[str, Sequence[tuple[int, int]]], budget: int | None = None,
    ylabel: str = "device peak of the fullest rank [MiB]",
) -> Figure:  # fmt: skip
    """Measured (length, device peak in bytes) of rows, one line for each row, and their budget."""
    figure, axes = new_axes(8, 4.2)
    for i, (name, points) in enumerate(tried.items()):
        x, y = zip(*points)
        hollow = i == len(tried) - 1  # the last may lie on the one before it
        style = {"linestyle": ":", "markersize": 11, "fillstyle": "none"} if hollow else {"linewidth": 1.2}
        axes.plot(x, [b / 2**20 for b in y], label=name, **{**style, **look(i)})
    if budget:
        axes.axhline(budget / 2**20, color=INK, linestyle="--", linewidth=1)
        axes.text(0.6, budget / 2**20, "budget", ha="left", va="bottom", color=INK, fontsize=8,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    token_axis(axes.xaxis)
    axes.set_ylim(bottom=0)
    name_lines(axes)
    return finish(figure, ylabel=ylabel)


def parity(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Losses of runs on the same data, overlaid, and the relative difference of each from the first."""
    figure, (top, bottom) = new_axes(8, 5.4, rows=2, sharex=True, height_ratios=(3, 2))
    names = list(losses)
    first = losses[names[0]]
    steps = range(1, len(first) + 1)
    for i, name in enumerate(names):
        style = {"linestyle": "-" if i == 0 else "none", "markersize": 7 if i == 0 else 3.5, **look(i)}
        top.plot(steps, losses[name], label=name, fillstyle="none" if i == 0 else "full", **style)
        if i:
            gap = [abs(a - b) / abs(b) for a, b in zip(losses[name], first)]
            bottom.semilogy(steps, [max(g, 1e-9) for g in gap], markersize=4, **look(i))
    top.set_ylabel("loss [nats per token]")
    top.legend(frameon=False)
    bottom.axhline(1e-5, color=INK, linestyle="--", linewidth=1)
    bottom.text(1, 1.15e-5, "1e-5", fontsize=8, color=INK)
    bottom.set_ylabel(f"relative difference\nfrom {names[0]}")
    bottom.set_xlabel("optimizer step")
    return finish(figure)


def memory_curves(curves: Mapping[str, Sequence[int]], title: str = "") -> Figure:
    """Live device bytes from start to end (in allocations, not seconds) and their peak, a line for each setting."""
    figure, axes = new_axes(8, 3.8)
    for i, (name, curve) in enumerate(curves.items()):
        x = [j / max(1, len(curve) - 1) for j in range(len(curve))]
        peak = max(range(len(curve)), key=curve.__getitem__)
        y = [b / 2**20 for b in curve]
        label = f"{name}: peak {format_bytes(curve[peak])}"  # a number in the plot would lie on other lines
        axes.plot(x, y, linewidth=1.2, markevery=[peak], label=label, **look(i))
    axes.legend(frameon=False)
    labels = {"xlabel": "progress of each line [share of its allocations]", "ylabel": "live device memory [MiB]"}
    return finish(figure, title, **labels)


def _area(i: int) -> dict[str, Any]:
    """Colour and hatch of the i-th part."""
    hatches = ("", "//", "..")
    return {"facecolor": AREAS[i % len(AREAS)], "hatch": hatches[i // len(AREAS)], "edgecolor": "white"}


KNOWN = (
    ("weights", "model states and ZeRO's buffers"), ("optimizer",), ("gradients", "outside PyTorch", "projections"),
    ("hidden states", "work of one layer"), ("attention",), ("mlp",), ("loss",), ("checkpoints",), ("exchange",),
    ("kernel workspace",),
)  # fmt: skip
"""Parts that look the same in all figures."""


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and hatch of each name: those of `KNOWN`, and for others what is left."""
    taken = {name: i for name in names for i, group in enumerate(KNOWN) if name in group}
    left = (i for i in range(30) if i not in taken.values())
    return {name: _area(taken[name] if name in taken else next(left)) for name in names}


def blocks(
    panels: Sequence[Sequence[Sequence[Sequence[int | str]]]], rows: Sequence[str], columns: Sequence[str], *,
    legend: Sequence[str] | Mapping[Any, str] = (), texts: Any = None, names: Sequence[Sequence[str]] = (),
    xlabel: str = "", below: Sequence[str] = (), cell: tuple[float, float] = (0.3, 0.3),
) -> Figure:  # fmt: skip
    """Grids of coloured cells, such as who holds what. `panels[row][column]` is a matrix of colours: the number of one
    in PALETTE, the name of one of PLACES, or -1 for nothing.

    Args:
        legend: the name of each colour, in the order of PALETTE; or of some, by the number or place.
        texts: written into the cells, nested like `panels`.
        names: for each row of panels, the name of each line of cells.
        below: the name of each column of cells, written under the last row of panels.
        cell: width and height of a cell in inches; narrower where the figure would be wider than a page (a page shows
            a wider one smaller, with its texts).
    """
    heights, widths = [len(row[0]) for row in panels], [len(matrix[0]) for matrix in panels[0]]
    width = min(PAGE, sum(widths) * cell[0] + 0.35 * len(widths) + 1.3)
    height = sum(heights) * cell[1] + 0.35 * len(heights) + 0.8
    shares = {"height_ratios": heights, "width_ratios": widths}
    figure, axes = new_axes(width, height, len(widths), len(heights), squeeze=False, **shares)
    gap = 0.01 / cell[0], 0.01 / cell[1]  # what is behind the figure is seen between cells
    for (i, j), ax in np.ndenumerate(axes):
        for y, line in enumerate(panels[i][j]):
            for x, value in enumerate(line):
                ax.add_patch(plt.Rectangle((x + gap[0], y + gap[1]), 1 - 2 * gap[0], 1 - 2 * gap[1], **_cell(value)))
                if texts:
                    look: Any = {
                        "ha": "center",
                        "va": "center",
                        "fontsize": 8,
                        "color": INK if value == -1 else _ink(value),
                    }
                    if isinstance(value, str) and texts[i][j][y][x]:  # no hatch behind a text
                        look["bbox"] = {"facecolor": PLACES[value]["facecolor"], "edgecolor": "none", "pad": 1}
                    ax.text(x + 0.5, y + 0.5, texts[i][j][y][x], **look)
        ax.set(xlim=(0, widths[j]), ylim=(heights[i], 0), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        if j == 0:
            ax.set_ylabel(rows[i], fontsize=10)
            if names:
                ax.set_yticks([y + 0.5 for y in range(heights[i])], names[i], fontsize=8)
        if i == 0:
            ax.set_title(columns[j], fontsize=10)
        if i == len(panels) - 1:
            ax.set_xlabel(xlabel, fontsize=9)
            if below:
                ax.set_xticks([x + 0.5 for x in range(widths[j])], below, fontsize=8)
    if legend:
        named: Mapping[Any, str] = legend if isinstance(legend, Mapping) else dict(enumerate(legend))
        patches = [plt.Rectangle((0, 0), 1, 1, **_cell(value)) for value in named]
        figure.legend(patches, named.values(), loc="outside lower center", ncols=len(named), frameon=False, fontsize=9)
    return finish(figure)


def _cell(value: int | str) -> Any:
    """How a cell of `blocks` looks."""
    if isinstance(value, str):
        return {"edgecolor": (1, 1, 1, 0.5), "linewidth": 0, **PLACES[value]}
    return {"facecolor": PALETTE[value] if value >= 0 else (0.5, 0.5, 0.5, 0.12), "linewidth": 0}


def degrees(series: Mapping[str, Mapping[int, float]], ylabel: str, title: str = "") -> Figure:
    """Quantities against the number of ranks that share a sample, one marked line for each name."""
    figure, axes = new_axes(7, 3.8)
    draw_lines(axes, series)
    ticks = sorted({p for points in series.values() for p in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(p) for p in ticks])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.legend(frameon=False, fontsize=9)
    return finish(figure, title, xlabel="sequence-parallel degree [ranks]", ylabel=ylabel)


def versus(
    series: Mapping[str, Mapping[float, float]], xlabel: str, ylabel: str, title: str = "", *,
    log: bool = False, marks: Mapping[str, float] | None = None,
) -> Figure:  # fmt: skip
    """Quantities against a number (log2 axis, from 0 a linear one), one marked line for each name. `marks` names
    vertical lines; `log` makes the y axis logarithmic."""
    figure, axes = new_axes(7, 3.8)
    draw_lines(axes, series)
    ticks = sorted({x for points in series.values() for x in points})
    if ticks[0] > 0:
        axes.set_xscale("log", base=2)
    ticks = apart(ticks, ticks[0] > 0) if len(ticks) > NAMED else ticks
    axes.set_xticks(ticks, [format_tokens(round(x)) if x == round(x) else f"{x:g}" for x in ticks], fontsize=9)
    axes.minorticks_off()
    if log and ylabel.endswith("[tokens]"):
        axes.set_yscale("log", base=2)
        token_axis(axes.yaxis, ylabel)
    elif log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * max(y for points in series.values() for y in points.values()))
    draw_marks(axes, marks, 0.97, 0.08)
    if len(series) > 4:  # too many to lie between the lines
        figure.set_figwidth(9.5)
        legend_beside(axes, fontsize=9)
    elif len(series) > 1:
        axes.legend(frameon=False, fontsize=9)
    return finish(figure, title, xlabel=xlabel, ylabel=ylabel)


def stacked(
    parts: Mapping[int, Mapping[str, float]], limit: float | None, title: str, *, top: float | None = None,
    mark: int | None = None, end: int | None = None,
) -> Figure:  # fmt: skip
    """Memory by category against the sequence length (log2 axis): {tokens: {category: GiB}}; `limit` is a line, `top`
    and `end` are the ends of the axes, `mark` is a length of note."""
    lengths = sorted(parts)
    names = list(dict.fromkeys(n for s in lengths for n in parts[s]))
    figure, axes = new_axes(8.4, 4.2)
    draw_areas(axes, lengths, [parts[s] for s in lengths], names, 0.4)
    if limit is not None:
        axes.axhline(limit, color=INK, linestyle="--", linewidth=1)
        axes.text(lengths[0], limit, f" {limit:.1f} GiB that a GPU has", va="bottom", fontsize=8)
    axes.set_xscale("log", base=2)
    token_axis(axes.xaxis, "sequence length [tokens], logarithmic")
    axes.set(xlim=(lengths[0], end or lengths[-1]), ylim=(0, top))
    if mark is not None:
        axes.axvline(mark, color=INK, linewidth=1)
        axes.text(mark, 0.97, f" {_short(mark)} ", va="top", fontsize=9, fontweight="bold", color="white",
                  ha="left" if mark < lengths[len(lengths) * 3 // 4] else "right", transform=axes.get_xaxis_transform(),
                  bbox={"facecolor": INK, "edgecolor": "none", "pad": 1})  # fmt: skip
    return finish(figure, title, ylabel="device memory [GiB]")


def paired(
    rows: Mapping[str, tuple[float, float]], names: tuple[str, str], xlabel: str, *, show: Callable[[float], str]
) -> Figure:
    """Two bars for each row, such as a measured and a predicted value, each with its number, as `show` writes it."""
    figure, axes = new_axes(8, 0.62 * len(rows) + 1.1)
    for i, name in enumerate(names):
        values, y = [pair[i] for pair in rows.values()], [row + 0.2 * (2 * i - 1) for row in range(len(rows))]
        bars = axes.barh(y, values, 0.38, color=PALETTE[3 * i], hatch=("", "\\\\")[i], edgecolor="white", label=name)
        axes.bar_label(bars, [f" {show(x)}" for x in values], fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return finish(figure, xlabel=xlabel)


def training(
    runs: Mapping[str, Mapping[int, float]], marks: Mapping[str, float] | None = None,
    evaluation: Mapping[str, Mapping[int, float]] | None = None,
) -> Figure:  # fmt: skip
    """Loss against the optimizer step: the first run as a line, others as hollow markers on it; `marks` names steps.
    With `evaluation`, its losses of some runs, all runs are lines, and evaluations have markers on dashed ones."""
    figure, axes = new_axes(7, 3.6)
    for i, (name, points) in enumerate(runs.items()):
        line = i == 0 or evaluation
        style: Any = {"linewidth": 1.5, "marker": ""} if line else {"linestyle": "none", "fillstyle": "none"}
        axes.plot(list(points), list(points.values()), label=name, **{**look(i), **style})
        if found := (evaluation or {}).get(name):
            axes.plot(list(found), list(found.values()), label=f"{name}, evaluation", linestyle="--", **look(i))
    draw_marks(axes, marks, 0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    name_lines(axes)
    return finish(figure, xlabel="optimizer step", ylabel="loss [nats per token]")
