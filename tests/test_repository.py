"""The repository itself: locks and environments agree, nothing of one machine is in it, size limits hold."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from alstlib.runs import results

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted((ROOT / "env").glob("*-py*.txt"))
SITE = ROOT / "env" / "site.txt"
SHARED = (
    "torch",
    "transformers",
    "datasets",
    "deepspeed",
    "papermill",
    "jupyterlab",
    "peft",
    "trl",
    "pytest",
    "ruff",
    "mypy",
)


def pins(lock: Path) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def repository_files() -> list[Path]:
    """What git tracks or would track; without git (an unpacked archive), what is not hidden."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [p for name in listed if name and (p := ROOT / name).is_file()]
    hidden = [p for p in ROOT.rglob("*") if p.is_file()]
    return [p for p in hidden if not any(part[0] == "." for part in p.relative_to(ROOT).parts)]


# Environments


def test_there_is_a_lock_for_each_target() -> None:
    assert [p.stem for p in LOCKS] == [f"{device}-py3{minor}" for device in ("cpu", "cuda") for minor in range(11, 15)]


@pytest.mark.parametrize("lock", [*LOCKS, SITE], ids=lambda p: p.stem)
def test_lock_lines_are_exact_and_sorted(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert names == sorted(set(names))


def test_locks_agree() -> None:
    found = {lock.stem: pins(lock) for lock in LOCKS}
    reference = found["cpu-py311"]
    assert set(SHARED) <= set(reference)
    for name, versions in found.items():
        assert set(SHARED) <= set(versions), name
        assert {k: v for k, v in versions.items() if k in reference and reference[k] != v} == {}, name


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_lock_has_what_pyproject_asks_for(lock: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if lock.stem.startswith("cpu"):
        del extras["qlora"]  # for GPUs
    asked = [*project["dependencies"], *(r for extra in extras.values() for r in extra)]
    versions = pins(lock) | pins(SITE)
    for requirement in map(Requirement, asked):
        version = versions.get(canonicalize_name(requirement.name), "absent")
        assert version != "absent", requirement
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_the_site_changes_nothing_that_is_locked(lock: Path) -> None:
    assert pins(lock).keys() & pins(SITE).keys() == set()


def test_environment_yml_has_the_versions_of_the_lock() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert "pytorch" not in environment["channels"]
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    assert "python=3.11" in plain
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    included = [line.split()[1] for line in pip if line.startswith("-r ")]
    assert included == ["env/cpu-py311.txt"]
    lock = pins(ROOT / included[0])
    named = dict(line.split("==") for line in pip if "==" in line)
    assert named["torch"] == lock["torch"]
    assert {name: lock[canonicalize_name(name)] for name in named} == named


CARD = ("torch", "deepspeed", "transformers", "datasets", "jupyterlab", "papermill", "ipywidgets", "matplotlib")
ON_GPU = ("liger-kernel", "flash-attn-4")


def test_the_conda_file_for_gpus_enables_the_block_of_the_other() -> None:
    """Every package of the project's card is named in both, with its version."""
    plain, cuda = (ROOT / name for name in ("environment.yml", "env/environment-cuda.yml"))
    (pip,) = [d["pip"] for d in yaml.safe_load(cuda.read_text())["dependencies"] if isinstance(d, dict)]
    named = dict(line.split("==") for line in pip if "==" in line)
    lock = pins(ROOT / "env" / "cuda-py311.txt")
    assert set(named) == {*CARD, *ON_GPU}
    assert {name: lock.get(name, "4.0.0b36") for name in named} == named
    assert [line for line in pip if line.startswith("-")] == ["-r cuda-py311.txt", "-e .."]
    lines = [line.strip() for line in plain.read_text().splitlines()]
    enabled = [line.removeprefix("# ") if line.startswith("# - ") else line for line in lines]
    assert [line for line in enabled if "==" in line] == [f"- {line}" for line in pip if "==" in line]
    assert {line.split()[2].split("==")[0] for line in lines if line.startswith("# - ")} == set(ON_GPU)
    assert "flash-attn 2" in plain.read_text()


def test_packages_that_are_installed_by_hand_have_a_version() -> None:
    text = (ROOT / "env" / "README.md").read_text()
    lines = [line for line in re.findall(r"(?m)^    (.*)$", text) if "pip install" in line]
    found = [m for line in lines for m in re.findall(r"\b(flash-attn(?:-\d)?)(?:\[\w+\])?==([\w.]+)", line)]
    assert len(lines) == 3
    assert [name for name, _ in found] == ["flash-attn", "flash-attn-3", "flash-attn-4"]
    assert dict(found)["flash-attn-4"] in (ROOT / "env" / "environment-cuda.yml").read_text()


def plan(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "env/install.sh"), "--plan"]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, cwd=tmp_path)


