"""What a process does for a cell: it trains the case's model with a stack and records what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from alstlib.planner.measure.small import build
from alstlib.planner.measure.verify import in_full

from .cases import DATA, EAGER, IGNORE, MODELS, WIDTHS, Case, even
from .judge import PEFT

LEARNING_RATE, EPSILON = 2e-3, 1e-6
"""AdamW's own epsilon is smaller: rounding of gradients near zero would decide what the weights become."""
NO_CLIPPING = 1e9
"""The Trainer reports the norm of the gradients only if it clips them."""
Batch = dict[str, Any]


@dataclass(kw_only=True)
class UnderTrainer:
    """How a stack is set up under a Trainer."""

    args: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainingArguments."""
    bases: tuple[type, ...] = ()
    """Classes before the Trainer."""
    own: dict[str, Any] = field(default_factory=dict)
    """What the Trainer's class is given."""
    collate: Callable[..., Batch] | None = None
    """None: `collate` below."""
    sft: bool = False
    """Whether the Trainer is TRL's SFTTrainer."""


def model_of(case: Case) -> Any:
    """The case's model, whose every gradient counts."""
    config = case.config
    if config is None:
        fields = {**WIDTHS, **MODELS[case.model]}
        config = AutoConfig.for_model(fields.pop("model_type", case.model), **fields)
    model: Any = build(config, getattr(torch, case.dtype))
    model.set_attn_implementation("eager" if case.model in EAGER else "sdpa")
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, p in model.named_parameters():
            if "lora_B" in name:  # which is zero at first, and so is then the gradient of the other
                nn.init.normal_(p, std=0.1)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)


def batches_of(case: Case) -> list[list[Batch]]:
    """The batches of each step of a loop: whole samples, with the positions of their tokens."""
    samples = DATA[case.data]()[: case.steps * case.accumulation]
    made = [collate([{**s, "position_ids": s.get("position_ids", [*range(len(s["labels"]))])}]) for s in samples]
    return [made[at : at + case.accumulation] for at in range(0, len(made), case.accumulation)]


FILLS = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0, "position_ids": 0}


def collate(samples: list[dict[str, list[int]]], multiple: int = 1, positions: bool = False) -> Batch:
    """A padded batch. A packed one has positions and no mask.

    Args:
        multiple: the number of tokens becomes one of it.
        positions: whether other samples have positions too.
    """
    longest = -(-max(len(s["input_ids"]) for s in samples) // multiple) * multiple
    rows = [{**s, "attention_mask": [1] * len(s["input_ids"])} for s in samples]
    names = [name for name in FILLS if name in rows[0]]
    made = {n: torch.tensor([r[n] + [FILLS[n]] * (longest - len(r[n])) for r in rows]) for n in names}
    if "position_ids" in made:
        del made["attention_mask"]
    elif positions:
        made["position_ids"] = torch.arange(longest).expand(len(rows), -1).contiguous()
    return made


# ----- what is seen on the way


class Watch:
    """What goes into each module in the first step and what comes out, in this order, and the gradients of both."""

    def __init__(self, model: nn.Module) -> None:
        self.open = True
        self.values: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            name = name.removeprefix(PEFT) or "the model"
            module.register_forward_pre_hook(self._noting(f"the input of {name}"))
            module.register_forward_hook(self._noting(f"the output of {name}"))

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, *passed: Any) -> None:
            tensors = [t for t in tree_leaves(passed[-1]) if isinstance(t, Tensor) and t.ndim > 1]
            if self.open and module.training and tensors and tensors[0].is_floating_point():
                self.values.setdefault(name, []).append(_flat(tensors[0]))
                if tensors[0].grad_fn is not None:  # not what a tile or a checkpoint computes anew from a copy
                    tensors[0].register_hook(lambda grad: self._gradient(name, grad))

        return note

    def _gradient(self, name: str, grad: Tensor) -> None:
        if self.open:
            self.gradients.setdefault(name, []).append(_flat(grad))


def _flat(t: Tensor) -> Tensor:
    t = t.detach().clone()
    return t.flatten(0, 1) if t.ndim > 2 else t


