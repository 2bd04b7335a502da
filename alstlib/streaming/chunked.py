"""A decoder layer runs in chunks of its rows: working memory is O(chunk), and the rest is on the device or on the host.

Shape legend: B batch, S sequence, P ranks, L = S / P rows of this rank, C rows of a chunk, H query heads, K key/value
heads, D head width, E model width. Everything token-wise in a layer (norms, projections, RoPE, MLP, residual) needs
only its own rows; attention needs the keys and values of all rows before. So the layer runs chunk by chunk over one
growing set of keys and values, as a model with a cache generates; beyond its input and output, only these are whole.

Forward makes no graph. Backward first makes the keys and values again (each chunk is left at its attention), then goes
from the last chunk to the first: recompute one with its graph, back-propagate, add what it contributes to the gradients
of earlier keys and values. When a chunk's turn comes, all that later rows contribute to its own is there, and goes on
into its projections. Exact for any length; the last chunk may be shorter.
A layer with a state hands that on in place of keys and values (`linear.carried`).

Where a layer's tensors of the sequence's length lie is a choice that changes no bit. The input, the output and their
gradients lie on the device, or on the host, from where chunks of them visit the device, copied beside the computation.
So do the keys and values, in pages (`pages`). (FPDT, arXiv 2408.16978, does this for attention; here whole layers are
streamed.)

With P ranks, rows are dealt out in stripes (`alltoall.stripe`): chunk i of all ranks together is P C consecutive rows
of the sequence, so that its keys are complete when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alstlib.kernels import paged
from alstlib.kernels.rule import Rule
from alstlib.kernels.spans import Documents
from alstlib.linear.carried import Carried, Step
from alstlib.offload.checkpoints import Segment
from alstlib.offload.courier import Courier, parts_of, put_part, room_like
from alstlib.offload.host_store import HostStore
from alstlib.recompute import GradientSums, Replay, check_thread, first_order, those_that_train, unchanged
from alstlib.sizing import page_rows
from alstlib.streaming.pages import LayerPages, PageChooser
from alstlib.ulysses.attention import UlyssesAttention, gradient_of_sinks, output_with, row_delta
from alstlib.ulysses.head_layouts import Layout


class KeysDone(Exception):
    """Leaves a layer once a chunk's keys and values, and what it hands on, are where they belong. Not seen outside.

    What comes after attention in a layer (its projection, the MLP) would be computed in vain in this pass. To run on
    with zeros costs 8% of a step's processor time with an untiled MLP, and 17% with a tiled one (Llama of width 512, 4
    layers, 2,048 tokens in chunks of 256, one core, gradients equal), and routers would count their tokens twice. It is
    safe to leave through a model's code: the pass has no graph, what is changed for it (random state, precision, what
    runs now) is put back by context managers, and an engine's hooks are on the layer as a whole, outside of the pass.
    """


@dataclass
class RowChunk:
    """One chunk of one layer in one pass: what its attention is to do."""

    rows: slice
    """Rows of this rank."""
    first: int
    """Its rows of the whole sequence: [first, last)."""
    last: int
    task: Literal["forward", "keys", "recompute"]
    pages: LayerPages
    choices: PageChooser | None = None
    """Which pages its attention sees; None: all."""
    keep: bool = False
    kept: list[Tensor] = field(default_factory=list)
    """Output [B, H, C, D] (sequence layout) and logsumexp [B, H / P, P C] (head layout): left by `forward` where `keep`
    says so, taken by `recompute`."""
    carried: Carried = field(default_factory=Carried)
    calls: Counter[Hashable] = field(default_factory=Counter)
    """How often each of the layer's parts that mix tokens has run: its attention, and those that hand something on."""
    all_calls: int = 1
    """The calls of all these parts in one pass: a pass for keys leaves the layer at the last."""
    choice: paged.Choice | None = None

    @property
    def page(self) -> int:
        """The page in which its keys lie."""
        return (self.last - 1) // self.pages.rows

    def attend(
        self, op: UlyssesAttention, q: Tensor, k: Tensor, v: Tensor, *, layer: int = 0, saved: None = None,
        sinks: Tensor | None = None, documents: Documents = None, **how: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of this chunk: q [B, H, C, D], k [B, K, C, D], v [B, K, C, V] -> [B, H, C, V].

        Args:
            layer, saved: `Blocks.attend` needs them; a chunk knows its layer, and keeps outputs by itself.
            how: scale, window and softcap, as `UlyssesAttention` takes them.

        Raises:
            ValueError: the layer attends more than once.
        """
        if self.calls["attention"]:
            raise ValueError("chunk: a layer that calls attention more than once cannot run in chunks; use chunk=None")
        self.calls["attention"] += 1
        rule = op.rule(q, k, v, sinks=sinks, **how)
        layout = op.layouts.of(q, k, documents, self.first, self.last, self.pages.length)
        if self.choices is not None and rule.window is None and self.task != "keys":
            where = (self.first, self.last, self.pages)
            self.choice = self.choices.of(q.detach(), k.detach(), *where, documents, op.exchange)
        if self.task == "recompute":
            return _ChunkAttention.apply(q, k, v, sinks, op, rule, layout, self)
        if self.task == "keys" and self.calls.total() == self.all_calls:
            self.pages.fill(*layout.keys_to_heads(k, v))
            raise KeysDone
        q_heads, k, v = layout.to_heads(q, k, v)
        self.pages.fill(k, v)
        out_heads, lse = self.forward(op, layout, q_heads, v.shape[-1], rule, sinks)
        out = layout.to_seq(out_heads)
        if self.keep and self.task == "forward":
            self.kept = [out, lse]
        return out

    def carry(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        """The output for this chunk of a call of a part that hands something on; `key` is of the call, and `inputs`
        are the step's."""
        rows, graph = (self.first, self.last), self.task == "recompute"
        forget = self.task == "forward"
        out = self.carried.run(key, step, inputs, rows, self.pages.length, graph=graph, forget=forget)
        if self.task == "keys" and self.calls.total() == self.all_calls:
            raise KeysDone
        return out

    def forward(
        self, op: UlyssesAttention, layout: Layout, q: Tensor, width: int, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of this chunk's queries, in head layout, over all pages before and in it."""
        op.forward_calls += self.last == self.pages.length  # once a pass over the whole sequence
        parts = layout.parts(q, self.first, self.last)
        backend = op.backend_for(q, width, rule)
        return paged.forward(backend, q, width, self.pages, self.page, parts, rule, sinks, self.choice)


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
        if piece.pages.filled == piece.first:  # the last chunk: no pass before this one has made its keys
            piece.pages.fill(*layout.keys_to_heads(k, v))
        ctx.width = v.shape[-1]
        if piece.kept:
            out, lse = piece.kept
            ctx.held = [q.detach(), out, lse]
            return out.view_as(out)
        (q_heads,) = layout.queries_to_heads(q)
        out_heads, lse = piece.forward(op, layout, q_heads, v.shape[-1], rule, ctx.sinks)
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
        backend, parts = op.backend_for(q, ctx.width, ctx.rule), layout.parts(q, piece.first, piece.last)
        dq, page = paged.backward(backend, dout, q, out, lse, piece.pages, piece.page, parts, ctx.rule, piece.choice)
        dk, dv = piece.pages.own(page, piece.first, piece.last, dq.dtype)
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
        device: where chunks run; None: where x is.
        travels: the input, the output and their gradients lie on the host, and chunks of them visit the device.
        kv_on_host: keys, values and the sums of their gradients lie there too.
        choices: which pages of keys this call's chunks see, where attention is sparse; None: all.
        tokenwise: the layer mixes no tokens.
        segment: consecutive layers of which only the first keeps its input (with `travels`); None: this one does.
        whole: calls a function of the layer's input in another layer's backward, with weights that an engine put away.
    """

    run: Callable[[Tensor, RowChunk], Tensor]
    chunk: int
    ranks: int
    store: HostStore
    keep: bool
    params: Callable[[], Sequence[Tensor]]
    accept: Callable[[Tensor], bool] = lambda out: True
    module: nn.Module | None = None
    device: torch.device | None = None
    travels: bool = False
    kv_on_host: bool = False
    choices: PageChooser | None = None
    tokenwise: bool = False
    segment: Segment | None = None
    whole: Callable[[Tensor, Callable[[], Tensor]], Tensor] = lambda x, run: run()

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, L, E] -> [B, L, E], with the same gradients for x and the weights as the layer as a whole."""
        return _Streamed.apply(self, torch.is_grad_enabled(), x, *self.params())

    def couriers(self, x: Tensor) -> tuple[Courier, Courier | None]:
        """What does the work, and what brings chunks of the input and takes those of the output."""
        courier = Courier(self.store, self.device or x.device)
        return courier, (courier if self.travels else None)

    def chunks(self, rows: int, task: Any, courier: Courier) -> list[RowChunk]:
        p, length = self.ranks, rows * self.ranks
        page = None if self.choices is None else self.choices.page
        page = page_rows(min(self.chunk, rows) * p, length) if page is None else page
        pages, carried = LayerPages(length, page, courier if self.kv_on_host else None), Carried()
        bounds = [*range(0, rows, self.chunk), rows]
        return [
            RowChunk(slice(lo, hi), p * lo, p * hi, task, pages, self.choices, self.keep, carried=carried)
            for lo, hi in itertools.pairwise(bounds)
        ]

    def without_graph(
        self, x: Tensor, around: Callable[[int], AbstractContextManager[None]], done: Callable[[RowChunk], None]
    ) -> Tensor:
        """Run the layer chunk by chunk: the i-th inside `around(i)`, and tell `done` of each that has run."""
        courier, way = self.couriers(x)
        pieces, out = self.chunks(x.shape[1], "forward", courier), room_like(way, x)
        for i, (piece, (part,)) in enumerate(zip(pieces, parts_of(way, _rows(pieces), x))):
            with around(i), unchanged(part, self.module):
                put_part(way, out, piece.rows, self.run(part, piece))
            done(piece)
        courier.finish()
        return out


@dataclass
class _Layer:
    """One streamed layer of a segment."""

    stream: Stream
    replays: list[Replay]
    held: Any
    """The input of the segment's first layer: the host tensor, where hidden states lie there, or a ticket for it."""

    def input(self, device: torch.device) -> Tensor:
        held, self.held = self.held, None
        return held if self.stream.travels else self.stream.store.get(held, device)[0]

    def again(self, x: Tensor, device: torch.device) -> Tensor:
        run = functools.partial(self.stream.without_graph, x, lambda i: self.replays[i](), lambda _: None)
        return self.stream.whole(x, run)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Stream, train: bool, x: Tensor, *_: Tensor) -> Tensor:
        store, train = stream.store, train and any(ctx.needs_input_grad)
        ctx.tickets, ctx.calls, ctx.device = [], 0, stream.device or x.device
        replays: list[Replay] = []

        @contextlib.contextmanager
        def noted(_: int) -> Iterator[None]:
            if train:
                replays.append(Replay(ctx.device, stream.module))
            yield

        def keep(piece: RowChunk) -> None:
            ctx.calls = piece.calls.total()
            if train and piece.kept:
                ctx.tickets.append(store.ticket())
                while piece.kept:  # on the device only until they wait elsewhere
                    store.put(ctx.tickets[-1], piece.kept.pop(0))

        if not train:
            stream = replace(stream, keep=False)
        out = stream.without_graph(x, noted, keep)
        if train:
            ctx.segment = stream.segment or Segment()
            held: Any
            if stream.travels:
                held = None if ctx.segment.members else x.detach()
            else:  # the input last, as it is wanted first; what is kept comes back in the opposite order
                held = store.ticket()
                store.put(held, x)
            # a layer that knows its segment would be a circle: tensors go when the graph goes
            ctx.index = ctx.segment.add(_Layer(replace(stream, segment=None), replays, held), out)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, layer = ctx.segment.take(ctx.index, ctx.device)
        tickets, stream, replays = ctx.__dict__.pop("tickets"), layer.stream, layer.replays
        store = stream.store
        if stream.travels:
            check_thread(ctx.device)
        need_x, needs = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        params, (courier, way) = those_that_train(stream.params(), needs), stream.couriers(grad)
        sums = GradientSums(params)
        if not need_x:
            grad_x = None
        elif stream.travels or store.mode == "none":
            grad_x = room_like(way, x)
        else:  # a copy that came back from the host is ours, and read for the last time before it is written
            grad_x = x
        pieces = stream.chunks(x.shape[1], "recompute", courier)
        _keys(stream, way, x, [] if stream.tokenwise else pieces[:-1], replays, ctx.calls)
        for part, upstream in parts_of(way, _rows(pieces[::-1]), x, grad):
            piece, replay = pieces.pop(), replays.pop()
            piece.kept = store.get(tickets.pop(), courier.device) if tickets else []
            leaf = part.contiguous().detach().requires_grad_(need_x)
            y = _recompute(stream, leaf, piece, replay)
            if not stream.accept(y):
                del y
                piece.calls.clear()
                y = _recompute(stream, leaf, piece, replay)
            with replay():
                wanted = [*([leaf] if need_x else []), *params]
                grads = list(torch.autograd.grad(y, wanted, upstream, allow_unused=True))
            del y, part, upstream
            if grad_x is not None:
                first = grads.pop(0)
                put_part(way, grad_x, piece.rows, torch.zeros_like(leaf) if first is None else first)
                del first
            sums.add(grads, last=not pieces)
            del piece, grads, leaf
        courier.finish()
        return None, None, grad_x, *sums.done(needs)


def _rows(pieces: Sequence[RowChunk]) -> list[slice]:
    return [piece.rows for piece in pieces]


def _recompute(stream: Stream, leaf: Tensor, piece: RowChunk, replay: Replay) -> Tensor:
    with replay(), torch.enable_grad():
        return stream.run(leaf, piece)


def _keys(
    stream: Stream, way: Courier | None, x: Tensor, pieces: Sequence[RowChunk], replays: Sequence[Replay], calls: int
) -> None:
    """Make the keys and values of these chunks again, and what they hand on."""
    for piece, replay, (part,) in zip(pieces, replays, parts_of(way, _rows(pieces), x)):
        piece.task, piece.all_calls = "keys", calls
        with replay():
            try:
                stream.run(part, piece)
            except KeysDone:
                pass
            else:
                raise ValueError("chunk: the layer did not call attention, so it cannot run in chunks; use chunk=None")
        piece.task = "recompute"
        piece.calls.clear()
