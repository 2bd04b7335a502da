"""Liger's Triton kernels in Triton's interpreter, on a CPU: steps of small models in tiles and in chunks are those of
plain transformers, or it ends with an error. TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

from collections import defaultdict

import liger_kernel.ops.cross_entropy as cross_entropy
import liger_kernel.ops.geglu as geglu
import liger_kernel.ops.rms_norm as rms_norm
import liger_kernel.ops.swiglu as swiglu
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from transformers import AutoConfig, AutoModelForCausalLM

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.reference import relative_error
from alstlib.data.shard import shard_batch
from alstlib.hf import models

ROWS, CHUNK, MLP_TILE, NORM_TILE, LOSS_TILE = 24, 10, 7, 9, 8
TILES = {"tiles": {"mlp": MLP_TILE, "loss": LOSS_TILE, "norm": NORM_TILE}}
OPTIONS = {
    "tiles": TILES,
    "chunks": {**TILES, "chunk": CHUNK, "save_attention": True},
}
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
}
"""SwiGLU and norms before; normed queries and keys; norms after; GEGLU, norms of 1 + weight, soft caps."""


def make_model(kind):
    config = AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, **KINDS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():  # transformers' init is near zero: make every gradient count
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def complete_the_interpreter():
    """Functions of CUDA's libdevice have no form on a CPU, and a launch makes fp32 scalars of floats."""

    def tanh(x):
        return 2 * tl.math.fdiv(1.0, 1.0 + tl.math.exp(-2 * x)) - 1

    convert = interpreter._implicit_cvt

    def scalar(value):
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = scalar
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)  # looked up when it is called: the interpreter patches it
    cross_entropy.tanh = geglu.tanh = tanh


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plain_step(model, batch):
    """Loss and gradients of the model as it is."""
    out = model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False)
    return float(out.loss.detach()), gradients(model, out.loss)


def step(model, batch, options, rows):
    """Loss and gradients with these options, and `rows` of the step alone."""
    with alstlib.apply(model, None, alstlib.Options(**options)):
        rows.clear()  # those of the dry run
        out = alstlib.causal_lm_loss(model, batch)
        return float(out.mean), gradients(model, out.loss)


def watch(rows, module, name):
    """Keep in `rows` how many of them a kernel is given."""
    inner = getattr(module, name)

    def call(x, *args, **kwargs):
        rows[name].add(x.numel() // x.shape[-1])
        return inner(x, *args, **kwargs)

    setattr(module, name, call)


def main():
    complete_the_interpreter()
    torch.set_num_threads(1)
    ids = torch.randint(0, 90, (1, ROWS), generator=torch.Generator().manual_seed(1))
    batch = shard_batch({"input_ids": ids, "labels": ids}, 1, 0)
    plain = {kind: plain_step(make_model(kind), batch) for kind in KINDS}  # before RoPE is replaced in its module
    rows = defaultdict(set)
    for kernel, module in (("rms_norm", rms_norm), ("swiglu", swiglu), ("geglu", geglu)):
        for way in ("forward", "backward"):
            watch(rows, module, f"{kernel}_{way}")
    for kind in KINDS:
        model = make_model(kind)
        models.put_liger(RunConfig(model={"name": "tiny", "liger": True}), model, gpu=True)
        want_loss, want = plain[kind]
        unit = "geglu" if kind == "gemma2" else "swiglu"
        for name, options in OPTIONS.items():
            got_loss, got = step(model, batch, options, rows)
            about = f"{kind}, {name}"
            assert got.keys() == want.keys(), about
            assert abs(got_loss - want_loss) / want_loss < 1e-6, about
            assert max(relative_error(got[n], want[n]) for n in want) < 5e-6, about
            for way in ("forward", "backward"):
                assert max(rows[f"{unit}_{way}"]) == MLP_TILE, about
                assert (CHUNK if "chunk" in options else NORM_TILE) in rows[f"rms_norm_{way}"], about


if __name__ == "__main__":
    main()
