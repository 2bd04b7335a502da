"""Heads that cannot be divided evenly among the ranks: a plan of whole heads and parts of heads, which every rank can
make alone.

Shape legend: B batch, S tokens of all ranks in a call, P ranks, L = S / P, H query heads, K key/value heads, G = H / K,
D width.

The H heads form a line, which is cut in P equal parts: a rank gets some whole heads and at most two parts of heads. A
part of a head is a share of its queries. A query costs as much as it has keys, so the queries of each document are
folded, first with last, second with second to last, and a share is a run of this order: equal shares have as many
queries and as much causal area. Each rank has the keys and values of all tokens for the heads that it needs, so the
outputs of two ranks never need merging. Every long document is cut like this, and short ones are dealt out whole
(`Shares`): the work is balanced however long the documents are.

`Plan` is pure: it uses no process group, and gives the indices by which queries travel. Queries are stored by head,
then by document, then in order.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from alstlib.base.sizing import kv_of
from alstlib.kernels.paged import HeadPart
from alstlib.kernels.spans import Documents, Span, document_spans

GOLDEN = (math.sqrt(5) - 1) / 2
"""Golden ratio, whose multiples modulo 1 are spread evenly."""


@dataclass(frozen=True)
class HeadShare:
    """What one rank has of one query head: its queries from share `lo` to share `hi` (`Shares`)."""

    head: int
    lo: Fraction
    hi: Fraction

    @property
    def whole(self) -> bool:
        return self.lo == 0 and self.hi == 1


def parts_of(heads: int, ranks: int, rank: int) -> list[HeadShare]:
    """The heads and parts of heads of a rank, in order."""
    lo, hi = Fraction(heads * rank, ranks), Fraction(heads * (rank + 1), ranks)
    return [
        HeadShare(h, max(lo - h, Fraction(0)), min(hi - h, Fraction(1))) for h in range(math.floor(lo), math.ceil(hi))
    ]


SHORT = 128
"""Fewest tokens of a document that is cut for all ranks; shorter documents are handed out whole, or nearly so."""
DEALT = 16
"""A document also counts as short when a rank's share of all documents is at least this many times as long."""


