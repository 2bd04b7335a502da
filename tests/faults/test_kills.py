"""A sample of `python -m tests.faults.kills`: what is killed leaves no process, and the same command finishes."""

from __future__ import annotations

import sys
from pathlib import Path

import kills
import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_that_is_killed_leaves_nothing_and_the_same_command_finishes(tmp_path: Path) -> None:
    """All its processes while it trains; and before, where the command is alone with its kernel, only that."""
    run = kills.Chain(tmp_path / "chain")
    for phase, victim in (("notebook", "kernel"), ("steps", "all")):
        killed = run.kill(phase, victim, kills.signal.SIGKILL, 0.2)
        assert killed is not None
        assert killed.status not in (None, 0), killed
        assert not killed.left
    assert len(run.finish()) == kills.STEPS
