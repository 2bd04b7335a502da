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
import torch.nn.functional as F
from torch import Tensor, nn

from alstlib.base.recompute import first_order, sum_dtype
from alstlib.base.sizing import default_tile, tiles_of
from alstlib.base.units import IGNORE
from alstlib.offload.courier import Travel
from alstlib.tiled.compute import TiledModule, check_tile, tiled_compute
from alstlib.tiled.last_product import untouched
from alstlib.tiled.logits import HeadCall, HeadPass, LogitTransform, Statistics, check_labels


class _LossOrLogps(torch.autograd.Function):
    """The summed loss, whose gradients are made in forward; or `by_token` the labels' log-probabilities, whose
    gradients are made in backward."""

    @staticmethod
    def forward(
        ctx: Any, call: HeadCall, by_token: bool, train: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:  # fmt: skip
        # autograd says which inputs require a gradient, under no_grad too
        needs = [train and not by_token and need for need in ctx.needs_input_grad[3:]]
        found = HeadPass(call, hidden, weight, bias, needs)
        made = torch.zeros(call.labels.shape if by_token else (), dtype=found.wide, device=call.labels.device)
        for at, one in found.tiles(hidden, weight, bias):
            if by_token:
                made.view(-1)[at] = one.logps()
            else:
                made -= one.logps().sum()
            del one
        ctx.by_token = by_token
        if by_token:
            ctx.call = replace(call, statistics=None)
            ctx.save_for_backward(hidden, weight, bias)
        else:
            ctx.found = found
        return made

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if ctx.by_token:
            hidden, weight, bias = ctx.saved_tensors  # each read unpacks them anew, where hooks pack them
            found = HeadPass(ctx.call, hidden, weight, bias, ctx.needs_input_grad[3:])
            for _, one in found.tiles(hidden, weight, bias, upstream.reshape(-1)):
                del one
            return None, None, None, *found.grads()
        if ctx.found is None:
            raise RuntimeError(
                "tiled_logits_loss: backward ran a second time, but its gradients are freed after the first; run "
                "forward again"
            )
        found, ctx.found = ctx.found, None
        return None, None, None, *found.grads(upstream)


def tiled_logits_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tile: int | None = None,
    transform: LogitTransform | None = None, travel: Travel | None = None,
    statistics: Statistics | None = None, label_smoothing: float = 0.0, temperature: float | None = None,
) -> Tensor:  # fmt: skip
    """The sum of the cross-entropy over the valid tokens, computed tile by tile: the logits of the whole sequence never
    exist (ALST, section 3.1). With a temperature, the log-probability of each label, for losses that give each token a
    weight (DPO, GRPO).

    Then each token may have an upstream gradient of its own, so backward makes the logits of each tile again: one
    matrix product more. With 32,768 tokens at the head of Llama-3.1-8B in bf16 (E 4,096, V 128,256) and tiles of 1,024
    tokens, forward takes 0.7 GiB and backward 3.9 GiB, of which 2.2 GiB are the gradients; log_softmax over whole
    logits takes 47 GiB (the ledger's peaks over fake tensors).

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
        temperature: the number by which the logits are divided, after the transform.

    Returns:
        A scalar in fp32 (or wider), in nats. It is a sum: divide it by the number of valid tokens of the whole batch.
        With a temperature, a tensor of labels' shape, 0 where the label is -100.

    Raises:
        ValueError: the shape of labels is not that of hidden without its width, or a label is outside the vocabulary
            (checked on a CPU); the temperature is not above 0.
    """
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0; 1.0 leaves the logits as they are")
    check_labels(labels, hidden, weight.shape[0])
    kind, dtype = labels.device.type, weight.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden = hidden.to(dtype)
    if statistics is not None:
        statistics.begin(labels, sum_dtype(hidden))
    tile = default_tile(weight.shape[0], 4, labels.device) if tile is None else check_tile(tile)
    transform = (transform or LogitTransform()).at(temperature or 1.0)
    call = HeadCall(labels, tile, dtype, transform, travel, statistics, label_smoothing)
    return _LossOrLogps.apply(call, temperature is not None, torch.is_grad_enabled(), hidden, weight, bias)


def loss_of_logits(logits: Tensor, labels: Tensor, smoothing: float, by_token: bool) -> Tensor:
    """Of logits [B, S, V] that exist anyway: what `tiled_logits_loss` computes, the loss or log-probabilities."""
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none" if by_token else "sum", ignore_index=IGNORE,
        label_smoothing=smoothing,
    )  # fmt: skip
    return -loss.view(labels.shape) if by_token else loss


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
        head: Any = self.inner
        if type(head) is not nn.Linear or not untouched(head):
            transform = self.transform.at(temperature or 1.0)
            logps = self._through_module(hidden, labels, transform, statistics, smoothing)
            return -logps.sum() if temperature is None else logps
        return tiled_logits_loss(
            hidden, head.weight, labels, bias=head.bias, tile=self.tile, transform=self.transform, travel=self.travel(),
            statistics=statistics, label_smoothing=smoothing, temperature=temperature,
        )  # fmt: skip

    @torch.no_grad()
    def _show(self, hidden: Tensor, labels: Tensor, look: Look) -> None:
        batch, length = labels.shape
        tile = self.tile or default_tile(self.vocabulary, 4, labels.device)
        for at in tiles_of(length, tile, batch):
            logits = self.inner(hidden[:, at].to(labels.device))
            look(self.transform(logits.to(sum_dtype(logits))))

    def _through_module(
        self, hidden: Tensor, labels: Tensor, transform: LogitTransform, statistics: Statistics | None,
        smoothing: float,
    ) -> Tensor:  # fmt: skip
        """Any head: log-probabilities by tiles of its own forward, recomputed in backward."""
        tile, travel = self.tile or default_tile(self.vocabulary, 4, labels.device), self.travel()

        def token_logps(part: Tensor, target: Tensor) -> Any:
            logits = self.inner(part)
            logits = transform(logits.to(sum_dtype(logits)))
            logps = loss_of_logits(logits, target, smoothing, by_token=True)
            if statistics is None:
                return logps
            found = Statistics().of(logits, target)
            return logps, found.entropy, found.correct, found.mean

        travel = None if travel is None else replace(travel, out=False)
        made = tiled_compute(token_logps, hidden, tile=tile, along=(labels,), module=self.inner, travel=travel)
        if statistics is None:
            return made
        logps, *found = made
        statistics.entropy, statistics.correct, statistics.mean = (t.detach() for t in found)
        return logps
