"""Estimate the time of a step from its FLOPs, the bytes that it moves, and rates (`gpus`), kernels at their best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from alstlib.config import RunConfig
from alstlib.planner.activations import FLASH_2, Activations
from alstlib.planner.fits import element_bytes
from alstlib.planner.gpus import Rates
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Recurrence, Shape
from alstlib.planner.state_ways import RECURRENCE, added, passes_of


def attention_flops(shape: Shape, seq_len: int, share: float = 1.0) -> float:
    """Of one forward over a sample, all layers: QK^T and PV of the causal half, or of what lies in a sliding window.
    `share` is that of the pairs which layers without a window compute."""
    windows = replace(shape, attending=shape.windowed).pairs(seq_len)
    pairs = share * (shape.pairs(seq_len) - windows) + windows
    return 2.0 * pairs * shape.heads * (shape.head_dim + shape.value_dim)


def linear_flops(shape: Shape, tokens: int) -> dict[str, float]:
    """Of one forward, all layers: projections of attention, MLPs (of experts, those that a token goes to), and the
    head."""
    return {
        "projections": 2.0 * tokens * shape.mixing, "mlp": 2.0 * tokens * shape.mlp_of_token,
        "head": 2.0 * tokens * shape.embedding,
    }  # fmt: skip


def model_flops(shape: Shape, run: RunConfig, seq_len: int) -> float:
    """Of one optimizer step over one sample on each replica: forwards and backwards of the causal half, and nothing
    that is computed twice. An MFU compares them with the GPU's peak."""
    states = 0.0 if shape.recurrence is None else shape.recurrence.layers * shape.recurrence.flops * seq_len
    linear = sum(linear_flops(shape, seq_len).values()) * (1 + _backwards(run))
    samples = run.data.batch_size * run.optim.accumulation
    return samples * (linear + 3 * (attention_flops(shape, seq_len) + states))


def exchange_bytes(shape: Shape, ranks: int, seq_len: int, element: int, forwards: float, saved: float) -> float:
    """Bytes that one rank sends for attention in a step, all layers, where ranks have whole heads or share one.

    A forward sends queries, keys and values to heads and outputs back; a backward outputs' gradients to heads and
    those of queries, keys and values back. Where outputs were kept, the recompute runs no forward, and backward sends
    queries, keys and values, with one number for each token and head in place of the outputs.

    Args:
        forwards: passes over a layer before its backward: 2 with checkpoints, else 1.
        saved: share of the layers whose outputs are kept.
    """
    if ranks == 1:
        return 0.0
    query, kv, keys, values = shape.heads, max(shape.kv_heads, ranks), shape.head_dim, shape.value_dim
    there, back = query * keys + kv * (keys + values), query * values
    numbers = (forwards - saved) * (there + back) + (there + back) + saved * (there + query * 4 / element)
    return numbers * element * (seq_len / ranks) * (ranks - 1) / ranks * shape.attending


