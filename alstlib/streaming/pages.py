"""The keys and values of one layer in pages, on the device or on the host, with the sums of their gradients.

Shape legend: B batch, S sequence, K key/value heads of this rank, R keys of a page, D key width, V value width.

Pages are filled in order in forward. The page that is being filled, or whose tokens are back-propagated, is *open*: it
lies on the device. The others come from the host one ahead of the computation (`Courier`), and in backward their sums
go back to it. (FPDT, arXiv 2408.16978, double-buffers keys and values in the same way.)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from alstlib.base.recompute import sum_dtype
from alstlib.kernels.paged import HeadPart, Page
from alstlib.kernels.spans import Documents
from alstlib.offload.courier import Coming, Courier, one_ahead
from alstlib.ulysses.alltoall import Exchange


class HeldPage:
    """One page: on the device, on the host, or on both."""

    def __init__(self) -> None:
        self.first = 0
        """Keys of the page that are left out before those that it holds."""
        self.device: list[Tensor] = []
        """k and v [R, B, K, D]."""
        self.host: list[Tensor] = []
        self.sums: list[Tensor] = []
        """Sums of dk and dv on the device, in fp32."""
        self.host_sums: list[Tensor] = []
        self.sent: Any = None
        """What a fetch has to wait for."""


class LayerPages:
    """Keys and values of one layer's whole sequence in head layout (with uneven heads those that this rank needs),
    filled chunk by chunk, and the sums of their gradients.

    Args:
        length: S.
        starts: the places in the sequence at which pages begin, and the end; a chunk's keys lie in one page.
        courier: brings pages from the host and back; None: all of them stay on the device.
    """

    def __init__(self, length: int, starts: Sequence[int], courier: Courier | None = None) -> None:
        self.length, self.starts, self.courier = length, starts, courier
        self.held = [HeldPage() for _ in starts[1:]]
        self.filled = 0
        """Keys that are in place."""
        self.open: int | None = None

    def find(self, key: int) -> tuple[int, int, int]:
        """The page of a key of the sequence, the key's place in it, and the number of keys from there to its border."""
        index = bisect.bisect_right(self.starts, key, hi=len(self.starts) - 1) - 1
        return index, key - self.starts[index], self.starts[index + 1] - key

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Put the next keys, k [B, K, C, D] and v [B, K, C, V], in place."""
        index, first, left = self.find(self.filled)
        self._open(index)
        page, new = self.held[index], [t.permute(2, 0, 1, 3) for t in (k, v)]
        if not page.device:
            page.device = [t.new_empty(first + left, *t.shape[1:]) for t in new]
        for held, t in zip(page.device, new):
            held[first : first + len(t)].copy_(t)
        self.filled += len(new[0])

    def _open(self, index: int) -> None:
        """Let this page lie on the device, and the one that did before go to the host, or go altogether where backward
        has left it behind."""
        before, self.open = self.open, index
        if before is None or before == index or self.courier is None:
            return
        if before > index:
            self.held[before] = HeldPage()
        else:
            self._leave(self.held[before])

    def _leave(self, page: HeldPage) -> None:
        page.host, page.device = page.host or self._send(page, page.device, []), []
        self._send_sums(page)

    def _send_sums(self, page: HeldPage) -> None:
        page.host_sums, page.sums = self._send(page, page.sums, page.host_sums), []

    def _send(self, page: HeldPage, tensors: Sequence[Tensor], to: list[Tensor]) -> list[Tensor]:
        """Send a page's tensors to the host: to where they lay before, if they did. Returns where they lie."""
        assert self.courier is not None
        to = to or [self.courier.empty(t.shape, t.dtype) for t in tensors]
        for host, t in zip(to, tensors):
            page.sent = self.courier.send(host, t)
        return to

    def visit(self, order: Sequence[int], sums: bool = False) -> Iterator[Page]:
        """These pages one after the other on the device, the first of them the one that is open from now on."""
        self._open(order[0])
        for index, arrived in zip(order, one_ahead(self._fetch(following, sums) for following in order)):
            page = self.held[index]
            keys = page.device or arrived[:2]
            if sums:
                found = page.sums or (
                    arrived[-2:] if page.host_sums else [torch.zeros_like(t, dtype=sum_dtype(t)) for t in keys]
                )
                page.sums = [_padded(total, t) for total, t in zip(found, keys)]
            if index == self.open:
                page.device = keys
            k, v, *more = (t.permute(1, 2, 0, 3) for t in [*keys, *(page.sums if sums else ())])
            yield Page(index, k, v, (more[0], more[1]) if more else None, page.first)
            if sums and self.courier is not None and index != self.open:
                self._send_sums(page)

    def _fetch(self, index: int, sums: bool) -> Coming:
        """What of a page has to come from the host, on its way."""
        page = self.held[index]
        wanted = [] if page.device else page.host
        if sums and not page.sums:
            wanted = [*wanted, *page.host_sums]
        return self.courier.fetch(*wanted, after=page.sent) if wanted and self.courier is not None else list

    def own(self, page: Page, first: int, last: int, dtype: torch.dtype) -> list[Tensor]:
        """Gradients [B, K, last - first, D] of the keys and values of tokens [first, last), which lie in this page."""
        assert page.sums is not None
        at = self.find(first)[1]
        return [t[:, :, at : at + last - first].to(dtype) for t in page.sums]


def _padded(sums: Tensor, keys: Tensor) -> Tensor:
    """Sums for all of a page's keys, where other pages' queries have seen the last of them only."""
    lacking = keys.shape[0] - sums.shape[0]
    return sums if not lacking else torch.cat([sums.new_zeros(lacking, *sums.shape[1:]), sums])


class PageChooser(Protocol):
    """Chooses the pages that the chunks see in one call of a layer, and keeps the choice for later passes."""

    page: int | None
    """The number of the sequence's tokens in a page; None: chosen as where every page is seen."""

    def of(
        self, parts: Sequence[HeadPart], q: Tensor, k: Tensor, first: int, last: int, pages: LayerPages,
        documents: Documents, exchange: Exchange,
    ) -> list[HeadPart]:  # fmt: skip
        """The parts of a rank's heads, cut where they see different pages, and what tokens [first, last) of the
        sequence see: q [B, H, C, D] and k [B, K, C, D] are this rank's of them. Collective over the SP group."""
