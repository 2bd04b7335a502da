"""Exercises of lesson 05: segments of checkpoints, and what the host holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import alstlib
from alstlib.base.reference import relative_error
from checks import Exercise


class _Watched(nn.Module):
    """A layer that counts its runs, and how many inputs of all layers are alive when one runs."""

    def __init__(self, width: int, log: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.log, self.runs = nn.Sequential(nn.Linear(width, width), nn.Tanh()), log, [0, 0]

    def forward(self, x: Tensor) -> Tensor:
        self.runs[torch.is_grad_enabled()] += 1
        alive = {ref.cdata: ref for ref in self.log["inputs"] if not ref.expired()}
        self.log["most"] = max(self.log["most"], len(alive))
        self.log["inputs"].append(StorageWeakRef(x.untyped_storage()))
        out: Tensor = self.inner(x)
        return out


def _step(mine: Callable[..., Any]) -> str:
    for count, every in ((12, 3), (13, 4), (5, 1), (4, 9), (1, 1)):
        where = f"with {count} layers and every={every}"
        torch.manual_seed(count)
        log: dict[str, Any] = {"inputs": [], "most": 0}
        layers = [_Watched(5, log).double() for _ in range(count)]
        x, grad = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
        for layer in layers:
            for p in layer.parameters():
                p.grad = torch.ones_like(p)  # gradients that were there before
        out, dx = mine(layers, x.clone(), grad, every)
        leaf = x.clone().requires_grad_()
        want = leaf
        for layer in layers:
            want = layer.inner(want)
        weights = [p for layer in layers for p in layer.parameters()]
        want_dx, *want_grads = torch.autograd.grad(want, [leaf, *weights], grad)
        assert relative_error(out, want) < 1e-12, f"the output is wrong {where}"
        assert dx is not None, f"there is no gradient of x {where}"
        assert relative_error(dx, want_dx) < 1e-12, f"the gradient of x is wrong {where}"
        for got, right in zip((p.grad for p in weights), want_grads):
            assert relative_error(got - 1, right) < 1e-12, (
                f"a weight's gradient is wrong {where} (gradients that were there before must stay in the sum)"
            )
        for i, layer in enumerate(layers):
            assert layer.runs[1] == 1, f"layer {i} ran {layer.runs[1]} times with a graph {where}; once is wanted"
            assert layer.runs[0] <= 2, f"layer {i} ran {layer.runs[0]} times without a graph {where}; 2 are allowed"
        segments = -(-count // every)
        most = segments + min(every, count) + 1  # and the tensor that the running layer makes
        assert log["most"] <= most, f"{log['most']} inputs wait at the same time {where}; {most} are allowed"
    return "outputs and all gradients agree with autograd, and no more inputs wait than allowed"


def _model(layers: int) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


@functools.cache
def _measured(layers: int, **chosen: Any) -> tuple[int, tuple[str, ...]]:
    """Host bytes of one step, and its notes."""
    ids = torch.randint(0, 512, (1, 1024), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(1024)[None], "shift_labels": ids.roll(-1, 1)}
    model = _model(layers)
    options = alstlib.Options(tiles={"mlp": 128, "loss": 128, "norm": True}, offload=True, **chosen)
    with alstlib.apply(model, None, options) as handle:
        alstlib.causal_lm_loss(model, batch).loss.backward()
        return handle.store.peak_nbytes, tuple(handle.notes)


def _bytes(answer: Callable[[], int]) -> str:
    mine = answer()
    want, _ = _measured(24, save_attention=True)
    assert mine == want, f"you predict {mine:,} bytes, which is {mine / want:.3g} times what a step takes"
    return f"a step of 24 layers takes {want:,} bytes of the host"


def _budget(answer: Callable[[], int]) -> str:
    mine = answer()
    try:
        _, notes = _measured(12, host_memory=mine)
    except MemoryError:
        raise AssertionError(f"{mine:,} bytes are too few: the step fails") from None
    try:
        _measured(12, host_memory=mine - 1)
    except MemoryError:
        return " ".join(notes)
    raise AssertionError(f"{mine:,} bytes are more than needed: with one byte less the step runs too")


def _keep_all(layers: Sequence[nn.Module], x: Tensor, grad: Tensor, every: int) -> tuple[Tensor, Tensor]:
    kept, y = [], x
    with torch.no_grad():
        for layer in layers:
            kept.append(y)
            y = layer(y)
    for layer, own in zip(reversed(layers), reversed(kept)):
        leaf = own.detach().requires_grad_()
        layer(leaf).backward(grad)
        assert leaf.grad is not None
        grad = leaf.grad
    return y, grad


def _one_graph(layers: Sequence[nn.Module], x: Tensor, grad: Tensor, every: int) -> tuple[Tensor, Tensor]:
    leaf = y = x.detach().requires_grad_()
    for layer in layers:
        y = layer(y)
    y.backward(grad)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _whole_segments(layers: Sequence[nn.Module], x: Tensor, grad: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """Forgets the segment's tail where the layers are no multiple."""
    layers = layers[: len(layers) // every * every] or layers[:1]
    return _keep_all(layers, x, grad, every)


EXERCISES = {
    1: Exercise(
        check=_step,
        hints=(
            "start with the forward: a loop under torch.no_grad() that stores the input when the layer's number is a "
            "multiple of `every`",
            "take the segments from the last to the first; in each, make the inputs of all its layers again under "
            "torch.no_grad(), from the one that was kept",
            "then take the layers of the segment from the last to the first: detach the input, let it require a "
            "gradient, run the layer, call backward with the gradient of its output, and go on with the gradient of "
            "the input; release each input after its use",
        ),
        mistakes=(_keep_all, _one_graph, _whole_segments),
    ),
    2: Exercise(
        check=_bytes,
        hints=(
            "write the number of fp32 values for one token and one layer first",
            "two tensors have the model's width, and one has a value for each head; multiply by tokens, layers, bytes",
        ),
        mistakes=(lambda: 24 * 1024 * 128 * 4, lambda: 24 * 1024 * 2 * 128 * 4),
    ),
    3: Exercise(
        check=_budget,
        hints=(
            "which inputs can backward make again, and from what?",
            "the longest segment has all layers in it; count what it keeps",
        ),
        mistakes=(lambda: 12 * 1024 * 128 * 4, lambda: 2 * 1024 * 128 * 4, lambda: 1024),
    ),
}  # fmt: skip
