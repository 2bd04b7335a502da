"""Tiled log-probabilities of labels, for losses that give each token a gradient of its own (DPO, GRPO).

Shape legend: N tokens of this rank, t tokens of a tile, E model width, V vocabulary. The gradient of a token is known
in backward only: there the logits of each tile are made again, which is one matrix product more than the loss takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alstlib.offload.courier import Travel
from alstlib.recompute import first_order
from alstlib.tiled.compute import check_tile, default_tile
from alstlib.tiled.logits import Gradients, LogitTransform, Statistics, check_labels, tiles_of_logits


class _TiledLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tile: int,
        transform: LogitTransform, dtype: torch.dtype, travel: Travel | None, found: Statistics | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.how = tile, transform, dtype, travel
        wide = torch.promote_types(hidden.dtype, torch.float32)
        courier = None if travel is None else travel.courier()
        logps = torch.zeros(labels.shape, dtype=wide, device=labels.device)
        if found is not None:
            found.begin(labels, wide)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        some = tiles_of_logits(hidden, weight, bias, labels, tile, transform, courier, False, found is not None)
        for at, part, one in some:
            logps.view(-1)[at] = one.logps()
            if found is not None:
                found.note(at, one)
            del part, one
        return logps

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        (hidden, weight, bias, labels), (tile, transform, dtype, travel) = ctx.saved_tensors, ctx.how
        courier, needs = None if travel is None else travel.courier(), list(ctx.needs_input_grad[:3])
        kept = (weight.dtype, None if bias is None else bias.dtype)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        grads = Gradients(hidden.reshape(-1, hidden.shape[-1]), weight, bias, needs, courier)
        upstream = upstream.reshape(-1)
        for at, part, one in tiles_of_logits(hidden, weight, bias, labels, tile, transform, courier, True):
            grads.add(at, part, one.grad(upstream[at]))
            del part, one
        rows = None if grads.rows is None else grads.rows.view(hidden.shape)
        made = [None if g is None else g.to(d) for g, d in zip((grads.weight, grads.bias), kept)]
        return rows, *made, *[None] * 6


def tiled_token_logps(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tile: int | None = None,
    transform: LogitTransform | None = None, temperature: float = 1.0, travel: Travel | None = None,
    statistics: Statistics | None = None,
) -> Tensor:  # fmt: skip
    """The log-probability of each label, computed in tiles: for losses that give each token a weight (DPO, GRPO).

    Each token may have an upstream gradient of its own, so backward makes the logits of each tile again: one matrix
    product more than `tiled_logits_loss`. With 32,768 tokens at the head of Llama-3.1-8B in bf16 (E 4,096, V 128,256)
    and tiles of 1,024 tokens, forward takes 0.7 GiB and backward 3.9 GiB, of which 2.2 GiB are the gradients;
    log_softmax over whole logits takes 47 GiB (the ledger's peaks over fake tensors).

    Args:
        hidden, weight, labels, bias, tile, transform, travel, statistics: as `tiled_logits_loss` takes them.
        temperature: the number by which the logits are divided, after the transform.

    Returns:
        A tensor of labels' shape in fp32 (or wider), in nats; 0 where the label is -100.

    Raises:
        ValueError: as `tiled_logits_loss`; the temperature is not above 0.
    """
    check_labels(labels, hidden, weight.shape[0])
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0; 1.0 leaves the logits as they are")
    transform, device, dtype = (transform or LogitTransform()).at(temperature), labels.device, weight.dtype
    tile = default_tile(weight.shape[0], 4, device) if tile is None else check_tile(tile)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden = hidden.to(dtype)
    return _TiledLogps.apply(hidden, weight, bias, labels, tile, transform, dtype, travel, statistics)
