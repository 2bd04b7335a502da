"""The picture that opens each lesson: one transformer layer under ALST, and which rank holds what.

`python -m alstlib.figures.layer notebooks/images/layer.svg` writes the README's copy of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from alstlib.figures.plots import PALETTE, _axes, _finish

RANKS = 4
_LAYER = ("project", "exchange", "attention", "output", "mlp")
_ALL = ("data", "input", *_LAYER, "loss", "sum", "backward", "states", "checkpoints", "pages", "host states")
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "": ("", _ALL),
    "memory": ("everything that a step keeps in memory", _ALL),
    "logits": ("the logits and the loss, one tile at a time", ("loss",)),
    "mlp": ("the MLP, one tile at a time", ("mlp",)),
    "all_to_all": ("the two exchanges around attention", ("project", "exchange", "attention", "output")),
    "adapter": ("the data adapter, which cuts each sample", ("data", "input")),
    "checkpoint": ("each layer's input, which waits on the host", ("input", "checkpoints", "backward")),
    "heads": ("how the ranks divide the heads", ("exchange", "attention")),
    "documents": ("attention within packed documents, which positions mark", ("data", "attention")),
    "gradients": ("the loss of all ranks, and its gradient", ("loss", "sum", "backward", "states")),
    "ablation": ("the features that the ablation switches on", ("exchange", "mlp", "loss", "checkpoints")),
    "peers": ("the whole step, compared with other libraries", _ALL),
    "limits": ("what fills the device, and what fills the host",
               ("attention", "mlp", "loss", "states", "checkpoints", "pages", "host states")),
    "trainer": ("the whole step, driven by a Trainer", _ALL),
    "time": ("what takes time: attention, matrix products, exchanges, copies",
             (*_LAYER, "loss", "backward", "checkpoints", "host states")),
    "ring": ("how attention sees all tokens", ("exchange", "attention")),
    "megatron": ("what tensor parallelism would divide: the weights of a layer",
                 ("project", "output", "mlp", "states")),
    "chunks": ("a whole layer, which runs on a chunk of its rows at a time", _LAYER),
    "kv_host": ("keys and values in pages on the host", ("attention", "pages")),
    "blocks": ("the whole model, which runs on a block of rows at a time", ("input", *_LAYER, "loss", "pages")),
    "sparse": ("attention to some of the pages", ("attention", "pages")),
    "recurrence": ("attention, which layers with a state replace", ("exchange", "attention")),
    "states": ("weights, gradients and optimizer states", ("states", "host states")),
}  # fmt: skip
"""What each part of the course highlights: in words, and the elements of the picture."""

_LEFT, _WIDTH, _GAP = 2.0, 1.16, 0.1  # of the ranks' columns, in inches
_CELL = _WIDTH / RANKS
_HEADING: Any = {"fontsize": 9, "fontweight": "bold", "va": "center"}
_ROWS: dict[str, tuple[float, float, str, str, str]] = {
    "data": (0.95, 0.36, "Data adapter", "shifts the labels,\nthen cuts samples", "ids, labels and\npositions: [s/P]"),
    "input": (1.56, 0.32, "Input of a layer", "first, the embedding", "hidden states:\n[s/P, d]"),
    "project": (2.13, 0.36, "Norm, projections", "q, k, v of own tokens", "q: [s/P, h, d_h]"),
    "exchange": (2.49, 0.5, "All-to-all", "slices to heads", ""),
    "attention": (2.99, 0.52, "Attention", "all tokens, own heads", "q: [s, h/P, d_h]"),
    "back": (3.51, 0.5, "All-to-all", "heads to slices", ""),
    "output": (4.01, 0.36, "Output projection", "adds to the input", "attended:\n[s/P, h, d_h]"),
    "mlp": (4.52, 0.4, "Norm and MLP", "one tile at a time", "one tile inside\nthe MLP: [t, f]"),
    "loss": (5.21, 0.4, "Logits and loss", "one tile at a time", "one tile of\nlogits: [t, V]"),
    "sum": (5.8, 0.32, "Sum over ranks", "of losses, of labels", "one loss:\nsum / count"),
    "states": (6.3, 0.42, "Model states", "ZeRO-3: a part for\neach rank", "1/P of weights,\ngradients, Adam"),
}  # fmt: skip
"""The rows of the picture: top and height in inches, name, what it does, and what each rank holds."""


def draw_layer(part: str = "") -> Figure:
    """One transformer layer under ALST on four ranks, from a sample to its loss, and what each rank holds.

    A column is a rank and a colour is a slice of the sequence. What `part` names is in full colour, and the rest is
    pale.

    Args:
        part: a key of `PARTS`, such as "mlp" or "all_to_all"; everything is highlighted without one.

    Raises:
        ValueError: a part that is not known; it names those that are.
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r} must be one of {', '.join(name for name in PARTS if name)}")
    words, bright = PARTS[part]
    under = f"This lesson: {words}" if words else "A column is a rank, and a colour is a slice of the sequence."
    figure, axes = _axes(10, 7.55)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(7.55, 0))
    axes.axis("off")
    pen = _Pen(axes, bright)
    title: Any = {"fontweight": "bold", "va": "center"}
    axes.text(0.35, 0.3, f"One transformer layer under ALST on P = {RANKS} ranks", fontsize=12.5, **title)
    axes.text(0.35, 0.58, under, fontsize=10.5, color=PALETTE[5], **title)
    _frames(axes)
    for row, (top, height, name, does, holds) in _ROWS.items():
        group, middle = "exchange" if row == "back" else row, top + height / 2
        pen.text(group, 0.45, middle - 0.075 * (1 + does.count("\n")), name, ha="left", fontsize=9, fontweight="bold")
        pen.text(group, 0.45, middle + 0.085, does, ha="left")
        pen.text(group, 7.13, middle, holds, ha="left")
    _ranks(pen)
    _arrows(pen)
    _host(pen)
    legend = (
        "s: tokens of a sample      P: ranks      d: width      h: query heads      d_h: width of a head      "
        "f: width inside the MLP\nt: tokens of a tile      V: vocabulary      L: layers      s0 ... s3: slices of the "
        "sequence      H0 ... H3: groups of heads, h/P in each"
    )
    axes.text(0.45, 7.2, legend, fontsize=8, va="center", color="#333333", linespacing=1.5)
    return _finish(figure)


