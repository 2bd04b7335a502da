"""What a run on a GPU hands to PyTorch, beside its step: where AdamW's state is, which device the ledger reads."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import check_refused
from fake import fake_cuda

from alstlib.runs.train import worker
from alstlib.runs.train.engine import reserve_adam_state


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("masters", [[], ["single_partition_of_fp32_groups"]], ids=["zero0", "zero1"])
def test_adamw_finds_the_state_that_its_own_first_step_would_make(masters, fused):
    """A fused kernel that is given `step` in host memory reads it as device memory."""
    with fake_cuda():
        ours, plain = (torch.empty(10, device="cuda:0", requires_grad=True) for _ in range(2))
        ours.grad = plain.grad = torch.empty_like(plain)
        reserved, adam = torch.optim.AdamW([ours], fused=fused), torch.optim.AdamW([plain], fused=fused)
        optimizer = SimpleNamespace(optimizer=reserved, **{name: [ours] for name in masters})
        reserve_adam_state(SimpleNamespace(optimizer=optimizer))
        with mock.patch.object(torch, "_fused_adamw_"), mock.patch("torch.optim.adamw.adamw"):
            adam.step()
        kinds = [
            {name: (t.device, t.dtype, t.shape) for name, t in o.state[p].items()}
            for o, p in ((reserved, ours), (adam, plain))
        ]
    assert kinds[0] == kinds[1]
    assert set(kinds[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert kinds[0]["step"][0].type == ("cuda" if fused else "cpu")


def test_ranks_on_a_mac_run_on_the_cpu(monkeypatch):
    """PyTorch's accelerator there has no streams and no process group."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert worker.this_device() == (torch.device("cpu"), False)


def ten_minutes(monkeypatch):
    """PyTorch's own timeouts, which are set back."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, timedelta(minutes=10))


@pytest.mark.parametrize("world, bound", [(8, torch.device("cuda", 3)), (1, None)])
def test_nccl_waits_as_long_as_a_step_may_take(monkeypatch, world, bound):
    """In DeepSpeed's own groups too. A group of one rank is not split from one that is bound to a device."""
    given = {}
    ten_minutes(monkeypatch)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: given.update(how, backend=backend))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    worker.join(torch.device("cuda", 3), 7200)
    assert given == {"backend": "nccl", "timeout": timedelta(hours=2), "device_id": bound}
    assert dist.distributed_c10d._get_default_timeout(dist.Backend.NCCL) == timedelta(hours=2)


def test_groups_of_a_run_wait_alike(monkeypatch):
    ten_minutes(monkeypatch)
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    worker.join(torch.device("cpu"), 7200)
    try:
        for group in (dist.group.WORLD, dist.new_group(ranks=range(1))):
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("hidden", [False, True])
def test_gpus_that_pytorch_cannot_use_are_not_passed_over(monkeypatch, hidden):
    old = mock.Mock(side_effect=RuntimeError("The NVIDIA driver on your system is too old (found version 11040)"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("alstlib.planner.devices._installed_gpus", lambda: 8)
    monkeypatch.setattr("alstlib.planner.devices.torch_version", lambda: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert worker.this_device() == (torch.device("cpu"), False)
        return
    check_refused(r"the driver lists 8 GPUs, but PyTorch .* can use none \(The NVIDIA driver.*", worker.this_device)
