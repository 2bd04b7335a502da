"""A decoder layer streamed in row chunks, with its keys and values resident: working memory of O(chunk).

Shape legend: B batch, S sequence, P ranks, L = S / P rows of this rank, C rows of a chunk, H query heads, K key/value
heads, D head width, E model width. Everything token-wise in a layer (norms, projections, RoPE, MLP, residual) needs
only its own rows; attention needs the keys and values of all rows before. So the layer runs chunk by chunk over one
growing set of keys and values, as a model with a cache generates; beyond its input and output, only these are whole.

Forward makes no graph. Backward first makes the keys and values again (each chunk is left at its attention), then goes
from the last chunk to the first: recompute one with its graph, back-propagate, add what it contributes to the gradients
of earlier keys and values. When a chunk's turn comes, all that later rows contribute to its own is there, and goes on
into its projections. Exact for any length; the last chunk may be shorter. (FPDT, arXiv 2408.16978, chunks attention;
here whole layers are, and keys and values stay on the device.)

With P ranks, rows are dealt out in stripes (`alltoall.stripe`): chunk i of all ranks together is P C consecutive rows
of the sequence, so that its keys are complete when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Documents
from alstlib.offload.host_store import HostStore, Ticket
from alstlib.recompute import GradientSums, Replay, first_order, those_that_train, unchanged
from alstlib.ulysses.attention import UlyssesAttention, gradient_of_sinks, output_with, row_delta
from alstlib.ulysses.head_layouts import Layout


class KeysDone(Exception):
    """Leaves a layer at its attention, once a chunk's keys and values are where they belong. Not seen outside."""


class Resident:
    """Keys and values of one layer's whole sequence in head layout [B, K / P, S, D] (with uneven heads those that this
    rank needs), filled chunk by chunk, and the sums of their gradients (fp32)."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys: list[Tensor] = []
        self.sums: tuple[Tensor, Tensor] | None = None
        self.filled = 0
        """Rows that are in place."""

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Put the next rows of k and v in place."""
        if not self.keys:
            self.keys = [t.new_empty(self.length, *t.shape[:2], t.shape[3]) for t in (k, v)]
        rows = k.shape[2]
        for held, t in zip(self.keys, (k, v)):
            held[self.filled : self.filled + rows].copy_(t.permute(2, 0, 1, 3))
        self.filled += rows

    def until(self, last: int) -> tuple[Tensor, Tensor]:
        """The first `last` rows of keys and values, [B, K / P, last, D]."""
        k, v = (t[:last].permute(1, 2, 0, 3) for t in self.keys)
        return k, v

    def sums_until(self, last: int) -> tuple[Tensor, Tensor]:
        """The same of their gradients; zeros at first."""
        if self.sums is None:
            k, v = self.until(self.length)
            wide = torch.promote_types(k.dtype, torch.float32)
            self.sums = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        return self.sums[0][:, :, :last], self.sums[1][:, :, :last]


