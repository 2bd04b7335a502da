"""The short causal convolution of layers with a state, over a sequence of which each rank holds a slice.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, C channels, W width (in tokens).

A token's output needs the W - 1 tokens before it. So each rank gives its last W - 1 tokens to the others, and puts what
comes before its slice in front of it. A document begins with zeros before its first token, wherever ranks cut. That is
so too where the recurrence after it exchanges tokens for heads (`by_heads`): W - 1 tokens of all channels are far
less than all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.spans import Documents, document_spans, once
from alstlib.recompute import first_order
from alstlib.ulysses.alltoall import Exchange


def causal_convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, width: int, exchange: Exchange, documents: Documents = None, *,
    start: Tensor | None = None, first: int = 0, length: int | None = None, known: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, C, L], this rank's tokens -> their outputs [B, C, L], and the last W - 1 tokens of all ranks.

    The tokens of all ranks may be a part of the sequence (a chunk): then `start` [B, C, W - 1] are the tokens before
    them, the same on all ranks, as their gradient is, and that of the tokens that are returned.

    Args:
        convolve: the convolution of one device, [b, C, n] -> [b, C, n], with zeros before its first token. What it does
            to each of its outputs (a bias, an activation) is done once.
        width: W.
        documents: global offsets into the flattened [B * S] batch; None makes every micro-batch row one document.
        start: None for zeros.
        first: where the part begins in the sequence.
        length: S; None: the part is all of it.
        known: what a first pass leaves for its recompute, which then exchanges no tokens: those before the slice. The
            recompute's last tokens of all ranks have no value, only a gradient.
    """
    rows, around = x.shape[2], width - 1
    if width == 1:
        return convolve(x), x[..., :0]
    before, end = _TokensAround.apply(x, start, around, exchange, known)
    if documents is None and exchange.ranks == 1 and start is None:
        return convolve(x), end
    x = torch.cat([before, x], -1)
    if documents is None:
        return convolve(x)[..., around:], end
    where = (first + exchange.rank * rows, rows * exchange.ranks if length is None else length)
    columns, places = _columns(documents, x.shape[0], rows, around, where, x.device)
    flat = torch.nn.functional.pad(x, (0, 1)).transpose(0, 1).flatten(1)  # the last column of each row is zero
    out = convolve(flat[None, :, columns])[0, :, places]
    return out.unflatten(1, (x.shape[0], rows)).transpose(0, 1), end


def _columns(
    documents: Documents, batch: int, rows: int, around: int, where: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(columns of the flattened [B, W - 1 + L + 1] tokens that make one long row, in which W - 1 columns are before
    each document, which of them are this rank's tokens); `where` is the first token's place, and S."""
    first, length = where

    def make() -> tuple[Tensor, Tensor]:
        columns: list[Tensor] = []
        places: list[Tensor] = []
        at = 0
        for span in document_spans(documents, batch, length, first, first + rows):
            begin = span.batch * (around + rows + 1)
            before = min(span.end - span.rows - span.begin, around)  # earlier tokens of this document
            own = begin + around + span.at
            zeros = torch.full((around - before,), begin + around + rows)
            columns += [zeros, torch.arange(own - before, own + span.rows)]
            places.append(torch.arange(at + around, at + around + span.rows))
            at += around + span.rows
        return torch.cat(columns).to(device), torch.cat(places).to(device)

    return once(documents, ("columns", batch, rows, around, *where, device), make)


class _TokensAround(torch.autograd.Function):
    """The `count` tokens [B, C, count] before this rank's slice, and the last ones of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: Tensor | None, count: int, exchange: Exchange, known: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        given = min(count, x.shape[2])
        ctx.exchange, ctx.shape, ctx.given, ctx.started = exchange, x.shape, given, start is not None
        if known:
            return known["before"].clone(), known["before"].clone()
        start = x.new_zeros(*x.shape[:2], count) if start is None else start
        tails = exchange.gather(x[..., x.shape[2] - given :]).movedim(0, 2).flatten(2)  # [B, C, P * given]
        line = torch.cat([start, tails], -1)
        at = exchange.rank * given
        before = line[..., at : at + count].clone()
        if known is not None and exchange.ranks > 1:
            known["before"] = before.clone()
        return before, line[..., line.shape[2] - count :].clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, before: Tensor, end: Tensor) -> tuple[Tensor | None, ...]:
        (exchange, given), count = (ctx.exchange, ctx.given), before.shape[2]
        line = torch.nn.functional.pad(end, (exchange.ranks * given, 0))
        for rank, theirs in enumerate(exchange.gather(before)):
            line[..., rank * given : rank * given + count] += theirs
        dx, at = before.new_zeros(ctx.shape), count + exchange.rank * given
        dx[..., ctx.shape[2] - given :] = line[..., at : at + given]
        return dx, line[..., :count].clone() if ctx.started else None, None, None, None
