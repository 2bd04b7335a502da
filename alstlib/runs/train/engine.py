"""The DeepSpeed engine of our own runs around an attached model, its optimizer steps, and what it keeps on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from alstlib.base.config import RunConfig
from alstlib.base.mesh import ATTACHED
from alstlib.hf.loading.ranks import UnplacedModel, place
from alstlib.hf.loading.zero_config import check_files, engine_config, sizes_of
from alstlib.hf.support import check_shared
from alstlib.runs.train import operators


def initialize(
    run: RunConfig, model: Any, bf16: bool, told: Callable[[str], None] = lambda message: None,
    unplaced: UnplacedModel | None = None,
) -> Any:  # fmt: skip
    """The DeepSpeed engine of an attached model, whose weights may be on their way; `told` hears what takes time."""
    if ATTACHED in model.__dict__:
        check_shared(model.__dict__[ATTACHED]().facts.shared, run.engine.zero_stage == 3)
    import deepspeed

    operators.leave_out()
    told(f"starting DeepSpeed, ZeRO {run.engine.zero_stage}")
    config, scheduler = engine_config(run, sizes_of(model.parameters()), bf16), None
    if run.optim.warmup_steps:  # not DeepSpeed's WarmupLR, whose first two steps have a rate of 0

        def scheduler(adam: Any) -> Any:
            ramp = run.optim.warmup_steps + 1
            return torch.optim.lr_scheduler.LambdaLR(adam, lambda done: min(1.0, (done + 1) / ramp))

    check_files(config)
    if unplaced is not None:
        place(unplaced, config)
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
    adam, zero = adam_of(engine), engine.optimizer
    fused = adam.defaults.get("fused")  # this kernel reads the count of steps on the weights' device
    for group, master in enumerate(masters(engine)):
        if adam.state.get(master):
            continue
        if away := on_disk(zero, group):
            zero._optimizer_states_and_gradient_swap_in(group)
        zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        step = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
        adam.state[master] = {"step": step, **zeros}
        if away:
            zero._optimizer_states_and_gradient_swap_out(group)


def on_disk(zero: Any, group: int) -> bool:
    """Whether DeepSpeed has this group of fp32 weights and their moments in files: not where they are below 1 MiB."""
    return bool(getattr(zero, "swap_optimizer", False)) and zero._swappable_optimizer_subgroup(group)


def host_tensors(engine: Any, run: RunConfig) -> Iterator[Tensor]:
    """What the engine keeps on the host: master weights, optimizer state and gradients under `offload_optimizer`, the
    weights' shards under `offload_params`; of what is on a disk, buffers. On a CPU these must be told apart from what a
    device would hold."""
    zero = engine.optimizer
    if run.engine.offload_optimizer and run.engine.zero_stage > 0:
        for master in masters(engine):
            yield master
            if master.grad is not None:
                yield master.grad
        if run.engine.offload_optimizer == "nvme":
            yield from zero.optimizer_swapper.swap_buffer_manager.all_buffers
        for state in zero.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor))
        for name in (
            "grad_partitions_flat_buffer", "temp_grad_buffer_for_cpu_offload",
            "param_buffer_of_bit16_for_cpu_offload_groups",
        ):  # fmt: skip
            held = getattr(zero, name, None)
            yield from (t for t in (held if isinstance(held, list | tuple) else [held]) if isinstance(t, Tensor))
    if run.engine.offload_params == "nvme":
        yield next(engine.module.parameters()).nvme_swapper.buffers
    if run.engine.offload_params:
        yield from (p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor"))
