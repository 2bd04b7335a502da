"""The list of branches for CUDA names every module that has one, and steps that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ASKS = re.compile(
    r'\.is_cuda|device\.type [!=]= "cuda"|torch\.cuda\.|kernel_device\([\w.]*device\.type\)|this_device\(\)|\bgpu: bool'
    r"|get_device_module|\baccelerator\(|own_device\("
)


def rows() -> list[list[str]]:
    table = (HERE / "README.md").read_text().partition("| module |")[2]
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:] if line.startswith("|")]


def test_every_module_that_asks_for_cuda_is_listed() -> None:
    asking = {
        p.relative_to(ROOT / "alstlib").with_suffix("").as_posix()
        for p in (ROOT / "alstlib").rglob("*.py")
        if ASKS.search(p.read_text())
    }
    named = {name for row in rows() for name in re.findall(r"`([\w/]+)`", row[0])}
    assert asking == named


def test_each_has_a_reason_and_a_step_that_runs_it() -> None:
    for row in rows():
        assert len(row) == 4
        assert row[2]
        for step in re.findall(r"`([\w/-]+)`", row[3]):
            group, _, name = step.partition("/")
            if group == "tests":
                assert name == "blockwise" or any((ROOT / "tests").rglob(f"{name}.py"))
                continue
            spec = yaml.safe_load((ROOT / "papermill_runs" / "specs" / f"{group}.yaml").read_text())
            assert not name or name in [r["name"] for r in spec["rows"]]
