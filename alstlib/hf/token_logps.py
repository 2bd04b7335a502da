"""Log-probabilities of labels under an attached model, and their sums over sequences, for losses such as DPO and GRPO.

Shape legend: B samples of a micro-batch, L tokens of this rank's slice, D documents of the sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.base.mesh import SPContext
from alstlib.base.options import Record
from alstlib.base.recompute import first_order
from alstlib.hf.block_step import MicroBatch, check_block, check_planned, check_temperature, run_forward
from alstlib.hf.causal_lm_loss import check_batch, fields_of
from alstlib.hf.inputs import STATE, agree, handle_of, places_of, read_call
from alstlib.hf.pass_state import Objective
from alstlib.tiled.logits import Statistics


class TokenLogps(NamedTuple):
    """What `token_logps` returns with `statistics`: four tensors [B, L], one value for each token of this rank."""

    logps: Tensor
    """The log-probability of the label, in nats; 0 where the label is -100."""
    entropy: Tensor
    """The entropy of the softmax, in nats, detached; 0 where the label is -100."""
    correct: Tensor
    """Whether the label has the largest logit (bool); False where the label is -100."""
    mean_logits: Tensor
    """The mean of the logits over the vocabulary, detached; 0 where the label is -100."""


def token_logps(
    model: Any, batch: Record, *, statistics: bool = False, temperature: float = 1.0,
    block: int | None = None,
) -> Any:  # fmt: skip
    """The log-probability of each label of this rank's slice, in nats: [B, L] in fp32 (or wider), 0 where the label is
    -100.

    It is differentiable, with an upstream gradient for each token, and computed in tiles. It is in the order of the
    tokens with any options of `apply`.

    An engine averages gradients over all ranks. A loss that adds up tokens is therefore this rank's sum over its tokens
    times `ctx.world_size`, divided by the number of tokens of all ranks. For a loss of whole sequences use
    `sequence_logps`. Every rank calls backward, also a rank without labels.

    As an example, the loss of GRPO in a `compute_loss` of your own. `batch` is a slice of prompts with their
    completions (`share_step` or `shard_batch` make it, with the label -100 in prompts); the advantages are [B]. Where
    the Trainer divides the loss by the accumulation steps (its `num_items_in_batch` is None), multiply by them::

        logps = alstlib.token_logps(model, batch, temperature=args.temperature)  # [B, L]
        ratio = (logps - old).exp()  # old: as logps, of the policy that generated; logps.detach() in the first pass
        gain = torch.min(ratio * advantages[:, None], ratio.clamp(1 - eps, 1 + eps) * advantages[:, None])
        own = gain[batch["shift_labels"] != -100].sum()
        loss = -own * ctx.world_size / batch["step_tokens"]

    Args:
        model: the model that `apply` was given, or the engine around it. Put all samples of a step into one batch (in
            DPO, the chosen and the rejected samples), because engines expect one forward before a backward.
        batch: as `causal_lm_loss` takes it; step_tokens is not used.
        statistics: whether to return a `TokenLogps`, which also has the entropy, the correctness and the mean logit.
        temperature: the number by which logits are divided; use the temperature with which the tokens were sampled.
        block: run the whole model on so many of this rank's tokens at a time, as `block_step` does, under
            `torch.no_grad()`: of the sequence, keys and values alone are kept. All replicas make this call. (With
            gradients: `block_step` with an `objective`.)

    Raises:
        ValueError: as `causal_lm_loss`; the temperature is not above 0, or the config of a mixture of experts asks for
            its load-balancing loss (output_router_logits); as `block_step`, where a `block` is given.
    """
    handle, by_blocks = handle_of(model), block is not None
    arguments = {"temperature": temperature, "statistics": statistics, "block": block}
    with agree(handle, "token_logps", arguments, batch, always=by_blocks, own_group=not by_blocks) as agreement:
        check_batch(batch, 1)
        check_temperature(temperature)
        found = Statistics() if statistics else None
        objective = Objective(temperature=float(temperature), statistics=found)
        if block is not None:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"block={block} makes no gradients: call token_logps under torch.no_grad(), or give block_step "
                    "your loss as its objective"
                )
            check_block(handle, block)
            check_planned(batch)
            agreement.count = -(-batch["input_ids"].shape[1] // block)
        state = read_call(handle, given := fields_of(batch), objective, block or handle.chunk, agreement)
    if block is not None and agreement.count > 1:
        micro = MicroBatch(handle, given, state, block)
        with micro.order(batch, agreement.count) as order:
            made = micro.in_order(run_forward(model, order))
        return TokenLogps(made[0], made[1], made[2].bool(), made[3]) if statistics else made
    logps = model(**given, **{STATE: state}).logits
    return logps if found is None else TokenLogps(logps, found.entropy, found.correct, found.mean)


def sequence_logps(logps: Tensor, batch: Record, ctx: SPContext) -> Tensor:
    """The sum of `token_logps` (or of other values of tokens) over each whole sequence, the same on all ranks of the SP
    group.

    The sums are in fp64, because preference losses subtract sums over many tokens, and fp32 would lose the last digits.

    Every rank of the SP group computes the same loss from these sums. After an engine has averaged gradients over all
    ranks, they are the gradients of the mean of this loss over the dp groups: backward multiplies the gradient of this
    rank's tokens by sp.

    Args:
        logps: [B, L], the values of this rank's slice.
        batch: the batch that `token_logps` was given; it says where documents begin.
        ctx: the mesh that the model was attached with.

    Returns:
        fp64 [B], one sum for each sample; for packed samples [D], one for each document, in order. Padding is not
        counted as a document where the batch has sample_tokens, as batches of `SPDataLoader` have.
    """
    (samples, length), device = logps.shape, logps.device
    whole = length * ctx.sp
    starts, tokens = torch.arange(samples) * whole, batch.get("sample_tokens")
    if batch.get("cu_seqlens") is not None:
        starts = torch.as_tensor(batch["cu_seqlens"]).flatten()[:-1].to("cpu", torch.int64)
    at = places_of(samples, length, ctx, device).flatten()
    document = torch.searchsorted(starts.to(device, non_blocking=True), at, right=True) - 1
    sums = logps.new_zeros(len(starts), dtype=torch.float64).index_add(0, document, logps.flatten().double())
    sums = OverRanks.apply(sums, ctx)
    if tokens is None or len(starts) == samples:
        return sums
    tokens = torch.as_tensor(tokens).flatten().cpu()
    padding = (torch.arange(samples) * whole + tokens)[tokens < whole]
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
