"""Which way a layer with a state takes over ranks: its state passed from rank to rank, or its heads dealt out.

Both give the same result (`linear.pass_state`, `linear.by_heads`). Passing sends a pair for each head, whatever the
length, and computes twice what the slice does to the state. Heads send all tokens and compute nothing twice. For L
tokens of each of P ranks, with `forwards` passes over the layer before its backward (2 under a checkpoint) and `pairs`
of them that make pairs (1 under a checkpoint, whose recompute knows the state that comes in):

    pass:  (pairs + 1) * (P - 1) * pair bytes / link
           + L * H * (pairs * FLOPs of a pair + 2 * FLOPs of a forward) / (RECURRENCE * matmul)
    heads: (forwards * there + back) * L / link

The pair is (M, U) in fp32 of every head, and in backward (M, W). W, what a slice's own outputs contribute to the
gradient of the state that comes in, is a backward of the recurrence once more: two forwards. `there` are the bytes of a
token that a rank sends to others for a forward (inputs to heads, outputs back), and `back` those for a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from alstlib.config import RunConfig
from alstlib.planner.gpus import Rates, rates_of
from alstlib.sizing import groups_of

RECURRENCE = 0.1
"""Of the rate of dense matrix products, what a recurrence's kernel reaches: its products are small, and the blocks of a
sequence wait for each other. A nominal share, not measured."""
PER_NODE = 8
"""Ranks of a node, where nothing says how many."""
BLOCK = 64
"""Tokens that a kernel works on at a time, as those of the gated delta rule do."""


class Sent(NamedTuple):
    """One of the tensors that a rank has of a token."""

    groups: int
    """Heads, or groups of heads that share it."""
    width: int
    """Numbers in each."""
    element_bytes: int


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """What of a layer with a state the ways depend on."""

    keys: int
    values: int
    """A head's state has keys * values numbers."""
    inputs: Sequence[Sent]
    """Of the recurrence, all but its weights."""
    output: Sent
    """Its groups are the heads."""
    matrix: bool = True
    """Is M a matrix [keys, keys] (delta rules), or a number for each head (Mamba-2, lightning attention)?"""
    block: int = BLOCK
    """Tokens that its kernel works on at a time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))  # so that layers can be told apart

    @property
    def heads(self) -> int:
        return self.output.groups

    def forward_flops(self, more: int = 0) -> float:
        """Of one token in one head, in blocks, with so many more values."""
        keys, values = self.keys, self.values + more
        if self.matrix:
            return 6.0 * keys * values + self.block * (5 * keys + 3 * values)
        return 4.0 * keys * values + 2 * self.block * (keys + values)

    def pair_bytes(self, batch: int = 1) -> int:
        """Of (M, U) in fp32, all heads."""
        return batch * self.heads * (self.keys * self.values + (self.keys**2 if self.matrix else 1)) * 4

    def there(self, ranks: int, rank: int) -> int:
        """Bytes of each of its tokens that a rank sends to others in a forward by heads."""
        return _to_heads(self.inputs, self.heads, ranks, rank) + _to_tokens([self.output], self.heads, ranks, rank)

    def back(self, ranks: int, rank: int) -> int:
        """Bytes of each of its tokens that a rank sends to others in a backward by heads."""
        return _to_heads([self.output], self.heads, ranks, rank) + _to_tokens(self.inputs, self.heads, ranks, rank)


def _numbers(sent: Sent, heads: int, ranks: int, rank: int) -> int:
    need = groups_of(sent.groups, heads, ranks, rank)
    return (need.stop - need.start) * sent.width * sent.element_bytes


def _to_heads(tensors: Sequence[Sent], heads: int, ranks: int, rank: int) -> int:
    return sum(_numbers(t, heads, ranks, other) for t in tensors for other in range(ranks) if other != rank)


def _to_tokens(tensors: Sequence[Sent], heads: int, ranks: int, rank: int) -> int:
    return sum(_numbers(t, heads, ranks, rank) for t in tensors) * (ranks - 1)


def passes_of(checkpoint: bool, *, chunks: bool = False, blocks: bool = False) -> tuple[int, int]:
    """(forwards, pairs) of `state_costs`: under checkpoints a recompute is one more forward, and knows the state that
    comes in; layers in chunks, and samples in blocks, begin with a forward without a graph."""
    if chunks:
        return 3, 3
    return 1 + checkpoint + blocks, 1 + blocks


class Cost(NamedTuple):
    """Seconds that a way adds to what one rank would do."""

    wire: float
    work: float

    @property
    def seconds(self) -> float:
        return self.wire + self.work


def state_costs(
    layer: StateLayer, rows: int, ranks: int, *, batch: int = 1, forwards: int = 2, pairs: int = 1,
    rates: Rates | None = None, nodes: bool = False,
) -> dict[str, Cost]:  # fmt: skip
    """What each way adds in one layer and step: `pass`, and `heads` where there are no more ranks than heads. What runs
    once in both (the recurrence itself) is in neither.

    Args:
        rows: L, of the sequence or of a chunk.
        batch: micro-batch rows.
        forwards: passes over the layer before its backward.
        pairs: those of them that make and exchange pairs.
        rates: of the machine; None: those of an H100.
        nodes: do the ranks lie on several nodes?
    """
    rates = rates_of("H100") if rates is None else rates
    link = rates.network if nodes else rates.link
    sent = (pairs + 1) * (ranks - 1) * layer.pair_bytes(batch)
    again = pairs * layer.forward_flops(layer.keys if layer.matrix else 0) + 2 * layer.forward_flops()
    work = 0.0 if ranks == 1 else batch * rows * layer.heads * again
    found = {"pass": Cost(sent / link, work / (RECURRENCE * rates.matmul))}
    if ranks <= layer.heads:
        found["heads"] = Cost(batch * rows * _most_sent(layer, ranks, forwards) / link, 0.0)
    return found


@functools.cache
def _most_sent(layer: StateLayer, ranks: int, forwards: int) -> int:
    """Bytes for each token of the rank that sends most in a step by heads. It depends on no length, and is asked for in
    every call of every layer and chunk, and for every length that a plan tries: at 64 ranks an answer takes 20 ms."""
    return max(forwards * layer.there(ranks, r) + layer.back(ranks, r) for r in range(ranks))


def state_seconds(layer: StateLayer, rows: int, ranks: int, **how: Any) -> dict[str, float]:
    """The seconds of `state_costs`, by way."""
    return {way: cost.seconds for way, cost in state_costs(layer, rows, ranks, **how).items()}


def cheapest(costs: Mapping[str, Cost]) -> str:
    """The way that adds least; `pass` of two that add the same."""
    return min(costs, key=lambda way: costs[way].seconds)


def added(
    layer: StateLayer, run: RunConfig, ranks: int, rows: int, rates: Rates | None = None, nodes: bool = False
) -> tuple[str, Cost]:
    """The way that a run takes, as `hf.state_ways` chooses it, and what it adds to a layer in a chunk, or in a block,
    or in a step.

    Args:
        rows: of the sequence, on each rank.
    """
    chunks = run.chunk is not None and run.chunk < rows
    blocks = run.block is not None and run.block < rows
    rows = min(rows, run.block or rows, run.chunk or rows)
    forwards, pairs = passes_of(run.options.checkpoint, chunks=chunks, blocks=blocks)
    costs = state_costs(
        layer, rows, ranks, batch=run.data.batch_size, forwards=forwards, pairs=pairs, rates=rates, nodes=nodes
    )
    way = cheapest(costs) if run.options.linear_attention == "auto" else run.options.linear_attention
    way = way if way in costs and ranks > 1 else "pass"  # heads of fewer than ranks are not shared
    return way, costs[way]
