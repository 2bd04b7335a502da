"""SPDataLoader and sharding: each rank gets its slice of every batch, and nothing more travels. What the slices are
worth together is held by the net (tests/matrix.py), whose cases read all their samples through this loader."""

import copy
import itertools
import json
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from cases import check_refused, lines_of, on_ranks, sample_of
from operators import counted
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from alstlib.base.mesh import SPContext
from alstlib.data.loader import SPDataLoader
from alstlib.data.shard import SLICED, documents_of, shard_batch
from alstlib.runs.train.ablation import SampleOrder


class Rows(list):
    """A list of batches (dicts) as a DataLoader-like; an exception in it is raised when its turn comes."""

    def __iter__(self):
        for batch in super().__iter__():
            if isinstance(batch, Exception):
                raise batch
            yield batch


def make(seed, length, rows=1, ignored=0, **more):
    return {**sample_of(length, rows, seed, ignored=slice(ignored)), **more}


def as_lists(batches):
    return [{k: v.tolist() for k, v in b.items()} for b in batches]


# ---- one batch, no process group


def test_a_slice_does_not_keep_the_whole_batch_alive():
    shard = shard_batch(make(0, 9, rows=2), 4, 1)
    for part in (shard[name] for name in SLICED):
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes


DOCUMENTS = [3, 1, 4]  # of 8 tokens
POSITIONS = [[0, 1, 2, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": torch.tensor(POSITIONS)},
        {"document_lengths": [DOCUMENTS]},
        {"document_lengths": torch.tensor([[3, 1, 4, 0]])},
        {"cu_seqlens": torch.tensor([0, 3, 4, 8], dtype=torch.int32)},
    ],
)
def test_packed_documents(given):
    """However they are given; the labels at their ends are those of the net's packed samples."""
    shards = [shard_batch(make(1, 8, **given), 3, r) for r in range(3)]  # 8 tokens padded to 9
    positions = torch.cat([s["position_ids"] for s in shards], 1)
    assert positions.tolist() == [[*POSITIONS[0], 0]]
    for shard in shards:
        assert shard["cu_seqlens"].tolist() == [0, 3, 4, 8, 9]  # the padding is a document of its own
        assert shard["cu_seqlens"].dtype == torch.int32
    assert {int(s["step_tokens"]) for s in shards} == {5}
    assert [documents_of(shard, 3) for shard in shards] == [DOCUMENTS] * 3


GOOD = {"input_ids": [[1, 2, 3, 4]], "labels": [[1, 2, 3, 4]]}
BAD = r"""
labels: null                                     -> no 'labels'.*input_ids
labels: [[1, 2, 3]]                              -> labels has shape \[1, 3\].*\[1, 4\]
input_ids: [[1.0]]                               -> dtype torch.float32
{input_ids: [1], labels: [1]}                    -> must be \[B, S\]
input_ids: [[1, 2], [3]]                         -> rectangular
token_type_ids: [[0]]                            -> \['token_type_ids'\] cannot be sharded
position_ids: [[0, 1, 5, 6]]                     -> position_ids\[0, 2\]=5
position_ids: [[1, 2, 3, 4]]                     -> position_ids\[0, 0\]=1
position_ids: [[0]]                              -> position_ids has shape
document_lengths: [[2, 1]]                       -> must sum to the sample's 4
document_lengths: [[2, 2], [4]]                  -> has 2 samples
cu_seqlens: [0, 3, 2, 4]                         -> must rise from 0
{input_ids: [[1], [3]], labels: [[1], [3]], cu_seqlens: [0, 2]} -> must have the start of each sample
{position_ids: [[0, 1, 2, 3]], document_lengths: [[2, 2]]} -> give one of them
attention_mask: [[0, 1, 1, 1]]                   -> padding on the right
labels: [[1, 2, 3, -1]]                          -> labels hold -1
input_ids: [[1, 2, 3, -100]]                     -> input_ids holds -100
"""


