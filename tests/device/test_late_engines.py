"""Training steps on the device on a CPU: alstlib's ways under engines, with the CPU's gradients and one order of
collectives on all ranks; and whether gradients are there when an engine's hook looks for them."""

import contextlib
import time
from collections import Counter
from unittest import mock

import matrix
import pytest
import torch
from device.module import device
from torch import nn

from alstlib.offload.host_store import HostStore
from alstlib.streaming.chunked import Stream

# ----- are gradients there when a hook looks?


class Layer(nn.Module):
    """A token-wise layer of nine weights in row chunks, its hidden states on the host."""

    def __init__(self, width=16):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(width, width).div(4).to(device())) for _ in range(9)])
        self.store = HostStore("async", budget=2**40)

    def inner(self, part, piece):
        for w in self.w:
            part = torch.mm(part[0], w)[None]
        piece.calls["x"] += 1
        return part

    def forward(self, x):
        stream = Stream(
            run=self.inner, chunk=32, ranks=1, store=self.store, keep=False, params=lambda: list(self.w),
            device=device(), travels=True, tokenwise=True,
        )  # fmt: skip
        return stream(x)


class PostBackward(torch.autograd.Function):
    """As FSDP2's `RegisterPostBackwardFunction` looks for gradients, when the gradient of a layer's input is made."""

    @staticmethod
    def forward(ctx, layer, seen, x):
        ctx.layer, ctx.seen = layer, seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        _count(ctx.layer, ctx.seen, "post backward")
        return None, None, grad


def _count(layer, seen, where):
    seen[where] += sum(w.grad is None for w in layer.w)


def missing(rank, world, single):
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
def test_gradients_are_there_when_a_hook_looks(late1, single):
    """Backward of hidden states on the host runs in the thread that called it, and weights' gradients arrive in that
    of the device: only in one thread is there an order."""
    (lost,) = late1(missing, single)
    assert all(n == 0 for n in lost.values()) if single else all(n > 0 for n in lost.values()), lost


ZERO3 = matrix.Case("llama", "1x1", way="host", engine="zero3", device="late")


def of_zero3(rank, world, single):
    """What a step of ZeRO-3 gives, or its error, where the device's thread takes its time with each gradient."""
    engine_of = matrix.engine_of

    def slow(*args):
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


def test_zero3_needs_one_thread(late1):
    """In two threads its hook finds no gradient, puts zeros in its place, and lets the weight go before it arrives."""
    matrix.check(late1(of_zero3, True), ZERO3)
    (result,) = late1(of_zero3, False)
    assert isinstance(result, str) or result["gradient"] > 1e-3, result


def refused(rank, world):
    layer, x = Layer(), torch.randn(1, 64, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="another thread"):
        layer(x).sum().backward()


def test_two_threads_are_refused(late1):
    late1(refused)
