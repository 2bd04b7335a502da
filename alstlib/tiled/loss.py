"""Tiled logits and loss: the cross-entropy of a language-model head without the logits (ALST, section 3.1).

Shape legend: B batch, S tokens of this rank, E model width, V vocabulary. Logits exist for one tile at a time.

The gradients of a sum of token losses are known as soon as its logits are: forward computes them tile by tile (one
matrix product less than recomputing the logits in backward), and backward scales them by the upstream gradient. They
are returned through autograd, once: scaling the loss by k scales every gradient by k, and a frozen head or body costs
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from alstlib.offload.courier import Travel
from alstlib.recompute import first_order
from alstlib.tiled.compute import TiledModule, check_tile, default_tile, tiled_compute, tiles_of
from alstlib.units import IGNORE


def readable(tensor: Tensor) -> bool:
    """Can its values be looked at for free? Not on a GPU, and not where there are none (a simulation)."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What some models do to the logits after the head: y = cap * tanh(scale * x / cap), or y = scale * x."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and self.softcap is None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def scale_grad(self, grad: Tensor, transformed: Tensor | None) -> Tensor:
        """In place: gradient of the transformed logits -> gradient of the head's own logits."""
        if self.softcap is not None and transformed is not None:
            grad.mul_(1 - (transformed / self.softcap).square_())
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tile: int,
        transform: LogitTransform, train: bool, travel: Travel | None,
    ) -> Tensor:  # fmt: skip
        # autograd says which inputs require a gradient, under no_grad too
        needs = need_hidden, need_weight, need_bias = [train and need for need in ctx.needs_input_grad[:3]]
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        courier = None if travel is None else travel.courier()
        total = torch.zeros((), dtype=wide, device=labels.device)
        grad_rows = None
        if need_hidden:
            grad_rows = torch.empty_like(rows) if courier is None else courier.empty(rows.shape, rows.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if need_bias and bias is not None else None
        tiles = tiles_of(rows.shape[0], tile)
        parts = (
            (rows[at] for at in tiles) if courier is None else (x for (x,) in courier.each([rows[at]] for at in tiles))
        )
        for at, part in zip(tiles, parts):
            target = targets[at]
            valid = target != IGNORE
            index = torch.where(valid, target, 0)[:, None]
            logits = transform(nn.functional.linear(part, weight, bias).to(wide))
            capped = logits.clone() if transform.softcap is not None and any(needs) else None
            picked = logits.gather(1, index)[:, 0]
            shift = logits.amax(1)
            sums = logits.sub_(shift[:, None]).exp_().sum(1)
            total += torch.where(valid, sums.log() + shift - picked, 0.0).sum()
            if not any(needs):
                del logits
                continue
            grad = logits.mul_((valid / sums)[:, None])  # softmax, zero for tokens without a label
            grad.scatter_add_(1, index, -valid.to(wide)[:, None])
            grad = transform.scale_grad(grad, capped)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(rows.dtype)
            if grad_rows is not None and courier is None:
                torch.mm(grad, weight, out=grad_rows[at])
            elif grad_rows is not None and courier is not None:
                courier.send(grad_rows[at], grad @ weight)
            if grad_weight is not None:
                if grad.dtype == wide:
                    grad_weight.addmm_(grad.T, part)
                else:
                    grad_weight += grad.T @ part
            del logits, capped, grad, part  # before the next tile's are made
        if courier is not None:
            courier.finish()
        ctx.grads = (grad_rows, grad_weight, grad_bias)
        ctx.like = (hidden.shape, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise RuntimeError("tiled_logits_loss: backward a second time; its gradients are gone after the first")
        (rows, weight, bias), (shape, weight_dtype, bias_dtype) = ctx.grads, ctx.like
        ctx.grads = None
        rows = None if rows is None else rows.mul_(upstream.to(rows.device)).view(shape)
        weight = None if weight is None else weight.mul_(upstream).to(weight_dtype)
        bias = None if bias is None else bias.mul_(upstream).to(bias_dtype)
        return rows, weight, bias, None, None, None, None, None


def tiled_logits_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tile: int | None = None,
    transform: LogitTransform | None = None, liger: bool = False, travel: Travel | None = None,
) -> Tensor:  # fmt: skip
    """Sum of the cross-entropy over the valid tokens, in tiles of `tile` tokens (ALST, section 3.1).

    Args:
        hidden: [..., E]. weight: [V, E] and bias: [V] of the head. labels: [...] int64, already shifted, -100 for none.
        tile: tokens in one tile; None chooses by `compute.default_tile`.
        transform: scale and soft cap of the logits.
        liger: use Liger's fused kernel (CUDA, with the package installed), which tiles by itself.
        travel: `hidden` and its gradient lie on the host, and tiles of them visit the device; None: they lie there.

    Returns:
        A scalar in fp32 (or wider). A sum: divide by the number of valid tokens of the whole batch.

    Raises:
        ValueError: labels whose shape is not hidden's without the width, or (on a CPU) a label outside the vocabulary.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {list(labels.shape)} must have hidden's shape {list(hidden.shape[:-1])}")
    if readable(labels):
        wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= weight.shape[0]))]
        if wrong.numel():
            raise ValueError(
                f"label {int(wrong[0])} is neither in the head's vocabulary of {weight.shape[0]} nor {IGNORE}, for none"
            )
    transform = transform or LogitTransform()
    if liger:
        return _liger_loss(hidden, weight, labels, bias, transform)
    device = labels.device
    tile = default_tile(weight.shape[0], 4, device) if tile is None else check_tile(tile)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _TiledLoss.apply(hidden, weight, bias, labels, tile, transform, torch.is_grad_enabled(), travel)


def _liger_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    if transform.scale != 1.0:
        hidden = hidden * transform.scale  # a scale of the logits is a scale of their input (Liger heads have no bias)
        if bias is not None:
            raise ValueError("Liger's fused loss cannot scale the logits of a head with a bias; use liger=False")
    fused = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE, reduction="sum", softcap=transform.softcap, accum_dtype=torch.float32
    )
    return fused(weight, hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), bias)


class TiledHead(TiledModule):
    """Stands in for a language-model head: with labels it returns the summed loss, without them the head's logits.

    Args:
        head: the model's own head, [B, S, E] -> [B, S, V]: a Linear, or any token-wise module (LoRA, say).
        tile: tokens in one tile; None chooses by `compute.default_tile`.
        transform: what the model does to the logits after its head.
        liger: use Liger's fused kernel on CUDA.
    """

    def __init__(
        self, head: nn.Module, tile: int | None = None, transform: LogitTransform | None = None, liger: bool = False
    ) -> None:
        super().__init__(head, tile)
        self.transform = transform or LogitTransform()
        self.liger = liger
        self.unshrink = 1.0
        """Factor that `apply` takes out of the loss again, after the model's own treatment of its logits."""

    @property
    def plain(self) -> bool:
        return type(self.inner) is nn.Linear

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return self.inner(hidden)
        if self.plain:
            return tiled_logits_loss(
                hidden,
                self.inner.weight,  # type: ignore[arg-type]
                labels,
                bias=self.inner.bias,  # type: ignore[arg-type]
                tile=self.tile,
                transform=self.transform,
                liger=self.liger and hidden.is_cuda,
                travel=self.travel(),
            )
        return self._through_module(hidden, labels)

    def _through_module(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Any head: token losses by tiles of its own forward, recomputed in backward."""
        vocabulary = max(p.shape[0] for p in self.inner.parameters() if p.ndim == 2)
        tile, travel = self.tile or default_tile(vocabulary, 4, labels.device), self.travel()

        def token_losses(part: Tensor, target: Tensor) -> Tensor:
            logits = self.inner(part)
            logits = self.transform(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORE
            )
            return loss.view(target.shape)

        travel = None if travel is None else replace(travel, out=False)
        return tiled_compute(
            token_losses, hidden, self.trainable, tile=tile, along=(labels,), module=self.inner, travel=travel
        ).sum()
