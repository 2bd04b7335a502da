"""`Options` says what `apply` attaches, and `Handle`, which `apply` returns, holds everything that is attached to one
model.

The handle holds the state of the attachment: which call of the model runs, what its layers keep for backward, and how
everything is undone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from alstlib.hf.edits import Edits
from alstlib.hf.inputs import Call
from alstlib.hf.support import Facts
from alstlib.linear.adapters import mixers_of
from alstlib.linear.ways import StateLayer
from alstlib.mesh import SPContext
from alstlib.offload import headroom
from alstlib.offload.courier import Courier, Travel
from alstlib.offload.host_store import HostOutOfMemory, HostStore, Mode
from alstlib.options import Options, Part
from alstlib.sizing import kept_on_host, keys_and_values, keys_leave, keys_left, kv_needed
from alstlib.streaming.blocks import Blocks
from alstlib.streaming.pages import PageChooser
from alstlib.tiled.compute import TiledMLP
from alstlib.tiled.loss import TiledHead
from alstlib.ulysses.attention import UlyssesAttention

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keys:
    """What one layer's attention keeps of a token: key/value heads (of so many query heads), the width of a key and a
    value together, and how many keys a row sees (None: all)."""

    heads: int
    kv_heads: int
    widths: int
    window: int | None


_MODES: dict[bool | str, Mode] = {False: "none", "sync": "sync", True: "async"}


class Handle:
    """What `apply` returns: the attachment to one model. `detach()`, or leaving `with apply(...):`, takes it back.

    Attributes for users: `model`, `ctx`, `options`, `notes`, `attention_kept`, `inputs_kept_every`, `kv_on_host`,
    `wire_bytes`.
    """

    def __init__(self, model: PreTrainedModel, ctx: SPContext, options: Options, facts: Facts) -> None:
        self.model, self.ctx, self.options, self.facts = model, ctx, options, facts
        self.attention = UlyssesAttention(ctx, options.attention)
        self.store = HostStore(_MODES[options.offload], budget=options.host_memory)
        self.chunk = options.chunk_for(model.config.get_text_config().hidden_size)
        """Tokens of one chunk of this rank's slice; None: layers run whole."""
        self.choose_pages: Callable[[], PageChooser] | None = None
        """Makes what chooses the pages of keys that the chunks of one call of a layer see (`contrib.sparse`)."""
        self.headroom = headroom.Headroom()
        self.edits = Edits()
        self.mlps: list[TiledMLP] = []
        self.head: TiledHead | None = None
        self.routers: list[nn.Module] = []
        """Routers of a mixture of experts, whose load-balancing loss can be had (`output_router_logits`)."""
        self.notes: list[str] = [f"chunk='auto' took {self.chunk:,} tokens"] if options.chunk == "auto" else []
        """What was not tiled or not kept, and why: one sentence for each."""
        self.attention_kept: float = 0.0
        """The share of the layers that attend whose attention output the last forward kept, from 0 to 1."""
        self.inputs_kept_every: int = 1
        """The last forward kept the input of one layer in so many: more than 1 where the host has too little room."""
        self.kv_on_host = False
        """Whether the last forward kept the keys and values of chunks or blocks on the host."""
        self.layer_of: dict[nn.Module, int] = {}
        """The decoder layer that a module belongs to."""
        self.keys: list[Keys] = []
        """What each layer's attention keeps of a token."""
        self.recurrences: dict[StateLayer, None] = {}
        """The sizes of layers with a state and heads that have run, in order."""
        self.not_by_blocks = ""
        """Why the model cannot run block by block, if it cannot."""
        self.longest_matters = False
        """Do frequencies of rotary embeddings depend on the longest position?"""
        self.whole_prompts = False
        """Are prompts of generate() whole on every rank? Then each rank generates by itself."""
        self.next_call: Call | None = None
        """The call that begins next, made elsewhere: a block of a micro-batch."""
        self._needed = 0
        self._handed_on = 0
        """Bytes that layers with a state hand on from a block, as the last micro-batch had them."""
        self._call: Call | None = None
        self._plain = False
        self._ends: list[Callable[[], Any]] = []

    def detach(self) -> PreTrainedModel:
        """Restore the model exactly as it was before `apply`, and return it. Take it out of engines first. A second
        call does nothing."""
        self._plain = True
        self.edits.close()
        while self._ends:
            self._ends.pop()()
        self.store.trim()
        return self.model

    def tile(self, part: Part) -> int | None:
        """Tokens of one tile of this part; None: they are chosen by the tensors' sizes."""
        asked = self.options.tile(part)
        return None if asked is True else int(asked)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def on_detach(self, end: Callable[[], Any]) -> None:
        """Have `detach` call this."""
        self._ends.append(end)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank's attention has sent to other ranks since `apply`."""
        return self.attention.exchange.bytes_sent

    @property
    def plain(self) -> bool:
        """Does the model run as its own, in generate() or after detach()?"""
        return self._plain

    @contextlib.contextmanager
    def as_its_own(self) -> Iterator[None]:
        """Inside, the model runs as its own."""
        before, self._plain = self._plain, True
        try:
            yield
        finally:
            self._plain = before

    @property
    def call(self) -> Call | None:
        """What belongs to the call of the model that runs now; None between calls."""
        return self._call

    def begin(self, call: Call) -> None:
        """A call of the model begins."""
        self._call = call

    def end(self) -> Call | None:
        """The call that ends now."""
        call, self._call = self._call, None
        return call

    @contextlib.contextmanager
    def using(self, call: Call | None) -> Iterator[None]:
        """Run what is inside, a layer's pass, as part of this call.

        Raises:
            ValueError: the model has been detached since.
        """
        if self._plain:
            name = type(self.model).__name__
            raise ValueError(f"backward of a graph that {name} made before detach(): call backward before detach()")
        before, self._call = self._call, call
        try:
            yield
        finally:
            self._call = before

    def set_forward(self, module: nn.Module, forward: Any) -> None:
        """Give this one module another `forward`, until detach; torch.compile leaves it as it is."""
        self.edits.set(module, "forward", torch.compiler.disable(forward))

    def travel(self, x: bool = True, out: bool = True) -> Travel | None:
        """How hidden states of the call that runs now visit the device; None where they lie there."""
        call = self._call
        if call is None or not call.travels or call.device is None:
            return None
        return Travel(self.store, call.device, x, out)

    def plan(self, x: Tensor, layers: int, streamed: bool = False, pages: int = 0) -> None:
        """Decide what this forward keeps, and where, from what the hosts have room for, before anything is taken.

        Collective where tensors are offloaded, or attention outputs may stay on a GPU: all ranks of all replicas keep
        what the rank keeps that can keep least. Ranks that keep different things recompute different layers, for which
        engines gather weights. It is decided anew in each forward, because samples differ in length from step to step
        and from replica to replica.

        Args:
            x: the first layer's input.
            streamed: the layers run in row chunks.
            pages: bytes of keys and values on the host, with the sums of their gradients, where x is a block.

        Raises:
            HostOutOfMemory: on every rank, where on some rank what must be kept does not fit.
        """
        options, store, ctx = self.options, self.store, self.ctx
        output, many = self._output_bytes(x), max(1, len(self.facts.attending))
        if not options.offload:
            self.inputs_kept_every, self.attention_kept = 1, self._kept_on_device(x, output) / many
            return
        row, travels = x.numel() * x.element_size(), streamed and self.travel() is not None
        pages = self._keys_and_values(x) if streamed and self.kv_on_host else pages
        every, outputs, needed, room = self._host_keeps(x, layers, streamed, pages)
        lacking = max(0, needed - room)
        if not isinstance(x, FakeTensor):
            mine = [every, -outputs, lacking * ctx.world_size + ctx.rank]
            every, negative, most = ctx.largest(mine)
            outputs = -negative
            self._check_hosts(most, lacking)
        if options.save_attention == "auto":
            needed += outputs * output
        self._needed = needed
        store.reserve(needed - (store.leased if travels else 0), room - (store.leased if travels else 0))
        self.attention_kept, self.inputs_kept_every = outputs / many, every
        self._say_where(every, row, layers, travels)

    def _output_bytes(self, x: Tensor) -> int:
        """Of one layer's attention output and its sums on this rank."""
        facts = self.facts
        return x.shape[0] * x.shape[1] * facts.heads * (facts.value_width * x.element_size() + 4)

    def _host_keeps(self, x: Tensor, layers: int, streamed: bool, pages: int) -> tuple[int, int, int, int]:
        """`sizing.kept_on_host` of a forward, and the room that this rank's host has for it."""
        row, room = x.numel() * x.element_size(), self.store.room() + self.store.unused
        travels = streamed and self.travel() is not None
        room += self.store.leased * travels  # the first layer's input, and what goes with it to every layer
        found = kept_on_host(
            room, layers, row, self._output_bytes(x), self.options.save_attention, streamed=streamed, travels=travels,
            tables=max(0, self.store.leased - row), pages=pages, attending=len(self.facts.attending),
        )  # fmt: skip
        return *found, room

    def _say_where(self, every: int, row: int, layers: int, travels: bool) -> None:
        """Note what was decided, when it differs from what was noted before."""
        found = []
        if every > 1:
            held = "on the host" if travels else f"({every * row:,} bytes) on the device"
            found.append(
                f"host memory has no room for the inputs of all {layers} layers: one in {every} is kept; backward runs "
                f"one more forward to make the others and holds up to {every} {held}"
            )
        if self.kv_on_host and self.options.place("kv") == "auto":
            found.append(
                "keys and values of a layer would take more than half of the device's free memory: they lie on the host"
            )
        for note in found:
            if note.partition(";")[0] not in {known.partition(";")[0] for known in self.notes}:
                self.notes.append(note)
                log.warning(note)

    def _keys_and_values(self, x: Tensor) -> int:
        """Bytes of one layer's keys and values on this rank, with the sums of their gradients."""
        facts, ranks = self.facts, self.ctx.sp
        heads = max(kv_needed(facts.heads, facts.kv_heads, ranks))
        return keys_and_values(x.shape[0] * x.shape[1] * ranks, heads, facts.kv_widths, x.element_size())

    def plan_blocks(self, x: Tensor, blocks: Blocks) -> None:
        """`plan` for a micro-batch that runs block by block, of which x is the first block's first layer input."""
        ranks, pages = self.ctx.sp, 0
        for keys in self.keys:
            heads = max(kv_needed(keys.heads, keys.kv_heads, ranks))
            rows = x.shape[0] * blocks.kept_rows(keys.window)
            pages += keys_and_values(rows, heads, keys.widths, x.element_size())
        pages += (blocks.count - 1) * self._handed_on
        self.place_keys(x, len(self.keys), pages)
        self.plan(x, len(self.keys), pages=pages if self.kv_on_host else 0)
        if self.kv_on_host:
            blocks.courier = Courier(self.store, x.device)
        blocks.planned = True

    def plan_states(self, blocks: Blocks) -> None:
        """After a micro-batch's first block, with pages on the host: what its layers with a state hand on from a block
        is known then, and granted for all blocks.

        Raises:
            HostOutOfMemory: on every rank, where on some rank it does not fit.
        """
        before, self._handed_on = self._handed_on, blocks.carried.nbytes
        if not self.kv_on_host or not any(mixers_of(layer) for layer in self.facts.layers):
            return
        self._needed += (blocks.count - 1) * max(0, self._handed_on - before)
        store, left = self.store, self._needed - self.store.leased
        lacking = max(0, left - store.room() - store.unused)
        self._check_hosts(self.ctx.largest([lacking * self.ctx.world_size + self.ctx.rank])[0], lacking)
        store.reserve(left)

    def _check_hosts(self, most: int, lacking: int) -> None:
        """Raise an error where this rank lacks no host memory and another does: `most` is the largest of all ranks'
        bytes that they lack * world size + rank."""
        most, rank = divmod(most, self.ctx.world_size)
        if most > 0 and not lacking:
            raise HostOutOfMemory(
                f"offload needs {most:,} bytes of host memory more than rank {rank} has left; use shorter "
                "sequences, more ranks, a larger host_memory, or offload=False"
            )

    def renew_plan(self) -> None:
        """Before a block's backward: what was granted for all of them, less what pages have taken of it."""
        left = max(0, self._needed - self.store.leased)
        if self.options.offload:
            self.store.reserve(left, left)

    def place_keys(self, x: Tensor, layers: int, nbytes: int | None = None) -> None:
        """Decide, for a forward whose first streamed layer gets x, where keys and values lie; alike on all ranks.

        Args:
            layers: of the model.
            nbytes: that they take; None: those of x in one layer.
        """
        self.kv_on_host = self.options.place("kv") == "host"
        if self.options.place("kv") != "auto" or not self.options.offload or isinstance(x, FakeTensor):
            return
        device = x.device if self._call is None or self._call.device is None else self._call.device
        if (memory := headroom.device_memory(device)) is not None:
            keys = self._keys_and_values(x) if nbytes is None else nbytes
            *_, needed, room = self._host_keeps(x, layers, nbytes is None, keys)
            beside = x.nbytes if nbytes is None and self.travel() is None else 0  # a gradient, where x lies there
            self.kv_on_host = keys_left(*self.ctx.largest(keys_leave(keys, memory[2] - beside, needed - room)))

    def keeps_attention(self, index: int) -> bool:
        """Is the attention output of this layer, by its place, kept in the forward that `plan` was asked of?"""
        return index in self.facts.attending[: round(self.attention_kept * len(self.facts.attending))]

    def _kept_on_device(self, x: Tensor, output: int) -> int:
        """Layers whose attention outputs, of `output` bytes each, stay on the device: with `auto` on a GPU those that
        fit beside what earlier steps needed."""
        if self.options.save_attention != "auto" or isinstance(x, FakeTensor):
            return len(self.facts.attending) if self.options.save_attention is True else 0
        if (memory := headroom.device_memory(x.device)) is None:
            return 0
        fit = self.headroom.begin(x.shape[0] * x.shape[1], memory) // output
        kept = -self.ctx.largest([-min(len(self.facts.attending), fit)])[0]
        self.headroom.keep(kept * output)
        return kept