def fake_python(folder: Path, version: str, name: str = "python") -> Path:
    """A script that answers the installer's questions as a Python of this version would."""
    major, minor = version.split(".")
    code = int((int(major), int(minor)) < (3, 11))
    path = folder / name
    path.write_text(
        f'#!/bin/sh\ncase "$2" in *base_executable*) echo "$0" ;; *) echo "{major} {minor}"; exit {code} ;; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "version, lock",
    [("3.11", "py311"), ("3.12", "py312"), ("3.13", "py313"), ("3.14", "py314"), ("3.15", "py314")],
)
def test_installer_picks_the_lock_of_the_python(tmp_path: Path, version: str, lock: str) -> None:
    done = plan(tmp_path, PYTHON=str(fake_python(tmp_path, version)), ALST_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    assert f"lock=env/cpu-{lock}.txt" in done.stdout
    assert ("newer than the locks" in done.stderr) == (version > "3.14")


def test_installer_refuses_an_old_python(tmp_path: Path) -> None:
    done = plan(tmp_path, PYTHON=str(fake_python(tmp_path, "3.10")))
    assert done.returncode == 1
    assert "Python 3.10, not a Python >= 3.11" in done.stderr


def test_installer_skips_an_old_python_on_the_path(tmp_path: Path) -> None:
    fake_python(tmp_path, "3.9", "python3")
    for newer in ("3.14", "3.13"):  # a locked one is taken before one that is newer than the locks
        fake_python(tmp_path, newer, f"python{newer}")
    fake_python(tmp_path, "3.15", "python")
    done = plan(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON="", ALST_DEVICE="cpu")
    assert f"python={tmp_path}/python3.13 lock=env/cpu-py313.txt" in done.stdout, done.stderr


@pytest.mark.parametrize("output, lock", [("GPU 0: a GPU (UUID: GPU-1)", "cuda-py312"), ("", "cpu-py312")])
def test_installer_picks_the_device(tmp_path: Path, output: str, lock: str) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "{output}"\n')
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    python = str(fake_python(tmp_path, "3.12"))
    assert f"lock=env/{lock}.txt" in plan(tmp_path, PATH=path, PYTHON=python, ALST_DEVICE="").stdout
    done = plan(tmp_path, PATH=path, PYTHON=python, ALST_DEVICE="tpu")
    assert done.returncode == 1
    assert "not one of cpu, cuda" in done.stderr


def copy_of_the_installer(folder: Path) -> Path:
    """Where it may run: it would remake the checkout's .venv."""
    (folder / "env").mkdir(parents=True)
    for path in (ROOT / "env").iterdir():
        shutil.copytree(path, folder / "env" / path.name) if path.is_dir() else shutil.copy(path, folder / "env")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "env" / "install.sh"


def install(tmp_path: Path, driver: str, **env: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What the installer does with a GPU of this driver and a Python that only notes what it is asked."""
    installer, tools = copy_of_the_installer(tmp_path / "checkout"), tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "nvidia-smi": f'case "$*" in *driver_version*) echo {driver} ;; *) echo "GPU 0: a GPU (UUID: GPU-1)" ;; esac',
        "python": f"""echo "$@" >> {tmp_path}/asked
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *base_executable*) echo "$0" ;;
    *ensurepip*) echo "3 12" ;;
