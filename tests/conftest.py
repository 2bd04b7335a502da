"""Shared fixtures: one pool of gloo ranks per world size for the whole test run (spawning ranks costs seconds)."""

import contextlib
import faulthandler
import gc
import json
import os
import queue
import shlex
import signal
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from operators import nan_memory

os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a shell that starts the tests in the background lets them, and all they start, ignore SIGINT: some tests send it
signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def freeze_modules():
    """Take everything that is alive, the code of the modules above all, out of the collector's sight for good.

    Half a million objects of PyTorch and transformers cost a second of every `gc.collect()` and `gc.get_objects()`, and
    the ledger, the simulation and many tests call both."""
    gc.collect()
    gc.freeze()


def gloo():
    return "gloo"


def forget_groups():
    """Destroy the process groups that earlier tasks made, but those that DeepSpeed holds: each has threads, of which
    one wakes a hundred times a second, and thousands of them took three quarters of two cores."""
    import torch.distributed as dist

    held = vars(sys.modules["deepspeed.utils.groups"]).values() if "deepspeed.utils.groups" in sys.modules else ()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and not any(group is one for one in held):
            dist.destroy_process_group(group)


def _serve(rank, world, port, tasks, results, backend):
    import torch.distributed as dist

    assert "preloaded" in sys.modules, "the server that forks ranks could not import tests/preloaded.py"
    if own := os.environ.pop("OWN_PYTHONPATH"):  # the server's would show this folder to what a rank starts
        os.environ["PYTHONPATH"] = own
    else:
        del os.environ["PYTHONPATH"]
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
    )  # fmt: skip
    dist.init_process_group(backend(), rank=rank, world_size=world)
    known = 0
    while (task := tasks.get()) is not None:
        fn, args = task
        forget_groups()  # every rank has answered: nothing is on its way in them
        if len(sys.modules) > known:  # the task's module has imported more
            freeze_modules()
            known = len(sys.modules)
        try:
            results.put((rank, True, fn(rank, world, *args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


def start_server():
    """The server from which this process of pytest forks all its ranks, also those of the referee: there is only one,
    and who asks first says what it imports."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # Python 3.11 does not tell the server where this folder is, and what it does not find it passes over
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OWN_PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with mock.patch.dict(os.environ, paths):
        forkserver.ensure_running()
    return context


class RankPool:
    """`pool(fn, *args)` runs the module-level `fn(rank, world, *args)` on every rank and returns the list of results.

    Any rank's exception fails the call with that rank's traceback, and the pool is rebuilt before the next call
    (the surviving ranks may be stuck in a collective). `backend` returns what `init_process_group` takes.
    """

    def __init__(self, world, backend=gloo):
        self.world, self.backend = world, backend
        self.processes = []

    def start(self):
        context = start_server()
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(self.world)]
        port = free_port()
        self.processes = [
            context.Process(
                target=_serve, args=(r, self.world, port, self.tasks[r], self.results, self.backend), daemon=True
            )
            for r in range(self.world)
        ]
        for process in self.processes:
            process.start()

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def __call__(self, fn, *args, timeout=400):
        if not self.processes:
            self.start()
        for tasks in self.tasks:
            tasks.put((fn, args))
        values = {}
        deadline = time.monotonic() + timeout
        try:
            while missing := sorted(set(range(self.world)) - set(values)):
                gone = [f"{r}: {p.exitcode}" for r, p in enumerate(self.processes) if not p.is_alive()]
                try:
                    rank, ok, value = self.results.get(timeout=2)
                except queue.Empty:
                    assert not gone, f"ranks ended, with these exit codes: {', '.join(gone)}"
                    assert time.monotonic() < deadline, f"ranks {missing} gave no answer in {timeout} s"
                    continue
                assert ok, f"rank {rank} of {self.world} failed:\n{value}"
                values[rank] = value
        except AssertionError:
            self.stop()
            raise
        return [values[r] for r in range(self.world)]


def gloo_on_a_gpu():
    """Ranks that share one GPU, which NCCL refuses."""
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
    torch.backends.cudnn.allow_tf32 = False  # on by default, for convolutions
    return "cpu:gloo,cuda:gloo"


def late():
    """The device on a CPU (tests/device), which a process cannot give back."""
    from device import group

    return group.backend()


def _pools(backend):
    """A fixture: the pool of any number of ranks."""

    @pytest.fixture(scope="session")
    def pools():
        if backend is late:
            from device import build

            if why := build.why_not():
                pytest.skip(f"the device on a CPU {why}")
        made = {}
        yield lambda world: made.setdefault(world, RankPool(world, backend))
        for pool in made.values():
            pool.stop()

    return pools


pools, late_pools, gpu_pools = _pools(gloo), _pools(late), _pools(gloo_on_a_gpu)


def _pool(world, pools):
    """A fixture: the pool of so many ranks."""

    @pytest.fixture(scope="session")
    def pool(request):
        return request.getfixturevalue(pools)(world)

    return pool


ranks2, ranks4 = _pool(2, "pools"), _pool(4, "pools")
late1, late2 = _pool(1, "late_pools"), _pool(2, "late_pools")


@pytest.fixture(scope="session")
def server():
    """For ranks that are started without a pool."""
    start_server()


@pytest.fixture
def here():
    """Accelerate's state as in a new process, for a Trainer in this one."""
    from trainers import accelerate_here

    with accelerate_here("ddp"):
        yield


@pytest.fixture(scope="session")
def slurm():
    """A Slurm of a few nodes on this machine (tests/slurm)."""
    from cluster import Absent, Cluster

    cluster = Cluster()
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(cluster)
        except Absent as e:
            pytest.skip(str(e))
    assert not cluster.left, f"these had to be killed: {cluster.left}"


@pytest.fixture
def alst(capsys):
    """Runs a command line of `alst` in this process: all that it prints. It must end with that exit status."""
    from alstlib.runs import cli

    def command(line, status=0):
        capsys.readouterr()
        ended = cli.main(shlex.split(line))
        said = "".join(capsys.readouterr())
        assert ended == status, f"{line}: {ended}\n{said}"
        return said

    return command


@pytest.fixture
def answer(alst):
    """What programs read of such a command, with `--json`; what is said beside it comes after it."""
    return lambda line, status=0: json.JSONDecoder().raw_decode(alst(f"{line} --json", status))[0]


@pytest.fixture
def nothing_starts(monkeypatch):
    """A launcher that starts a process all the same fails: there is no such Python."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


@pytest.fixture
def unwritten_is_nan(request):
    """Memory that nobody wrote is NaN during the test (`operators.nan_memory`), except in a test for a GPU."""
    with contextlib.nullcontext() if "gpu" in request.keywords else nan_memory():
        yield


SLOW = ("measure", "referee", "cuda", "device", "sweep", "faults", "slurm", "elsewhere", "test_lab.py", "test_site.py")
"""Folders and files of tests that `make test` leaves out: they simulate, measure, or drive other programs."""
ASKED = {
    "faults": "takes many minutes", "elsewhere": "mounts, and runs as other users",
    "slurm": "installs and starts a Slurm here",
}  # fmt: skip
"""Tests that are run with an option of that name, and why not always."""
QUICK = 4
"""Cases of one parametrized test that `make test` runs, spread over all of them; the others are slow."""


def pytest_collection_finish():
    freeze_modules()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    if nextitem is not None and nextitem.path != item.path:  # after the fixtures of a file, with what it has imported
        freeze_modules()


def pytest_addoption(parser):
    for name in ASKED:
        parser.addoption(f"--{name}", action="store_true", help=f"run tests/{name}, as make test-{name} does")
    parser.addoption("--whole", action="store_true", help="of tests/elsewhere: whole commands, and installations")
    parser.addoption("--kills", type=int, default=8, help="of tests/faults: number of random kills")
    parser.addoption("--seed", type=int, help="of the random kills; without it, one that is printed")


def pytest_collection_modifyitems(config, items):
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        places = {*item.path.relative_to(Path(__file__).parent).parts}  # a checkout's own folder may have any name
        if places & {*SLOW}:
            item.add_marker("slow")
        asked = ASKED.keys() & {*places, *getattr(item, "fixturenames", ())}
        why = [f"{ASKED[name]}: make test-{name}" for name in asked if not config.getoption(f"--{name}")]
        if "gpu" in item.keywords and not torch.cuda.is_available():
            why.append("needs a CUDA device, none here")
        for reason in why:
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: "browser" not in item.keywords)  # minutes long: never the last, beside an idle core
    for some in cases.values():
        # a table may say which of its cases are the sample
        drawn = {i for i, item in enumerate(some) if "drawn" in item.keywords}
        quick = drawn or {round(i * (len(some) - 1) / (QUICK - 1)) for i in range(QUICK)}
        for i, item in enumerate(some):
            if i not in quick:
                item.add_marker("slow")
