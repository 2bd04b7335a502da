"""No hidden costs: nothing in a training step makes the host wait for a GPU. Without one, the steps of
tests/cuda/test_steps.py end with an error where a value is read, because tensors there have none."""

import pytest
import torch
from cases import ALL_ON, attach, make_model, sample_of, train

from alstlib.data.shard import WHOLE, shard_batch


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 64])
def test_gpu_step_waits_for_nothing(chunk):
    model = make_model().to("cuda", torch.bfloat16)
    shard = shard_batch(sample_of(301), 1, 0)
    batch = {n: t.cuda() if n not in (*WHOLE, "step_tokens") else t for n, t in shard.items()}
    with attach(model, chunk=chunk, on_host="none", **{**ALL_ON, "tiles": {"mlp": 50, "loss": 70, "norm": True}}):
        for _ in range(2):
            train(model, batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
