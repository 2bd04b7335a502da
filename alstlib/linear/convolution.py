"""The short causal convolution of layers with a state, over a sequence of which each rank holds a slice.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, C channels, W width (in tokens).

A token's output needs the W - 1 tokens before it. So each rank gives its last W - 1 tokens to the others, and puts what
comes before its slice in front of it. A document begins with zeros before its first token, wherever ranks cut. That is
so too where the recurrence after it exchanges tokens for heads (`by_heads`): W - 1 tokens of all channels are far
less than all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.base.types import OutputAndState
from alstlib.kernels.spans import Documents, document_spans, once
from alstlib.ulysses.alltoall import Exchange, Moved


def causal_convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, width: int, exchange: Exchange, documents: Documents = None, *,
    start: Tensor | None = None, first: int = 0, length: int | None = None, known: dict[str, Tensor] | None = None,
) -> OutputAndState:  # fmt: skip
    """x [B, C, L], this rank's tokens -> their outputs [B, C, L], and the last W - 1 tokens of all ranks.

    The tokens of all ranks may be a part of the sequence (a chunk): then `start` [B, C, W - 1] are the tokens before
    them, the same on all ranks, as their gradient is, and that of the tokens that are returned.

    Args:
        convolve: the convolution of one device, [b, C, n] -> [b, C, n], with zeros before its first token. What it does
            to each of its outputs (a bias, an activation) is done once.
        width: W.
        documents: global offsets into the flattened [B * S] batch; None makes every sample one document.
        start: None for zeros.
        first: where the part begins in the sequence.
        length: S; None: the part is all of it.
        known: what a first pass leaves for its recompute, which then exchanges no tokens: those before the slice. The
            recompute's last tokens of all ranks have no value, only a gradient.
    """
    local, around = x.shape[2], width - 1
    begin = x.new_zeros(*x.shape[:2], around) if start is None else start
    own = x[..., max(0, local - around) :]
    before, end = _tokens_around(own, begin, exchange, {} if known is None else known)
    if documents is None and exchange.ranks == 1 and start is None:
        return convolve(x), end
    x = torch.cat([before, x], -1)
    if documents is None:
        return convolve(x)[..., around:], end
    length = local * exchange.ranks if length is None else length
    columns, places = _columns(documents, x.shape[0], local, around, first + exchange.rank * local, length, x.device)
    flat = F.pad(x, (0, 1)).transpose(0, 1).flatten(1)  # the last column of each sample is zero
    out = convolve(flat[None, :, columns])[0, :, places]
    return out.unflatten(1, (x.shape[0], local)).transpose(0, 1), end


def _columns(
    documents: Documents, batch: int, local: int, around: int, first: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Columns of the flattened [B, W - 1 + L + 1] tokens that make one long sample, with W - 1 columns before each
    document; and the places in it of this rank's tokens, which begin with the token `first` of the sequence."""

    def make() -> tuple[Tensor, Tensor]:
        columns, places, at = [], [], 0
        for span in document_spans(documents, batch, length, first, first + local):
            begin = span.at - (span.end - span.queries - span.begin)
            tokens = torch.arange(span.at - around, span.at + span.queries)
            places.append(torch.arange(at + around, at + len(tokens)))
            at += len(tokens)
            tokens = tokens.where(tokens >= begin, local)  # earlier ones are of another document: a zero
            columns.append(tokens + span.batch * (around + local + 1) + around)
        return torch.cat(columns).to(device), torch.cat(places).to(device)

    return once(documents, ("columns", batch, local, around, first, length, device), make)


def _tokens_around(own: Tensor, start: Tensor, exchange: Exchange, known: dict[str, Tensor]) -> Sequence[Tensor]:
    """The W - 1 tokens before this rank's slice, and the last ones of all ranks, from its own last ones [B, C, n] (a
    slice may have fewer) and those before all ranks' [B, C, W - 1]."""
    given, count = own.shape[2], start.shape[2]

    def there(own: Tensor, start: Tensor) -> list[Tensor]:
        if known:
            return [known["before"].clone(), known["before"].clone()]
        line = torch.cat([start, *exchange.gather(own)], -1)
        at = exchange.rank * given
        before = line[..., at : at + count].clone()
        if exchange.ranks > 1:
            known["before"] = before.clone()
        return [before, line[..., line.shape[2] - count :].clone()]

    def back(before: Tensor, end: Tensor) -> list[Tensor]:
        line = F.pad(end, (exchange.ranks * given, 0))
        for rank, theirs in enumerate(exchange.gather(before)):
            line[..., rank * given : rank * given + count] += theirs
        at = count + exchange.rank * given
        return [line[..., at : at + given].clone(), line[..., :count].clone()]  # they outlive the line

    return Moved.apply(there, back, own, start)
