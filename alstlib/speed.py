"""How long a step takes, from its FLOPs, the bytes it moves and rates (`rates`): an estimate, kernels at their best."""

from __future__ import annotations

from alstlib.activations import Activations, element_bytes
from alstlib.config import RunConfig
from alstlib.rates import Rates
from alstlib.shapes import Shape


def attention_flops(shape: Shape, seq_len: int) -> float:
    """Of one forward over a sample, all layers, the causal half: QK^T and PV."""
    return 2.0 * seq_len**2 * shape.heads * shape.head_dim * shape.layers


def linear_flops(shape: Shape, tokens: int) -> dict[str, float]:
    """Of one forward, all layers: projections of attention, MLPs, and the head."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = 2.0 * tokens * shape.layers * shape.width * (2 * query + 2 * kv)
    mlp = 2.0 * tokens * shape.layers * 3 * shape.width * shape.mlp
    return {"projections": projections, "mlp": mlp, "head": 2.0 * tokens * shape.embedding}


def exchange_bytes(shape: Shape, ranks: int, seq_len: int, element: int, forwards: float, saved: float) -> float:
    """Bytes that one rank sends for attention in a step, all layers, where ranks have whole heads or share one.

    A forward sends queries, keys and values to heads and outputs back; a backward outputs' gradients to heads and
    those of queries, keys and values back. Where outputs were kept, the recompute runs no forward, and backward sends
    queries, keys and values, with one number a row and head in place of the outputs.

    Args:
        forwards: passes over a layer before its backward: 2 with checkpoints, else 1.
        saved: share of the layers whose outputs are kept.
    """
    if ranks == 1:
        return 0.0
    query, kv = shape.heads, max(shape.kv_heads, ranks)
    units = (forwards - saved) * (2 * query + 2 * kv) + (2 * query + 2 * kv) + saved * (query + 2 * kv)
    units += saved * query * 4 / (shape.head_dim * element)
    return units * shape.head_dim * element * (seq_len / ranks) * (ranks - 1) / ranks * shape.layers


def step_seconds(
    shape: Shape,
    run: RunConfig,
    rates: Rates,
    ranks: int,
    world: int,
    per_node: int,
    seq_len: int,
    found: Activations,
    preset: str = "ours",
) -> dict[str, float]:
    """Seconds of one optimizer step over one sample on each replica, by part; `step` is the time that passes.

    Layers run forward, again for their backward unless everything is kept, and backward (twice a forward); attention
    runs forward once where its outputs are kept, and its backward is 2.5 forwards. The exchange is waited for. ZeRO's
    traffic and asynchronous offload hide behind the computing, as far as that lasts.
    """
    element = element_bytes(run, "cuda")
    again = 1.0 if run.checkpoint else 0.0
    flash2 = preset == "paper" or run.attention in ("flash", "flash_attention_2")
    forward = rates.flash2_forward if flash2 else rates.attention_forward
    backward = rates.flash2_backward if flash2 else rates.attention_backward
    linear = linear_flops(shape, seq_len * run.batch_size)
    attention = attention_flops(shape, seq_len) * run.batch_size
    chunk_again = 1.0 if run.chunk is not None else 0.0  # keys and values are made again before backward
    thrice = 1.0 if preset == "paper" and run.tiled_mlp else 0.0  # its tiles run again in backward
    passes = {"projections": 3 + again + chunk_again, "mlp": 3 + again + thrice, "head": 3.0}
    matmul = sum(linear[name] * times for name, times in passes.items()) / rates.matmul / ranks
    kept = found.attention_kept
    core = attention * ((1 + again * (1 - kept)) / forward + 2.5 / backward) / ranks
    network = rates.link if ranks <= per_node else rates.network
    exchange = exchange_bytes(shape, ranks, seq_len * run.batch_size, element, 1 + again, kept) / network
    share = rates.link if world <= per_node else rates.network
    gathers = {3: 3, 2: 1, 1: 2, 0: 2}[run.zero_stage]
    zero = gathers * shape.parameters * element * (world - 1) / world / share * run.accumulation
    if run.offload_params:
        zero = max(zero, 2 * shape.parameters * element / world / rates.host)
    offload = 2 * found.host / rates.host
    shard = shape.parameters / (world if run.zero_stage else 1)
    optimizer = 28 * shard / (rates.host_memory if run.offload_optimizer and run.zero_stage else 3e12)
    computing = (matmul + core) * run.accumulation
    waited = max(0.0, zero - computing)
    if run.offload == "sync":
        waited += offload * run.accumulation
    elif run.offload == "async":
        waited += max(0.0, offload * run.accumulation - computing)
    step = computing + exchange * run.accumulation + waited + optimizer
    return {
        "step": step, "matrix products": matmul * run.accumulation, "attention": core * run.accumulation,
        "exchange": exchange * run.accumulation, "waiting for memory and network": waited, "optimizer": optimizer,
    }  # fmt: skip