esac""",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    env = {"ALST_DEVICE": "", "TORCH_INDEX_URL": "", "WHEELHOUSE": "", **env}
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "python"), **env}
    done = subprocess.run(["bash", str(installer)], env=env, capture_output=True, text=True)
    return done, tmp_path / "checkout" / ".venv"


def test_the_installer_names_an_old_driver_before_it_downloads(tmp_path: Path) -> None:
    done, venv = install(tmp_path, "550.90.07")
    assert done.returncode == 1
    assert "the NVIDIA driver is 550.90.07" in done.stderr
    assert "needs 580 or newer" in done.stderr
    assert "TORCH_INDEX_URL" in done.stderr
    assert not venv.exists()
    assert " pip " not in (tmp_path / "asked").read_text()


OF_CUDA_13 = {"cuda-bindings", "cuda-pathfinder", "nvidia-nvjitlink"}


@pytest.mark.parametrize(
    "driver, env, left_out",
    [
        ("580.65.06", {}, False), ("550.90.07", {"TORCH_INDEX_URL": "an index"}, True),
        ("550.90.07", {"ALST_DEVICE": "cpu", "TORCH_INDEX_URL": "an index"}, False),
    ],
)  # fmt: skip
def test_the_installer_leaves_cudas_pins_to_another_torch(
    tmp_path: Path, driver: str, env: dict[str, str], left_out: bool
) -> None:
    done, venv = install(tmp_path, driver, **env)
    assert done.returncode == 0, done.stderr
    device = env.get("ALST_DEVICE", "cuda")
    lock = pins(ROOT / "env" / f"{device}-py312.txt")
    missing = lock.keys() - pins(venv / ".lock-without-deepspeed").keys()
    assert missing == {"deepspeed", *(OF_CUDA_13 if left_out else ())}
    assert set((venv / ".left-out").read_text().split()) == (OF_CUDA_13 if left_out else set())
    asked = (tmp_path / "asked").read_text()
    assert ("--index-url an index" in asked) == bool(env)


def test_the_check_leaves_out_what_another_torch_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "env"))
    check = importlib.import_module("check")
    monkeypatch.setattr(check.sys, "prefix", str(tmp_path))
    lock = tmp_path / "lock.txt"
    lock.write_text("cuda-bindings==0.0.1\nnvidia-nvjitlink==0.0.1\n")
    assert len(check.differences(lock)) == 2
    (tmp_path / ".left-out").write_text("cuda-bindings\n")
    assert [line.split(":")[0] for line in check.differences(lock)] == ["nvidia-nvjitlink"]


# Continuous integration


@pytest.mark.parametrize(
    "broken, output, fails",
    [
        ("", "3 passed, 1 skipped in 0.10s", False),
        ("", "300 passed in 400.10s (0:06:40)", False),
        ("test-all", "no tests ran in 0.01s", True),
        ("", "4 skipped in 0.01s", True),
        ("", "10 deselected in 0.01s", True),
        ("test-all", "1 failed, 3 passed in 0.10s", True),
        ("test-all", "3 passed, 1 error in 0.10s", True),
        ("lint", "3 passed in 0.10s", True),
        ("check-lessons", "3 passed in 0.10s", True),
        ("site", "3 passed in 0.10s", True),
        ("test-elsewhere", "3 passed in 0.10s", True),
        ("test-compat", "3 passed in 0.10s", True),
        ("", "nothing", True),
    ],
)
def test_ci_fails_with_the_suite_and_the_lessons_and_ends_with_the_suites_summary(
    tmp_path: Path, broken: str, output: str, fails: bool
) -> None:
    make = tmp_path / "make"
    make.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/called\ncase "$1" in\n'
        f'test-all) echo "{output}" ;;\n'
        'test-elsewhere | test-compat | check-lessons) echo "1 failed in 9.9s, says $1" ;;\n'
        f'esac\n[ "$1" != "{broken}" ] || exit 2\n'
    )
    make.chmod(0o755)
    (tmp_path / "chromium").symlink_to(make)  # or it would be installed
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([str(ROOT / ".ci/run")], env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == ("pytest gave no summary" if output == "nothing" else output)
    first, *rest = (tmp_path / "called").read_text().split()
    assert (first, sorted(rest[:2])) == ("site-tools", ["lint", "site"])
    assert rest[2:] == ["test-all", "test-elsewhere", "test-compat", "check-lessons"]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_help_lists_every_target() -> None:
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  ([a-z-]+) ", done.stdout, re.MULTILINE)) == make_targets()
    assert {"ablation", "parity", "lab", "lessons", "check-lessons", "test", "lint", "clean", "help"} <= make_targets()


def test_make_targets_in_the_pages_exist() -> None:
    readmes = [p for p in repository_files() if p.name == "README.md" or p.parent == ROOT / "notebooks"]
    readmes = [p for p in readmes if p.suffix == ".md"]
    if ROOT / "README.md" not in readmes:
        pytest.skip("no README.md yet")
    for readme in readmes:
        text = readme.read_text()
        code = [
            *re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL),
            *re.findall(r"(?m)^    (.*)$", text),
        ]
        code += re.findall(r"`([^`\n]+)`", text)
        named = re.findall(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*make ([a-z-]+)\b", "\n".join(code), re.MULTILINE)
        assert set(named) <= make_targets(), readme


def test_jupyterlab_keeps_its_token() -> None:
    pattern = re.compile(r"(token|password)\s*=\s*(''|\"\"|\s|$)", re.MULTILINE)
    assert not pattern.search((ROOT / "Makefile").read_text())


# Nothing of one machine


FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~}*-])/(?:work|root|home|Users)/[\w.]"),
    "an address of a registry": re.compile(
        r"(?i)\b[\w-]*(?:pypi|pythonhosted|anaconda|npmjs)[\w-]*\.[a-z]{2,}\b|//[^\s/]*/whl"
    ),
}
NO_ADDRESS = re.compile(r"\w+://")


@pytest.mark.parametrize(
    "text, caught",
    [
        ("see " + "/".join(["", "root", "x"]), True),
        ('"' + "/".join(["", "home", "me", "x"]) + '"', True),
        ("../work/x and ~/root/x", False),
        ("files." + "python" + "hosted.org", True),
        ("py" + "pi.org/simple", True),
        ("https://d.example/" + "whl/cpu", True),
        ("the paper's arxiv.org page", False),
    ],
)
def test_the_patterns_catch(text: str, caught: bool) -> None:
    assert any(pattern.search(text) for pattern in FORBIDDEN.values()) == caught


def test_no_machine_path_and_no_registry() -> None:
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}: {what}: {m[0]}" for what, pattern in FORBIDDEN.items() for m in pattern.finditer(text)]
        configures = name.startswith((".ci/", "env/")) or name in ("Makefile", "environment.yml", "pyproject.toml")
        if configures:
            found += [f"{name}: an address: {m[0]}" for m in NO_ADDRESS.finditer(text)]
    assert found == []


def test_git_ignores_what_is_made_here() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    made = [".venv/x", "papermill_runs/out/x", "alstlib/__pycache__/x", "alstlib.egg-info/x", ".mypy_cache/x"]
    done = subprocess.run(["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == made


# Size and form


def test_exceptions_of_complexity_are_needed() -> None:
    """What a file is allowed in pyproject.toml, it needs: the list only shrinks."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    rules = ",".join(sorted({rule for of_file in allowed.values() for rule in of_file}))
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--select", rules]
    command += ["--config", "lint.per-file-ignores={}", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, set[str]] = {}
    for one in json.loads(done.stdout):
        found.setdefault(Path(one["filename"]).relative_to(ROOT).as_posix(), set()).add(one["code"])
    assert {name: sorted(of_file) for name, of_file in found.items()} == allowed


