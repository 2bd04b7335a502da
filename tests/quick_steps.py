"""Steps that no simulation made: the planner's answers are tested without waiting for any.

What a real step takes is tested in tests/measure and against real ranks; here it only has to grow with what it grows
with."""

import argparse
import math
import shlex

import pytest

from alstlib.base.config import RunConfig, row_config
from alstlib.base.sizing import kv_needed
from alstlib.planner import command, fits, progress
from alstlib.planner.model_shapes import read_shape

TILE = {"loss": 1024, "mlp": 16_384}
EIGHT_B = read_shape("meta-llama/Llama-3.1-8B")
OURS = row_config("ours", RunConfig(model={"name": EIGHT_B.name, "dtype": "bf16"}, engine={"sp": 0})).replace(
    options={"chunk": None}
)
"""The row `ours` for it, with layers whole."""


def asked(options):
    """What a command line of `alst plan` asks."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.read(parser.parse_args(shlex.split(options)))


def question(options):
    """What such a line asks the planner of its first kind of GPU."""
    request = asked(options)
    return request.question(request.machines[0], request.gpus)


def step(question, rows):
    """The moments of a step in attention's backward, in an MLP and at the head, as `answers.span` gives them."""
    run, ranks = RunConfig.from_dict(question["run"]), question["ranks"]
    shape = read_shape(run.model.name, run.model.config)
    options, offload, places = run.options, bool(run.options.offload), run.options.on_host
    chunk = run.chunk if run.chunk is not None and rows > run.chunk else None
    hidden, inside = 2.0 * shape.width, 2.0 * max(shape.mlp, shape.width)
    heads = 2.0 * shape.heads * shape.head_dim
    keys = 2.0 * kv_needed(shape.heads, shape.kv_heads, ranks) * 2 * shape.head_dim * ranks

    def part(each, of=chunk):
        """Bytes without any rows and for each row: of a chunk's rows, or of all."""
        return (0.0, each) if of is None else (each * of, 0.0)

    travels = chunk is not None and places in ("hidden", "hidden+kv")
    waits = part(6 * hidden, chunk if travels else None)
    pages = part(3 * keys, chunk if chunk and places == "hidden+kv" else None)
    kept = 0.0
    if not options.checkpoint:
        kept = shape.layers * (12 * hidden + 2 * heads + 3 * inside)
    elif not offload:
        kept = shape.layers * (hidden + (heads if options.save_attention else 0))
    every = {"hidden states": waits, "checkpoints": (0.0, kept)}
    logits, tiles = 8.0 * shape.vocab, {name: options.tile(name) for name in ("loss", "mlp")}
    weights = 0.0 if run.model.lora else 4.0 * shape.width * shape.mlp
    mlp = part(4 * inside, min(TILE["mlp"], rows) if tiles["mlp"] else chunk)
    last = f"model.layers.{shape.layers - 1}"
    moments = [
        [f"{last}.self_attn", True, {**every, "attention": _sum(part(2 * heads), pages),
                                     "exchange": part(2 * heads if ranks > 1 else 0.0)}],
        [f"{last}.mlp", False, {**every, "mlp": _sum(mlp, (weights, 0.0))}],
        ["lm_head", False, {**every, "loss": part(logits, min(TILE["loss"], rows) if tiles["loss"] else None)}],
    ]  # fmt: skip
    saved = heads + 4 * shape.heads if options.save_attention else 0.0
    host = shape.layers * (hidden + saved) * (offload and options.checkpoint)
    return {"from": rows, "to": rows, "host": (0.0, host), "moments": moments}


def _sum(one, other):
    return one[0] + other[0], one[1] + other[1]


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Such steps in place of simulated ones, unless a test is marked `simulates`; sizes of models are real. However
    slow the machine is, no line says how much is left."""
    monkeypatch.setattr(progress, "EVERY", math.inf)
    if request.node.get_closest_marker("simulates"):
        return
    ask, known = fits._ask, fits._known

    def answer(what, asked):
        return step(asked, asked["tokens"]) if what == "span" else ask(what, asked)

    found = {}
    monkeypatch.setattr(fits, "_ask", answer)
    of_sizes = "["  # and of towers: how such questions begin
    monkeypatch.setattr(fits, "_known", lambda text: known(text) if text[0] == of_sizes else found.setdefault(text, []))
    monkeypatch.setattr(fits, "_keep", lambda *_: None)
