"""What the planner says about a run on this machine: before it starts, and for comparison with what was measured.

A step that was not simulated yet takes seconds: it is simulated before runs on GPUs and long ones (`_patience`).
"""

from __future__ import annotations

import math
import textwrap
from contextlib import nullcontext
from typing import Any

from alstlib.base.config import RunConfig
from alstlib.base.units import format_bytes, format_seconds
from alstlib.hf.loading.configs import find_config, overridden
from alstlib.planner.fits import known_only
from alstlib.planner.machine import Machine, machine_of, rates_known
from alstlib.planner.model_shapes import Shape, read_shape
from alstlib.planner.prediction import Prediction, first_beyond, longest, predict
from alstlib.planner.question import Question, settings
from alstlib.planner.rendering import as_text, named, table, verdict, writes

CERTAIN = 1.1
"""A run is refused when it would take this many times what there is: the planner is right within a few percent."""

SMALL = 0.01
"""Share of the memory: a run on a CPU whose hidden states take less than that fits, and is not simulated."""
FACTOR = 10
"""A run may take this many times what is predicted."""
HOUR, DAY = 3600.0, 86400.0
TRIALS = 12
"""Steps of the length that a search finds, which its trials take together."""
SLOW_DISK = 2e8
"""Bytes a second of a disk that nothing is known of."""


def foretell(run: RunConfig, machine: Machine, seq_len: int | None = None) -> tuple[Shape, Prediction]:
    """The prediction for a resolved run.

    Raises:
        ValueError: the planner does not know its model.
    """
    shape = read_shape(run.model.name, run.model.config, trust_remote_code=run.model.trust_remote_code)
    return shape, predict(shape, run, machine, seq_len or max(run.data.seq_len, run.engine.sp))


def _expected(run: RunConfig, nodes: int, gpus: int, waits: bool = False) -> tuple[Question, Prediction]:
    """The question about a resolved run on this machine (`machine_of`) with its prediction, that of a search at the
    length that it should find. What is not known is simulated, unless the run is so small that it is not worth the
    wait: it is on a CPU, and its hidden states are less than `SMALL` of the memory.

    Args:
        waits: simulate for a small run too.

    Raises:
        ValueError: it is no training run, or the planner does not know its model.
    """
    if run.emulate or run.peers:
        raise ValueError("it is not a training run")
    machine = machine_of(run, nodes, gpus)
    limits = [has for has in (machine.gpu_memory, machine.host_memory) if has is not None]
    config = overridden(find_config(run.model.name), run.model.config)
    width, layers = (int(config.get(name) or 1) for name in ("hidden_size", "num_hidden_layers"))
    hidden = 4 * width * layers * run.data.seq_len * run.data.batch_size
    processes = machine.ranks_of_node * machine.overheads.process
    waits = waits or machine.device != "cpu" or max(hidden / SMALL, processes) > min(limits, default=math.inf)
    with nullcontext() if waits else known_only():
        shape, found = foretell(run, machine)
        if run.search:
            best = longest(shape, run, machine, run.search.granule)
            if best and run.search.max and best.seq_len > run.search.max:
                best = predict(shape, run, machine, run.search.max)
            found = best or found
    return Question(shape, run, machine), found


def as_metrics(found: Prediction, machine: Machine) -> dict[str, Any]:
    """What a result records of a prediction: bytes of a rank. Seconds only for GPUs, whose rates are known."""
    return {
        "step_seconds": found.seconds["step"] if rates_known(machine) else None,
        "device_peak_bytes": found.device_peak,
        "device_bytes": found.device,
        "allocated_bytes": found.device_peak - sum(machine.overhead().values()),
        "host_peak_bytes": found.host_peak - found.host.get("process", 0),
        "host_bytes": found.host,
        **({} if found.disk_limit is None else {"disk_peak_bytes": found.activations.disk}),
    }


