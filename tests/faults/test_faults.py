"""What can go wrong in a run, one fault at a time: it ends, says what it was and where, and leaves nothing behind."""

import os
import resource
import sys
from pathlib import Path

import pytest
from cases import living, run_with
from kills import TOLERANCE

from alstlib.runs import launch, results, status
from alstlib.runs.workers import ABLATION

HERE = Path(__file__).parent
RUN = run_with(
    "{model: {name: tiny, liger: false}, engine: {world_size: 2, sp: 2}, data.seq_len: 64, optim.steps: 4, "
    "output.checkpoint_every: 1}", {},
)  # fmt: skip
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def start(out, run=RUN, fault=""):
    extra = {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), str(HERE))), "FAULT": fault, "OMP_NUM_THREADS": "1"}
    try:
        return launch.launch(run, out, worker="faulty" if fault else ABLATION, extra_env=extra)
    finally:
        for attempt in (out / "logs").glob("*"):
            assert not living(attempt.name)


def fails(out, run=RUN, fault=""):
    """The result of a run that must not finish, which `result.json` and `alst status` tell too."""
    with pytest.raises(launch.RunFailed) as raised:
        start(out, run, fault)
    result = results.read_result(out / "result.json")
    assert result == raised.value.result
    row = status.look_at(out).rows[0]
    assert row.status == result["status"]
    assert row.what == results.why(result).splitlines()[0]
    return result


def finishes(out, expected, run=RUN):
    """The same command goes on after step 2, with the losses of the run that nobody disturbed."""
    result = start(out, run)
    assert result["status"] == "ok"
    assert result["metrics"]["loss"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    losses = start(tmp_path_factory.mktemp("undisturbed"))["metrics"]["loss"]
    assert len(losses) == RUN.optim.steps
    return losses


def continued(out):
    return "continued after step 2" in str(results.read_result(out / "result.json")["metrics"]["notes"])


def test_memory_runs_out_on_a_rank(tmp_path):
    """It is a result about the configuration, and that of the rank."""
    result = start(tmp_path, fault="oom")
    assert (result["status"], result["error"]["rank"]) == ("oom", 1)
    assert "on rank 1: " in results.why(result)
    assert start(tmp_path) == result, "it is not repeated"


def test_a_weight_that_is_not_a_number_on_a_rank(tmp_path, expected):
    error = fails(tmp_path, fault="nan")["error"]
    assert error["type"] == "FloatingPointError"
    assert error["message"].startswith("step 3 at 64 tokens: its ")
    finishes(tmp_path, expected)
    assert continued(tmp_path)


def test_a_full_disk(tmp_path, expected):
    """A training state that does not fit is the error, and the same command finishes once there is room. Files that may
    not grow beyond a limit stand for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        error = fails(tmp_path)["error"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in error["message"]
    assert not list(tmp_path.glob("state*")), "what was written of a state is gone"
    finishes(tmp_path, expected)


def test_a_damaged_state_file(tmp_path, expected):
    """It is named, and nothing is trained from it; `resume='never'` begins anew and keeps it."""
    fails(out := tmp_path / "out", fault="kill")
    file = max(max((out / "state").iterdir()).iterdir(), key=lambda path: path.stat().st_size)  # of the newest
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    message = fails(out)["error"]["message"]
    assert str(file) in message
    assert "damaged" in message
    finishes(out, expected, RUN.replace(output={"resume": "never"}))
    assert not continued(out)