def whole(t: Tensor) -> Tensor:
    """All of a tensor that FSDP2 or ZeRO-3 may have spread."""
    if hasattr(t, "ds_id"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([t]):
            return t.detach().clone()
    t = t.detach()
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


# ----- a run


def run(stack: Any, case: Case, ranks: int, folder: str, resume: bool = False) -> dict[str, Any]:
    """Losses, norms of the gradients and evaluations by step, the first step's gradients, the weights at the end, and
    what `Watch` saw."""
    if case.dtype == "float64":  # what a model's code computes in fp32, too
        with in_full():
            return _run(stack, replace(case, dtype="float32"), ranks, folder, resume, torch.float64)
    return _run(stack, case, ranks, folder, resume)


def _run(
    stack: Any, case: Case, ranks: int, folder: str, resume: bool, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    model = model_of(case).to(dtype)
    watch = Watch(model)
    if hasattr(stack, "trainer"):
        found = _under_trainer(stack.trainer(ranks, case), model, watch, case, ranks, folder, resume)
    else:
        found = _loop(stack, model, watch, case, ranks)
    return {**found, "values": watch.values, "value_gradients": watch.gradients}


def _loop(stack: Any, model: Any, watch: Watch, case: Case, ranks: int) -> dict[str, Any]:
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    steps = batches_of(case)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "tokens": steps[0][0]["input_ids"].numel()}
    stack.prepare(model, ranks, case)
    for batches in steps:
        found["loss"].append(stack.step(batches))
        if watch.open:
            found["gradients"], watch.open = stack.gradients(), False
        found["grad_norm"].append(stack.update())
    return {**found, "weights": {n: whole(p) for n, p in model.named_parameters() if p.requires_grad}}


def _under_trainer(
    how: UnderTrainer, model: Any, watch: Watch, case: Case, ranks: int, folder: str, resume: bool
) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    arguments: Any = TrainingArguments
    base: Any = Trainer
    own = dict(how.own)
    data, evaluation = DATA[case.data](), even(3, seed=8) if case.evaluate else None
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": case.evaluate or 1, "max_steps": case.steps,
        "gradient_accumulation_steps": case.accumulation, "logging_steps": 1, "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant", "adam_epsilon": EPSILON, "weight_decay": 0.0, "report_to": [],
        "max_grad_norm": case.clip or NO_CLIPPING, "save_strategy": "no", "disable_tqdm": True, "log_level": "error",
        "bf16": False, "remove_unused_columns": False, "output_dir": folder,
    }  # fmt: skip
    if case.resume:
        settings |= {"save_strategy": "no"} if resume else {"save_strategy": "steps", "save_steps": case.resume}
    settings |= {"eval_strategy": "steps", "eval_steps": 1} if case.evaluate else {}
    if how.sft:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from .words import tokenizer

        arguments, base = SFTConfig, SFTTrainer
        settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
        own["processing_class"] = tokenizer()
        data, evaluation = Dataset.from_list(data), evaluation and Dataset.from_list(evaluation)
    seen: dict[str, Any] = {}

    def look() -> None:
        """Note the first step's gradients, which are not clipped yet."""
        if watch.open:
            watch.open = False
            seen.update({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})

    def scaled(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        out = super(made, trainer).compute_loss(*args, **kwargs)
        return (out[0] * case.scale, out[1]) if isinstance(out, tuple) else out * case.scale

    body = {"compute_loss": scaled} if case.scale != 1.0 else {}
    made: Any = type("Judged", (*how.bases, base), body)
    with _looking_at_deepspeed(model, watch, seen, "deepspeed" in how.args):
        trainer = made(
            model=model, args=arguments(**{**settings, **case.arguments, **how.args}), train_dataset=data,
            eval_dataset=evaluation, data_collator=how.collate or collate, **own,
        )  # fmt: skip
        clip = trainer.accelerator.clip_grad_norm_

        def look_and_clip(*args: Any, **kwargs: Any) -> Any:
            look()
            return clip(*args, **kwargs)

        trainer.accelerator.clip_grad_norm_ = look_and_clip
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{case.resume}" if resume else None)
    logs = trainer.state.log_history
    found = {name: [line[name] for line in logs if name in line] for name in ("loss", "grad_norm", "eval_loss")}
    if resume:  # earlier lines are those of the first run
        found = {n: [x[n] for x in logs if n in x and x["step"] > case.resume] for n in found}
    weights = {n.removeprefix("_orig_mod."): whole(p) for n, p in model.named_parameters() if p.requires_grad}
    return {**found, "gradients": {} if resume else seen, "weights": weights}


def _looking_at_deepspeed(model: Any, watch: Watch, seen: dict[str, Any], used: bool) -> Any:
    """The gradients before DeepSpeed's own step, which runs in backward: the Trainer's clipping comes too late."""
    import contextlib

    if not used:
        return contextlib.nullcontext()
    from deepspeed import DeepSpeedEngine

    step = DeepSpeedEngine.step

    def looked(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.open and engine.is_gradient_accumulation_boundary():
            seen.update(deepspeed_gradients(model))
            watch.open = False
        return step(engine, *args, **kwargs)

    return mock.patch.object(DeepSpeedEngine, "step", looked)


def deepspeed_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Each whole gradient between backward and step."""
    from deepspeed.utils import safe_get_full_grad

    found = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
    return {n: g.detach().clone() for n, g in found.items() if g is not None}


def on_cpu_ranks() -> None:
    """Accelerate knows no DeepSpeed and no FSDP on CPUs: it is told of several devices, which send with gloo."""
    from accelerate.state import PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = several_devices


def several_devices(*_: Any, **__: Any) -> tuple[str, Any]:
    """In place of `PartialState._prepare_backend`."""
    from accelerate.utils import DistributedType

    return "gloo", DistributedType.MULTI_GPU


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's config under a Trainer. The second line is for CPUs: nothing is compiled."""
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {"zero_optimization": {"stage": stage}, **own, **dict.fromkeys(batch, "auto")}
