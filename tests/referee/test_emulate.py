"""One rank of many: the same sizes, bytes and peak as that rank has among real ones."""

import gc
import sys

import emulate
import pytest
import time_kernels
import torch
from cases import run_with, sample_of, train
from emulate import ballast

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.hf.loading import models
from alstlib.hf.loading.models import load_model
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.measure.simulate import fake_ranks
from alstlib.runs.launch import launch
from alstlib.runs.train import worker

RANKS = 4
RUN = """
options: plain
options.tiles.loss: true
options.tiles.mlp: true
options.tiles.norm: true
options.offload: sync
options.save_attention: auto
model.name: tiny
model.config: {num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 4, hidden_size: 128}
model.dtype: fp32
data.seq_len: 2048
optim.steps: 1
engine.world_size: 1
engine.sp: 1
emulate: 4
"""


def run_of(**changes):
    return run_with(RUN, changes)


def real_rank(rank, world, chunk):
    """Peak, exchanged bytes and host bytes of a rank without an engine. The peak is the lowest of three steps: gloo's
    thread may let go of what it has sent when the next buffer is there already (3 of 320 steps beside busy cores)."""
    run, ctx, steps = run_of(emulate=0, chunk=chunk), alstlib.SPContext.create(world), []
    for _ in range(3):
        model = load_model(run, torch.float32)
        with alstlib.apply(model, ctx, run.options) as handle:
            batch = shard_batch(sample_of(run.data.seq_len), world, rank)
            gc.collect()
            with Ledger(stores=[handle.store]) as ledger:
                start = ledger.device_bytes
                train(model, batch)
                steps.append((ledger.device_peak - start, handle.wire_bytes, handle.store.peak_nbytes))
    assert len({step[1:] for step in steps}) == 1
    return min(steps)


@pytest.mark.parametrize("chunk", [None, 128])
def test_an_emulated_rank_is_a_real_one(ranks4, tmp_path, chunk):
    """Emulated in this process: what is there before does not count."""
    peak, wire, host = ranks4(real_rank, chunk)[-1]
    run = run_of(chunk=chunk)
    with Ledger() as ledger:
        standing = ledger.device_bytes
    with fake_ranks(RANKS):
        made = emulate.Emulation(run, tmp_path)
        with made.handle:
            metrics = made()
    emulated = metrics["emulated"]
    assert (metrics["wire_bytes"], metrics["host_peak_bytes"]) == (wire, [host])
    parameters = sum(p.numel() for p in load_model(run, torch.float32).parameters())  # of a model of our own
    standing += 4 * parameters + 3 * 8 * 2048 // RANKS + sum(ballast(run, parameters, 4).values())
    assert metrics["device_peak_bytes"][0] - standing == pytest.approx(peak, rel=0.02)
    assert (emulated["ranks"], emulated["layers_run"], emulated["backend"]) == (RANKS, 2, "cpu")
    assert emulated["layer_forward_seconds"] > 0 < emulated["layer_backward_seconds"]


def test_few_layers_stand_for_many(tmp_path):
    """Two layers of the shape's own depth: the rest is ballast and a projection that says so."""
    run = run_of(**{"model.name": "small", "model.config": {"num_hidden_layers": 1}, "data.seq_len": 512})
    result = launch(run, tmp_path, worker=emulate.__file__)
    emulated = result["metrics"]["emulated"]
    assert result["mode"] == "emulated"
    assert (emulated["layers_run"], emulated["layers_of_the_model"]) == (1, 16)
    whole = sum(p.numel() for p in load_model(run.replace(model={"config": {}}), torch.float32).parameters())
    assert emulated["ballast_bytes"]["weights"] == -(-whole // RANKS) * 4
    layer = emulated["layer_forward_seconds"] + emulated["layer_backward_seconds"]
    assert emulated["projected"]["step_seconds"] > 15 * layer


def test_ballast_is_what_zero3_holds():
    run = run_of(offload_optimizer=False)
    buckets = {"buckets": 2 * 1_000_000}
    assert ballast(run, 1001, 2) == {"weights": 502, "gradients": 502, "optimizer": 3012, **buckets}
    run = run.replace(engine={"offload_optimizer": True, "offload_params": True})
    assert ballast(run, 1001, 2) == buckets


def test_ligers_kernels_are_put_in_on_a_gpu(tmp_path, monkeypatch):
    """As in a real run: on a GPU where Liger is installed, its norm, RoPE and SwiGLU, and our tiled loss."""
    put = []
    monkeypatch.setattr(worker, "this_device", lambda: (torch.device("cpu"), True))
    monkeypatch.setattr(models, "liger_knows", lambda: ("llama",))
    monkeypatch.setattr(models, "liger_kernels", put.append)
    made = emulate.Emulation(run_of(emulate=1, liger="auto"), tmp_path)
    assert put == [made.model]
    assert made.handle.head is not None


def test_kernels_are_timed(tmp_path):
    metrics = time_kernels.Bench(run_of(emulate=0, seq_len=300, chunk=64), tmp_path)()
    assert metrics["chosen"] == "cpu"
    cpu, flash = metrics["kernels"]["cpu"], metrics["kernels"]["flash"]
    assert min(cpu[f"{part}{way}_tflops"] for part in ("", "chunks_") for way in ("forward", "backward")) > 0
    assert not flash["runs"]
    assert "does not run on cpu" in flash["why"]


def test_a_kernel_that_fails_is_an_answer_and_not_the_end(tmp_path, monkeypatch):
    """An assertion within a kernel, a process that dies, and one that hangs: each says something about one kernel."""
    scripts = {
        "cpu": "import sys; print('an illegal memory access', file=sys.stderr, flush=True); import os; os.abort()",
        "blockwise": "import time; time.sleep(60)",
    }
    made = time_kernels.Bench(run_of(emulate=0, seq_len=64), tmp_path)
    monkeypatch.setattr(time_kernels, "seconds_left", lambda: 4.0)
    monkeypatch.setattr(made, "command", lambda task, answer: [sys.executable, "-c", scripts[task["name"]]])
    metrics = made()
    assert metrics["step_seconds"] == []
    whys = {"cpu": "its process ended with status -6: an illegal memory access", "blockwise": "no answer in 2 s"}
    assert {name: metrics["kernels"][name] for name in scripts} == {
        name: {"runs": False, "why": why} for name, why in whys.items()
    }

    def refuse(*_, **__):
        raise AssertionError("head_dim 24 is not supported")

    monkeypatch.setattr(time_kernels, "attention_backward", refuse)
    task = {"name": "cpu", "device": "cpu", "dtype": "float32", "heads": 2, "kv": 1, "dim": 8, "length": 32, "steps": 1}
    assert time_kernels.answer_of({**task, "chunk": None}) == {
        "runs": False, "why": "AssertionError: head_dim 24 is not supported"
    }  # fmt: skip
