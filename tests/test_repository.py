"""The repository itself: locks and environments agree, nothing of one machine is in it, size limits hold."""

import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from cases import ROOT, lines_of, text_of, unsaid, values_of
from exactness import page as referee_page
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from alstlib.base.config import ROWS
from alstlib.planner import devices
from alstlib.runs import results
from alstlib.runs.sweeps import load_spec

LOCKS = sorted(ROOT.glob("env/*-py*.txt"))


SITE = ROOT / "env/site.txt"
PROJECT = tomllib.loads(text_of("pyproject.toml"))


def pins(lock):
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def repository_files():
    """What git tracks or would track; without git (an unpacked archive), what is not hidden."""
    if not (ROOT / ".git").exists():
        return [p for p in ROOT.rglob("[!.]*") if p.is_file() and "/." not in f"/{p.relative_to(ROOT)}"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [p for name in listed if name and (p := ROOT / name).is_file()]


# Environments


def test_locks_are_exact_and_agree():
    """There is one for each target, sorted, and what the site needs besides is not in it."""
    assert [p.stem for p in LOCKS] == [f"{device}-py3{minor}" for device in ("cpu", "cuda") for minor in range(11, 15)]
    reference, site = pins(LOCKS[0]), pins(SITE)
    for lock in (*LOCKS, SITE):
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines), lock
        found = pins(lock)
        assert [canonicalize_name(line.split("==")[0]) for line in lines] == sorted(found), lock
        assert [name for name in found if reference.get(name, found[name]) != found[name]] == [], lock
        assert lock == SITE or not found.keys() & site.keys()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_lock_has_what_pyproject_asks_for(lock):
    project, versions = PROJECT["project"], pins(lock) | pins(SITE)
    extras = {**project["optional-dependencies"]}
    if lock.stem.startswith("cpu"):
        del extras["qlora"]  # that is for GPUs
    for requirement in map(Requirement, itertools.chain(project["dependencies"], *extras.values())):
        version = versions.get(canonicalize_name(requirement.name), "absent")
        assert version != "absent", requirement
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


ON_GPU = {"liger-kernel", "flash-attn-4"}
CARD = ("torch", "deepspeed", "transformers", "datasets", "jupyterlab", "papermill", "ipywidgets", "matplotlib")


CONDA = """
environment.yml          -> cpu-py311  -> [-r env/cpu-py311.txt, -e .]
env/environment-cuda.yml -> cuda-py311 -> [-r cuda-py311.txt, -e ..]
"""


@pytest.mark.parametrize("path, lock, options", values_of(CONDA))
def test_a_conda_file_has_the_versions_of_its_lock(path, lock, options):
    """Every package of the project's card is named with its version; those for a GPU are comments without one."""
    conda, versions = yaml.safe_load(text_of(path)), pins(ROOT / f"env/{lock}.txt")
    (pip,) = [d["pip"] for d in conda["dependencies"] if isinstance(d, dict)]
    named = dict(line.split("==") for line in pip if "==" in line)
    found, of_cuda = (
        dict(re.findall(r"(?m)^ *(?:# )?- ([\w-]+)==(\S+)$", text_of(one)))
        for one in (path, "env/environment-cuda.yml")
    )
    assert [line for line in pip if line.startswith("-")] == options
    assert {name: versions.get(name, "4.0.0b36") for name in named} == named
    assert set(found) - set(named) == (ON_GPU if lock.startswith("cpu") else set())
    assert {*CARD, *ON_GPU} <= set(found)
    assert found == of_cuda
    assert "pytorch" not in conda["channels"]


def test_packages_that_are_installed_by_hand_have_a_version():
    lines = re.findall(r"^    .*pip install.*$", text_of("env/README.md"), re.M)
    found = dict(re.findall(r"\b(flash-attn(?:-\d)?)(?:\[\w+\])?==([\w.]+)", "\n".join(lines)))
    assert len(lines) == 3
    assert list(found) == ["flash-attn", "flash-attn-3", "flash-attn-4"]
    assert found["flash-attn-4"] in text_of("env/environment-cuda.yml")


