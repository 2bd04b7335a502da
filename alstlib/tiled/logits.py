"""The logits of one tile: what a model does to them, their softmax, and the gradients that the head gets from them.

Shape legend: N tokens, t tokens of a tile, E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from alstlib.base.recompute import sum_dtype
from alstlib.base.sizing import default_tile, tiles_of
from alstlib.base.units import IGNORE
from alstlib.offload.courier import Travel, parts_of, room_like


def readable(tensor: Tensor) -> bool:
    """Whether a tensor's values can be looked at for free: not on a GPU, and not in a simulation, which has none."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What some models do to the logits after the head: y = cap * tanh(scale * x / cap), or y = scale * x."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self == LogitTransform()

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def at(self, temperature: float) -> LogitTransform:
        """The transform whose logits are these divided by a temperature."""
        return LogitTransform(
            scale=self.scale / temperature, softcap=None if self.softcap is None else self.softcap / temperature
        )

    def scale_grad(self, grad: Tensor, transformed: Tensor | None) -> Tensor:
        """In place: gradient of the transformed logits -> gradient of the head's own logits."""
        if self.softcap is not None and transformed is not None:
            grad.mul_(1 - (transformed / self.softcap).square_())
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


class Softmax:
    """The softmax of a tile's logits [t, V] (fp32 or wider), in their memory, and what follows from it for each token.

    Args:
        transform: it has been applied; with it, `grad` can be asked for.
        statistics: the largest logit of each token is found too, and the mean of its logits.
        smoothing: share of a label's weight that all tokens of the vocabulary get in equal parts.
    """

    def __init__(
        self, logits: Tensor, target: Tensor, transform: LogitTransform | None = None, statistics: bool = False,
        smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        self.valid, self.transform, self.smoothing = target != IGNORE, transform, smoothing
        self.index = torch.where(self.valid, target, 0)[:, None]
        self.capped = logits.clone() if transform is not None and transform.softcap is not None else None
        self.picked = logits.gather(1, self.index)[:, 0]
        if smoothing:
            self.picked = torch.lerp(self.picked, logits.mean(1), smoothing)
        if statistics:
            self.shift, best = logits.max(1)
            self.correct = (best == self.index[:, 0]) & self.valid
            self.mean = torch.where(self.valid, logits.mean(1), 0.0)
        else:
            self.shift = logits.amax(1)
        self.exp = logits.sub_(self.shift[:, None]).exp_()
        self.sums = self.exp.sum(1)

    def logps(self) -> Tensor:
        """[t] log-probabilities of the labels, 0 without one."""
        return torch.where(self.valid, self.picked - self.shift - self.sums.log(), 0.0)

    def entropy(self) -> Tensor:
        """[t] in nats, 0 without a label; in an eighth of the memory of the logits."""
        parts = self.exp.split(max(1, self.exp.shape[0] // 8))
        sums = torch.cat([torch.special.entr(part).sum(1) for part in parts])
        return torch.where(self.valid, self.sums.log() + sums / self.sums, 0.0)

    def grad(self, upstream: Tensor) -> Tensor:
        """Gradient of the sum of upstream [t] * logps for the head's own logits [t, V], in the softmax's memory."""
        assert self.transform is not None
        upstream = torch.where(self.valid, upstream, 0.0)
        grad = self.exp.mul_((-upstream / self.sums)[:, None])
        if self.smoothing:
            grad += (upstream * (self.smoothing / grad.shape[1]))[:, None]
            upstream = upstream * (1 - self.smoothing)
        grad.scatter_add_(1, self.index, upstream[:, None])
        del upstream
        return self.transform.scale_grad(grad, self.capped)


class Statistics:
    """What a tiled loss finds of each token when it is given one of these: of the shape of the labels, detached.

    It is no dataclass and no container: wrappers of a model copy those, and what is found would be lost.
    """

    entropy: Tensor
    """Entropy of each token's softmax, in nats; 0 without a label."""
    correct: Tensor
    """Whether each token's label has the largest logit: bool, False without a label."""
    mean: Tensor
    """Mean of each token's logits over the vocabulary; 0 without a label."""

    def begin(self, labels: Tensor, wide: torch.dtype) -> None:
        self.entropy = torch.zeros(labels.shape, dtype=wide, device=labels.device)
        self.correct = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
        self.mean = torch.zeros_like(self.entropy)

    def note(self, at: slice, tile: Softmax) -> None:
        self.entropy.view(-1)[at] = tile.entropy()
        self.correct.view(-1)[at] = tile.correct
        self.mean.view(-1)[at] = tile.mean

    def of(self, logits: Tensor, labels: Tensor) -> Statistics:
        """Find the statistics of logits [..., V] that exist anyway, tile by tile."""
        flat, targets = logits.detach().flatten(0, -2), labels.flatten()
        wide = sum_dtype(flat)
        self.begin(labels, wide)
        for at in tiles_of(flat.shape[0], default_tile(flat.shape[1], 4, flat.device)):
            self.note(at, Softmax(flat[at].to(wide, copy=True), targets[at], statistics=True))
        return self

    def sums(self) -> Tensor:
        """fp64 [2]: of the entropy, and of what is correct."""
        return torch.stack([self.entropy.sum(dtype=torch.float64), self.correct.sum().double()])


@dataclass(frozen=True)
class HeadCall:
    """The labels of one call of a head, and how its tiles are computed."""

    labels: Tensor
    tile: int
    dtype: torch.dtype
    """Precision of the products."""
    transform: LogitTransform
    travel: Travel | None = None
    statistics: Statistics | None = None
    smoothing: float = 0.0


class HeadPass:
    """One pass over the tiles of a head's call; gradients of its weight and bias add up in fp32 or wider.

    Args:
        needs: whether gradients of hidden, weight and bias are wanted.
    """

    def __init__(
        self, call: HeadCall, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
    ) -> None:
        self.call, self.needs, self.shape = call, any(needs), hidden.shape
        self.wide = sum_dtype(hidden)
        self.courier = None if call.travel is None else call.travel.courier()
        self.dtypes = weight.dtype, None if bias is None else bias.dtype
        self.hidden = room_like(self.courier, hidden.reshape(-1, hidden.shape[-1])) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=self.wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=self.wide) if needs[2] and bias is not None else None

    def tiles(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor | None = None
    ) -> Iterator[tuple[slice, Softmax]]:
        """Each tile's place and softmax, one after the other; the caller lets go of a softmax before it takes the next.
        The gradients are those of the sum of upstream [N] (None: -1) * log-probabilities."""
        call, targets, tokens = self.call, self.call.labels.reshape(-1), hidden.reshape(1, -1, hidden.shape[-1])
        weight, bias = weight.to(call.dtype), None if bias is None else bias.to(call.dtype)
        tiles = tiles_of(targets.shape[0], call.tile)
        for at, (part,) in zip(tiles, parts_of(self.courier, tiles, tokens)):
            part = part[0]
            logits = call.transform(F.linear(part, weight, bias).to(self.wide))
            transform = call.transform if self.needs else None
            one = Softmax(logits, targets[at], transform, call.statistics is not None, call.smoothing)
            del logits
            if call.statistics is not None:
                call.statistics.note(at, one)
            yield at, one
            if self.needs:
                # unnamed: it goes as soon as it has been read
                grad = one.grad(one.sums.new_full((), -1.0) if upstream is None else upstream[at])
                self._add(at, part, grad, weight)
                del grad
            del part, one
        if self.courier is not None:
            self.courier.finish()

    def _add(self, at: slice, part: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the gradients of the tile `part` [t, E], whose logits have this gradient [t, V]."""
        if self.bias is not None:
            self.bias += grad.sum(0)
        grad = grad.to(part.dtype)
        if self.hidden is not None and self.courier is None:
            torch.mm(grad, weight, out=self.hidden[at])
        elif self.hidden is not None and self.courier is not None:
            self.courier.send(self.hidden[at], grad @ weight)
        if self.weight is not None:
            if grad.dtype == self.weight.dtype:
                self.weight.addmm_(grad.T, part)
            else:
                self.weight += grad.T @ part

    def grads(self, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Those of hidden, weight and bias, times a number."""
        made = [self.hidden, self.weight, self.bias]
        if scale is not None:
            made = [g if g is None else g.mul_(scale.to(g.device)) for g in made]
        grad, *others = made
        kept = (g if g is None else g.to(dtype) for g, dtype in zip(others, self.dtypes))
        return (None if grad is None else grad.view(self.shape), *kept)


def check_labels(labels: Tensor, hidden: Tensor, vocabulary: int) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {list(labels.shape)} must have hidden's shape {list(hidden.shape[:-1])}")
    if readable(labels):
        wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= vocabulary))]
        if wrong.numel():
            raise ValueError(
                f"label {int(wrong[0])} is neither in the head's vocabulary of {vocabulary} nor {IGNORE}, for none"
            )
