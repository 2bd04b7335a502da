"""What the library asks of a device's module: memory, pinning, random states, waiting, and how ranks find their device.
None of it may come from `torch.cuda`, which has no device here."""

import contextlib
import gc
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ALL_ON, attach, make_model, plain_step, run_with, same, sample_of, small_pages, train, worst_error
from device import module
from device.module import NEVER, device, late
from mutate import mutated

import alstlib
from alstlib.base.config import RunConfig
from alstlib.data.loader import SPDataLoader
from alstlib.hf.loading.zero_config import zero_config
from alstlib.offload.courier import Courier
from alstlib.offload.headroom import SHARE, device_memory
from alstlib.offload.host_store import HostStore, Ticket
from alstlib.planner.measure.ledger import Ledger, ran_out
from alstlib.planner.model_shapes import read_shape
from alstlib.runs.train import worker
from alstlib.runs.train.engine import initialize
from alstlib.runs.train.state import RunStates

MIB = 2**20
RUN = """
options: plain
model.name: tiny
model.dtype: fp32
data.seq_len: 128
engine.world_size: 1
engine.sp: 1
engine.zero_stage: 1
engine.offload_optimizer: false
"""


def zeros(mib):
    return torch.zeros(mib * MIB // 4, device=device())


# ----- memory


def ledger(rank, world):
    zeros(64)  # a peak before, and a block that nobody has
    held = zeros(1)
    host = torch.zeros(8 * MIB)
    before = torch.get_device_module(device()).memory_allocated()
    with Ledger(module.NAME, budget=before + 6 * MIB) as ledger:
        assert ledger.device == device()
        assert ledger.device_peak == ledger.device_bytes == before >= held.nbytes
        x = zeros(4)
        host = host + 1  # not the device's
        assert ledger.device_bytes == before + 4 * MIB
        del x
        with pytest.raises(torch.OutOfMemoryError) as error:
            zeros(7)
        assert ran_out(error.value)
        assert (ledger.device_bytes, ledger.device_peak) == (before, before + 4 * MIB)
        ledger.start()
        assert ledger.device_peak == before
    zeros(7)


def test_a_ledger_has_the_peak_and_the_budget_of_the_device(late1):
    late1(ledger)


def counted(rank, world):
    here = torch.get_device_module(device())
    zeros(32)
    here.reset_peak_memory_stats()
    before, x = here.memory_allocated(), zeros(4)
    y = zeros(2)
    del y
    assert here.mem_get_info()[0] < module.TOTAL - here.memory_allocated()  # blocks that nobody has are not free there
    assert device_memory(device()) == (before + x.nbytes, before + 6 * MIB, module.TOTAL - before - x.nbytes)


def test_headroom_counts_the_device(late1):
    late1(counted)


OPTIONS = {"tiles": {"mlp": 16, "norm": 16}}  # the loss makes the peak
LENGTH = 128


def on_device(length, **fields):
    """A model on the device, a batch of one sample, and the gradients of plain transformers on the CPU."""
    model, sample = make_model(**fields), sample_of(length)
    _, want = plain_step(model, sample)
    (batch,) = SPDataLoader([sample], alstlib.SPContext(), device=device())
    return model.to(device()), batch, want


def check_gradients(model, want):
    assert worst_error({n: p.grad.cpu() for n, p in model.named_parameters()}, want)[0] < 1e-5


def kept(rank, world, chunk):
    """The share of layers whose attention outputs steps keep on a device with room for half of them; a step that keeps
    more would run out of memory."""
    model, batch, want = on_device(LENGTH, num_hidden_layers=4, vocab_size=1024)

    def step():
        model.zero_grad()
        train(model, batch)

    need = []
    for save in (False, True):
        with attach(model, save_attention=save, chunk=chunk, **OPTIONS):
            step()
            model.zero_grad()
            with Ledger(device()) as ledger:
                start = ledger.device_bytes
                step()
                need.append(ledger.device_peak - start)
    output = LENGTH * (model.config.hidden_size + model.config.num_attention_heads) * 4  # with the logsumexp
    assert need[1] - need[0] == 4 * output
    model.zero_grad()
    start = torch.get_device_module(device()).memory_allocated()
    shares, total = [], int((need[0] + 2.5 * output) / SHARE) + start
    with (
        mock.patch.object(module, "TOTAL", total), attach(model, chunk=chunk, **OPTIONS) as handle,
        Ledger(device(), budget=start + need[0] + 3 * output),
    ):  # fmt: skip
        for _ in range(3):
            step()
            shares.append(handle.plan.attention_kept)
            check_gradients(model, want)
            model.zero_grad()
    module.limit(1.0)  # of the whole device again
    return shares


@pytest.mark.parametrize("chunk", [None, 64])
def test_attention_outputs_stay_on_the_device_as_far_as_they_fit(late1, chunk):
    assert late1(kept, chunk) == [[0, 0.5, 0.5]]


# ----- ranks


LAUNCHED = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}


