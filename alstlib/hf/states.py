"""The layers with a state of an attached model: their convolution and their recurrence run over the tokens of all
ranks.

A mixer's own forward runs, with other functions in the place of those by which it mixes tokens (`linear.mixers`): a
copy of the function whose globals differ in these names. So projections, gates and norms are transformers' own, in
every version, and so is each kernel on one device: `causal-conv1d`, `flash-linear-attention` or PyTorch, as
transformers chooses. Kernels that keep packed documents apart (they name `cu_seqlens` or `seq_idx`) get them in one
call.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.hf.handle import Handle
from alstlib.linear.by_heads import by_heads
from alstlib.linear.convolution import causal_convolution
from alstlib.linear.documents import Packed
from alstlib.linear.mixers import (
    CONVOLUTION,
    GATED_DELTA,
    KDA,
    LIGHTNING_ATTENTION,
    MAMBA1,
    MAMBA1_FUSED,
    MAMBA2,
    MAMBA2_FUSED,
    called_by,
    family_of,
    mixers_of,
    plain_forward,
    takes,
)
from alstlib.linear.pass_state import GatedDeltaRule, Recurrence, SelectiveScan, decayed_attention, over_ranks
from alstlib.linear.ways import BLOCK, Sent, StateLayer, way_of
from alstlib.ulysses.alltoall import Exchange

log = logging.getLogger(__name__)


def attach_states(handle: Handle) -> None:
    """Give each known mixer of the decoder layers the functions that work over ranks and restart at documents."""
    found = [mixer for layer in handle.facts.layers for mixer in mixers_of(layer)]
    for mixer in found:
        _attach(handle, mixer)


def _attach(handle: Handle, mixer: nn.Module) -> None:
    own, original = plain_forward(mixer), mixer.forward
    if family_of(mixer) == LIGHTNING_ATTENTION:
        over: Any = functools.partial(_lightning, _Part(handle, (mixer, "")))
    else:
        names = {
            name: functools.partial(OURS[name], _Part(handle, (mixer, name)), own.__globals__[name])
            for name in called_by(own) & OURS.keys()
        }
        over = types.FunctionType(
            own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
        )
        over.__kwdefaults__ = own.__kwdefaults__

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if handle.plain else over(mixer, *args, **kwargs)

    handle.set_forward(mixer, forward)


@dataclass(frozen=True)
class _Part:
    """One function of one mixer: what it hands on goes from rank to rank, and from chunk to chunk."""

    handle: Handle
    key: tuple[nn.Module, str]

    @property
    def exchange(self) -> Exchange:
        return self.handle.attention.exchange

    @property
    def hands_on(self) -> bool:
        """Does the state go to another rank, or chunk?"""
        call = self.handle.call
        return self.exchange.ranks > 1 or (call is not None and (call.piece or call.blocks) is not None)

    def mix(
        self, rule: Recurrence, tokens: Sequence[Tensor], weights: Sequence[Tensor], keys: Tensor, values: Tensor,
        block: int = BLOCK,
    ) -> Tensor:  # fmt: skip
        """The output of a recurrence with heads, whose kernel works on so many tokens at a time, by the way that the
        layer takes (`linear.ways`).

        Args:
            tokens: inputs of the recurrence, [B, L, heads or groups, ..].
            keys, values: those of them whose widths the state has, and whose heads the layer has.
        """

        def sent(x: Tensor) -> Sent:
            return Sent(x.shape[2], x.shape[3] if x.ndim == 4 else 1, x.element_size())

        layer = StateLayer(
            keys=keys.shape[3], values=values.shape[3], inputs=[sent(t) for t in tokens], output=sent(values),
            matrix=isinstance(rule, GatedDeltaRule), block=block,
        )  # fmt: skip
        self.handle.recurrences[layer] = None
        way = by_heads if self._way(layer.heads) == "heads" else over_ranks
        return self.run((*tokens, *weights), functools.partial(way, rule, tokens, weights, self.exchange))

    def _way(self, heads: int) -> str:
        """The way over ranks of a layer with so many heads, noted once where the option does not say it."""
        option, ranks, notes = self.handle.options.linear_attention, self.exchange.ranks, self.handle.notes
        way = way_of(option, heads, ranks)
        does = "tokens are exchanged for heads" if way == "heads" else "states are passed"
        note = f"{family_of(self.key[0])}: {heads} heads for {ranks} ranks: {does} (linear_attention={option!r})"
        if ranks > 1 and way != option and note not in notes:
            notes.append(note)
            log.log(logging.INFO if option == "auto" else logging.WARNING, note)
        return way

    def run(self, inputs: Sequence[Tensor], over: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """The output of `over` (documents, start=, first=, length=) for the rows that run now."""
        call = self.handle.call
        if call is None:
            raise ValueError(
                "call the model that apply() was given, not a part of it: only the model gets documents and labels"
            )

        left: dict[str, Any] = {} if call.saved is None else call.saved.left_by(self.key)
        known = left.setdefault("known", {})

        def step(start: Tensor | None, first: int, length: int | None) -> tuple[Tensor, Tensor]:
            return over(call.documents, start=start, first=first, length=length, known=known)

        chunks = call.piece or call.blocks
        if chunks is None:
            return step(None, 0, None)[0]
        if "call" not in left:  # a recompute inside a block is that of the first pass
            chunks.calls[self.key] += 1
            left["call"] = chunks.calls[self.key]
        return chunks.carry((*self.key, left["call"]), step, inputs)


def _in_order(weights: Sequence[Tensor]) -> list[Tensor]:
    """Views of weights, from which gradients reach the weights in one order, by whichever way the layer runs.

    Replicas may take different ways: one with a single block hands no state on. ZeRO-2 puts gradients into its buckets
    as they arrive and reduces what lies at the same place on all ranks: where two orders differ, it would add up
    gradients of different weights. Autograd runs the views' nodes, made here one after the other, in that order.
    """
    return [w.view_as(w) for w in weights]


def _convolution(
    part: _Part, theirs: Callable[..., Tensor], hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    weight, *more = _in_order([t for t in (weight, bias) if t is not None])
    bias = more[0] if more else None

    def convolve(x: Tensor) -> Tensor:
        return theirs(x, weight, bias, activation=activation)

    over = functools.partial(causal_convolution, convolve, hidden_states, weight.shape[-1], part.exchange)
    return part.run((hidden_states, weight, *more), over)


def _gated_delta_rule(
    part: _Part, theirs: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    def run(tensors: Sequence[Tensor], **how: Any) -> Any:
        q, k, v, g, beta = tensors
        return theirs(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **how)

    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
        return run(tensors, initial_state=initial_state, output_final_state=True)

    def packed(*tensors: Tensor, documents: Packed) -> Tensor:
        return run(tensors, initial_state=None, output_final_state=False, cu_seqlens=documents.offsets)[0]

    rule = GatedDeltaRule(kernel, packed=packed if takes(theirs, "cu_seqlens") else None)
    return part.mix(rule, (query, key, value, g, beta), (), key, value), None


def _mamba2(
    part: _Part, theirs: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    chunk_size: int, D: Tensor, dt_bias: Tensor, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> Tensor:  # fmt: skip
    def run(tensors: Sequence[Tensor], **how: Any) -> Any:
        x, dt, B, C, A, D, dt_bias = tensors
        return theirs(
            x, dt, A, B, C, chunk_size=chunk_size, D=D, z=None, dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=dt_limit, **how,
        )  # fmt: skip

    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
        return run(tensors, initial_states=initial_state, return_final_states=True)

    def packed(*tensors: Tensor, documents: Packed) -> Tensor:
        return run(tensors, initial_states=None, return_final_states=False, seq_idx=documents.index)

    def decay(*tensors: Tensor) -> Tensor:
        _, dt, _, _, A, _, dt_bias = tensors
        step = dt + dt_bias.to(dt.dtype)
        step = (nn.functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        return (step.to(torch.promote_types(step.dtype, A.dtype)) * A).sum(1)[..., None, None]

    tokens, weights = (hidden_states, dt, B, C), _in_order((A, D, dt_bias))
    rule = Recurrence(kernel, decay, packed if takes(theirs, "seq_idx") else None)
    return part.mix(rule, tokens, weights, B, hidden_states, chunk_size)


def _mamba1(
    part: _Part, theirs: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor, z: Tensor, delta_bias: Tensor, delta_softplus: bool = False, return_last_state: bool = False, **how: Any,
) -> Tensor:  # fmt: skip
    def scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (t.transpose(1, 2) for t in (x, dt, B, C))
        out, state = theirs(
            x, dt, A, B, C, D=D, z=None, delta_bias=bias, delta_softplus=delta_softplus, return_last_state=True, **how
        )
        return out.transpose(1, 2), state

    tokens, weights = [t.transpose(1, 2) for t in (hidden_states, dt, B, C)], _in_order((A, D, delta_bias))
    rule = SelectiveScan(scan, delta_softplus, part.hands_on)  # it has no heads: its state is passed
    out = part.run((*tokens, *weights), functools.partial(over_ranks, rule, tokens, weights, part.exchange))
    return out.transpose(1, 2) * nn.functional.silu(z)


def _lightning(part: _Part, mixer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The forward of lightning attention (MiniMax-01, arXiv 2501.08313), by its own modules."""
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
    qkv = qkv.reshape(*hidden_states.shape[:2], -1, 3 * mixer.head_dim)

    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, slopes = tensors
        return decayed_attention(q, k, v, slopes, mixer.block_size, initial_state)

    def decay(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return (-slopes * q.shape[1]).expand(q.shape[0], -1)[..., None, None]

    tokens = _, k, v = qkv.split(mixer.head_dim, 3)
    out = part.mix(Recurrence(kernel, decay), tokens, (mixer.slope_rate.flatten(),), k, v, mixer.block_size)
    out = mixer.norm(out.flatten(2))
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * out), None


def _not_fused(*_: Any, **__: Any) -> None:
    """Convolution, scan, norm and projection in one kernel: it takes no state, and transformers goes on without it."""


OURS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: _convolution,
    GATED_DELTA: _gated_delta_rule,
    KDA: _gated_delta_rule,
    MAMBA1: _mamba1,
    MAMBA1_FUSED: _not_fused,
    MAMBA2: _mamba2,
    MAMBA2_FUSED: _not_fused,
}
"""What takes the place of each function: (the part, the function, *its arguments)."""
