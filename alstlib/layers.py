"""Checkpointed decoder layers of an attached model: what each keeps, where, and how it is recomputed.

A layer's own `forward` is wrapped on the instance. How much is kept (inputs, attention outputs) is planned at the first
layer of each forward, from what the host has room for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from alstlib.chunked import RowChunk, Stream
from alstlib.offload import Saved, checkpoint
from alstlib.tiled import TiledMLP, output_unread

if TYPE_CHECKING:
    from alstlib.hf import Handle


def attach_checkpoints(handle: Handle, layers: Sequence[nn.Module]) -> None:
    """Layers' own `forward` is wrapped on the instance: engines' hooks stay outside, in every transformers version."""
    _stop_own_checkpointing(handle)
    for i, layer in enumerate(layers):
        handle._undo.callback(_restore_forward, layer, layer.__dict__.get("forward"))
        layer.forward = _checkpointed(handle, layer, layer.forward, i, len(layers))


def _stop_own_checkpointing(handle: Handle) -> None:
    for module in handle.model.modules():
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 (no declared attribute)
            handle._undo.callback(setattr, module, "gradient_checkpointing", True)


def attach_streams(handle: Handle, layers: Sequence[nn.Module]) -> None:
    """Layers run in row chunks (`chunked`). To ZeRO-3 each is a leaf: gathered once a pass, not once a chunk."""
    for i, layer in enumerate(layers):
        if not {"past_key_values", "past_key_value", "layer_past"} & set(inspect.signature(layer.forward).parameters):
            raise ValueError(
                f"layer {i} ({type(layer).__name__}) takes no cache: it cannot be streamed; use chunk=None"
            )
    _stop_own_checkpointing(handle)
    for i, layer in enumerate(layers):
        handle._undo.callback(_restore_forward, layer, layer.__dict__.get("forward"))
        layer.forward = _streamed(handle, layer, layer.forward, i, len(layers))
        hook = layer.register_forward_pre_hook(_ensure_input_grad, with_kwargs=True)
        handle._undo.callback(hook.remove)
        handle._undo.callback(layer.__dict__.pop, "_z3_leaf", None)
        layer._z3_leaf = True  # type: ignore[assignment]


def _ensure_input_grad(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An input that needs no gradient makes ZeRO-3's hooks of a leaf fire before backward: let it need one."""
    x = args[0] if args else kwargs["hidden_states"]
    if not torch.is_grad_enabled() or x.requires_grad or not any(p.requires_grad for p in layer.parameters()):
        return None
    x = x.detach().requires_grad_()
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _streamed(handle: Handle, layer: nn.Module, original: Any, index: int, count: int) -> Any:
    mlps = [m for m in layer.modules() if isinstance(m, TiledMLP)]

    def trainable() -> list[nn.Parameter]:
        return [p for p in layer.parameters() if p.requires_grad]

    def forward(*args: Any, **kwargs: Any) -> Any:
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        if index == 0:
            handle.attention_kept = _plan_host(handle, x, count) / count if torch.is_grad_enabled() else 0.0
        call, as_tuple = handle._call, False
        leaves, spec = tree_flatten((args, kwargs))
        cuts = [_row_dimension(t, x.shape[1], layer) for t in leaves]

        def run(part: Tensor, piece: RowChunk) -> Tensor:
            nonlocal as_tuple
            mine = [t if at is None else t[(slice(None),) * at + (piece.rows,)] for t, at in zip(leaves, cuts)]
            some_args, some_kwargs = tree_unflatten(mine, spec)
            for mlp in mlps:
                mlp.whole = True
            try:
                with handle._using(None if call is None else dataclasses.replace(call, piece=piece)):
                    out = original(part, *some_args, **some_kwargs)
            finally:
                for mlp in mlps:
                    mlp.whole = False
            as_tuple = not isinstance(out, Tensor)
            if as_tuple and len(out) > 1:
                raise ValueError(f"layer {index} ({type(layer).__name__}) returns more than its output; use chunk=None")
            return out[0] if as_tuple else out

        keep = index < round(handle.attention_kept * count)
        chunk = handle.options.chunk
        assert chunk is not None
        stream = Stream(
            run=run, chunk=chunk, ranks=handle.ctx.sp, store=handle.store, keep=keep, params=trainable
        )  # fmt: skip
        out = stream(x)
        return (out,) if as_tuple else out

    return forward


def _row_dimension(value: Any, rows: int, layer: nn.Module) -> int | None:
    """The dimension of a layer's further argument that goes with its rows; None for none.

    Raises:
        ValueError: an argument that a chunk cannot be cut out of, or that needs a gradient.
    """
    if not isinstance(value, Tensor) or value.ndim == 0:
        return None
    if value.requires_grad:
        raise ValueError(f"{type(layer).__name__} takes a further input that needs a gradient; use chunk=None")
    at = 0 if value.ndim == 1 else 1
    if value.shape[at] == rows:
        return at
    if rows in value.shape or (value.ndim > 1 and value.shape[1] > 1):
        raise ValueError(f"{type(layer).__name__} takes an input {list(value.shape)} not to be cut by rows: chunk=None")
    return None


def _restore_forward(layer: nn.Module, before: Any) -> None:
    del layer.forward
    if before is not None:
        layer.forward = before


def _checkpointed(handle: Handle, layer: nn.Module, original: Any, index: int, count: int) -> Any:
    mlps = [m for m in layer.modules() if isinstance(m, TiledMLP)]
    unread = bool(mlps)  # until the layer's graph says otherwise: the recompute need not compute the MLP's output

    def accept(out: Any) -> bool:
        nonlocal unread
        outs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
        if unread and not all(output_unread(o) for o in outs):
            unread = False
            return False
        return True

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        if index == 0:
            handle.attention_kept = _plan_host(handle, x, count) / count
        saved = Saved() if index < round(handle.attention_kept * count) else None
        call = None if handle._call is None else dataclasses.replace(handle._call, saved=saved)
        passes = 0

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            for mlp in mlps:
                mlp.skip = unread and passes > 1
            try:
                with handle._using(None if call is None else dataclasses.replace(call, release=passes > 1)):
                    return original(x, *args, **kwargs)
            finally:
                for mlp in mlps:
                    mlp.skip = False

        trains = any(p.requires_grad for p in layer.parameters())
        return checkpoint(run, x, *args, store=handle.store, saved=saved, trains=trains, accept=accept, **kwargs)

    return forward


def _plan_host(handle: Handle, x: Tensor, layers: int) -> int:
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
