"""Which documents share a call: little padding, and few calls. That every token is in one is seen in gradients
(test_pass_state.py, test_adapters.py)."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from alstlib.kernels.spans import Offsets
from alstlib.linear.documents import LONGEST_TO_SHORTEST, MOST_DOCUMENTS, PADDED, runs_of

CPU = torch.device("cpu")


def cut(length, count):
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    return Offsets((0, *cuts.sort().values.tolist(), length))


def calls(documents, first, rows, packed=False):
    return runs_of(documents, (1, rows), first, documents[-1], packed, CPU)


def test_two_thousand_documents_make_few_calls():
    documents = cut(2**20, 2000)
    runs = calls(documents, 0, 2**20)
    assert calls(documents, 0, 2**20)[-1] is runs[-1]  # worked out once for all layers
    inside = [run.shape for run in runs if run.to is not None]
    assert len(runs) < 80
    assert max(n for n, _ in inside) <= MOST_DOCUMENTS
    assert max(n * t for n, t in inside) <= PADDED
    assert sum(n * t for n, t in inside) < LONGEST_TO_SHORTEST * 2**20
    assert len(calls(documents, 0, 2**20, packed=True)) == 2  # the last document hands its state on
    assert len(calls(documents, 2**18, 2**18, packed=True)) == 3


def test_lengths_of_a_batch_are_alike():
    lengths = [4, 5, 6, 10, 8, 1, 1, 100, 3]
    runs = calls(Offsets((0, *itertools.accumulate(lengths), 200)), 0, 200)
    assert [run.shape for run in runs if run.to is not None] == [(2, 10), (2, 6), (2, 1)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_simulation_needs_no_values(packed):
    with FakeTensorMode():
        x = torch.empty(1, 40, 3)
        taken = [run.of(x).shape[:2] for run in calls(Offsets((0, 4, 9, 13, 17, 40)), 0, 40, packed=packed)]
    assert taken == ([(1, 23), (1, 17)] if packed else [(1, 23), (4, 5)])
