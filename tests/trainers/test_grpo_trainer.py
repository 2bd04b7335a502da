"""GRPOTrainerMixin: what plain GRPOTrainer and RLOOTrainer log and train in one process, and wrong use refused by
name."""

from types import SimpleNamespace

import pytest
import yaml
from cases import check_refused
from trainers import accelerate_here, as_one_process, check_runs, made_of, plain, run
from trl import GRPOConfig, GRPOTrainer
from trl_runs import built, dataset, mixture, policy, small_tokens, turns

import alstlib
from alstlib.trainers.trainer_checks import check_trees

PROMPTS = {"trainer": "GRPO", "what": "prompt"}
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
TABLE = yaml.safe_load("""
two: &two {max_steps: 2}  # in which a step follows another one: on new completions, or on the same ones used twice
evaluated: &evaluated {evaluate: true, eval_strategy: steps, eval_steps: 2}
from one: &from_one {reference: true, beta: 0.2}

cases:
  a reference model: [ddp, {<<: [*from_one, *evaluated], num_iterations: 2}]
  LoRA: [ddp, {<<: *two, lora: true, beta: 0.2, temperature: 0.7}]
  truncated completions and low entropies are masked: [ddp, {<<: *two, mask_truncated_completions: true,
    top_entropy_quantile: 0.4, max_completion_length: 5, num_iterations: 2}]
  RLOO: [ddp, {<<: [*two, *from_one, *evaluated], trainer: RLOO}]
  ratios of sequences: [ddp, {<<: *two, importance_sampling_level: sequence, loss_type: grpo, num_iterations: 2,
    epsilon: 0.05, delta: 1.1, off_policy_mask_threshold: 0.01}]
  several steps of one generation: [ddp, {steps_per_generation: 4, scale_rewards: batch}]
  a reference that follows: [ddp, {<<: *from_one, sync_ref_model: true, ref_model_sync_steps: 2}]
  ZeRO-2, LoRA: [zero2, {<<: *two, lora: true, beta: 0.2}]
  ZeRO-3: [zero3, {<<: [*two, *from_one]}]
  FSDP2: [fsdp2, {num_iterations: 2}]

as trees: [a reference model, LoRA, truncated completions and low entropies are masked, RLOO, tokens of an environment]

# arguments, and why they are refused
refused:
- [{entropy_coef: 0.1}, entropy_coef cannot be used with GRPOTrainerMixin; use 0.0]
- [{use_adaptive_entropy: true}, use_adaptive_entropy=True cannot be used with GRPOTrainerMixin]
- [{cast_lm_head_to_fp32: true}, cast_lm_head_to_fp32=True cannot be used with GRPOTrainerMixin]
- [{use_transformers_continuous_batching: true}, it replaces the attention that is attached]

# what is asked of a trainer with trees
trees:
- [{is_deepspeed_enabled: true}, trees=8 with DeepSpeed cannot be used with GRPOTrainerMixin; leave]
- [{is_fsdp_enabled: true}, trees=8 with FSDP2 cannot be used with GRPOTrainerMixin; leave]
- [{fp16: true}, trees=8 with fp16 cannot be used with GRPOTrainerMixin; use bf16]
- [{loss_is_scaled_for_ga: null}, trees=8 with this TRL cannot be used .* install trl 1.16]

# batches, whether there are data for an evaluation
uneven:
- [{per_device_train_batch_size: 1, gradient_accumulation_steps: 1}, false, 'multiple of sp=2: each rank generates']
- [{num_generations: 8}, false, 'must be a multiple of num_generations=8: the ranks that share a sample are one']
- [{per_device_eval_batch_size: 3}, true, 'eval_batch_size=3 .* use a multiple of sp=2']
- [{use_vllm: true, vllm_mode: server}, false, tools with vllm_mode=server cannot .* vllm_mode='colocate']
- [{num_generations_eval: 4}, true, multiple of the 4 generations of a prompt]
""")
CASES = TABLE["cases"]
CASES["tokens of an environment"] = ["ddp", {"rollout": turns, "top_entropy_quantile": 0.6, "max_steps": 2}]
TWO = TABLE["two"]
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


@pytest.mark.parametrize("case, trees", [*((case, None) for case in CASES), *((case, 4) for case in TABLE["as trees"])])
def test_what_a_trainer_can_do_besides(ranks2, reference, case, trees):
    engine, settings = CASES[case]
    if settings.get("reference"):
        settings = {**settings, "reference": reference}
    chunks = {"options": {"chunk": 3}} if case == "LoRA" and not trees else {}
    _, found = as_one_process(ranks2, {**PROMPTS, **settings}, engine, near_zero=CANCEL, trees=trees, **chunks)
    assert found >= LOGGED
    assert ("kl" in found) == ("beta" in settings)


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


def build(cls=SPGRPO, settings=None, **given):
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, **(settings or {})}
    return built(cls, GRPOConfig, "prompt", settings, reward_funcs=small_tokens, **given)


OF_MORE = [
    ({}, "trees=0 must be the number of a rank's tokens in one block", {"trees": lambda: 0}),
    ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 cannot .* GRPOTrainerMixin",
     {"model": lambda: made_of(mixture())}),
]  # fmt: skip


@pytest.mark.parametrize("settings, message, more", [*((*row, {}) for row in TABLE["refused"]), *OF_MORE])
@pytest.mark.usefixtures("here")
def test_arguments_that_are_refused(settings, message, more):
    check_refused(message, build, settings=settings, **{name: make() for name, make in more.items()})


@pytest.mark.parametrize("asked, message", TABLE["trees"])
def test_engines_that_trees_are_refused_with(asked, message):
    plain = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "loss_is_scaled_for_ga": True}
    args = SimpleNamespace(fp16=asked.get("fp16", False))
    check_refused(message, check_trees, SimpleNamespace(trees=8, MIXIN=SPGRPO.MIXIN, args=args, **{**plain, **asked}))


class WithTools(SPGRPO):
    def _validate_args(self):
        self.tools = [print]
        super()._validate_args()


def refuse(rank, world, settings, evaluates, message):
    data = {"eval_dataset": dataset("prompt", 2)} if evaluates else {}
    cls = WithTools if "use_vllm" in settings else SPGRPO
    with accelerate_here("ddp"):
        check_refused(message, build, settings=settings, sp=world, cls=cls, **data)


@pytest.mark.parametrize("settings, evaluates, message", TABLE["uneven"])
def test_batches_that_ranks_cannot_share(ranks2, settings, evaluates, message):
    ranks2(refuse, settings, evaluates, message)


def evaluate_unevenly(rank, world):
    with accelerate_here("ddp"):
        settings = {"per_device_eval_batch_size": 6, "num_generations_eval": 3}
        trainer = build(settings=settings, sp=world, eval_dataset=dataset("prompt", 3))
        check_refused("a batch has 3 completions, which sp=2 ranks cannot share", trainer.evaluate)


def test_a_last_batch_that_ranks_cannot_share(ranks2):
    ranks2(evaluate_unevenly)
