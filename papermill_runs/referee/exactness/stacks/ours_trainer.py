"""alstlib under transformers' Trainer, with DeepSpeed's ZeRO-2."""

from __future__ import annotations

from typing import Any


class Stack:
    sources = ("notebooks/training.md",)
    requires = ("torch", "transformers", "accelerate", "deepspeed")
    note = "judged by the same code as the others"

    def trainer(self, ranks: int, case: Any) -> Any:
        import alstlib
        from alstlib.runs.train import operators

        from ..training import UnderTrainer, on_cpu_ranks, zero

        on_cpu_ranks()
        operators.leave_out()
        own = {"sp": ranks, "alst": alstlib.Options()}
        return UnderTrainer(args={"deepspeed": zero(2)}, bases=(alstlib.TrainerMixin,), own=own)
