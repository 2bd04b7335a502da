"""The sizes of a layer with a state, from which follow its way over ranks and what that sends. Without torch, so that a
plan knows it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CHUNK_SIZE = 64
"""Tokens that a kernel works on at a time (its chunk size), as those of the gated delta rule do."""


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
    chunk_size: int = CHUNK_SIZE
    """Tokens that its kernel works on at a time."""

    @property
    def heads(self) -> int:
        return self.output.groups

    def forward_flops(self, more: int = 0) -> float:
        """Operations of one token in one head, where the kernel works in chunks, with so many more values."""
        keys, values = self.keys, self.values + more
        if self.matrix:
            return 6.0 * keys * values + self.chunk_size * (5 * keys + 3 * values)
        return 4.0 * keys * values + 2 * self.chunk_size * (keys + values)

    def pair_bytes(self, batch: int = 1) -> int:
        """Bytes of (M, U) of all heads in fp32."""
        return batch * self.heads * (self.keys * self.values + (self.keys**2 if self.matrix else 1)) * 4

    def way(self, option: str, ranks: int) -> str:
        """`heads` where several ranks can have equally many whole heads each, with groups split or shared evenly, else
        `pass`; an `option` other than `auto` is taken where it can be."""
        even = self.heads % ranks == 0 and all(s.groups % ranks == 0 or ranks % s.groups == 0 for s in self.inputs)
        return "heads" if option != "pass" and ranks > 1 and even else "pass"

    def exchanged(self, ranks: int) -> int:
        """Bytes of each of its tokens that a rank sends to others in a forward by heads, and again in its backward."""
        needs = [max(1, sent.groups // ranks) * sent.width * sent.element_bytes for sent in (*self.inputs, self.output)]
        return sum(needs) * (ranks - 1)
