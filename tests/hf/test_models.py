"""Models by name: shapes, local folders, refusals, and the dimensions that FLOPS are counted from."""

import contextlib
import importlib.metadata
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from cases import check_refused, freeze, make_model, same
from cases import config as case_config
from transformers import AutoModelForCausalLM
from trl_runs import mixture

from alstlib.base.config import RunConfig
from alstlib.base.options import Options
from alstlib.hf.loading import models
from alstlib.hf.loading.configs import overridden
from alstlib.hf.loading.models import experts_of_token, flop_dimensions, flos, load_model, mfu, model_config, put_liger


def test_overrides_and_unknown_fields():
    config = model_config("tiny", {"num_hidden_layers": 5, "rms_norm_eps": 0.1})
    assert (config.num_hidden_layers, config.rms_norm_eps, config.hidden_size) == (5, 0.1, 64)
    wrong = {"num_hiden_layers": 5}
    check_refused(r"of model\.config 'num_hiden_layers'; did you mean 'num_hidden_layers'", model_config, "tiny", wrong)


def test_a_width_of_heads_follows_where_a_config_has_such_heads():
    """Mamba-2's heads are none of attention's."""
    heads = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    assert overridden(heads, {"hidden_size": 32}) == {**heads, "hidden_size": 32, "head_dim": 8}
    mamba2 = {"hidden_size": 64, "num_heads": 8, "head_dim": 16}
    assert overridden(mamba2, {"hidden_size": 32}) == {**mamba2, "hidden_size": 32}


def test_unknown_models_name_what_there_is(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "llama").mkdir()
    (tmp_path / "config.json").write_text("{}")
    for name, says in (
        ("tinny", "^model='tinny' is not a folder here and could not be downloaded .*built-in shapes: tiny, small, ll"),
        (tmp_path / "lama", f"lama' does not exist; did you mean '{tmp_path / 'llama'}'"),
        (tmp_path / "llama", "is a folder without config.json"),
        (tmp_path, "its config cannot be read"),
    ):
        check_refused(says, model_config, str(name), {})


def load(name, seed=0, dtype=torch.float32, **model):
    return load_model(RunConfig(model={"name": str(name), **model}, optim={"seed": seed}), dtype)


def test_random_weights_follow_the_seed():
    first, again, other = (load("tiny", seed).state_dict() for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)
    assert load("tiny").training
    assert load("tiny", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_local_folder_has_its_weights_unless_random_ones_are_asked_for(tmp_path):
    saved = make_model("qwen3")
    saved.save_pretrained(tmp_path)
    loaded, random = load(tmp_path), load(tmp_path, random_weights=True)
    assert same(saved.state_dict(), loaded.state_dict())
    assert loaded.training
    assert type(random) is type(saved)
    assert not torch.equal(random.lm_head.weight, saved.lm_head.weight)
    assert len(load(tmp_path, config={"num_hidden_layers": 1}, random_weights=True).model.layers) == 1


PARTS = ("mlp", "head")
COUNTED = [
    *itertools.product(["mha", "gqa", "qwen3", "gpt2"], [False, True], [()]), ("gqa", False, PARTS),
    ("experts", False, PARTS),
]  # fmt: skip
"""Models, whether embeddings are tied, and parts of the names of frozen weights."""


@pytest.mark.parametrize("kind, tied, frozen", COUNTED)
def test_flos_count_every_matrix_multiplication(kind, tied, frozen):
    """The model's FLOPs are what PyTorch counts over forward and backward (2 flops a multiply-add), but for the half
    of the attention that is masked. An adapter's base has no gradients of its own, and a token goes to two of four
    experts. What they are in a result is in tests/runs/test_results.py."""
    from torch.utils.flop_counter import FlopCounterMode

    how = {"experts_implementation": "eager"} if kind == "experts" else {}
    config = mixture() if how else case_config(kind, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **how)
    freeze(model, frozen)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(32).view(1, 32), use_cache=False).logits.sum().backward()
    dimensions = flop_dimensions(model)
    masked = 6 * 32 * 32 * dimensions["head_dim"] * dimensions["heads"] * dimensions["layers"]
    assert (dimensions["frozen"] > dimensions["dense_params"] / 3) == bool(frozen)
    assert counter.get_total_flops() == pytest.approx(flos(32, 32, **dimensions)["model"] + masked, rel=0.02)


