"""What can go wrong in a run, one fault at a time: it ends, says what it was and where, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kills import SPEC, TOLERANCE, Chain

from alstlib.config import RunConfig
from alstlib.runs import launch, locks, processes, results, status
from alstlib.runs.workers import ABLATION

HERE = Path(__file__).parent
STEPS = 4
RUN = RunConfig(
    model={"name": "tiny", "liger": False},
    engine={"world_size": 2, "sp": 2},
    data={"seq_len": 64},
    optim={"steps": STEPS},
    output={"checkpoint_every": 1},
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def start(out: Path, run: RunConfig = RUN, fault: str = "") -> dict[str, Any]:
    extra = {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), str(HERE))), "FAULT": fault, "OMP_NUM_THREADS": "1"}
    try:
        return launch.launch(run, out, worker="faulty" if fault else ABLATION, extra_env=extra)
    finally:
        for attempt in (out / "logs").glob("*"):
            assert not processes.processes(attempt.name)


def fails(out: Path, run: RunConfig = RUN, fault: str = "") -> dict[str, Any]:
    """The result of a run that must not finish, which `result.json` and `alst status` tell too."""
    with pytest.raises(launch.RunFailed) as raised:
        start(out, run, fault)
    result = results.read_result(out / "result.json")
    assert result == raised.value.result
    row = status.look_at(out).rows[0]
    assert row.state == result["status"]
    assert row.what == results.why(result).splitlines()[0]
    return result


def finishes(out: Path, expected: list[float], run: RunConfig = RUN) -> None:
    """The same command goes on after step 2, with the losses of the run that nobody disturbed."""
    result = start(out, run)
    assert result["status"] == "ok"
    assert result["metrics"]["loss"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = start(tmp_path_factory.mktemp("undisturbed"))["metrics"]["loss"]
    assert len(losses) == STEPS
    return losses


def continued(out: Path) -> bool:
    return any(
        "continued after step 2" in note for note in results.read_result(out / "result.json")["metrics"]["notes"]
    )


def test_a_stopped_rank(tmp_path: Path, expected: list[float]) -> None:
    error = fails(tmp_path, RUN.replace(limits={"step_timeout": 60}), "stop")["error"]
    assert error["type"] == "Stalled"
    says = (
        "no step ended for limits.step_timeout=60 s: the last step was 2 of 4; rank 1: stopped (SIGSTOP, or a debugger)"
    )
    assert error["message"].startswith(says)
    assert "; rank 0: waited in " in error["message"]
    *_, last = (e["time"] for e in launch.ProgressReader(tmp_path / "progress.jsonl").read() if e["event"] == "step")
    assert (tmp_path / "result.json").stat().st_mtime - last < 60 + 30, "the limit, and asking where the ranks are"
    finishes(tmp_path, expected, RUN.replace(limits={"step_timeout": 60}))
    assert continued(tmp_path)


def test_a_rank_that_is_killed(tmp_path: Path, expected: list[float]) -> None:
    error = fails(tmp_path, fault="kill")["error"]
    assert error["type"] == "RankKilled"
    assert error["message"].startswith(
        "rank 1 was ended by SIGKILL (as the kernel does when the host's memory runs out"
    )
    finishes(tmp_path, expected)
    assert continued(tmp_path)


def test_memory_runs_out_on_a_rank(tmp_path: Path) -> None:
    """It is a result about the configuration, and that of the rank."""
    result = start(tmp_path, fault="oom")
    assert (result["status"], result["error"]["rank"]) == ("oom", 1)
    assert "on rank 1: " in results.why(result)
    assert start(tmp_path) == result, "it is not repeated"


def test_a_weight_that_is_not_a_number_on_a_rank(tmp_path: Path, expected: list[float]) -> None:
    error = fails(tmp_path, fault="nan")["error"]
    assert error["type"] == "FloatingPointError"
    assert error["message"].startswith("step 3 at 64 tokens: its ")
    finishes(tmp_path, expected)
    assert continued(tmp_path)


def documents(path: Path, odd: int | None = None) -> str:
    """Samples of 64 tokens, two of them for each step of two ranks; one has a token that no model knows."""
    lines = [{"input_ids": [(7 * i + j) % 100 for j in range(64)]} for i in range(2 * STEPS)]
    if odd is not None:
        lines[odd]["input_ids"][9] = 10**6
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_sample_with_a_token_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Every rank has its own samples: the one that read it is named."""
    data = documents(tmp_path / "data.jsonl", odd=5)
    message = fails(tmp_path / "out", RUN.replace(data={"name": data}, engine={"sp": 1}))["error"]["message"]
    logs = (tmp_path / "out").glob("logs/*/*/attempt_0/*/stderr.log")
    (read,) = [log.parent.name for log in logs if "in check_tokens" in log.read_text()]
    says = (
        f"the data of rank {read} failed: ValueError: data='{data}' has token 1000000, but the model's vocab_size is "
    )
    assert message.startswith(says)


