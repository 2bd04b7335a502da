"""`alst verify`: which models are equal, what is named where one is not, what is refused, and what it costs to ask."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers
import yaml
from cases import ROOT, lines_of, on_ranks, unsaid, values_of, worst_error

from alstlib.planner.measure import small, verify
from alstlib.planner.measure.deep import kinds_of_layers
from alstlib.planner.measure.simulate import decoder_layers
from alstlib.runs import verify as command

COMMON = {"vocab_size": 128_000, "max_position_embeddings": 131_072, "eos_token_id": [127_000, 127_001]}
MODELS = yaml.safe_load("""
llama: {hidden_size: 4096, num_attention_heads: 32, num_key_value_heads: 8, num_hidden_layers: 32,
  intermediate_size: 14336, rope_parameters: {rope_type: llama3, rope_theta: 500000.0, factor: 8.0,
  low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192}}
gemma3_text: {hidden_size: 5376, num_attention_heads: 32, num_key_value_heads: 16, head_dim: 128,
  num_hidden_layers: 62, intermediate_size: 21504, sliding_window: 1024}
gpt_oss: {hidden_size: 2880, num_attention_heads: 64, num_key_value_heads: 8, head_dim: 64,
  num_hidden_layers: 24, num_local_experts: 32, output_router_logits: true}
qwen3_moe: {hidden_size: 2048, num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128,
  num_hidden_layers: 48, num_experts: 128, num_experts_per_tok: 8}
rwkv: {hidden_size: 768, num_hidden_layers: 12}
t5: {}
gpt2: {}
""")
SHIFT = """
import torch
from torch import nn
from transformers import LlamaForCausalLM
from .configuration_shifted import ShiftedConfig


class Shift(nn.Module):
    def forward(self, x):
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return torch.cat([before.chunk(2, -1)[0], x.chunk(2, -1)[1]], -1)


class ShiftedForCausalLM(LlamaForCausalLM):
    config_class = ShiftedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp.act_fn = nn.Sequential(self.model.layers[1].mlp.act_fn, Shift())
"""
"""A model that comes with code, in which half of what an MLP computes is of the token before."""


def folder(path, kind, **more):
    """A full-size config.json, without weights."""
    path.mkdir(exist_ok=True)
    config = {"model_type": kind, "torch_dtype": "bfloat16", **(COMMON if MODELS[kind] else {}), **MODELS[kind]}
    (path / "config.json").write_text(json.dumps({**config, **more}))
    return str(path)


def on_pool(rank, world, question):
    return verify.verify(question)


@pytest.fixture
def here(monkeypatch, pools):
    """The command's ranks are those of the tests, or this process where it is one."""

    def run(function, ranks, question):
        return on_ranks(pools, ranks, on_pool, question)

    monkeypatch.setattr(command, "run_on_ranks", run)


EQUAL = """
llama       -> ''                                                         -> 2 -> 1
gemma3_text -> --set chunk=16K --set offload=sync --set on_host=hidden+kv -> 6 -> 2
gpt_oss     -> --set save_attention=true                                  -> 2 -> 2
qwen3_moe   -> --block 16384                                              -> 2 -> 1
"""


@pytest.mark.parametrize("kind, options, layers, kinds", values_of(EQUAL))
def test_models_that_are_equal(here, tmp_path, answer, kind, options, layers, kinds):
    found, config = answer(f"verify {folder(tmp_path / kind, kind)} {options}"), MODELS[kind]
    cases, small = found["cases"], found["small"]
    assert found["verdict"] == "equal", found
    assert [(c["sp"], c["sample"]) for c in cases] == [(sp, s) for sp in (1, 2) for s in ("whole", "packed")]
    assert all(c["loss"] < 1e-6 and c["gradient"] < 1e-5 for c in cases)
    assert small["changes"]["num_hidden_layers"] == [config["num_hidden_layers"], layers]
    assert small["layer_kinds"] == [kinds, kinds]
    assert small["heads"] == [config["num_attention_heads"], config["num_key_value_heads"]]
    assert ("sliding_window" in small["changes"]) == (kind in ("gemma3_text", "gpt_oss"))
    assert (found["tiles"]["tiles.mlp"], cases[0]["notes"]) == ([True, 5], [])


