"""Ulysses attention: exchange, attention over whole sequences of some heads, and exchange back (ALST, section 3.2).

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D key width, V value width.

One autograd function holds the exchange and the kernel, so that backward moves only what it needs: with attention
recomputed under checkpointing it keeps q, k, v, output and logsumexp in head layout and exchanges dO, dq, dk, dv. With
the output *saved* by the first pass (`Saved`), the recompute runs neither kernel nor exchange, and backward exchanges
q, k, v and dO together. The saved output itself is not exchanged: a kernel's backward reads it only through
delta = rowsum(dO * O), one number for each token and head, and O' = delta / |dO|^2 * dO has the same delta.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alstlib.base.mesh import SPContext
from alstlib.base.recompute import Saved, first_order, sum_dtype
from alstlib.base.sizing import default_tile, kernel_device
from alstlib.base.types import OutputAndLse
from alstlib.kernels.attention import query_tiles
from alstlib.kernels.backends import Backend, choose_backend, of_user
from alstlib.kernels.paged import add_sinks, sinks_backward
from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Documents, Offsets, once
from alstlib.ulysses.alltoall import Exchange
from alstlib.ulysses.head_layouts import Layout, layout_of
from alstlib.ulysses.head_split import Sample


class Way(NamedTuple):
    """How a call is computed: the same in all layers of a kind and in all passes of a step."""

    backend: Backend
    rule: Rule
    layout: Layout


class UlyssesAttention:
    """Causal attention over a sequence of which each rank of an SP group holds a slice; any number of heads works.

    Args:
        ctx: the mesh; with sp = 1 this is plain attention.
        attention: `sdpa`, `auto`, the name of a kernel in `backends.BACKENDS`, or a function of the user's own
            (`kernels.user_attention` has the contract).
        split_heads: also divide the tokens of a head among ranks where each rank could compute whole heads; it serves
            to measure what this costs.
    """

    def __init__(self, ctx: SPContext, attention: str | Callable[..., Any] = "sdpa", split_heads: bool = False) -> None:
        self.exchange, self.split_heads = Exchange(ctx.sp_group), split_heads
        self.attention = attention if isinstance(attention, str) else of_user(attention)
        self._shape: Any = None
        self._undivided = Offsets()
        """Keeps what was chosen for samples of this shape without documents, as the offsets of others do."""
        self.backend_name = ""
        """Name of the kernel that ran last."""
        self.forward_calls = 0
        """Number of times that core attention ran forward."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None,
        softcap: float | None = None, sinks: Tensor | None = None, documents: Documents = None,
        saved: Saved | None = None,
    ) -> Tensor:  # fmt: skip
        """The attention output [B, H, L, V] of this rank's tokens, from q [B, H, L, D], k [B, K, L, D] and
        v [B, K, L, V] of this rank's tokens, after RoPE. Collective over the SP group.

        Args:
            scale: the factor of the scores; None for D ** -0.5.
            window: the number of keys that a query attends to, its own included; None for all keys up to its own.
            softcap: c, with which a score s becomes c * tanh(s / c); None for none.
            sinks: [H], the score of a further key without a value for each head (gpt-oss).
            documents: offsets of the documents in the flattened batch [B * S] of all ranks (`spans.Offsets` keep what
                is found for them, which is made anew for others); None: each sample is one document.
            saved: where a checkpoint's first pass leaves the output, and where its recompute takes it from. In the
                backward of a recompute each tensor is freed as soon as it has been read. Without `saved`, tensors are
                kept as autograd keeps them (and its hooks see them).

        Raises:
            ValueError: the shapes do not belong together, or the kernel cannot run on this device.
        """
        way = self.way(q, k, v, sinks, documents, scale=scale, window=window, softcap=softcap)
        saved = saved or Saved(keep=False)
        self.forward_calls += not saved.replaying
        return CoreAttention.apply(q, k, v, sinks, way.layout, _AllKeys(way, documents), saved)

    def way(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, documents: Documents = None,
        chunk: tuple[int, int] | None = None, length: int | None = None, *, scale: float | None = None,
        window: int | None = None, softcap: float | None = None,
    ) -> Way:  # fmt: skip
        """Kernel, rule and layout of a call, chosen at its first layer and pass (ValueError for what does not belong
        together). `chunk`: its tokens [first, last) of sequences of this length; None: all of them."""
        rule = Rule(q.shape[-1] ** -0.5 if scale is None else float(scale), window, softcap or None)
        length = length or q.shape[2] * self.exchange.ranks
        if documents is None and self._shape != (shape := (q.shape[0], length, q.device)):
            self._shape, self._undivided = shape, Offsets()
        kept = self._undivided if documents is None else documents
        # layers of all rules share a layout; kept by its exchange, because `self` would be a circle
        dealt = self.exchange, self.split_heads, q.shape[:2], q.device, k.shape[1], length, chunk

        def choose() -> Way:
            _check(q, k, v, window, sinks)
            width, capped = max(q.shape[-1], v.shape[-1]), rule.softcap is not None
            heads, sample = (q.shape[1], k.shape[1]), Sample(q.shape[0], length, documents, q.device)
            layout = once(kept, dealt, lambda: layout_of(self.exchange, *heads, sample, chunk, self.split_heads))
            return Way(choose_backend(self.attention, q.device, q.dtype, width, capped), rule, layout)

        key = (*dealt, self.attention, rule, k.shape, v.shape, q.dtype, kernel_device(q.device.type))
        way = once(kept, key, choose)
        self.backend_name = way.backend.name
        return way


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> None:
    like_q = q.ndim == 4 and k.shape == (q.shape[0], k.shape[1], *q.shape[2:]) and v.shape[:3] == k.shape[:3]
    if not like_q or q.shape[1] % k.shape[1] or (sinks is not None and sinks.shape != q.shape[1:2]):
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v, sinks) if t is not None)
        raise ValueError(
            "attention needs q [B, H, L, D], k [B, K, L, D] and v [B, K, L, V], H a multiple of K, and sinks [H] or "
            f"none, got {shapes}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} hides every key; it must be at least 1, or None for no window")


