"""The layers with a state of an attached model (`hf.handle.Handle`) get the forward of their adapter."""

from __future__ import annotations

from typing import Any

from torch import nn

from alstlib.linear.adapter import Adapter, LayerPart
from alstlib.linear.adapters import adapter_of


def attach_states(handle: Any) -> None:
    """Give each known mixer of the decoder layers a forward that works over ranks and restarts at documents."""
    for layer in handle.facts.layers:
        for mixer in layer.modules():
            if adapter := adapter_of(mixer):
                _attach(handle, mixer, adapter)


def _attach(handle: Any, mixer: nn.Module, adapter: type[Adapter]) -> None:
    original = mixer.forward
    over = adapter.forward(mixer, lambda name: LayerPart(handle, (mixer, name), adapter.family))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (original if handle.plain else over)(*args, **kwargs)

    handle.set_forward(mixer, forward)