@pytest.mark.parametrize("bad, message", lines_of(BAD))
def test_bad_batches_are_refused_by_name(bad, message):
    check_refused(
        rf"(?s)rank 0 failed.*{message}", list, SPDataLoader([{**GOOD, **yaml.safe_load(bad)}], SPContext.create())
    )


def test_bad_arguments():
    check_refused(r"pad_to=7 .* use 8", shard_batch, GOOD, 2, 0, 7)
    check_refused("must yield dicts", shard_batch, [1, 2], 2, 0)


# ---- one process


def test_one_process_needs_no_process_group():
    loader = SPDataLoader([make(i, 4 + i) for i in range(5)], SPContext.create(), accumulation=2)
    assert [int(b["step_tokens"]) for b in loader] == [7, 7, 11, 11]
    assert len(loader) == 4
    check_refused("accumulation=0", SPDataLoader, [], SPContext.create(), 0)


def test_other_errors_of_the_loader_keep_their_cause():
    with pytest.raises(RuntimeError, match="rank 0 failed: KeyError: 'gone'") as caught:
        list(SPDataLoader(Rows([KeyError("gone")]), SPContext.create()))
    assert isinstance(caught.value.__cause__, KeyError)


# ---- several ranks


def _stream(rank, world, sp, per_rank, options=None):
    """Everything this rank gets, with the bytes it received as seen by dist.scatter itself; options may be by rank."""
    ctx = SPContext.create(sp)
    options = options[rank] if isinstance(options, list) else options or {}
    loader = SPDataLoader(Rows(per_rank[rank]), ctx, **options)
    received, logs, real = [], [], dist.scatter

    def scatter(tensor, *args, **kw):
        received.append((kw["group_src"] != ctx.sp_rank) * tensor.nbytes)
        return real(tensor, *args, **kw)

    with (
        mock.patch.object(dist, "scatter", scatter), counted(dist, "all_reduce") as collectives,
        mock.patch("alstlib.data.loader.logger.warning", logs.append),
    ):  # fmt: skip
        got = as_lists(loader)
    assert sum(received) == loader.received_bytes
    return {"got": got, "bytes": received, "collectives": collectives.total(), "logs": logs}


def _refused(rank, world, message, *args):
    with pytest.raises((ValueError, RuntimeError)) as error:
        _stream(rank, world, *args)
    assert re.match(message, f"{error.type.__name__}: {error.value}"), error.value


