"""Attention of some queries over keys and values that are kept in pages, of which one at a time is on the device.

Shape legend: B batch, C queries, R keys of a page, H query heads, K key/value heads, D key width, V value width.

The pages are merged by their logsumexps in fp32, whether they come from the host or lie on the device: what is computed
is the same to the bit. Pages that no query sees (other documents, keys that a window has passed) are not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from alstlib.base.recompute import sum_dtype
from alstlib.base.types import OutputAndLse
from alstlib.kernels.attention import add_gradients, add_pieces
from alstlib.kernels.backends import Backend
from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Piece, Span, pieces_of_pages


@dataclass
class Page:
    """Keys and values of one page on the device, [B, K, R, D] and [B, K, R, V], and the sums of their gradients (fp32)
    where these are asked for."""

    index: int
    k: Tensor
    v: Tensor
    sums: tuple[Tensor, Tensor] | None = None
    first: int = 0
    """Number of the page's first keys that are left out, because nobody sees them any more."""

    def of(self, piece: Piece) -> Piece:
        """A call on the page, with its keys counted from the first that is here."""
        return replace(piece, k=piece.k - self.first)


class Pages(Protocol):
    """Where pages come from."""

    def find(self, key: int) -> tuple[int, int, int]:
        """The page of a key of the sequence, the key's place in it, and the number of keys from there to its border."""
        ...

    def visit(self, order: Sequence[int], sums: bool = False) -> Iterator[Page]:
        """These pages one after the other, on the device; with `sums`, those too, which may be added to."""
        ...


@dataclass(frozen=True)
class HeadPart:
    """Some of a rank's heads, or queries of one head, as views of stored tensors, and what they see."""

    heads: slice
    """Numbers of these query heads in the model."""
    stored: slice
    """Where the queries are stored: heads of tensors [B, H, C, ...], or queries of [1, 1, queries, ...]."""
    kv: slice
    """Key/value heads, of those that the rank has."""
    spans: Sequence[Span] = ()
    """Which of the queries see which keys; none for heads that see all documents."""
    batch: int = 0
    """Number of samples that each head's run of stored queries holds; 0 for stored heads."""
    sees: Callable[[int, int], bool] = lambda sample, page: True
    """Function that says of a sample whether the queries see a page that holds keys of their spans."""

    def queries_of(self, x: Tensor) -> Tensor:
        """The view of stored queries, outputs or logsumexps, [B, heads, C, ...]."""
        if not self.batch:
            return x[:, self.stored]
        heads = self.heads.stop - self.heads.start
        return x[0, 0, self.stored].view(heads, self.batch, -1, *x.shape[3:]).transpose(0, 1)

    def keys_of(self, x: Tensor) -> Tensor:
        """The view of keys or values [B, K, R, ...]."""
        return x[:, self.kv]


def _calls(parts: Iterable[HeadPart], rule: Rule, pages: Pages, own: int) -> dict[int, list[tuple[HeadPart, Piece]]]:
    """The calls on each page that is needed, the queries' own first."""
    calls: dict[int, list[tuple[HeadPart, Piece]]] = {own: []}
    for part in parts:
        for span in part.spans:
            for at, piece in pieces_of_pages(span, rule.window, pages.find):
                if part.sees(span.batch, at):
                    calls.setdefault(at, []).append((part, piece))
    return {at: calls[at] for at in [own, *sorted(calls.keys() - {own})]}


def forward(
    backend: Backend, q: Tensor, width: int, pages: Pages, own: int, parts: Sequence[HeadPart], rule: Rule
) -> OutputAndLse:  # fmt: skip
    """Causal attention of queries q over the pages that they see -> (out [B, H, C, V], lse [B, H, C]), both in
    fp32. Without autocast, as `attention_forward`.

    Args:
        width: V.
        own: the page in which the queries' own keys lie.
        parts: all heads of q.
    """
    wide = sum_dtype(q)
    out, lse = q.new_empty(*q.shape[:3], width, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
    calls = _calls(parts, rule, pages, own)
    for page in pages.visit(list(calls)):
        for part, piece in calls[page.index]:
            add_pieces(backend, [page.of(piece)], Attended(q, page.k, page.v, out, lse).part(part), rule)
    return out, lse


def add_sinks(parts: Sequence[HeadPart], out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Change output and logsumexp of these heads as the model's attention sinks do, where it has some: each is a
    further key that has a score and no value."""
    if sinks is None:
        return
    for part in parts:
        mine, total, score = part.queries_of(out), part.queries_of(lse), sinks[part.heads].to(lse.dtype)
        score = score[None, :, None]
        mine.mul_(torch.sigmoid(total - score)[..., None])
        total.copy_(torch.logaddexp(total, score))


def sinks_backward(parts: Sequence[HeadPart], delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """These heads' share of the gradient [H] of the sinks, from delta = rowsum(dout * out) [B, H, C, 1] and lse
    [B, H, C] that holds them."""
    grad = torch.zeros_like(sinks, dtype=lse.dtype)
    for part in parts:
        share = torch.exp(sinks[part.heads].to(lse.dtype)[None, :, None] - part.queries_of(lse))
        grad[part.heads] -= (share * part.queries_of(delta)[..., 0]).sum((0, 2))
    return grad.to(sinks.dtype)


def backward(
    backend: Backend, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, pages: Pages, own: int,
    parts: Sequence[HeadPart], rule: Rule,
) -> tuple[Tensor, Page]:  # fmt: skip
    """Gradients of `forward` -> (dq [B, H, C, D], the page `own`).

    What the queries contribute to the gradients of the keys and values they saw is added to the pages' sums: with the
    output and logsumexp over all keys, each page gives its own share exactly (FlashAttention-2, section 3.1.2).
    """
    dq = torch.zeros_like(q, dtype=sum_dtype(q))
    calls, first = _calls(parts, rule, pages, own), None
    for page in pages.visit(list(calls), sums=True):
        first = first or page
        assert page.sums is not None
        for part, piece in calls[page.index]:
            sums = part.queries_of(dq), *(part.keys_of(t) for t in page.sums)
            mine = Attended(q, page.k, page.v, out, lse).part(part)
            add_gradients(backend, [page.of(piece)], part.queries_of(dout), mine, rule, sums)
    assert first is not None
    return dq.to(q.dtype), first
