"""The referee: what it finds in stacks with known mistakes, and in those that are installed."""

import mistakes
import pytest
import referee
from exactness.cases import CASES
from exactness.judge import verdict
from exactness.ranks import Processes


@pytest.fixture(scope="module")
def plain():
    """What plain transformers found, once for each case."""
    return {}


@pytest.mark.parametrize("name", mistakes.KINDS)
def test_a_mistake_is_found_in_its_module(name, plain):
    case = CASES["window"]
    want = referee.reference(Processes(), case, False, plain)
    found = Processes(mistakes.__name__).run(name, case, 2)
    assert isinstance(found, list), found
    judged = verdict(found, want)
    assert (judged["result"], judged.get("first")) == ("wrong", mistakes.KINDS[name][1]), judged


EXPECTED = {
    ("ours", "uneven"): "exact", ("ours", "no labels"): "exact", ("ours-trainer", "packed"): "exact",
    ("ours-trainer", "smoothing"): "exact", ("deepspeed", "even"): "wrong", ("deepspeed", "heads"): "refused",
    ("accelerate-sp", "packed"): "wrong", ("accelerate-cp", "even"): "exact", ("accelerate-cp", "window"): "refused",
}  # fmt: skip
"""Some cells of the table, with the versions of the lock."""


@pytest.mark.parametrize("stack, case", EXPECTED)
def test_a_cell(stack, case, plain):
    cell = referee.cell_of(Processes(), stack, CASES[case], plain)
    assert cell["result"] == EXPECTED[stack, case], cell
