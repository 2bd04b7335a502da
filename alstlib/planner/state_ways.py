"""What a layer with a state adds to a step over ranks: its state passed from rank to rank, or its heads dealt out.

Both give the same result (`linear.pass_state`, `linear.by_heads`), and a run takes one by a rule (`linear.ways`), not
by these seconds. Passing sends a pair for each head, whatever the length, and computes twice what the slice does to the
state. Heads send all tokens and compute nothing twice. For L tokens of each of P ranks, with `forwards` passes over the
layer before its backward (2 under a checkpoint) and `pairs` of them that make pairs (1 under a checkpoint, whose
recompute knows the state that comes in):

    pass:  (pairs + 1) * (P - 1) * pair bytes / link
           + L * H * (pairs * FLOPs of a pair + 2 * FLOPs of a forward) / (RECURRENCE * matmul)
    heads: (forwards + 1) * exchanged * L / link

The pair is (M, U) in fp32 of every head, and in backward (M, W). W, what a slice's own outputs contribute to the
gradient of the state that comes in, is a backward of the recurrence once more: two forwards. `exchanged` are the bytes
of a token that a rank sends to others for a forward (inputs to heads, outputs back), as for a backward.
"""

from __future__ import annotations

from alstlib.linear.ways import StateLayer
from alstlib.planner.gpus import Rates, rates_of

RECURRENCE = 0.1
"""The share of the rate of dense matrix products that a recurrence's kernel reaches: its products are small, and the
blocks of a sequence wait for each other. A nominal share, not measured."""


def forward_flops(layer: StateLayer, more: int = 0) -> float:
    """Operations of one token in one head, where the kernel works in chunks, with so many more values."""
    keys, values = layer.keys, layer.values + more
    if layer.matrix:
        return 6.0 * keys * values + layer.chunk_size * (5 * keys + 3 * values)
    return 4.0 * keys * values + 2 * layer.chunk_size * (keys + values)


def pair_bytes(layer: StateLayer, batch: int = 1) -> int:
    """Bytes of (M, U) of all heads in fp32."""
    return batch * layer.heads * (layer.keys * layer.values + (layer.keys**2 if layer.matrix else 1)) * 4


def exchanged(layer: StateLayer, ranks: int) -> int:
    """Bytes of each of its tokens that a rank sends to others in a forward by heads, and again in its backward."""
    sent = (*layer.inputs, layer.output)
    return sum(max(1, s.groups // ranks) * s.width * s.element_bytes for s in sent) * (ranks - 1)


def counted(layer: StateLayer, tokens: int, batch: int = 1) -> int:
    """The largest product that the kernel of a recurrence counts in a call with so many tokens of each rank, whichever
    way it runs over ranks: one of its inputs, or Mamba-2's states of all chunks (`kernels.int32`)."""
    states = 0 if layer.matrix else layer.keys * layer.values // layer.chunk_size
    return batch * tokens * layer.heads * max(layer.values, layer.keys if layer.matrix else states)


def state_seconds(
    layer: StateLayer, way: str, tokens: int, ranks: int, *, batch: int = 1, passes: tuple[float, float] = (2, 1),
    rates: Rates | None = None, nodes: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """(sending, computing): what a way, `pass` or `heads`, adds to one layer and step of one rank. What runs once in
    both (the recurrence itself) is in neither.

    Args:
        tokens: L, of the sequence or of a chunk.
        batch: samples.
        passes: over the layer before its backward, and those of them that make and exchange pairs.
        rates: of the machine; None: those of an H100.
        nodes: do the ranks lie on several nodes?
    """
    rates, (forwards, pairs) = rates_of("H100") if rates is None else rates, passes
    link = rates.network if nodes else rates.link
    if way == "heads":
        return batch * tokens * (forwards + 1) * exchanged(layer, ranks) / link, 0.0
    sent = (pairs + 1) * (ranks - 1) * pair_bytes(layer, batch)
    again = pairs * forward_flops(layer, layer.keys if layer.matrix else 0) + 2 * forward_flops(layer)
    work = 0.0 if ranks == 1 else batch * tokens * layer.heads * again
    return sent / link, work / (RECURRENCE * rates.matmul)
