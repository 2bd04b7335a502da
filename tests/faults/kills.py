"""Kills runs at random moments, and sees that nothing of them is left and that the same command finishes.

    python -m tests.faults.kills [--kills 40] [--chain 4] [--seed 0]

A chain is one run of `alst run` with a tiny model: it is started, one of its processes gets a signal in one phase, and
the same command is given again, until the chain's kills are used up. Then it must finish, with the losses, to the bit,
of a run that nobody disturbed. After each kill the command must end, and no process of it may be left. Every fourth
chain begins without DeepSpeed's compiled operators, and its kills come while they are compiled. It takes a quarter of
an hour of processor time, so the tests run a sample of it (test_kills.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alstlib.runs.processes import sigterm_interrupts
from alstlib.runs.results import read_result
from alstlib.train.operators import FOLDER_VARIABLE

MARK = "ALST_KILLS"
PATIENCE_SECONDS = 900.0
STEPS = 12
SPEC = {
    "name": "kills", "rows": ["alst"],
    "base": {"model": "tiny", "world_size": 2, "sp": 2, "seq_len": 64, "steps": STEPS, "checkpoint_every": 1},
}  # fmt: skip
PHASES = ("command", "notebook", "torchrun", "loading", "engine", "steps", "result")
COMPILING = "compiling"
VICTIMS = ("command", "kernel", "torchrun", "rank", "all")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Kill:
    """What happened: when, to whom, how the command ended, and what was left."""

    phase: str
    victim: str
    number: str
    status: int | None
    """Of the command; None where it did not end."""
    seconds: float
    """From the signal until nothing was left."""
    left: tuple[str, ...] = ()
    """Command lines of processes that were there a minute later."""

    def __str__(self) -> str:
        wrong = "still runs" if self.status is None else f"left {self.left}" if self.left else "nothing left"
        return f"| {self.phase} | {self.victim} | {self.number} | {self.status} | {wrong} | {self.seconds:.0f} s |"


class Chain:
    """One folder, and the command that is given again and again."""

    def __init__(self, folder: Path, operators: Path | None = None) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
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
        found, mark = {}, f"{MARK}={self.mark}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        return found

    def of(self, victim: str, command: int) -> list[int]:
        """Processes that get the signal; none where the victim is not there."""
        words = {
            "kernel": "ipykernel_launcher",
            "torchrun": "alstlib.train.agent",
            "rank": "-m alstlib.train.ablation --config",
        }
        if victim in ("command", "all"):
            return [command] if victim == "command" else list(self.processes())
        found = [pid for pid, line in self.processes().items() if words[victim] in line]
        return [pid for pid in found if victim != "rank" or "alstlib.train.agent" not in self.processes().get(pid, "")]

    def reached(self, phase: str) -> bool:
        if phase == COMPILING:
            return any("cc1plus" in line for line in self.processes().values())
        events = []
        with contextlib.suppress(OSError, ValueError):
            events = [json.loads(line) for line in (self.row / "progress.jsonl").read_text().splitlines()]
        said = [str(event.get("message")) for event in events]
        return {
            "command": lambda: True,
            "notebook": lambda: any("ipykernel" in line for line in self.processes().values()),
            "torchrun": lambda: bool(events),
            "loading": lambda: any(message.startswith("loading") for message in said),
            "engine": lambda: any(message.startswith("starting DeepSpeed") for message in said),
            "steps": lambda: any(event["event"] == "step" for event in events),
            "result": lambda: any(event.get("step") == STEPS for event in events),
        }[phase]()

    def kill(self, phase: str, victim: str, number: int, delay: float) -> Kill | None:
        """Start the command, and give the signal `delay` seconds after the phase began; None where it had ended."""
        (self.row / "progress.jsonl").unlink(missing_ok=True)
        with self.started() as process:
            until(lambda: self.reached(phase) or process.poll() is not None, 0.02)
            time.sleep(delay)
            if process.poll() is not None:
                return None
            pids = self.of(victim, process.pid)
            if not pids:
                victim, pids = "command", [process.pid]
            began = time.monotonic()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until(lambda: process.poll() is not None)
            until(lambda: not self.processes(), seconds=60)
            left = tuple(self.processes().values())
            return Kill(phase, victim, signal.Signals(number).name, process.poll(), time.monotonic() - began, left)

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


def campaign(kills: int, chain: int, seed: int, folder: Path, told: Callable[[str], None] = print) -> list[Kill]:
    """All kills; `told` hears a line of a table for each, and one for each chain that finished.

    Raises:
        AssertionError: a chain did not finish, or not with the losses of the run that nobody disturbed.
    """
    draw, made = random.Random(seed), []
    expected = Chain(folder / "undisturbed").finish()
    assert len(expected) == STEPS
    told("| phase | who | signal | exit status | afterwards | after |\n|---|---|---|---|---|---|")
    for first in range(0, kills, chain):
        compiles = first // chain % 4 == 1
        run = Chain(folder / f"chain-{first}", folder / f"operators-{first}" if compiles else None)
        for _ in range(min(chain, kills - first)):
            killed = None
            while killed is None:
                phase = COMPILING if compiles else draw.choice(PHASES)
                killed = run.kill(phase, draw.choice(VICTIMS), draw.choice(SIGNALS), draw.uniform(0.0, 2.0))
                if killed is None:  # it was done before it was hit: again, from the beginning
                    shutil.rmtree(run.folder / "out")
            told(str(killed))
            made.append(killed)
        losses = run.finish()
        assert losses == expected, f"{losses} and not {expected}"
        told(f"| the same command | | | 0 | finished, all {STEPS} losses the same to the bit | |")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--chain", type=int, default=4, help="kills before the command must finish")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, sigterm_interrupts():
        made = campaign(args.kills, args.chain, args.seed, Path(folder), lambda line: print(line, flush=True))
    bad = [kill for kill in made if kill.left or kill.status is None]
    print(f"{len(made)} kills, {len(bad)} with something left")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
