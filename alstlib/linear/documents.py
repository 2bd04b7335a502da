"""Which tokens of a rank's slice a recurrence computes in one call, when the slice holds packed documents.

Shape legend: B batch, L tokens of this rank, N documents of a call, T tokens of the longest of them.

A state enters a slice only in its first document and leaves it only in its last one: each of these two has a call of
its own. All other documents begin with zeros and hand nothing on. They share calls, because a sample can hold thousands
of them: side by side in a batch [N, T, ..], where each is padded with zeros after its last token. No token sees what
comes after it, so the padding changes nothing. Or, where the kernel keeps packed documents apart itself, one after the
other as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.spans import Documents, Span, document_spans, once

PADDED = 65_536
"""Most tokens of a batch of several documents, padding included: longer calls are not faster, but need more memory."""
LONGEST_TO_SHORTEST = 1.25
"""Documents share a batch only if the longest has at most so many times the tokens of the shortest: finer batches have
less padding, but there are more of them."""
MOST_DOCUMENTS = 512
"""Most documents of a batch. Times the heads, it is a dimension of some kernels' grids, which end at 65,535."""


@dataclass(frozen=True, eq=False)
class KernelRun:
    """One call: a document at an end of this rank's slice, whole samples, or several documents inside it."""

    at: tuple[Any, Any]
    """The index of its tokens in a tensor [B, L, ..]."""
    to: tuple[Tensor, Tensor] | None = None
    """Their index in a batch of documents; None: the call takes them as they are stored."""
    shape: tuple[int, int] = (0, 0)
    """(N, T) of that batch."""
    packed: Tensor | None = None
    """Offsets of the documents that lie one after the other in the call, with the end: [N + 1], int64; None: each
    sample is one document."""
    goes_on: bool = False
    """Whether its document has begun on an earlier rank."""
    last: bool = False
    """Whether its last token is the last of the slice, so that its state goes to the next rank."""

    @property
    def samples(self) -> slice:
        """The samples of the batch that it is of, where a state enters or leaves."""
        return self.at[0]

    def of(self, x: Tensor) -> Tensor:
        """What the call takes of x [B, L, ..]."""
        if self.to is None:
            return x[self.at]
        padded = x.new_zeros(*self.shape, *x.shape[2:])
        padded[self.to] = x[self.at]
        return padded


def runs_of(
    documents: Documents, shape: tuple[int, int], first: int, length: int, packed: bool, device: torch.device
) -> list[KernelRun]:
    """The calls for the tokens [first, first + L) of every sample.

    Args:
        documents: global offsets into the flattened [B * length] batch; None makes every sample one document.
        shape: (B, L).
        packed: whether the kernel keeps packed documents apart.
    """
    batch, local = shape
    if documents is None:
        return [KernelRun((slice(0, batch), slice(0, local)), goes_on=first > 0, last=True)]
    runs, inside = [], []
    for span in document_spans(documents, batch, length, first, first + local):
        goes_on, last = span.end - span.queries > span.begin, span.at + span.queries == local
        if goes_on or last:
            runs.append(_stored([span], goes_on=goes_on, last=last))
        else:
            inside.append(span)
    share = _packed if packed else _side_by_side
    key = ("calls", *shape, first, length, packed, device)
    return [*runs, *once(documents, key, lambda: list(share(inside, device)))]


def _stored(spans: Sequence[Span], **how: Any) -> KernelRun:
    """Documents of one sample, of which each begins where the one before ends."""
    b, first, last = spans[0].batch, spans[0].at, spans[-1].at + spans[-1].queries
    return KernelRun((slice(b, b + 1), slice(first, last)), **how)


def _packed(spans: Sequence[Span], device: torch.device) -> Iterator[KernelRun]:
    for _, inside in groupby(spans, lambda span: span.batch):
        some = list(inside)
        yield _stored(some, packed=torch.tensor([0, *accumulate(span.queries for span in some)], device=device))


def _side_by_side(spans: Sequence[Span], device: torch.device) -> Iterator[KernelRun]:
    alike: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.queries, reverse=True):
        longest = alike[-1][0].queries if alike else 0
        room = longest and len(alike[-1]) < min(MOST_DOCUMENTS, PADDED // longest)
        if room and longest <= LONGEST_TO_SHORTEST * span.queries:
            alike[-1].append(span)
        else:
            alike.append([span])
    step = torch.tensor([[0], [1], [0], [1]])
    for some in alike:
        if len(some) == 1:
            yield _stored(some)
            continue
        places = [
            torch.tensor([[span.batch], [span.at], [place], [0]]) + step * torch.arange(span.queries)
            for place, span in enumerate(some)
        ]
        batch, at, place, token = torch.cat(places, 1).to(device)
        yield KernelRun((batch, at), (place, token), (len(some), some[0].queries))
