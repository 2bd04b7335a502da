"""DeepSpeed's configuration as our own runs have it: `zero_config` makes it for any model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from alstlib.base.config import FIELDS, WEIGHTS_ON_DISK, RunConfig
from alstlib.base.mesh import accelerator, own_device
from alstlib.base.options import Json, check_names
from alstlib.base.sizing import zero_bucket

ON_DISK = 100_000_000
"""Elements that an optimizer with its states on a disk steps on at a time (or one tensor's): four buffers of these in
fp32 are pinned on the host. DeepSpeed's default, 1e9, would pin 16 GB for each rank."""


def zero_config(model: torch.nn.Module, **fields: Any) -> dict[str, Any]:
    """DeepSpeed's configuration for a model, as our own runs have it: `deepspeed.initialize(model, config=...)`.

    Buckets fit the model, and AdamW makes one pass over its state. With DeepSpeed's defaults a step on a CPU takes
    about a tenth longer, and a device holds buffers of 1 to 2 GB.

    Args:
        fields: those of `RunConfig.engine` and `RunConfig.optim`, and `batch_size`: `zero_stage=3`,
            `learning_rate=1e-4`, `accumulation=1`. The optimizer's state stays on the device unless
            `offload_optimizer=True` (on the host) or `offload_optimizer="nvme"` with `nvme_path`, a folder on a local
            disk that no other run uses: DeepSpeed's files have fixed names there, and stay.

    Raises:
        ValueError: another field, or a value that is none of the field's.
    """
    ours = [name for name in FIELDS if name.startswith(("engine.", "optim.", "data.batch_size"))]
    where = {name.split(".")[1]: name for name in ours}
    check_names(fields, where, "field of zero_config")
    run = RunConfig.from_dict({where[name]: value for name, value in {"offload_optimizer": False, **fields}.items()})
    bf16 = next(model.parameters()).dtype == torch.bfloat16
    return engine_config(run, count(model.parameters()), bf16)


def count(parameters: Iterable[Any]) -> int:
    """Elements of parameters, whole ones and those that ZeRO-3 has partitioned."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)


def check_files(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that offloads to a disk (`nvme`) where DeepSpeed would keep all in memory, or fail later.

    Raises:
        ValueError: the stage, the folder, or DeepSpeed's operator does not do it.
    """
    zero = config.get("zero_optimization") or {}
    weights, states = (zero.get(name) or {} for name in ("offload_param", "offload_optimizer"))
    if weights.get("device") == "nvme":
        raise ValueError(f"offload_param on nvme: {WEIGHTS_ON_DISK}; use the device cpu")
    if states.get("device") != "nvme":
        return
    stage, folder = zero.get("stage"), states.get("nvme_path")
    if stage != 3:
        raise ValueError(
            f"offload_optimizer on nvme needs ZeRO-3: DeepSpeed's stage {stage} keeps it in the host's memory, as with "
            "the device cpu"
        )
    if folder is None or not Path(folder).is_dir():
        raise ValueError(f"nvme_path={folder!r} of offload_optimizer must be a folder on a local disk that is there")
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder: Any = AsyncIOBuilder
    if not installed_ops.get(builder.NAME) and not builder().is_compatible():
        raise ValueError(
            "offload_optimizer on nvme needs DeepSpeed's operator async_io, which cannot be compiled here: install "
            "libaio's headers (Debian: libaio-dev) and a C++ compiler, and for a GPU the CUDA toolkit (CUDA_HOME)"
        )


def engine_config(run: RunConfig, parameters: int, bf16: bool) -> Json:
    """DeepSpeed's configuration for a run.

    Buckets are sized on purpose (`sizing.zero_bucket`): DeepSpeed's default is a buffer of 1 to 2 GB on every
    device. All ranks are data parallel to ZeRO; the factor that makes gradients right is in the loss
    (`causal_lm_loss`).
    """
    bucket = zero_bucket(parameters)
    zero: Json = {
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
    if run.engine.offload_optimizer == "nvme":
        zero["offload_optimizer"] |= {"device": "nvme", "nvme_path": run.engine.nvme_path}
        zero["sub_group_size"] = ON_DISK
    adam = {
        "lr": run.optim.learning_rate,
        "weight_decay": run.optim.weight_decay,
        "betas": [0.9, 0.95],
        "torch_adam": True,
    }
    adam["fused"] = True  # one pass over the state: PyTorch's default makes temporaries as large as the weights
    return {
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
