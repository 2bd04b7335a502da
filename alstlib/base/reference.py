"""The plain version of every operator: slow, short and easy to check. The tests compare everything with it.

Shape legend: B batch, S sequence, L = S / P tokens of one rank, P sequence-parallel degree, H query heads, K key/value
heads, D head width, E model width, V vocabulary; K and V are also the widths of keys and values of a state, C the
channels and W the width of a convolution. Everything here materialises whatever it likes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.base.types import Documents, OutputAndLse, OutputAndState


def causal_mask(batch: int, length: int, documents: Documents = None, window: int | None = None) -> Tensor:
    """Boolean [B, S, S]: may query i attend to key j? Causal, inside one document, and among its last `window` keys."""
    at = torch.arange(length)
    allowed = (at[:, None] >= at[None, :]).expand(batch, length, length)
    if window is not None:
        allowed = allowed & (at[:, None] - at[None, :] < window)
    document = first_tokens(batch, length, documents).cumsum(1)
    return allowed & (document[:, :, None] == document[:, None, :])


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, documents: Documents = None, causal: bool = True,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, seen: Tensor | None = None,
) -> OutputAndLse:  # fmt: skip
    """Attention. q [B, H, S, D], k [B, K, N, D], v [B, K, N, V] -> output [B, H, S, V] and logsumexp [B, H, S].

    Causal (with N = S), inside documents and a sliding window, or else over all keys. Scores may be capped to
    c * tanh(s / c); sinks [H] are the score of a further key of each head, which has no value. A query does not attend
    to keys where `seen` [B, K, S, N] is False.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = _capped((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale, softcap)
    if causal:
        mask = causal_mask(q.shape[0], q.shape[2], documents, window)
        scores = scores.masked_fill(~mask[:, None].to(q.device), float("-inf"))
    if seen is not None:
        scores = scores.masked_fill(~seen.repeat_interleave(groups, 1), float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    shares = scores.softmax(-1)[..., : k.shape[2]]
    return shares.to(v.dtype) @ v, scores.logsumexp(-1)


def first_tokens(batch: int, length: int, documents: Documents = None, state: Tensor | None = None) -> Tensor:
    """Boolean [B, S]: does a document begin with this token? Every sample begins one, unless there is a state
    from the tokens before it."""
    starts = {*range(0, batch * length, length), *(documents or ())} - {batch * length}
    first = torch.zeros(batch * length, dtype=torch.bool)
    first[sorted(starts)] = True
    first = first.view(batch, length)
    if state is not None:
        first[:, 0] = False
    return first


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, documents: Documents = None) -> Tensor:
    """Each channel's own weighted sum of the last W tokens of a document. x [B, C, S], weight [C, W] -> [B, C, S]."""
    (batch, _, length), width, at = x.shape, weight.shape[1], torch.arange(x.shape[2])
    begin = torch.where(first_tokens(batch, length, documents), at, 0).cummax(1).values
    out = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    for back in range(min(width, length)):
        seen = (at - begin >= back).to(x.device)[:, None]  # the token so many places before is of the same document
        out = out + weight[:, -1 - back, None] * x.roll(back, 2) * seen
    return out


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, documents: Documents,
    beta: Tensor | None = None,
) -> OutputAndState:  # fmt: skip
    """The state h = decay h + k v^T of each head, token by token, and its output q h: all that follow are of this form.

    q, k [B, S, H, K], v [B, S, H, V], decay [B, S, H, K or 1], state [B, H, K, V] or none, for zeros -> output
    [B, S, H, V] and the last state. It begins with zeros in each document. With beta [B, S, H], what the decayed state
    holds for the key is taken from v first, and the rest counts in this share.
    """
    first = first_tokens(v.shape[0], v.shape[1], documents, state)[..., None, None, None]
    h = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        h, new = h.masked_fill(first[:, t], 0.0) * decay[:, t, ..., None], v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhk,bhkv->bhv", k[:, t], h))
        h = h + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], h))
    return torch.stack(outputs, 1), h


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, *,
    documents: Documents = None,
) -> OutputAndState:  # fmt: skip
    """The gated delta rule, token by token (Gated Delta Networks, arXiv 2412.06464).

    q, k [B, S, H, K], v [B, S, H, V], g (log of the decay) and beta [B, S, H] -> output [B, S, H, V] and the last state
    [B, H, K, V]. In Kimi delta attention (arXiv 2510.26692) each key dimension has its own decay: g [B, S, H, K]. The
    state h decays, forgets what it holds for the key k, and takes v for it in the share beta:
    h = exp(g) h;  h = h + beta k (v - k h)^T;  output q h / sqrt(K). It begins with zeros in each document.
    """
    decay = (g if g.ndim == 4 else g[..., None]).exp()
    output, state = _recurrence(q, k, v, decay, initial_state, documents, beta)
    return output * k.shape[3] ** -0.5, state


