"""Lesson 24: how many features each rank sends to each rank."""

from collections.abc import Callable
from typing import Any

import torch

from alstlib.data.images import plan_features

from . import Exercise


def counted(function: Callable[..., Any]) -> str:
    cases = [
        (2, 12, [(1, 5), (7, 9)], [1, 0]),
        (3, 33, [(0, 4), (4, 5), (9, 28), (30, 33)], [2, 2, 0, 1]),
        (5, 40, [(3, 39)], [4]),
        (4, 24, [(2, 4), (6, 12), (12, 13)], [3, 3, 3]),
        (1, 7, [(1, 3)], [0]),
    ]
    for ranks, tokens, spans, owners in cases:
        at = [torch.arange(*span) for span in spans]
        wanted = [plan_features(at, owners, tokens, ranks, r).to_ranks for r in range(ranks)]
        got = [list(map(int, line)) for line in function(at, owners, tokens, ranks)]
        where = f"{tokens} tokens on {ranks} ranks, images at {spans} of the ranks {owners}"
        shape = [len(line) for line in got]
        assert shape == [ranks] * ranks, f"{where}: the answer must have {ranks} lists of {ranks} numbers"
        for source in range(ranks):
            assert got[source] == wanted[source], (
                f"{where}: rank {source} sends {wanted[source]} features to the ranks in turn, not {got[source]}"
            )
    return "images that cross borders, ranks without an image, and features that stay where they are"


def _counts(at: Any, ranks: int, pair: Callable[..., tuple[int, int]]) -> list[list[int]]:
    made = [[0] * ranks for _ in range(ranks)]
    for i, places in enumerate(at):
        for place in places.tolist():
            source, target = pair(i, place)
            made[source][target] += 1
    return made


def _transposed(at: Any, owners: Any, tokens: int, ranks: int) -> Any:
    return _counts(at, ranks, lambda i, place: (place // (tokens // ranks), owners[i]))


def _whole_images(at: Any, owners: Any, tokens: int, ranks: int) -> Any:
    """An image goes to the slice of its first placeholder."""
    return _counts(at, ranks, lambda i, _: (owners[i], int(at[i][0]) // (tokens // ranks)))


def _in_turn(at: Any, owners: Any, tokens: int, ranks: int) -> Any:
    """Tokens are dealt out one by one."""
    return _counts(at, ranks, lambda i, place: (owners[i], place % ranks))


def _without_own(at: Any, owners: Any, tokens: int, ranks: int) -> Any:
    made = _counts(at, ranks, lambda i, place: (owners[i], place // (tokens // ranks)))
    return [[0 if source == target else n for target, n in enumerate(line)] for source, line in enumerate(made)]


EXERCISES = {
    1: Exercise(
        check=counted,
        hints=(
            "Two facts decide each feature: the rank that runs its image, and the rank whose slice has its place.",
            "A slice has tokens // ranks places, so the place p lies in the slice of rank p // (tokens // ranks).",
            "Begin with a table of zeros, and add one at [owners[i]][p // (tokens // ranks)] for each p in at[i].",
        ),
        mistakes=(_transposed, _whole_images, _in_turn, _without_own),
    )
}
