"""Whole training steps of wide models under fake CUDA, as one of many ranks that share a sample."""

import contextlib
import functools

import torch
import zoo
from cases import attach, train
from fake import fake_cuda
from torch import Tensor

import alstlib
from alstlib.base.config import RunConfig
from alstlib.hf.loading.models import load_model
from alstlib.planner.measure.simulate import drop_gradients, fake_ranks, shard_of

GEMMA = "google/gemma-2-9b"


def step(model, ctx, rows, documents=None, block=None, logps=False):
    """Forward and backward of one sample; with a `block`, block by block, or of its tokens' log-probabilities."""
    made = shard_of(ctx, rows // ctx.sp)
    batch = {n: v.to("cuda:0") if isinstance(v, Tensor) else v for n, v in made.items()}
    if documents is not None:
        batch["cu_seqlens"] = list(documents)
    if block is not None:
        alstlib.block_step(model, batch, block)
    elif logps:
        made = alstlib.token_logps(model, batch, statistics=True)
        alstlib.sequence_logps(made.logps, batch, ctx).sum().backward()
    else:
        train(model, batch)


def build(name, layers):
    if name in zoo.MODELS:
        return zoo.build(name, dtype=torch.bfloat16, num_hidden_layers=layers, max_position_embeddings=4096)
    fields = {"num_hidden_layers": layers}
    if name == GEMMA:
        fields |= {"vocab_size": 32_000, "sliding_window": 1024}  # the vocabulary tells nothing here
    run = RunConfig(model={"name": name, "config": fields, "random_weights": True})
    return load_model(run, torch.bfloat16, shape_only=True)


@contextlib.contextmanager
def steps(name, rows, sp=1, layers=2, kept=None, **options):
    """A function that makes a step of one of `sp` ranks which share `rows` tokens, with what watches it and the handle.

    Args:
        kept: host memory is so short that this share of the layers keeps its attention outputs.
        options: of `alstlib.apply`.
    """
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    with torch.device("meta"):
        model = build(name, layers)
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    mine = rows // sp
    row, output = mine * config.hidden_size * 2, mine * config.num_attention_heads * (width * 2 + 4)
    budget = 2**50 if kept is None else layers * row + int(kept * layers) * output
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(fake_ranks(sp))
        handle = stack.enter_context(attach(model, ctx, host_memory=budget, attention="sdpa", **options))
        watch = stack.enter_context(fake_cuda())
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # weights become those of another device
        drop_gradients(model.to_empty(device="cuda:0"))
        made = functools.partial(step, model, ctx, rows)
        made.watch, made.handle = watch, handle
        yield made