def why_not(run: RunConfig, nodes: int, gpus: int) -> str | None:
    """Why a resolved run cannot fit this machine (`machine_of`), and what would; None where it may. Runs that search
    for a length, or that the planner does not know, are not judged."""
    if run.search:
        return None
    try:
        question, found = _expected(run, nodes, gpus)
    except (ValueError, KeyError):
        return None
    if over := first_beyond(found.sides, CERTAIN):
        where, needs, has = over
        what = "device_memory is" if run.limits.device_memory else "a GPU has"
        what = what if where == "device" else f"a rank's share of the free {named(where)} is"
        text = (
            f"{found.seq_len:,} tokens would take {format_bytes(needs)} of {named(where)} a rank, and {what} "
            f"{format_bytes(has)} (predicted, largest parts: {largest(found, where, question.machine)})"
        )
    elif first_beyond(found.loading.sides, CERTAIN):
        text = f"{found.loading.why} (predicted)"
    else:
        return None
    if near := question.nearest(found.seq_len):
        text += f"; it would fit with {near.what}: {settings(near.changes)}"
    elif best := question.longest():
        text += f"; the longest that fits is {best.seq_len:,} tokens"
    return f"{text}. force=True (--force) runs it all the same"


def limits(run: RunConfig, nodes: int, gpus: int) -> tuple[float, float]:
    """Seconds that a resolved run may take, and those that a rank may wait for others: `FACTOR` times what is predicted
    of the run, and of a step and the saving of a training state. An hour at least; a day where no rates are known.
    """
    try:
        question, found = _expected(run, nodes, gpus)
    except (ValueError, KeyError):
        return DAY, DAY
    least = HOUR if rates_known(question.machine) else DAY
    step, disk = found.seconds["step"], question.shape.parameters / SLOW_DISK  # a byte of each parameter
    steps = run.optim.steps + (TRIALS if run.search else 0)
    states = run.optim.steps // run.output.checkpoint_every if run.output.checkpoint_every else 0
    whole = steps * step + (4 + 12 * states) * disk  # the model is read and written once
    return max(least, FACTOR * whole), max(least, FACTOR * (step + 12 * disk))


def time_limit(run: RunConfig, nodes: int, gpus: int, trains: bool = True) -> tuple[float, str]:
    """Seconds after which the launcher ends a resolved run, and which limit this is. The planner is not asked about a
    run that does not train."""
    if (given := run.limits.timeout) is not None:
        return (given, f"limits.timeout={given:g} s") if given else (math.inf, "no time limit (limits.timeout=0)")
    seconds = limits(run, nodes, gpus)[0] if trains else DAY
    reasons = {HOUR: "the shortest default", DAY: "no time is predicted"}
    why = reasons.get(seconds, f"{FACTOR} times the prediction")
    return seconds, f"the time limit of {format_seconds(seconds)} ({why}; limits.timeout=SECONDS sets another, 0 none)"


def step_limit(run: RunConfig, nodes: int, gpus: int, trains: bool = True) -> tuple[float, str]:
    """Seconds without a step or a message after which the launcher ends a resolved run, and which limit this is."""
    if run.limits.step_timeout is not None:
        return run.limits.step_timeout or math.inf, f"limits.step_timeout={run.limits.step_timeout:g} s"
    seconds = limits(run, nodes, gpus)[1] if trains else DAY
    return seconds, f"{format_seconds(seconds)} (limits.step_timeout=SECONDS sets another limit, 0 none)"


def outlook(run: RunConfig, gpus: int, nodes: int = 1) -> str:
    """What the planner says of a resolved run on this machine before it starts, in lines: whether it fits (of a search:
    the longest sequence), and a table of bytes of a rank and seconds of a step."""
    try:
        question, found = _expected(run, nodes, gpus, waits=True)
    except (ValueError, KeyError) as e:
        return f"not predicted: {e}"
    longest_fits = f"the longest that fits is {found.seq_len:,} tokens"
    said = longest_fits if run.search and found.fits else verdict(found, question.machine)
    shown = "\n".join([as_text(table(found, question.machine, parts=False)), writes(question, found)]).rstrip()
    return f"{said}\n{textwrap.indent(shown, ' ' * 13)}"


def largest(found: Prediction, where: str, machine: Machine) -> str:
    on_host = {**found.host, **found.device} if machine.device == "cpu" else found.host
    held = on_host if where == "host" else getattr(found, where)
    top = sorted(held.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in top)