def folded_tokens(tokens: int, lo: int, hi: int) -> list[tuple[int, int]]:
    """The tokens from number `lo` to `hi` of a document of `tokens` tokens, counted as first, last, second, second to
    last, ...: one run [first, last) of its beginning and one of its end, or a single run where the two meet."""
    front, back = ((lo + 1) // 2, (hi + 1) // 2), (tokens - hi // 2, tokens - lo // 2)
    runs = [(front[0], back[1])] if front[1] == back[0] else [front, back]
    return [run for run in runs if run[0] < run[1]]


class Shares:
    """Cuts a head's queries so that all shares of one size have the same number of queries and the same causal area.

    Long documents are cut one by one, each at the same share of its folded tokens. Short documents are put in a line,
    in an order that mixes all lengths, and the line is cut: each cut divides at most two of them. With 9 heads on 8
    ranks and 400 chats of 16 to 2,000 tokens, sorted by length, the fullest rank then has 0.4% more causal area than
    the mean; with the documents in their own order it has 4.8% more.
    """

    def __init__(self, spans: Sequence[Span], ranks: int) -> None:
        short = max(SHORT, sum(s.queries for s in spans) // (DEALT * ranks))
        self.long = [s for s in spans if s.queries >= short]
        by_length = sorted((s for s in spans if s.queries < short), key=lambda s: s.queries)
        order = sorted(range(len(by_length)), key=lambda i: i * GOLDEN % 1)
        self.short = [by_length[i] for i in order]
        self.begins = list(itertools.accumulate((s.queries for s in self.short), initial=0))

    def between(self, lo: Fraction, hi: Fraction) -> list[Span]:
        """The share from `lo` to `hi` as runs of queries in their documents, stored one after the other."""
        found = []
        for number, document in enumerate(self.long):
            nudge, n = (number * GOLDEN + 0.5) % 1, document.queries
            a, b = (n if share == 1 else math.floor(n * float(share) + nudge) if share else 0 for share in (lo, hi))
            found.append((document, a, min(b, n)))
        first, last = (math.floor(self.begins[-1] * share) for share in (lo, hi))
        for i in range(bisect.bisect_right(self.begins, first) - 1, bisect.bisect_left(self.begins, last)):
            document, begin = self.short[i], self.begins[i]
            found.append((document, max(first - begin, 0), min(last - begin, document.queries)))
        spans: list[Span] = []
        at = 0
        for document, a, b in sorted(found, key=lambda f: (f[0].batch, f[0].begin)):
            start = document.end - document.queries
            for run, stop in folded_tokens(document.queries, a, b):
                spans.append(Span(document.batch, document.begin, start + stop, stop - run, at, 0))
                at += stop - run
        return spans


@dataclass(frozen=True)
class Message:
    """Indices of the queries that pass between this rank and another."""

    sent: Tensor
    """Indices of the queries that this rank sends, into its [B * H * L] queries in sequence layout."""
    received: Tensor
    """Indices of the queries that this rank receives, into its stored queries."""
    kv: slice
    """Key/value heads that the other rank needs."""


class Sample(NamedTuple):
    """What is attended: a batch, whole."""

    batch: int
    """Number B of samples."""
    length: int
    """Number S of tokens in a sample."""
    documents: Documents = None
    """Offsets of the documents into the flattened [B * S] batch; None makes every sample one document."""
    device: torch.device | str = "cpu"
    """Device of the plan's tensors."""


class Plan:
    """Which rank computes which queries of which heads, as one rank sees it.

    Args:
        heads, kv_heads: H and K of the model.
        ranks, rank: P and this rank.
        sample: what is attended; the indices lie on its device.
        first, last: tokens of this call, of a sequence that is computed in chunks; None: all.
    """

    def __init__(
        self, heads: int, kv_heads: int, ranks: int, rank: int, sample: Sample, first: int = 0, last: int | None = None
    ) -> None:
        batch, length, documents, device = sample
        last = length if last is None else last
        self.heads, self.kv_heads, self.ranks, self.rank = heads, kv_heads, ranks, rank
        self.batch, self.first, self.length, self.own = batch, first, last - first, (last - first) // ranks
        self.spans = document_spans(documents, batch, length, first, last)
        self._shares = Shares(self.spans, ranks)
        with unset_fake_temporarily():  # a simulation must know too which tokens go to which rank
            runs = [self._runs(r) for r in range(ranks)]
            _, _, lo, n = runs[rank]
            self.stored = int(n.sum())
            """Number of queries that this rank computes, over its heads."""
            # into [B, H, L] of this rank those that others want, and into what it stores those that others have
            indices = [self._in_slice(rank, r, (r[1] * heads + r[0]) * self.own - rank * self.own) for r in runs]
            indices += [self._in_slice(r, runs[rank], n.cumsum(0) - n - lo) for r in range(ranks)]
            together = torch.cat(indices)
        moved = together.to(device).split([i.numel() for i in indices])  # one copy for all
        kv = [kv_of(heads, kv_heads, ranks, r) for r in range(ranks)]
        self.kv = kv[rank]
        self.messages = [Message(moved[r], moved[ranks + r], kv[r]) for r in range(ranks)]
        self.parts = self._parts()

    def _of(self, rank: int) -> list[tuple[HeadShare, list[Span]]]:
        """The heads and parts of heads of a rank, and their queries in the order in which they are stored."""
        whole = [Span(b, 0, self.first + self.length, self.length, 0, 0) for b in range(self.batch)]
        shares = parts_of(self.heads, self.ranks, rank)
        return [(s, whole if s.whole else self._shares.between(s.lo, s.hi)) for s in shares]

    def _runs(self, rank: int) -> Tensor:
        """Runs of queries of a rank: [(head, sample, first token of the call, tokens), n]."""
        found = [(s.head, q.batch, q.end - q.queries - self.first, q.queries) for s, own in self._of(rank) for q in own]
        return torch.tensor(found, dtype=torch.int64).view(-1, 4).T

    def _in_slice(self, rank: int, runs: Tensor, at: Tensor) -> Tensor:
        """The places of those tokens of the runs that are in the slice of a rank. The place of a run's first token is
        `at`, and what the runs before it have there."""
        first, (_, _, lo, n) = rank * self.own, runs
        start, stop = lo.clamp(min=first), (lo + n).clamp(max=first + self.own)
        lengths = (stop - start).clamp(min=0)
        before = lengths.cumsum(0) - lengths
        return torch.arange(int(lengths.sum())) + (at + start - before).repeat_interleave(lengths)

    def _parts(self) -> list[HeadPart]:
        """What this rank attends with: whole query heads that share one key/value head, and parts of heads."""
        found: list[HeadPart] = []
        group, at = self.heads // self.kv_heads, 0

        def together(own: tuple[HeadShare, list[Span]]) -> tuple[int, int]:
            return own[0].head // group, -1 if own[0].whole else own[0].head

        for (kv, _), some in itertools.groupby(self._of(self.rank), together):
            (share, spans), *more = some
            n, kv = 1 + len(more), kv - self.kv.start
            size = n * sum(s.queries for s in spans)
            where = slice(share.head, share.head + n), slice(at, at + size), slice(kv, kv + 1)
            if size:
                found.append(HeadPart(*where, batch=self.batch) if share.whole else HeadPart(*where, spans, 1))
            at += size
        return found


def area(spans: Sequence[Span]) -> int:
    """Pairs of query and key that these spans compute, without a window."""
    return sum(s.queries * (s.end - s.begin) - s.queries * (s.queries - 1) // 2 for s in spans)


def balance(heads: int, kv_heads: int, ranks: int, length: int, documents: Documents = None) -> tuple[float, float]:
    """(queries, causal area) of the fullest rank, relative to the mean, for one sample."""
    plans = [Plan(heads, kv_heads, ranks, r, Sample(1, length, documents)) for r in range(ranks)]
    areas = [sum((p.heads.stop - p.heads.start) * area(p.spans or plan.spans) for p in plan.parts) for plan in plans]
    queries = [plan.stored for plan in plans]
    return max(queries) * ranks / sum(queries), max(areas) * ranks / sum(areas)
