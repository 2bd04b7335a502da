"""The device on a CPU itself: refusals, memory, and the record of collectives.

Whole steps show that its values, random numbers and collectives are the CPU's (tests/test_matrix.py). What the library
asks of it shows how late copies are (test_late_accelerator.py). Mistakes that are made on purpose show that memory is
NaN and goes to the next tensor at once, and that a stream which did not wait is found (test_late_mutations.py)."""

import pytest
import torch
import torch.distributed as dist
from device import group
from device.module import device, extension
from operators import error_of
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from alstlib.base.mesh import SPContext
from alstlib.data.agreement import Agreement

MIXED = """
x + host
x @ host
torch.cat([x, host])
F.linear(x, host)
x.add_(host)
torch.where(x > 0, x, host)
F.embedding(host.long(), x)
torch._foreach_add_([x], [host])
host.add_(x)
torch.mm(x, x, out=host)
"""


def refusals(rank, world):
    x, host = torch.ones(3, 3, device=device()), torch.ones(3, 3)
    for mixed in MIXED.split("\n")[1:-1]:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"same device|different"):
            eval(mixed, {"torch": torch, "F": F, "x": x, "host": host})
    assert torch.equal((x * torch.tensor(2.0)).cpu(), host * 2)  # numbers may come from the CPU
    assert torch.equal(x[torch.tensor([0, 1])].cpu(), host[:2])  # and indices
    with pytest.raises(TypeError, match=r"convert|copy"):
        x.numpy()


def test_tensors_of_two_devices_are_refused(late1):
    late1(refusals)


def memory(rank, world):
    here = torch.get_device_module(device())
    before, x = here.memory_allocated(), torch.ones(1000, device=device())
    x.untyped_storage().resize_(0)  # as FSDP2 and ZeRO do between steps
    assert here.memory_allocated() == before
    x.untyped_storage().resize_(4000)
    assert x.isnan().all()
    assert not torch.ones(3).is_pinned()


def test_memory_that_is_given_back_and_taken_again_is_nan(late1):
    late1(memory)


def recorded(rank, world):
    group.calls()
    group.delay(2000)
    x = torch.ones(4, device=device())
    for _ in range(5):
        dist.all_reduce(x)
        dist.broadcast(x, 0)
    group.delay(0)
    return [call.op for call in group.calls() if call.device]


def test_the_order_of_collectives_is_recorded(late2):
    assert late2(recorded) == [["allreduce", "broadcast"] * 5] * 2


def test_the_extension_is_not_loaded_here():
    """A process with the device has another default accelerator: other tests must not see it."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert callable(extension)


# ----- a process group that can send from the device only, as NCCL without gloo


def agree(rank, world, waits):
    ctx = SPContext(sp=world, sp_rank=rank, mesh=DeviceMesh.from_group(dist.new_group(backend="late"), "cpu"))
    group.calls()

    def call():
        with Agreement(ctx, "a call", {}, waits):
            if rank == 1:
                raise ValueError("a bad batch")

    said = error_of(call)
    assert ctx.largest([rank, 10 - rank]) == [1, 10]
    return str(ctx.wire), said, [(call.op, call.device) for call in group.calls()]


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_agree_over_a_group_that_sends_from_the_device_only(late2, waits):
    """NCCL cannot send what lies on the CPU."""
    first, second = late2(agree, waits)
    assert first[0] == second[0] == "latecpu:0"
    refused = "rank 1 refused: ValueError: a bad batch"
    assert (first[1], second[1]) == ((refused, refused) if waits else ("accepted", "a bad batch"))
    assert len(first[2]) == (4 if waits else 1)  # a refusal is told in two of them
    assert all(on_device for _, on_device in first[2])
