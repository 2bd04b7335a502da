"""Live controls for a notebook, over figures and over the planner; without a kernel their first view is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from alstlib import plots
from alstlib.config import RunConfig
from alstlib.planner import GIB, Machine, Prediction, predict
from alstlib.results import format_tokens
from alstlib.shapes import Shape


def by_category(found: Prediction) -> dict[str, float]:
    """GiB of the device by category."""
    return {name: nbytes / GIB for name, nbytes in found.device.items() if nbytes}


GROUPS = {
    "outside PyTorch": ("CUDA context", "NCCL", "fragments"),
    "model states and ZeRO's buffers": (
        "weights", "gathered weights", "gradients", "optimizer", "buckets", "copies of buckets",
    ),
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
    cells = "".join(f"<tr><td>{name}</td><td align=right>{gib:.2f}</td></tr>" for name, gib in rows)
    verdict = "fits" if found.fits else f"does not fit: {found.limit} memory"
    return (
        f"<b>{format_tokens(found.seq_len)} tokens: {verdict}</b>, {found.device_peak / GIB:.1f} GiB a GPU, a step "
        f"takes {found.seconds['step']:,.0f} s<table><tr><th>device</th><th>GiB</th></tr>{cells}</table>"
    )


def explore(shape: Shape, run: RunConfig, machine: Machine, switches: Mapping[str, Any]) -> Any:
    """A slider for the length and a checkbox for each of `switches` (name: RunConfig's fields when it is on); the
    verdict and the memory by category follow. Where ALST_STATIC is set (a notebook that is stored to be read without a
    kernel), what they would show at first."""
    if os.environ.get("ALST_STATIC"):
        from IPython.display import HTML

        return HTML(_verdict(predict(shape, run, machine, FIRST)))
    import ipywidgets

    length = ipywidgets.FloatLogSlider(
        value=FIRST,
        base=10,
        min=4,
        max=8,
        step=0.02,
        description="tokens",
        readout_format=".3s",
        continuous_update=False,
    )
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


def step_through(draw: Callable[[int], Any], count: int, name: str = "step") -> Any:
    """A slider over `draw(1)` to `draw(count)`, each of which returns what a cell may show, such as a figure. Where
    ALST_STATIC is set, `draw(1)`."""
    if os.environ.get("ALST_STATIC"):
        return draw(1)
    import ipywidgets
    from IPython.display import display

    slider = ipywidgets.IntSlider(value=1, min=1, max=count, description=name, continuous_update=False)
    shown = ipywidgets.Output()

    def update(*_: Any) -> None:
        view = draw(slider.value)
        shown.clear_output(wait=True)
        with shown:
            display(view)

    slider.observe(update, "value")
    update()
    return ipywidgets.VBox([slider, shown])
