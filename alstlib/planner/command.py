"""`alst plan` says what fits, what limits it, what would help and what that costs. It imports neither torch nor
transformers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from alstlib.config import Engine, Model, RunConfig, not_default, row_config
from alstlib.planner import devices
from alstlib.planner.gpus import GPUS, label_bytes, rates_of, with_measured
from alstlib.planner.hybrids import NOTE
from alstlib.planner.machine import Machine, Overheads, read_machine
from alstlib.planner.model_shapes import Shape, read_shape
from alstlib.planner.prediction import (
    Help,
    Loading,
    Prediction,
    advice,
    changed,
    changes_of,
    loads_with,
    longest,
    nearest_that_fits,
    predict,
    settings,
)
from alstlib.planner.ways import Way, compare
from alstlib.units import GIB, format_seconds, parse_quantity

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
        help="the tokens of one sample, such as 500K or 3.7M (default: the longest sample that fits is found)",
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
        help="the number of GPUs on all nodes together (default: 8); 0 takes those of this machine",
    )  # fmt: skip
    where.add_argument(
        "--gpus-per-node", type=int, metavar="NUMBER", help="the number of GPUs of each node (default: 8)"
    )
    where.add_argument("--gpu", help=f"the GPU whose speed is assumed: {', '.join(GPUS)} (default: H100)")
    where.add_argument(
        "--gpu-memory", metavar="BYTES",
        help="the memory of each GPU: as on its label, such as 80GB, or exact, such as 79GiB (default: that of --gpu)",
    )  # fmt: skip
    where.add_argument(
        "--host-memory", metavar="BYTES",
        help="the host memory of each node, such as 1.9TB or 1.9TiB (default: no limit)",
    )  # fmt: skip
    where.add_argument(
        "--rates", type=Path, metavar="PATH",
        help="the result.json of alstlib.measure.time_kernels, whose measured attention speed replaces the table's",
    )  # fmt: skip
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
class Question:
    """What is asked about: a model, a run, a machine, and whose stack it is."""

    shape: Shape
    run: RunConfig
    machine: Machine
    preset: str
    understood: dict[str, str]
    """Quantities as they were understood."""

    @property
    def shortest(self) -> int:
        return 8 * (self.run.engine.sp or self.machine.gpus)

    def at(self, seq_len: int) -> Prediction:
        return predict(self.shape, self.run, self.machine, seq_len, self.preset)

    def longest(self) -> Prediction | None:
        return longest(self.shape, self.run, self.machine, preset=self.preset)

    def advice(self) -> list[Help]:
        """Of ours: the reference's options are those of its paper."""
        return advice(self.shape, self.run, self.machine) if self.preset == "ours" else []

    def ways(self, seq_len: int | None) -> list[Way]:
        """Of ours."""
        return compare(self.shape, self.run, self.machine, seq_len) if self.preset == "ours" else []

    @property
    def notes(self) -> list[str]:
        """What else to know of this plan."""
        return [NOTE] if self.shape.states and self.machine.device != "cpu" else []

    @property
    def loading(self) -> Loading:
        """The same for every length."""
        return self.at(self.shortest).loading

    def cannot_load(self) -> str:
        """Why the model cannot be loaded and the nearest thing that works, in a sentence; nothing where it can."""
        why = self.loading.why
        return why and f"{why[0].upper()}{why[1:]}; it can be loaded {loads_with(self.shape, self.run, self.machine)}."

    def limit(self, best: Prediction | None, found: Prediction | None) -> str:
        """What a length goes beyond; for the longest, what a longer one would."""
        if found is not None and not found.fits:
            return found.limit
        if best is None:
            return self.at(self.shortest).limit
        return self.at(int(1.02 * best.seq_len) + self.shortest).limit


