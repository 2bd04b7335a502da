"""The README's first command on machines unlike this one (`make test-elsewhere`): in each environment its `--dry-run`,
and a row of two steps; with `--whole` the command itself, and an installation with every other Python that is here.
And a wheel without a checkout.

What this machine does not let the tests make is skipped, with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from cases import ROOT
from test_lab import checkout

from alstlib.runs import results

SPEC = re.search(r"(?m)^ablation: setup.*\n.*alst run (\S+)", (ROOT / "Makefile").read_text())[1]  # type: ignore[index]
GROUPS = Path("/sys/fs/cgroup")
FOUR_GIB = 4 * 2**30
NOBODY = 54321
"""A user whom no file of the system knows, as in a container that was started with `--user`."""
READS = "-all,+dac_read_search"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]

LINES = """
import shlex, sys
from alstlib.runs import cli
assert not any(cli.main(shlex.split(line)) for line in sys.argv[1:])
"""
"""A program that runs command lines of `alst`, one after the other."""
TWO_STEPS = {
    "name": "two-steps", "rows": ["alst"],
    "base": {"model.name": "tiny", "engine": {"world_size": 2, "sp": 2}, "data.seq_len": 64, "optim.steps": 2},
}  # fmt: skip


@dataclass
class Place:
    """A copy of the checkout, a folder for results beside it, and how commands are started there."""

    checkout: Path
    mine: Path
    """Where results and temporary files go."""
    before: list[str] = field(default_factory=list)
    """What starts the command, such as `taskset -c 0`."""
    env: dict[str, str] = field(default_factory=dict)
    memory: str = ""
    """A rank's share of the host, where it is known."""

    def run(self, *command, limit=600.0):
        """What a command says that must succeed."""
        named = {"PATH", "CI", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"}
        env = {n: os.environ[n] for n in named & {*os.environ}} | {"HOME": str(Path.home())}
        env |= {"TMPDIR": str(self.mine / "tmp"), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **self.env}
        (self.mine / "tmp").mkdir(exist_ok=True)
        done = subprocess.run(
            [*self.before, *command], cwd=self.checkout, env=env, capture_output=True, text=True, timeout=limit
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{' '.join([*self.before, *command])}\n{said[-6000:]}"
        assert "Traceback" not in said, said[-6000:]
        return said

    def alst(self, *lines, limit=600.0):
        """What such lines say, all in one process."""
        return self.run(str(self.checkout / ".venv/bin/python"), "-c", LINES, *map(shlex.join, lines), limit=limit)


@pytest.fixture
def place():
    """Not in pytest's folder, which another user may not enter."""
    with tempfile.TemporaryDirectory(prefix="alst-elsewhere-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        (Path(name) / "mine").mkdir()
        checkout(Path(name) / "checkout")
        (Path(name) / "checkout" / ".venv").symlink_to(sys.prefix)
        yield Place(Path(name) / "checkout", Path(name) / "mine")


def root():
    if os.geteuid():
        pytest.skip("only root may mount something in a namespace of its own, or be another user")


def mounted(place, script):
    """Start commands in a namespace of mounts of their own, after this script."""
    root()
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "t", str(place.mine)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount something in a namespace of its own (unshare -m)")
    place.before += ["unshare", "-m", "bash", "-ec", f'{script}\nexec "$@"', "bash"]


def grouped(place, limit):
    """Control groups of version 2, of which this process's has a limit."""
    said = Path("/proc/self/cgroup")
    name = re.search(r"(?m)^0::/((?!.*\.\.).*)", said.read_text() if said.exists() else "")
    if name is None or not GROUPS.is_dir():
        pytest.skip("this process is in no control group of version 2, so none can stand in for it")
    group = place.mine / "groups" / name[1]
    group.mkdir(parents=True)
    for file, text in (("memory.max", limit), ("memory.current", "0"), ("memory.stat", "inactive_file 0")):
        (group / file).write_text(f"{text}\n")
    mounted(place, f'mount --bind "{place.mine}/groups" {GROUPS}')


def ungrouped(place):
    if not GROUPS.is_dir():
        return  # it is such a machine
    mounted(place, f"mount -t tmpfs t {GROUPS}")


def unlimited(place):
    grouped(place, "max")


def one_core(place):
    place.before[:0] = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def four_gib(place):
    """A group's limit for all of it, and the kernel's for each process."""
    grouped(place, str(FOUR_GIB))
    place.before[:0] = ["prlimit", f"--data={FOUR_GIB}"]
    place.memory = "2.00 GiB"


def another_user(place):
    """Who may write neither to the checkout nor to a home folder."""
    root()
    (place.mine / "tmp").mkdir()
    for folder in (place.mine, place.mine / "tmp"):
        os.chown(folder, NOBODY, NOBODY)
    place.env["HOME"] = str(place.checkout)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    # where the interpreter lies in root's home, only who may read everything can start it
    for more in ((), (f"--inh-caps={READS}", f"--ambient-caps={READS}", f"--bounding-set={READS}")):
        # by a shell: what setpriv itself starts, it starts with root's rights to files
        start = [*user, *more, "sh", "-c", '"$0" -c "import torch"', str(place.checkout / ".venv/bin/python")]
        if subprocess.run(start, capture_output=True).returncode == 0:
            place.before += [*user, *more]
            return
    pytest.skip(f"another user cannot start {sys.executable}")


def plain_c_and_odd_names(place):
    odd = "größer, and with spaces"
    place.checkout = place.checkout.rename(place.checkout.with_name(f"{odd} checkout"))
    place.mine = place.mine.rename(place.mine.with_name(f"{odd} mine"))
    place.env |= {"LANG": "C", "LC_ALL": "C"}


def read_only(place):
    mounted(place, f'mount --bind "{place.checkout}" "{place.checkout}"\nmount -o remount,ro,bind "{place.checkout}"')


ENVIRONMENTS = {
    "no control group, another user without a home": (ungrouped, another_user),
    "control groups without a limit, a read-only checkout, LC_ALL=C, umlauts and spaces in paths":
        (plain_c_and_odd_names, unlimited, read_only),
    "4 GiB of memory, one core": (four_gib, one_core),
}  # fmt: skip
"""What differs from this machine, several things in each."""


def starts(place, whole):
    out, rows = str(place.mine / "out"), yaml.safe_load((ROOT / SPEC).read_text())["rows"]
    (place.mine / "two.yaml").write_text(yaml.safe_dump(TWO_STEPS))
    two = ("run", str(place.mine / "two.yaml"), "--out", str(place.mine / "two"))
    would = place.alst(("run", SPEC, "--dry-run", "--out", out), *(() if whole else (two,)))
    assert would.count("would run as") == would.count("predicted  the longest that fits is") == len(rows), would
    if place.memory:
        assert f"of {place.memory}; with what is on the device" in would
    if whole:
        place.alst(("run", SPEC, "--out", out), limit=3000)
        found = [results.read_result(path) for path in Path(out).glob("*/result.json")]
        assert [result["status"] for result in found] == ["ok"] * len(rows)
        return
    result = results.read_result(place.mine / "two" / "alst" / "result.json")
    assert (result["status"], len(result["metrics"]["loss"])) == ("ok", 2)


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("parts", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_the_first_command(parts, place, pytestconfig):
    missing = []
    for part in parts:
        try:
            part(place)
        except pytest.skip.Exception as e:
            missing.append(str(e))
    if len(missing) == len(parts):
        pytest.skip("; ".join(missing))
    for why in missing:
        warnings.warn(f"not as asked for: {why}", stacklevel=1)
    starts(place, pytestconfig.getoption("whole"))


@pytest.mark.timeout(1500)
def test_a_wheel_in_a_folder_of_the_users_own(place):
    """Its packages are this environment's; of this library only the wheel is there, and no checkout is near."""
    python, wheels = str(place.mine / "env/bin/python"), str(place.mine / "wheels")
    place.run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, ".")
    place.run(sys.executable, "-m", "venv", "--without-pip", str(place.mine / "env"))
    (wheel,) = Path(wheels).glob("alstlib-*.whl")
    place.run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel))
    (packages,) = place.mine.glob("env/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    folder = place.checkout = place.mine / "folder"  # where commands are run
    folder.mkdir()
    assert str(packages) in place.run(python, "-c", "import alstlib; print(alstlib.__file__)")
    alst = str(place.mine / "env/bin/alst")
    assert "Llama-3.1-8B" in place.run(alst, "plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "8")
    (folder / "two.yaml").write_text(yaml.safe_dump(TWO_STEPS))
    (folder / "mine.txt").write_text("def double(x):\n    return 2 * x\n" * 200)
    loads = "import transformers\ntransformers.AutoModel.from_pretrained('tuned/model')"
    said = place.run(
        python, "-c", f"{LINES}{loads}", "run two.yaml", f"run {SPEC} --dry-run", "verify tiny --sp 2",
        "finetune --model tiny --data mine.txt --set optim.steps=3",
    )  # fmt: skip
    assert results.read_result(folder / "papermill_runs/out/two-steps/alst/result.json")["status"] == "ok"
    for part in ("results in papermill_runs/out/ablation-quick", "equal", "step 3/3"):
        assert part in said


def interpreter(version):
    """A Python of this version that can make environments; empty where there is none."""
    known = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    ask = "import ensurepip, venv, sys; print(*sys.version_info[:2], sep='.')"
    for found in (str(path) for path in known if path):
        done = subprocess.run([found, "-c", ask], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return found
    return ""


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("version", PYTHONS)
def test_another_python(version, place, pytestconfig):
    """Its lock is chosen and it reads every module; with `--whole` it is installed, and trains."""
    python = interpreter(version)
    if not python or version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip(f"Python {version} is {'what runs the other tests' if python else 'not here'}")
    lock = f"env/cpu-py{version.replace('.', '')}.txt"
    place.env |= {"PYTHON": python, "ALST_DEVICE": "cpu", "PYTHONPYCACHEPREFIX": str(place.mine / "cache")}
    (place.checkout / ".venv").unlink()
    assert f"lock={lock} " in place.run("env/install.sh", "--plan")
    place.run(python, "-W", "error", "-m", "compileall", "-q", "alstlib", "env")
    if pytestconfig.getoption("whole"):
        place.run("env/install.sh", limit=3000)
        starts(place, whole=False)
