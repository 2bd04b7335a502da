"""Attention block by block: exact against whole layers, the same bits wherever pages lie, and no byte in vain."""

from __future__ import annotations

import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from operators import EXACT, gradients, leaf, nan_memory, randn, worst
from test_chunked import HEADS, KV, WIDTH, E, toy, toy_weights, whole_layers
from torch import Tensor

from alstlib.mesh import SPContext
from alstlib.offload.checkpoints import Saved
from alstlib.offload.courier import Courier
from alstlib.offload.host_store import HostStore
from alstlib.streaming.blocks import Blocks, first_seen
from alstlib.ulysses.attention import UlyssesAttention


def by_blocks(
    x: Tensor, upstream: Tensor, weights: list[Tensor], how: dict[str, Any], block: int,
    store: HostStore | None = None, save: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Output, gradient of the input and of the weights, with pages on the host where a store is given."""
    op, weights = UlyssesAttention(SPContext()), [leaf(w) for w in weights]
    layers = [*zip(*[iter(weights)] * 4)]
    blocks = Blocks(len(layers), x.shape[1], block, 1)
    blocks.courier = None if store is None else Courier(store, x.device)

    def run(part: Tensor, notes: list[Saved]) -> Tensor:
        for i, ws in enumerate(layers):
            rule = {**how, "sinks": ws[3] if how.get("sinks") else None, "saved": notes[i] if notes else None}
            part = toy(part, ws, functools.partial(blocks.attend, i, op, **rule))
        return part

    outs, grads = [], []
    with torch.no_grad():
        for i in range(blocks.count):
            blocks.begin(i, making=True)
            outs.append(run(x[:, blocks.rows], []))
    for i in reversed(range(blocks.count)):
        blocks.begin(i, making=False)
        part = leaf(x[:, blocks.rows])
        notes = [Saved() for _ in layers] if save else []
        if save:  # as a checkpoint does: a pass without a graph, whose attention outputs the recompute takes
            with torch.no_grad():
                run(part, notes)
            for one in notes:
                one.rewind(one.leave())
        run(part, notes).backward(upstream[:, blocks.rows])
        held = [pages.held[i] for pages in blocks.pages]  # gone with each layer's backward, before the block's end
        assert not any(page.device or page.sums or page.host or page.host_sums for page in held)
        blocks.done()
        assert part.grad is not None
        grads.insert(0, part.grad)
    blocks.close()
    return [torch.cat(outs, 1), torch.cat(grads, 1), *(w.grad for w in weights)]  # type: ignore[list-item]


CASES: dict[str, dict[str, Any]] = {
    "even": {"rows": 12, "block": 4},
    "the last block shorter": {"rows": 13, "block": 5},
    "blocks of one row": {"rows": 6, "block": 1},
    "batch": {"rows": 9, "block": 4, "batch": 2},
    "documents": {"rows": 13, "block": 5, "documents": [0, 1, 6, 13]},
    "documents of a batch": {"rows": 8, "block": 3, "batch": 2, "documents": [0, 5, 8, 9, 16]},
    "window": {"rows": 17, "block": 4, "window": 3},
    "window over blocks": {"rows": 17, "block": 3, "window": 8, "sinks": True},
    "window of one key": {"rows": 7, "block": 3, "window": 1},
    "window and documents": {"rows": 19, "block": 4, "window": 6, "documents": [0, 7, 16, 19], "softcap": 2.0},
}


@pytest.mark.parametrize("save", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_layers_by_blocks_are_whole_layers(case: dict[str, Any], save: bool) -> None:
    case = dict(case)
    rows, block, batch = case.pop("rows"), case.pop("block"), case.pop("batch", 1)
    x, upstream = randn(batch, rows, E), randn(batch, rows, E, seed=1, scale=3.0)
    weights, store = toy_weights(), HostStore("sync")
    want = gradients(functools.partial(whole_layers, **case), [leaf(x), *weights], upstream)
    with nan_memory():
        found = [by_blocks(x, upstream, weights, case, block, s, save) for s in (None, store)]
    assert worst(found[0], want) < EXACT[torch.float64]
    assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(*found))
    gc.collect()
    assert store.nbytes == store.unused, "a page was not given back"


def test_bytes_that_travel() -> None:
    """A page goes to the host once, and its sums once for each later block; it comes back for each later block's
    forward, recompute and backward, with sums that are there already, and these once more for its own backward."""
    rows, block, layers = 14, 4, 3
    x, n = randn(1, rows, E, dtype=torch.float32), -(-rows // block)
    page = block * KV * 2 * WIDTH * 4  # fp32 keys and values, and so their sums
    later = sum(n - 1 - j for j in range(n - 1))
    for save in (False, True):
        store = HostStore("sync")
        by_blocks(x, x, toy_weights(layers, x.dtype), {}, block, store, save)
        assert store.bytes_sent == layers * page * (n - 1 + later)
        assert store.bytes_fetched == layers * page * (3 * later + later)


@pytest.mark.parametrize(
    ("how", "kept"), [({"window": 3}, 2), ({"window": 1}, 0), ({"documents": [0, 4, 8, 12]}, 0),
                      ({"documents": [0, 3, 6, 11, 12], "window": 4}, 1)], ids=str,
)  # fmt: skip
def test_pages_keep_what_later_blocks_see(how: dict[str, Any], kept: int) -> None:
    """Blocks of 4 rows: under a window of 3 the next block alone sees two rows of a page; documents that end with
    their blocks, or a window of a row, leave nothing. (The last case: one row of page 0, two of page 1.)"""
    x, store = randn(1, 12, E, dtype=torch.float32), HostStore("sync")
    by_blocks(x, x, toy_weights(1, x.dtype), how, 4, store)
    rows = 2 * kept if "documents" not in how or not kept else 1 + 2
    row = KV * 2 * WIDTH * 4
    assert (store.bytes_sent, store.bytes_fetched) == (2 * rows * row, 4 * rows * row)
    assert Blocks(1, 12, 4, 1).kept_rows(how.get("window")) == 2 * min(4, how.get("window", 5) - 1)


def test_first_row_that_is_seen() -> None:
    """Against a look at all pairs."""
    for documents, window in itertools.product([None, [0, 10, 20], [0, 2, 7, 15, 20]], [None, 1, 2, 5]):
        bounds = documents or [0, 10, 20]
        document = [max(b for b in [*bounds, 10] if b <= i) for i in range(20)]
        for end in range(1, 11):
            seen = [
                j for first in (0, 10) for i in range(end, 10) for j in range(end)
                if document[first + j] == document[first + i] and (window is None or i - j < window)
            ]  # fmt: skip
            assert first_seen(documents, 2, 10, end, window) == min(seen, default=end), (documents, window, end)


def test_attention_twice_in_a_layer() -> None:
    """In forward it would take the place of the first call's keys: the dry run refuses such a layer before that."""
    blocks, op = Blocks(1, 4, 2, 1), UlyssesAttention(SPContext())
    q = randn(1, HEADS, 2, WIDTH)
    k = randn(1, KV, 2, WIDTH)
    with torch.no_grad():
        blocks.begin(0, making=True)
        blocks.attend(0, op, q, k, k)
        with pytest.raises(ValueError, match="calls attention more than once"):
            blocks.attend(0, op, q, k, k)
