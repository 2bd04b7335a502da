"""`python papermill_runs/referee/referee.py [--stack NAME ...] [--case NAME ...]` judges stacks (`exactness/`) on all
cases and writes papermill_runs/results/referee/. A cell that was judged with the same versions is kept.

With `--model NAME` it judges one stack on a small copy of that model instead, and writes nothing. This is what
`alst verify NAME --stack STACK` runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MORE = os.environ.get("REFEREE_PATH", "")
"""A folder of packages, which come before the environment's."""
OWN = [str(HERE), str(ROOT), *([MORE] if MORE else [])]
sys.path[:0] = OWN
os.environ["PYTHONPATH"] = os.pathsep.join([*OWN, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from exactness import page, reproduce, stacks  # noqa: E402
from exactness.cases import CASES, Case  # noqa: E402
from exactness.ranks import Processes  # noqa: E402

RANKS = 2
RESULT = ROOT / "papermill_runs" / "results" / "referee"


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
    found = processes.run(name, case, getattr(stacks.load(name), "ranks", RANKS))
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
    found = errors(here, exact)
    found["gradient norm"] = found["gradient"]  # a norm is off by no more
    return {name: ROUNDING * error for name, error in found.items()}


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


def reproduced(processes: Processes, stack: str, case: str, folder: Path) -> tuple[bool, str]:
    """Whether a cell's reproducer shows that something is wrong, and what it shows."""
    from exactness.judge import apart

    path = folder / reproduce.file_of(stack, case)
    printed = []
    for ranks in (1, RANKS):
        found = processes.script(path, ranks, stack in reproduce.STAND_IN)
        if isinstance(found, dict):
            return False, page.said(found)
        printed.append(found[0])
    want, got = printed
    if not want or {n: len(some) for n, some in got.items()} != {n: len(some) for n, some in want.items()}:
        return False, f"prints {got} where plain transformers prints {want}"
    off = {n: max(apart(a, b) for a, b in zip(got[n], want[n])) for n in want}
    return max(off.values()) > TOLD[CASES[case].dtype], ", ".join(f"{n} {page.percent(off[n])}" for n in off)


TOLD = {"float32": 1e-5, "bfloat16": 0.02}
"""Errors above this are shown to be wrong by a reproducer."""


def reproduce_all(chosen: Sequence[str], names: Sequence[str]) -> int:
    """Run the reproducers of cells and keep with each cell what its own shows; returns 1 if one shows nothing wrong."""
    processes, missed = Processes(), 0
    for stack in chosen:
        for case in names:
            cell = page.read(RESULT)["cells"].get(stack, {}).get(case, {"result": "absent"})
            if reproduce.writable(stack, CASES[case], cell):
                shown, words = reproduced(processes, stack, case, RESULT / "reproducers")
                missed += not shown
                result = page.read(RESULT)  # another process may have written it
                told = f"{words} ({time.strftime('%Y-%m-%d')})" if shown else f"NOT SHOWN: {words}"
                result["cells"][stack][case]["reproduced"] = told
                page.write(RESULT, result)
                print(f"{stack:20} {case:14} {'shown' if shown else 'NOT SHOWN'}: {words}", flush=True)
    return int(missed > 0)


OF_A_MODEL = ("even", "prompts", "accumulation", "packed")
"""Cases that `--model` judges."""


def model_cases(name: str) -> list[Case]:
    """Cases with a small copy of a model, whose kinds of layers are all there."""
    from alstlib.hf.loading.models import model_config
    from alstlib.planner.measure.small import first_of_each, kinds_in_lists, shrunk

    config = model_config(name, {}, False)
    text = config.get_text_config()
    small = shrunk(text, first_of_each(kinds_in_lists(text)))
    return [replace(CASES[case], model=small.model_type, config=small) for case in OF_A_MODEL]


def of_a_model(name: str, stack: str, as_json: bool) -> int:
    """Judge a stack on a small copy of a model; returns the exit status of `alst verify`."""
    processes, plain = Processes(), dict[Any, Any]()
    cells = {}
    for case in model_cases(name):
        cells[case.title] = cell_of(processes, stack, case, plain)
        if not as_json:
            print(f"{case.title}: {page.said(cells[case.title])}", flush=True)
    if as_json:
        print(json.dumps({"model": name, "stack": stack, "cells": cells}, indent=2))
    results = {cell["result"] for cell in cells.values()}
    return 1 if results & {"wrong", "does not run"} else 2 if "refused" in results else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", action="append", choices=stacks.known(), help="judge this one; may be repeated")
    parser.add_argument("--case", action="append", choices=[*CASES], help="judge this one; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--model", help="judge --stack on a small copy of this model")
    parser.add_argument("--json", action="store_true", help="with --model: print JSON")
    parser.add_argument("--again", action="store_true", help="judge anew what was judged with the same versions")
    parser.add_argument("--reproduce", action="store_true", help="run the committed reproducers in place of the stacks")
    args = parser.parse_args()
    if args.model:
        name = (args.stack or ["ours"])[0]
        if not ready(name):
            environment = {**os.environ, **stacks.load(name).environment()}
            sys.exit(subprocess.call([sys.executable, *sys.argv], env=environment))
        sys.exit(of_a_model(args.model, name, args.json))
    chosen, names = args.stack or stacks.known(), args.case or [*CASES]
    if args.reproduce:
        sys.exit(reproduce_all(chosen, names))
    processes, plain = Processes(), dict[Any, Any]()
    for name in [name for name in chosen if not ready(name)]:  # its variables must be there before Python starts
        chosen = [other for other in chosen if other != name]
        given = [word for case in names for word in ("--case", case)] + (["--again"] if args.again else [])
        command = [sys.executable, __file__, "--stack", name, "--out", str(args.out), *given]
        subprocess.run(command, env={**os.environ, **stacks.load(name).environment()}, check=True)
    todo = [(name, case) for case in names for name in chosen if args.again or not kept(args.out, name, case)]
    for at, (name, case) in enumerate(todo, 1):
        cell = cell_of(processes, name, CASES[case], plain)
        result = page.read(args.out)
        result["cells"].setdefault(name, {})[case] = cell
        page.write(args.out, result)
        print(f"{at:3}/{len(todo)} {name:14} {case:14} {page.said(cell)} ({cell['seconds']:.0f} s)", flush=True)
    page.write(args.out, page.read(args.out))
    if args.out == RESULT:
        page.put_tables(ROOT, page.read(RESULT))


def ready(name: str) -> bool:
    """Whether this process has the variables that a stack asks for."""
    asked: dict[str, str] = getattr(stacks.load(name), "environment", dict)()
    return all(os.environ.get(variable) == value for variable, value in asked.items())


def kept(folder: Path, name: str, case: str) -> bool:
    """Whether a cell was judged with the versions that are installed; or at all, where the stack is not installed."""
    result = page.read(folder)
    try:
        return page.judged(result, name, case, versions_of(stacks.load(name)))
    except metadata.PackageNotFoundError:  # it was judged with a folder of packages of its own
        return case in result["cells"].get(name, {})


if __name__ == "__main__":
    main()
