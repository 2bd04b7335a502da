"""The training loss over all ranks. After an engine has averaged gradients over all ranks, each gradient is that of the
mean loss over all valid tokens of the whole optimizer step.

No differentiable gather is needed: each rank's loss is its own sum over the global token count, times the factor that
the engine's averaging (and its division by accumulation steps) takes out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.base.mesh import SPContext
from alstlib.base.options import Record
from alstlib.base.units import IGNORE
from alstlib.data.images import DEALT
from alstlib.data.shard import Batch
from alstlib.hf.inputs import PACKED, STATE, agree, check_number, handle_of, read_call
from alstlib.hf.pass_state import Objective, PassState
from alstlib.tiled.logits import Statistics
from alstlib.tiled.loss import Look


@dataclass(frozen=True)
class Loss:
    """What `causal_lm_loss` returns."""

    loss: Tensor
    """A scalar for backward: this rank's part of the loss, scaled for an engine that averages gradients over ranks."""
    mean: Tensor
    """A scalar for the log: the mean loss over the valid tokens of this micro-batch on all ranks, in nats; the same on
    every rank, detached."""
    tokens: Tensor
    """The number of valid tokens of this micro-batch on all ranks (int64 scalar)."""
    entropy: Tensor | None = None
    """The mean entropy of the softmax over the same tokens, in nats, detached; None without `statistics`."""
    accuracy: Tensor | None = None
    """The share of these tokens whose label has the largest logit, detached; None without `statistics`."""
    router: Tensor | None = None
    """The load-balancing loss of this SP group's micro-batch, without its weight, where the config of a mixture of
    experts asks for it (output_router_logits); detached."""


def causal_lm_loss(
    model: Any, batch: Record, engine_divides_by: int | None = None, *, statistics: bool = False,
    label_smoothing: float = 0.0, look: Look | None = None, router_tokens: float | None = None, dft: bool = False,
) -> Loss:  # fmt: skip
    """Run the model on this rank's slice of a micro-batch, and return the training loss.

    A valid token is one whose label is not -100. B: samples of the micro-batch; L: tokens of this rank's slice of each.

    Args:
        model: the model that `apply` was given, or the DDP, FSDP or DeepSpeed engine around it.
        batch: what `SPDataLoader` yields: input_ids, position_ids and shift_labels [B, L] (int64), cu_seqlens, and
            step_tokens, the number of valid tokens of the whole optimizer step. Without step_tokens this micro-batch
            counts as the whole step.
        engine_divides_by: the number by which the engine divides the loss before backward. None: a DeepSpeed engine is
            asked (it divides by its accumulation steps), and nothing else divides. Where something else does, such as
            `accelerator.backward`, give its number of accumulation steps.
        statistics: whether to compute the entropy and the accuracy too, from the same logits.
        label_smoothing: as in PyTorch's cross_entropy.
        look: a function for evaluations; it is called for each tile with the logits [B, t, V] of t tokens.
        router_tokens: the load-balancing loss of a mixture of experts gets the weight of this many tokens; None: of the
            valid tokens of the micro-batch.
        dft: whether the loss of each token is multiplied by the probability of its label, as a number without a
            gradient (Dynamic Fine-Tuning, arXiv 2508.05629); it takes one matrix product of the head more.

    Returns:
        A `Loss`: call `.loss.backward()` (or the engine's backward), and log `.mean`.

    Raises:
        ValueError: the batch lacks a field or has one that is not known; the model is not attached; a DeepSpeed engine
            accumulates another number of micro-batches than the loader counted. What one rank refuses is raised on all
            ranks, and so is a call that differs between ranks (`Agreement` has what that costs).
    """
    handle, divides = handle_of(model), divisor_of(model, engine_divides_by)
    how = {"label_smoothing": label_smoothing, "dft": dft}
    arguments = {"engine_divides_by": divides, "statistics": statistics, **how}
    with agree(handle, "causal_lm_loss", arguments, batch) as agreement:
        check_batch(batch, divides)
        check_accumulation(model, batch, engine_divides_by)
        if look is not None and not callable(look):
            raise ValueError(f"look={look!r} must be a function of logits, or None")
        check_number("label_smoothing", label_smoothing, "a number from 0 to 1", most=1.0)
        objective = Objective(
            reduction="sum", statistics=Statistics() if statistics else None, look=look, router_tokens=router_tokens,
            label_smoothing=label_smoothing, dft=dft,
        )  # fmt: skip
        state = read_call(handle, given := fields_of(batch), objective, handle.chunk, agreement)
    return loss_of(model, given, state, batch, handle.ctx, divides)


