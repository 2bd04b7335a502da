"""Tiled logits and loss: the cross-entropy of a language-model head, without the logits of the whole sequence (ALST,
section 3.1).

Shape legend: B batch, S tokens of this rank, E model width, V vocabulary. Logits exist for one tile at a time.

The gradients of a sum of token losses are known as soon as its logits are: forward computes them tile by tile (one
matrix product less than recomputing the logits in backward), and backward scales them by the upstream gradient. They
are returned through autograd, once: scaling the loss by k scales every gradient by k, and a frozen head or body costs
nothing.

For losses that give each token a gradient of its own (DPO, GRPO) there are the log-probabilities of the labels. A
token's gradient is known in backward only: there the logits of each tile are made again, which is one matrix product
more than the loss takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.offload.courier import Travel
from alstlib.recompute import first_order
from alstlib.tiled.compute import TiledModule, check_tile, default_tile, tiled_compute, tiles_of
from alstlib.tiled.logits import Gradients, LogitTransform, Statistics, check_labels, tiles_of_logits
from alstlib.units import IGNORE


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tile: int,
        transform: LogitTransform, train: bool, travel: Travel | None, found: Statistics | None,
        smoothing: float,
    ) -> Tensor:  # fmt: skip
        # autograd says which inputs require a gradient, under no_grad too
        needs = [train and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        courier = None if travel is None else travel.courier()
        total = torch.zeros((), dtype=wide, device=labels.device)
        grads = Gradients(hidden.reshape(-1, hidden.shape[-1]), weight, bias, needs, courier)
        some = tiles_of_logits(
            hidden, weight, bias, labels, tile, transform, courier, any(needs), found, smoothing
        )  # fmt: skip
        for at, part, one in some:
            total -= one.logps().sum()
            if any(needs):
                grads.add(at, part, one.grad(one.sums.new_full((), -1.0)))
            del part, one
        ctx.grads = (grads.rows, grads.weight, grads.bias)
        ctx.like = (hidden.shape, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "tiled_logits_loss: backward ran a second time, but its gradients are freed after the first; run "
                "forward again"
            )
        (rows, weight, bias), (shape, weight_dtype, bias_dtype) = ctx.grads, ctx.like
        ctx.grads = None
        rows = None if rows is None else rows.mul_(upstream.to(rows.device)).view(shape)
        weight = None if weight is None else weight.mul_(upstream).to(weight_dtype)
        bias = None if bias is None else bias.mul_(upstream).to(bias_dtype)
        return rows, weight, bias, *[None] * 7


def tiled_logits_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tile: int | None = None,
    transform: LogitTransform | None = None, travel: Travel | None = None,
    statistics: Statistics | None = None, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """The sum of the cross-entropy over the valid tokens, computed tile by tile: the logits of the whole sequence never
    exist (ALST, section 3.1).

    Args:
        hidden: [..., E], the input of the head.
        weight, bias: [V, E] and [V], the parameters of the head.
        labels: [...] int64, already shifted; -100 marks a token without loss.
        tile: the number of tokens in one tile; None chooses it by `compute.default_tile`.
        transform: the scale and the soft cap of the logits.
        travel: says that `hidden` and its gradient are on the host, from where tiles are copied to the device; None:
            they are on the device.
        statistics: receives the entropy of each token and whether its label has the largest logit.
        label_smoothing: as in PyTorch's cross_entropy.

    Returns:
        A scalar in fp32 (or wider), in nats. It is a sum: divide it by the number of valid tokens of the whole batch.

    Raises:
        ValueError: the shape of labels is not that of hidden without its width, or a label is outside the vocabulary
            (checked on a CPU).
    """
    tile, dtype = _checked(hidden, weight, labels, tile)
    transform = transform or LogitTransform()
    if dtype is not None:
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _TiledLoss.apply(
        hidden, weight, bias, labels, tile, transform, torch.is_grad_enabled(), travel, statistics, label_smoothing
    )


def _checked(hidden: Tensor, weight: Tensor, labels: Tensor, tile: int | None) -> tuple[int, torch.dtype | None]:
    """The tile of a head's call whose labels are checked, and autocast's dtype; None without autocast."""
    check_labels(labels, hidden, weight.shape[0])
    kind = labels.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return default_tile(weight.shape[0], 4, labels.device) if tile is None else check_tile(tile), dtype


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
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        for at, part, one in tiles_of_logits(hidden, weight, bias, labels, tile, transform, courier, False, found):
            logps.view(-1)[at] = one.logps()
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
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0; 1.0 leaves the logits as they are")
    transform, (tile, dtype) = (transform or LogitTransform()).at(temperature), _checked(hidden, weight, labels, tile)
    hidden = hidden if dtype is None else hidden.to(dtype)
    return _TiledLogps.apply(hidden, weight, bias, labels, tile, transform, dtype or weight.dtype, travel, statistics)


Look = Callable[[Tensor], Any]


class TiledHead(TiledModule):
    """Stands in for a language-model head: with labels it returns the summed loss, or each label's log-probability;
    without them the head's logits.

    Args:
        head: the model's own head, [B, S, E] -> [B, S, V]: a Linear, or any token-wise module (LoRA, say).
        tile: tokens in one tile; None chooses by `compute.default_tile`.
        transform: what the model does to the logits after its head.
    """

    def __init__(self, head: nn.Module, tile: int | None = None, transform: LogitTransform | None = None) -> None:
        super().__init__(head, tile)
        self.transform = transform or LogitTransform()
        self.unshrink = 1.0
        """Factor by which `apply` multiplies the loss after the model's own treatment of its logits."""

    @property
    def plain(self) -> bool:
        return type(self.inner) is nn.Linear

    @property
    def vocabulary(self) -> int:
        return max(p.shape[0] for p in self.inner.parameters() if p.ndim == 2)

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, temperature: float | None = None,
        statistics: Statistics | None = None, smoothing: float = 0.0, look: Look | None = None,
    ) -> Tensor:  # fmt: skip
        """The logits of hidden [B, S, E]; with labels [B, S] their loss, with a temperature too their log-probabilities
        [B, S]. In an evaluation, `look` gets the logits [B, t, V] tile by tile."""
        if labels is None:
            return self.inner(hidden)
        if look is not None:
            self._show(hidden, labels, look)
        if not self.plain:
            transform = self.transform.at(temperature or 1.0)
            logps = self._through_module(hidden, labels, transform, statistics, smoothing)
            return -logps.sum() if temperature is None else logps
        weight: Any = self.inner.weight
        given: Any = {
            "bias": self.inner.bias, "tile": self.tile, "transform": self.transform, "travel": self.travel(),
            "statistics": statistics,
        }  # fmt: skip
        if temperature is not None:
            return tiled_token_logps(hidden, weight, labels, temperature=temperature, **given)
        return tiled_logits_loss(hidden, weight, labels, label_smoothing=smoothing, **given)

    @torch.no_grad()
    def _show(self, hidden: Tensor, labels: Tensor, look: Look) -> None:
        rows, length = labels.shape
        for at in tiles_of(length, self.tile or default_tile(self.vocabulary * rows, 4, labels.device)):
            logits = self.inner(hidden[:, at].to(labels.device))
            look(self.transform(logits.to(torch.promote_types(logits.dtype, torch.float32))))

    def _through_module(
        self, hidden: Tensor, labels: Tensor, transform: LogitTransform, statistics: Statistics | None,
        smoothing: float,
    ) -> Tensor:  # fmt: skip
        """Any head: log-probabilities by tiles of its own forward, recomputed in backward."""
        tile, travel = self.tile or default_tile(self.vocabulary, 4, labels.device), self.travel()

        def token_logps(part: Tensor, target: Tensor) -> Tensor:
            logits = self.inner(part)
            logits = transform(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORE,
                label_smoothing=smoothing,
            )  # fmt: skip
            logps = -loss.view(target.shape)
            if statistics is None:
                return logps
            found = Statistics().of(logits, target)
            return torch.stack([logps, found.entropy, found.correct.to(logps.dtype), found.mean], -1)

        travel = None if travel is None else replace(travel, out=False)
        made = tiled_compute(
            token_logps, hidden, self.trainable, tile=tile, along=(labels,), module=self.inner, travel=travel
        )  # fmt: skip
        if statistics is None:
            return made
        statistics.entropy, correct, statistics.mean = made.detach()[..., 1:].unbind(-1)
        statistics.correct = correct.bool()
        return made[..., 0]
