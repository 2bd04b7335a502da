"""Attaching to transformers models: exact while attached, nothing left afterwards, clear refusals, no work in vain."""

import contextlib
import copy
import functools
import operator
import pickle
import sys

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
import zoo
from cases import (
    ALL_OFF,
    ALL_ON,
    VOCAB,
    attach,
    batch,
    batch_of,
    check_step,
    gradients,
    make_model,
    passes,
    plain_step,
    sample_of,
    slopes,
    step,
    worst_error,
)
from operators import counted
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AutoModelForCausalLM
from zoo import small

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.hf import attach as attaching
from alstlib.hf.logits import find_transform
from alstlib.mesh import SPContext
from alstlib.tiled.compute import TiledMLP
from alstlib.tiled.logits import LogitTransform

LENGTH = 20
STREAMED = {**ALL_ON, "chunk": 5}
BATCH = batch_of(LENGTH)
IDS = BATCH["input_ids"]
SAMPLE = sample_of(LENGTH)


@pytest.fixture(autouse=True)
def _no_registration_left():
    before = set(AttentionInterface._global_mapping)
    yield
    assert set(AttentionInterface._global_mapping) == before


def anatomy(model):
    """Every module, and what is in each: identities of children, weights, hooks and all other attributes."""
    found = {"config": model.config.to_dict(), "attention": model.config._attn_implementation}
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
    """Outputs bit for bit; every module, attribute, hook and registration as before."""
    model = make_model(kind)
    before, out = anatomy(model), model(IDS).logits
    names = set(AttentionInterface._global_mapping)
    handle = attach(model, **options)
    assert anatomy(model) != before
    assert set(AttentionInterface._global_mapping) != names
    step(model, BATCH)
    model.zero_grad()
    assert handle.detach() is model
    assert anatomy(model) == before
    assert set(AttentionInterface._global_mapping) == names
    assert torch.equal(model(IDS).logits, out)
    assert handle.store.nbytes == 0
    handle.detach()
    assert anatomy(model) == before


@pytest.mark.parametrize(("chunk", "notes"), [(16_384, 0), (16_000, 1)])
def test_a_chunk_that_cudnn_leaves_to_a_slower_kernel_is_said(monkeypatch, chunk, notes):
    monkeypatch.setattr(sys.modules["alstlib.hf.attach"], "own_device", lambda: torch.device("cuda"))
    with attach(make_model("gqa"), chunk=chunk) as handle:
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
    with attach(model), pytest.raises(ValueError, match=r"attached already; call detach\(\) of its handle"):
        attach(model)


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
        with pytest.raises(ValueError, match=message):
            step(model, BATCH)
        model.eval()(IDS)
    with pytest.raises(ValueError, match=message):
        attach(model.train(), checkpoint=False)


@pytest.mark.parametrize("shared", [False, True], ids=["two kinds", "one config"])
def test_two_models_in_one_process(shared):
    """Interleaved, with different options; one is detached between the other's forward and backward."""
    models = [make_model("gqa"), make_model("gpt2", seed=1)]
    if shared:
        models[1] = type(models[0])(models[0].config)
    wants = [plain_step(m, BATCH) for m in models]
    with attach(models[0], **ALL_ON):
        assert models[1](input_ids=IDS, labels=IDS).loss.item() == pytest.approx(wants[1][0], rel=1e-6)
        second = attach(models[1], tiles={"mlp": 3, "loss": True, "norm": True})
        losses = [alstlib.causal_lm_loss(m, BATCH).loss for m in models]
        losses[1].backward()
        second.detach()
        losses[0].backward()
        for model, loss, want in zip(models, losses, wants):
            check_step((loss.item(), gradients(model)), want)
        check_step(step(models[0], BATCH), wants[0])


