"""Training states on disk: weights, optimizer and position in the data. They are written while training continues.

PyTorch's `torch.distributed.checkpoint` writes and reads them: every rank saves the pieces of fp32 weights and moments
that it holds, flat and by parameter name, and loading takes what it needs from any number of ranks' files under any
ZeRO stage. Nothing is gathered. What else is known is JSON, `state.json`, and nothing but tensors is unpickled.

A state belongs to a configuration (all but `FREE` of its fields must agree where it is loaded), every byte of it is
under a checksum, it is there when all of it is there, and the state before it is kept next to it, in `.old`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from alstlib.config import RunConfig, bound, value_of
from alstlib.hf.saving import Told, silent
from alstlib.mesh import accelerator, gather_text
from alstlib.offload.host_store import host_available
from alstlib.train.files import (
    SCHEMA_VERSION,
    OtherState,
    Writer,
    check_files,
    find_state,
    read_state,
)
from alstlib.train.pieces import HeldState, LoadPlanner, Reader, SavePlanner

log = logging.getLogger(__name__)


class Saver:
    """Saves training states of an engine, one at a time. Every rank calls the methods, at the end of the same step.

    The ranks stand still while their pieces are copied into host memory. A thread of each writes them: to the folder
    `checkpoint_local` of its machine first, where the run names one, and from there next to the state's folder, which
    is renamed when all ranks' parts are whole: whatever happens, the state before is intact. That one is kept in the
    folder + `.old`, and the one that was there is removed. Where the host has no room for the copies, the ranks wait.

    Every method may raise what went wrong with the state that was being written, on every rank: OSError (a full disk),
    or FloatingPointError (a weight or a moment is not finite).

    Args:
        engine: a DeepSpeed engine with AdamW.
        run: the run that the states belong to.
    """

    def __init__(self, engine: Any, run: RunConfig) -> None:
        self.engine, self.run = engine, run
        self.group: Any = None
        self.pending: Any = None
        self.seconds: float | None = None
        """What it took to write the last state."""

    def start(
        self, folder: str | Path, *, step: int, loader_state: Any, history: Any = None, aside: Path | None = None,
        told: Told = silent,
    ) -> None:  # fmt: skip
        """Save the state after optimizer step `step`: copied when this returns, on disk when `wait` does.

        Args:
            loader_state: this rank's `SPDataLoader.state_dict()`, or anything that JSON holds.
            history: what a continued run wants back, such as the losses so far; anything that JSON holds.
            aside: what lies at `folder` is no state of this run: it is moved here (`place_aside`), nothing is removed.
            told: while this state waits for the one before, it hears the share of that one that is written.
        """
        self.wait(told)
        began, held = time.monotonic(), HeldState(self.engine)
        pieces = {name: held.own(name) for name in held.names()}
        rng = [of.get_rng_state().numpy().tobytes().hex() for of in _generators(self.engine.device)]
        content = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "config": _configuration(self.engine, self.run),
            "ranks": dist.get_world_size(),
            "history": history,
            "scheduler_step": getattr(self.engine.lr_scheduler, "last_epoch", None),
            "parameters": {name: {"shape": shape, "step": held.step(name)} for name, shape in held.shapes.items()},
        }
        nbytes = sum(4 * len(piece) for _, piece in pieces.values())
        lacking = torch.tensor(int(nbytes > host_available() // 2), device=self.engine.device)
        dist.all_reduce(lacking)
        self.group = self.group or dist.new_group(backend="gloo")  # the thread's own: the training uses the others
        self.writer = Writer(Path(folder), self.run.output.checkpoint_local, json.dumps(content), aside, not lacking)
        self.planner = SavePlanner(
            {name: start for name, (start, _) in pieces.items()}, {name: held.size(name) for name in pieces},
            json.dumps({"loader": loader_state, "rng": rng}), nbytes,
        )  # fmt: skip
        with _disable_current_modes():  # copies on the host, which a ledger would take for the device's
            self.pending = checkpoint.async_save(
                {name: piece for name, (_, piece) in pieces.items()}, storage_writer=self.writer, planner=self.planner,
                process_group=self.group,
            )  # fmt: skip

        def written(_: Any) -> None:
            self.seconds = time.monotonic() - began

        self.pending.add_done_callback(written)
        if lacking:
            log.warning("host memory has no room for a copy of the training state: the ranks wait until it is written")
            self.wait()

    def poll(self) -> None:
        """Raise what went wrong with a state that has been written meanwhile."""
        if self.pending is not None:
            done = torch.tensor(int(self.pending.done()), device=self.engine.device)
            dist.broadcast(done, 0)
            if done:
                self.wait()

    def wait(self, told: Told = silent) -> None:
        """Return when the state that is being written is whole; `told` hears the share that is."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        while not futures.wait([pending], 1).done:
            told(self.planner.share)
        try:
            pending.result()
        except checkpoint.CheckpointException as e:
            if dist.get_rank() == 0:
                shutil.rmtree(self.writer.new, ignore_errors=True)
            dist.barrier()  # there is room again for what a rank says of its error
            folder, error = self.writer.folder, e.failures[min(e.failures)][0]
            if not isinstance(error, OSError | FloatingPointError):
                raise
            why = str(error)
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                why = "the disk is full" if full else f"{error.strerror or why} ({error.filename or self.writer.new})"
            before = "; the state saved before is intact" if find_state(folder) else ""
            kind = OSError if isinstance(error, OSError) else FloatingPointError
            raise kind(f"could not save the training state in {folder}: {why}{before}") from None


