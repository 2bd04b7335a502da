"""The load-balancing loss of mixture-of-experts models, exact on a sharded sequence and under recomputes.

Shape legend: T tokens of this rank, N tokens of all ranks of an SP group times layers, E experts.

The loss (Switch Transformer, arXiv 2101.03961, equations 4 to 6, as transformers computes it) multiplies two means over
all tokens and layers: the share of assignments f and the mean probability P of each expert, E * sum(f * P). f has no
gradient, so once it is known for all tokens, a token's gradient is its own matter: E * f / N for each of its
probabilities. The first pass adds up f and P, one small reduction makes them whole, and wherever a router runs with a
graph (forward or recompute, whole or in chunks) that gradient is put in, scaled as backward scales the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.base.recompute import first_order


class RouterLoss:
    """The loss of one call of the model.

    Args:
        experts, top_k: E, and the experts of a token.
        weight: factor of this loss when it is added to the mean over tokens.
        group: process group of the ranks that share the sequence; None for one rank.
    """

    def __init__(self, experts: int, top_k: int, weight: float, group: Any) -> None:
        self.experts, self.top_k, self.weight, self.group = experts, top_k, weight, group
        self.sums: Tensor | None = None
        """[2 E + 1] sums over this rank's tokens: assignments, probabilities, tokens."""
        self.slope: Tensor | None = None
        """[E] the gradient of the whole loss for each probability of a token; known after the first pass."""
        self.scale: Tensor | None = None
        """What backward multiplies the loss by."""
        self.value: Tensor | None = None
        """The loss of the whole sequence, unweighted."""

    def see(self, logits: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
        """A router's output for some tokens: add it up, or put the gradient into its scores' graph.

        Args:
            real: [B, s] which of them are not padding; None: all.
        """
        if real is not None:
            real = real.reshape(logits.shape[0])
        if self.slope is None:
            self._add(logits.detach(), real)
        if torch.is_grad_enabled() and logits.requires_grad:
            return _Balance.apply(scores, logits, self, real)
        return scores

    def _add(self, logits: Tensor, real: Tensor | None) -> None:
        p = logits.softmax(-1)
        chosen = torch.zeros_like(p, dtype=torch.float32).scatter_(-1, p.topk(self.top_k, -1).indices, 1.0)
        p = p.float()
        if real is not None:
            p, chosen = p * real[:, None], chosen * real[:, None]
        tokens = p.new_tensor([p.shape[0]]) if real is None else real.sum()[None].float()
        sums = torch.cat([chosen.sum(0), p.sum(0), tokens])
        self.sums = sums if self.sums is None else self.sums + sums

    def add_to(self, total: Tensor, tokens: Tensor) -> Tensor:
        """After the first pass: this rank's `total` (a sum over its tokens) with this rank's share of the loss, times
        the `tokens` of all ranks. With the valid ones, the sum over ranks divided by them is mean + weight * loss.

        In a recompute the loss is known: its gradient alone is joined to `total`."""
        if self.slope is not None:
            return self._noting_scale(total)
        assert self.sums is not None
        e = self.experts
        own = self.sums[e : 2 * e]
        whole = torch.cat([self.sums, tokens[None].to(self.sums)])
        if self.group is not None:
            dist.all_reduce(whole, group=self.group)
        shares, layer_tokens, tokens = whole[:e] / whole[2 * e], whole[2 * e], whole[-1]
        self.value = e * (shares * whole[e : 2 * e]).sum() / layer_tokens
        self.slope = shares * (e * self.weight / layer_tokens) * tokens
        return self._noting_scale(total + (self.slope * own).sum().to(total.dtype))

    def _noting_scale(self, total: Tensor) -> Tensor:
        """A view of the total whose backward, which comes before any layer's, notes what it is multiplied by."""

        def note(grad: Tensor) -> None:
            self.scale = grad.detach()

        total = total.view_as(total)
        if total.requires_grad:
            total.register_hook(note)
        return total


class _Balance(torch.autograd.Function):
    """The identity on a router's scores; in backward, the loss's gradient for its logits joins in."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, logits: Tensor, loss: RouterLoss, real: Tensor | None) -> Tensor:
        ctx.loss, ctx.real = loss, real
        ctx.save_for_backward(logits)
        return scores.view_as(scores)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        loss: RouterLoss = ctx.loss
        (logits,) = ctx.saved_tensors
        if loss.slope is None or loss.scale is None:  # the model's output went into backward by another way
            return grad, None, None, None
        p = logits.float().softmax(-1)
        slope = loss.slope * loss.scale.to(loss.slope)
        d = p * (slope - (p * slope).sum(-1, keepdim=True))
        if ctx.real is not None:
            d = d * ctx.real[:, None]
        return grad, d.to(logits.dtype), None, None
