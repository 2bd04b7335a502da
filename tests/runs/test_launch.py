"""The launcher, with real torchrun and a worker that imports nothing: how runs end, and that nothing stays behind."""

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import yaml
from cases import check_refused, lines_of, living, make_file, reads_proc, run_with, values_of, wait_for

from alstlib.base.config import RunConfig
from alstlib.planner import devices
from alstlib.runs import launch, locks, processes, progress, results, torchrun, workers
from alstlib.runs.cluster import JOB_END_VARIABLE, MARGIN_SECONDS
from alstlib.runs.progress import ProgressReader

TESTS = Path(__file__).parent
NOTEBOOK = TESTS.parents[1] / "notebooks/run.ipynb"
PATHS = {"PYTHONPATH": os.pathsep.join((str(TESTS.parents[1]), str(TESTS)))}


def result_of(out):
    return results.read_result(out / "result.json")


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(devices, "device_count", lambda: count)


def papermill(output, *options):
    """The command that runs the notebook `run`."""
    return [sys.executable, "-m", "papermill", str(NOTEBOOK), str(output), *options]


def fake(what, **fields):
    """Fields by their own names, such as `timeout=40`."""
    return run_with("timeout: 200", {"model.config": {"fake": what}, **fields})


def start(what, out, on_progress=None, **fields):
    return launch.launch(fake(what, **fields), out, worker="fake_worker", extra_env=PATHS, on_progress=on_progress)


def processes_of(out):
    """Every other living process that names the folder `out`, or is of an attempt in it: papermill, agent and ranks."""
    lines = {p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    named = {pid: line for pid, line in lines.items() if str(out) in line and pid != os.getpid()}
    for attempt in out.glob("**/logs/*"):
        named |= living(attempt.name)
    return named


@contextlib.contextmanager
def hanging(folder, commands):
    """Programs by their names, each of which starts two ranks that hang in a folder of that name, when all of them do.
    They end then, and leave nothing; or it fails, and what is left is killed."""
    quiet = {"env": {**os.environ, **PATHS}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    runs = {name: subprocess.Popen(command, **quiet) for name, command in commands.items()}
    try:
        assert wait_for(lambda: len(list(folder.glob("*/started.[01]"))) == 2 * len(runs))
        yield runs
        for name, run in runs.items():
            assert run.wait(200) != 0, name
            assert wait_for(lambda out=folder / name: not processes_of(out)), name
    finally:
        for run in runs.values():
            run.kill()
            run.wait()
        for pid in processes_of(folder):
            os.kill(pid, signal.SIGKILL)


def in_thread(what, out, **fields):
    """Launch in a thread: a future."""
    return ThreadPoolExecutor(1).submit(start, what, out, **fields)


def later(seconds):
    """The module `time` with clocks that are ahead: a limit is reached without the wait for it."""
    return mock.Mock(wraps=time, time=lambda: time.time() + seconds, monotonic=lambda: time.monotonic() + seconds)


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
    """Ranks other than the first write no progress."""
    out, result, events = finished_run
    assert result["status"] == "ok"
    assert result == result_of(out)
    assert json.loads((out / "config.json").read_text()) == result["config"]
    assert [(e["event"], e.get("status"), e.get("loss")) for e in events] == [
        ("start", None, None), ("step", None, None), ("step", None, 2.5), ("end", "ok", None),
    ]  # fmt: skip
    assert not processes_of(out)


def test_ranks_get_a_clean_environment(finished_run):
    out, result, _ = finished_run
    world = result["config"]["engine"]["world_size"]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    want = {"WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    want["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world))
    want |= {} if devices.device_count() else {"DS_ACCELERATOR": "cpu"}
    for rank in range(world):
        env = json.loads((out / f"environ.{rank}.json").read_text())
        assert env.items() >= {**want, "RANK": str(rank)}.items()
        assert not {"1", "x"} & {env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]}
        assert not {"PET_NNODES", "MPLBACKEND"} & env.keys()
        assert env["ALST_RUN_ID"].startswith(result["run_id"])


def test_a_finished_run_is_not_run_again(finished_run, monkeypatch):
    out, result, _ = finished_run
    monkeypatch.setattr(torchrun, "start", lambda *a: pytest.fail("torchrun was started"))
    assert start("environ", out) == result
    assert launch.finished(fake("environ", seq_len=4096), out) is None
    monkeypatch.setattr(results, "git_facts", lambda: {"sha": "another", "dirty": False})
    assert launch.finished(fake("environ"), out) is None


