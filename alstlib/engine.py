"""DeepSpeed around an attached model: its configuration, what it keeps on the host, and saving what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.config import RunConfig
from alstlib.hf import Handle


def zero_config(run: RunConfig, parameters: int, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for a run.

    Buckets are sized on purpose: DeepSpeed's default of 5e8 elements is a buffer of 1 to 2 GB on every device. Ours is
    a sixteenth of the model, between 1M and 200M elements. All ranks are data parallel to ZeRO; the factor that makes
    gradients right is in the loss (`objective`).
    """
    bucket = max(1_000_000, min(200_000_000, parameters // 16))
    zero: dict[str, Any] = {
        "stage": run.zero_stage,
        "reduce_bucket_size": bucket,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    pin = torch.cuda.is_available()
    if run.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 10_000}
        zero |= {"stage3_max_live_parameters": 2 * bucket, "stage3_max_reuse_distance": 2 * bucket}
    if run.offload_optimizer and run.zero_stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if run.offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
    adam = {"lr": run.learning_rate, "weight_decay": run.weight_decay, "betas": [0.9, 0.95], "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.batch_size,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": run.max_grad_norm,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": bf16},
    }
    if run.warmup_steps:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_max_lr": run.learning_rate, "warmup_num_steps": run.warmup_steps, "warmup_type": "linear"
            },
        }  # fmt: skip
    return config


def initialize(run: RunConfig, model: Any, bf16: bool) -> Any:
    """The DeepSpeed engine of an attached model."""
    import deepspeed

    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=zero_config(run, parameters, bf16), dist_init_required=False)
    return engine


def host_tensors(engine: Any, run: RunConfig) -> Iterator[Tensor]:
    """What the engine keeps on the host: master weights, optimizer state and gradients under `offload_optimizer`,
    the weights' shards under `offload_params`. On a CPU these must be told apart from what a device would hold."""
    zero = engine.optimizer
    if run.offload_optimizer and run.zero_stage > 0:
        for group in zero.optimizer.param_groups:
            for p in group["params"]:
                yield p
                if p.grad is not None:
                    yield p.grad
        for state in zero.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor))
        for name in (
            "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer", "single_partition_of_fp32_groups",
            "temp_grad_buffer_for_cpu_offload", "param_buffer_of_bit16_for_cpu_offload_groups",
        ):  # fmt: skip
            held = getattr(zero, name, None)
            yield from (t for t in (held if isinstance(held, list | tuple) else [held]) if isinstance(t, Tensor))
    if run.offload_params:
        yield from (p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor"))


def full_weights(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole weight) of every parameter, gathered one at a time: ZeRO-3 shards, FSDP2's DTensors, or plain.

    A collective: every rank iterates. Names are those of the unattached model; a tied weight comes once.
    """
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                yield name, p.detach()
        elif hasattr(p, "full_tensor"):
            yield name, p.full_tensor().detach()
        else:
            yield name, p.detach()


def save_model(handle: Handle, folder: str | Path, tokenizer: Any = None) -> None:
    """Write the model as safetensors that `from_pretrained` loads, from DDP, FSDP2 and every ZeRO stage.

    A collective: every rank calls it, rank 0 writes. The model stays attached.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    model, weights = handle.model, {}
    for name, tensor in full_weights(model):
        if first:
            weights[name] = tensor.to("cpu", copy=True)
    if first:
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                weights[name] = buffer.detach().to("cpu", copy=True)
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
