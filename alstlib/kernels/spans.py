"""Which queries attend to which keys, written as calls of a kernel whose only mask is the causal one.

Shape legend: S sequence, N keys, w window.

A `Span` is a run of queries that belong to the last tokens of a run of keys: a document, its tokens in one chunk, or
the tokens of it that a rank computes for a head. Under a sliding window query i attends to keys (i - w, i]. The queries
are cut into blocks of w. A block attends to its own causal triangle, and in the block before to the keys still inside
the window: an upper triangle of w - 1 queries. That triangle is causal when its queries and keys are read backwards. So
any kernel with a causal mask computes windows exactly and does no work outside them; the parts are merged by their
logsumexps.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from alstlib.sizing import keys_of_a_call

Documents = Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of the last `rows` tokens of the keys [begin, end) of one micro-batch row."""

    batch: int
    begin: int
    end: int
    rows: int
    at: int
    """Row at which its queries are stored: [at, at + rows)."""
    q_batch: int
    """Micro-batch row in which its queries are stored."""


@dataclass(frozen=True)
class Piece:
    """One call of a kernel on `repeat` equal parts, each `stride` queries and keys after the one before."""

    kind: Literal["causal", "full", "upper"]
    """Which keys a query attends to. causal: query i attends to keys 0 to i; full: to all keys; upper: to keys from i
    on. Causal and upper are squares (for a kernel that aligns at the end, causal may have more keys than queries)."""
    q: int
    rows: int
    k: int
    keys: int
    repeat: int = 1
    stride: int = 0

    def queries_of(self, x: Tensor, batch: int) -> Tensor:
        """View of x [B, H, S, D] -> [repeat, H, rows, D]; of x [B, H, S] -> [repeat, H, rows]."""
        return _parts(x[batch], self.q, self.rows, self.repeat, self.stride)

    def keys_of(self, x: Tensor, batch: int) -> Tensor:
        """View of x [B, K, N, D] -> [repeat, K, keys, D]."""
        return _parts(x[batch], self.k, self.keys, self.repeat, self.stride)


def _parts(x: Tensor, first: int, rows: int, repeat: int, stride: int) -> Tensor:
    if repeat == 1:
        return x[None, :, first : first + rows]
    parts = x[:, first : first + (repeat - 1) * stride + rows].unfold(1, rows, stride)  # [H, repeat, (D,) rows]
    return parts.movedim(-1, 2).transpose(0, 1)


