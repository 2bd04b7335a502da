"""LoRA on a base whose weights are packed integers: 4-bit linears of bitsandbytes where it is installed, and a stand-in
whose weight has their form. Tiles, checkpoints and chunks call modules and read no weight but the head's."""

import functools
import importlib.util

import pytest
import torch
from cases import make_model, same
from peft import prepare_model_for_kbit_training
from torch import nn
from trainers import check_runs, train
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
ADAPTED = ["k_proj", "up_proj"]
BASES = [
    "stand-in",
    pytest.param(
        "bitsandbytes",
        marks=pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed"),
    ),
]


class Packed(nn.Linear):
    """A linear layer whose weight is a column of whole numbers, uint8 [out * in, 1], almost as bitsandbytes has it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight = linear.weight.detach()
        self.step = float(weight.abs().max()) / 7
        self.weight = nn.Parameter((weight / self.step + 8.5).to(torch.uint8).view(-1, 1), requires_grad=False)

    def forward(self, x):
        weight = (self.weight.to(x.dtype) - 8) * self.step
        return nn.functional.linear(x, weight.view(self.out_features, self.in_features))


def base(kind, folder):
    """The model in the folder, with its linears in 4 bits."""
    if kind == "bitsandbytes":
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = model.model.layers
    for name, module in [*layers.named_modules()]:
        if isinstance(module, nn.Linear):
            layers.set_submodule(name, Packed(module))
    return model


def prepared(kind, folder):
    return prepare_model_for_kbit_training(base(kind, folder)).train()


def run(rank, world, how, engine, kind, folder, settings):
    model = functools.partial(prepared, kind, folder)
    return train(rank, world, how, engine, kind=model, lora=True, targets=ADAPTED, max_steps=6, **settings)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("engine, options", [("ddp", {"chunk": 5}), ("zero2", {})], ids=["DDP, chunks", "ZeRO-2"])
def test_two_ranks_train_as_one_process(ranks2, tmp_path, engine, options, kind):
    """Losses, gradient norms and weights of 6 steps, on the base as it was."""
    folder = str(tmp_path / "model")
    make_model(**WIDTHS).save_pretrained(folder)
    want = run(0, 1, "plain", "ddp", kind, folder, {})
    packed = {name: p for name, p in want["weights"].items() if p.dtype is torch.uint8}
    assert len(packed) == 2 * 7
    runs = ranks2(run, "ours", engine, kind, folder, {"options": options})
    check_runs(runs, want)
    assert all(same({name: got["weights"][name] for name in packed}, packed) for got in runs)
