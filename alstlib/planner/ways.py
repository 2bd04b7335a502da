"""Compare the ways to run a model on long sequences: whole layers, layers in chunks, and more and more tensors on the
host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alstlib.config import RunConfig
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.prediction import Prediction, longest, predict
from alstlib.planner.streaming import least_chunk

CHUNK = 16_384
_LAYERS = {"options.chunk": CHUNK, "block": None}
WAYS: dict[str, dict[str, Any]] = {
    "layers whole": {"options.chunk": None, "options.on_host": "auto", "block": None},
    "chunks, all on the device": {**_LAYERS, "options.on_host": "none"},
    "hidden states on the host": {**_LAYERS, "options.on_host": "hidden"},
    "keys and values too": {**_LAYERS, "options.on_host": "hidden+kv"},
    "block by block": {"options.chunk": None, "options.on_host": "hidden+kv", "block": CHUNK},
}
"""As fields of RunConfig, beside tiles and checkpoints on the host."""
SPARSE = "a choice of pages (not exact)"
"""The way that a run with `sparse` asks for, which approximates attention."""


@dataclass(frozen=True)
class Way:
    """One way of running a model on a machine."""

    what: str
    changes: dict[str, Any]
    best: Prediction | None
    """The longest sequence that fits; None where none does."""
    beyond: Prediction | None
    """A little longer than the longest, so that it does not fit."""
    at: Prediction | None
    """At a length that was asked for, where it fits."""

    @property
    def limit(self) -> str:
        """What stops a longer sequence: the device's memory or the host's."""
        return self.beyond.reason if self.beyond else ""

    @property
    def link(self) -> bool:
        """Does the link to the host hold a step up at that length?"""
        found = self.at or self.best
        return found is not None and found.seconds["waiting for memory and network"] > 0.02 * found.seconds["step"]


def compare(shape: Shape, run: RunConfig, machine: Machine, seq_len: int | None = None) -> list[Way]:
    """Every way with the run's other options: how far it reaches, and what a step takes at `seq_len` (by default the
    longest length that every way reaches that reaches any)."""
    found: list[Any] = []
    ways = dict(WAYS)
    if run.contrib.sparse:
        ways[SPARSE] = {**WAYS["keys and values too"], "contrib.sparse": run.contrib.sparse}
    asked = run.options.chunk if run.options.chunk != "auto" else None
    size = asked or run.block or max(CHUNK, least_chunk(shape, machine.rates, run.engine.sp or machine.gpus))
    needed = {"options.checkpoint": True, "options.offload": True, "contrib.sparse": None}
    for what, changes in ways.items():
        own = {name: size if value == CHUNK else value for name, value in changes.items()}
        tiles = {"options.tiles.loss": run.options.tile("loss") or True}
        other = run.replace(**{**needed, **tiles, **own})
        best = longest(shape, other, machine)
        beyond = predict(shape, other, machine, int(1.02 * best.seq_len) + machine.gpus) if best else None
        found.append((what, own, other, best, beyond))
    reached = [best.seq_len for *_, best, _ in found if best is not None]
    length = seq_len or min(reached, default=0)
    made = []
    for what, own, other, best, beyond in found:
        at = predict(shape, other, machine, length) if best is not None and length else None
        made.append(Way(what, own, best, beyond, at if at is not None and at.fits else None))
    return made
