"""Log-probabilities of labels under an attached model, and their sums over sequences: for DPO, GRPO and others.

Shape legend: B rows of a micro-batch, L tokens of this rank's slice, D documents of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.hf.causal_lm_loss import check_batch, check_first_backward, fields_of
from alstlib.mesh import SPContext, context_of
from alstlib.recompute import first_order
from alstlib.tiled.logits import Statistics


class TokenLogps(NamedTuple):
    """What `token_logps` returns with statistics, each [B, L]."""

    logps: Tensor
    entropy: Tensor
    """Of the softmax, in nats, detached; 0 without a label."""
    correct: Tensor
    """Has the label the largest logit? bool, False without a label."""
    mean_logits: Tensor
    """Mean of the logits over the vocabulary, detached; 0 without a label."""


@overload
def token_logps(
    model: Any, batch: Mapping[str, Any], ctx: SPContext | None = ..., *, temperature: float = ...
) -> Tensor: ...  # fmt: skip
@overload
def token_logps(
    model: Any, batch: Mapping[str, Any], ctx: SPContext | None = ..., statistics: bool = ..., temperature: float = ...
) -> Any: ...  # fmt: skip
def token_logps(
    model: Any, batch: Mapping[str, Any], ctx: SPContext | None = None, statistics: bool = False,
    temperature: float = 1.0,
) -> Any:  # fmt: skip
    """Log-probability of each label of this rank's slice: [B, L] in fp32 (or wider), 0 where the label is -100.

    Differentiable, with an upstream gradient for each token, and computed in tiles with any options of `apply`. Where
    layers run in chunks, which deal tokens out anew, it is put back in order.

    An engine averages gradients over all ranks. A loss that adds up tokens is therefore this rank's sum over its tokens
    times `ctx.world_size`, divided by the tokens of all ranks; a loss of whole sequences takes `sequence_logps`. Every
    rank calls backward, one without a label too.

    The loss of GRPO in a `compute_loss` of your own takes a slice of prompts with their completions (`share_step` and
    `shard_batch` make it, with labels of -100 in prompts) and the advantages [B]. Where the Trainer divides the loss by
    the accumulation steps, multiply by them::

        logps = alstlib.token_logps(model, batch, ctx, temperature=args.temperature)  # [B, L]
        ratio = (logps - old).exp()  # old: as logps, of the policy that generated; logps.detach() in the first pass
        gain = torch.min(ratio * advantages[:, None], ratio.clamp(1 - eps, 1 + eps) * advantages[:, None])
        own = gain[batch["shift_labels"] != -100].sum()
        loss = -own * ctx.world_size / batch["step_tokens"]

    Args:
        model: the model `apply` was given, or its wrapper. Put all samples of a step into one batch (chosen and
            rejected ones of DPO, say): engines expect one forward before a backward.
        batch: as `causal_lm_loss` takes it; step_tokens is not used.
        ctx: the mesh the model was attached with; it may be left out.
        statistics: return a `TokenLogps`, which has the entropy, the correctness and the mean logit of each token too.
        temperature: what logits are divided by, as the sampling of the tokens did.

    Raises:
        ValueError: as `causal_lm_loss`; a temperature that is not above 0, or a mixture of experts that is asked for
            its load-balancing loss (output_router_logits).
    """
    check_batch(batch, 1)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0; 1.0 leaves the logits as they are")
    context_of(model, ctx)
    check_first_backward(model)
    found = Statistics() if statistics else None
    logps = model(**fields_of(batch), temperature=float(temperature), statistics=found).logits
    if logps.shape != batch["shift_labels"].shape:
        raise ValueError(f"{type(model).__name__} returned its logits: attach it with alstlib.apply first")
    return logps if found is None else TokenLogps(logps, found.entropy, found.correct, found.mean)


def sequence_logps(logps: Tensor, batch: Mapping[str, Any], ctx: SPContext) -> Tensor:
    """Sums of `token_logps` (or of other values of tokens) over whole sequences, the same on all ranks of the SP group.

    They are in fp64: preference losses subtract sums over many tokens, of which fp32 would lose the last digits.

    Gradients: every rank of the SP group computes the same loss from these sums. After an engine has averaged gradients
    over all ranks, each is the gradient of the mean over the dp replicas of this loss, because backward multiplies by
    sp what this rank's tokens get.

    Args:
        logps: [B, L] of this rank's slice.
        batch: what `token_logps` was given, for its documents.
        ctx: the mesh the model was attached with.

    Returns:
        fp64 [B], or of packed samples [D], the documents of all rows in order; padding is no document where the batch
        has row_tokens, as that of `SPDataLoader` has.
    """
    (rows, length), device = logps.shape, logps.device
    whole = length * ctx.sp
    starts, tokens = torch.arange(rows) * whole, batch.get("row_tokens")
    if batch.get("cu_documents") is not None:
        starts = torch.as_tensor(batch["cu_documents"]).flatten()[:-1].to("cpu", torch.int64)
    at = (torch.arange(rows, device=device) * ctx.sp + ctx.sp_rank)[:, None] * length
    at = (at + torch.arange(length, device=device)).flatten()
    document = torch.searchsorted(starts.to(device, non_blocking=True), at, right=True) - 1
    sums = logps.new_zeros(len(starts), dtype=torch.float64).index_add(0, document, logps.flatten().double())
    sums = OverRanks.apply(sums, ctx)
    if tokens is None or len(starts) == rows:
        return sums
    tokens = torch.as_tensor(tokens).flatten().cpu()
    padding = (torch.arange(rows) * whole + tokens)[tokens < whole]
    kept = torch.isin(starts, padding, invert=True).nonzero()[:, 0]
    return sums[kept.to(device, non_blocking=True)]


class OverRanks(torch.autograd.Function):
    """The sum over the ranks of an SP group, which all compute the same loss from it."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, mesh: SPContext) -> Tensor:
        ctx.sp, sums = mesh.sp, sums.clone()
        if mesh.sp_group is not None:
            dist.all_reduce(sums, group=mesh.sp_group)
        return sums

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.sp, None