class Offsets(tuple[int, ...]):
    """Document offsets of one sample that keep what was found for them: the same in every layer, chunk and pass of a
    step. It goes with the sample."""

    def __init__(self, *_: object) -> None:
        self.bounds: dict[tuple[int, int], list[int]] = {}
        self.spans: dict[tuple[int, int, int, int], tuple[Span, ...]] = {}
        self.uploaded: dict[tuple[int, torch.device], tuple[Tensor, int]] = {}
        self.columns: dict[tuple[int, int, int, int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self.calls: dict[tuple[int, int, int, int, bool, torch.device], list[Any]] = {}


def document_spans(documents: Documents, batch: int, length: int, first: int, last: int) -> Sequence[Span]:
    """The documents of queries [first, last) of every micro-batch row; queries are stored from `first` on.

    Args:
        documents: offsets into the flattened [batch * length] tokens; None makes every micro-batch row one document.

    Raises:
        ValueError: offsets that do not rise from 0 to batch * length.
    """
    known = documents if isinstance(documents, Offsets) else Offsets()
    shape, key = (batch, length), (batch, length, first, last)
    if shape not in known.bounds:
        known.bounds[shape] = _bounds(documents, batch, length)
    if key not in known.spans:
        known.spans[key] = tuple(_spans(known.bounds[shape], *key))
    return known.spans[key]


def _spans(bounds: Sequence[int], batch: int, length: int, first: int, last: int) -> Iterator[Span]:
    for b in range(batch):
        at = max(0, bisect.bisect_right(bounds, b * length + first) - 1)
        while at + 1 < len(bounds) and bounds[at] < b * length + last:
            begin, end = bounds[at] - b * length, min(bounds[at + 1] - b * length, last)
            start = max(begin, first)
            if start < end:
                yield Span(b, begin, end, end - start, start - first, b)
            at += 1


def _bounds(documents: Documents, batch: int, length: int) -> list[int]:
    """Where documents and micro-batch rows begin, and the end."""
    rows = range(0, batch * length + 1, length)
    offsets = rows if documents is None else [int(o) for o in documents]
    total = batch * length
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or sorted(offsets) != list(offsets):
        raise ValueError(f"documents={list(offsets[:8])} must rise from 0 to batch * sequence = {total}")
    return sorted({*offsets, *rows})


def pieces(
    span: Span, window: int | None = None, *, bottom_right: bool = False, keys_per_query: int | None = None
) -> Iterator[Piece]:
    """The calls that make up a span. Those of kind causal come first and hold every query once.

    Args:
        window: number of keys that a query attends to, its own included; None for all keys up to its own.
        bottom_right: the kernel takes a causal mask with more keys than queries, aligned at the end.
        keys_per_query: most keys of a full piece for each query (a kernel's backward makes gradients for all keys).
    """
    start, keys = span.end - span.rows, span.end - span.begin
    if window is None or window >= keys:
        if bottom_right and keys_per_query is None:
            yield Piece("causal", span.at, span.rows, span.begin, keys)
            return
        yield Piece("causal", span.at, span.rows, start, span.rows)
        step = keys_of_a_call(span.rows, start - span.begin, keys_per_query)
        for k in range(span.begin, start, step):
            yield Piece("full", span.at, span.rows, k, min(step, start - k))
        return
    blocks = _window_blocks(span, window)
    for a, n, repeat in blocks:
        yield Piece("causal", a - start + span.at, n, a, n, repeat, window)
    for a, n, repeat in blocks:
        b = a + n
        at = a - start + span.at
        if (k := max(span.begin, b - window)) < a:  # keys of every query of a block that is shorter than the window
            yield Piece("full", at, n, k, a - k)
        if b - window > span.begin and n > 1:
            yield Piece("upper", at, n - 1, a - window + 1, n - 1, repeat, window)


def pieces_of_pages(span: Span, window: int | None, page: int) -> Iterator[tuple[int, Piece]]:
    """(page, call) of a span whose keys lie in pages of `page` keys: each call's keys are in one page, and counted from
    its first. The span's own rows lie in one page."""
    for piece in pieces(span, window):
        last = piece.k + (piece.repeat - 1) * piece.stride + piece.keys - 1
        if piece.k // page == last // page:
            yield piece.k // page, replace(piece, k=piece.k % page)
            continue
        for i in range(piece.repeat):
            q, k = piece.q + i * piece.stride, piece.k + i * piece.stride
            yield from _cut(Piece(piece.kind, q, piece.rows, k, piece.keys), page)


def _cut(piece: Piece, page: int) -> Iterator[tuple[int, Piece]]:
    """One call at the borders of pages."""
    while piece.keys:
        at, first = divmod(piece.k, page)
        n = min(piece.keys, page - first)
        if piece.kind == "upper":  # rows before the border see a triangle of this page's keys, and all that follow
            yield at, Piece("upper", piece.q, n, first, n)
            rest = Piece("upper", piece.q + n, piece.rows - n, piece.k + n, piece.keys - n)
            if rest.keys:
                yield from _cut(Piece("full", piece.q, n, rest.k, rest.keys), page)
        else:
            assert piece.kind == "full" or n == piece.keys
            yield at, replace(piece, k=first, keys=n)
            rest = replace(piece, k=piece.k + n, keys=piece.keys - n)
        piece = rest


def _window_blocks(span: Span, window: int) -> list[tuple[int, int, int]]:
    """(first key position, queries, repeats) of the blocks: cut at multiples of the window from the span's first
    key."""
    found: list[tuple[int, int, int]] = []
    a = span.end - span.rows
    while a < span.end:
        inside = (a - span.begin) % window
        whole = 0 if inside else (span.end - a) // window
        if whole and a == span.begin:
            whole = 1  # the first block has no keys before its own: it differs from those after it
        n = window if whole else min(window - inside, span.end - a)
        found.append((a, n, max(1, whole)))
        a += n * max(1, whole)
    return found
