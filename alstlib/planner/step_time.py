"""Estimate the time of a step from its FLOPs, the bytes that it moves, and rates (`gpus`), kernels at their best."""

from __future__ import annotations

from dataclasses import dataclass

from alstlib.base.config import RunConfig
from alstlib.base.sizing import tile_for
from alstlib.planner.activations import FLASH_2, Activations
from alstlib.planner.fits import element_bytes
from alstlib.planner.gpus import Rates
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Recurrence, Shape
from alstlib.planner.state_ways import RECURRENCE, state_seconds


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often a micro-batch runs a layer, each time with the work of a forward over all of its tokens."""

    rows: int
    """Tokens of a rank that a layer works on at a time: of a chunk, or of the whole slice."""
    forward: float
    """Forwards before a backward: one, and one more of the tokens whose block runs for the blocks after it."""
    again: float
    """Recomputes of checkpoints: 1, or 0 where everything is kept."""
    remade: float
    """Forwards that make the input of another layer, where one input in k is kept: the share of the layers whose input
    is not kept."""
    keys: float
    """Forwards up to attention that make keys, or states, again before the backward of a layer in chunks: the share of
    tokens that are not in the last chunk (`streaming.chunked`)."""
    sends: float
    """The passes before a backward that send and compute attention, or would if none of its outputs were kept."""
    served: float
    """The share of recomputes that run no attention, because they have its outputs already."""


def passes_of(shape: Shape, run: RunConfig, found: Activations, tokens: int) -> Passes:
    """How often layers run for a slice of so many tokens of a rank.

    In whole layers, the attention outputs of a forward that makes an input serve the recompute of that layer; where
    outputs are kept, that forward runs no attention.
    """
    remade = 1 - -(-shape.layers // found.inputs_kept_every) / shape.layers
    forward, again, more = 1 + found.twice, float(run.options.checkpoint), remade * (1 - found.attention_kept)
    rows = min(run.chunk or tokens, tokens)
    return Passes(
        rows=rows, forward=forward, again=again, remade=remade, keys=(tokens - 1) // rows * rows / tokens,
        sends=forward + again + more, served=found.attention_kept + (0.0 if run.chunk else more),
    )  # fmt: skip


def attention_flops(shape: Shape, seq_len: int, share: float = 1.0) -> float:
    """FLOPs of one forward over a sample, all layers: QK^T and PV of the causal half, or of what lies in a sliding
    window. `share` is that of the pairs which layers without a window compute."""
    return 2.0 * shape.pairs(seq_len, share) * shape.heads * (shape.head_dim + shape.value_dim)


def linear_flops(shape: Shape, tokens: int) -> dict[str, float]:
    """FLOPs of one forward, all layers: projections of attention, MLPs (of experts, those that a token goes to), and
    the head."""
    return {
        "projections": 2.0 * tokens * shape.mixing, "mlp": 2.0 * tokens * shape.mlp_of_token,
        "head": 2.0 * tokens * shape.embedding,
    }  # fmt: skip


def model_flops(shape: Shape, run: RunConfig, seq_len: int) -> float:
    """FLOPs of one optimizer step over one sample on each replica: forwards and backwards of the causal half, and
    nothing that is computed twice. An MFU compares them with the GPU's peak."""
    states = 0.0 if shape.recurrence is None else shape.recurrence.layers * shape.recurrence.flops * seq_len
    linear = sum(linear_flops(shape, seq_len).values()) * (1 + products_of_backward(run))
    samples = run.data.batch_size * run.optim.accumulation
    tower = 0.0
    if (images := shape.images) is not None:
        tower = images.count * (images.products * (1 + products_of_backward(run)) + 3 * images.attention)
    return samples * (linear + tower + 3 * (attention_flops(shape, seq_len) + states))


