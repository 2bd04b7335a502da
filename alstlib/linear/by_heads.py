"""Layers with a state over ranks by the exchange of Ulysses: slices of the sequence for heads, and back.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, H heads, G groups of heads (those of keys and
queries, or of Mamba-2's B and C).

The heads of a recurrence are independent, as those of attention are. So a rank can have the tokens of all ranks for
some heads and run its kernel once over the whole sequence: it makes no pair and runs nothing twice, as `pass_state`
does, but what it sends grows with the sequence. Both ways give the same result. Heads are dealt out evenly, and of the
groups a rank gets what its heads need (`StateLayer.way` has the rule). A recompute exchanges again: under checkpoints
the tokens travel twice forward and once backward, without them once and once.

The convolution before the recurrence stays with the slices (`convolution`): it exchanges W - 1 tokens of all channels,
far less than an exchange of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from alstlib.base.types import OutputAndState
from alstlib.linear.pass_state import pass_state
from alstlib.linear.rule import StateRule
from alstlib.ulysses.alltoall import Exchange, swap


def by_heads(
    rule: StateRule, tokens: Sequence[Tensor], weights: Sequence[Tensor], exchange: Exchange, *more: Any, **how: Any
) -> OutputAndState:
    """What `pass_state` returns, by an exchange of tokens for heads: the output [B, L, H, V] for this rank's
    tokens, and the state [B, H / P, ..] of this rank's heads after the tokens of all ranks.

    In chunks, `start` is the state of this rank's heads too: each rank carries its own from chunk to chunk.

    Args:
        tokens: the kernel's inputs, [B, L, H, ..] or [B, L, G, ..] with a width or none, of this rank's tokens.
        weights: its further inputs, [H, ..]. This rank's gradients of other heads are zero, so that the sum over ranks
            is the whole gradient, as with `pass_state`.
        more, how: documents, start, first, length and known, as `pass_state` takes them.
    """
    ranks = exchange.ranks
    if ranks == 1:
        return pass_state(rule, tokens, weights, exchange, *more, **how)
    own, together = list(tokens), dict[Any, list[int]]()
    for i, t in enumerate(tokens):  # one buffer for each dtype, but shared groups have their own
        together.setdefault((t.dtype, min(t.shape[2], ranks)), []).append(i)
    for places in together.values():
        some = [tokens[i] if tokens[i].ndim == 4 else tokens[i][..., None] for i in places]
        for i, t in zip(places, swap(exchange, True, *(t.transpose(1, 2) for t in some))):
            own[i] = t.transpose(1, 2) if tokens[i].ndim == 4 else t.transpose(1, 2).squeeze(3)
    out, state = pass_state(rule, own, [w.chunk(ranks)[exchange.rank] for w in weights], Exchange(), *more, **how)
    # models take views of it; with one head on each rank, heads do not lie side by side
    return swap(exchange, False, out.transpose(1, 2))[0].transpose(1, 2).contiguous(), state
