"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

These are the public names. Each is imported when it is first used, so that `import alstlib` takes no time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def face(package: str, where: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package, from its modules and the names that each gives."""
    module = {name: f"{package}.{m}" for m, names in where.items() for name in names}

    def load(name: str) -> Any:
        if name not in module:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(module[name]), name)

    return load, sorted(module)


__version__ = "0.1.0"
__getattr__, __all__ = face(__name__, {
    "config": ["ROWS", "RunConfig"], "mesh": ["SPContext"], "data.loader": ["SPDataLoader"],
    "hf.handle": ["Handle", "Options"], "hf.attach": ["apply"], "hf.causal_lm_loss": ["Loss", "causal_lm_loss"],
    "hf.block_step": ["block_step"], "hf.token_logps": ["sequence_logps", "token_logps"],
    "hf.trainer": ["TrainerMixin"], "hf.dpo_trainer": ["DPOTrainerMixin"], "streaming.sparse": ["Sparse"],
    "hf.zero_config": ["zero_config"],
})  # fmt: skip


def __dir__() -> list[str]:
    return __all__
