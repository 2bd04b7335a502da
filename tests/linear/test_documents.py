"""Which documents share a call: every token once, little padding, few calls."""

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


def calls(documents, first, rows, batch=1, packed=False):
    length = documents[-1] // batch
    return runs_of(documents, (batch, rows), first, length, packed, CPU)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_token_is_in_one_call(batch, packed):
    documents, rows = cut(600, 90), 600 // batch // 2
    x = torch.arange(1, 600 // batch * batch + 1).view(batch, -1)
    for first in (0, rows):
        mine, out, seen = x[:, first : first + rows], torch.zeros(batch, rows, dtype=torch.long), 0
        runs = calls(documents, first, rows, batch, packed)
        for run in runs:
            part = run.of(mine)
            run.into(out, part)
            seen += int((part > 0).sum())
            if run.inside and not packed:  # rows are whole documents, and only zeros follow them
                for row in part:
                    tokens = row[row > 0]
                    assert (row[len(tokens) :] == 0).all()
                    assert {int(tokens[0]) - 1, int(tokens[-1])} <= {*documents, *range(0, 601, 600 // batch)}
        assert torch.equal(out, mine)
        assert seen == mine.numel()
        assert len(runs) < 90 // 2
        assert runs_of(documents, (batch, rows), first, 600 // batch, packed, CPU)[-1] is runs[-1]


def test_two_thousand_documents_make_few_calls():
    documents = cut(2**20, 2000)
    runs = calls(documents, 0, 2**20)
    inside = [run.shape for run in runs if run.to is not None]
    assert len(runs) < 80
    assert max(n for n, _ in inside) <= MOST_DOCUMENTS
    assert max(n * t for n, t in inside) <= PADDED
    assert sum(n * t for n, t in inside) < LONGEST_TO_SHORTEST * 2**20
    assert len(calls(documents, 0, 2**20, packed=True)) == 2  # the last document hands its state on
    assert len(calls(documents, 2**18, 2**18, packed=True)) == 3


def test_kernels_get_offsets_and_the_document_of_each_token():
    *_, run = calls(Offsets((0, 3, 4, 6, 9, 12)), 2, 9, packed=True)
    assert run.at == (slice(0, 1), slice(1, 7))
    packed = run.packed
    assert packed is not None
    assert (packed.offsets.tolist(), packed.offsets.dtype) == ([0, 1, 3, 6], torch.int64)
    assert (packed.index.tolist(), packed.index.dtype) == ([[0, 1, 1, 2, 2, 2]], torch.int32)


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
