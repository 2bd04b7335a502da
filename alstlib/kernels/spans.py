"""Which queries attend to which keys, written as calls of a kernel whose only mask is the causal one.

Shape legend: S sequence, N keys, w window.

A `Span` is a run of queries that belong to the last tokens of a run of keys: a document, its tokens in one chunk, or
the tokens of it that a rank computes for a head. Under a sliding window query i attends to keys (i - w, i]. The queries
are cut into runs of w. A run attends to its own causal triangle, and in the run before to the keys still inside
the window: an upper triangle of w - 1 queries. That triangle is causal when its queries and keys are read backwards. So
any kernel with a causal mask computes windows exactly and does no work outside them; the parts are merged by their
logsumexps.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

from torch import Tensor

from alstlib.base.sizing import keys_of_a_call
from alstlib.base.types import Documents

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of the last `queries` tokens of the keys [begin, end) of one sample."""

    batch: int
    begin: int
    end: int
    queries: int
    at: int
    """Where its queries are stored: from `at` to `at + queries`."""
    q_batch: int
    """Sample in which its queries are stored."""


@dataclass(frozen=True)
class Piece:
    """One call of a kernel: on the same queries and keys of some samples, or on `repeat` equal parts of one of
    them, each `stride` queries and keys after the one before."""

    kind: Literal["causal", "full", "upper"]
    """Which keys a query attends to. causal: query i attends to keys 0 to i; full: to all keys; upper: to keys from i
    on. Causal and upper are squares."""
    q: int
    queries: int
    k: int
    keys: int
    batch: slice
    """Samples of the micro-batch that the keys are of."""
    q_batch: slice
    """Samples in which the queries are stored."""
    first: bool = False
    """Whether no call before it has these queries."""
    repeat: int = 1
    stride: int = 0

    def queries_of(self, x: Tensor) -> Tensor:
        """View of x [B, H, S, D] -> [n, H, queries, D]; of x [B, H, S] -> [n, H, queries]; n samples or parts."""
        return self._parts(x[self.q_batch], self.q, self.queries)

    def keys_of(self, x: Tensor) -> Tensor:
        """View of x [B, K, N, D] -> [n, K, keys, D]."""
        return self._parts(x[self.batch], self.k, self.keys)

    def _parts(self, x: Tensor, first: int, count: int) -> Tensor:
        if self.repeat == 1:
            return x[:, :, first : first + count]
        end = first + (self.repeat - 1) * self.stride + count
        return x[0, :, first:end].unfold(1, count, self.stride).movedim(-1, 2).transpose(0, 1)


class Offsets(tuple[int, ...]):
    """Document offsets of one sample that keep what was found for them: the same in every layer, chunk and pass of a
    step. It goes with the sample."""

    def __init__(self, *_: object) -> None:
        self.found: dict[Hashable, Any] = {}


def once(documents: Documents, key: Hashable, make: Callable[[], T]) -> T:
    """The result of `make` for these documents, computed once for each sample."""
    found = documents.found if isinstance(documents, Offsets) else {}
    if key not in found:
        found[key] = make()
    return found[key]


def document_spans(documents: Documents, batch: int, length: int, first: int, last: int) -> Sequence[Span]:
    """The documents of queries [first, last) of every sample; queries are stored from `first` on.

    Args:
        documents: offsets into the flattened [batch * length] tokens; None makes every sample one document.

    Raises:
        ValueError: offsets that do not rise from 0 to batch * length.
    """
    shape, where = (batch, length), (batch, length, first, last)
    bounds = once(documents, ("bounds", *shape), lambda: _bounds(documents, *shape))
    return once(documents, ("spans", *where), lambda: tuple(_spans(bounds, *where)))


