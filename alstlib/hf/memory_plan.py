"""What a forward keeps for backward, and where: decided for all layers before the first of them runs.

This is the only collective decision about memory, and the only reader of what the host and the device have left. Ranks
that keep different things would recompute different layers, for which engines gather weights: so all ranks of all
replicas keep what the rank keeps that can keep least. It is decided anew in each forward, because samples differ in
length from step to step and from replica to replica.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from alstlib.base.mesh import SPContext
from alstlib.base.options import Options
from alstlib.base.sizing import Forward, keys_and_values, kv_needed
from alstlib.hf.dry_run import Keys
from alstlib.hf.support import Facts
from alstlib.linear.adapters import mixers_of
from alstlib.offload import headroom
from alstlib.offload.courier import Courier
from alstlib.offload.disk_store import DiskStore
from alstlib.offload.host_store import HostOutOfMemory, HostStore
from alstlib.streaming.blocks import Blocks

log = logging.getLogger(__name__)


class MemoryPlan:
    """What the forward that runs now keeps, and what the last one kept.

    Args:
        notes: where a sentence goes that says what was decided, when it differs from what was said before.
    """

    def __init__(self, ctx: SPContext, options: Options, facts: Facts, store: HostStore, notes: list[str]) -> None:
        self.ctx, self.options, self.facts, self.store, self.notes = ctx, options, facts, store, notes
        self.headroom = headroom.Headroom()
        self.attention_kept: float = 0.0
        """The share of the layers that attend whose attention output is kept, from 0 to 1."""
        self.inputs_kept_every: int = 1
        """The input of one layer in so many is kept: more than 1 where the host has too little room."""
        self.kv_on_host = False
        """Whether the keys and values of chunks or blocks are kept on the host."""
        self._needed = 0
        """Bytes of the host that the forward may take."""
        self._handed_on = 0
        """Bytes that layers with a state hand on from a block, as the last micro-batch had them."""

    def whole(self, x: Tensor, pages: int = 0, travels: bool = False) -> None:
        """Decide what layers keep that run on all tokens; x is the first layer's input.

        Args:
            pages: bytes of keys and values on the host, with the sums of their gradients, where layers run on some of
                the tokens: in chunks, with an input on the host where it `travels`, or in blocks.

        Raises:
            HostOutOfMemory: on every rank, where on some rank what must be kept does not fit.
        """
        options, store, forward = self.options, self.store, self._forward(x, pages, travels)
        many = max(1, len(forward.attending))
        if not options.offload:
            kept = self._kept_on_device(x, sum(forward.outputs))
            self.inputs_kept_every, self.attention_kept = 1, kept / many
            return
        simulated, disk, room = isinstance(x, FakeTensor), store.disk_room(), self._room(travels)
        found = forward.kept(room, disk)
        lacks = int(found.every > 1 or found.needed > room + disk)
        if options.disk is not None and not simulated and self.ctx.largest([lacks])[0]:
            found = forward.kept(room)
            self._note(f"the disk in {options.disk.folder!r} has too little room, or the host for what is on its way")
        if not simulated:
            lacking = 0 if found.staged else found.needed - room
            every, negative = self._on_all_hosts(lacking, found.every, -found.outputs)
            found = found._replace(every=every, outputs=-negative)
        self._needed, spread, away, moving = forward.sent(found, room)
        there = store.leased if travels else 0
        store.reserve(self._needed - there, room - there, x.nbytes)
        if isinstance(store, DiskStore):
            store.share(spread, away, moving)
        self.attention_kept, self.inputs_kept_every = found.outputs / many, found.every
        self._say(x.nbytes, travels)

    def chunked(self, x: Tensor, device: torch.device, travels: bool, train: bool) -> None:
        """Layers run in chunks on `device`; x is the first layer's input, on the host where it `travels`."""
        pages = self._pages(x, x.shape[1] * self.ctx.sp, self.facts.most)
        beside = 0 if travels else x.nbytes  # a gradient, where x lies on the device
        pages = self._place_keys(x, device, pages, beside, travels)
        if train:
            self.whole(x, pages, travels)

    def blockwise(self, x: Tensor, blocks: Blocks) -> None:
        """A micro-batch runs block by block, of which x is the first block's first layer input."""
        pages = (blocks.count - 1) * self._handed_on
        pages += sum(self._pages(x, blocks.kept_tokens(keys.window), keys) for keys in self.facts.keys)
        self.whole(x, self._place_keys(x, x.device, pages))
        blocks.place(Courier(self.store, x.device) if self.kv_on_host else None)

    def handed_on(self, blocks: Blocks) -> None:
        """A micro-batch's first block has run: what its layers with a state hand on is known, and where pages lie on
        the host it is granted for all blocks."""
        before, self._handed_on = self._handed_on, blocks.carried.nbytes
        if not self.kv_on_host or not any(mixers_of(layer) for layer in self.facts.layers):
            return
        self._needed += (blocks.count - 1) * max(0, self._handed_on - before)
        store, left = self.store, self._needed - self.store.leased
        self._on_all_hosts(left - store.room() - store.unused)
        store.reserve(left)

    def renew(self) -> None:
        """Reserve anew, before a block's backward, what was granted for all blocks and pages have not taken."""
        left = max(0, self._needed - self.store.leased)
        if self.options.offload:
            self.store.reserve(left, left)

    def keeps_attention(self, index: int) -> bool:
        """Whether the attention output of this layer, by its place, is kept."""
        attending = self.facts.attending
        return index in attending[: round(self.attention_kept * len(attending))]

    def _forward(self, x: Tensor, pages: int, travels: bool) -> Forward:
        """What the layers make on this rank, of which x is the first layer's input."""
        facts, options, element = self.facts, self.options, x.element_size()
        rows, chunk = x.shape[0] * x.shape[1] * facts.output.heads, options.chunk_for(x.shape[-1])
        return Forward(
            layers=len(facts.layers), attending=facts.attending, save=options.save_attention, input_bytes=x.nbytes,
            outputs=(rows * facts.output.value_width * element, rows * 4),
            chunks=-(-x.shape[1] // chunk) if chunk else 0, travels=travels,
            tables=max(0, self.store.leased - x.nbytes), pages=pages,
        )  # fmt: skip

    def _room(self, travels: bool) -> int:
        """Bytes that this rank's host has for a forward: also what the first layer's input takes where it is there, and
        what goes with it to every layer."""
        return self.store.room() + self.store.unused + self.store.leased * travels

    def _pages(self, x: Tensor, tokens: int, keys: Keys) -> int:
        """Bytes of one layer's keys and values of so many tokens on this rank, with the sums of their gradients."""
        needed = kv_needed(keys.heads, keys.kv_heads, self.ctx.sp)
        return keys_and_values(x.shape[0] * tokens, needed, keys.widths, x.element_size())

    def _place_keys(self, x: Tensor, device: torch.device, keys: int, beside: int = 0, travels: bool = False) -> int:
        """Decide where keys and values of so many bytes lie, alike on all ranks; returns those on the host."""
        asks = self.options.place("kv") == "auto" and self.options.offload and not isinstance(x, FakeTensor)
        memory = headroom.device_memory(device) if asks else None
        self.kv_on_host = self._forward(x, keys, travels).keys_on_host(
            self.options.place("kv"), memory and memory[2] - beside, self._room(travels), self.ctx.largest
        )
        return keys if self.kv_on_host else 0

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

    def _on_all_hosts(self, lacking: int, *numbers: int) -> list[int]:
        """The largest of each of these numbers over all ranks, where no host but this rank's lacks memory. (Where its
        own does, `HostStore.reserve` says so; a rank that went on would wait for it for ever.)"""
        ctx = self.ctx
        *found, most = ctx.largest([*numbers, max(0, lacking) * ctx.world_size + ctx.rank])
        most, rank = divmod(most, ctx.world_size)
        if most > 0 and lacking <= 0:
            raise HostOutOfMemory(
                f"offload needs {most:,} bytes of host memory more than rank {rank} has left; use shorter "
                "sequences, more ranks, a larger host_memory, or offload=False"
            )
        return found

    def _say(self, size: int, travels: bool) -> None:
        """Note what was decided, when it differs from what was noted before."""
        every = self.inputs_kept_every
        if every > 1:
            held = "on the host" if travels else f"({every * size:,} bytes) on the device"
            self._note(
                f"host memory has no room for the inputs of all {len(self.facts.layers)} layers: one in {every} is "
                "kept",
                f"; backward runs one more forward to make the others and holds up to {every} {held}",
            )
        if self.kv_on_host and self.options.place("kv") == "auto":
            self._note(
                "keys and values of a layer would take more than half of the device's free memory: they lie on the host"
            )

    def _note(self, what: str, more: str = "") -> None:
        if not any(note.startswith(what) for note in self.notes):
            self.notes.append(what + more)
            log.warning(what + more)
