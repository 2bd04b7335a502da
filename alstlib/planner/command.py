"""`alst plan` says what fits, what limits it, what would help and what that costs; and which machines hold a length. It
imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from alstlib.base.config import Engine, Model, RunConfig, not_default, row_config
from alstlib.base.units import GIB, format_seconds, parse_quantity
from alstlib.planner import devices
from alstlib.planner.fits import known_only
from alstlib.planner.gpus import GPUS, label_bytes, rates_of
from alstlib.planner.machine import Machine, Overheads, read_machine
from alstlib.planner.model_shapes import Shape, read_shape
from alstlib.planner.prediction import Prediction, with_degree
from alstlib.planner.progress import watched
from alstlib.planner.question import NEEDED, Question, Variant, trained_length
from alstlib.planner.rendering import LATE, PATIENCE, describe, describe_machines, introduce, table
from alstlib.planner.tables import console
from alstlib.planner.trees import cost

EXIT = (
    "exit status: 0 the length fits (without --seq-len: some length does; of several machines: one of them holds it), "
    "1 it does not fit, 2 the question cannot be answered"
)

PRESETS = {"ours": "ours", "paper": "alst"}
"""Rows of the ablation that the presets begin from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `alst plan`."""
    what = parser.add_argument_group("the run")
    what.add_argument(
        "--model", default="meta-llama/Llama-3.1-8B",
        help="a name on the Hugging Face hub, a folder, a config.json, or a built-in shape (default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--seq-len", metavar="TOKENS",
        help="the tokens of one sample, such as 500K or 3.7M (default: the longest sample that fits is found); "
        "without --gpus: the smallest machines that hold it",
    )  # fmt: skip
    what.add_argument(
        "--tree", metavar="TREE",
        help="a step on trajectories that share prefixes (tree_step), compared with one by one: 800K,8x200K is a "
        "prefix of 800K tokens before 8 branches of 200K each, and a third part would branch again",
    )  # fmt: skip
    what.add_argument(
        "--images", type=int, default=0, metavar="NUMBER", help="the number of images in each sample, of one size"
    )
    what.add_argument(
        "--image-size", metavar="HEIGHTxWIDTH",
        help="the pixels of an image, as the model's processor makes it, such as 1008x756; not for a tower of one size",
    )  # fmt: skip
    what.add_argument(
        "--preset", choices=PRESETS, default="ours",
        help="plan a run of this library (ours), or of the programs that the ALST paper used (paper); default: ours",
    )  # fmt: skip
    what.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE",
        help="set a field of alstlib.RunConfig, such as --set options.chunk=16384; may be given several times",
    )  # fmt: skip
    where = parser.add_argument_group("the machine")
    where.add_argument(
        "--machine", type=Path, metavar="PATH",
        help="plan for the machine that `alst check` measured: the folder of its result, or the result.json there",
    )  # fmt: skip
    where.add_argument(
        "--gpus", type=int, metavar="NUMBER",
        help="the number of GPUs on all nodes together (default: 8, or with --seq-len the smallest number that holds "
        "it); 0 takes those of this machine",
    )  # fmt: skip
    where.add_argument(
        "--gpus-per-node", type=int, metavar="NUMBER", help="the number of GPUs of each node (default: 8; 1 of GH200)"
    )
    where.add_argument(
        "--gpu", metavar="NAMES",
        help=f"the GPU, or several with commas between them, to compare: {', '.join(GPUS)} (default: H100)",
    )  # fmt: skip
    where.add_argument(
        "--gpu-memory", metavar="BYTES",
        help="the memory of each GPU: as on its label, such as 80GB, or exact, such as 79GiB (default: that of --gpu)",
    )  # fmt: skip
    where.add_argument(
        "--host-memory", metavar="BYTES",
        help="the host memory of each node, such as 1.9TB or 1.9TiB (default: what clouds have with such GPUs)",
    )  # fmt: skip
    where.add_argument(
        "--disk", metavar="BYTES",
        help="a disk of each node, such as 2TB, for the checkpoints that the host has no room for, and for states with "
        "--set engine.offload_optimizer=nvme --set engine.nvme_path=/scratch (default: none)",
    )  # fmt: skip
    where.add_argument(
        "--disk-rate", metavar="BYTES",
        help="what that disk writes and reads in a second, such as 5GB/s (default: 5GB/s, or as measured)",
    )  # fmt: skip
    where.add_argument(
        "--disk-life", metavar="BYTES", help="what that disk may be written in its life, such as 7000TB: shown in days"
    )
    each = {"context": "the CUDA context on each GPU", "nccl": "NCCL's buffers on each GPU",
            "process": "the process of each rank on the host"}  # fmt: skip
    for name, text in each.items():
        size = f"{getattr(Overheads(), name) / GIB:g}GiB"
        where.add_argument(f"--{name}", metavar="BYTES", help=f"the memory of {text} (default: {size})")
    where.add_argument(
        "--fragmentation", type=float, metavar="SHARE",
        help="the share of each GPU's memory that is lost to fragmentation (default: 0.03)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


@dataclass(frozen=True)
class Request:
    """What the options describe: questions about one machine or about several."""

    args: argparse.Namespace
    shape: Shape
    run: RunConfig
    machines: tuple[Machine, ...]
    """One with each GPU that was named; where machines are searched for and none was, with each that is known. Their
    number of GPUs says nothing."""
    gpus: int | None
    """None: the smallest number that holds the asked length."""
    seq_len: int | None

    def question(self, machine: Machine, gpus: int) -> Question:
        """The question about so many GPUs of such a machine."""
        args, assumed, rates = self.args, dict[str, str](), machine.rates
        machine = replace(machine, gpus=gpus)
        if args.gpus is None and self.gpus is not None and not args.machine:
            assumed["--gpus"] = f"{gpus} GPUs"
        if not args.gpu and not args.machine and len(self.machines) == 1:
            assumed["--gpu"] = f"the speed of {rates.name}" if args.gpu_memory else rates.name
        if machine.host_memory is None and rates.node_host:
            ranks = machine.ranks_of_node
            machine = replace(machine, host_memory=ranks * rates.node_host)
            told = f"{ranks * rates.node_host / 1e9:,.0f} GB on each node"
            assumed["--host-memory"] = f"{told}, as clouds have with {ranks} x {rates.name}"
        run = with_degree(self.shape, self.run, machine, args.preset)
        ranks, images = run.engine.sp or gpus, self.shape.images
        shortest = {ranks: "one token for each rank", images.tokens if images else 0: "the tokens of its images"}
        for least, why in shortest.items():
            if self.seq_len is not None and self.seq_len < least:
                raise ValueError(f"seq-len={self.seq_len} must be at least {least}: {why}")

        def there(nbytes: int | None, text: str) -> str:
            return f"{text}: {nbytes / GIB:,.0f} GiB on each node" if nbytes is not None else "no limit"

        memory, gpu = machine.gpu_memory, args.gpu_memory or rates.name
        usable = f"{memory / GIB:.1f} GiB that PyTorch finds on a GPU" if memory else "no limit"
        understood = {
            "gpu_memory": f"{gpu}: {usable}",
            "host_memory": there(
                machine.host_memory, args.host_memory or ("free as measured" if args.machine else "assumed")
            ),
        }
        if machine.disk is not None or self.run.engine.nvme_path:
            understood["disk"] = f"{there(machine.disk, args.disk)}, {machine.disk_rate / 1e9:.3g} GB/s"
        if self.seq_len:
            understood["seq_len"] = f"{args.seq_len}: {self.seq_len:,} tokens"
        if images:
            understood["images"] = (
                f"{images.count} of {images.size[0]}x{images.size[1]} pixels in each sample, which take "
                f"{images.tokens:,} of its tokens; a rank has at most {images.of_rank(ranks, run.data.batch_size)}"
            )
        if gpus > 1:
            chosen = "" if self.run.engine.sp else ", chosen as the largest that works"
            share = "all GPUs share each sample" if ranks == gpus else f"{ranks} of the {gpus} GPUs share each sample"
            understood["sp"] = f"{ranks}: {share}{chosen}"
        return Question(self.shape, run, machine, args.preset, understood, assumed)


OWN_OPTIONS = {
    "model.name": "--model", "data.seq_len": "--seq-len", "engine.world_size": "--gpus",
    "limits.device_memory": "--gpu-memory",
}  # fmt: skip
"""Fields of a run that have an option of their own here."""
LEAST_MEMORY = 2**28
"""Bytes of the smallest GPU: less is a number without its unit."""


def check(args: argparse.Namespace) -> None:
    """Refuse options that are empty or exclude each other.

    Raises:
        ValueError: which they are.
    """
    if empty := [name for name, value in vars(args).items() if isinstance(value, str) and not value.strip(" ,")]:
        raise ValueError(f"--{empty[0].replace('_', '-')} is empty: give a value, or leave the option out")
    if args.tree and (args.seq_len or args.preset != "ours"):
        raise ValueError("--tree is about a step of this library: leave out --seq-len and --preset")
    if args.machine and args.gpu:
        raise ValueError("--machine brings measured rates: leave out --gpu")
    if args.gpus is not None and args.gpus < 0:
        raise ValueError(f"gpus={args.gpus} must be at least 1 (0: the GPUs of this machine)")
    if args.images < 0 or (args.image_size and not args.images):
        raise ValueError(f"images={args.images} must be at least {0 if args.images < 0 else 1}")
    if args.images and (args.tree or args.preset != "ours"):
        raise ValueError("--images is about a step of this library on samples: leave out --tree and --preset")


def read(args: argparse.Namespace) -> Request:
    """What the options describe."""
    check(args)
    measured = read_machine(args.machine) if args.machine else None
    wanted = parse_quantity(args.seq_len, "seq-len") if args.seq_len else None
    gpus = args.gpus
    if gpus is None:
        gpus = measured.gpus if measured else None if wanted else 8
    if gpus == 0 and not (gpus := devices.device_count()):
        raise ValueError("gpus=0 means the GPUs of this machine, and it has none; give the number of GPUs to plan for")
    base = RunConfig(model=Model(name=args.model, dtype="bf16"), engine=Engine(sp=0))
    whole = {"options.chunk": None}  # chunks are one of the ways that the answer compares with whole layers
    fields = fields_of(args.set, "--set")
    given = {f"{name}.{key}" for name, of in fields.items() if isinstance(of, dict) for key in of} | {*fields}
    if had := [name for name in OWN_OPTIONS if name in given]:
        raise ValueError(f"--set {had[0]} has no effect on a plan: give {OWN_OPTIONS[had[0]]}")
    run = row_config(PRESETS[args.preset], base).replace(**{**whole, **fields})
    names = [name for name in (args.gpu or "").split(",") if name.strip()]
    every = gpus is None and not args.gpu_memory
    kinds = [measured] if measured else [usual(name) for name in names or (GPUS if every else ["H100"])]
    if len(kinds) > 1 and (args.gpu_memory or args.tree):
        raise ValueError("--gpu-memory and --tree are about one kind of GPU: name one with --gpu")
    terms = quantities(args, "context", "nccl", "process")
    if args.fragmentation is not None:
        if not 0 <= args.fragmentation < 1:
            raise ValueError(f"fragmentation={args.fragmentation} must be a share of at least 0 and below 1")
        terms["fragmentation"] = args.fragmentation
    if args.host_memory:  # which holds the processes too, and what was measured as free does not
        terms = {"process": Overheads().process, **terms}
    if args.images and run.model.lora is not None:
        raise ValueError("model.lora is not planned with --images: leave one of both out")
    shape = read_shape(
        args.model, run.model.config, trust_remote_code=run.model.trust_remote_code, images=args.images,
        image_size=size_of(args.image_size) if args.image_size else None,
    )  # fmt: skip
    own = machine_fields(args)
    kinds = [replace(one, overheads=replace(one.overheads, **terms), **own) for one in kinds]
    return Request(args, shape, run, tuple(kinds), gpus, wanted)


def usual(name: str) -> Machine:
    """A machine with GPUs of this name."""
    rates = rates_of(name)
    return Machine(per_node=rates.node_gpus, gpu_memory=int(rates.usable) or None, rates=rates)


def machine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `Machine` that the options give."""
    given = quantities(args, "host_memory", "disk", "disk_life")
    if args.gpu_memory:
        given["gpu_memory"] = nbytes = label_bytes(args.gpu_memory)
        if nbytes < LEAST_MEMORY:
            raise ValueError(f"gpu-memory={args.gpu_memory} is {nbytes:,} bytes: give a GPU's memory, such as 80GB")
    if args.gpus_per_node is not None:
        given["per_node"] = args.gpus_per_node
    if args.disk_rate:
        given["disk_rate"] = parse_quantity(args.disk_rate.removesuffix("/s"), "disk-rate")
    return given


