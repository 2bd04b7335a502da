"""Changes to modules: taken back from them, absent from their copies, gone with them, and careful with others'."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import peft
import pytest
import torch
from cases import VOCAB, make_model, plain_run, worst_error
from torch import Tensor, nn
from transformers import AttentionInterface

import alstlib
from alstlib.hf.edits import Edits
from alstlib.reference import shift

ALL_ON = {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "offload": "async", "save_attention": True}
HOW = {"default": {}, "all on": ALL_ON, "chunk": {**ALL_ON, "chunk": 5}}
IDS = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "position_ids": torch.arange(20)[None], "shift_labels": shift(IDS)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# ----- by themselves


def test_what_others_put_over_a_change_stays() -> None:
    module, edits = nn.Sequential(nn.Linear(2, 2)), Edits()
    edits.set(module, "mine", 1)
    edits.set(module, "other", 1)
    edits.swap(module, "0", nn.Identity())
    module.other, module[0] = 2, nn.Tanh()  # type: ignore[assignment]
    edits.close()
    assert module.other == 2
    assert isinstance(module[0], nn.Tanh)
    assert "mine" not in module.__dict__


def test_a_copy_is_as_the_module_was_and_the_module_stays_changed() -> None:
    module, edits = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Edits()
    module.kept = lambda: "before"  # type: ignore[assignment]
    first, own = module[0], module.register_forward_hook(lambda *_: None)
    edits.set(module, "kept", lambda: "after")
    edits.set(first, "forward", lambda x: x)
    edits.swap(module, "1", nn.Identity())
    edits.hook(module, module.register_forward_pre_hook(lambda *_: None, with_kwargs=True))
    twin = copy.deepcopy(module)
    assert twin.kept() == "before"  # type: ignore[operator]
    assert [type(m) for m in twin] == [nn.Linear, nn.Linear]
    assert twin[0].weight is not first.weight
    assert "forward" not in twin[0].__dict__
    assert "__deepcopy__" not in twin.__dict__
    assert not twin._forward_pre_hooks
    assert not twin._forward_pre_hooks_with_kwargs
    assert [*twin._forward_hooks] == [own.id]
    assert isinstance(module[1], nn.Identity)
    assert module.kept() == "after"  # type: ignore[operator]
    assert len(module._forward_pre_hooks) == 1


# ----- copies of an attached model


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["gqa", "gpt2"])
def test_a_deep_copy_of_an_attached_model_is_plain(kind: str, how: str) -> None:
    """It has gradients of its own, is attached anew, and outlives the original's detach."""
    model = make_model(kind)
    _, want = plain_run(model, [{"input_ids": IDS, "labels": IDS}])
    with alstlib.apply(model, None, alstlib.Options(**HOW[how])):
        alstlib.causal_lm_loss(model, BATCH).loss.backward()  # a first call may change more
        model.zero_grad()
        twin = copy.deepcopy(model)
        with pytest.raises(ValueError, match=r"not attached: attach the model with alstlib\.apply first"):
            alstlib.causal_lm_loss(twin, BATCH)
        twin(input_ids=IDS, labels=IDS).loss.backward()
        assert gradients(model) == {}
        assert worst_error(gradients(twin), want)[0] < 1e-5
        twin.zero_grad()
        with alstlib.apply(twin, None, alstlib.Options(**HOW[how])):
            alstlib.causal_lm_loss(twin, BATCH).loss.backward()
        assert gradients(model) == {}
        assert worst_error(gradients(twin), want)[0] < 1e-5
        alstlib.causal_lm_loss(model, BATCH).loss.backward()
    assert worst_error(gradients(model), want)[0] < 1e-5
    assert {n: type(m) for n, m in twin.named_modules()} == {n: type(m) for n, m in model.named_modules()}
    assert "alst" not in str([m.__dict__.keys() for m in twin.modules()])