AFTER = {
    "default": ({}, True),
    "segments": ({**ALL_ON, "host_memory": 6000, "save_attention": "auto"}, True),
    "chunk, all on": (STREAMED, True),
    "tiles": ({"tiles": {"mlp": 5, "loss": 7, "norm": 6}, "checkpoint": False}, False),
    "all off": (ALL_OFF, False),
}
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
                with pytest.raises(ValueError, match=r"made before detach\(\): call backward before detach\(\)"):
                    loss.backward()
            else:
                loss.backward()
                assert worst_error(gradients(model), want)[0] < 1e-6


# ----- names and files


@pytest.mark.parametrize("kind, tied", [("gqa", False), ("gqa", True), ("gpt2", True), ("gemma2", True)])
def test_names_and_saved_form_stay(tmp_path, kind, tied):
    """Weights keep names and storage; the config is the model's own, and copies of it build plain models; what the
    attached model, or its body, saves is the model."""
    model, other = (make_model(kind, seed=seed, tie_word_embeddings=tied).eval() for seed in (0, 3))
    own, want = model.config, model(IDS).logits

    def form():
        weights = {n: t.data_ptr() for n, t in model.state_dict().items()}
        return {"weights": weights, "attention": own._attn_implementation, "config": own.to_dict()}

    before = form()
    with attach(model):
        assert form() == before
        assert model.config is own
        for made_from in (own, copy.deepcopy(own), copy.deepcopy(model.base_model.config)):
            fresh = AutoModelForCausalLM.from_config(made_from)
            assert (type(fresh.config), fresh.config._attn_implementation) == (type(own), before["attention"])
            fresh(IDS)
        for part, folder in ((model, tmp_path / "whole"), (model.base_model, tmp_path / "body")):
            part.save_pretrained(folder)
            assert "alst" not in "".join(f.read_text() for f in folder.glob("*.json"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        model.load_state_dict(other.state_dict())
    assert torch.equal(loaded(IDS).logits, want)
    assert torch.equal(model(IDS).logits, other(IDS).logits)
    model.save_pretrained(tmp_path / "after")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("whole", "after")]
    assert texts[0] == texts[1]
    assert "attn_implementation" not in texts[0]


def test_a_composite_config_is_saved_as_it_was(tmp_path):
    text = {n: v for n, v in zoo.COMMON.items() if not n.endswith("token_id")} | {"head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    made = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(made)
    model.save_pretrained(tmp_path / "before")
    with attach(model):
        model.save_pretrained(tmp_path / "while")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("before", "while")]
    assert texts[0] == texts[1]


# ----- how often things run


def counted_step(monkeypatch, kind, options):
    """Tokens through each kind of module in a second step (the first learns the layer), per token and layer."""
    model = make_model(kind)
    found = passes(monkeypatch, model)
    with attach(model, **options) as handle:
        step(model, BATCH)
        once, before = copy.deepcopy(found), handle.attention.forward_calls
        step(model, BATCH)
        count = {name: sum(tokens) - sum(once[name]) for name, tokens in found.items()}
        assert (handle.attention.forward_calls - before) * LENGTH == count["attention"]
    return {name: tokens / LENGTH / 2 for name, tokens in count.items()}


CONTRACT = [
    *((kind, {**tiles, "save_attention": True}, 1, 2) for kind in ("gqa", "qwen3", "gpt2", "gemma2")
      for tiles in ({"tiles": {"mlp": 7, "loss": True, "norm": True}}, {"tiles": {"loss": True}}, ALL_ON)),
    *(("gqa", {"tiles": {"mlp": tile, "loss": True, "norm": True}, "save_attention": False}, 2, 2)
      for tile in (7, False)),
    ("gqa", ALL_OFF, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("kind, options, attention, others", CONTRACT, ids=str)
def test_recompute_contract(monkeypatch, kind, options, attention, others):
    """With the outputs saved: attention forward once, MLP forward twice, projections twice; without, attention twice;
    without checkpoints, all once."""
    want = {"attention": attention, "mlp": others, "query": others}
    assert counted_step(monkeypatch, kind, options) == want


def exchanges(rank, world, save_attention, **more):
    """Loss, collectives and bytes of a training step on this rank."""
    ctx, model, data = SPContext.create(world), make_model("gqa"), shard_batch(SAMPLE, world, rank)
    with attach(model, ctx, **{**ALL_ON, "save_attention": save_attention}, **more) as handle:
        alstlib.causal_lm_loss(model, data).loss.backward()  # asks for host memory
        before = handle.wire_bytes
        with counted(dist, "all_to_all_single", "all_to_all", "all_gather", "all_reduce") as count:
            out = alstlib.causal_lm_loss(model, data)
            out.loss.backward()
    return out.mean.item(), count, handle.wire_bytes - before


@pytest.mark.parametrize("save_attention, per_layer", [(True, 5), (False, 6)])
def test_few_exchanges(ranks2, save_attention, per_layer):
    """Per layer and step 5 exchanges with saved outputs and 6 without (the reference: 12, and 2 gathers of positions);
    three reductions of numbers: whether all ranks make the same call, what all ranks' hosts have room for (samples
    differ from step to step, so that both are agreed in each), and the loss. In chunks of rows a layer sends the same
    bytes."""
    want, _ = plain_step(make_model("gqa"), SAMPLE)
    in_chunks = ranks2(functools.partial(exchanges, chunk=4), save_attention)
    for (mean, count, sent), (_, _, same) in zip(ranks2(exchanges, save_attention), in_chunks):
        assert mean == pytest.approx(want, rel=1e-6)
        assert count == {"all_to_all_single": 2 * per_layer, "all_reduce": 3}
        assert sent == same


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


@pytest.mark.parametrize(
    "options, block",
    [({"checkpoint": False}, None), ({"save_attention": True}, None), ({"chunk": 6}, None),
     ({"chunk": 6, "tiles": {"mlp": 4, "loss": True, "norm": True}}, None), ({}, 6)],
    ids=str,
)  # fmt: skip
def test_gradient_with_dropout_is_the_derivative(options, block):
    """With a fixed seed the loss is a function of the weights: its gradient against a central difference, in fp64."""
    model = make_model("gpt2", dtype=torch.float64, **DROPOUT)
    with attach(model, **{"tiles": {"mlp": 6, "loss": 6, "norm": True}, **options}):
        slope, numerical = slopes(model, BATCH, block)
    assert slope == pytest.approx(numerical, rel=1e-5)


# ----- evaluation


@pytest.mark.parametrize("kind", ["gqa", "gemma2", "gpt2"])
@pytest.mark.parametrize("options", [ALL_OFF, ALL_ON, STREAMED], ids=["all off", "all on", "chunk"])
def test_evaluation_is_plain(kind, options):
    """Without gradients: Hugging Face's loss from its own labels, and the logits when there are no labels."""
    model = make_model(kind, **(DROPOUT if kind == "gpt2" else {})).eval()
    with torch.no_grad():
        want = model(IDS, labels=IDS)
        with attach(model, **options) as handle:
            got = model(IDS, labels=IDS)
            logits = model(IDS).logits
            assert handle.store.nbytes == handle.store.unused
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    assert torch.allclose(logits, want.logits, rtol=1e-5, atol=1e-5)
    assert isinstance(got.logits, torch.Tensor) != bool(options["tiles"])
    assert not got.loss.requires_grad


def test_logits_that_are_not_kept_say_so():
    """When they are used; engines, libraries and copies may handle the output as any other."""
    with attach(make_model()) as handle:
        out = handle.model(**BATCH)
    uses = [operator.methodcaller("float"), operator.attrgetter("shape"), operator.itemgetter(0), operator.neg, len,
            np.asarray, lambda logits: nn.functional.cross_entropy(logits, IDS)]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match=r"keeps none\. Use out.loss, .*label_smoothing.* or alstlib.token_logps"):
            use(out.logits)
    assert out[0] is out["loss"] is out.loss
    assert tree_map(lambda part: isinstance(part, Tensor), out) == {"loss": True, "logits": False}
    for copied in (copy.deepcopy(out.logits), pickle.loads(pickle.dumps(out.logits))):
        assert type(copied) is type(out.logits)


# ----- other models


def test_a_scale_that_the_body_holds():
    """Falcon-H1 multiplies its logits by a number of its body, which made its loss untiled."""
    name, fields = zoo.HYBRIDS["falcon_h1"]
    assert find_transform(small(name, **fields, lm_head_multiplier=0.5)) == LogitTransform(scale=0.5)
    with attach(small("CohereConfig", logit_scale=3.0)) as handle:
        assert find_transform(handle.model) == LogitTransform(scale=3.0)
        assert handle.head is not None


def test_the_mlp_of_a_hybrid_without_experts_is_tiled():
    """Granite 4 calls it as what stands beside experts in other sizes of it, and it was left as long as the slice."""
    name, fields = zoo.HYBRIDS["granitemoehybrid"]
    with attach(small(name, **fields), **ALL_ON) as handle:
        assert [type(m) for m in handle.model.modules() if isinstance(m, TiledMLP)] == [TiledMLP, TiledMLP]
        assert handle.facts.attending == [1]


# ----- LoRA


def lora(model, head=False):
    torch.manual_seed(3)
    targets = ["q_proj", "gate_proj", "down_proj", *(["lm_head"] if head else [])]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@pytest.mark.parametrize("order", ["lora first", "lora and head first", "lora after"])
def test_lora(order):
    """Adapters inside tiles and under the tiled head train; the loss goes through the PEFT model."""
    head = order == "lora and head first"
    want = plain_step(lora(make_model(), head), BATCH)
    model = make_model()
    wrapped = lora(model, head) if order != "lora after" else None
    with attach(model, **ALL_ON):
        wrapped = wrapped or lora(model)
        check_step(step(wrapped, BATCH), want)
    assert all("lora" in name for name in want[1])
    assert torch.equal(wrapped(IDS).logits, lora(make_model(), head)(IDS).logits)


def test_a_peft_model_itself_is_refused():
    wrapped = lora(make_model())
    with pytest.raises(ValueError, match=r"that nothing wraps yet, but got PeftModel.*; give model.get_base_model\(\)"):
        attach(wrapped)
    attach(wrapped.get_base_model()).detach()


# ----- refusals


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, d_model=32, num_layers=1))