def quantities(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of these options that were given, as numbers."""
    return {n: parse_quantity(v, n.replace("_", "-")) for n in names if (v := getattr(args, n)) is not None}


def command(args: argparse.Namespace) -> int:
    """`alst plan`; its exit status is EXIT's."""
    request = read(args)
    if args.tree:
        return tree(request)
    if request.gpus is None or len(request.machines) > 1:
        return machines(request)
    question, wanted = request.question(request.machines[0], request.gpus), request.seq_len
    with watched("looking for the longest sequence that fits"):
        best = question.longest()
    found = best if wanted is None else question.at(wanted)
    tell(args, lambda: as_json(question, best, found), describe(question, best, found))
    return 0 if found is not None and found.fits else 1


def tell(args: argparse.Namespace, made: Callable[[], dict[str, Any]], lines: Iterable[Any]) -> None:
    """Print an answer as it is computed: JSON, or lines and tables."""
    if args.json:
        print(json.dumps(made(), indent=2))
        return
    for shown in lines:
        console().print(shown)


def tree(request: Request) -> int:
    """The question about trajectories that share prefixes, as a tree and one by one."""
    args = request.args
    assert request.gpus is not None  # it may only be left out where a length is asked for
    question = request.question(request.machines[0], request.gpus)
    found, counts = cost(question, args.tree)
    alone, each = cost(question, f"{counts['leaves']}x{found.seq_len}")
    made = {"mode": "predicted", **found.to_dict(), **counts, "one_by_one": {**alone.to_dict(), **each}}
    then = f"one by one {format_seconds(alone.seconds['step'])}, {each['tokens']:,} tokens"
    speed = f"{counts['tokens']:,} tokens; {then}"
    tell(args, lambda: made, (*introduce(question), table(found, question.machine, speed)))
    return 0 if found.fits else 1


def size_of(text: str) -> tuple[int, int]:
    """Height and width in pixels, of HEIGHTxWIDTH."""
    if not (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())):
        raise ValueError(f"image-size={text!r} must have the form HEIGHTxWIDTH in pixels, such as 1008x756")
    return int(found[1]), int(found[2])


