"""Keys and values block by block: no byte in vain, and which rows later blocks see. The net of whole steps
(tests/matrix.py) has the gradients."""

import pytest
import zoo
from cases import attach, batch, lines_of, step

LENGTH, BLOCK, LAYERS, HEADS, KV, WIDTH = 14, 4, 2, 4, 2, 8
CASES = """
None | ()           | 12        | 4 * (3 + 2 + 1)
3    | ()           | 2 * 3     | 2 * 3
1    | ()           | 0         | 0
None | (4, 4, 4, 2) | 0         | 0
4    | (3, 3, 5, 3) | 1 + 2 + 1 | 1 + 2 + 1
"""
"""A window, documents, rows of pages that later blocks see, and how often such a block sees one."""
CASES = [[*map(eval, line)] for line in lines_of(CASES, "|")]


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("window, documents, kept, visits", CASES, ids=str)
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
