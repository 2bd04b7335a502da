"""What layers leave for each other besides their output, such as keys and values (Gemma 3n, Gemma 4), in a mapping that
each of them gets.

A layer that is recomputed runs without a graph at first, so that what it leaves would have no gradient. Here these
tensors are inputs and outputs of the layer: autograd brings the gradients of the layers that read them to the one that
made them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def is_shared(value: Any) -> bool:
    """Whether a layer's further argument is a mapping in which layers leave something for each other."""
    return isinstance(value, MutableMapping)


@dataclass
class Shared:
    """How to call a layer with further arguments that `apart` took apart. It keeps no mapping: a recompute that held
    one would hold the graph that it is a part of."""

    spec: Any
    kinds: dict[int, Any]
    """The mappings' kinds, by their places among the arguments."""
    held: Any
    made: Any = None
    """How what the layer returns and leaves is put together again, once it has run."""
    left: int = 0
    """Number of tensors that it leaves for other layers, the last of those that it makes."""

    def run(self, layer: Callable[..., Any], leaves: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the layer returns and leaves for other layers, flat: its output comes first."""
        before: list[Any] = tree_unflatten(list(tensors), self.held)
        mappings = [kind(held) for kind, held in zip(self.kinds.values(), before)]
        filled = dict(enumerate(leaves)) | dict(zip(self.kinds, mappings))
        args, kwargs = tree_unflatten(list(filled.values()), self.spec)
        out = layer(*args, **kwargs)
        new = [{k: v for k, v in m.items() if v is not b.get(k)} for m, b in zip(mappings, before)]
        made, self.made = tree_flatten((out, new))
        self.left = len(tree_leaves(new))
        return tuple(made)

    def leave(self, mappings: Sequence[Any], made: Sequence[Any]) -> Any:
        """Let other layers find what the layer has left; returns what it returns."""
        out, left = tree_unflatten(list(made), self.made)
        for mapping, new in zip(mappings, left):
            mapping.update(new)
        return out


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shared, list[Any], list[Tensor], list[Any]]:
    """A layer's further arguments, flat: how to call the layer with them, the arguments with None for each mapping, the
    tensors in the mappings, and the mappings."""
    leaves, spec = tree_flatten((args, kwargs))
    found = {i: value for i, value in enumerate(leaves) if is_shared(value)}
    tensors, held = tree_flatten([dict(mapping) for mapping in found.values()])
    shared = Shared(spec, {i: type(mapping) for i, mapping in found.items()}, held)
    return shared, [None if i in found else value for i, value in enumerate(leaves)], tensors, list(found.values())
