"""Keys and values block by block: no byte in vain, and which rows later blocks see. The net of whole steps
(tests/matrix.py) has the gradients."""

import pytest
import torch
import zoo
from cases import attach, batch, step
from operators import randn

from alstlib.mesh import SPContext
from alstlib.streaming.blocks import Blocks
from alstlib.ulysses.attention import UlyssesAttention

LENGTH, BLOCK, LAYERS, HEADS, KV, WIDTH = 14, 4, 2, 4, 2, 8


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(
    ("window", "documents", "kept", "visits"),
    [(None, (), 12, 4 * (3 + 2 + 1)), (3, (), 2 * 3, 2 * 3), (1, (), 0, 0), (None, (4, 4, 4, 2), 0, 0),
     (4, (3, 3, 5, 3), 1 + 2 + 1, 1 + 2 + 1)],
    ids=str,
)  # fmt: skip
def test_bytes_that_travel(window, documents, kept, visits, save):
    """Of a page those rows go to the host that a later block sees, once, and their sums once for each such block. They
    come back for each one's forward, two passes without a kept attention output, and backward, with sums that are there
    already, and these once more for the page's own backward."""
    model = zoo.build("mistral", num_hidden_layers=LAYERS, sliding_window=window)
    with attach(model, offload="sync", on_host="hidden+kv", save_attention=save) as handle:
        step(model, batch(LENGTH, documents), block=BLOCK)
        sent, fetched = handle.store.bytes_sent, handle.store.bytes_fetched
        assert handle.store.leased == 0
    row = KV * 2 * WIDTH * 4  # keys and values in fp32, and so their sums
    checkpoints = LAYERS * LENGTH * 4 * (HEADS * WIDTH + save * HEADS * (WIDTH + 1))
    assert sent == checkpoints + LAYERS * row * (kept + visits)
    assert fetched == checkpoints + LAYERS * row * visits * (4 if save else 5)


def test_attention_twice_in_a_layer():
    """In forward it would take the place of the first call's keys: the dry run refuses such a layer before that."""
    blocks, op = Blocks(1, 4, 2, 1), UlyssesAttention(SPContext())
    q, k = randn(1, HEADS, 2, WIDTH), randn(1, KV, 2, WIDTH)
    with torch.no_grad():
        blocks.begin(0, making=True)
        blocks.attend(op, q, k, k, layer=0)
        with pytest.raises(ValueError, match="calls attention more than once"):
            blocks.attend(op, q, k, k, layer=0)
