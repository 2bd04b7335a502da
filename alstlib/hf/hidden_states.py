"""The hidden states of an attached model that are kept on the host: what is made before its layers and read after them.

With layers in row chunks everything that is as long as the sequence may lie there: embeddings and rotary tables are
made tile by tile and sent to the host; layers, and the norm and head after them, fetch chunks of it. Between these
modules a model handles a tensor on the CPU with the right values, so that what it does with it (a scale, positions that
are added, dropout) is done there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.hf.attention import tokens_along
from alstlib.hf.handle import Handle
from alstlib.hf.pass_state import StepInputs
from alstlib.hf.support import by_longest
from alstlib.options import Options
from alstlib.recompute import backward_in_this_thread
from alstlib.tiled.compute import TiledModule, tiled_compute, tiles_of


def attach_hidden_states(handle: Handle) -> None:
    """Modules outside the layers learn to leave their outputs on the host, and to read them there."""
    if not _may_travel(handle.options):
        return
    tokens: Any = handle.model.get_input_embeddings()  # with an adapter around it, that as a whole
    inside = {id(m) for m in tokens.modules() if m is not tokens}
    for module in _outside_layers(handle):
        if isinstance(module, TiledModule):
            module.travel = lambda: handle.travel()
        elif module is tokens or (isinstance(module, nn.Embedding) and id(module) not in inside):
            handle.set_forward(module, _embedding(handle, module, module.forward))
        elif any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            handle.set_forward(module, _rotary(handle, module, module.forward))


def _outside_layers(handle: Handle) -> Iterator[nn.Module]:
    inside = {id(m) for layer in handle.facts.layers for m in layer.modules()}
    return (m for m in handle.model.modules() if id(m) not in inside)


def _may_travel(options: Options) -> bool:
    return options.chunk is not None and options.place("hidden") != "device" and bool(options.offload)


def travels(handle: Handle, inputs: StepInputs, kwargs: dict[str, Any]) -> bool:
    """Whether the hidden states of this call lie on the host. Not where a caller gets them, or one chunk holds them.
    Then this thread's backward runs in one thread, until detach."""
    chunk = handle.chunk
    if chunk is None or not _may_travel(handle.options):
        return False
    if handle.head is None or inputs.labels is None or inputs.shape[1] <= chunk:
        return False
    if kwargs.get("inputs_embeds") is not None:
        return False
    if kwargs.get("output_hidden_states") or getattr(handle.model.config, "output_hidden_states", False):
        return False
    if torch.is_autocast_enabled(inputs.device.type):
        return False
    if torch.is_grad_enabled() and (restore := backward_in_this_thread()) is not None:
        handle.on_detach(restore)
    return True


def _embedding(handle: Handle, module: nn.Module, original: Any) -> Any:
    def trainable() -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad]

    def forward(*args: Any, **kwargs: Any) -> Any:
        travel = None if handle.plain else handle.travel(x=False)
        if travel is None or kwargs or len(args) != 1 or args[0].ndim != 2:
            return original(*args, **kwargs)
        assert handle.chunk is not None
        return tiled_compute(
            original, args[0], trainable, tile=handle.chunk, module=module, travel=travel
        )  # fmt: skip

    return forward


def _rotary(handle: Handle, module: nn.Module, original: Any) -> Any:
    sees_longest = by_longest(module)  # then every tile must see it

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        travel = None if handle.plain else handle.travel()
        if travel is None:
            return original(x, position_ids, *args, **kwargs)
        assert handle.chunk is not None
        length = position_ids.shape[-1]
        along = tokens_along(position_ids)
        like, courier = torch.empty(0, dtype=x.dtype, device=travel.device), travel.courier()
        longest = position_ids[..., :0]
        if sees_longest:
            longest = position_ids.max().expand(*position_ids.shape[:-1], 1)
        made: list[Tensor] = []
        for rows in tiles_of(length, handle.chunk):
            at = torch.cat([position_ids[..., rows], longest], -1)
            table = original(like, at, *args, **kwargs)
            alone = isinstance(table, Tensor)  # of complex numbers, and not (cos, sin)
            out = (table,) if alone else table
            if any(t.shape[along] != at.shape[-1] for t in out):
                raise ValueError(
                    f"{type(module).__name__} makes tables {[tuple(t.shape) for t in out]} for positions "
                    f"{tuple(at.shape)}, which cannot be cut by tokens: use on_host='none'"
                )
            made = made or [
                courier.empty((*t.shape[:along], length, *t.shape[along:][1:]), t.dtype) for t in out
            ]  # fmt: skip
            count = rows.stop - rows.start
            for to, t in zip(made, out):
                courier.send(to.narrow(along, rows.start, count), t.narrow(along, 0, count))
        courier.finish()
        return made[0] if alone else tuple(made)

    return forward
