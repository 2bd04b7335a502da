"""Checkpointed decoder layers of an attached model: what each keeps, where, and how it is recomputed.

A layer's own `forward` is wrapped on the instance. How much is kept (inputs, attention outputs) is planned at the first
layer of each forward, from what the host has room for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alstlib.offload import Saved, checkpoint
from alstlib.tiled import TiledMLP
from alstlib.unread import Follower, find_followers, output_unread

if TYPE_CHECKING:
    from alstlib.hf import Handle


def attach_checkpoints(handle: Handle, layers: Sequence[nn.Module]) -> None:
    """Layers' own `forward` is wrapped on the instance: engines' hooks stay outside, in every transformers version."""
    stop_own_checkpointing(handle)
    for i, layer in enumerate(layers):
        set_forward(handle, layer, _checkpointed(handle, layer, layer.forward, i, len(layers)))


def stop_own_checkpointing(handle: Handle) -> None:
    """Switch transformers' own checkpointing off, until detach."""
    for module in handle.model.modules():
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 (no declared attribute)
            handle._undo.callback(setattr, module, "gradient_checkpointing", True)


def set_forward(handle: Handle, module: nn.Module, forward: Any) -> None:
    """Give this one module another `forward`, until detach."""
    handle._undo.callback(_restore_forward, module, module.__dict__.get("forward"))
    module.forward = forward


def _restore_forward(module: nn.Module, before: Any) -> None:
    del module.forward
    if before is not None:
        module.forward = before


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
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        if index == 0:
            handle.attention_kept = plan_host(handle, x, count) / count
        saved = Saved() if index < round(handle.attention_kept * count) else None
        call = None if handle._call is None else dataclasses.replace(handle._call, saved=saved)
        passes = 0

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            for mlp in mlps:
                mlp.skip, mlp.then = unread and passes > 1, followers.get(mlp)
            once = original if looked or passes > 1 or x.shape[1] < 2 else look
            try:
                with handle._using(None if call is None else dataclasses.replace(call, release=passes > 1)):
                    return once(x, *args, **kwargs)
            finally:
                for mlp in mlps:
                    mlp.skip, mlp.then = False, None
                for mlp, follower in followers.items():
                    follower.expected = None
                    follower.gather_with(mlp)

        trains = any(p.requires_grad for p in layer.parameters())
        return checkpoint(run, x, *args, store=handle.store, saved=saved, trains=trains, accept=accept, **kwargs)

    return forward


def plan_host(handle: Handle, x: Tensor, layers: int) -> int:
    """Layers whose attention output is kept: all, none, or with `auto` as many as the host has room for, after the
    layers' inputs (outputs go first when memory is short)."""
    options, store = handle.options, handle.store
    config = handle.model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    each = x.shape[0] * x.shape[1] * heads * (width * x.element_size() + 4)
    inputs = layers * x.numel() * x.element_size()
    store.check_room(inputs + (layers * each if options.save_attention is True else 0))
    if options.save_attention != "auto" or options.offload == "none":
        return layers if options.save_attention is True else 0
    have = store.room() + sum(slab.bytes.numel() for slab in store.free)
    return max(0, min(layers, (have - inputs) // each))
