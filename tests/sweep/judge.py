"""One type judged on one rank: loss and every gradient against plain transformers, for whole and packed samples and for
every set of options; or the refusal. It is `alst verify`'s comparison (`alstlib.measure.verify`)."""

import functools
import os
from pathlib import Path
from unittest import mock

import small
import torch

import alstlib
from alstlib import sizing
from alstlib.measure import verify

TILES = {"tiles": {"mlp": 5, "loss": 7, "norm": 6}}
OPTIONS = {
    "default": {},
    "tiles": {**TILES, "offload": True, "save_attention": True, "linear_attention": "heads"},
    "chunks": {**TILES, "chunk": 4, "linear_attention": "pass"},
    "chunks, host": {"offload": True, "chunk": 4, "on_host": "hidden+kv", "linear_attention": "heads"},
    "blocks": {**TILES, "offload": True, "on_host": "hidden+kv", "block": 5},
    "no checkpoints": {"tiles": False, "checkpoint": False},
}
LENGTH = 32
CASES = [f"{data}, {how}" for data in ("whole", "packed") for how in OPTIONS]
EXACT = {torch.float32: (1e-6, 1e-4), torch.float64: (1e-9, 1e-9)}
"""Largest relative error of the loss and of a gradient."""


def judge(rank, world, kind, cases, references):
    """The outcome of each case of this type: exact, refused, wrong or crash, with the errors or the reason.

    Args:
        references: folder in which the first rank to need plain transformers' result leaves it for all others.
    """
    try:
        small.small_model(kind)
    except Exception as e:
        return [{"result": "not built", "reason": verify.why(e)} for _ in cases]
    ctx, path = alstlib.SPContext.create(world), Path(references) / kind
    run = {case: functools.partial(_one, ctx, case, path) for case in cases}
    return list(verify.judge(functools.partial(small.small_model, kind), run).values())


def _one(ctx, case, path, model):
    packed, _, how = case.partition(", ")
    data = verify.sample(LENGTH, packed == "packed")
    path = path.with_name(f"{path.name} {packed} {model.dtype}")
    chosen = dict(OPTIONS[how])
    block = chosen.pop("block", None)
    with mock.patch.object(sizing, "LEAST_KEYS", 1):  # pages of one chunk
        return verify.compare(
            model, ctx, alstlib.Options(**chosen), data, lambda model: _reference(model, path, data), EXACT, block
        )


def _reference(model, path, data):
    if path.exists():
        return torch.load(path)
    made = verify.plain(model, data)
    part = path.with_name(f"{path.name} {os.getpid()}")
    torch.save(made, part)
    part.rename(path)
    return made
