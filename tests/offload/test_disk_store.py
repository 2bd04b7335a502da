"""A disk under the host: the same bits, read in backward's order two layers ahead, and failures that all ranks see."""

import errno
import fcntl
import gc
import mmap
import os
import random
import re
import resource
import tempfile
import threading
import time
import weakref

import pytest
import torch
import yaml
from cases import attach, batch, check_refused, lines_of, make_model, same, small_pages, step, train
from device.module import device

import alstlib
from alstlib.base.sizing import STAGED, Forward, sent_away
from alstlib.offload import disk_store
from alstlib.offload.disk_store import DiskFailed, DiskFile
from alstlib.offload.host_store import HostOutOfMemory

LENGTH, LAYERS, WIDTH = 256, 10, 32
ROW, OUTPUT = LENGTH * WIDTH * 4, LENGTH * 4 * (8 * 4 + 4)
"""Bytes of one layer's input, and of its attention output with the sums."""
TABLES = 2 * LENGTH * 8 * 4
LAYER = ROW + OUTPUT
WAYS = """
whole  | {save_attention: true}                                     | (STAGED + 2) * LAYER
inputs | {save_attention: false}                                    | (STAGED + 1) * ROW
auto   | {save_attention: auto}                                     | (STAGED + 4) * LAYER
chunks | {chunk: 64, on_host: none, save_attention: true}           | (STAGED + 2) * LAYER
hidden | {chunk: 64, on_host: hidden, save_attention: true}         | STAGED * LAYER + 5 * ROW + TABLES
pages  | {chunk: 100, on_host: hidden+kv, save_attention: false}    | (STAGED + 9) * ROW + TABLES
"""
WAYS = {name: (yaml.safe_load(options), eval(budget)) for name, options, budget in lines_of(WAYS, "|")}
"""Options, and host bytes that hold a part of what is kept."""


def model_of(layers=LAYERS):
    return make_model(num_hidden_layers=layers)


def with_disk(model, folder, way="inputs", ctx=None, **more):
    options, budget = WAYS[way]
    return attach(model, ctx, **{"offload": True, **options, "host_memory": budget, "disk": str(folder), **more})


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_with_a_host_that_is_too_small(tmp_path, monkeypatch, way):
    """Of two steps, on a disk that the computation waits for; the host's budget is kept, what goes to the disk is what
    the plan says, and nothing is left."""
    model, sample, (options, budget), own = model_of(), batch(LENGTH), WAYS[way], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (time.sleep(0.005), own(*given))[1])
    with small_pages(64), attach(model, offload=True, **options):
        loss, want = step(model, sample)
    with small_pages(64), with_disk(model, tmp_path, way) as handle:
        store, written = handle.store, []
        for _ in range(2):
            before = store.file.written
            got, grads = step(model, sample)
            assert got == loss
            assert same(grads, want)
            written.append(store.file.written - before)
            assert store.file.held == store.leased == 0
        assert handle.plan.inputs_kept_every == 1
        assert handle.plan.attention_kept == (options["save_attention"] is not False)
        assert store.peak_nbytes <= budget
        assert written[0] == written[1] == store.file.read / 2 == store.file.peak > 2 * ROW
        assert os.listdir(tmp_path) == []


def test_as_much_stays_on_the_host_as_it_has_room_for(tmp_path):
    """What stays is spread over the layers, and what is on its way is the share of three layers: the host is full."""
    for rows, away in ((3, 10), (4, 9), (5, 7), (6, 6), (7, 5), (8, 3), (9, 2), (LAYERS, 0)):
        with with_disk(model := model_of(), tmp_path, host_memory=rows * ROW) as handle:
            train(model, batch(LENGTH))
            assert handle.store.file.written == away * ROW
            assert handle.store.peak_nbytes == rows * ROW
    with with_disk(model := model_of(), tmp_path, host_memory=7 * ROW) as handle:
        loss = alstlib.causal_lm_loss(model, batch(LENGTH)).loss
        ticket, stays = handle.store.latest(), []
        while ticket is not None:
            stays.append(ticket.there)
            ticket = ticket.next()
        assert stays == [False, True, False, True, True, False, True, False, True, False]
        loss.backward()


def test_backward_reads_in_its_order_two_layers_ahead(tmp_path, monkeypatch):
    places, begun = {"write": [], "fill": []}, []
    for name, own in (("write", DiskFile.write), ("fill", DiskFile.fill)):

        def noted(file, memory, place, ready, name=name, own=own):
            places[name].append(place)
            return own(file, memory, place, ready)

        monkeypatch.setattr(DiskFile, name, noted)
    with with_disk(model := model_of(), tmp_path, host_memory=STAGED * ROW) as handle:
        own = handle.store.get
        monkeypatch.setattr(handle.store, "get", lambda *a: (own(*a), begun.append(len(places["fill"])))[0])
        train(model, batch(LENGTH))
    assert len(places["write"]) == LAYERS
    assert places["fill"] == places["write"][::-1]
    assert begun == [min(LAYERS, i + STAGED) for i in range(LAYERS)]