def lightning(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, initial_state: Tensor | None = None, *,
    documents: Documents = None,
) -> OutputAndState:  # fmt: skip
    """Lightning attention, token by token (MiniMax-01, arXiv 2501.08313).

    q, k [B, S, H, K], v [B, S, H, V], slopes [H] -> output [B, S, H, V] and the last state [B, H, K, V].
    h = exp(-slope) h + k v^T; output q h. It begins with zeros in each document.
    """
    decay = (-slopes).exp()[:, None].expand(*v.shape[:3], 1)
    return _recurrence(q, k, v, decay, initial_state, documents)


def mamba1(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor | None = None, *,
    documents: Documents = None,
) -> OutputAndState:  # fmt: skip
    """The selective state space of Mamba, token by token (arXiv 2312.00752).

    x and dt (step widths) [B, S, E], A (negative) [E, N], B and C [B, S, N], D [E] -> output [B, S, E] and the last
    state [B, E, N]. h = exp(dt A) h + dt x B^T; output h C + D x. The state begins with zeros in each document.
    """
    state = None if initial_state is None else initial_state[..., None]
    q, k = (t[:, :, None].expand(*x.shape, -1) for t in (C, B))  # each channel is a head with a single value
    output, state = _recurrence(q, k, (dt * x)[..., None], (dt[..., None] * A).exp(), state, documents)
    return output[..., 0] + D * x, state[..., 0]


def mamba2(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor | None = None, *,
    documents: Documents = None,
) -> OutputAndState:  # fmt: skip
    """The state space of Mamba-2, token by token (arXiv 2405.21060).

    x [B, S, H, P], dt (step widths) [B, S, H], A (negative) and D [H], B and C [B, S, G, N], each of the G groups for
    H / G heads -> output [B, S, H, P] and the last state [B, H, P, N]. h = exp(dt A) h + dt x B^T; output h C + D x.
    The state begins with zeros in each document.
    """
    state = None if initial_state is None else initial_state.mT
    q, k = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (C, B))
    output, state = _recurrence(q, k, dt[..., None] * x, (dt * A).exp()[..., None], state, documents)
    return output + D[:, None] * x, state.mT


def seq_to_heads(shards: Sequence[Tensor]) -> list[Tensor]:
    """What every rank holds after the exchange. P slices [B, H, L, D] in rank order -> P tensors [B, H/P, S, D].

    With fewer heads than ranks (K of grouped-query attention), P/K neighbouring ranks share one head.
    """
    ranks, heads = len(shards), shards[0].shape[1]
    whole = torch.cat(list(shards), 2)
    if heads % ranks == 0:
        return list(whole.chunk(ranks, 1))
    return [whole[:, r * heads // ranks, None] for r in range(ranks)]


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def token_logps(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, scale: float = 1.0,
    softcap: float | None = None, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Log-probability of each label, 0 where it is -100; hidden [.., E], weight [V, E], labels [..]. Minus their sum is
    the summed cross-entropy. In fp32 or wider."""
    logits = F.linear(hidden, weight, bias)
    logits = _capped(logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale, softcap)
    logps = (logits / temperature).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return logps.masked_fill(labels == -100, 0.0)


def head_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy (in nats) of each token's softmax, whether its label has the largest logit, and the mean of its logits;
    0 where the label is -100."""
    p, valid = logits.softmax(-1), labels != -100
    return torch.special.entr(p).sum(-1) * valid, (logits.argmax(-1) == labels) & valid, logits.mean(-1) * valid


def shift(labels: Tensor) -> Tensor:
    """labels [B, S] -> the label of each position, which is the next token's; the last has none (-100)."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def relative_error(got: Tensor, want: Tensor, floor: float = 1e-12) -> float:
    """Norm of the difference over the norm of what is right (or `floor`, where that is zero by construction)."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(floor))
