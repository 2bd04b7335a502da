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
from collections.abc import Iterable, Mapping, Sequence
from itertools import tee
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.units import IGNORE
from alstlib.hf.token_logps import TokenLogps, token_logps
from alstlib.trainers.logps_trainer import LogpsMixin, whole_samples
from alstlib.trainers.trainer_checks import check_preferences, check_trees
from alstlib.trees.tree_step import OfStatistics, tree_step

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

    def __init__(self, *args: Any, trees: int | None = None, **kwargs: Any) -> None:
        self.trees = trees
        super().__init__(*args, **kwargs)

    def _validate_args(self) -> None:
        super()._validate_args()
        check_preferences(self)
        if self.trees is not None:
            check_trees(self)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.trees is None:
            return super().training_step(model, inputs, *args, **kwargs)
        model.train()
        with self.compute_loss_context_manager():  # backward runs inside
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss / self.current_gradient_accumulation_steps

    # ----- batches

    def _items(self, inputs: Mapping[str, Any]) -> None:
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

    def _pairs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: value.to(self.args.device) for name, value in inputs[PAIRS].items()}

    def _scorer(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Called as DPOTrainer calls its model, with TRL's fused head."""
        return functools.partial(_score, model, inputs, self)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
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
                    loss = self._tree_loss(model, inputs[PAIRS], pairs)
        finally:
            self.precompute_ref_logps = known
        return (loss, {"loss": loss}) if return_outputs else loss

    def _tree_loss(self, model: nn.Module, whole: Mapping[str, Tensor], pairs: Mapping[str, Tensor]) -> Tensor:
        """The loss of the samples as a tree, detached: in training, backward has already run."""
        assert self.trees is not None
        me: Any = self
        losses: list[Tensor] = []

        def objective(found: list[TokenLogps]) -> Tensor:
            names = ("log_probs", "entropy", "is_top1", "mean_logits")
            out = SimpleNamespace(**{n: as_rows(list(t), whole) for n, t in zip(names, zip(*found))})
            loss = me._compute_loss(lambda **_: out, pairs, False)
            losses.append(loss.detach())
            return loss / self.current_gradient_accumulation_steps if torch.is_grad_enabled() else loss

        tree_step(model, trajectories_of(whole), self.trees, objective=OfStatistics(objective))
        return losses[0]

    # ----- evaluation

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
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


def _score(model: nn.Module, inputs: Mapping[str, Any], trainer: DPOTrainerMixin, **_: Any) -> Any:
    """What TRL's fused head returns of whole samples, each fp64 [2P, S-1], from the slices of all ranks."""
    if trainer.trees is not None:  # the reference's, without gradients
        whole = inputs[PAIRS]
        return SimpleNamespace(log_probs=as_rows(tree_step(model, trajectories_of(whole), trainer.trees).logps, whole))
    ctx, length = trainer.ctx, inputs[PAIRS]["input_ids"].shape[1]
    found = token_logps(model, {n: t for n, t in inputs.items() if n != PAIRS}, statistics=True)
    part = torch.stack([t.double() for t in found])  # sums over many tokens lose their last digits in fp32
    logps, entropy, correct, mean_logits = whole_samples(part, ctx)[..., : length - 1]
    return SimpleNamespace(log_probs=logps, entropy=entropy, is_top1=correct.bool(), mean_logits=mean_logits)


def trajectories_of(whole: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows of a batch of pairs without their padding, as `tree_step` takes them."""
    labels = whole["input_ids"].masked_fill(whole["completion_mask"] == 0, IGNORE)
    rows = zip(whole["input_ids"], labels, whole["attention_mask"].bool())
    return [{"input_ids": ids[real], "labels": row[real]} for ids, row, real in rows]


def as_rows(values: Sequence[Tensor], whole: Mapping[str, Tensor]) -> Tensor:
    """Values of the trajectories as those of whole samples [2P, S-1], 0 in padding; numbers are fp64."""
    real = whole["attention_mask"].bool().to(values[0].device)
    flat = torch.cat([*values])
    rows = torch.zeros(real.shape, dtype=torch.bool if flat.dtype == torch.bool else torch.float64, device=flat.device)
    return rows.masked_scatter(real, flat.to(rows.dtype))[:, :-1]
