"""Exercises of lesson 09: the search for the longest sequence, and slopes of the committed ablation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from alstlib.runs import results
from checks import Exercise

RUN = Path(__file__).resolve().parents[2] / "papermill_runs" / "results" / "ablation-cpu"


def _search(mine: Callable[[Callable[[int], bool], int], int]) -> str:
    for count, granule in ((0, 7), (1, 256), (2, 1), (3, 5), (5, 256), (22, 256), (1000, 3), (1023, 1), (1024, 64)):
        limit = count * granule + granule // 2  # between two multiples
        calls: list[int] = []

        def fits(length: int, limit: int = limit, granule: int = granule, calls: list[int] = calls) -> bool:
            assert length > 0, f"fits({length}) is called: a step has at least one token"
            assert length % granule == 0, f"fits({length}) is called: that is no multiple of {granule}"
            assert length not in calls, f"fits({length}) is called twice with granule={granule}"
            calls.append(length)
            assert len(calls) < 10_000, f"after 10,000 calls with granule={granule} there is no answer"
            return length <= limit

        got = mine(fits, granule)
        where = f"granule={granule}, where {count} granules fit"
        assert got == count * granule, f"{where}: the answer is {got}; {count * granule} is wanted"
        assert max(calls) <= max(1, 2 * count) * granule, f"{where}: fits({max(calls)}) is more than twice the answer"
        most = 2 * count.bit_length() + 1
        assert len(calls) <= most, f"{where}: fits is called {len(calls)} times; {most} are allowed"
    return "the longest length is found in nine cases, with few steps"


def _points(row: str) -> list[tuple[int, int]]:
    (run,) = (r for r in results.collect(RUN) if r["row"] == row)
    return sorted({t["seq_len"]: t["device_peak_bytes"] for t in run["metrics"]["tried"]}.items())


def _least_squares(points: list[tuple[int, int]]) -> tuple[float, float]:
    """Slope and constant of the line through these points."""
    n, x, y = len(points), sum(a for a, _ in points), sum(b for _, b in points)
    slope = (n * sum(a * b for a, b in points) - x * y) / (n * sum(a * a for a, _ in points) - x * x)
    return slope, (y - slope * x) / n


def _budget(answer: Callable[[], float]) -> str:
    mine = answer()
    slope, constant = _least_squares(_points("baseline"))
    (run,) = (r for r in results.collect(RUN) if r["row"] == "alst")
    right = constant + slope * run["metrics"]["seq_len"]
    assert abs(mine - right) < 0.02 * right, f"{mine:,.0f} bytes are {mine / right:.2f} of the right answer"
    return f"{results.format_bytes(right)}, {right / run['config']['limits']['device_memory']:.1f} times the budget"


def _saving(answer: Callable[[], float]) -> str:
    mine = answer()
    last = {row: _least_squares(_points(row)[-3:])[0]
            for row in ("ulysses", "ulysses+tiled_mlp", "ulysses+offload", "alst")}  # fmt: skip
    alone, then = last["ulysses"] - last["ulysses+tiled_mlp"], last["ulysses+offload"] - last["alst"]
    assert abs(mine - alone) <= 0.02 * alone, f"{mine:,.0f} is not the difference of the two rows' slopes"
    return (
        f"{alone:,.0f} bytes, {alone / last['ulysses']:.0%} of the slope; with offload on it saves {then:,.0f}, "
        f"{then / last['ulysses+offload']:.0%} of the slope that is left"
    )


def _one_by_one(fits: Callable[[int], bool], granule: int) -> int:
    length = 0
    while fits(length + granule):
        length += granule
    return length


def _doubled_only(fits: Callable[[int], bool], granule: int) -> int:
    length = granule
    while fits(length):
        length *= 2
    return length // 2


def _from_high(fits: Callable[[int], bool], granule: int) -> int:
    low, high = 0, 1 << 12
    while high > low + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * granule) else (low, middle)
    return low * granule


EXERCISES = {
    1: Exercise(
        check=_search,
        hints=(
            "first find a length that does not fit, with few calls and without going far beyond the answer",
            "double the number of granules until a step does not fit; the answer is then between the last two numbers",
            "keep `low` (fits, or 0) and `high` (does not fit); try the middle of both until they are neighbours",
        ),
        mistakes=(_one_by_one, _doubled_only, _from_high),
    ),
    2: Exercise(
        check=_budget,
        hints=(
            "`tried` has the measured lengths and peaks of each row; `slope` the bytes for each token",
            "go on from the longest measured length of the baseline, along its slope, to the length of alst",
        ),
        mistakes=(lambda: 96 * 2**20 * 11, lambda: 118_324 * 5632),
    ),
    3: Exercise(
        check=_saving,
        hints=(
            "compare two rows that differ in the tiled MLP only",
            "the table has the slopes between the two longest lengths of `ulysses` and `ulysses+tiled_mlp`",
        ),
        mistakes=(lambda: 20_272, lambda: 20_272 - 12_592),
    ),
}
