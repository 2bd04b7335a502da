"""Attention of a model that runs by blocks: the outer loop is over blocks of tokens, the inner loop over layers.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, C tokens of a block on this rank, H query
heads, K key/value heads, D key width, V value width.

Everything token-wise in a model needs only its own tokens, so what a block hands to later blocks is each layer's keys
and values. Forward runs the blocks in order without a graph and leaves these in pages, one for each block. Backward
goes from the last block to the first: it recomputes a block with its graph and calls backward; attention adds what the
block contributes to the gradients of earlier pages, and takes what later blocks have added to its own. Layers with a
state hand that on instead (`carried`), and what each block began with is kept where pages are. What lies on the device
is one block and few pages of one layer; what grows with the sequence is pages, and states before blocks. (SeCO and
SeCOv2 run models this way.)

A page keeps only the keys that a later block sees: under a sliding window its last ones, of a document that ends with
the block none, and of the last block none. A block's own keys are made again by its recompute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.base.recompute import Saved
from alstlib.base.sizing import kept_of_page
from alstlib.kernels.paged import Page
from alstlib.kernels.spans import Documents, document_spans
from alstlib.offload.courier import Courier
from alstlib.streaming.carried import Carried, Step
from alstlib.streaming.chunked import LayerChunk
from alstlib.streaming.pages import HeldPage, LayerPages
from alstlib.ulysses.attention import UlyssesAttention


def first_seen(documents: Documents, batch: int, length: int, end: int, window: int | None) -> int:
    """The first token that any token from `end` on sees; `end` where no token before it is seen."""
    if end >= length:
        return end
    begin = min(span.begin for span in document_spans(documents, batch, length, end, end + 1))
    return begin if window is None else max(begin, end - window + 1)


class BlockPages(LayerPages):
    """Keys and values of one layer, a page for each block, and the sums of their gradients. `starts` may change where
    no page is held."""

    def begin(self, first: int) -> None:
        """The block whose tokens begin here puts its keys and values in next, in place of what the page holds."""
        self.filled, self.open = first, None
        self.held += [HeldPage() for _ in range(len(self.held), len(self.starts) - 1)]
        page = self.held[self.find(first)[0]]
        page.device, page.host, page.first = [], [], 0

    def keep(self, first: int) -> None:
        """Keep the open page's keys from token `first` of the sequence on, for later blocks."""
        index, self.open = self.open, None
        assert index is not None
        page = self.held[index]
        page.first = max(0, first - self.starts[index])
        if page.first >= len(page.device[0]):
            self.held[index] = page = HeldPage()
        elif page.first:
            page.device = [t[page.first :].clone() for t in page.device]
        if self.courier is not None:
            self._leave(page)

    def leave(self) -> None:
        """Let the open page go: the block's recompute makes it again. What later blocks have added to it stays."""
        assert self.open is not None
        self.held[self.open].device = []
        self.open = None

    def own(self, page: Page, first: int, last: int, dtype: torch.dtype) -> list[Tensor]:
        """What `LayerPages.own` returns; the page goes, because all blocks that saw it are done."""
        found = super().own(page, first, last, dtype)
        self.drop(page.index)
        return found

    def drop(self, index: int) -> None:
        """Let a page go altogether; a layer that does not attend has none."""
        self.held[index : index + 1] = [HeldPage() for _ in self.held[index : index + 1]]
        self.open = None


class Blocks:
    """The pages of all layers of a micro-batch that runs block by block, and the block that runs now.

    Args:
        layers: of the model.
        tokens: L.
        block: C; the last block may have fewer.
        ranks: P. Block i of all of them is consecutive tokens of the sequence (`alltoall.stripe`).
    """

    def __init__(self, layers: int, tokens: int, block: int, ranks: int) -> None:
        self.length, self.block, self.ranks = tokens, block, ranks
        self.count = -(-tokens // block)
        self.layers = layers
        self.starts = [*range(0, tokens * ranks, block * ranks), tokens * ranks]
        """The places in the sequence at which blocks begin, and the end."""
        self.pages: list[BlockPages] = []
        """The pages of each layer; none until it is decided where they lie."""
        self.carried = Carried()
        self.begin(0, making=True)

    def begin(self, index: int, making: bool, seen: bool = True) -> None:
        """A block's pass begins: with `making` the forward without a graph, which leaves keys and values in the
        pages. `seen`: later blocks see some of its tokens, where tokens follow at all."""
        self.index, self.making, self.seen = index, making, seen
        self.first, self.last = self.starts[index : index + 2]
        self.tokens = slice(self.first // self.ranks, self.last // self.ranks)
        if not making:
            self.carried.drop(self.last)  # those that began with it are done
        self.calls = Counter[Hashable]()
        """How often each part that hands something on has run in this pass."""

    def place(self, courier: Courier | None = None) -> None:
        """Make the pages, which lie on the device, or on the host with a courier, as what is carried."""
        self.carried.courier = courier
        self.pages = [BlockPages(self.length * self.ranks, self.starts, courier) for _ in range(self.layers)]

    def kept_tokens(self, window: int | None) -> int:
        """Tokens of the sequence that a layer's pages keep at most."""
        return (self.count - 1) * kept_of_page(min(self.block, self.length) * self.ranks, window)

    def attend(
        self, op: UlyssesAttention, q: Tensor, k: Tensor, v: Tensor, *, layer: int, saved: Saved | None = None,
        documents: Documents = None, window: int | None = None, **how: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of the block's tokens in one layer: q [B, H, C, D], k [B, K, C, D], v [B, K, C, V] -> [B, H, C, V].

        Args:
            saved: as `UlyssesAttention` takes it, for a layer that is checkpointed inside its block.
            how: scale, softcap and sinks, as `UlyssesAttention` takes them.
        """
        graph = torch.is_grad_enabled()
        if saved is None:  # nothing is kept: what a backward reads goes as soon as it has
            (saved := Saved(keep=False)).rewind([])
        if saved.replaying and not graph:
            return saved.take()[0]
        pages, first, last, length = self.pages[layer], self.first, self.last, self.ranks * self.length
        piece = LayerChunk(self.tokens, first, last, graph, pages, saved=saved)
        pages.begin(first)
        out = piece.attend(op, q, k, v, documents=documents, window=window, **how)
        if graph:
            return out
        if self.making:
            pages.keep(first_seen(documents, q.shape[0], length, last, window) if self.seen else last)
        else:
            pages.leave()
        return out

    def carry(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        """The output for the block of a call of a part that hands something on; `key` is of the call."""
        place, length = (self.first, self.last), self.ranks * self.length
        return self.carried.run(
            key, step, inputs, place, length, graph=torch.is_grad_enabled(), keep=self.making and self.seen
        )

    def done(self) -> None:
        """The block's backward has run: nobody needs its pages any more."""
        for pages in self.pages:
            pages.drop(self.index)

    def close(self) -> None:
        """Let all pages go, once no copy of them is on its way."""
        if self.carried.courier is not None:
            self.carried.courier.finish()
        self.pages, self.carried = [], Carried()
