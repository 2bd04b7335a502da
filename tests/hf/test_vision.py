"""Models that read images: loss and every gradient, the tower's too, are those of plain transformers."""

import contextlib

import peft
import pytest
import torch
from cases import ALL_ON, attach, check_refused, on_ranks
from matrix import engine_of
from matrix import gradients as gradients_of
from pictures import IMAGE, MODELS, VIDEOS, document, joined, plain_vlm, small_vlm
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import alstlib
from alstlib.data.images import deal, plan_features
from alstlib.data.shard import shard_batch
from alstlib.planner.measure.verify import errors_of, in_full

SEVERAL = [3, "image", 9, "image", 2, "image", 4]
CASES = {
    "several": [SEVERAL],
    "one": [["image", 21]],
    "none": [[23]],
    "at the end": [[2, "image", 2, "image"]],
    "packed": [[4, "image", 3], [6], [2, "image", 5, "image", 1]],
}
"""The documents of one row."""


def step_on_rank(rank, world, name, parts, replicas=1, engine="average", options=None, change=None, dtype=None):
    """Largest errors of the loss and of a gradient, and whose; one row for each replica."""
    ctx = alstlib.SPContext.create(world // replicas)
    model = small_vlm(name, dtype or torch.float32)
    rows = [parts[i::replicas] for i in range(replicas)]
    rows = [[document(name, part, 7 * i + j) for j, part in enumerate(row)] for i, row in enumerate(rows)]
    for n, p in model.named_parameters():
        p.requires_grad_(change != "frozen tower" or "language_model" in n or "lm_head" in n)
        p.requires_grad_(p.requires_grad and (change != "frozen text" or not ("language_model" in n or "lm_head" in n)))
    train = model
    with attach(model, ctx, **(options or {})) as handle:
        if change == "LoRA":
            wanted = "q_proj|v_proj|qkv|proj"
            train = peft.get_peft_model(
                model, peft.LoraConfig(target_modules=rf".*({wanted})$", init_lora_weights=False)
            )
        with handle.as_its_own():
            loss, want = plain_vlm(train, [one for row in rows for one in row])
        driven = fsdp2(train) if engine == "fsdp2" else engine_of(train, engine) if world > 1 else train
        loader = alstlib.SPDataLoader([joined(rows[ctx.dp_rank])], ctx, replicated=True, images=handle.images)
        (batch,) = loader
        out = alstlib.causal_lm_loss(driven, batch)
        driven.backward(out.loss) if engine.startswith("zero") else out.loss.backward()
        got = gradients_of(train, engine) if world > 1 else {
            n: p.grad for n, p in train.named_parameters() if p.grad is not None
        }  # fmt: skip
        mean = float(out.mean)
        if engine.startswith("zero"):
            driven.destroy()
    got |= {n: torch.zeros_like(w) for n, w in want.items() if n not in got and not w.any()}
    errors = errors_of(got, want)
    worst = max(errors, key=errors.__getitem__)
    return abs(mean - loss) / abs(loss), errors[worst], worst, handle.store.leased


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module)
    return fully_shard(model)


def check(results, loss=1e-6, gradient=1e-4):
    """In fp32; a gradient that is zero but for rounding, as of a key's bias, is judged in fp64 alone."""
    for rank, (loss_error, error, name, leased) in enumerate(results):
        assert loss_error < loss, (rank, loss_error)
        assert error < gradient, (rank, error, name)
        assert leased == 0


def in_fp64(rank, world, name, cases, **how):
    with in_full():
        return {
            case: step_on_rank(rank, world, name, parts, dtype=torch.float64, **how) for case, parts in cases.items()
        }


@pytest.mark.parametrize("sp", [2, 3, 1])
@pytest.mark.parametrize("name", MODELS)
def test_images_are_exact(pools, name, sp):
    """Several images in a sample, one, none; with few tokens some images cross a border between slices, or lie at it."""
    for result in on_ranks(pools, sp, in_fp64, name, CASES):
        check(result.values(), 1e-9, 1e-9)
