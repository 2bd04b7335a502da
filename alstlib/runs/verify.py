"""`alst verify` shows whether a step with the chosen options has the loss and the gradients of plain transformers. It
uses a small model of the same architecture on CPU ranks, which run `alstlib.planner.measure.verify`."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from alstlib.base.units import parse_quantity
from alstlib.hf.loading.configs import check_model
from alstlib.planner.command import fields_of
from alstlib.planner.tables import console, listed
from alstlib.runs.results import Json
from alstlib.runs.spawn import run_on_ranks

HELP = "check on the CPU, with a small copy of a model, that its gradients equal those of plain transformers"
EXIT = (
    "Exit status: 0 when everything is equal; 1 when something differs or fails; 2 when the model or an option is "
    "refused, or when no small model can be built."
)

WORDS = {"exact": "equal", "wrong": "differs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `alst verify`."""
    add = parser.add_argument
    add("model", help="a name on the Hugging Face hub, a folder, a config.json, or a built-in shape")
    add("--sp", type=int, default=2, help="the number of ranks that share each sample (default: 2)")
    add("--block", type=parse_quantity, metavar="TOKENS", help="run the whole model in blocks of this many tokens")
    for flag, example in {"--set": "alstlib.Options, such as chunk=16K", "--config": "the model's config"}.items():
        text = f"set a field of {example}; may be given several times"
        add(flag, action="append", default=[], metavar="FIELD=VALUE", help=text)
    add("--stack", help=f"check another stack's sequence parallelism: {', '.join(_stacks())}")
    add("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    add("--json", action="store_true", help="print JSON, for programs")


REFEREE = Path(__file__).resolve().parents[2] / "papermill_runs/referee/referee.py"
"""The referee, which lies beside the package: in a clone and in a wheel."""


def _stacks() -> list[str]:
    files = (REFEREE.parent / "exactness/stacks").glob("[a-z]*.py")
    return sorted(path.stem.replace("_", "-") for path in files if not path.stem.startswith("plain"))


def on_rank(question: Json) -> Json:
    """What a rank does; it needs torch."""
    from alstlib.planner.measure import verify

    return verify.verify(question)


def judge_stack(args: argparse.Namespace) -> int:
    """The same check of another stack, by the referee.

    Raises:
        ValueError: there is no such stack, or an option is given that is for our own.
    """
    ours = {
        "--set": args.set,
        "--block": args.block,
        "--config": args.config,
        "--trust-remote-code": args.trust_remote_code,
    }
    if given := [name for name, value in ours.items() if value] + (["--sp"] if args.sp != 2 else []):
        raise ValueError(f"--stack judges a stack as its documentation sets it up, on 2 ranks: leave out {given[0]}")
    if args.stack not in _stacks():
        raise ValueError(f"there is no stack '{args.stack}': {', '.join(_stacks())}")
    flags = ["--json"] if args.json else []
    return subprocess.call([sys.executable, str(REFEREE), "--model", args.model, "--stack", args.stack, *flags])


def verify(args: argparse.Namespace) -> int:
    """The command; its exit status is EXIT's."""
    options = {**({"block": args.block} if args.block else {}), **fields_of(args.set, "--set")}
    question = {
        "model": args.model, "sp": args.sp, "options": options, "config": fields_of(args.config, "--config"),
        "trust_remote_code": args.trust_remote_code,
    }  # fmt: skip
    check_model(args.model)
    if args.stack:
        return judge_stack(args)
    if not args.json:
        ranks = f"{args.sp} CPU ranks"
        print(f"{args.model}: a step of a small model on {ranks} is compared with plain transformers", flush=True)
    began = time.monotonic()
    try:
        answer = together(run_on_ranks(on_rank, args.sp, question))
    except RuntimeError as e:  # a rank ended, or waited for another that did not come
        answer = {"cases": [], "failed": str(e).strip()}
    answer = {**question, **answer, "seconds": round(time.monotonic() - began, 1)}
    answer["verdict"], answer["reason"] = verdict(answer)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        show(answer)
    return {"equal": 0, "differs": 1, "fails": 1, "refused": 2}[answer["verdict"]]


def together(ranks: Sequence[Json]) -> Json:
    """One answer of all ranks': of each case the worst, with the module that is the first to differ on any rank."""
    order = ["exact", "not built", "refused", "wrong", "crash"]
    cases = []
    for case in zip(*(rank["cases"] for rank in ranks)):
        worst = max(case, key=lambda one: (order.index(one["result"]), one.get("gradient", 0.0)))
        found = [one["first"] for one in case if one.get("first")]
        cases.append({**worst, "first": min(found, key=lambda first: first["order"], default=None)})
    return {**ranks[0], "cases": cases}


def verdict(answer: Json) -> tuple[str, str]:
    """In a word, and why."""
    for word, key in (("fails", "failed"), ("refused", "refused")):
        if key in answer:
            return word, answer[key]
    cases = answer["cases"]
    for case in cases:
        if case["result"] == "crash" and not case["reason"].startswith("ValueError: "):  # those refuse a call
            return "fails", f"sp {case['sp']}, {case['sample']}: {case['reason']}"
        if case["result"] not in WORDS:
            return "refused", case["reason"].removeprefix("ValueError: ")
    wrong = [case for case in cases if case["result"] == "wrong"]
    if wrong:
        text = "in {module} ({kind}): its output is off by {error:.1e} of its norm"
        first = text.format(**wrong[0]["first"]) if wrong[0]["first"] else wrong[0]["reason"]
        return "differs", f"{len(wrong)} of {len(cases)} cases; first {first}"
    worst = max(max(case["loss"], case["gradient"]) for case in cases)
    return "equal", f"loss and every gradient are those of plain transformers, to {worst:.1e}"


def show(answer: Json) -> None:
    """Print the answer for people."""
    about = [["options", _said(answer["options"])]]
    if small := answer.get("small"):
        about += [
            ["shrunk", _said({name: f"{a} -> {b}" for name, (a, b) in small["changes"].items()})],
            ["in tokens here", _said({name: here for name, (_, here) in answer["tiles"].items()})],
        ]
    notes = [note for one in (answer, *answer["cases"]) for note in one.get("notes", ())]
    about += [["note", note] for note in dict.fromkeys(re.sub(r"^layer \d+:? ", "", note) for note in notes)]
    cases = []
    for case in answer["cases"]:
        numbers = [f"{case[name]:.1e}" if name in case else "" for name in ("loss", "gradient")]
        cases.append([str(case["sp"]), case["sample"], WORDS.get(case["result"], case["result"]), *numbers])
    console().print(listed(["", ""], about), "", listed(["sp", "sample", "", "loss", "gradients"], cases))
    print(f"{answer['verdict']}: {answer['reason']} ({answer['seconds']:.0f} s)")


def _said(fields: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items()) or "as by default"
