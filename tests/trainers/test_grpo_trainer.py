"""GRPOTrainerMixin: what plain GRPOTrainer and RLOOTrainer log and train in one process, and wrong use refused by
name."""

from types import SimpleNamespace

import pytest
from cases import check_refused, make_model
from trainers import SETTINGS, accelerate_here, as_one_process, check_runs, made_of, plain, run
from trl import GRPOConfig, GRPOTrainer
from trl_runs import dataset, mixture, policy, small_tokens, tokenizer, turns

import alstlib
from alstlib.trainers.trainer_checks import check_trees

PROMPTS = {"trainer": "GRPO", "what": "prompt"}
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
EVALUATED = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 2}
MASKED = {"mask_truncated_completions": True, "top_entropy_quantile": 0.4, "max_completion_length": 5}
CLIPPED = {"num_iterations": 2, "epsilon": 0.05, "delta": 1.1, "off_policy_mask_threshold": 0.01}
TWO = {"max_steps": 2}
"""In which a step follows another one: on new completions, or on the same ones where each is used twice."""
CASES = {
    "a reference model": ("ddp", {"reference": True, "beta": 0.2, "num_iterations": 2, **EVALUATED}),
    "LoRA": ("ddp", {"lora": True, "beta": 0.2, "temperature": 0.7, **TWO}),
    "truncated completions and low entropies are masked": ("ddp", {**MASKED, "num_iterations": 2, **TWO}),
    "RLOO": ("ddp", {"trainer": "RLOO", "reference": True, "beta": 0.2, **EVALUATED, **TWO}),
    "ratios of sequences": ("ddp", {"importance_sampling_level": "sequence", "loss_type": "grpo", **CLIPPED, **TWO}),
    "tokens of an environment": ("ddp", {"rollout": turns, "top_entropy_quantile": 0.6, **TWO}),
    "several steps of one generation": ("ddp", {"steps_per_generation": 4, "scale_rewards": "batch"}),
    "a reference that follows": (
        "ddp", {"reference": True, "beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    "ZeRO-2, LoRA": ("zero2", {"lora": True, "beta": 0.2, **TWO}),
    "ZeRO-3": ("zero3", {"reference": True, "beta": 0.2, **TWO}),
    "FSDP2": ("fsdp2", {"num_iterations": 2}),
}  # fmt: skip
AS_TREES = (
    "a reference model", "LoRA", "truncated completions and low entropies are masked", "RLOO",
    "tokens of an environment",
)  # fmt: skip
CANCEL = ("loss", "kl")
"""Advantages of a prompt's completions add up to 0, and the first adapter is none."""
LOGGED = {"reward", "reward_std", "rewards/kinds/mean", "entropy", "completions/mean_length", "num_tokens", "tokens"}


@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_train_as_one_process(ranks2, loss):
    """Steps of two micro-batches of four completions of unequal lengths, each of which is used twice: all that is
    logged, and the weights. And as trees, of which what completions of a prompt share is computed once, in blocks of 8
    tokens."""
    settings = {**PROMPTS, "loss_type": loss, "num_iterations": 2, **TWO}
    for trees in (None, 8):
        _, found = as_one_process(ranks2, settings, near_zero=CANCEL, trees=trees)
        assert found >= LOGGED


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a reference model: one, so that a plain run is known to all tests that compare with it."""
    policy().save_pretrained(folder := tmp_path_factory.mktemp("reference"))
    return str(folder)


@pytest.mark.parametrize("case, trees", [*((case, None) for case in CASES), *((case, 4) for case in AS_TREES)])
def test_what_a_trainer_can_do_besides(ranks2, reference, case, trees):
    engine, settings = CASES[case]
    if settings.get("reference"):
        settings = {**settings, "reference": reference}
    chunks = {"options": {"chunk": 3}} if case == "LoRA" and not trees else {}
    _, found = as_one_process(ranks2, {**PROMPTS, **settings}, engine, near_zero=CANCEL, trees=trees, **chunks)
    assert found >= LOGGED
    assert ("kl" in found) == ("beta" in settings)


@pytest.mark.slow
def test_twenty_steps(ranks2):
    as_one_process(ranks2, {**PROMPTS, "max_steps": 20, "num_iterations": 2}, near_zero=CANCEL)


@pytest.mark.parametrize("trees", [None, 4])
def test_replicas_of_groups_train_as_one_process(pools, trees):
    """Two replicas of two ranks and no accumulation, against one process with two micro-batches."""
    # the mean of entropies over tokens: of all replicas' at once, and of each micro-batch's
    ours = {"sp": 2, "gradient_accumulation_steps": 1, "trees": trees}
    as_one_process(pools(4), PROMPTS, without=("entropy",), near_zero=CANCEL, **ours)


def test_a_run_is_resumed(ranks2, tmp_path):
    """After two of four steps, against a plain run that was not interrupted."""
    saved = {"save_strategy": "steps", "save_steps": 2, "folder": str(tmp_path)}
    ranks2(run, "ours", "ddp", {**PROMPTS, **saved})
    resumed = ranks2(run, "ours", "ddp", {**PROMPTS, "resume": f"{tmp_path}/checkpoint-2"})
    check_runs(resumed, plain(PROMPTS), after=2, without=("num_tokens",), near_zero=CANCEL)  # TRL counts those of a run


def generated(rank, world):
    """What two ranks generate for one prompt, two completions each, and the micro-batches that they make of it."""
    with accelerate_here("ddp"):
        trainer = build(settings={"max_steps": 1, "max_completion_length": 8, "num_generations": 4}, sp=world)
        trainer.train()
        return list(trainer._logs["completion"]), [part["completion_ids"].tolist() for part in trainer._buffered_inputs]


def test_ranks_generate_different_completions_and_shuffle_them_alike(ranks2):
    (logged, batches), second = ranks2(generated)
    assert (logged, batches) == second
    assert len(logged) == len(set(logged)) == 4
    assert sum(map(len, batches)) == 4


# ----- wrong use


class SPGRPO(alstlib.GRPOTrainerMixin, GRPOTrainer):
    pass


def build(cls=SPGRPO, settings=None, **kwargs):
    args = GRPOConfig(**{**SETTINGS, "use_cpu": True, "bf16": False, "output_dir": "unused", "num_generations": 2,
                         "per_device_train_batch_size": 2, **(settings or {})})  # fmt: skip
    data = {"train_dataset": dataset("prompt", 4), "processing_class": tokenizer(), "reward_funcs": small_tokens}
    return cls(**{"model": make_model(), "args": args, **data, **kwargs})


@pytest.mark.parametrize(
    "settings, more, message",
    [
        ({"entropy_coef": 0.1}, {}, "entropy_coef cannot be used with GRPOTrainerMixin; use 0.0"),
        ({}, {"trees": lambda: 0}, "trees=0 must be the number of a rank's tokens in one block"),
        ({"use_adaptive_entropy": True}, {}, "use_adaptive_entropy=True cannot be used with GRPOTrainerMixin"),
        ({"cast_lm_head_to_fp32": True}, {}, "cast_lm_head_to_fp32=True cannot be used with GRPOTrainerMixin"),
        ({"use_transformers_continuous_batching": True}, {}, "it replaces the attention that is attached"),
        (
            {"router_aux_loss_coef": 0.1}, {"model": lambda: made_of(mixture())},
            "router_aux_loss_coef=0.1 cannot .* GRPOTrainerMixin",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_arguments_that_are_refused(settings, more, message):
    check_refused(message, build, settings=settings, **{name: make() for name, make in more.items()})


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"is_deepspeed_enabled": True}, "trees=8 with DeepSpeed cannot be used with GRPOTrainerMixin; leave"),
        ({"is_fsdp_enabled": True}, "trees=8 with FSDP2 cannot be used with GRPOTrainerMixin; leave"),
        ({"args": SimpleNamespace(fp16=True)}, "trees=8 with fp16 cannot be used with GRPOTrainerMixin; use bf16"),
        ({"loss_is_scaled_for_ga": None}, "trees=8 with this TRL cannot be used .* install trl 1.16"),
    ],
)
def test_engines_that_trees_are_refused_with(asked, message):
    plain = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "args": SimpleNamespace(fp16=False),
             "loss_is_scaled_for_ga": True}  # fmt: skip
    trainer = SimpleNamespace(**{**plain, "trees": 8, "MIXIN": SPGRPO.MIXIN, **asked})
    check_refused(message, check_trees, trainer)


class WithTools(SPGRPO):
    def _validate_args(self):
        self.tools = [print]
        super()._validate_args()


UNEVEN = [
    (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        {},
        r"multiple of sp=2: each rank generates",
    ),
    ({"num_generations": 8}, {}, r"must be a multiple of num_generations=8: the ranks that share a sample are one"),
    ({"per_device_eval_batch_size": 3}, {"eval_dataset": True}, r"eval_batch_size=3 .* use a multiple of sp=2"),
    (
        {"use_vllm": True, "vllm_mode": "server"},
        {"cls": WithTools},
        "tools with vllm_mode=server cannot .* vllm_mode='colocate'",
    ),
    ({"num_generations_eval": 4}, {"eval_dataset": True}, r"multiple of the 4 generations of a prompt"),
]


def refuse(rank, world, settings, more, message):
    with accelerate_here("ddp"):
        given = {name: value if value is not True else dataset("prompt", 2) for name, value in more.items()}
        check_refused(message, build, settings=settings, sp=world, **given)


@pytest.mark.parametrize("settings, more, message", UNEVEN)
def test_batches_that_ranks_cannot_share(ranks2, settings, more, message):
    ranks2(refuse, settings, more, message)


def evaluate_unevenly(rank, world):
    with accelerate_here("ddp"):
        settings = {"per_device_eval_batch_size": 6, "num_generations_eval": 3}
        trainer = build(settings=settings, sp=world, eval_dataset=dataset("prompt", 3))
        check_refused("a batch has 3 completions, which sp=2 ranks cannot share", trainer.evaluate)


def test_a_last_batch_that_ranks_cannot_share(ranks2):
    ranks2(evaluate_unevenly)
