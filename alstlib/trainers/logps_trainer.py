"""What the mixins before those trainers of TRL share whose losses are made of log-probabilities: a reference model that
is attached too, metrics of replicas, and the values of whole samples from the slices of all ranks.

Shape legend: B samples of a micro-batch, L tokens of this rank's slice, S = sp * L tokens of a whole sample.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from alstlib.base.mesh import SPContext
from alstlib.hf.attach import apply
from alstlib.hf.handle import Handle
from alstlib.hf.token_logps import OverRanks
from alstlib.trainers.trainer import TrainerMixin, without_adapters


class LogpsMixin(TrainerMixin):
    """Base of the mixins before TRL's trainers that compute their losses from log-probabilities.

    Raises:
        ValueError: no such trainer, or one of an older TRL, is behind the mixin.
    """

    MIXIN: str
    """The public name of the mixin."""
    SEAM: str
    """The method of these trainers that computes log-probabilities, which the mixin replaces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trl, (first, *more) = importlib.metadata.version("trl"), self.LOSS_OF[1:]
        if not hasattr(super(), self.SEAM) or tuple(map(int, trl.split(".")[:2])) < (1, 15):
            raise ValueError(
                f"{type(self).__name__} needs {' or '.join([first, *more])} of trl 1.15 or newer behind {self.MIXIN}: "
                f"write class Mine(alstlib.{self.MIXIN}, trl.{first}), and pip install 'trl>=1.15' ({trl} is installed)"
            )
        self.reference_handle: Handle | None = None
        super().__init__(*args, **kwargs)

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

    @contextlib.contextmanager
    def _replicas_once(self) -> Iterator[None]:
        """Inside, what the Trainer gathers for its metrics comes from each replica once, and not from each rank."""
        accelerator: Any = self.accelerator
        accelerator.gather = functools.partial(self._gather_replicas, repeated=True)
        accelerator.gather_for_metrics = self._gather_replicas
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics


def whole_samples(own: Tensor, ctx: SPContext) -> Tensor:
    """Values [..., B, S] of whole samples, of those [..., B, L] of the slices of all ranks of an SP group, which
    compute the same loss from them."""
    before = ctx.sp_rank * own.shape[-1]
    return OverRanks.apply(F.pad(own, (before, (ctx.sp - 1) * own.shape[-1] - before)), ctx)
