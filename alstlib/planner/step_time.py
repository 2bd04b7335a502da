"""Estimate the time of a step from its FLOPs, the bytes that it moves, and rates (`gpus`), kernels at their best."""

from __future__ import annotations

from alstlib.base.config import RunConfig
from alstlib.base.sizing import tile_for
from alstlib.planner.activations import FLASH_2, Activations
from alstlib.planner.fits import element_bytes
from alstlib.planner.gpus import Rates
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Recurrence, Shape
from alstlib.planner.state_ways import RECURRENCE, passes_of, state_seconds


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


def exchange_bytes(shape: Shape, ranks: int, seq_len: int, element: int, forwards: float, saved: float) -> float:
    """Bytes that one rank sends for attention in a step, all layers, where ranks have whole heads or share one.

    A forward sends queries, keys and values to heads and outputs back; a backward outputs' gradients to heads and
    those of queries, keys and values back. Where outputs were kept, the recompute runs no forward, and backward sends
    queries, keys and values, with one number for each token and head in place of the outputs.

    Args:
        forwards: passes over a layer before its backward: 2 with checkpoints, else 1; more where inputs are made again.
        saved: share of the layers whose recompute has its outputs already.
    """
    query, kv, keys, values = shape.heads, max(shape.kv_heads, ranks), shape.head_dim, shape.value_dim
    there, back = query * keys + kv * (keys + values), query * values
    numbers = (forwards - saved) * (there + back) + (there + back) + saved * (there + query * 4 / element)
    return numbers * element * (seq_len / ranks) * (ranks - 1) / ranks * shape.attending


def attention_passes(run: RunConfig, remade: float, kept: float) -> tuple[float, float]:
    """(forwards, saved) of `exchange_bytes`, for a share of the layers that run once more to make an input, and a share
    whose attention outputs are kept: saved recomputes run no attention. In whole layers the outputs of the forward that
    makes an input serve the recompute of that layer."""
    more = remade * (1 - kept)
    return 1.0 + run.options.checkpoint + more, kept + (more if run.chunk is None else 0.0)