def loss_of(
    model: Any, given: Record, state: PassState, batch: Record, ctx: SPContext,
    engine_divides_by: int,
) -> Loss:  # fmt: skip
    """`causal_lm_loss` after all checks, with what the model is `given`, and the pass that its call begins."""
    out, found = model(**given, **{STATE: state}), state.objective.statistics
    sums = None if found is None else found.sums()
    factor, means = share_of(out.loss.detach(), batch["shift_labels"], batch, ctx, engine_divides_by, sums)
    return Loss(out.loss * factor, **means, router=getattr(out, "aux_loss", None))


FIELDS = ("input_ids", "position_ids", "shift_labels", "cu_seqlens", "sample_tokens", "sample_length", *DEALT)
"""Fields of a batch that an attached model is given."""
CHECKED = ("attention_mask", *PACKED)
"""Fields that it is also given where a batch has them: its call takes them where that is exact, or else refuses."""
KNOWN = (*FIELDS, *CHECKED, "step_tokens", "seen_tokens", "accumulation", "labels")
"""Fields of a batch. Labels are not looked at, because shift_labels are the same labels."""


def fields_of(batch: Record) -> Batch:
    """The fields of a batch that an attached model is given."""
    return {name: batch[name] for name in (*FIELDS, *CHECKED) if batch.get(name) is not None}


def check_batch(batch: Any, engine_divides_by: Any) -> None:
    """Refuse a batch that lacks a field, or has one that would be dropped silently (ValueError)."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch is of the type {type(batch).__name__}; it must be a dict, as SPDataLoader yields")
    for name in ("input_ids", "position_ids", "shift_labels"):
        if batch.get(name) is None:
            raise ValueError(
                f"the batch has no {name}; it has {', '.join(batch) or 'nothing'}. Give a batch of SPDataLoader"
            )
    if unknown := [str(name) for name, value in batch.items() if value is not None and name not in KNOWN]:
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which would not reach the model: leave it out (known: "
            f"{', '.join(KNOWN)})"
        )
    check_number("engine_divides_by", engine_divides_by, "a number of at least 1", 1)
    if (tokens := batch.get("step_tokens")) is not None:
        check_number("step_tokens", tokens, "the number of labels of the whole optimizer step")


def accumulation_of(engine: Any) -> int | None:
    """The number of micro-batches in an optimizer step of a DeepSpeed engine, which divides each loss by it; None of
    another model."""
    deepspeed = hasattr(engine, "set_gradient_accumulation_boundary")
    return int(engine.gradient_accumulation_steps()) if deepspeed else None


def divisor_of(engine: Any, given: int | None) -> Any:
    """What the engine divides the loss by: as it is `given`, or as the engine says."""
    return (accumulation_of(engine) or 1) if given is None else given


def check_accumulation(engine: Any, batch: Record, given: int | None) -> None:
    """Refuse a batch of an optimizer step that has another number of micro-batches in the engine than in the loader
    (ValueError)."""
    counted, steps = batch.get("accumulation"), accumulation_of(engine)
    if given is None and counted is not None and steps is not None and int(counted) != steps:
        raise ValueError(
            f"the engine accumulates gradients over {steps} micro-batches, but the loader counted the tokens of "
            f"{int(counted)}: give SPDataLoader(accumulation={steps}), or zero_config(accumulation={int(counted)})"
        )


def share_of(
    total: Tensor, labels: Tensor, batch: Record, ctx: SPContext, engine_divides_by: int,
    found: Tensor | None = None,
) -> tuple[Any, dict[str, Tensor]]:  # fmt: skip
    """What this rank's sum of losses is multiplied by for backward, and the fields of `Loss` of the whole micro-batch:
    of this rank's sum of losses, its labels, and the sums [2] of its statistics. Collective."""
    stats = torch.stack([total.double(), labels.ne(IGNORE).sum().double(), *([] if found is None else found)])
    if ctx.world_group is not None:
        dist.all_reduce(stats, group=ctx.world_group)
    tokens = stats[1]
    step_tokens = batch.get("step_tokens")
    if isinstance(step_tokens, Tensor) and step_tokens.device != tokens.device:
        step_tokens = int(step_tokens)  # a number on the CPU: copying it to a device would wait for the device
    step_tokens = tokens if step_tokens is None else step_tokens
    if isinstance(step_tokens, Tensor):
        factor: Any = (ctx.world_size * engine_divides_by / step_tokens.double().clamp_min(1)).to(total.dtype)
    else:
        factor = ctx.world_size * engine_divides_by / max(1, step_tokens)
    fields = dict(zip(("mean", "tokens", "entropy", "accuracy"), stats / tokens.clamp_min(1)))
    fields["tokens"] = tokens.to(torch.int64)
    return factor, fields
