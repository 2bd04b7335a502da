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
from cases import lines_of, wait_for

from alstlib.config import ROWS, RunConfig
from alstlib.planner import devices
from alstlib.runs import cli, launch, locks, notebooks, processes, progress, results, status, verify, workers

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parents[1]
ABLATION = REPOSITORY / "papermill_runs" / "specs" / "ablation.yaml"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(TESTS)))}
HANGS = [{"name": "one", "model.config": {"fake": "hang"}}]


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


def put(folder: Path, config: RunConfig, ended="", began=0.0, **changes) -> None:
    """What a run leaves: its configuration, a step, and its result where it has `ended`."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write_json(folder / "config.json", config.to_dict())
    event = {"time": began or time.time() - 100, "event": "step", "step": 3, "steps": 9}
    (folder / "progress.jsonl").write_text(json.dumps(event) + "\n")
    if ended:
        results.write_result(folder / "result.json", {**results.new_result(config, ended), **changes})


@pytest.fixture
def ran(monkeypatch) -> list:
    """The rows that are run, each with its Spec and whether it is forced; they end as `ran.status` says."""

    class Ran(list):
        status = "ok"

    made = Ran()
    monkeypatch.setattr(cli, "execute", lambda *a, **k: None)
    monkeypatch.setattr(
        cli,
        "run_row",
        lambda spec, row, force, warned: (
            made.append((row, force, spec)) or results.new_result(spec.rows[row], made.status)
        ),
    )
    return made


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of a row that works and one that fails, run once."""
    folder = tmp_path_factory.mktemp("cli")
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    reported = "(Path(results) / 'reported').write_text(sys.executable)"
    report = {
        "nbformat": 4, "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "gone", "language": "python", "display_name": "a kernel nobody has"}},
        "cells": [
            {**code, "id": "p", "metadata": {"tags": ["parameters"]}, "source": "results = ''"},
            {**code, "id": "r", "source": f"import sys\nfrom pathlib import Path\nimport beside\n{reported}"},
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
    """Notebooks run in the running Python, whatever kernel they name."""
    _, out, code = sweep
    assert code == 1
    assert [results.read_result(out / row / "result.json")["status"] for row in ("good", "bad")] == ["ok", "error"]
    assert (out / "good" / "run.ipynb").exists()
    assert "RunFailed" in (out / "bad" / "run.ipynb").read_text()
    assert (out / "reported").read_text() == sys.executable


@pytest.mark.parametrize(
    "arguments, expected",
    [("", "bad"), ("--retry error", "bad"), ("--rows good", ""), ("--force", "good! bad!"), ("--dry-run", "")],
)
def test_what_is_run_again(sweep, ran, alst, arguments, expected):
    said = alst(f"run {sweep[0]} {arguments}")
    assert [row + "!" * force for row, force, _ in ran] == expected.split()
    assert ("good: it finished already: ok" in said) == (arguments in ("", "--rows good", "--dry-run"))


def test_retry_and_fail_fast(tmp_path, ran, alst):
    """A retry leaves alone what never ran, and takes what was killed."""
    spec, ran.status = write_spec(tmp_path), "timeout"
    alst(f"run {spec} --fail-fast", 1)
    alst(f"run {spec}", 1)
    put(out_of(tmp_path) / "bad", RunConfig())
    ran.status = "oom"
    alst(f"run {spec} --retry error")
    assert [row for row, *_ in ran] == ["good", "good", "bad", "bad"]


def test_a_row_that_does_not_fit_says_why_and_fails_nothing(tmp_path, monkeypatch, alst):
    error = {"type": "WouldNotFit", "message": "20,000,000 tokens would take 71 GiB"}
    found = results.new_result(RunConfig(), "oom", error=error)
    monkeypatch.setattr(cli, "run_row", lambda *a, **k: found)
    said = alst(f"run {write_spec(tmp_path)} --rows good")
    assert "good: oom: WouldNotFit: 20,000,000 tokens would take 71 GiB\n" in said


def test_report_prints_a_table_and_writes_a_page(sweep, alst):
    spec, out, _ = sweep
    (out / "report.html").unlink()  # alst run wrote it
    table = alst(f"report {out}")
    assert "| good | ok | real | {'fake': 'ok'} | 2,048 |" in table
    assert "| bad | error |" in table
    assert (out / "report.html").exists()
    assert alst(f"report {spec}") == table


def test_status_of_what_ended(sweep, alst):
    spec = sweep[0]
    shown = alst(f"status {spec}", 1)
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert lines["good"].split()[1] == "ok"
    assert "RankFailed: rank 1 ended with exit status 1" in lines["bad"]
    assert all(len(line) <= 100 for line in shown.partition("next:")[0].splitlines())
    assert f"alst run {spec} --retry error" in shown
    log = re.search(r"less (\S+)", shown)[1]
    assert "rank one is broken" in Path(log).read_text()
    made = json.loads(alst(f"status {spec} --json", 1))
    assert made["counts"] == {"ok": 1, "error": 1}
    assert [(r["row"], r["state"]) for r in made["rows"]] == [("good", "ok"), ("bad", "error")]
    assert made["rows"][0]["seconds"] > 0
    assert made["rows"][1]["log"] == log


def test_the_commands_of_a_dry_run_and_of_the_page_run_a_row(sweep, tmp_path, monkeypatch, alst):
    """As typed: the dry run's is this very run, in its folder; the page's runs the row of the spec again."""
    spec, out, _ = sweep
    monkeypatch.chdir(spec.parent)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    alst(f"report {spec}")
    assert "<pre>alst run spec.yaml --rows good --force</pre>" in html.unescape((out / "report.html").read_text())
    other = tmp_path / "an other"
    dry_run = f"run {spec} --rows good --out '{other}' --dry-run"
    line = re.search(r"by itself +(.*)", alst(dry_run))[1]
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
    assert "good: it finished already: ok" in alst(dry_run)


STATES = """
changed    stale         oom with data.seq_len=77 (now 2048)
committed  ok at another commit, 0123456789
cut        interrupted   after: step 3/9
again      interrupted
never      never run
torn       unreadable
"""


def test_status_of_what_was_changed_or_cut_off(tmp_path, monkeypatch, alst):
    """`again` has a newer attempt than its result, which is not of this configuration."""
    states = {row: says for row, *says in (re.split("  +", line) for line in STATES.strip().splitlines())}
    spec, out = write_spec(tmp_path, rows=[{"name": n, "model.config": {"fake": "ok"}} for n in states]), None
    configs, out = cli.load_spec(spec).rows, out_of(tmp_path)
    put(out / "changed", configs["changed"].replace(data={"seq_len": 77}), "oom")
    at_commit = {"run_id": "another", "git": {"sha": "0123456789abcdef", "dirty": False}}
    put(out / "committed", configs["committed"], "ok", **at_commit)
    put(out / "cut", configs["cut"])
    put(out / "again", configs["again"].replace(optim={"steps": 5}), "ok", began=time.time() + 50)
    put(out / "torn", configs["torn"])
    (out / "torn" / "result.json").write_text("{")
    shown = {line.split()[0]: line for line in alst(f"status {spec}", 1).splitlines() if line[:1].isalpha()}
    for row, says in states.items():
        assert all(part in shown[row] for part in says), shown[row]
    for row in ("cut", "again", "torn"):
        shutil.rmtree(out / row)
    alst(f"status {spec}", 3)
    monkeypatch.chdir(tmp_path)
    cli.write_record(cli.load_spec(spec))
    line = r"^sweep +2 stale, 4 never run +alst status papermill_runs/out/sweep *$"
    assert re.search(line, alst("status", 3), re.MULTILINE)


def test_status_judges_rows_as_the_machine_that_ran_them(tmp_path, monkeypatch, alst):
    """A login node without GPUs, and a machine with fewer of them, look at a sweep that ran on eight."""
    base = {"cpu": {"data.seq_len": 1000}, "cuda": {"data.seq_len": "8K"}}
    rows = ["alst", {"name": "all", "engine.world_size": 8, "optim.steps": 3}]
    spec, out = write_spec(tmp_path, base=base, rows=rows), out_of(tmp_path)
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    loaded = cli.load_spec(spec)
    for name, config in loaded.rows.items():
        put(out / name, config, "ok")
    cli.write_record(loaded)
    for gpus in (8, 2, 0):
        monkeypatch.setattr(devices, "device_count", lambda gpus=gpus: gpus)
        assert not {"stale", "alst run"} & set(re.findall("stale|alst run", alst(f"status {spec}"))), gpus
        alst(f"report {spec}")
    assert cli.load_spec(spec).rows["alst"].engine.world_size == 2  # what `alst run` would run here
    write_spec(tmp_path, base=base, rows=["alst", {**rows[1], "optim.steps": 4}])
    assert "ok with optim.steps=3 (now 4)" in alst(f"status {spec}", 3)


def test_commands_to_type_next_can_be_typed(tmp_path, monkeypatch, ran, alst):
    """They name the folder of the results where it is not the usual one, and quote what a shell would take apart."""
    (home := tmp_path / "my sweeps").mkdir()
    spec, out = write_spec(home), tmp_path / "other results"
    monkeypatch.chdir(tmp_path)
    ran.status, where = "error", "'my sweeps/spec.yaml' --out 'other results'"
    said = alst(f"run '{spec}' --out '{out}' --rows bad", 1)
    assert f"repeat them with: alst run {where} --retry error\n" in said
    log = out / "bad" / "logs" / "one" / "agent.log"
    log.parent.mkdir(parents=True)
    log.write_text("ended")
    put(out / "bad", cli.load_spec(spec).rows["bad"], "error", began=time.time())

    def typed() -> list[str]:
        return list(json.loads(alst(f"status '{spec}' --out '{out}' --json", 1))["next"])

    with locks.hold(out) as note:
        assert typed() == ["less 'other results/bad/logs/one/agent.log'", f"alst report {where}"]
        note(row="good")
        watched = [shlex.split(line)[3] for line in typed() if line.startswith("watch")]
        assert watched == [f"alst status {where}"]
    assert {f"alst run {where} --retry error", f"alst run {where}"} <= set(typed())


def test_status_of_a_folder_and_out_without_a_spec(sweep, tmp_path, alst):
    spec, out, _ = sweep
    assert alst(f"status {out}", 1) == alst(f"status {spec}", 1)  # it knows its spec
    for row, code in (("good", 0), ("bad", 1)):  # a run's own folder
        told = re.findall(r"(?m)^(good|bad) +(\w+)", alst(f"status {out / row}", code))
        assert told == [(row, "ok" if row == "good" else "error")]
    alone = tmp_path / "other" / "alone"
    shutil.copytree(out / "bad", alone)
    assert "alone  error" in alst(f"status {alone}", 1)
    assert f"{tmp_path} has no runs" in alst(f"status {tmp_path}", 2)
    for arguments in ("status", f"status {out}", f"report {out}"):
        assert "needs a spec" in alst(f"{arguments} --out {tmp_path}", 2)
    assert not (tmp_path / "report.html").exists()


def test_a_sweep_behind_a_symlink_knows_its_spec_and_says_when_that_became_invalid(tmp_path, monkeypatch, ran, alst):
    home, scratch = tmp_path / "home", tmp_path / "a" / "deep" / "scratch"
    (home / "papermill_runs").mkdir(parents=True)
    scratch.mkdir(parents=True)
    (home / "papermill_runs" / "out").symlink_to(scratch)
    monkeypatch.chdir(home)
    spec, ran.status = write_spec(home), "oom"
    alst(f"run {spec}")
    assert "alst status papermill_runs/out/sweep\n" in alst("status", 3)  # both never ran
    spec.write_text(spec.read_text().replace("timeout", "tiemout"))
    for arguments in ("", f" {out_of(home)}"):
        assert "unknown field of limits 'tiemout'; did you mean 'timeout'?" in alst(f"status{arguments}")


def test_the_log_to_look_at_exists_and_is_of_the_newest_attempt(tmp_path):
    def write(attempt, name, text, age):
        path = tmp_path / "logs" / attempt / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - age,) * 2)
        return path

    def log():
        return status.Row(row="r", folder=tmp_path, state="error").log()

    first, second, traceback = (
        "x/attempt_0/0/stderr.log",
        "x/attempt_0/1/stderr.log",
        "Traceback (most recent call last)",
    )
    write("old", first, traceback, 100)
    assert log() is None  # this attempt did not come to start ranks
    (tmp_path / "progress.jsonl").write_text(json.dumps({"time": time.time() - 50, "event": "start"}) + "\n")
    write("new", "agent.log", "", 40)
    assert log() is None
    agent = write("new", "agent.log", "torchrun says", 40)
    assert log() == agent
    write("new", first, "waited", 30)
    broken = write("new", second, traceback + "frames\n" * 2000, 20)  # longer than what a result keeps
    assert log() == broken
    assert progress.log_tail(tmp_path / "logs" / "new").startswith("--- rank 1, stderr ---")


