"""Checks of the ninety minutes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from checks import Exercise

Slice = Callable[[Tensor, int, int], Sequence[Tensor]]


def check_slice(slice_of_any: Slice) -> str:
    cases = ((12, 3), (13, 3), (7, 8), (1, 2), (10, 4), (9, 1))
    for length, ranks in cases:
        sample = torch.arange(100, 100 + length)
        n = -(-length // ranks)
        tokens = [*range(100, 100 + length)] + [0] * (n * ranks - length)
        labels = [*range(101, 100 + length)] + [-100] * (n * ranks - length + 1)
        for rank in range(ranks):
            inputs = f"rank {rank} of {ranks}, a sample of {length} tokens"
            got = slice_of_any(sample.clone(), rank, ranks)
            assert len(got) == 3, f"there are {len(got)} tensors, not tokens, labels and positions ({inputs})"
            for name, mine, whole in zip(("tokens", "labels", "positions"), got, (tokens, labels, range(n * ranks))):
                want = list(whole[rank * n : (rank + 1) * n])
                assert mine.tolist() == want, f"the {name} are {mine.tolist()}, not {want} ({inputs})"
    return f"{len(cases)} lengths, on every rank"


def _parts(sample: Tensor, labels: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    n = -(-len(sample) // ranks)
    extra = n * ranks - len(sample)
    tokens = torch.cat([sample, torch.zeros(extra, dtype=torch.int64)])
    labels = torch.cat([labels, torch.full((n * ranks - len(labels),), -100)])
    own = slice(rank * n, (rank + 1) * n)
    return tokens[own], labels[own], torch.arange(n * ranks)[own]


def drops_the_rest(tokens: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    whole = tokens[: len(tokens) // ranks * ranks]
    return _parts(whole, tokens[1 : len(whole) + 1], rank, ranks)


def cut_first(tokens: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    own, labels, positions = _parts(tokens, tokens, rank, ranks)
    return own, torch.cat([labels[1:], torch.tensor([-100])]), positions


def learns_padding(tokens: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    n = -(-len(tokens) // ranks)
    padded = torch.cat([tokens, torch.zeros(n * ranks - len(tokens), dtype=torch.int64)])
    return _parts(padded, padded[1:], rank, ranks)


def own_positions(tokens: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    own, labels, positions = _parts(tokens, tokens[1:], rank, ranks)
    return own, labels, positions - positions[0]


EXERCISES = {
    1: Exercise(
        check=check_slice,
        hints=(
            "how many tokens has a rank at least, so that all tokens have a place? Round up.",
            "make the labels of the whole sample first; the last token and all padding have -100; then cut",
        ),
        mistakes=(drops_the_rest, cut_first, learns_padding, own_positions),
    )
}
