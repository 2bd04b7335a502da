"""Lesson 25: how far labels look back, the theta that reaches a length, and what attention computes."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from . import Exercise


def _distances(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """By looking at all places before each."""
    found = []
    for name in (i - 1 for i, label in enumerate(labels) if label != -100):
        places = [i for i in range(name) if ids[i] == ids[name] and labels[i + 1] == -100]
        found.append(name - places[-1] if places else 0)
    return found


def check_distances(function: Callable[..., Any]) -> str:
    ignored, drawn = -100, random.Random(0)
    cases: dict[str, tuple[list[int], list[int]]] = {
        "one question": ([9, 5, 7, 1, 5, 9], [ignored] * 5 + [9]),
        "a name that stood in a question before": (
            [9, 5, 1, 1, 5, 9, 1, 5, 9], [ignored] * 5 + [9, ignored, ignored, 9],
        ),
        "a name that stood twice": ([9, 5, 9, 5, 1, 5, 9], [ignored] * 6 + [9]),
        "a name that never stood": ([9, 5, 1, 6, 9], [ignored] * 4 + [9]),
        "no label": ([1, 2, 3], [ignored] * 3),
    }  # fmt: skip
    for number in range(20):
        ids = [drawn.randrange(6) for _ in range(40)]
        labels = [ignored, *(token if drawn.random() < 0.2 else ignored for token in ids[1:])]
        cases[f"random tokens, {number}"] = ids, labels
    for what, (ids, labels) in cases.items():
        want = _distances(ids, labels)
        got = list(map(int, function(list(ids), list(labels))))
        assert got == want, f"{what} (ids {ids}, labels {labels}): the distances are {want}, not {got}"
    return "names that stood in other questions do not count"


def _first_place(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    names = [i - 1 for i, label in enumerate(labels) if label != -100]
    return [name - list(ids).index(ids[name]) for name in names]


def _with_questions(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    found = []
    for name in (i - 1 for i, label in enumerate(labels) if label != -100):
        places = [i for i in range(name) if ids[i] == ids[name]]
        found.append(name - places[-1] if places else 0)
    return found


def _from_the_answer(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    return [distance + 1 if distance else 0 for distance in _distances(ids, labels)]


def _first(theta: float, dim: int, trained: int, least: float = 2 * math.pi) -> int:
    """The first pair that turns by less than `least` radians."""
    return next(i for i in range(dim // 2) if trained * theta ** (-2 * i / dim) < least)


def check_theta(function: Callable[..., Any]) -> str:
    for theta, dim, trained, wanted in (
        (1e5, 32, 2048, 32768), (1e4, 64, 4096, 8192), (5e5, 128, 8192, 131072), (1e6, 6, 7, 8), (1e4, 16, 300, 301),
    ):  # fmt: skip
        pair = _first(theta, dim, trained)
        want = theta * (wanted / trained) ** (dim / (2 * pair))
        got = float(function(theta, dim, trained, wanted))
        what = f"theta={theta:,.0f}, dim={dim}, trained={trained:,}, wanted={wanted:,}"
        assert math.isclose(got, want, rel_tol=1e-6), f"{what}: pair {pair} decides: {want:,.1f}, not {got:,.1f}"
    return "the angle of that pair at the new distance is the one that it had at the old"


def _in_radians(theta: float, dim: int, trained: int, wanted: int) -> float:
    return float(theta * (wanted / trained) ** (dim / (2 * max(1, _first(theta, dim, trained, 1.0)))))


def _in_proportion(theta: float, dim: int, trained: int, wanted: int) -> float:
    return theta * wanted / trained


def _last_pair(theta: float, dim: int, trained: int, wanted: int) -> float:
    return float(theta * (wanted / trained) ** (dim / (dim - 2)))


def _one_too_fast(theta: float, dim: int, trained: int, wanted: int) -> float:
    return float(theta * (wanted / trained) ** (dim / (2 * max(1, _first(theta, dim, trained) - 1))))


def check_ratio(function: Callable[[], Any]) -> str:
    want = sum(range(1, 32_769)) / (16 * sum(range(1, 2049)))
    got = function()
    assert abs(got - want) < 0.06, f"{got} is not right: count the keys that each query sees, 1 for the first"
    return "as many tokens, and nearly sixteen times the pairs"


EXERCISES = {
    1: Exercise(
        check=check_distances,
        hints=(
            "Go through the places from the left, and remember in a dictionary where each token stood last.",
            "At a place whose next token has a label, note the distance; at any other place, update the dictionary.",
            "`last.get(token, place)` gives the place itself for a token that never stood, and so the distance 0.",
        ),
        mistakes=(_first_place, _with_questions, _from_the_answer),
    ),
    2: Exercise(
        check=check_theta,
        hints=(
            "Over a distance, pair i turns by distance * theta ** (-2 * i / dim) radians; a whole turn is 2 pi.",
            "Find the first pair i with less than a whole turn. Its reach is trained * (new / theta) ** (2 * i / dim).",
            "Solve that for the new theta: theta * (wanted / trained) ** (dim / (2 * i)).",
        ),
        mistakes=(_in_radians, _in_proportion, _last_pair, _one_too_fast),
    ),
    3: Exercise(
        check=check_ratio,
        hints=(
            "The first query sees one key, the second two, and so on: add them up for one text.",
            "A text of n tokens has n (n + 1) / 2 pairs: divide the long text's by 16 times a short one's.",
        ),
        mistakes=(lambda: 256, lambda: 1),
    ),
}
