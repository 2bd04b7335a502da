"""What our own loop and the Trainer's share about ending a run and continuing it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alstlib.base.config import FIELDS, RunConfig, flat
from alstlib.base.mesh import from_all
from alstlib.hf.loading.zero_config import sizes_of
from alstlib.planner.preflight import SLOW_DISK
from alstlib.runs import results
from alstlib.runs.processes import WARNED, seconds_left
from alstlib.runs.results import Json, differences

EQUAL = tuple(
    name
    for name in FIELDS
    if name.split(".")[0] in ("model", "data", "optim", "contrib")
    and name not in ("model.trust_remote_code", "model.liger", "model.bits", "data.allow_dropped", "optim.steps")
)
"""Fields that must be equal in the run that saved a training state and in the one that loads it: what is trained, on
what, and how. The rest is free: on which ranks and how the same numbers are computed, and how many steps there are."""


class Timeout(TimeoutError):
    """The run's time is up; its state is saved."""


class Warned(InterruptedError):
    """The run was told to end (`processes.WARNED`); its state is saved."""


def seconds_to_save(model: Any) -> float:
    """About how long it takes to write a model's fp32 weights and moments, for want of a measurement."""
    return 12 * sum(sizes_of(model.parameters())) / SLOW_DISK


def ending(out: Path, step: float, saving: float) -> type[Exception] | None:
    """Exception to raise because a step may not begin that takes so many seconds, and its state so many to save; the
    same on every rank."""
    late, warned = of_first([seconds_left() < 1.2 * step + 2 * saving + 1, (out / WARNED).exists()])
    return Warned if warned else Timeout if late else None


def ended(why: type[Exception], run: RunConfig, step: int, folder: Path) -> Exception:
    """What is raised after the state of the last step is in `folder`."""
    first = "the run was told to end" if why is Warned else "the time limit leaves no time for a step"
    return why(
        f"{first} after step {step} of {run.optim.steps}; the training state is saved in {folder}, and the same "
        "command continues from there"
    )


def of_first(answer: Any) -> Any:
    """Rank 0's answer, on every rank."""
    return from_all(answer)[0]


def fields(run: RunConfig) -> Json:
    """A run's fields by their names with the group, as JSON gives them back."""
    return json.loads(json.dumps(flat(run.to_dict())))


def finished(out: Path, run: RunConfig, names: Iterable[str]) -> bool:
    """Whether a run with the same fields of these names ended well in `out` before: it is repeated, from its first
    step."""
    try:
        result = results.read_result(out / "result.json")
    except (OSError, ValueError):
        return False
    return result["status"] == "ok" and not differences(flat(result["config"]), fields(run), names)
