"""Training steps on the device on a CPU: alstlib's ways under engines, with the CPU's gradients and one order of
collectives on all ranks; and whether gradients are there when an engine's hook looks for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import matrix
import pytest
import torch
from cases import make_model, make_samples, plain_run, small_pages, worst_error
from device import group, module
from device.module import NEVER, device, late
from torch import Tensor, nn

import alstlib
from alstlib.data.loader import SPDataLoader
from alstlib.measure.verify import in_full
from alstlib.offload.host_store import HostStore
from alstlib.streaming.chunked import Stream

# ----- are gradients there when a hook looks?


class Layer(nn.Module):
    """A token-wise layer of nine weights in row chunks, its hidden states on the host."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(width, width).div(4).to(device())) for _ in range(9)])
        self.store = HostStore("async", budget=2**40)

    def inner(self, part: Tensor, piece: Any) -> Tensor:
        for w in self.w:
            part = torch.mm(part[0], w)[None]
        piece.calls["x"] += 1
        return part

    def forward(self, x: Tensor) -> Tensor:
        stream = Stream(
            run=self.inner, chunk=32, ranks=1, store=self.store, keep=False, params=lambda: list(self.w),
            device=device(), travels=True, tokenwise=True,
        )  # fmt: skip
        return stream(x)


class PostBackward(torch.autograd.Function):
    """As FSDP2's `RegisterPostBackwardFunction` looks for gradients, when the gradient of a layer's input is made."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, seen: Counter[str], x: Tensor) -> Tensor:
        ctx.layer, ctx.seen = layer, seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        _count(ctx.layer, ctx.seen, "post backward")
        return None, None, grad


def _count(layer: Layer, seen: Counter[str], where: str) -> None:
    seen[where] += sum(w.grad is None for w in layer.w)


def missing(rank: int, world: int, single: bool) -> dict[str, int]:
    """Gradients that were not there yet: when FSDP2 would look, and when DeepSpeed's hook of a leaf module would."""
    torch.manual_seed(0)
    layers, seen = nn.ModuleList([Layer() for _ in range(4)]), Counter({"post backward": 0, "leaf hook": 0})
    for layer in layers:
        layer.register_full_backward_hook(lambda layer, *_: _count(layer, seen, "leaf hook"))
        for w in layer.w:
            w.register_hook(lambda g: time.sleep(0.002))  # in the thread that accumulates: a device is busy
    with (
        torch.autograd.set_multithreading_enabled(not single),
        mock.patch("alstlib.streaming.chunked.check_thread"),  # which refuses the wrong way
    ):
        for _ in range(3):
            h = torch.randn(1, 64, 16).requires_grad_()
            for layer in layers:
                h = layer(PostBackward.apply(layer, seen, h))
            h.sum().backward()
            assert all(w.grad is not None for w in layers.parameters())  # afterwards they are
            layers.zero_grad()
    return dict(seen)


@pytest.mark.parametrize("single", [True, False], ids=["one thread", "two threads"])
def test_gradients_are_there_when_a_hook_looks(late1: Any, single: bool) -> None:
    """Backward of hidden states on the host runs in the thread that called it, and weights' gradients arrive in that
    of the device: only in one thread is there an order."""
    (lost,) = late1(missing, single)
    assert all(n == 0 for n in lost.values()) if single else all(n > 0 for n in lost.values()), lost


ZERO3 = matrix.Case("llama", "1x1", way="host", engine="zero3", device="late")


def of_zero3(rank: int, world: int, single: bool) -> dict[str, Any] | str:
    """What a step of ZeRO-3 gives, or its error, where the device's thread takes its time with each gradient."""
    engine_of = matrix.engine_of

    def slow(*args: Any) -> Any:
        engine = engine_of(*args)
        for p in engine.parameters():
            p.register_hook(lambda g: time.sleep(0.002))
        return engine

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(matrix, "engine_of", slow))
        if not single:
            stack.enter_context(mock.patch("alstlib.hf.hidden_states.backward_in_this_thread", return_value=None))
            stack.enter_context(mock.patch("alstlib.streaming.chunked.check_thread"))
        try:
            return matrix.run(rank, world, ZERO3)
        except (RuntimeError, AssertionError) as e:
            return f"{type(e).__name__}: {e}"


def test_zero3_needs_one_thread(late1: Any) -> None:
    """In two threads its hook finds no gradient, puts zeros in its place, and lets the weight go before it arrives."""
    matrix.check(late1(of_zero3, True), ZERO3)
    (result,) = late1(of_zero3, False)
    assert isinstance(result, str) or result["gradient"] > 1e-3, result


def refused(rank: int, world: int) -> None:
    layer, x = Layer(), torch.randn(1, 64, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="another thread"):
        layer(x).sum().backward()


def test_two_threads_are_refused(late1: Any) -> None:
    late1(refused)


