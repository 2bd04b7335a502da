"""Several nodes: what Slurm or options say of them, and runs on two, which a launcher starts on this machine."""

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import yaml
from cases import ROOT, check_refused, lines_of, listening, living, make_file, reads_proc, values_of, wait_for
from runs_on_ranks import trained
from test_launch import PATHS, hanging, in_thread, later, processes_of, result_of, start, with_gpus
from test_repository import program, run

from alstlib.base import sizing
from alstlib.runs import cli, cluster, launch, processes, results, torchrun

TWICE = shlex.join([sys.executable, str(Path(__file__).with_name("twice.py"))])
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "16", "SLURM_GPUS_ON_NODE": "8"}


@pytest.fixture
def two_nodes(monkeypatch):
    for name, value in cluster.Nodes(count=2, launcher=tuple(shlex.split(TWICE))).variables().items():
        monkeypatch.setenv(name, value)


def of_run(out):
    """All processes of a run: its launcher, agents and ranks."""
    found = (pid for attempt in (out / "logs").glob("*") for pid in living(attempt.name))
    return [psutil.Process(pid) for pid in found if psutil.pid_exists(pid)]


def agent_of(out, node):
    """A node's agent."""
    agents = (process for process in of_run(out) if torchrun.AGENT in process.cmdline()[:3])
    return next(agent for agent in agents if agent.environ()["ALST_NODE_RANK"] == str(node))


# Which nodes there are


NODES = """
{}    -> []                     -> 1 -> '' -> 127.0.0.1
slurm -> [1]                    -> 1 -> '' -> 127.0.0.1
slurm -> []                     -> 3 -> srun --overlap --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpu-bind=none \
--kill-on-bad-exit=0 --wait=60 --cpus-per-task=16 --gpus-per-node=8 -> 10.0.0.7
slurm -> [2, 'true']            -> 2 -> 'true'           -> 10.0.0.7
{}    -> [2, true -n 'a b', n1] -> 2 -> true -n 'a b'    -> n1
{}    -> [2, 'true']            -> 2 -> 'true'           -> the name of this node
"""
"""The environment and the options; how many nodes there are, their launcher, and the head."""


