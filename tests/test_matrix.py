"""Every case of the net (`matrix`)."""

import matrix
import pytest

TABLE = matrix.table()
SAMPLE = set(matrix.sample(TABLE))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.drawn] if case in SAMPLE else []) for case in TABLE], ids=str
)
def test_a_step_is_that_of_plain_transformers(request, case):
    pools = request.getfixturevalue("late_pools" if case.device == "late" else "pools")
    matrix.check_on(pools, case)
