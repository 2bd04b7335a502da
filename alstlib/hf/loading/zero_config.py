"""DeepSpeed's configuration as our own runs have it: `zero_config` makes it for any model."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.base.config import FIELDS, RunConfig
from alstlib.base.mesh import accelerator, own_device
from alstlib.base.options import Json, Record, check_names
from alstlib.base.sizing import FP32_ON_DISK, ON_DISK, zero_bucket


def zero_config(model: torch.nn.Module, **fields: Any) -> dict[str, Any]:
    """DeepSpeed's configuration for a model, as our own runs have it: `deepspeed.initialize(model, config=...)`.

    Buckets fit the model, and AdamW makes one pass over its state. With DeepSpeed's defaults a step on a CPU takes
    about a tenth longer, and a device holds buffers of 1 to 2 GB.

    Args:
        fields: those of `RunConfig.engine` and `RunConfig.optim`, and `batch_size`: `zero_stage=3`,
            `learning_rate=1e-4`, `accumulation=1`. The optimizer's state stays on the device unless
            `offload_optimizer=True` (on the host) or `offload_optimizer="nvme"` with `nvme_path`, a folder on a local
            disk that no other run uses: DeepSpeed's files have fixed names there, and stay. So do the weights with
            `offload_params`.

    Raises:
        ValueError: another field, a value that is none of the field's, or files that cannot be written (`nvme`: there
            is no such folder, no async_io, or the weights that shall go there are not in bf16).
    """
    ours = ("engine.", "optim.", "data.batch_size")
    where = {name.split(".")[1]: name for name in FIELDS if name.startswith(ours)}
    check_names(fields, where, "field of zero_config")
    run = RunConfig.from_dict({where[name]: value for name, value in {"offload_optimizer": False, **fields}.items()})
    bf16 = next(model.parameters()).dtype == torch.bfloat16
    config = engine_config(run, sizes_of(model.parameters()), bf16)
    check_files(config)
    return config


def on_nvme(config: Record) -> list[str]:
    """What a configuration of DeepSpeed offloads to a disk: offload_optimizer, offload_param."""
    zero = config.get("zero_optimization") or {}
    return [name for name in ("offload_optimizer", "offload_param") if (zero.get(name) or {}).get("device") == "nvme"]


def sizes_of(parameters: Iterable[Any]) -> list[int]:
    """Elements of each parameter, of whole ones and of those that ZeRO-3 has partitioned."""
    return [getattr(p, "ds_numel", p.numel()) for p in parameters]


def check_files(config: Record) -> None:
    """Refuse a configuration that offloads to a disk (`nvme`) where DeepSpeed would keep all in memory, or fail later.

    Raises:
        ValueError: the stage, the folder, or DeepSpeed's operator does not do it.
    """
    away = on_nvme(config)
    for name in away:
        stage = config["zero_optimization"].get("stage")
        if stage != 3:
            raise ValueError(
                f"{name} on nvme needs ZeRO-3: DeepSpeed's stage {stage} keeps it in the host's memory, as with "
                "the device cpu"
            )
        folder = config["zero_optimization"][name].get("nvme_path")
        if folder is None or not Path(folder).is_dir():
            raise ValueError(f"nvme_path={folder!r} of {name} must be a folder on a local disk that is there")
    if "offload_param" in away and not any((config.get(name) or {}).get("enabled") for name in ("bf16", "fp16")):
        raise ValueError(FP32_ON_DISK)
    if not away:
        return
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder: Any = AsyncIOBuilder
    if not installed_ops.get(builder.NAME) and not builder().is_compatible():
        raise ValueError(
            f"{away[0]} on nvme needs DeepSpeed's operator async_io, which cannot be compiled here: install "
            "libaio's headers (Debian: libaio-dev) and a C++ compiler, and for a GPU the CUDA toolkit (CUDA_HOME)"
        )
    _align_gradients()
    _read_once()


def _align_gradients() -> None:
    """Let DeepSpeed read gradients from a disk to where a disk can be read to.

    A group's gradients lie one after the other, and each is read back to its place in the group. Direct access wants
    that place aligned. Behind a norm that is divided among ranks it is not: the read fails, DeepSpeed (0.19.8) does not
    ask, and the step takes the numbers that were in memory. Here what stands before the next aligned place stays in
    memory, as what is below 1 MiB does.
    """
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    swapper: Any = OptimizerSwapper
    cut = swapper._adjust_for_misaligned_lengths
    if hasattr(cut, "__wrapped__"):
        return

    @functools.wraps(cut)
    def aligned(self: Any, tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        parts: list[Tensor] = []
        places: list[int] = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            before = -offset % self.numel_alignment if self.is_swappable_tensor(tensor=tensor) else 0
            if before:  # a copy: a view would keep all of the gradient
                parts.append(tensor[:before].clone())
                places.append(offset)
            parts.append(tensor[before:])
            places.append(offset + before)
        return cut(self, parts, places)

    swapper._adjust_for_misaligned_lengths = aligned


def _read_once() -> None:
    """Let DeepSpeed read a weight from a disk once where it is used twice in a row, as the head is in tiles: DeepSpeed
    (0.19.8) reads ahead for both uses at once, and fails from the second step on."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper

    swapper: Any = AsyncPartitionedParameterSwapper
    read = swapper.swap_in
    if hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def once(self: Any, params: Sequence[Tensor], *how: Any, **named: Any) -> None:
        read(self, [*dict.fromkeys(params)], *how, **named)

    swapper.swap_in = once


