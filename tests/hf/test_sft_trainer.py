"""TrainerMixin before TRL's SFTTrainer: what the plain one logs and trains in one process."""

from __future__ import annotations

from typing import Any

import pytest
from cases import make_model
from trainers import SETTINGS, accelerate_here
from trl import SFTConfig, SFTTrainer
from trl_runs import dataset, errors, mixture, tokenizer, train

import alstlib

EVALUATED = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 5}
CASES: dict[str, dict[str, Any]] = {
    "text": {"what": "text", "loss_type": "nll", **EVALUATED},
    "packing": {"what": "text", "packing": True, "max_length": 32, "count": 60, **EVALUATED},
    "padding_free": {"what": "completion", "padding_free": True, "max_length": None, **EVALUATED},
    "chat, LoRA": {"what": "chat", "assistant_only_loss": True, "lora": True, **EVALUATED},
}


def run(rank: int, world: int, how: str, settings: dict[str, Any]) -> Any:
    return train(rank, world, how, "SFT", **{"max_steps": 10, **settings})


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process(ranks2: Any, case: str) -> None:
    """10 steps of two micro-batches of two samples of unequal lengths: all that is logged, and the weights."""
    want = run(0, 1, "plain", CASES[case])
    for got in ranks2(run, "ours", CASES[case]):
        found = errors(got, want)
        assert max(found.values()) < 1e-5, found
        assert {"entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy"} <= found.keys()


class SPSFT(alstlib.TrainerMixin, SFTTrainer):
    pass


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        (
            {"activation_offloading": True},
            make_model,
            r"activation_offloading=True .*alstlib.Options\(offload='async'\)",
        ),
        ({}, mixture, "router_aux_loss_coef=0.001 cannot be run with TrainerMixin; use 0.0"),
        ({"loss_type": "dft"}, make_model, "loss_type='dft' cannot be run with TrainerMixin; use 'nll'"),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], model: Any, message: str) -> None:
    with accelerate_here("ddp"):
        args = SFTConfig(**{**SETTINGS, "use_cpu": True, "bf16": False, "output_dir": "unused", **settings})
        with pytest.raises(ValueError, match=message):
            SPSFT(model=model(), args=args, train_dataset=dataset("text", 4), processing_class=tokenizer())
