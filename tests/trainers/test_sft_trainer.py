"""TrainerMixin before TRL's SFTTrainer: what the plain one logs and trains in one process."""

from pathlib import Path

import pytest
import yaml
from cases import check_refused, make_model
from trainers import HERE, SETTINGS, accelerate_here, as_one_process, check_runs, plain, run
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from trl_runs import built, dataset, mixture, tokenizer

import alstlib

TABLE = yaml.safe_load("""
evaluated: &evaluated {trainer: SFT, max_steps: 10, evaluate: true, eval_strategy: steps, eval_steps: 5}
packing: &packing {<<: *evaluated, what: text, packing: true, max_length: 32, count: 60}
qwen: &qwen {<<: *packing, kind: qwen3, lora: true}

cases:
  text: {what: text, loss_type: nll}
  padding_free: {what: completion, padding_free: true, max_length: null}
  chat, LoRA: {what: chat, assistant_only_loss: true, lora: true}
  dft: {what: completion, loss_type: dft}
  images: {what: images, max_length: null}

engines:
  DDP, packing: [ddp, *packing]
  ZeRO-2, Qwen3, packing, LoRA: [zero2, *qwen]
  ZeRO-3, Qwen3, packing, LoRA: [zero3, *qwen]
  FSDP2, packing: [fsdp2, *packing]
""")
EVALUATED, CASES, ENGINES = (TABLE[name] for name in ("evaluated", "cases", "engines"))
CASES["a mixture of experts"] = {"what": "text", "kind": mixture(), "router_aux_loss_coef": 0.3}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process(ranks2, case):
    """5 steps of two micro-batches of two samples of unequal lengths, the last two in a second epoch: all that is
    logged, and the weights."""
    _, found = as_one_process(ranks2, {**EVALUATED, "count": 12, "max_steps": 5, "eval_steps": 3, **CASES[case]})
    assert {"entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy"} <= found
    assert ("aux_loss" in found) == ("eval_aux_loss" in found) == (case == "a mixture of experts")


@pytest.mark.parametrize("case", ENGINES)
def test_engines_and_a_resume_in_the_middle_of_an_epoch(ranks2, tmp_path, case):
    """10 steps, and those after the seventh, which is in the second epoch, again from what was saved then."""
    engine, settings = ENGINES[case]
    want, folder = plain(settings), {"output_dir": str(tmp_path)}
    assert [1 < line["epoch"] < 2 for line in want["logs"] if line["step"] == 7] == [True]
    saving = {**settings, **folder, "save_strategy": "steps", "save_steps": 7}
    check_runs(ranks2(run, "ours", engine, saving), want)
    resumed = ranks2(run, "ours", engine, {**settings, **folder, "resume": f"{tmp_path}/checkpoint-7"})
    check_runs(resumed, want, 7, ("num_tokens", "eval_num_tokens"))  # TRL counts them from the resume on


class SPSFT(alstlib.TrainerMixin, SFTTrainer):
    pass


@HERE
def test_a_router_loss_that_the_model_does_not_weigh_is_refused():
    model, settings = make_model(), {"router_aux_loss_coef": 0.1}
    model.config.output_router_logits = False  # as configs of mixtures have it
    says = r"router_aux_loss_coef=0.1 cannot .* use 0.0: the model's config has none"
    check_refused(says, built, SPSFT, SFTConfig, "text", settings, model=model)


def as_printed(rank, world, code, folder):
    """The lines of the page on a model from a folder that has its tokenizer; twice, as after an interruption."""
    settings = {
        "output_dir": f"{folder}/out",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    for steps, text in ((2, code.replace("resume_from_checkpoint=True", "")), (4, code)):
        with accelerate_here("ddp"):
            names = {"model": AutoModelForCausalLM.from_pretrained(f"{folder}/model"),
                                     "args": SFTConfig(**{**SETTINGS, **settings, "max_steps": steps}),
                                     "data": dataset("text", 16)}  # fmt: skip
            exec(text, names)
    return names["trainer"].state.global_step


def test_the_lines_of_the_page_run_as_printed(ranks2, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    text = (Path(__file__).parents[2] / "notebooks" / "training.md").read_text(encoding="utf-8")
    code = text.partition("## Use it in your own training")[2].partition("```python")[2].partition("```")[0]
    assert "sp=8" in code
    assert ranks2(as_printed, code.replace("sp=8", "sp=2"), str(tmp_path)) == [4, 4]
