"""The picture of the course: one transformer layer under ALST, and which rank holds what; and the strip of it that
opens each lesson.

`python -m alstlib.figures.layer notebooks/images/layer.svg` writes the README's copy of it.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from alstlib.figures.lines import INK, PALETTE, PLACES
from alstlib.figures.plots import PAGE, finish, new_axes

RANKS = 4
_LAYER = ("project", "exchange", "attention", "output", "mlp")
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logits": ("the logits and the loss, one tile at a time", ("loss",)),
    "mlp": ("the MLP, one tile at a time", ("mlp",)),
    "all_to_all": ("the two exchanges around attention", ("project", "exchange", "attention", "output")),
    "adapter": ("the data adapter, which cuts each sample", ("data", "input")),
    "checkpoint": ("each layer's input, which waits on the host", ("input", "checkpoints", "backward")),
    "heads": ("how the ranks divide the heads", ("exchange", "attention")),
    "documents": ("attention within packed documents, which positions mark", ("data", "attention")),
    "gradients": ("the loss of all ranks, and its gradient", ("loss", "sum", "backward", "states")),
    "ablation": ("the features that the ablation switches on", ("exchange", "mlp", "loss", "checkpoints")),
    "limits": ("what fills the device, and what fills the host",
               ("attention", "mlp", "loss", "states", "checkpoints", "pages", "host states")),
    "time": ("what takes time: attention, matrix products, exchanges, copies",
             (*_LAYER, "loss", "backward", "checkpoints", "host states")),
    "ring": ("how attention sees all tokens", ("exchange", "attention")),
    "megatron": ("what tensor parallelism would divide: the weights of a layer",
                 ("project", "output", "mlp", "states")),
    "chunks": ("a whole layer, which runs on a chunk of its rows at a time", _LAYER),
    "kv_host": ("keys and values in pages on the host", ("attention", "pages")),
    "blocks": ("the whole model, which runs on a block of rows at a time", ("input", *_LAYER, "loss", "pages")),
    "sparse": ("attention to some of the pages", ("attention", "pages")),
    "recurrence": ("a state in the place of attention", ("attention",)),
}  # fmt: skip
"""What each part of the course highlights: in words, and the elements of the strip."""
_DEVICE = (
    ("data", "Data\nadapter"), ("input", "Layer's\ninput"), ("project", "Norm, q,\nk and v"),
    ("exchange", "All-to-\nall"), ("attention", "Attention"), ("exchange", "All-to-\nall"),
    ("output", "Output\nproject."), ("mlp", "Norm,\nMLP"),
    ("loss", "Logits,\nloss"), ("sum", "Sum over\nranks"), ("states", "Model\nstates"),
)  # fmt: skip
_HOST = (
    ("checkpoints", 1, "inputs of\nall layers"),
    ("pages", 4, "pages of\nk and v"),
    ("host states", 10, "Adam's\nstates"),
)
"""The boxes of the strip: what the device does from left to right, and what the host keeps, below a box of these."""

_LEFT, _WIDTH, _GAP = 2.0, 1.16, 0.1  # of the ranks' columns, in inches
_CELL = _WIDTH / RANKS
_HEADING: Any = {"fontsize": 9, "fontweight": "bold", "va": "center"}
_DARK = "#111111"  # text in boxes, which are light on any background
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
    """One transformer layer under ALST on four ranks, from a sample to its loss, and what each rank holds: a column is
    a rank, and a colour is a slice of the sequence. With a `part`, a strip of its steps.

    Args:
        part: a key of `PARTS`, such as "mlp" or "all_to_all": what it names is in colour in the strip.

    Raises:
        ValueError: a part that is not known; it names those that are.
    """
    if part:
        if part not in PARTS:
            raise ValueError(f"part={part!r} must be one of {', '.join(PARTS)}")
        return _strip(*PARTS[part])
    axes = _paper(10, 7.55)
    title: Any = {"fontweight": "bold", "va": "center"}
    axes.text(0.35, 0.3, f"One transformer layer under ALST on P = {RANKS} ranks", fontsize=12.5, **title)
    under = "A column is a rank, and a colour is a slice of the sequence."
    axes.text(0.35, 0.58, under, fontsize=10.5, color=PALETTE[5], **title)
    _frames(axes)
    for top, height, name, does, holds in _ROWS.values():
        middle = top + height / 2
        axes.text(0.45, middle - 0.075 * (1 + does.count("\n")), name, va="center", fontsize=9, fontweight="bold")
        axes.text(0.45, middle + 0.085, does, va="center", fontsize=8)
        axes.text(7.13, middle, holds, va="center", fontsize=8)
    _ranks(axes)
    _arrows(axes)
    legend = (
        "s: tokens of a sample      P: ranks      d: width      h: query heads      d_h: width of a head      "
        "f: width inside the MLP\nt: tokens of a tile      V: vocabulary      L: layers      s0 ... s3: slices of the "
        "sequence      H0 ... H3: groups of heads, h/P in each"
    )
    axes.text(0.45, 7.2, legend, fontsize=8, va="center", linespacing=1.5)
    return finish(axes.figure)


def _strip(words: str, bright: tuple[str, ...]) -> Figure:
    """The steps of a layer in one line, and what the host keeps below them; without colour what is not `bright`."""
    axes = _paper(PAGE, 1.75)
    axes.text(0.05, 0.2, f"This lesson: {words}", fontsize=10.5, color=PALETTE[5], fontweight="bold", va="center")
    step, size = (PAGE - 0.65) / len(_DEVICE), (0.63, 0.42)
    for name, y in (("device", 0.72), ("host", 1.42)):
        axes.text(0.05, y, name, fontsize=9, fontweight="bold", va="center")
    below = {column: (group, text) for group, column, text in _HOST}
    for i, (group, text) in enumerate(_DEVICE):
        x = 0.62 + i * step
        _box(axes, (x, 0.51), *size, text, **(PLACES["device"] if group in bright else {}))
        if 0 < i < len(_DEVICE) - 1:
            _arrow(axes, (x + size[0] - step, 0.72), (x, 0.72))
        if i in below:
            group, text = below[i]
            _box(axes, (x, 1.21), *size, text, **(PLACES["host"] if group in bright else {}))
            _arrow(axes, (x + size[0] / 2, 0.93), (x + size[0] / 2, 1.21), "<|-|>")
    color = PALETTE[5] if "backward" in bright else INK
    _arrow(axes, (0.62 + 10 * step - 0.1, 1.08), (0.62 + 5 * step + 0.1, 1.08), color=color)
    axes.text(
        0.62 + 7.4 * step, 1.25, "backward: each layer runs again", fontsize=8, color=color, ha="center", va="center"
    )
    return finish(axes.figure)


def _paper(width: float, height: float) -> Any:
    """Axes in inches, from the upper left corner, without margins."""
    figure, axes = new_axes(width, height)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


def _tint(color: str, share: float = 0.45) -> tuple[float, ...]:
    """The colour mixed with white: light enough for dark text."""
    return tuple(share * c + 1 - share for c in to_rgb(color))


def _box(axes: Any, at: tuple[float, float], width: float, height: float, text: str = "", **look: Any) -> None:
    """A light box with dark text, or an empty one with an outline where no colour is given."""
    color = look.pop("facecolor", None)
    face = _tint(color, look.pop("share", 0.45)) if color else "none"
    hatched: Any = {"hatch": look.get("hatch"), "edgecolor": color or INK, "linewidth": 1 if color else 0.7}
    axes.add_patch(plt.Rectangle(at, width, height, facecolor=face, **hatched))
    box: Any = {"facecolor": face, "edgecolor": "none", "pad": 1} if look.get("hatch") else None
    middle = at[0] + width / 2, at[1] + height / 2
    axes.text(*middle, text, fontsize=8, ha="center", va="center", color=_DARK if color else INK, bbox=box)


def _arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], style: str = "-|>", color: str = INK
) -> None:
    look: Any = {"arrowstyle": style, "color": color, "shrinkA": 0, "shrinkB": 0, "lw": 1}
    axes.annotate("", end, start, arrowprops=look)


def _left(rank: int, part: int = 0) -> float:
    """Left edge of a rank's column, or of one of the four cells in a rank's box."""
    return _LEFT + rank * (_WIDTH + _GAP) + part * _CELL


def _ranks(axes: Any) -> None:
    """The boxes of every rank, row by row."""

    def box(row: str, x: float, width: float, color: str, text: str = "", share: float = 0.45) -> None:
        _box(axes, (x, _ROWS[row][0]), width, _ROWS[row][1], text, facecolor=color, share=share)

    (attention, height) = _ROWS["attention"][:2]
    for rank in range(RANKS):
        left, color = _left(rank), PALETTE[rank]
        axes.text(left + _WIDTH / 2, 0.84, f"rank {rank}", ha="center", **_HEADING)
        box("data", left, _WIDTH, color, f"slice s{rank}")
        box("input", left, _WIDTH, color, f"s{rank}")
        for j in range(RANKS):
            for row in ("project", "output"):
                box(row, _left(rank, j), _CELL, color, f"H{j}")
            _box(axes, (_left(rank, j), attention), _CELL, 0.3, f"s{j}", facecolor=PALETTE[j])
        heads = f"heads H{rank} only"
        _box(axes, (left, attention + 0.3), _WIDTH, height - 0.3, heads, facecolor=INK, share=0.2)
        for row in ("mlp", "loss"):
            box(row, left, _WIDTH, color, share=0.15)
            box(row, _left(rank, 1), _CELL, color, "tile", 0.75)
        box("states", left, _WIDTH, INK, f"part {rank} of {RANKS}", 0.25)
    box("sum", _LEFT, RANKS * (_WIDTH + _GAP) - _GAP, INK, "all-reduce", 0.25)
    for row in ("exchange", "back"):
        top, height = _ROWS[row][:2]
        for i, j in itertools.product(range(RANKS), repeat=2):
            # slice i of the heads H_j goes from rank i to rank j, and back
            ends = _left(i, j) + _CELL / 2, _left(j, i) + _CELL / 2
            ends = ends if row == "exchange" else ends[::-1]
            span = (top + 0.03, top + height - 0.03)
            axes.plot(ends, span, color=PALETTE[i], linewidth=1.2, solid_capstyle="butt")


def _frames(axes: Any) -> None:
    """Around a decoder layer and the host's memory, their headings, and what waits on the host."""
    axes.text(7.13, 0.84, "each rank holds", ha="left", **_HEADING)
    axes.text(9.17, 0.84, "host memory", ha="center", **_HEADING)
    axes.add_patch(plt.Rectangle((8.42, 0.95), 1.5, 5.77, fill=False, edgecolor=INK, linewidth=0.8))
    axes.add_patch(plt.Rectangle((0.34, 2.02), 7.94, 3.03, fill=False, edgecolor=INK, linestyle="--", lw=1))
    axes.text(8.2, 2.12, "decoder layer, x L", ha="right", va="center", fontsize=8)
    for y, top, height, text in (
        (1.72, 1.3, 0.84, "checkpoints:\ninputs of L layers,\n[s/P, d] in each,\nfrom every rank"),
        (3.25, 2.83, 0.84, "keys and values,\nin pages, of layers\nthat run in\nrow chunks"),
        (6.51, 6.03, 0.6, "Adam's states,\nand weights in fp32,\nif offloaded"),
    ):
        _box(axes, (8.5, top), 1.34, height, text, **PLACES["host"])
        _arrow(axes, (8.12, y), (8.5, y), "<|-|>")


def _arrows(axes: Any) -> None:
    """From row to row of every rank, and the way back."""
    for upper, lower in (("data", "input"), ("input", "project"), ("output", "mlp"), ("mlp", "loss"), ("loss", "sum")):
        for rank in range(RANKS):
            x = _left(rank) + _WIDTH / 2
            _arrow(axes, (x, sum(_ROWS[upper][:2])), (x, _ROWS[lower][0]))
    _arrow(axes, (0.24, 5.96), (0.24, 1.6))
    back = "backward: each layer runs again from its input"
    axes.text(0.12, 3.78, back, rotation=90, fontsize=8, ha="center", va="center")


def save_svg(path: str) -> None:
    """Write the whole picture as an SVG file whose texts are text; the same bytes each time."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "layer"}):
        draw_layer().savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    save_svg(sys.argv[1])