def test_a_sample_that_is_cut_off(tmp_path: Path) -> None:
    data = Path(documents(tmp_path / "data.jsonl"))
    data.write_text(data.read_text()[:-30])
    error = fails(tmp_path / "out", RUN.replace(data={"name": str(data)}))["error"]
    assert re.match(rf"data='{data}', line \d+, is not JSON: ", error["message"])


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[bool]:
    """A disk of its own at `folder`; False where it cannot be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path, expected: list[float]) -> None:
    """A training state that does not fit is the error, and the same command finishes once there is room. Where no disk
    can be mounted, files may not grow beyond the limit."""
    with small_disk(tmp_path / "disk", "300k") as mounted:
        out, before = tmp_path / "disk" / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        try:
            error = fails(out)["error"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert ("No space left on device" if mounted else "File too large") in error["message"]
        assert not list(out.glob("state*")), "what was written of a state is gone"
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=200m", str(tmp_path / "disk")], check=True)
        finishes(out, expected)


def test_a_read_only_folder(tmp_path: Path) -> None:
    """Nothing is started; a result that is there can be read."""
    with small_disk(tmp_path / "disk", "1m") as mounted:
        if not mounted:
            pytest.skip("needs the right to mount a disk: files' permissions do not bind root")
        out = tmp_path / "disk" / "out"
        out.mkdir()
        results.write_result(out / "result.json", results.new_result(RUN, "error", error={"type": "Earlier"}))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        with pytest.raises(ValueError, match=r"cannot be written to \(Read-only file system\); name another folder"):
            start(out)
        assert status.look_at(out).rows[0].what == "Earlier"
        assert locks.holder(out) is None


@pytest.fixture(scope="module")
def with_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed after the state of step 2 was saved."""
    out = tmp_path_factory.mktemp("state") / "out"
    fails(out, fault="kill")
    return out


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_state_file(tmp_path: Path, with_state: Path, expected: list[float], damage: str) -> None:
    """It is named, and nothing is trained from it; `resume='never'` begins anew and keeps it."""
    out = tmp_path / "out"
    shutil.copytree(with_state, out)
    file = max(max((out / "state").iterdir()).iterdir(), key=lambda path: path.stat().st_size)  # of the newest
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    message = fails(out)["error"]["message"]
    assert str(file) in message
    assert "damaged" in message
    if damage == "flipped":
        finishes(out, expected, RUN.replace(output={"resume": "never"}))
        assert not continued(out)


def test_three_sweeps_at_once(tmp_path: Path) -> None:
    """Each in its folder: they share the machine, and no port, lock or file."""
    runs = [Chain(tmp_path / str(i)) for i in range(3)]
    for i, run in enumerate(runs):
        (run.folder / "spec.yaml").write_text(yaml.safe_dump({**SPEC, "name": f"sweep{i}"}))
    losses: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda i=i: losses.update({i: runs[i].finish()})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 3
    for i in (1, 2):
        assert losses[i] == pytest.approx(losses[0], abs=TOLERANCE)
