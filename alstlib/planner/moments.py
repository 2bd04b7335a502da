"""The moments of a step, as `forms.json` has them (`measure.forms` reads them off the real code), and the largest of
them at some sizes. Without torch, in microseconds."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("forms.json")
KERNEL = "#kernel"
"""Marks a moment within attention's backward."""
REFERENCE = "reference"
DENSE_GRANITE = "granitemoehybrid-dense"
"""What forms call Granite 4 without experts."""
SAME = {"mistral": "llama", "smollm3": "llama"}
"""Decoders whose step is the same as that of another decoder (`tests/measure/test_forms.py`)."""


@functools.cache
def _factors(names: str) -> tuple[tuple[str, int], ...]:
    parts = (name.partition("^") for name in names.split())
    return tuple((name, int(power or 1)) for name, _, power in parts)


def product(names: str, sizes: Mapping[str, float]) -> float:
    """The product of these names' sizes: `R H`, `d^2 k`."""
    result = 1.0
    for name, power in _factors(names):
        result *= sizes[name] ** power
    return result


@functools.cache
def forms() -> dict[str, Any]:
    """forms.json, with each moment as (place, {category: [(coefficient, names)]})."""
    found = json.loads(FILE.read_text())

    def terms(text: str) -> list[tuple[float, str]]:
        parts = (part.partition(" ") for part in text.split(" + "))
        return [(float(number), names) for number, _, names in parts]

    found["moments"] = [(place, {kind: terms(t) for kind, t in kinds.items()}) for place, kinds in found["moments"]]
    return found


def families() -> list[str]:
    """Decoders that have a form."""
    made = {name.partition(".")[0] for name in forms()["tiles"]} - {REFERENCE, DENSE_GRANITE}
    return sorted([*made, *SAME])


Kinds = Mapping[str, list[tuple[float, str]]]
"""What is alive at a moment: for each category, (coefficient, names) of a sum."""


def largest_of(
    moments: Iterable[tuple[str, Kinds]],
    sizes: Mapping[str, float],
    adjust: Callable[[str, Kinds, dict[str, float]], None] = lambda *_: None,
    held: Callable[[str], float] = lambda part: 0.0,
) -> tuple[dict[str, float], str]:
    """(bytes by category, place) of the largest moment at these sizes, each adjusted for what its form leaves open.
    `held` gives the bytes of model states in a part of the model (`part_of`), which count for which is the largest."""
    best: dict[str, float] = {}
    where, most = "", 0.0
    for place, kinds in moments:
        found = {kind: sum(c * product(n, sizes) for c, n in terms) for kind, terms in kinds.items()}
        adjust(place, kinds, found)
        if (total := sum(found.values()) + held(part_of(place))) > most:
            best, where, most = found, place.removesuffix(KERNEL), total
    return best, where


def moments_of(way: str) -> list[Any]:
    """The moments of a way. Outside the layers those of chunks whose tiles are not shorter are the same, and more."""
    made = forms()
    found = [made["moments"][i] for i in made["ways"][way]]
    if way.endswith("+fine"):
        others = (made["moments"][i] for i in made["ways"][way.removesuffix("+fine")])
        found += [m for m in others if not in_layer(m[0])]
    return found


def in_layer(place: str) -> bool:
    """Does a module's path lie in a decoder layer?"""
    return re.search(r"\.\d", place) is not None


def part_of(place: str) -> str:
    """Where in the model a module lies: `layer`, `mlp` (a layer's) or `outside`."""
    return "outside" if not in_layer(place) else "mlp" if re.search(r"\.\d+\.mlp", place) else "layer"


def of_tokens(names: str) -> bool:
    """Does a term count tokens (or is it a number)? Others are of weights."""
    return not names or not {"R", "C", "c", "M", "U", "N", "D", "t"}.isdisjoint(names.split())


def frozen(kinds: Kinds) -> Kinds:
    """A moment of a model whose weights are frozen: without terms that have no tokens, which are weights' gradients.
    The inputs that only these gradients need are still counted."""
    return {kind: [(c, names) for c, names in terms if of_tokens(names)] for kind, terms in kinds.items()}
