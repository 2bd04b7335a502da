"""Attaching to transformers models: exact while attached, nothing left afterwards, clear refusals, no work in vain."""

import contextlib
import copy
import functools
import pickle
import sys

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import yaml
import zoo
from cases import (
    ALL_OFF,
    ALL_ON,
    VOCAB,
    attach,
    batch,
    batch_of,
    check_refused,
    check_step,
    decoder_layers,
    gradients,
    make_model,
    own_step,
    plain_step,
    sample_of,
    slopes,
    step,
    train,
    with_lora,
    worst_error,
)
from operators import counted, error_of
from pictures import small_gemma
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AutoModelForCausalLM
from zoo import small

import alstlib
from alstlib.base.mesh import SPContext
from alstlib.data.shard import shard_batch
from alstlib.hf import attach as attaching
from alstlib.kernels.backends import BACKENDS
from alstlib.tiled.compute import TiledMLP
from alstlib.tiled.logits import LogitTransform

LENGTH = 20
STREAMED = {**ALL_ON, "chunk": 5}
BATCH = batch_of(LENGTH)
IDS = BATCH["input_ids"]
SAMPLE = sample_of(LENGTH)


def anatomy(model):
    """Every module, and what is in each: identities of children, weights, hooks and all other attributes; the config,
    and the attentions that are registered."""
    found = {"registered": set(AttentionInterface._global_mapping)}
    if config := getattr(model, "config", None):
        found |= {"config": config.to_dict(), "attention": config._attn_implementation}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = (id(module), type(module), module.training)
        for key, value in module.__dict__.items():
            inside = [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else id(value)
            found[f"{name}.__dict__[{key}]"] = inside
    return found


# ----- attach and detach


@pytest.mark.parametrize("options", [{}, ALL_ON, ALL_OFF, STREAMED], ids=["default", "all on", "all off", "chunk"])
@pytest.mark.parametrize("kind", ["gqa", "gemma2", "gpt2"])
def test_detach_restores_the_model_exactly(kind, options):
    """Outputs bit for bit; every module, attribute, hook and registration as before, and what a user had set."""
    model = make_model(kind)
    model.generate = lambda *args: "mine"
    for layer, leaf in zip(decoder_layers(model), (True, False)):
        layer._z3_leaf = leaf
    before, out = anatomy(model), model(IDS).logits
    handle = attach(model, **options)
    assert anatomy(model)["registered"] != before["registered"]
    step(model, BATCH)
    model.zero_grad()
    assert handle.detach() is model
    assert anatomy(model) == before
    assert torch.equal(model(IDS).logits, out)
    assert handle.store.nbytes == 0
    handle.detach()
    assert anatomy(model) == before


@pytest.mark.parametrize("chunk, kernel, notes", [(16_384, "cudnn", 0), (16_000, "cudnn", 1), (16_000, "flash", 0)])
def test_a_chunk_that_cudnn_leaves_to_a_slower_kernel_is_said(monkeypatch, chunk, kernel, notes):
    monkeypatch.setattr(sys.modules["alstlib.hf.support"], "choose_backend", lambda *_: BACKENDS[kernel])
    with attach(make_model(), chunk=chunk) as handle:
        assert [note[:14] for note in handle.notes] == ["chunk=16,000: "] * notes


def test_an_error_leaves_nothing(monkeypatch):
    """In the context, and late in `apply`."""
    model = make_model()
    before = anatomy(model)
    with pytest.raises(KeyError), attach(model):
        raise KeyError
    assert anatomy(model) == before
    monkeypatch.setattr(attaching, "_attach_calls", lambda *_: {}["late"])
    with pytest.raises(KeyError, match="late"):
        attach(model)
    assert anatomy(model) == before


def test_apply_twice_is_refused():
    model = make_model()
    with attach(model):
        check_refused(r"attached already; call detach\(\) of its handle", attach, model)


@pytest.mark.parametrize("later", [False, True], ids=["before", "while attached"])
def test_gradient_checkpointing_is_taken_over_and_given_back(later):
    """Also where it is switched on later, as transformers' Trainer does: ours takes its place."""
    model = make_model()
    want = plain_step(model, BATCH)
    if not later:
        model.gradient_checkpointing_enable()
    before = anatomy(model)
    with attach(model, save_attention=True) as handle:
        if later:
            model.gradient_checkpointing_enable()
        check_step(step(model, BATCH), want)
        assert handle.attention.forward_calls == 2
    assert model.is_gradient_checkpointing
    model.zero_grad()
    assert later or anatomy(model) == before


def test_gradient_checkpointing_without_ours_is_refused():
    model = make_model()
    message = r"gradient_checkpointing_enable\(\) does not work with checkpoint=False.*checkpoint=True"
    with attach(model, checkpoint=False):
        model.gradient_checkpointing_enable()
        check_refused(message, step, model, BATCH)
        model.eval()(IDS)
    check_refused(message, attach, model.train(), checkpoint=False)


@pytest.mark.parametrize("shared", [False, True], ids=["two kinds", "one config"])
def test_two_models_in_one_process(shared):
    """Interleaved, with different options; one is detached between the other's forward and backward."""
    models = [make_model(), make_model("gpt2", seed=1)]
    if shared:
        models[1] = type(models[0])(models[0].config)
    wants = [plain_step(m, BATCH) for m in models]
    with attach(models[0], **ALL_ON):
        check_step(own_step(models[1], input_ids=IDS, labels=IDS), wants[1])
        models[1].zero_grad()
        second = attach(models[1], tiles={"mlp": 3})
        losses = [alstlib.causal_lm_loss(m, BATCH).loss for m in models]
        losses[1].backward()
        second.detach()
        losses[0].backward()
        for model, loss, want in zip(models, losses, wants):
            check_step((loss.item(), gradients(model)), want)
        check_step(step(models[0], BATCH), wants[0])


AFTER = yaml.safe_load("""
tiles: &tiles {tiles: {mlp: 5, loss: 7, norm: 6}}
every: &every {<<: *tiles, offload: true, save_attention: true}
options:
  default: [{}, true]
  segments: [{<<: *every, host_memory: 6000, save_attention: auto}, true]
  chunk, all on: [{<<: *every, chunk: 5}, true]
  tiles: [{<<: *tiles, checkpoint: false}, false]
  all off: [{tiles: false, checkpoint: false}, false]
""")["options"]
"""Options, and whether their backward needs the attachment."""


@pytest.mark.parametrize("options, recomputes", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("kind", ["gqa", "gpt2"])
def test_backward_after_detach_is_right_or_refused(kind, options, recomputes):
    """What is recomputed would run the model's own attention, without documents; also when it is attached again."""
    model, joined = make_model(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 3}), batch(20, (8, 12))
    for attached_again in (False, True):
        with attach(model, **options):
            _, want = step(model, joined)
            model.zero_grad()
            loss = alstlib.causal_lm_loss(model, joined).loss
        with attach(model) if attached_again else contextlib.nullcontext():
            if recomputes:
                check_refused(r"made before detach\(\): call backward before detach\(\)", loss.backward)
            else:
                loss.backward()
                assert worst_error(gradients(model), want)[0] < 1e-6


# ----- names and files


def saved(model, folder):
    """The configs that a model saves."""
    model.save_pretrained(folder)
    return [file.read_text() for file in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("kind, tied", [("gqa", False), ("gqa", True), ("gpt2", True), ("gemma2", True)])
def test_names_and_saved_form_stay(tmp_path, kind, tied):
    """Weights keep names and storage; the config is the model's own, and copies of it build plain models; what the
    attached model, or its body, saves is the model."""
    model = make_model(kind, tie_word_embeddings=tied).eval()
    own, want, configs = model.config, model(IDS).logits, saved(model, tmp_path / "before")
    attention = own._attn_implementation

    def weights():
        return {n: t.data_ptr() for n, t in model.state_dict().items()}

    before = weights()
    with attach(model):
        assert weights() == before
        assert model.config is own
        for made_from in (own, copy.deepcopy(own), copy.deepcopy(model.base_model.config)):
            fresh = AutoModelForCausalLM.from_config(made_from)
            assert (type(fresh.config), fresh.config._attn_implementation) == (type(own), attention)
            fresh(IDS)
        assert saved(model, tmp_path / "while") == configs
        assert "alst" not in str(saved(model.base_model, tmp_path / "body"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "while")
        model.load_state_dict(loaded.state_dict())
    assert torch.equal(loaded(IDS).logits, want)


def test_a_composite_config_is_saved_as_it_was(tmp_path):
    model = small_gemma()
    configs = saved(model, tmp_path / "before")
    with attach(model):
        assert saved(model, tmp_path / "while") == configs


# ----- what is sent


def exchanges(rank, world, save_attention, per_layer):
    model, data = make_model(), shard_batch(SAMPLE, world, rank)
    with attach(model, SPContext.create(world), **{**ALL_ON, "save_attention": save_attention}):
        train(model, data)  # asks for host memory
        with counted(dist, "all_to_all_single", "all_to_all", "all_gather", "all_reduce") as count:
            train(model, data)
    assert count == {"all_to_all_single": 2 * per_layer, "all_reduce": 3}


@pytest.mark.parametrize("save_attention, per_layer", [(True, 5), (False, 6)])
def test_few_exchanges(ranks2, save_attention, per_layer):
    """Per layer and step 5 exchanges with saved outputs and 6 without (the reference: 12, and 2 gathers of positions);
    three reductions of numbers: whether all ranks make the same call, what all ranks' hosts have room for (samples
    differ from step to step, so that both are agreed in each), and the loss. Their bytes, in chunks of rows too, are in
    tests/referee/test_peers.py."""
    ranks2(exchanges, save_attention, per_layer)


# ----- dropout


DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}


def test_dropout_is_that_of_plain_transformers():
    """GPT-2 with its default dropout in embeddings, residuals and MLPs: untiled, the same masks as plain, in forward
    and in the recompute."""
    model = make_model("gpt2", **DROPOUT)
    want, other = (plain_step(model, BATCH, seed) for seed in (7, 8))
    assert other[0] != want[0]
    for options in (ALL_OFF, {**ALL_OFF, "checkpoint": True}, {**ALL_OFF, "checkpoint": True, "save_attention": True}):
        with attach(model, **options):
            check_step(step(model, BATCH, seed=7), want)


DRAWING = yaml.safe_load("""
- [{checkpoint: false}, null]
- [{save_attention: true}, null]
- [{chunk: 6}, null]
- [{chunk: 6, tiles: {mlp: 4, loss: true, norm: true}}, null]
- [{}, 6]
# the host has room for the input of one layer in two
- [{offload: sync, save_attention: false, host_memory: 5120}, null]
""")
"""Options, and the length of a block."""


@pytest.mark.parametrize("options, block", DRAWING, ids=str)
def test_gradient_with_dropout_is_the_derivative(options, block):
    """With a fixed seed the loss is a function of the weights: its gradient against a central difference, in fp64."""
    model = make_model("gpt2", dtype=torch.float64, **DROPOUT)
    with attach(model, **{"tiles": {"mlp": 6, "loss": 6, "norm": True}, **options}):
        slope, numerical = slopes(model, BATCH, block)
    assert slope == pytest.approx(numerical, rel=1e-5)


# ----- logits


def test_logits_that_are_not_kept_say_so():
    """When they are used; engines, libraries and copies may handle the output as any other."""
    with attach(make_model()) as handle:
        out = handle.model(**BATCH)
    says = r"keeps none\. Use out.loss, .*label_smoothing.* or alstlib.token_logps"
    for use in ("x.shape", "x[0]", "-x", "len(x)", "np.asarray(x)", "nn.functional.cross_entropy(x, IDS)"):
        check_refused(says, eval, use, {"np": np, "nn": nn, "IDS": IDS, "x": out.logits})
    assert out[0] is out["loss"] is out.loss
    assert tree_map(lambda part: isinstance(part, Tensor), out) == {"loss": True, "logits": False}
    for copied in (copy.deepcopy(out.logits), pickle.loads(pickle.dumps(out.logits))):
        assert type(copied) is type(out.logits)


# ----- other models


def test_a_scale_that_the_body_holds():
    """Falcon-H1 multiplies its logits by a number of its body, which made its loss untiled."""
    for model, scale in (
        (zoo.build_hybrid("falcon_h1", lm_head_multiplier=0.5), 0.5),
        (small("CohereConfig", logit_scale=3.0), 3.0),
    ):
        with attach(model) as handle:
            assert handle.head.transform == LogitTransform(scale=scale)


def test_the_mlp_of_a_hybrid_without_experts_is_tiled():
    """Granite 4 calls it as what stands beside experts in other sizes of it, and it was left as long as the slice."""
    with attach(zoo.build_hybrid("granitemoehybrid"), **ALL_ON) as handle:
        assert [type(m) for m in handle.model.modules() if isinstance(m, TiledMLP)] == [TiledMLP, TiledMLP]
        assert handle.facts.attending == [1]


# ----- LoRA


lora = functools.partial(with_lora, targets=["q_proj", "gate_proj", "down_proj"])


@pytest.mark.parametrize(
    "first, more",
    [(True, {}), (True, {"targets": ["q_proj", "lm_head"]}), (False, {}), (False, {"modules_to_save": ["lm_head"]})],
)
def test_lora(first, more):
    """Adapters inside tiles and under the tiled head train, and so does the copy that PEFT makes of a head; the loss
    goes through the PEFT model."""
    want, model = plain_step(lora(make_model(), **more), BATCH), make_model()
    wrapped = lora(model, **more) if first else None
    with attach(model, **ALL_ON):
        wrapped = wrapped or lora(model, **more)
        check_step(step(wrapped, BATCH), want)
    assert all("lora" in name or "modules_to_save" in name for name in want[1])
    assert torch.equal(wrapped(IDS).logits, lora(make_model(), **more)(IDS).logits)


# ----- refusals


def mixing(module):
    model = make_model()
    model.model.layers[1].mlp.mixer = module
    return model


def without_its_window():
    model = zoo.build("gemma3")
    model.model.layers[0].self_attn.sliding_window = None
    return model


REFUSED = [
    (lambda: lora(make_model()), r"that nothing wraps yet, but got PeftModel.*; give model.get_base_model\(\)"),
    (lambda: make_model().model, "LlamaModel is not a decoder-only causal language model with a head"),
    (lambda: nn.Linear(3, 3), "needs a transformers model that nothing wraps yet, but got Linear"),
    (
        lambda: mixing(nn.Conv1d(32, 32, 4, groups=32)),
        r"layer 1 of LlamaForCausalLM .*: mlp.mixer \(Conv1d\) mixes tokens .* sharded sequence",
    ),
    (
        lambda: mixing(type("Mamba2Mixer", (nn.Module,), {})()),
        r"mlp.mixer \(Mamba2Mixer\) mixes tokens in another way than attention",
    ),
    (lambda: mixing(nn.BatchNorm1d(32)), r"mlp.mixer \(BatchNorm1d\) mixes tokens in another way"),
    (without_its_window, "layer 0 .* may slide by config.sliding_window=7, but"),
]
OF_CONFIGS = yaml.safe_load(r"""
BloomConfig: [{n_layer: 1, n_head: 4},
  "BloomForCausalLM computes attention by itself, not through transformers' AttentionInterface"]
RecurrentGemmaConfig: [{}, RecurrentGemmaForCausalLM mixes tokens by linear_attention]
OpenAIGPTConfig: [{n_layer: 1, n_head: 4}, has no decoder layers that transformers can checkpoint]
# what is seen of them by a dry run
DogeConfig: [{}, 'layer 0 \(DogeAttention\) makes an attention mask by itself']
OlmoeConfig: [{sliding_window: 7, num_experts: 4, num_experts_per_tok: 2},
  'layer 0 \(OlmoeAttention\) gives its attention the window 7, but .* set config.sliding_window to None']
DiffLlamaConfig: [{}, 'layer 0 \(DiffLlamaDecoderLayer\) calls attention more than once, so it can', {chunk: 4}]
Gemma2Config: [{attn_logit_softcapping: 50.0},
  "layer 0 of Gemma2ForCausalLM \\(Gemma2DecoderLayer\\): attention='cpu' does not compute a soft cap",
  {attention: cpu}]
BartConfig: [{d_model: 32, decoder_layers: 2, decoder_attention_heads: 4, decoder_ffn_dim: 48, is_decoder: true,
  is_encoder_decoder: false}, BartForCausalLM numbers its tokens by itself]
""")
REFUSED += [(functools.partial(small, kind, **fields), *says) for kind, (fields, *says) in OF_CONFIGS.items()]


@pytest.mark.parametrize("make, message, options", [(*one, {})[:3] for one in REFUSED])
def test_models_that_cannot_be_exact_are_refused(make, message, options):
    """By name and before anything is changed."""
    model = make()
    before = anatomy(model)
    check_refused(message, attach, model, **options)
    assert anatomy(model) == before


@pytest.mark.parametrize("first", ["peft", "apply"])
def test_activated_lora_is_refused(first):
    """A layer of it counts from the end of the tokens that it is called with, which PEFT tells it in forward only."""
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    model = make_model()
    if first == "peft":
        peft.get_peft_model(model, config)
        check_refused(r"activated LoRA \(alora_invocation_tokens\)", attach, model)
        return
    with attach(model):
        wrapped = peft.get_peft_model(model, config)
        check_refused(r"activated LoRA \(alora_invocation_tokens\)", alstlib.causal_lm_loss, wrapped, BATCH)


def test_a_part_of_the_model_cannot_be_called_alone():
    """Documents and labels go with the model's own call; one that failed leaves nothing behind."""
    model = make_model()
    with attach(model):
        for _ in range(2):
            check_refused(r"call the model that apply\(\) was given, not a part of it", model.model, input_ids=IDS)
            with pytest.raises(IndexError):
                model(input_ids=torch.tensor([[VOCAB + 3]]))


def test_what_a_call_asks_of_attention():
    """What a config does not say is seen at the call, in what it is given or in what its layers hold."""
    with attach(make_model()) as handle:
        said = functools.partial(error_of, handle.model, IDS)
        attention = handle.model.model.layers[1].self_attn
        assert "layer 0 (LlamaAttention) adds a position_bias to its scores" in said(position_bias=torch.zeros(1))
        assert "layer 0 (LlamaAttention) is not causal" in said(is_causal=False)
        assert said(output_router_logits=True) == "accepted"  # a model without routers has no use for it
        attention.attention_dropout = 0.5
        assert "layer 1 (LlamaAttention) has attention dropout 0.5" in said()
        attention.attention_dropout, attention.is_causal = 0.0, False
        assert "layer 1 (LlamaAttention) is not causal" in said()