def test_what_runs_and_that_it_runs_once(tmp_path, alst):
    """Status follows a running sweep; a second one says who runs and touches nothing; killed, it is interrupted."""
    spec, out = write_spec(tmp_path, rows=HANGS), out_of(tmp_path)
    command = [sys.executable, "-m", "alstlib.runs.cli", "run", str(spec)]
    sweep = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kernel = None
    try:
        assert wait_for(lambda: all((out / "one" / f"started.{rank}").exists() for rank in (0, 1)), 120)
        made = json.loads(alst(f"status {spec} --json", 3))
        row = made["rows"][0]
        assert (row["state"], row["step"], row["steps"]) == ("running", 2, 2)
        assert row["seconds"] > 0
        assert made["holder"]["pid"] == sweep.pid
        shown = alst(f"status {spec}", 3)
        assert f"run by process {sweep.pid} since" in shown
        assert re.search(r"^one +running .*step 2/2 ", shown, re.MULTILINE)
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.suffix != ".ipynb"}
        assert f"in use by another run: process {sweep.pid} since" in alst(f"run {spec} --force", 2)
        assert {p: p.stat().st_mtime_ns for p in before} == before
        with pytest.raises(ValueError, match="its folder is in use by process"):
            cli.run_row(cli.load_spec(spec), "one")
        kernel = locks.holder(out / "one")["pid"]
    finally:
        sweep.kill()
        sweep.wait()
        if kernel:
            os.kill(kernel, signal.SIGKILL)
    assert wait_for(lambda: status.look(out / "one", None).state == "interrupted", 20)
    assert locks.holder(out) is None


