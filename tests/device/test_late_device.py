"""The device on a CPU itself: values, refusals, memory, streams that are late, threads, and collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import group
from device.module import NEVER, device, extension, late
from operators import EXACT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from alstlib.data.agreement import Agreement
from alstlib.mesh import SPContext
from alstlib.reference import relative_error

OPS: dict[str, Callable[..., Tensor]] = {
    "products": lambda x, y: (x @ y.T).tanh() @ x + (x.mul(y) - x / 3).exp().sum(0),
    "views": lambda x, y: x.view(2, -1).t().reshape(-1)[3:].unfold(0, 4, 2) + y[:, None].expand(6, 2, 8).flatten()[:4],
    "in place": lambda x, y: x.clone().add_(y).mul_(2).index_fill_(0, torch.tensor([1], device=x.device), 3.0),
    "slices": lambda x, y: torch.cat([x[:2], y[1:, ::2].repeat(1, 2), torch.stack([x[0], y[0]])]).flip(0),
    "written slices": lambda x, y: _written(x, y),
    "indices": lambda x, y: x[torch.tensor([0, 3, 3], device=x.device)] + y[[1, 2, 0]] * y.gather(1, _ids(x))[:3],
    "masks": lambda x, y: torch.where(x > 0, x, y).masked_fill(y < 0, 0.5),
    "softmax": lambda x, y: F.log_softmax(x, -1) * y.softmax(0) + x.logsumexp(-1, keepdim=True),
    "norms": lambda x, y: F.layer_norm(x, (8,), y[0], y[1]) + F.rms_norm(x, (8,), y[2]),
    "loss": lambda x, y: F.cross_entropy(x, _ids(x)[:, 0], reduction="none") + F.mse_loss(x, y),
    "embedding": lambda x, y: F.embedding(_ids(x) % 6, x) @ y.T,
    "convolution": lambda x, y: F.conv1d(x[None], y[:, None, :3], groups=6, padding=2),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None], is_causal=True),
    "sorted": lambda x, y: x.sort(-1).values * y.topk(8, -1).values.cumsum(-1),
    "complex": lambda x, y: torch.view_as_real(torch.view_as_complex(x.reshape(6, 4, 2)) * 1j).flatten(1) + y,
    "types": lambda x, y: (x.bfloat16() * y.half()).float() + x.double().float(),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y).triu().diagonal() + torch.bmm(x[None], y.T[None]).sum(),
}  # fmt: skip


def _ids(x: Tensor) -> Tensor:
    return torch.arange(48, device=x.device).view(6, 8) % 8


def _written(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[1:4] = y[:3]
    out[:, 2:] += 1
    out[0], out[4:] = x[5], 2.0
    out[1:4, :2] = x[1:4, :2].sigmoid()
    return out.split([3, 5], 1)[1] * 2


def both(rank: int, world: int, name: str) -> None:
    """Outputs and gradients are those of the CPU, but for the rounding of what PyTorch decomposes on a device."""
    found = []
    for where in (torch.device("cpu"), device()):
        torch.manual_seed(0)
        x, y = (torch.randn(6, 8).to(where).requires_grad_() for _ in range(2))
        out = OPS[name](x, y)
        assert out.device == where
        grads = torch.autograd.grad(out.square().sum(), (x, y), allow_unused=True)
        found.append([out, *grads])
    for cpu, here in zip(*found):
        assert (cpu is None) == (here is None)
        if cpu is not None:
            assert here.device == device()
            assert relative_error(here.cpu(), cpu) < EXACT[torch.float32]


@pytest.mark.parametrize("name", OPS)
def test_values_are_those_of_the_cpu(late1: Any, name: str) -> None:
    late1(both, name)


def steps(rank: int, world: int, optimizer: str) -> None:
    """Dropout, a norm of gradients and an optimizer, with the states and the draws of each device."""
    found = []
    for where in (torch.device("cpu"), device()):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.SiLU(), nn.Linear(8, 1)).to(where)
        chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            model(torch.rand(4, 8, device=where)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            chosen.step()
            chosen.zero_grad()
        found.append([p.detach().cpu() for p in model.parameters()])
    assert all(relative_error(b, a) < EXACT[torch.float32] for a, b in zip(*found))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_steps_are_those_of_the_cpu(late1: Any, optimizer: str) -> None:
    late1(steps, optimizer)


def random_states(rank: int, world: int) -> None:
    here = torch.get_device_module(device())
    torch.manual_seed(1)
    state, cpu = here.get_rng_state(device()), torch.get_rng_state()
    first = torch.rand(5, device=device())
    assert torch.equal(cpu, torch.get_rng_state())  # a generator of its own
    assert not torch.equal(first, torch.rand(5, device=device()))
    here.set_rng_state(state, device())
    assert torch.equal(first, torch.rand(5, device=device()))
    own = torch.Generator(device())
    own.manual_seed(1)
    assert torch.equal(first, torch.rand(5, device=device(), generator=own))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(5, device=device(), generator=torch.Generator())
    here.set_rng_state(state, device())
    with torch.random.fork_rng(devices=[device()], device_type=device().type):
        torch.rand(3, device=device())
    assert torch.equal(first, torch.rand(5, device=device()))


def test_random_numbers_come_from_its_own_generator(late1: Any) -> None:
    late1(random_states)


def refusals(rank: int, world: int) -> None:
    x, host = torch.ones(3, 3, device=device()), torch.ones(3, 3)
    for mixed in (
        lambda: x + host, lambda: x @ host, lambda: torch.cat([x, host]), lambda: F.linear(x, host),
        lambda: x.add_(host), lambda: torch.where(x > 0, x, host), lambda: F.embedding(host.long(), x),
        lambda: torch._foreach_add_([x], [host]), lambda: host.add_(x), lambda: torch.mm(x, x, out=host),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, NotImplementedError), match=r"same device|different"):
            mixed()
    assert torch.equal((x * torch.tensor(2.0)).cpu(), host * 2)  # numbers may come from the CPU
    assert torch.equal(x[torch.tensor([0, 1])].cpu(), host[:2])  # and indices
    with pytest.raises(TypeError, match=r"convert|copy"):
        x.numpy()


def test_tensors_of_two_devices_are_refused(late1: Any) -> None:
    late1(refusals)


def memory(rank: int, world: int) -> None:
    here = torch.get_device_module(device())
    torch.latecpu.synchronize()
    before = here.memory_allocated()
    x = torch.empty(1000, device=device())
    assert x.isnan().all()
    here.reset_peak_memory_stats()
    assert here.memory_allocated() - before == 4096
    x.fill_(1)
    place = x.data_ptr()
    del x
    assert here.memory_allocated() == before
    y = torch.empty(1000, device=device())
    assert y.data_ptr() == place  # at once
    assert here.max_memory_allocated() - before == 4096
    assert y.isnan().all()
    y.untyped_storage().resize_(0)  # as FSDP2 and ZeRO do between steps
    assert here.memory_allocated() == before
    y.untyped_storage().resize_(4000)
    assert y.isnan().all()
    y.fill_(2)
    z = torch.empty(0, device=device()).set_(y.untyped_storage(), 10, (4, 5), (5, 1))
    z.zero_()
    assert int(y.sum()) == 2 * 980
    z.resize_(100, 5)
    assert z.shape == (100, 5)


def test_memory_is_nan_and_is_handed_out_again_at_once(late1: Any) -> None:
    late1(memory)


def pinned(rank: int, world: int) -> None:
    assert not torch.ones(3).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    some = torch.zeros(64)
    runtime = torch.get_device_module(device()).cudart()
    runtime.cudaHostRegister(some.data_ptr(), 256, 0)
    assert some[10:].is_pinned()
    runtime.cudaHostUnregister(some.data_ptr())
    assert not some.is_pinned()


def test_pinned_memory_is_known(late1: Any) -> None:
    late1(pinned)


class Transfer:
    """Values that a side stream takes to pinned memory and brings back."""

    def __init__(self, without: str) -> None:
        here: Any = torch.get_device_module(device())
        self.without, self.main, self.stream = without, here.current_stream(device()), here.stream
        self.out, self.back = here.Stream(device()), here.Stream(device())

    def wait(self, what: str) -> bool:
        return self.without != what

    def __call__(self) -> list[Tensor]:
        """Copies on the host, and what came back: ten tensors of each."""
        arrived, returned = [], []
        for i in range(10):
            x = torch.full((512,), float(i), device=device())
            x = x * 2 + 1
            host = torch.empty(512, pin_memory=True)
            if self.wait("out waits for compute"):
                self.out.wait_stream(self.main)
            with self.stream(self.out):
                host.copy_(x, non_blocking=True)
            sent = self.out.record_event()
            if self.wait("x lives until its copy is done"):
                self.main.wait_event(sent)
            del x
            other = torch.full((512,), -7.0, device=device())  # takes x's memory
            del other
            to = torch.empty(512, device=device())  # and this one takes it from there
            if self.wait("back waits for compute"):
                self.back.wait_stream(self.main)
            if self.wait("back waits for out"):
                self.back.wait_event(sent)
            with self.stream(self.back):
                to.copy_(host, non_blocking=True)
            came = self.back.record_event()
            if self.wait("compute waits for back"):
                self.main.wait_event(came)
            returned.append(to + 0)
            if self.wait("the host waits for out"):
                self.out.synchronize()
            arrived.append(host.clone())
            del to
        self.out.synchronize()
        return [torch.stack(arrived), torch.stack(returned).cpu()]


def transfer(rank: int, world: int, without: str, delay: int) -> tuple[bool, bool]:
    """Whether the values are right, and whether a race was noted."""
    want, raced = (torch.arange(10.0) * 2 + 1)[:, None].expand(10, 512), False
    right = True
    try:
        with late(delay, seed=rank + 1):
            for got in Transfer(without)():
                right &= torch.equal(got, want)
    except AssertionError:
        raced = True
    return right, raced


WAITS = ["out waits for compute", "x lives until its copy is done", "back waits for compute", "compute waits for back"]


@pytest.mark.parametrize("delay", [0, 300, NEVER])
def test_copies_that_wait_are_right(late1: Any, delay: int) -> None:
    assert late1(transfer, "", delay) == [(True, False)]


@pytest.mark.parametrize("without", WAITS)
def test_a_missing_wait_gives_wrong_values(late1: Any, without: str) -> None:
    ((right, raced),) = late1(transfer, without, NEVER)
    assert not right
    assert raced == ("waits for compute" in without)


def host_too_early(rank: int, world: int) -> None:
    here: Any = torch.get_device_module(device())
    with late(NEVER):
        x, side = torch.ones(8, device=device()), here.Stream()
        host, other = torch.empty(8, pin_memory=True), torch.empty(8, pin_memory=True)
        host.copy_(x, non_blocking=True)  # the default stream's copies to the host are late for the host, too
        side.wait_stream(here.current_stream())
        with here.stream(side):
            other.copy_(x, non_blocking=True)
        assert host.isnan().all()
        assert other.isnan().all()
        here.current_stream().synchronize()
        assert host.eq(1).all()
        assert other.isnan().all()
        here.synchronize()
        assert other.eq(1).all()
        plain = torch.empty(8)
        plain.copy_(x, non_blocking=True)  # CUDA waits where memory is not pinned
        assert plain.eq(1).all()


def test_the_host_reads_too_early_what_it_did_not_wait_for(late1: Any) -> None:
    late1(host_too_early)


def two_streams(rank: int, world: int) -> None:
    """One side stream waits for another, for what it has brought to the host."""
    here: Any = torch.get_device_module(device())
    for waits in (True, False):
        with late(NEVER):
            main, out, back = here.current_stream(), here.Stream(), here.Stream()
            x, y = torch.ones(8, device=device()), torch.empty(8, device=device())
            host = torch.zeros(8).pin_memory()
            for side in (out, back):
                side.wait_stream(main)
            with here.stream(out):
                host.copy_(x, non_blocking=True)
            if waits:
                back.wait_stream(out)
            with here.stream(back):
                y.copy_(host, non_blocking=True)
                assert here.current_stream() == back
            main.wait_stream(back)
            assert y.sum().item() == 8 * waits


def test_streams_wait_for_each_other(late1: Any) -> None:
    late1(two_streams)


def events(rank: int, world: int) -> None:
    here: Any = torch.get_device_module(device())
    with late(300_000):
        side, host, event = here.Stream(), torch.empty(8, pin_memory=True), here.Event()
        assert event.query()
        x = torch.ones(8, device=device())
        side.wait_stream(here.current_stream())
        with here.stream(side):
            host.copy_(x, non_blocking=True)
            event.record()
        event.synchronize()
        assert event.query()
        assert side.query()
        assert host.eq(1).all()
        with here.stream(side):  # other operators come after the copies, at once
            host.copy_(x * 2, non_blocking=True)
            assert x.to("cpu").eq(1).all()
            assert host.eq(2).all()
        x.record_stream(side)
        place = x.data_ptr()
        with here.stream(side):
            host.copy_(x, non_blocking=True)
        del x
        assert torch.empty(8, device=device()).data_ptr() != place
        side.synchronize()
        assert torch.empty(8, device=device()).data_ptr() == place


def test_events_and_recorded_streams(late1: Any) -> None:
    late1(events)


class Threads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[int]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(threading.get_native_id())
        return grad, None


def threads(rank: int, world: int, single: bool) -> tuple[bool, bool]:
    """Whether backward ran in the thread that called it: of a tensor on the CPU, of one on the device."""
    cpu: list[int] = []
    own: list[int] = []
    with torch.autograd.set_multithreading_enabled(not single):
        x = torch.ones(4).requires_grad_()
        y = Threads.apply(Threads.apply(x, cpu).to(device()), own)
        y.sum().backward()
    return cpu == [threading.get_native_id()], own == [threading.get_native_id()]


@pytest.mark.parametrize("single", [False, True])
def test_autograd_has_a_thread_for_it(late1: Any, single: bool) -> None:
    assert late1(threads, single) == [(True, single)]


def collectives(rank: int, world: int, where: str) -> list[Any]:
    """What each collective gives, on the device or on the CPU."""
    at = device() if where == "device" else torch.device("cpu")
    x = torch.arange(4.0, device=at) + 10 * rank
    other = 1 - rank
    found = {}

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=at)

    for op in ("SUM", "MAX"):
        dist.all_reduce(found.setdefault(f"all_reduce {op}", x.clone()), getattr(dist.ReduceOp, op))
    dist.broadcast(found.setdefault("broadcast", x.clone()), 1)
    dist.reduce(found.setdefault("reduce", x.clone()), 0)
    if rank:
        del found["reduce"]
    dist.all_gather_into_tensor(found.setdefault("all_gather_into_tensor", empty(8)), x)
    dist.all_gather(found.setdefault("all_gather", [empty(4), empty(4)]), x)
    dist.reduce_scatter_tensor(found.setdefault("reduce_scatter_tensor", empty(2)), x)
    dist.reduce_scatter(found.setdefault("reduce_scatter", empty(2)), list(x.split(2)))
    dist.all_to_all_single(found.setdefault("all_to_all_single", empty(4)), x)
    sizes = ([1, 2], [1, 3]) if rank == 0 else ([3, 2], [2, 2])
    dist.all_to_all_single(found.setdefault("uneven", empty(sum(sizes[0]))), x, *sizes)
    dist.scatter(found.setdefault("scatter", empty(2)), list(x.split(2)) if rank == 0 else None, src=0)
    gathered = [empty(4), empty(4)] if rank == 0 else None
    dist.gather(x, gathered, dst=0)
    found["gather"] = gathered or []
    if rank == 0:
        dist.send(x, other)
        dist.recv(found.setdefault("recv", empty(4)), other)
    else:
        dist.recv(found.setdefault("recv", empty(4)), other)
        dist.send(x, other)
    work = dist.all_reduce(found.setdefault("async", x.clone()), async_op=True)
    work.wait()
    dist.barrier()
    pair = dist.new_group([0, 1])
    dist.all_reduce(found.setdefault("group", x.clone()), group=pair)
    assert all(t.device == at for value in found.values() for t in (value if isinstance(value, list) else [value]))
    return [(n, [t.cpu() for t in v] if isinstance(v, list) else v.cpu()) for n, v in found.items()]


def test_collectives_are_those_of_gloo(late2: Any) -> None:
    for got, want in zip(late2(collectives, "device"), late2(collectives, "cpu")):
        assert [name for name, _ in got] == [name for name, _ in want]
        for (name, a), (_, b) in zip(got, want):
            assert all(torch.equal(x, y) for x, y in zip(a, b)), name


def averages(rank: int, world: int) -> None:
    x = torch.arange(4.0, device=device()) + 10 * rank
    out = torch.empty(2, device=device())
    dist.reduce_scatter_tensor(out, x, dist.ReduceOp.AVG)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [5, 6, 7, 8]
    assert out.tolist() == [5, 6] if rank == 0 else [7, 8]
    x = torch.ones(3, device=device(), requires_grad=True)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1, bias=False).to(device()))
    model(x * (rank + 1)).backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 3]


def test_averages_and_ddp(late2: Any) -> None:
    late2(averages)


def recorded(rank: int, world: int, delay: int) -> list[tuple[str, int, bool]]:
    group.calls()
    group.delay(delay)
    try:
        x = torch.ones(4, device=device())
        for _ in range(5):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
        worker = threading.Thread(target=lambda: dist.all_reduce(x[:2]))
        worker.start()
        worker.join()
    finally:
        group.delay(0)
    calls = [call for call in group.calls() if call.device]
    assert {call.thread for call in calls[:10]} == {threading.get_native_id()} != {calls[10].thread}
    return [(call.op, call.nbytes) for call in calls]


def test_the_order_of_collectives_is_recorded(late2: Any) -> None:
    first, second = late2(recorded, 2000)
    assert first == second == [("allreduce", 16), ("broadcast", 16)] * 5 + [("allreduce", 8)]


def test_the_extension_is_not_loaded_here() -> None:
    """A process with the device has another default accelerator: other tests must not see it."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert callable(extension)


# ----- a process group that can send from the device only, as NCCL without gloo


def agree(rank: int, world: int, waits: bool) -> tuple[str, str, list[Any]]:
    ctx = SPContext(sp=world, sp_rank=rank, mesh=DeviceMesh.from_group(dist.new_group(backend="late"), "cpu"))
    group.calls()
    said = ""
    try:
        with Agreement(ctx, "a call", {}, waits):
            if rank == 1:
                raise ValueError("a bad batch")
    except ValueError as e:
        said = str(e)
    return str(ctx.wire), said, [(call.op, call.device) for call in group.calls()]


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_agree_over_a_group_that_sends_from_the_device_only(late2: Any, waits: bool) -> None:
    """NCCL cannot send what lies on the CPU."""
    first, second = late2(agree, waits)
    assert first[0] == second[0] == "latecpu:0"
    assert second[1] == "a bad batch"
    assert first[1] == ("rank 1 refused: ValueError: a bad batch" if waits else "")
    assert len(first[2]) == (2 if waits else 0)
    assert all(on_device for _, on_device in first[2])