def load_state(
    engine: Any, run: RunConfig, folder: str | Path, told: Told = silent, *, own: bool = False
) -> dict[str, Any]:
    """Put a saved state into an engine of the same model, on any number of ranks, at any sp and under any ZeRO stage.

    A collective. Everything is checked before the engine is touched.

    Args:
        folder: what `Saver.start` was given, or the folder of a run, which has it in `state`.
        told: called with the share that is read, 0 to 1.
        own: the run continues itself: it must have begun from the same `resume_from`, and may be at its last step.

    Returns: `step` (optimizer steps done), `loader` (a loader's state, this rank's if there are as many ranks), `note`
        (what other ranks change; also logged), `history` and `place` (the state's folder).

    Raises:
        OtherState: on every rank: the state is of another configuration or model, or has more steps than the run.
        ValueError: on every rank: no state there, or a damaged one.
    """
    held, device, problem = HeldState(engine), engine.device, ["", False]
    state: dict[str, Any] = {}
    place = find_state(folder) or Path(folder) / "state"
    try:
        if not (place / "state.json").is_file():
            what = "it has no training state (state.json)" if Path(folder).exists() else "there is no such folder"
            raise ValueError(f"{what}; name the folder of a run with checkpoint_every")
        state = read_state(place)
        _check_fits(state, engine, run, held, own)
        check_files(place, state)
    except ValueError as e:
        problem = [str(e), isinstance(e, OtherState)]
    problems = [json.loads(text) for text in gather_text(json.dumps(problem), device)]
    if told_first := next((p for p in problems if p[0]), None):
        what, other = told_first
        if not own:
            raise (OtherState if other else ValueError)(f"resume_from='{folder}': {what}")
        raise OtherState(what) if other else ValueError(f"{what}; resume='never' begins at step 1 and keeps it")
    pieces = {name: held.piece(name) for name in held.names()}
    checkpoint.load(
        {name: piece for name, (_, piece) in pieces.items()}, storage_reader=Reader(place, state["pieces"]),
        planner=LoadPlanner({name: start for name, (start, _) in pieces.items()}, told),
    )  # fmt: skip
    held.use()
    held.set_steps({name: p["step"] for name, p in state["parameters"].items()})
    if engine.lr_scheduler is not None:
        saved_step = state["scheduler_step"]  # None: that run had no warm-up
        engine.lr_scheduler.last_epoch = (state["step"] if saved_step is None else saved_step) - 1
        engine.lr_scheduler.step()
    then = {"ranks": state["ranks"], "sp": state["config"]["engine"]["sp"]}
    now = {"ranks": dist.get_world_size(), "sp": run.engine.sp}
    mine, note = state["by_rank"][dist.get_rank() % then["ranks"]], ""
    if differs := [f"{name}={then[name]!r} (now {now[name]!r})" for name in now if then[name] != now[name]]:
        note = f"the state in {place} was saved under {', '.join(differs)}: the data go on after the samples seen then"
        groups = [one["ranks"] // (one["sp"] or one["ranks"]) for one in (then, now)]
        if groups[0] != groups[1]:
            note += f"; a step takes the samples of {groups[1]} groups and not of {groups[0]}, so that losses differ"
        log.log(logging.INFO if dist.get_rank() else logging.WARNING, note)
    if then["ranks"] == now["ranks"]:
        for of, saved in zip(_generators(device), mine["rng"]):
            of.set_rng_state(torch.frombuffer(bytearray.fromhex(saved), dtype=torch.uint8))
    else:
        note += "; random numbers, such as dropout's, begin anew"
    return {"step": state["step"], "history": state["history"], "place": place, "loader": mine["loader"], "note": note}


def _check_fits(state: Mapping[str, Any], engine: Any, run: RunConfig, held: HeldState, own: bool) -> None:
    """Raise OtherState unless the state is of this configuration and model, and leaves the run a step to do."""
    then, now = bound(state["config"]), bound(_configuration(engine, run))
    if own:  # of the run that is continued with the same command
        then["output.resume_from"] = state["config"]["output"]["resume_from"]
        now["output.resume_from"] = run.output.resume_from
    if differs := [name for name in now if then.get(name) != now[name]]:
        listed = ", ".join(f"{n}={then.get(n)!r} (here {now[n]!r})" for n in differs)
        raise OtherState(f"its state of step {state['step']} belongs to another configuration: {listed}")
    saved = {name: tuple(p["shape"]) for name, p in state["parameters"].items()}
    if odd := sorted(n for n in saved.keys() | held.shapes.keys() if saved.get(n) != held.shapes.get(n)):
        was, here = saved.get(odd[0], "absent"), held.shapes.get(odd[0], "absent")
        raise OtherState(f"it is of another model: {len(odd)} parameters differ, {odd[0]}: {was}, here {here}")
    if missing := sorted(set(held.names()) - state["pieces"].keys()):
        raise OtherState(f"it lacks {missing[0]} and {len(missing) - 1} more: were they frozen when it was saved?")
    if state["step"] >= run.optim.steps + own:
        raise OtherState(
            f"steps={run.optim.steps} counts all steps, and it has done {state['step']} already; use at least "
            f"{state['step'] + (not own)}"
        )


# Between ranks


def _generators(device: torch.device) -> list[Any]:
    """Modules whose `get_rng_state` and `set_rng_state` are of the random generators: the CPU's and the device's."""
    here = accelerator(device)
    return [torch] if here is None else [torch, here]


def _configuration(engine: Any, run: RunConfig) -> dict[str, Any]:
    """The run's fields as JSON gives them back, with `auto` as it was resolved and whole paths."""
    dtype = "bf16" if engine.bfloat16_enabled() else "fp32"
    names = ("model.name", "data.name", "data.tokenizer", "output.resume_from")
    paths = {name: os.path.abspath(path) for name in names if os.path.exists(path := value_of(run, name) or "")}
    return json.loads(json.dumps(run.replace(**{"model.dtype": dtype, **paths}).to_dict()))
