"""No hidden costs: nothing in a training step makes the host wait for the device."""

import traceback
from pathlib import Path

import pytest
import torch
from cases import ALL_ON, attach, make_model, sample_of, train
from torch.utils._python_dispatch import TorchDispatchMode

import alstlib
from alstlib.data.shard import WHOLE, shard_batch

ON_THE_CPU = {
    ("recompute", "has_moved"),  # random states lie on the CPU, a GPU's too
    ("logits", "check_labels"),  # labels are checked on a CPU only
    ("inputs", "_check_positions"),  # and so are positions
    ("inputs", "_real_tokens"),  # sample_tokens are always there
    ("inputs", "check_number"),  # numbers of a batch are looked at on a CPU only
    ("causal_lm_loss", "check_batch"),  # step_tokens too
}
"""Where values are read that are never on a GPU."""


PACKAGE = Path(alstlib.__file__).parent


class Waits(TorchDispatchMode):
    """Collects the places in alstlib that read a value, or make an output as large as values say."""

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.NAMES:
            frames = [f for f in traceback.extract_stack() if PACKAGE in Path(f.filename).parents]
            if frames:
                self.places.add((Path(frames[-1].filename).stem, frames[-1].name))
        return func(*args, **(kwargs or {}))


def shard(rank, world, length=24):
    return shard_batch(sample_of(length), world, rank)


def places(rank, world, chunk):
    """Where the second training step of this rank waits (the first plans the host's memory)."""
    ctx, model = alstlib.SPContext.create(world), make_model("gemma2")
    batch = shard(rank, world)
    with attach(model, ctx, chunk=chunk, **ALL_ON):
        train(model, batch)
        with Waits() as waits:
            train(model, batch)
    return waits.places


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_step_waits_for_nothing(ranks2, chunk):
    assert places(0, 1, chunk) <= ON_THE_CPU
    for found in ranks2(places, chunk):
        assert found <= ON_THE_CPU


def test_the_watch_sees_a_wait():
    """Positions without document offsets have to be looked at."""
    batch = {n: t for n, t in shard(0, 1).items() if n != "cu_seqlens"}
    with attach(make_model()) as handle, Waits() as waits:
        alstlib.causal_lm_loss(handle.model, batch)
    assert ("inputs", "_documents") in waits.places


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 64])
def test_gpu_step_waits_for_nothing(chunk):
    model = make_model().to("cuda", torch.bfloat16)
    batch = {n: t.cuda() if n not in (*WHOLE, "step_tokens") else t for n, t in shard(0, 1, 301).items()}
    with attach(model, chunk=chunk, on_host="none", **{**ALL_ON, "tiles": {"mlp": 50, "loss": 70, "norm": True}}):
        for _ in range(2):
            train(model, batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
