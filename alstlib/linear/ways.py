"""The two ways of a layer with a state over ranks, by the rule that chooses one, and what each sends. Without torch, so
that a plan knows it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alstlib.sizing import groups_of

BLOCK = 64
"""Tokens that a kernel works on at a time, as those of the gated delta rule do."""


def way_of(option: str, heads: int, ranks: int) -> str:
    """`heads` where each of several ranks gets at least one of the layer's heads, else `pass`; an `option` other than
    `auto` is taken where it can be."""
    return "heads" if option != "pass" and 1 < ranks <= heads else "pass"


class Sent(NamedTuple):
    """One of the tensors that a rank has of a token."""

    groups: int
    """Heads, or groups of heads that share it."""
    width: int
    """The number of values in each."""
    element_bytes: int


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """The sizes of a layer with a state and heads."""

    keys: int
    values: int
    """A head's state has keys * values numbers."""
    inputs: Sequence[Sent]
    """The tensors that the recurrence gets of a token, all but its weights."""
    output: Sent
    """Its groups are the heads."""
    matrix: bool = True
    """Whether M is a matrix [keys, keys] (delta rules), and not a number for each head (Mamba-2, lightning)."""
    block: int = BLOCK
    """Tokens that its kernel works on at a time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))  # so that layers can be told apart

    @property
    def heads(self) -> int:
        return self.output.groups

    def forward_flops(self, more: int = 0) -> float:
        """Operations of one token in one head, where the kernel works in blocks, with so many more values."""
        keys, values = self.keys, self.values + more
        if self.matrix:
            return 6.0 * keys * values + self.block * (5 * keys + 3 * values)
        return 4.0 * keys * values + 2 * self.block * (keys + values)

    def pair_bytes(self, batch: int = 1) -> int:
        """Bytes of (M, U) of all heads in fp32."""
        return batch * self.heads * (self.keys * self.values + (self.keys**2 if self.matrix else 1)) * 4

    def there(self, ranks: int, rank: int) -> int:
        """Bytes of each of its tokens that a rank sends to others in a forward by heads."""
        return self._to_heads(self.inputs, ranks, rank) + self._to_tokens([self.output], ranks, rank)

    def back(self, ranks: int, rank: int) -> int:
        """Bytes of each of its tokens that a rank sends to others in a backward by heads."""
        return self._to_heads([self.output], ranks, rank) + self._to_tokens(self.inputs, ranks, rank)

    def _bytes(self, tensors: Sequence[Sent], ranks: int, rank: int) -> int:
        """Bytes of a token that the heads of this rank need."""
        needs = [groups_of(sent.groups, self.heads, ranks, rank) for sent in tensors]
        return sum((n.stop - n.start) * sent.width * sent.element_bytes for n, sent in zip(needs, tensors))

    def _to_heads(self, tensors: Sequence[Sent], ranks: int, rank: int) -> int:
        return sum(self._bytes(tensors, ranks, other) for other in range(ranks) if other != rank)

    def _to_tokens(self, tensors: Sequence[Sent], ranks: int, rank: int) -> int:
        return self._bytes(tensors, ranks, rank) * (ranks - 1)