@pytest.mark.parametrize("env, given, count, launcher, head", values_of(NODES))
def test_which_nodes_there_are(monkeypatch, env, given, count, launcher, head):
    with_gpus(monkeypatch, 8)
    monkeypatch.setattr(cluster, "_slurm_address", lambda env: "10.0.0.7")
    monkeypatch.setattr(cluster.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(socket, "gethostname", lambda: "the name of this node")
    found = cluster.here(*given, env=env and SLURM)
    assert (found.count, shlex.join(found.launcher), found.head) == (count, launcher, head)
    assert cluster.told(found.variables()) == found
    assert cluster.told({"ALST_NODES": "2", **SLURM}) == cluster.Nodes(), "an opened notebook"


IMPOSSIBLE = """
{}                          -> [2] -> --nodes 2 needs --launcher CMD outside of a Slurm job
{SLURM_STEP_NUM_TASKS: '3'} -> []  -> srun started this command 3 times, but it must be started once
{SLURM_GPUS_ON_NODE: '4'}   -> []  -> Slurm gave this node 4 GPUs, but PyTorch can use 8
{}                          -> [2, no-such-launcher -n 2] \
-> "--launcher no-such-launcher -n 2: there is no command 'no-such-launcher'"
"""
"""Variables beside those of a job where there are any, and options."""


@pytest.mark.parametrize("env, given, says", values_of(IMPOSSIBLE))
def test_nodes_that_cannot_be(monkeypatch, env, given, says):
    with_gpus(monkeypatch, 8)
    check_refused(says, cluster.here, *given, env=env and {**SLURM, **env})


RANK_OF_NODE = """
{ALST_NODE_RANK: '1', SLURM_PROCID: '0'} -> 1
{OMPI_COMM_WORLD_RANK: '1'}              -> 1
{SLURM_PROCID: '0'}                      -> 0
{} -> ALST_NODE_RANK= must be the rank of this node, from 0 to 1.* set one of ALST_NODE_RANK, OMPI_COMM_WORLD_
{PMI_RANK: '2'}   -> PMI_RANK=2 must be the rank
{ALST_NODE_RANK: a} -> ALST_NODE_RANK=a must be the rank
"""


@pytest.mark.parametrize("env, says", values_of(RANK_OF_NODE))
def test_the_rank_of_a_node(env, says):
    if isinstance(says, int):
        assert torchrun.node_rank(2, env) == says
    else:
        check_refused(says, torchrun.node_rank, 2, env)


def test_the_heads_address_is_one_that_others_reach(monkeypatch):
    assert torchrun.free_port("127.0.0.1") > 0
    check_refused(r"--head 192\.0\.2\.1: this node cannot listen there", torchrun.free_port, "192.0.2.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **kw: [(2, 1, 6, "", ("127.0.1.1", 0))])
    check_refused(r"n1 means 127\.0\.1\.1 on this node, which no other node can reach", torchrun.free_port, "n1")


def test_a_run_ends_before_its_job(monkeypatch):
    for name in (cluster.JOB_END_VARIABLE, "SLURM_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert cluster.job_seconds() == float("inf")
    for left, seconds in ((4000, 4000 - cluster.MARGIN_SECONDS), (80, 40)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + left))
        assert cluster.job_seconds() == pytest.approx(seconds, abs=1)


@pytest.mark.parametrize("said, end", [("NONE", ""), ("2026-01-31T12:00:00", "1769860800")])
def test_the_job_loads_modules_reads_settings_and_is_queued_again(tmp_path, said, end):
    """The batch script, with stand-ins for Slurm's programs and for `alst run`, whose time is up."""
    program(tmp_path / "squeue", f"echo {said}")
    program(tmp_path / "scontrol", 'echo "scontrol $*"')
    python = program(tmp_path / "python", f'echo "$LOADED, $SET, $ALST_JOB_END, $*"\nexit {cluster.AGAIN}')
    (tmp_path / "setup.sh").write_text("export SET=read\n")
    given = {"ALST_MODULES": "gcc/13 cuda/13", "ALST_SETUP": "setup.sh", "ALST_PYTHON": python, "SLURM_JOB_ID": "7"}
    given |= {"BASH_FUNC_module%%": '() { export LOADED="$*$NOT_SET"; }', "TZ": "UTC"}
    done = run(["bash", ROOT / "env" / "cluster" / "alst.sbatch", "SPEC", "--rows", "a"], tmp_path, **given)
    started = f"load gcc/13 cuda/13, read, {end}, -m alstlib.runs.cli run SPEC --rows a"
    assert (done.stdout.splitlines(), done.stderr) == ([started, "scontrol requeue 7"], "")
    assert done.returncode == cluster.AGAIN


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("given, used", [(None, "lo"), ("eth7", "eth7")])
def test_gloo_gets_the_interface_that_reaches_the_head(monkeypatch, given, used):
    """A node's own name may mean an address that no other node reaches."""
    assert torchrun.interface("no.such.host.invalid") is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    attempt = torchrun.Attempt(id="a", ranks=1, out="/nowhere", worker="w", nodes=2, port=1)
    assert attempt.environment()["GLOO_SOCKET_IFNAME"] == used


# The command


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.yaml"
    base = "{model.name: tiny, data.seq_len: 64, optim.steps: 2, engine: {sp: 0, world_size: 2}}"
    path.write_text(f"{{name: two, base: {base}, rows: [alst]}}")
    return path


def test_options_can_be_variables(monkeypatch, capsys, alst, spec):
    monkeypatch.setenv("ALST_LAUNCHER", "no-such-launcher")
    monkeypatch.setenv("ALST_NODES", "2")
    assert "--launcher no-such-launcher: there is no command" in alst(f"run {spec}", 2)
    monkeypatch.setenv("ALST_GRACE", "soon")
    with pytest.raises(SystemExit):
        cli.main(["run", str(spec)])
    assert "argument --grace: invalid float value: 'soon'" in capsys.readouterr().err


# Runs on two nodes


@pytest.mark.launch
def test_a_sweep_on_two_nodes_is_the_run_on_one(ranks2, tmp_path, spec, alst):
    """To the bit. Real ranks; nothing of it is left."""
    out, one = tmp_path / "two", ranks2(trained, tmp_path / "one", cli.load_spec(spec).rows["alst"])[0]
    given = {**PATHS, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # as the ranks of the tests have it
    with mock.patch.dict(os.environ, given):  # the command sets some, too
        alst(f"run {spec} --out {out} --nodes 2 --head 127.0.0.1 --launcher {shlex.quote(TWICE)}")
    two = result_of(out / "alst")
    assert two["config"]["engine"]["world_size"] == two["config"]["engine"]["sp"] == 2
    assert one["metrics"]["loss"] == two["metrics"]["loss"]
    assert len(two["metrics"]["loss"]) == len(two["metrics"]["device_peak_bytes"]) == 2
    (logs,) = (out / "alst/logs").iterdir()
    assert {log.name for log in logs.iterdir()} >= {"agent.log", "launcher.log", "node1.rank1"}
    assert json.loads((out / "sweep.json").read_text())["nodes"] == 2
    assert not of_run(out / "alst")


@pytest.mark.launch
@pytest.mark.usefixtures("two_nodes")
@reads_proc
def test_nodes_that_fail_are_named(tmp_path):
    """A rank that is killed on the second node; and a node that dies, in a search that went on after memory ran out."""
    with pytest.raises(launch.RunFailed, match=r"RankKilled: node 1 \(host1\): rank 1 was ended by SIGKILL") as e:
        start("killed", tmp_path / "killed", world_size=2)
    assert e.value.result["error"]["message"].endswith("; after that, Explained: the other rank is gone")
    assert "/attempt_0/0/stderr.log ---" in e.value.result["error"]["log_tail"]

    out = tmp_path / "search"
    run = in_thread("shrink_then_hang", out, world_size=2, search=True)
    assert wait_for(lambda: len(list(out.glob("logs/*/node1.rank1/*/attempt_0/0/stderr.log"))) == 2)
    assert wait_for(lambda: sum("-m fake_worker" in line for line in processes_of(out).values()) == 2)
    assert {address for found in listening(out).values() for address in found} == {"127.0.0.1"}
    agent_of(out, 1).kill()
    assert str(run.exception(200)).startswith("error: NodeLost: node 1 (host1) ended without a word; ")
    assert wait_for(lambda: not of_run(out))


@pytest.mark.launch
@pytest.mark.usefixtures("two_nodes")
@reads_proc
def test_the_ranks_of_both_nodes_say_where_they_are(tmp_path, monkeypatch):
    run = in_thread("hang", tmp_path, timeout=300, world_size=2)
    assert wait_for(lambda: len(list(tmp_path.glob("started.[01]"))) == 2)
    monkeypatch.setattr(launch, "time", later(300))
    ended = str(run.exception(200))
    assert "Timeout: the run took longer than limits.timeout=300 s" in ended
    assert all(f"rank {rank}: in main (fake_worker.py, line " in ended for rank in (0, 1))
    assert not of_run(tmp_path)


VICTIMS = {
    "interrupted": signal.SIGINT, "command": signal.SIGKILL, "launcher": signal.SIGKILL, "head": signal.SIGKILL,
}  # fmt: skip


@pytest.mark.launch
@pytest.mark.usefixtures("two_nodes")
@reads_proc
def test_who_ends_leaves_nothing_on_any_node(tmp_path):
    """Four runs at once, in each of which another one ends. Agents end with their launcher, also where that could not
    tell them."""
    code = """
import sys
from alstlib.base.config import RunConfig
from alstlib.runs import launch
run = RunConfig(model={"config": {"fake": "hang"}}, engine={"world_size": 2})
launch.launch(run, sys.argv[1], worker="fake_worker")"""
    commands = {victim: [sys.executable, "-c", code, str(tmp_path / victim)] for victim in VICTIMS}
    with hanging(tmp_path, commands) as runs:
        launcher = agent_of(tmp_path / "launcher", 0).parent()
        victims = {**runs, "launcher": launcher, "head": agent_of(tmp_path / "head", 0)}
        for victim, number in VICTIMS.items():
            victims[victim].send_signal(number)
    assert result_of(tmp_path / "interrupted")["status"] == "cancelled"


@pytest.mark.launch
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("name, value, says", [
    ("ALST_TEST_RANKS", "", r"NodeFailed: node -1 \(host[01]\): ALST_NODE_RANK= must be the rank of this node"),
    ("ALST_TEST_RANKS", "0 0", r"NodeFailed: node 0 \(host[01]\): ValueError: this node has rank 0 and cannot listen"),
    (cluster.LAUNCHER_VARIABLE, "sh -c 'echo no such hosts >&2; exit 3'",
     "sh ended with exit status 3; node 0 never started; node 1 never started; no such hosts"),
])  # fmt: skip
def test_a_launcher_that_fails_or_gives_wrong_ranks(tmp_path, monkeypatch, name, value, says):
    """Its own words are in the error."""
    monkeypatch.setenv(name, value)
    with pytest.raises(launch.RunFailed, match=says):
        start("ok", tmp_path, world_size=2)
    assert wait_for(lambda: not of_run(tmp_path))


# What the nodes say


def starts(node, **more):
    return {"node": node, "name": f"n{node}", **more}


def ends(node, code, kind="RankFailed"):
    return starts(node, code=code, kind=kind, why=f"why {node}")


def words(*reports):
    return [f"{torchrun.SAYS}{json.dumps(report)}" for report in reports]


def test_what_nodes_say_is_found_in_the_launchers_words(tmp_path):
    log = tmp_path / "launcher.log"
    assert torchrun.read_reports(log) == []
    first, second = words(starts(0), starts(1))
    log.write_text(f"srun: hello\n1: {second}\n[1,0]<stdout>:{first}\n{torchrun.SAYS}{{half")
    assert torchrun.read_reports(log) == [starts(1), starts(0)]


ENDED = """
[[0, 1], [1, 1, RankKilled]] ->         -> RankKilled -> node 1 (n1): why 1
[[1, 1], [0, 1]]             ->         -> RankFailed -> node 1 (n1): why 1
[[0, 1]]                     ->         -> RankFailed -> node 0 (n0): why 0
[[0, 1]]                     -> x ended -> NodeLost   -> node 1 (n1) ended without a word; x ended; srun: n1: Killed
[[0, 1, RankKilled]]         -> x ended -> RankKilled -> node 0 (n0): why 0
[[0, 143]]                   -> x ended -> NodeLost   -> node 1 (n1) ended without a word; x ended; srun: n1: Killed
null -> x ended -> LauncherFailed -> x ended; node 0 never started; node 1 never started; srun: n1: Killed
"""
"""What nodes said when they ended, where they said that they started; what became of the launcher; and the cause."""


@pytest.mark.parametrize("reports, ended, kind, says", lines_of(ENDED))
def test_who_ended_a_run(tmp_path, reports, ended, kind, says):
    reports = yaml.safe_load(reports)
    said = [] if reports is None else words(starts(0), starts(1), *(ends(*one) for one in reports))
    log = tmp_path / "launcher.log"
    log.write_text("\n".join([*said, "srun: n1: Killed"]))
    assert torchrun.cause(log, 2, ended) == (kind, says)


# What a job has


@pytest.mark.parametrize("root, limit, used, cached, line", [
    ("", "memory.max", "memory.current", "inactive_file", "0::/job_7/step_0\n"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
     "0::/\n5:memory:/job_7/step_0\n3:cpu,cpuacct:/\n"),
], ids=["version 2", "version 1"])  # fmt: skip
def test_free_memory_is_what_the_jobs_groups_leave(tmp_path, root, limit, used, cached, line):
    """A limit of the job, above the step that has none; files that were read can be dropped."""
    for name, most in (("job_7", "1000"), ("job_7/step_0", "max")):
        for file, text in ((limit, most), (used, "700"), ("memory.stat", f"anon 500\n{cached} 150")):
            make_file(tmp_path / root / name / file, f"{text}\n")
    (tmp_path / "cgroup").write_text(line)
    for file, left in (("cgroup", [450]), ("nothing", [])):
        assert list(sizing._groups_leave(tmp_path / file, tmp_path)) == left


def test_free_memory_without_any_limit_is_the_machines(monkeypatch):
    """No control group has a limit, and there is no job: as on most machines. macOS has no free pages in sysconf."""
    monkeypatch.setattr(sizing, "_groups_leave", lambda: iter(()))
    monkeypatch.setattr(sizing, "_job_has", lambda env: iter(()))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096}.__getitem__)
    assert sizing.host_free() == pytest.approx(psutil.virtual_memory().available, rel=0.5)


GIVEN = """
{}                                                -> []
{SLURM_MEM_PER_NODE: '0'}                         -> []
{SLURM_MEM_PER_NODE: '4'}                         -> [4]
{SLURM_MEM_PER_CPU: '3', SLURM_CPUS_ON_NODE: '5'} -> [15]
{SLURM_MEM_PER_GPU: '7', SLURM_GPUS_ON_NODE: '2'} -> [14]
"""
"""Slurm's variables, and MiB."""


def test_free_memory_is_what_slurm_gave(monkeypatch):
    for env, nbytes in values_of(GIVEN):
        assert list(sizing._job_has(env)) == [n * 2**20 for n in nbytes]
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "4")
    assert sizing.host_free() == 4 * 2**20