def _spans(bounds: Sequence[int], batch: int, length: int, first: int, last: int) -> Iterator[Span]:
    for b in range(batch):
        origin = b * length
        at, stop = bisect.bisect_right(bounds, origin + first) - 1, bisect.bisect_left(bounds, origin + last)
        for begin, end in pairwise(bounds[at : stop + 1]):
            start, end = max(begin - origin, first), min(end - origin, last)
            yield Span(b, begin - origin, end, end - start, start - first, b)


def _bounds(documents: Documents, batch: int, length: int) -> list[int]:
    """Where documents and samples begin, and the end."""
    samples = range(0, batch * length + 1, length)
    offsets = samples if documents is None else [int(o) for o in documents]
    total = batch * length
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or sorted(offsets) != list(offsets):
        raise ValueError(f"documents={list(offsets[:8])} must rise from 0 to batch * sequence = {total}")
    return sorted({*offsets, *samples})


def pieces(span: Span, window: int | None = None, keys_per_query: int | None = None) -> Iterator[Piece]:
    """The calls that make up a span. For each query, one of kind causal comes first.

    Args:
        window: number of keys that a query attends to, its own included; None for all keys up to its own.
        keys_per_query: most keys of a full piece for each query (a kernel's backward makes gradients for all keys).
    """
    start, where = span.end - span.queries, (slice(span.batch, span.batch + 1), slice(span.q_batch, span.q_batch + 1))
    if window is None or window >= span.end - span.begin:
        yield Piece("causal", span.at, span.queries, start, span.queries, *where, first=True)
        step = keys_of_a_call(span.queries, start - span.begin, keys_per_query)
        for k in range(span.begin, start, step):
            yield Piece("full", span.at, span.queries, k, min(step, start - k), *where)
        return
    for a, n, repeat in _window_runs(span, window):
        at, b = a - start + span.at, a + n
        yield Piece("causal", at, n, a, n, *where, True, repeat, window)
        if (k := max(span.begin, b - window)) < a:  # keys of every query of a run that is shorter than the window
            yield Piece("full", at, n, k, a - k, *where)
        if b - window > span.begin and n > 1:
            yield Piece("upper", at, n - 1, a - window + 1, n - 1, *where, False, repeat, window)


def pieces_of_pages(
    span: Span, window: int | None, find: Callable[[int], tuple[int, int, int]]
) -> Iterator[tuple[int, Piece]]:
    """(page, call) of a span whose keys lie in pages: each call's keys are in one page, and counted from its first. The
    span's own keys lie in one page.

    Args:
        find: gives a key's page, the key's place in it, and the number of keys from there to the page's border.
    """
    left = [*pieces(span, window)][::-1]
    while left:
        piece = left.pop()
        (at, first, n), upper = find(piece.k), piece.kind == "upper"
        if (piece.repeat - 1) * piece.stride + piece.keys <= n:
            yield at, replace(piece, k=first)
        elif piece.repeat > 1:
            steps = [i * piece.stride for i in range(piece.repeat)]
            left += [replace(piece, q=piece.q + step, k=piece.k + step, repeat=1) for step in steps[::-1]]
        else:
            assert piece.kind != "causal"
            rest = replace(piece, k=piece.k + n, keys=piece.keys - n)
            if upper:  # queries before the border see a triangle of this page's keys, and all that follow
                left.append(replace(rest, q=piece.q + n, queries=piece.queries - n))
                rest = replace(rest, kind="full", queries=n)
            left += [rest, replace(piece, keys=n, queries=n if upper else piece.queries)]


def _window_runs(span: Span, window: int) -> Iterator[tuple[int, int, int]]:
    """(first key position, queries, repeats) of the runs: cut at multiples of the window from the span's first
    key."""
    a = span.end - span.queries
    while a < span.end:
        inside = (a - span.begin) % window
        # the first run has no keys before its own: it differs from those after it
        repeat = 1 if inside or a == span.begin else max(1, (span.end - a) // window)
        n = min(window - inside, span.end - a)
        yield a, n, repeat
        a += n * repeat
