"""The timeline of one layer that lesson 14 draws: what a rank does for it in a step and when, by predicted rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from alstlib.base.config import RunConfig
from alstlib.planner.activations import Activations
from alstlib.planner.fits import element_bytes
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.step_time import (
    attention_flops,
    attention_rates,
    before_attention,
    disk_seconds,
    exchange_bytes,
    linear_flops,
    mlp_again,
    passes_of,
    products_of_backward,
    trained,
    zero_seconds,
)

COMPUTE, EXCHANGE, COPIES, STATES, DISK = (
    "computing", "exchange", "copies to and from the host", "weights and gradients", "disk",
)  # fmt: skip
"""Lanes of `layer_spans`."""


@dataclass(frozen=True)
class Span:
    """Something that one rank does for a layer, seconds after the layer's pass began."""

    lane: str
    what: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


def layer_spans(
    shape: Shape, run: RunConfig, machine: Machine, ranks: int, seq_len: int, found: Activations, preset: str = "ours"
) -> dict[str, list[Span]]:
    """The parts of `step_seconds` for one of many layers, in `forward` and in `backward` (with its recompute, and where
    one input in k is kept with the layer's share of the forwards that make the others). Of a sample in blocks: all
    blocks together, and in `forward` what runs for the blocks after it too.

    Computing and the exchange take turns. Copies to the host, ZeRO's traffic and a disk's begin with the pass and run
    beside it: what has not ended with the computing is waited for. The layer's attention output is kept if most
    layers' are. With `offload="sync"` copies come first, and computing waits.
    """
    kept, rates = round(found.attention_kept) if run.options.checkpoint else 0, machine.rates
    passes = passes_of(shape, run, replace(found, attention_kept=kept), -(-seq_len // ranks))
    linear = linear_flops(shape, seq_len * run.data.batch_size)
    per_layer = rates.matmul * ranks * shape.layers
    projections, mlp = linear["projections"] / per_layer, linear["mlp"] / per_layer
    query, kv = shape.heads, max(shape.kv_heads, ranks)  # in what is sent
    first = projections * before_attention(shape)
    last = projections - first
    forward, backward = attention_rates(shape, found, rates)
    core = attention_flops(shape, seq_len, found.attention_share) * run.data.batch_size / ranks / shape.layers
    one_pass = exchange_bytes(shape, ranks, seq_len * run.data.batch_size, element_bytes(run, "cuda"), 1, 0) / 2
    network = rates.link if ranks <= machine.per_node else rates.network
    unit = one_pass / (2 * query + 2 * kv) / network / shape.layers
    row_sums = 4 / (shape.head_dim * element_bytes(run, "cuda")) * query

    mixing = [
        (COMPUTE, "queries, keys, values", first), (EXCHANGE, "to heads", unit * (query + 2 * kv)),
        (COMPUTE, "attention", core / forward), (EXCHANGE, "to rows", unit * query),
        (COMPUTE, "output projection", last),
    ]  # fmt: skip
    there = [(lane, what, passes.forward * seconds) for lane, what, seconds in [*mixing, (COMPUTE, "MLP", mlp)]]
    back: list[tuple[str, str, float]] = []
    if run.options.checkpoint and kept:
        back = [(COMPUTE, "projections again", projections)]
    elif run.options.checkpoint:
        back = [(lane, f"{what} again" if lane == COMPUTE else what, seconds) for lane, what, seconds in mixing]
    running = 1 - (
        passes.served - kept
    )  # the share of recomputes that run attention, where its outputs are not kept at all
    recompute = [
        (lane, what, seconds * (running if lane == EXCHANGE or what == "attention again" else 1))
        for lane, what, seconds in back
    ]
    back = [
        (lane, f"{what} for an input" if lane == COMPUTE else what, seconds * passes.remade)
        for lane, what, seconds in [*back, (COMPUTE, "MLP again", mlp)]
    ] + recompute
    sent = query + passes.served * (
        query + 2 * kv + row_sums
    )  # outputs' gradients; and what kept outputs did not need again
    times = products_of_backward(run)
    back += [
        (COMPUTE, "keys, values again", first * passes.keys),
        (COMPUTE, "MLP again", mlp * mlp_again(shape, run, passes, preset)),
        (COMPUTE, "MLP, backward", times * mlp), (COMPUTE, "output projection, backward", times * last),
        (EXCHANGE, "to heads", unit * sent), (COMPUTE, "attention, backward", 2.5 * core / backward),
        (EXCHANGE, "to rows", unit * (query + 2 * kv)), (COMPUTE, "queries, keys, values, backward", times * first),
    ]  # fmt: skip
    copy = found.copied / 2 / shape.layers / rates.host
    of_layer = shape.layer_parameters / shape.parameters / run.optim.accumulation
    states = sum(zero_seconds(shape, run, machine, passes, found.blocks)) * of_layer
    # of these, a forward's; backward gathers and reduces
    gathers = passes.forward + 1 + passes.remade + trained(shape, run) / shape.parameters
    gathered = passes.forward * states / gathers if run.engine.zero_stage == 3 else 0.0
    later = states - gathered
    away, home, _ = (
        s / shape.layers / run.optim.accumulation for s in disk_seconds(shape, run, machine, found, passes)
    )
    beside = {
        "forward": [(COPIES, "kept for backward", copy), (STATES, "gather", gathered), (DISK, "written", away)],
        "backward": [(COPIES, "brought back", copy), (STATES, "gather, reduce", later), (DISK, "read", home)],
    }
    wait = copy if run.options.offload == "sync" else 0.0
    return {
        name: [*_in_turn(spans, wait), *(Span(lane, what, 0.0, s) for lane, what, s in beside[name] if s)]
        for name, spans in (("forward", there), ("backward", back))
    }


def _in_turn(spans: list[tuple[str, str, float]], start: float) -> Iterator[Span]:
    for lane, what, seconds in spans:
        if seconds:
            yield Span(lane, what, start, seconds)
            start += seconds
