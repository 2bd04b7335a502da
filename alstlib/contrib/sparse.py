"""Sparse attention over pages: each chunk of queries attends to some pages of keys only, which this module chooses.

Shape legend: B batch, C tokens of this rank in a chunk, H query heads, K key/value heads, D key width, P ranks.

A chunk sees its own page, the first pages of its document, the last ones before its own, and of the others those with
the best scores, for each sample and each key/value head. By default the score of a page is the product of two
means: of its keys, and of the chunk's queries, summed over the query heads of the key/value head. The means are over
all tokens, also where a document ends in the page or the chunk. This is an approximation of the model's attention.
(SeCOv2 and Native Sparse Attention, arXiv 2502.11089, choose pages too.)

The choice is made in forward and kept on the CPU, where pages are fetched from. Every later pass of the step uses it
again. So the gradients are exact for the attention that forward computed; the choice itself has none.

Each rank scores with its own tokens of all heads, and the mean over the ranks counts. Therefore the choice does not
depend on which rank computes which head: all parts of a head see the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from alstlib.base.options import Count, Natural, Settings, Works
from alstlib.hf.handle import Handle
from alstlib.kernels.paged import HeadPart
from alstlib.kernels.spans import Documents, document_spans
from alstlib.streaming.pages import LayerPages
from alstlib.ulysses.alltoall import Exchange

Score = Annotated[Callable[..., Any], Works("a function (queries, mean keys of pages) -> scores")]


class Sparse(Settings):
    """Attention to selected pages of keys, which approximates the model's attention (`select_pages`).

    A page is a piece of the sequence's keys and values. Each chunk of queries always attends to its own page. Layers
    with a sliding window stay exact.

    Raises:
        ValueError: a value that does not fit its field.
    """

    top: Natural
    """The number of pages that are chosen by their scores, for each chunk of queries and each key/value head."""
    last: Natural = 1
    """The number of pages before the chunk's own page that are always attended to."""
    first: Natural = 1
    """The number of pages at the beginning of the chunk's document that are always attended to."""
    page: Count | None = None
    """The number of the sequence's tokens in a page: a multiple of chunk * sp. None: chosen as without a rule."""
    score: Score | None = None
    """A function (queries [B, H, C, D], mean keys of the pages [B, K, pages, D]) -> scores [B, K, pages]. It gets this
    rank's own tokens of the chunk. None: the product of the mean queries and the mean keys."""

    def chooser(self) -> PageChoices:
        """What chooses the pages for one call of a layer."""
        return PageChoices(self)


def select_pages(handle: Handle, sparse: Sparse) -> None:
    """Let the chunks of an attached model attend to selected pages of keys only, from the next forward on.

    Args:
        handle: what `alstlib.apply` returned for a model whose layers run in chunks. `handle.notes` gets a sentence
            that says what is approximated.
        sparse: which pages are seen.

    Raises:
        ValueError: layers run whole, chunks do not fill the pages, or no layer has pages that can be left out.
    """
    chunk, ranks, name = handle.chunk, handle.ctx.sp, type(handle.model).__name__
    if chunk is None:
        raise ValueError("sparse pages work on layers that run in chunks: give Options(chunk=...), such as 16384")
    if sparse.page is not None and sparse.page % (chunk * ranks):
        near = max(1, round(sparse.page / (chunk * ranks))) * chunk * ranks
        raise ValueError(
            f"sparse: page={sparse.page} is not a multiple of chunk * sp = {chunk} * {ranks} tokens: use page={near}"
        )
    windows = [keys.window for keys in handle.facts.keys if keys.widths]  # of layers that attend
    if not handle.facts.output.value_width or (windows and None not in windows):
        raise ValueError(f"sparse: no layer of {name} attends to all keys before, so no pages can be left out")
    rest = sum(w is not None for w in windows)
    handle.notes.append(
        f"sparse: the attention of {name} is approximated, as chunks of queries leave out pages of keys; gradients are "
        "exact for the pages that were seen, and the choice of pages has none"
        + (f"; {rest} of {len(windows)} layers have sliding windows and stay exact" if rest else "")
    )
    handle.page_chooser = sparse.chooser


def mean_score(q: Tensor, means: Tensor) -> Tensor:
    """q [B, H, C, D], mean keys of pages [B, K, pages, D] -> scores [B, K, pages]."""
    mine = q.mean(2, dtype=means.dtype).unflatten(1, (means.shape[1], -1)).sum(2)
    return (mine[:, :, None] * means).sum(-1)  # not a product of matrices, which autocast would lower


