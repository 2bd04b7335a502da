"""Types, shapes and ranges of what a user hands to a call of an attached model: what is wrong is named before anything
is computed."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alstlib.tiled.logits import readable

FORMS = {
    "input_ids": "[B, L]",
    "inputs_embeds": "[B, L, width]",
    "position_ids": "[B, L] or [1, L]",
    "labels": "[B, L]",
    "shift_labels": "[B, L]",
}
"""Shapes of the tensors of a call."""
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments by which transformers' own models are told of packed documents."""


def check_tensors(given: Mapping[str, Any]) -> None:
    """Refuse inputs that are no tensors, or of another shape or dtype (ValueError)."""
    for name, form in FORMS.items():
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is of the type {type(value).__name__}; it must be a tensor {form}")
        if value.ndim != (3 if name == "inputs_embeds" else 2):
            raise ValueError(f"{name} has shape {list(value.shape)}; it must be {form}")
        if name != "inputs_embeds" and value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} has dtype {value.dtype}; it must be torch.int64")


def check_number(
    name: str, value: Any, works: str, least: float = 0.0, most: float = math.inf, whole: bool = False
) -> None:
    """Refuse what is not a number between these (ValueError). A tensor on a GPU is not looked at: that would wait for
    it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if not readable(value):
            return
        value = value.item()
    right = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    if not right or not least <= value <= most or math.isinf(value):
        raise ValueError(f"{name}={value!r} must be {works}")


def integers(name: str, value: Any) -> list[int]:
    """A list of whole numbers, of a list, a tensor or an array [n].

    Raises:
        ValueError: it is something else.
    """
    try:
        return [operator.index(n) for n in (value.tolist() if hasattr(value, "tolist") else value)]
    except TypeError:
        shown = f"of shape {list(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
        raise ValueError(f"{name} {shown} must be one row of whole numbers, such as [0, 5, 12]") from None


def packed_documents(kwargs: dict[str, Any], batch: int, rows: int, sp: int) -> tuple[str, list[int]] | None:
    """What `PACKED` tells of documents, all of which is taken out of `kwargs`: the name, and their offsets.

    Raises:
        ValueError: they contradict each other, or `seq_idx` is of a slice.
    """
    given = {name: kwargs.pop(name, None) for name in PACKED}
    found = {name: integers(name, given[name]) for name in PACKED[:2] if given[name] is not None}
    if (index := given["seq_idx"]) is not None:
        if sp > 1:
            raise ValueError("seq_idx of a slice does not tell where documents begin: leave it out; use cu_seqlens")
        if not isinstance(index, Tensor) or index.shape != (batch, rows):
            shown = list(index.shape) if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(f"seq_idx {shown} must be a tensor [{batch}, {rows}], as input_ids")
        starts = torch.ones_like(index, dtype=torch.bool)
        starts[:, 1:] = index.diff(dim=1) != 0
        found["seq_idx"] = [*starts.flatten().nonzero().flatten().tolist(), batch * rows]
    if not found:
        return None
    first, *others = found
    for name in others:
        check_same_documents(first, found[first], name, found[name], batch, rows * sp)
    return first, found[first]


def check_same_documents(one: str, ours: list[int], other: str, theirs: list[int], batch: int, whole: int) -> None:
    """Refuse offsets of documents that contradict each other (ValueError); a document begins with each row too."""
    starts = set(range(0, batch * whole, whole))
    if starts | set(ours) != starts | set(theirs):
        raise ValueError(
            f"{one}={ours[:8]} and {other}={theirs[:8]} disagree about where documents begin: leave one of them out"
        )
