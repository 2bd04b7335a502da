"""Lesson 23: two trajectories merged by hand, and what a tree costs compared with its paths one by one."""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import Exercise

VOCABULARY = 7


def merged(function: Callable[..., Any]) -> str:
    dice = random.Random(23)
    torch.manual_seed(23)
    model = [torch.randn(n, 5, dtype=torch.float64) for n in (VOCABULARY, 5, VOCABULARY)]
    for case, paths in {
        "both share three tokens, and have equal tokens again further on": ([1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 5, 6, 2]),
        "one is the beginning of the other": ([4, 4, 1, 2], [4, 4]),
        "nothing is shared": ([3, 1, 1], [2, 1, 1, 5]),
        "both are the same": ([6, 0, 6, 0, 1], [6, 0, 6, 0, 1]),
        "only the first token is shared": ([2, 3], [2, 5, 3, 3]),
    }.items():
        both = [_trajectory(path, dice) for path in paths]
        rows, terms = function(*copy.deepcopy(both))
        _check_form(case, rows, terms)
        least = len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})
        assert len(rows) == least, f"{case}: {paths[0]} and {paths[1]} take {least} rows, not {len(rows)}"
        one_by_one = [_row_by_row(one) for one in both]
        want = sum((_step(model, *one) for one in one_by_one), torch.zeros(()))
        got = _step(model, rows, terms)
        what = "the loss" if not torch.isclose(got[:1], want[:1]) else "the gradient of the loss"
        assert torch.allclose(got, want, rtol=1e-9), f"{case}: {what} is not that of the two one by one"
    return "each token once, and the gradients of the trajectories one by one"


def _trajectory(path: list[int], dice: random.Random) -> dict[str, Any]:
    labels = [-100 if dice.random() < 0.25 else token for token in path]
    return {"input_ids": path, "labels": labels, "weights": [dice.uniform(-1, 2) for _ in path]}


def _check_form(case: str, rows: Any, terms: Any) -> None:
    for i, (token, parent) in enumerate(rows):
        assert 0 <= token < VOCABULARY, f"{case}: row {i} has the token {token}, which neither trajectory has"
        assert -1 <= parent < i, f"{case}: row {i} comes after row {parent}, which is not before it in the list"
    for row, label, _ in terms:
        assert 0 <= label < VOCABULARY, f"{case}: {label} is no label; tokens with -100 are not predicted"
        assert 0 <= row < len(rows), f"{case}: a term names row {row}, which is not there"


def _row_by_row(one: dict[str, Any]) -> tuple[Any, Any]:
    rows = [(token, i - 1) for i, token in enumerate(one["input_ids"])]
    terms = [(i - 1, label, w) for i, (label, w) in enumerate(zip(one["labels"], one["weights"])) if i and label >= 0]
    return rows, terms


def _step(model: list[Tensor], rows: Any, terms: Any) -> Tensor:
    """The loss and all gradients of a small recurrent model, whose every row depends on all rows of its path."""
    embed, mix, head = (p.clone().requires_grad_() for p in model)
    states: list[Tensor] = []
    for token, parent in rows:
        before = states[parent] if parent >= 0 else torch.zeros(5, dtype=torch.float64)
        states.append((embed[token] + before @ mix).tanh())
    zero = sum(p.sum() * 0 for p in (embed, mix, head))
    loss = zero - sum(w * (head @ states[row]).log_softmax(0)[label] for row, label, w in terms)
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in (embed, mix, head) if p.grad is not None)])


def _with_keys(a: Any, b: Any, key: Callable[[Any, int, int], Any], shift: int = 1, **how: bool) -> Any:
    rows: list[Any] = []
    terms: list[Any] = []
    at: dict[Any, int] = {}
    for number, one in enumerate((a, b)):
        before, ids = -1, one["input_ids"]
        for i, (token, label, w) in enumerate(zip(ids, one["labels"], one["weights"])):
            new = key(ids, i, number) not in at
            if new:
                at[key(ids, i, number)] = len(rows)
                rows.append((token, len(rows) - 1 if how.get("chained") else before))
            row = before if shift else at[key(ids, i, number)]
            if (label >= 0 or how.get("all_labels")) and row >= 0 and (new or not how.get("own_labels")):
                terms.append((row, label, w))
            before = at[key(ids, i, number)]
    return rows, terms


