"""Recurrences over ranks by an exchange of tokens for heads, against loops over the whole sequence, in fp64."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_pass_state import KEYS, RULES, TOLERANCE, VALUES, everywhere, gated, gated_inputs, mamba_inputs, on_rank

from alstlib.linear.adapters.gated_delta import GatedDeltaRule
from alstlib.linear.by_heads import by_heads
from alstlib.linear.pass_state import pass_state
from alstlib.linear.ways import Sent, StateLayer
from alstlib.planner.gpus import rates_of
from alstlib.planner.state_ways import state_seconds
from alstlib.ulysses.alltoall import Exchange

WAYS = (pass_state, by_heads)
SHARED = [("gated delta rule", 6, 2), ("gated delta rule", 5, 5), ("Kimi delta attention", 5, 5), ("Mamba-2", 4, 2),
          ("Mamba-2", 5, 1), ("lightning attention", 4, 4)]  # fmt: skip
"""Heads and groups that divide by two, three or four ranks, and that do not."""
LENGTHS = {
    "whole": (2, 12, None), "packed": (1, 24, (0, 2, 6, 7, 12, 23, 24)),
    "rows of their own": (2, 12, (0, 1, 12, 13, 24)),
}  # fmt: skip
"""Micro-batch rows, tokens of each, and offsets of documents."""


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name, heads, groups", SHARED)
def test_heads_and_states_give_what_one_rank_gives(pools, name, heads, groups, case, world):
    """Also where an input is frozen, and from chunk to chunk with a state of a rank's own heads."""
    in_chunks = [{"ways": (by_heads,), "chunk": 2}] * (world == 3)
    for how in ({"ways": WAYS}, {"ways": WAYS, "frozen": 0}, *in_chunks):
        for rank, result in enumerate(everywhere(pools, world, on_rank, name, case, (heads, groups), **how)):
            assert result["error"] < TOLERANCE, (rank, how, result)


def layer_of(name, heads, groups, element=8):
    tokens, _ = RULES[name][0](1, 1, heads, groups)
    inputs = [Sent(t.shape[2], t[0, 0, 0].numel(), element) for t in tokens]
    output = Sent(heads, VALUES, element)
    return StateLayer(keys=KEYS, values=VALUES, inputs=inputs, output=output, matrix=RULES[name][2].matrix)


@pytest.mark.parametrize("name, heads, groups", SHARED)
def test_bytes_on_the_wire_are_those_of_the_formula(pools, name, heads, groups):
    layer, case, rows = layer_of(name, heads, groups), LENGTHS["whole"], 2 * 12 // 3
    for rank, result in enumerate(everywhere(pools, 3, on_rank, name, case, (heads, groups), ways=WAYS)):
        # in fp64 here; a layer that makes every gradient sends pairs twice, and tokens there and back
        assert result["sent"][0][1] == 2 * 2 * layer.pair_bytes(2) * 2, (rank, result["sent"])
        assert result["sent"][1][1] == rows * (layer.there(3, rank) + layer.back(3, rank)), (rank, result["sent"])


def in_half(rank, world):
    """Tokens of several dtypes: gates in fp32 with the rest in bf16, as models give them."""

    def inputs(*sizes):
        return [t.to(torch.float32 if t.ndim == 3 else torch.bfloat16) for t in gated_inputs(*sizes)[0]], []

    def wide(*tensors, **how):
        assert [t.dtype for t in tensors] == [torch.bfloat16] * 3 + [torch.float32] * 2
        out, state = gated(*(t.double() for t in tensors), **how)
        return out.bfloat16(), state

    with mock.patch.dict(RULES, {"in half": (inputs, wide, GatedDeltaRule(wide), (3, 1))}):
        return on_rank(rank, world, "in half", (1, 12, None), ways=(by_heads,))


def test_each_dtype_travels_as_it_is(pools):
    for result in pools(2)(in_half):
        assert result["error"] < 1e-2  # sums of two roundings to bf16


def test_more_ranks_than_heads_are_refused():
    exchange = Exchange()
    exchange.ranks = 3
    with pytest.raises(ValueError, match="3 ranks cannot each have one of 2 heads; at most 2 ranks can"):
        by_heads(RULES["Mamba-2"][2], *mamba_inputs(1, 4, 2, 1), exchange)


def test_seconds_of_the_ways():
    """By hand, for rates that make all sums easy."""
    rates = replace(rates_of("H100"), link=1.0, network=0.5, matmul=10.0)
    layer = StateLayer(keys=2, values=1, inputs=[Sent(1, 2, 2), Sent(2, 1, 2)], output=Sent(2, 1, 2))
    pair, forward, pairs = 2 * (4 + 2) * 4, 6 * 2 + 64 * (5 * 2 + 3), 6 * 2 * 3 + 64 * (5 * 2 + 3 * 3)
    there = (2 * 2 + 1 * 2) + 1 * 2  # a rank's head needs its group and its own input; its output goes back

    def seconds(**how):
        return [state_seconds(layer, way, 10, 2, rates=rates, **how) for way in ("pass", "heads")]

    assert seconds() == [(2 * pair, 10 * 2 * (pairs + 2 * forward)), (10 * 3 * there, 0)]
    slow = seconds(nodes=True, passes=(3, 3))
    assert slow == [(8 * pair, 10 * 2 * (3 * pairs + 2 * forward)), (2 * 10 * 4 * there, 0)]
    assert state_seconds(layer, "pass", 10, 1, rates=rates) == (0, 0)
