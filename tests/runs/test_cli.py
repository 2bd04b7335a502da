"""`alst`: specs, sweeps through papermill, what is run again and what is refused."""

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
import yaml
from cases import check_refused, lines_of, make_file, wait_for
from nbformat.v4 import new_code_cell, new_notebook
from test_launch import PATHS, processes_of, result_of, with_gpus

from alstlib.base.config import ROWS, RunConfig
from alstlib.runs import cli, launch, locks, notebooks, processes, progress, results, status

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parents[1]
HANGS = [{"name": "one", "model.config": {"fake": "hang"}}]


SPEC = """
name: sweep
notebook: run.ipynb
rows: [{name: good, model.config: {fake: ok}}, {name: bad, model.config: {fake: fail}}]
parameters: {worker: fake_worker}
base: {limits.timeout: 60}
"""


def write_spec(folder, **changes):
    spec = {**yaml.safe_load(SPEC), **changes}
    shutil.copy(REPOSITORY / "notebooks/run.ipynb", folder)
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in spec.items() if v is not None}))
    return path


def out_of(folder):
    return folder / "papermill_runs/out/sweep"


def put(folder, config, ended="", began=0.0, **changes):
    """What a run leaves: its configuration, a step, and its result where it has `ended`."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write_json(folder / "config.json", config.to_dict())
    event = {"time": began or time.time() - 100, "event": "step", "step": 3, "steps": 9}
    (folder / "progress.jsonl").write_text(json.dumps(event) + "\n")
    if ended:
        results.write_result(folder / "result.json", {**results.new_result(config, ended), **changes})


@pytest.fixture
def ran(monkeypatch):
    """The rows that are run, those that are forced with an exclamation mark; they end as `status` says."""
    made = SimpleNamespace(rows=[], status="ok", error=None)

    def run_row(spec, row, force, warned):
        made.rows.append(row + "!" * force)
        return results.new_result(spec.rows[row], made.status, error=made.error)

    monkeypatch.setattr(cli, "execute", lambda *a, **k: None)
    monkeypatch.setattr(cli, "run_row", run_row)
    return made


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of a row that works and one that fails, run once; its report names a kernel that nobody has."""
    folder = tmp_path_factory.mktemp("cli")
    reported = "import sys\nimport beside\nopen(f'{results}/reported', 'w').write(sys.executable)"
    cells = [new_code_cell("results = ''", metadata={"tags": ["parameters"]}), new_code_cell(reported)]
    kernel = {"kernelspec": {"name": "gone", "language": "python", "display_name": "gone"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "report.ipynb")
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
    assert [result_of(out / row)["status"] for row in ("good", "bad")] == ["ok", "error"]
    assert (out / "good/run.ipynb").exists()
    assert "RunFailed" in (out / "bad/run.ipynb").read_text()
    assert (out / "reported").read_text() == sys.executable


@pytest.mark.parametrize(
    "arguments, expected",
    [("", "bad"), ("--rows good", ""), ("--force", "good! bad!"), ("--dry-run", "")],
)
def test_what_is_run_again(sweep, ran, alst, arguments, expected):
    said = alst(f"run {sweep[0]} {arguments}")
    assert ran.rows == expected.split()
    assert ("good: it finished already: ok" in said) == (arguments in ("", "--rows good", "--dry-run"))


def test_fail_fast(tmp_path, ran, alst):
    """A row that does not fit says why and fails nothing."""
    spec, ran.status = write_spec(tmp_path), "timeout"
    ran.error = {"type": "Timeout", "message": "too long"}
    assert "failed: good; repeat them with: alst run" in alst(f"run {spec} --fail-fast", 1)
    ran.status, ran.error = "oom", {"type": "WouldNotFit", "message": "1M tokens would take 71 GiB"}
    assert "bad: oom: WouldNotFit: 1M tokens would take 71 GiB\n" in alst(f"run {spec}")
    assert ran.rows == ["good", "good", "bad"]


def test_status_of_what_ended(sweep, alst, answer):
    spec = sweep[0]
    shown, made = alst(f"status {spec}", 1), answer(f"status {spec}", 1)
    good, bad = made["rows"]
    assert re.search(r"(?ms)^good +ok.*^bad [^\n]*RankFailed: rank 1 ended with exit status 1", shown)
    assert all(len(line) <= 100 for line in shown.partition("next:")[0].splitlines())
    assert f"next: alst run {spec} " in shown
    assert made["counts"] == {"ok": 1, "error": 1}
    assert (good["row"], good["status"], bad["row"], bad["status"]) == ("good", "ok", "bad", "error")
    assert good["seconds"] > 0
    assert f"less {bad['log']}" in shown
    assert "rank one is broken" in Path(bad["log"]).read_text()


def test_the_report_has_the_command_of_a_row(sweep, monkeypatch, alst):
    spec, out, _ = sweep
    monkeypatch.chdir(spec.parent)
    (out / "report.html").unlink()  # alst run wrote it
    table = alst(f"report {spec}")
    assert "| good | ok | real | {'fake': 'ok'} | 2,048 |" in table
    assert alst(f"report {out}") == table
    assert "<pre>alst run spec.yaml --rows good --force</pre>" in html.unescape((out / "report.html").read_text())


STATES = """
changed   -> stale       -> oom with data.seq_len=77 (here 2048)
committed -> ok at another commit, 0123456789
cut       -> interrupted -> after: step 3/9
again     -> interrupted
never     -> never run
torn      -> unreadable
"""


def test_status_of_what_was_changed_or_cut_off(tmp_path, monkeypatch, alst):
    """`again` has a newer attempt than its result, which is not of this configuration."""
    states = {row: says for row, *says in lines_of(STATES)}
    spec = write_spec(tmp_path, rows=[{"name": n, "model.config": {"fake": "ok"}} for n in states])
    loaded, out = cli.load_spec(spec), out_of(tmp_path)
    at_commit = {"run_id": "another", "git": {"sha": "0123456789abcdef", "dirty": False}}
    for row, changes, ended, more in (
        ("changed", {"data.seq_len": 77}, "oom", {}), ("committed", {}, "ok", at_commit), ("cut", {}, "", {}),
        ("again", {"optim.steps": 5}, "ok", {"began": time.time() + 50}), ("torn", {}, "", {}),
    ):  # fmt: skip
        put(out / row, loaded.rows[row].replace(**changes), ended, **more)
    (out / "torn/result.json").write_text("{")
    shown = alst(f"status {spec}", 1)
    for row, says in states.items():
        line = re.search(rf"(?m)^{row} .*", shown)[0]
        assert all(part in line for part in says), line
    for row in ("cut", "again", "torn"):
        shutil.rmtree(out / row)
    monkeypatch.chdir(tmp_path)
    cli.write_record(loaded)
    line = r"(?m)^sweep +2 stale, 4 never run +alst status papermill_runs/out/sweep *$"
    assert re.search(line, alst("status", 3))


def test_status_judges_rows_as_the_machine_that_ran_them(tmp_path, monkeypatch, alst):
    """A login node without GPUs, and a machine with fewer of them, look at a sweep that ran on eight."""
    base = {"cpu": {"data.seq_len": 1000}, "cuda": {"data.seq_len": "8K"}}
    rows = ["alst", {"name": "all", "engine.world_size": 8, "optim.steps": 3}]
    spec, out = write_spec(tmp_path, base=base, rows=rows), out_of(tmp_path)
    with_gpus(monkeypatch, 8)
    loaded = cli.load_spec(spec)
    for name, config in loaded.rows.items():
        put(out / name, config, "ok")
    cli.write_record(loaded)
    for gpus in (8, 2, 0):
        with_gpus(monkeypatch, gpus)
        assert not re.search("stale|alst run", alst(f"status {spec}")), gpus
        alst(f"report {spec}")
    assert cli.load_spec(spec).rows["alst"].engine.world_size == 2  # what `alst run` would run here
    write_spec(tmp_path, base=base, rows=["alst", {**rows[1], "optim.steps": 4}])
    assert "ok with optim.steps=3 (here 4)" in alst(f"status {spec}", 3)


def test_commands_to_type_next_can_be_typed(tmp_path, monkeypatch, ran, alst, answer):
    """They name the folder of the results where it is not the usual one, and quote what a shell would take apart."""
    (home := tmp_path / "my sweeps").mkdir()
    spec, out = write_spec(home), tmp_path / "other results"
    monkeypatch.chdir(tmp_path)
    ran.status, where = "error", "'my sweeps/spec.yaml' --out 'other results'"
    ran.error = {"type": "E", "message": ""}
    again = f"alst run {where} --rows bad"
    assert f"repeat them with: {again}\n" in alst(f"run {where} --rows bad", 1)
    log = out / "bad/logs/one/agent.log"
    make_file(log, "ended")
    put(out / "bad", cli.load_spec(spec).rows["bad"], "error", began=time.time())

    def typed():
        return list(answer(f"status {where}", 1)["next"])

    with locks.hold(out):
        assert typed() == ["less 'other results/bad/logs/one/agent.log'", f"alst report {where}"]
    assert f"alst run {where}" in typed()


def test_status_of_a_folder(sweep, tmp_path, alst):
    spec, out, _ = sweep
    assert alst(f"status {out}", 1) == alst(f"status {spec}", 1)  # it knows its spec
    assert "needs a spec" in alst(f"status {out} --out {tmp_path}", 2)
    alone = tmp_path / "other/alone"
    shutil.copytree(out / "bad", alone)
    for folder, line in ((out / "good", "good  ok"), (out / "bad", "bad  error"), (alone, "alone  error")):
        rows = re.findall(r"(?m)^(?:good|bad|alone) +\w+", alst(f"status {folder}", int("error" in line)))
        assert rows == [line]


def test_a_sweep_behind_a_symlink_knows_its_spec_and_says_when_that_became_invalid(tmp_path, monkeypatch, ran, alst):
    home, scratch = tmp_path / "home", tmp_path / "a/deep/scratch"
    for folder in (home / "papermill_runs", scratch):
        folder.mkdir(parents=True)
    (home / "papermill_runs/out").symlink_to(scratch)
    monkeypatch.chdir(home)
    spec, ran.status = write_spec(home), "oom"
    alst(f"run {spec}")
    assert "alst status papermill_runs/out/sweep\n" in alst("status", 3)  # both never ran
    spec.write_text(spec.read_text().replace("timeout", "tiemout"))
    for arguments in ("", f" {out_of(home)}"):
        assert "unknown field of limits 'tiemout'; did you mean 'timeout'?" in alst(f"status{arguments}")


def test_the_log_to_look_at_exists_and_is_of_the_newest_attempt(tmp_path):
    """Each of these is written, and is the log then or leaves it as it was."""
    traceback, log = "Traceback (most recent call last)", None
    for name, text, age, shown in (
        ("old/x/attempt_0/0/stderr.log", traceback, 100, False),  # the newest did not come to start ranks
        ("new/agent.log", "", 40, False),
        ("new/agent.log", "torchrun says", 40, True),
        ("new/x/attempt_0/1/stderr.log", traceback + "frames\n" * 2000, 20, True),  # longer than what a result keeps
        ("new/x/attempt_0/0/stderr.log", "waited", 30, False),
    ):
        path = tmp_path / "logs" / name
        make_file(path, text)
        os.utime(path, (time.time() - age,) * 2)
        log = path if shown else log
        assert status.Row(row="r", folder=tmp_path, status="error").log() == log
        (tmp_path / "progress.jsonl").touch()  # the next one starts ranks


@contextlib.contextmanager
def program(spec, *interpreter, **how):
    """`alst run` as a program, which is killed in the end where it still runs."""
    command = [sys.executable, *interpreter, "-m", "alstlib.runs", "run", str(spec)]
    with subprocess.Popen(command, env={**os.environ, **PATHS}, text=True, **how) as sweep:
        try:
            yield sweep
        finally:
            sweep.kill()


def test_what_runs_runs_once_and_ends_with_its_sweep(tmp_path, alst, answer):
    """Status follows a running sweep; a second one says who runs and touches nothing; SIGTERM leaves nothing behind."""
    spec, out = write_spec(tmp_path, rows=[*HANGS, {"name": "two", "model.config": {"fake": "ok"}}]), out_of(tmp_path)
    with program(spec, stdout=subprocess.PIPE) as sweep:
        while "/2  loss" not in (line := sweep.stdout.readline()):  # progress of the row reaches the terminal
            assert line
        assert wait_for(lambda: len(list(out.glob("one/started.[01]"))) == 2, 120)
        made = answer(f"status {spec}", 3)
        row = made["rows"][0]
        assert (row["status"], row["step"], row["steps"]) == ("running", 2, 2)
        assert row["seconds"] > 0
        shown = alst(f"status {spec}", 3)
        assert f"run by process {sweep.pid} on " in shown
        assert re.search(r"(?m)^one +running .*step 2/2 ", shown)
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.suffix != ".ipynb"}
        assert f"in use by another run: process {sweep.pid} on " in alst(f"run {spec} --force", 2)
        assert {p: p.stat().st_mtime_ns for p in before} == before
        check_refused("its folder is in use by process", cli.run_row, cli.load_spec(spec), "one")
        sweep.terminate()
        sweep.communicate(timeout=notebooks.KERNEL_SECONDS + processes.GRACE_SECONDS)
    assert (sweep.returncode, result_of(out / "one")["status"]) == (130, "cancelled")
    assert "KeyboardInterrupt" in (out / "one/run.ipynb").read_text()  # the cell itself cleaned up
    assert not (out / "two").exists()
    assert not processes_of(out)
    assert locks.holder(out) is None


