"""`alst`: specs, sweeps through papermill, what is run again and what is refused."""

import contextlib
import html
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from alstlib.config import ROWS, RunConfig
from alstlib.planner import devices
from alstlib.runs import cli, launch, locks, notebooks, processes, progress, results, status, verify, workers

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parents[1]
ABLATION = REPOSITORY / "papermill_runs" / "specs" / "ablation.yaml"


def write_spec(folder: Path, **changes) -> Path:
    rows = [{"name": "good", "model.config": {"fake": "ok"}}, {"name": "bad", "model.config": {"fake": "fail"}}]
    spec = {"name": "sweep", "notebook": "run.ipynb", "rows": rows, "parameters": {"worker": "fake_worker"}}
    spec |= {"base": {"limits.timeout": 60}, **changes}
    (folder / "run.ipynb").write_text((REPOSITORY / "notebooks" / "run.ipynb").read_text())
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in spec.items() if v is not None}))
    return path


def out_of(folder: Path) -> Path:
    return folder / "papermill_runs" / "out" / "sweep"


def recorder(ran: list, status: str):
    """A stand-in for `cli.run_row` that notes the row."""
    return lambda spec, row, force, warned: ran.append(row) or results.new_result(spec.rows[row], status)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of a row that works and one that fails, run once."""
    folder = tmp_path_factory.mktemp("cli")
    report = {
        "nbformat": 4, "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "gone", "language": "python", "display_name": "a kernel nobody has"}},
        "cells": [
            {"cell_type": "code", "id": "p", "metadata": {"tags": ["parameters"]}, "source": "results = ''",
             "outputs": [], "execution_count": None},
            {"cell_type": "code", "id": "r", "metadata": {}, "outputs": [], "execution_count": None,
             "source": "import sys\nfrom pathlib import Path\nimport beside\n"
                       "(Path(results) / 'reported').write_text(sys.executable)"},
        ],
    }  # fmt: skip
    (folder / "report.ipynb").write_text(json.dumps(report))
    (folder / "beside.py").touch()  # lessons that are reports import what lies beside them
    spec = write_spec(folder, report="report.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        code = cli.main(["run", str(spec)])
    return spec, out_of(folder), code


def test_a_failed_row_fails_the_sweep_and_the_others_still_run(sweep):
    _, out, code = sweep
    assert code == 1
    assert [results.read_result(out / row / "result.json")["status"] for row in ("good", "bad")] == ["ok", "error"]
    assert (out / "good" / "run.ipynb").exists()
    assert "RunFailed" in (out / "bad" / "run.ipynb").read_text()


def test_notebooks_run_in_the_running_python_whatever_kernel_they_name(sweep):
    assert (sweep[1] / "reported").read_text() == sys.executable


def test_what_is_run_again(sweep, monkeypatch, capsys):
    spec, _, _ = sweep
    ran = []

    def run_row(spec, row, force, warned):
        ran.append((row, force))
        return results.new_result(spec.rows[row], "ok")

    monkeypatch.setattr(cli, "run_row", run_row)
    monkeypatch.setattr(cli, "execute", lambda *a, **k: None)
    for arguments, expected in (
        ([], [("bad", False)]),
        (["--retry", "error"], [("bad", False)]),
        (["--rows", "good"], []),
        (["--force"], [("good", True), ("bad", True)]),
        (["--dry-run"], []),
    ):
        ran.clear()
        assert cli.main(["run", str(spec), *arguments]) == 0
        assert ran == expected, arguments
    assert "good: it finished already: ok" in capsys.readouterr().out


def test_retry_leaves_alone_what_never_ran_and_takes_what_was_killed(tmp_path, monkeypatch):
    spec, out = write_spec(tmp_path), out_of(tmp_path)
    (out / "bad").mkdir(parents=True)
    (out / "bad" / "config.json").write_text("{}")
    ran = []
    monkeypatch.setattr(cli, "run_row", recorder(ran, "oom"))
    assert cli.main(["run", str(spec), "--retry", "error"]) == 0
    assert ran == ["bad"]


def test_fail_fast(tmp_path, monkeypatch):
    spec, ran = write_spec(tmp_path), []
    monkeypatch.setattr(cli, "run_row", recorder(ran, "timeout"))
    assert cli.main(["run", str(spec), "--fail-fast"]) == 1
    assert ran == ["good"]
    assert cli.main(["run", str(spec)]) == 1
    assert ran == ["good", "good", "bad"]


def test_a_row_that_does_not_fit_says_why_and_fails_nothing(tmp_path, monkeypatch, capsys):
    error = {"type": "WouldNotFit", "message": "20,000,000 tokens would take 71 GiB"}
    found = results.new_result(RunConfig(), "oom", error=error)
    monkeypatch.setattr(cli, "run_row", lambda *a, **k: found)
    assert cli.main(["run", str(write_spec(tmp_path)), "--rows", "good"]) == 0
    assert "good: oom: WouldNotFit: 20,000,000 tokens would take 71 GiB\n" in capsys.readouterr().out


def test_report_prints_a_table_and_writes_a_page(sweep, capsys):
    spec, out, _ = sweep
    assert (out / "report.html").exists()  # alst run wrote it
    (out / "report.html").unlink()
    assert cli.main(["report", str(out)]) == 0
    table = capsys.readouterr().out
    assert "| good | ok | real | {'fake': 'ok'} | 2,048 |" in table
    assert "| bad | error |" in table
    assert (out / "report.html").exists()
    assert cli.main(["report", str(spec)]) == 0
    assert capsys.readouterr().out == table


def test_status_of_what_ended(sweep, capsys):
    spec = sweep[0]
    assert cli.main(["status", str(spec)]) == 1
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert next(line for line in lines if line[:1] == ["good"])[:2] == ["good", "ok"]
    bad = next(line for line in shown.splitlines() if line.startswith("bad"))
    assert "RankFailed: rank 1 ended with exit status 1" in bad
    assert all(len(line) <= 100 for line in shown.partition("next:")[0].splitlines())
    assert f"alst run {spec} --retry error" in shown
    log = re.search(r"less (\S+)", shown)[1]
    assert "rank one is broken" in Path(log).read_text()
    assert cli.main(["status", str(spec), "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["counts"] == {"ok": 1, "error": 1}
    assert [(r["row"], r["state"]) for r in made["rows"]] == [("good", "ok"), ("bad", "error")]
    assert made["rows"][0]["seconds"] > 0
    assert made["rows"][1]["log"] == log


def test_the_commands_of_a_dry_run_and_of_the_page_run_a_row(sweep, tmp_path, monkeypatch, capsys):
    """As typed: the dry run's is this very run, in its folder; the page's runs the row of the spec again."""
    spec, out, _ = sweep
    monkeypatch.chdir(spec.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(REPOSITORY), str(TESTS))))
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    cli.main(["report", str(spec)])
    page = html.unescape((out / "report.html").read_text())
    assert "<pre>alst run spec.yaml --rows good --force</pre>" in page
    capsys.readouterr()
    other = tmp_path / "an other"
    assert cli.main(["run", str(spec), "--rows", "good", "--out", str(other), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    line = re.search(r"by itself +(.*)", shown)[1]
    parameters = json.loads(shlex.split(line)[-1])
    assert parameters["worker"] == "fake_worker"
    assert parameters["config"] == {
        "row": "good",
        "model": {"config": {"fake": "ok"}},
        "limits": {"timeout": 60},
        "engine": {"world_size": devices.device_count() or 2},
    }
    assert not other.exists()
    assert subprocess.run(line, shell=True, capture_output=True).returncode == 0, line
    assert results.read_result(other / "good" / "result.json")["status"] == "ok"
    assert cli.main(["run", str(spec), "--rows", "good", "--out", str(other), "--dry-run"]) == 0
    assert "good: it finished already: ok" in capsys.readouterr().out


def test_status_of_what_was_changed_or_cut_off(tmp_path, monkeypatch, capsys):
    rows = [
        {"name": n, "model.config": {"fake": "ok"}} for n in ("changed", "committed", "cut", "again", "never", "torn")
    ]
    spec, out = write_spec(tmp_path, rows=rows), out_of(tmp_path)
    configs = cli.load_spec(spec).rows

    def put(row, config, began=0.0, **changes):
        (out / row).mkdir(parents=True)
        results.write_json(out / row / "config.json", config.to_dict())
        event = {"time": began or time.time() - 100, "event": "step", "step": 3, "steps": 9}
        (out / row / "progress.jsonl").write_text(json.dumps(event) + "\n")
        if changes:
            results.write_result(out / row / "result.json", {**results.new_result(config, "ok"), **changes})

    put("changed", configs["changed"].replace(data={"seq_len": 77}), status="oom")
    put("committed", configs["committed"], run_id="another", git={"sha": "0123456789abcdef", "dirty": False})
    put("cut", configs["cut"])
    put("again", configs["again"].replace(optim={"steps": 5}), began=time.time() + 50, status="ok")
    put("torn", configs["torn"])
    (out / "torn" / "result.json").write_text("{")
    assert cli.main(["status", str(spec)]) == 1
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()}
    assert "stale" in shown["changed"]
    assert "oom with data.seq_len=77 (now 2048)" in shown["changed"]
    assert "ok at another commit, 0123456789" in shown["committed"]
    assert "interrupted" in shown["cut"]
    assert "after: step 3/9" in shown["cut"]
    assert "interrupted" in shown["again"]  # a newer attempt than the result, which is not of this configuration
    assert "never run" in shown["never"]
    assert "unreadable" in shown["torn"]
    for row in ("cut", "again", "torn"):
        shutil.rmtree(out / row)
    assert cli.main(["status", str(spec)]) == 3
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    cli.write_record(cli.load_spec(spec))
    assert cli.main(["status"]) == 3
    assert re.search(
        r"^sweep +2 stale, 4 never run +alst status papermill_runs/out/sweep *$", capsys.readouterr().out, re.MULTILINE
    )


def test_status_judges_rows_as_the_machine_that_ran_them(tmp_path, monkeypatch, capsys):
    """A login node without GPUs, and a machine with fewer of them, look at a sweep that ran on eight."""
    base = {"cpu": {"data.seq_len": 1000}, "cuda": {"data.seq_len": "8K"}}
    rows = ["alst", {"name": "all", "engine.world_size": 8, "optim.steps": 3}]
    spec, out = write_spec(tmp_path, base=base, rows=rows), out_of(tmp_path)
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    loaded = cli.load_spec(spec)
    for name, config in loaded.rows.items():
        (out / name).mkdir(parents=True)
        results.write_json(out / name / "config.json", config.to_dict())
        results.write_result(out / name / "result.json", results.new_result(config, "ok"))
    cli.write_record(loaded)
    for gpus in (0, 2, 8):
        monkeypatch.setattr(devices, "device_count", lambda gpus=gpus: gpus)
        assert cli.main(["status", str(spec)]) == 0, gpus
        shown = capsys.readouterr().out
        assert "stale" not in shown
        assert "alst run" not in shown
        assert cli.main(["report", str(spec)]) == 0
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    assert cli.load_spec(spec).rows["alst"].engine.world_size == 2  # what `alst run` would run here
    write_spec(tmp_path, base=base, rows=["alst", {"name": "all", "engine.world_size": 8, "optim.steps": 4}])
    capsys.readouterr()
    assert cli.main(["status", str(spec)]) == 3
    assert "ok with optim.steps=3 (now 4)" in capsys.readouterr().out


def test_commands_to_type_next_can_be_typed(tmp_path, monkeypatch, capsys):
    """They name the folder of the results where it is not the usual one, and quote what a shell would take apart."""
    home = tmp_path / "my sweeps"
    home.mkdir()
    spec, out = write_spec(home), tmp_path / "other results"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_row", recorder([], "error"))
    assert cli.main(["run", str(spec), "--out", str(out), "--rows", "bad"]) == 1
    where = ["my sweeps/spec.yaml", "--out", "other results"]
    again = capsys.readouterr().err.partition("repeat them with: ")[2]
    assert shlex.split(again) == ["alst", "run", *where, "--retry", "error"]
    log = out / "bad" / "logs" / "one" / "agent.log"
    log.parent.mkdir(parents=True)
    log.write_text("ended")
    (out / "bad" / "progress.jsonl").write_text(json.dumps({"time": time.time(), "event": "start"}) + "\n")
    results.write_result(out / "bad" / "result.json", results.new_result(cli.load_spec(spec).rows["bad"], "error"))
    with locks.hold(out) as note:
        assert cli.main(["status", str(spec), "--out", str(out), "--json"]) == 1
        typed = [shlex.split(command) for command in json.loads(capsys.readouterr().out)["next"]]
        assert typed == [["less", "other results/bad/logs/one/agent.log"], ["alst", "report", *where]]
        note(row="good")
        assert cli.main(["status", str(spec), "--out", str(out), "--json"]) == 1
        typed = [shlex.split(command) for command in json.loads(capsys.readouterr().out)["next"]]
        assert [shlex.split(words[3]) for words in typed if words[0] == "watch"] == [["alst", "status", *where]]
    assert cli.main(["status", str(spec), "--out", str(out), "--json"]) == 1
    typed = [shlex.split(command) for command in json.loads(capsys.readouterr().out)["next"]]
    assert ["alst", "run", *where, "--retry", "error"] in typed
    assert ["alst", "run", *where] in typed


def test_status_of_a_folder_and_out_without_a_spec(sweep, tmp_path, capsys):
    spec, out, _ = sweep
    assert cli.main(["status", str(spec)]) == 1
    shown = capsys.readouterr().out
    assert cli.main(["status", str(out)]) == 1
    assert capsys.readouterr().out == shown  # it knows its spec
    for row, code in (("good", 0), ("bad", 1)):  # a run's own folder
        assert cli.main(["status", str(out / row)]) == code
        told = capsys.readouterr().out
        assert [line.split()[:2] for line in told.splitlines() if line.startswith(("good ", "bad "))] == [
            [row, "ok" if row == "good" else "error"]
        ]
    alone = tmp_path / "other" / "alone"
    shutil.copytree(out / "bad", alone)
    assert cli.main(["status", str(alone)]) == 1
    assert "alone  error" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path} has no runs" in capsys.readouterr().err
    for arguments in (["status"], ["status", str(out)], ["report", str(out)]):
        assert cli.main([*arguments, "--out", str(tmp_path)]) == 2, arguments
        assert "needs a spec" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_sweep_behind_a_symlink_knows_its_spec_and_says_when_that_became_invalid(tmp_path, monkeypatch, capsys):
    home, scratch = tmp_path / "home", tmp_path / "a" / "deep" / "scratch"
    (home / "papermill_runs").mkdir(parents=True)
    scratch.mkdir(parents=True)
    (home / "papermill_runs" / "out").symlink_to(scratch)
    monkeypatch.chdir(home)
    spec = write_spec(home)
    monkeypatch.setattr(cli, "run_row", recorder([], "oom"))
    assert cli.main(["run", str(spec)]) == 0
    capsys.readouterr()
    assert cli.main(["status"]) == 3  # both never ran
    assert "alst status papermill_runs/out/sweep\n" in capsys.readouterr().out
    spec.write_text(spec.read_text().replace("timeout", "tiemout"))
    for arguments in ([], [str(out_of(home))]):
        cli.main(["status", *arguments])
        shown = capsys.readouterr()
        assert "unknown field of limits 'tiemout'; did you mean 'timeout'?" in shown.out + shown.err, arguments


def test_the_log_to_look_at_exists_and_is_of_the_newest_attempt(tmp_path):
    def put(path, text, age):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - age,) * 2)

    def log():
        return status.Row(row="r", folder=tmp_path, state="error").log()

    old, new = tmp_path / "logs" / "old", tmp_path / "logs" / "new"
    put(old / "x" / "attempt_0" / "0" / "stderr.log", "Traceback (most recent call last)", 100)
    assert log() is None  # this attempt did not come to start ranks
    (tmp_path / "progress.jsonl").write_text(json.dumps({"time": time.time() - 50, "event": "start"}) + "\n")
    new.mkdir()
    assert log() is None
    put(new / "agent.log", "", 40)
    assert log() is None
    put(new / "agent.log", "torchrun says", 40)
    assert log() == new / "agent.log"
    put(new / "x" / "attempt_0" / "0" / "stderr.log", "waited", 30)
    broken = new / "x" / "attempt_0" / "1" / "stderr.log"
    put(broken, "Traceback (most recent call last)" + "frames\n" * 2000, 20)  # longer than what a result keeps
    put(old / "x" / "attempt_0" / "0" / "stderr.log", "Traceback (most recent call last)", 100)
    assert log() == broken
    assert progress.log_tail(new).startswith("--- rank 1, stderr ---")


def test_what_runs_and_that_it_runs_once(tmp_path, capsys):
    """Status follows a running sweep; a second one says who runs and touches nothing; killed, it is interrupted."""
    spec, out = write_spec(tmp_path, rows=[{"name": "one", "model.config": {"fake": "hang"}}]), out_of(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(TESTS)))}
    command = [sys.executable, "-m", "alstlib.runs.cli", "run", str(spec)]
    sweep = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kernel = None
    try:
        deadline = time.monotonic() + 120
        while not (out / "one" / "started.0").exists() or not (out / "one" / "started.1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert cli.main(["status", str(spec), "--json"]) == 3
        made = json.loads(capsys.readouterr().out)
        row = made["rows"][0]
        assert (row["state"], row["step"], row["steps"]) == ("running", 2, 2)
        assert row["seconds"] > 0
        assert made["holder"]["pid"] == sweep.pid
        assert cli.main(["status", str(spec)]) == 3
        shown = capsys.readouterr().out
        assert f"run by process {sweep.pid} since" in shown
        assert re.search(r"^one +running .*step 2/2 ", shown, re.MULTILINE)
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.suffix != ".ipynb"}
        assert cli.main(["run", str(spec), "--force"]) == 2
        assert f"in use by another run: process {sweep.pid} since" in capsys.readouterr().err
        assert {p: p.stat().st_mtime_ns for p in before} == before
        with pytest.raises(ValueError, match="its folder is in use by process"):
            cli.run_row(cli.load_spec(spec), "one")
        kernel = locks.holder(out / "one")["pid"]
    finally:
        sweep.kill()
        sweep.wait()
        if kernel:
            os.kill(kernel, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while (state := status.look(out / "one", None).state) == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert state == "interrupted"
    assert locks.holder(out) is None


def test_a_dry_run_says_what_would_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    base = {"model.name": "tiny", "data.seq_len": 256, "optim.steps": 2}
    rows = ["alst", {"name": "long", "engine.sp": 2, "data": {"seq_len": "100K"}, "limits.device_memory": "96MiB"}]
    spec = write_spec(tmp_path, base=base, rows=rows, parameters=None)
    assert cli.main(["run", str(spec), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert (
        "  sets       row=alst, model.name=tiny, data.seq_len=256, options.tiles={'loss': True, 'mlp': True}, "
        "options.offload=sync, options.save_attention=False, engine.world_size=2, engine.sp=2, optim.steps=2\n" in shown
    )
    assert "  predicted  fits: " in shown
    assert "  predicted  does not fit: " in shown
    assert " short on the device and " in shown
    assert re.search(r"\n +device, each rank +[\d.]+ MiB  of 96\.00 MiB\n", shown)
    assert re.search(r"\n +a step +not predicted  rates are known for GPUs only\n", shown)
    assert f"  folder     {out_of(tmp_path) / 'alst'}\n" in shown
    assert not (tmp_path / "papermill_runs").exists()
    spec = write_spec(tmp_path, rows=[{"name": "k"}], parameters={"worker": "alstlib.measure.time_kernels"})
    assert cli.main(["run", str(spec), "--dry-run"]) == 0
    assert "not predicted: the worker is alstlib.measure.time_kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bases": {}}, "unknown field of a spec 'bases'; did you mean 'base'?"),
        ({"base": {"seq_length": 1}}, "unknown parameter 'seq_length'; did you mean 'data.seq_len'?"),
        ({"base": {"data": {"seq_length": 1}}}, "unknown field of data 'seq_length'; did you mean 'seq_len'?"),
        ({"base": {"seq_len": 1}}, "unknown parameter 'seq_len'; did you mean 'data.seq_len'?"),
        ({"base": {"cuda": {}, "cpu": {"modle": "tiny"}}}, "unknown parameter 'modle'; did you mean 'model'?"),
        ({"rows": ["ulyses"]}, "unknown row 'ulyses'; did you mean 'ulysses'?"),
        ({"rows": [{"name": "x", "options.tils": True}]}, "unknown field of Options 'tils'; did you mean 'tiles'?"),
        ({"rows": [{"name": "../x"}]}, "row='../x' must be the name of a folder"),
        ({"rows": [{"name": "x", "engine.sp": 3}]}, "engine.sp=3 does not divide engine.world_size=2; use engine.sp=2"),
        ({"rows": ["alst", "alst"]}, "must have a name that no other row has"),
        ({"rows": [{"model.name": "tiny"}]}, "must have a name that no other row has"),
        ({"rows": []}, "rows=[] must be a list of at least one row"),
        ({"rows": None, "base": {}}, "must be a list of at least one row"),
        ({"notebook": "spec.yaml"}, "spec.yaml' is not a Jupyter notebook that can be read\n"),
        (
            {"base": {"data.allow_dropped": True}, "parameters": {}},
            "data.allow_dropped=True is a field of the worker alstlib.train.f",
        ),
        ({"notebook": "rnu.ipynb"}, "notebook='rnu.ipynb'"),
        ({"parameters": {"wroker": "w"}}, "unknown parameter of run.ipynb 'wroker'; did you mean 'worker'?"),
        ({"seq_len": 4}, "unknown field of a spec 'seq_len'; did you mean 'base: {data.seq_len: ...}'?"),
        ({"parameters": {"seq_len": 4}}, "unknown parameter of run.ipynb 'seq_len'; did you mean 'data.seq_len'?"),
        ({"parameters": {"tilse": 1}}, "'tilse'; did you mean 'options.tiles'?"),
        ({"report": "run.ipynb"}, "unknown parameter of run.ipynb 'results'"),
    ],
)
def test_unknown_names_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    monkeypatch.setattr(cli, "execute", lambda *a: pytest.fail("a notebook was executed"))
    assert cli.main(["run", str(write_spec(tmp_path, **changes))]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "papermill_runs").exists()


def test_many_more_ranks_than_cores_are_refused_unless_forced(tmp_path, monkeypatch, capsys):
    """A typing error would start 100,000 processes."""
    monkeypatch.setattr("alstlib.runs.workers.cores", lambda: 2)
    says = "engine.world_size=100000 would start 100,000 processes on a machine with 2 cores; give at most 16"
    run = RunConfig(model={"name": "tiny"}, engine={"world_size": 100_000}, data={"seq_len": 100_000})
    with pytest.raises(ValueError, match=says):
        launch.launch(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    spec = str(write_spec(tmp_path, base={"engine.world_size": 100_000}))
    for flags in ([], ["--dry-run"]):
        assert cli.main(["run", spec, *flags]) == 2
        assert says in capsys.readouterr().err
    for flags in (["--force"], ["--nodes=2"]):  # such a job has other machines
        assert cli.main(["run", spec, "--dry-run", *flags]) == 0
        assert "would run as" in capsys.readouterr().out
    workers.check_ranks(100_000, 6250, 0)
    workers.check_ranks(100_000, 1, 100_000)


def test_set_changes_fields_of_all_rows(tmp_path, monkeypatch, capsys):
    """Values are YAML's; how a spec takes them is its own affair."""
    given, load_spec, spec = [], cli.load_spec, str(write_spec(tmp_path))
    monkeypatch.setattr(cli, "load_spec", lambda *a, changes, **k: given.append(changes) or load_spec(*a, **k))
    words = ["--set", "options.chunk=16384", "--set=optim.trainer={seed: 3}", "--set", "model.name=a=b"]
    assert cli.main(["run", spec, "--dry-run", *words]) == 0
    assert given == [{"options.chunk": 16384, "optim.trainer": {"seed": 3}, "model.name": "a=b"}]
    assert cli.main(["run", spec, "--dry-run", "--set", "chunk"]) == 2
    assert "--set chunk must have the form FIELD=VALUE" in capsys.readouterr().err


