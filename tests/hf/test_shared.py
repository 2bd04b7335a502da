"""Layers that leave keys and values for each other (Gemma 3n): gradients reach the layer that made them."""

import functools
import gc

import pytest
import torch
import zoo
from cases import ALL_OFF, ALL_ON, attach, check_attached, check_refused, check_step, no_gc, plain_step, sample_of, step

SAMPLE = sample_of(26)
INPUT = 2 * 26 * 32 * 4
"""Bytes of one layer's input, which has two hidden states of each token."""


def gemma3n():
    return zoo.small(
        "Gemma3nTextConfig", num_kv_shared_layers=2, num_hidden_layers=4, sliding_window=7, head_dim=8,
        layer_types=zoo.LAYER_TYPES * 2, hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
        vocab_size_per_layer_input=zoo.VOCAB, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip


HOW = {
    "off": ALL_OFF,
    "whole": ALL_ON, "inputs of some": {**ALL_ON, "offload": "sync", "save_attention": False, "host_memory": 3 * INPUT},
    "chunks on the host": {"offload": True, "on_host": "hidden+kv", "chunk": 5},
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_gradients_reach_the_layer_that_made_the_keys(how):
    handle = check_attached(gemma3n(), SAMPLE, **HOW[how])
    assert handle.plan.inputs_kept_every == (2 if how == "inputs of some" else 1)


def test_block_by_block():
    model = gemma3n()
    want = plain_step(model, SAMPLE)
    with attach(model):
        check_step(step(model, SAMPLE, block=5), want)


def with_graphs():
    return sum(isinstance(t, torch.Tensor) and t.grad_fn is not None for t in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"chunk": 5}])
def test_nothing_of_a_step_is_left(options):
    """A recompute that held the mapping would hold the graph that it is a part of."""
    model = gemma3n()
    with attach(model, **options), no_gc():
        before = with_graphs()
        step(model, SAMPLE)
        assert with_graphs() == before


def test_what_is_shared_and_no_keys_is_not_cut(monkeypatch):
    model = gemma3n()
    layer = model.model.layers[0]
    original = layer.forward

    @functools.wraps(original)
    def forward(hidden_states, *args, shared_kv_states, **kwargs):
        shared_kv_states["more"] = hidden_states[0]
        return original(hidden_states, *args, shared_kv_states=shared_kv_states, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    check_refused("shares a tensor .* that is no keys or values", attach, model, chunk=5)
