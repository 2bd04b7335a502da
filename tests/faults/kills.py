"""Kills runs at random moments, and sees that nothing of them is left and that the same command finishes.

    python -m tests.faults.kills [--kills 60] [--chain 4] [--beside 2] [--seed 0] [--json FILE]

A chain is one run of `alst run` with a tiny model: it is started, one of its processes gets a signal at one moment, and
the same command is given again, until the chain's kills are used up. Then it must finish, with the losses of a run that
nobody disturbed. After each kill the command must end, no process of it may be left a minute later, and what
`alst status` tells of the run must be true. Every eighth chain begins without DeepSpeed's compiled operators, and its
kills come while they are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alstlib.runs import status
from alstlib.runs.processes import processes, sigterm_interrupts
from alstlib.runs.results import read_result
from alstlib.train.operators import FOLDER_VARIABLE

MARK = "ALST_KILLS"
PATIENCE_SECONDS = 900.0
LEFT_SECONDS = 60.0
"""After these no process of a run that was killed may be there."""
TOLERANCE = 1e-6
STEPS = 16
SPEC = {
    "name": "kills",
    "rows": ["alst"],
    "base": {
        "model.name": "tiny",
        "engine.world_size": 2,
        "engine.sp": 2,
        "data.seq_len": 64,
        "optim.steps": STEPS,
        "output.checkpoint_every": 1,
    },
}
STEP = "step "
MOMENTS = ("command", "notebook", "torchrun", "loading", "engine", *(f"{STEP}{n}" for n in range(1, STEPS + 1, 3)))
COMPILING = "compiling"
VICTIMS = ("command", "kernel", "torchrun", "rank", "all")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WORDS = {
    "kernel": "ipykernel_launcher", "torchrun": "alstlib.train.agent", "rank": "-m alstlib.train.ablation --config",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What happened: when, to whom, how the command ended, what it says of itself, and what was left."""

    chain: int
    moment: str
    victim: str
    signal: str
    seconds: float
    """From the signal until nothing was left."""
    status: int | None
    """Exit status of the command; None where it did not end."""
    state: str
    """What `alst status` tells."""
    what: str
    left: tuple[str, ...] = ()
    """Command lines of processes that were there after `LEFT_SECONDS`."""
    wrong: str = ""
    """Empty when all is as it must be."""

    def __str__(self) -> str:
        after = f"{self.seconds:.0f} s" if not self.left else f"left {len(self.left)}"
        cells = (self.chain, self.moment, self.victim, self.signal, self.status, self.state, after, self.wrong or "ok")
        return f"| {' | '.join(map(str, cells))} |"


HEADING = "| run | moment | who | signal | exit status | alst status | nothing left after | |\n|" + "---|" * 8


