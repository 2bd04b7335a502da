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
then by document, then in order, as the rows of one matrix.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

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


def folded_rows(rows: int, lo: int, hi: int) -> list[tuple[int, int]]:
    """The tokens from number `lo` to `hi` of a document of `rows` tokens, counted as first, last, second, second to
    last, ...: one run [first, last) of its beginning and one of its end, or a single run where the two meet."""
    front, back = ((lo + 1) // 2, (hi + 1) // 2), (rows - hi // 2, rows - lo // 2)
    runs = [(front[0], back[1])] if front[1] == back[0] else [front, back]
    return [run for run in runs if run[0] < run[1]]


class Shares:
    """Cuts a head's queries so that all shares of one size have the same number of queries and the same causal area.

    Long documents are cut one by one, each at the same share of its folded tokens. Short documents are put in a line,
    in an order that mixes all lengths, and the line is cut: each cut divides at most two of them. With 9 heads on 8
    ranks and 400 chats of 16 to 2,000 tokens, sorted by length, the fullest rank then has 0.4% more causal area than
    the mean; with the documents in their own order it has 4.8% more.
    """

    def __init__(self, rows: Sequence[int], ranks: int = 1) -> None:
        self.rows = rows
        short = max(SHORT, sum(rows) // (DEALT * ranks))
        self.long = [i for i, n in enumerate(rows) if n >= short]
        by_length = sorted((i for i, n in enumerate(rows) if n < short), key=lambda i: rows[i])
        spread = sorted(range(len(by_length)), key=lambda i: i * GOLDEN % 1)
        self.short = [by_length[i] for i in spread]
        self.ends = list(itertools.accumulate(rows[i] for i in self.short))

    def between(self, lo: Fraction, hi: Fraction) -> list[tuple[int, int, int]]:
        """(document, first, last of its folded tokens) of the share from `lo` to `hi`, by document."""
        found = []
        for number, i in enumerate(self.long):
            nudge, n = (number * GOLDEN + 0.5) % 1, self.rows[i]
            a, b = (n if share == 1 else math.floor(n * float(share) + nudge) if share else 0 for share in (lo, hi))
            found.append((i, a, min(b, n)))
        if self.ends:
            first, last = (math.floor(self.ends[-1] * share) for share in (lo, hi))
            for at in range(bisect.bisect_right(self.ends, first), len(self.ends)):
                i = self.short[at]
                begin = self.ends[at] - self.rows[i]
                if begin >= last:
                    break
                found.append((i, max(first - begin, 0), min(last - begin, self.rows[i])))
        return sorted(f for f in found if f[1] < f[2])


@dataclass(frozen=True)
class Group:
    """One call of attention: query heads that share one key/value head, stored at rows [at, at + heads * rows)."""

    at: int
    heads: int
    first_head: int
    rows: int
    """Number of one head's queries; B * S for whole heads."""
    kv: int
    """Number of the key/value head, counted from the rank's first."""
    spans: tuple[Span, ...] | None
    """Spans of the queries in their documents; None for whole heads, which see all documents."""


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
    """Number B of micro-batch rows."""
    length: int
    """Number S of tokens in a micro-batch row."""
    documents: Documents = None
    """Offsets of the documents into the flattened [B * S] batch; None makes every micro-batch row one document."""
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
        self.batch, self.rows, self.own = batch, last - first, (last - first) // ranks
        self.spans = document_spans(documents, batch, length, first, last)
        self._shares = Shares([s.rows for s in self.spans], ranks)
        with unset_fake_temporarily():  # a simulation must know too which tokens go to which rank
            runs = [self._runs(r) for r in range(ranks)]
            self.stored = int(runs[rank][:, 3].sum())
            """Number of queries that this rank computes, over its heads."""
            indices = [self._sent(runs[r]) for r in range(ranks)]
            indices += [self._received(runs[rank], r) for r in range(ranks)]
            together = torch.cat(indices)
        moved = together.to(device).split([i.numel() for i in indices])  # one copy for all
        self.kv = self.kv_of(rank)
        self.messages = [Message(moved[r], moved[ranks + r], self.kv_of(r)) for r in range(ranks)]
        self.groups = self._groups(first)

    def kv_of(self, rank: int) -> slice:
        """The key/value heads that a rank needs."""
        own, group = parts_of(self.heads, self.ranks, rank), self.heads // self.kv_heads
        return slice(own[0].head // group, own[-1].head // group + 1)

    def _runs(self, rank: int) -> Tensor:
        """Runs of queries of a rank in the order in which they are stored: [n, (head, micro-batch row, first token,
        tokens)], counted from the first token of the call."""
        found: list[tuple[int, int, int, int]] = []
        for part in parts_of(self.heads, self.ranks, rank):
            if part.whole:
                found += [(part.head, b, 0, self.rows) for b in range(self.batch)]
                continue
            found += [(part.head, s.batch, s.at + lo, hi - lo) for s, lo, hi in self._rows_of(part)]
        return torch.tensor(found, dtype=torch.int64).view(-1, 4)

    def _sent(self, runs: Tensor) -> Tensor:
        """Indices into this rank's flattened [B, H, L] queries of those that lie in `runs`."""
        head, b, lo, n = runs.unbind(1)
        mine = self.rank * self.own
        start, stop = lo.clamp(min=mine), (lo + n).clamp(max=mine + self.own)
        return _ranges((b * self.heads + head) * self.own + start - mine, (stop - start).clamp(min=0))

    def _received(self, runs: Tensor, source: int) -> Tensor:
        """Indices into this rank's stored queries of those that come from the rank `source`."""
        lo, n = runs[:, 2], runs[:, 3]
        at, theirs = n.cumsum(0) - n, source * self.own
        start, stop = lo.clamp(min=theirs), (lo + n).clamp(max=theirs + self.own)
        return _ranges(at + start - lo, (stop - start).clamp(min=0))

    def _groups(self, first: int) -> list[Group]:
        found: list[Group] = []
        group, at = self.heads // self.kv_heads, 0
        parts = parts_of(self.heads, self.ranks, self.rank)
        for (kv, whole), some in itertools.groupby(parts, key=lambda p: (p.head // group, p.whole)):
            own = list(some)
            if whole:
                rows = self.batch * self.rows
                found.append(Group(at, len(own), own[0].head, rows, kv - self.kv.start, None))
                at += len(own) * rows
                continue
            for part in own:
                spans, size = self._spans(part, first)
                if size:
                    found.append(Group(at, 1, part.head, size, kv - self.kv.start, tuple(spans)))
                at += size
        assert at == self.stored
        return found

    def _rows_of(self, part: HeadShare) -> Iterator[tuple[Span, int, int]]:
        """(document, first, last of a run of its tokens) of a part, in the order in which they are stored."""
        for i, lo, hi in self._shares.between(part.lo, part.hi):
            for first, last in folded_rows(self.spans[i].rows, lo, hi):
                yield self.spans[i], first, last

    def _spans(self, part: HeadShare, first: int) -> tuple[list[Span], int]:
        """The runs of a part as spans over the keys of their documents, and the number of their queries."""
        spans: list[Span] = []
        at = 0
        for span, lo, hi in self._rows_of(part):
            spans.append(Span(span.batch, span.begin, first + span.at + hi, hi - lo, at, 0))
            at += hi - lo
        return spans, at


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """starts and lengths [n] -> the numbers start, start + 1, ... of every range, one after the other."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


def area(spans: Sequence[Span]) -> int:
    """Pairs of query and key that these spans compute, without a window."""
    return sum(s.rows * (s.end - s.begin) - s.rows * (s.rows - 1) // 2 for s in spans)


def balance(heads: int, kv_heads: int, ranks: int, length: int, documents: Documents = None) -> tuple[float, float]:
    """(queries, causal area) of the fullest rank, relative to the mean, for one micro-batch row."""
    plans = [Plan(heads, kv_heads, ranks, r, Sample(1, length, documents)) for r in range(ranks)]
    whole = area(plans[0].spans)
    areas = [sum(g.heads * whole if g.spans is None else area(g.spans) for g in p.groups) for p in plans]
    rows = [p.stored for p in plans]
    return max(rows) * ranks / sum(rows), max(areas) * ranks / sum(areas)