def command(args: argparse.Namespace) -> int:
    """`alst plan`: its exit status is 0 where the asked length fits (without one, where any does), and 1 where not."""
    question = read(args)
    run, machine = question.run, question.machine
    wanted = parse_quantity(args.seq_len, "seq-len") if args.seq_len else None
    if wanted is not None and wanted < (run.engine.sp or machine.gpus):
        raise ValueError(f"seq-len={wanted} must be at least {run.engine.sp or machine.gpus}: one token for each rank")
    best = question.longest()
    found = best if wanted is None else question.at(wanted)
    helps = question.advice()
    fits = found is not None and found.fits
    if args.json:
        print(json.dumps(as_json(question, best, found, helps), indent=2))
        return 0 if fits else 1
    print("\n".join(describe(question, best, found, helps)))
    if found is not None and not fits and question.preset == "ours":
        print("\n".join(remedy(question, found)))
    return 0 if fits else 1


def read(args: argparse.Namespace) -> Question:
    """What the options describe."""
    measured = read_machine(args.machine) if args.machine else None
    if measured and (args.gpu or args.rates):
        raise ValueError("--machine brings measured rates: leave out --gpu and --rates")
    of_node = args.gpus_per_node if args.gpus_per_node is not None else measured.per_node if measured else 8
    gpus = args.gpus if args.gpus is not None else measured.gpus if measured else 8
    if gpus < 0 or of_node < 1:
        raise ValueError(f"gpus={gpus} must be at least 0, and gpus-per-node={of_node} at least 1")
    if gpus == 0 and not (gpus := devices.device_count()):
        raise ValueError("gpus=0 means the GPUs of this machine, and it has none; give the number of GPUs to plan for")
    base = RunConfig(model=Model(name=args.model, dtype="bf16"), engine=Engine(sp=0))
    whole = {"options.chunk": None}  # row chunks are one of the ways that the answer compares with whole layers
    run = row_config(PRESETS[args.preset], base).replace(**{**whole, **fields_of(args.set, "--set")})
    shape = read_shape(args.model, run.model.config)
    rates = measured.rates if measured else rates_of(args.gpu or "H100")
    if args.rates:
        rates = with_measured(rates, args.rates)
    terms: dict[str, Any] = {
        n: parse_quantity(v, n) for n in ("context", "nccl", "process") if (v := getattr(args, n)) is not None
    }
    if args.fragmentation is not None:
        if not 0 <= args.fragmentation < 1:
            raise ValueError(f"fragmentation={args.fragmentation} must be a share of at least 0 and below 1")
        terms["fragmentation"] = args.fragmentation
    memory = label_bytes(args.gpu_memory) if args.gpu_memory else int(rates.usable) or None
    host = parse_quantity(args.host_memory, "host-memory") if args.host_memory else None
    if measured:
        beside = {} if host else {"process": measured.overheads.process}
        host = host or measured.host_memory
        terms = {"context": measured.overheads.context, "nccl": measured.overheads.nccl, **beside, **terms}
    machine = Machine(
        gpus=gpus, per_node=of_node, gpu_memory=memory, host_memory=host, rates=rates,
        device=measured.device if measured else "cuda", overheads=Overheads(**terms),
    )  # fmt: skip
    named = args.gpu_memory or (f"measured in {args.machine}" if measured else args.gpu or "H100")
    understood = {
        "gpu_memory": f"{named}: {memory / GIB:.1f} GiB that PyTorch finds on a GPU" if memory else "no limit",
        "host_memory": f"{args.host_memory or 'free as measured'}: {host / GIB:,.0f} GiB on each node"
        if host
        else "no limit",
    }
    if args.seq_len:
        understood["seq_len"] = f"{args.seq_len}: {parse_quantity(args.seq_len, 'seq-len'):,} tokens"
    return Question(shape, run, machine, args.preset, understood)


def fields_of(texts: Sequence[str], option: str) -> dict[str, Any]:
    """The fields that an option sets, each as FIELD=VALUE."""
    made: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} {text} must have the form FIELD=VALUE, such as options.chunk=16384")
        made[name.strip()] = yaml.safe_load(value)
    return made