def test_a_dry_run_says_what_would_run(tmp_path, monkeypatch, alst):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    base = {"model.name": "tiny", "data.seq_len": 256, "optim.steps": 2}
    rows = ["alst", {"name": "long", "engine.sp": 2, "data": {"seq_len": "100K"}, "limits.device_memory": "96MiB"}]
    spec = write_spec(tmp_path, base=base, rows=rows, parameters=None)
    shown = alst(f"run {spec} --dry-run")
    for part in (
        "  sets       row=alst, model.name=tiny, data.seq_len=256, options.tiles={'loss': True, 'mlp': True}, "
        "options.offload=sync, options.save_attention=False, engine.world_size=2, engine.sp=2, optim.steps=2\n",
        "  predicted  fits: ", "  predicted  does not fit: ", " short on the device and ",
        f"  folder     {out_of(tmp_path) / 'alst'}\n",
    ):  # fmt: skip
        assert part in shown
    assert re.search(r"\n +device, each rank +[\d.]+ MiB  of 96\.00 MiB\n", shown)
    assert re.search(r"\n +a step +not predicted  rates are known for GPUs only\n", shown)
    assert not (tmp_path / "papermill_runs").exists()
    spec = write_spec(tmp_path, rows=[{"name": "k"}], parameters={"worker": "alstlib.measure.time_kernels"})
    assert "not predicted: the worker is alstlib.measure.time_kernels" in alst(f"run {spec} --dry-run")


