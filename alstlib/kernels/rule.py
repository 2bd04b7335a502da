"""What a call of attention is told (`Rule`, `Packed`), and what its backward needs (`Attended`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """How scores are made of products, and which keys a query attends to."""

    scale: float
    window: int | None = None
    """Number of keys that a query attends to, its own included; None for all keys up to its own."""
    softcap: float | None = None
    """The number c with which scores s become c * tanh(s / c); None for none."""


class Packed(NamedTuple):
    """The documents of a batch that one call of a kernel takes, as the [B * S] tokens of one sequence."""

    cu_seqlens: Tensor
    """Offsets of the documents, [documents + 1] int32 on the device: 0 first and B * S last."""
    longest: int
    """Tokens of the longest document."""
    window: int | None
    """Number of keys that a query attends to, its own included; None for all keys up to its own."""


class Attended(NamedTuple):
    """A call of attention as its backward needs it: what went in, and what came out."""

    q: Tensor
    """Queries [B, H, S, D]."""
    k: Tensor
    """Keys [B, K, N, D]."""
    v: Tensor
    """Values [B, K, N, V]."""
    out: Tensor
    """Output [B, H, S, V]."""
    lse: Tensor
    """Logsumexp of the scores [B, H, S], in fp32."""

    def part(self, of: Any) -> Attended:
        """Views of what a part of the call (`spans.Piece`, `paged.HeadPart`) has of it."""
        queries, keys = of.queries_of, of.keys_of
        return Attended(queries(self.q), keys(self.k), keys(self.v), queries(self.out), queries(self.lse))
