"""alstlib in a loop of one's own: `apply`, `shard_batch` and `causal_lm_loss`, gradients averaged as DDP does."""

from __future__ import annotations

from typing import Any


class Stack:
    sources = ("notebooks/training.md",)
    requires = ("torch", "transformers")
    note = "judged by the same code as the others"

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        import alstlib

        from ..training import optimizer_of

        self.ctx = alstlib.SPContext.create(ranks)
        self.model, self.case, self.optimizer = model, case, optimizer_of(model)
        alstlib.apply(getattr(model, "get_base_model", lambda: model)(), self.ctx, alstlib.Options())

    def step(self, batches: list[dict[str, Any]]) -> float:
        import torch
        import torch.distributed as dist

        import alstlib
        from alstlib.data.shard import shard_batch

        self.optimizer.zero_grad()
        shards = [shard_batch(batch, self.ctx.sp, self.ctx.sp_rank) for batch in batches]
        tokens = sum(shard["step_tokens"] for shard in shards)
        mean = 0.0
        for shard in shards:
            out = alstlib.causal_lm_loss(self.model, {**shard, "step_tokens": torch.as_tensor(tokens)})
            (out.loss * self.case.scale).backward()
            mean += float(out.mean * out.tokens / tokens) * self.case.scale
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= self.ctx.sp
        return mean

    def gradients(self) -> dict[str, Any]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def update(self) -> float:
        from torch.nn.utils import clip_grad_norm_

        norm = float(clip_grad_norm_(self.model.parameters(), self.case.clip or float("inf")))
        self.optimizer.step()
        return norm
