"""Attention of some rows over keys and values that are kept in pages, of which one at a time is on the device.

Shape legend: B batch, C query rows, R keys of a page, H query heads, K key/value heads, D key width, V value width.

The pages are merged by their logsumexps in fp32, whether they come from the host or lie on the device: what is computed
is the same to the bit. Pages that no row sees (other documents, keys that a window has passed) are not asked for.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from alstlib.kernels.attention import add_piece, backward_of_piece, in_full, with_sinks
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
        return replace(piece, k=piece.k - self.first) if self.first else piece


class Pages(Protocol):
    """Where pages come from."""

    rows: int
    """Number of keys in a page; the last page may have fewer."""

    def visit(self, order: Sequence[int], sums: bool = False) -> Iterator[Page]:
        """These pages one after the other, on the device; with `sums`, those too, which may be added to."""
        ...


@dataclass(frozen=True)
class HeadPart:
    """Some of a rank's heads, or rows of one head, as views of stored tensors, and what they see."""

    queries: Callable[[Tensor], Tensor]
    """Gives the view of stored queries, outputs or logsumexps [B, H, C, ...]."""
    keys: Callable[[Tensor], Tensor]
    """Gives the view of keys or values [B, K, R, ...]."""
    spans: Sequence[Span]
    """Which of the queries see which keys."""
    heads: slice
    """Numbers of these heads in the model."""

    def call(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Attended:
        """The part's views of a call's tensors."""
        return Attended(self.queries(q), self.keys(k), self.keys(v), self.queries(out), self.queries(lse))

    def some(self, kv: range, each: int) -> HeadPart:
        """Its key/value heads `kv`, with `each` query heads to each of them."""
        return HeadPart(
            lambda x: self.queries(x)[:, kv.start * each : kv.stop * each],
            lambda x: self.keys(x)[:, kv.start : kv.stop],
            self.spans,
            slice(self.heads.start + kv.start * each, self.heads.start + kv.stop * each),
        )


@dataclass(frozen=True)
class Choice:
    """Pages before their own that the queries of a chunk see; the others are left out."""

    seen: Tensor
    """Which pages are seen: boolean [B, K, pages before the own], for the key/value heads of the model, on the CPU."""
    heads: int
    """Number of the model's query heads."""

    def of(self, part: HeadPart, batch: int, page: int) -> list[HeadPart]:
        """The heads of a part that see this page, neighbours together."""
        if page >= self.seen.shape[2]:
            return [part]
        group, (first, last) = self.heads // self.seen.shape[1], (part.heads.start, part.heads.stop - 1)
        sees = self.seen[batch, first // group : last // group + 1, page].tolist()
        if all(sees):
            return [part]
        each, found = (last + 1 - first) // len(sees), []
        for yes, run in itertools.groupby(range(len(sees)), key=sees.__getitem__):
            if yes:
                kv = list(run)
                found.append(part.some(range(kv[0], kv[-1] + 1), each))
        return found


def _calls(
    parts: Iterable[HeadPart], rule: Rule, page: int, own: int, choice: Choice | None
) -> dict[int, list[tuple[HeadPart, Span, Piece]]]:
    """The calls on each page that is needed, the queries' own first."""
    calls: dict[int, list[tuple[HeadPart, Span, Piece]]] = defaultdict(list)
    for part in parts:
        for span in part.spans:
            for at, piece in pieces_of_pages(span, rule.window, page):
                for some in [part] if choice is None else choice.of(part, span.batch, at):
                    calls[at].append((some, span, piece))
    return {at: calls[at] for at in [own, *sorted(calls.keys() - {own})]}


@in_full
def forward(
    backend: Backend,
    q: Tensor,
    width: int,
    pages: Pages,
    own: int,
    parts: Sequence[HeadPart],
    rule: Rule,
    sinks: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of rows q over the pages that they see -> (out [B, H, C, V], lse [B, H, C] in fp32).

    Args:
        width: V.
        own: the page in which the rows' own keys lie.
        parts: all heads of q.
        sinks: scores of the model's attention sinks, one for each of its heads.
        choice: which pages are seen; None: all that hold keys of the rows' documents and windows.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], width, dtype=wide)
    lse = q.new_empty(q.shape[:3], dtype=wide)
    calls = _calls(parts, rule, pages.rows, own, choice)
    for page in pages.visit(list(calls)):
        for part, span, piece in calls[page.index]:
            add_piece(backend, page.of(piece), span, part.call(q, page.k, page.v, out, lse), rule)
    for part in parts:
        if sinks is None:
            break
        part.queries(lse).copy_(with_sinks(part.queries(out), part.queries(lse), sinks[part.heads])[1])
    return out.to(q.dtype), lse


@in_full
def backward(
    backend: Backend,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    pages: Pages,
    own: int,
    parts: Sequence[HeadPart],
    rule: Rule,
    choice: Choice | None = None,
) -> tuple[Tensor, Page]:
    """Gradients of `forward` -> (dq [B, H, C, D], the page `own`).

    What the rows contribute to the gradients of the keys and values they saw is added to the pages' sums: with the
    output and logsumexp over all keys, each page gives its own share exactly (FlashAttention-2, section 3.1.2).
    """
    dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    calls, first = _calls(parts, rule, pages.rows, own, choice), None
    for page in pages.visit(list(calls), sums=True):
        first = first or page
        assert page.sums is not None
        for part, span, piece in calls[page.index]:
            sums, mine = (part.keys(page.sums[0]), part.keys(page.sums[1])), part.call(q, page.k, page.v, out, lse)
            backward_of_piece(backend, page.of(piece), span, part.queries(dout), mine, part.queries(dq), sums, rule)
    assert first is not None
    return dq.to(q.dtype), first
