"""The launcher, with real torchrun and a worker that imports nothing: how runs end, and that nothing stays behind."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

import pytest
import torch
from cases import READS_PROC, by_own_names, wait_for

from alstlib.config import PAPER_ROWS, RunConfig, row_config
from alstlib.planner import devices, preflight
from alstlib.runs import launch, processes, progress, results, torchrun
from alstlib.runs.cluster import JOB_END_VARIABLE, MARGIN_SECONDS
from alstlib.runs.progress import ProgressReader

TESTS = Path(__file__).parent
NOTEBOOK = TESTS.parents[1] / "notebooks" / "run.ipynb"
PATHS = {"PYTHONPATH": os.pathsep.join((str(TESTS.parents[1]), str(TESTS)))}


def fake(what: str, **fields) -> RunConfig:
    """Fields by their own names, such as `timeout=40`."""
    return RunConfig.from_dict({"model.config": {"fake": what}, **by_own_names(fields)})


def start(what: str, out: Path, on_progress=None, **fields):
    config = fake(what, **{"timeout": 200, **fields})
    return launch.launch(config, out, worker="fake_worker", extra_env=PATHS, on_progress=on_progress)


def processes_of(out: Path) -> dict[int, str]:
    """Every other living process that names the folder `out`: papermill, the agent and its ranks."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(out) in line and int(pid) != os.getpid():
            found[int(pid)] = line
    return found


def in_thread(what: str, out: Path, **fields) -> list[launch.RunFailed]:
    """Launch in a thread; the list gets what was raised."""
    raised: list[launch.RunFailed] = []

    def run():
        try:
            start(what, out, **fields)
        except launch.RunFailed as e:
            raised.append(e)

    threading.Thread(target=run, daemon=True).start()
    return raised


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """One run that ends well, with what another launcher would have left in the environment."""
    out, events = tmp_path_factory.mktemp("launch") / "environ", []
    left = "RANK=7 WORLD_SIZE=9 MASTER_PORT=1 TORCHELASTIC_RUN_ID=x PET_NNODES=4 MPLBACKEND=? GLOO_SOCKET_IFNAME=eth7"
    with pytest.MonkeyPatch.context() as patch:
        for setting in left.split():
            patch.setenv(*setting.split("="))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        result = start("environ", out, on_progress=events.append)
    return out, result, events


def test_a_run_that_ends_well(finished_run):
    out, result, events = finished_run
    assert result["status"] == "ok"
    assert result == results.read_result(out / "result.json")
    config = json.loads((out / "config.json").read_text())
    assert (config["engine"]["world_size"], config["engine"]["sp"]) == (result["config"]["engine"]["world_size"], 1)
    assert config["engine"]["world_size"] > 0
    assert [e["event"] for e in events] == ["start", "step", "step", "end"]
    assert events[-1]["status"] == "ok"
    assert events[1]["loss"] is None
    assert events[2]["loss"] == 2.5
    assert events[0]["time"] > 0
    assert not processes_of(out)


def test_ranks_get_a_clean_environment(finished_run):
    out, result, _ = finished_run
    ranks = [
        json.loads((out / f"environ.{r}.json").read_text()) for r in range(result["config"]["engine"]["world_size"])
    ]
    assert [e["RANK"] for e in ranks] == [str(r) for r in range(len(ranks))]
    for env in ranks:
        assert env["WORLD_SIZE"] == str(len(ranks))
        assert env["MASTER_PORT"] != "1"
        assert env["TORCHELASTIC_RUN_ID"] != "x"
        assert "PET_NNODES" not in env
        assert "MPLBACKEND" not in env
        assert Path(env["TMPDIR"]).parent == Path(tempfile.gettempdir())
        assert not Path(env["TMPDIR"]).exists(), "ranks leave files there"
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")
        assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // len(ranks))
        assert env["ALST_RUN_ID"].startswith(result["run_id"])
        if not devices.device_count():
            assert env["DS_ACCELERATOR"] == "cpu"


def test_a_finished_run_is_not_run_again(finished_run, monkeypatch):
    out, result, _ = finished_run
    monkeypatch.setattr(torchrun, "start", lambda *a: pytest.fail("torchrun was started"))
    assert start("environ", out) == result
    assert launch.finished(fake("environ", timeout=200), out) == result
    assert launch.finished(fake("environ", timeout=200, seq_len=4096), out) is None
    monkeypatch.setattr(results, "git_state", lambda: {"sha": "another", "dirty": False})
    assert launch.finished(fake("environ", timeout=200), out) is None


