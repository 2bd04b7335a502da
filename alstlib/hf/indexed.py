"""Attention whose keys an indexer selects (DeepSeek-V3.2's sparse attention, and models that took it over).

Shape legend: B batch, S sequence, P ranks, L = S / P, N selected keys of a token, R width of what the indexer reads, D
width of its keys.

A layer's indexer scores all tokens before a token, and its attention sees the N with the highest scores. Each rank does
so for the tokens of its slice: the indexer's own keys, one head of them for each token, are gathered once a layer, and
the module's own forward runs tile by tile, over the keys of one document at a time, so that no tensor has [L, S]
numbers. It sees the keys that plain transformers shows it for this document, those to come hidden, and chooses the same
among equal scores. transformers has no gradient through an indexer, and neither has this.

`attend` hands what was selected on to `ulysses.selected`. Layers run whole: chunks and blocks would need pages of the
indexer's keys, and gradients that come back to pages by selected keys.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.sizing import tokens_in_tile
from alstlib.kernels.spans import Documents, document_spans
from alstlib.ulysses.alltoall import Exchange

INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
"""What `config.layer_types` calls layers whose attention has an indexer, in newer and older transformers."""
WHY_WHOLE = "has attention whose keys an indexer selects, which runs on whole layers only"


def is_indexer(module: nn.Module) -> bool:
    """Whether a module selects keys for attention in the way that is known."""
    return hasattr(module, "index_topk") and "q_resid" in inspect.signature(module.forward).parameters


def has_indexer(module: nn.Module) -> bool:
    """Whether this is an attention module with an indexer."""
    indexer = getattr(module, "indexer", None)
    return isinstance(indexer, nn.Module) and is_indexer(indexer)


class AnyMask:
    """Stands for the mask of an attention module that hands parts of it to its indexer."""

    def __getitem__(self, part: Any) -> AnyMask:
        return self


class _KeysFound(Exception):
    """Leaves an indexer once it has made its keys. Not seen outside."""


class _Cache:
    """What an indexer takes for a cache: without `keys` it finds out the keys of the indexer's rows, with them it says
    that all rows have these."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        if self.keys is None:
            self.keys = keys
            raise _KeysFound
        return self.keys


@torch.no_grad()
def select(
    module: Any, indexer: Callable[..., Tensor], hidden: Tensor, queries: Tensor, rotary: Sequence[Tensor],
    documents: Documents, sample_tokens: Sequence[int] | None, exchange: Exchange,
) -> Tensor:  # fmt: skip
    """[B, L, N] int32: the places in the sequence of the keys that each token of this rank attends to, -1 for none.
    Collective over the SP group.

    Args:
        module: the indexer.
        indexer: its own forward.
        hidden, queries: what the indexer reads of this rank's tokens, [B, L, R] each with its own R.
        rotary: cosines and sines of their positions, [B, L, W] or [1, L, W].
        documents: offsets in the flattened batch of all ranks; None: each row is one.
        sample_tokens: the tokens of each row without padding, which is no key of the row's document; None: all.
    """
    batch, rows = hidden.shape[:2]
    length, first = rows * exchange.ranks, rows * exchange.rank
    rotary = [t.expand(batch, -1, -1) for t in rotary]
    made = _Cache()
    with contextlib.suppress(_KeysFound):
        indexer(hidden, queries, tuple(rotary), None, position_ids=None, past_key_values=made)
    assert made.keys is not None
    keys = exchange.gather(made.keys).transpose(0, 1).flatten(1, 2)
    found = torch.full((batch, rows, min(module.index_topk, length)), -1, dtype=torch.int32, device=hidden.device)
    ends = torch.tensor([length] if sample_tokens is None else sample_tokens).expand(batch).tolist()
    for span in document_spans(documents, batch, length, 0, length):
        last = ends[span.batch] if span.begin < ends[span.batch] < span.end else span.end
        row, own = slice(span.batch, span.batch + 1), slice(span.begin, last)
        places = torch.arange(span.begin, last, device=hidden.device)
        tile = tokens_in_tile(4 * max(1, module.n_heads) * len(places), hidden.device.type)
        start, end = max(span.begin, first), min(span.end, first + rows)
        for at in range(start, end, tile):
            part = slice(at - first, min(at + tile, end) - first)
            mine = torch.arange(part.start, part.stop, device=hidden.device)[:, None] + first
            chosen = indexer(
                hidden[row, part], queries[row, part], tuple(t[row, part] for t in rotary), (places <= mine)[None],
                position_ids=None, past_key_values=_Cache(keys[row, own]),
            )[0] + span.begin  # fmt: skip
            found[span.batch, part, : chosen.shape[-1]] = chosen.masked_fill(chosen > mine, -1)
    return found