@pytest.mark.parametrize("how", HOW)
def test_a_deep_copy_of_a_part_is_plain(how: str) -> None:
    model = make_model()
    mask = torch.zeros(1, 1, 20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    with alstlib.apply(model, None, alstlib.Options(**HOW[how])):
        body, layer = copy.deepcopy(model.model), copy.deepcopy(model.model.layers[1])
        body(IDS).last_hidden_state.sum().backward()
        assert gradients(model) == {}
        assert len(gradients(body)) == len([*body.parameters()])
        x = torch.randn(1, 20, 32)
        layer(x, attention_mask=mask, position_embeddings=body.rotary_emb(x, torch.arange(20)[None])).sum().backward()
        assert gradients(model) == {}


def test_a_head_that_peft_copies_trains() -> None:
    """`modules_to_save` makes a deep copy of the head inside the attached model."""
    model, config = make_model(), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    reference = peft.get_peft_model(copy.deepcopy(model), config)
    with alstlib.apply(model, None, alstlib.Options(**ALL_ON)):
        wrapped = peft.get_peft_model(model, config)
        alstlib.causal_lm_loss(wrapped, BATCH).loss.backward()
        got = gradients(wrapped)
    torch.manual_seed(0)
    logits = reference(input_ids=IDS).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["shift_labels"].flatten()).backward()
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert worst_error({name: got[name]}, {name: gradients(reference)[name]})[0] < 1e-5
    assert torch.allclose(wrapped(input_ids=IDS).logits, logits, atol=1e-5)


# ----- the end


@pytest.mark.parametrize("how", HOW)
def test_a_model_that_is_dropped_without_detach_is_freed(how: str) -> None:
    before = set(AttentionInterface._global_mapping)
    model = make_model()
    handle: Any = alstlib.apply(model, None, alstlib.Options(**HOW[how]))
    alstlib.causal_lm_loss(model, BATCH).loss.backward()
    gone = [weakref.ref(model), weakref.ref(handle), weakref.ref(model.model.layers[0].self_attn.q_proj.weight)]
    del model, handle
    gc.collect()
    assert [w() for w in gone] == [None, None, None]
    assert set(AttentionInterface._global_mapping) == before


def test_a_handle_that_is_dropped_leaves_the_model_attached() -> None:
    model = make_model()
    want, _ = plain_run(model, [{"input_ids": IDS, "labels": IDS}])
    alstlib.apply(model)
    gc.collect()
    assert alstlib.causal_lm_loss(model, BATCH).loss.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("leaf", [True, False])
def test_detach_gives_back_what_a_user_had_set(leaf: bool) -> None:
    model = make_model()
    for layer in model.model.layers:
        layer._z3_leaf = leaf
    model.generate = lambda *args: "mine"  # type: ignore[method-assign]
    with alstlib.apply(model, None, alstlib.Options(chunk=5)):
        assert model.generate() == "mine"
        assert all(layer._z3_leaf for layer in model.model.layers)
    assert model.generate() == "mine"
    assert [layer.__dict__.get("_z3_leaf") for layer in model.model.layers] == [leaf, leaf]


@pytest.mark.parametrize("how", HOW)
def test_what_a_user_wraps_while_attached_stays_and_is_plain_after_detach(how: str) -> None:
    model = make_model()
    loss, want = plain_run(model, [{"input_ids": IDS, "labels": IDS}])
    generated, calls = model.generate(IDS, max_new_tokens=3, do_sample=False), []
    with alstlib.apply(model, None, alstlib.Options(**HOW[how])):
        layer, ours, make = model.model.layers[0], model.model.layers[0].forward, model.generate
        layer.forward = lambda *args, **kwargs: calls.append(1) or ours(*args, **kwargs)
        model.generate = lambda *args, **kwargs: calls.append(2) or make(*args, **kwargs)  # type: ignore[method-assign]
        alstlib.causal_lm_loss(model, BATCH).loss.backward()
    assert 1 in calls
    calls.clear()
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert worst_error(gradients(model), want)[0] < 1e-5
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), generated)
    assert {1, 2} == set(calls)
