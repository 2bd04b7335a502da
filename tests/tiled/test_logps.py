"""What a head finds of each token, against the whole logits; test_loss.py has the log-probabilities themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from operators import leaf, randn, strided, worst
from test_loss import ALL, PLAIN, VOCAB, growth, inputs_of, labels_of
from torch import Tensor, nn

from alstlib import reference
from alstlib.tiled.logits import LogitTransform, Statistics
from alstlib.tiled.logps import tiled_token_logps
from alstlib.tiled.loss import tiled_logits_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def statistics_of(inputs: Sequence[Tensor], labels: Tensor, transform: LogitTransform) -> tuple[Tensor, ...]:
    return reference.head_statistics(transform(nn.functional.linear(*inputs)), labels)


def correct_for_some(labels: Tensor, inputs: Sequence[Tensor], transform: LogitTransform) -> Tensor:
    """Every other label is the largest logit."""
    best = transform(nn.functional.linear(*inputs)).argmax(-1)
    return torch.where((labels != -100) & (torch.arange(labels.numel()).view(labels.shape) % 2 == 0), best, labels)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("transform", [PLAIN, ALL], ids=["plain", "both"])
@pytest.mark.parametrize("tile", [1, 4, None])
@pytest.mark.parametrize("fn", [tiled_logits_loss, tiled_token_logps])
def test_statistics_of_each_token(fn: Any, tile: int | None, transform: LogitTransform, train: bool) -> None:
    inputs = [strided(t) for t in inputs_of(2, 13, bias=True)[:2]] + [randn(VOCAB, seed=2)]
    inputs[0] = inputs[0] * torch.linspace(0, 300, 13)[:, None].double()  # from even to all on one
    inputs = [leaf(t, needs=train) for t in inputs]
    labels = strided(correct_for_some(labels_of(2, 13), inputs, transform))
    found = Statistics()
    out = fn(inputs[0], inputs[1], labels, bias=inputs[2], tile=tile, transform=transform, statistics=found)
    entropy, correct, mean = statistics_of(inputs, labels, transform)
    assert 0 < int(correct.sum()) < int((labels != -100).sum())
    assert worst([found.entropy, found.mean], [entropy, mean]) < 1e-12
    assert torch.equal(found.correct, correct)
    assert not found.entropy.requires_grad
    assert torch.equal(out, fn(*inputs[:2], labels, bias=inputs[2], tile=tile, transform=transform))


def test_of_equal_logits_the_first_is_the_largest() -> None:
    """As argmax has it: many logits in bf16 are equal."""
    found = Statistics().of(torch.zeros(3, VOCAB), torch.tensor([0, 1, -100]))
    assert found.correct.tolist() == [True, False, False]


def test_statistics_take_no_product_and_less_than_a_tile() -> None:
    """And nothing where nobody asks: the same calls as without them."""
    rows, vocab, tile = 512, 1000, 64
    labels = torch.arange(rows) % vocab
    hidden, weight = (leaf(randn(n, 8, seed=n), torch.float32) for n in (rows, vocab))

    def run(found: Statistics | None) -> tuple[int, int]:
        with torch.profiler.profile() as profile:
            tiled_logits_loss(hidden, weight, labels, tile=tile, statistics=found)
        products = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm"))
        return products, growth(lambda: tiled_logits_loss(hidden, weight, labels, tile=tile, statistics=found))[0]

    (products, without), (products_too, peak) = run(None), run(Statistics())
    assert products == products_too > 0
    assert peak - without < 4 * tile * vocab / 2
