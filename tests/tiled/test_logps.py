"""What statistics of each token cost, and which of equal logits counts; test_loss.py compares them with the whole
logits."""

import pytest
import torch
from operators import leaf, randn
from test_loss import VOCAB, growth

from alstlib.tiled.logits import Statistics
from alstlib.tiled.loss import tiled_logits_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def test_of_equal_logits_the_first_is_the_largest():
    """As argmax has it: many logits in bf16 are equal."""
    found = Statistics().of(torch.zeros(3, VOCAB), torch.tensor([0, 1, -100]))
    assert found.correct.tolist() == [True, False, False]


def test_statistics_take_no_product_and_less_than_a_tile():
    """And nothing where nobody asks: the same calls as without them."""
    rows, vocab, tile = 512, 1000, 64
    labels = torch.arange(rows) % vocab
    hidden, weight = (leaf(randn(n, 8, seed=n), torch.float32) for n in (rows, vocab))

    def run(found):
        with torch.profiler.profile() as profile:
            tiled_logits_loss(hidden, weight, labels, tile=tile, statistics=found)
        products = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm"))
        return products, growth(lambda: tiled_logits_loss(hidden, weight, labels, tile=tile, statistics=found))[0]

    (products, without), (products_too, peak) = run(None), run(Statistics())
    assert products == products_too > 0
    assert peak - without < 4 * tile * vocab / 2
