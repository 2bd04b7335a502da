"""Cases of the net (`matrix`) on a GPU: those that the device on a CPU has, by ranks that share one GPU over gloo."""

from dataclasses import replace

import matrix
import pytest


def rounds_otherwise(case):
    """Dynamic NTK's frequencies are computed in fp32 in each forward, and a CPU's are not a GPU's: the gradients differ
    by 1.2e-8."""
    return case.model == "llama, dynamic NTK"


TABLE = [
    replace(case, device="cuda") for case in matrix.table() if case.device == "late" and not rounds_otherwise(case)
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_gpu_step_is_that_of_plain_transformers(gpu_pools, case):
    matrix.check_on(gpu_pools, case)