class _Pen:
    """Draws boxes, texts and arrows of named elements, pale where an element is not among the bright ones."""

    def __init__(self, axes: Any, bright: Sequence[str]) -> None:
        self.axes, self.bright = axes, bright

    def ink(self, group: str, color: str = "#111111") -> str:
        return color if group in self.bright else "#808080"

    def box(
        self, group: str, at: tuple[float, float], width: float, height: float, color: str, text: str = "",
        tint: float = 0.45,
    ) -> None:  # fmt: skip
        """A box whose `color` is mixed with white: `tint` is the colour's share."""
        on = group in self.bright
        share = tint if on else 0.12
        mixed = tuple(share * c + 1 - share for c in to_rgb(color))
        look: Any = {"facecolor": mixed, "edgecolor": color if on else "#d9d9d9", "linewidth": 1}
        self.axes.add_patch(plt.Rectangle(at, width, height, **look))
        if text:
            self.text(group, at[0] + width / 2, at[1] + height / 2, text)

    def row(self, row: str, x: float, width: float, color: str, text: str = "", tint: float = 0.45) -> None:
        """A box as high as its row."""
        top, height = _ROWS[row][:2]
        self.box(row, (x, top), width, height, color, text, tint)

    def text(
        self, group: str, x: float, y: float, text: str, *, fontsize: float = 8, ha: str = "center", **look: Any
    ) -> None:
        self.axes.text(x, y, text, fontsize=fontsize, ha=ha, va="center", color=self.ink(group), **look)

    def line(self, group: str, x: tuple[float, float], y: tuple[float, float], color: str) -> None:
        on = group in self.bright
        self.axes.plot(x, y, color=color if on else "#dedede", linewidth=1.2 if on else 0.8, solid_capstyle="butt")

    def arrow(self, group: str, start: tuple[float, float], end: tuple[float, float], style: str = "-|>") -> None:
        look: Any = {"arrowstyle": style, "color": self.ink(group, "#333333"), "shrinkA": 0, "shrinkB": 0, "lw": 1}
        self.axes.annotate("", end, start, arrowprops=look)


