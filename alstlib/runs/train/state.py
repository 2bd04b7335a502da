"""The training states of one run: weights, optimizer and position in the data. They are written while it trains.

Every rank saves the pieces of fp32 weights and moments that it holds, flat and by parameter name, and loading takes
what it needs from any number of ranks' files under any ZeRO stage. Nothing is gathered. What else is known is JSON.

A state belongs to a configuration (the fields in `EQUAL`), every byte of it is under a checksum, it is there when all
of it is there, and the state before it is kept. The same command continues by itself: a state of the same configuration
in the run's own folder comes before `resume_from`. States there that are not continued are moved aside before the run
saves its own, unless they are those of this run, which ended well.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from alstlib.base.config import RunConfig
from alstlib.base.mesh import accelerator, from_all
from alstlib.offload.host_store import host_available
from alstlib.runs.results import Json, differences
from alstlib.runs.train.files import SCHEMA_VERSION, OtherState, Writer, check, move_aside, read_state, states_in
from alstlib.runs.train.pieces import HeldState
from alstlib.runs.train.resume import EQUAL, ended, ending, fields, finished, of_first, seconds_to_save


class RunStates:
    """What a run continues from and saves, in `state` below its folder `out`. Every rank calls the methods, at the end
    of the same step.

    The ranks stand still while their pieces are copied into host memory, and a thread of each writes them. A rank whose
    host has no room for the copies waits until its pieces are written.

    `after_step`, `save` and `wait` may raise what went wrong with the state that was being written, on every rank:
    OSError (a full disk), or FloatingPointError (a weight or a moment is not finite).

    Args:
        engine: a DeepSpeed engine with AdamW.
        run: the run as it was asked for.
        seq_len: the length that it trains at, which a search may have found.
        say: hears what takes long.
    """

    def __init__(self, engine: Any, run: RunConfig, seq_len: int, out: Path, say: Callable[[str], None]) -> None:
        self.engine, self.run, self.out, self.folder, self.say = engine, run, out, out / "state", say
        self.config = {**fields(run), "data.seq_len": seq_len, "schema_version": SCHEMA_VERSION}
        self.config["model.dtype"] = "bf16" if engine.bfloat16_enabled() else "fp32"
        self.device = engine.device
        self.generators = [torch, *filter(None, [accelerator(engine.device)])]
        """Modules whose `get_rng_state` and `set_rng_state` are of the CPU's random numbers and of the device's."""
        self.seconds = seconds_to_save(engine.module)
        """How long it took to write the last state; a guess before the first."""
        self.begun = 0
        """Optimizer steps that were done before this attempt."""
        self.notes: list[str] = []
        self.group: Any = None
        self.pending: Any = None

    # Saving

    def after_step(self, loader: Any, step: int, seconds: float, history: Any) -> None:
        """Save the state of every `checkpoint_every`th step, and of the last one that there is time for. It is written
        while the training goes on, but for the last one: this returns when that is on disk.

        Raises:
            Timeout: another step of so many `seconds` might not leave the time to save a state.
            Warned: the run was told to end.
        """
        if not (every := self.run.output.checkpoint_every):
            return
        last, ends = step == self.run.optim.steps, None
        if not last:
            ends = ending(self.out, seconds, self.seconds)
        if ends or step % every == 0:
            self.save(step, loader.state_dict(), history)
        if ends or last:
            self.say("saving the training state")
            self.wait()
        if ends:
            raise ended(ends, self.run, step, self.folder)

    def save(self, step: int, loader_state: Any, history: Any = None) -> None:
        """Save the state after optimizer step `step`: copied when this returns, on disk when `wait` does.

        Args:
            loader_state: this rank's `SPDataLoader.state_dict()`, or anything that JSON holds.
            history: what a continued run wants back, such as the losses so far; anything that JSON holds.
        """
        self.wait()
        began, held = time.monotonic(), HeldState(self.engine)
        common = {
            "step": step, "config": self.config, "history": history, "adam_steps": held.steps, "shapes": held.shapes,
            "scheduler_step": getattr(self.engine.lr_scheduler, "last_epoch", None),
        }  # fmt: skip
        rng = [of.get_rng_state().numpy().tobytes().hex() for of in self.generators]
        own = held.own()
        full = sum(piece.nbytes for piece in own.values()) > host_available() // 2
        waits = bool(held.files) or full
        self.writer = Writer(self.folder, common, {"loader": loader_state, "rng": rng})
        self._clear()
        self.group = self.group or dist.new_group(backend="gloo")  # the thread's own: the training uses the others
        with _disable_current_modes():  # a ledger would take copies on the host for the device's
            if not waits:
                own = {name: piece.to("cpu", copy=True) for name, piece in own.items()}
            self.pending = checkpoint.async_save(own, storage_writer=self.writer, process_group=self.group)
        self.pending.add_done_callback(lambda _: setattr(self, "seconds", time.monotonic() - began))
        if waits:
            where = "is in files that the next step overwrites" if held.files else "has no room on the host for a copy"
            self.say(f"the training state {where}: waiting until it is written")
            futures.wait([self.pending])

    def wait(self) -> None:
        """Return when the state that is being written is whole."""
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except checkpoint.CheckpointException as e:
            self._clear()
            dist.barrier()  # there is room again for what a rank says of its error
            error = e.failures[min(e.failures)][0]
            what = f"could not save the training state in {self.folder} (one saved before is intact): {error}"
            raise type(error)(what) from e

    def _clear(self) -> None:
        """Remove what is there of a state that was not finished."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.writer.path, ignore_errors=True)

    # Continuing

    def resume(self, loader: Any) -> Json:
        """Put engine and loader where an earlier attempt was; returns the `history` that it saved."""
        output, found, begins = self.run.output, None, "output.resume_from"
        again = finished(self.out, self.run, (*EQUAL, "optim.steps", begins))
        left, again = of_first([bool(states_in(self.folder)), again])
        if left and not again and output.resume == "auto":
            try:
                found, left = self.load(self.folder, begins), False
            except OtherState as e:
                self.notes.append(f"it is kept, but not continued: {e}")
        if found is None and output.resume_from:
            found = self.load(Path(output.resume_from))
        if left and output.checkpoint_every and dist.get_rank() == 0:
            if again:
                shutil.rmtree(self.folder)
            else:
                self.notes.append(f"what was in {self.folder} is now in {move_aside(self.folder)}")
        if found is None:
            return {}
        loader.load_state_dict(found["loader"])
        return found["history"] or {}

    def load(self, folder: Path, *equal: str) -> Json:
        """Put a saved state into the engine, from any number of ranks, at any sp and under any ZeRO stage.

        A collective. Everything is checked before the engine is touched.

        Args:
            folder: that of a state, or of a run, of which it takes the newest.
            equal: fields that must be equal in the run that saved it, besides those in `EQUAL`.

        Returns: what state.json says of all ranks and of this one, or, with other ranks, of one that stands for it.

        Raises:
            OtherState: on every rank: the state is of another configuration or model, or has more steps than the run.
            ValueError: on every rank: no state there, or a damaged one.
        """
        self.say(f"reading the training state in {folder}")
        held, problem = HeldState(self.engine), None
        try:
            place, state = read_state(folder)
            self._check(state, held, equal)
            for rank in state["by_rank"][dist.get_rank() :: dist.get_world_size()]:
                check(place / rank["file"], rank["checksum"])
        except ValueError as e:
            problem = [f"the training state in {folder}: {e}", isinstance(e, OtherState)]
        for told in from_all(problem):
            if told:
                raise (OtherState if told[1] else ValueError)(told[0])
        held.load(place, state)
        if (scheduler := self.engine.lr_scheduler) is not None:
            scheduler.last_epoch = state["scheduler_step"] - 1
            scheduler.step()
        mine, self.begun = state["by_rank"][dist.get_rank() % len(state["by_rank"])], state["step"]
        self.notes.append(f"continued after step {self.begun} from {place}")
        if differ := differences(state["config"], self.config, ("engine.world_size", "engine.sp")):
            self.notes.append(
                f"the training state was saved under {', '.join(differ)}: the data go on after the samples seen then. "
                "With another number of groups of ranks a step takes other samples, and with other ranks random "
                "numbers, such as dropout's, begin anew"
            )
        if len(state["by_rank"]) == dist.get_world_size():
            for of, saved in zip(self.generators, mine["rng"]):
                of.set_rng_state(torch.frombuffer(bytearray.fromhex(saved), dtype=torch.uint8))
        return {**state, **mine}

    def _check(self, state: Mapping[str, Any], held: HeldState, equal: tuple[str, ...]) -> None:
        """Raise OtherState unless the state is of this configuration and model, and of no later step than the last."""
        step, steps = state["step"], self.run.optim.steps
        if differ := differences(state["config"], self.config, ("schema_version", *EQUAL, *equal)):
            raise OtherState(f"step {step} belongs to another configuration: {', '.join(differ)}")
        if differ := differences(state["shapes"], held.shapes, {**state["shapes"], **held.shapes}):
            raise OtherState(f"it is of another model, or others are frozen: {len(differ)} tensors differ, {differ[0]}")
        if step > steps:
            raise OtherState(f"optim.steps={steps} counts all steps, and it has done {step} already")
