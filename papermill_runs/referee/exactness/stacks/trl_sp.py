"""TRL's SFTTrainer over Accelerate's sequence parallelism (DeepSpeed's Ulysses), with ZeRO-3."""

from __future__ import annotations

from typing import Any

from .accelerate_sp import Stack as AccelerateSP


class Stack(AccelerateSP):
    sources = ("https://huggingface.co/docs/trl/en/distributing_training",)
    requires = ("torch", "transformers", "accelerate", "deepspeed", "trl")

    def trainer(self, ranks: int, case: Any) -> Any:
        made = super().trainer(ranks, case)
        made.sft = True
        return made