def check_groups(results, sp, data, accumulation=1, pad_to=None, replicated=False):
    """Every rank gets its slice of its group's batches, in turn, and the tokens of all groups' micro-batches."""
    wanted, turns = [], 1 if replicated else sp
    for rank, result in enumerate(results):
        first, places = rank - rank % sp, range(len(result["got"]))
        batches = [data[first + i % turns][i // turns] for i in places]
        wanted.append(as_lists(shard_batch(batch, sp, rank - first, pad_to) for batch in batches))
    for result, want in zip(results, wanted):
        for i, batch in enumerate(result["got"]):
            begins = i - i % accumulation
            step = [b["step_tokens"] for group in wanted[::sp] for b in group[begins : begins + accumulation]]
            assert batch == {**want[i], "step_tokens": sum(step), "accumulation": accumulation}


def batches_of(ranks, count, length, **more):
    """`count` batches for each rank, of a length by rank and place."""
    return [[make(10 * r + i, length(r, i), **more) for i in range(count)] for r in range(ranks)]


def short(*counts, apart=10):
    """Batches of six tokens, so many of them for each rank."""
    return [[make(apart * r + i, 6) for i in range(count)] for r, count in enumerate(counts)]


STREAMS = {
    "unequal lengths": (2, batches_of(2, 3, lambda r, i: 5 + 3 * r + i), {}, 6, ""),
    "steps that straddle rounds": (
        2, [[make(10 * r + i, 5 + r + 2 * i, ignored=(r + i) % 5) for i in range(3)] for r in range(4)],
        {"accumulation": 3}, 6, "",
    ),
    "replicas alone": (1, batches_of(2, 2, lambda r, i: 5 + r), {}, 2, ""),
    "shorter than the ranks": (4, batches_of(4, 1, lambda r, i: 1 + r, rows=2), {}, 4, ""),
    "packed": (2, batches_of(2, 1, lambda r, i: 8, document_lengths=[DOCUMENTS]), {"pad_to": 12}, 2, ""),
    "one ends earlier": (2, short(3, 2), {}, 4, "after 2 batches on ranks [1]"),
    "the first ends earlier": (2, short(1, 4), {}, 2, "after 1 batches on ranks [0]"),
    "an incomplete step": (2, short(4, 4), {"accumulation": 3}, 6, "2 micro-batches of an incomplete optimizer step"),
}  # fmt: skip
"""The ranks that share a sample, the batches of each rank, and the loader's options; how many each rank gets, and what
it is told of those that are dropped. Whole replicated streams are the net's."""


@pytest.mark.parametrize("sp, data, options, count, said", STREAMS.values(), ids=STREAMS)
def test_streams(pools, sp, data, options, count, said):
    results = pools(len(data))(_stream, sp, data, options)
    check_groups(results, sp, data, **options)
    for result in results:
        assert len(result["got"]) == count
        assert len(result["logs"]) == bool(said)
        assert said in "".join(result["logs"])
    assert any(any(r["bytes"]) for r in results) == (sp > 1 and not options.get("replicated"))


def test_only_slices_travel(ranks2):
    for result in ranks2(_stream, 2, [[make(r, 1000)] for r in range(2)]):
        (sent,) = filter(None, result["bytes"])  # of two steps, one is another rank's
        assert 0 <= sent - 3 * 500 * 8 <= 64  # and a few document offsets
        assert result["collectives"] == 1 + 2  # agreement; one for each round, the second of which finds the end


SAME = [make(1, 6)]
ERRORS = {
    "ValueError: .*ranks \\[2, 3\\] hold different": (
        2, [SAME, SAME, [make(2, 6)], [make(3, 6)]], {"replicated": True},
    ),
    "ValueError: ranks \\[0, 1\\] hold different batches": (2, short(3, 2, apart=0), {"replicated": True}),
    "RuntimeError: the data of rank 2 failed: .*broken file": (2, [SAME, SAME, [*SAME, KeyError("broken file")], SAME]),
    "ValueError: the data of rank 2 failed: .*no 'labels'": (2, [SAME, SAME, [*SAME, {"input_ids": [[1]]}], SAME]),
    "ValueError: .* different values of accumulation: \\[1, 5\\]": (2, [SAME * 6] * 2, [{}, {"accumulation": 5}]),
}  # fmt: skip


@pytest.mark.parametrize("message, case", ERRORS.items())
def test_an_error_is_raised_on_all_ranks(pools, message, case):
    """The ranks that share a sample, the batches of each rank, and the loader's options."""
    pools(len(case[1]))(_refused, message, *case)


# ---- resuming


class Numbered(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"input_ids": torch.full((6,), i + 1), "labels": torch.full((6,), i + 1)}


class Stateful:
    """A loader with a state of its own; counts how many batches it made."""

    def __init__(self):
        self.at, self.made = 0, 0

    def __len__(self):
        return 6

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            self.made += 1
            yield make(100 + self.at, 4 + self.at)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def build_loader(kind, rank=0, world=1):
    if kind == "stateful":
        return Stateful()
    if kind == "shuffle":  # the order comes from torch's random numbers
        return DataLoader(Numbered(), shuffle=True)
    if kind == "sampler":
        return DataLoader(Numbered(), sampler=DistributedSampler(Numbered(), world, rank, seed=5))
    order = RandomSampler(range(16), generator=torch.Generator().manual_seed(1))
    return DataLoader(Numbered(), batch_sampler=BatchSampler(order, 2, False))


def stopped(loader, count):
    """The batches before a stop, the state there, and the other batches."""
    stream = iter(loader)
    taken = [next(stream) for _ in range(count)]
    state = copy.deepcopy(loader.state_dict())
    return taken, state, as_lists(stream)


def _resume(rank, world, sp, kind, accumulation, stop):
    ctx = SPContext.create(sp)

    def made(seed):
        """In a process of so many random numbers."""
        torch.manual_seed(seed + rank)
        return SPDataLoader(build_loader(kind, rank, world), ctx, accumulation)

    loader = made(100)
    loader.set_epoch(2)
    for _ in range(2):  # in the second epoch the generators are further on
        taken, state, rest = stopped(loader, stop)
    if kind != "stateful":
        state = json.loads(json.dumps(state))

    again = made(7)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(2)
    before = torch.get_rng_state()  # the training's own random numbers
    first, after, others = stopped(again, 1)
    assert torch.equal(torch.get_rng_state(), before) or kind != "shuffle"
    assert after["micro_batches"] == stop + 1
    assert as_lists(first) + others == rest
    fresh = as_lists(again)  # the next pass starts at the beginning
    assert len(fresh) == len(taken) + len(rest)
    assert kind != "sampler" or fresh[:stop] == as_lists(taken)
    return len(rest)


ORDERS = ["shuffle", "generator", "sampler", "stateful"]
ROUNDS = [(2, 1, 3), (2, 3, 4), (2, 2, 4), (2, 5, 1)]


@pytest.mark.parametrize(
    "kind, sp, accumulation, stop",
    [(kind, *place) for kind in ORDERS for place in ((1, 3, 5), *ROUNDS)],
)
def test_each_sample_comes_once_after_a_resume_whatever_draws_the_order(pools, kind, sp, accumulation, stop):
    rest = on_ranks(pools, sp, _resume, sp, kind, accumulation, stop)
    assert min(rest) == max(rest) > 0


class Hidden(list):
    """An order that comes from numbers which nobody can draw again."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(16).tolist())


def resumed(first, second, count):
    """A loader over the second data, at the place where one over the first stopped after so many batches."""
    again = SPDataLoader(second, SPContext.create())
    again.load_state_dict(stopped(SPDataLoader(first, SPContext.create()), count)[1])
    return again


def test_other_data_and_an_order_that_nobody_can_draw_again_are_refused():
    rows = [make(i, 4 + i) for i in range(6)]
    drawn = [DataLoader(range(16), sampler=Hidden(), collate_fn=lambda ids: make(ids[0], 6)) for _ in range(2)]
    for first, second in ((Rows(rows), Rows(rows[1:])), (Rows(rows), Rows(rows[:1])), drawn):
        check_refused(
            r"first 2 batches are not those .* the data changed, or their order", list, resumed(first, second, 2)
        )


def test_a_stateful_loader_is_not_read_twice():
    again = resumed(Stateful(), Stateful(), 4)
    assert len(list(again)) == again.dataloader.made == 2


def test_each_sample_comes_once_whatever_the_number_of_replicas():
    samples, seen = [], 0
    for replicas, steps in ((2, 3), (1, 2), (4, 99)):
        orders = [SampleOrder([*range(48)], replicas, rank) for rank in range(replicas)]
        for order in orders:
            order.load_state_dict({"seen": seen})
        turns = [*zip(*orders)][:steps]
        samples += itertools.chain(*turns)
        seen += replicas * len(turns)
    assert samples == [*range(48)]


def test_a_state_of_another_layout_is_refused():
    state = SPDataLoader(build_loader("sampler"), SPContext.create(), 2).state_dict()
    for other, message in (({"sp": 2}, "sp=2, but this loader has 1"), ({"accumulation": 3}, "accumulation=3")):
        check_refused(
            f"the saved state has {message}",
            SPDataLoader(build_loader("sampler"), SPContext.create(), 2).load_state_dict,
            {**state, **other},
        )