def test_a_dry_run_says_what_would_run(tmp_path, monkeypatch, alst):
    with_gpus(monkeypatch, 0)
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
    worker = "papermill_runs/referee/time_kernels.py"
    spec = write_spec(tmp_path, rows=[{"name": "k"}], parameters={"worker": worker})
    assert f"not predicted: the worker is {REPOSITORY / worker}" in alst(f"run {spec} --dry-run")  # in the clone


REFUSED = """
bases: {}                         -> unknown field of a spec 'bases'; did you mean 'base'?
base: {seq_length: 1}             -> unknown parameter 'seq_length'; did you mean 'data.seq_len'?
base: {data: {seq_length: 1}}     -> unknown field of data 'seq_length'; did you mean 'seq_len'?
base: {seq_len: 1}                -> unknown parameter 'seq_len'; did you mean 'data.seq_len'?
base: {cuda: {}, cpu: {modle: a}} -> unknown parameter 'modle'; did you mean 'model'?
rows: [ulyses]                    -> unknown row 'ulyses'; did you mean 'ulysses'?
rows: [{name: x, options.tils: 1}] -> unknown field of Options 'tils'; did you mean 'tiles'?
rows: [{name: ../x}]              -> row='../x' must be the name of a folder
rows: [{name: x, engine.sp: 3}]   -> engine.sp=3 does not divide world_size=2: use sp=2
rows: [alst, alst]                -> must have a name that no other row has
rows: [{model.name: tiny}]        -> must have a name that no other row has
rows: []                          -> rows=[] must be a list of at least one row
{rows: null, base: {}}            -> must be a list of at least one row
notebook: spec.yaml               -> Notebook does not appear to be JSON
{base: {data.allow_dropped: true}, parameters: {}} -> data.allow_dropped=True is a field of the worker alstlib.runs.trai
notebook: rnu.ipynb               -> notebook='rnu.ipynb'
parameters: {worker: w.py}        -> worker='w.py'
parameters: {wroker: w}           -> unknown parameter of run.ipynb 'wroker'; did you mean 'worker'?
seq_len: 4                        -> unknown field of a spec 'seq_len'; did you mean 'base: {data.seq_len: ...}'?
parameters: {seq_len: 4}          -> unknown parameter of run.ipynb 'seq_len'; did you mean 'data.seq_len'?
parameters: {tilse: 1}            -> 'tilse'; did you mean 'options.tiles'?
report: run.ipynb                 -> unknown parameter of run.ipynb 'results'
"""


