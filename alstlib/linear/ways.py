"""The sizes of a layer with a state, from which follows its way over ranks. Without torch, so that a plan knows it
too (`planner.state_ways` has what it sends and computes)."""

from __future__ import annotations

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
    inputs: tuple[Sent, ...]
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

    def way(self, option: str, ranks: int) -> str:
        """`heads` where several ranks can have equally many whole heads each, with groups split or shared evenly, else
        `pass`; an `option` other than `auto` is taken where it can be."""
        even = self.heads % ranks == 0 and all(s.groups % ranks == 0 or ranks % s.groups == 0 for s in self.inputs)
        return "heads" if option != "pass" and ranks > 1 and even else "pass"