def _path(ids: Any, i: int, _: int) -> Any:
    return tuple(ids[: i + 1])


def _nothing_shared(a: Any, b: Any) -> Any:
    return _with_keys(a, b, lambda ids, i, number: (i, number))


def _equal_places(a: Any, b: Any) -> Any:
    """Merges equal tokens at the same place, after a branch too."""
    return _with_keys(a, b, lambda ids, i, number: (i, ids[i]))


def _labels_of_the_first(a: Any, b: Any) -> Any:
    return _with_keys(a, b, _path, own_labels=True)


def _not_shifted(a: Any, b: Any) -> Any:
    return _with_keys(a, b, _path, shift=0)


def _every_label(a: Any, b: Any) -> Any:
    return _with_keys(a, b, _path, all_labels=True)


def _one_after_another(a: Any, b: Any) -> Any:
    """The second branch goes on where the first ends."""
    return _with_keys(a, b, _path, chained=True)


def ratio(function: Callable[..., Any]) -> str:
    for prefix, branches, own, token, pair in (
        (3000, 8, 1000, 40.0, 0.5), (0, 5, 2000, 3.0, 1.0), (4000, 1, 1500, 1.0, 1.0), (2000, 30, 100, 0.0, 2.0),
        (700, 4, 2100, 1.0, 0.0), (800_000, 8, 200_000, 1.6e10, 5.2e5),
    ):  # fmt: skip
        whole = prefix + own
        alone = branches * (whole * token + whole * (whole + 1) / 2 * pair)
        again = (branches - 1) * (prefix * token + prefix * (prefix + 1) / 2 * pair)
        want, got = 1 - again / alone, function(prefix, branches, own, token, pair)
        case = f"prefix={prefix:,}, branches={branches}, own={own:,}, token={token:g}, pair={pair:g}"
        assert abs(got - want) <= 0.01 * want, f"{case}: the tree costs {want:.3f} of one by one, not {got:.3f}"
    return "from trees that share nothing to trees that share nearly all"


def _own_keys_only(prefix: float, branches: int, own: float, token: float, pair: float) -> float:
    tree = (prefix + branches * own) * token + (prefix**2 + branches * own**2) / 2 * pair
    return tree / (branches * ((prefix + own) * token + (prefix + own) ** 2 / 2 * pair))


def _tokens_only(prefix: float, branches: int, own: float, token: float, pair: float) -> float:
    return (prefix + branches * own) / (branches * (prefix + own))


def _the_other_way(prefix: float, branches: int, own: float, token: float, pair: float) -> float:
    alone = branches * ((prefix + own) * token + (prefix + own) ** 2 / 2 * pair)
    return alone / (alone - (branches - 1) * (prefix * token + prefix**2 / 2 * pair))


EXERCISES = {
    1: Exercise(
        check=merged,
        hints=(
            "Two tokens are the same row if all tokens before them are equal too, and not only if they are equal.",
            "Keep a dictionary from a prefix (a tuple of tokens) to the number of its row, and go through both "
            "trajectories token by token. A prefix that is not in the dictionary is a new row, whose parent is the row "
            "of the token before.",
            "The label of a token is predicted by the row of the token before it. Append (that row, label, weight) for "
            "each token but the first of both trajectories whose label is not -100, whether its row is new or not.",
        ),
        mistakes=(
            _nothing_shared, _equal_places, _labels_of_the_first, _not_shifted, _every_label, _one_after_another,
        ),
    ),
    2: Exercise(
        check=ratio,
        hints=(
            "A path of S tokens has S tokens and S^2 / 2 pairs. What does a branch have that begins after P tokens?",
            "A branch has own tokens and ((prefix + own)^2 - prefix^2) / 2 pairs; there are `branches` of them and one "
            "prefix.",
        ),
        mistakes=(_own_keys_only, _tokens_only, _the_other_way, lambda *_: 1.0),
    ),
}  # fmt: skip
