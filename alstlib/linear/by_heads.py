"""Layers with a state over ranks by the exchange of Ulysses: slices of the sequence for heads, and back.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, H heads, h heads of this rank, G groups of
heads (those of keys and queries, or of Mamba-2's B and C), K and V widths of keys and values.

The heads of a recurrence are independent, as those of attention are. So a rank can have the tokens of all ranks for
some heads and run its kernel once over the whole sequence: it makes no pair and runs nothing twice, as `pass_state`
does, but what it sends grows with the sequence. Both ways give the same result. Whole heads are dealt out as evenly as
they can be (H need not be a multiple of P, but must not be less), and of each group a rank gets what its heads need;
the gradients of a group that several ranks need are summed in fp32. A recompute exchanges again: under checkpoints the
tokens travel twice forward and once backward, without them once and once.

The convolution before the recurrence stays with the slices (`convolution`): it exchanges W - 1 tokens of all channels,
far less than an exchange of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.spans import Documents
from alstlib.linear.pass_state import pass_state
from alstlib.linear.rule import StateRule
from alstlib.recompute import first_order
from alstlib.sizing import groups_of, own_heads
from alstlib.ulysses.alltoall import Exchange


def by_heads(
    rule: StateRule, tokens: Sequence[Tensor], weights: Sequence[Tensor], exchange: Exchange,
    documents: Documents = None, *, start: Tensor | None = None, first: int = 0, length: int | None = None,
    known: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `pass_state` returns, by an exchange of tokens for heads: the output [B, L, H, V] for this rank's
    tokens, and the state [B, h, ..] of this rank's heads after the tokens of all ranks.

    In chunks, `start` is the state of this rank's heads too: each rank carries its own from chunk to chunk.

    Args:
        tokens: the kernel's inputs, [B, L, H, ..] or [B, L, G, ..] with a width or none, of this rank's tokens.
        weights: its further inputs, [H, ..]. This rank's gradients of other heads are zero, so that the sum over ranks
            is the whole gradient, as with `pass_state`.
        documents, first, length: as `pass_state` takes them.
        known: not used.

    Raises:
        ValueError: there are more ranks than heads.
    """
    heads, ranks = max(t.shape[2] for t in tokens), exchange.ranks
    if ranks > heads:
        raise ValueError(f"{ranks} ranks cannot each have one of {heads} heads; at most {heads} ranks can")
    own = own_heads(heads, ranks, exchange.rank)
    if ranks > 1:
        mine = _ToHeads.apply(exchange, heads, *tokens)
        tokens, weights = (
            [_for_own_heads(t, own, n.shape[2], heads) for t, n in zip(mine, tokens)],
            [w[own] for w in weights],
        )
    out, state = pass_state(rule, tokens, weights, Exchange(), documents, start=start, first=first, length=length)
    return (_ToTokens.apply(exchange, heads, out) if ranks > 1 else out), state


def _for_own_heads(x: Tensor, own: slice, groups: int, heads: int) -> Tensor:
    """x [B, S, groups that the heads `own` need, ..], as a kernel takes it: each group for equally many heads. Groups
    are repeated where the ranks' heads divide them unevenly."""
    size = heads // groups
    if x.shape[2] == 1 or not (own.start % size or own.stop % size):
        return x
    index = torch.arange(own.start, own.stop, device=x.device) // size - own.start // size
    return x.index_select(2, index)