def engine_config(run: RunConfig, sizes: Sequence[int], bf16: bool) -> Json:
    """DeepSpeed's configuration for a run of a model whose parameters have these `sizes`.

    Buckets are sized on purpose (`sizing.zero_bucket`): DeepSpeed's default is a buffer of 1 to 2 GB on every
    device. All ranks are data parallel to ZeRO; the factor that makes gradients right is in the loss
    (`causal_lm_loss`).
    """
    engine, optim, bucket = run.engine, run.optim, zero_bucket(sum(sizes))
    zero: Json = {
        "stage": engine.zero_stage, "reduce_bucket_size": bucket, "contiguous_gradients": True, "overlap_comm": False
    }  # fmt: skip
    if engine.zero_stage == 3:
        ahead = bucket if engine.prefetch else 0
        zero |= {"stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 10_000}
        zero |= {"stage3_max_live_parameters": 2 * bucket, "stage3_max_reuse_distance": 2 * bucket}
    on_host = {"device": "cpu", "pin_memory": accelerator(own_device()) is not None}
    on_disk = {**on_host, "device": "nvme", "nvme_path": engine.nvme_path}
    if engine.offload_optimizer and engine.zero_stage > 0:
        zero["offload_optimizer"] = dict(on_host)
    if engine.offload_params:
        zero["offload_param"] = dict(on_host)
    if engine.offload_params == "nvme":
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        part = -(-max(sizes) // ranks)  # five buffers of the largest weight's part are pinned on the host
        # DeepSpeed's default keeps 1e9 weights of each rank in memory
        zero["offload_param"] = {**on_disk, "buffer_size": part + 1024, "max_in_cpu": 0}
    if engine.offload_optimizer == "nvme":
        zero |= {"offload_optimizer": on_disk, "sub_group_size": ON_DISK}
    adam = {"lr": optim.learning_rate, "weight_decay": optim.weight_decay, "betas": [0.9, 0.95], "torch_adam": True}
    adam["fused"] = True  # one pass over the state: PyTorch's default makes temporaries as large as the weights
    return {
        "train_micro_batch_size_per_gpu": run.data.batch_size,
        "gradient_accumulation_steps": optim.accumulation,
        "gradient_clipping": optim.max_grad_norm,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": bf16},
    }
