"""Accelerate's context parallelism (PyTorch's ring attention) with FSDP2, under transformers' Trainer."""

from __future__ import annotations

from typing import Any


class Stack:
    sources: tuple[str, ...] = (
        "https://huggingface.co/docs/accelerate/en/concept_guides/context_parallelism",
        "https://huggingface.co/docs/trl/en/distributing_training",
    )
    requires: tuple[str, ...] = ("torch", "transformers", "accelerate")
    note = (
        "PyTorch's ring knows the attention operators of CUDA only: plain PyTorch stands in for them beneath it "
        "(`exactness/ring.py`), and a GPU must confirm each of these cells; samples are padded to a multiple of twice "
        "the ranks"
    )

    def trainer(self, ranks: int, case: Any) -> Any:
        from functools import partial

        from accelerate import ParallelismConfig

        from .. import ring
        from ..training import UnderTrainer, collate, on_cpu_ranks

        on_cpu_ranks()
        ring.stand_in()
        args = {
            "parallelism_config": ParallelismConfig(cp_size=ranks), "fsdp": True,
            "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        }  # fmt: skip
        return UnderTrainer(args=args, collate=partial(collate, multiple=2 * ranks, positions=True))