def test_two_runs_share_a_disk_and_a_dropped_graph_leaves_nothing(tmp_path):
    first, second = model_of(), make_model(num_hidden_layers=LAYERS, seed=1)
    samples = batch(LENGTH), batch(LENGTH - 3)
    with attach(first), attach(second):
        want = [step(model, sample) for model, sample in zip((first, second), samples)]
    with with_disk(first, tmp_path) as one, with_disk(second, tmp_path, "whole") as other:
        losses = [alstlib.causal_lm_loss(model, sample) for model, sample in zip((first, second), samples)]
        assert os.listdir(tmp_path) == []
        assert one.store.file.held
        assert other.store.file.held
        del losses
        assert one.store.file.held == other.store.file.held == 0
        for (loss, _), model, sample in zip(want, (first, second), samples):
            assert step(model, sample)[0] == loss
        assert one.store.file.end == one.store.file.peak  # which began anew
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(one.store.file.descriptor)


def test_a_store_ends_with_its_model_whatever_was_on_its_way(tmp_path):
    model = model_of()
    with with_disk(model, tmp_path) as handle:
        loss, store = alstlib.causal_lm_loss(model, batch(LENGTH)).loss, weakref.ref(handle.store)
    del loss, handle  # without a backward, as after an error
    gc.collect()
    assert store() is None


def test_where_direct_access_is_refused_it_goes_on_and_says_so(tmp_path, monkeypatch):
    """As in file systems that take the flag and then refuse."""
    model, sample, own = model_of(), batch(LENGTH), os.pwrite

    def pwrite(descriptor, *args):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return own(descriptor, *args)

    with attach(model, offload=True, save_attention=False):
        _, want = step(model, sample)
    with with_disk(model, tmp_path) as handle:
        assert handle.store.file.direct
        assert not any("O_DIRECT" in note for note in handle.notes)
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)  # a file that has a name for a moment
    monkeypatch.setattr(os, "pwrite", pwrite)
    with with_disk(model, tmp_path) as handle:
        assert not handle.store.file.direct
        assert sum("O_DIRECT" in note for note in handle.notes) == 1
        assert same(step(model, sample)[1], want)
        assert handle.store.file.read
        assert os.listdir(tmp_path) == []