def test_out_of_memory_is_a_result(tmp_path):
    result = start("oom", tmp_path)
    assert (result["status"], result["error"]["message"]) == ("oom", "too long")
    assert launch.finished(fake("oom"), tmp_path) == result


FAILS = """
fail         -> rank 1 ended with exit status 1: RuntimeError: rank one is broken
ok_then_fail -> rank 1
silent       -> without writing result.json
"""


@pytest.mark.parametrize("what, says", lines_of(FAILS))
def test_a_run_that_ends_with_an_error(tmp_path, what, says):
    """One that fails after its result keeps the metrics and gets the logs; and an `ok` that an earlier run left is not
    taken for that of a worker which wrote none."""
    if what == "silent":
        results.write_result(tmp_path / "result.json", results.new_result(fake("other"), "ok"))
    with pytest.raises(launch.RunFailed, match=says) as e:
        start(what, tmp_path)
    result = result_of(tmp_path)
    assert result == e.value.result
    assert (result["status"], result["run_id"]) == ("error", results.run_id(launch.resolve(fake(what))))
    assert result["metrics"].get("step_seconds") == ([3.0, 1.0, 2.0] if what == "ok_then_fail" else None)
    assert f"rank 0 says: {what}" in result["error"]["log_tail"]
    assert not processes_of(tmp_path)


@pytest.mark.slow
@reads_proc
def test_a_rank_that_is_stopped_ends_the_run_within_the_limit_and_is_named(tmp_path, monkeypatch):
    seen = []
    run = in_thread("stopped", tmp_path, on_progress=seen.append, timeout=None, step_timeout=300)
    assert wait_for(lambda: [e.get("step") for e in seen][-1:] == [2])
    assert wait_for(lambda: psutil.STATUS_STOPPED in [psutil.Process(pid).status() for pid in processes_of(tmp_path)])
    monkeypatch.setattr(launch, "time", later(300))
    began, ended = time.monotonic(), run.exception(200)
    assert time.monotonic() - began < processes.GRACE_SECONDS, "SIGTERM waits for SIGCONT"
    assert "Stalled: no step ended for limits.step_timeout=300 s: the last step was 2 of" in str(ended)
    message = ended.result["error"]["message"]
    assert "; rank 0: in main (fake_worker.py, " in message
    assert "; rank 1: gave no answer (stopped, " in message
    assert not processes_of(tmp_path)


def agent_in(out):
    """The process of the agent of the run in `out`."""
    return next(pid for pid, line in processes_of(out).items() if torchrun.AGENT in line)


@pytest.mark.slow
def test_signals_to_papermill_leave_nothing_behind(tmp_path):
    """SIGINT and SIGKILL of papermill, and SIGKILL of kernel and torchrun, at once in three runs that hang."""
    hangs = ("-p", "worker", "fake_worker", "-y", "config: {model.config: {fake: hang}}")
    outs = {name: tmp_path / name for name in ("SIGINT", "SIGKILL", "both")}
    commands = {name: papermill(f"{out}.ipynb", "-p", "out", str(out), *hangs) for name, out in outs.items()}
    with hanging(tmp_path, commands) as runs:
        agent = agent_in(outs["both"])
        kernel = psutil.Process(agent).ppid()
        os.kill(agent, signal.SIGSTOP)  # or it would end its ranks before it is killed
        for pid in (kernel, agent):
            os.kill(pid, signal.SIGKILL)
        for name in ("SIGINT", "SIGKILL"):
            runs[name].send_signal(signal.Signals[name])
    for name in ("SIGKILL", "both"):  # nothing was left that could say so
        assert launch.finished(fake("hang", timeout=None), outs[name]) is None
    assert result_of(outs["SIGINT"])["status"] == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_that_is_ended_from_outside(tmp_path, number):
    """Also where a rank that loses the other still writes an error."""
    run = in_thread("hang" if number == signal.SIGKILL else "hang_then_explain", tmp_path)
    assert wait_for((tmp_path / "started.1").exists)
    os.kill(agent_in(tmp_path), number)
    result = run.exception(200).result
    said = result["error"]["message"]
    assert (result["status"], said) == ("cancelled", f"torchrun was ended by signal {int(number)}")
    assert not processes_of(tmp_path)


