"""Changes to modules that can be undone. Deep copies of the modules do not have them.

A deep copy shares functions with its original: a `forward` or a hook that was put on a module would go on working for
the original inside the copy. So every changed module is copied as it was before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Back = Callable[[nn.Module, Callable[[Any], Any]], None]
"""Takes one change back from a module or its copy; the second argument gives the counterpart of an object in it."""


class Edits:
    """Changes to modules, until `close`. What somebody else has put over a change meanwhile stays."""

    def __init__(self) -> None:
        self._backs: dict[nn.Module, list[Back]] = {}

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Give this instance another attribute, which is neither a parameter nor a child."""
        there, before = name in module.__dict__, module.__dict__.get(name)

        def back(m: nn.Module, same: Callable[[Any], Any]) -> None:
            if m.__dict__.get(name) is not value:
                return
            if there:
                m.__dict__[name] = same(before)
            else:
                del m.__dict__[name]

        module.__dict__[name] = value
        self._add(module, back)

    def swap(self, parent: nn.Module, name: str, new: nn.Module) -> None:
        """Put another child in a child's place."""
        old = parent._modules[name]

        def back(m: nn.Module, same: Callable[[Any], Any]) -> None:
            if m._modules.get(name) is same(new):
                m._modules[name] = same(old)

        parent._modules[name] = new
        self._add(parent, back)

    def hook(self, module: nn.Module, made: RemovableHandle) -> None:
        """Keep this forward hook or forward pre-hook of the module."""

        def back(m: nn.Module, same: Callable[[Any], Any]) -> None:
            for name in [n for n in m.__dict__ if n.startswith(("_forward_hooks", "_forward_pre_hooks"))]:
                m.__dict__[name].pop(made.id, None)

        self._add(module, back)

    def close(self) -> None:
        """Take everything back."""
        for module, backs in self._backs.items():
            for back in reversed(backs):
                back(module, lambda x: x)
        self._backs.clear()

    def _add(self, module: nn.Module, back: Back) -> None:
        if module not in self._backs:
            self._backs[module] = []
            self.set(module, "__deepcopy__", functools.partial(self._copy, module))
        self._backs[module].append(back)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the module as it was."""
        ours = module.__dict__.pop("__deepcopy__")
        try:
            twin = copy.deepcopy(module, memo)
        finally:
            module.__dict__["__deepcopy__"] = ours
        for back in reversed(self._backs[module]):
            back(twin, lambda x: copy.deepcopy(x, memo))
        return twin