@pytest.mark.parametrize("changes, message", lines_of(REFUSED))
def test_unknown_names_are_refused_before_anything_starts(tmp_path, monkeypatch, alst, changes, message):
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr(cli, "execute", lambda *a: pytest.fail("a notebook was executed"))
    assert message in alst(f"run {write_spec(tmp_path, **yaml.safe_load(changes))}", 2)
    assert not (tmp_path / "papermill_runs").exists()


def test_set_is_repeated_in_what_is_typed_next_and_status_knows_it(tmp_path, monkeypatch, ran, alst, answer):
    """It changes fields of all rows; values are YAML's."""
    spec, ran.status, ran.error = write_spec(tmp_path), "error", {"type": "E", "message": ""}
    changed = {"options.chunk": 64, "optim.learning_rate": 1e-5, "optim.trainer": {"seed": 3}, "model.name": "7"}
    monkeypatch.chdir(tmp_path)
    sets = "--set options.chunk=64 --set optim.learning_rate=1e-5 --set 'optim.trainer={seed: 3}'"
    said = alst(f"""run spec.yaml {sets} --set "model.name='7'" --rows bad""", 1)
    again = said.partition("repeat them with: alst ")[2]
    put(out_of(tmp_path) / "bad", RunConfig())  # it began
    assert alst(again, 1).endswith(again)
    assert ran.rows == ["bad", "bad"]
    as_run = cli.load_spec(spec, as_run=True)
    assert as_run.rows["bad"] == cli.load_spec(spec, changes=changed).rows["bad"] != cli.load_spec(spec).rows["bad"]
    for row, config in as_run.rows.items():
        put(as_run.out / row, config, "ok")
    for argument in ("spec.yaml", as_run.out):
        alst(f"status {argument}")
    shutil.rmtree(as_run.out / "good")
    command, *_ = answer("status spec.yaml", 3)["next"]
    assert "bad: it finished already: ok" in alst(f"{command.removeprefix('alst ')} --dry-run")
    assert "it finished already" not in alst("run spec.yaml --dry-run")


