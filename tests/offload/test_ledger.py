"""The byte ledger: it reads what PyTorch's own allocation events say, stops a run at a budget, and knows the host."""

import functools
import gc
import itertools
from pkgutil import resolve_name

import pytest
import torch
import yaml
from cases import attach, batch, check_step, lines_of, make_model, no_gc, step, train
from torch import nn
from torch.profiler import ProfilerActivity, profile

from alstlib.offload.host_store import HostStore
from alstlib.planner.measure.ledger import DeviceOutOfMemory, Ledger, ran_out, storage_bytes

MIB = 2**20
SHAPE = yaml.safe_load("""
{vocab_size: 512, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 4,
 num_key_value_heads: 2, max_position_embeddings: 4096}
""")
OPTIONS = yaml.safe_load("""
nothing: {tiles: false, checkpoint: false}
checkpoint: {tiles: {norm: true}}
tiled: {tiles: &tiles {mlp: 128, loss: 128, norm: true}, save_attention: true}
sync: {tiles: *tiles, offload: sync, save_attention: false}
async: {tiles: *tiles, offload: true}
""")


@pytest.fixture(autouse=True)
def _one_thread():
    """Each thread of PyTorch's CPU attention has a workspace of its own, which a GPU has not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def profiled_peak(step):
    """Peak of the live bytes over those at the start, from PyTorch's own allocation events."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reading_is_pytorchs_own_within_a_percent(options):
    """Peak over the start of a training step. Slabs are none of PyTorch's allocations; the model is large enough for
    its MLP's tiles to outweigh the workspace of CPU attention, which is inside an operator."""
    length, width = 900, 128
    shape = {**SHAPE, "hidden_size": width, "intermediate_size": 6 * width}
    model, data = make_model(**shape), batch(length, vocab=512)
    options = {name: 512 if value == 128 else value for name, value in options.items()}
    with attach(model, **options) as handle:
        step = functools.partial(train, model, data)
        step()
        model.zero_grad()
        with Ledger(stores=[handle.store]) as ledger:
            before = ledger.device_bytes
            step()
        model.zero_grad()
        gc.collect()
        want = profiled_peak(step)
        assert want > 8 * MIB
        assert ledger.device_peak - before == pytest.approx(want, rel=0.01)
        inputs, outputs = 2 * length * width * 4, 2 * length * (width + 4) * 4
        kept = {"sync": inputs, True: inputs + outputs}.get(options.get("offload", False), 0)
        assert ledger.host_peak == handle.store.nbytes == kept


def test_counts_what_is_alive_at_the_start():
    """Parameters, gradients and plain tensors, each storage once however many views it has."""
    with Ledger() as ledger:
        base = ledger.device_bytes
    module, weight = nn.Linear(256, 512, bias=False), 256 * 512 * 4
    module(torch.zeros(1, 256)).sum().backward()
    views = [module.weight.detach()[:1], module.weight.data.T]
    with Ledger() as ledger:
        assert ledger.device_bytes - base == 2 * weight
        module.zero_grad()
        x = torch.zeros(MIB)
        y = x.view(2, -1)[1]
        del x
        assert ledger.device_bytes - base == weight + 4 * MIB
        del y
        assert ledger.device_bytes - base == weight
        assert ledger.device_peak - base == weight + 4 * MIB
    assert storage_bytes([module.weight, *views]) == weight


def test_what_only_dead_cycles_hold_is_not_alive():
    """Else Python frees it inside, and a peak over the bytes at the start is too small, or less than nothing."""
    with no_gc():
        cycle = [torch.zeros(MIB)]
        cycle.append(cycle)
        del cycle
        with Ledger() as ledger:
            base = ledger.device_bytes
            gc.collect()
            assert ledger.device_bytes == base


def test_a_storage_that_grows_is_counted_at_its_size():
    with Ledger() as ledger:
        base = ledger.device_bytes
        x = torch.zeros(1000)
        x.resize_(3000)
        assert ledger.device_bytes - base == 12_000


def test_slabs_are_host_memory_and_what_comes_back_is_the_devices():
    """A permuted tensor, as an attention output is, goes there without a copy of it on the device."""
    store, other, x = HostStore("sync"), HostStore("sync"), torch.randn(1, 100, 8, 10).transpose(1, 2)
    with Ledger(stores=[store]) as ledger:
        base, ticket, size = ledger.device_bytes, store.ticket(), x.nbytes
        store.put(ticket, x)
        assert (ledger.device_peak, ledger.device_bytes, ledger.host_peak) == (base, base, size)
        back = store.get(ticket, x.device)
        assert (ledger.device_peak, ledger.device_bytes, ledger.host_peak) == (base + size, base + size, size)
        del back
        store.trim()
        assert (ledger.device_bytes, ledger.host_peak) == (base, size)
        ledger.start()
        assert ledger.host_peak == 0
        held = other.ticket()
        other.put(held, x)  # in a store that the ledger does not know
        assert ledger.device_bytes == base + size


