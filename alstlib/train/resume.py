"""The training states of one run: which one it continues from, when it saves one, and which are kept.

The same command continues by itself: a state of the same configuration in the run's own folder comes before
`resume_from`. A state there that is not continued is never replaced, unless it is that of this run, which ended well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig, bound, flat
from alstlib.hf.saving import Told
from alstlib.mesh import gather_text
from alstlib.planner.preflight import SLOW_DISK
from alstlib.runs import results
from alstlib.runs.processes import WARNED, seconds_left
from alstlib.train.files import OtherState, find_state, place_aside
from alstlib.train.state import Saver, load_state


class Timeout(TimeoutError):
    """The run's time is up; its state is saved."""


class Warned(InterruptedError):
    """The run was told to end (`processes.WARNED`); its state is saved."""


def ending(out: Path, seconds: float, device: Any) -> type[Exception] | None:
    """Why no step may begin any more that needs so many seconds with what follows it; the same on every rank."""
    mine = json.dumps([seconds_left() < seconds, (out / WARNED).exists()])
    late, warned = json.loads(gather_text(mine, device)[0])
    return Warned if warned else Timeout if late else None


def ended(why: type[Exception], run: RunConfig, step: int, folder: Path) -> Exception:
    """What is raised after the state of the last step is in `folder`."""
    limit = f"timeout={run.limits.timeout:g} s" if run.limits.timeout else "the run's time limit"
    first = "the run was told to end" if why is Warned else f"{limit} leaves no time for a step"
    return why(
        f"{first} after step {step} of {run.optim.steps}; the training state is saved in {folder}, and the same "
        "command continues from there"
    )


class RunStates:
    """What a run continues from and saves, in `state` below its folder `out`. Every rank calls the methods.

    Args:
        run: the run as it was asked for.
        seq_len: the length that it trains at, which a search may have found.
        told: gives who hears the share of a piece of work that is done.
    """

    def __init__(self, engine: Any, run: RunConfig, seq_len: int, out: Path, told: Callable[[str], Told]) -> None:
        self.engine, self.asked, self.run, self.out, self.told = (
            engine,
            run,
            run.replace(data={"seq_len": seq_len}),
            out,
            told,
        )
        self.folder, self.saver = out / "state", Saver(engine, self.run)
        self.begun = 0
        """Optimizer steps that were done before this attempt."""
        self.notes: list[str] = []
        self.aside: Path | None = None  # where a state that is not continued goes when one is saved
        self.guess = 12 * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()) / SLOW_DISK
        """Seconds that the first state will take to be written."""

    def resume(self, loader: Any) -> dict[str, Any]:
        """Put engine and loader where an earlier attempt was; returns the `history` that it saved."""
        left, found, told = find_state(self.folder), None, self.told("reading the training state")
        there, finished = self._agreed([left is not None, self._finished()])
        if there and not finished:
            self.aside = place_aside(self.folder)
        if there and not finished and self.run.output.resume == "auto":
            try:
                found = load_state(
                    self.engine, self.run, self.folder, self.told("reading the training state"), own=True
                )
            except OtherState as e:
                self.notes.append(f"the training state in {left} is kept, but not continued: {e}")
        if found is None and self.run.output.resume_from:
            found = load_state(self.engine, self.run, self.run.output.resume_from, told)
        if found is None:
            return {}
        if left is not None and found["place"].resolve() == left.resolve():
            self.aside = None  # the states to come follow it
        loader.load_state_dict(found["loader"])
        self.begun = found["step"]
        self.notes += [f"continued after step {self.begun} from {found['place']}", *filter(None, [found["note"]])]
        return found["history"] or {}

    def after_step(self, loader: Any, step: int, seconds: float, history: Any) -> None:
        """Save the state of every `checkpoint_every`th step, and of the last one that there is time for. It is written
        while the training goes on, but for the last one: this returns when that is on disk.

        Raises:
            Timeout: another step of so many `seconds` might not leave the time to save a state.
            Warned: the run was told to end.
            OSError, FloatingPointError: the state before could not be saved.
        """
        every, told = self.run.output.checkpoint_every, self.told("saving the training state")
        self.saver.poll()
        ends = self._ending(seconds) if every and step < self.run.optim.steps else None
        if every and (ends or step % every == 0):
            state: dict[str, Any] = {"loader_state": loader.state_dict(), "history": history, "aside": self.aside}
            self.saver.start(self.folder, step=step, told=told, **state)
            self.aside = None
        if ends or step == self.run.optim.steps:
            self.saver.wait(told)
        if ends:
            raise ended(ends, self.run, step, self.folder)

    def _ending(self, seconds: float) -> type[Exception] | None:
        saving = self.guess if self.saver.seconds is None else self.saver.seconds
        return ending(self.out, 1.2 * seconds + 2 * saving + 1, self.engine.device)

    def _finished(self) -> bool:
        """Whether this very run ended well here before: it is repeated, from its first step, and its states with it."""
        try:
            result = results.read_result(self.out / "result.json")
        except (OSError, ValueError):
            return False
        before, now = result["config"], self.asked.to_dict()
        more = ("optim.steps", "output.resume_from")
        same = bound(before) == bound(now) and all(flat(before).get(name) == flat(now)[name] for name in more)
        return result["status"] == "ok" and same

    def _agreed(self, answers: list[bool]) -> list[bool]:
        """Rank 0's answers, on every rank."""
        return json.loads(gather_text(json.dumps(answers), self.engine.device)[0])
