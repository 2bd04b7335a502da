"""The reference stack's code under fake tensors makes what it makes with real ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from alstlib.measure import forms, reference_forms
from alstlib.measure.reference_forms import Way, trace

TINY = {"d": 2, "I": 97, "V": 131, "R": 77, "M": 11, "U": 13}
HEADS: dict[str, Any] = {
    "one": ({"k": 2, "q": 3}, 1, "kq"),
    "whole": ({"P": 2, "k": 2, "q": 3}, 2, "Pkq"),
    "shared": ({"K": 2, "m": 2, "g": 3}, 4, "Kmg"),
}


@pytest.mark.parametrize(
    "way",
    [
        Way("llama", mlp=False, loss=False),
        Way("qwen3", heads="whole", mlp=False),
        Way("llama", heads="whole", offload=True),
        Way("qwen3", heads="shared", offload=True),
    ],
    ids=lambda way: way.name,
)
def test_real_tensors_at_small_sizes(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same moments, to the byte and the category."""
    monkeypatch.setattr(forms, "WIDTH", 11)
    monkeypatch.setattr(forms, "HEADS", HEADS)
    monkeypatch.setattr(reference_forms, "SIZES", {**reference_forms.SIZES, **TINY})
    fake = _moments(way)
    monkeypatch.setattr(reference_forms, "FakeTensorMode", lambda **_: contextlib.nullcontext())
    assert _moments(way) == fake
    assert len(fake) > 50


def _moments(way: Way) -> set[tuple[str, frozenset[Any]]]:
    """What was alive where, without what is gone already."""
    return {(place, frozenset(one for one in alive if one[1])) for alive, place in trace(way)[0].items()}