def test_the_notebook_refuses_unknown_names_in_two_lines(tmp_path):
    project = tomllib.loads((TESTS.parents[1] / "pyproject.toml").read_text())["project"]
    (installed := tmp_path / "as_installed-0.dist-info").mkdir()  # whatever this environment was made from
    ((name, where),) = project["entry-points"]["papermill.engine"].items()
    (installed / "entry_points.txt").write_text(f"[papermill.engine]\n{name} = {where}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PATHS['PYTHONPATH']}"}
    options = shlex.split(f"--no-progress-bar --log-level ERROR -p out {tmp_path}/run -p seq_length 4096")
    ran = subprocess.run(papermill(tmp_path / "o.ipynb", *options), env=env, capture_output=True, text=True)
    assert ran.returncode != 0
    noise = "IPKernelApp"  # which env/jupyter turns off
    *more, where, what = [line for line in ran.stderr.splitlines() if line and noise not in line]
    assert where == "papermill: cell [4] failed; the output notebook has its traceback"
    assert what.startswith("ValueError: unknown parameter 'seq_length'; did you mean 'data.seq_len'?")
    assert len(more) <= 3, ran.stderr
    assert "Traceback" in (tmp_path / "o.ipynb").read_text()
    assert not (tmp_path / "run").exists()


def test_stopping_sweeps_processes_that_left_the_agent():
    """A process in a session of its own that ignores SIGTERM, as a rank may; a namesake run is left alone."""
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    how = {"start_new_session": True, "stdout": subprocess.PIPE}
    one, other = (
        subprocess.Popen([sys.executable, "-c", ignore], env={**os.environ, "ALST_RUN_ID": run}, **how)
        for run in ("run-1", "run-11")
    )
    try:
        for stray in (one, other):
            stray.stdout.readline()
        assert list(living("run-1")) == [one.pid]
        processes.stop(None, "run-1")
        assert one.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for stray in (one, other):
            stray.kill()
            stray.communicate()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to stand for a full disk")
def test_progress_that_a_full_disk_does_not_take_is_dropped_with_a_warning():
    with pytest.warns(UserWarning, match="progress is not recorded"):
        progress.Progress("/dev/full").emit("step", step=1)


RESOLVED = """
{sp: 0}         -> 0 -> 1 -> [2, 2]
{sp: 0}         -> 8 -> 4 -> [32, 32]
{sp: 3}         -> 0 -> 1 -> "engine.sp=3 does not divide world_size=2: use sp=2, or world_size=3"
{world_size: 3} -> 0 -> 2 -> "world_size=3 ranks do not divide evenly over 2 nodes with no GPUs each; nearest: 4"
{world_size: 9} -> 8 -> 1 -> "world_size=9 ranks do not divide evenly over 1 nodes with 8 GPUs each; nearest: 8"
"""


@pytest.mark.parametrize("engine, gpus, nodes, found", values_of(RESOLVED))
def test_resolve(monkeypatch, engine, gpus, nodes, found):
    with_gpus(monkeypatch, gpus)
    run = RunConfig(engine=engine)
    if isinstance(found, str):
        check_refused(found, launch.resolve, run, nodes)
    else:
        resolved = launch.resolve(run, nodes).engine
        assert [resolved.world_size, resolved.sp] == found


VISIBLE = """
null     -> 4
''       -> 0
'0,2'    -> 2
'1,-1,2' -> 1
GPU-a    -> 1
"""