def states_seconds(
    of: Recurrence, run: RunConfig, machine: Machine, ranks: int, seq_len: int, forwards: float
) -> tuple[float, float]:
    """(exchange, computing) of all layers with a state in a step over one sample: a backward is twice a forward, and
    `state_seconds` says what the way over ranks adds. Each pass sends the last tokens of a slice or chunk too."""
    rates, nodes, tokens = machine.rates, ranks > machine.per_node, -(-seq_len // ranks)
    passes, batch = passes_of(run, tokens), run.data.batch_size
    piece = min(tokens, run.chunk or tokens, run.block or tokens)
    pieces = -(-tokens // piece)
    network = rates.network if nodes else rates.link
    tails = (passes[1] + 1.0) * (ranks - 1) * batch * element_bytes(run, "cuda") * of.tail / network
    one = of.flops * seq_len * batch * (2 + forwards) / (RECURRENCE * rates.matmul) / ranks
    sent = work = 0.0
    if of.layer:
        way = of.layer.way(run.options.linear_attention, ranks)
        sent, work = state_seconds(of.layer, way, piece, ranks, batch=batch, passes=passes, rates=rates, nodes=nodes)
    return of.layers * pieces * (sent + tails), of.layers * (one + pieces * work)


def step_seconds(
    shape: Shape, run: RunConfig, machine: Machine, ranks: int, seq_len: int, found: Activations, preset: str = "ours"
) -> dict[str, float]:
    """Seconds of one optimizer step over one sample on each replica, by part; `step` is the time that passes.

    `passes` says how often matrix products run, `attention_passes` how often attention does, whose backward is 2.5
    forwards. The exchange is waited for. ZeRO's traffic and asynchronous offload hide behind the computing, as far as
    that lasts. So do a disk's reads and writes, all together: of checkpoints, of weights in files, and of gradients
    that backward writes to them. The optimizer's step on files hides nothing: DeepSpeed reads a group, steps on it, and
    writes it, one after the other. A vision tower runs like the layers; ranks wait for the one with the most images.
    """
    element, rates, times = element_bytes(run, "cuda"), machine.rates, run.optim.accumulation
    forward, backward = attention_rates(shape, found, rates)
    linear = linear_flops(shape, seq_len * run.data.batch_size)
    attention = attention_flops(shape, seq_len, found.attention_share) * run.data.batch_size
    matmul = sum(linear[name] * n for name, n in passes(shape, run, found, preset).items()) / rates.matmul / ranks
    remade, first = made_again(shape, found), found.twice
    forwards, served = attention_passes(run, remade, found.attention_kept)
    core = attention * ((forwards - served + first) / forward + 2.5 / backward) / ranks
    network = rates.link if ranks <= machine.per_node else rates.network
    wire = exchange_bytes(shape, ranks, seq_len * run.data.batch_size, element, forwards + first, served)
    exchange, of_layer = wire / network, 1.0 + run.options.checkpoint + first
    if shape.recurrence is not None:
        sent, recurrence = states_seconds(shape.recurrence, run, machine, ranks, seq_len, of_layer + remade)
        exchange, core = exchange + sent, core + recurrence
    if (images := shape.images) is not None:
        of_rank = images.of_rank(ranks, run.data.batch_size)
        matmul += of_rank * images.products * (of_layer + products_of_backward(run)) / rates.matmul
        core += of_rank * images.attention * (of_layer / forward + 2.5 / backward)
        exchange += 2 * of_rank * images.each * shape.width * element * (ranks - 1) / ranks / network
    made = {"matrix products": matmul * times, "attention": core * times, "exchange": exchange * times}
    computing, offload = (matmul + core) * times, found.copied / rates.host * times
    waited = max(0.0, zero_seconds(shape, run, machine, remade + first) * found.blocks - computing)
    if run.options.offload:
        waited += offload if run.options.offload == "sync" else max(0.0, offload - computing)
    before = (sum(linear.values()) / rates.matmul + attention / forward) / ranks * times
    out, back, on_files = disk_seconds(shape, run, machine, found)
    waited += max(0.0, out - before) + max(0.0, back - computing + before)
    made["waiting for memory and network"] = waited
    memory = rates.host_memory if run.engine.offload_optimizer and run.engine.zero_stage else DEVICE_MEMORY
    made["optimizer"] = ADAM_BYTES * shard(shape, run, machine) / memory + on_files
    return {"step": sum(made.values()), **made}


def passes(shape: Shape, run: RunConfig, found: Activations, preset: str = "ours") -> dict[str, float]:
    """How often the matrix products of a step run, each time with the work of a forward: `projections`, those of the
    `mlp`, and the `head`.

    Layers run forward, again for their backward unless everything is kept, and backward: twice a forward, or once where
    an adapter is trained, because frozen weights have no gradients (the adapter's own products are left out). Where one
    input in k is kept, the layers of the others run forward once more; so does a block for the blocks after it. Layers
    in chunks make keys and values again before their backward.
    """
    once, more = 1 + found.twice + products_of_backward(run), made_again(shape, found)
    return {
        "projections": once + more + run.options.checkpoint + (run.chunk is not None),
        "mlp": once + more + mlp_again(shape, run, preset), "head": once,
    }  # fmt: skip


def mlp_again(shape: Shape, run: RunConfig, preset: str = "ours") -> float:
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
    if run.chunk is not None and run.chunk <= size:
        return 1.0
    products = shape.mlp_of_token / max(1, shape.layers * shape.width * shape.mlp)
    adapted = run.model.lora is not None and [*shape.linear][-1] in shape.adapted(run.model.lora)
    return 1.0 if products not in (2, 3) or adapted else 1 - 1 / products


def disk_seconds(shape: Shape, run: RunConfig, machine: Machine, found: Activations) -> tuple[float, float, float]:
    """(in forwards, in backwards, in the optimizer's step): what a rank's share of its node's disk takes in a step to
    write and to read checkpoints, to read weights in files, to write gradients to them, and to step on states there."""
    filed, paged = (where == "nvme" for where in (run.engine.offload_optimizer, run.engine.offload_params))
    element, times, own = element_bytes(run, "cuda"), run.optim.accumulation, shard(shape, run, machine)
    weights = 0 if run.model.bits else paged * element * shape.parameters / machine.gpus * found.blocks
    gathers = 1 + made_again(shape, found) + found.twice
    moved = (
        (found.disk + weights) * times, (found.disk + gathers * weights) * times + 4 * own * filed,
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


def made_again(shape: Shape, found: Activations) -> float:
    """Share of the layers whose input is not kept: a forward of the layer before makes it for backward."""
    return 1 - -(-shape.layers // found.inputs_kept_every) / shape.layers


def products_of_backward(run: RunConfig) -> float:
    """Matrix products of a backward, compared with a forward: of inputs' gradients, and of trained weights'."""
    return 2.0 if run.model.lora is None else 1.0


def trained(shape: Shape, run: RunConfig) -> int:
    """Parameters that are trained."""
    return shape.parameters if run.model.lora is None else shape.adapter_parameters(run.model.lora)


def zero_seconds(shape: Shape, run: RunConfig, machine: Machine, remade: float) -> float:
    """Seconds of ZeRO's gathering and reducing in a step, and of copying weights from the host, where layers run
    forward `remade` times more than once in forward and once in backward."""
    rates, world = machine.rates, machine.gpus
    share = rates.link if world <= machine.per_node else rates.network
    gathers, reduces = {3: (2 + remade, 1), 2: (0, 1), 1: (0, 2), 0: (0, 2)}[run.engine.zero_stage]
    element = element_bytes(run, "cuda")
    gathered = 0 if run.model.bits else shape.parameters  # whole on each rank
    moved = gathers * gathered + reduces * trained(shape, run)
    zero, away = moved * (world - 1) / world / share, gathers * gathered / world / rates.host
    return (max(zero, away) if run.engine.offload_params else zero) * element * run.optim.accumulation


ADAM_BYTES = 28
"""That AdamW reads and writes for each weight in fp32: it, its gradient and two moments. In files, the same."""
DEVICE_MEMORY = 3e12
"""Bytes a second of a GPU's own memory."""