def test_what_an_engine_keeps_on_the_host_is_marked():
    """Known or new to the ledger, marked once or twice, and no longer counted when it dies."""
    weights = torch.zeros(1000)
    with Ledger() as ledger:
        base = ledger.device_bytes
        ledger.mark_host([weights, weights[1:]])
        ledger.mark_host([weights])
        assert (ledger.device_bytes, ledger.host_peak) == (base - 4000, 4000)
        state = torch.zeros(500)
        assert ledger.device_bytes == base - 2000
        ledger.mark_host([state])
        assert (ledger.device_bytes, ledger.host_peak) == (base - 4000, 6000)
        weights.add_(1)
        assert ledger.device_bytes == base - 4000


def test_what_is_computed_on_the_host_stays_there():
    """An offloaded optimizer's temporaries are host memory; what a device tensor takes part in is not."""
    state, weight = torch.ones(1000), torch.ones(1000)
    with Ledger() as ledger:
        ledger.mark_host([state])
        base = ledger.device_bytes
        step = state.mul(0.1).add(state)
        assert ledger.device_bytes == base
        copied = weight + step
        assert ledger.device_bytes == base + 4000
        del copied
        assert ledger.device_bytes == base


def test_budget_stops_a_run_and_a_shorter_one_goes_on():
    """As on a GPU: the step fails at the operation that goes beyond, and its memory comes back."""
    model = make_model(**SHAPE)
    with attach(model, **OPTIONS["nothing"]) as handle:
        want = step(model, batch(512, vocab=512))
        with Ledger(stores=[handle.store]) as ledger:
            train(model, batch(512, vocab=512))
            budget = ledger.device_peak + MIB
        with Ledger(stores=[handle.store], budget=budget) as ledger:
            with pytest.raises(DeviceOutOfMemory, match=rf"[\d,]+ bytes at aten.* the budget of {budget:,} bytes"):
                train(model, batch(4096, vocab=512))
            gc.collect()
            assert ledger.device_bytes < budget - MIB
            ledger.start()
            check_step(step(model, batch(512, vocab=512)), want)
            assert ledger.device_peak <= budget


def test_budget_holds_from_start_and_not_after_close():
    held = torch.zeros(MIB)
    with Ledger(budget=MIB) as ledger:  # what is alive already is beyond it: only new bytes raise
        with pytest.raises(MemoryError):  # which callers may catch
            torch.zeros(MIB)
        before = ledger.device_peak
        ledger.close()
        torch.zeros(8 * MIB)
        assert ledger.device_peak == before
    assert held.numel() == MIB


def test_curve_and_peak_agree():
    model = make_model(**SHAPE)
    with attach(model, **OPTIONS["sync"]), Ledger(record=True) as ledger:
        train(model, batch(512, vocab=512))
        assert max(ledger.curve) == ledger.device_peak
        assert ledger.curve[-1] == ledger.device_bytes
        ledger.start()
        assert ledger.curve == []
    with Ledger() as ledger:
        torch.zeros(10)
        assert ledger.curve == [], "nothing is recorded unasked"


ENDS = """
torch:OutOfMemoryError                            -> yes -> CUDA out of memory. Tried to allocate 2.00 GiB
alstlib.planner.measure.ledger:DeviceOutOfMemory  -> yes -> out of device memory
builtins:RuntimeError -> yes -> cuDNN error: CUDNN_STATUS_ALLOC_FAILED
builtins:RuntimeError -> yes -> CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
builtins:RuntimeError -> yes -> CUDA error: out of memory
builtins:RuntimeError -> yes -> NCCL error: unhandled cuda error, Failed to CUDA calloc async 608 bytes
builtins:RuntimeError -> yes -> DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes
builtins:RuntimeError -> no  -> CUDA error: an illegal memory access was encountered
builtins:ValueError   -> no  -> out of memory
"""


@pytest.mark.parametrize("kind, is_it, message", lines_of(ENDS))
def test_what_says_that_memory_ran_out(kind, is_it, message):
    assert ran_out(resolve_name(kind)(message)) == (is_it == "yes")


@pytest.mark.gpu
def test_ledger_reads_the_allocator_on_a_gpu():
    with Ledger("cuda") as ledger:
        start = ledger.device_bytes
        x = torch.zeros(16 * MIB, device="cuda")
        del x
        assert ledger.device_peak - start == 64 * MIB
        assert ledger.device_bytes == start


@pytest.mark.gpu
def test_budget_stops_a_run_on_a_gpu():
    torch.cuda.empty_cache()
    with Ledger("cuda", budget=512 * MIB):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.zeros(256 * MIB, device="cuda")
        torch.zeros(MIB, device="cuda")
    torch.zeros(256 * MIB, device="cuda")