def test_a_failing_rank(tmp_path):
    """The result of an earlier run does not count, and the log tail opens with the rank that failed."""
    results.write_result(tmp_path / "result.json", results.new_result(fake("other"), "oom"))
    with pytest.raises(
        launch.RunFailed, match="rank 1 ended with exit status 1: RuntimeError: rank one is broken"
    ) as e:
        start("fail", tmp_path)
    result = results.read_result(tmp_path / "result.json")
    assert result == e.value.result
    assert result["status"] == "error"
    assert result["run_id"] == results.run_id(launch.resolve(fake("fail", timeout=200)))
    assert result["error"]["log_tail"].startswith("--- rank 1, stderr ---")
    assert len(result["error"]["log_tail"]) <= 4000
    assert not processes_of(tmp_path)


def test_out_of_memory_is_a_result(tmp_path):
    result = start("oom", tmp_path)
    assert result["status"] == "oom"
    assert result["error"]["message"] == "too long"
    assert launch.finished(fake("oom", timeout=200), tmp_path) == result


@pytest.mark.parametrize(
    "what, says", [("explained", "error: Explained: too long"), ("ok_then_fail", "rank 1"), ("silent", "without")]
)
def test_a_run_that_ends_with_an_error(tmp_path, what, says):
    """One that the worker explains gets the logs; one after the result keeps its metrics; and an `ok` that an earlier
    run left is not taken for that of a worker which wrote none."""
    if what == "silent":
        results.write_result(tmp_path / "result.json", results.new_result(fake("other"), "ok"))
    with pytest.raises(launch.RunFailed, match=says):
        start(what, tmp_path)
    result = results.read_result(tmp_path / "result.json")
    assert result["status"] == "error"
    if what == "silent":
        assert "without writing result.json" in result["error"]["message"]
        return
    assert result["metrics"]["step_seconds"] == [3.0, 1.0, 2.0]
    assert f"rank 0 says: {what}" in result["error"]["log_tail"]


@pytest.mark.skipif(not READS_PROC, reason="reads /proc")
def test_a_rank_that_is_killed_is_the_one_that_is_named(tmp_path):
    """And not the rank that lost it, whose error the result had."""
    with pytest.raises(launch.RunFailed, match=r"RankKilled: rank 1 was ended by SIGKILL \(as the kernel does when"):
        start("killed", tmp_path)
    error = results.read_result(tmp_path / "result.json")["error"]
    assert error["message"].endswith("; after that, Explained: the other rank is gone")
    assert "rank 0 says: killed" in error["log_tail"]


@pytest.mark.slow
@pytest.mark.skipif(not READS_PROC, reason="reads /proc")
def test_a_rank_that_is_stopped_ends_the_run_within_the_limit_and_is_named(tmp_path):
    with pytest.raises(
        launch.RunFailed, match=r"Stalled: no step ended for limits\.step_timeout=30 s: the last step was 2 of"
    ):
        start("stopped", tmp_path, timeout=None, step_timeout=30)
    events = launch.ProgressReader(tmp_path / "progress.jsonl").read()
    *_, last = (e["time"] for e in events if e["event"] == "step")
    ended = (tmp_path / "result.json").stat().st_mtime
    assert ended - last < 30 + processes.GRACE_SECONDS, "SIGTERM waits for SIGCONT"
    message = results.read_result(tmp_path / "result.json")["error"]["message"]
    assert "; rank 1: stopped (SIGSTOP, or a debugger); rank 0: in " in message
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_timeout_and_one_run_a_folder(tmp_path):
    raised = in_thread("hang", tmp_path, timeout=30)
    assert wait_for((tmp_path / "started.1").exists)
    with pytest.raises(ValueError, match="in use by another run"):
        start("ok", tmp_path)
    assert len(processes_of(tmp_path)) >= 3
    assert wait_for(lambda: raised)
    assert raised[0].result["status"] == "timeout"
    message = raised[0].result["error"]["message"]
    assert "limits.timeout=30 s: the last step was 2 of 2; rank 0: in main (fake_worker.py, line " in message
    assert "; rank 1: in main (fake_worker.py, line " in message
    assert results.read_result(tmp_path / "result.json")["status"] == "timeout"
    assert not processes_of(tmp_path)


def pids_of(out: Path, program: str) -> list[int]:
    """Processes of the run in `out` whose command line holds `program`."""
    return [pid for pid, line in processes_of(out).items() if program in line]