def program(path, script):
    """A program that runs this script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def run(command, path=None, **env):
    """A program that this repository brings, where the programs in `path` are found first."""
    env = {**os.environ, **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {}), **env}
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, cwd=path)


INSTALL = ("bash", ROOT / "env/install.sh", "--plan")


def fake_python(folder, version, name="python"):
    """A script that answers the installer's questions as a Python of this version would."""
    major, minor = version.split(".")
    code = int(int(minor) < 11)
    answers = f'case "$2" in *base_executable*) echo "$0" ;; *) echo "{major} {minor}"; exit {code} ;; esac'
    return program(folder / name, answers)


PLANS = """
3.11 | cpu |                           | lock=env/cpu-py311.txt
3.15 | cpu |                           | newer than the locks
3.15 | cpu |                           | lock=env/cpu-py314.txt
3.10 | cpu |                           | Python 3.10, not a Python >= 3.11
3.12 |     | GPU 0: a GPU (UUID: GPU-1) | lock=env/cuda-py312.txt
3.12 |     |                           | lock=env/cpu-py312.txt
3.12 | tpu |                           | not one of cpu, cuda
"""


@pytest.mark.parametrize("version, device, driver, says", lines_of(PLANS, "|"))
def test_installer_picks_the_lock_of_the_python_and_of_the_device(tmp_path, version, device, driver, says):
    program(tmp_path / "nvidia-smi", f'echo "{driver}"')
    done = run(INSTALL, tmp_path, PYTHON=fake_python(tmp_path, version), ALST_DEVICE=device)
    assert says in done.stdout + done.stderr
    assert (done.returncode != 0) == ("not " in says)


def test_installer_skips_an_old_python_on_the_path(tmp_path):
    """One that is locked is taken before one that is newer than the locks."""
    for version, name in {"3.9": "3", "3.14": "3.14", "3.13": "3.13", "3.15": ""}.items():
        fake_python(tmp_path, version, f"python{name}")
    done = run(INSTALL, tmp_path, PYTHON="", ALST_DEVICE="cpu")
    assert f"python={tmp_path}/python3.13 lock=env/cpu-py313.txt" in done.stdout, done.stderr


DRIVERS = """
580.65.06 -> cuda -> ''       -> []
550.90.07 -> cuda -> an index -> [cuda-bindings, cuda-pathfinder, nvidia-nvjitlink]
550.90.07 -> cpu  -> an index -> []
550.90.07 -> cuda -> ''       -> null
"""
"""A driver, a device, where torch comes from, and the pins of CUDA 13 that are left out; null: it is refused."""


@pytest.mark.parametrize("driver, device, index, left_out", values_of(DRIVERS))
def test_the_installer_leaves_cudas_pins_to_another_torch(tmp_path, driver, device, index, left_out):
    """With a GPU of this driver and a Python that only notes what it is asked. An old driver is named before anything
    is downloaded."""
    tools, checkout = tmp_path / "tools", tmp_path / "checkout"  # it would remake this checkout's .venv
    tools.mkdir()
    shutil.copytree(ROOT / "env", checkout / "env")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    gpu = f'case "$*" in *driver_version*) echo {driver} ;; *) echo "GPU 0: a GPU (UUID: GPU-1)" ;; esac'
    program(tools / "nvidia-smi", gpu)
    asks = f"""echo "$@" >> {tmp_path}/asked
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *base_executable*) echo "$0" ;;
    *ensurepip*) echo "3 12" ;;
esac"""
    python, given = program(tools / "python", asks), "cpu" if device == "cpu" else ""
    command = ["bash", checkout / "env/install.sh"]
    done = run(command, tools, ALST_DEVICE=given, TORCH_INDEX_URL=index, WHEELHOUSE="", PYTHON=python)
    venv, asked = checkout / ".venv", (tmp_path / "asked").read_text()
    if left_out is None:
        assert done.returncode == 1
        assert unsaid(done.stderr, "the NVIDIA driver is 550.90.07\nneeds 580 or newer\nTORCH_INDEX_URL") == []
        assert not venv.exists()
        assert " pip " not in asked
        return
    assert done.returncode == 0, done.stderr
    missing = pins(ROOT / f"env/{device}-py312.txt").keys() - pins(venv / ".lock-without-deepspeed").keys()
    assert missing == {"deepspeed", *left_out}
    assert sorted((venv / ".left-out").read_text().split()) == left_out
    assert ("--index-url an index" in asked) == bool(index)


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "env"))
    return importlib.import_module("check")


