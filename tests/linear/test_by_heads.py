"""Recurrences over ranks by an exchange of tokens for heads, against loops over the whole sequence, in fp64."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import yaml
from cases import on_ranks
from test_pass_state import KEYS, RULES, VALUES, gated, gated_inputs, on_rank

from alstlib.linear.adapters.gated_delta import GatedDeltaRule
from alstlib.linear.by_heads import by_heads
from alstlib.linear.pass_state import pass_state
from alstlib.linear.ways import Sent, StateLayer
from alstlib.planner import state_ways
from alstlib.planner.gpus import rates_of

WAYS = (pass_state, by_heads)
SHARED = yaml.safe_load("""
[[2, gated delta rule, 6, 2], [3, gated delta rule, 6, 1], [4, gated delta rule, 4, 2], [3, Kimi delta attention, 3, 3],
 [2, Mamba-2, 4, 1], [3, Mamba-2, 6, 3], [4, Mamba-2, 8, 2], [2, lightning attention, 4, 4]]
""")
"""Ranks, and heads and groups that are dealt out evenly among them; or groups are shared."""
LENGTHS = yaml.safe_load("""
whole: [2, 12, null]
packed: [1, 24, [0, 2, 6, 7, 12, 23, 24]]
rows of their own: [2, 12, [0, 1, 12, 13, 24]]
""")
"""Samples, tokens of each, and offsets of documents."""


@pytest.mark.parametrize("case", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("world, name, heads, groups", SHARED)
def test_heads_and_states_give_what_one_rank_gives(pools, world, name, heads, groups, case):
    """Also where an input is frozen, and from chunk to chunk with a state of a rank's own heads."""
    in_chunks = [{"ways": (by_heads,), "chunk": 2}] * (world < 4)
    for how in ({"ways": WAYS}, {"ways": WAYS, "frozen": 0}, *in_chunks):
        on_ranks(pools, world, on_rank, name, case, (heads, groups), **how)


def layer_of(name, heads, groups):
    tokens, _ = RULES[name][0](1, 1, heads, groups)
    *inputs, output = (Sent(t.shape[2], t.shape[3:].numel(), 8) for t in (*tokens, torch.empty(1, 1, heads, VALUES)))
    return StateLayer(keys=KEYS, values=VALUES, inputs=inputs, output=output, matrix=RULES[name][2].matrix)


@pytest.mark.parametrize("world, name, heads, groups", SHARED)
def test_bytes_on_the_wire_are_those_of_the_formula(pools, world, name, heads, groups):
    layer, case = layer_of(name, heads, groups), LENGTHS["whole"]
    for (_, passed), (_, exchanged) in on_ranks(pools, world, on_rank, name, case, (heads, groups), ways=WAYS):
        # in fp64 here; a layer that makes every gradient sends pairs twice, and tokens there and back
        assert passed == 2 * (world - 1) * state_ways.pair_bytes(layer, 2) * 2
        assert exchanged == 2 * 12 // world * 2 * state_ways.exchanged(layer, world)


def test_heads_are_taken_where_they_divide_evenly():
    layer = layer_of("gated delta rule", 32, 16)
    found = {ranks: layer.way("auto", ranks) for ranks in (1, 2, 3, 8, 12, 32, 64)}
    assert found == {1: "pass", 2: "heads", 3: "pass", 8: "heads", 12: "pass", 32: "heads", 64: "pass"}
    assert [layer.way("heads", ranks) for ranks in (3, 8)] == ["pass", "heads"]
    assert layer.way("pass", 8) == "pass"


def in_half(rank, world):
    """Tokens of several dtypes: gates in fp32 with the rest in bf16, as models give them."""

    def inputs(*sizes):
        return [t.to(torch.float32 if t.ndim == 3 else torch.bfloat16) for t in gated_inputs(*sizes)[0]], []

    def wide(*tensors, **how):
        assert [t.dtype for t in tensors] == [torch.bfloat16] * 3 + [torch.float32] * 2
        out, state = gated(*(t.double() for t in tensors), **how)
        return out.bfloat16(), state

    with mock.patch.dict(RULES, {"in half": (inputs, wide, GatedDeltaRule(wide), (4, 1))}):
        on_rank(rank, world, "in half", (1, 12, None), ways=(by_heads,), tolerance=1e-2)  # two roundings to bf16


def test_each_dtype_travels_as_it_is(pools):
    pools(2)(in_half)


def test_seconds_of_the_ways():
    """By hand, for rates that make all sums easy."""
    rates = replace(rates_of("H100"), link=1.0, network=0.5, matmul=10.0)
    layer = StateLayer(keys=2, values=1, inputs=[Sent(1, 2, 2), Sent(2, 1, 2)], output=Sent(2, 1, 2))
    pair, forward, pairs = 2 * (4 + 2) * 4, 6 * 2 + 64 * (5 * 2 + 3), 6 * 2 * 3 + 64 * (5 * 2 + 3 * 3)
    there = (2 * 2 + 1 * 2) + 1 * 2  # a rank's head needs its group and its own input; its output goes back

    def seconds(**how):
        return [state_ways.state_seconds(layer, way, 10, 2, rates=rates, **how) for way in ("pass", "heads")]

    assert seconds() == [(2 * pair, 10 * 2 * (pairs + 2 * forward)), (10 * 3 * there, 0)]
    slow = seconds(nodes=True, passes=(3, 3))
    assert slow == [(8 * pair, 10 * 2 * (3 * pairs + 2 * forward)), (2 * 10 * 4 * there, 0)]
    assert state_ways.state_seconds(layer, "pass", 10, 1, rates=rates) == (0, 0)
