"""Accelerate's sequence parallelism with the backend `torch`, where the installed version has it."""

from __future__ import annotations

from typing import Any

from .accelerate_sp import Stack as AccelerateSP


class Stack(AccelerateSP):
    requires = ("torch", "transformers", "accelerate")
    note = "accelerate 1.15 knows the backend `deepspeed` only"

    def trainer(self, ranks: int, case: Any) -> Any:
        from accelerate import ParallelismConfig

        from ..training import UnderTrainer, on_cpu_ranks

        on_cpu_ranks()
        parallel = ParallelismConfig(sp_backend="torch", sp_size=ranks)
        return UnderTrainer(args={"parallelism_config": parallel, "fsdp": True, "fsdp_config": {"version": 2}},
                            collate=self.collate(ranks))  # fmt: skip
