"""A decoder layer runs in chunks of its tokens: working memory is O(chunk), and the rest is on the device or on the
host.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, C tokens of a chunk, H query heads, K
key/value heads, D head width, E model width. Everything token-wise in a layer (norms, projections, RoPE, MLP, residual)
needs only its own tokens; attention needs the keys and values of all tokens before. So the layer runs chunk by chunk
over one growing set of keys and values, as a model with a cache generates; beyond its input and output, only these are
whole.

Forward makes no graph. Backward first makes the keys and values again (each chunk is left at its attention), then goes
from the last chunk to the first: recompute one with its graph, back-propagate, add what it contributes to the gradients
of earlier keys and values. When a chunk's turn comes, all that later tokens contribute to its own is there, and goes on
into its projections. Exact for any length; the last chunk may be shorter.
A layer with a state hands that on in place of keys and values (`streaming.carried`).

Where a layer's tensors of the sequence's length lie is a choice that changes no bit. The input, the output and their
gradients lie on the device, or on the host, from where chunks of them visit the device, copied beside the computation.
So do the keys and values, in pages (`pages`). (FPDT, arXiv 2408.16978, does this for attention; here whole layers are
streamed.)

With P ranks, tokens are dealt out in stripes (`alltoall.stripe`): chunk i of all ranks together is P C consecutive
tokens of the sequence, so that its keys are complete when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.recompute import (
    GradientSums,
    Replay,
    Saved,
    Strays,
    check_thread,
    first_order,
    those_that_train,
    trained,
    unchanged,
)
from alstlib.base.sizing import page_keys
from alstlib.base.types import OutputAndLse
from alstlib.kernels import paged
from alstlib.kernels.spans import Documents
from alstlib.offload.checkpoints import Segment
from alstlib.offload.courier import Courier, parts_of, put_part, room_like
from alstlib.offload.storage import Storage
from alstlib.streaming.carried import Carried, Step
from alstlib.streaming.pages import LayerPages, PageChooser
from alstlib.ulysses.attention import CoreAttention, UlyssesAttention

STRAY = (
    "chunk: a weight that no layer owns, such as a vector that a hook adds, would get no gradient in a layer in chunks "
    "whose own weights and input need none; let a weight of that layer train, or use chunk=None"
)


class KeysDone(Exception):
    """Leaves a layer once a chunk's keys and values, and what it hands on, are where they belong. Not seen outside.

    What comes after attention in a layer (its projection, the MLP) would be computed in vain in this pass. To run on
    with zeros costs 8% of a step's processor time with an untiled MLP, and 17% with a tiled one (Llama of width 512, 4
    layers, 2,048 tokens in chunks of 256, one core, gradients equal), and routers would count their tokens twice. It is
    safe to leave through a model's code: the pass has no graph, what is changed for it (random state, precision, what
    runs now) is put back by context managers, and an engine's hooks are on the layer as a whole, outside of the pass.
    """


@dataclass
class LayerChunk:
    """One chunk of one layer in one pass: what its attention is to do."""

    tokens: slice
    """Its tokens in this rank's slice."""
    first: int
    """Its tokens in the whole sequence: [first, last)."""
    last: int
    graph: bool
    """Whether its backward follows."""
    pages: LayerPages
    choices: PageChooser | None = None
    """Which pages its attention sees; None: all."""
    saved: Saved = field(default_factory=lambda: Saved(keep=False))
    """Where the first pass leaves its output, and where the recompute takes it from."""
    carried: Carried = field(default_factory=Carried)
    left: list[Tensor] = field(default_factory=list)
    """Tensors [B, C, ...] that the layer has made of it for other layers, with gradients that come back."""
    calls: Counter[Hashable] = field(default_factory=Counter)
    """How often each of the layer's parts that mix tokens has run: its attention, and those that hand something on."""
    leaves_at: int = 0
    """After so many calls of these parts, all of them, a pass for keys leaves the layer; 0: no such pass."""

    def attend(
        self, op: UlyssesAttention, q: Tensor, k: Tensor, v: Tensor, *, layer: int = 0, saved: None = None,
        sinks: Tensor | None = None, documents: Documents = None, **how: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of this chunk: q [B, H, C, D], k [B, K, C, D], v [B, K, C, V] -> [B, H, C, V].

        Args:
            layer, saved: `Blocks.attend` needs them; a chunk knows its layer, and where it keeps its output.
            how: scale, window and softcap, as `UlyssesAttention` takes them.

        Raises:
            ValueError: the layer attends more than once.
        """
        if self.calls["attention"]:
            raise ValueError("chunk: a layer that calls attention more than once cannot run in chunks; use chunk=None")
        self.calls["attention"] += 1
        self.op, self.width = op, v.shape[-1]
        self.way = op.way(q, k, v, sinks, documents, (self.first, self.last), self.pages.length, **how)
        self.page, self.parts = self.pages.find(self.first)[0], self.way.layout.own
        if self.choices is not None and self.way.rule.window is None and not self.leaves_at:
            where = (self.first, self.last, self.pages)
            self.parts = self.choices.of(self.parts, q.detach(), k.detach(), *where, documents, op.exchange)
        if self.calls.total() == self.leaves_at:
            self.pages.fill(*self.way.layout.swap([], [k, v]))
            raise KeysDone
        return CoreAttention.apply(q, k, v, sinks, self.way.layout, self, self.saved)

    # ----- what `CoreAttention` calls: the chunk's queries attend to all pages before and in it

    def keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        if not self.graph:
            return [k, v]
        if self.pages.filled == self.first:  # the last chunk: no pass before has made its keys
            self.pages.fill(*self.way.layout.swap([], [k, v]))
        return []

    def forward(self, q: Tensor, *new: Tensor) -> OutputAndLse:
        (backend, rule, _), pages = self.way, self.pages
        if new:
            pages.fill(*new)
        self.op.forward_calls += self.last == pages.length  # once a pass over the whole sequence
        return paged.forward(backend, q, self.width, pages, self.page, self.parts, rule)

    def backward(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
        (backend, rule, _), pages = self.way, self.pages
        dq, page = paged.backward(backend, dout, q, out, lse, pages, self.page, self.parts, rule)
        return dq, *pages.own(page, self.first, self.last, dq.dtype)

    # ----- parts that hand something on

    def carry(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        """The output for this chunk of a call of a part that hands something on; `key` is of the call, and `inputs`
        are the step's."""
        place, forget = (self.first, self.last), not (self.graph or self.leaves_at)
        out = self.carried.run(key, step, inputs, place, self.pages.length, graph=self.graph, forget=forget)
        if self.calls.total() == self.leaves_at:
            raise KeysDone
        return out


@dataclass(kw_only=True)
class Stream:
    """One call of a layer that is streamed: how, and from its first pass to its backward what it keeps.

    Args:
        run: (x [B, C, E], chunk, *those beside [B, C, ...]) -> [B, C, E]: the layer on some tokens; its attention goes
            to `LayerChunk.attend`, and what it makes for other layers to `LayerChunk.left`.
        chunk: tokens of this rank in a chunk.
        ranks: P.
        device: where chunks run.
        store: where the layer's input and, with `keep`, attention outputs wait for backward.
        keep: keep attention outputs, so that attention runs forward once.
        accept: looks at what a chunk's recompute returned; where it says False, the chunk is recomputed once more.
        module: the layer, whose weights may train; a recompute runs it in the mode (training or evaluation) of the
            first pass.
        travels: the input, the output and their gradients lie on the host, and chunks of them visit the device.
        kv_on_host: keys, values and the sums of their gradients lie there too.
        choices: which pages of keys this call's chunks see, where attention is sparse; None: all.
        tokenwise: the layer mixes no tokens.
        whole: calls a function of the module and its input in another layer's backward, with weights that an engine has
            put away.
    """

    run: Callable[..., Tensor]
    chunk: int
    ranks: int
    device: torch.device
    store: Storage
    keep: bool
    module: nn.Module
    accept: Callable[[Any], bool] = lambda out: True
    travels: bool = False
    kv_on_host: bool = False
    choices: PageChooser | None = None
    tokenwise: bool = False
    whole: Callable[[Any, Tensor, Callable[[], Tensor]], Tensor] = lambda module, x, run: run()
    replays: list[Replay] = field(default_factory=list)
    """What the recompute of each chunk takes over from its first pass."""
    tickets: list[Any] = field(default_factory=list)
    """The tickets of each chunk's attention outputs in the store."""
    beside: list[Tensor] = field(default_factory=list)
    """Further inputs [B, L, ...] with gradients; they stay where they are."""
    left: list[Tensor] = field(default_factory=list)
    """What the first pass has made for other layers [B, L, ...]; on the device."""
    calls: int = 0
    """The calls of parts that mix tokens, in one chunk."""
    held: Any = None
    """The input of a segment's first layer: parked in the store, where hidden states lie on the host, or a ticket."""

    def __call__(self, x: Tensor, segment: Segment | None = None, beside: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """x [B, L, E] -> [B, L, E], and what the layer has made for other layers; with the same gradients for x, for
        those beside it and for the weights as the layer as a whole.

        Args:
            segment: consecutive layers of which, where hidden states travel, only the first keeps its input.
            beside: further inputs [B, L, ...] that need gradients.
        """
        self.beside = [t.detach() for t in beside]
        # a layer that knew its segment would be a circle: tensors go when the graph goes
        return _Streamed.apply(self, segment or Segment(), torch.is_grad_enabled(), x, *beside, *trained(self.module))

    def chunks(self, tokens: int, graph: bool, courier: Courier) -> list[LayerChunk]:
        p, length = self.ranks, tokens * self.ranks
        page = (self.choices.page if self.choices else None) or page_keys(min(self.chunk, tokens) * p, length)
        starts = [*range(0, length, page), length]
        pages, carried = LayerPages(length, starts, courier if self.kv_on_host else None), Carried()
        bounds = [*range(0, tokens, self.chunk), tokens]
        return [
            LayerChunk(slice(lo, hi), p * lo, p * hi, graph, pages, self.choices, carried=carried)
            for lo, hi in itertools.pairwise(bounds)
        ]

    def without_graph(self, x: Tensor, first: bool = False, frozen: bool = False) -> Tensor:
        """Run the layer chunk by chunk, for the `first` time or as it ran then.

        Args:
            frozen: neither its inputs nor its weights need a gradient.

        Raises:
            ValueError: something in a frozen layer needs one all the same.
        """
        courier = Courier(self.store, self.device)
        way = courier if self.travels else None
        pieces, out = self.chunks(x.shape[1], False, courier), room_like(way, x)
        for i, (piece, (part,)) in enumerate(zip(pieces, parts_of(way, _slices(pieces), x))):
            if first:
                self.replays.append(Replay(self.device, self.module))
                piece.saved.keep = self.keep
            with contextlib.nullcontext() if first else self.replays[i](), unchanged(part, self.module):
                with torch.set_grad_enabled(frozen):  # then it makes no graph
                    y = self.run(part, piece, *self.beside_of(piece))
                if y.requires_grad:
                    raise ValueError(STRAY)
                put_part(way, out, piece.tokens, y)
                del y
            made, piece.left = piece.left, []
            if first:
                self.left = self.left or [t.new_empty(t.shape[0], x.shape[1], *t.shape[2:]) for t in made]
                for whole, t in zip(self.left, made):
                    whole[:, piece.tokens] = t
            self.calls = piece.calls.total()
            if kept := piece.saved.leave():
                self.tickets.append(self.store.ticket(part=True))
                while kept:  # on the device only until they wait elsewhere
                    self.store.put(self.tickets[-1], kept.pop(0))
        courier.finish()
        return out

    def beside_of(self, piece: LayerChunk) -> list[Tensor]:
        """The chunk's part of the further inputs, on the device."""
        return [t[:, piece.tokens].to(self.device, non_blocking=True) for t in self.beside]

    # ----- as a member of its segment

    def input(self, device: torch.device) -> Tensor:
        held, self.held = self.held, None
        return self.store.unpark(held, device) if self.travels else self.store.get(held, device)[0]

    def again(self, x: Tensor, device: torch.device) -> Tensor:
        return self.whole(self.module, x, functools.partial(self.without_graph, x))


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Stream, segment: Segment, train: bool, x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        frozen = train and not any(ctx.needs_input_grad)
        train = train and not frozen
        stream.keep = stream.keep and train
        out = stream.without_graph(x, first=True, frozen=frozen)
        if train:
            if not stream.travels:  # the input last, as it is wanted first; what is kept comes back in opposite order
                stream.held = stream.store.ticket()
                stream.store.put(stream.held, x)
            elif not segment.members:
                stream.held = stream.store.park(x)
            ctx.device, ctx.segment, ctx.index = stream.device, segment, segment.add(stream, out)
        left, stream.left = stream.left, []
        return out, *left

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, *left: Tensor) -> tuple[Any, ...]:
        x, stream = ctx.segment.take(ctx.index, ctx.device)
        store, tickets, replays = stream.store, stream.tickets, stream.replays
        if stream.travels:
            check_thread(ctx.device)
        needs = ctx.needs_input_grad[4 + len(stream.beside) :]
        params, courier = those_that_train(trained(stream.module), needs), Courier(store, ctx.device)
        way = courier if stream.travels else None
        sums, strays = GradientSums(params), Strays()
        more: list[Any] = [None] * len(stream.beside)
        # a copy that came back from the host is ours, and read for the last time before it is written
        grad_x = room_like(way, x) if stream.travels or store.mode == "none" else x
        pieces = stream.chunks(x.shape[1], True, courier)
        _keys(stream, way, x, [] if stream.tokenwise else pieces[:-1])
        for part, upstream in parts_of(way, _slices(pieces[::-1]), x, grad):
            piece, replay = pieces.pop(), replays.pop()
            piece.saved.rewind(store.get(tickets.pop(), courier.device) if tickets else [])
            leaf = part.contiguous().detach().requires_grad_()
            beside = [t.detach().requires_grad_() for t in stream.beside_of(piece)]
            y = _recompute(stream, [leaf, *beside], piece, replay)
            if not stream.accept([y, *piece.left]):
                del y
                piece.calls.clear()
                y = _recompute(stream, [leaf, *beside], piece, replay)
            ends, grads = [y, *piece.left], [upstream, *(g[:, piece.tokens] for g in left)]
            with replay():
                grads = strays.gradients_of(ends, [leaf, *beside, *params], grads)
            del y, ends, part, upstream
            put_part(way, grad_x, piece.tokens, grads.pop(0))
            for i, t in enumerate(stream.beside):
                if (g := grads.pop(0)) is not None:
                    more[i] = torch.zeros_like(t) if (known := more[i]) is None else known
                    more[i][:, piece.tokens] = g
            sums.add(grads, last=not pieces)
            del piece, grads, leaf, beside
        strays.add()
        courier.finish()
        return None, None, None, grad_x, *more, *sums.done(needs)


def _slices(pieces: Sequence[LayerChunk]) -> list[slice]:
    return [piece.tokens for piece in pieces]


def _recompute(stream: Stream, leaves: Sequence[Tensor], piece: LayerChunk, replay: Replay) -> Tensor:
    with replay(), torch.enable_grad():
        return stream.run(leaves[0], piece, *leaves[1:])


def _keys(stream: Stream, way: Courier | None, x: Tensor, pieces: Sequence[LayerChunk]) -> None:
    """Make the keys and values of these chunks again, and what they hand on."""
    for piece, replay, (part,) in zip(pieces, stream.replays, parts_of(way, _slices(pieces), x)):
        piece.graph, piece.leaves_at = False, stream.calls
        with replay(), contextlib.suppress(KeysDone):
            stream.run(part, piece, *stream.beside_of(piece))
            raise ValueError("chunk: the layer did not call attention, so it cannot run in chunks; use chunk=None")
        piece.graph, piece.leaves_at = True, 0
        piece.calls.clear()
