"""Live controls for figures and for the planner in a notebook; without a kernel the first view remains."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alstlib.config import RunConfig
from alstlib.figures import plots
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.model_states import BUCKETS, COPIES, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from alstlib.planner.prediction import Prediction, longest, predict
from alstlib.units import GIB, format_seconds, format_tokens


def by_category(found: Prediction) -> dict[str, float]:
    """GiB of the device by category."""
    return {name: nbytes / GIB for name, nbytes in found.device.items() if nbytes}


GROUPS = {
    "outside PyTorch": ("CUDA context", "NCCL", "fragments"),
    "model states and ZeRO's buffers": (WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, BUCKETS, COPIES),
}  # fmt: skip
"""What a figure shows together."""


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Categories with model states, and what lies outside PyTorch, added up; these first."""
    inside = {name for names in GROUPS.values() for name in names}
    made = {group: sum(parts.get(name, 0.0) for name in names) for group, names in GROUPS.items()}
    return made | {name: gib for name, gib in parts.items() if name not in inside}


def memory_figure(shape: Shape, run: RunConfig, machine: Machine, lengths: Any, title: str = "") -> Any:
    """Memory by category against the length."""
    parts = {n: grouped(by_category(predict(shape, run, machine, n))) for n in lengths}
    limit = None if machine.gpu_memory is None else machine.gpu_memory / GIB
    return plots.stacked(parts, limit, title)


FIRST = 1_000_000
"""Tokens at which the slider begins."""


def _verdict(found: Prediction) -> str:
    rows = sorted(by_category(found).items(), key=lambda item: -item[1])
    verdict = "fits" if found.fits else f"does not fit: {found.limit} memory"
    return (
        f"<b>{format_tokens(found.seq_len)} tokens: {verdict}</b>, {found.device_peak / GIB:.1f} GiB a GPU, a step "
        f"takes {found.seconds['step']:,.0f} s" + html_table(("device", "GiB"), [(n, f"{gib:.2f}") for n, gib in rows])
    )


def explore(shape: Shape, run: RunConfig, machine: Machine, switches: Mapping[str, Any]) -> Any:
    """A slider for the length and a checkbox for each of `switches`; the verdict and the memory by category follow.

    `switches` has the changes of the run for a box that is empty, as `RunConfig.replace` takes them. Where ALST_STATIC
    is set (a notebook that is stored to be read without a kernel): what is shown at first."""
    if os.environ.get("ALST_STATIC"):
        from IPython.display import HTML

        return HTML(_verdict(predict(shape, run, machine, FIRST)))
    import ipywidgets

    length = ipywidgets.FloatLogSlider(
        value=FIRST, base=10, min=4, max=8, step=0.02, description="tokens", readout_format=".3s",
        continuous_update=False,
    )  # fmt: skip
    boxes = {name: ipywidgets.Checkbox(value=True, description=name, indent=False) for name in switches}
    text = ipywidgets.HTML()

    def update(*_: Any) -> None:
        now = run
        for name, box in boxes.items():
            if not box.value:
                now = now.replace(**switches[name])
        text.value = _verdict(predict(shape, now, machine, round(length.value)))

    for control in (length, *boxes.values()):
        control.observe(update, "value")
    update()
    return ipywidgets.VBox([length, ipywidgets.HBox(list(boxes.values())), text])


# A figure with its table, drawn anew by controls


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A small table: the first column is text, the others are numbers."""
    cell = '<{0} style="text-align: {1}">{2}</{0}>'  # JupyterLab puts everything to the right where only `align` is set
    lines = [
        "".join(cell.format(tag, "right" if i else "left", html.escape(text)) for i, text in enumerate(row))
        for tag, row in (("th", head), *(("td", row) for row in rows))
    ]
    return '<table style="line-height: 1.3">' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


COLOURS = (*GROUPS, "checkpoints", "loss", "hidden states", "mlp", "exchange", "attention", "kernel workspace")
"""The order of categories in `wall`: each keeps its colour from one figure to the next."""


def wall(shape: Shape, run: RunConfig, machine: Machine, lengths: Sequence[int], title: str) -> tuple[Any, str]:
    """Memory by category against the length, cut off a little over what a GPU has, with the longest sequence that fits
    marked; and the table (HTML) of what a GPU holds there.

    Raises:
        ValueError: a machine with `gpu_memory=None`, which has no wall.
    """
    if machine.gpu_memory is None:
        raise ValueError("gpu_memory=None: without a limit every length fits, give the bytes of a GPU")
    found = longest(shape, run, machine)
    parts = {n: dict.fromkeys(COLOURS, 0.0) | grouped(by_category(predict(shape, run, machine, n))) for n in lengths}
    limit = machine.gpu_memory / GIB
    figure = plots.stacked(parts, limit, title, top=1.25 * limit, mark=found.seq_len if found else None)
    if found is None:
        return figure, "<p>No length fits: what does not depend on it is more than the device or the host has.</p>"
    stops = predict(shape, run, machine, round(1.05 * found.seq_len)).limit
    rows = [
        ("longest sequence", f"{format_tokens(found.seq_len)} tokens"),
        ("what stops it", f"{stops} memory"),
        ("one step", f"{format_seconds(found.seconds['step'])}"),
        ("host, one rank", f"{found.host_peak / GIB:.1f} GiB"),
        ("device", f"{found.device_peak / GIB:.1f} GiB"),
    ]
    rows += [(f"of it {name}", f"{gib:.1f} GiB") for name, gib in grouped(by_category(found)).items()]
    return figure, html_table(("predicted", ""), rows)


def follow(draw: Callable[..., Any], **controls: tuple[Sequence[Any], Any]) -> Any:
    """What `draw(**values)` gives, drawn anew as sliders move: a figure, or a figure and its table (HTML).

    Each of `controls` is a name, the values it steps through, and the first to show. Where ALST_STATIC is set: what is
    shown at first.
    """
    names = {name: first for name, (_, first) in controls.items()}
    if os.environ.get("ALST_STATIC"):
        from IPython.display import HTML, display

        made = draw(**names)
        if not isinstance(made, tuple):
            return made
        display(made[0])
        return HTML(made[1])
    import ipywidgets

    sliders = {
        name: ipywidgets.SelectionSlider(
            options=[(_label(value), value) for value in values], value=names[name], description=name,
            layout={"width": "32em"}, continuous_update=False,
        )
        for name, (values, _) in controls.items()
    }  # fmt: skip
    shown = ipywidgets.HTML()

    def update(*_: Any) -> None:
        made = draw(**{name: slider.value for name, slider in sliders.items()})
        figure, table = made if isinstance(made, tuple) else (made, "")
        says = html.escape(", ".join(f"{name} {_label(slider.value)}" for name, slider in sliders.items()))
        alt = f"figure for {says}" + ("; its numbers are in the table below" if table else "")
        shown.value = f'<img alt="{alt}" style="max-width: 100%" src="{plots.data_uri(figure, 100)}">{table}'

    for slider in sliders.values():
        slider.observe(update, "value")
    update()
    return ipywidgets.VBox([*sliders.values(), shown])


def _label(value: Any) -> str:
    """Long lengths as `32K`."""
    return format_tokens(value) if isinstance(value, int) and value >= 1000 else str(value)
