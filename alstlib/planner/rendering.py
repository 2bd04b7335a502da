"""What people read of predictions: one table for a prediction, in the terminal and before a run starts; and the answers
of `alst plan`. Without torch."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alstlib.base.units import GIB, format_bytes, format_seconds, format_tokens, printable
from alstlib.planner import model_states
from alstlib.planner.fits import known_only
from alstlib.planner.machine import Machine, rates_known
from alstlib.planner.model_shapes import Shape
from alstlib.planner.prediction import Prediction
from alstlib.planner.question import NEEDED, Question, Variant, changed, settings
from alstlib.planner.tables import listed

MEANING = {
    "CUDA context": "the driver's own, before the first tensor",
    "NCCL": "buffers for what GPUs send to each other",
    "fragments": "gaps that the allocator cannot use",
    model_states.WEIGHTS: "the model's weights that stay here",
    model_states.GATHERED: "weights of other GPUs, while a layer needs them",
    model_states.GRADIENTS: "gradients of the weights",
    model_states.OPTIMIZER: "weights in fp32 and AdamW's two moments",
    model_states.BUCKETS: "gradients while they are summed over the GPUs",
    model_states.COPIES: "copies of buckets while DeepSpeed sums or writes them",
    model_states.FILES: "what DeepSpeed reads from files and writes to them",
    "hidden states": "residuals, norms, embeddings and their gradients",
    "attention": "queries, keys, values, outputs, their gradients",
    "exchange": "what attention sends to and gets from other GPUs",
    "kernel workspace": "what the attention kernel takes for itself",
    "states": "layers with a state (linear attention, Mamba)",
    "unpacked weights": "a matrix of 4 bits, in bf16 while it multiplies",
    "mlp": "what one tile of the MLP or of the experts makes",
    "loss": "the head, one tile of logits, the loss",
    "checkpoints": "inputs of layers, kept for backward",
    "vision tower": "what the tower makes and keeps of images",
    "process": "Python and libraries of one rank's process",
}
"""What is counted in each category of memory."""
TIMES = {
    "matrix products": ("matrix products", "projections, MLPs and the head"),
    "attention": ("attention", "queries with keys, weights with values"),
    "exchange": ("exchange", "the all-to-all of attention, waited for"),
    "waiting for memory and network": ("waiting", "for copies to host and disk, and weights from others"),
    "optimizer": ("optimizer", "AdamW's step"),
}
"""How each part of a step's time is called, and what is counted in it."""


def table(found: Prediction, machine: Machine, speed: str | None = "", parts: bool = True) -> Table:
    """Memory of each GPU and of its share of the host, and the time of a step: in parts with a few words on each, or
    (`parts=False`) the totals.

    Args:
        speed: what else to say of the time; None: nothing is said of it.
    """
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True, justify="right")
    made.add_column(overflow="fold")

    def add(name: str, value: str = "", text: str = "", style: str = "bold" if parts else "") -> None:
        made.add_row(*(Text(printable(cell), style) for cell in (name, value, text)))

    each = "rank" if machine.device == "cpu" else "GPU"
    for where, needs, has in found.sides:
        held: dict[str, int] = getattr(found, where)
        if parts and held:
            add(named(where))
            for name, nbytes in sorted(held.items(), key=lambda item: -item[1]):
                if nbytes > found.device_peak // 1000:
                    add(f"  {name}", sized(nbytes, found), _meaning(name, where, found), "")
        shared = where == "host" and machine.device == "cpu"  # with the device
        total = needs if shared else sum(held.values())
        add(f"{where}, each {each}", sized(total, found), _of(where, total, has, found, machine, parts))
        if parts and speed is not None:
            made.add_row()
    if found.loading.host and (not parts or found.loading.why):
        there = "" if found.loading.host_limit is None else f"of {sized(found.loading.host_limit, found)}; "
        add("loading", sized(found.loading.host, found), f"{there}the host of the first node")
    if speed is None:
        return made
    if not (speed or rates_known(machine)):
        add("a step", "not predicted", "rates are known for GPUs only")
        return made
    if parts:
        add("time")
        for name, seconds in found.seconds.items():
            if name != "step" and seconds > found.seconds["step"] / 1000:
                shown, text = TIMES[name]
                add(f"  {shown}", format_seconds(seconds), text, "")
    add("a step", format_seconds(found.seconds["step"]), speed)
    return made