def states_seconds(
    of: Recurrence, run: RunConfig, machine: Machine, ranks: int, seq_len: int, forwards: float
) -> tuple[float, float]:
    """(exchange, computing) of all layers with a state in a step over one sample: a backward is twice a forward, and
    `state_ways.added` says what the way over ranks adds. Each pass sends the last tokens of a slice or chunk too."""
    rates, nodes, rows = machine.rates, ranks > machine.per_node, -(-seq_len // ranks)
    _, passes = passes_of(run, rows)
    pieces = -(-rows // min(rows, run.chunk or rows, run.block or rows))
    network = rates.network if nodes else rates.link
    tails = (passes + 1.0) * (ranks - 1) * run.data.batch_size * element_bytes(run, "cuda") * of.tail / network
    one = of.flops * seq_len * run.data.batch_size * (2 + forwards) / (RECURRENCE * rates.matmul) / ranks
    sent, work = added(of.layer, run, ranks, rows, rates, nodes) if of.layer else (0.0, 0.0)
    return of.layers * pieces * (sent + tails), of.layers * (one + pieces * work)


def step_seconds(
    shape: Shape, run: RunConfig, machine: Machine, ranks: int, seq_len: int, found: Activations, preset: str = "ours"
) -> dict[str, float]:
    """Seconds of one optimizer step over one sample on each replica, by part; `step` is the time that passes.

    Layers run forward, again for their backward unless everything is kept, and backward: twice a forward, or once where
    an adapter is trained, because frozen weights have no gradients (the adapter's own products are left out). Where one
    input in k is kept, the layers of the others run forward once more. Attention runs forward once where its outputs
    are kept, and its backward is 2.5 forwards. The exchange is waited for. ZeRO's traffic and asynchronous offload hide
    behind the computing, as far as that lasts.
    """
    element, rates = element_bytes(run, "cuda"), machine.rates
    again = 1.0 if run.options.checkpoint else 0.0
    forward, backward = _attention_rates(shape, found, rates)
    linear = linear_flops(shape, seq_len * run.data.batch_size)
    attention = attention_flops(shape, seq_len, found.attention_share) * run.data.batch_size
    first = _before_blocks(run, ranks, seq_len)  # forward without a graph
    once = 1 + _backwards(run)
    remade, kept = _made_again(shape, found), found.attention_kept
    passes = {
        "projections": once + again + remade + first + _chunk_again(run),
        "mlp": once + again + remade + first + _thrice(run, preset), "head": once + first,
    }  # fmt: skip
    matmul = sum(linear[name] * times for name, times in passes.items()) / rates.matmul / ranks
    core = attention * ((1 + (again + remade) * (1 - kept) + first) / forward + 2.5 / backward) / ranks
    network = rates.link if ranks <= machine.per_node else rates.network
    forwards = 1 + again + remade * (1 - kept)
    wire = exchange_bytes(shape, ranks, seq_len * run.data.batch_size, element, forwards, kept)
    exchange = wire / network
    if shape.recurrence is not None:
        sent, recurrence = states_seconds(shape.recurrence, run, machine, ranks, seq_len, 1 + again + remade + first)
        exchange, core = exchange + sent, core + recurrence
    zero = _zero_seconds(shape, run, machine, remade) * (
        -(-seq_len // (run.block * ranks)) if run.block and first else 1
    )
    offload = found.copied / rates.host
    shard = _trained(shape, run) / (machine.gpus if run.engine.zero_stage else 1)
    optimizer = (
        ADAM_BYTES
        * shard
        / (rates.host_memory if run.engine.offload_optimizer and run.engine.zero_stage else DEVICE_MEMORY)
    )
    computing = (matmul + core) * run.optim.accumulation
    waited = max(0.0, zero - computing)
    if run.options.offload == "sync":
        waited += offload * run.optim.accumulation
    elif run.options.offload:
        waited += max(0.0, offload * run.optim.accumulation - computing)
    step = computing + exchange * run.optim.accumulation + waited + optimizer
    return {
        "step": step, "matrix products": matmul * run.optim.accumulation, "attention": core * run.optim.accumulation,
        "exchange": exchange * run.optim.accumulation, "waiting for memory and network": waited, "optimizer": optimizer,
    }  # fmt: skip


BLOCKWISE = 64
"""Bytes that `kernels.blockwise` reads and writes for each score in forward, and half of what it does in backward: its
products and functions of a block pass through the device's memory in fp32."""


def _attention_rates(shape: Shape, found: Activations, rates: Rates) -> tuple[float, float]:
    flash2 = found.kernel in FLASH_2
    forward = rates.flash2_forward if flash2 else rates.attention_forward
    backward = rates.flash2_backward if flash2 else rates.attention_backward
    if found.kernel == "blockwise":
        score = 2 * (shape.head_dim + shape.value_dim) * DEVICE_MEMORY / BLOCKWISE
        forward, backward = min(forward, score), min(backward, 2.5 / 2 * score)
    return forward, backward


def _before_blocks(run: RunConfig, ranks: int, seq_len: int) -> float:
    return 1.0 if run.block is not None and run.block * ranks < seq_len else 0.0


def _made_again(shape: Shape, found: Activations) -> float:
    """Share of the layers whose input is not kept: a forward of the layer before makes it for backward."""
    return 1 - -(-shape.layers // found.inputs_kept_every) / shape.layers


def _backwards(run: RunConfig) -> float:
    """Matrix products of a backward, compared with a forward: of inputs' gradients, and of trained weights'."""
    return 2.0 if run.model.lora is None else 1.0


def _trained(shape: Shape, run: RunConfig) -> int:
    return shape.parameters if run.model.lora is None else shape.adapter_parameters(run.model.lora)


def _chunk_again(run: RunConfig) -> float:
    return 1.0 if run.chunk is not None else 0.0  # keys and values are made again before backward


def _thrice(run: RunConfig, preset: str) -> float:
    return 1.0 if preset == "paper" and run.options.tile("mlp") else 0.0  # its tiles run again in backward


def _zero_seconds(shape: Shape, run: RunConfig, machine: Machine, remade: float) -> float:
    rates, world = machine.rates, machine.gpus
    share = rates.link if world <= machine.per_node else rates.network
    gathers, reduces = {3: (2 + remade, 1), 2: (0, 1), 1: (0, 2), 0: (0, 2)}[run.engine.zero_stage]
    element = element_bytes(run, "cuda")
    moved = gathers * shape.parameters + reduces * _trained(shape, run)
    zero = moved * element * (world - 1) / world / share * run.optim.accumulation
    return max(zero, 2 * shape.parameters * element / world / rates.host) if run.engine.offload_params else zero


ADAM_BYTES = 28
"""That AdamW reads and writes for each weight in fp32: it, its gradient and two moments."""
DEVICE_MEMORY = 3e12
"""Bytes a second of a GPU's own memory."""

COMPUTE, EXCHANGE, COPIES, STATES = "computing", "exchange", "copies to and from the host", "weights and gradients"
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
    one input in k is kept with the layer's share of the forwards that make the others).

    Computing and the exchange take turns. Copies to the host, and ZeRO's traffic, begin with the pass and run beside
    it: what has not ended with the computing is waited for. The layer's attention output is kept if most layers' are.
    With `offload="sync"` copies come first, and computing waits.
    """
    kept, rates = round(found.attention_kept) if run.options.checkpoint else 0, machine.rates
    linear = linear_flops(shape, seq_len * run.data.batch_size)
    per_layer = rates.matmul * ranks * shape.layers
    projections, mlp = linear["projections"] / per_layer, linear["mlp"] / per_layer
    query, kv = shape.heads, max(shape.kv_heads, ranks)  # in what is sent
    into = shape.heads + 2 * shape.kv_heads  # in projections: queries, keys, values; then the output's
    first, last = projections * into / (into + shape.heads), projections * shape.heads / (into + shape.heads)
    forward, backward = _attention_rates(shape, found, rates)
    core = attention_flops(shape, seq_len, found.attention_share) * run.data.batch_size / ranks / shape.layers
    one_pass = exchange_bytes(shape, ranks, seq_len * run.data.batch_size, element_bytes(run, "cuda"), 1, 0) / 2
    network = rates.link if ranks <= machine.per_node else rates.network
    unit = one_pass / (2 * query + 2 * kv) / network / shape.layers
    row_sums = 4 / (shape.head_dim * element_bytes(run, "cuda")) * query

    there = [
        (COMPUTE, "queries, keys, values", first), (EXCHANGE, "to heads", unit * (query + 2 * kv)),
        (COMPUTE, "attention", core / forward), (EXCHANGE, "to rows", unit * query),
        (COMPUTE, "output projection", last), (COMPUTE, "MLP", mlp),
    ]  # fmt: skip
    back: list[tuple[str, str, float]] = []
    if run.options.checkpoint and kept:
        back = [(COMPUTE, "projections again", projections), (COMPUTE, "MLP again", mlp)]
    elif run.options.checkpoint:
        back = [(lane, f"{what} again" if lane == COMPUTE else what, seconds) for lane, what, seconds in there]
    remade = _made_again(shape, found)
    back = [
        (lane, f"{what} for an input" if lane == COMPUTE else what, seconds * remade) for lane, what, seconds in back
    ] + back
    sent = query + kept * (query + 2 * kv + row_sums)  # outputs' gradients; and what kept outputs did not need again
    times = _backwards(run)
    back += [
        (COMPUTE, "keys, values again", projections * _chunk_again(run)),
        (COMPUTE, "MLP's tiles again", mlp * _thrice(run, preset)),
        (COMPUTE, "MLP, backward", times * mlp), (COMPUTE, "output projection, backward", times * last),
        (EXCHANGE, "to heads", unit * sent), (COMPUTE, "attention, backward", 2.5 * core / backward),
        (EXCHANGE, "to rows", unit * (query + 2 * kv)), (COMPUTE, "queries, keys, values, backward", times * first),
    ]  # fmt: skip
    copy = found.copied / 2 / shape.layers / rates.host
    of_layer = shape.layer_parameters / shape.parameters / run.optim.accumulation
    states = _zero_seconds(shape, run, machine, remade) * of_layer
    gathers = 2 + remade + _trained(shape, run) / shape.parameters  # forward gathers once, backward gathers and reduces
    gathered = states / gathers if run.engine.zero_stage == 3 else 0.0
    beside = {
        "forward": [(COPIES, "kept for backward", copy), (STATES, "gather", gathered)],
        "backward": [(COPIES, "brought back", copy), (STATES, "gather, reduce", states - gathered)],
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