@pytest.mark.parametrize("name", ["num_experts_per_tok", "top_k_experts", "moe_topk"])
def test_families_name_the_experts_of_a_token_differently(name):
    assert experts_of_token(SimpleNamespace(**{name: 2})) == 2
    assert experts_of_token(SimpleNamespace(**{name: None})) is None


def test_flos_of_windows():
    model = AutoModelForCausalLM.from_config(mixture(sliding_window=7))
    dimensions = flop_dimensions(model)
    assert dimensions["windows"] == (7, 2)
    pairs = sum(min(i + 1, 7) for i in range(500))
    dense = 6 * dimensions["dense_params"] * 500
    found = (flos(500, 500, **dimensions)["model"] - dense) / (12 * 32 * 2)
    assert found == pytest.approx(pairs, rel=0.01)


MFU = yaml.safe_load("""
NVIDIA H100 80GB HBM3: 989
NVIDIA GeForce RTX 4090: 165
a GPU: null
NVIDIA H100 PCIe: 756
NVIDIA RTX A1000: null
NVIDIA A100-SXM4-40GB: 312
""")
"""The peak of GPUs in TFLOPS."""


def test_an_mfu_is_a_share_of_the_peak_of_a_gpu_that_is_known(monkeypatch):
    assert mfu(1e12, torch.device("cpu")) is None
    for name, peak in MFU.items():
        here = SimpleNamespace(get_device_name=lambda device, name=name: name)
        monkeypatch.setattr(models, "accelerator", lambda device, here=here: here)
        assert mfu(1e12, torch.device("cuda")) == (peak and pytest.approx(1 / peak))


LIGER = yaml.safe_load("""
# asked for, tiles, a GPU, the architecture that an installed package knows, and whether they are put in
- [auto, true, true, null, false]
- [false, true, true, null, false]
- [auto, true, true, qwen2, false]
- [auto, true, false, llama, false]
- [auto, true, true, llama, true]
- [true, true, true, llama, true]
- [auto, false, true, llama, false]
- [true, false, true, llama, true]  # the paper's baseline has none
- [true, true, true, null, refused]
- [true, true, false, llama, refused]
- [true, true, true, qwen2, refused]
""")


@pytest.mark.parametrize("asked, tiles, gpu, knows, outcome", LIGER, ids=str)
def test_liger_is_asked_for_clearly(monkeypatch, asked, tiles, gpu, knows, outcome):
    model, put = make_model("llama"), []
    monkeypatch.setattr(models, "liger_kernels", put.append)
    monkeypatch.setattr(models, "liger_knows", lambda: (knows,))
    options = Options.plain(tiles={"loss": True} if tiles else False)
    run = RunConfig(model={"name": "tiny", "liger": asked}, options=options)
    says = "liger=True needs a GPU and the package liger-kernel .* does not know the model_type llama"
    with pytest.raises(ValueError, match=says) if outcome == "refused" else contextlib.nullcontext():
        put_liger(run, model, gpu=gpu)
    assert put == [model] * (outcome is True)


@pytest.mark.parametrize("version, knows", [(None, False), ("0.8.3", False), ("0.8.4", True), ("0.10.0", True)])
def test_a_liger_that_counts_with_32_bits_is_as_none(monkeypatch, version, knows):
    found = [SimpleNamespace(version=version)] if version else []
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found if name == "liger-kernel" else [])
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None}))
    assert [*models.liger_knows()] == ["llama"] * knows


def test_weights_that_do_not_fit_or_were_cut_off(tmp_path):
    load("tiny").save_pretrained(tmp_path)
    run = RunConfig(model={"name": str(tmp_path)})
    for config, says in (
        ({"vocab_size": 300}, "its weights cannot be loaded, .* or model.config asks for other sizes"),
        ({"num_hidden_layers": 6}, r"has no weights for model\.layers\.\d\..* and \d+ more, which"),
    ):
        check_refused(says, load_model, run.replace(model={"config": config}), torch.float32)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    check_refused("files are damaged or were cut off", load_model, run, torch.float32)
