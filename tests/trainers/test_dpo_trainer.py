"""DPOTrainerMixin: what plain DPOTrainer logs and trains in one process, and wrong use refused by name."""

import importlib.metadata
import re

import pytest
import yaml
from cases import check_refused, lines_of, make_model
from trainers import HERE, as_one_process, made_of
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl_runs import built, dataset, mixture

import alstlib

TABLE = yaml.safe_load("""
alone: &alone {trainer: DPO, what: pairs, count: 12, max_steps: 4}
pairs: &pairs {<<: *alone, reference: true}
evaluated: &evaluated {evaluate: true, eval_strategy: steps, eval_steps: 2}
mixed: &mixed {loss_type: [sigmoid, ipo, sft, robust], label_smoothing: 0.1, ld_alpha: 0.5}

cases:
  a reference model: [ddp, {<<: [*pairs, *evaluated]}]
  LoRA: [ddp, {<<: [*alone, *evaluated], lora: true}]
  several losses: [ddp, {<<: [*pairs, *mixed]}]
  ZeRO-2, LoRA: [zero2, {<<: [*alone, *evaluated], lora: true}]
  ZeRO-3: [zero3, {<<: [*pairs, *evaluated]}]
  FSDP2: [fsdp2, {<<: [*pairs, *evaluated]}]
""")
ALONE, PAIRS, EVALUATED, MIXED, CASES = (TABLE[name] for name in ("alone", "pairs", "evaluated", "mixed", "cases"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process(ranks2, case):
    """4 steps of two micro-batches of two pairs of unequal lengths, the last in a second epoch: all that is logged, and
    the weights."""
    engine, settings = CASES[case]
    chunks = {"options": {"chunk": 3}} if case == "several losses" else {}
    _, found = as_one_process(ranks2, settings, engine, **chunks)
    assert {"rewards/margins", "logps/chosen", "logits/rejected", "entropy", "num_tokens"} <= found


LOSSES = [
    "sigmoid", "hinge ipo nca_pair bco_pair", "exo_pair robust aot apo_zero discopop",
    "sppo_hard aot_unpaired apo_down sft sigmoid_norm",
]  # fmt: skip


@pytest.mark.parametrize("losses", LOSSES)
def test_every_loss(ranks2, losses):
    """By itself, or in a sum of others, whose gradient each changes."""
    smooth = {"label_smoothing": 0.1} if "robust" in losses else {}
    as_one_process(ranks2, {**PAIRS, "loss_type": losses.split(), "max_steps": 2, **smooth})


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence"])
def test_each_divergence(ranks2, divergence):
    as_one_process(ranks2, {**PAIRS, "f_divergence_type": divergence, "max_steps": 2})


def test_all_losses_of_the_installed_trl_are_tried():
    said = DPOConfig.__dataclass_fields__["loss_type"].metadata["help"].partition("If multiple")[0]
    assert set(re.findall(r"`'(\w+)'`", said)) == set(" ".join(LOSSES).split())


@pytest.mark.parametrize("settings", [{**PAIRS, **MIXED}, {**ALONE, "lora": True}], ids=["a reference model", "LoRA"])
def test_pairs_as_trees_train_as_one_process(ranks2, settings):
    """Each pair's prompt is computed once, in blocks of 8 tokens, and all that is logged is as without, of an
    evaluation too."""
    as_one_process(ranks2, {**settings, "max_steps": 2, **EVALUATED}, trees=8)


@pytest.mark.parametrize("trees", [None, 8])
def test_replicas_of_groups_train_as_one_process(pools, trees):
    """Two replicas of two ranks and no accumulation, against one process with two micro-batches."""
    settings = {**PAIRS, "count": 8}
    without = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected")
    # means over tokens: of all replicas' at once, and of each micro-batch's
    as_one_process(pools(4), settings, without=without, sp=2, gradient_accumulation_steps=1, trees=trees)


@pytest.mark.parametrize("trees", [None, 8])
def test_a_reference_computed_before_training(ranks2, tmp_path, trees):
    """By both ranks, in slices or on trees, against a reference model that stays."""
    for count in (12, 7):
        dataset("pairs", count).save_to_disk(tmp_path / f"pairs-{count}")
    as_one_process(ranks2, {**PAIRS, **EVALUATED}, precompute_ref_log_probs=True, data=str(tmp_path), trees=trees)


# ----- wrong use


class SPDPO(alstlib.DPOTrainerMixin, DPOTrainer):
    pass


def build(cls=SPDPO, settings=None, **given):
    return built(cls, DPOConfig, "pairs", settings, **{"ref_model": make_model(), **given})


REFUSED = [
    ("use_weighting=True cannot be used with DPOTrainerMixin", {"use_weighting": True}, {}),
    ("use 'reverse_kl'", {"f_divergence_type": "alpha_divergence"}, {}),
    ("router_aux_loss_coef=0.1 cannot .* DPOTrainerMixin", {"router_aux_loss_coef": 0.1}, {"kind": mixture()}),
    ("trees=0 must be the number of a rank's tokens in one block", {}, {"trees": 0}),
    (r"compute_metrics cannot be used .* evaluate\(\) logs", {}, {"compute_metrics": print}),
]


@pytest.mark.parametrize("message, settings, more", REFUSED)
@HERE
def test_arguments_that_are_refused(message, settings, more):
    more = {"model": made_of(more["kind"])} if "kind" in more else more
    check_refused(message, build, settings=settings, **more)


@HERE
def test_an_older_trl_is_refused(monkeypatch):
    """Its DPOTrainer computes log-probabilities from logits by itself."""
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.14.0" if name == "trl" else installed(name))
    check_refused(r"of trl 1\.15 or newer .* \(1\.14\.0 is installed\)", build)


@HERE
def test_logits_are_refused():
    check_refused(r"returns no logits: call evaluate\(\)", build().predict, build().train_dataset)


BEHIND = """
TrainerMixin     -> DPOTrainer    -> DPOTrainer has its own .*put alstlib.DPOTrainerMixin before it
TrainerMixin     -> KTOTrainer    -> KTOTrainer has its own .*calls its models in several places, .* loss from alstlib
DPOTrainerMixin  -> KTOTrainer    -> KTOTrainer has its own .*calls its models in several places, .* loss from alstlib
TrainerMixin     -> GRPOTrainer   -> GRPOTrainer has its own .*put alstlib.GRPOTrainerMixin before it
TrainerMixin     -> RLOOTrainer   -> RLOOTrainer has its own .*put alstlib.GRPOTrainerMixin before it
TrainerMixin     -> RewardTrainer -> RewardTrainer has its own .*scores whole samples, .*: train it without the mixin
TrainerMixin     -> CPOTrainer    -> CPOTrainer has its own .*reads logits of whole samples: .*alstlib.token_logps
TrainerMixin     -> ORPOTrainer   -> ORPOTrainer has its own .*reads logits of whole samples: .*alstlib.token_logps
GRPOTrainerMixin -> SFTTrainer    -> needs GRPOTrainer or RLOOTrainer of trl 1.15 or newer behind GRPO
DPOTrainerMixin  -> SFTTrainer    -> needs DPOTrainer of trl 1.15 or newer behind DPOTrainerMixin
DPOTrainerMixin  -> Trainer       -> needs DPOTrainer of trl 1.15 or newer behind DPOTrainerMixin
"""
TRAINERS = (
    CPOTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer, Trainer,
)  # fmt: skip


@pytest.mark.parametrize("mixin, behind, message", lines_of(BEHIND))
def test_trainers_that_are_refused(mixin, behind, message):
    (behind,) = (one for one in TRAINERS if one.__name__ == behind)
    check_refused(message, type("Mine", (getattr(alstlib, mixin), behind), {}))
