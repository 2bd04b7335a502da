"""What the mixins before those trainers of TRL share whose losses are made of log-probabilities: a reference model that
is attached too, metrics of replicas, the values of whole samples from the slices of all ranks, and steps on the tree of
a micro-batch's samples.

Shape legend: B samples of a micro-batch, L tokens of this rank's slice, S = sp * L tokens of a whole sample.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alstlib.base.mesh import SPContext
from alstlib.hf.attach import apply
from alstlib.hf.handle import Handle
from alstlib.hf.token_logps import OverRanks, TokenLogps
from alstlib.trainers.trainer import TrainerMixin, without_adapters
from alstlib.trainers.trainer_checks import check_trees
from alstlib.trees.tree_step import OfStatistics, tree_step


class LogpsMixin(TrainerMixin):
    """Base of the mixins before TRL's trainers that compute their losses from log-probabilities.

    Raises:
        ValueError: no such trainer, or one of an older TRL, is behind the mixin.
    """

    MIXIN: str
    """The public name of the mixin."""
    SEAM: str
    """The method of these trainers that computes log-probabilities, which the mixin replaces."""

    def __init__(self, *args: Any, trees: int | None = None, **kwargs: Any) -> None:
        self.trees = trees
        trl, (first, *more) = importlib.metadata.version("trl"), self.LOSS_OF[1:]
        if not hasattr(super(), self.SEAM) or tuple(map(int, trl.split(".")[:2])) < (1, 15):
            raise ValueError(
                f"{type(self).__name__} needs {' or '.join([first, *more])} of trl 1.15 or newer behind {self.MIXIN}: "
                f"write class Mine(alstlib.{self.MIXIN}, trl.{first}), and pip install 'trl>=1.15' ({trl} is installed)"
            )
        self.reference_handle: Handle | None = None
        super().__init__(*args, **kwargs)

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.trees is not None:
            check_trees(self)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.trees is None:
            return super().training_step(*args, **kwargs)
        with mock.patch.object(self.accelerator, "backward", return_value=None):  # it has run inside the loss
            return super().training_step(*args, **kwargs)

    def _tree_loss(
        self, model: nn.Module, known: Mapping[str, Tensor], loss_of: Callable[[TokenLogps], Tensor],
        temperature: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """The loss that `loss_of` makes of the `TokenLogps` [B, S-1] of whole samples, detached: in training, backward
        has already run."""
        divided = self.loss_is_scaled_for_ga or not torch.is_grad_enabled()
        steps = 1 if divided else self.current_gradient_accumulation_steps
        losses: list[Tensor] = []

        def objective(found: list[TokenLogps]) -> Tensor:
            loss = loss_of(TokenLogps(*(as_rows(values, known["attention_mask"]) for values in zip(*found))))
            losses.append(loss.detach())
            return loss / steps

        asked: Any = OfStatistics(objective)
        assert self.trees is not None
        tree_step(model, trajectories_of(known), self.trees, objective=asked, temperature=temperature)
        return losses[0]

    def _tree_logps(self, model: nn.Module, known: Mapping[str, Tensor], temperature: float = 1.0) -> Tensor:
        """The log-probabilities [B, S-1] of whole samples, without gradients."""
        assert self.trees is not None
        with torch.no_grad():
            found = tree_step(model, trajectories_of(known), self.trees, temperature=temperature)
        return as_rows(found.logps, known["attention_mask"])

    @property
    def ref_model(self) -> Any:
        """The reference, which is attached when TRL's trainer sets it, before an engine wraps it; or None."""
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        self._ref_model = model
        if model is not None and self.reference_handle is None:
            self.reference_handle = apply(without_adapters(model), self.ctx, self.alst)

    def detach(self) -> nn.Module:
        """The model as it was before: without anything attached, in no engine; the reference model too."""
        if self.reference_handle is not None:
            self.reference_handle.detach()
        return super().detach()

    def _replicas_once(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what the Trainer gathers for its metrics comes from each replica once, and not from each rank."""
        repeated = functools.partial(self._gather_replicas, repeated=True)
        return mock.patch.multiple(self.accelerator, gather=repeated, gather_for_metrics=self._gather_replicas)


def whole_samples(own: Tensor, ctx: SPContext) -> Tensor:
    """Values [..., B, S] of whole samples, of those [..., B, L] of the slices of all ranks of an SP group, which
    compute the same loss from them."""
    before = ctx.sp_rank * own.shape[-1]
    return OverRanks.apply(F.pad(own, (before, (ctx.sp - 1) * own.shape[-1] - before)), ctx)


def trajectories_of(known: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Samples with their labels (both [B, S]), without the padding of either side, as `tree_step` takes them."""
    rows = zip(known["input_ids"], known["labels"], known["attention_mask"].bool())
    return [{"input_ids": ids[real], "labels": labels[real]} for ids, labels, real in rows]


def as_rows(values: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Values of the trajectories, which lie at the token before theirs, as those [B, S-1] of samples with a mask
    [B, S]; 0 in padding."""
    flat = torch.cat([*values])
    return flat.new_zeros(mask.shape).masked_scatter(mask.bool().to(flat.device), flat)[:, :-1]
