"""The DeepSpeed engine around an attached model: its configuration, what it keeps on the host, and saving models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.config import Engine, Optim, RunConfig
from alstlib.hf.handle import Handle
from alstlib.hf.support import check_shared
from alstlib.mesh import ATTACHED, accelerator, own_device
from alstlib.options import check_names
from alstlib.planner.model_states import zero_bucket
from alstlib.train import operators
from alstlib.train.loading import Arrival, place


def zero_config(model: torch.nn.Module, **fields: Any) -> dict[str, Any]:
    """DeepSpeed's configuration for a model, as our own runs have it: `deepspeed.initialize(model, config=...)`.

    Buckets fit the model, and AdamW makes one pass over its state. With DeepSpeed's defaults a step on a CPU takes
    about a tenth longer, and a device holds buffers of 1 to 2 GB.

    Args:
        fields: those of `RunConfig.engine` and `RunConfig.optim`, and `batch_size`: `zero_stage=3`,
            `learning_rate=1e-4`, `accumulation=1`. The optimizer's state stays on the device unless
            `offload_optimizer=True`.

    Raises:
        ValueError: another field, or a value that is none of the field's.
    """
    known = ("batch_size", *Engine.model_fields, *Optim.model_fields)
    check_names(fields, known, "field of zero_config")
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())  # partitioned already, or whole
    bf16 = next(model.parameters()).dtype == torch.bfloat16
    return engine_config(
        RunConfig.from_dict(
            {RunConfig.elsewhere().get(n, n): v for n, v in {"offload_optimizer": False, **fields}.items()}
        ),
        parameters,
        bf16,
    )


def engine_config(run: RunConfig, parameters: int, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for a run.

    Buckets are sized on purpose (`model_states.zero_bucket`): DeepSpeed's default is a buffer of 1 to 2 GB on every
    device. All ranks are data parallel to ZeRO; the factor that makes gradients right is in the loss
    (`causal_lm_loss`).
    """
    bucket = zero_bucket(parameters)
    zero: dict[str, Any] = {
        "stage": run.engine.zero_stage,
        "reduce_bucket_size": bucket,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    pin = accelerator(own_device()) is not None
    if run.engine.zero_stage == 3:
        ahead = bucket if run.engine.prefetch else 0
        zero |= {"stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 10_000}
        zero |= {"stage3_max_live_parameters": 2 * bucket, "stage3_max_reuse_distance": 2 * bucket}
    if run.engine.offload_optimizer and run.engine.zero_stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if run.engine.offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
    adam = {
        "lr": run.optim.learning_rate,
        "weight_decay": run.optim.weight_decay,
        "betas": [0.9, 0.95],
        "torch_adam": True,
    }
    adam["fused"] = True  # one pass over the state: PyTorch's default makes temporaries as large as the weights
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.data.batch_size,
        "gradient_accumulation_steps": run.optim.accumulation,
        "gradient_clipping": run.optim.max_grad_norm,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": bf16},
    }
    return config


def initialize(
    run: RunConfig, model: Any, bf16: bool, told: Callable[[str], None] = lambda message: None,
    arrival: Arrival | None = None,
) -> Any:  # fmt: skip
    """The DeepSpeed engine of an attached model, whose weights may be on their way; `told` hears what takes time."""
    if ATTACHED in model.__dict__:
        check_shared(model.__dict__[ATTACHED]().facts.shared, run.engine.zero_stage == 3)
    import deepspeed

    operators.load(told)
    told(f"starting DeepSpeed, ZeRO {run.engine.zero_stage}")
    parameters = sum(p.numel() for p in model.parameters())
    config, scheduler = engine_config(run, parameters, bf16), None
    if run.optim.warmup_steps:  # not DeepSpeed's WarmupLR, whose first two steps have a rate of 0

        def scheduler(adam: Any) -> Any:
            ramp = run.optim.warmup_steps + 1
            return torch.optim.lr_scheduler.LambdaLR(adam, lambda done: min(1.0, (done + 1) / ramp))

    if arrival is not None:
        place(arrival, config)
    engine, *_ = deepspeed.initialize(model=model, config=config, lr_scheduler=scheduler, dist_init_required=False)
    reserve_adam_state(engine)
    return engine


def take_step(engine: Any) -> bool:
    """`engine.step()`; False where an optimizer step's gradients are not finite: on every rank alike, with weights and
    AdamW's state as they were."""
    last = engine.is_gradient_accumulation_boundary()
    if last and engine.zero_optimization_stage() == 0:  # where DeepSpeed looks in some precisions only
        norm = torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
        if not bool(norm.isfinite()):
            engine.zero_grad()
            return False
    engine.step()
    return not last or engine.was_step_applied()


def adam_of(engine: Any) -> Any:
    """PyTorch's optimizer inside the engine's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def masters(engine: Any) -> list[Tensor]:
    """The fp32 weights that the optimizer steps on, flat under ZeRO (stage 3 empties its groups between steps)."""
    zero = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if held := getattr(zero, name, None):
            return list(held)
    return [p for group in adam_of(engine).param_groups for p in group["params"]]


def reserve_adam_state(engine: Any) -> None:
    """Make AdamW's state now, as its first step would: so that the first step's memory is every step's memory."""
    adam = adam_of(engine)
    fused = adam.defaults.get("fused")  # this kernel reads the count of steps on the weights' device
    for master in masters(engine):
        if not adam.state.get(master):
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
            adam.state[master] = {"step": step, **zeros}


def host_tensors(engine: Any, run: RunConfig) -> Iterator[Tensor]:
    """What the engine keeps on the host: master weights, optimizer state and gradients under `offload_optimizer`,
    the weights' shards under `offload_params`. On a CPU these must be told apart from what a device would hold."""
    zero = engine.optimizer
    if run.engine.offload_optimizer and run.engine.zero_stage > 0:
        for master in masters(engine):
            yield master
            if master.grad is not None:
                yield master.grad
        for state in zero.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor))
        for name in (
            "grad_partitions_flat_buffer", "temp_grad_buffer_for_cpu_offload",
            "param_buffer_of_bit16_for_cpu_offload_groups",
        ):  # fmt: skip
            held = getattr(zero, name, None)
            yield from (t for t in (held if isinstance(held, list | tuple) else [held]) if isinstance(t, Tensor))
    if run.engine.offload_params:
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


Told = Callable[[float], None]
"""Hears how much of a long piece of work is done, from 0 to 1."""


def silent(_: float) -> None:
    """A `Told` for nobody."""


def save_model(handle: Handle, folder: str | Path, tokenizer: Any = None, told: Told = silent) -> None:
    """Write the model as safetensors that `from_pretrained` loads, from DDP, FSDP2 and every ZeRO stage.

    A collective: every rank calls it, rank 0 writes. The model stays attached.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    model, weights = handle.model, {}
    count = sum(1 for _ in model.parameters())
    for i, (name, tensor) in enumerate(full_weights(model)):
        told(i / count)
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
