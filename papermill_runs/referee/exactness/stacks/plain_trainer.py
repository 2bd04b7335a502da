"""Plain transformers' Trainer in one process, which stacks under a Trainer are compared with."""

from __future__ import annotations

from typing import Any


class Stack:
    sources: tuple[str, ...] = ()
    requires = ("torch", "transformers", "accelerate")
    note = ""

    def trainer(self, ranks: int, case: Any) -> Any:
        from ..training import UnderTrainer

        return UnderTrainer(args={"use_cpu": True})
