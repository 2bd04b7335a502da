"""The decoder layers of an attached model as checkpoints: what each keeps, where, and how it is recomputed.

A layer's own `forward` is wrapped on the instance. How much is kept (inputs, attention outputs) is planned at the first
layer of each forward, from what the hosts (without offload: the devices) of all ranks have room for.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.hf.handle import Handle
from alstlib.hf.support import check_recompute
from alstlib.offload.checkpoints import Saved, Segment, checkpoint
from alstlib.tiled.compute import Pass, entered
from alstlib.tiled.skip import Follower, Unread, find_followers


def attach_checkpoints(handle: Handle, layers: Sequence[nn.Module]) -> None:
    """Layers' own `forward` is wrapped on the instance: engines' hooks stay outside, in every transformers version."""
    check_recompute(handle.facts)
    chain = _Chain()
    for i, layer in enumerate(layers):
        handle.set_forward(layer, _checkpointed(handle, chain, layer, layer.forward, i, len(layers)))


class _Chain:
    """The segment that the last checkpointed layer of a forward belongs to, which the next one may continue."""

    segment: Callable[[], Segment | None] = staticmethod(lambda: None)


def _checkpointed(handle: Handle, chain: _Chain, layer: nn.Module, original: Any, index: int, count: int) -> Any:
    unread = Unread(layer)
    mlps, followers, looked = unread.mlps, unread.followers, not unread.mlps

    def look(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and find out what follows its MLPs."""
        nonlocal looked
        returned: list[Any] = []
        with find_followers(layer, mlps, returned) as found:
            out = original(x, *args, **kwargs)
            returned.append(out)
        looked = True
        for mlp, module in found.items():
            followers[mlp] = Follower(module)
            handle.set_forward(module, followers[mlp].forward)
        return out

    def forward(*args: Any, **kwargs: Any) -> Any:
        if handle.plain or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        if index == 0 and (handle.call is None or handle.call.blocks is None):
            handle.plan(x, count)
        saved, drew = Saved(keep=handle.keeps_attention(index)), set[nn.Module]()
        before, call = chain.segment() if index > 0 else None, handle.call

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            graph = saved.stage == "graph"
            now = Pass(drew, skip=unread.holds and graph, followers=followers)
            once = look if saved.stage == "first" and not looked else original
            if graph and index == 0:
                handle.headroom.look(x.device)
            own = call and dataclasses.replace(call, saved=saved)
            try:
                with handle.using(own), entered(now):
                    if saved.stage == "again":
                        return run_whole(layer, x, lambda: original(x, *args, **kwargs))
                    return once(x, *args, **kwargs)
            finally:
                for mlp, follower in followers.items():
                    follower.expected = None
                    follower.gather_with(mlp)

        segment = before if before and before.continues_with(x) else Segment(handle.store, handle.inputs_kept_every)
        chain.segment = weakref.ref(segment)
        weights = [p for p in layer.parameters() if p.requires_grad]
        # an engine that takes gradients one by one, or (ZeRO-3, FSDP2) puts weights in place for the time of a call
        taken = any(p._post_accumulate_grad_hooks or hasattr(p, "ds_id") for p in weights)
        taken = taken or any(hasattr(m, "unshard") for m in layer.modules())
        out = checkpoint(
            run, x, *args, saved=saved, trains=bool(weights), accept=unread.accept, segment=segment, module=layer,
            weights=None if taken else weights, **kwargs,
        )  # fmt: skip
        if index == count - 1:
            segment.end = None
        return out

    return forward


def run_whole(layer: Any, x: Tensor, run: Callable[[], Any]) -> Any:
    """What `run` makes of a layer and its input x in another layer's backward, when engines have put its weights away.

    FSDP2 has functions that put them together. ZeRO-3 gathers those of a leaf in the hooks of a call, and others when
    the layer's submodules are called.
    """
    if hasattr(layer, "unshard") and hasattr(layer, "reshard"):
        layer.unshard()
        try:
            return run()
        finally:
            layer.reshard()
    if not getattr(layer, "_z3_leaf", False) or not any(hasattr(p, "ds_id") for p in layer.parameters()):
        return run()
    # DeepSpeed also counts calls, to know when their backward has ended: this one has none
    own = layer.__dict__
    before = {
        name: own[name] for name in ("forward", "ds_grads_remaining", "applied_pre_backward_ref_cnt") if name in own
    }
    own["forward"] = lambda _: run()
    try:
        return layer(x)
    finally:
        own.update(before)
