"""The decoder layers of an attached model run in chunks: what `chunked` must know of a Hugging Face layer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from alstlib.hf.checkpointed_layers import run_whole
from alstlib.hf.dry_run import LayerCall
from alstlib.hf.handle import Handle
from alstlib.hf.support import check_recompute
from alstlib.linear.adapters import is_tokenwise
from alstlib.recompute import with_gradient
from alstlib.streaming.chunked import RowChunk, Stream, StreamSegment
from alstlib.tiled.compute import Pass, entered
from alstlib.tiled.skip import Unread


def attach_streams(handle: Handle, layers: Sequence[nn.Module]) -> None:
    """Layers run in row chunks (`chunked`). To ZeRO-3 each is a leaf: gathered once a pass, not once a chunk."""
    for i, layer in enumerate(layers):
        if not {"past_key_values", "past_key_value", "layer_past", "cache_params"} & set(
            inspect.signature(layer.forward).parameters
        ):
            raise ValueError(
                f"layer {i} ({type(layer).__name__}) takes no cache, so it cannot run in chunks; use chunk=None"
            )
    check_recompute(handle.facts)
    for i, call in enumerate(handle.facts.calls):
        _check_call(f"layer {i} ({type(call.layer).__name__})", call)
    chain = _Chain()
    for i, layer in enumerate(layers):
        handle.set_forward(layer, _streamed(handle, chain, layer, layer.forward, i, len(layers)))
        handle.edits.hook(layer, layer.register_forward_pre_hook(_ensure_input_grad, with_kwargs=True))
        handle.edits.set(layer, "_z3_leaf", True)


def _check_call(where: str, call: LayerCall) -> None:
    """Refuse a layer that cannot be streamed, by how it was called in a dry run."""
    for value in tree_flatten(call.others)[0]:
        _row_dimension(value, call.hidden.shape[1], call.layer)
    if len(call.attention) > 1:
        raise ValueError(f"{where} calls attention more than once, so it cannot run in chunks; use chunk=None")
    if call.outputs > 1:
        raise ValueError(f"{where} returns more than its output, so it cannot run in chunks; use chunk=None")


def _ensure_input_grad(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (with_gradient(args[0], layer), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": with_gradient(kwargs["hidden_states"], layer)}


class _Chain:
    """The segment that the last streamed layer of a forward belongs to, which the next one may continue."""

    segment: Callable[[], StreamSegment | None] = staticmethod(lambda: None)


def _streamed(handle: Handle, chain: _Chain, layer: nn.Module, original: Any, index: int, count: int) -> Any:
    unread, tokenwise = Unread(layer), is_tokenwise(layer)

    def trainable() -> list[nn.Parameter]:
        return [p for p in layer.parameters() if p.requires_grad]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if handle.plain:
            return original(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        travel = handle.travel()
        if travel is not None:
            x = x.cpu()  # the embeddings of a caller may come from a device
        if index == 0:
            handle.place_keys(x, count)
            if torch.is_grad_enabled():
                handle.plan(x, count, streamed=True)
        call, nothing, drew = handle.call, None, set[nn.Module]()
        leaves, spec = tree_flatten((args, kwargs))
        cuts = [_row_dimension(t, x.shape[1], layer) for t in leaves]

        def run(part: Tensor, piece: RowChunk) -> Tensor:
            nonlocal nothing
            mine = [t if at is None else t[(slice(None),) * at + (piece.rows,)] for t, at in zip(leaves, cuts)]
            if travel is not None:  # what is made for all layers may lie on the host too
                mine = [t.to(part.device, non_blocking=True) if isinstance(t, Tensor) else t for t in mine]
            some_args, some_kwargs = tree_unflatten(mine, spec)
            again = piece.task == "recompute"
            if again and index == 0:
                handle.headroom.look(part.device)
            now = Pass(drew, skip=unread.holds and again, whole=True)
            with handle.using(None if call is None else dataclasses.replace(call, piece=piece)), entered(now):
                out = original(part, *some_args, **some_kwargs)
            if isinstance(out, Tensor):
                return out
            if any(o is not None for o in out[1:]):
                raise ValueError(f"layer {index} ({type(layer).__name__}) returns more than its output; use chunk=None")
            nothing = out[1:]
            return out[0]

        keep = handle.keeps_attention(index)
        chunk = handle.chunk
        assert chunk is not None
        segment = chain.segment() if index > 0 else None
        if segment is None or not segment.continues_with(x):
            segment = StreamSegment(handle.inputs_kept_every)
        chain.segment = weakref.ref(segment)
        stream = Stream(
            run=run, chunk=chunk, ranks=handle.ctx.sp, store=handle.store, keep=keep, params=trainable,
            accept=unread.accept, module=layer, device=None if call is None else call.device,
            travels=travel is not None, kv_on_host=handle.kv_on_host, segment=segment, tokenwise=tokenwise,
            whole=functools.partial(run_whole, layer),
            choices=None if handle.choose_pages is None else handle.choose_pages(),
        )  # fmt: skip
        out = stream(x)
        if index == count - 1:
            segment.end = None
        return out if nothing is None else (out, *nothing)

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
        raise ValueError(
            f"{type(layer).__name__} takes an input {list(value.shape)} that cannot be cut into chunks; use chunk=None"
        )
    return None