def test_the_check_leaves_out_what_another_torch_brings(tmp_path, monkeypatch, check):
    monkeypatch.setattr(check.sys, "prefix", str(tmp_path))
    lock = tmp_path / "lock.txt"
    lock.write_text("cuda-bindings==0.0.1\nnvidia-nvjitlink==0.0.1\n")
    assert len(check.differences(lock)) == 2
    (tmp_path / ".left-out").write_text("cuda-bindings\n")
    assert [line.split(":")[0] for line in check.differences(lock)] == ["nvidia-nvjitlink"]


# Images


def lines_in(path):
    """Lines without comments, where one that ends with a backslash goes on in the next."""
    whole = re.sub(r"\\\n\s*", " ", text_of(path))
    lines = (re.split(r"(?:^|\s)#", line)[0].strip() for line in whole.splitlines())
    return [line for line in lines if line]


def test_the_definitions_of_images_make_the_same_environment():
    """As far as can be known without Docker and Apptainer, which no machine of ours had with a network."""
    docker = [line.partition(" ")[::2] for line in lines_in("env/Dockerfile")]
    of = dict(docker)
    assert " ".join(word for word, _ in docker) == "FROM RUN ENV WORKDIR COPY RUN WORKDIR CMD"
    assert [text for word, text in docker if word in ("WORKDIR", "COPY")] == ["/opt/alst", ". .", "/runs"]
    made = [command.strip() for word, text in docker if word == "RUN" for command in text.split("&&")]
    subprocess.run(["sh", "-n"], input="\n".join(made), text=True, check=True)
    *apt, setup = made
    assert {"make", "git", "build-essential"} <= set(apt[1].split())  # what env/install.sh calls
    assert setup == "make setup"
    assert of["ENV"] == "ALST_DEVICE=cuda PATH=/opt/alst/.venv/bin:$PATH"
    assert json.loads(of["CMD"])[0] == "alst"
    python = re.fullmatch(r"python:3\.(\d+)-slim-bookworm", of["FROM"])[1]
    assert ROOT / f"env/cuda-py3{python}.txt" in LOCKS
    own = ("cd /opt/alst", "rm -rf .venv")  # what a copy without a list of what to leave out needs
    assert lines_in("env/apptainer.def") == [
        "Bootstrap: docker", f"From: {of['FROM']}", "%files", ". /opt/alst",
        "%post", *apt, *own, f"ALST_DEVICE=cuda {setup}",
        "%environment", "export PATH=/opt/alst/.venv/bin:$PATH", "%runscript", 'exec alst "$@"',
    ]  # fmt: skip


def test_an_image_gets_nothing_that_git_ignores():
    left = set(text_of("env/Dockerfile.dockerignore").split())
    ignored = {line.rstrip("/") for line in text_of(".gitignore").split()}
    assert {name.removeprefix("**/") for name in left} >= ignored - {"papermill_runs/results/**/report.html"}


def test_the_example_of_four_nodes_runs_on_four_nodes(monkeypatch):
    """Its spec takes all of their GPUs, and its lines are those that the programs print."""
    section = text_of("env/README.md").partition("### An example: 4 nodes with 8 GPUs")[2].partition("\n## ")[0]
    (spec,) = set(re.findall(r"sbatch --nodes=4 env/cluster/alst\.sbatch (\S+)", section))
    monkeypatch.setattr(devices, "device_count", lambda: 8)
    for changes, sp in (({}, 32), ({"engine.sp": 8}, 8)):
        found = load_spec(ROOT / spec, nodes=4, changes=changes)
        assert {(run.engine.world_size, run.engine.sp) for run in found.rows.values()} == {(32, sp)}
    assert f"`{found.name}: {len(found.rows)} rows, results in " in section
    assert "starting 32 ranks on 4 nodes" in section


# Continuous integration


CI = """
               | 3 passed, 1 skipped in 0.10s       |
               | 300 passed in 400.10s (0:06:40)    |
test-all       | no tests ran in 0.01s              | fails
               | 4 skipped in 0.01s                 | fails
               | 10 deselected in 0.01s             | fails
test-all       | 1 failed, 3 passed in 0.10s        | fails
test-all       | 3 passed, 1 error in 0.10s         | fails
site-tools     | 3 passed in 0.10s                  | fails
lint           | 3 passed in 0.10s                  | fails
check-lessons  | 3 passed in 0.10s                  | fails
site           | 3 passed in 0.10s                  | fails
test-elsewhere | 3 passed in 0.10s                  | fails
test-compat    | 3 passed in 0.10s                  | fails
               | nothing                            | fails
"""
"""The target that breaks, what the suite says last, and what follows."""


