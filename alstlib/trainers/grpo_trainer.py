"""Group relative policy optimization with samples divided among ranks, as a mixin that is written before TRL's
GRPOTrainer or RLOOTrainer.

    class SPGRPO(alstlib.GRPOTrainerMixin, GRPOTrainer): ...
    trainer = SPGRPO(model=model, reward_funcs=rewards, args=args, train_dataset=data, processing_class=tok, sp=8)

- *Completions.* The completions of a replica are dealt to the ranks of its SP group. Each rank generates and rewards
  its own as a process of the plain trainer does, on whole prompts. Then every rank of the group gets all of them.
- *Log-probabilities.* Where TRL's trainer asks for those of whole samples, each rank computes those of its slice. Every
  rank then gets all of them, and computes TRL's loss and metrics with TRL's own formulas.

Shape legend: B samples of a micro-batch, S tokens of a sample (P of the prompt, padded on the left, and C of the
completion, padded on the right), N samples of a batch that is generated at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alstlib.base.mesh import from_all
from alstlib.base.recompute import own_random
from alstlib.base.units import IGNORE
from alstlib.data.shard import Batch
from alstlib.hf.token_logps import TokenLogps, token_logps
from alstlib.trainers.logps_trainer import LogpsMixin, whole_samples
from alstlib.trainers.trainer import TrainerMixin
from alstlib.trainers.trainer_checks import check_rollouts

Scores = tuple[Tensor, Tensor | None, None]
"""What TRL's trainers are told of completions: log-probabilities [B, C], entropies [B, C], and no router's loss."""


class GRPOTrainerMixin(LogpsMixin):
    """Gives TRL's GRPOTrainer or RLOOTrainer sequence parallelism: `class SPGRPO(alstlib.GRPOTrainerMixin,
    GRPOTrainer)`.

    TRL computes the rewards, the advantages, all types of loss and the metrics. The `sp` ranks of a group train as one
    process: `per_device_train_batch_size` counts the completions of a group, and a batch that is generated at once has
    `per_device_train_batch_size * steps_per_generation` of them for each group, which `sp` must divide. Positions count
    from the first token of a prompt, and not from its padding.

    Args:
        sp, alst: as `TrainerMixin` takes them. All other arguments go to TRL's trainer.
        trees: the number of a rank's tokens in one block: completions of a micro-batch that begin alike, as those of a
            prompt do, are then trained as a tree (`tree_step`), with what they share computed once. None: each
            completion by itself.

    Raises:
        ValueError: before training, where the arguments cannot be run exactly; the message says what to write instead.
            In an evaluation, where `sp` does not divide the rows of the last batch.
    """

    MIXIN, SEAM = "GRPOTrainerMixin", "_get_per_token_logps_and_entropies"
    LOSS_OF = ("Trainer", "GRPOTrainer", "RLOOTrainer")
    temperature: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._generating = False
        """Whether this rank is at its own completions, and not at those of the group."""
        super().__init__(*args, **kwargs)
        # TRL has seeded each process differently, but the ranks of a group shuffle completions alike
        torch.manual_seed(self.args.seed)

    def _validate_args(self) -> None:
        super()._validate_args()
        check_rollouts(self)
        args: Any = self.args
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * self.ctx.dp

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_for_training(*args, **kwargs)
        assert self.handle is not None
        if self.is_fsdp_enabled:  # else generate() stops on a rank while others still gather weights
            self.handle.model._is_fsdp_managed_module = True  # type: ignore[assignment]
        return made

    # ----- batches: what TRL's trainer does, on whole prompts

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super(TrainerMixin, self)
        return base.get_batch_samples(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        base: Any = super(TrainerMixin, self)
        with self._replicas_once():
            if self.trees is None:
                return base.compute_loss(model, inputs, *args, **kwargs)
            known = _of_completions(*_whole(inputs))
            return self._tree_loss(
                model, known, lambda found: base.compute_loss(found, inputs, *args, **kwargs), self.temperature
            )

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Loss of a replica's completions, which are generated first."""
        base: Any = super(TrainerMixin, self)
        return base.prediction_step(*args, **kwargs)

    # ----- completions

    def _generate_and_score_completions(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """The completions of this replica with their advantages: [N, ...], the same on all ranks of the group."""
        base: Any = super()
        ctx, device = self.ctx, self.args.device
        each, rest = divmod(len(inputs), ctx.sp)
        if rest:
            raise ValueError(
                f"a batch has {len(inputs)} completions, which sp={ctx.sp} ranks cannot share evenly: use samples for "
                f"evaluation that fill whole batches, or num_generations_eval divisible by {ctx.sp}"
            )
        seed = int(torch.randint(2**62, ())) + ctx.rank
        with own_random(device):
            torch.manual_seed(seed)  # ranks generate different completions of a prompt
            self._generating = True
            try:
                own = base._generate_and_score_completions(inputs[ctx.sp_rank * each :][:each])
            finally:
                self._generating = False
        made = self._of_group({**own, "random state": torch.get_rng_state()[None]})
        torch.set_rng_state(made.pop("random state")[0])  # TRL shuffles next, and the ranks must do it alike
        if "num_items_in_batch" in made:  # TRL divides it by the processes, and the ranks of a group are one
            made["num_items_in_batch"] = made["num_items_in_batch"] * ctx.sp
        return made

    def _of_group(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors [n, ...] of this rank as those [sp * n, ...] of the ranks of its group, in their order: prompts are
        padded on the left and all else on the right. Numbers stay."""
        from trl.trainer.utils import pad

        mine = {name: t.cpu() for name, t in own.items()}
        parts = [mine] if self.ctx.sp == 1 else from_all(mine, self.ctx.sp_group)
        me: Any = self
        padding = me._tokenizer.pad_token_id
        fills = {"prompt_ids": padding, "completion_ids": padding, "tool_mask": 1}
        made = {}
        for name, t in own.items():
            values = [part[name] for part in parts]
            if t.ndim == 2:
                side = "left" if name.startswith("prompt_") else "right"
                whole = pad([row for rows in values for row in rows], fills.get(name, 0), side)
            else:
                whole = torch.cat(values) if t.ndim else values[0]
            made[name] = whole.to(t.device)
        return made

    # ----- log-probabilities

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, **_: Any,
    ) -> Scores:  # fmt: skip
        """The log-probabilities [B, C] of the last tokens of rows [B, S], and their entropies: of the rows that all
        ranks of the group have, or, while they generate, of each rank's own."""
        if isinstance(model, TokenLogps):  # the loss is of a tree, and these are its log-probabilities
            logps, entropies = (t[:, -logits_to_keep:] for t in model[:2])
            return logps, entropies.float(), None
        count, keep, mine = len(input_ids), logits_to_keep, slice(None)
        if self._generating:
            own = {"prompt_ids": input_ids[:, :-keep], "prompt_mask": attention_mask[:, :-keep]}
            own |= {"completion_ids": input_ids[:, -keep:], "completion_mask": attention_mask[:, -keep:]}
            rows = self._of_group(own)
            input_ids, attention_mask, keep = _whole(rows)
            mine = slice(self.ctx.sp_rank * count, (self.ctx.sp_rank + 1) * count)
        if self.trees is not None:  # of the old policy or the reference
            with self.accelerator.autocast():
                known = _of_completions(input_ids, attention_mask, keep)
                found = self._tree_logps(model, known, self.temperature)[:, -keep:]
            return found[mine, :logits_to_keep], None, None
        size = batch_size or len(input_ids)
        parts = zip(input_ids.split(size), attention_mask.split(size))
        logps, entropies = zip(*(self._score(model, ids, mask, keep) for ids, mask in parts))
        found = torch.cat(logps)[mine, :logits_to_keep]
        return found, torch.cat(entropies)[mine, :logits_to_keep] if compute_entropy else None, None

    def _score(self, model: nn.Module, ids: Tensor, mask: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, keep] of the last tokens of rows ids [B, S], which all ranks have; 0
        where the mask [B, S] is."""
        device, length = ids.device, ids.shape[1]
        known, at = _of_completions(ids, mask, keep), torch.arange(length)
        mask = known["attention_mask"]
        left = mask.argmax(1, keepdim=True)  # tokens of padding before the prompt, which go to the end of the row
        longest = int(mask.sum(1).max())
        order = ((at + left) % length)[:, :longest]
        (part,) = self._share([{name: t.gather(1, order) for name, t in known.items()}])
        with self.accelerator.autocast():
            found = token_logps(model, self._prepare_inputs(part), statistics=True, temperature=self.temperature)
        both = whole_samples(torch.stack([found.logps, found.entropy.to(found.logps.dtype)]), self.ctx)
        both = F.pad(both, (0, length - both.shape[-1]))  # as long as before; a token's value lies at the one before it
        back = ((at[-keep:] - left - 1) % length).to(device)
        logps, entropy = both.gather(2, back.expand(2, -1, -1))
        return logps, entropy.detach().float()  # as TRL compares them with a quantile, which it rounds to fp32


def _whole(rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """The tokens and the mask [B, S] of prompts with their completions, and the length C of the completions."""
    ids, mask = (torch.cat([rows[f"prompt_{n}"], rows[f"completion_{n}"]], 1) for n in ("ids", "mask"))
    return ids, mask, rows["completion_ids"].shape[1]


def _of_completions(ids: Tensor, mask: Tensor, keep: int) -> dict[str, Tensor]:
    """Samples [B, S] whose labels are their last tokens, on the CPU, where they are cut."""
    ids, mask = ids.cpu(), mask.cpu()
    labels = ids.masked_fill(mask == 0, IGNORE)
    labels[:, :-keep] = IGNORE
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
