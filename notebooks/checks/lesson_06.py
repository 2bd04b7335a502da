"""Exercises of lesson 06: which key/value heads a rank needs, and how heads are divided."""

from __future__ import annotations

from collections.abc import Callable

from checks import Exercise


def _by_points(heads: int, kv_heads: int, ranks: int) -> list[list[int]]:
    """By brute force: each head is `ranks` points long, and so is each part of the line `heads` points."""
    needed: list[set[int]] = [set() for _ in range(ranks)]
    for point in range(heads * ranks):
        needed[point // heads].add(point // ranks * kv_heads // heads)
    return [sorted(own) for own in needed]


def _kv(mine: Callable[[int, int, int], list[list[int]]]) -> str:
    cases = [
        (8, 2, 4),
        (14, 2, 5),
        (15, 5, 7),
        (40, 8, 16),
        (6, 6, 4),
        (12, 3, 32),
        (64, 8, 3),
        (5, 1, 9),
        (98, 49, 49),
    ]
    for heads, kv_heads, ranks in cases:
        got, want = mine(heads, kv_heads, ranks), _by_points(heads, kv_heads, ranks)
        where = f"{heads} query heads, {kv_heads} key/value heads, {ranks} ranks"
        assert len(got) == ranks, f"{where}: the list has {len(got)} entries, one for each rank is wanted"
        for rank, (a, b) in enumerate(zip(got, want)):
            lacks, extra = sorted(set(b) - set(a)), sorted(set(a) - set(b))
            assert not lacks, f"{where}: rank {rank} lacks key/value heads {lacks}"
            assert not extra, f"{where}: rank {rank} does not read key/value heads {extra}"
            assert list(a) == b, f"{where}: rank {rank}'s list is not sorted, or has a head twice"
    return f"{len(cases)} layouts agree with counting point by point"


def _parts(answer: Callable[[], int]) -> str:
    mine, line = answer(), [point // 4 for point in range(10, 20)]  # 10 heads of 4 points, 10 points for each rank
    right = sum(line.count(head) < 4 for head in set(line))
    assert mine == right, f"not {mine}: cut a line of length 10 into 4 equal parts and look at the second"
    return "the part of rank 1 begins inside a head, and ends between two heads"


def _count(answer: Callable[[], int]) -> str:
    mine, right = answer(), sum(28 % p == 0 for p in range(1, 29))
    assert mine == right, f"not {mine}: a rank's part of the line has to begin and end between two heads"
    return f"at the other {28 - right} degrees some heads are shared by rows"


def _even(heads: int, kv_heads: int, ranks: int) -> list[list[int]]:
    """Whole heads only, dealt out one after the other."""
    return [sorted({h * kv_heads // heads for h in range(heads) if h * ranks // heads == r}) for r in range(ranks)]


def _one_too_many(heads: int, kv_heads: int, ranks: int) -> list[list[int]]:
    group = heads // kv_heads
    ends = [(heads * r // ranks // group, heads * (r + 1) // ranks // group) for r in range(ranks)]
    return [list(range(a, min(b, kv_heads - 1) + 1)) for a, b in ends]


def _floating(heads: int, kv_heads: int, ranks: int) -> list[list[int]]:
    """Rounding errors of floats shift an end of the line."""
    width, group = heads / ranks + 1e-9, heads // kv_heads
    return [
        list(range(int(r * width) // group, min(kv_heads - 1, int((r + 1) * width) // group) + 1)) for r in range(ranks)
    ]


EXERCISES = {
    1: Exercise(
        check=_kv,
        hints=(
            "find the first and the last query head of which the rank has a part; all heads between them are its too",
            "the rank's part of the line is from heads * rank / ranks to heads * (rank + 1) / ranks: round the "
            "beginning down; the end is not part of it when it falls between two heads",
            "use whole numbers only: -(-a // b) rounds a / b up; the last query head is one less than the end, "
            "rounded up",
        ),
        mistakes=(_even, _one_too_many, _floating),
    ),
    2: Exercise(
        check=_parts,
        hints=(
            "each rank gets 10 / 4 heads",
            "the second part of the line is from 2.5 to 5: which heads does it cut?",
        ),
        mistakes=(lambda: 2, lambda: 0),
    ),
    3: Exercise(
        check=_count,
        hints=("when does 28 / P heads for each rank mean whole heads?", "count the numbers that divide 28"),
        mistakes=(lambda: 5, lambda: 28),
    ),
}
