"""Liger's kernels in transformers, in one process: fused loss, RMSNorm, RoPE, and its tiled SwiGLU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .plain import Stack as Plain

FOLDER = Path(__file__).resolve().parents[4] / ".compat" / "liger"
"""Where `make liger` puts Liger and Triton."""
TILES = 4


class Stack(Plain):
    sources = ("https://github.com/linkedin/Liger-Kernel#readme",)
    requires = ("torch", "transformers", "liger_kernel", "triton")
    note = (
        "it is no sequence parallelism, so one process; Triton's interpreter stands in for its compiler, and functions "
        "of CUDA's libdevice are written anew; MLPs of Llama and Mistral are `LigerTiledSwiGLUMLP`, in four tiles"
    )
    ranks = 1

    def environment(self) -> dict[str, str]:
        return {"TRITON_INTERPRET": "1", "REFEREE_PATH": str(FOLDER)}

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        from liger_kernel.transformers import monkey_patch
        from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP

        if case.dtype == "bfloat16":
            raise RuntimeError("Triton's interpreter gives no numbers in bf16: a GPU must judge this")
        complete_the_interpreter()
        base = getattr(model, "get_base_model", lambda: model)()
        if base.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise NotImplementedError(f"Liger has no kernels for the type {base.config.model_type}")
        monkey_patch._apply_liger_kernel_to_instance(model=base)
        for layer in base.model.layers:
            if type(layer.mlp).__name__ in ("LlamaMLP", "MistralMLP"):
                layer.mlp.__dict__.pop("forward", None)  # Liger's untiled one
                layer.mlp.__class__, layer.mlp.num_shards = LigerTiledSwiGLUMLP, TILES
        super().prepare(model, ranks, case)


def complete_the_interpreter() -> None:
    """Functions of CUDA's libdevice have no form on a CPU, and a launch makes fp32 scalars of floats."""
    import liger_kernel.ops.cross_entropy as cross_entropy
    import liger_kernel.ops.geglu as geglu
    import liger_kernel.ops.rms_norm as rms_norm
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    def tanh(x: Any) -> Any:
        return 2 * tl.math.fdiv(1.0, 1.0 + tl.math.exp(-2 * x)) - 1

    convert = interpreter._implicit_cvt

    def scalar(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = scalar
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)  # looked up when it is called: the interpreter patches it
    cross_entropy.tanh = geglu.tanh = tanh