@pytest.mark.parametrize("name", ["run", "finetune"])
def test_a_template_is_small_takes_parameters_and_holds_no_outputs(name: str) -> None:
    """The lessons' rules are in test_lessons.py."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 1_000_000
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert "widgets" not in notebook["metadata"]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in code) == 1
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)


CHECK = (
    "import sys, pathlib; sys.path.insert(0, 'env'); import check; print(check.differences(pathlib.Path(sys.argv[1])))"
)


def test_this_environment_matches_its_lock() -> None:
    """Where `make` set it up: a stale environment must not vouch for the locks."""
    target = Path(sys.prefix) / ".target"
    if not target.exists():
        pytest.skip("this environment was not made by env/install.sh")
    lock = target.read_text().split()[0]
    done = subprocess.run([sys.executable, "-c", CHECK, lock], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_readme_shows_the_committed_ablation() -> None:
    """The README's numbers are those of the committed results, and nothing else."""
    from alstlib.config import ROWS

    found = {r["row"]: r for r in results.collect(ROOT / "papermill_runs" / "results" / "ablation-cpu")}
    columns = ["row", "mode", "seq_len", "step_seconds", "device_peak_bytes", "host_peak_bytes", "paper_seq_len"]
    table = results.to_markdown(results.table([found[name] for name in ROWS]), columns)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.partition("<!-- ablation -->")[2].partition("<!-- /ablation -->")[0].strip() == table