def fields_of(texts: Sequence[str], option: str) -> dict[str, Any]:
    """The fields that an option sets, each as FIELD=VALUE."""
    made: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} {text} must have the form FIELD=VALUE, such as options.chunk=16384")
        made[name.strip()] = yaml.safe_load(value)
    return made


def as_json(question: Question, best: Prediction | None, found: Prediction | None) -> dict[str, Any]:
    """What programs read: the question, and its predictions as `Prediction.to_dict` has them."""
    found = found or question.at(question.shortest)
    made = {
        **about(question), "gpus": question.machine.gpus, "nodes": question.machine.nodes, "sp": question.ranks,
        "longest_sequence": best.seq_len if best else 0,
        "longest_step_seconds": best.seconds["step"] if best else None, **speeds(question, found),
        "limit": (question.beyond(best) if found.fits else found).reason,
    }  # fmt: skip
    length = found.seq_len if best else None
    with known_only(PATIENCE) as missed:
        for name, ones in (("help", question.advice()), ("ways", question.ways(length))):
            made[name] = [{**one.to_dict(), "limit": one.limit} for one in ones]
        made["works_with"] = [] if found.fits else [one.to_dict() for one in question.remedies(length)]
    return {
        **made,
        "notes": [LATE] * bool(missed) + question.notes(found.seq_len),
        "options": not_default(question.run),
    }


