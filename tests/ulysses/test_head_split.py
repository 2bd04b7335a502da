"""Uneven heads: which rows of which heads a rank has. Tests on real ranks (test_ulysses.py) have their attention."""

import pytest
import torch
import yaml

import alstlib
from alstlib.kernels.spans import Offsets
from alstlib.ulysses.alltoall import whole_heads
from alstlib.ulysses.attention import UlyssesAttention
from alstlib.ulysses.head_layouts import WholeHeads
from alstlib.ulysses.head_split import Plan, Sample, balance, parts_of

LAYOUTS = yaml.safe_load("""
[[9, 3, 8], [40, 8, 16], [8, 2, 16], [7, 1, 4], [28, 4, 8], [14, 2, 4], [7, 7, 4], [25, 5, 8], [6, 3, 2], [3, 1, 5]]
""")
DOCUMENTS = {
    "one": None,
    "uneven": [0, 1, 5, 700, 701, 3000, 4096],
    "short": [*range(0, 4096, 31), 4096],
    "one long": [0, *range(3000, 4096, 16), 4096],
}
EVERY_SAMPLE = pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
EVERY_LAYOUT = pytest.mark.parametrize("heads, kv, ranks", LAYOUTS)


@EVERY_SAMPLE
@EVERY_LAYOUT
def test_every_rank_has_the_same_work(heads, kv, ranks, documents):
    rows, areas = balance(heads, kv, ranks, 4096, documents)
    assert rows <= 1.01
    assert areas <= (1.01 if documents is None or len(documents) < 100 else 1.02)


@EVERY_SAMPLE
@EVERY_LAYOUT
def test_every_row_of_every_head_is_somewhere_once(heads, kv, ranks, documents):
    length = 4096 if ranks != 5 else 4095
    documents = documents and [min(d, length) for d in documents]
    plans = [Plan(heads, kv, ranks, r, Sample(1, length, documents)) for r in range(ranks)]
    for source in plans:
        sent = torch.cat([m.sent for m in source.messages])
        assert torch.equal(sent.sort().values, torch.arange(heads * source.own))
        for r, plan in enumerate(plans):
            assert source.messages[r].sent.numel() == plan.messages[source.rank].received.numel()
    for plan in plans:
        got = torch.cat([m.received for m in plan.messages])
        assert torch.equal(got.sort().values, torch.arange(plan.stored))
        parts = parts_of(heads, ranks, plan.rank)
        assert sum(not p.whole for p in parts) <= 2
        assert {p.head * kv // heads for p in parts} == set(range(plan.kv.start, plan.kv.stop))


def attention_on(ranks):
    """That of the first of so many ranks, which exchange nothing here."""
    op = UlyssesAttention(alstlib.SPContext())
    op.exchange.ranks = ranks
    return op


def test_whole_heads_where_they_can_be():
    """Divisible heads keep the plain exchange: no plan, no index, no copy more."""
    assert [whole_heads(*c) for c in ((8, 2, 2), (8, 2, 4), (8, 2, 8), (9, 3, 3))] == [True] * 4
    assert not any(whole_heads(*c) for c in LAYOUTS)
    q, k = torch.ones(1, 8, 5, 2), torch.ones(1, 2, 5, 2)
    assert isinstance(attention_on(4).way(q, k, k).layout, WholeHeads)


def test_plans_are_made_once_for_all_layers():
    op, q, k = attention_on(2), torch.ones(1, 3, 4, 2), torch.ones(1, 1, 4, 2)
    for documents in (Offsets([0, 3, 8]), None):
        one, two, other = (op.way(q, k, k, None, at) for at in (documents, documents, Offsets([0, 4, 8])))
        assert one is two
        assert other is not one
    short = [t[:, :, :3] for t in (q, k, k)]
    assert op.way(*short).layout is op.way(*short, window=2).layout
    assert len(op._undivided.found) == 3  # a layout and two ways; those of samples of another shape are gone


def test_many_documents_are_handed_out_whole():
    """A rank calls its kernel for its own documents, not for a part of every one."""
    documents = [*range(0, 65_536, 256), 65_536]
    plan = Plan(28, 4, 8, 3, Sample(1, 65_536, documents))
    parts = [len(part.spans) for part in plan.parts if part.spans]
    assert parts
    assert all(n < 0.6 * len(documents) for n in parts)
    assert balance(28, 4, 8, 65_536, documents)[1] < 1.01
