"""Axolotl's context parallelism (ring-flash-attn over a sample's documents) with DDP, by the hooks of its trainer."""

from __future__ import annotations

from typing import Any

IGNORE = -100


class Stack:
    sources = (
        "https://docs.axolotl.ai/docs/sequence_parallelism.html",
        "https://huggingface.co/blog/axolotl-ai-co/long-context-with-sequence-parallelism-in-axolotl",
        "the package's axolotl/train.py, utils/ctx_managers/sequence_parallel.py and utils/schemas/validation.py",
    )
    requires = ("torch", "transformers", "axolotl", "ring_flash_attn")
    note = (
        "transformers is the version that axolotl 0.19 pins; ring-flash-attn refuses 5.23; plain PyTorch stands "
        "in for the functions of FlashAttention 2 beneath the ring (`exactness/flash.py`), and a GPU must confirm each "
        "of these cells; its trainer's loop is written out: every rank has the whole batch, a hook cuts it, and the "
        "loss is not averaged over tokens of other ranks (`average_tokens_across_devices` is False there); the ring is "
        "`varlen_llama3`, the default with `sample_packing`; each rank shifts the labels of its own slice, so that the "
        "label after a cut is lost, and the loss is divided by the number of all labels, those and a sample's first "
        "token included: two of 40 here, and a far smaller share of a long sample"
    )

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.nn.parallel import DistributedDataParallel
        from transformers import modeling_flash_attention_utils, utils

        from .. import flash
        from ..training import collate, optimizer_of

        flash.stand_in(getattr(model, "get_base_model", lambda: model)())
        flash.stand_in_for_package()
        anything: Any = modeling_flash_attention_utils
        anything.is_flash_attn_greater_or_equal_2_10 = utils.is_flash_attn_greater_or_equal_2_10  # as its validation
        from axolotl.utils.ctx_managers.sequence_parallel import SequenceParallelContextManager
        from axolotl.utils.schemas.enums import RingAttnFunc

        hooks = SequenceParallelContextManager(
            models=[model], context_parallel_size=ranks, gradient_accumulation_steps=case.accumulation,
            ring_attn_func=RingAttnFunc.VARLEN_LLAMA3, heads_k_stride=1, gather_outputs=False,
            device_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)),
        )  # fmt: skip
        hooks.__enter__()
        collectives: Any = dist
        collectives.all_reduce = whole_averages
        self.model, self.case, self.ranks, self.optimizer = model, case, ranks, optimizer_of(model)
        self.engine, self.collate = DistributedDataParallel(model, find_unused_parameters=True), collate

    def step(self, batches: list[dict[str, Any]]) -> float:
        import torch.distributed as dist

        self.optimizer.zero_grad()
        items, mean = sum((batch["labels"] != IGNORE).sum() for batch in batches), 0.0
        for batch in batches:
            rows = [{n: t[0].tolist() for n, t in batch.items() if n != "attention_mask"}]
            inputs = self.collate(rows, 64)  # as its collator pads
            loss = self.engine(**inputs, num_items_in_batch=items, use_cache=False).loss * self.case.scale
            loss.backward()
            reported = loss.detach().clone()
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


def whole_averages(tensor: Any, op: Any = None, group: Any = None) -> None:
    """`all_reduce` with NCCL's average of whole numbers, which gloo does not have: rounded down."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import all_reduce

    average = op == dist.ReduceOp.AVG
    all_reduce(tensor, dist.ReduceOp.SUM if average or op is None else op, group)
    if average:
        tensor.div_(dist.get_world_size(group), rounding_mode=None if tensor.is_floating_point() else "floor")