def exchange_bytes(shape: Shape, ranks: int, seq_len: int, element: int, sends: float, served: float) -> float:
    """Bytes that one rank sends for attention in a step, all layers, where ranks have whole heads or share one.

    A forward sends queries, keys and values to heads and outputs back; a backward outputs' gradients to heads and
    those of queries, keys and values back. Where outputs were kept, the recompute runs no forward, and backward sends
    queries, keys and values, with one number for each token and head in place of the outputs.

    Args:
        sends, served: as `Passes` has them.
    """
    query, kv, keys, values = shape.heads, max(shape.kv_heads, ranks), shape.head_dim, shape.value_dim
    there, back = query * keys + kv * (keys + values), query * values
    numbers = (sends - served) * (there + back) + (there + back) + served * (there + query * 4 / element)
    return numbers * element * (seq_len / ranks) * (ranks - 1) / ranks * shape.attending


def states_seconds(
    of: Recurrence, run: RunConfig, machine: Machine, ranks: int, seq_len: int, passes: Passes
) -> tuple[float, float]:
    """(exchange, computing) of all layers with a state in a step over one sample: a backward is twice a forward, and
    `state_seconds` says what the way over ranks adds. Each pass sends the last tokens of a slice or chunk too. A
    recompute knows the state that came to a whole slice, and not those between chunks."""
    rates, nodes, tokens = machine.rates, ranks > machine.per_node, -(-seq_len // ranks)
    batch, forwards = run.data.batch_size, passes.forward + passes.again + passes.remade + passes.keys
    both = forwards, forwards if passes.keys else passes.forward  # all, and those that make what is passed
    piece = min(passes.rows, run.block or tokens)
    pieces = -(-tokens // piece)
    network = rates.network if nodes else rates.link
    tails = (both[1] + 1) * (ranks - 1) * batch * element_bytes(run, "cuda") * of.tail / network
    one = of.flops * seq_len * batch * (2 + forwards) / (RECURRENCE * rates.matmul) / ranks
    sent = work = 0.0
    if of.layer:
        way = of.layer.way(run.options.linear_attention, ranks)
        sent, work = state_seconds(of.layer, way, piece, ranks, batch=batch, passes=both, rates=rates, nodes=nodes)
    return of.layers * pieces * (sent + tails), of.layers * (one + pieces * work)


def step_seconds(
    shape: Shape, run: RunConfig, machine: Machine, ranks: int, seq_len: int, found: Activations, preset: str = "ours"
) -> dict[str, float]:
    """Seconds of one optimizer step over one sample on each replica, by part; `step` is the time that passes.

    `Passes` says how often layers run; a backward of attention is 2.5 forwards. The exchange is waited for. ZeRO's
    traffic and asynchronous offload hide behind the computing, as far as that lasts; ZeRO's after the last backward is
    waited for. A disk's reads and writes hide too, all together: of checkpoints, of weights in files, and of gradients
    that backward writes to them. The optimizer's step on files hides nothing: DeepSpeed reads a group, steps on it, and
    writes it, one after the other. A vision tower runs like the layers; ranks wait for the one with the most images.
    """
    element, rates, times = element_bytes(run, "cuda"), machine.rates, run.optim.accumulation
    forward, backward = attention_rates(shape, found, rates)
    linear = linear_flops(shape, seq_len * run.data.batch_size)
    attention = attention_flops(shape, seq_len, found.attention_share) * run.data.batch_size
    passes = passes_of(shape, run, found, -(-seq_len // ranks))
    matmul = sum(linear[name] * n for name, n in products(shape, run, passes, preset).items()) / rates.matmul / ranks
    core = attention * ((passes.sends - passes.served) / forward + 2.5 / backward) / ranks
    network = rates.link if ranks <= machine.per_node else rates.network
    wire = exchange_bytes(shape, ranks, seq_len * run.data.batch_size, element, passes.sends, passes.served)
    exchange, of_tower = wire / network, passes.forward + passes.again
    if shape.recurrence is not None:
        sent, recurrence = states_seconds(shape.recurrence, run, machine, ranks, seq_len, passes)
        exchange, core = exchange + sent, core + recurrence
    if (images := shape.images) is not None:
        of_rank = images.of_rank(ranks, run.data.batch_size)
        matmul += of_rank * images.products * (of_tower + products_of_backward(run)) / rates.matmul
        core += of_rank * images.attention * (of_tower / forward + 2.5 / backward)
        exchange += 2 * of_rank * images.each * shape.width * element * (ranks - 1) / ranks / network
    made = {"matrix products": matmul * times, "attention": core * times, "exchange": exchange * times}
    computing, offload = (matmul + core) * times, found.copied / rates.host * times
    beside, after = zero_seconds(shape, run, machine, passes, found.blocks)
    waited = max(0.0, beside - computing) + after
    if run.options.offload:
        waited += offload if run.options.offload == "sync" else max(0.0, offload - computing)
    before = (sum(linear.values()) / rates.matmul + attention / forward) / ranks * times
    out, back, on_files = disk_seconds(shape, run, machine, found, passes)
    waited += max(0.0, out - before) + max(0.0, back - computing + before)
    made["waiting for memory and network"] = waited
    memory = rates.host_memory if run.engine.offload_optimizer and run.engine.zero_stage else DEVICE_MEMORY
    made["optimizer"] = ADAM_BYTES * shard(shape, run, machine) / memory + on_files
    return {"step": sum(made.values()), **made}


def products(shape: Shape, run: RunConfig, passes: Passes, preset: str = "ours") -> dict[str, float]:
    """How often the matrix products of a micro-batch run, each time with the work of a forward: `projections`, those of
    the `mlp`, and the `head`. Of an adapter's frozen weights; its own products are left out."""
    head = passes.forward + products_of_backward(run)
    layers = head + passes.remade
    return {
        "projections": layers + passes.again + passes.keys * before_attention(shape),
        "mlp": layers + mlp_again(shape, run, passes, preset), "head": head,
    }  # fmt: skip


def before_attention(shape: Shape) -> float:
    """The share of the projections' products that attention, or a recurrence, waits for: all but those of outputs."""
    outputs, states = shape.attending * shape.heads * shape.value_dim, shape.recurrence
    if states and states.layer:
        outputs += states.layers * states.layer.heads * states.layer.values
    return 1 - shape.width * outputs / shape.mixing


def mlp_again(shape: Shape, run: RunConfig, passes: Passes, preset: str = "ours") -> float:
    """Forwards of an MLP that its backward takes: a checkpoint's recompute, or its tiles'.

    Tiles run again for their gradients, and a checkpoint of ours leaves the MLP out then; that of the `paper` runs
    both. Ours leave out the last product of an MLP of linear modules (`tiled.last_product`), one of its two or three:
    not of experts, beside an adapter, in chunks that are no longer than a tile, and for a norm that follows (Gemma 2),
    which is not told here. It is the last linear module of a layer.
    """
    tile = run.options.tile("mlp")
    if preset == "paper" or not tile:
        return float(run.options.checkpoint) + bool(tile)
    size = tile_for(max(shape.mlp, shape.width), element_bytes(run, "cuda"), "cuda") if tile is True else tile
    if run.chunk and passes.rows * run.data.batch_size <= size:
        return 1.0
    products = shape.mlp_of_token / max(1, shape.layers * shape.width * shape.mlp)
    adapted = run.model.lora is not None and [*shape.linear][-1] in shape.adapted(run.model.lora)
    return 1.0 if products not in (2, 3) or adapted else 1 - 1 / products


def disk_seconds(
    shape: Shape, run: RunConfig, machine: Machine, found: Activations, passes: Passes
) -> tuple[float, float, float]:
    """(in forwards, in backwards, in the optimizer's step): what a rank's share of its node's disk takes in a step to
    write and to read checkpoints, to read weights in files, to write gradients to them, and to step on states there."""
    filed, paged = (where == "nvme" for where in (run.engine.offload_optimizer, run.engine.offload_params))
    element, times, own = element_bytes(run, "cuda"), run.optim.accumulation, shard(shape, run, machine)
    weights = 0 if run.model.bits else paged * element * shape.parameters / machine.gpus * found.blocks
    moved = (
        (found.disk + weights) * times,
        (found.disk + (passes.forward + passes.remade) * weights) * times + 4 * own * filed,
        (ADAM_BYTES * filed + element * paged) * own,
    )  # fmt: skip
    out, back, step = (nbytes * machine.ranks_of_node / machine.disk_rate for nbytes in moved)
    return out, back, step


def shard(shape: Shape, run: RunConfig, machine: Machine) -> float:
    """Parameters that a rank's optimizer steps on."""
    return trained(shape, run) / (machine.gpus if run.engine.zero_stage else 1)


BLOCKWISE = 64
"""Bytes that `kernels.blockwise` reads and writes for each score in forward, and half of what it does in backward: its
products and functions of a block pass through the device's memory in fp32."""


def attention_rates(shape: Shape, found: Activations, rates: Rates) -> tuple[float, float]:
    """FLOPs a second of the kernel that was found: of its forward, and of its backward."""
    flash2 = found.kernel in FLASH_2
    forward = rates.flash2_forward if flash2 else rates.attention_forward
    backward = rates.flash2_backward if flash2 else rates.attention_backward
    if found.kernel == "blockwise":
        score = 2 * (shape.head_dim + shape.value_dim) * DEVICE_MEMORY / BLOCKWISE
        forward, backward = min(forward, score), min(backward, 2.5 / 2 * score)
    return forward, backward


def products_of_backward(run: RunConfig) -> float:
    """Matrix products of a backward, compared with a forward: of inputs' gradients, and of trained weights'."""
    return 2.0 if run.model.lora is None else 1.0


def trained(shape: Shape, run: RunConfig) -> int:
    """Parameters that are trained."""
    return shape.parameters if run.model.lora is None else shape.adapter_parameters(run.model.lora)


def zero_seconds(shape: Shape, run: RunConfig, machine: Machine, passes: Passes, blocks: int) -> tuple[float, float]:
    """(beside, after): seconds of ZeRO's traffic in a step during forwards and backwards, and after the last of them.

    An all-gather or a reduce-scatter moves each number once, and an all-reduce twice. Stage 3 gathers weights for each
    pass of each micro-batch and block (on the host, they are copied too), and scatters gradients. The others, as
    DeepSpeed 0.19.8 has them: stages 1 and 2 all-reduce gradients (`use_multi_rank_bucket_allreduce` in
    `runtime/zero/stage_1_and_2.py`), and at the optimizer's step gather the weights that were trained
    (`all_gather_dp_groups`); stage 0 all-reduces gradients (`buffered_allreduce_fallback` in `runtime/engine.py`).
    Stage 2 does so in each backward, and a block has one of its own; stages 0 and 1 after the last one of a step
    (`allreduce_gradients`, `block_step`).
    """
    rates, world, own = machine.rates, machine.gpus, trained(shape, run)
    share, element = rates.link if world <= machine.per_node else rates.network, element_bytes(run, "cuda")
    each = run.optim.accumulation * blocks
    whole = 0 if run.model.bits else (passes.forward + 1 + passes.remade) * shape.parameters
    beside, after = {3: (each * (whole + own), 0), 2: (2 * each * own, own), 1: (0, 3 * own), 0: (0, 2 * own)}[
        run.engine.zero_stage
    ]
    sent = element * (world - 1) / world / share
    copied = each * whole * element / world / rates.host if run.engine.offload_params else 0.0
    return max(beside * sent, copied), after * sent


ADAM_BYTES = 28
"""That AdamW reads and writes for each weight in fp32: it, its gradient and two moments. In files, the same."""
DEVICE_MEMORY = 3e12
"""Bytes a second of a GPU's own memory."""
