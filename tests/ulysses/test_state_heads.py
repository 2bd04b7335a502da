"""Recurrences over ranks by an exchange of tokens for heads, against loops over the whole sequence, in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from operators import gradients, leaf, nan_memory, randn, worst
from torch import Tensor, nn

from alstlib import SPContext, reference
from alstlib.kernels.spans import Offsets
from alstlib.planner.gpus import rates_of
from alstlib.planner.state_ways import Sent, StateLayer, state_seconds
from alstlib.ulysses.alltoall import Exchange
from alstlib.ulysses.state_heads import by_heads
from alstlib.ulysses.states import GatedDeltaRule, Recurrence, decayed_attention, over_ranks

KEYS, VALUES, TOLERANCE = 3, 4, 1e-11
Inputs = tuple[list[Tensor], list[Tensor]]


def gated_inputs(batch: int, length: int, heads: int, groups: int) -> Inputs:
    q, k = (randn(batch, length, groups, KEYS, seed=i) for i in (0, 1))
    v, g, beta = (randn(batch, length, heads, *d, seed=i) for i, d in ((2, (VALUES,)), (3, ()), (4, ())))
    return [q, nn.functional.normalize(k, dim=-1), v, -nn.functional.softplus(g), beta.sigmoid()], []


def gated(*tensors: Tensor, **how: Any) -> Any:
    q, k, v, *gates = tensors
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    return reference.gated_delta_rule(q, k, v, *gates, **how)


def kimi_inputs(batch: int, length: int, heads: int, groups: int) -> Inputs:
    """Each key dimension decays by itself."""
    (q, k, v, _, beta), _ = gated_inputs(batch, length, heads, groups)
    return [q, k, v, -nn.functional.softplus(randn(batch, length, heads, KEYS, seed=3)), beta], []


def mamba_inputs(batch: int, length: int, heads: int, groups: int) -> Inputs:
    x, dt = randn(batch, length, heads, VALUES), nn.functional.softplus(randn(batch, length, heads, seed=1))
    b, c = (randn(batch, length, groups, KEYS, seed=i) for i in (2, 3))
    return [x, dt, b, c], [-randn(heads, seed=4).exp(), randn(heads, seed=5)]


def mamba(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, **how: Any) -> Any:
    return reference.mamba2(x, dt, a, b, c, d, **how)


def lightning_inputs(batch: int, length: int, heads: int, groups: int) -> Inputs:
    q, k, v = (randn(batch, length, heads, d, seed=i) for i, d in enumerate((KEYS, KEYS, VALUES)))
    return [q, k, v], [randn(heads, seed=4).exp()]


RULES: dict[str, tuple[Callable[..., Inputs], Callable[..., Any], Recurrence]] = {
    "gated delta rule": (gated_inputs, gated, GatedDeltaRule(gated)),
    "Kimi delta attention": (kimi_inputs, gated, GatedDeltaRule(gated)),
    "Mamba-2": (
        mamba_inputs, mamba, Recurrence(mamba, lambda x, dt, b, c, a, d: (dt * a).sum(1)[..., None, None])
    ),
    "lightning attention": (
        lightning_inputs, reference.lightning,
        Recurrence(
            lambda q, k, v, slopes, initial_state: decayed_attention(q, k, v, slopes, 4, initial_state),
            lambda q, k, v, slopes: (-slopes * q.shape[1]).expand(q.shape[0], -1)[..., None, None],
        ),
    ),
}  # fmt: skip
SHARED = [("gated delta rule", 6, 2), ("gated delta rule", 5, 5), ("Kimi delta attention", 5, 5), ("Mamba-2", 4, 2),
          ("Mamba-2", 5, 1), ("lightning attention", 4, 4)]  # fmt: skip
"""Heads and groups that divide by two, three or four ranks, and that do not."""
LENGTHS: dict[str, tuple[int, int, Sequence[int] | None]] = {
    "whole": (2, 12, None), "packed": (1, 24, (0, 2, 6, 7, 12, 23, 24)),
    "rows of their own": (2, 12, (0, 1, 12, 13, 24)),
}  # fmt: skip
"""Micro-batch rows, tokens of each, and offsets of documents."""


def by_both(rank: int, world: int, name: str, heads: int, groups: int, case: Any, frozen: int | None) -> Any:
    """Errors of this rank's part by heads: against the oracle on the whole sequence, and against the states' way."""
    (batch, length, documents), (make, plain, rule) = case, RULES[name]
    tokens, weights = make(batch, length, heads, groups)
    count, needs = len(tokens), [i != frozen for i in range(len(tokens) + len(weights))]
    if name == "lightning attention":
        needs[count] = False  # its slopes are constants
    whole = [leaf(t, needs=need) for t, need in zip([*tokens, *weights], needs)]
    dout = randn(batch, length, heads, VALUES, seed=9)
    want = gradients(lambda *ts: plain(*ts, documents=documents)[0], whole, dout)
    rows = slice(rank * length // world, (rank + 1) * length // world)
    own = [leaf(t[:, rows], needs=need) for t, need in zip(tokens, needs)] + whole[count:]
    exchange, found, sent = Exchange(SPContext.create(world).sp_group), {}, {}
    offsets = None if documents is None else Offsets(documents)
    for way in (over_ranks, by_heads):
        over, before = functools.partial(way, rule, exchange=exchange, documents=offsets), exchange.bytes_sent
        with nan_memory():
            found[way] = gradients(lambda *ts, over=over: over(ts[:count], ts[count:])[0], own, dout[:, rows])
        sent[way] = exchange.bytes_sent - before
    got, oracle = found[by_heads], [None if t is None else t[:, rows] for t in want[: count + 1]]
    return {
        "error": worst(got[: count + 1], oracle, want[: count + 1]),
        "ways": worst(got[: count + 1], found[over_ranks][: count + 1], want[: count + 1]),
        "weights": [got[count + 1 :], found[over_ranks][count + 1 :]], "want": list(want[count + 1 :]),
        "sent": [sent[over_ranks], sent[by_heads]],
    }  # fmt: skip


def on_ranks(pools: Callable[[int], Any], world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [fn(0, 1, *args)] if world == 1 else pools(world)(fn, *args)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name, heads, groups", SHARED)
def test_heads_and_states_give_what_one_rank_gives(
    pools: Callable[[int], Any], name: str, heads: int, groups: int, case: Any, world: int
) -> None:
    for frozen in (None, 0):
        results = on_ranks(pools, world, by_both, name, heads, groups, case, frozen)
        for rank, result in enumerate(results):
            assert max(result["error"], result["ways"]) < TOLERANCE, (rank, frozen, result)
        for i, want in enumerate(results[0]["want"]):
            for way in () if want is None else (0, 1):
                total = sum(result["weights"][way][i] for result in results)
                assert worst([total], [want]) < TOLERANCE, (i, way)


def layer_of(name: str, heads: int, groups: int, element: int = 8) -> StateLayer:
    tokens, _ = RULES[name][0](1, 1, heads, groups)
    inputs = [Sent(t.shape[2], t[0, 0, 0].numel(), element) for t in tokens]
    output = Sent(heads, VALUES, element)
    return StateLayer(
        keys=KEYS, values=VALUES, inputs=inputs, output=output, matrix=isinstance(RULES[name][2], GatedDeltaRule)
    )


@pytest.mark.parametrize("name, heads, groups", SHARED)
def test_bytes_on_the_wire_are_those_of_the_formula(
    pools: Callable[[int], Any], name: str, heads: int, groups: int
) -> None:
    layer, case, rows = layer_of(name, heads, groups), LENGTHS["whole"], 2 * 12 // 3
    for rank, result in enumerate(pools(3)(by_both, name, heads, groups, case, None)):
        # in fp64 here; a layer that makes every gradient sends pairs twice, and tokens there and back
        assert result["sent"][0] == 2 * 2 * layer.pair_bytes(2) * 2, (rank, result["sent"])
        assert result["sent"][1] == rows * (layer.there(3, rank) + layer.back(3, rank)), (rank, result["sent"])


def in_chunks(rank: int, world: int, name: str, heads: int, groups: int, case: Any, chunk: int) -> float:
    """Each rank carries the state of its own heads from chunk to chunk."""
    (batch, length, documents), (make, plain, rule) = case, RULES[name]
    tokens, weights = make(batch, length, heads, groups)
    count, dout = len(tokens), randn(batch, length, heads, VALUES, seed=9)
    offsets, exchange = None if documents is None else Offsets(documents), Exchange(SPContext.create(world).sp_group)

    def over(*ts: Tensor) -> Tensor:
        outs, state = [], None
        for lo in range(0, ts[0].shape[1], chunk):
            part = [t[:, lo : lo + chunk] for t in ts]
            how: dict[str, Any] = {"start": state, "first": lo * world, "length": length}
            out, state = by_heads(rule, part, weights, exchange, offsets, **how)
            outs.append(out)
        return torch.cat(outs, 1)

    own = torch.cat(
        [torch.arange(length)[lo : lo + world * chunk].chunk(world)[rank] for lo in range(0, length, world * chunk)]
    )
    whole = [leaf(t) for t in tokens]
    want = gradients(lambda *ts: plain(*ts, *weights, documents=documents)[0], whole, dout)
    with nan_memory():
        got = gradients(over, [leaf(t[:, own]) for t in tokens], dout[:, own])
    return worst(got, [t[:, own] for t in want], want) + (0.0 if len(got) == count + 1 else 1.0)


@pytest.mark.parametrize("case", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name, heads, groups", SHARED)
def test_a_state_of_own_heads_goes_from_chunk_to_chunk(
    pools: Callable[[int], Any], name: str, heads: int, groups: int, case: Any
) -> None:
    assert max(pools(3)(in_chunks, name, heads, groups, case, 2)) < TOLERANCE


def in_half(rank: int, world: int) -> tuple[list[torch.dtype], float]:
    """Tokens of several dtypes: gates in fp32 with the rest in bf16, as models give them."""
    tokens, _ = gated_inputs(1, 12, 3, 1)
    mixed = [t.to(torch.float32 if t.ndim == 3 else torch.bfloat16) for t in tokens]
    rows = slice(rank * 12 // world, (rank + 1) * 12 // world)
    own = [leaf(t[:, rows]) for t in mixed]

    def wide(*ts: Tensor, initial_state: Tensor | None = None) -> Any:
        assert [t.dtype for t in ts] == [t.dtype for t in mixed]
        out, state = gated(*(t.double() for t in ts), initial_state=initial_state)
        return out.bfloat16(), state

    out = by_heads(GatedDeltaRule(wide), own, (), Exchange(SPContext.create(world).sp_group))[0]
    dout = randn(1, 12, 3, VALUES, seed=9, dtype=torch.bfloat16)
    out.backward(dout[:, rows])
    want = gradients(lambda *ts: wide(*ts)[0], [leaf(t) for t in mixed], dout)
    got = [t.grad for t in own]
    return [t.dtype for t in got], worst([out.detach(), *got], [t[:, rows] for t in want], want)


def test_each_dtype_travels_as_it_is(pools: Callable[[int], Any]) -> None:
    for dtypes, error in pools(2)(in_half):
        assert dtypes == [torch.bfloat16] * 3 + [torch.float32] * 2
        assert error < 1e-2  # sums of two roundings to bf16


def test_more_ranks_than_heads_are_refused() -> None:
    exchange = Exchange()
    exchange.ranks = 3
    with pytest.raises(ValueError, match="3 ranks cannot each have one of 2 heads; at most 2 ranks can"):
        by_heads(RULES["Mamba-2"][2], *mamba_inputs(1, 4, 2, 1), exchange)


def test_seconds_of_the_ways() -> None:
    """By hand, for rates that make all sums easy."""
    rates = replace(rates_of("H100"), link=1.0, network=0.5, matmul=10.0)
    layer = StateLayer(keys=2, values=1, inputs=[Sent(1, 2, 2), Sent(2, 1, 2)], output=Sent(2, 1, 2))
    pair, forward, pairs = 2 * (4 + 2) * 4, 6 * 2 + 64 * (5 * 2 + 3), 6 * 2 * 3 + 64 * (5 * 2 + 3 * 3)
    there = (2 * 2 + 1 * 2) + 1 * 2  # a rank's head needs its group and its own input; its output goes back
    seconds = state_seconds(layer, 10, 2, rates=rates)
    assert seconds == {"pass": 2 * pair + 10 * 2 * (pairs + 2 * forward), "heads": 10 * 3 * there}
    slow = state_seconds(layer, 10, 2, rates=rates, nodes=True, pairs=3, forwards=3)
    assert slow == {"pass": 8 * pair + 10 * 2 * (3 * pairs + 2 * forward), "heads": 2 * 10 * 4 * there}
    assert state_seconds(layer, 10, 3, rates=rates).keys() == {"pass"}
    assert state_seconds(layer, 10, 1, rates=rates) == {"pass": 0, "heads": 0}


def test_across_nodes_long_slices_pass_states() -> None:
    """Of the shape of Qwen3-Next: pairs cost too much for short slices, tokens for long ones."""
    inputs = [Sent(16, 128, 2), Sent(16, 128, 2), Sent(32, 128, 2), Sent(32, 1, 4), Sent(32, 1, 2)]
    layer = StateLayer(keys=128, values=128, inputs=inputs, output=Sent(32, 128, 2))
    found = [state_seconds(layer, rows, 16, nodes=True) for rows in (1024, 131_072)]
    assert [min(one, key=lambda way: one[way]) for one in found] == ["heads", "pass"]