WARNINGS = """
SIGUSR1 -> 0.0 -> 1 -> false
SIGTERM -> 0.0 -> 0 -> true
SIGTERM -> 0.2 -> 1 -> true
"""


@pytest.mark.parametrize("name, grace, told, ends", values_of(WARNINGS))
def test_a_warning_is_heard_and_sigterm_ends_after_the_grace(name, grace, told, ends):
    heard, began = [], time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext(),
        processes.warnings_call(lambda: heard.append(1), grace),
        processes.sigterm_interrupts(),
    ):
        os.kill(os.getpid(), signal.Signals[name])
        assert len(heard) == told
        time.sleep(0.3)
        assert not ends
    assert len(heard) == told
    assert time.monotonic() - began >= grace
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    "status, saved, code",
    [("cancelled", "now", cluster.AGAIN), ("cancelled", "", 1), ("cancelled", "before", 1), ("ok", "", cluster.AGAIN)],
)
def test_a_sweep_whose_time_is_up_can_be_repeated(tmp_path, monkeypatch, alst, status, saved, code):
    """In the first of two rows: its state is saved, or not, or only an earlier attempt left one; or it ends well and
    the next does not begin."""
    path = tmp_path / "spec.yaml"
    path.write_text("{name: two, base: {model.name: tiny}, rows: [baseline, alst]}")
    ran, state = [], tmp_path / "out/baseline/state/state.json"
    state.parent.mkdir(parents=True)
    if saved == "before":
        state.touch()

    def run_row(spec, row, force, warned):
        ran.append(row)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert warned()
        if saved == "now":
            state.touch()
        return results.new_result(spec.rows[row], status)

    monkeypatch.setattr(cli, "run_row", run_row)
    said = alst(f"run {path} --out {tmp_path}/out --fail-fast", code)
    assert ran == ["baseline"]
    assert ("the time is up; this command continues it: alst run" in said) == (code == cluster.AGAIN)


def test_ranks_are_bound_next_to_their_gpus(tmp_path, monkeypatch):
    from alstlib.runs.train import agent

    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    with_gpus(monkeypatch, 8)
    monkeypatch.setattr(agent.shutil, "which", lambda name: f"/bin/{name}")
    assert "--numa-binding" in agent.run.get_args_parser().format_help()
    for cores, binding in ((os.cpu_count(), ["--numa-binding", "node"]), (1, [])):  # one, as a scheduler has it
        monkeypatch.setattr(agent, "cores", lambda cores=cores: cores)
        assert agent.numa_binding(tmp_path) == binding
