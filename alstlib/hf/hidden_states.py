"""The hidden states of an attached model that are kept on the host: what is made before its layers and read after them.

With layers in chunks everything that is as long as the sequence may lie there: embeddings and rotary tables are
made tile by tile and sent to the host; layers, and the norm and head after them, fetch chunks of it. Between these
modules a model handles a tensor on the CPU with the right values, so that what it does with it (a scale, positions that
are added, dropout) is done there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.options import Options
from alstlib.base.recompute import backward_in_this_thread
from alstlib.hf.handle import Handle
from alstlib.hf.pass_state import StepInputs
from alstlib.hf.vision import tower_modules
from alstlib.tiled.compute import TiledModule, tiled_compute


def attach_hidden_states(handle: Handle) -> None:
    """Modules outside the layers learn to leave their outputs on the host, and to read them there."""
    if not _may_travel(handle.options):
        return
    tokens: Any = handle.model.get_input_embeddings()  # with an adapter around it, that as a whole
    inside = {*tokens.modules()} - {tokens}
    tiled = {inner for m in handle.model.modules() if isinstance(m, TiledModule) for inner in m.modules()}
    for module in outside_layers(handle):
        if isinstance(module, TiledModule):
            module.travel = lambda: handle.travel()
        elif module is tokens or (isinstance(module, nn.Embedding) and module not in inside):
            handle.set_forward(module, functools.partial(_token_wise, handle, module, module.forward, False))
        elif isinstance(module, nn.Linear) and module not in inside | tiled:
            handle.set_forward(module, functools.partial(_token_wise, handle, module, module.forward, True))
        elif any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            handle.set_forward(module, functools.partial(_rotary, handle, module.forward))


def outside_layers(handle: Handle) -> Iterator[nn.Module]:
    """The modules of the model that are neither in its layers nor in its vision tower."""
    inside = {m for layer in handle.facts.layers for m in layer.modules()} | {*tower_modules(handle.model)}
    return (m for m in handle.model.modules() if m not in inside)


def _may_travel(options: Options) -> bool:
    return options.chunk is not None and options.place("hidden") != "device" and bool(options.offload)


def travels(handle: Handle, inputs: StepInputs, kwargs: dict[str, Any]) -> bool:
    """Whether the hidden states of this call lie on the host. Not where a caller gets them, or one chunk holds them.
    Then this thread's backward runs in one thread, until detach."""
    chunk = handle.chunk
    if not _may_travel(handle.options) or chunk is None or handle.head is None or inputs.labels is None:
        return False
    shown = kwargs.get("output_hidden_states") or getattr(handle.model.config, "output_hidden_states", False)
    embedded, mixed = kwargs.get("inputs_embeds") is not None, torch.is_autocast_enabled(inputs.device.type)
    if shown or embedded or mixed or inputs.images or inputs.shape[1] <= chunk:
        return False
    if torch.is_grad_enabled() and (restore := backward_in_this_thread()) is not None:
        handle.ends.callback(weakref.finalize(handle.model, restore))  # once: a model that is dropped is not detached
    return True


def _token_wise(handle: Handle, module: nn.Module, original: Any, x: bool, *args: Any, **kwargs: Any) -> Any:
    """The forward of an embedding, or of a projection, whose input `x` lies on the host too."""
    travel = handle.travel(x=x)
    if travel is None or kwargs or len(args) != 1 or args[0].ndim != 2 + x:
        return original(*args, **kwargs)
    assert handle.chunk is not None
    return tiled_compute(original, args[0], tile=handle.chunk, module=module, travel=travel)


def _rotary(handle: Handle, original: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that makes rotary tables."""
    travel = handle.travel(x=False)
    if travel is None:
        return original(x, position_ids, *args, **kwargs)
    assert handle.chunk is not None
    like, kinds = x.new_empty(0, device=travel.device), position_ids.ndim == 3  # those of text and of images' axes

    def tables(at: Tensor) -> Any:
        return original(like, at.movedim(-1, 0) if kinds else at, *args, **kwargs)

    by_token = position_ids.movedim(0, -1) if kinds else position_ids
    return tiled_compute(tables, by_token, tile=handle.chunk, travel=travel)
