"""Checks of lesson 04, the data adapter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from alstlib.data.shard import shard_batch
from checks import Exercise

Cut = Callable[[list[Tensor], int], Sequence[dict[str, Tensor]]]
FIELDS = ("input_ids", "position_ids", "shift_labels")


def check_cut(cut_documents: Cut) -> str:
    cases = (((5, 3, 8), 4), ((7,), 3), ((1, 2, 1, 6), 4), ((4, 4), 2), ((9, 2), 8), ((6, 5), 1))
    for lengths, ranks in cases:
        documents = [torch.arange(n) + 100 * (i + 1) for i, n in enumerate(lengths)]
        got = cut_documents([d.clone() for d in documents], ranks)
        inputs = f"documents of {', '.join(map(str, lengths))} tokens on {ranks} ranks"
        assert len(got) == ranks, f"there are slices for {len(got)} ranks ({inputs})"
        rows = []
        for tokens in (d.tolist() for d in documents):
            rows += [(token, i, label) for i, (token, label) in enumerate(zip(tokens, [*tokens[1:], -100]))]
        rows += [(0, 0, -100)] * (-len(rows) % ranks)
        size = len(rows) // ranks
        for rank, part in enumerate(got):
            for j, field in enumerate(FIELDS):
                want = [row[j] for row in rows[rank * size : (rank + 1) * size]]
                shape, which = list(part[field].shape), f"{field} of rank {rank}"
                assert shape == [1, size], f"{which} is {shape}, not {[1, size]} ({inputs})"
                mine = part[field][0].tolist()
                at = next((i for i in range(size) if mine[i] != want[i]), None)
                assert at is None, f"{which} is wrong at place {at}, where it has {mine[at or 0]} ({inputs})"
    return f"{len(cases)} samples, token by token"


def _cut(documents: list[Tensor], ranks: int, positions: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    extra = -len(positions) % ranks
    whole = (pad(torch.cat(documents), (0, extra)), pad(positions, (0, extra)), pad(labels, (0, extra), value=-100))
    return [{name: t[None].chunk(ranks, 1)[r] for name, t in zip(FIELDS, whole)} for r in range(ranks)]


def one_document(documents: list[Tensor], ranks: int) -> list[dict[str, Tensor]]:
    """Labels and positions run on from one document into the next."""
    whole = torch.cat(documents)
    return _cut(documents, ranks, torch.arange(len(whole)), pad(whole[1:], (0, 1), value=-100))


def labels_run_on(documents: list[Tensor], ranks: int) -> list[dict[str, Tensor]]:
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return _cut(documents, ranks, positions, pad(torch.cat(documents)[1:], (0, 1), value=-100))


def cut_first(documents: list[Tensor], ranks: int) -> list[dict[str, Tensor]]:
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    parts = _cut(documents, ranks, positions, torch.cat(documents))
    for part in parts:
        part["shift_labels"] = pad(part["shift_labels"][:, 1:], (0, 1), value=-100)
    return parts


def check_answers(answer: Callable[[], Sequence[int]]) -> str:
    places = list(answer())
    assert len(set(places)) == 3, f"{places} are not three positions"
    assert all(0 <= p < 64 for p in places), f"{places} are not all from 0 to 63"
    labels = torch.full((1, 64), -100)
    labels[0, places] = 1
    kept = sum(int((part[0, 1:] != -100).sum()) for part in labels.chunk(4, 1))  # a slice's first label has no place
    assert kept == 0, f"a naive cut still has {kept} of the labels at {places}"
    parts = [shard_batch({"input_ids": torch.ones_like(labels), "labels": labels}, 4, r) for r in range(4)]
    whole = sum(int((part["shift_labels"] != -100).sum()) for part in parts)
    assert whole == 3, f"only {whole} of the labels at {places} belong to a token at all"
    return "labels that are shifted first are all learned from"


def check_bytes(answer: Callable[[], int]) -> str:
    tokens = torch.zeros(1, 100_003, dtype=torch.int64)
    share = shard_batch({"input_ids": tokens, "labels": tokens}, 8, 3)
    right, mine = 7 * sum(share[name].nbytes for name in FIELDS), answer()
    assert mine == right, f"{mine:,} is {'too little' if mine < right else 'too much'}"
    return "the slice of its own sample is there already"


EXERCISES = {
    1: Exercise(
        check=check_cut,
        hints=(
            "make the three fields for the whole sample first, document by document, and cut them last",
            "each document has its own torch.arange and its own shifted labels; join them with torch.cat",
            "then pad all three at the end by -tokens % ranks, the labels with -100, and cut with chunk(ranks)",
        ),
        mistakes=(one_document, labels_run_on, cut_first),
    ),
    2: Exercise(
        check=check_answers,
        hints=(
            "a label of a token is used by the token before it",
            "the token before the first one of a slice is on another rank; nothing comes before the first token of all",
        ),
        mistakes=(lambda: [0, 16, 32], lambda: [15, 31, 47], lambda: [16, 32, 47]),
    ),
    3: Exercise(
        check=check_bytes,
        hints=("a sample is padded to a multiple of 8, and a slice is an 8th of it", "a rank sends nothing to itself"),
        mistakes=(lambda: 7 * 3 * 8 * 12_500, lambda: 8 * 3 * 8 * 12_501, lambda: 7 * 3 * 8 * 100_003),
    ),
}  # fmt: skip