def test_the_pages_command(here, tmp_path, alst):
    page = (ROOT / "notebooks" / "training.md").read_text()
    ((model, options),) = re.findall(r"^    \.venv/bin/alst verify (\S+) (.*)$", page, re.MULTILINE)
    assert model == "meta-llama/Llama-3.1-8B"
    path = folder(tmp_path / "llama", "llama")
    said = " ".join(alst(f"verify {path} {options}").split())
    expected = f"""
{path}: a step of a small model on 2 CPU ranks is compared with plain transformers
hidden_size 4096 -> 256
chunk 4
offload True
1 whole equal
2 packed equal
"""
    assert unsaid(said, expected) == []
    assert re.search(
        r" equal: loss and every gradient are those of plain transformers, to \d\.\de-0[67] \(\d+ s\)", said
    )


def test_a_model_that_mixes_tokens_in_its_own_code(tmp_path):
    """As its user runs it: real processes, and code that comes with the model."""
    auto = {"AutoConfig": "configuration_shifted.ShiftedConfig",
            "AutoModelForCausalLM": "modeling_shifted.ShiftedForCausalLM"}  # fmt: skip
    path = folder(tmp_path / "shifted", "llama", model_type="shifted", auto_map=auto)
    of_config = (
        "from transformers import LlamaConfig\n\n\nclass ShiftedConfig(LlamaConfig):\n    model_type = 'shifted'\n"
    )
    (tmp_path / "shifted" / "configuration_shifted.py").write_text(of_config)
    (tmp_path / "shifted" / "modeling_shifted.py").write_text(SHIFT)
    line = [sys.executable, "-m", "alstlib.runs.cli", "verify", path, "--trust-remote-code", "--json"]
    env = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "differs"
    assert "4 of 4 cases; first in model.layers.1.mlp.act_fn.1 (Shift): its output is off by" in answer["reason"]
    assert {(c["sp"], c["first"]["kind"]) for c in answer["cases"]} == {(1, "Shift"), (2, "Shift")}
    refused = verify.verify({"model": path, "sp": 1, "options": {}, "config": {}, "trust_remote_code": False})
    assert refused["refused"].endswith("; --trust-remote-code runs it")


def test_a_wrong_gradient_is_named(here, monkeypatch, answer):
    """The nearest to a mistake that spoils all before it: a layer's norms are its last parameters, but run first."""
    step = verify.attached_step

    def wrong(*args):
        loss, grads = step(*args)
        spoilt = ("k_proj.weight", "input_layernorm.weight")
        return loss, {n: g * 1.0001 if n.endswith(spoilt) else g for n, g in grads.items()}

    monkeypatch.setattr(verify, "attached_step", wrong)
    case = answer("verify tiny --sp 1", 1)["cases"][0]
    assert (case["first"], case["reason"]) == (None, "gradient of model.layers.1.self_attn.k_proj.weight")
    assert case["gradient"] == pytest.approx(1e-4, rel=1e-3)


REFUSED = """
rwkv  ->                            -> (RwkvBlock) mixes tokens in another way than attention
t5    ->                            -> transformers has no causal language model of the type t5
gpt2  ->                            -> layer 0 (GPT2Attention) has attention dropout 0.1, which tiles cannot replay
llama -> --set attention=flash      -> attention='flash' does not run on cpu
llama -> --block 4K --set chunk=4K  -> give only one of them
llama -> --set ofload=sync          -> unknown field of Options 'ofload'; did you mean 'offload'?
llama -> --config hidden_sizes=3    -> unknown field of model.config 'hidden_sizes'
"""


@pytest.mark.parametrize("kind, options, reason", lines_of(REFUSED))
def test_what_is_refused(here, tmp_path, alst, kind, options, reason):
    said = alst(f"verify {folder(tmp_path / kind, kind)} --sp 1 {options}", 2)
    assert reason in said.partition("\nrefused: ")[2]


def test_dropout_that_is_refused_may_be_set_to_zero(here, tmp_path, answer):
    found = answer(f"verify {folder(tmp_path / 'gpt2', 'gpt2')} --sp 1 --config attn_pdrop=0")
    assert found["small"]["changes"]["resid_pdrop"] == [0.1, 0.0]


