"""Changes to modules: taken back from them, absent from their copies, gone with them, and careful with others'."""

import copy
import gc
import weakref

import pytest
import torch
from cases import ALL_ON, attach, batch_of, check_refused, check_step, gradients, make_model, own_step, plain_step, step
from transformers import AttentionInterface

import alstlib

HOW = {"default": {}, "all on": ALL_ON, "chunk": {**ALL_ON, "chunk": 5}}
EVERY_WAY = pytest.mark.parametrize("options", HOW.values(), ids=HOW)
BATCH = batch_of(20)
IDS = BATCH["input_ids"]


# ----- copies of an attached model


@EVERY_WAY
@pytest.mark.parametrize("kind", ["gqa", "gpt2"])
def test_a_deep_copy_of_an_attached_model_is_plain(kind, options):
    """It has gradients of its own, is attached anew, and outlives the original's detach."""
    model = make_model(kind)
    want = plain_step(model, BATCH)
    with attach(model, **options):
        step(model, BATCH)  # a first call may change more
        model.zero_grad()
        twin = copy.deepcopy(model)
        check_refused(r"not attached: attach the model with alstlib\.apply first", alstlib.causal_lm_loss, twin, BATCH)
        check_step(own_step(twin, input_ids=IDS, labels=IDS), want)
        with attach(twin, **options):
            check_step(step(twin, BATCH), want)
        assert gradients(model) == {}
        check_step(step(model, BATCH), want)
    assert {n: type(m) for n, m in twin.named_modules()} == {n: type(m) for n, m in model.named_modules()}
    assert "alst" not in str([m.__dict__.keys() for m in twin.modules()])


@EVERY_WAY
@pytest.mark.parametrize("part", ["model", "model.layers.1"])
def test_a_deep_copy_of_a_part_is_plain(part, options):
    model, twin = make_model(), make_model()
    with attach(model, **options):
        twin.set_submodule(part, copy.deepcopy(model.get_submodule(part)))
        check_step(own_step(twin, input_ids=IDS, labels=IDS), plain_step(make_model(), BATCH))
        assert gradients(model) == {}


# ----- the end


@EVERY_WAY
def test_a_model_that_is_dropped_without_detach_is_freed(options):
    before = set(AttentionInterface._global_mapping)
    model = make_model()
    handle = attach(model, **options)
    step(model, BATCH)
    gone = [weakref.ref(model), weakref.ref(handle), weakref.ref(model.model.layers[0].self_attn.q_proj.weight)]
    del model, handle
    gc.collect()
    assert [w() for w in gone] == [None, None, None]
    assert set(AttentionInterface._global_mapping) == before
    assert torch._C._is_multithreading_enabled()


def test_a_handle_that_is_dropped_leaves_the_model_attached():
    model = make_model()
    want = plain_step(model, BATCH)
    attach(model)
    gc.collect()
    check_step(step(model, BATCH), want)


@EVERY_WAY
def test_what_a_user_wraps_while_attached_stays_and_is_plain_after_detach(options):
    model, calls = make_model(), []
    want = plain_step(model, BATCH)
    with attach(model, **options):
        layer, ours = model.model.layers[0], model.model.layers[0].forward
        layer.forward = lambda *args, **kwargs: calls.append(1) or ours(*args, **kwargs)
        step(model, BATCH)
    assert calls
    calls.clear()
    check_step(own_step(model, input_ids=IDS, labels=IDS), want)
    assert calls