def _left(rank: int, part: int = 0) -> float:
    """Left edge of a rank's column, or of one of the four cells in a rank's box."""
    return _LEFT + rank * (_WIDTH + _GAP) + part * _CELL


def _ranks(pen: _Pen) -> None:
    """The boxes of every rank, row by row."""
    grey, (attention, height) = "#666666", _ROWS["attention"][:2]
    for rank in range(RANKS):
        left, color = _left(rank), PALETTE[rank]
        pen.axes.text(left + _WIDTH / 2, 0.84, f"rank {rank}", ha="center", **_HEADING)
        pen.row("data", left, _WIDTH, color, f"slice s{rank}")
        pen.row("input", left, _WIDTH, color, f"s{rank}")
        for j in range(RANKS):
            for row in ("project", "output"):
                pen.row(row, _left(rank, j), _CELL, color, f"H{j}")
            pen.box("attention", (_left(rank, j), attention), _CELL, 0.3, PALETTE[j], f"s{j}")
        pen.box("attention", (left, attention + 0.3), _WIDTH, height - 0.3, grey, f"heads H{rank} only", 0.15)
        for row in ("mlp", "loss"):
            pen.row(row, left, _WIDTH, color, tint=0.15)
            pen.row(row, _left(rank, 1), _CELL, color, "tile", tint=0.75)
        pen.row("states", left, _WIDTH, grey, f"part {rank} of {RANKS}", 0.2)
    pen.row("sum", _LEFT, RANKS * (_WIDTH + _GAP) - _GAP, grey, "all-reduce", 0.2)
    for row in ("exchange", "back"):
        top, height = _ROWS[row][:2]
        for i, j in itertools.product(range(RANKS), repeat=2):
            # slice i of the heads H_j goes from rank i to rank j, and back
            ends = _left(i, j) + _CELL / 2, _left(j, i) + _CELL / 2
            ends = ends if row == "exchange" else ends[::-1]
            pen.line("exchange", ends, (top + 0.03, top + height - 0.03), PALETTE[i])


def _frames(axes: Any) -> None:
    """Around a decoder layer and the host's memory, and the headings."""
    axes.text(7.13, 0.84, "each rank holds", ha="left", **_HEADING)
    axes.text(9.17, 0.84, "host memory", ha="center", **_HEADING)
    axes.add_patch(plt.Rectangle((8.42, 0.95), 1.5, 5.77, facecolor="#f6f6f6", edgecolor="#bbbbbb", linewidth=0.8))
    axes.add_patch(plt.Rectangle((0.34, 2.02), 7.94, 3.03, fill=False, edgecolor="#777777", linestyle="--", lw=1))
    axes.text(7.13, 2.02, " decoder layer, x L ", va="center", fontsize=8, backgroundcolor="white")


def _arrows(pen: _Pen) -> None:
    """From row to row of every rank, and the way back."""
    for upper, lower in (("data", "input"), ("input", "project"), ("output", "mlp"), ("mlp", "loss"), ("loss", "sum")):
        for rank in range(RANKS):
            x = _left(rank) + _WIDTH / 2
            pen.arrow(lower, (x, sum(_ROWS[upper][:2])), (x, _ROWS[lower][0]))
    pen.arrow("backward", (0.24, 5.96), (0.24, 1.6))
    pen.text("backward", 0.12, 3.78, "backward: each layer runs again from its input", rotation=90)


def _host(pen: _Pen) -> None:
    """What waits on the host, and the copies."""
    for group, top, height, text in (
        ("checkpoints", 1.3, 0.84, "checkpoints:\ninputs of L layers,\n[s/P, d] in each,\nfrom every rank"),
        ("pages", 2.83, 0.84, "keys and values,\nin pages, of layers\nthat run in\nrow chunks"),
        ("host states", 6.03, 0.6, "Adam's states,\nand weights in fp32,\nif offloaded"),
    ):
        pen.box(group, (8.5, top), 1.34, height, "#666666", text, 0.15)
    for group, y in (("checkpoints", 1.72), ("pages", 3.25), ("host states", 6.51)):
        pen.arrow(group, (8.12, y), (8.5, y), "<|-|>")


def save_svg(path: str) -> None:
    """Write the whole picture as an SVG file whose texts are text; the same bytes each time."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "layer"}):
        draw_layer().savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    save_svg(sys.argv[1])