class _AllKeys(NamedTuple):
    """Attention of all tokens of the sequence, whose keys and values are exchanged with the queries."""

    way: Way
    documents: Documents

    def keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return [k, v]

    @property
    def forward(self) -> Callable[..., OutputAndLse]:  # the layout's own: no frame more between a call and a kernel
        backend, rule, layout = self.way
        return functools.partial(layout.forward, backend, rule=rule, cu_seqlens=self.documents)

    def backward(self, dout: Tensor, *kept: Tensor) -> Sequence[Tensor]:
        (backend, rule, layout), documents = self.way, self.documents
        return layout.backward(backend, dout, Attended(*kept), rule=rule, cu_seqlens=documents)


class CoreAttention(torch.autograd.Function):
    """A call of attention: exchange into a layout of heads, attention there, and exchange back.

    What attends there has three methods: `keys(k, v)`, those that are exchanged with the queries, or none where it has
    taken them; `forward(q, *keys)` -> (output, logsumexp), without sinks, the output in q's dtype or wider;
    `backward(dout, q, *keys, output, logsumexp)` -> (dq, dk, dv).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Layout, call: Any, saved: Saved
    ) -> Tensor:  # fmt: skip
        ctx.layout, ctx.call, ctx.release = layout, call, saved.stage == "graph"
        ctx.sinks = None if sinks is None else sinks.detach().clone()  # an engine may take the parameter away
        ctx.from_saved, keys = saved.replaying, call.keys(k, v)
        if saved.replaying:
            out, lse = saved.take()
            _keep(ctx, q, *keys, out, lse)
            return out.view_as(out)  # a tensor of its own: autograd must not mark the saved one as an output
        q, *keys = layout.swap([q], keys)
        with torch.autocast(q.device.type, enabled=False):  # it would take back the precision in which kernels sum
            made, lse = call.forward(q, *keys)
            add_sinks(layout.own, made, lse, ctx.sinks)
        made = made.to(q.dtype)
        (out,) = layout.swap_back(made)
        if saved.active:
            saved.tensors.append((out, lse))
        if any(ctx.needs_input_grad):
            _keep(ctx, q, *keys, made, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        layout, delta = ctx.layout, None
        q, *keys, out, lse = ctx.__dict__.pop("kept") if ctx.release else ctx.saved_tensors
        if not ctx.from_saved:
            (dout,) = layout.swap([dout])
        elif layout.exchange.ranks > 1:
            (delta,) = layout.swap([delta_of(dout, out)])
            q, dout, *keys = layout.swap([q, dout], keys)
            out = output_with(delta, dout)
        dsinks = None
        if ctx.sinks is not None and ctx.needs_input_grad[3]:  # this rank's share
            dsinks = sinks_backward(layout.own, delta_of(dout, out) if delta is None else delta, lse, ctx.sinks)
        with torch.autocast(dout.device.type, enabled=False):
            grads = ctx.call.backward(dout, q, *keys, out, lse)
        del dout, q, keys, out, lse, delta
        return (*layout.swap_back(*grads), dsinks, None, None, None)


def _keep(ctx: Any, *tensors: Tensor) -> None:
    if ctx.release:
        ctx.kept = [t.detach() for t in tensors]  # detached: the output itself would keep the graph alive
    else:
        ctx.save_for_backward(*tensors)


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out) in fp32, [B, H, S, 1]: all that a kernel's backward reads of its output."""
    wide = sum_dtype(dout)
    delta = dout.new_empty(*dout.shape[:3], 1, dtype=wide)
    for at in query_tiles(dout, default_tile(dout.shape[1] * dout.shape[3], 4, dout.device)):
        torch.sum(dout[at].to(wide) * out[at], -1, keepdim=True, out=delta[at])
    return delta


def output_with(delta: Tensor, dout: Tensor) -> Tensor:
    """A stand-in output whose rowsum(dO * O) is `delta`; zero where dO is (then delta is zero too)."""
    made = torch.empty_like(dout)
    for at in query_tiles(dout, default_tile(dout.shape[1] * dout.shape[3], 4, dout.device)):
        part = dout[at].to(delta.dtype)
        norm = part.square().sum(-1, keepdim=True)  # not vecdot, which autocast would lower
        made[at] = part * torch.where(norm > 0, delta[at] / norm, 0.0)
    return made
