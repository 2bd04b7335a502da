"""Checks of lesson 02, the tiled MLP."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from alstlib.base.reference import relative_error
from alstlib.base.units import format_bytes
from alstlib.planner.measure.ledger import Ledger
from alstlib.tiled.compute import TiledMLP
from checks import Exercise


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate) * (x @ up)) @ down


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def check_in_tiles(in_tiles: Callable[..., Tensor]) -> str:
    cases: Sequence[tuple[Any, tuple[int, int, int], list[tuple[int, ...]], int]] = (
        (swiglu, (1, 10, 6), [(6, 14), (6, 14), (14, 6)], 4),
        (swiglu, (2, 7, 5), [(5, 9), (5, 9), (9, 3)], 7),
        (swiglu, (1, 5, 4), [(4, 8), (4, 8), (8, 4)], 16),
        (normed, (3, 11, 4), [(4,)], 1),
    )
    for case, (fn, shape, shapes, tile) in enumerate(cases):
        generator = torch.Generator().manual_seed(case)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: B023

        x, params = random(*shape), [random(*size) for size in shapes]
        want = fn(x, *params)
        upstream, rows, kept = random(*want.shape).detach(), [], {}

        def seen(part: Tensor, *given: Tensor) -> Tensor:
            rows.append(part.shape[1])  # noqa: B023
            return fn(part, *given)  # noqa: B023

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()  # noqa: B023
            return t

        inputs = f"{fn.__name__} of x {list(shape)}, tile={tile}"
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            got = in_tiles(seen, x, params, tile)
        assert got.shape == want.shape, f"the shape is {list(got.shape)}, not {list(want.shape)} ({inputs})"
        assert relative_error(got, want) < 1e-9, f"the values are not those of the function ({inputs})"
        assert max(rows) <= tile, f"the function ran on {max(rows)} rows at once ({inputs})"
        assert got.requires_grad, f"the result cannot be differentiated ({inputs})"
        most = sum(t.untyped_storage().nbytes() for t in (x, *params))
        assert sum(kept.values()) <= most, f"more than x and the parameters is kept for backward ({inputs})"
        names = ["x", *(f"params[{i}]" for i in range(len(params)))]
        right = torch.autograd.grad(want, (x, *params), upstream)
        found = torch.autograd.grad(got, (x, *params), upstream, allow_unused=True)
        for name, mine, grad in zip(names, found, right):
            assert mine is not None, f"{name} gets no gradient ({inputs})"
            assert relative_error(mine, grad) < 1e-9, f"the gradient of {name} is wrong ({inputs})"
    return f"{len(cases)} cases, values and gradients, and nothing kept but x and the parameters"


def graph_of_all_tiles(fn: Callable[..., Tensor], x: Tensor, params: list[Tensor], tile: int) -> Tensor:
    """Tiles in forward, but autograd keeps the intermediates of all of them."""
    return torch.cat([fn(part, *params) for part in x.split(tile, 1)], 1)


def whole(fn: Callable[..., Tensor], x: Tensor, params: list[Tensor], tile: int) -> Tensor:
    return torch.utils.checkpoint.checkpoint(fn, x, *params, use_reentrant=False)


def _wrong(change: Callable[[list[Tensor], int], list[Tensor]], ones: bool = False) -> Callable[..., Tensor]:
    """Right but for the gradients of the tiles, which `change` gets, or for the upstream gradient."""

    def in_tiles(fn: Callable[..., Tensor], x: Tensor, params: list[Tensor], tile: int) -> Tensor:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
                ctx.save_for_backward(x, *params)
                return graph_of_all_tiles(fn, x, list(params), tile)

            @staticmethod
            def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, ...]:
                above = torch.ones_like(upstream) if ones else upstream
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                sums = [torch.zeros_like(t) for t in leaves]
                count = -(-leaves[0].shape[1] // tile)
                for i in range(count):
                    with torch.enable_grad():
                        y = fn(leaves[0][:, i * tile : (i + 1) * tile], *leaves[1:])
                    grads = list(torch.autograd.grad(y, leaves, above[:, i * tile : (i + 1) * tile]))
                    for s, g in zip(sums, change(grads, count - 1 - i)):
                        s += g
                return tuple(sums)

        return Function.apply(x, *params)

    return in_tiles


def _mlp() -> LlamaMLP:
    return LlamaMLP(LlamaConfig(hidden_size=256, intermediate_size=896))


def _peak(module: torch.nn.Module, tokens: int) -> int:
    x = torch.randn(1, tokens, 256, requires_grad=True)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    upstream = torch.ones_like(x)
    with Ledger("cpu") as ledger:
        start = ledger.device_bytes
        module(x).backward(upstream)
        return ledger.device_peak - start


def check_tokens(answer: Callable[[], int]) -> str:
    tokens = answer()
    peak = _peak(_mlp(), tokens)
    assert abs(peak / (200 * 2**20) - 1) < 0.05, f"{tokens:,} tokens peak at {format_bytes(peak)}, not near 200 MiB"
    return f"{tokens:,} tokens peak at {format_bytes(peak)}"


def check_tile(answer: Callable[[], int]) -> str:
    tile = answer()
    assert tile & (tile - 1) == 0, f"{tile} is no power of two"
    limit = _peak(_mlp(), 4096) / 3
    peak, twice = (_peak(TiledMLP(_mlp(), tile=t), 4096) for t in (tile, 2 * tile))
    assert peak <= limit, f"tiles of {tile} tokens peak at {format_bytes(peak)}: more than a third"
    assert twice > limit, f"larger tiles than {tile} tokens would work as well"
    return f"{format_bytes(peak)}, and twice the tile takes {format_bytes(twice)}"


EXERCISES = {
    1: Exercise(
        check=check_in_tiles,
        hints=(
            "forward runs the tiles and concatenates them, and saves only its inputs with ctx.save_for_backward; "
            "inside an autograd.Function no graph is made",
            "backward is the loop of the lesson, with the upstream gradient that it gets, in torch.enable_grad()",
            "return one gradient for each input of forward: that of x, then the sums of the parameters'",
        ),
        mistakes=(
            graph_of_all_tiles, whole, _wrong(lambda grads, left: grads, ones=True),
            _wrong(lambda grads, left: [grads[0], *(g * (left == 0) for g in grads[1:])]),
            _wrong(lambda grads, left: [g * (left > 0) for g in grads]),
        ),
    ),
    2: Exercise(
        check=check_tokens,
        hints=('max(curves["plain"]) is the peak of 4,096 tokens', "twice the tokens have twice the peak"),
        mistakes=(lambda: 4096, lambda: 10_240),
    ),
    3: Exercise(
        check=check_tile,
        hints=("the table above has the peak of each tile", "compare it with a third of the plain peak"),
        mistakes=(lambda: 256, lambda: 1024, lambda: 500),
    ),
}  # fmt: skip