def mixing(module):
    model = make_model()
    model.model.layers[1].mlp.mixer = module
    return model


REFUSED = {
    "encoder-decoder": (t5, "T5ForConditionalGeneration is not a decoder-only causal language model"),
    "no head": (lambda: make_model().model, "LlamaModel is not a decoder-only causal language model with a head"),
    "not a model": (lambda: nn.Linear(3, 3), "needs a transformers model that nothing wraps yet, but got Linear"),
    "wrapped": (lambda: nn.Sequential(make_model()), "that nothing wraps yet, but got Sequential"),
    "own attention": (
        lambda: small("BloomConfig", n_layer=1, n_head=4),
        "BloomForCausalLM computes attention by itself, not through transformers' AttentionInterface",
    ),
    "another recurrence": (
        lambda: small("RwkvConfig"), r"layer 0 of RwkvForCausalLM \(RwkvBlock\).* mixes tokens in another way",
    ),
    "recurrent layers": (
        lambda: small("RecurrentGemmaConfig"),
        r"layer 0 of RecurrentGemmaForCausalLM \(RecurrentGemmaDecoderLayer\) mixes tokens in another way",
    ),
    "chunked attention": (
        lambda: small("Llama4TextConfig", head_dim=8, num_local_experts=2, intermediate_size_mlp=48),
        "mixes tokens by chunked_attention",
    ),
    "gpt2's attention dropout": (
        lambda: make_model("gpt2", attn_pdrop=0.1),
        "config.attn_pdrop=0.1 is not supported in attention; set it to 0",
    ),
    "llama's attention dropout": (lambda: make_model(attention_dropout=0.2), "config.attention_dropout=0.2"),
    "cross-attention": (
        lambda: make_model("gpt2", add_cross_attention=True),
        r"layer 0 of GPT2LMHeadModel \(GPT2Block\) has cross-attention",
    ),
    "convolution beside attention": (
        lambda: mixing(nn.Conv1d(32, 32, 4, groups=32)),
        r"layer 1 of LlamaForCausalLM .*: mlp.mixer \(Conv1d\) is a convolution over 4 tokens, .* sharded sequence",
    ),
    "recurrence beside attention": (
        lambda: mixing(nn.GRU(32, 32)), r"layer 1 of .*: mlp.mixer \(GRU\) is recurrent",
    ),
    "state space beside attention": (
        lambda: mixing(type("Mamba2Mixer", (nn.Module,), {})()),
        r"mlp.mixer \(Mamba2Mixer\) mixes tokens in another way than attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_models_that_cannot_be_exact_are_refused(make, message):
    """By name and before anything is changed."""
    model = make()
    modules = [(n, id(m), len(m.__dict__)) for n, m in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        attach(model)
    assert [(n, id(m), len(m.__dict__)) for n, m in model.named_modules()] == modules


def test_an_attention_that_cannot_be_had_is_refused():
    with pytest.raises(ValueError, match=r"attention='flashy' must be one of 'auto', 'sdpa', .*'eager', or a function"):
        attach(make_model(), attention="flashy")
    model = make_model("gemma2", attn_logit_softcapping=50.0)
    where = r"layer 0 of Gemma2ForCausalLM \(Gemma2DecoderLayer\)"
    with pytest.raises(ValueError, match=f"{where}: attention='cpu' does not compute a soft cap"):
        attach(model, attention="cpu")
    attach(model).detach()


CONTRADICT = [
    ({"offload": "disk"}, "offload='disk' must be True or False, or 'sync'"),
    ({"save_attention": "maybe"}, "save_attention='maybe' must be True, False or 'auto'"),
    (
        {"checkpoint": False, "offload": "sync"},
        "offload='sync' moves checkpoints to the host: it needs checkpoint=True",
    ),
    ({"save_attention": True, "checkpoint": False}, "save_attention=True .* needs checkpoint=True"),
    ({"chunk": 0}, "chunk=0 must be a whole number of at least 1, such as 2048 or 3.7M, or 'auto', or None"),
    ({"chunk": 2.5}, r"chunk=2\.5 must be a whole number"),
    ({"chunk": 64, "checkpoint": False}, "chunk=64 recomputes layers .* needs checkpoint=True"),
    ({"tiles": {"mlp": 0}}, "tiles={'mlp': 0.* must be True, False or a tile of at least 1 token"),
    ({"tiles": {"norm": 2.5}}, "tiles={.*2.5.* must be"),
    ({"checkpoint": "perhaps"}, "checkpoint='perhaps' must be True or False"),
    ({"host_memory": -1}, "host_memory=-1 must be a whole number of at least 1, such as 80GB"),
]


@pytest.mark.parametrize("options, message", CONTRADICT, ids=str)
def test_options_that_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        alstlib.Options(**options)


def test_a_part_of_the_model_cannot_be_called_alone():
    """Documents and labels go with the model's own call; one that failed leaves nothing behind."""
    model = make_model()
    with attach(model):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"call the model that apply\(\) was given, not a part of it"):
                model.model(input_ids=IDS)
            with pytest.raises(IndexError):
                model(input_ids=torch.tensor([[VOCAB + 3]]))


def test_dropout_or_noncausal_attention_in_a_layer_is_refused():
    """What a config does not say is seen at the call."""
    model = make_model()
    with attach(model):
        model.model.layers[1].self_attn.attention_dropout = 0.5
        with pytest.raises(ValueError, match=r"layer 1 \(LlamaAttention\) has attention dropout 0.5"):
            model(IDS)
        model.model.layers[1].self_attn.attention_dropout = 0.0
        model.model.layers[0].self_attn.is_causal = False
        with pytest.raises(ValueError, match=r"layer 0 \(LlamaAttention\) is not causal"):
            model(IDS)
