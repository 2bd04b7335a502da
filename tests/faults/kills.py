"""Kills runs at random moments, and sees that nothing of them is left and that the same command finishes.

A chain is one run of `alst run` with a tiny model: it is started, one of its processes gets a signal at one moment, and
the same command is given again, until the chain's kills are used up. Then it must finish, with the losses of a run that
nobody disturbed. After each kill the command must end, no process of it may be left a minute later, and what
`alst status` tells of the run must be true. `make test-faults ARGS='--kills 60 --seed 1'` runs them.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import living, wait_for

from alstlib.runs import status
from alstlib.runs.progress import ProgressReader
from alstlib.runs.results import read_result

MARK = "ALST_KILLS"
PATIENCE_SECONDS = 900.0
LEFT_SECONDS = 60.0
"""After these no process of a run that was killed may be there."""
TOLERANCE = 1e-6
STEPS = 16
SPEC = f"""
name: kills
rows: [alst]
base: {{model.name: tiny, engine: {{world_size: 2, sp: 2}}, data.seq_len: 64, optim.steps: {STEPS}, \
output.checkpoint_every: 1}}
"""
WORDS = {
    "command": "alstlib.runs.cli", "kernel": "ipykernel_launcher", "torchrun": "alstlib.runs.train.agent",
    "rank": "-m alstlib.runs.train.ablation --config", "all": "",
}  # fmt: skip
"""Who gets a signal, and what a command line of theirs has."""
STARTED = (WORDS["command"], WORDS["kernel"], WORDS["torchrun"])
MOMENTS = (*STARTED, "loading", "starting DeepSpeed", *range(1, STEPS + 1, 3))
"""What a command line has, what is told, or a step."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CHAIN, BESIDE = 4, 2
"""Kills of one run, and runs at a time."""


class Chain:
    """One folder, and the command that is given again and again."""

    def __init__(self, folder, number=0):
        self.folder, self.number, self.mark = folder, number, uuid.uuid4().hex
        self.row = folder / "out" / "alst"
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text(SPEC)
        self.env = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}

    @contextlib.contextmanager
    def started(self):
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

    def processes(self):
        """Command lines of all that lives of this chain, whoever is its parent now."""
        return living(self.mark, MARK)

    def reached(self, moment):
        events = ProgressReader(self.row / "progress.jsonl").read()
        if isinstance(moment, int):
            return any((event.get("step") or 0) >= moment for event in events)
        return any(moment in text for text in (*self.processes().values(), *(str(e.get("message")) for e in events)))

    def kill(self, moment, draw):
        """Start the command, and within a second after the moment give a signal to one of its processes, or to all.
        Returns what is wrong, which is empty when all is as it must be; None where it had ended."""
        victim, number = draw.choice([*WORDS]), draw.choice(SIGNALS)
        (self.row / "progress.jsonl").unlink(missing_ok=True)
        with self.started() as process:

            def over():
                return process.poll() is not None and not self.processes()

            wait_for(lambda: self.reached(moment) or process.poll() is not None, PATIENCE_SECONDS)
            time.sleep(draw.uniform(0.0, 1.0))
            if process.poll() is not None:
                return None
            pids = [pid for pid, line in self.processes().items() if WORDS[victim] in line]
            if not pids:
                victim, pids = "command", [process.pid]
            pids = pids if victim == "all" else [draw.choice(pids)]
            began = time.monotonic()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            wait_for(over, LEFT_SECONDS)
            if process.poll() is None and set(pids) <= self.processes().keys() and number != signal.SIGKILL:
                wait_for(over, PATIENCE_SECONDS)  # an interrupt of a kernel that is not busy: the run goes on
            left, seconds, code = self.processes(), time.monotonic() - began, process.poll()
        row = status.look_at(self.folder / "spec.yaml", self.folder / "out").rows[0]
        wrong = [f"{len(left)} processes are left: {'; '.join(left.values())}"] if left else []
        wrong += ["the command goes on"] if code is None else []
        if row.status not in (*status.FAILED, "never run", "ok"):
            wrong.append(f"alst status tells {row.status}: {row.what}")
        if row.status == "ok" and len(self.losses()) != STEPS:
            wrong.append(f"the result is ok, with {len(self.losses())} losses")
        if row.status != "ok" and code == 0:
            wrong.append("the command ended with exit status 0")
        said = f"run {self.number}: {signal.Signals(number).name} to {victim} at {moment}: exit status {code}, "
        said += f"{row.status}, {seconds:.0f} s; {'; '.join(wrong) or 'as it must be'}"
        print(said, flush=True)
        return said if wrong else ""

    def losses(self):
        return read_result(self.row / "result.json")["metrics"].get("loss") or []

    def finish(self):
        """Give the command once more; the losses of the run that must end well."""
        with self.started() as process:
            wait_for(lambda: process.poll() is not None, PATIENCE_SECONDS)
            tail = (self.folder / "log").read_text(errors="replace")[-3000:]
            assert process.returncode == 0, f"the command ended with {process.returncode}: {tail}"
        assert not self.processes()
        result = read_result(self.row / "result.json")
        assert result["status"] == "ok", result
        return result["metrics"]["loss"]


def campaign(kills, seed, folder):
    """All kills, each of which is printed; returns what was wrong."""
    wrong = []
    expected = Chain(folder / "undisturbed").finish()
    assert len(expected) == STEPS
    print(f"seed {seed}", flush=True)

    def compare(run, losses):
        print(f"run {run.number}: the same command finishes with {len(losses)} losses", flush=True)
        if losses != pytest.approx(expected, rel=0, abs=TOLERANCE):
            wrong.append(f"run {run.number}: its losses are {losses} and not {expected}")

    def disturb(first):
        """So many kills of one run; then it must finish."""
        number, left = first // CHAIN, min(CHAIN, kills - first)
        draw, run = random.Random(f"{seed} {number}"), Chain(folder / f"run-{number}", number)
        while left:
            if (killed := run.kill(draw.choice(MOMENTS), draw)) is None:  # it was done before it was hit
                compare(run, run.losses())
                shutil.rmtree(run.folder / "out")  # again, from the beginning
                continue
            left -= 1
            wrong.extend(filter(None, [killed]))
        try:
            compare(run, run.finish())
        except (AssertionError, OSError, ValueError) as e:
            wrong.append(f"run {number} did not finish: {e}")

    with ThreadPoolExecutor(BESIDE) as pool:
        list(pool.map(disturb, range(0, kills, CHAIN)))
    return wrong
