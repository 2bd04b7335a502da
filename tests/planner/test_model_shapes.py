"""Shapes: parameters as transformers counts them; what is unknown is refused with the nearest that is known."""

import json
from dataclasses import replace

import peft
import pytest
import torch
import yaml
from cases import check_refused, lines_of, values_of
from quick_steps import quick  # noqa: F401
from transformers import AutoModelForCausalLM, Llama4TextConfig

from alstlib.base.config import RunConfig
from alstlib.hf.loading.configs import find_config, planned_config
from alstlib.hf.loading.models import flop_dimensions, model_config
from alstlib.hf.loading.public_models import PUBLIC, SHAPES
from alstlib.planner import fits
from alstlib.planner.model_shapes import read_shape

SAME_SHAPES = """
openai/gpt-oss-20b      -> {}
openai/gpt-oss-20b      -> {num_hidden_layers: 6, head_dim: 64}
google/gemma-2-9b       -> {}
deepseek-ai/DeepSeek-V3 -> {}
LiquidAI/LFM2-1.2B      -> {}
small                   -> {hidden_size: 96}
tiny                    -> {num_attention_heads: 8}
tiny                    -> {hidden_size: 96, head_dim: 64}
Qwen/Qwen3-4B           -> {hidden_size: 96, num_hidden_layers: 1}
Qwen/Qwen2.5-7B         -> {num_attention_heads: 14, num_hidden_layers: 1}
"""


@pytest.mark.parametrize("name, fields", values_of(SAME_SHAPES))
def test_shapes_are_those_of_transformers_models(name, fields):
    """Of published configs, and with other fields."""
    config = model_config(name, fields, shape_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape, kinds = read_shape(name, fields), list(getattr(config, "layer_types", None) or [])
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_parameters == max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    assert shape.windowed == kinds[: shape.layers].count("sliding_attention")
    if fields:
        assert shape.head_dim == fields.get("head_dim", 128 if name == "Qwen/Qwen3-4B" else shape.width // shape.heads)
    if name == "google/gemma-2-9b":
        assert shape.softcap
        assert shape.dense_parameters == flop_dimensions(model)["dense_params"]


ANSWERED = [name for name in PUBLIC if "gpt2" not in name]
"""Without GPT-2, whose dropout is refused."""


def test_public_models_are_answered_without_torch(monkeypatch):
    """Their sizes come with the library."""
    monkeypatch.setattr(fits, "_ask", lambda *_: pytest.fail("it was counted again"))
    assert all(read_shape(name).parameters > 10**8 for name in ANSWERED)


@pytest.mark.parametrize("name, fields", values_of("""
tiny -> {}
openai-community/gpt2-xl -> {attn_pdrop: 0, embd_pdrop: 0, resid_pdrop: 0, n_layer: 2, n_embd: 64, n_head: 4}
"""))  # fmt: skip
def test_adapters_are_counted_as_peft_makes_them(name, fields):
    """GPT-2's linear modules are transformers' own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(name, fields, shape_only=True))
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert read_shape(name, fields).adapter_parameters({"r": 3}) == trained


def test_pairs_in_windows():
    """Counted one by one."""
    shape = replace(read_shape("tiny"), attending=3, window=7, windowed=2)
    for length in (5, 7, 30):
        exact = [sum(min(i + 1, w) for i in range(length)) for w in (length, 7, 7)]
        assert shape.pairs(length) == pytest.approx(sum(exact), abs=1.5 * length)
    assert shape.pairs(10**6) == pytest.approx(5e11 + 2 * 7e6, rel=1e-6)


def test_pairs_in_chunks(tmp_path):
    """Three of four layers begin anew with every 100 tokens."""
    small = dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "vocab_size"), 32)
    Llama4TextConfig(
        **small, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_local_experts=2, attention_chunk_size=100, architectures=["Llama4ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = read_shape(str(tmp_path))
    assert shape.pairs(10**4) == pytest.approx(10**8 / 2 + 3 * 100 * 100**2 / 2, rel=0.01)


PUBLISHED = yaml.safe_load("""
meta-llama/Llama-3.1-8B: 8.03
meta-llama/Llama-3.1-70B: 70.55
Qwen/Qwen3-4B: 4.02
Qwen/Qwen3-32B: 32.76
Qwen/Qwen2.5-7B: 7.62
meta-llama/Llama-3.2-1B: 1.24
""")
ACTIVE = yaml.safe_load("""
mistralai/Mixtral-8x7B-v0.1: 12.77
Qwen/Qwen3-30B-A3B: 3.04
openai/gpt-oss-20b: 3.61
deepseek-ai/DeepSeek-V3: 36.62
""")
"""Billions that multiply a token, the embedding left out."""


def test_published_shapes_have_the_published_sizes():
    assert {name: read_shape(name).parameters / 1e9 for name in PUBLISHED} == pytest.approx(PUBLISHED, abs=0.006)
    assert {name: read_shape(name).dense_parameters / 1e9 for name in ACTIVE} == pytest.approx(ACTIVE, rel=0.005)


def test_variants_of_published_models_are_known():
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "META-LLAMA/llama-3.1-8b"):
        assert read_shape(name).layers == 32
        assert model_config(name, {}, shape_only=True).num_hidden_layers == 32  # of which a simulation makes a model
    assert read_shape("tiny", {"num_hidden_layers": 7}).layers == 7
    assert set(SHAPES).isdisjoint(PUBLIC)


def test_a_config_on_disk_and_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**PUBLIC["Qwen/Qwen3-4B"], "num_hidden_layers": 5}))
    for name in (folder, folder / "config.json", "some/model"):
        assert read_shape(str(name)).layers == 5


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", "microsoft/phi-4"])
def test_a_published_model_that_was_downloaded(name, tmp_path, monkeypatch):
    """What comes with the library answers for it where it has the published shape; else what was downloaded counts."""
    question = fits.StepQuestion(RunConfig(model={"name": name}), 1, "cuda")
    before, shape = question.text, read_shape(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").mkdir(parents=True)

    def downloaded(**fields):
        own = {**planned_config(name), "torch_dtype": "bfloat16", "use_cache": True, "pad_token_id": 7, **fields}
        (folder / "snapshots/abc/config.json").write_text(json.dumps(own))

    downloaded(max_position_embeddings=4096)
    assert (question.text, read_shape(name)) == (before, shape)
    assert find_config(name)["max_position_embeddings"] == 4096
    downloaded(num_hidden_layers=5)
    assert question.text != before
    assert (read_shape(name).layers, model_config(name, {}, shape_only=True).num_hidden_layers) == (5, 5)


UNKNOWN = """
meta-llama/Llama-3.1-8 -> did you mean 'meta-llama/Llama-3.1-8B'
smal                   -> did you mean 'small'
nothing/like/it        -> built in: tiny, small
"""


@pytest.mark.parametrize("name, says", lines_of(UNKNOWN))
def test_an_unknown_model_is_refused_with_the_nearest(name, says):
    check_refused(says, find_config, name)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    check_refused(r"config\.json", read_shape, str(tmp_path))
