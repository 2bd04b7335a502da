"""Whole training steps of wide models under fake CUDA, as one of many ranks that share a sample."""

import contextlib

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


class Steps:
    """Steps of a model of few layers and the real width, attached with these options."""

    def __init__(self, watch, model, handle, ctx, rows):
        self.watch, self.model, self.handle, self.ctx, self.rows = watch, model, handle, ctx, rows

    def __call__(self, documents=None, block=None, logps=False):
        """Forward and backward of one sample; with a `block`, block by block, or of its tokens' log-probabilities."""
        made = shard_of(self.ctx, self.rows // self.ctx.sp)
        batch = {n: v.to("cuda:0") if isinstance(v, Tensor) else v for n, v in made.items()}
        if documents is not None:
            batch["cu_seqlens"] = list(documents)
        if block is not None:
            alstlib.block_step(self.model, batch, block)
        elif logps:
            made = alstlib.token_logps(self.model, batch, statistics=True)
            alstlib.sequence_logps(made.logps, batch, self.ctx).sum().backward()
        else:
            train(self.model, batch)


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
    """Steps of one of `sp` ranks that share `rows` tokens.

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
        yield Steps(watch, model, handle, ctx, rows)