class PageChoices:
    """Which pages the chunks of one call of a layer see."""

    def __init__(self, sparse: Sparse) -> None:
        self.sparse, self.page = sparse, sparse.page
        self.made: dict[int, Tensor] = {}
        """Which pages before its own each chunk sees, by the chunk's first token of the sequence: boolean [B, K, pages
        before the own], for the key/value heads of the model, on the CPU."""
        self._sums: Tensor | None = None
        """Sums of the keys of each page, [B, K, pages, D], until forward has come to the end."""

    def of(
        self, parts: Sequence[HeadPart], q: Tensor, k: Tensor, first: int, last: int, pages: LayerPages,
        documents: Documents, exchange: Exchange,
    ) -> list[HeadPart]:  # fmt: skip
        """A part for each key/value head, with what tokens [first, last) of the sequence see: q [B, H, C, D] and
        k [B, K, C, D] are this rank's of them.

        Chunks come in order the first time; of the same tokens a second time, the answer is the same.

        Raises:
            ValueError: the user's score has a wrong shape.
        """
        if first not in self.made:
            self.made[first] = self._choose(q, k, first, last, pages, documents, exchange)
        seen, group = self.made[first], q.shape[1] // k.shape[1]
        return [replace(one, sees=_sees(seen, one.heads.start // group)) for part in parts for one in _by_kv_head(part)]

    def _choose(
        self, q: Tensor, k: Tensor, first: int, last: int, pages: LayerPages, documents: Documents, exchange: Exchange
    ) -> Tensor:
        own, batch, wide = pages.find(first)[0], q.shape[0], torch.promote_types(k.dtype, torch.float32)
        spans, size = document_spans(documents, batch, pages.length, first, last), pages.starts[1]
        begins = {span.batch: span.begin // size for span in reversed(spans)}
        """The first page that these tokens may see, for each sample: of its first span."""
        shape = (batch, k.shape[1], own)
        found = [k.sum(2, dtype=wide).flatten()]
        if any(self._open(begin, own) for begin in begins.values()):
            assert self._sums is not None
            found.append(self._scores(q, self._sums[:, :, :own] / size, shape).flatten())
        sums, *scores = exchange.gather(torch.cat(found)).sum(0).split([t.numel() for t in found])
        if self._sums is None:
            self._sums = sums.new_zeros(*shape[:2], len(pages.held), k.shape[3])
        self._sums[:, :, own] += sums.view(*shape[:2], -1)
        if last == pages.length:
            self._sums = None
        return self._seen(begins, scores[0].view(shape) if scores else None, shape)

    def _open(self, begin: int, own: int) -> range:
        """The pages that scores decide on."""
        return range(begin + self.sparse.first, own - self.sparse.last)

    def _scores(self, q: Tensor, means: Tensor, shape: tuple[int, ...]) -> Tensor:
        scores = (self.sparse.score or mean_score)(q, means)
        if (found := getattr(scores, "shape", ())) != shape:
            raise ValueError(
                f"sparse: score returned {list(found)}, but must return a score for each page: {list(shape)}"
            )
        return scores.detach().to(means.dtype)

    def _seen(self, begins: dict[int, int], scores: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """[B, K, pages before the own], on the CPU."""
        seen, scores = torch.zeros(shape, dtype=torch.bool), None if scores is None else scores.cpu()
        for sample, begin in begins.items():
            seen[sample, :, begin:] = True
            if (some := self._open(begin, shape[2])) and scores is not None:
                best = scores[sample, :, some.start : some.stop].topk(min(self.sparse.top, len(some)), -1).indices
                seen[sample, :, some.start : some.stop] = False
                seen[sample].scatter_(1, best + some.start, True)
        return seen


def _by_kv_head(part: HeadPart) -> list[HeadPart]:
    """A part for each key/value head."""
    n = part.kv.stop - part.kv.start
    each, found = (part.heads.stop - part.heads.start) // n, []
    for i in range(n) if n > 1 else ():
        heads, stored = (slice(at.start + i * each, at.start + (i + 1) * each) for at in (part.heads, part.stored))
        kv = slice(part.kv.start + i, part.kv.start + i + 1)
        found.append(replace(part, heads=heads, stored=stored, kv=kv))
    return found or [part]


def _sees(seen: Tensor, kv: int) -> Callable[[int, int], bool]:
    """`HeadPart.sees` of the heads of one of the model's key/value heads."""
    return lambda sample, page: page >= seen.shape[2] or bool(seen[sample, kv, page])
