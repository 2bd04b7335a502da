"""What is known of the workers that train, the ablation (`train/ablation`, our own loop) and the fine-tuning
(`train/finetune`, TRL's SFTTrainer), to check a configuration before a run starts. This module does not import torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from alstlib.base.config import RunConfig, value_of
from alstlib.base.sizing import cores
from alstlib.hf.loading.configs import check_model
from alstlib.hf.loading.public_models import SHAPES
from alstlib.planner import preflight

ABLATION, FINETUNE = "alstlib.runs.train.ablation", "alstlib.runs.train.finetune"
TRAINING = (ABLATION, FINETUNE)
"""Workers that train the model of a configuration: what the planner predicts is about them."""

LIBRARIES = {ABLATION: ("deepspeed",), FINETUNE: ("trl", "peft", "accelerate")}
"""Packages without which a worker does not start. They are not imported here: that would take seconds."""

ONLY = {
    FINETUNE: (
        "data.eval", "data.allow_dropped", "model.lora", "output.merge_lora", "engine.fsdp", "optim.trainer",
    ),
    ABLATION: (
        "block", "search", "emulate", "peers", "output.resume_from", "contrib.sparse",
    ),
}  # fmt: skip
"""Fields that one worker has and the other has not."""

RANKS_OF_A_CORE = 8
"""More of them on a CPU are taken for a typing error."""

OURS = {
    "output_dir": "nothing (checkpoints go to the run's folder)", "max_steps": "optim.steps",
    "max_length": "data.seq_len", "packing": "data.packed", "bf16": "model.dtype", "fp16": "model.dtype",
    "use_cpu": "nothing (without a GPU, the CPU is used)", "deepspeed": "engine.zero_stage", "fsdp": "engine.fsdp",
    "fsdp_config": "engine.fsdp", "parallelism_config": "engine.sp", "gradient_checkpointing": "options.checkpoint",
    "activation_checkpointing": "options.checkpoint", "resume_from_checkpoint": "output.resume",
}  # fmt: skip
"""Fields of SFTConfig that follow from fields of ours, which the planner reads too."""

SECRETS = ("hub_token", "push_to_hub_token", "token", "use_auth_token", "api_key", "password")
"""Names in `trainer` that take secrets, in any release of the Trainer, or that are given in the belief that they do."""


def check(run: RunConfig, worker: str) -> None:
    """Refuse a run of a worker that trains, where a field is not that worker's, or a package or the model is missing.

    Raises:
        ValueError: it names the field, and what works.
    """
    if worker not in TRAINING:
        return
    if secret := next(_secrets(run.optim.trainer), None):
        raise ValueError(
            f"{secret} in optim.trainer is a secret, and a run's settings are written to files that others may read: "
            "set HF_TOKEN in the environment instead, or log in with: hf auth login"
        )
    default = RunConfig()
    (other,) = set(TRAINING) - {worker}
    for name in ONLY[other]:
        if (value := value_of(run, name)) != value_of(default, name):
            raise ValueError(f"{name}={value!r} is a field of the worker {other}, but this run's worker is {worker}")
    if run.model.bits is not None:
        raise ValueError(
            f"model.bits={run.model.bits} is planned only: a script of your own loads such a model (bitsandbytes), and "
            "TrainerMixin or apply trains it"
        )
    if missing := [name for name in LIBRARIES[worker] if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{worker} needs {', '.join(missing)}: pip install 'alstlib[train,trainer]'")
    _check_fine_tuning(run)
    if worker == FINETUNE and run.engine.nvme_path and run.output.checkpoint_every:
        raise ValueError(
            f"output.checkpoint_every={run.output.checkpoint_every} with engine.nvme_path: DeepSpeed would continue "
            "such a checkpoint with moments of zero; keep the states and weights in memory, or use checkpoint_every=0"
        )
    if run.output.checkpoint_every and run.engine.offload_params == "nvme" != run.engine.offload_optimizer:
        raise ValueError(
            f"output.checkpoint_every={run.output.checkpoint_every} with engine.offload_params='nvme' needs "
            "offload_optimizer='nvme' too: states are loaded into DeepSpeed's files of both"
        )
    check_model(run.model.name)


def _secrets(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if name in SECRETS and value:
            yield name
        if isinstance(value, Mapping):
            yield from _secrets(value)


def check_ranks(ranks: int, nodes: int, gpus: int) -> None:
    """Refuse to start many more ranks, on so many nodes, than this machine has cores; `gpus` are those of a node.

    Raises:
        ValueError: it names the most ranks.
    """
    each, most = ranks // nodes, RANKS_OF_A_CORE * cores()
    if not gpus and each > most:
        raise ValueError(
            f"engine.world_size={ranks} would start {each:,} processes on a machine with {cores()} cores; give at most "
            f"{most * nodes}. force=True (--force) runs it all the same"
        )


def _check_fine_tuning(run: RunConfig) -> None:
    for name, value in run.optim.trainer.items():
        if name in OURS:
            raise ValueError(f"optim.trainer={{{name!r}: {value!r}}} is set by alstlib: give {OURS[name]} instead")
    if run.optim.trainer.get("push_to_hub") and not run.output.save_to:
        raise ValueError(
            "optim.trainer={'push_to_hub': True} needs output.save_to, the folder where the model is saved first"
        )
    if run.model.lora is not None and run.output.save_to and run.model.name in SHAPES and not run.output.merge_lora:
        raise ValueError(
            f"model={run.model.name!r} has random weights, and an adapter saved without them is of no use: give "
            "output.merge_lora=True, which saves both"
        )


def outlook(run: RunConfig, worker: str, gpus: int, nodes: int = 1) -> str:
    """What the planner says of a resolved run before it starts (`preflight.outlook`), or why it says nothing."""
    if why := unpredicted(run, worker, gpus):
        return f"not predicted: {why}"
    return preflight.outlook(run, gpus, nodes)


def unpredicted(run: RunConfig, worker: str, gpus: int) -> str:
    """Why a prediction says nothing about a run: it is about training under DeepSpeed. Empty where it is."""
    if worker not in TRAINING:
        return f"the worker is {worker}"
    if worker == ABLATION or (gpus and not run.engine.fsdp):
        return ""
    return f"predictions are about DeepSpeed, and the engine of this run is {'FSDP2' if gpus else 'DDP'}"


def planned(run: RunConfig, worker: str, gpus: int) -> RunConfig:
    """The run of which the planner says whether it can fit and how long it may take at most: DDP on a CPU, for which it
    takes an engine without ZeRO, and FSDP2, which holds what ZeRO-3 holds."""
    if worker != FINETUNE or (gpus and not run.engine.fsdp):
        return run
    none = {"offload_optimizer": False, "offload_params": False, "nvme_path": None}
    return run.replace(engine={"zero_stage": 3 if gpus else 0, **none})
