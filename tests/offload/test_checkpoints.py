"""Offloaded checkpoints: gradients of the plain function, exact replay, host memory that is counted and bounded."""

import functools
import mmap
import sys
from unittest import mock

import pytest
import torch
from cases import attach, batch, lines_of, make_model, no_gc, train
from operators import counted, gradients, randn, worst
from test_ledger import OPTIONS as MORE_OPTIONS
from torch import Tensor, nn

import alstlib
from alstlib.offload import host_store
from alstlib.offload.checkpoints import checkpoint
from alstlib.offload.host_store import HostOutOfMemory, HostStore
from alstlib.planner.measure.ledger import Ledger

MODES = ["none", "sync", "async"]


class Block(nn.Module):
    """x, a second tensor and a number in; two tensors and a None out. Draws dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x, other, *, scale):
        self.calls += 1
        y = x + self.second(self.dropout(torch.nn.functional.silu(self.first(x)))) * scale
        return y * other, None, y.square().mean(-1)


def inputs():
    """Of which the first one is strided."""
    made = [randn(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((8, 7, 2), (8,), (1,)))]
    return [made[0].permute(2, 1, 0), *made[1:]]


def after(block, run):
    """A function of three tensors that ends in one."""

    def fn(x, other, scale):
        torch.manual_seed(5)
        y, nothing, z = run(block, x, other, scale=scale)
        assert nothing is None
        torch.manual_seed(9)  # what is drawn between forward and backward must not matter
        return torch.cat([y.sin().flatten(), z.flatten()])

    return fn


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_equals_the_plain_function(mode, dropout):
    """Outputs, x, a second tensor, a keyword tensor, weights; the random state afterwards; upstream other than 1."""
    block, tensors, store = Block(dropout), [t.requires_grad_() for t in inputs()], HostStore(mode)
    found, keep = [], functools.partial(checkpoint, store=store)
    for run in (Block.__call__, keep):
        block.zero_grad()
        made = gradients(after(block, run), tensors, randn(2 * 7 * 9))
        found.append([*made, torch.rand(3), *(p.grad for p in block.parameters())])
    assert worst(*found) < 1e-6
    assert block.calls == 1 + 2
    assert (store.nbytes > 0) == (mode != "none")
    with torch.no_grad():  # the function is simply run
        leased, out = store.leased, keep(block, *tensors[:2], scale=tensors[2])
    assert block.calls == 1 + 2 + 1
    assert not out[0].requires_grad
    assert store.leased == leased


def test_a_frozen_function_costs_nothing():
    frozen, (x, other, scale) = Block().requires_grad_(False), inputs()
    out = checkpoint(frozen, x, other, scale=scale, store=HostStore("sync"), module=frozen)[0]
    assert not out.requires_grad
    assert frozen.calls == 1


def test_an_input_without_a_gradient_leaves_its_device_too():
    """As the first layer's of a model whose adapter alone trains."""
    block, (x, other, scale) = Block(), inputs()
    x = torch.nn.functional.pad(x, (0, 0, 0, 2**16))
    with Ledger(stores=[store := HostStore("sync")]) as ledger:
        first = ledger.device_bytes
        hidden = x + 1
        out = checkpoint(lambda h: block(h, other, scale=scale)[0].sum(), hidden, store=store, module=block)
        del hidden
        assert ledger.device_bytes - first < x.nbytes / 10
        out.backward()
    got = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    block(x + 1, other, scale=scale)[0].sum().backward()
    assert worst(got, [p.grad for p in block.parameters()]) < 1e-6


# ----- host memory


def run_step(store, length, layers=3):
    x = torch.randn(1, length, 8, requires_grad=True)
    y = x
    for _ in range(layers):
        y = checkpoint(torch.sin, y, store=store)
    y.sum().backward()


def test_slabs_are_reused_and_trimmed():
    store, made = HostStore("sync"), []
    store.on_slab = lambda slab: made.append(slab.data_ptr())
    for length, slabs, holds in ((10, 3, 10), (10, 3, 10), (9, 3, 10), (1, 3, 10), (11, 6, 11)):
        run_step(store, length)  # a shorter sequence fits the same slabs, a longer one gives them back
        assert (len(made), store.nbytes, store.peak_nbytes) == (slabs, *[3 * holds * 8 * 4] * 2)
    store.budget = store.nbytes  # and so does a shorter one that may take no more than it needs
    store.reserve(3 * 4 * 8 * 4, 3 * 4 * 8 * 4)
    run_step(store, 4)
    assert (len(made), store.nbytes) == (9, 3 * 4 * 8 * 4)
    store.trim()
    assert (store.nbytes, store.free) == (0, [])


def test_no_slab_is_made_after_the_longest_sample():
    """Whatever lengths follow: pinning slabs anew takes longer than the copies."""
    lengths = torch.randint(9, 60, (15,), generator=torch.Generator().manual_seed(0)).tolist()
    for how in ({}, {"chunk": 8, "on_host": "none"}, {"chunk": 8, "on_host": "hidden+kv"}):
        with attach(make_model(), **how, offload="sync") as handle:
            train(handle.model, batch(60))
            with counted(host_store._Slab, "__init__") as made:
                for length in lengths:
                    train(handle.model, batch(length))
            assert handle.store.free
            assert not made, how