REFUSED = """
bases: {}                         -> unknown field of a spec 'bases'; did you mean 'base'?
base: {seq_length: 1}             -> unknown parameter 'seq_length'; did you mean 'data.seq_len'?
base: {data: {seq_length: 1}}     -> unknown field of data 'seq_length'; did you mean 'seq_len'?
base: {seq_len: 1}                -> unknown parameter 'seq_len'; did you mean 'data.seq_len'?
base: {cuda: {}, cpu: {modle: a}} -> unknown parameter 'modle'; did you mean 'model'?
rows: [ulyses]                    -> unknown row 'ulyses'; did you mean 'ulysses'?
rows: [{name: x, options.tils: 1}] -> unknown field of Options 'tils'; did you mean 'tiles'?
rows: [{name: ../x}]              -> row='../x' must be the name of a folder
rows: [{name: x, engine.sp: 3}]   -> engine.sp=3 does not divide engine.world_size=2; use engine.sp=2
rows: [alst, alst]                -> must have a name that no other row has
rows: [{model.name: tiny}]        -> must have a name that no other row has
rows: []                          -> rows=[] must be a list of at least one row
{rows: null, base: {}}            -> must be a list of at least one row
notebook: spec.yaml               -> spec.yaml' is not a Jupyter notebook that can be read
{base: {data.allow_dropped: true}, parameters: {}} -> data.allow_dropped=True is a field of the worker alstlib.train.f
notebook: rnu.ipynb               -> notebook='rnu.ipynb'
parameters: {wroker: w}           -> unknown parameter of run.ipynb 'wroker'; did you mean 'worker'?
seq_len: 4                        -> unknown field of a spec 'seq_len'; did you mean 'base: {data.seq_len: ...}'?
parameters: {seq_len: 4}          -> unknown parameter of run.ipynb 'seq_len'; did you mean 'data.seq_len'?
parameters: {tilse: 1}            -> 'tilse'; did you mean 'options.tiles'?
report: run.ipynb                 -> unknown parameter of run.ipynb 'results'
"""