@pytest.mark.slow
def test_signals_to_papermill_leave_nothing_behind(tmp_path):
    """SIGINT, SIGTERM and SIGKILL of papermill, and SIGKILL of kernel and torchrun, at once in four runs that hang."""
    runs = {}
    for name in ("SIGINT", "SIGTERM", "SIGKILL", "both"):
        out = tmp_path / name
        command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(tmp_path / f"{name}.ipynb")]
        command += ["-p", "out", str(out), "-p", "worker", "fake_worker", "-y", "config: {model.config: {fake: hang}}"]
        with open(tmp_path / f"{name}.log", "wb") as log:
            runs[name] = subprocess.Popen(command, env={**os.environ, **PATHS}, stdout=log, stderr=log)
    try:
        for name, papermill in runs.items():
            out = tmp_path / name
            assert wait_for(lambda out=out: all((out / f"started.{r}").exists() for r in (0, 1))), name
            assert len(pids_of(out, "fake_worker")) >= 4  # papermill, torchrun, two ranks
            if name == "both":
                (agent,) = pids_of(out, "alstlib.train.agent")
                kernel = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(agent, signal.SIGSTOP)  # or it would end its ranks before it is killed
                os.kill(kernel, signal.SIGKILL)
                os.kill(agent, signal.SIGKILL)
            else:
                papermill.send_signal(signal.Signals[name])
        for name, papermill in runs.items():
            assert papermill.wait(200) != 0, name
            assert wait_for(lambda out=tmp_path / name: not processes_of(out)), processes_of(tmp_path / name)
    finally:
        for papermill in runs.values():
            papermill.kill()
            papermill.wait()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
    assert results.read_result(tmp_path / "SIGINT" / "result.json")["status"] == "cancelled"
    for name in ("SIGTERM", "SIGKILL", "both"):  # nothing was left that could say so
        assert launch.finished(fake("hang"), tmp_path / name) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_that_is_ended_from_outside(tmp_path, number):
    """Also where a rank that loses the other still writes an error."""
    raised = in_thread("hang" if number == signal.SIGKILL else "hang_then_explain", tmp_path)
    assert wait_for((tmp_path / "started.1").exists)
    os.kill(pids_of(tmp_path, "alstlib.train.agent")[0], number)
    assert wait_for(lambda: raised)
    assert raised[0].result["status"] == "cancelled"
    assert raised[0].result["error"]["message"] == f"torchrun was ended by signal {int(number)}"
    assert results.read_result(tmp_path / "result.json")["status"] == "cancelled"
    assert not processes_of(tmp_path)


def test_the_notebook_refuses_unknown_names_in_two_lines(tmp_path):
    project = tomllib.loads((TESTS.parents[1] / "pyproject.toml").read_text())["project"]
    engines = project["entry-points"]["papermill.engine"]
    installed = tmp_path / "as_installed-0.dist-info"  # whatever pyproject.toml this environment was made from
    installed.mkdir()
    lines = "".join(f"{name} = {where}\n" for name, where in engines.items())
    (installed / "entry_points.txt").write_text(f"[papermill.engine]\n{lines}")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PATHS['PYTHONPATH']}"}
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(tmp_path / "o.ipynb"), "--no-progress-bar"]
    command += ["-p", "out", str(tmp_path / "run"), "--log-level", "ERROR", "-p", "seq_length", "4096"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode != 0
    noise = "IPKernelApp"  # which env/jupyter turns off
    *_, where, what = [line for line in ran.stderr.splitlines() if line and noise not in line]
    assert where == "papermill: cell [4] failed; the output notebook has its traceback"
    assert what.startswith("ValueError: unknown parameter 'seq_length'; did you mean 'data.seq_len'?")
    assert len(ran.stderr.splitlines()) <= 5, ran.stderr
    assert "Traceback" in (tmp_path / "o.ipynb").read_text()
    assert not (tmp_path / "run").exists()


def test_stopping_sweeps_processes_that_left_the_agent(tmp_path):
    """A process in a session of its own that ignores SIGTERM, as a rank may; a namesake run is left alone."""
    ignore = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )

    def stray(run):
        env = {**os.environ, "ALST_RUN_ID": run}
        child = subprocess.Popen(
            [sys.executable, "-c", ignore], env=env, start_new_session=True, stdout=subprocess.PIPE
        )
        child.stdout.readline()
        return child

    ours, other = stray("run-1"), stray("run-11")
    try:
        assert list(processes.processes("run-1")) == [ours.pid]
        processes.stop(None, "run-1")
        assert ours.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for child in (ours, other):
            child.kill()
            child.wait()
            child.stdout.close()