def about(question: Question) -> dict[str, Any]:
    """The model, and whose stack runs it."""
    shape = question.shape
    return {
        "mode": "predicted", "preset": question.preset,
        "model": {"name": shape.name, "family": shape.family, "parameters": shape.parameters,
                  "trained_length": trained_length(question.run)},
    }  # fmt: skip


def speeds(question: Question, found: Prediction) -> dict[str, Any]:
    """A prediction with what it means for each GPU, and how the question was understood."""
    return {
        "understood": question.understood, "assumed": question.assumed, **found.to_dict(),
        "tokens_per_second_per_gpu": question.tokens_per_second(found), "mfu": question.mfu(found),
        "days_of_disk": question.days_of_disk(found),
    }  # fmt: skip


MOST = 1024
"""GPUs of the largest machine that is tried."""


def answer(request: Request, machine: Machine, gpus: int) -> Variant:
    """The first of `NEEDED` with which so many GPUs hold the asked length, or without one any length; else the one that
    lacks least."""
    question, tried = request.question(machine, gpus), list[Variant]()
    given = question.preset != "ours" or question.run.options.chunk or question.run.block
    for needs, changes in NEEDED.items() if not given else [("", {})]:
        if question.run.engine.offload_params and "engine.offload_params" in changes:
            continue
        other = question.with_changes(changes)
        at = other.at(request.seq_len) if request.seq_len else None
        tried.append(Variant(needs, changes, other, None if at else other.longest(), at))
        if tried[-1].found.fits:
            return tried[-1]
    return min(tried, key=lambda one: one.found.shortfall)


def smallest(request: Request, machine: Machine) -> Variant:
    """The smallest machine of this kind that holds the asked length: a power of two of them, times the sequence
    parallel degree where one is given."""
    assert request.seq_len is not None
    least, most = request.run.engine.sp or 1, min(MOST, request.seq_len)
    counts = [least << n for n in range(MOST.bit_length()) if least << n <= most] or [least]
    place = bisect_left(counts, True, key=lambda gpus: answer(request, machine, gpus).found.fits)
    return answer(request, machine, counts[min(place, len(counts) - 1)])


def machines(request: Request) -> int:
    """The question about several machines: which hold a length, or how far each reaches."""
    with watched("kinds of GPU", request.machines) as each:
        answers = [
            smallest(request, one) if request.gpus is None else answer(request, one, request.gpus) for one in each
        ]
    each_one = [
        {**one.to_dict(), "gpu": one.question.machine.rates.name, **speeds(one.question, one.found)} for one in answers
    ]
    made = {**about(answers[0].question), "seq_len": request.seq_len, "machines": each_one}
    tell(
        request.args, lambda: made, describe_machines(answers, request.seq_len, MOST if request.gpus is None else None)
    )
    return 0 if any(one.found.fits for one in answers) else 1
