"""Plain transformers in one process, which every stack is compared with."""

from __future__ import annotations

import itertools
from typing import Any

IGNORE = -100


class Stack:
    sources: tuple[str, ...] = ()
    requires: tuple[str, ...] = ("torch", "transformers", "accelerate")
    note = ""

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        from ..training import optimizer_of

        self.model, self.case, self.optimizer = model, case, optimizer_of(model)

    def step(self, batches: list[dict[str, Any]]) -> float:
        self.optimizer.zero_grad()
        tokens = sum(int((labels[:, 1:] != IGNORE).sum()) for batch in batches for labels in documents(batch)["labels"])
        mean = 0.0
        for batch in batches:
            parts = documents(batch)
            for ids, labels in zip(parts["input_ids"], parts["labels"]):
                loss = self.model(input_ids=ids, labels=labels, num_items_in_batch=tokens, use_cache=False).loss
                (loss * self.case.scale).backward()
                mean += float(loss.detach())
        return mean * self.case.scale

    def gradients(self) -> dict[str, Any]:
        return {n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def update(self) -> float:
        from torch.nn.utils import clip_grad_norm_

        norm = float(clip_grad_norm_(self.model.parameters(), self.case.clip or float("inf")))
        self.optimizer.step()
        return norm


def documents(batch: dict[str, Any]) -> dict[str, Any]:
    """A packed sample's documents, each by itself, split where positions begin again."""
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    return {name: batch[name].split(lengths, 1) for name in ("input_ids", "labels")}
