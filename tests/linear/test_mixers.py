"""Hybrids attached on real ranks against plain transformers: loss and every gradient."""

import gc

import pytest
import zoo
from cases import attach, batch, check_refused, train
from matrix import Case, check_on
from torch import nn

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.hf.support import check_model
from alstlib.linear.adapters import ADAPTERS, adapter_of, mixers_of
from alstlib.linear.adapters.compressed import CompressedConvolution
from alstlib.linear.adapters.mamba1 import Mamba1
from alstlib.linear.adapters.short_conv import ShortConv
from alstlib.planner.measure import verify
from alstlib.planner.measure.ledger import Ledger

WHOLE = [[[144]]]
"""More than one block of 64 tokens of the gated delta rule on each of two ranks."""
PACKED = [[[3, 1, 20, 48, 30, 1, 41]]]
"""Documents that begin inside, at and across the slices of two and three ranks."""
CASES = {
    "packed-3": (PACKED, 3, {"save_attention": True}), "packed-3, in chunks": (PACKED, 3, {"chunk": 11}),
    "whole-2, by blocks": (WHOLE, 2, {"block": 19}),
}  # fmt: skip
BY_HEADS = ["qwen3_next", "kimi_linear", "falcon_h1", "minimax"]
"""One model of each family whose recurrence has heads: four of them, in two groups where there are groups."""
OTHERS = ["qwen3_5", "nemotron_h", "zamba2"]
"""And of every other mixer that computes in blocks of tokens, which the net's samples are shorter than. Mixers that go
from token to token, and further models, are the net's alone."""


def step(pools, name, data, world, options, states="pass", **more):
    case = Case(name, f"{world}x1", states=states, tiles="default")
    check_on(pools, case, options=options, data=data, accumulation=1, **more)


@pytest.mark.parametrize("data, world, options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "name, states", [*((name, way) for name in BY_HEADS for way in ("pass", "heads")), *((n, "pass") for n in OTHERS)]
)
def test_hybrids_are_exact(pools, name, states, data, world, options):
    """On more tokens than the net of whole steps draws."""
    step(pools, name, data, 2 if states == "heads" else world, options, states)  # of four heads


class Twice(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states, **kwargs):
        return self.mixer(self.mixer(hidden_states, **kwargs), **kwargs)


def twice(model):
    model.model.layers[0].linear_attn = Twice(model.model.layers[0].linear_attn)
    return lambda: None


@pytest.mark.parametrize("options", [{}, {"chunk": 11}, {"block": 19}, {"block": 19, "checkpoint": False}], ids=str)
def test_a_layer_may_call_a_part_with_a_state_twice(pools, options):
    step(pools, "qwen3_5", WHOLE, 2, options, prepare=twice)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0,
           "mrope_section": [2, 1, 1]}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"offload": "sync", "chunk": 11}, {"block": 19}], ids=str)
def test_positions_of_several_kinds(pools, options):
    """Qwen3.5 gives its rotary embedding positions [3, B, L]: whole, in chunks whose tables lie on the host, and in
    blocks, with frequencies that depend on the longest of them."""
    step(pools, "qwen3_5", WHOLE, 2, options, fields={"max_position_embeddings": 16, "rope_parameters": DYNAMIC})


def told(rank, world, states, chunk, widths):
    """What is noted of the ways in three steps of two lengths, and the bytes that they send."""
    ctx, model = alstlib.SPContext.create(world), zoo.build_hybrid("qwen3_next", **widths)
    with attach(model, ctx, linear_attention=states, chunk=chunk) as handle:
        for length in (48, 96, 48):
            data = {**verify.sample(length, False), "document_lengths": [[length]]}
            train(model, shard_batch(data, world, rank))
        return [note for note in handle.notes if "linear_attention" in note], handle.wire_bytes


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("way, heads, does", [("pass", 4, "states are passed"), ("heads", 6, "tokens are exchanged")])
def test_auto_takes_heads_where_they_divide_evenly_and_says_so(pools, way, heads, does, chunk):
    widths = {"linear_num_value_heads": heads, "linear_num_key_heads": heads // 2}
    auto, one = (pools(3)(told, states, chunk, widths) for states in ("auto", way))
    for (notes, sent), (silent, same) in zip(auto, one):
        (note,) = notes
        assert note.startswith(f"gated delta rule: {heads} heads for 3 ranks: {does}"), note
        assert (silent, sent) == ([], same)


def test_fewer_heads_than_ranks_pass_their_state(pools):
    note = "gated delta rule: 2 heads for 3 ranks: states are passed (linear_attention='heads')"
    assert [notes for notes, _ in pools(3)(told, "heads", None, {"linear_num_value_heads": 2})] == [[note]] * 3


def test_without_checkpoints_a_loss_that_is_held_holds_no_inputs():
    """After backward, what lives on until the loss is let go does not grow as a layer's queries, keys and values do."""

    def held(length):
        model = zoo.build_hybrid("qwen3_5", max_position_embeddings=256)
        with attach(model, checkpoint=False), Ledger("cpu") as ledger:
            for _ in range(2):
                gc.collect()
                start = ledger.device_bytes
                out = train(model, batch(length, [length // 2] * 2))  # noqa: F841
                model.zero_grad(set_to_none=False)
            return ledger.device_bytes - start

    assert (held(256) - held(128)) / 128 < 50


@pytest.mark.parametrize("name, noted", [("nemotron_h", 0), ("mamba2", 0), ("zamba2", 2)])
def test_layers_without_an_mlp_are_not_noted_for_it(name, noted):
    """Some have nothing but a mixer or attention; Zamba2's have an MLP further inside."""
    with attach(zoo.build_hybrid(name)) as handle:
        assert sum("has no MLP module" in note for note in handle.notes) == noted, handle.notes


def test_each_adapter_has_a_model_in_the_zoo_and_here():
    """But that of ZAYA, which runs in no chunks: the sweep judges it. Those from token to token are the net's alone."""
    models = {name: zoo.build_hybrid(name) for name in (*zoo.HYBRIDS, *zoo.MORE_HYBRIDS)}
    of = {name: {adapter_of(mixer) for mixer in mixers_of(model)} for name, model in models.items()}
    every = {*ADAPTERS} - {CompressedConvolution}
    assert set().union(*of.values()) == every
    assert set().union(*(of[name] for name in (*BY_HEADS, *OTHERS))) == every - {Mamba1, ShortConv}


def test_a_mixer_that_calls_what_is_unknown_is_refused():
    model = zoo.build_hybrid("qwen3_next")
    mixer = mixers_of(model)[0]
    known = type(mixer)

    class Strange(known):
        def forward(self, hidden_states, **kwargs):
            return stranger(hidden_states)

    mixer.__class__ = Strange
    assert adapter_of(mixer) is None
    check_refused("mixes tokens by linear_attention", check_model, model, "sdpa")


def stranger(x):
    return nn.functional.silu(x)
