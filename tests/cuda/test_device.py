"""What a run on a GPU hands to PyTorch, beside its step: where AdamW's state is, which device the ledger reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fake import fake_cuda
from torch import Tensor

from alstlib.engine import reserve_adam_state
from alstlib.memory import Ledger


def on_cuda(*shape: int) -> Tensor:
    weight = torch.empty(*shape, device="cuda:0", requires_grad=True)
    weight.grad = torch.empty_like(weight)
    return weight


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("masters", ["", "single_partition_of_fp32_groups"], ids=["zero0", "zero1"])
def test_adamw_finds_the_state_that_its_own_first_step_would_make(masters: str, fused: bool) -> None:
    """A fused kernel that is given `step` in host memory reads it as device memory."""
    with fake_cuda():
        ours, plain = on_cuda(10), on_cuda(10)
        reserved, adam = torch.optim.AdamW([ours], fused=fused), torch.optim.AdamW([plain], fused=fused)
        engine: Any = SimpleNamespace(
            optimizer=SimpleNamespace(optimizer=reserved, **({masters: [ours]} if masters else {}))
        )
        reserve_adam_state(engine)
        with mock.patch.object(torch, "_fused_adamw_"), mock.patch("torch.optim.adamw.adamw"):
            adam.step()
        kinds = [
            {name: (t.device, t.dtype, t.shape) for name, t in o.state[p].items()}
            for o, p in ((reserved, ours), (adam, plain))
        ]
    assert kinds[0] == kinds[1]
    assert set(kinds[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert kinds[0]["step"][0].type == ("cuda" if fused else "cpu")


def test_a_ledger_of_cuda_is_one_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own function for the budget refuses a device without a number."""
    given: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr("torch._C._cuda_setMemoryFraction", lambda *limit: given.append(limit), raising=False)
    monkeypatch.setattr("torch._C._cuda_resetPeakMemoryStats", lambda device: None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    with Ledger("cuda", budget=250) as ledger:
        assert ledger.device == torch.device("cuda", 3)
    assert given == [(0.25, 3), (1.0, 3)]
