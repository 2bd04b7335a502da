"""verl's Ulysses with FSDP2: the functions of its FSDP engine, in the order in which the engine calls them."""

from __future__ import annotations

from typing import Any

IGNORE = -100


class Stack:
    sources = (
        "https://verl.readthedocs.io/en/latest/perf/perf_tuning.html",
        "the package's verl/workers/engine/fsdp/transformer_impl.py",
    )
    requires = ("torch", "transformers", "verl", "ray", "tensordict")
    note = (
        "plain PyTorch stands in for FlashAttention 2 (`exactness/flash.py`), and a GPU must confirm each of these "
        "cells; the engine itself, which Ray starts, is not run; a sample's first token is no label, as in its data "
        "sets; the router's loss is not in its loss for fine-tuning (`sft_loss`)"
    )

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from verl.models.transformers import monkey_patch
        from verl.utils.ulysses import set_ulysses_sequence_parallel_group

        from .. import flash
        from ..training import optimizer_of

        base = getattr(model, "get_base_model", lambda: model)()
        flash.stand_in(base)
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "sp"))
        set_ulysses_sequence_parallel_group(mesh["sp"].get_group())
        monkey_patch.is_trl_available = lambda: False  # it asks for a class that trl 1.16 does not have
        monkey_patch.apply_monkey_patch(base, ulysses_sp_size=ranks, use_remove_padding=True)
        whole = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for layer in base.model.layers:
            fully_shard(layer, mesh=whole)
        fully_shard(model, mesh=whole)
        self.model, self.case, self.ranks, self.optimizer = model, case, ranks, optimizer_of(model)

    def step(self, batches: list[dict[str, Any]]) -> float:
        import torch
        from verl.utils.torch_functional import logprobs_from_logits, masked_sum
        from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

        self.optimizer.zero_grad()
        masks = [batch["labels"][0] != IGNORE for batch in batches]
        for mask in masks:
            mask[0] = False
        tokens, mean = int(sum(mask.sum() for mask in masks)), 0.0
        for batch, mask in zip(batches, masks):
            ids = batch["input_ids"]
            mine, positions, pad = ulysses_pad_and_slice_inputs(ids, batch["position_ids"], self.ranks)
            targets, _, _ = ulysses_pad_and_slice_inputs(torch.roll(ids, -1, 1), None, self.ranks)
            logits = self.model(input_ids=mine, position_ids=positions, attention_mask=None, use_cache=False).logits
            logits = logits.squeeze(0).float()  # as in flash-attn's cross entropy, which it takes where it is installed
            found = logprobs_from_logits(logits, targets.squeeze(0))
            found = gather_outputs_and_unpad(found, gather_dim=0, unpad_dim=0, padding_size=pad)
            loss = -masked_sum(found, torch.roll(mask, -1)) / tokens * self.case.scale
            loss.backward()
            mean += float(loss)
        return mean

    def gradients(self) -> dict[str, Any]:
        from ..training import whole

        return {n: whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}

    def update(self) -> float:
        from torch.nn.utils import clip_grad_norm_  # as `fsdp2_clip_grad_norm_`, which moves the norm to a GPU

        from ..training import whole

        norm = clip_grad_norm_(self.model.parameters(), self.case.clip or float("inf"))
        self.optimizer.step()
        return float(whole(norm))