@pytest.mark.parametrize("broken, output, fails", lines_of(CI, "|"))
def test_ci_fails_with_the_suite_and_the_lessons_and_ends_with_the_suites_summary(tmp_path, broken, output, fails):
    make = program(
        tmp_path / "make",
        f"""echo "$1" >> {tmp_path}/called
case "$1" in
test-all) echo "{output}" ;;
test-elsewhere | test-compat | check-lessons) echo "1 failed in 9.9s, says $1" ;;
esac
[ "$1" != "{broken}" ] || exit 2""",
    )
    (tmp_path / "chromium").symlink_to(make)  # or it would be installed
    done = run([ROOT / ".ci/run"], tmp_path)
    assert (done.returncode != 0) == bool(fails), done.stdout
    assert done.stdout.splitlines()[-1] == ("pytest gave no summary" if output == "nothing" else output)
    assert f"make {broken}" in done.stdout if broken else "failed, see above" not in done.stdout or fails
    called = (tmp_path / "called").read_text().split()
    beside = ["lint", "site", "test-compat", "test-elsewhere"]  # run while the tests and the lessons run
    assert called[:2] == ["setup", "site-tools"]
    assert [target for target in called[2:] if target in beside] == beside
    assert [target for target in called[2:] if target not in beside] == ["test-all", "check-lessons"]


def make_targets():
    return set(re.findall(r"(?m)^([a-z-]+):(?!=)", text_of("Makefile")))


def test_make_help_lists_every_target():
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    done = run(["make", "-s", "-C", ROOT, "help"])
    assert set(re.findall(r"(?m)^  ([a-z-]+) ", done.stdout)) == make_targets()
    assert {"lint", "clean", "help"} <= make_targets()


def test_make_targets_in_the_pages_exist():
    pages = [*(p for p in repository_files() if p.name == "README.md"), *ROOT.glob("notebooks/*.md")]
    assert ROOT / "README.md" in pages
    for page in pages:
        code = re.findall(r"(?ms)^```\w*\n(.*?)^```|^    ([^\n]*)$|`([^`\n]+)`", page.read_text())
        lines = "\n".join(map("".join, code))
        named = re.findall(r"(?m)^ *(?:\$ )?(?:[A-Z_]+=\S+ )*make ([a-z-]+)\b", lines)
        assert set(named) <= make_targets(), page


# Nothing of one machine


FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~}*-])/(?:work|root|home|Users)/[\w.]"),
    "an address of a registry": re.compile(
        r"(?i)\b[\w-]*(?:pypi|pythonhosted|anaconda|npmjs)[\w-]*\.[a-z]{2,}\b|//[^\s/]*/whl"
    ),
}
NO_ADDRESS = re.compile(r"\w+://")


def test_the_patterns_catch():
    parts = {"/ root /x": 1, '"/ home /me/x"': 1, "../ work/x and ~/ root/x": 0, "files.python hosted.org": 1,
             "py pi.org/simple": 1, "https://d.example/ whl/cpu": 1, "the paper's arxiv .org page": 0}  # fmt: skip
    for text, caught in parts.items():  # in parts, because this file is searched too
        found = [pattern for pattern in FORBIDDEN.values() if pattern.search(text.replace(" ", ""))]
        assert len(found) == caught, text


def test_no_machine_path_and_no_registry():
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        name = path.relative_to(ROOT).as_posix()
        configures = name.startswith((".ci/", "env/")) or name in ("Makefile", "environment.yml", "pyproject.toml")
        for what, pattern in (*FORBIDDEN.items(), *([("an address", NO_ADDRESS)] if configures else [])):
            found += [f"{name}: {what}: {m[0]}" for m in pattern.finditer(text)]
    assert found == []


# Size and form


