"""Training states on disk: weights, optimizer and position in the data. They are written while training continues.

PyTorch's `torch.distributed.checkpoint` writes and reads them: every rank saves the pieces of fp32 weights and moments
that it holds, flat and by parameter name, and loading takes what it needs from any number of ranks' files under any
ZeRO stage. Nothing is gathered. What else is known is JSON, `state.json`, and nothing but tensors is unpickled.

A state belongs to a configuration (the fields in `EQUAL`), every byte of it is under a checksum, it is there when all
of it is there, and the state before it is kept next to it, in `.old`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from alstlib.config import EQUAL, RunConfig, flat
from alstlib.mesh import accelerator, gather_text
from alstlib.offload.host_store import host_available
from alstlib.planner.preflight import SLOW_DISK
from alstlib.train.files import SCHEMA_VERSION, OtherState, Writer, check_files, find_state, read_state
from alstlib.train.pieces import HeldState, Reader

log = logging.getLogger(__name__)


def count(parameters: Iterable[Any]) -> int:
    """Elements of parameters, of those that ZeRO-3 partitions too."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)


def seconds_to_save(model: torch.nn.Module) -> float:
    """About how long it takes to write a model's fp32 weights and moments, for want of a measurement."""
    return 12 * count(model.parameters()) / SLOW_DISK


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
        self.seconds = seconds_to_save(engine.module)
        """How long it took to write the last state; a guess before the first."""

    def start(self, folder: str | Path, *, step: int, loader_state: Any, history: Any = None) -> None:
        """Save the state after optimizer step `step`: copied when this returns, on disk when `wait` does.

        Args:
            loader_state: this rank's `SPDataLoader.state_dict()`, or anything that JSON holds.
            history: what a continued run wants back, such as the losses so far; anything that JSON holds.
        """
        self.wait()
        began, held = time.monotonic(), HeldState(self.engine)
        pieces = {name: piece.own() for name, piece in held.pieces.items()}
        lacks = sum(piece.nbytes for piece in pieces.values()) > host_available() // 2
        rng = [of.get_rng_state().numpy().tobytes().hex() for of in _generators(self.engine.device)]
        mine = json.dumps({"loader": loader_state, "rng": rng, "lacks_memory": lacks})
        by_rank = [json.loads(text) for text in gather_text(mine, self.engine.device)]
        content = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "config": _configuration(self.engine, self.run),
            "history": history,
            "scheduler_step": getattr(self.engine.lr_scheduler, "last_epoch", None),
            "tensors": {name: piece.whole for name, piece in held.pieces.items()},
            "adam_steps": held.steps,
            "by_rank": by_rank,
        }
        self.writer = Writer(Path(folder), self.run.output.checkpoint_local, json.dumps(content))
        self.group = self.group or dist.new_group(backend="gloo")  # the thread's own: the training uses the others
        waits = any(rank["lacks_memory"] for rank in by_rank)
        with _disable_current_modes():  # a ledger would take copies on the host for the device's
            if not waits:
                pieces = {name: piece.copied() for name, piece in pieces.items()}
            self.pending = checkpoint.async_save(pieces, storage_writer=self.writer, process_group=self.group)
        self.pending.add_done_callback(lambda _: setattr(self, "seconds", time.monotonic() - began))
        if waits:
            log.warning("host memory has no room for a copy of the training state: the ranks wait until it is written")
            self.wait()

    def wait(self) -> None:
        """Return when the state that is being written is whole."""
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except checkpoint.CheckpointException as e:
            if dist.get_rank() == 0:
                shutil.rmtree(self.writer.new, ignore_errors=True)
            dist.barrier()  # there is room again for what a rank says of its error
            folder, error = self.writer.folder, e.failures[min(e.failures)][0]
            intact = "; the state saved before is intact" if find_state(folder) else ""
            for kind in (OSError, FloatingPointError):
                if isinstance(error, kind):
                    raise kind(f"could not save the training state in {folder}: {error}{intact}") from None
            raise


