"""Lesson 15: a ring without a mask, and the ratio of heads from which it sends less than Ulysses."""

from collections.abc import Callable
from typing import Any

import torch

from alstlib.base.reference import relative_error

from . import Exercise, Largest


def ring(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(15)
    cases = (([4], 2, 8, 1), ([3, 3], 1, 4, 1), ([5, 1, 7], 3, 6, 1), ([2, 9, 4, 6, 1], 2, 5, 300))
    for rows, heads, width, large in cases:
        made = [torch.randn(3, heads, n, width, generator=generator, dtype=torch.float64) for n in rows]
        qs, ks, vs = ([large * x[0] for x in made], [x[1] for x in made], [x[2] for x in made])
        case = f"{len(rows)} ranks with {rows} rows" + (", large scores" if large > 1 else "")
        want = (0.7 * torch.cat(qs, 1) @ torch.cat(ks, 1).mT).softmax(-1) @ torch.cat(vs, 1)
        given = [[x.clone() for x in xs] for xs in (qs, ks, vs)]
        with Largest() as largest:
            got = function(*given, 0.7)
        assert isinstance(got, list | tuple), f"{case}: a list of outputs is wanted"
        assert len(got) == len(rows), f"{case}: one output for each rank is wanted, not {len(got)}"
        for r, (out, right) in enumerate(zip(got, want.split(rows, 1))):
            shape = list(right.shape)
            assert list(out.shape) == shape, f"{case}: rank {r}: the shape is {list(out.shape)}, not {shape}"
            assert out.isfinite().all(), f"{case}: rank {r}: not all numbers are finite: do exponentials overflow?"
            error = relative_error(out, right)
            assert error < 1e-10, f"{case}: rank {r}: the output differs by {error:.1g} from attention over all keys"
        block = heads * max(rows) * max(*rows, width)
        assert largest.elements <= block, (
            f"{case}: there was a tensor of {largest.elements} numbers, and what one block of keys needs has at most "
            f"{block}: a rank never has the keys of several ranks at once"
        )
    return "one rank to five, with slices of different lengths, and with scores in the hundreds"


def _mean(qs: list[Any], ks: list[Any], vs: list[Any], scale: float) -> list[Any]:
    return [sum((scale * q @ k.mT).softmax(-1) @ v for k, v in zip(ks, vs)) / len(ks) for q in qs]


def _no_ring(qs: list[Any], ks: list[Any], vs: list[Any], scale: float) -> list[Any]:
    return [(scale * q @ torch.cat(ks, 1).mT).softmax(-1) @ torch.cat(vs, 1) for q in qs]


def _overflow(qs: list[Any], ks: list[Any], vs: list[Any], scale: float) -> list[Any]:
    powers = [[(scale * q @ k.mT).exp() for k in ks] for q in qs]
    return [sum(p @ v for p, v in zip(ps, vs)) / sum(p.sum(-1, keepdim=True) for p in ps) for ps in powers]


def _own_block_only(qs: list[Any], ks: list[Any], vs: list[Any], scale: float) -> list[Any]:
    return [(scale * q @ k.mT).softmax(-1) @ v for q, k, v in zip(qs, ks, vs)]


def ratio(answer: Callable[[], Any]) -> str:
    def sent(r: int) -> tuple[float, float]:
        ranks = 8  # for each key/value head, each token of a rank and each number of a head's width
        return 2 * (2 * r + 2) * (ranks - 1) / ranks, 2 * (ranks - 1) + 2 * (ranks - 1 + ranks)

    mine = answer()
    assert isinstance(mine, int), f"{mine!r} is not a whole number"
    assert mine >= 1, f"{mine} query heads cannot share a key/value head"
    exchanged, passed = sent(mine)
    assert passed < exchanged, f"with {mine} query heads for each key/value head the ring does not send less"
    assert mine == 1 or sent(mine - 1)[1] >= sent(mine - 1)[0], f"with {mine - 1} query heads it sends less already"
    return f"with {mine} query heads for each key/value head the ring sends {passed / exchanged:.2f} times as much"


EXERCISES = {
    1: Exercise(
        check=ring,
        hints=(
            "Each rank keeps its queries. It needs an output so far, and the logsumexp of the keys it has seen so far.",
            "For a block: scores, their logsumexp over the keys, and the output of this block alone. Then merge it "
            "with the output so far, as the lesson's `merge` does.",
            "The block of step s on rank r is that of rank r - s. The logsumexp of both is torch.logaddexp of the two; "
            "the weight of each output is exp(its logsumexp - the logsumexp of both).",
        ),
        mistakes=(_mean, _no_ring, _overflow, _own_block_only),
    ),
    2: Exercise(
        check=ratio,
        hints=(
            "Put P = 8 and H = r K into the formulas of the table. The tokens, K and the width of a head cancel.",
            "`mebibytes(tokens, 8, H=8 * r, K=8)` gives both numbers; try r = 1, 2, 3 and so on.",
        ),
        mistakes=(lambda: 11, lambda: 13, lambda: 4),
    ),
}
