"""TRL's SFTTrainer over Accelerate's context parallelism (PyTorch's ring attention), with FSDP2."""

from __future__ import annotations

from typing import Any

from .accelerate_cp import Stack as AccelerateCP


class Stack(AccelerateCP):
    sources = ("https://huggingface.co/docs/trl/en/distributing_training",)
    requires = ("torch", "transformers", "accelerate", "trl")
    note = f"{AccelerateCP.note}; TRL refuses `packing=True` here, but not documents that are packed already"

    def trainer(self, ranks: int, case: Any) -> Any:
        made = super().trainer(ranks, case)
        made.sft = True
        return made
