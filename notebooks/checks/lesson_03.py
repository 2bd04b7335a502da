"""Checks of lesson 03, the all-to-all."""

from collections.abc import Callable

import torch
from torch import Tensor

from alstlib.base import reference
from alstlib.ulysses.alltoall import whole_heads
from checks import Exercise

Gradient = Callable[[list[Tensor], int], list[Tensor]]


def check_shared(gradient_of_shared: Gradient) -> str:
    cases = ((4, 2, 2, 3, 1), (6, 2, 5, 4, 2), (3, 1, 1, 7, 1), (8, 4, 3, 2, 1))
    for ranks, heads, rows, width, batch in cases:
        generator = torch.Generator().manual_seed(ranks)
        shards = [
            torch.randn(batch, heads, rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
            for _ in range(ranks)
        ]
        blocks = reference.seq_to_heads(shards)
        above = [torch.randn(block.shape, generator=generator, dtype=torch.float64) for block in blocks]
        want = torch.autograd.grad(blocks, shards, above)
        got = gradient_of_shared([grad.clone() for grad in above], heads)
        inputs = f"{ranks} ranks, {heads} key/value heads, {rows} rows for each rank, batch {batch}"
        assert len(got) == ranks, f"there are {len(got)} gradients and not one for each rank ({inputs})"
        for rank, (mine, right) in enumerate(zip(got, want)):
            name = f"the gradient of rank {rank}'s shard"
            assert mine.shape == right.shape, f"{name} is {list(mine.shape)}, not {list(right.shape)} ({inputs})"
            assert torch.allclose(mine, right), f"{name} is wrong ({inputs})"
    return f"{len(cases)} cases agree with autograd"


def first_sharer(grads: list[Tensor], heads: int) -> list[Tensor]:
    return list(torch.cat(grads[:: len(grads) // heads], 1).chunk(len(grads), 2))


def mean_of_sharers(grads: list[Tensor], heads: int) -> list[Tensor]:
    grouped = torch.stack(grads).unflatten(0, (heads, -1)).mean(1)
    return list(torch.cat(list(grouped), 1).chunk(len(grads), 2))


def not_neighbours(grads: list[Tensor], heads: int) -> list[Tensor]:
    grouped = torch.stack(grads).unflatten(0, (-1, heads)).sum(0)
    return list(torch.cat(list(grouped), 1).chunk(len(grads), 2))


def not_cut(grads: list[Tensor], heads: int) -> list[Tensor]:
    grouped = torch.stack(grads).unflatten(0, (heads, -1)).sum(1)
    return [torch.cat(list(grouped), 1)] * len(grads)


def check_degree(answer: Callable[[], int]) -> str:
    degree = answer()
    assert 16 % degree == 0, f"{degree} does not divide 16 GPUs"
    assert whole_heads(40, 8, degree), f"{degree} ranks cannot all have whole heads, 40 and 8 of them"
    larger = [p for p in range(degree + 1, 17) if 16 % p == 0 and whole_heads(40, 8, p)]
    assert not larger, f"{degree} is not the largest"
    return f"{16 // degree} such groups are {16 // degree} replicas"


def _sent(ranks: int) -> float:
    """GiB that one rank sends in a step, counted message by message: Llama-3.1-8B, 1M tokens, bf16, 3 passes."""
    rows, head = 1_000_000 / ranks, 128 * 2
    query, shared = 32 / ranks, max(1.0, 8 / ranks)  # heads in a message of q (or of the output), of k (or of v)
    message = (2 * query + 2 * shared) * rows * head
    return 3 * 32 * (ranks - 1) * message / 2**30


def check_ranks(answer: Callable[[], int]) -> str:
    ranks = answer()
    assert ranks & (ranks - 1) == 0, f"{ranks} is no power of two"
    assert _sent(ranks) < 150, f"each of {ranks} ranks sends {_sent(ranks):.0f} GiB"
    assert _sent(ranks // 2) >= 150, f"fewer ranks than {ranks} would do"
    return f"{_sent(ranks):.0f} GiB, and {_sent(ranks // 2):.0f} GiB with half of the ranks"


EXERCISES = {
    1: Exercise(
        check=check_shared,
        hints=(
            "a number that was copied to several places contributes to the loss through each of them: its gradient is "
            "made of all of theirs, as for a tensor that a program uses twice",
            "neighbouring ranks have the same head: ranks 0 to P / K - 1 have head 0",
            "add up the gradients of the ranks that share a head, join the K sums along the heads, and cut the rows",
        ),
        mistakes=(first_sharer, mean_of_sharers, not_neighbours, not_cut),
    ),
    2: Exercise(
        check=check_degree,
        hints=("the degree divides 40", "the degree divides the 8 key/value heads, or is a multiple of 8"),
        mistakes=(lambda: 16, lambda: 4, lambda: 5),
    ),
    3: Exercise(
        check=check_ranks,
        hints=("the table of the lesson has the bytes for each degree", "look for the first one below 150 GiB"),
        mistakes=(lambda: 8, lambda: 32, lambda: 12),
    ),
}  # fmt: skip
