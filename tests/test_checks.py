"""The checks of the lessons' exercises refuse the usual mistakes, and have hints.

That they accept the solutions is seen when the lessons run: `make check-lessons`.
"""

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


def test_a_value_that_is_not_set_is_not_answered(capsys, monkeypatch):
    import checks

    def check(answer):
        assert answer() == 3, f"{answer()} is not 3"
        return "3"

    monkeypatch.setattr(checks, "find", lambda name: checks.Exercise(check, (), ()))
    checks.judge("03.2", lambda: None)
    checks.judge("03.2", lambda: 3)
    unset, right = capsys.readouterr().out.splitlines()
    assert unset.startswith("not answered yet: set the value above")
    assert right == "right: 3"
    with pytest.raises(AssertionError, match="4 is not 3"):
        checks.judge("03.2", lambda: 4)


def test_a_reader_sees_a_box_and_no_traceback(monkeypatch):
    import checks
    from IPython.testing.globalipapp import get_ipython
    from IPython.utils.capture import capture_output

    monkeypatch.delenv("ALST_STRICT")
    get_ipython()

    def check(answer):
        raise AssertionError(f"{answer()} is not <3>")

    monkeypatch.setattr(checks, "find", lambda name: checks.Exercise(check, (), ()))
    with capture_output() as seen:
        checks.judge("03.2", lambda: 4)
    (shown,) = seen.outputs
    assert shown.data["text/plain"] == 'not right yet: 4 is not <3>\nask for help with hint("03.2")'
    assert "4 is not &lt;3&gt;" in shown.data["text/html"]


def test_an_answer_may_be_a_lambda_and_may_fail_by_itself(capsys, monkeypatch):
    import checks

    def check(answer):
        assert answer(2) == 4, f"{answer(2)} is not 4"
        return "4"

    def unsupported(x):
        return refuse(x)

    def refuse(x):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(checks, "find", lambda name: checks.Exercise(check, (), ()))
    checks.judge("03.1", lambda x: 2 * x)
    assert capsys.readouterr().out == "right: 4\n"
    with pytest.raises(NotImplementedError, match="no such operator"):
        checks.judge("03.1", unsupported)