@pytest.mark.parametrize("visible, count", values_of(VISIBLE))
def test_visible_devices(monkeypatch, visible, count):
    monkeypatch.setattr(devices, "_installed_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for version, found in (("2.13.0", count), ("2.13.0+cpu", 0)):
        monkeypatch.setattr(devices, "torch_version", lambda version=version: version)
        assert devices.device_count() == found


def test_cuda_environment(monkeypatch):
    """Pinned memory is as large as what is asked for where PyTorch's version can do that, or the user says so."""
    with_gpus(monkeypatch, 8)
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in (*names, "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    grows, own, exact = "expandable_segments:True", "max_split_size_mb:64", devices.EXACT
    for version, given, setting in (
        ("2.12.0", "", grows), ("2.13.1", "", f"{grows},{exact}"), ("2.13.1", own, own),
        ("2.13.1", f"{own},{exact}", f"{own},{exact}"),
    ):  # fmt: skip
        monkeypatch.setattr(devices, "torch_version", lambda version=version: version)
        if given:
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
        env = torchrun.environment("r", 8, {"OMP_NUM_THREADS": "3"})
        assert [env.get(name) for name in names] == [None if given else setting, setting]
        assert devices.pins_exactly() == (exact in setting)
        assert env["OMP_NUM_THREADS"] == "3"
        assert "DS_ACCELERATOR" not in env


def test_torch_knows_the_settings_that_its_version_is_said_to_know():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    named = [setting.partition("_mb:")[0] for setting in devices.EXACT.split(",")]
    assert {name in header.read_text() for name in named} == {devices.pins_exactly()}


def test_reader_returns_whole_lines_once(tmp_path):
    path = tmp_path / "progress.jsonl"
    reader = ProgressReader(path)
    assert reader.read() == []
    for mode, text, events in (
        ("w", '{"a": 1}\n{"a": 2', [{"a": 1}]), ("a", "", []), ("a", '}\nnot json\n{"a": 3}\n', [{"a": 2}, {"a": 3}]),
        ("w", '{"b": 1}\n', [{"b": 1}]),
    ):  # fmt: skip
        with open(path, mode) as file:
            file.write(text)
        assert reader.read() == events


def test_one_line_says_it_all():
    event = {"row": "alst", "seq_len": 3072, "step": 1, "steps": 3, "tokens_per_second": 1234.5, "loss": 2.25}
    line = progress.describe({**event, "eta_seconds": 75, "message": "searching"})
    assert line == "length 3,072  step 1/3  1,234 tokens/s  loss 2.2500  searching  0:01:15 left"


def test_log_tail_fits_and_starts_with_the_first_traceback(tmp_path):
    for rank, text in enumerate(("x" * 5000, "y" * 5000 + "\nTraceback (most recent call last):\nBoom", "")):
        make_file(tmp_path / f"id/attempt_0/{rank}/stderr.log", text)
    tail = progress.log_tail(tmp_path)
    assert tail.startswith("--- id/attempt_0/1/stderr.log ---\n")
    assert [part in tail for part in ("Boom", "attempt_0/0", "attempt_0/2")] == [True, True, False]
    assert 2500 < len(tail) <= 4000


REFUSED = """
model.name: tinny     -> built-in shapes: tiny,
model.name: ./lama    -> does not exist
model.lora: {r: 4}    -> model.lora=.* is a field of the worker alstlib.runs.train.finetune
data.eval: 0.1        -> data.eval=.* is a field of the worker alstlib.runs.train.finetune
optim.trainer: {a: 1} -> optim.trainer=.* is a field of the worker alstlib.runs.train.finetune
engine.world_size: 18 -> engine.world_size=18 would .* a machine with 2 cores; give at most 16
{engine.offload_params: nvme, engine.nvme_path: x, output.checkpoint_every: 5} -> needs offload_optimizer='nvme' too
"""
"""A typing error would start 100,000 processes; states of weights on a disk need the optimizer there."""


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("fields, says", lines_of(REFUSED))
def test_runs_that_are_refused_before_the_start(tmp_path, monkeypatch, fields, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(workers, "cores", lambda: 2)
    check_refused(says, launch.launch, RunConfig.from_dict(yaml.safe_load(fields)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ranks_that_cores_or_gpus_suffice_for(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 2)
    workers.check_ranks(16, 1, 0)
    workers.check_ranks(100_000, 1, 100_000)


@pytest.mark.parametrize(
    "timeout, job, seconds",
    [(None, 0, 86400), (0, 0, math.inf), (None, 1000, 1000 - MARGIN_SECONDS), (300, 1000, 300)],
)
def test_ranks_are_told_the_time_limit(tmp_path, monkeypatch, timeout, job, seconds):
    """That of the run, or the end of its job."""
    start = mock.Mock(side_effect=OSError("not now"))
    monkeypatch.setattr(torchrun, "start", start)
    if job:
        monkeypatch.setenv(JOB_END_VARIABLE, str(time.time() + job))
    with pytest.raises(OSError, match="not now"):
        launch.launch(RunConfig(limits={"timeout": timeout}), tmp_path)
    attempt = torchrun.Attempt(**locks.read_object(Path(start.call_args.args[0][-1])))
    deadline = float(attempt.environment()["ALST_DEADLINE"])
    assert deadline == pytest.approx(time.time() + seconds, abs=60)
    told = ProgressReader(tmp_path / "progress.jsonl").read()[0]["message"]
    assert ("no time limit" in told) == (timeout == 0)


@pytest.mark.parametrize("what, status", [("shrink", "ok"), ("stuck", "oom")])
@pytest.mark.slow
def test_a_search_goes_on_in_a_new_process_where_memory_ran_out(tmp_path, what, status):
    result = start(what, tmp_path, world_size=1, search=True)
    assert result["status"] == status
    assert sum(e.get("peak") == 100 for e in ProgressReader(tmp_path / "progress.jsonl").read()) == 2
    assert len(list((tmp_path / "logs").iterdir())) == 2