def _of(where: str, total: int, has: int | None, found: Prediction, machine: Machine, parts: bool) -> str:
    """What a total is a part of, and what else to say of it."""
    notes, ranks = [f"of {sized(has, found)}"] if has is not None else [], machine.ranks_of_node
    if where == "device" and parts:
        notes.append(f"highest in {found.activations.place}")
    if where == "host" and machine.device == "cpu":
        notes.append("with what is on the device")
    elif where == "host" and ranks > 1:
        there = "" if has is None else f" of {has * ranks / GIB:,.0f}"
        notes.append(f"a node's {ranks}: {total * ranks / GIB:,.0f}{there} GiB")
    return "; ".join(notes)


def as_text(shown: Table) -> str:
    """A table as plain lines of 80 columns."""
    file = io.StringIO()
    # in a kernel, rich would show the table and leave the file empty
    Console(file=file, width=80, color_system=None, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def sized(nbytes: int, found: Prediction) -> str:
    """Bytes in GiB, so that the numbers of a prediction can be compared; of a small one, in the unit that they need."""
    return f"{nbytes / GIB:,.2f} GiB" if found.device_peak >= GIB else format_bytes(nbytes)


def named(where: str) -> str:
    """How a side of a prediction is called."""
    return where if where == "disk" else f"{where} memory"


def _meaning(name: str, where: str, found: Prediction) -> str:
    kept = found.activations
    if name != "checkpoints" or where != "host":
        return MEANING.get(name, "")
    outputs = f", attention outputs of {kept.attention_kept:.0%} of layers" if kept.attention_kept else ""
    if kept.inputs_kept_every > 1:
        return f"one layer's input in {kept.inputs_kept_every}{outputs}; there is no room for more"
    return f"each layer's input{outputs}"


def verdict(found: Prediction, machine: Machine) -> str:
    """Whether it fits, and by how much: of each GPU, and of its share of the host."""
    each = "rank" if machine.device == "cpu" else "GPU"
    spare = []
    for where, needs, has in found.sides:
        if has is not None:
            alone = where != "host" or machine.device != "cpu"  # what is on the device is not in the host's memory too
            held = sum(getattr(found, where).values())
            held = held if alone and needs <= held <= has else needs
            spare.append(f"{format_bytes(abs(has - held))} {'spare' if has >= held else 'short'} on the {where}")
    fits = "fits" if found.fits else "does not fit"
    loads = f"{found.loading.why}; in a step " if found.loading.why else ""
    return f"{fits}: {loads}{' and '.join(spare)} for each {each}" if spare else f"{fits}: no limits were given"


def limited_by(beyond: Prediction) -> str:
    """What limits the longest sequence: what a longer one, which does not fit, goes beyond."""
    every = beyond.activations.inputs_kept_every
    if beyond.limit == "device" and beyond.reason == "host":
        return (
            f"host memory limits it: the host is full with one layer's input in {every} (k={every}), and the device "
            "has no room for the others"
        )
    if beyond.reason == "disk":
        return "the disk limits it: it has no room for all checkpoints that the host has no room for"
    return f"{f'{beyond.reason} memory' if beyond.reason else 'nothing known'} limits it"


def limit_in_short(beyond: Prediction) -> str:
    """The same in a word or two: `device`; `host, k=4`."""
    every = beyond.activations.inputs_kept_every
    return f"host, k={every}" if beyond.reason == "host" and every > 1 else beyond.reason or "nothing known"


PATIENCE = 180.0
"""Seconds after which advice simulates nothing more."""
LATE = (
    f"Not all of this was looked at: nothing more is simulated after {format_seconds(PATIENCE)}. The same command goes "
    "on where this one stopped."
)


def heading(shape: Shape, preset: str) -> str:
    whose = "" if preset == "ours" else ", as the ALST paper ran it"
    return f"{shape.name} ({shape.family}, {shape.parameters / 1e9:.2f}B parameters){whose}; predicted, nothing was run"


def introduce(question: Question) -> Iterator[str]:
    """What is asked about, as it was understood."""
    nodes = question.machine.nodes
    yield heading(question.shape, question.preset)
    yield f"{question.name}, {nodes} node{'s' if nodes > 1 else ''}"
    yield from (f"  {key}: {text}" for key, text in question.understood.items())
    if question.assumed:
        yield f"Assumed: {'; '.join(f'{text} ({option})' for option, text in question.assumed.items())}."
    yield ""


def describe(question: Question, best: Prediction | None, found: Prediction | None) -> Iterator[Any]:
    """The answer to a question, as it is computed."""
    machine = question.machine
    yield from introduce(question)
    if best is not None:
        yield f"Longest sequence: {best.seq_len:,} tokens; {limited_by(question.beyond(best))}."
        yield f"A step of it takes {format_seconds(best.seconds['step'])}: {question.speed(best)}."
    else:
        short = question.at(question.shortest)
        yield f"Nothing fits, not even {short.seq_len:,} tokens: {lacks(short, machine)}."
    if found is not None and found is not best:
        yield f"{found.seq_len:,} tokens: {verdict(found, machine)}."
    found = found or question.at(question.shortest)
    yield f"\nAt {found.seq_len:,} tokens:\n"
    yield table(found, machine, None if best is None else question.speed(found))
    if written := writes(question, found):
        yield f"\n{written}"
    with known_only(PATIENCE) as missed:
        if question.preset == "ours" and not found.fits:
            yield from describe_remedies(question, found, nothing=best is None)
        if best is not None:
            yield from describe_variants("What would help", question, question.advice()[:5], best.seq_len)
            ways = question.ways(found.seq_len)
            yield from describe_variants("Ways to run the model", question, ways, found.seq_len)
    notes = [LATE] * bool(missed) + question.notes(found.seq_len)
    yield from (f"\nNote: {note}" for note in notes)


def writes(question: Question, found: Prediction) -> str:
    """What a step writes to a disk; empty where it writes nothing."""
    if not (written := question.written(found)):
        return ""
    days = question.days_of_disk(found)
    life = f", which is at the end of its life after {days:,.0f} days of this training" if days else ""
    needs = found.activations.disk and question.run.options.disk is None
    takes = " Checkpoints go there with options.disk=FOLDER." if needs else ""
    return f"Each step writes {format_bytes(written)} to a node's disk{life}.{takes}"


def lacks(found: Prediction, machine: Machine) -> str:
    """What is missing, and how much of it."""
    ranks, missing = machine.ranks_of_node, []
    for where, nbytes in found.missing.items():
        node = f" ({format_bytes(nbytes * ranks)} on each node)" if where != "device" and ranks > 1 else ""
        missing.append(f"{format_bytes(nbytes)} of {named(where)} for each GPU{node}")
    return f"{' and '.join(missing)} are missing" if missing else found.loading.why


def describe_variants(title: str, question: Question, ones: Sequence[Variant], length: int) -> Iterator[Any]:
    """Other settings: the longest sequence with each and what limits it, and a step of this length where it fits."""
    head = ["longest", "its step", "limit", f"at {format_tokens(length)}", "with"]
    rows = []
    for one in ones:
        limit = limit_in_short(one.question.beyond(one.best)) if one.best else ""
        rows.append((*_reach(one.best), limit, _reach(one.at)[1], _named_with_settings(question, one)))
    if any(one.best for one in ones):
        yield f"\n{title}:\n"
        yield listed(head, rows, ["longest", "its step", head[3]])


def _named_with_settings(question: Question, one: Variant) -> str:
    """What the other settings are called, and those fields of the run that differ."""
    fields = settings(changed(question.run, one.changes))
    return f"{one.what} ({fields})" if fields else one.what


def _reach(found: Prediction | None) -> tuple[str, str]:
    """A length, and how long its step takes."""
    return (f"{found.seq_len:,}", format_seconds(found.seconds["step"])) if found else ("none", "")


def describe_remedies(question: Question, found: Prediction, nothing: bool) -> Iterator[Any]:
    """What works where the asked length does not fit, or `nothing` does."""
    rows = []
    for one in question.remedies(None if nothing else found.seq_len):
        rate = f"{one.question.tokens_per_second(one.found):,.0f}"
        rows.append((*_reach(one.found), rate, _named_with_settings(question, one)))
    if rows:
        head = ["longest" if nothing else "tokens", "its step", "tokens/s/GPU", "with"]
        yield "\nWhat works:\n"
        yield listed(head, rows, head[:3])
    else:
        yield (
            f"\nNothing that was tried makes it fit: other options, {'' if question.shape.images else 'LoRA, '}"
            "a disk, more host memory, more nodes of this kind. "
            "--seq-len without --gpus says which machines hold a length."
        )
    if nothing and question.run.model.lora is None and question.shape.images is None:
        yield "QLoRA (LoRA on weights in 4 bits) takes less memory still: --set 'model.lora={r: 16}' --set model.bits=4"


def describe_machines(answers: Sequence[Variant], wanted: int | None, most: int | None) -> Iterator[Any]:
    """Several machines: which hold the wanted length, or how far each reaches. `most`: the smallest of up to so many
    GPUs were looked for."""
    first = answers[0].question
    yield heading(first.shape, first.preset)
    if most:
        yield f"The smallest machines that hold {wanted:,} tokens (GPUs: powers of two up to {most:,}):\n"
    else:
        yield f"{f'{wanted:,} tokens on each machine' if wanted else 'The longest sequence of each machine'}:\n"
    own, last = (["nodes", "GPU", "host"], "needs") if wanted else (["GPU", "host", "longest"], "limit")
    head = ["GPUs", *own, "step", "tok/s/GPU", "MFU", last]
    rows = [_machine(one, last) for one in answers]
    yield listed(head, [[row.get(name, "") for name in head] for row in rows], head[1:-1])
    yield "\nGPU and host: GiB that one GPU and its share of the host take, of those that are there."
    for needs in sorted({one.what for one in answers if one.found.fits} - {""}):
        yield f"{needs}: {' '.join(f'--set {name}={value}' for name, value in NEEDED[needs].items())}"
    assumed = {option: text for one in answers for option, text in one.question.assumed.items()}
    if "--host-memory" in assumed:
        assumed["--host-memory"] = "the host memory that clouds have with such GPUs"
    yield from (f"Assumed: {text} ({option})." for option, text in assumed.items())
    longest = max((one.found.seq_len for one in answers if one.found.fits), default=None)
    yield from (f"Note: {note}" for note in first.notes(longest))
    yield "Give --gpu and --gpus of one line for its memory in parts and other ways to run the model."


def _machine(one: Variant, last: str) -> dict[str, str]:
    """What the table says of a machine, by column: in the `last` what it `needs`, or its `limit`."""
    question, found = one.question, one.found
    row = {"GPUs": question.name, "nodes": f"{question.machine.nodes:,}"}
    if not found.fits:
        lacking = " and ".join(f"{format_bytes(nbytes)} of {where}" for where, nbytes in found.missing.items())
        return row | {"step": "-", last: f"lacks {lacking or 'memory to load it'}"}
    share, limit = question.mfu(found), limit_in_short(question.beyond(found)) if last == "limit" else ""
    return row | {
        "GPU": _of_there(found.device_peak, found.device_limit), "host": _of_there(found.host_peak, found.host_limit),
        "longest": format_tokens(found.seq_len), "step": format_seconds(found.seconds["step"]),
        "tok/s/GPU": f"{question.tokens_per_second(found):,.0f}", "MFU": f"{share:.0%}" if share else "",
        last: ", ".join(filter(None, [limit, one.what])),
    }  # fmt: skip


def _of_there(nbytes: int, has: int | None) -> str:
    return f"{nbytes / GIB:,.0f}{f'/{has / GIB:,.0f}' if has else ''}"