def test_full_disk(tmp_path, monkeypatch, capsys):
    """Before the run: refused, the old result intact. Progress: dropped with a warning."""
    results.write_result(tmp_path / "result.json", results.new_result(fake("other"), "ok"))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(torchrun, "start", lambda *a: pytest.fail("torchrun was started"))
        with pytest.raises(OSError, match=r"config\.json: No space left on device"):
            start("ok", tmp_path)
    assert results.read_result(tmp_path / "result.json")["status"] == "ok"
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full to stand for a full disk")
    writer = launch.Progress("/dev/full")
    with pytest.warns(UserWarning, match="progress is not recorded"):
        writer.emit("step", step=1)


def test_resolve(monkeypatch):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    resolved = launch.resolve(RunConfig(engine={"sp": 0}))
    assert (resolved.engine.world_size, resolved.engine.sp) == (2, 2)
    with pytest.raises(
        ValueError, match=r"engine.sp=3 does not divide engine.world_size=2; use engine.sp=2, or engine.world_size=3"
    ):
        launch.resolve(RunConfig(engine={"sp": 3}))
    with pytest.raises(ValueError, match=r"world_size=3 ranks do not divide evenly over 2 nodes; nearest: 4"):
        launch.resolve(RunConfig(engine={"world_size": 3}), nnodes=2)
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    assert launch.resolve(RunConfig(engine={"sp": 0}), nnodes=4).engine.sp == 32
    with pytest.raises(ValueError, match=r"world_size=9 needs more GPUs than there are \(8 on each node\)"):
        launch.resolve(RunConfig(engine={"world_size": 9}))


@pytest.mark.parametrize("visible, count", [(None, 4), ("", 0), ("0,2", 2), ("1,-1,2", 1), ("GPU-a", 1)])
def test_visible_devices(monkeypatch, visible, count):
    monkeypatch.setattr(devices, "_installed_gpus", lambda: 4)
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.device_count() == count
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert devices.device_count() == 0


