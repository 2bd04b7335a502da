"""Live controls for figures and for the planner in a notebook; without a kernel the first view remains."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from alstlib.base.config import RunConfig
from alstlib.base.units import GIB, format_tokens
from alstlib.figures import plots
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.model_states import BUCKETS, COPIES, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from alstlib.planner.prediction import Prediction, longest, predict
from alstlib.planner.rendering import as_text, limited_by, table, verdict

GROUPS = {
    "outside PyTorch": ("CUDA context", "NCCL", "fragments"),
    "model states and ZeRO's buffers": (WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, BUCKETS, COPIES),
}  # fmt: skip
"""What a figure shows together."""


def grouped(found: Prediction) -> dict[str, float]:
    """GiB of the device by category; model states, and what lies outside PyTorch, are added up and come first."""
    parts = {name: nbytes / GIB for name, nbytes in found.device.items()}
    made = {group: sum(parts.pop(name, 0.0) for name in names) for group, names in GROUPS.items()}
    return made | {name: gib for name, gib in parts.items() if gib}


def in_html(shown: Table) -> str:
    """A table as it is printed."""
    return f"<pre>{html.escape(as_text(shown))}</pre>"


def told(found: Prediction, machine: Machine, said: str = "") -> str:
    """A prediction as HTML: a sentence (None is given: whether it fits), and the table that `alst plan` prints."""
    sentence = said or verdict(found, machine)
    return f"<b>{format_tokens(found.seq_len)} tokens: {sentence}</b>{in_html(table(found, machine))}"


# A figure with its table, drawn anew by controls


WORK = "work of one layer"
COLOURS = (*GROUPS, "checkpoints", "loss", WORK)
"""The order of categories in `wall`: each keeps its colour from one figure to the next."""


def _coarse(found: Prediction) -> dict[str, float]:
    """GiB of the device by the categories of `COLOURS`."""
    parts = grouped(found)
    return {name: parts.pop(name, 0.0) for name in COLOURS if name != WORK} | {WORK: sum(parts.values())}


def wall(shape: Shape, run: RunConfig, machine: Machine, lengths: Sequence[int], title: str) -> tuple[Any, str]:
    """Memory by category against the length, up to a little over what a GPU has, with the longest sequence that fits
    marked; and the table (HTML) of what it takes.

    Raises:
        ValueError: a machine with `gpu_memory=None`, which has no wall.
    """
    if machine.gpu_memory is None:
        raise ValueError("gpu_memory=None: without a limit every length fits, give the bytes of a GPU")
    found = longest(shape, run, machine)
    limit = machine.gpu_memory / GIB
    parts: dict[int, dict[str, float]] = {}
    for n in lengths:
        parts[n] = _coarse(predict(shape, run, machine, n))
        if sum(parts[n].values()) > 1.25 * limit:
            break
    mark = found.seq_len if found else None
    figure = plots.stacked(parts, limit, title, top=1.25 * limit, mark=mark, end=lengths[-1])
    if found is None:
        return figure, "<p>No length fits: what does not depend on it is more than the device or the host has.</p>"
    stops = limited_by(predict(shape, run, machine, round(1.05 * found.seq_len)))
    return figure, told(found, machine, f"the longest sequence; {stops}")


def follow(draw: Callable[..., Any], **controls: tuple[Sequence[Any], Any]) -> Any:
    """What `draw(**values)` gives, drawn anew as controls move: a figure, its table (HTML), or a pair of both.

    Each of `controls` is a name, the values it steps through, and the first to show: a slider, or a checkbox where the
    values are True and False. Where ALST_STATIC is set (a notebook that is stored to be read without a kernel): what is
    shown at first.
    """
    if os.environ.get("ALST_STATIC"):
        from IPython.display import HTML, display

        figure, table = _pair(draw(**{name: first for name, (_, first) in controls.items()}))
        if not table:
            return figure
        if figure is not None:
            display(figure)
        return HTML(table)
    import ipywidgets

    made = {}
    for name, (values, first) in controls.items():
        if isinstance(first, bool):
            made[name] = ipywidgets.Checkbox(value=first, description=name, indent=False)
            continue
        options = [(_label(value), value) for value in values]
        look = {"description": name, "layout": {"width": "32em"}, "continuous_update": False}
        made[name] = ipywidgets.SelectionSlider(options=options, value=first, **look)
    shown = ipywidgets.HTML()

    def update(*_: Any) -> None:
        figure, table = _pair(draw(**{name: control.value for name, control in made.items()}))
        if figure is not None:
            says = html.escape(", ".join(f"{name} {_label(control.value)}" for name, control in made.items()))
            alt = f"figure for {says}" + ("; its numbers are in the table below" if table else "")
            image = f'<img alt="{alt}" style="max-width: 100%" src="{plots.data_uri(figure, 100)}">'
            table = f"<div>{image}</div>{table}"  # the text below it, and not beside it
        shown.value = table

    for control in made.values():
        control.observe(update, "value")
    update()
    return ipywidgets.VBox([*made.values(), shown])


def _pair(drawn: Any) -> tuple[Any, str]:
    """A figure and a table, of which one may be missing."""
    if isinstance(drawn, tuple):
        return drawn
    return (None, drawn) if isinstance(drawn, str) else (drawn, "")


def _label(value: Any) -> str:
    """Long lengths as `32K`."""
    return format_tokens(value) if isinstance(value, int) and value >= 1000 else str(value)