def test_a_spec_outside_of_the_clone_runs_its_notebook(tmp_path, monkeypatch, alst):
    with_gpus(monkeypatch, 0)
    path = tmp_path / "mine.yaml"
    path.write_text("{rows: [{name: one, model.name: tiny}]}")
    (deep := tmp_path / "deep").mkdir()
    for here, home in ((REPOSITORY, REPOSITORY), (REPOSITORY / "tests", REPOSITORY), (deep, deep)):
        monkeypatch.chdir(here)
        spec, out = cli.load_spec(path), home / "papermill_runs/out"
        assert spec.notebook == REPOSITORY / "notebooks/run.ipynb"
        assert (spec.out, launch.default_folder(RunConfig()).parent) == (out / "mine", out / "single")
        assert "--out" not in spec.typed("run")
    assert "mine: 1 rows, results in papermill_runs/out/mine\none: would run as" in alst(f"run {path} --dry-run")
    assert f"no runs below {out}" in alst("status")


NOWHERE = """
run {}/spec.yaml --rows good,bda -> unknown row 'bda'; did you mean 'bad'?
status {}/no.yaml                -> no.yaml does not exist;
run {}/loop.yaml                 -> loop.yaml does not exist; it is a symbolic link to loop.yaml
run {}/spec.yaml --dry-run --set chunk -> --set chunk must have the form FIELD=VALUE
report {}                        -> there is no result.json below
status {}                        -> {} has no runs
status --out {}                  -> needs a spec
status {}/empty --out {}         -> needs a spec
report {}/empty --out {}         -> needs a spec
run {}/spec.yaml --out {}/a_file/out -> a_file/out' cannot be written to (Not a directory); name another folder
"""


