"""Lesson 18: one input in k, the order that keeps less, and blocks that are long enough."""

from collections.abc import Callable
from typing import Any

import torch

from . import Exercise


def inputs(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(18)
    for count, k in ((6, 1), (6, 2), (9, 3), (7, 3), (5, 8), (11, 4)):
        case = f"{count} layers, one input in {k}"
        matrices = torch.randn(count, 5, 5, generator=generator, dtype=torch.float64)
        made = [torch.randn(5, generator=generator, dtype=torch.float64)]
        for matrix in matrices[:-1]:
            made.append((matrix @ made[-1]).tanh())
        kept, ran = {i: made[i] for i in range(0, count, k)}, _Counted(matrices)
        for layer in reversed(range(count)):
            got = function(kept, layer, ran.run)
            assert torch.equal(got, made[layer]), f"{case}: this is not the input of layer {layer}"
            held = sum(i // k == layer // k for i in kept)
            assert held <= k, f"{case}: {held} inputs of one segment are kept at layer {layer}"
            done = sorted(i for i in kept if i > layer)
            assert not done, f"{case}: at layer {layer} the inputs of {done} are still kept, which are not needed again"
        least = count - len(range(0, count, k))
        assert ran.calls <= least, f"{case}: {ran.calls} layers ran in backward, and {least} are enough"
    return "every input, and each that was not kept is made once"


class _Counted:
    def __init__(self, matrices: Any) -> None:
        self.matrices, self.calls = matrices, 0

    def run(self, x: Any, i: int) -> Any:
        self.calls += 1
        return (self.matrices[i] @ x).tanh()


def _from_the_first(kept: Any, layer: int, run: Any) -> Any:
    x = kept[0]
    for i in range(layer):
        x = run(x, i)
    return x


def _makes_each_again(kept: Any, layer: int, run: Any) -> Any:
    start = max(i for i in kept if i <= layer)
    x = kept[start]
    for i in range(start, layer):
        x = run(x, i)
    return x


def _keeps_all(kept: Any, layer: int, run: Any) -> Any:
    for i in range(max(i for i in kept if i <= layer), layer):
        kept[i + 1] = run(kept[i], i)
    return kept[layer]


def _nearest(kept: Any, layer: int, run: Any) -> Any:
    return kept[max(i for i in kept if i <= layer)]


def order(answer: Callable[[], Any]) -> str:
    mine = answer()
    assert isinstance(mine, tuple | list), "a pair (order, bytes) is wanted"
    assert len(mine) == 2, "a pair (order, bytes) is wanted"
    layers, width, keys = 64, 5120, 8 * 128
    kept = {"layers": layers * width * 2, "blocks": layers * 2 * keys * (2 + 2)}
    assert mine[0] == min(kept, key=lambda name: kept[name]), "compare both orders in bytes for each token"
    assert mine[1] == kept[mine[0]], (
        f"{mine[1]:,} bytes is not what is kept: which tensors, in which dtype, for how many layers?"
    )
    return f"{kept['layers']:,} bytes with layers outermost, {kept['blocks']:,} with blocks outermost"


def block_rows(answer: Callable[[], Any]) -> str:
    def hours(rows: float) -> float:
        blocks = 4_000_000 / rows  # the i-th visits the i blocks before it
        visited = blocks * (blocks - 1) / 2 * rows  # rows, in each layer
        return visited * 32 * 8 * 128 * (2 * 2 + 2 * 2 + 2 * 4) / 20e9 / 3600

    mine = answer()
    assert hours(1.015 * mine) <= 1, f"with {mine:,.0f} rows the copies take {hours(mine):.2f} hours"
    assert hours(0.985 * mine) > 0.98, f"fewer than {mine:,.0f} rows are enough"
    return f"about {mine:,.0f} rows"


EXERCISES = {
    1: Exercise(
        check=inputs,
        hints=(
            "The nearest input at or before layer l is the one with the number max(i for i in kept if i <= l).",
            "On the way to the input of layer l the inputs of all layers before it in its segment are made as well. "
            "Who asks for them next?",
            "Put each input that is made into `kept`. Nobody asks for the input of layer l again: take it out.",
        ),
        mistakes=(_keeps_all, _from_the_first, _makes_each_again, _nearest),
    ),
    2: Exercise(
        check=order,
        hints=(
            "The rule E > 6 K d holds for sums in fp32. Which of the two orders keeps sums?",
            "Layers outermost keeps 2 E L bytes for each token, blocks outermost (2 + 2) 2 K d L.",
        ),
        mistakes=(lambda: ("layers", 655_360), lambda: ("blocks", 786_432), lambda: ("blocks", 262_144)),
    ),
    3: Exercise(
        check=block_rows,
        hints=(
            "Blocks of C rows visit about S^2 / 2C rows in each layer. How many bytes come for each of these rows in "
            "forward, and how many in backward?",
            "4 K d bytes come in forward and 12 K d in backward, in each of 32 layers.",
        ),
        mistakes=(lambda: 16_384, lambda: 87_381),
    ),
}