def test_a_hub_name_without_a_network(monkeypatch, alst):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = alst("verify someone/nothing", 2)
    why = "alst: model='someone/nothing' is not a folder here and could not be downloaded from the hub"
    assert told.startswith(why)
    assert "without a network, name a folder that holds the model" in told


def test_the_answer_of_several_ranks():
    """The worst of each case, and the module that is first on any rank; a crash of one rank is no proof."""
    wrong = {"sp": 2, "sample": "whole", "result": "wrong", "loss": 1.0, "gradient": 1.0, "reason": "gradient of x"}
    late, early = ({"module": m, "kind": "K", "error": 1.0, "order": ord(m)} for m in "ba")
    crash = {**wrong, "result": "crash", "reason": "RuntimeError: no"}

    def together(**other):
        ranks = [{**wrong, "first": late}, {**wrong, **other}]
        made = command.together([{"cases": [rank]} for rank in ranks])
        return made["cases"][0], command.verdict(made)

    case, verdict = together(gradient=2.0, first=early)
    assert (case["gradient"], case["first"]["module"]) == (2.0, "a")
    assert verdict == ("differs", "1 of 1 cases; first in a (K): its output is off by 1.0e+00 of its norm")
    assert together(**crash)[1] == ("fails", "sp 2, whole: RuntimeError: no")


# Small configs


def test_the_first_layers_keep_their_order():
    config = transformers.Gemma3TextConfig(num_hidden_layers=26, sliding_window=4096)
    made = small.shrunk(config, small.first_of_each(small.kinds_in_lists(config)))
    assert made.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (made.num_hidden_layers, made.sliding_window) == (6, small.WINDOW)
    routed = transformers.DeepseekV3Config(first_k_dense_replace=3)
    with torch.device("meta"):
        kinds = kinds_of_layers(decoder_layers(transformers.AutoModelForCausalLM.from_config(routed)))
    assert (small.first_of_each(kinds), len({*kinds})) == (4, 2)


KEPT = """
Gemma2 -> {num_attention_heads: 12, num_key_value_heads: 3, tie_word_embeddings: true} \
-> {attn_logit_softcapping: 2.0, final_logit_softcapping: 5.0}
Qwen3Moe -> {num_experts_per_tok: 1, norm_topk_prob: true} -> {num_experts: 4}
Mistral  -> {sliding_window: null}                         -> {}
"""


@pytest.mark.parametrize("kind, fields, changed", values_of(KEPT))
def test_what_a_small_config_keeps(kind, fields, changed):
    made = small.shrunk(getattr(transformers, f"{kind}Config")(**fields))
    assert {name: getattr(made, name) for name in fields | changed} == fields | changed


@pytest.mark.parametrize("part, pairs", [(1.0, 4), (0.75, 3), (0.4, 2)])
def test_rope_that_depends_on_the_length_changes_within_a_sample(part, pairs):
    factors = [1.0 + i for i in range(int(64 * part))]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors,
            "partial_rotary_factor": part, "original_max_position_embeddings": 4096}  # fmt: skip
    config = transformers.Phi3Config(hidden_size=4096, num_attention_heads=32, rope_parameters=rope)
    made = small.shrunk(config).rope_parameters
    assert (len(made["long_factor"]), made["original_max_position_embeddings"]) == (pairs, small.LONGEST)
    assert max(verify.sample(33, True)["document_lengths"][0]) == small.LONGEST < 33


def test_a_judge_in_fp64_stays_there_whatever_a_model_calls():
    """A router that calls `type` made fp32 of it, and a right model was called wrong."""
    x = torch.ones(3, dtype=torch.float64)
    with verify.in_full():
        made = [x.float(), x.to(torch.float32), x.type(torch.float32), x.type_as(x), torch.sum(x, dtype=torch.float32)]
        assert {(t.dtype, t.type()) for t in made} == {(torch.float64, "torch.DoubleTensor")}
    assert x.type(torch.float32).dtype == torch.float32


def test_a_gradient_that_is_no_number_is_wrong():
    """And not only where it comes first: `max` passes over nan."""
    right = {"a": torch.ones(2), "b": torch.ones(2)}
    for name in right:
        assert worst_error({**right, name: torch.full((2,), torch.nan)}, right) == (float("inf"), name)