def test_what_the_command_line_names_wrongly(tmp_path, alst):
    """On a read-only disk too, for which a file stands where a folder would be."""
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "a_file").touch()
    (tmp_path / "empty").mkdir()
    write_spec(tmp_path)
    for line, says in lines_of(NOWHERE.replace("{}", str(tmp_path))):
        assert says in alst(line, 2)
    assert not (tmp_path / "report.html").exists()


def test_nothing_unprintable_reaches_a_terminal(tmp_path, capsys):
    """Of results that others made, of names in a spec, of what a run says."""
    evil = "\x1b]0;owned\x07\x1b[2J\rgone\x9b31m\u202e"
    folder = tmp_path / "sweep"
    error = {"type": f"{evil}E", "message": f"{evil}first\nsecond", "log_tail": ""}
    put(folder / "row", RunConfig(row="row"), "error", error=error)
    for arguments in (f"status {folder}", f"report {folder}", f"status {folder} --json", f"run {evil}"):
        cli.main(arguments.split(" "))
        shown = "".join(capsys.readouterr())
        assert shown
        assert all(c.isprintable() or c == "\n" for c in shown), arguments
    progress.Printer()({"event": "load", "row": "r", "message": f"{evil}x\ny"})
    assert capsys.readouterr().out == f"r  {''.join(c if c.isprintable() else ' ' for c in evil)}x y\n"


