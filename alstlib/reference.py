"""The plain version of every operator: slow, short, obviously right. The oracle of every test.

Shape legend: B batch, S sequence, L = S / P rows of one rank, P sequence-parallel degree, H query heads, K key/value
heads, D head width, E model width, V vocabulary. Everything here materialises whatever it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def causal_mask(batch: int, length: int, documents: Sequence[int] | None = None) -> Tensor:
    """Boolean [B, S, S]: may row i attend to column j? Causal, and inside one document.

    `documents` are offsets into the flattened [B * S] batch; None makes every batch row one document.
    """
    row = torch.arange(length)
    allowed = (row[:, None] >= row[None, :]).expand(batch, length, length)
    if documents is None:
        return allowed
    starts = torch.as_tensor(documents[1:-1], dtype=torch.long)
    document = torch.searchsorted(starts, torch.arange(batch * length), right=True).view(batch, length)
    return allowed & (document[:, :, None] == document[:, None, :])


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, documents: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention. q [B, H, S, D], k and v [B, K, S, D] -> output [B, H, S, D] and logsumexp [B, H, S]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    mask = causal_mask(q.shape[0], q.shape[2], documents).to(q.device)
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v), scores.logsumexp(-1)


def seq_to_heads(shards: Sequence[Tensor]) -> list[Tensor]:
    """What every rank holds after the exchange. P shards [B, H, L, D] in rank order -> P tensors [B, H/P, S, D].

    With fewer heads than ranks (K of grouped-query attention), P/K neighbouring ranks share one head.
    """
    ranks, heads = len(shards), shards[0].shape[1]
    whole = torch.cat(list(shards), 2)
    if heads % ranks == 0:
        return list(whole.chunk(ranks, 1))
    return [whole[:, r * heads // ranks, None] for r in range(ranks)]


def heads_to_seq(blocks: Sequence[Tensor]) -> list[Tensor]:
    """The way back: P blocks of heads [B, H/P, S, D] in rank order -> P shards [B, H, L, D]."""
    return list(torch.cat(list(blocks), 1).chunk(len(blocks), 2))


def token_wise(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A token-wise function on the whole sequence at once."""
    return fn(x)


def logits_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Sum over the valid tokens of the cross-entropy in fp32 or wider. hidden [.., E], weight [V, E], labels [..]."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, labels = logits.flatten(0, -2), labels.flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def shift(labels: Tensor) -> Tensor:
    """labels [B, S] -> the label of each position, which is the next token's; the last has none (-100)."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def relative_error(got: Tensor, want: Tensor, floor: float = 1e-12) -> float:
    """Norm of the difference over the norm of what is right (or `floor`, where that is zero by construction)."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(floor))
