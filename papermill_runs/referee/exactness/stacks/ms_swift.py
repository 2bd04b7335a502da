"""ms-swift's sequence parallelism (Ulysses) with DDP: what its Seq2SeqTrainer does in `compute_loss`, in a loop."""

from __future__ import annotations

from typing import Any

IGNORE = -100


class Stack:
    sources = (
        "https://github.com/modelscope/ms-swift (swift/trainers/seq2seq_trainer.py and swift/sequence_parallel)",
    )
    requires = ("torch", "transformers", "accelerate", "ms_swift", "modelscope", "peft")
    note = (
        "plain PyTorch stands in for FlashAttention 2 (`exactness/flash.py`), and a GPU must confirm each of these "
        "cells; its Trainer, which wants a template of the hub's models, is not run; samples have no padding "
        "(`padding_free`); `router_aux_loss_coef` is the case's"
    )

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        from types import SimpleNamespace

        from swift.sequence_parallel import sequence_parallel
        from torch.nn.parallel import DistributedDataParallel

        from .. import flash
        from ..training import optimizer_of

        base = getattr(model, "get_base_model", lambda: model)()
        flash.stand_in(base)
        self.coefficient = getattr(base.config, "router_aux_loss_coef", 0.0)
        base.model_info = SimpleNamespace(is_moe_model=hasattr(base.config, "num_experts_per_tok"))
        base.model_meta = SimpleNamespace(model_arch=None)
        tokenizer: Any = SimpleNamespace(pad_token_id=base.config.pad_token_id)
        sequence_parallel.prepare(ranks, base, tokenizer, padding_free=True)
        self.model, self.case, self.ranks, self.optimizer = model, case, ranks, optimizer_of(model)
        self.engine = DistributedDataParallel(model, find_unused_parameters=True)

    def step(self, batches: list[dict[str, Any]]) -> float:
        import torch.distributed as dist
        from swift.sequence_parallel import sequence_parallel
        from swift.trainers.utils import per_token_loss_func_sp

        self.optimizer.zero_grad()
        items, mean = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in batches), 0.0
        for batch in batches:
            inputs = {**batch, "labels": batch["labels"].clone()}
            inputs["labels"][:, 0] = IGNORE  # as its templates do: it rolls labels, and the first would be the last
            sequence_parallel.prepare_inputs(inputs)
            labels = inputs.pop("labels")
            outputs = self.engine(**inputs, use_cache=False)
            outputs.logits = outputs.logits.float()  # as Accelerate does where the command sets bf16
            loss = per_token_loss_func_sp(outputs, labels).sum() / items
            if outputs.get("aux_loss") is not None:
                share = (labels[:, 1:] != IGNORE).sum() / items
                loss = loss + self.coefficient * outputs.aux_loss * share
            (loss * self.case.scale).backward()
            reported = loss.detach() * self.case.scale
            dist.all_reduce(reported)
            mean += float(reported) / self.ranks
        return mean

    def gradients(self) -> dict[str, Any]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def update(self) -> float:
        from torch.nn.utils import clip_grad_norm_

        norm = float(clip_grad_norm_(self.model.parameters(), self.case.clip or float("inf")))
        self.optimizer.step()
        return norm
