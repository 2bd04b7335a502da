"""Lightning attention (MiniMax-01, arXiv 2501.08313): a number for each head, the same for all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.recompute import sum_dtype
from alstlib.base.types import OutputAndState
from alstlib.linear.adapter import Adapter, LayerPart
from alstlib.linear.rule import StateRule

AT_ONCE = 64
"""Chunks of the recurrence that are computed together, or a part of them all if that is more: a loop over single chunks
of a long sequence is thousands of small operations, on a GPU as in a simulation (a plan of MiniMax took over five
minutes with it)."""
MADE_OF = {"qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "slope_rate", "block_size", "head_dim"}
"""It calls no function for its recurrence, and is known by these."""


class Lightning(Adapter):
    family = "lightning attention"

    @classmethod
    def knows(cls, mixer: nn.Module, calls: set[str]) -> bool:
        return not calls and all(hasattr(mixer, name) for name in MADE_OF)

    @classmethod
    def forward(cls, mixer: nn.Module, part: Callable[[str], LayerPart]) -> Callable[..., Any]:
        return functools.partial(_forward, part(""), mixer)


def _forward(part: LayerPart, mixer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """By the mixer's own modules."""
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
    qkv = qkv.unflatten(2, (-1, 3 * mixer.head_dim))

    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> OutputAndState:
        q, k, v, slopes = tensors
        return decayed_attention(q, k, v, slopes, mixer.block_size, initial_state)

    def decay(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return (-slopes * q.shape[1]).expand(q.shape[0], -1)[..., None, None]

    tokens = _, k, v = qkv.split(mixer.head_dim, 3)
    out = part.mix(StateRule(kernel, decay), tokens, (mixer.slope_rate.flatten(),), k, v, mixer.block_size)
    out = mixer.norm(out.flatten(2))
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * out), None


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, chunk_size: int, initial_state: Tensor | None = None
) -> OutputAndState:
    """Linear attention whose past decays by exp(-slope) at each token, in chunks of tokens (lightning attention).

    q, k [B, S, H, K], v [B, S, H, V], slopes [H] -> output [B, S, H, V] and the last state [B, H, K, V], in which the
    state is h = exp(-slope) h + k v^T and the output q h.
    """
    wide, state, outs = sum_dtype(v), initial_state, []
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=wide)
    whole, rest = divmod(q.shape[1], chunk_size)
    together = max(AT_ONCE, whole // AT_ONCE)
    full, last = divmod(whole, together)
    sizes = [size for size in [together * chunk_size] * full + [last * chunk_size, rest] if size]
    slope = slopes.to(wide)[:, None, None]
    for parts in zip(*(t.transpose(1, 2).to(wide).split(sizes, 2) for t in (q, k, v))):
        out, state = _piece(slope, chunk_size, state, *parts)
        outs.append(out)
    return torch.cat(outs, 2).transpose(1, 2).to(v.dtype), state


def _piece(slope: Tensor, chunk_size: int, state: Tensor, *tensors: Tensor) -> OutputAndState:
    """q, k, v [B, H, s, K or V] of some whole chunks, or of a shorter one -> output and state."""
    tokens = min(chunk_size, tensors[0].shape[2])
    q, k, v = (t.unflatten(2, (-1, tokens)) for t in tensors)  # [B, H, chunks, tokens, K or V]
    at = torch.arange(1, tokens + 1, device=q.device, dtype=q.dtype)[:, None]
    decay = slope[:, None]  # for each head, of a token
    inside = (q @ k.mT) * (decay * (at.mT - at)).exp().tril()  # no token sees later ones
    ends = (k * (decay * (at - tokens)).exp()).mT @ v  # what each chunk adds to the state
    ended = torch.arange(q.shape[2] + 1, device=q.device, dtype=q.dtype)[:, None]  # chunks before a start
    later = (ended - 1 - ended[:-1].mT).clamp(min=0)  # chunks between the end of one and the start of another
    starts = ((-slope * tokens * later).exp().tril(-1) @ ends.flatten(3)).unflatten(3, state.shape[2:])
    starts = starts + (-slope * tokens * ended).exp()[..., None] * state[:, :, None]
    return (inside @ v + q * (-decay * at).exp() @ starts[:, :, :-1]).flatten(2, 3), starts[:, :, -1]
