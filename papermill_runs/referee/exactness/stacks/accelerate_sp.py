"""Accelerate's sequence parallelism (DeepSpeed's Ulysses) under transformers' Trainer, with ZeRO-3."""

from __future__ import annotations

from typing import Any


class Stack:
    sources: tuple[str, ...] = (
        "https://huggingface.co/docs/transformers/en/deepspeed_alst",
        "https://huggingface.co/docs/accelerate/en/concept_guides/sequence_parallelism",
    )
    requires: tuple[str, ...] = ("torch", "transformers", "accelerate", "deepspeed")
    note = (
        "the collator gives the positions that the adapter asks for, and pads to a multiple of the ranks; the adapter "
        "gathers samples of unequal lengths, which gloo refuses and NCCL may not"
    )

    stage = 3
    """ZeRO's."""

    def trainer(self, ranks: int, case: Any) -> Any:
        from alstlib.runs.train import operators

        from ..training import UnderTrainer, on_cpu_ranks, zero

        on_cpu_ranks()
        operators.leave_out()
        args = {"deepspeed": zero(self.stage), **self.parallel(ranks, case)}
        return UnderTrainer(args=args, collate=self.collate(ranks))

    def parallel(self, ranks: int, case: Any) -> dict[str, Any]:
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        from ..cases import EAGER

        attention = "eager" if case.model in EAGER else "sdpa"
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
        return {"parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=ranks, sp_handler=handler)}

    def collate(self, ranks: int) -> Any:
        from functools import partial

        from ..training import collate

        return partial(collate, multiple=ranks, positions=True)
