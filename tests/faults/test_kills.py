"""Random kills (`make test-faults ARGS='--kills 60'`): nothing is left, and the same command finishes."""

import random
import sys

import kills
import pytest


@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_runs_that_are_killed_leave_nothing_and_the_same_command_finishes(tmp_path, request, capsys):
    seed = request.config.getoption("--seed")
    seed = random.randrange(10**6) if seed is None else seed
    with capsys.disabled():
        wrong = kills.campaign(request.config.getoption("--kills"), seed, tmp_path)
    assert wrong == []