def test_exceptions_of_complexity_are_needed():
    """What a file is allowed in pyproject.toml, it needs: the list only shrinks."""
    ignores = PROJECT["tool"]["ruff"]["lint"]["per-file-ignores"]
    allowed = {(name, rule) for name, of_file in ignores.items() for rule in of_file}
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--select"]
    command += [",".join({rule for _, rule in allowed}), "--config", "lint.per-file-ignores={}", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = {(Path(one["filename"]).relative_to(ROOT).as_posix(), one["code"]) for one in json.loads(done.stdout)}
    assert found == allowed


@pytest.mark.parametrize("name", ["run", "finetune"])
def test_a_template_is_small_takes_parameters_and_holds_no_outputs(name):
    """The lessons' rules are in test_lessons.py."""
    notebook = json.loads(text_of(f"notebooks/{name}.ipynb"))
    assert "widgets" not in notebook["metadata"]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in code) == 1
    assert not any(c["outputs"] or c["execution_count"] for c in code)


def test_this_environment_matches_its_lock(check):
    """Where `make` set it up: a stale environment must not vouch for the locks."""
    target = Path(sys.prefix) / ".target"
    if not target.exists():
        pytest.skip("this environment was not made by env/install.sh")
    assert check.differences(ROOT / target.read_text().split()[0]) == []


def test_readme_shows_the_committed_ablation():
    """The README's numbers are those of the committed results, and nothing else."""
    found = {r["row"]: r for r in results.collect(ROOT / "papermill_runs/results/ablation-cpu")}
    columns = ["row", "mode", "seq_len", "step_seconds", "device_peak_bytes", "host_peak_bytes", "paper_seq_len"]
    table = results.to_markdown(results.table([found[name] for name in ROWS]), columns)
    assert f"<!-- ablation -->\n{table}\n<!-- /ablation -->" in text_of("README.md")


def test_the_table_of_decoders_is_what_was_measured():
    import support_table

    assert support_table.table() in text_of("notebooks/training.md")


@pytest.mark.parametrize("path", referee_page.TABLES)
def test_a_table_of_stacks_is_what_the_referee_found(path):
    result = referee_page.read(ROOT / "papermill_runs/results/referee")
    mark = referee_page.TABLES[path][0]
    assert f"<!-- {mark} -->\n{referee_page.table_of(path, result)}<!-- /{mark} -->" in text_of(path)


def test_the_referees_pages_are_of_its_result():
    folder = ROOT / "papermill_runs/results/referee"
    cells = referee_page.read(folder)["cells"]
    assert (folder / "referee.md").read_text() == referee_page.markdown(cells)
    assert (folder / "referee.html").read_text() == referee_page.page(cells)


def test_the_licence_the_citation_and_the_package_agree():
    assert hashlib.sha256(text_of("LICENSE").encode()).hexdigest().startswith("cfc7749b96f63bd3")  # Apache's text
    citation, project = yaml.safe_load(text_of("CITATION.cff")), PROJECT["project"]
    assert citation["license"] == project["license"] == "Apache-2.0"
    assert citation["version"] == project["version"]
    assert {"message", "title", "authors", "cff-version"} <= set(citation)  # what the format requires
    assert f"## {project['version']}" in text_of("CHANGELOG.md")


def test_the_readme_says_early_what_was_measured_where():
    """In its third paragraph of text, as long as no result is of a GPU."""
    third = [p for p in text_of("README.md").split("\n\n") if re.match(r"[\w*]", p)][2]
    found = results.collect(ROOT / "papermill_runs/results")
    on_gpu = [r["folder"] for r in found if "cpu" not in str(r["environment"]["device"]).lower()]
    assert ("nothing on a GPU" in third) == (not on_gpu), on_gpu


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wheelhouse_takes_wheels_for_every_libc_of_a_lock(tmp_path, device):
    """pip takes a tag at its word: a wheel for manylinux_2_27 alone is not found under 2_28."""
    python = program(tmp_path / "python", f'echo "$@" >> {tmp_path}/asked')
    command = [ROOT / "env/wheelhouse.sh", "download", tmp_path / "wheels", device, "3.11"]
    done = run(command, PYTHON=python, ARCH="x86_64", TORCH_INDEX_URL="")
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "asked").read_text().splitlines()[0].split()
    assert {f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)} <= set(first)


def test_one_conftest():
    """`from conftest import ...` and what ranks unpickle mean the first one that was imported."""
    assert list((ROOT / "tests").rglob("conftest.py")) == [ROOT / "tests/conftest.py"]
