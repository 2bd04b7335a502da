"""The training states of one run: which one it continues from, when it saves one, and which are kept.

The same command continues by itself: a state of the same configuration in the run's own folder comes before
`resume_from`. A state there that is not continued is moved aside before the run saves its own, unless it is that of
this run, which ended well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from alstlib.config import EQUAL, RunConfig, flat, value_of
from alstlib.mesh import gather_text
from alstlib.runs import results
from alstlib.runs.processes import WARNED, seconds_left
from alstlib.train.files import OtherState, find_state, move_aside
from alstlib.train.state import Saver, load_state


class Timeout(TimeoutError):
    """The run's time is up; its state is saved."""


class Warned(InterruptedError):
    """The run was told to end (`processes.WARNED`); its state is saved."""


def ending(out: Path, seconds: float, device: Any) -> type[Exception] | None:
    """Why no step may begin any more that needs so many seconds with what follows it; the same on every rank."""
    late, warned = of_first([seconds_left() < seconds, (out / WARNED).exists()], device)
    return Warned if warned else Timeout if late else None


def ended(why: type[Exception], run: RunConfig, step: int, folder: Path) -> Exception:
    """What is raised after the state of the last step is in `folder`."""
    limit = f"limits.timeout={run.limits.timeout:g} s" if run.limits.timeout else "the run's time limit"
    first = "the run was told to end" if why is Warned else f"{limit} leaves no time for a step"
    return why(
        f"{first} after step {step} of {run.optim.steps}; the training state is saved in {folder}, and the same "
        "command continues from there"
    )


def of_first(answer: Any, device: Any) -> Any:
    """Rank 0's answer, on every rank; anything that JSON holds."""
    return json.loads(gather_text(json.dumps(answer), device)[0])


def fields(run: RunConfig, names: Iterable[str]) -> dict[str, Any]:
    """These fields of a run, as JSON gives them back."""
    return json.loads(json.dumps({name: value_of(run, name) for name in names}, default=str))


def finished(out: Path, bound: dict[str, Any]) -> bool:
    """Whether a run with these fields ended well in `out` before: it is repeated, from its first step."""
    try:
        result = results.read_result(out / "result.json")
    except (OSError, ValueError):
        return False
    then = flat(result["config"])
    return result["status"] == "ok" and all(then.get(name) == value for name, value in bound.items())


class RunStates:
    """What a run continues from and saves, in `state` below its folder `out`. Every rank calls the methods.

    Args:
        run: the run as it was asked for.
        seq_len: the length that it trains at, which a search may have found.
        say: hears what takes long.
    """

    def __init__(self, engine: Any, run: RunConfig, seq_len: int, out: Path, say: Callable[[str], None]) -> None:
        self.engine, self.asked, self.run, self.out, self.say = (
            engine,
            run,
            run.replace(data={"seq_len": seq_len}),
            out,
            say,
        )
        self.folder, self.saver = out / "state", Saver(engine, self.run)
        self.begun = 0
        """Optimizer steps that were done before this attempt."""
        self.notes: list[str] = []

    def resume(self, loader: Any) -> dict[str, Any]:
        """Put engine and loader where an earlier attempt was; returns the `history` that it saved."""
        run, device, found = self.run, self.engine.device, None
        repeats = finished(self.out, fields(self.asked, (*EQUAL, "optim.steps", "output.resume_from")))
        left = of_first(find_state(self.folder) is not None and not repeats, device)
        if left and run.output.resume == "auto":
            self.say("reading the training state")
            try:
                found = load_state(self.engine, run, self.folder, own=True)
                left = False
            except OtherState as e:
                self.notes.append(f"the training state in {self.folder} is kept, but not continued: {e}")
            except ValueError as e:
                raise ValueError(f"{e}; resume='never' begins at step 1 and keeps it") from e
        if found is None and run.output.resume_from:
            self.say(f"reading the training state in {run.output.resume_from}")
            try:
                found = load_state(self.engine, run, run.output.resume_from)
            except ValueError as e:
                raise type(e)(f"resume_from='{run.output.resume_from}': {e}") from e
        if left and run.output.checkpoint_every and dist.get_rank() == 0:
            self.notes.append(f"it is now in {move_aside(self.folder)}")
        if found is None:
            return {}
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
        if not (every := self.run.output.checkpoint_every):
            return
        last, ends = step == self.run.optim.steps, None
        if not last:
            ends = ending(self.out, 1.2 * seconds + 2 * self.saver.seconds + 1, self.engine.device)
        if ends or step % every == 0:
            self.saver.start(self.folder, step=step, loader_state=loader.state_dict(), history=history)
        if ends or last:
            self.say("saving the training state")
            self.saver.wait()
        if ends:
            raise ended(ends, self.run, step, self.folder)