def joined(rank, world):
    """What this rank makes its device, and how it joins others: by `SPContext.create`, and by a worker of a run."""
    made = []
    here = torch.get_device_module(device())
    with (
        mock.patch.dict(os.environ, LAUNCHED),
        mock.patch.object(here, "set_device", lambda device: made.append(str(device))),
        mock.patch.object(dist, "is_initialized", return_value=False),
        mock.patch.object(dist, "init_process_group", lambda backend, **how: made.append((backend, how))),
        mock.patch.multiple(dist.distributed_c10d, default_pg_timeout=None, default_pg_nccl_timeout=None),
    ):
        alstlib.SPContext.create()
        assert worker.this_device() == (torch.device(module.NAME, 3), True)
        worker.join(worker.begin(), 7200)
    (*rest, (backend, how)) = made
    return [*rest, backend, str(how["device_id"])]


def test_ranks_join_with_the_backend_of_their_device(late1):
    name = f"{module.NAME}:3"
    assert late1(joined) == [[name, ("late", {}), name, "late", name]]


def waits(rank, world):
    with late(NEVER):
        x, host = torch.ones(8, device=device()), torch.empty(8, pin_memory=True)
        host.copy_(x, non_blocking=True)
        assert host.isnan().all()
        assert worker.timed(lambda: None, device()) > 0
        assert host.eq(1).all()


def test_a_time_is_that_of_what_has_been_done(late1):
    late1(waits)


# ----- pinned memory


def pins(rank, world):
    """A device whose runtime PyTorch does not show pins by PyTorch's allocator; a step that keeps all on the host."""
    here = torch.get_device_module(device())
    assert zero_config(make_model(), offload_optimizer=True)["zero_optimization"]["offload_optimizer"]["pin_memory"]
    runtime = here.cudart
    del here.cudart
    try:
        store = HostStore("async", budget=2**20)
        host = store.lease((3, 5), torch.float64, device())
        assert host.is_pinned()
        assert host.shape == (3, 5)
        model, batch, want = on_device(41)
        with attach(model, **ALL_ON, chunk=5, on_host="hidden+kv") as handle, small_pages(), late(NEVER):
            train(model, batch)
            assert all(slab.bytes.is_pinned() for slab in handle.store.free)
            assert handle.store.peak_nbytes > 0
        check_gradients(model, want)
        del host, store, handle, model
    finally:
        here.cudart = runtime


def test_memory_is_pinned_without_cudas_runtime(late1):
    late1(pins)


# ----- what the host keeps


def dropped(rank, world, mistake):
    """Whether memory stays as it is when a checkpoint is dropped while it is on its way there."""
    change = [("self.coming()", "pass")] if mistake else []
    with mutated(Ticket.release, *change), late(NEVER):
        store, right = HostStore("async", budget=2**30), True
        tickets = [store.ticket() for _ in range(3)]
        for i, ticket in enumerate(tickets):
            store.put(ticket, torch.full((16,), float(i), device=device()))
        store.get(tickets.pop(), device())  # and the one before it is fetched
        del ticket
        while tickets:
            tickets.pop()
            others = [torch.full((16,), 7.0, device=device()) for _ in range(4)]  # one takes its memory
            torch.get_device_module(device()).synchronize()
            right &= all(bool(other.eq(7).all()) for other in others)
    return right


@pytest.mark.parametrize("mistake", [False, True])
def test_a_checkpoint_may_be_dropped_while_it_is_fetched(late1, mistake):
    assert late1(dropped, mistake) == [not mistake]