def test_the_hardware_chooses_its_section(tmp_path, monkeypatch):
    base = {"optim": {"steps": 5}, "cpu": {"data.seq_len": 1000}, "cuda": {"data.seq_len": "8K", "optim.steps": 7}}
    spec = write_spec(tmp_path, base=base, rows=["alst", {"name": "ours", "options": {"tiles": {"mlp": 64}}}])
    for gpus, *want in ((0, 1000, 5, 2, 2), (4, 8000, 7, 4, 4)):
        with_gpus(monkeypatch, gpus)
        rows = cli.load_spec(spec).rows
        for c in rows.values():
            assert [c.data.seq_len, c.optim.steps, c.engine.sp, c.engine.world_size] == want
    ours = rows["ours"].options
    assert (ours.tile("mlp"), ours.save_attention, rows["alst"].options.offload) == (64, "auto", "sync")


def test_the_ablation_is_the_seven_rows(monkeypatch):
    for gpus in (0, 8):
        with_gpus(monkeypatch, gpus)
        rows = cli.load_spec(REPOSITORY / "papermill_runs/specs/ablation.yaml").rows
        assert [name for name, row in rows.items() if row.search] == list(ROWS)


def test_a_dead_kernel_is_an_error_in_the_result(tmp_path, monkeypatch):
    spec, folder = cli.load_spec(write_spec(tmp_path)), out_of(tmp_path) / "good"
    monkeypatch.setattr(cli, "execute", lambda *a: RuntimeError("Kernel died"))
    put(folder, RunConfig(), "ok")
    result = cli.run_row(spec, "good")
    assert (result["status"], result["error"]["message"]) == ("error", "Kernel died")
    assert result_of(folder) == result


@pytest.mark.parametrize("when", ["importing", "the kernel starts"])
def test_ctrl_c_in_the_first_seconds_is_two_lines(tmp_path, when):
    """A terminal sends it to every process that was started from it, the notebook's kernel too."""
    shown = ["-X", "importtime"] if when == "importing" else []  # which reports each module as it has been imported
    with program(write_spec(tmp_path, rows=HANGS), *shown, stderr=subprocess.PIPE, start_new_session=True) as sweep:

        def kernel_starts():
            assert sweep.poll() is None
            with contextlib.suppress(psutil.Error):
                return any("ipykernel_launcher" in p.cmdline() for p in psutil.Process(sweep.pid).children())
            return False

        if shown:
            while "pydantic" not in (line := sweep.stderr.readline()):
                assert line
        else:
            assert wait_for(kernel_starts, 60)  # it imports
        os.killpg(sweep.pid, signal.SIGINT)
        said = [line for line in sweep.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    assert sweep.returncode == 130
    assert len([*filter(None, said)]) <= 2, said
    assert "alst: interrupted" in said[-1]


@pytest.mark.slow
def test_the_ablations_report_needs_no_row_but_the_first(tmp_path):
    """A sweep may have been given some rows only: the lesson that is its report leaves out what it cannot show."""
    committed = REPOSITORY / "papermill_runs/results/ablation-cpu/baseline"
    shutil.copytree(committed, tmp_path / "baseline")
    lesson, output = REPOSITORY / "notebooks/09_ablation.ipynb", tmp_path / "report.ipynb"
    notebook, alone = json.loads(lesson.read_text(encoding="utf-8")), {"own-counter-code", "scenario-code"}
    assert alone <= {cell["id"] for cell in notebook["cells"]}
    asked = [cell for cell in notebook["cells"] if cell["id"] not in alone]  # what asks nothing of a sweep is long
    (tmp_path / "lesson.ipynb").write_text(json.dumps({**notebook, "cells": asked}), encoding="utf-8")
    assert cli.execute(tmp_path / "lesson.ipynb", output, {"results": str(tmp_path)}, folder=lesson.parent) is None