def as_json(question: Question, best: Prediction | None, found: Prediction | None, helps: list[Help]) -> dict[str, Any]:
    """What programs read. Bytes, tokens and seconds; memory is each GPU's, and its share of the host's."""
    shape, run, machine = question.shape, question.run, question.machine
    made: dict[str, Any] = {
        "mode": "predicted",
        "preset": question.preset,
        "model": {"name": shape.name, "family": shape.family, "parameters": shape.parameters},
        "notes": question.notes,
        "gpus": machine.gpus, "nodes": machine.nodes, "understood": question.understood,
        "fits": found is not None and found.fits,
        "longest_sequence": best.seq_len if best else 0,
        "limit": question.limit(best, found),
        "loading": {**asdict(question.loading), "why": question.cannot_load()},
    }  # fmt: skip
    if found is not None:
        made |= {
            "seq_len": found.seq_len,
            "device": {"peak": found.device_peak, "limit": found.device_limit, "by_category": found.device,
                       "peak_place": found.activations.place},
            "host": {"peak": found.host_peak, "limit": found.host_limit, "by_category": found.host,
                     "attention_kept": found.activations.attention_kept,
                     "inputs_kept_every": found.activations.inputs_kept_every},
            "kernel": found.activations.kernel,
            "step_seconds": found.seconds,
        }  # fmt: skip
    made["help"] = [
        {"what": h.what, "changes": h.changes, "longest_sequence": h.longest, "step_seconds": h.seconds} for h in helps
    ]
    made["ways"] = [
        {
            "what": w.what, "changes": w.changes, "longest_sequence": w.best.seq_len if w.best else 0, "limit": w.limit,
            "seq_len": w.at.seq_len if w.at else None, "step_seconds": w.at.seconds["step"] if w.at else None,
            "waits_for_link": w.link,
        }
        for w in question.ways(found.seq_len if found is not None else None)
    ]  # fmt: skip
    made["options"] = not_default(run)
    return made


def describe(question: Question, best: Prediction | None, found: Prediction | None, helps: list[Help]) -> list[str]:
    """What people read."""
    shape, run, machine = question.shape, question.run, question.machine
    nodes = f"{machine.nodes} node{'s' if machine.nodes > 1 else ''}"
    whose = "" if question.preset == "ours" else ", as the ALST paper ran it"
    name = f"{shape.name} ({shape.family}, {shape.parameters / 1e9:.2f}B parameters)"
    lines = [f"{name} on {machine.gpus} x {machine.rates.name}, {nodes}{whose}; predicted, nothing was run"]
    lines += [f"  {key}: {text}" for key, text in question.understood.items()]
    limit = question.limit(best, best)
    if best is None:
        short_of = "the model cannot be loaded" if limit.startswith("loading") else f"{limit} memory"
        lines += ["", f"Not even a short sequence fits: {short_of}."]
        lines += [cannot_load] if (cannot_load := question.cannot_load()) else []
    else:
        lines += ["", f"Longest sequence: {best.seq_len:,} tokens; {limited_by(limit)}."]
    if found is None:
        found = question.at(question.shortest)
    if found is not best:
        lines.append(f"{found.seq_len:,} tokens: {verdict(found)}")
    lines += ["", f"At {found.seq_len:,} tokens, each GPU takes:", ""]
    lines += table(found.device, found.device_limit, "device")
    lines += [f"  (peak in {found.activations.place})", ""]
    if found.host:
        lines += table(found.host, found.host_limit, "host, for each GPU")
        kept = found.activations
        if run.options.save_attention:
            lines.append(f"  (the attention outputs of {kept.attention_kept:.0%} of the layers are kept)")
        if kept.inputs_kept_every > 1:
            lines.append(f"  (the inputs of one layer in {kept.inputs_kept_every} are kept: the host lacks room)")
        lines.append("")
    parts = ", ".join(f"{n} {format_seconds(s)}" for n, s in found.seconds.items() if n != "step" and s >= 0.05)
    lines.append(f"A step: {format_seconds(found.seconds['step'])} ({parts})")
    if helps:
        priced = f", and the change in the time of a step of {best.seq_len:,} tokens" if best else ""
        lines += ["", f"What would help (the longest sequence with it{priced}):"]
        for h in helps[:5]:
            cost = f", {h.seconds / best.seconds['step'] - 1:+.0%}" if best else ""
            lines.append(f"  {h.what}: {h.longest:,} tokens{cost}  ({settings(changed(run, h.changes))})")
    lines += describe_ways(question.ways(found.seq_len))
    return [*lines, "", *(f"Note: {note}" for note in question.notes)] if question.notes else lines


