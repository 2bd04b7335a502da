"""Models by name: shapes, local folders, refusals, and the dimensions that FLOPS are counted from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import config as case_config
from cases import make_model
from transformers import AutoModelForCausalLM

from alstlib.config import RunConfig
from alstlib.hf import models
from alstlib.hf.models import flop_dimensions, load_model, model_config, put_liger
from alstlib.hf.public_models import SHAPES
from alstlib.options import Options


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    config = model_config(name, {})
    assert config.model_type == "llama"
    assert {field: getattr(config, field) for field in SHAPES[name] if field != "rope_parameters"} == {
        field: value for field, value in SHAPES[name].items() if field != "rope_parameters"
    }
    assert config.num_attention_heads % 2 == config.num_key_value_heads % 2 == 0  # two ranks can split them


def test_llama_8b_has_its_size() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config("llama-3.1-8b", {}))
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert model.config.rope_parameters["factor"] == 8.0
    dimensions = flop_dimensions(model)
    assert dimensions == {"dense_params": 8_030_261_248 - 128_256 * 4096 - 65 * 4096, "heads": 32, "head_dim": 128,
                          "layers": 32}  # fmt: skip


def test_overrides_and_unknown_fields() -> None:
    config = model_config("tiny", {"num_hidden_layers": 5, "rms_norm_eps": 0.1})
    assert (config.num_hidden_layers, config.rms_norm_eps, config.hidden_size) == (5, 0.1, 64)
    with pytest.raises(
        ValueError, match=r"unknown field of model\.config 'num_hiden_layers'; did you mean 'num_hidden_lay"
    ):
        model_config("tiny", {"num_hiden_layers": 5})


def test_unknown_models_name_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("tinny", "someone/nothing"):
        with pytest.raises(ValueError) as refused:
            model_config(name, {})
        message = str(refused.value)
        assert message.startswith(f"model='{name}' is not a folder here and could not be downloaded from the hub")
        assert "built-in shapes: tiny, small, llama-3.1-8b" in message
        assert ("did you mean 'tiny'?" in message) == (name == "tinny")
        assert "\n" not in message
    (tmp_path / "llama").mkdir()
    for name, says in (
        (str(tmp_path / "lama"), f"lama' does not exist; did you mean '{tmp_path / 'llama'}'"),
        ("./no/where", "does not exist; its folder no does not exist either"),
        (str(tmp_path / "llama"), "is a folder without config.json"),
    ):
        with pytest.raises(ValueError, match=says):
            model_config(name, {})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        model_config(str(tmp_path), {})


def test_random_weights_follow_the_seed() -> None:
    first, again, other = (
        load_model(RunConfig(model={"name": "tiny"}, optim={"seed": s}), torch.float32) for s in (1, 1, 2)
    )
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not torch.equal(pairs[0][0], pairs[0][2])
    assert first.training
    assert load_model(RunConfig(model={"name": "tiny"}), torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="model='tiny' is a shape without weights: random_weights must be True"):
        load_model(RunConfig(model={"name": "tiny", "random_weights": False}), torch.float32)


def test_a_local_folder_has_its_weights_unless_random_ones_are_asked_for(tmp_path: Path) -> None:
    saved = make_model("qwen3")
    saved.save_pretrained(tmp_path)
    name = str(tmp_path)
    loaded = load_model(RunConfig(model={"name": name}), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters()))
    assert loaded.training
    random = load_model(RunConfig(model={"name": name, "random_weights": True}), torch.float32)
    assert type(random) is type(saved)
    assert not torch.equal(random.lm_head.weight, saved.lm_head.weight)
    fewer = load_model(
        RunConfig(model={"name": name, "config": {"num_hidden_layers": 1}, "random_weights": True}), torch.float32
    )
    assert len(fewer.model.layers) == 1


@pytest.mark.parametrize("kind", ["mha", "gqa", "qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_flos_count_every_matrix_multiplication(kind: str, tied: bool) -> None:
    """PyTorch's own counter over forward and backward agrees (2 flops a multiply-add, full attention matrix)."""
    from torch.utils.flop_counter import FlopCounterMode

    model: Any = AutoModelForCausalLM.from_config(
        case_config(kind, tie_word_embeddings=tied), attn_implementation="eager"
    )
    ids = torch.arange(32).view(1, 32)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    dimensions = flop_dimensions(model)
    dense = 6 * dimensions["dense_params"] * 32
    attention = 3 * 4 * 32 * 32 * dimensions["head_dim"] * dimensions["heads"] * dimensions["layers"]
    assert counter.get_total_flops() == pytest.approx(dense + attention, rel=0.02)
    made = models.flos(32, 32, **dimensions)
    assert made["model"] == dense + attention / 2
    assert made["paper"] == (dense + attention) * 4 / 3


LIGER: list[tuple[bool | str, bool, bool, str | None, bool | str]] = [
    # asked for, tiles, a GPU, the architecture that an installed package knows, and what happens
    ("auto", True, True, None, False), (False, True, True, None, False),
    (True, True, True, None, "liger=True needs the package liger-kernel, which is not ins"),
    (True, True, False, None, "liger=True needs a GPU"),
    ("auto", True, True, "qwen2", False), (True, True, True, "qwen2", "does not know the model_type llama"),
    ("auto", True, False, "llama", False), ("auto", True, True, "llama", True), (True, True, True, "llama", True),
    ("auto", False, True, "llama", False), (True, False, True, "llama", True),  # the paper's baseline has none
]  # fmt: skip


@pytest.mark.parametrize("asked, tiles, gpu, knows, outcome", LIGER, ids=str)
def test_liger_is_asked_for_clearly(
    monkeypatch: pytest.MonkeyPatch, asked: bool | str, tiles: bool, gpu: bool, knows: Any, outcome: bool | str
) -> None:
    model, put = make_model("llama"), []
    monkeypatch.setattr(models, "liger_kernels", put.append)
    if knows:
        monkeypatch.setattr(models, "liger_knows", lambda: (knows,))
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = Options.plain(tiles={"loss": True} if tiles else False)
    run = RunConfig(model={"name": "tiny", "liger": asked}, options=options)
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome):
            put_liger(run, model, gpu=gpu)
    else:
        put_liger(run, model, gpu=gpu)
    assert put == [model] * (outcome is True)


def test_weights_that_do_not_fit_or_were_cut_off(tmp_path: Path) -> None:
    load_model(RunConfig(model={"name": "tiny"}), torch.float32).save_pretrained(tmp_path)
    run = RunConfig(model={"name": str(tmp_path)})
    with pytest.raises(ValueError, match=r"its weights have other sizes than model.config asks for \(vocab_size=300\)"):
        load_model(run.replace(model={"config": {"vocab_size": 300}}), torch.float32)
    with pytest.raises(ValueError, match=r"has no weights for model\.layers\.\d\..* and \d+ more, which"):
        load_model(run.replace(model={"config": {"num_hidden_layers": 6}}), torch.float32)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or was cut off"):
        load_model(run, torch.float32)
