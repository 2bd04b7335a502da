"""Faces of packages: names that load their module on first use, so that an import costs nothing."""

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