def test_refusals(tmp_path):
    model = model_of(2)
    check_refused(r"disk\.folder='/none/such' takes no file .*local disk", with_disk, model, "/none/such")
    check_refused("disk takes what the host has no room for: it needs offload=True", alstlib.Options, disk="/tmp")
    check_refused(r"disk\.bytes=0 must be", alstlib.Options, offload=True, disk={"folder": "/tmp", "bytes": 0})
    with attach(model, offload=True, disk=tmp_path):
        check_refused("disk=None, or chunk='auto'", alstlib.block_step, model, batch(LENGTH), 64)
    # a disk that is too small is not used, and the host keeps what it can by itself
    with with_disk(model_of(), tmp_path, disk={"folder": tmp_path, "bytes": ROW}, host_memory=5 * ROW) as handle:
        train(handle.model, batch(LENGTH))
        assert handle.plan.inputs_kept_every == 2
        assert handle.store.file.written == 0
        assert any("has too little room" in note for note in handle.notes)
    small = {"folder": tmp_path, "bytes": ROW}
    with with_disk(model_of(), tmp_path, disk=small, host_memory=ROW // 2) as handle, pytest.raises(HostOutOfMemory):
        train(handle.model, batch(LENGTH))


RULE = yaml.safe_load("""
# bytes of the host and of the disk, what is saved: what is kept, for 10 layers with inputs of 100 bytes, outputs of 50
- [1500, 1000000, auto, [1, 10, 1000, false]]  # no need
- [1499, 1000000, auto, [1, 10, 1000, true]]
- [449, 1000000, auto, [1, 0, 1000, true]]  # outputs cannot be on their way
- [299, 1000000, auto, [5, 1, 200, false]]  # nor inputs
- [500, 400, false, [2, 0, 500, false]]  # the disk is too small
""")


def test_the_rule():
    for room, disk, save, want in RULE:
        rule = Forward(layers=10, attending=range(10), save=save, input_bytes=100, outputs=(40, 10))
        assert rule.kept(room, disk) == tuple(want)
    page = 4096
    assert sent_away(9 * page, 0, 10, page, (), ())[1:] == (2 * page, page)
    assert sent_away(2 * page, 0, 10, page, (), ())[1:] == (10 * page, 2 * page)  # nothing makes room enough
    assert sent_away(15 * page, 0, 10, page, (page, page), range(5))[1:] == (9 * page, 4 * page)  # half of them attend


def test_a_plan_never_takes_more_than_the_host_has():
    """However a layer's outputs are cut into chunks: else one rank would refuse its forward, and others wait for it."""
    draw = random.Random(0)
    for _ in range(300):
        layers, tokens, heads, chunks = (
            draw.randint(1, 6),
            draw.randint(1, 600),
            draw.randint(1, 7),
            draw.randint(0, 12),
        )
        size, outputs = tokens * heads * 16, (tokens * heads * 8, tokens * heads * 4)
        movable = layers * (size + sum(outputs))
        room = draw.choice([draw.randint(0, movable), draw.randint(0, 4 * size)])
        _, away, moving = sent_away(room, 0, layers, size, outputs, range(layers), chunks)
        assert movable - away + moving <= max(room, movable - away), (layers, tokens, heads, chunks, room)


def compared(model, data, folder, way, ctx=None):
    """Each of two steps with a disk, which is used, has the bits of a step without."""
    with small_pages(64), attach(model, ctx, offload=True, **WAYS[way][0]):
        loss, want = step(model, data, ctx)
    with small_pages(64), with_disk(model, folder, way, ctx) as handle:
        for _ in range(2):
            got, grads = step(model, data, ctx)
            assert got == loss
            assert same(grads, want)
        assert handle.store.file.written > ROW


def on_two(rank, world, folder, way):
    ctx = alstlib.SPContext.create(world)
    compared(model_of(), batch(2 * LENGTH, world=world, rank=rank), folder, way, ctx)


@pytest.mark.parametrize("way", ["auto", "hidden"])
def test_a_step_of_two_ranks(ranks2, tmp_path, way):
    ranks2(on_two, str(tmp_path), way)


def failing(rank, world, folder, fault):
    """What each rank says where the last one's disk fails, and whether a layer got a gradient."""
    model, ctx = model_of(), alstlib.SPContext.create(world)
    before, over = resource.getrlimit(resource.RLIMIT_FSIZE), threading.Event()

    def broken(*_):
        over.wait(100 if fault == "slow" else 0)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch, small_pages(64), with_disk(model, folder, "hidden", ctx):
        if rank == world - 1 and fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROW, before[1]))
        elif rank == world - 1:
            patch.setattr(disk_store, "PATIENCE", 0.2)
            patch.setattr(os, "preadv" if fault == "reads" else "pwrite", broken)
        try:
            train(model, batch(2 * LENGTH, world=world, rank=rank))
        except DiskFailed as e:
            return str(e), any(p.grad is not None for p in model.model.layers.parameters())
        finally:
            over.set()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "fault, says",
    [("full", "has no room for .* bytes .*File too large"), ("reads", "failed .Input/output error"),
     ("writes", "failed .Input/output error"), ("slow", "has moved nothing for 0.2 s")],
)  # fmt: skip
def test_a_fault_of_one_disk_ends_all_ranks_before_a_gradient(ranks2, tmp_path, fault, says):
    other, (own, grad) = ranks2(failing, str(tmp_path), fault)
    assert other == ("the disk of rank 1 failed: its own message says why", False)
    assert not grad
    assert re.fullmatch(f"the disk in '{re.escape(str(tmp_path))}'.*{says}.*or disk=None", own, re.DOTALL), own


def test_pieces_fill_memory_whatever_their_number(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "PIECE", 8192)
    file, want = DiskFile(str(tmp_path), limit=80_000), torch.arange(5 * 4096) % 251
    memory = torch.frombuffer(mmap.mmap(-1, 5 * 4096), dtype=torch.uint8)
    memory.copy_(want)
    assert file.room() == 80_000
    for one in file.write(memory, file.take(memory.nbytes), lambda: None):
        one.result()
    memory.zero_()
    moves = file.fill(memory, 0, lambda: None)
    assert len([one.result() for one in moves]) == 3
    assert torch.equal(memory, want.to(torch.uint8))
    assert file.room() == 80_000 - 5 * 4096


def on_late(rank, world, folder, way):
    """On a device whose copies are late."""
    here = device()
    data = {n: t.to(here) for n, t in batch(LENGTH).items() if isinstance(t, torch.Tensor)}
    compared(model_of().to(here), data, folder, way)


@pytest.mark.parametrize("way", ["whole", "hidden"])
def test_copies_of_a_device_are_waited_for(late1, tmp_path, way):
    late1(on_late, str(tmp_path), way)
