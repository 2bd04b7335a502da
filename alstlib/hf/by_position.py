"""Attention that depends on a token's position in its document: chunked attention, and queries that are scaled by
position (Llama 4).

Shape legend: B batch, L tokens of this rank, S sequence, H query heads, D key width.

Chunked attention is packing: a token attends to those tokens before it that are in the same chunk of its document, as
if each chunk were a document of its own. So a layer with chunked attention gets other offsets than the rest, and is
exact wherever packed documents are. Positions go on through the chunks, because RoPE is given the document's.

A layer of Llama 4 without RoPE scales its queries by their positions, which it counts from the first row that it is
called with. Here that is the first row of a slice, a chunk or a block, so the layer is told to leave the scale out, and
the queries are scaled by the positions of the call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.kernels.spans import Documents, Offsets

CHUNKED = "chunked_attention"
"""What `config.layer_types` calls layers with chunked attention."""


def attention_chunk(module: nn.Module) -> int | None:
    """Number of tokens in which this attention module attends together; None where it is not chunked."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if config is None or index is None or not kinds or kinds[index] != CHUNKED:
        return None
    return config.attention_chunk_size


def scales_by_position(module: nn.Module) -> bool:
    """Whether this attention module scales its queries by positions that it counts by itself."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def chunk_offsets(documents: Documents, batch: int, length: int, chunk: int) -> Offsets:
    """Offsets of the chunks of all documents in the flattened batch [B * S], each counted from its document's start.

    Args:
        documents: offsets of the documents; None: each of the `batch` samples of this `length` is one document.
    """
    total = batch * length
    starts = sorted({*(documents or ()), *range(0, total + 1, length)})
    return Offsets([at for begin, end in pairwise(starts) for at in range(begin, end, chunk)] + [total])


def scaled_queries(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Queries [B, H, L, D] times the scale of their positions [B, L], by the formula of transformers' Llama 4."""
    scale = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return (query * scale.to(query.device)[:, None, :, None]).to(query.dtype)
