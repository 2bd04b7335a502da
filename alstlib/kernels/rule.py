"""`Rule` is what a call of attention is told, and `Attended` is what its backward needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """How scores are made of products, and which keys a query attends to."""

    scale: float
    window: int | None = None
    """Query i attends to keys (i - window, i]; None: to all keys up to its own."""
    softcap: float | None = None
    """Scores s become c * tanh(s / c)."""

    @property
    def given(self) -> dict[str, Any]:
        """Keyword arguments of a kernel besides the scale."""
        return {} if self.softcap is None else {"softcap": self.softcap}


class Attended(NamedTuple):
    """A call of attention as its backward needs it: what went in, and what came out."""

    q: Tensor
    """[B, H, S, D]"""
    k: Tensor
    """[B, K, N, D]"""
    v: Tensor
    """[B, K, N, V]"""
    out: Tensor
    """[B, H, S, V]"""
    lse: Tensor
    """[B, H, S], logsumexp of the scores, in fp32."""
