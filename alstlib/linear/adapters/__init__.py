"""The kinds of layers with a state that are known: each file here has the adapters of one (`linear.adapter`), and all
of them are found here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from torch import nn

from alstlib.linear.adapter import HARMLESS, Adapter, LayerPart, called_by, plain_forward

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
ADAPTERS = tuple(Adapter.__subclasses__())
TOKENWISE = {"mlp", "moe"}
"""What a hybrid calls layers that hold an MLP or experts alone."""
KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", *TOKENWISE}
"""What `config.layer_types` calls layers with a state, and those."""


def adapter_of(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a module that carries a state in a known way, or None for any other module."""
    calls = called_by(plain_forward(module)) - HARMLESS
    return next((adapter for adapter in ADAPTERS if adapter.knows(module, calls)), None)


def mixers_of(module: nn.Module) -> list[nn.Module]:
    """The modules inside a module that have an adapter."""
    return [m for m in module.modules() if adapter_of(m) is not None]


def is_tokenwise(layer: nn.Module) -> bool:
    """Whether this layer of a hybrid mixes no tokens."""
    return getattr(layer, "block_type", None) in TOKENWISE and not mixers_of(layer)


def attach_states(handle: Any) -> None:
    """Give each known mixer of an attached model's layers a forward that works over ranks and restarts at documents."""
    for layer in handle.facts.layers:
        for mixer in layer.modules():
            if adapter := adapter_of(mixer):
                handle.set_forward(mixer, adapter.forward(mixer, _parts(handle, mixer, adapter.family)))


def _parts(handle: Any, mixer: nn.Module, family: str) -> Callable[[str], LayerPart]:
    return lambda name: LayerPart(handle, (mixer, name), family)
