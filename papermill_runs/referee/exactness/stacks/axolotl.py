"""Axolotl's context parallelism (ring attention over the keys of a sample), with the hooks that its trainer puts in."""

from __future__ import annotations

from typing import Any

from .plain import Stack as Plain


class Stack(Plain):
    sources = ("https://huggingface.co/blog/axolotl-ai-co/long-context-with-sequence-parallelism-in-axolotl",)
    requires = ("torch", "transformers", "axolotl", "ring_flash_attn")
    note = (
        "ring-flash-attn 0.1.8, on which it is built, imports a function that transformers 5.23 does not have there; "
        "axolotl 0.19 pins transformers 5.16.1, which this library does not support; the functions of FlashAttention "
        "beneath the ring are empty here"
    )

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        import sys
        from types import ModuleType

        from torch.distributed.device_mesh import init_device_mesh

        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
            setattr(interface, f"_flash_attn_{name}", None)
        sys.modules.update({package.__name__: package, interface.__name__: interface})
        from axolotl.utils.ctx_managers.sequence_parallel import SequenceParallelContextManager
        from axolotl.utils.schemas.enums import RingAttnFunc

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        hooks = SequenceParallelContextManager(
            models=[model], context_parallel_size=ranks, gradient_accumulation_steps=case.accumulation,
            ring_attn_func=RingAttnFunc.VARLEN_LLAMA3, heads_k_stride=1, gather_outputs=False, device_mesh=mesh,
        )  # fmt: skip
        hooks.__enter__()
        super().prepare(model, ranks, case)
