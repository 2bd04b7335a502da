"""A real Slurm of two nodes on this machine gets the commands of env/README.md, word for word (`make test-slurm`)."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from cases import ROOT, living, wait_for
from cluster import CPU_NODES, GPU_NODES, GPUS, tail
from test_lab import checkout as copy
from test_repository import program

from alstlib.runs import results
from alstlib.runs.torchrun import AGENT

PAGE = re.search(r"^### Slurm\n(.*?)^## ", (ROOT / "env" / "README.md").read_text(), re.M | re.S)[1]  # type: ignore[index]
LINES = re.findall(r"^ {4}(.*?)(?:\s{2,}#.*)?$", PAGE, re.M)
START_SECONDS = 240.0
"""For a job to start its ranks on a machine that is busy."""


def line(*words, job="JOB"):
    """The one command of the page that has these words."""
    (found,) = [found for found in LINES if all(word in found for word in words)]
    return found.replace("JOB", job)


@pytest.fixture
def checkout(tmp_path, slurm):
    """A copy of what runs, with the environment of these tests as its `.venv`."""
    copy(folder := tmp_path / "checkout")
    (folder / ".venv").symlink_to(sys.prefix)
    slurm.env["PYTHONPATH"] = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    slurm.env["OMP_NUM_THREADS"] = "1"
    return folder


def number(said):
    return re.search(r"job (\d+)", said)[1]  # type: ignore[index]


def submit(slurm, command, folder):
    done = slurm.run("bash", "-c", command, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return number(done.stdout)


def log(slurm, job):
    return Path(slurm.show("job", job)["StdOut"]).read_text(errors="replace")


def reached(slurm, job, row, step):
    """Wait until a run has done so many steps."""

    def there():
        lines = (row / "progress.jsonl").read_text().splitlines() if (row / "progress.jsonl").exists() else []
        done = [json.loads(line).get("step") or 0 for line in lines if line.endswith("}")]
        return max(done, default=0) >= step

    if not wait_for(lambda: there() or slurm.show("job", job)["JobState"] in ("FAILED", "COMPLETED"), START_SECONDS):
        raise AssertionError(f"no step {step} after {START_SECONDS:.0f} s:\n{log(slurm, job)}")
    assert slurm.show("job", job)["JobState"] == "RUNNING", log(slurm, job)


# What a job gets


def test_a_job_gets_whole_nodes_whatever_they_have(slurm, tmp_path):
    """On both nodes: Slurm alone would give a step one core, a hundredth of the memory, and no GPU."""
    said = "node=$SLURM_NODEID cores=$(taskset -pc $$ | sed 's/.*: //') gpus=${SLURM_GPUS_ON_NODE:-0}"
    code = "import subprocess, sys; from alstlib.runs import cluster; "
    code += "sys.exit(subprocess.run([*cluster.here().launcher, *sys.argv[1:]]).returncode)"
    on_nodes = shlex.join([sys.executable, "-c", code, str(tmp_path / "task")])
    program(tmp_path / "task", f'echo "{said} $@"')
    python = program(tmp_path / "python", f'export CUDA_VISIBLE_DEVICES=\nexec {on_nodes} "$@"')
    slurm.env |= {"ALST_PYTHON": python, "PYTHONPATH": str(ROOT)}
    cores = f"0-{last}" if (last := (os.cpu_count() or 1) - 1) > 1 else ",".join(map(str, range(last + 1)))
    try:
        on_gpus = "--partition=gpu"
        for options, nodes, gpus in (
            ("", CPU_NODES, 0), (on_gpus, GPU_NODES, GPUS), (f"{on_gpus} --gpus-per-node=2", GPU_NODES, 2),
        ):  # fmt: skip
            job = submit(slurm, f"sbatch {options} {ROOT}/env/cluster/alst.sbatch SPEC --rows a", tmp_path)
            slurm.wait(job, "COMPLETED", START_SECONDS)
            ran = f"node=(\\d) cores={cores} gpus={gpus} -m alstlib.runs.cli run SPEC --rows a"
            assert sorted(re.findall(ran, log(slurm, job))) == ["0", "1"], log(slurm, job)
            assert "invalid date" not in log(slurm, job), "a job without a time limit has no end"
            memory = sum(int(slurm.show("node", node)["RealMemory"]) for node in nodes)
            assert f"mem={memory}M" in slurm.show("job", job)["TRES"]
    finally:
        del slurm.env["ALST_PYTHON"]


def test_the_error_of_the_run_is_the_last_word(slurm, checkout):
    (checkout / "bad.yaml").write_text("{name: bad, base: {seq_lenn: 64}, rows: [alst]}")
    job = submit(slurm, "sbatch env/cluster/alst.sbatch bad.yaml", checkout)
    slurm.wait(job, "FAILED", START_SECONDS)
    last = log(slurm, job).splitlines()[-1]
    assert last == "alst: unknown parameter 'seq_lenn'; did you mean 'data.seq_len'?"


def clock(checkout, steps):
    """The spec `clock` of steps that take a second; the folder of its row."""
    base = {"model.name": "tiny", "engine.world_size": 2, "optim.steps": steps}
    spec = {"name": "clock", "base": base, "rows": [{"name": "count"}], "parameters": {"worker": "clock"}}
    (checkout / "clock.yaml").write_text(yaml.safe_dump(spec))
    return checkout / "papermill_runs" / "out" / "clock" / "count"


def test_a_run_ends_before_its_job_and_the_job_continues(slurm, checkout):
    """A job of three minutes, which Slurm warns after one: the run ends halfway, and another attempt finishes it.

    Ranks get two minutes less what it takes to start them, and on a machine that is busy that is one."""
    row = clock(checkout, 130)
    job = submit(slurm, "sbatch --nodes=2 --time=3 env/cluster/alst.sbatch clock.yaml", checkout)
    slurm.wait(job, "COMPLETED", 3 * START_SECONDS)
    assert int(slurm.show("job", job)["Restarts"]) >= 1
    assert results.read_result(row / "result.json")["metrics"]["begun"] > 0
    assert "the time is up; this command continues it: alst run clock.yaml" in log(slurm, job)


def test_a_node_that_dies_is_named(slurm, checkout):
    """Its torchrun is killed, and its rank with it. The other rank notices nothing, and srun ends it a minute later."""
    row = clock(checkout, 600)
    job = submit(slurm, "sbatch --nodes=2 env/cluster/alst.sbatch clock.yaml", checkout)
    reached(slurm, job, row, 3)
    (attempt,) = (row / "logs").iterdir()
    (agent,) = [
        pid for pid in living(attempt.name)
        if AGENT in psutil.Process(pid).cmdline() and psutil.Process(pid).environ().get("SLURMD_NODENAME") == "n2"
        and psutil.Process(pid).name() != "srun"
    ]  # fmt: skip
    os.kill(agent, signal.SIGKILL)
    slurm.wait(job, "FAILED", START_SECONDS)
    error = results.read_result(row / "result.json")["error"]
    assert error["type"] == "NodeLost"
    assert "node 1 (n2) ended without a word" in error["message"]
    assert "srun: error: n2: task 1: Killed" in error["message"]
    assert not living(attempt.name)


# The page


def test_the_first_row_of_the_ablation(slurm, checkout):
    job = submit(slurm, line("sbatch", "ablation-quick"), checkout)
    slurm.wait(job, "COMPLETED", 3 * START_SECONDS)  # with the notebook of the report
    out = checkout / "papermill_runs" / "out" / "ablation-quick"
    found = results.read_result(out / "baseline" / "result.json")
    assert found["status"] == "ok"
    assert len(found["metrics"]["device_peak_bytes"]) == 2
    assert list((out / "baseline" / "logs").glob("*/node1.rank1")), "the second node had no rank"
    assert list(out.glob("*/run.ipynb")) == [out / "baseline" / "run.ipynb"]


def tuned(checkout):
    """The spec of the page, longer and with one rank on a node; the folder of its row."""
    path = checkout / "papermill_runs" / "specs" / "finetune.yaml"
    spec = yaml.safe_load(path.read_text())
    spec["base"]["cpu"] |= {"engine": {"world_size": 2}}
    spec["base"]["cpu"]["optim"] |= {"steps": 80}
    path.write_text(yaml.safe_dump(spec))
    return checkout / "papermill_runs" / "out" / "finetune" / "full"


@pytest.mark.timeout(3600)  # five jobs, one after the other
def test_a_fine_tuning_that_is_disturbed_ends_with_the_same_losses(slurm, checkout):
    """Warned, requeued and cancelled, by the commands of the page: the losses are those of an undisturbed run."""
    row = tuned(checkout)
    slurm.wait(submit(slurm, line("sbatch", "finetune"), checkout), "COMPLETED", 3 * START_SECONDS)
    expected = results.read_result(row / "result.json")["metrics"]
    row.parent.rename(row.parent.with_name("undisturbed"))

    by_hand = line("sbatch", "finetune")
    job = submit(slurm, by_hand, checkout)
    reached(slurm, job, row, 13)
    slurm.run("bash", "-c", line("--signal=USR1", job=job))
    wait_for(lambda: slurm.show("job", job)["Restarts"] == "1", START_SECONDS)
    warned = results.read_result(row / "result.json")
    assert (warned["status"], warned["error"]["type"]) == ("cancelled", "Warned")
    saved = {int(p.name.rpartition("-")[2]) for p in (row / "checkpoints").glob("checkpoint-*")}
    assert max(saved) % 10, f"no checkpoint between those of checkpoint_every: {saved}"

    reached(slurm, job, row, 33)
    slurm.run("bash", "-c", line("scontrol requeue", job=job))
    wait_for(lambda: slurm.show("job", job)["Restarts"] == "2", START_SECONDS)

    wait_for(lambda: slurm.show("job", job)["JobState"] == "RUNNING", START_SECONDS)
    reached(slurm, job, row, 53)
    slurm.run("bash", "-c", line("scancel JOB", job=job))
    slurm.wait(job, "CANCELLED", START_SECONDS)
    assert results.read_result(row / "result.json")["status"] == "cancelled"
    assert "cancelled" in slurm.run("bash", "-c", line("alst status"), cwd=checkout).stdout

    job = submit(slurm, by_hand, checkout)
    slurm.wait(job, "COMPLETED", 3 * START_SECONDS)
    found = results.read_result(row / "result.json")["metrics"]
    assert found["loss_steps"] == expected["loss_steps"] == list(range(1, 81))
    for name in ("loss", "eval_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), tail(row / "result.json")
