"""Direct preference optimization with samples divided among ranks, as a mixin that is written before TRL's DPOTrainer.

    class SPDPO(alstlib.DPOTrainerMixin, DPOTrainer): ...
    trainer = SPDPO(model=model, ref_model=reference, args=args, train_dataset=data, processing_class=tok, sp=8)

Each rank computes the log-probabilities of its slice of the chosen and the rejected samples. Every rank of an SP group
then gets those of all slices, 8 bytes for each token. From them DPOTrainer computes its loss and its metrics with its
own formulas, so that every type of loss is TRL's.

Shape legend: P pairs of a micro-batch, whose 2P samples are the chosen samples and then the rejected ones, S tokens of
a row, L tokens of this rank's slice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import tee
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.options import Record
from alstlib.base.units import IGNORE
from alstlib.data.shard import Batch
from alstlib.hf.token_logps import token_logps
from alstlib.trainers.logps_trainer import LogpsMixin, whole_samples
from alstlib.trainers.trainer_checks import check_preferences

PAIRS = "pairs"
"""Key of a micro-batch under which DPOTrainer finds the whole batch that its collator made."""


class DPOTrainerMixin(LogpsMixin):
    """Gives TRL's DPOTrainer sequence parallelism: `class SPDPO(alstlib.DPOTrainerMixin, DPOTrainer)`.

    As in DPOTrainer, the loss is the mean over the pairs of a micro-batch; log-probabilities are summed in fp64. The
    reference is the one that DPOTrainer uses: a model (which is attached too), the model without its adapter, or
    log-probabilities that were computed before training. TRL computes all types of loss, their weights, `ld_alpha` and
    the metrics.

    Args:
        sp, alst: as `TrainerMixin` takes them. All other arguments go to DPOTrainer.
        trees: the number of a rank's tokens in one block: samples that begin alike, as the two of a pair do, are then
            trained as a tree (`tree_step`), with their prompt computed once. None: each sample by itself.

    Raises:
        ValueError: before training, where the arguments cannot be run exactly; the message says what to write instead.
    """

    MIXIN, SEAM, LOSS_OF = "DPOTrainerMixin", "compute_ref_log_probs", ("Trainer", "DPOTrainer")
    precompute_ref_logps: bool

    def _validate_args(self) -> None:
        super()._validate_args()
        check_preferences(self)

    # ----- batches

    def _items(self, inputs: Record) -> None:
        """The loss is a mean over pairs, and nothing is counted."""

    def _share(self, batches: Iterable[Any]) -> list[Any]:
        """The slices of an optimizer step, each with the whole batch that it is of."""
        batches, wholes = tee(batches)
        return [{**part, PAIRS: whole} for part, whole in zip(super()._share(batches), wholes)]

    def _known(self, batch: Any) -> dict[str, Tensor]:
        """The rows of a batch of pairs; labels are the tokens of completions."""
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORE)
        return {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": batch["attention_mask"]}

    # ----- the reference

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._attach()
        base: Any = super()
        with self._replicas_once():
            return base._precompute_ref_logps(*args, **kwargs)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Sums [P] of the log-probabilities of the chosen and of the rejected samples under the reference."""
        if PAIRS not in inputs:
            (inputs,) = self._share([inputs])
            inputs = self._prepare_inputs(inputs)
        base: Any = super()
        return base.compute_ref_log_probs(self._scorer(model, inputs), self._pairs(inputs))

    # ----- the loss

    def _pairs(self, inputs: Record) -> dict[str, Tensor]:
        return {name: value.to(self.args.device) for name, value in inputs[PAIRS].items()}

    def _scorer(self, model: nn.Module, inputs: Record) -> Any:
        """Called as DPOTrainer calls its model, with TRL's fused head."""
        return functools.partial(_score, model, inputs, self)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:  # fmt: skip
        me: Any = self
        pairs, known = self._pairs(inputs), self.precompute_ref_logps
        if not known:  # first, because engines expect one forward with gradients right before backward
            reference = me.model if self.ref_model is None else self.ref_model
            found = self.compute_ref_log_probs(reference, inputs)
            pairs.update(zip(("ref_chosen_logps", "ref_rejected_logps"), found))
        self.precompute_ref_logps = True
        try:
            with self._replicas_once():
                if self.trees is None:
                    loss = me._compute_loss(self._scorer(model, inputs), pairs, False)
                else:
                    loss = self._tree_loss(
                        model, self._known(inputs[PAIRS]),
                        lambda found: me._compute_loss(lambda **_: _fused(found), pairs, False),
                    )  # fmt: skip
        finally:
            self.precompute_ref_logps = known
        return (loss, {"loss": loss}) if return_outputs else loss

    # ----- evaluation

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss of a replica's pairs."""
        if not prediction_loss_only:
            raise ValueError(
                "DPOTrainerMixin returns no logits: call evaluate(), which logs the rewards, or predict() of a "
                "TrainerMixin before transformers' Trainer"
            )
        (batch,) = self._share([inputs])
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(batch)), None, None


def _score(model: nn.Module, inputs: Record, trainer: DPOTrainerMixin, **_: Any) -> Any:
    """What TRL's fused head returns of whole samples, each fp64 [2P, S-1], from the slices of all ranks."""
    if trainer.trees is not None:  # the reference's, without gradients
        return SimpleNamespace(log_probs=trainer._tree_logps(model, trainer._known(inputs[PAIRS])).double())
    ctx, length = trainer.ctx, inputs[PAIRS]["input_ids"].shape[1]
    found = token_logps(model, {n: t for n, t in inputs.items() if n != PAIRS}, statistics=True)
    part = torch.stack([t.double() for t in found])
    return _fused(whole_samples(part, ctx)[..., : length - 1])


def _fused(found: Iterable[Tensor]) -> Any:
    """The values of `TokenLogps`, each [2P, S-1], as TRL's fused head names them."""
    logps, entropy, correct, mean_logits = (t.double() for t in found)  # fp32 loses the last digits of long sums
    return SimpleNamespace(log_probs=logps, entropy=entropy, is_top1=correct.bool(), mean_logits=mean_logits)
