"""Liger's Triton kernels in Triton's interpreter, on a CPU: steps of small models in tiles and in chunks are those of
plain transformers, or it ends with an error. TRITON_INTERPRET=1 is set before Triton is imported.
"""

from collections import defaultdict

import liger_kernel.ops.geglu as geglu
import liger_kernel.ops.rms_norm as rms_norm
import liger_kernel.ops.swiglu as swiglu
import torch
import zoo
from cases import attach, check_step, plain_step, sample_of, step
from exactness.stacks.liger import complete_the_interpreter

from alstlib.base.config import RunConfig
from alstlib.hf.loading import models

ROWS, CHUNK, MLP_TILE, NORM_TILE, LOSS_TILE = 24, 10, 7, 9, 8
TILES = {"tiles": {"mlp": MLP_TILE, "loss": LOSS_TILE, "norm": NORM_TILE}}
OPTIONS = {
    "tiles": TILES,
    "chunks": {**TILES, "chunk": CHUNK, "save_attention": True},
}
KINDS = {"llama": {}, "qwen3": {}, "olmo2": {}, "gemma2": {"attn_logit_softcapping": None}}
"""SwiGLU and norms before; normed queries and keys; norms after; GEGLU, norms of 1 + weight, soft caps."""


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
    sample, built = sample_of(ROWS), {kind: zoo.build(kind, **fields) for kind, fields in KINDS.items()}
    wants = {kind: plain_step(model, sample) for kind, model in built.items()}  # before RoPE is replaced in its module
    rows = defaultdict(set)
    for kernel, module in (("rms_norm", rms_norm), ("swiglu", swiglu), ("geglu", geglu)):
        for way in ("forward", "backward"):
            watch(rows, module, f"{kernel}_{way}")
    for kind, model in built.items():
        models.put_liger(RunConfig(model={"name": "tiny", "liger": True}), model, gpu=True)
        unit = "geglu" if kind == "gemma2" else "swiglu"
        for name, options in OPTIONS.items():
            about = f"{kind}, {name}"
            with attach(model, **options):
                rows.clear()  # those of the dry run
                check_step(step(model, sample), wants[kind], gradient=5e-6)
            for way in ("forward", "backward"):
                assert max(rows[f"{unit}_{way}"]) == MLP_TILE, about
                assert (CHUNK if "chunk" in options else NORM_TILE) in rows[f"rms_norm_{way}"], about


if __name__ == "__main__":
    main()