@dataclass
class RowChunk:
    """One chunk of one layer in one pass: what its attention is to do."""

    rows: slice
    """Rows of this rank."""
    first: int
    """Its rows of the whole sequence: [first, last)."""
    last: int
    task: Literal["forward", "keys", "recompute"]
    resident: Resident
    keep: bool = False
    kept: list[Tensor] = field(default_factory=list)
    """Output [B, H, C, D] (sequence layout) and logsumexp [B, H / P, P C] (head layout): left by `forward` where `keep`
    says so, taken by `recompute`."""
    calls: int = 0

    def attend(
        self, op: UlyssesAttention, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None,
        documents: Documents = None, **how: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of this chunk: q [B, H, C, D], k [B, K, C, D], v [B, K, C, V] -> [B, H, C, V].

        Args:
            how: scale, window and softcap, as `UlyssesAttention` takes them.

        Raises:
            ValueError: the layer attends more than once.
        """
        self.calls += 1
        if self.calls > 1:
            raise ValueError("chunk: a layer that calls attention more than once cannot be streamed; use chunk=None")
        rule = op.rule(q, k, v, sinks=sinks, **how)
        layout = op.layouts.of(q, k, documents, self.first, self.last, self.resident.length)
        if self.task == "recompute":
            return _ChunkAttention.apply(q, k, v, sinks, op, rule, layout, self)
        if self.task == "keys":
            self.resident.fill(*layout.keys_to_heads(k, v))
            raise KeysDone
        q_heads, k, v = layout.to_heads(q, k, v)
        self.resident.fill(k, v)
        out_heads, lse = self._forward(op, layout, q_heads, rule, sinks)
        out = layout.to_seq(out_heads)
        if self.keep:
            self.kept = [out, lse]
        return out

    def _forward(
        self, op: UlyssesAttention, layout: Layout, q: Tensor, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k, v = self.resident.until(self.last)
        op.forward_calls += self.last == self.resident.length  # once a pass over the whole sequence
        return layout.forward(op.backend_for(q, v, rule), q, k, v, rule, sinks)


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        op: UlyssesAttention,
        rule: Rule,
        layout: Layout,
        piece: RowChunk,
    ) -> Tensor:
        ctx.op, ctx.rule, ctx.layout, ctx.piece = op, rule, layout, piece
        ctx.sinks = None if sinks is None else sinks.detach().clone()
        if piece.resident.filled == piece.first:  # the last chunk: no pass before this one has made its keys
            piece.resident.fill(*layout.keys_to_heads(k, v))
        if piece.kept:
            out, lse = piece.kept
            ctx.held = [q.detach(), out, lse]
            return out.view_as(out)
        (q_heads,) = layout.queries_to_heads(q)
        out_heads, lse = piece._forward(op, layout, q_heads, rule, ctx.sinks)
        ctx.held = [q_heads.detach(), out_heads, lse]
        return layout.to_seq(out_heads)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        op, piece, layout, delta = ctx.op, ctx.piece, ctx.layout, None
        q, out, lse = ctx.__dict__.pop("held")
        if piece.kept and op.exchange.ranks > 1:
            (delta,) = layout.queries_to_heads(row_delta(dout, out))
            q, dout = layout.queries_to_heads(q, dout)
            out = output_with(delta, dout)
        elif not piece.kept:
            (dout,) = layout.queries_to_heads(dout)
        dsinks = gradient_of_sinks(ctx, dout, out, lse, delta)
        (k, v), sums = piece.resident.until(piece.last), piece.resident.sums_until(piece.last)
        backend = op.backend_for(q, v, ctx.rule)
        dq = layout.backward_rows(backend, dout, Attended(q, k, v, out, lse), sums, ctx.rule)
        dk, dv = (t[:, :, piece.first :].to(dq.dtype) for t in sums)
        return (*layout.grads_to_seq(dq, dk, dv), dsinks, None, None, None, None)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """How one call of a layer is streamed.

    Args:
        run: (x [B, C, E], chunk) -> [B, C, E]: the layer on some rows; its attention goes to `RowChunk.attend`.
        chunk: rows of this rank in a chunk.
        ranks: P.
        store: where the layer's input and, with `keep`, attention outputs wait for backward.
        keep: keep attention outputs, so that attention runs forward once.
        params: the layer's weights that train, called again in backward (an engine may swap them).
        accept: looks at what a chunk's recompute returned; where it says False, the chunk is recomputed once more.
        module: the layer, which a recompute runs in the mode (training or evaluation) of the first pass.
    """

    run: Callable[[Tensor, RowChunk], Tensor]
    chunk: int
    ranks: int
    store: HostStore
    keep: bool
    params: Callable[[], Sequence[Tensor]]
    accept: Callable[[Tensor], bool] = lambda out: True
    module: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, L, E] -> [B, L, E], with the same gradients for x and the weights as the layer as a whole."""
        return _Streamed.apply(self, torch.is_grad_enabled(), x, *self.params())

    def chunks(self, rows: int, task: Any) -> list[RowChunk]:
        resident, p = Resident(rows * self.ranks), self.ranks
        bounds = [*range(0, rows, self.chunk), rows]
        return [
            RowChunk(slice(lo, hi), p * lo, p * hi, task, resident, keep=self.keep)
            for lo, hi in itertools.pairwise(bounds)
        ]


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Stream, train: bool, x: Tensor, *_: Tensor) -> Tensor:
        ctx.stream, store, train = stream, stream.store, train and any(ctx.needs_input_grad)
        ctx.replays, ctx.tickets = [], []
        out = torch.empty_like(x)
        for piece in stream.chunks(x.shape[1], "forward"):
            piece.keep &= train
            if train:
                ctx.replays.append(Replay(x.device, stream.module))
            with unchanged(x, stream.module):
                out[:, piece.rows] = stream.run(x[:, piece.rows], piece)
            if piece.kept:
                ctx.tickets.append(store.ticket())
                for t in piece.kept:
                    store.put(ctx.tickets[-1], t)
        if train:  # the input last, as it is wanted first; what is kept comes back in the opposite order
            ctx.input = store.ticket()
            store.put(ctx.input, x)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        stream, store, ticket = ctx.stream, ctx.stream.store, ctx.input
        if ticket is None:
            raise RuntimeError("chunk: backward a second time; what the layer kept is gone after the first")
        ctx.input, tickets = None, ctx.__dict__.pop("tickets")
        (x,) = store.get(ticket, grad.device)
        need_x, needs = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        params = those_that_train(stream.params(), needs)
        sums = GradientSums(params)
        # a copy that came back from the host is ours, and its rows are read for the last time before they are written
        grad_x = (x if store.mode != "none" else torch.empty_like(x)) if need_x else None
        pieces = stream.chunks(x.shape[1], "recompute")
        _keys(stream, x, pieces[:-1], ctx.replays)
        while pieces:
            piece, replay = pieces.pop(), ctx.replays.pop()
            piece.kept = _take(store, tickets, grad.device)
            leaf = x[:, piece.rows].contiguous().detach().requires_grad_(need_x)
            y = _recompute(stream, leaf, piece, replay)
            if not stream.accept(y):
                del y
                piece.calls = 0
                y = _recompute(stream, leaf, piece, replay)
            with replay():
                wanted = [*([leaf] if need_x else []), *params]
                grads = list(torch.autograd.grad(y, wanted, grad[:, piece.rows], allow_unused=True))
            del y, leaf
            if grad_x is not None:
                first = grads.pop(0)
                grad_x[:, piece.rows] = 0 if first is None else first
            sums.add(grads, last=not pieces)
            del piece, grads
        done = iter(sums.done())
        return (None, None, grad_x, *(next(done) if need else None for need in needs))


def _recompute(stream: Stream, leaf: Tensor, piece: RowChunk, replay: Replay) -> Tensor:
    with replay(), torch.enable_grad():
        return stream.run(leaf, piece)


def _keys(stream: Stream, x: Tensor, pieces: Sequence[RowChunk], replays: Sequence[Replay]) -> None:
    """Make the keys and values of these chunks again."""
    for piece, replay in zip(pieces, replays):
        piece.task = "keys"
        with replay():
            try:
                stream.run(x[:, piece.rows], piece)
            except KeysDone:
                pass
            else:
                raise ValueError("chunk: the layer did not call attention; use chunk=None")
        piece.task, piece.calls = "recompute", 0


def _take(store: HostStore, tickets: list[Ticket], device: torch.device) -> list[Tensor]:
    return store.get(tickets.pop(), device) if tickets else []
