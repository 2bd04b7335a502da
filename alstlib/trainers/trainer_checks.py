"""What cannot be run exactly with `TrainerMixin` raises a ValueError before training, with what to write instead."""

from __future__ import annotations

from typing import Any

import torch

from alstlib.base.options import Record
from alstlib.data.agreement import check_same
from alstlib.hf.inputs import check_number
from alstlib.hf.loading.models import beyond_training
from alstlib.hf.loading.zero_config import check_files, on_nvme

REPLACED = ("compute_loss", "prediction_step", "get_batch_samples", "_prepare_inputs")
"""Methods of a Trainer that are the mixin's altogether: what a class behind it does there would be lost."""


ELSEWHERE = "compute its loss from alstlib.token_logps and alstlib.sequence_logps in a TrainerMixin before Trainer"
REMEDIES = {
    "DPOTrainer": "put alstlib.DPOTrainerMixin before it",
    "GRPOTrainer": "put alstlib.GRPOTrainerMixin before it",
    "RLOOTrainer": "put alstlib.GRPOTrainerMixin before it",
    "KTOTrainer": f"it calls its models in several places, on whole samples: {ELSEWHERE}",
    "CPOTrainer": f"it reads logits of whole samples: {ELSEWHERE}",
    "ORPOTrainer": f"it reads logits of whole samples: {ELSEWHERE}",
    "RewardTrainer": "its model scores whole samples, without log-probabilities: train it without the mixin",
}
"""What to do about a trainer of TRL whose loss is not the mixin's, by its name."""


def check_class(cls: type, mixin: type, known: tuple[str, ...]) -> None:
    """A class behind the mixin must not have its own way to the loss.

    Args:
        known: trainers of transformers and TRL whose loss the mixin computes.
    """
    order = cls.__mro__
    for behind in order[order.index(mixin) + 1 :]:
        library = behind.__module__.partition(".")[0] in ("transformers", "trl")
        lost = [name for name in REPLACED if name in behind.__dict__]
        if not lost or (library and behind.__name__ in known):
            continue
        remedy = (
            REMEDIES.get(behind.__name__, f"its loss is not the one that TrainerMixin computes: {ELSEWHERE}") if library
            else "write these methods in a class before the mixin, and call super() in them"
        )  # fmt: skip
        raise ValueError(f"{behind.__name__} has its own {', '.join(lost)}, which TrainerMixin would replace; {remedy}")


def check_arguments(trainer: Any) -> None:
    args, accelerator, options = trainer.args, trainer.accelerator, trainer.alst
    several, fsdp = args.world_size > 1, getattr(accelerator.state, "fsdp_plugin", None)
    sharded = fsdp is not None or trainer.is_deepspeed_enabled
    check_files(deepspeed_config(trainer))
    unused = several and not sharded and options.checkpoint and bool(args.ddp_find_unused_parameters)
    rebalance = getattr(args, "train_sampling_strategy", None) == "batch_rebalance" and trainer.ctx.sp > 1
    fused = args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True)
    offloading, router = getattr(args, "activation_offloading", False), _router_loss(trainer)
    unweighted = not hasattr(trainer.model.config.get_text_config(), "router_aux_loss_coef")
    found = [
        (args.n_gpu > 1, "several GPUs in one process", "start one process for each GPU (torchrun, accelerate launch)"),
        (trainer.compute_loss_func is not None and getattr(args, "loss_type", None) != "dft", "compute_loss_func",
         "it needs the logits of whole samples: use label_smoothing_factor, or override compute_loss with a loss of "
         "model(**inputs).loss, or of the labels' log-probabilities, which alstlib.token_logps computes"),
        (several and not args.average_tokens_across_devices, "average_tokens_across_devices=False",
         "leave it True: the loss is the mean over all tokens"),
        (several and args.auto_find_batch_size, "auto_find_batch_size=True",
         "leave it out and ask `alst plan` what fits: where one rank alone runs out of memory, the others would wait"),
        (bool(accelerator.dispatch_batches), "dispatch_batches=True", "leave it out: each rank reads its own batches"),
        (args.eval_use_gather_object, "eval_use_gather_object=True", "leave it out"),
        (rebalance, "train_sampling_strategy='batch_rebalance'", "use 'group_by_length'"),
        (unused, "ddp_find_unused_parameters=True",
         "leave it out: DDP would count the parameters of a recomputed layer twice"),
        (fsdp is not None and fsdp.fsdp_version != 2, "FSDP 1", "write fsdp_config={'version': 2, ...}"),
        (fsdp is not None and bool(fsdp.activation_checkpointing), "FSDP's activation_checkpointing",
         "leave it out: Options(checkpoint=True) does it"),
        (offloading, "activation_offloading=True", "use alst=alstlib.Options(offload=True)"),
        (router != 0 and unweighted, f"router_aux_loss_coef={router}", "use 0.0: the model's config has none"),
        (fused, "use_liger_kernel=True with its fused loss",
         "this replaces the model's forward with Liger's fused loss: write "
         "liger_kernel_config={'fused_linear_cross_entropy': False}; the loss runs in tiles (Options.tiles)"),
    ]  # fmt: skip
    _refuse(found, "TrainerMixin")


