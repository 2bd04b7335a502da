"""One type judged on one rank: loss and every gradient against plain transformers, for whole and packed samples and for
every set of options; or the refusal. It is `alst verify`'s comparison (`alstlib.planner.measure.verify`)."""

import functools
from unittest import mock

import small
import torch
import yaml

import alstlib
from alstlib.base import sizing
from alstlib.planner.measure import verify

OPTIONS = yaml.safe_load("""
default: {}
tiles: {tiles: &tiles {mlp: 5, loss: 7, norm: 6}, offload: true, save_attention: true, linear_attention: heads}
chunks: {tiles: *tiles, chunk: 4, linear_attention: pass}
chunks, host: {offload: true, chunk: 4, on_host: hidden+kv, linear_attention: heads}
blocks: {tiles: *tiles, offload: true, on_host: hidden+kv, block: 5}
no checkpoints: {tiles: false, checkpoint: false}
""")
LENGTH = 32
CASES = [f"{data}, {how}" for data in ("whole", "packed") for how in OPTIONS]
EXACT = {torch.float32: (1e-6, 1e-4), torch.float64: (1e-9, 1e-9)}
"""Largest relative error of the loss and of a gradient."""


def outcomes(small_model, one, rank, world, kind, cases):
    """The outcome of each case of this type: exact, refused, wrong or crash, with the errors or the reason."""
    try:
        small_model(kind)
    except Exception as e:
        return [{"result": "not built", "reason": verify.why(e)} for _ in cases]
    ctx, known = alstlib.SPContext.create(world), {}
    run = {case: functools.partial(one, ctx, case, known) for case in cases}
    return list(verify.judge(functools.partial(small_model, kind), run).values())


def _one(ctx, case, known, model):
    packed, _, how = case.partition(", ")
    data = verify.sample(LENGTH, packed == "packed")
    chosen = dict(OPTIONS[how])
    block = chosen.pop("block", None)

    def plain(model):
        """Once for all ways of running the layers."""
        if (packed, model.dtype) not in known:
            known[packed, model.dtype] = verify.plain(model, data)
        return known[packed, model.dtype]

    with mock.patch.object(sizing, "LEAST_KEYS", 1):  # pages of one chunk
        return verify.compare(model, ctx, alstlib.Options(**chosen), data, plain, EXACT, block)


judge = functools.partial(outcomes, small.small_model, _one)