@pytest.mark.parametrize("name", ["support_table", "trainer_table"])
def test_a_table_of_the_page_on_training_is_what_was_measured(name: str) -> None:
    page = (ROOT / "notebooks" / "training.md").read_text(encoding="utf-8")
    assert importlib.import_module(name).table() in page


def test_the_top_level_is_complete_and_nothing_else() -> None:
    named = {p.relative_to(ROOT).parts[0] for p in repository_files()}
    assert named - {".ci", ".gitignore"} == {
        "notebooks", "alstlib", "papermill_runs", "env", "tests", "environment.yml", "pyproject.toml", "Makefile",
        "README.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md",
    }  # fmt: skip


def test_the_licence_the_citation_and_the_package_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert hashlib.sha256(licence.encode()).hexdigest().startswith("cfc7749b96f63bd3")  # Apache's text, unchanged
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", project["license"])
    assert citation["version"] == project["version"]
    assert {"message", "title", "authors"} <= set(citation)  # what the format requires
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_readme_says_early_what_was_measured_where() -> None:
    """In its third paragraph of text, as long as no result is of a GPU."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    third = [p for p in text.split("\n\n") if re.match(r"[\w*]", p)][2]
    found = results.collect(ROOT / "papermill_runs" / "results")
    on_gpu = [r["folder"] for r in found if "cpu" not in str(r["environment"]["device"]).lower()]
    assert ("nothing on a GPU" in third) == (not on_gpu), on_gpu
    assert "[LICENSE](LICENSE)" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wheelhouse_takes_wheels_for_every_libc_of_a_lock(tmp_path: Path, device: str) -> None:
    """pip takes a tag at its word: a wheel for manylinux_2_27 alone is not found under 2_28."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    command = [ROOT / "env/wheelhouse.sh", "download", tmp_path / "wheels", device, "3.11"]
    environment = {**os.environ, "PYTHON": str(python), "ARCH": "x86_64", "TORCH_INDEX_URL": ""}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    first = (tmp_path / "asked").read_text().splitlines()[0].split()
    assert {f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)} <= set(first)


def test_one_conftest() -> None:
    """`from conftest import ...` and what ranks unpickle mean the first one that was imported."""
    assert list((ROOT / "tests").rglob("conftest.py")) == [ROOT / "tests" / "conftest.py"]