def deepspeed_config(trainer: Any) -> Record:
    """The configuration that the user gave DeepSpeed; empty without it."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return {} if plugin is None else plugin.deepspeed_config


def check_resume(trainer: Any, checkpoint: Any) -> None:
    """DeepSpeed 0.19.8 copies the files of a checkpoint back, but its new AdamW does not read those of the moments."""
    away = on_nvme(deepspeed_config(trainer))
    if checkpoint and away:
        why = "DeepSpeed would begin with moments of zero, and count steps from 1"
        raise ValueError(
            f"resume_from_checkpoint with {away[0]} on nvme: {why if 'offload_optimizer' in away else 'not tested'}; "
            "use the device cpu, or load the checkpoint's weights as a model and train anew"
        )


def _router_loss(trainer: Any) -> float:
    """The weight that TRL gives to the load-balancing loss of a mixture of experts; 0 where there is none."""
    args, text = trainer.args, trainer.model.config.get_text_config()
    if not hasattr(args, "router_aux_loss_coef") or not hasattr(text, "output_router_logits"):
        return 0.0
    given = args.router_aux_loss_coef
    return getattr(text, "router_aux_loss_coef", 0.0) if given is None else given


def _refuse(found: list[tuple[Any, str, str]], mixin: str) -> None:
    for wrong, what, remedy in found:
        if wrong:
            raise ValueError(f"{what} cannot be used with {mixin}; {remedy}")


def check_preferences(trainer: Any) -> None:
    """What of DPOTrainer needs more than log-probabilities of texts."""
    args, router = trainer.args, _router_loss(trainer)
    found = [
        (trainer._is_vision_dataset, "a dataset with images", "train on text alone, or use sp=1 without the mixin"),
        (args.use_weighting, "use_weighting=True", "leave it out: it needs sums over squares of probabilities"),
        (args.f_divergence_type == "alpha_divergence", "f_divergence_type='alpha_divergence'",
         "use 'reverse_kl', 'forward_kl' or 'js_divergence': TRL has no limits for exponentials in fp64"),
        (trainer.compute_metrics is not None, "compute_metrics", "leave it out: evaluate() logs the rewards"),
        (router != 0, f"router_aux_loss_coef={router}", "use 0.0: log-probabilities have no load-balancing loss"),
    ]  # fmt: skip
    _refuse(found, "DPOTrainerMixin")


def check_trees(trainer: Any) -> None:
    """Where backward, which runs block by block inside the loss, does not fit the engine (ValueError)."""
    why, trees = "backward runs inside the loss, and only DDP and one process are told so", trainer.trees
    check_number("trees", trees, "the number of a rank's tokens in one block, such as 16384", 1)
    found = [
        (trainer.is_deepspeed_enabled, f"trees={trees} with DeepSpeed", f"leave trees out: {why}"),
        (trainer.is_fsdp_enabled, f"trees={trees} with FSDP2", f"leave trees out: {why}"),
        (trainer.args.fp16, f"trees={trees} with fp16", "use bf16: the scaler of losses is not told of blocks"),
        (
            getattr(trainer, "loss_is_scaled_for_ga", None) is None,
            f"trees={trees} with this TRL",
            "install trl 1.16, whose trainers say whether their losses are divided by the micro-batches",
        ),
    ]
    _refuse(found, trainer.MIXIN)


def check_rollouts(trainer: Any) -> None:
    """What of GRPOTrainer and RLOOTrainer cannot be divided among ranks, or needs more than log-probabilities."""
    args, (sp, dp), router = trainer.args, (trainer.ctx.sp, trainer.ctx.dp), _router_loss(trainer)
    batch, steps = args.per_device_train_batch_size, args.steps_per_generation
    each = "each rank generates as many completions"
    whole = f"the ranks that share a sample are one process, here of {dp}"
    trained = f"per_device_train_batch_size={batch} with steps_per_generation={steps}"
    evaluated = f"per_device_eval_batch_size={args.per_device_eval_batch_size}"
    group = args.num_generations
    group_eval = args.num_generations_eval or group
    evaluates = trainer.eval_dataset is not None
    zero = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    sharded = trainer.is_fsdp_enabled or (zero is not None and zero.zero_stage == 3)
    together = args.vllm_mode == "server" if args.use_vllm else sharded
    found = [
        (batch * steps % sp, trained, f"their product must be a multiple of sp={sp}: {each}"),
        (batch * steps * dp % group, trained,
         f"their product times {dp} must be a multiple of num_generations={group}: {whole}"),
        (evaluates and args.per_device_eval_batch_size % sp, evaluated, f"use a multiple of sp={sp}: {each}"),
        (evaluates and args.per_device_eval_batch_size * dp % group_eval, evaluated,
         f"times {dp} it must be a multiple of the {group_eval} generations of a prompt: {whole}"),
        (trainer._is_vlm, "a processor of images", "train on text alone, or without the mixin"),
        (getattr(trainer, "tools", None) and together and sp * dp > 1,
         f"tools with {'vllm_mode=server' if args.use_vllm else 'sharded weights'}",
         "use DDP, ZeRO up to stage 2 or vllm_mode='colocate': ranks generate another number of turns each, and would "
         "wait for each other"),
        (getattr(args, "entropy_coef", 0.0) != 0, "entropy_coef", "use 0.0: entropies have no gradient here"),
        (getattr(args, "use_adaptive_entropy", False), "use_adaptive_entropy=True",
         "leave it out: entropies have no gradient here"),
        (getattr(args, "cast_lm_head_to_fp32", False), "cast_lm_head_to_fp32=True",
         "leave it out: the head's tiles compute in its dtype"),
        (args.use_transformers_continuous_batching, "use_transformers_continuous_batching=True",
         "leave it out: it replaces the attention that is attached"),
        (router != 0, f"router_aux_loss_coef={router}", "use 0.0: log-probabilities have no load-balancing loss"),
    ]  # fmt: skip
    _refuse(found, "GRPOTrainerMixin")


def offloads(args: Any) -> bool:
    """Whether the arguments ask for transformers' offload of checkpoints. It is taken out of them, because ours does
    it. transformers 5.23 has the field under two names."""
    asked = False
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        given = dict(getattr(args, name, None) or {})
        if "offload" in given:
            asked = given.pop("offload") or asked
            setattr(args, name, given)
    return bool(asked and args.gradient_checkpointing)


MOST_PADDING = 0.25
"""The share of a batch that may be padding without a warning."""


def advice(config: Any, batch: Any) -> list[str]:
    """What would go wrong silently with a batch of whole samples."""
    rows, positions, mask = batch["input_ids"], batch.get("position_ids"), batch.get("attention_mask")
    # in a packed row each document has positions of its own
    made = [beyond_training(config, len(rows[0]) if positions is None else 1 + int(positions.max()))]
    padded = 0.0 if mask is None or mask.ndim != 2 else 1 - float(mask.ne(0).float().mean())
    if padded > MOST_PADDING:
        made.append(
            f"{padded:.0%} of a batch is padding, which is computed for nothing: use packing, padding_free=True, "
            "train_sampling_strategy='group_by_length', or fewer samples in a batch"
        )
    return [text for text in made if text]


class Slice(dict):
    """One rank's inputs of the model. Who looks for what only whole samples have is told what there is instead."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"the inputs of a rank's slice have no {name}, only {', '.join(self)}. Labels are shift_labels [B, L], "
            "already shifted: use model(**inputs).loss, or alstlib.token_logps for the log-probability of each"
        )

    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(name, *default) if default or name in self else self[name]


def check_seeds(trainer: Any) -> None:
    """Ranks that shuffle differently would read different samples."""
    args = trainer.args
    mine = {"seed": args.seed, "data_seed": -1 if args.data_seed is None else args.data_seed}
    if args.data_seed is None:
        mine["torch.initial_seed()"] = torch.initial_seed() % 2**62
    check_same(trainer.ctx, mine, "they would draw different samples: give all ranks the same seed, or give data_seed")
