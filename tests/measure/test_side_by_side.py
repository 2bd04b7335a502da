"""What the cores make side by side is what one would make, also where a fork ends early."""

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from cases import check_refused, wait_for

from alstlib.planner.measure import deep
from alstlib.planner.measure.deep import side_by_side


@pytest.fixture(autouse=True)
def three_cores(monkeypatch):
    """At the end no fork is left."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = multiprocessing.active_children()
    yield
    assert {*multiprocessing.active_children()} <= {*before}


def where(n):
    return n, os.getpid()


def killed_in_a_fork(parent):
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return "made here"


def refused():
    raise ValueError("the model says no")


@pytest.mark.parametrize("calls", [1, 3, 8])
def test_results_in_order_from_as_many_processes_as_there_are_cores(calls):
    made = side_by_side("calls", [partial(where, n) for n in range(calls)])
    assert [n for n, _ in made] == [*range(calls)]
    assert len({pid for _, pid in made}) == min(calls, 3)


def test_what_a_killed_fork_leaves_is_made_here():
    assert side_by_side("calls", [partial(killed_in_a_fork, os.getpid())] * 4) == ["made here"] * 4


def killed_in_its_answer(parent):
    """The pipe holds less than the answer, which this process reads later."""
    if os.getpid() == parent:
        time.sleep(0.6)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    return bytes(2**22)


def test_what_a_fork_leaves_that_is_killed_in_its_answer_is_made_here():
    assert side_by_side("calls", [partial(killed_in_its_answer, os.getpid())] * 2) == [bytes(2**22)] * 2


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_call_raises_is_raised(at):
    calls = [partial(where, n) for n in range(4)]
    calls[at] = refused
    check_refused("the model says no", side_by_side, "calls", calls)


def test_forks_end_where_a_further_one_cannot_be_made(monkeypatch):
    begin, made = deep._Fork.__init__, []

    def second_fails(fork, share):
        if made:
            raise OSError("no process is left")
        begin(fork, share)
        made.append(fork.process)

    monkeypatch.setattr(deep._Fork, "__init__", second_fails)
    with pytest.raises(OSError, match="no process is left"):
        side_by_side("calls", [partial(time.sleep, 60)] * 3)
    assert not made[0].is_alive()


def test_a_fork_does_not_outlive_its_process(tmp_path):
    """It would keep what its process has locked."""
    started = tmp_path / "started"

    def parent():
        calls = [partial(time.sleep, 60), lambda: (started.write_text(str(os.getpid())), time.sleep(60))]
        side_by_side("calls", calls)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    assert wait_for(lambda: started.exists() and started.read_text(), 20)
    process.kill()
    process.join()
    assert wait_for(lambda: not Path(f"/proc/{started.read_text()}").exists(), 20)


def test_nothing_is_forked_beside_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert {pid for _, pid in side_by_side("calls", [partial(where, n) for n in range(3)])} == {os.getpid()}