def test_set_is_repeated_in_what_is_typed_next_and_status_knows_it(tmp_path, monkeypatch, capsys):
    spec, ran = write_spec(tmp_path), []
    sets = ["options.chunk=64", "optim.learning_rate=1e-5", "optim.trainer={seed: 3}", "model.name='7'"]
    typed = [word for text in sets for word in ("--set", text)]
    changed = {"options.chunk": 64, "optim.learning_rate": 1e-5, "optim.trainer": {"seed": 3}, "model.name": "7"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_row", recorder(ran, "error"))
    assert cli.main(["run", "spec.yaml", *typed, "--rows", "bad"]) == 1
    again = capsys.readouterr().err.partition("repeat them with: ")[2]
    (out_of(tmp_path) / "bad").mkdir()
    (out_of(tmp_path) / "bad" / "config.json").write_text("{}")  # it began
    assert cli.main(shlex.split(again)[1:]) == 1
    assert capsys.readouterr().err.partition("repeat them with: ")[2] == again
    assert ran == ["bad", "bad"]
    as_run = cli.load_spec(spec, as_run=True)
    assert as_run.rows["bad"] == cli.load_spec(spec, changes=changed).rows["bad"] != cli.load_spec(spec).rows["bad"]
    for row, config in as_run.rows.items():
        (as_run.out / row).mkdir(parents=True, exist_ok=True)
        (as_run.out / row / "config.json").write_text("{}")
        results.write_result(as_run.out / row / "result.json", results.new_result(config, "ok"))
    for argument in ("spec.yaml", str(as_run.out)):
        assert cli.main(["status", argument]) == 0, capsys.readouterr().out
    shutil.rmtree(as_run.out / "good")
    capsys.readouterr()
    assert cli.main(["status", "spec.yaml", "--json"]) == 3
    (command, *_) = map(shlex.split, json.loads(capsys.readouterr().out)["next"])
    assert cli.main([*command[1:], "--dry-run"]) == 0
    assert "bad: it finished already: ok" in capsys.readouterr().out
    assert cli.main(["run", "spec.yaml", "--dry-run"]) == 0
    assert "it finished already" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["check", "--ranks"], ["verify", "tiny", "--sp"]])