@pytest.mark.parametrize("changes, message", lines_of(REFUSED))
def test_unknown_names_are_refused_before_anything_starts(tmp_path, monkeypatch, alst, changes, message):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    monkeypatch.setattr(cli, "execute", lambda *a: pytest.fail("a notebook was executed"))
    assert message in alst(f"run {write_spec(tmp_path, **yaml.safe_load(changes))}", 2)
    assert not (tmp_path / "papermill_runs").exists()


def test_many_more_ranks_than_cores_are_refused_unless_forced(tmp_path, monkeypatch, alst):
    """A typing error would start 100,000 processes."""
    monkeypatch.setattr("alstlib.runs.workers.cores", lambda: 2)
    says = "engine.world_size=100000 would start 100,000 processes on a machine with 2 cores; give at most 16"
    run = RunConfig(model={"name": "tiny"}, engine={"world_size": 100_000}, data={"seq_len": 100_000})
    with pytest.raises(ValueError, match=says):
        launch.launch(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    spec = write_spec(tmp_path, base={"engine.world_size": 100_000})
    for flags in ("", "--dry-run"):
        assert says in alst(f"run {spec} {flags}", 2)
    for flags in ("--force", "--nodes=2"):  # such a job has other machines
        assert "would run as" in alst(f"run {spec} --dry-run {flags}")
    workers.check_ranks(100_000, 6250, 0)
    workers.check_ranks(100_000, 1, 100_000)


def test_set_is_repeated_in_what_is_typed_next_and_status_knows_it(tmp_path, monkeypatch, ran, alst):
    """It changes fields of all rows; values are YAML's."""
    spec, ran.status = write_spec(tmp_path), "error"
    sets = ["options.chunk=64", "optim.learning_rate=1e-5", "optim.trainer={seed: 3}", "model.name='7'"]
    changed = {"options.chunk": 64, "optim.learning_rate": 1e-5, "optim.trainer": {"seed": 3}, "model.name": "7"}
    monkeypatch.chdir(tmp_path)
    said = alst(f"run spec.yaml {shlex.join(w for text in sets for w in ('--set', text))} --rows bad", 1)
    again = said.partition("repeat them with: alst ")[2]
    put(out_of(tmp_path) / "bad", RunConfig())  # it began
    assert alst(again, 1).endswith(again)
    assert [row for row, *_ in ran] == ["bad", "bad"]
    as_run = cli.load_spec(spec, as_run=True)
    assert as_run.rows["bad"] == cli.load_spec(spec, changes=changed).rows["bad"] != cli.load_spec(spec).rows["bad"]
    for row, config in as_run.rows.items():
        put(as_run.out / row, config, "ok")
    for argument in ("spec.yaml", as_run.out):
        alst(f"status {argument}")
    shutil.rmtree(as_run.out / "good")
    command, *_ = json.loads(alst("status spec.yaml --json", 3))["next"]
    assert "bad: it finished already: ok" in alst(f"{command.removeprefix('alst ')} --dry-run")
    assert "it finished already" not in alst("run spec.yaml --dry-run")
    assert "--set chunk must have the form FIELD=VALUE" in alst("run spec.yaml --dry-run --set chunk", 2)


@pytest.mark.parametrize("command", ["check --ranks", "verify tiny --sp"])
def test_check_and_verify_refuse_as_many_ranks_as_run_does(monkeypatch, alst, command):
    monkeypatch.setattr("alstlib.runs.workers.cores", lambda: 2)
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    started = []
    monkeypatch.setattr(
        launch, "launch", lambda run, *a, **k: started.append(run.engine.world_size) or {"status": "no"}
    )
    monkeypatch.setattr(verify, "run_on_ranks", lambda function, ranks, *a: started.append(ranks) or 1 / 0)
    given = command.partition("--")[2]
    says = f"{given}=17 would start 17 processes on a machine with 2 cores; give at most 16"
    assert says in alst(f"{command} 17", 2)
    assert started == []
    for argv in ("16", "17 --force"):
        with contextlib.suppress(ZeroDivisionError, KeyError):
            alst(f"{command} {argv}")
    assert started == [16, 17]


def test_a_spec_outside_of_the_clone_runs_its_notebook(tmp_path, monkeypatch, alst):
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    path = tmp_path / "mine.yaml"
    path.write_text("{rows: [{name: one, model.name: tiny}]}")
    (deep := tmp_path / "deep").mkdir()
    for here, out in ((REPOSITORY, REPOSITORY), (REPOSITORY / "tests", REPOSITORY), (deep, deep)):
        monkeypatch.chdir(here)
        spec = cli.load_spec(path)
        assert spec.notebook == REPOSITORY / "notebooks" / "run.ipynb"
        assert spec.out == out / "papermill_runs" / "out" / "mine"
        assert "--out" not in spec.typed("run")
        assert launch.default_folder(RunConfig()).parent == out / "papermill_runs" / "out" / "single"
    first, second, *_ = alst(f"run {path} --dry-run").splitlines()
    assert first == "mine: 1 row, results in papermill_runs/out/mine"
    assert second.startswith("one: would run as")
    assert f"results in {tmp_path / 'out'}\n" in alst(f"run {path} --out {tmp_path / 'out'} --dry-run")
    assert f"no runs below {deep / 'papermill_runs' / 'out'}" in alst("status")


def test_rows_that_are_not_in_the_spec_and_specs_that_do_not_exist(tmp_path, alst):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for line, says in (
        (f"run {write_spec(tmp_path)} --rows good,bda", "unknown row 'bda'; did you mean 'bad'?"),
        (f"status {tmp_path}/no.yaml", "no.yaml does not exist; "),
        (f"run {tmp_path}/loop.yaml", "loop.yaml does not exist; it is a symbolic link to loop.yaml"),
        (f"report {tmp_path}", ""),
    ):
        assert says in alst(line, 2)


def test_dropped_rows_are_allowed_by_a_switch_that_starts_no_other_run(tmp_path, ran, alst):
    path = write_spec(tmp_path, rows=[{"name": "good", "model.name": "tiny"}])
    alst(f"run {path} --allow-dropped")
    allowed, plain = ran[0][2].rows["good"], cli.load_spec(path).rows["good"]
    assert (allowed.data.allow_dropped, plain.data.allow_dropped) == (True, False)
    assert allowed.digest() == plain.digest()


def test_nothing_unprintable_reaches_a_terminal(tmp_path, capsys):
    """Of results that others made, of names in a spec, of what a run says."""
    evil = "\x1b]0;owned\x07\x1b[2J\rgone\x9b31m\u202e"
    folder = tmp_path / "sweep"
    error = {"type": f"{evil}E", "message": f"{evil}first\nsecond"}
    put(folder / "row", RunConfig(row="row"), "error", error={**error, "log_tail": ""})
    for arguments in (["status"], ["report"], ["status", "--json"], ["run", evil]):
        cli.main([*arguments, *([str(folder)] if evil not in arguments else [])])
        shown = "".join(capsys.readouterr())
        assert shown
        assert all(c.isprintable() or c == "\n" for c in shown), arguments
    progress.Printer()({"event": "load", "row": "r", "message": f"{evil}x\ny"})
    assert capsys.readouterr().out == f"r  {''.join(c if c.isprintable() else ' ' for c in evil)}x y\n"


@pytest.mark.parametrize("name, value", [("metrics", []), ("config", "x"), ("error", ["x"]), ("git", None)])
def test_a_result_that_is_none_is_one_unreadable_row(tmp_path, alst, name, value):
    put(tmp_path / "row", RunConfig(row="row"))
    made = results.new_result(RunConfig(row="row"), "error", error={"type": "E"})
    (tmp_path / "row" / "result.json").write_text(json.dumps({**made, name: value}))
    assert re.search("row +unreadable", alst(f"status {tmp_path}", 1))


def test_the_hardware_chooses_its_section(tmp_path, monkeypatch):
    base = {"optim": {"steps": 5}, "cpu": {"data.seq_len": 1000}, "cuda": {"data.seq_len": "8K", "optim.steps": 7}}
    spec = write_spec(tmp_path, base=base, rows=["alst", {"name": "ours", "options": {"tiles": {"mlp": 64}}}])
    for gpus, length, steps, sp in ((0, 1000, 5, 2), (4, 8000, 7, 4)):
        monkeypatch.setattr(devices, "device_count", lambda gpus=gpus: gpus)
        rows = cli.load_spec(spec).rows
        for c in rows.values():
            assert (c.data.seq_len, c.optim.steps, c.engine.sp, c.engine.world_size) == (length, steps, sp, sp)
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
    spec, folder = cli.load_spec(write_spec(tmp_path)), out_of(tmp_path) / "good"
    monkeypatch.setattr(cli, "execute", lambda *a: RuntimeError("Kernel died"))
    put(folder, RunConfig(), "ok")
    result = cli.run_row(spec, "good")
    assert (result["status"], result["error"]["message"]) == ("error", "Kernel died")
    assert results.read_result(folder / "result.json") == result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_sweep_stops_it_and_leaves_nothing(tmp_path, number):
    spec = write_spec(tmp_path, rows=[*HANGS, {"name": "two", "model.config": {"fake": "ok"}}])
    command, out = [sys.executable, "-m", "alstlib.runs.cli", "run", str(spec)], out_of(tmp_path)
    sweep = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
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
    spec = write_spec(tmp_path, rows=HANGS)
    command = [sys.executable, "-X", "importtime", "-m", "alstlib.runs", "run", str(spec)]
    if when != "importing":
        command[1:3] = []
    sweep = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def kernel_starts() -> bool:
        assert sweep.poll() is None
        lines = [_read(Path(f"/proc/{p.pid}/cmdline")) for p in psutil.Process(sweep.pid).children()]
        return any(b"ipykernel_launcher" in line for line in lines)

    try:
        if when == "importing":  # which reports each module as it has been imported
            while "pydantic" not in (line := sweep.stderr.readline()):
                assert line
        else:
            assert wait_for(kernel_starts, 60)  # it imports
        os.killpg(sweep.pid, signal.SIGINT)
        said = [line for line in sweep.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    finally:
        sweep.kill()
        sweep.wait()
    assert sweep.returncode == 130
    assert len([line for line in said if line]) <= 2, said
    assert "alst: interrupted" in said[-1]


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_kernel_has_minutes_to_start(tmp_path, monkeypatch):
    """papermill's own limit of a minute was met on a busy machine, as "Kernel didn't respond in 60 seconds"."""
    given = {}
    monkeypatch.setattr("papermill.execute_notebook", lambda *a, **kw: given.update(kw))
    notebook = REPOSITORY / "notebooks" / "run.ipynb"
    assert cli.execute(notebook, tmp_path / "o.ipynb", {}, lambda: None) is None
    assert given["start_timeout"] >= 600


@pytest.mark.slow
def test_the_ablations_report_needs_no_row_but_the_first(tmp_path):
    """A sweep may have been given some rows only: the lesson that is its report leaves out what it cannot show."""
    committed = REPOSITORY / "papermill_runs" / "results" / "ablation-cpu" / "baseline"
    shutil.copytree(committed, tmp_path / "baseline")
    lesson, output = REPOSITORY / "notebooks" / "09_ablation.ipynb", tmp_path / "report.ipynb"
    assert cli.execute(lesson, output, {"results": str(tmp_path)}, lambda: None, lesson.parent) is None
    assert output.exists()
