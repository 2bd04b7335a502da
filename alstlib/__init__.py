"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

The public face; names load on first use, so that `import alstlib` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "SPContext": "groups",
    "Options": "handle",
    "Handle": "handle",
    "apply": "hf",
    "SPDataLoader": "data",
    "causal_lm_loss": "objective",
    "Loss": "objective",
    "zero_config": "engine",
    "RunConfig": "config",
    "ROWS": "config",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"alstlib.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'alstlib' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
