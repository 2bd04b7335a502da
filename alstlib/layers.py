"""Checkpointed decoder layers of an attached model: what each keeps, where, and how it is recomputed.

A layer's own `forward` is wrapped on the instance. How much is kept (inputs, attention outputs) is planned at the first
layer of each forward, from what the hosts (without offload: the devices) of all ranks have room for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from alstlib import headroom
from alstlib.offload import HostOutOfMemory, Saved, Segment, checkpoint
from alstlib.rules import share_host
from alstlib.support import check_recompute
from alstlib.tiled import Pass, TiledMLP, entered
from alstlib.unread import Follower, find_followers, output_unread

if TYPE_CHECKING:
    from alstlib.hf import Handle

log = logging.getLogger(__name__)


def attach_checkpoints(handle: Handle, layers: Sequence[nn.Module]) -> None:
    """Layers' own `forward` is wrapped on the instance: engines' hooks stay outside, in every transformers version."""
    check_recompute(handle.facts)
    for i, layer in enumerate(layers):
        set_forward(handle, layer, _checkpointed(handle, layer, layer.forward, i, len(layers)))


def stop_own_checkpointing(handle: Handle) -> None:
    """Switch transformers' own checkpointing off, until detach, whenever it is switched on: ours takes its place.

    Raises:
        ValueError: now or at a call, where there is none of ours.
    """

    @torch.compiler.disable
    def stop(*_: Any) -> None:
        for module in handle.model.modules():
            if not getattr(module, "gradient_checkpointing", False):
                continue
            if not handle.options.checkpoint and handle.model.training:
                raise ValueError(
                    "gradient_checkpointing_enable() with checkpoint=False: a recompute by transformers would not know "
                    "the call that it belongs to; use Options(checkpoint=True), which does the same, or "
                    "gradient_checkpointing_disable()"
                )
            handle.edits.set(module, "gradient_checkpointing", False)

    stop()
    handle.edits.hook(handle.model, handle.model.register_forward_pre_hook(stop))


def set_forward(handle: Handle, module: nn.Module, forward: Any) -> None:
    """Give this one module another `forward`, until detach; torch.compile leaves it as it is."""
    handle.edits.set(module, "forward", torch.compiler.disable(forward))


def _checkpointed(handle: Handle, layer: nn.Module, original: Any, index: int, count: int) -> Any:
    mlps = [m for m in layer.modules() if isinstance(m, TiledMLP)]
    unread = bool(mlps)  # until the layer's graph says otherwise: the recompute need not compute the MLP's output
    followers: dict[TiledMLP, Follower] = {}
    looked = not mlps

    def look(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and find out what follows its MLPs."""
        nonlocal looked
        with find_followers(layer, mlps) as found:
            out = original(x, *args, **kwargs)
        looked = True
        for mlp, module in found.items():
            followers[mlp] = Follower(module)
            set_forward(handle, module, followers[mlp].forward)
        return out

    def accept(out: Any) -> bool:
        nonlocal unread
        outs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
        accepted = not unread or all(output_unread(o, followers.values()) for o in outs)
        unread = unread and accepted
        for follower in followers.values():
            follower.forget()
        return accepted

    def forward(*args: Any, **kwargs: Any) -> Any:
        if handle._plain or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        if index == 0:
            plan(handle, x, count)
        saved, drew = Saved(keep=index < round(handle.attention_kept * count)), set[nn.Module]()
        before, call = handle._segment() if index > 0 else None, handle._call

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            graph = saved.stage == "graph"
            now = Pass(drew, skip=unread and graph, followers=followers)
            once = look if saved.stage == "first" and not looked else original
            if graph and index == 0:
                handle.headroom.look(x.device)
            own = call and dataclasses.replace(call, saved=saved if saved.active else None, release=graph)
            try:
                with handle._using(own), _whole(layer, saved.stage == "again"), entered(now):
                    return once(x, *args, **kwargs)
            finally:
                for mlp, follower in followers.items():
                    follower.expected = None
                    follower.gather_with(mlp)

        segment = before if before and before.continues_with(x) else Segment(handle.store, handle.inputs_kept_every)
        handle._segment = weakref.ref(segment)
        weights = [p for p in layer.parameters() if p.requires_grad]
        # an engine that takes gradients one by one, or (FSDP2) puts weights in place for the time of a call
        taken = any(p._post_accumulate_grad_hooks for p in weights)
        taken = taken or any(hasattr(m, "unshard") for m in layer.modules())
        out = checkpoint(
            run, x, *args, saved=saved, trains=bool(weights), accept=accept, segment=segment, module=layer,
            weights=None if taken else weights, **kwargs,
        )  # fmt: skip
        if index == count - 1:
            segment.end = None
        return out

    return forward


