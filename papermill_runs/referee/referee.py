"""`python papermill_runs/referee/referee.py [--stack NAME ...] [--case NAME ...]` judges stacks (`exactness/`) on all
cases and writes papermill_runs/results/referee/. A cell that was judged with the same versions is kept."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from exactness import page, stacks  # noqa: E402
from exactness.cases import CASES, Case  # noqa: E402
from exactness.ranks import Processes  # noqa: E402

RANKS = 2


def versions_of(stack: Any) -> dict[str, str]:
    """Of the packages that a stack needs; raises PackageNotFoundError without them."""
    return {name: metadata.version(name) for name in stack.requires}


def judge(processes: Processes, name: str, case: Case, plain: dict[Any, Any]) -> dict[str, Any]:
    """One cell. `plain` keeps what plain transformers found."""
    from exactness.judge import verdict

    trainer = hasattr(stacks.load(name), "trainer")
    if case.only_under_trainer and not trainer:
        return {"result": "absent", "reason": "needs a Trainer"}
    want = reference(processes, case, trainer, plain)
    if isinstance(want, dict) and "result" in want:
        return {"result": "does not run", "reason": f"plain transformers: {want['reason']}"}
    found = processes.run(name, case, RANKS)
    if isinstance(found, dict):
        return found
    judged = verdict(found, want)
    if judged["result"] == "wrong" and max(judged["wrong"].values()) < LARGE[case.dtype]:
        judged = verdict(found, want, rounding(processes, case, trainer, plain))
    return judged


LARGE = {"float32": 1e-3, "bfloat16": 0.2}
"""Errors above this are no rounding."""


def reference(processes: Processes, case: Case, trainer: bool, plain: dict[Any, Any]) -> Any:
    """What plain transformers finds in one process: in a loop, or under the Trainer; or how it ends."""
    key = case.title, case.dtype, trainer
    if key not in plain:
        found = processes.run("plain-trainer" if trainer else "plain", case, 1)
        plain[key] = found if isinstance(found, dict) else found[0]
    return plain[key]


def rounding(processes: Processes, case: Case, trainer: bool, plain: dict[Any, Any]) -> dict[str, float]:
    """How large an error of each quantity may be by rounding (`judge.ROUNDING`). The Trainer's fp64 is the loop's."""
    from exactness.judge import ROUNDING, errors

    trainer = trainer and case.dtype == "bfloat16"
    wider = replace(case, dtype={"float32": "float64", "bfloat16": "float32"}[case.dtype])
    here, exact = (reference(processes, one, trainer, plain) for one in (case, wider))
    if "result" in here or "result" in exact:
        return {}
    return {name: ROUNDING * error for name, error in errors(here, exact).items()}


def cell_of(processes: Processes, name: str, case: Case, plain: dict[Any, Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        versions = versions_of(stacks.load(name))
    except metadata.PackageNotFoundError as e:
        made, versions = {"result": "does not run", "reason": f"{e.name} is not installed"}, {}
    else:
        made = judge(processes, name, case, plain)
    return {
        **made,
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", action="append", choices=stacks.known(), help="judge this one; may be repeated")
    parser.add_argument("--case", action="append", choices=[*CASES], help="judge this one; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "papermill_runs" / "results" / "referee")
    parser.add_argument("--again", action="store_true", help="judge anew what was judged with the same versions")
    args = parser.parse_args()
    chosen, names = args.stack or stacks.known(), args.case or [*CASES]
    result, processes, plain = page.read(args.out), Processes(), dict[Any, Any]()
    todo = [
        (stack, case)
        for case in names
        for stack in chosen
        if args.again or not page.judged(result, stack, case, versions_or_none(stack))
    ]
    for at, (name, case) in enumerate(todo, 1):
        environment: dict[str, str] = getattr(stacks.load(name), "environment", dict)()
        if all(os.environ.get(n) == v for n, v in environment.items()):
            cell = cell_of(processes, name, CASES[case], plain)
            result = page.read(args.out)
            result["cells"].setdefault(name, {})[case] = cell
            page.write(args.out, result)
            print(f"{at:3}/{len(todo)} {name:14} {case:14} {page.said(cell)} ({cell['seconds']:.0f} s)", flush=True)
        else:  # processes of its own: the variables must be there before Python starts
            again = ["--again"] if args.again else []
            command = [sys.executable, __file__, "--stack", name, "--case", case, "--out", str(args.out), *again]
            subprocess.run(command, env={**os.environ, **environment}, check=True)
    page.write(args.out, page.read(args.out))


def versions_or_none(name: str) -> dict[str, str] | None:
    try:
        return versions_of(stacks.load(name))
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
