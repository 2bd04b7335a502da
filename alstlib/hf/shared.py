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
from torch.utils._pytree import tree_flatten, tree_unflatten


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
    left: Any = None
    alone: bool = True
    """Whether the layer returns a tensor, and no tuple."""

    def run(
        self, layer: Callable[..., Any], leaves: Sequence[Any], tensors: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """What the layer returns, and what it leaves for other layers."""
        before: list[Any] = tree_unflatten(list(tensors), self.held)
        mappings = [kind(held) for kind, held in zip(self.kinds.values(), before)]
        filled = dict(enumerate(leaves)) | dict(zip(self.kinds, mappings))
        args, kwargs = tree_unflatten(list(filled.values()), self.spec)
        out = layer(*args, **kwargs)
        new = [{k: v for k, v in m.items() if v is not b.get(k)} for m, b in zip(mappings, before)]
        self.alone = isinstance(out, Tensor)
        left, self.left = tree_flatten(new)
        return out, left

    def joined(self, out: Any, left: Sequence[Tensor]) -> Any:
        """One tuple of what the layer returns and leaves; what it returns as it is, where it leaves nothing."""
        return (*((out,) if self.alone else out), *left) if left else out

    def leave(self, mappings: Sequence[Any], joined: Any) -> Any:
        """Let other layers find what the layer has left; returns what it returns."""
        many = self.left.num_leaves
        if not many:
            return joined
        for mapping, new in zip(mappings, tree_unflatten(list(joined[-many:]), self.left)):
            mapping.update(new)
        return joined[0] if self.alone else joined[:-many]


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shared, list[Any], list[Tensor], list[Any]]:
    """A layer's further arguments, flat: how to call the layer with them, the arguments with None for each mapping, the
    tensors in the mappings, and the mappings."""
    leaves, spec = tree_flatten((args, kwargs))
    found = {i: value for i, value in enumerate(leaves) if is_shared(value)}
    tensors, held = tree_flatten([dict(mapping) for mapping in found.values()])
    shared = Shared(spec, {i: type(mapping) for i, mapping in found.items()}, held)
    return shared, [None if i in found else value for i, value in enumerate(leaves)], tensors, list(found.values())