# ----- whole steps

WAYS: dict[str, dict[str, Any]] = {
    "whole": {"tiles": {"mlp": 5, "loss": 7, "norm": True}, "offload": True, "save_attention": True},
    "plain": {"tiles": False, "checkpoint": False},
    "chunks": {"tiles": {"mlp": True, "loss": 7, "norm": True}, "offload": True, "chunk": 5, "on_host": "none"},
    "host": {"tiles": {"mlp": True, "loss": 7, "norm": True}, "offload": True, "chunk": 5, "on_host": "hidden+kv"},
    "host, sync": {
        "tiles": {"mlp": True, "loss": 7, "norm": True},
        "offload": "sync",
        "chunk": 5,
        "on_host": "hidden+kv",
    },
}
ENGINES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]


def zero_config(stage: int, accumulation: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100_000}
    zero |= {f"stage3_{n}": 100_000 for n in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def engine_of(model: Any, kind: str, world: int, accumulation: int) -> Any:
    if kind == "none":
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(module.NAME, (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from device import accelerator

    accelerator.install()
    import deepspeed

    return deepspeed.initialize(model=model, config=zero_config(int(kind[4:]), accumulation))[0]


def gradients(model: Any, deep: bool) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        if deep:
            from deepspeed.utils import safe_get_full_grad

            grad = safe_get_full_grad(p)
        else:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name] = grad.to("cpu", copy=True)
    return found


@contextlib.contextmanager
def delayed(delay: int, seed: int) -> Iterator[None]:
    """Copies come late, and ranks come to their collectives at different times."""
    group.delay(2000)
    try:
        with late(delay, seed):
            yield
    finally:
        group.delay(0)


def step(rank: int, world: int, kind: str, way: str, delay: int) -> tuple[float, str, list[tuple[str, int]]]:
    """Two micro-batches' gradients on the device: the largest error against plain transformers on the CPU, whose it
    is, and the collectives of the device in their order."""
    deep, accumulation = kind.startswith("zero"), 2
    ctx = alstlib.SPContext.create(2)
    model = make_model("gqa")
    samples = make_samples(accumulation)
    _, want = plain_run(model, samples)
    model = model.to(device())
    handle = alstlib.apply(model, ctx, alstlib.Options(**WAYS[way]))
    engine = engine_of(model, kind, world, accumulation)
    group.calls()
    threads = set()
    with small_pages(), delayed(delay, seed=rank):
        for i, batch in enumerate(SPDataLoader(samples, ctx, accumulation, replicated=True, device=device())):
            last = i == accumulation - 1
            if kind == "fsdp2":
                engine.set_requires_gradient_sync(last)
            with engine.no_sync() if kind == "ddp" and not last else contextlib.nullcontext():
                out = alstlib.causal_lm_loss(engine, batch)
                if not deep:
                    out.loss.backward()
                    continue
                engine.backward(out.loss)
                if not last:
                    engine.step()
        calls = [call for call in group.calls() if call.device]
        threads = {call.thread for call in calls}
        error, name = worst_error(gradients(model, deep), want)
    if "host" in way:
        assert threads == {threading.get_native_id()}
    if deep:
        engine.step()
        engine.destroy()
    handle.detach()
    return error, name, [(call.op, call.nbytes) for call in calls]


@pytest.mark.parametrize("way, delay", [*((way, NEVER) for way in WAYS), ("host", 1000)])
@pytest.mark.parametrize("kind", ENGINES)
def test_steps_under_engines(late2: Any, kind: str, way: str, delay: int) -> None:
    results = late2(step, kind, way, delay)
    for error, name, _ in results:
        assert error < 1e-5, (error, name)
    assert results[0][2] == results[1][2]  # one order on all ranks, or NCCL hangs
    assert len(results[0][2]) > 10


def trained_alone(rank: int, world: int, way: str, delay: int) -> tuple[float, str]:
    """One rank without an engine, in fp64, with pages of few keys: hidden states and keys come and go many times."""
    model = make_model("gqa", dtype=torch.float64)
    samples, ctx = make_samples(1, length=41), alstlib.SPContext()
    with in_full():
        _, want = plain_run(model, samples)
    model = model.to(device())
    with alstlib.apply(model, options=alstlib.Options(**WAYS[way])), in_full(), small_pages(), late(delay, seed=3):
        for batch in SPDataLoader(samples, ctx, device=device()):
            alstlib.causal_lm_loss(model, batch).loss.backward()
    return worst_error({n: p.grad.cpu() for n, p in model.named_parameters()}, want)


@pytest.mark.parametrize("delay", [0, 1000, NEVER], ids=["at once", "late", "at the latest"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_alone(late1: Any, way: str, delay: int) -> None:
    ((error, name),) = late1(trained_alone, way, delay)
    assert error < 1e-12, (error, name)
