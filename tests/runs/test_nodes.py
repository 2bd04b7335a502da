"""Several nodes, as launchers on this machine: a head and a follower, with schedulers' variables and real torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cases import READS_PROC, listening, wait_for
from test_launch import PATHS, fake, pids_of, processes_of

from alstlib import sizing
from alstlib.config import RunConfig
from alstlib.planner import devices
from alstlib.runs import cli, cluster, follower, launch, nodes, processes, results, torchrun

SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}


def command(*argv: Any, rank: int | None = None, **env: str) -> subprocess.Popen[bytes]:
    """`alst ...` as SkyPilot would start it on a node."""
    sky = {} if rank is None else {**SKYPILOT, "SKYPILOT_NODE_RANK": str(rank)}
    env = {**os.environ, **PATHS, **sky, **env}
    argv = (sys.executable, "-m", "alstlib.runs.cli", *map(str, argv))
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def two_nodes(folder: Path, patience: float = 60.0) -> Iterator[Path]:
    """This process is the head of a sweep; the file where the nodes meet."""
    path = folder / nodes.FILE
    with nodes.lead(path, cluster.Nodes(count=2, head="127.0.0.1"), patience) as told:
        yield path
        told[0] = 0


def node_1(path: Path) -> subprocess.Popen[bytes]:
    code = "from alstlib.runs import cluster, follower; import pathlib, sys\n"
    code += "node = cluster.Nodes(count=2, rank=1); sys.exit(follower.follow(pathlib.Path(sys.argv[1]), node, 60))"
    return subprocess.Popen([sys.executable, "-c", code, str(path)], env={**os.environ, **PATHS})


def run_fake(what: str, out: Path, **fields: Any) -> dict[str, Any]:
    config = fake(what, timeout=200, world_size=2, **fields)
    return launch.launch(config, out, worker="fake_worker", extra_env=PATHS)


# What schedulers say

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[004-005,9]", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip


@pytest.mark.parametrize("env, system, count, rank, head", [
    (SLURM, "Slurm", 3, 1, "gpu004"),
    ({**SKYPILOT, "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}, "SkyPilot", 2, 1, "127.0.0.1"),
    ({"PET_NNODES": "4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "run-master-0"}, "Kubeflow", 4, 0, "run-master-0"),
    ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.4",
      "DSTACK_GPUS_PER_NODE": "8"}, "dstack", 2, 1, "10.0.0.4"),
])  # fmt: skip
def test_variables_of_schedulers(monkeypatch, env, system, count, rank, head):
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    found = cluster.here(env=env)
    assert (found.system, found.count, found.rank, found.head) == (system, count, rank, head)
    assert found.gpus in (8, None)
    with pytest.raises(
        ValueError, match=f"--nodes 5 does not match the {count} nodes that the variables of {system} name"
    ):
        cluster.here(5, env=env)
    assert cluster.here(1, env=env).count == 1
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    if found.gpus:
        with pytest.raises(ValueError, match=f"{system} gave this node 8 GPUs, but PyTorch can use 0"):
            cluster.here(env=env)


def test_flags_and_wrong_variables(monkeypatch):
    assert cluster.here(env={}).count == 1
    given = cluster.here(2, 1, "n1:29500", {})
    assert (given.count, given.rank, given.head) == (2, 1, "n1:29500")
    for flags, says in (((2, 1, None), "go together"), ((2, 2, "n1"), "must be from 0 to 1")):
        with pytest.raises(ValueError, match=says):
            cluster.here(*flags, env={})
    with pytest.raises(ValueError, match=r"PET_NNODES='1:4' is not a number"):
        cluster.here(env={"PET_NNODES": "1:4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m"})
    with pytest.raises(ValueError, match=r"6 tasks on 3 nodes, but each node needs one: use srun --ntasks-per-node=1"):
        cluster.here(env={**SLURM, "SLURM_STEP_NUM_TASKS": "6"})
    with pytest.raises(ValueError, match=r"several nodes, but the command was started on only one"):
        cluster.here(env={"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
    assert cluster.here(env={"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}).count == 1
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **kw: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ValueError, match=r"--head n1 means 127\.0\.1\.1 on this node, which no other node can reach"):
        nodes.open_meeting(Path("nowhere"), cluster.Nodes(count=2, head="n1"), 1)


@pytest.mark.parametrize(
    "names, first", [("n[1-2]", "n1"), ("n[001-003,7],m5", "n001"), ("a,b", "a"), ("r[2,4]n[1-8]", "r2n1")]
)
def test_the_first_host_of_slurm(names, first):
    assert cluster.first_host(names) == first


def test_a_run_ends_before_its_job(monkeypatch):
    for name in (cluster.JOB_END_VARIABLE, "SLURM_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert cluster.job_seconds() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "5000")
    assert cluster.job_seconds(1000) == 4000 - cluster.MARGIN_SECONDS
    assert cluster.job_seconds(4920) == 40
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(cluster, "_ask", lambda *command: {"EndTime": "2026-01-31T12:00:00"})
    assert cluster.job_end() == time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_gloo_gets_the_interface_that_reaches_the_head(tmp_path, monkeypatch):
    """A node's own name may mean an address that no other node reaches."""
    assert torchrun.interface("127.0.0.1") == "lo"
    assert torchrun.interface("no.such.host.invalid") is None
    given: list[str | None] = []
    monkeypatch.setattr(torchrun, "start", lambda argv, env, log: given.append(env.get("GLOO_SOCKET_IFNAME")))
    attempt = torchrun.Attempt(id="a", config={"engine.world_size": 2}, out=str(tmp_path), worker="w", nodes=2, port=1)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    attempt.begin(str(tmp_path), 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    attempt.begin(str(tmp_path), 1)
    assert given == ["lo", "eth7"]


def test_the_flags_can_be_variables(monkeypatch, capsys, spec):
    for name, value in (("ALST_NODES", "2"), ("ALST_NODE_RANK", "2"), ("ALST_HEAD", "n1")):
        monkeypatch.setenv(name, value)
    assert cli.main(["run", str(spec)]) == 2
    assert "--node-rank 2 must be from 0 to 1, because --nodes is 2" in capsys.readouterr().err
    monkeypatch.setenv("ALST_GRACE", "soon")
    with pytest.raises(SystemExit):
        cli.main(["run", str(spec)])
    assert "argument --grace: invalid float value: 'soon'" in capsys.readouterr().err


def test_ranks_know_when_the_job_ends(tmp_path, monkeypatch):
    given = []

    def refuse(argv, env, log):
        given.append(float(env["ALST_DEADLINE"]))
        raise OSError("not now")

    monkeypatch.setattr(torchrun, "start", refuse)
    monkeypatch.setenv(cluster.JOB_END_VARIABLE, str(time.time() + 1000))
    for timeout, seconds in ((5000, 1000 - cluster.MARGIN_SECONDS), (None, 1000 - cluster.MARGIN_SECONDS), (300, 300)):
        with pytest.raises(OSError, match="not now"):
            launch.launch(RunConfig(model={"name": "tiny"}, limits={"timeout": timeout}), tmp_path)
        assert given[-1] - time.time() == pytest.approx(seconds, abs=30)


# The command


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.yaml"
    base = {"model.name": "tiny", "data.seq_len": 64, "optim.steps": 2, "engine.sp": 0, "engine.world_size": 2}
    path.write_text(yaml.safe_dump({"name": "two", "base": base, "rows": ["alst"]}))
    return path


def test_nodes_are_submitted_as_a_job(tmp_path, monkeypatch, capsys, spec):
    for name in (*SLURM, *SKYPILOT, "ALST_NODES"):
        monkeypatch.delenv(name, raising=False)
    argv = ["run", str(spec), "--out", str(tmp_path / "out"), "--nodes", "2", "--sbatch", "--time=60 --partition='a b'"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(argv) == 2
    assert f"alst run {spec} --out={tmp_path / 'out'} --patience=600 --nodes 2 --node-rank R" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "$ALST_PYTHON $@" > {tmp_path / "given"}\necho "42;cluster"\n')
    (tmp_path / "sbatch").chmod(0o755)
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "job 42 on 2 nodes" in said
    assert f"tail -F {tmp_path / 'out' / 'slurm-42.log'}" in said
    assert "scancel 42" in said
    given = (tmp_path / "given").read_text()
    assert given.startswith(
        f"{sys.executable} --parsable --nodes=2 --job-name=alst-out --output={tmp_path}/out/slurm-%j"
    )
    assert f"--time=60 --partition=a b {cluster.TEMPLATE} {spec} --out={tmp_path / 'out'} --patience=600\n" in given
    assert cluster.TEMPLATE.read_text().startswith("#!/usr/bin/env bash\n#SBATCH")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cli.main(argv) == 2
    assert f"srun --nodes=2 --ntasks-per-node=1 alst run {shlex.quote(str(spec))}" in capsys.readouterr().err


def test_parameters_of_the_notebook_are_a_single_run(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{row: alst, seq_len: 4K, config: {model: tiny, steps: 5}, worker: alstlib.train.ablation}")
    found = cli.load_spec(path, nodes=2)
    run = found.rows["alst"]
    assert (run.model.name, run.data.seq_len, run.optim.steps, run.options.tile("mlp")) == ("tiny", 4000, 5, True)
    assert run.engine.world_size == run.engine.sp == 2 * (devices.device_count() or 2)
    path.write_text("{model: tiny}")
    assert list(cli.load_spec(path).rows) == ["run"]
    path.write_text("{name: x, base: {}}")
    with pytest.raises(ValueError, match="has no rows"):
        cli.load_spec(path)


@pytest.mark.launch
def test_a_sweep_on_two_nodes(tmp_path, spec):
    """Real ranks; the follower is there first, and both end with the sweep."""
    out = tmp_path / "out"
    argv = ("run", spec, "--out", out, "--patience", "120")
    started = [command(*argv, rank=rank, CUDA_VISIBLE_DEVICES="") for rank in (1, 0)]
    said = [process.communicate(timeout=300)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    result = results.read_result(out / "alst" / "result.json")
    assert result["status"] == "ok"
    assert result["config"]["world_size"] == result["config"]["sp"] == 2
    assert len(result["metrics"]["loss"]) == 2
    assert len(result["metrics"]["device_peak_bytes"]) == 2
    (logs,) = (out / "alst" / "logs").iterdir()
    assert {log.name for log in logs.iterdir()} >= {"agent.log", "node1.rank1"}
    assert json.loads((out / "sweep.json").read_text())["nodes"] == 2
    assert not (out / nodes.FILE).exists()
    assert not processes_of(tmp_path)


# Followers


@pytest.mark.launch
@pytest.mark.skipif(not READS_PROC, reason="reads Linux's /proc")
def test_nodes_that_fail(tmp_path):
    """One after the other, with the same follower: a rank that is killed on the other node, and a node that is lost, in
    a search that went on after memory ran out."""
    with two_nodes(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        other = node_1(path)
        try:
            with pytest.raises(launch.RunFailed, match=r"RankKilled: node 1 \(.*\): rank 1 was ended by SIGKILL") as e:
                run_fake("killed", tmp_path / "killed")
            assert e.value.result["error"]["message"].endswith("; after that, Explained: the other rank is gone")
            assert "--- rank 0, stderr ---" in e.value.result["error"]["log_tail"]

            out, raised = tmp_path / "search", []
            run = threading.Thread(target=lambda: raised.append(_failure("shrink_then_hang", out, search=True)))
            run.start()
            assert wait_for(lambda: len(list(out.glob("logs/*/node1.rank1/*/attempt_0/0/stderr.log"))) == 2)
            assert wait_for(lambda: len(pids_of(out, "fake_worker --config")) == 4), "two agents and ranks"
            assert list(listening(out).values()) == [{"127.0.0.1"}]
            other.kill()
            run.join(90)
            assert f"error: NodeLost: node 1 ({socket.gethostname()}): its launcher ended, or" in raised[0]
        finally:
            other.kill()
            other.wait()
    assert wait_for(lambda: not processes_of(tmp_path))


def _failure(what: str, out: Path, **fields: Any) -> str:
    try:
        run_fake(what, out, **fields)
    except launch.RunFailed as e:
        return str(e)
    return ""


def in_thread(path: Path, rank: int = 1, patience: float = 20.0) -> list[Any]:
    """A follower in a thread; the list gets its exit status, or what it raised."""
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(follower.follow(path, cluster.Nodes(count=2, rank=rank), patience))
        except ValueError as e:
            ended.append(str(e))

    threading.Thread(target=work, daemon=True).start()
    return ended


@pytest.mark.parametrize("name", ["commit", "python", "gpus"])
def test_a_node_with_something_else_is_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torchrun, "start", lambda *a: pytest.fail("ranks were started"))
    monkeypatch.setattr(nodes, "PARTING_SECONDS", 0.1)
    with two_nodes(tmp_path) as path:
        monkeypatch.setattr(follower, "facts", lambda: {**nodes.facts(), name: "another"})
        ended = in_thread(path)
        says = rf"node 1 \(.*\) differs from the head in {name} another \(the head: .*\): all nodes of a run must agree"
        with pytest.raises(launch.RunFailed, match=f"error: NodeMissing: {says}"):
            run_fake("ok", tmp_path / "run")
        assert wait_for(lambda: ended)
        assert f"differs from the head in {name}" in ended[0]


def test_the_least_free_node_decides(tmp_path, monkeypatch):
    """What the follower has free is too little for the run, and the head has enough."""
    monkeypatch.setattr(torchrun, "start", lambda *a: pytest.fail("ranks were started"))
    config = RunConfig(model={"name": "small"}, data={"seq_len": 65536}, engine={"world_size": 2, "sp": 2})
    with two_nodes(tmp_path) as path:
        monkeypatch.setattr(follower, "facts", lambda: {**nodes.facts(), "host_free": 2**20})
        ended = in_thread(path)
        result = launch.launch(config, tmp_path / "run")
        assert (result["status"], result["error"]["type"]) == ("oom", "WouldNotFit")
        assert "a rank's share of the host's free memory is 1.00 MiB" in result["error"]["message"]
    assert wait_for(lambda: ended == [0]), "the sweep is over"


@contextlib.contextmanager
def with_a_follower(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[nodes.Followers, list[Any], Any]]:
    """A head, a follower in a thread that runs `sleep` in place of torchrun, and what tells the follower its end."""
    agents: list[Any] = []
    told: list[Any] = []

    def start(argv, env, log):
        agents.append(subprocess.Popen(["sleep", "60"], env=env))
        return agents[-1]

    @contextlib.contextmanager
    def hears(call, grace):
        told.append(call)
        yield

    monkeypatch.setattr(torchrun, "start", start)
    monkeypatch.setattr(follower, "warnings_call", hears)
    warned: list[int] = []
    with two_nodes(path) as file, nodes.Followers(nodes.read_meeting(file), lambda: warned.append(1)) as head:
        ended = in_thread(file)
        head.gather()
        config = launch.resolve(fake("hang"), 2).to_dict()
        head.begin(torchrun.Attempt(id="a", config=config, out=str(path), worker="fake_worker", nodes=2, port=1))
        assert wait_for(lambda: len(agents) == 1)
        assert head.poll() == [None]
        yield head, agents, lambda: told[0]() or wait_for(lambda: head.poll() == [None] and warned == [1])
    assert wait_for(lambda: ended == [0])


def test_a_follower_ends_its_ranks_with_its_head_and_passes_a_warning_on(tmp_path, monkeypatch):
    with with_a_follower(tmp_path, monkeypatch) as (head, agents, warn):
        assert (tmp_path / "logs" / "a" / "node1.rank2").is_dir()
        assert warn()
        head.__exit__()  # as when the head was killed
        assert wait_for(lambda: agents[0].poll() is not None)


def test_who_does_not_appear_is_named(tmp_path):
    with two_nodes(tmp_path, patience=0.5) as path:
        with pytest.raises(
            launch.RunFailed, match=r"NodeMissing: node 1 of 2 did not connect to 127\.0\.0\.1:\d+ within"
        ):
            run_fake("ok", tmp_path / "run")
        assert json.loads(path.read_text())["count"] == 2
    ended = in_thread(tmp_path / nodes.FILE, patience=1)
    assert wait_for(lambda: ended)
    assert "node 1 waited 1.0 s (--patience) in vain for the head, 127.0.0.1: the head has not written" in ended[0]


def test_strangers_learn_and_do_nothing(tmp_path, monkeypatch):
    """Neither one that says nothing, nor one with another key, nor one that calls itself the head."""
    monkeypatch.setattr(nodes, "ANSWER_SECONDS", 1)
    monkeypatch.setattr(nodes, "PARTING_SECONDS", 0.1)
    with two_nodes(tmp_path) as path:
        found = nodes.read_meeting(path)
        with nodes.Followers(found) as head, socket.create_connection(("127.0.0.1", found.port)) as stranger:
            stranger.sendall(b"\0\0\0\4data")
            head.accept()
            wrong = nodes.Meeting(**{**vars(found), "key": "00" * 32})
            threading.Thread(target=lambda: _try_to_join(wrong), daemon=True).start()
            head.accept()
            assert head.nodes == {}


def _try_to_join(meeting: nodes.Meeting) -> None:
    with contextlib.suppress(Exception):
        nodes.connect(socket.create_connection(("127.0.0.1", meeting.port)), meeting.key, server=False)


# What a job has


@pytest.mark.parametrize("version", [2, 1])
def test_free_memory_is_what_the_jobs_groups_leave(tmp_path, version):
    """A limit of the job, above the step that has none; files that were read can be dropped."""
    top = tmp_path if version == 2 else tmp_path / "memory"
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    limit, used, cached = names[version]
    for folder, most in (("job_7", "1000"), ("job_7/step_0", "max")):
        (top / folder).mkdir(parents=True)
        (top / folder / limit).write_text(f"{most}\n")
        (top / folder / used).write_text("700\n")
        (top / folder / "memory.stat").write_text(f"anon 500\n{cached} 150\n")
    line = "0::/job_7/step_0\n" if version == 2 else "0::/\n5:memory:/job_7/step_0\n3:cpu,cpuacct:/\n"
    (tmp_path / "cgroup").write_text(line)
    assert list(sizing._groups_leave(tmp_path / "cgroup", tmp_path)) == [450]
    assert list(sizing._groups_leave(tmp_path / "nothing", tmp_path)) == []


def test_free_memory_without_any_limit_is_the_machines(monkeypatch):
    """No control group has a limit, and there is no job: as on most machines. macOS has no free pages in sysconf."""
    monkeypatch.setattr(sizing, "_groups_leave", lambda: iter(()))
    monkeypatch.setattr(sizing, "_job_has", lambda env: iter(()))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096}.__getitem__)
    assert sizing.host_free() == pytest.approx(psutil.virtual_memory().available, rel=0.5)


def test_free_memory_is_what_slurm_gave(monkeypatch):
    for env, nbytes in (
        ({"SLURM_MEM_PER_NODE": "4"}, [4]), ({"SLURM_MEM_PER_NODE": "0"}, []), ({}, []),
        ({"SLURM_MEM_PER_CPU": "3", "SLURM_CPUS_ON_NODE": "5"}, [15]),
        ({"SLURM_MEM_PER_GPU": "7", "SLURM_GPUS_ON_NODE": "2"}, [14]),
    ):  # fmt: skip
        assert list(sizing._job_has(env)) == [n * 2**20 for n in nbytes]
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "4")
    assert sizing.host_free() == 4 * 2**20


@pytest.mark.parametrize("number, grace, told, ends", [
    (signal.SIGUSR1, 0.0, 1, False), (signal.SIGTERM, 0.0, 0, True), (signal.SIGTERM, 0.2, 1, True),
])  # fmt: skip
def test_a_warning_is_heard_and_sigterm_ends_after_the_grace(number, grace, told, ends):
    heard, began = [], time.monotonic()
    with contextlib.ExitStack() as stack:
        if ends:
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        stack.enter_context(processes.warnings_call(lambda: heard.append(1), grace))
        stack.enter_context(processes.sigterm_interrupts())
        os.kill(os.getpid(), number)
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
def test_a_sweep_whose_time_is_up_can_be_repeated(tmp_path, monkeypatch, capsys, status, saved, code):
    """In the first of two rows: its state is saved, or not, or only an earlier attempt left one; or it ends well and
    the next does not begin."""
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "two", "base": {"model": "tiny"}, "rows": ["baseline", "alst"]}))
    ran, state = [], tmp_path / "out" / "baseline" / "state" / "state.json"
    state.parent.mkdir(parents=True)
    if saved == "before":
        state.touch()

    def run_row(spec, row, force, also, warned):
        ran.append(row)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert warned()
        if saved == "now":
            state.touch()
        return results.new_result(spec.rows[row], status)

    monkeypatch.setattr(cli, "run_row", run_row)
    assert cli.main(["run", str(path), "--out", str(tmp_path / "out"), "--fail-fast"]) == code
    assert ran == ["baseline"]
    assert ("the time is up; this command continues it: alst run" in capsys.readouterr().out) == (code == cluster.AGAIN)


def test_ranks_are_bound_next_to_their_gpus(tmp_path, monkeypatch):
    from alstlib.train import agent

    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    monkeypatch.setattr(agent.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(agent, "cores", os.cpu_count)
    assert agent.numa_binding(tmp_path) == ["--numa-binding", "node"]
    assert "--numa-binding" in agent.run.get_args_parser().format_help()
    monkeypatch.setattr(agent, "cores", lambda: 1)  # as a scheduler has it
    assert agent.numa_binding(tmp_path) == []
    monkeypatch.setattr(torchrun, "cores", lambda: 1)
    monkeypatch.setattr(torchrun.os, "cpu_count", lambda: 64)
    assert "only 1 of 64 cores" in torchrun.bound(8)
    monkeypatch.setattr(torchrun, "cores", lambda: 8)  # one for each rank
    assert "only 8 of 64 cores" in torchrun.bound(8)
    monkeypatch.setattr(torchrun, "cores", lambda: 64)
    assert torchrun.bound(8) == ""