def test_a_step_of_the_same_length_that_keeps_more_makes_only_what_is_missing():
    """As when the second step keeps outputs for which the first had no room."""
    store, needed = HostStore("sync"), 2 * 40 * 8 * 4
    for more in (0, 64):
        store.reserve(needed + more, hidden=needed // 2)
        with counted(host_store._Slab, "__init__") as made:
            extra = store.lease((more // 4,), torch.float32, None) if more else None
            run_step(store, 40, layers=2)
    assert made.total() == 1
    assert store.nbytes == needed + 64
    del extra


def test_budget_stops_before_anything_is_taken():
    store = HostStore("sync", budget=10 * 8 * 4 - 1)
    with pytest.raises(HostOutOfMemory, match=r"needs 320 .* 319 are left.*host_memory"):
        run_step(store, 10, layers=1)
    assert (store.nbytes, store.peak_nbytes) == (0, 0)
    run_step(store, 9, layers=1)
    store.reserve(319)  # what is free but taken counts
    with pytest.raises(HostOutOfMemory, match=r"needs 320 .* 319 are left.*offload=False"):
        store.reserve(320)


def test_host_available_is_shared_by_the_local_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    whole = host_store.host_available()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert whole > 2**20
    assert host_store.host_available() == pytest.approx(whole / 4, rel=0.3)


# ----- through a model

OPTIONS = {**MORE_OPTIONS, "eager": {**MORE_OPTIONS["sync"], "attention": "eager"}}


@pytest.mark.parametrize("kind, options", [*(("gqa", o) for o in OPTIONS), ("gemma2", "async"), ("gpt2", "tiled")])
def test_no_reference_cycle_keeps_a_step_alive(kind, options):
    """With the garbage collector off, a step leaves its gradients and nothing else, and no slab in use."""
    model = make_model(kind)
    with attach(model, **OPTIONS[options]) as handle:
        data = batch(256)
        train(model, data)  # what is made once (caches) is made here
        model.zero_grad()
        with no_gc(), Ledger(stores=[handle.store]) as ledger:
            start = ledger.device_bytes
            train(model, data)
            gradients = sum(p.grad.numel() * 4 for p in model.parameters() if p.grad is not None)
            assert ledger.device_bytes - start == gradients
            alstlib.causal_lm_loss(model, data)  # a graph dropped without a backward
            assert ledger.device_bytes - start == gradients
        assert sum(slab.bytes.numel() for slab in handle.store.free) == handle.store.nbytes


# ----- slabs of host memory


@pytest.mark.skipif(sys.platform != "linux", reason="other systems know no such advice")
def test_slabs_are_private_in_huge_pages_and_not_forked(monkeypatch):
    asked = []

    class Mapped(mmap.mmap):
        def __new__(cls, fileno, length, flags):
            asked.append(bool(flags & mmap.MAP_PRIVATE))
            return super().__new__(cls, fileno, length, flags=flags)

        def madvise(self, advice, *rest):
            asked.append(advice)
            super().madvise(advice, *rest)

    monkeypatch.setattr(mmap, "mmap", Mapped)
    host_store._Slab(5 * 2**20, None)
    assert asked == [True, mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK]


def test_pinned_slabs_wait_before_they_go(monkeypatch):
    cuda = mock.Mock()
    runtime = cuda.cudart()
    for name in ("cudart", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    runtime.cudaHostRegister.side_effect = [0, 2]
    host_store._Slab(3 * 2**20 + 5, torch.device("cuda")).bytes.fill_(1)
    with pytest.raises(HostOutOfMemory, match=r"cannot pin 64 bytes of host memory \(CUDA error 2\)"):
        host_store._Slab(64, torch.device("cuda"))
    calls = [name.removeprefix("cudart().") for name, *_ in cuda.mock_calls if name != "cudart"]
    # what was not pinned is not unpinned
    assert calls == ["cudaHostRegister", "synchronize", "cudaHostUnregister", "cudaHostRegister"]


STRIDES = """
torch.randn(1, 5, 3, 4).transpose(1, 2)          | its own
torch.randn(2, 5, 4)                             | its own
torch.randn(3, 2, 4, 5).permute(3, 1, 0, 2)      | its own
torch.randn(6, 4)[:, None].transpose(0, 1)       | its own
torch.empty(0, 3).T                              | its own
torch.randn(2, 6, 4)[:, :5]                      | (20, 4, 1)
torch.randn(3, 1).expand(3, 4)                   | (4, 1)
"""
"""Tensors, and the strides with which the host gives them back."""


@pytest.mark.parametrize("mode", MODES)
def test_tensors_come_back_with_their_strides(mode):
    """An attention output is a permuted view: kernels that are built for a layout meet the same one again. What has
    gaps, or rows that share memory, is stored without. It may be overwritten once it is kept."""
    store, kept = HostStore(mode), []
    ticket = store.ticket()
    for made, strides in lines_of(STRIDES, "|"):
        x = eval(made)
        own = strides == "its own" or mode == "none"
        kept.append((x.clone(), x.stride() if own else eval(strides)))
        store.put(ticket, x)
        if mode != "none":  # the host holds what it was
            x.untyped_storage().fill_(0)
    back = store.get(ticket, torch.device("cpu"))
    for got, (want, strides) in zip(back, kept, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == strides
    assert store.nbytes == (0 if mode == "none" else sum(t.nbytes for t in back))


# ----- on a GPU


@pytest.mark.gpu
def test_device_peak_is_that_of_a_few_layers_on_a_gpu(monkeypatch):
    """Tensors are handed between streams by events: `record_stream` would keep their memory for later."""

    def refuse(*args):
        raise AssertionError("record_stream")

    monkeypatch.setattr(Tensor, "record_stream", refuse)
    peaks = []
    for layers in (6, 24):
        store = HostStore("async")
        x = torch.randn(2**20, 16, device="cuda", requires_grad=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            y = x
            for _ in range(layers):
                y = checkpoint(lambda t: t.sin(), y, store=store)
            y.sum().backward()
            del y
        peaks.append(torch.cuda.max_memory_allocated())
        assert store.nbytes == layers * x.numel() * 4
    assert peaks[1] - peaks[0] < x.numel() * 4