def load_state(engine: Any, run: RunConfig, folder: str | Path, *, own: bool = False) -> dict[str, Any]:
    """Put a saved state into an engine of the same model, on any number of ranks, at any sp and under any ZeRO stage.

    A collective. Everything is checked before the engine is touched.

    Args:
        folder: what `Saver.start` was given, or the folder of a run, which has it in `state`.
        own: the run continues itself: it must have begun from the same `resume_from`, and may be at its last step.

    Returns: `step` (optimizer steps done), `loader` (a loader's state, this rank's if there are as many ranks), `note`
        (what other ranks change), `history` and `place` (the state's folder).

    Raises:
        OtherState: on every rank: the state is of another configuration or model, or has more steps than the run.
        ValueError: on every rank: no state there, or a damaged one.
    """
    held, device, problem = HeldState(engine), engine.device, {}
    try:
        place, state = read_state(folder)
        _check_fits(state, _configuration(engine, run), held, own)
        check_files(place, state)
    except ValueError as e:
        problem = {"what": str(e), "other": isinstance(e, OtherState)}
    for told in map(json.loads, gather_text(json.dumps(problem), device)):
        if told:
            raise (OtherState if told["other"] else ValueError)(told["what"])
    checkpoint.load(held.pieces, storage_reader=Reader(place, state["pieces"]))
    held.use()
    held.steps = state["adam_steps"]
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.last_epoch = state["scheduler_step"] - 1
        engine.lr_scheduler.step()
    then = {"ranks": len(state["by_rank"]), **state["config"]}
    now = {"ranks": dist.get_world_size(), **flat(run.to_dict())}
    mine, note = state["by_rank"][dist.get_rank() % then["ranks"]], ""
    if differ := differences(then, now, ("ranks", "engine.sp")):
        note = (
            f"the training state was saved under {', '.join(differ)}: the data go on after the samples seen then. With "
            "another number of groups of ranks a step takes other samples, and with other ranks random numbers, such "
            "as dropout's, begin anew"
        )
    if then["ranks"] == now["ranks"]:
        for of, saved in zip(_generators(device), mine["rng"]):
            of.set_rng_state(torch.frombuffer(bytearray.fromhex(saved), dtype=torch.uint8))
    return {"step": state["step"], "history": state["history"], "place": place, "loader": mine["loader"], "note": note}


def differences(then: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """In words, under which of these names the two say different things."""
    return [f"{n}={then.get(n)!r} (here {now.get(n)!r})" for n in names if then.get(n) != now.get(n)]


def _check_fits(state: Mapping[str, Any], now: Mapping[str, Any], held: HeldState, own: bool) -> None:
    """Raise OtherState unless the state is of this configuration and model, and leaves the run a step to do."""
    then = {**flat(RunConfig().to_dict()), **state["config"]}  # what saved it may not know a field
    step = state["step"]
    if differ := differences(then, now, (*EQUAL, "output.resume_from") if own else EQUAL):
        raise OtherState(f"its state of step {step} belongs to another configuration: {', '.join(differ)}")
    was, here = state["tensors"], {name: list(piece.whole) for name, piece in held.pieces.items()}
    if differ := differences(was, here, sorted(was.keys() | here.keys())):
        raise OtherState(f"it is of another model, or others are frozen: {len(differ)} tensors differ, {differ[0]}")
    if (least := step + (not own)) > now["optim.steps"]:
        raise OtherState(
            f"optim.steps={now['optim.steps']} counts all steps, and it has done {step} already; use at least {least}"
        )


def _generators(device: torch.device) -> list[Any]:
    """Modules whose `get_rng_state` and `set_rng_state` are of the random generators: the CPU's and the device's."""
    here = accelerator(device)
    return [torch] if here is None else [torch, here]


def _configuration(engine: Any, run: RunConfig) -> dict[str, Any]:
    """The run's fields by their names with the group, as JSON gives them back, with `auto` as it was resolved and whole
    paths."""
    given = {**flat(run.to_dict()), "model.dtype": "bf16" if engine.bfloat16_enabled() else "fp32"}
    named = {name: given[name] for name in ("model.name", "data.name", "data.tokenizer", "output.resume_from")}
    paths = {name: os.path.abspath(path) for name, path in named.items() if path and os.path.exists(path)}
    return json.loads(json.dumps({**given, **paths}))