def test_cuda_environment(monkeypatch):
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    for version, settings in (
        ("2.13.1", f"expandable_segments:True,{devices.EXACT}"),
        ("2.12.0", "expandable_segments:True"),
    ):
        monkeypatch.setattr(devices.importlib.metadata, "version", lambda name, version=version: version)
        env = torchrun.environment("r", 8)
        assert env["PYTORCH_CUDA_ALLOC_CONF"] == env["PYTORCH_ALLOC_CONF"] == settings
        assert devices.pins_exactly() == (version == "2.13.1")
    assert "DS_ACCELERATOR" not in env
    own = torchrun.environment("r", 8, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "3"})
    assert own["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in own
    assert own["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.13.1")
    for given, exact in (("max_split_size_mb:64", False), (f"max_split_size_mb:64,{devices.EXACT}", True)):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
        assert devices.pins_exactly() == exact


def test_torch_knows_the_settings_that_its_version_is_said_to_know():
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    named = [setting.partition("_mb:")[0] for setting in devices.EXACT.split(",")]
    assert {name in header.read_text() for name in named} == {devices.pins_exactly()}


def test_reader_returns_whole_lines_once(tmp_path):
    path = tmp_path / "progress.jsonl"
    reader = launch.ProgressReader(path)
    assert reader.read() == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert reader.read() == [{"a": 1}]
    assert reader.read() == []
    with open(path, "a") as file:
        file.write('}\nnot json\n{"a": 3}\n')
    assert reader.read() == [{"a": 2}, {"a": 3}]
    path.write_text('{"b": 1}\n')
    assert reader.read() == [{"b": 1}]


def test_only_rank_0_writes(tmp_path):
    launch.Progress(tmp_path / "p", rank=1).emit("step")
    assert not (tmp_path / "p").exists()


def test_a_callback_that_fails_is_dropped(tmp_path):
    run = launch._Run(fake("ok"), tmp_path, on_progress=lambda event: 1 / 0)
    launch.Progress(tmp_path / "progress.jsonl").emit("step")
    with pytest.warns(UserWarning, match="on_progress failed"):
        run.follow()
    launch.Progress(tmp_path / "progress.jsonl").emit("step")
    run.follow()


def test_one_line_says_it_all(capsys):
    event = {"event": "step", "row": "alst", "seq_len": 3072, "step": 1, "steps": 3, "tokens_per_second": 1234.5}
    event |= {"loss": 2.25, "eta_seconds": 75, "message": "searching"}
    line = progress.describe(event)
    assert line == "length 3,072  step 1/3  1,234 tokens/s  loss 2.2500  searching  0:01:15 left"
    show = launch.progress_printer()
    for _ in range(1000):
        show(event)
    show({"event": "end", "row": "alst", "status": "ok"})
    assert capsys.readouterr().out.splitlines() == [f"alst  {line}", "alst  ok"]


def test_log_tail_fits_and_starts_with_the_first_traceback(tmp_path):
    for rank, text in enumerate(("x" * 5000, "y" * 5000 + "\nTraceback (most recent call last):\nBoom", "")):
        file = tmp_path / "id" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    tail = progress.log_tail(tmp_path)
    assert tail.startswith("--- rank 1, stderr ---\n")
    assert "Boom" in tail
    assert "rank 0" in tail
    assert "rank 2" not in tail
    assert 2500 < len(tail) <= 4000


def test_a_model_that_is_not_there_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torchrun, "start", lambda *a: pytest.fail("ranks were started"))
    for name, says in (("tinny", "did you mean 'tiny'"), (str(tmp_path / "lama"), "does not exist")):
        with pytest.raises(ValueError, match=says):
            launch.launch(RunConfig(model={"name": name}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_longest_row_of_the_paper_ends_within_its_time_limit(monkeypatch):
    """Its step takes 6,455 s."""
    monkeypatch.setattr("alstlib.planner.devices.first_gpu", lambda: ("NVIDIA H100 80GB HBM3", 80 * 2**30))
    fields = {"model.name": "llama-3.1-8b", "data.seq_len": "3.7M", "optim.steps": 3, "output.checkpoint_every": 1}
    run = launch.resolve(row_config("alst", RunConfig.from_dict(fields)), gpus=8)
    seconds, which = preflight.time_limit(run, 1, 8)
    assert 5 * 3 * PAPER_ROWS["alst"]["step_seconds"] < seconds < 7 * 86400
    assert preflight.limits(run, 1, 8)[1] > 5 * PAPER_ROWS["alst"]["step_seconds"]
    assert "(10 times the prediction; limits.timeout=SECONDS sets another, 0 none)" in which
    assert preflight.time_limit(run.replace(search=True), 1, 8)[0] > 2 * seconds
    short = run.replace(data={"seq_len": 1024}, output={"checkpoint_every": 0})
    assert "the time limit of 1:00:00 (the shortest default" in preflight.time_limit(short, 1, 8)[1]
    for timeout, limit in ((0, (math.inf, "no time limit (limits.timeout=0)")), (300, (300, "limits.timeout=300 s"))):
        assert preflight.time_limit(run.replace(limits={"timeout": timeout}), 1, 8) == limit
    seconds, which = preflight.time_limit(RunConfig(engine={"world_size": 2, "sp": 2}), 1, 0)
    assert seconds == 86400
    assert "24:00:00 (no time is predicted" in which


@pytest.mark.parametrize(
    "timeout, job, seconds",
    [(None, 0, 86400), (0, 0, math.inf), (300, 0, 300), (None, 1000, 1000 - MARGIN_SECONDS),
     (5000, 1000, 1000 - MARGIN_SECONDS), (300, 1000, 300)],
)  # fmt: skip
def test_ranks_are_told_the_time_limit(tmp_path, monkeypatch, timeout, job, seconds):
    """That of the run, or the end of its job."""
    given = []

    def refuse(command, env, log):
        given.append(env)
        raise OSError("not now")

    monkeypatch.setattr(torchrun, "start", refuse)
    if job:
        monkeypatch.setenv(JOB_END_VARIABLE, str(time.time() + job))
    with pytest.raises(OSError, match="not now"):
        launch.launch(RunConfig(limits={"timeout": timeout}), tmp_path)
    deadline = float(given[0]["ALST_DEADLINE"])
    assert deadline == seconds if seconds == math.inf else abs(deadline - time.time() - seconds) < 60
    (told,) = [e for e in ProgressReader(tmp_path / "progress.jsonl").read() if e["event"] == "start"]
    assert ("the time limit is" in told["message"]) == (timeout != 0)


@pytest.mark.parametrize("what, search, status, starts", [
    ("shrink", True, "ok", 2), ("stuck", True, "oom", 2), ("stuck", False, "oom", 1),
])  # fmt: skip
@pytest.mark.slow
def test_a_search_goes_on_in_a_new_process_where_memory_ran_out(tmp_path, what, search, status, starts):
    result = start(what, tmp_path, world_size=1, search=search)
    assert result["status"] == status
    assert sum(e.get("peak") == 100 for e in ProgressReader(tmp_path / "progress.jsonl").read()) == starts
    assert len(list((tmp_path / "logs").iterdir())) == starts
    assert results.read_result(tmp_path / "result.json") == result