def describe_ways(ways: list[Way]) -> list[str]:
    """How far each way of running the model reaches, and which is fastest where several do."""
    reached = [w for w in ways if w.best is not None]
    if not reached:
        return []
    lengths = [w.at.seq_len for w in ways if w.at is not None]
    timed = f" (the longest sequence, and the time of a step at {lengths[0]:,} tokens)" if lengths else ""
    lines = ["", f"Ways to run the model{timed}:"]
    farthest = max(reached, key=lambda w: w.best.seq_len if w.best else 0)
    fastest = min((w for w in ways if w.at), key=lambda w: w.at.seconds["step"] if w.at else 0.0, default=None)
    for w in ways:
        reach = f"{w.best.seq_len:>13,} tokens, {limited_by(w.limit)}" if w.best else "not even a short sequence fits"
        step = "" if w.at is None else f"; {format_seconds(w.at.seconds['step'])}"
        step += ", slowed by the link to the host" if w.link and w.at is not None else ""
        best = " and ".join(["longest"] * (w is farthest) + ["fastest"] * (w is fastest))
        lines.append(f"  {w.what:28} {reach}{step}{f'  <- {best}' if best else ''}")
        lines.append(
            f"  {'':28} ({settings({n: v for n, v in w.changes.items() if v not in (None, 'auto')}) or 'no chunk'})"
        )
    return lines


def limited_by(limit: str) -> str:
    """The limit of a longest sequence, as it is printed."""
    return f"{f'{limit} memory' if limit else 'nothing known'} limits it"


def verdict(found: Prediction) -> str:
    """Does it fit, and by how much?"""
    spare = [
        f"{abs(limit - needs) / GIB:.1f} GiB {'spare' if limit >= needs else 'short'} on the {where}"
        for where, needs, limit in found.sides
        if limit is not None
    ]
    if found.loading.why:
        spare.insert(0, "the model cannot be loaded")
    return f"{'fits' if found.fits else 'does not fit'} ({', '.join(spare) or 'no limits were given'})"


def remedy(question: Question, found: Prediction) -> list[str]:
    """The nearest configuration under which this length fits."""
    near = nearest_that_fits(question.shape, question.run, question.machine, found.seq_len)
    if near is None and question.loading.why:
        return ["", "No options make it fit here, because the model cannot be loaded."]
    if near is None:
        return ["", "No options make it fit here. Use fewer tokens, or more GPUs."]
    what = near[0]
    return ["", f"It fits with {' and '.join(what)} ({settings(changed(question.run, changes_of(what)))})."]


def table(parts: dict[str, int], limit: int | None, title: str) -> list[str]:
    """Categories in GiB, the largest first."""
    rows = sorted(parts.items(), key=lambda item: -item[1])
    total = sum(parts.values())
    lines = [f"  {title:24} {'GiB':>9}"]
    lines += [f"  {name:24} {nbytes / GIB:9.2f}" for name, nbytes in rows if nbytes]
    of = f" of {limit / GIB:.2f}" if limit is not None else ""
    return [*lines, f"  {'total':24} {total / GIB:9.2f}{of}"]