@dataclass(kw_only=True)
class Campaign:
    """All that happened."""

    seed: int
    kills: list[Kill] = field(default_factory=list)
    finished: int = 0
    """Runs that the same command finished, with the losses of the undisturbed one."""
    bitwise: int = 0
    """Those of them whose losses were the same to the bit."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        left = sum(bool(k.left) for k in self.kills)
        wrong = [f"{k}\n{k.wrong}" for k in self.kills if k.wrong]
        lines = [
            f"seed {self.seed}: {len(self.kills)} kills in {self.seconds:.0f} s, {left} left processes, "
            f"{len(wrong)} were wrong; {self.finished} runs finished with equal losses ({self.bitwise} to the bit)"
        ]
        return "\n".join([*lines, *wrong, *self.failures])


class Chain:
    """One folder, and the command that is given again and again."""

    def __init__(self, folder: Path, number: int = 0, operators: Path | None = None) -> None:
        self.folder, self.number, self.mark = folder, number, uuid.uuid4().hex
        self.row = folder / "out" / "alst"
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
        self.env = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        if operators is not None:
            self.env[FOLDER_VARIABLE] = str(operators)

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "alstlib.runs.cli", "run", str(self.folder / "spec.yaml")]
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [*command, "--out", str(self.folder / "out")], env=self.env, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self) -> dict[int, str]:
        """Command lines of all that lives of this chain, whoever is its parent now."""
        return processes(self.mark, MARK)

    def of(self, victim: str, command: int) -> list[int]:
        """Processes that get the signal; none where the victim is not there."""
        found = self.processes()
        if victim in ("command", "all"):
            return [command] if victim == "command" else list(found)
        agents = [pid for pid, line in found.items() if WORDS["torchrun"] in line]
        if victim == "torchrun":
            return agents[:1]
        return [pid for pid, line in found.items() if WORDS[victim] in line and pid not in agents]

    def events(self) -> list[dict[str, Any]]:
        events = []
        with contextlib.suppress(OSError, ValueError):
            events = [json.loads(line) for line in (self.row / "progress.jsonl").read_text().splitlines()]
        return events

    def reached(self, moment: str) -> bool:
        if moment == COMPILING:
            return any("cc1plus" in line for line in self.processes().values())
        if moment == "notebook":
            return any(WORDS["kernel"] in line for line in self.processes().values())
        events = self.events()
        if moment.startswith(STEP):
            return any((event.get("step") or 0) >= int(moment.removeprefix(STEP)) for event in events)
        said = [str(event.get("message")) for event in events]
        return {
            "command": lambda: True,
            "torchrun": lambda: bool(events),
            "loading": lambda: any(message.startswith("loading") for message in said),
            "engine": lambda: any(message.startswith("starting DeepSpeed") for message in said),
        }[moment]()

    def kill(self, moment: str, victim: str, number: int, delay: float, chosen: float = 0.0) -> Kill | None:
        """Start the command, and give the signal `delay` seconds after the moment; None where it had ended. `chosen`,
        in [0, 1), says which rank is the victim."""
        (self.row / "progress.jsonl").unlink(missing_ok=True)
        with self.started() as process:
            until(lambda: self.reached(moment) or process.poll() is not None, 0.05)
            time.sleep(delay)
            if process.poll() is not None:
                return None
            pids = self.of(victim, process.pid)
            if victim == "rank" and pids:
                pids = [pids[int(chosen * len(pids))]]
            if not pids:
                victim, pids = "command", [process.pid]
            began = time.monotonic()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until(lambda: process.poll() is not None and not self.processes(), seconds=LEFT_SECONDS)
            left = self.processes()
            ignored = process.poll() is None and set(pids) <= left.keys() and number != signal.SIGKILL
            if ignored:  # such as an interrupt of a kernel that is not busy: the run goes on
                until(lambda: process.poll() is not None and not self.processes())
                left = self.processes()
            seconds, code = time.monotonic() - began, process.poll()
        row = status.look_at(self.folder / "spec.yaml", self.folder / "out").rows[0]
        wrong = [f"{len(left)} processes are left: {'; '.join(left.values())}"] if left else []
        wrong += ["the command goes on"] if code is None else []
        if row.state not in (*status.FAILED, "never run", "ok"):
            wrong.append(f"alst status tells {row.state}: {row.what}")
        if row.state == "ok" and len(self.losses()) != STEPS:
            wrong.append(f"the result is ok, with {len(self.losses())} losses")
        if row.state != "ok" and code == 0:
            wrong.append("the command ended with exit status 0")
        return Kill(
            chain=self.number, moment=moment, victim=victim, signal=signal.Signals(number).name, seconds=seconds,
            status=code, state=row.state, what=row.what, left=tuple(left.values()), wrong="; ".join(wrong),
        )  # fmt: skip

    def losses(self) -> list[float]:
        return read_result(self.row / "result.json")["metrics"].get("loss") or []

    def finish(self) -> list[float]:
        """Give the command once more; the losses of the run that must end well."""
        with self.started() as process:
            until(lambda: process.poll() is not None)
            tail = (self.folder / "log").read_text(errors="replace")[-3000:]
            assert process.returncode == 0, f"the command ended with {process.returncode}: {tail}"
        assert not self.processes()
        result = read_result(self.row / "result.json")
        assert result["status"] == "ok", result
        return result["metrics"]["loss"]


def until(condition: Callable[[], Any], every: float = 0.2, seconds: float = PATIENCE_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def disturb(
    run: Chain, kills: int, draw: random.Random, moments: tuple[str, ...], expected: list[float], made: Campaign,
    told: Callable[[str], None],
) -> None:  # fmt: skip
    """So many kills of one run; then it must finish."""
    done = 0
    while done < kills:
        killed = run.kill(
            draw.choice(moments), draw.choice(VICTIMS), draw.choice(SIGNALS), draw.uniform(0.0, 1.0), draw.random()
        )
        if killed is None:  # it was done before it was hit: again, from the beginning
            compare(run, run.losses(), expected, made, told)
            shutil.rmtree(run.folder / "out")
            continue
        done += 1
        made.kills.append(killed)
        told(str(killed))
    try:
        compare(run, run.finish(), expected, made, told)
    except (AssertionError, OSError, ValueError) as e:
        made.failures.append(f"run {run.number} did not finish: {e}")
        told(made.failures[-1])


def compare(
    run: Chain, losses: list[float], expected: list[float], made: Campaign, told: Callable[[str], None]
) -> None:
    worst = max((abs(a - b) for a, b in zip(losses, expected)), default=0.0)
    if len(losses) != len(expected) or not worst <= TOLERANCE:
        made.failures.append(f"run {run.number}: its losses are {losses} and not {expected}")
        told(made.failures[-1])
        return
    made.finished += 1
    made.bitwise += losses == expected
    told(f"| {run.number} | the same command | | | 0 | ok | | finished, {STEPS} losses differ by {worst:.0e} |")


def campaign(
    kills: int, chain: int, beside: int, seed: int, folder: Path, told: Callable[[str], None] = print,
    seconds: float = float("inf"),
) -> Campaign:  # fmt: skip
    """All kills, `chain` of them to a run and `beside` runs at a time; `told` hears the lines of a table. No run begins
    after so many `seconds`."""
    made, began, lock = Campaign(seed=seed), time.monotonic(), threading.Lock()

    def say(line: str) -> None:
        with lock:
            told(line)

    expected = Chain(folder / "undisturbed").finish()
    assert len(expected) == STEPS
    say(f"seed {seed}; the undisturbed run took {time.monotonic() - began:.0f} s\n\n{HEADING}")

    def one(first: int) -> None:
        if time.monotonic() - began > seconds:
            return
        number = first // chain
        compiles = number % 8 == 1
        run = Chain(folder / f"run-{number}", number, folder / f"operators-{number}" if compiles else None)
        moments = (COMPILING,) if compiles else MOMENTS
        disturb(run, min(chain, kills - first), random.Random(f"{seed} {number}"), moments, expected, made, say)

    with ThreadPoolExecutor(beside) as pool:
        list(pool.map(one, range(0, kills, chain)))
    made.seconds = time.monotonic() - began
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--chain", type=int, default=4, help="kills before the command must finish")
    parser.add_argument("--beside", type=int, default=2, help="runs that are disturbed at the same time")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run begins after so many")
    parser.add_argument("--json", type=Path, help="a file for all that happened")
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background lets all that it starts ignore it
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary, sigterm_interrupts():
        folder = args.folder or Path(temporary)
        made = campaign(
            args.kills, args.chain, args.beside, args.seed, folder, lambda line: print(line, flush=True), args.seconds
        )
    if args.json:
        args.json.write_text(json.dumps(dataclasses.asdict(made), indent=1))
    print(made)
    return 1 if made.failures or any(kill.wrong for kill in made.kills) else 0


if __name__ == "__main__":
    sys.exit(main())
