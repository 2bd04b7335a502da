"""Search for the longest sequence that fits a memory budget, with few and short trials.

A step's peak grows (almost) linearly with the length, so two short trials predict where it meets the budget, and a
trial there corrects the prediction. Every length that counts has been run: the answer's own peak is measured within the
budget, and so is the first length that exceeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    length: int
    """The longest multiple of the granule that fits."""
    tried: list[tuple[int, int]]
    """(length, peak bytes) of every trial, in order."""


BEYOND = 1.25
"""Share of the budget that a length counts as having taken at which memory ran out."""


class Trials:
    """What is known of a search's trials from the events (`tried`) of processes before this one.

    An error of memory that ran out may leave a device, a kernel's library or the other ranks unusable. So it ends the
    process, and the search goes on in a new one, which meets its trials again in their order.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.lost: set[int] = set()
        """Lengths at which memory ran out."""
        self.peaks: dict[int, list[int]] = {}
        for event in events:
            if event["event"] == "tried" and event["peak"] is None:
                self.lost.add(event["seq_len"])
            elif event["event"] == "tried":
                self.peaks.setdefault(event["seq_len"], []).append(event["peak"])

    def peak(self, seq_len: int, budget: int) -> int | None:
        """The peak of this length's next trial in bytes; None where it has yet to run."""
        if seq_len in self.lost:
            return int(BEYOND * budget)
        known = self.peaks.get(seq_len)
        return known.pop(0) if known else None


def longest_that_fits(
    peak_of: Callable[[int], int], budget: int, granule: int, *, start: int, limit: int | None = None
) -> Found:
    """Find the longest multiple of `granule` tokens whose measured peak stays within `budget` bytes.

    Args:
        peak_of: runs a step at a length and returns its peak in bytes; does not fail beyond the budget.
        start: first length to try, rounded up to a granule.
        limit: longest length to consider; None for no end.

    Raises:
        MemoryError: not even one granule fits.
    """
    top = None if limit is None else max(1, limit // granule)
    tried: list[tuple[int, int]] = []
    peaks: dict[int, int] = {}

    def peak(n: int) -> int:
        if n not in peaks:
            peaks[n] = peak_of(n * granule)
            tried.append((n * granule, peaks[n]))
        return peaks[n]

    n = max(1, -(-start // granule))
    n = n if top is None else min(n, top)
    for first in (1, n):  # one granule costs next to nothing, and gives the line its other point
        if peak(first) > budget:
            break
    while True:
        fits = [m for m in peaks if peaks[m] <= budget]
        over = [m for m in peaks if peaks[m] > budget]
        low, high = max(fits, default=0), min(over, default=None)
        if low == 0 and high == 1:
            raise MemoryError(f"not even {granule} tokens fit: they peak at {peaks[1]:,} bytes of {budget:,}")
        if (high is not None and high == low + 1) or low == top:
            return Found(low * granule, tried)
        if high is None:  # a line through short trials is not trusted beyond twice their length
            below = sorted(fits)[-2:]
            guess = min(2 * low, _meets(peaks, budget, *below) if len(below) == 2 else 2 * low)
        elif low == 0:
            guess = high // 2
        elif len({peak <= budget for _, peak in tried[-2:]}) == 1:  # where peaks jump, lines miss on one side
            guess = (low + high) // 2
        else:
            guess = min(high - 1, _meets(peaks, budget, low, high))
        guess = max(guess, low + 1)  # where the line says `low`, the length after it must be seen to exceed
        peak(guess if top is None else min(guess, top))


def _meets(peaks: dict[int, int], budget: int, a: int, b: int) -> int:
    """Where the line through the trials at a and b granules meets the budget, in granules."""
    slope = (peaks[b] - peaks[a]) / (b - a)
    return 2 * b if slope <= 0 else int(a + (budget - peaks[a]) / slope)
