"""What is under way and how much of it is left, where people see it."""

import io
import re

import pytest
from rich.console import Console

from alstlib.planner import progress
from alstlib.planner.progress import watched


def work():
    with watched("ways", "ab") as ways:
        for _ in ways:
            with watched("simulating [tiny]"), watched("lengths", [1]) as lengths:
                assert [*lengths] == [1]


def test_a_log_gets_lines_from_time_to_time(monkeypatch, capsys):
    work()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EVERY", 0)
    work()
    assert re.sub(", about [^;]* left", "", capsys.readouterr().err).splitlines() == [
        "alst: ways: 1 of 2", "alst: ways: 1 of 2; simulating [tiny]; lengths: 1 of 1",
        "alst: ways: 2 of 2", "alst: ways: 2 of 2; simulating [tiny]; lengths: 1 of 1",
    ]  # fmt: skip


@pytest.mark.parametrize("stored", ["", "1"])
def test_a_terminal_has_lines_that_change_and_a_stored_notebook_none(stored, monkeypatch, capsys):
    file = io.StringIO()
    monkeypatch.setattr(progress, "EVERY", 0)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=file, force_terminal=True, width=100))
    monkeypatch.setenv("ALST_STATIC", stored)
    with pytest.raises(ZeroDivisionError), watched("ways"):
        raise ZeroDivisionError
    work()
    print("an answer")
    assert ("alst: ways: 1 of 2" in file.getvalue()) == (not stored)
    assert capsys.readouterr() == ("an answer\n", "")
    assert progress._SHOWN.get() is None