@contextlib.contextmanager
def _whole(layer: Any, again: bool) -> Iterator[None]:
    """A layer that runs in another layer's backward: FSDP2 has not put its weights together."""
    sharded = again and hasattr(layer, "unshard") and hasattr(layer, "reshard")
    if sharded:
        layer.unshard()
    try:
        yield
    finally:
        if sharded:
            layer.reshard()


def plan(handle: Handle, x: Tensor, layers: int, segments: bool = True) -> None:
    """Decide what this forward keeps, from what the hosts have room for, before anything is taken. Without `segments`
    the input of every layer must fit.

    Collective where tensors are offloaded, or attention outputs may stay on a GPU: all ranks of all replicas keep
    what the rank keeps that can keep least. Ranks that keep different things recompute different layers, for which
    engines gather weights. It is decided anew in each forward, because samples differ in length from step to step
    and from replica to replica.

    Raises:
        HostOutOfMemory: on every rank, where on some rank what must be kept does not fit.
    """
    options, store, ctx, facts = handle.options, handle.store, handle.ctx, handle.facts
    output = x.shape[0] * x.shape[1] * facts.heads * (facts.value_width * x.element_size() + 4)
    if options.offload == "none":
        handle.inputs_kept_every, handle.attention_kept = 1, _kept_on_device(handle, x, layers, output) / layers
        return
    row = x.numel() * x.element_size()
    room = store.room() + store.unused
    every, outputs = share_host(room, layers, row, output, options.save_attention)
    if not segments and every > 1:
        every, outputs = 1, outputs if options.save_attention is True else 0
    lacking = max(0, -(-layers // every) * row + outputs * output - room)
    if not isinstance(x, FakeTensor):
        mine = [every, -outputs, lacking * ctx.world_size + ctx.rank]
        every, negative, most = ctx.largest(mine)
        outputs, (most, rank) = -negative, divmod(most, ctx.world_size)
        if most > 0 and not lacking:
            raise HostOutOfMemory(
                f"offload needs {most:,} bytes of host memory more than rank {rank} has left; use shorter sequences, "
                "more ranks, a larger host_memory, or offload='none'"
            )
    store.reserve(-(-layers // every) * row + outputs * output, room)
    handle.attention_kept, handle.inputs_kept_every = outputs / layers, every
    if every > 1 and not any(f"one in {every} is kept" in note for note in handle.notes):
        note = (
            f"host memory has no room for the inputs of all {layers} layers: one in {every} is kept; backward runs one "
            f"more forward to make the others and holds up to {every} ({every * row:,} bytes) on the device"
        )
        handle.notes.append(note)
        log.warning(note)


def _kept_on_device(handle: Handle, x: Tensor, layers: int, output: int) -> int:
    """Layers whose attention outputs, of `output` bytes each, stay on the device: with `auto` on a GPU those that fit
    beside what earlier steps needed."""
    if handle.options.save_attention != "auto" or isinstance(x, FakeTensor):
        return layers if handle.options.save_attention is True else 0
    if (memory := headroom.device_memory(x.device)) is None:
        return 0
    fit = handle.headroom.begin(x.shape[0] * x.shape[1], memory) // output
    kept = -handle.ctx.largest([-min(layers, fit)])[0]
    handle.headroom.keep(kept * output)
    return kept
