"""The search: the right answer in few trials, each claim measured."""

import contextlib
import random

import pytest
from cases import values_of

from alstlib.planner.search import Trials, longest_that_fits

GRANULE = 256


def truth(peak_of, budget, top=4000):
    return max(n * GRANULE for n in range(1, top) if peak_of(n * GRANULE) <= budget)


def search(peak_of, budget, start=512, limit=None):
    return longest_that_fits(peak_of, budget, GRANULE, start=start, limit=limit)


def longest_trial(found):
    return max(length for length, _ in found.tried)


def check(found, peak_of, budget, trials=9):
    assert found.length == truth(peak_of, budget)
    assert all(peak == peak_of(length) for length, peak in found.tried)
    tried = dict(found.tried)
    assert len(tried) == len(found.tried) <= trials  # no length twice
    assert tried[found.length] <= budget < tried[found.length + GRANULE]


AFFINE = """
5_000_000 -> 900  -> 60_000_000
10        -> 3    -> 90_000
0         -> 7000 -> 700_000_000
0         -> 1000 -> 4_352_000
0         -> 1000 -> 4_351_999
0         -> 1000 -> 256_000
"""
"""An exact fit counts as fitting, and one byte less does not: 4,352,000 bytes are 17 granules."""


@pytest.mark.parametrize("start", [2_048, 10_000, 61_184, 300_000])
@pytest.mark.parametrize("base, slope, budget", values_of(AFFINE))
def test_an_affine_peak(base, slope, budget, start):
    def peak_of(length):
        return base + slope * length

    found = search(peak_of, budget, start)
    check(found, peak_of, budget)
    assert longest_trial(found) <= max(2 * found.length, start + GRANULE)  # long trials cost most


STARTS = """
1      -> 12 -> [256, 512, 1024, 2048]
60_300 -> 4  -> [256, 60_416, 60_928, 61_184]
"""


@pytest.mark.parametrize("start, trials, first", values_of(STARTS))
def test_a_short_start_doubles_and_one_near_the_answer_is_all_but_it(start, trials, first):
    """One granule, the start (rounded up), the answer and the length after it."""
    found = search(lambda length: 5_000_000 + 900 * length, 60_000_000, start)
    assert found.length == 60_928
    assert [length for length, _ in found.tried][:4] == first
    assert len(found.tried) <= trials


@pytest.mark.parametrize("step", [1_000_000, 30_000_000, None])
def test_a_peak_that_jumps(step):
    """A bucket or a tile that is added at some length (two slopes and a jump), and the steps of an allocator."""

    def peak_of(length):
        if step is None:
            return -(-(3_000_000 + 777 * length) // 2_097_152) * 2_097_152
        return 4_000_000 + 800 * length + (step if length > 40_000 else 0) + 300 * max(0, length - 60_000)

    for budget in (20_000_000, 36_500_000, 80_000_000):
        check(search(peak_of, budget, start=10_000), peak_of, budget, trials=13)


def test_noise_ends_and_stays_honest():
    """Peaks that differ a little from a line (and are not monotonous) give a length that fits, near the best."""
    for seed in range(20):
        noise = random.Random(seed)
        offsets = {n * GRANULE: noise.randint(-40_000, 40_000) for n in range(1, 2000)}

        def peak_of(length, offsets=offsets):
            return 5_000_000 + 900 * length + offsets[length]

        found = search(peak_of, 60_000_000, start=4096)
        tried = dict(found.tried)
        assert tried[found.length] <= 60_000_000 < tried[found.length + GRANULE]
        assert abs(found.length - 55_000_000 / 900) <= GRANULE + 40_000 / 900
        assert len(found.tried) <= 8


LIMITED = """
100_000 -> 1000      -> 1_000_000_000 -> 99_840
1000    -> 1_000_000 -> 1_000_000_000 -> 768
100_000 -> 1000      -> 50_000        -> 49_920
"""


@pytest.mark.parametrize("limit, start, budget, length", values_of(LIMITED))
def test_a_limit_ends_the_search(limit, start, budget, length):
    found = search(lambda length: length, budget, start, limit)
    assert found.length == length
    assert len(found.tried) <= 9
    assert longest_trial(found) <= limit
    assert budget < limit or found.tried[-1] == (length, length)


def test_nothing_fits():
    tried = []

    def peak_of(length):
        tried.append(length)
        return 7_000_000 + length

    with pytest.raises(MemoryError, match="not even 256 tokens fit: they peak at 7,000,256 bytes of 1,000"):
        search(peak_of, 1000, start=10_000)
    assert tried[-1] == GRANULE
    assert len(tried) <= 8


def test_a_search_goes_on_below_a_length_at_which_memory_ran_out():
    """In another process, which runs no trial again."""
    events = []

    def peak(length):
        if (known := trials.peak(length, 100_000)) is not None:
            return known
        events.append({"event": "tried", "seq_len": length, "peak": length if length <= 50_000 else None})
        if length > 50_000:
            raise MemoryError
        return length

    for _ in range(8):
        trials, before = Trials([{"event": "step"}, *events]), len(events)
        with contextlib.suppress(MemoryError):
            found = search(peak, 100_000, start=1000)
            break
    assert found.length == 50_000 // GRANULE * GRANULE
    ran = [e["seq_len"] for e in events]
    assert len(ran) == len({*ran})
    assert before > 0