class _ToHeads(torch.autograd.Function):
    """Tensors [B, L, H or G, ..] -> [B, S, what this rank's heads need of them, ..]."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.heads, ctx.needs = exchange, heads, ctx.needs_input_grad[2:]
        ctx.groups = [t.shape[2] for t, need in zip(tensors, ctx.needs) if need]
        outs = _to_heads(exchange, heads, tensors)
        ctx.mark_non_differentiable(*(out for out, need in zip(outs, ctx.needs) if not need))
        return tuple(outs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [g for g, need in zip(grads, ctx.needs) if need]
        found = iter(_to_tokens(ctx.exchange, ctx.heads, ctx.groups, wanted))
        return None, None, *(next(found) if need else None for need in ctx.needs)


class _ToTokens(torch.autograd.Function):
    """The output [B, S, h, V] of this rank's heads -> [B, L, H, V]."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, heads: int, x: Tensor) -> Tensor:
        ctx.exchange, ctx.heads = exchange, heads
        return _to_tokens(exchange, heads, [heads], [x])[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _to_heads(ctx.exchange, ctx.heads, [grad])[0]


def _to_heads(exchange: Exchange, heads: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """One exchange for each dtype; the results are views of what arrived."""
    (b, rows), ranks, outs = tensors[0].shape[:2], range(exchange.ranks), list(tensors)
    for at in _of_one_dtype(tensors):
        some = [_with_width(tensors[i]) for i in at]
        needs = [[groups_of(t.shape[2], heads, len(ranks), r) for t in some] for r in ranks]
        sizes = [b * rows * sum(_widths(some, need)) for need in needs]
        send = some[0].new_empty(sum(sizes))
        for need, message in zip(needs, send.split(sizes)):
            for t, groups, part in zip(some, need, _parts(message, b, rows, some, need)):
                part.copy_(t[:, :, groups].transpose(0, 1))
        own = needs[exchange.rank]
        receive = exchange.swap_unequal(send, sizes, [sizes[exchange.rank]] * len(ranks))
        for i, part in zip(at, _parts(receive, b, rows * len(ranks), some, own)):
            outs[i] = part.transpose(0, 1) if tensors[i].ndim == 4 else part.transpose(0, 1)[..., 0]
    return outs


def _to_tokens(exchange: Exchange, heads: int, groups: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The way back, of tensors [B, S, what this rank's heads need, ..] that have so many groups: what several ranks
    need is summed."""
    (b, length), ranks, outs = tensors[0].shape[:2], range(exchange.ranks), list(tensors)
    rows = length // len(ranks)
    for at in _of_one_dtype(tensors):
        some = [_with_width(tensors[i]) for i in at]
        needs = [[groups_of(groups[i], heads, len(ranks), r) for i in at] for r in ranks]
        sizes = [b * rows * sum(_widths(some, need)) for need in needs]
        own, size = needs[exchange.rank], sizes[exchange.rank]
        send = some[0].new_empty(size * len(ranks))
        for t, part in zip(some, _parts(send, b, length, some, own)):
            part.copy_(t.transpose(0, 1))
        receive = exchange.swap_unequal(send, [size] * len(ranks), sizes).split(sizes)
        arrived = [_parts(message, b, rows, some, need) for message, need in zip(receive, needs)]
        for k, (i, t) in enumerate(zip(at, some)):
            shared = sum(need[k].stop - need[k].start for need in needs) > groups[i]
            wide = torch.promote_types(t.dtype, torch.float32) if shared else t.dtype
            out = (torch.zeros if shared else torch.empty)(b, rows, groups[i], t.shape[3], dtype=wide, device=t.device)
            for parts, need in zip(arrived, needs):
                there = out[:, :, need[k]]
                there.add_(parts[k].transpose(0, 1)) if shared else there.copy_(parts[k].transpose(0, 1))
            outs[i] = out.to(t.dtype).view(b, rows, groups[i], *tensors[i].shape[3:])
    return outs


def _of_one_dtype(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors that travel together."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        yield [i for i, t in enumerate(tensors) if t.dtype == dtype]


def _with_width(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x[..., None]


def _widths(tensors: Sequence[Tensor], needs: Sequence[slice]) -> list[int]:
    """Numbers of a token in these groups of each tensor."""
    return [(need.stop - need.start) * t.shape[3] for t, need in zip(tensors, needs)]


def _parts(message: Tensor, b: int, rows: int, tensors: Sequence[Tensor], needs: Sequence[slice]) -> list[Tensor]:
    """Views [rows, B, groups, width] of a message, one for each tensor: tokens lie outermost."""
    parts = message.view(rows, b, -1).split(_widths(tensors, needs), 2)
    return [part.unflatten(2, (-1, t.shape[3])) for part, t in zip(parts, tensors)]
