"""The checks of the lessons' exercises refuse the usual mistakes, and have hints.

That they accept the solutions is seen when the lessons run: `make check-lessons`.
"""

import functools
import sys
from importlib import import_module
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))  # as in a lesson, which runs in this folder
NAMES = [
    f"{path.stem[-2:]}.{number}"
    for path in sorted((NOTEBOOKS / "checks").glob("lesson_*.py"))
    for number in import_module(f"checks.{path.stem}").EXERCISES
]


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("ALST_STRICT", "1")


@pytest.mark.parametrize("name", NAMES)
def test_the_usual_mistakes_are_refused(name, capsys):
    from checks import find, judge

    mistakes = find(name).mistakes
    assert mistakes, "a check without a mistake to refuse may be one that cannot fail"
    for mistake in mistakes:
        with pytest.raises(AssertionError, match=r"."):  # with a sentence
            judge(name, mistake)

    def unwritten(*args, **kwargs):
        raise NotImplementedError

    judge(name, unwritten)
    assert capsys.readouterr().out.startswith("not answered yet")


@pytest.mark.parametrize("name", NAMES)
def test_hints_go_on_to_the_last(name, capsys):
    from checks import find, hint

    hints = len(find(name).hints)
    assert hints >= 2
    for level in range(1, hints + 1):
        hint(name, level)
    assert capsys.readouterr().out.count("tells more") == hints - 1
    with pytest.raises(ValueError, match="has hints 1 to"):
        hint(name, hints + 1)


@pytest.fixture
def judge(monkeypatch):
    """As in a lesson, of an exercise whose answer is 3."""
    import checks

    def check(answer):
        if answer() != 3:
            raise AssertionError(f"{answer()} is not <3>")
        return "3"

    monkeypatch.setattr(checks, "find", lambda name: checks.Exercise(check, (), ()))
    return functools.partial(checks.judge, "03.2")


def test_a_value_that_is_not_set_is_not_answered(capsys, judge):
    judge(lambda: None)
    judge(lambda: 3)
    unset, right = capsys.readouterr().out.splitlines()
    assert unset.startswith("not answered yet: set the value above")
    assert right == "right: 3"
    with pytest.raises(AssertionError, match="4 is not <3>"):
        judge(lambda: 4)


def test_a_reader_sees_a_box_and_no_traceback(monkeypatch, judge):
    from IPython.testing.globalipapp import get_ipython
    from IPython.utils.capture import capture_output

    monkeypatch.delenv("ALST_STRICT")
    get_ipython()
    with capture_output() as seen:
        judge(lambda: 4)
    (shown,) = seen.outputs
    assert shown.data["text/plain"] == 'not right yet: 4 is not <3>\nask for help with hint("03.2")'
    assert "4 is not &lt;3&gt;" in shown.data["text/html"]


def test_an_answer_may_be_a_lambda_and_may_fail_by_itself(capsys, judge):
    def unsupported(x=1):
        return refuse(x)

    def refuse(x):
        raise NotImplementedError("no such operator")

    called = []
    judge(lambda x=1: called.append(x) or 3 * x)
    assert capsys.readouterr().out == "right: 3\n"
    assert called == [1], "an answer that takes something is called by its check alone"
    with pytest.raises(NotImplementedError, match="no such operator"):
        judge(unsupported)
