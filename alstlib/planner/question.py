"""A question to the planner: a model, a run and a machine, with the predictions that answer it. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from alstlib.config import RunConfig
from alstlib.hf.configs import find_config, overridden
from alstlib.hf.public_models import PUBLIC, TRAINED
from alstlib.planner.fits import other_versions
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.prediction import (
    HELP,
    Help,
    Prediction,
    Remedy,
    advice,
    loads_with,
    longest,
    predict,
    remedies,
)
from alstlib.planner.step_time import model_flops
from alstlib.planner.ways import CHUNK, Way, compare

NOTE = (
    "layers with a state are planned with the memory of the fused kernels (flash-linear-attention, mamba-ssm, "
    "causal-conv1d), as their published source has it; no GPU has run it, and what a kernel takes for itself is not "
    "known. Without these packages transformers' PyTorch code runs, which is slower and takes more."
)


@dataclass(frozen=True)
class Question:
    """What is asked about: a model, a run, a machine, and whose stack it is."""

    shape: Shape
    run: RunConfig
    machine: Machine
    preset: str
    understood: dict[str, str]
    """Quantities as they were understood."""
    assumed: dict[str, str] = field(default_factory=dict)
    """What was not given, by the option that gives it."""

    @property
    def ranks(self) -> int:
        """GPUs that share a sample."""
        return self.run.engine.sp or self.machine.gpus

    @property
    def shortest(self) -> int:
        return 8 * self.ranks

    def at(self, seq_len: int) -> Prediction:
        return predict(self.shape, self.run, self.machine, seq_len, self.preset)

    def longest(self) -> Prediction | None:
        return longest(self.shape, self.run, self.machine, preset=self.preset)

    def beyond(self, best: Prediction | None) -> Prediction:
        """A length that is a little longer than the longest that fits."""
        return self.at(int(1.02 * best.seq_len) + self.shortest if best else self.shortest)

    def advice(self) -> list[Help]:
        """Of ours: the reference's options are those of its paper."""
        return advice(self.shape, self.run, self.machine) if self.preset == "ours" else []

    def ways(self, seq_len: int | None) -> list[Way]:
        """Of ours."""
        return compare(self.shape, self.run, self.machine, seq_len) if self.preset == "ours" else []

    def remedies(self, seq_len: int | None) -> Iterator[tuple[Remedy, Prediction]]:
        """Of ours: what lets this length fit that does not, with its prediction; where no length fits (None), what lets
        some fit, with that of the longest."""
        if self.preset != "ours":
            return
        for one in remedies(self.shape, self.run, self.machine, seq_len or self.shortest):
            of = self.shape, one.run, one.machine
            if found := predict(*of, seq_len) if seq_len else longest(*of):
                yield one, found

    def on(self, remedy: Remedy) -> Question:
        """The same question with the run and on the machine of a remedy."""
        return replace(self, run=remedy.run, machine=remedy.machine)

    def tokens_per_second(self, found: Prediction) -> float:
        """Of each GPU."""
        samples = self.run.data.batch_size * self.run.optim.accumulation
        return samples * found.seq_len / self.ranks / found.seconds["step"]

    def mfu(self, found: Prediction) -> float | None:
        """The model's FLOPs as a share of the GPUs' peak; None where the peak is not known."""
        if not self.machine.rates.peak:
            return None
        flops = model_flops(self.shape, self.run, found.seq_len) / self.ranks
        return flops / found.seconds["step"] / self.machine.rates.peak

    def speed(self, found: Prediction) -> str:
        share = self.mfu(found)
        return f"{self.tokens_per_second(found):,.0f} tokens/s for each GPU" + (f", MFU {share:.0%}" if share else "")

    @property
    def name(self) -> str:
        return f"{self.machine.gpus} x {self.machine.rates.name}"

    def notes(self, seq_len: int | None = None) -> list[str]:
        """What else to know of this plan, and of this length."""
        made = [NOTE] if self.shape.recurrence and self.machine.device != "cpu" else []
        if find_config(self.run.model.name) in PUBLIC.values() and (remark := other_versions()):
            made.append(remark)
        trained = trained_length(self.run)
        if seq_len and trained and seq_len > trained:
            made.append(
                f"the model was trained on up to {trained:,} tokens, and {seq_len:,} are {seq_len / trained:.1f} times "
                "as many; memory and time are as planned, but positions beyond need scaling and training."
            )
        return made

    def cannot_load(self) -> str:
        """Why the model cannot be loaded and the nearest thing that works, in a sentence; nothing where it can."""
        why = self.at(self.shortest).loading.why
        return why and f"{why[0].upper()}{why[1:]}; it can be loaded {loads_with(self.shape, self.run, self.machine)}."


def trained_length(run: RunConfig) -> int | None:
    """Tokens of the longest sequence that the model was trained for, as its config says (with its scaling of rotary
    positions); None where it does not say."""
    found = find_config(run.model.name)
    public = next((name for name, config in PUBLIC.items() if config == found), "")
    config = overridden(found, run.model.config)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 0)
    length = config.get("max_position_embeddings") or config.get("n_positions") or TRAINED.get(public, 0)
    return int(max(length, scaled)) or None


CHUNKS = {"options.chunk": CHUNK}
NEEDED: dict[str, dict[str, Any]] = {
    "": {}, "chunks": CHUNKS, "chunks, weights on the host": {**CHUNKS, **HELP["weights on the host"]},
}  # fmt: skip
"""Settings that a machine may need to hold a length, from the fastest to those that take the least memory."""


@dataclass(frozen=True)
class Answer:
    """One machine, and what it holds."""

    question: Question
    needs: str
    """Of `NEEDED`."""
    found: Prediction
    """The asked length; without one the longest that fits, or the shortest, which does not fit."""
