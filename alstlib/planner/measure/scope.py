"""Where in a model an operation runs, in forward and in backward, so that memory and time can be assigned to modules.

Hooks on the modules say it for forward passes and recomputes; an autograd node remembers where it was made, for its
backward. Nothing here holds a tensor, so that lifetimes stay as they are.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HIDDEN, ATTENTION, MLP, LOSS, EXCHANGE, CHECKPOINTS, STATES = (
    "hidden states", "attention", "mlp", "loss", "exchange", "checkpoints", "states",
)  # fmt: skip
"""Categories of what a step takes: hidden states are embeddings, norms, residuals and their gradients."""

STATEFUL = ("linear_attn", "mamba", "conv")
"""What decoders call their layers with a state."""

ROOT = "model"
"""The path of the model itself."""

_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)(.*)$")


def category(path: str) -> str:
    """The category of what a module makes, from its path in a decoder."""
    if path.endswith(">"):
        return path[path.index("<") + 1 : -1]
    if match := _LAYER.match(path):
        child = match[2].partition(".")[0]
        if child in STATEFUL:
            return STATES
        if "norm" not in child and ("attn" in child or "attention" in child or child == "mixer"):
            return ATTENTION
        return MLP if child in ("mlp", "feed_forward", "ffn", "block_sparse_moe") else HIDDEN
    return HIDDEN if "embed" in path or "rotary" in path or "wte" in path else LOSS


class _Tag(TorchFunctionMode):
    """Writes the place into the autograd nodes that are made there."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.stack:
            tag(out, self.stack[-1])
        return out


def tag(out: Any, place: str) -> None:
    """Write a place into the nodes that made this, and into those before them that have none: functions of ours, which
    no mode sees."""
    first = next((o for o in out if isinstance(o, Tensor)), None) if isinstance(out, tuple | list) else out
    if isinstance(first, Tensor) and first.grad_fn is not None:
        nodes: list[Any] = [first.grad_fn, *(before for before, _ in first.grad_fn.next_functions)]
        for node in filter(None, nodes):
            node.metadata.setdefault("place", place)


class Places(ExitStack):
    """While it is entered, `now()` is the path of the module whose operation runs (of its forward or backward)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack: list[str] = []
        self._tagging: list[Any] = []
        self._last = ROOT
        for name, module in model.named_modules(prefix=ROOT):
            self.callback(module.register_forward_pre_hook(self._enter(name)).remove)
            self.callback(module.register_forward_hook(self._leave, always_call=True).remove)

    def _enter(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self.stack.append(name)
            # that of the module around tags too; within a backward there is none
            tagging = nullcontext() if torch._C._len_torch_function_stack() else _Tag(self.stack)
            tagging.__enter__()
            self._tagging.append(tagging)

        return enter

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        tag(out, self.stack.pop())
        self._tagging.pop().__exit__(None, None, None)

    def wrap(self, thing: Any, method: str, place: str) -> None:
        """What this object's method makes belongs to a category of its own, whichever module calls it."""
        original = getattr(thing, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(f"{self.now()}<{place}>")
            try:
                return original(*args, **kwargs)
            finally:
                self.stack.pop()

        self.enter_context(mock.patch.object(thing, method, wrapped))

    def now(self) -> str:
        if self.stack:
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        place = "" if node is None else node.metadata.get("place", "")
        if not place:  # made by a layer itself while it was recomputed, between its modules
            return _LAYER.sub(r"\1", self._last)
        self._last = place
        return place
