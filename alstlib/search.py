"""The longest sequence that fits a memory budget, with few and short trials.

A step's peak grows (almost) linearly with the length, so two short trials predict where it meets the budget, and a
trial there corrects the prediction. Every length that counts has been run: the answer's own peak is measured within the
budget, and so is the first length that exceeds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    length: int
    """The longest multiple of the granule that fits."""
    tried: list[tuple[int, int]]
    """(length, peak bytes) of every trial, in order."""


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
    peak(n)
    while True:
        fits = [m for m in peaks if peaks[m] <= budget]
        over = [m for m in peaks if peaks[m] > budget]
        low, high = max(fits, default=0), min(over, default=None)
        if low == 0 and high == 1:
            raise MemoryError(f"not even {granule} tokens fit: they peak at {peaks[1]:,} bytes of {budget:,}")
        if (high is not None and high == low + 1) or low == top:
            return Found(low * granule, tried)
        guess = _meets(peaks, budget)
        if guess is None:  # one trial: double, or halve
            guess = 2 * low if low else max(1, high // 2)  # type: ignore[operator]
        elif guess == low:
            guess = low + 1  # believed to be the answer: what is next must be seen to exceed
        guess = min(guess, 4 * max(peaks))  # a line through short trials is not trusted far
        if high is not None:
            guess = min(guess, high - 1)
        guess = max(guess, low + 1)
        peak(guess if top is None else min(guess, top))


def _meets(peaks: dict[int, int], budget: int) -> int | None:
    """Where a line through the two trials nearest the budget meets it, in granules."""
    if len(peaks) < 2:
        return None
    a, b = sorted(sorted(peaks, key=lambda n: abs(peaks[n] - budget))[:2])
    slope = (peaks[b] - peaks[a]) / (b - a)
    return None if slope <= 0 else int(a + (budget - peaks[a]) / slope)
