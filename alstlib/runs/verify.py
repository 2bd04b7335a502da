"""`alst verify` shows whether a step with the chosen options has the loss and the gradients of plain transformers. It
uses a small model of the same architecture on CPU ranks, which run `alstlib.measure.verify`."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence

from alstlib.hf.configs import check_model
from alstlib.planner.command import fields_of
from alstlib.runs.results import Json
from alstlib.runs.spawn import run_on_ranks
from alstlib.runs.workers import check_ranks
from alstlib.tables import console, listed
from alstlib.units import parse_quantity

HELP = "check on the CPU, with a small copy of a model, that its gradients equal those of plain transformers"
EXIT = (
    "Exit status: 0 when everything is equal; 1 when something differs or fails; 2 when the model or an option is "
    "refused, or when no small model can be built."
)

WORDS = {"exact": "equal", "wrong": "differs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `alst verify`."""
    parser.add_argument(
        "model",
        help="a name on the Hugging Face hub, a folder, a config.json, or a built-in shape; the weights are not read",
    )
    parser.add_argument(
        "--sp",
        type=int,
        default=2,
        help="the number of ranks that share each sample (default: 2); one rank is tried too",
    )
    parser.add_argument(
        "--chunk", type=parse_quantity, metavar="TOKENS", help="run each layer in chunks of this many tokens"
    )
    parser.add_argument(
        "--block", type=parse_quantity, metavar="TOKENS",
        help="run the whole model in blocks of this many tokens (`block_step`)",
    )  # fmt: skip
    parser.add_argument(
        "--offload", action="store_true", default=None, help="keep activation checkpoints in the host's memory"
    )
    parser.add_argument("--attention", metavar="KERNEL", help="the attention kernel, which must run on a CPU")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE",
        help="set a field of alstlib.Options, such as --set offload=sync; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--config", action="append", default=[], metavar="FIELD=VALUE",
        help="set a field of the model's config, such as attn_pdrop=0; may be given several times",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--force", action="store_true", help="start many more ranks than cores, too")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


WORKER = "alstlib.measure.verify"


def on_rank(worker: str, question: Json) -> Json:
    """What a rank does; it needs torch."""
    import importlib

    return importlib.import_module(worker).verify(question)


def verify(args: argparse.Namespace) -> int:
    """The command; its exit status is EXIT's."""
    if args.sp < 1:
        raise ValueError(f"sp={args.sp} must be at least 1")
    if not args.force:
        check_ranks(args.sp, 1, 0, "sp")
    options = {n: v for n in ("chunk", "block", "offload", "attention") if (v := getattr(args, n)) is not None}
    question = {
        "model": args.model, "sp": args.sp, "options": options | fields_of(args.set, "--set"),
        "config": fields_of(args.config, "--config"), "trust_remote_code": args.trust_remote_code,
    }  # fmt: skip
    check_model(args.model)
    if not args.json:
        ranks = f"{args.sp} CPU rank{'s' * (args.sp > 1)}"
        print(f"{args.model}: a step of a small model on {ranks} is compared with plain transformers", flush=True)
    began = time.monotonic()
    try:
        answer = together(run_on_ranks(on_rank, args.sp, WORKER, question))
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
    if "failed" in answer:
        return "fails", answer["failed"]
    if "refused" in answer:
        return "refused", answer["refused"]
    first = {case["result"]: case for case in reversed(answer["cases"])}
    if case := first.get("refused") or first.get("not built") or first.get("crash"):
        if case["result"] == "crash" and not case["reason"].startswith("ValueError: "):  # those refuse a call
            return "fails", f"sp {case['sp']}, {case['sample']}: {case['reason']}"
        return "refused", case["reason"].removeprefix("ValueError: ")
    if "wrong" in first:
        count = sum(case["result"] == "wrong" for case in answer["cases"])
        return "differs", f"{count} of {len(answer['cases'])} cases; first {said(first['wrong'])}"
    worst = max(max(case["loss"], case["gradient"]) for case in answer["cases"])
    return "equal", f"loss and every gradient are those of plain transformers, to {worst:.1e}"


def said(case: Json) -> str:
    """What is wrong in a case: in which module, where that is known."""
    text = "in {module} ({kind}): its output is off by {error:.1e} of its norm"
    return text.format(**case["first"]) if case["first"] else case["reason"]


def show(answer: Json) -> None:
    """Print the answer for people."""
    about = []
    if small := answer.get("small"):
        (found, whole), (heads, kv_heads) = small["layer_kinds"], small["heads"]
        about.append(["shrunk", ", ".join(f"{name} {a} -> {b}" for name, (a, b) in small["changes"].items())])
        kinds = f"{found} of {whole} kinds of layers in their order"
        about.append(["kept", f"{kinds}, {heads} query and {kv_heads} key/value heads, all other fields"])
    options = (f"{name} {value}" for name, value in answer["options"].items())
    about.append(["options", ", ".join(options) or "as by default"])
    tiles = (f"{name} {here}" for name, (_, here) in answer.get("tiles", {}).items())
    about.append(["in tokens here", ", ".join(tiles)])
    notes = [note for one in (answer, *answer["cases"]) for note in one.get("notes", ())]
    about += [["note", note] for note in dict.fromkeys(re.sub(r"^layer \d+:? ", "", note) for note in notes)]
    cases = []
    for case in answer["cases"]:
        numbers = [f"{case[name]:.1e}" if name in case else "" for name in ("loss", "gradient")]
        cases.append([str(case["sp"]), case["sample"], WORDS.get(case["result"], case["result"]), *numbers])
    console().print(listed(["", ""], about), "")
    console().print(listed(["sp", "sample", "", "loss", "gradients"], cases))
    print(f"{answer['verdict']}: {answer['reason']} ({answer['seconds']:.0f} s)")