def test_check_and_verify_refuse_as_many_ranks_as_run_does(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr("alstlib.runs.workers.cores", lambda: 2)
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    started = []
    monkeypatch.setattr(
        launch, "launch", lambda run, *a, **k: started.append(run.engine.world_size) or {"status": "no"}
    )
    monkeypatch.setattr(verify, "run_on_ranks", lambda function, ranks, *a: started.append(ranks) or 1 / 0)
    given = command[-1].removeprefix("--")
    assert cli.main([*command, "17"]) == 2
    assert f"{given}=17 would start 17 processes on a machine with 2 cores; give at most 16" in capsys.readouterr().err
    assert started == []
    for argv in ([*command, "16"], [*command, "17", "--force"]):
        with contextlib.suppress(ZeroDivisionError, KeyError):
            cli.main(argv)
    assert started == [16, 17]


def test_a_spec_outside_of_the_clone_runs_its_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    path = tmp_path / "mine.yaml"
    path.write_text("{rows: [{name: one, model.name: tiny}]}")
    deep = tmp_path / "deep"
    deep.mkdir()
    for here, out in ((deep, deep), (REPOSITORY, REPOSITORY), (REPOSITORY / "tests", REPOSITORY)):
        monkeypatch.chdir(here)
        spec = cli.load_spec(path)
        assert spec.notebook == REPOSITORY / "notebooks" / "run.ipynb"
        assert spec.out == out / "papermill_runs" / "out" / "mine"
        assert "--out" not in spec.typed("run")
        assert launch.default_folder(RunConfig()).parent == out / "papermill_runs" / "out" / "single"
    monkeypatch.chdir(deep)
    assert cli.main(["run", str(path), "--dry-run"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "mine: 1 row, results in papermill_runs/out/mine"
    assert second.startswith("one: would run as")
    assert cli.main(["run", str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert f"results in {tmp_path / 'out'}\n" in capsys.readouterr().out
    assert cli.main(["status"]) == 0
    assert f"no runs below {deep / 'papermill_runs' / 'out'}" in capsys.readouterr().out


def test_rows_that_are_not_in_the_spec_and_specs_that_do_not_exist(tmp_path, capsys):
    assert cli.main(["run", str(write_spec(tmp_path)), "--rows", "good,bda"]) == 2
    assert "unknown row 'bda'; did you mean 'bad'?" in capsys.readouterr().err
    assert cli.main(["status", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml does not exist; " in capsys.readouterr().err
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert cli.main(["run", str(tmp_path / "loop.yaml")]) == 2
    assert "loop.yaml does not exist; it is a symbolic link to loop.yaml" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2


def test_dropped_rows_are_allowed_by_a_switch_that_starts_no_other_run(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(
        cli, "run_row", lambda spec, row, **_: ran.append(spec) or results.new_result(spec.rows[row], "ok")
    )
    monkeypatch.setattr(cli, "execute", lambda *a, **k: None)
    path = write_spec(tmp_path, rows=[{"name": "good", "model.name": "tiny"}])
    assert cli.main(["run", str(path), "--allow-dropped"]) == 0
    allowed, plain = ran[0].rows["good"], cli.load_spec(path).rows["good"]
    assert (allowed.data.allow_dropped, plain.data.allow_dropped) == (True, False)
    assert allowed.digest() == plain.digest()


def test_nothing_unprintable_reaches_a_terminal(tmp_path, capsys):
    """Of results that others made, of names in a spec, of what a run says."""
    evil = "\x1b]0;owned\x07\x1b[2J\rgone\x9b31m\u202e"
    folder = tmp_path / "sweep" / "row"
    folder.mkdir(parents=True)
    error = {"type": f"{evil}E", "message": f"{evil}first\nsecond"}
    results.write_result(folder / "result.json", results.new_result(RunConfig(row="row"), "error", error=error))
    (folder / "config.json").write_text("{}")
    typed = ["status {}", "report {}", "status --json {}"]
    for arguments in (*([*line.split()[:-1], str(folder.parent)] for line in typed), ["run", evil]):
        cli.main(arguments)
        shown = "".join(capsys.readouterr())
        assert shown
        assert all(c.isprintable() or c == "\n" for c in shown), arguments
    show = progress.Printer()
    show({"event": "load", "row": "r", "message": f"{evil}x\ny"})
    assert capsys.readouterr().out == f"r  {''.join(c if c.isprintable() else ' ' for c in evil)}x y\n"


def test_a_result_that_is_none_is_one_unreadable_row(tmp_path, capsys):
    made = results.new_result(RunConfig(row="row"), "error", error={"type": "E"})
    for name, value in (("metrics", []), ("config", "x"), ("error", ["x"]), ("git", None)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "result.json").write_text(json.dumps({**made, name: value}))
        assert cli.main(["status", str(tmp_path)]) == 1
        said = capsys.readouterr().out
        assert re.search(rf"{name} +unreadable", said), said


def test_the_hardware_chooses_its_section(tmp_path, monkeypatch):
    base = {"optim": {"steps": 5}, "cpu": {"data.seq_len": 1000}, "cuda": {"data.seq_len": "8K", "optim.steps": 7}}
    spec = write_spec(tmp_path, base=base, rows=["alst", {"name": "ours", "options": {"tiles": {"mlp": 64}}}])
    for gpus, length, steps, sp in ((0, 1000, 5, 2), (4, 8000, 7, 4)):
        monkeypatch.setattr(devices, "device_count", lambda gpus=gpus: gpus)
        rows = cli.load_spec(spec).rows
        assert all(
            (c.data.seq_len, c.optim.steps, c.engine.sp, c.engine.world_size) == (length, steps, sp, sp)
            for c in rows.values()
        )
        assert rows["ours"].options.tile("mlp") == 64
        assert rows["ours"].options.save_attention == "auto"
        assert rows["alst"].options.offload == "sync"


def test_the_ablation_is_the_seven_rows():
    text = yaml.safe_load(ABLATION.read_text())
    assert [row["name"] for row in text["rows"]] == list(ROWS)
    base = {k: v for k, v in text["base"].items() if k not in ("cpu", "cuda")}
    for section in ("cpu", "cuda"):
        assert RunConfig.from_dict({**base, **text["base"][section]}).search


def test_a_dead_kernel_is_an_error_in_the_result(tmp_path, monkeypatch):
    path = write_spec(tmp_path)
    monkeypatch.setattr(cli, "execute", lambda *a: RuntimeError("Kernel died"))
    old = out_of(tmp_path) / "good" / "result.json"
    old.parent.mkdir(parents=True)
    results.write_result(old, results.new_result(RunConfig(), "ok"))
    result = cli.run_row(cli.load_spec(path), "good")
    assert result["status"] == "error"
    assert result["error"]["message"] == "Kernel died"
    assert results.read_result(old) == result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_sweep_stops_it_and_leaves_nothing(tmp_path, number):
    rows = [{"name": "one", "model.config": {"fake": "hang"}}, {"name": "two", "model.config": {"fake": "ok"}}]
    spec, out = write_spec(tmp_path, rows=rows), out_of(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(TESTS)))}
    sweep = subprocess.Popen(
        [sys.executable, "-m", "alstlib.runs.cli", "run", str(spec)], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        text = ""
        while "/2  loss" not in text and "step 1/2" not in text:  # progress of the row reaches the terminal
            line = sweep.stdout.readline()
            assert line, text
            text += line
        sweep.send_signal(number)
        sweep.communicate(timeout=notebooks.KERNEL_SECONDS + processes.GRACE_SECONDS)
    finally:
        sweep.kill()
        sweep.wait()
    assert sweep.returncode == 130
    assert results.read_result(out / "one" / "result.json")["status"] == "cancelled"
    assert "KeyboardInterrupt" in (out / "one" / "run.ipynb").read_text()  # the cell itself cleaned up
    assert not (out / "two").exists()
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in _read(p)]
    assert left == []


@pytest.mark.parametrize("when", ["importing", "the kernel starts"])
def test_ctrl_c_in_the_first_seconds_is_two_lines(tmp_path, when):
    """A terminal sends it to every process that was started from it, the notebook's kernel too."""
    spec = write_spec(tmp_path, rows=[{"name": "one", "model.config": {"fake": "hang"}}])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(TESTS)))}
    command = [sys.executable, "-X", "importtime", "-m", "alstlib.runs", "run", str(spec)]
    if when != "importing":
        command[1:3] = []
    sweep = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        if when == "importing":  # which reports each module as it has been imported
            while "pydantic" not in (line := sweep.stderr.readline()):
                assert line
        else:
            kernel, end = f"{sys.executable} -m ipykernel_launcher".encode(), time.monotonic() + 60
            while not any(_read(Path(f"/proc/{p.pid}/cmdline")).replace(b"\0", b" ").startswith(kernel)
                          for p in psutil.Process(sweep.pid).children()):  # fmt: skip
                assert sweep.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
            time.sleep(0.1)  # it imports
        os.killpg(sweep.pid, signal.SIGINT)
        said = [line for line in sweep.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    finally:
        sweep.kill()
        sweep.wait()
    assert sweep.returncode == 130
    assert len([line for line in said if line]) <= 2, said
    assert "alst: interrupted" in said[-1]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_kernel_has_minutes_to_start(tmp_path, monkeypatch):
    """papermill's own limit of a minute was met on a busy machine, as "Kernel didn't respond in 60 seconds"."""
    import papermill

    given = {}
    monkeypatch.setattr(papermill, "execute_notebook", lambda *a, **kw: given.update(kw))
    assert (
        cli.execute(Path(__file__).parents[2] / "notebooks" / "run.ipynb", tmp_path / "o.ipynb", {}, lambda: None)
        is None
    )
    assert given["start_timeout"] >= 600


@pytest.mark.slow
def test_the_ablations_report_needs_no_row_but_the_first(tmp_path):
    """A sweep may have been given some rows only: the lesson that is its report leaves out what it cannot show."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "papermill_runs" / "results" / "ablation-cpu" / "baseline", tmp_path / "baseline")
    lesson = root / "notebooks" / "09_ablation.ipynb"
    given, output = {"results": str(tmp_path)}, tmp_path / "report.ipynb"
    assert cli.execute(lesson, output, given, lambda: None, lesson.parent) is None
    assert output.exists()
