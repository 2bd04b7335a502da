"""DeepSpeed's operators: what a killed build leaves stops nobody, and a build that runs is waited for by name."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import wait_for

from alstlib.runs import locks
from alstlib.runs.processes import RUN_ID_VARIABLE, processes
from alstlib.train import operators

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed has this operator on Linux only"),
    pytest.mark.skipif(operators._builder() is None, reason="DeepSpeed needs no operator on this device"),
    pytest.mark.skipif(not shutil.which("c++"), reason="no compiler"),
]


def loading(root, log, run=""):
    """A process that loads them, and then asks DeepSpeed for them as its engines do."""
    code = (
        "from alstlib.train import operators; operators.load(print); from deepspeed.comm.torch import *; build_shm_op()"
    )
    env = {**os.environ, operators.FOLDER_VARIABLE: str(root), RUN_ID_VARIABLE: run}
    with open(log, "wb") as out:
        return subprocess.Popen([sys.executable, "-uc", code], env=env, stdout=out, stderr=out)


def at(monkeypatch, root):
    monkeypatch.setenv(operators.FOLDER_VARIABLE, str(root))
    return operators.folder()


def test_another_user_takes_what_the_environment_has(tmp_path, monkeypatch):
    """Neither the environment nor a home folder is theirs to write."""
    monkeypatch.setattr("sys.prefix", str(tmp_path / "env"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.delenv(operators.FOLDER_VARIABLE, raising=False)
    (tmp_path / "home").touch()  # no folder can be made in a file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache = operators.folder()
    assert cache.is_relative_to(tmp_path / "home")
    monkeypatch.setattr(operators, "_builder", lambda: SimpleNamespace(NAME="op", _loaded_ops={}))
    with pytest.raises(RuntimeError, match=r"cannot be built in .*home.*: TORCH_EXTENSIONS_DIR names another folder"):
        operators.load()
    there = tmp_path / "env" / "share" / cache.relative_to(tmp_path / "home")
    (there / "built").mkdir(parents=True)
    assert operators.folder() == there


def test_what_is_built_is_loaded_whatever_lock_was_left(tmp_path, monkeypatch):
    """And by whom it is built is said while that goes on."""
    operators.load()
    built = operators.folder() / "built"
    here = at(monkeypatch, tmp_path)
    here.mkdir(parents=True)
    log = tmp_path / "log"
    with locks.hold(here):
        other = loading(tmp_path, log)
        assert wait_for(lambda: f"waiting for process {os.getpid()} since" in log.read_text()), log.read_text()
        shutil.copytree(built, here / "built")
        next((here / "built").glob("*/*.so")).with_name("lock").touch()
    try:
        assert other.wait(200) == 0, log.read_text()
    finally:
        other.kill()
    assert os.listdir(tmp_path / "alst-operators")
    assert not (tmp_path / "deepspeed_shm_comm").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_is_cut_off_leaves_no_process_and_nothing_built(tmp_path, monkeypatch, number):
    here = at(monkeypatch, tmp_path)
    run = f"operators-{os.getpid()}-{number}"

    def compilers():
        names = [Path(f"/proc/{pid}/comm") for pid in processes(run)]
        return [name for name in names if name.exists() and name.read_text().startswith("cc1plus")]

    other = loading(tmp_path, log := tmp_path / "log", run)
    try:
        assert wait_for(compilers), log.read_text()
        other.send_signal(number)
        other.wait(60)
        assert wait_for(lambda: not processes(run)), processes(run)
        time.sleep(0.5)
        assert not (here / "built").exists()
    finally:
        other.kill()
        for pid in processes(run):
            os.kill(pid, signal.SIGKILL)