def kept_before(rank, world):
    with late(NEVER):
        store = HostStore("async", budget=2**30)
        tickets, courier = [store.ticket(), store.ticket()], Courier(store, device())
        for ticket in tickets:
            store.put(ticket, torch.ones(16, device=device()))
        host = courier.empty((16,), torch.float32).fill_(float("nan"))
        courier.send(host, torch.ones(16, device=device()))
        for ticket in reversed(tickets):
            assert store.get(ticket, device())[0].eq(1).all()
        assert host.isnan().all()
        courier.finish()
        assert host.eq(1).all()


def test_what_is_kept_comes_back_without_waiting_for_what_left_after_it(late1):
    """The sums of a page, for example: behind them a checkpoint would come late."""
    late1(kept_before)


# ----- random states


def continued(rank, world, folder):
    """A training state brings back the random numbers of the device, and those of the CPU."""
    from device import accelerator

    accelerator.install()
    run = run_with(RUN, {"steps": 9})

    def started():
        model = make_model().to(device())
        attach(model, alstlib.SPContext.create(1))
        return initialize(run, model, False)

    def drawn():
        return [torch.rand(5), torch.rand(5, device=device()).cpu()]

    engine = started()
    torch.rand(7, device=device())  # so that both generators are at other places
    states = RunStates(engine, run, 0, folder, print)
    states.save(1, {})
    states.wait()
    want = drawn()
    assert not torch.equal(*want)
    found = RunStates(started(), run, 0, folder, print).load(folder)
    assert found["step"] == 1
    assert same(drawn(), want)


def test_a_training_state_has_the_random_states_of_the_device(late1, tmp_path):
    late1(continued, tmp_path)


# ----- a whole run


def trained(rank, world, out, budget):
    """The result of a run on the device, by the worker of `alst run`."""
    from device import accelerator

    from alstlib.hf.loading import models, ranks
    from alstlib.runs import results
    from alstlib.runs.train import ablation

    accelerator.install()
    run = run_with(RUN, {"device_memory": budget, "tiles": {"mlp": 64, "loss": 64}, "steps": 3})

    def load(run, dtype, where):
        """Not by `p.data = ...`, which takes a parameter to CUDA but not to this device."""
        return ranks.UnplacedModel(models.load_model(run, dtype).to(where), {}, where)

    out.mkdir()
    gc.collect()
    with (
        mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="late"),
        mock.patch.object(ablation, "load_on_first", load),
        mock.patch("alstlib.runs.train.engine.place"),
        contextlib.suppress(torch.OutOfMemoryError),
    ):
        worker.work(run, out, ablation.AblationRun)
    module.limit(1.0)
    return results.read_result(out / "result.json")


def test_a_run_trains_on_the_device_within_its_memory(late1, tmp_path):
    (result,) = late1(trained, tmp_path / "long", 2**26)
    assert result["status"] == "ok"
    assert result["environment"]["device"] == module.NAME
    (peak,) = result["metrics"]["device_peak_bytes"]
    states = 4 * 4 * read_shape("tiny").parameters  # weights, gradients and two moments
    assert states < peak < 2**26
    (result,) = late1(trained, tmp_path / "short", peak - 2**20)
    assert result["status"] == "oom"
    assert result["error"]["type"] == "OutOfMemoryError"


def drawn(rank, world, limit):
    from alstlib.hf.loading import ranks

    here = torch.get_device_module(module.device())
    gc.collect()
    here.reset_peak_memory_stats()
    before = here.memory_allocated()
    module.limit(limit)
    made = ranks._whole(RunConfig(model={"name": "tiny"}), torch.float32, module.device(), images=False)
    module.limit(1.0)
    taken = here.max_memory_allocated() - before
    assert {p.device.type for p in made.parameters()} == {"cpu"}
    assert here.memory_allocated() == before
    return taken / sum(p.nbytes for p in made.parameters())


@pytest.mark.parametrize("limit, share", [(1.0, 1), (1e-6, 0)])
def test_random_weights_are_drawn_on_the_device_where_they_fit(late1, limit, share):
    (taken,) = late1(drawn, limit)
    assert taken >= 1 if share else taken < 0.5
