"""Exercises of lesson 07: attention with a sliding window, and what packed documents cost and count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alstlib.base import reference
from alstlib.data.shard import shard_batch
from checks import Exercise


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def _window(mine: Callable[..., Tensor]) -> str:
    cases = [(2, 11, 4, 3), (1, 12, 8, 4), (3, 5, 4, 9), (1, 7, 2, 1), (2, 101, 4, 7)]
    for heads, size, width, window in cases:
        where = f"with {heads} heads, {size} tokens, a window of {window}"
        torch.manual_seed(size)
        q, k, v = (torch.randn(heads, size, width, dtype=torch.float64) for _ in range(3))
        with _Largest() as largest:
            got = mine(q.clone(), k.clone(), v.clone(), 0.3, window)
        want = reference.attention(q[None], k[None], v[None], scale=0.3, window=window)[0][0]
        assert got.shape == want.shape, f"the output has shape {list(got.shape)} {where}; {list(want.shape)} is wanted"
        assert not got.isnan().any(), f"the output has nan {where}"
        bad = ((got - want).abs().amax((0, 2)) > 1e-9).nonzero().flatten().tolist()
        assert not bad, f"rows {bad[:5]} are wrong {where}"
        most = max(heads * window * 2 * window, q.numel())
        if window < size:
            assert largest.elements <= most, f"a tensor has {largest.elements:,} elements {where}; {most:,} are allowed"
    return f"{len(cases)} sizes agree with attention under a mask, and no tensor is of shape [S, S]"


def _share(answer: Callable[[], float]) -> str:
    mine = answer()
    pairs = [int(reference.causal_mask(1, n).sum()) for n in (128, 512)]  # an eighth of the lengths
    assert abs(mine - 4 * pairs[0] / pairs[1]) < 0.01, (
        f"{mine} is not the share of 4 documents of 1,024 in one of 4,096"
    )
    return "the work of a document depends on its own length only"


def _labels(answer: Callable[[], int]) -> str:
    mine, sample = answer(), torch.arange(4096)[None]
    packed = {"input_ids": sample, "labels": sample, "document_lengths": [[1000, 2000, 1096]]}
    counted = sum(int((shard_batch(packed, 4, r)["shift_labels"] != -100).sum()) for r in range(4))
    assert mine == counted, f"{mine:,} is not what the ranks count"
    return "where ranks meet no label is lost; where documents meet one is"


def _all_keys(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    return reference.attention(q[None], k[None], v[None], scale=scale, window=window)[0][0]


def _shifted(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    return _all_keys(q, k, v, scale, window + 1)


def _no_block_before(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Each block of rows attends to itself only."""
    parts = [[x[:, at : at + window] for x in (q, k, v)] for at in range(0, q.shape[1], window)]
    return torch.cat([_all_keys(*part, scale, window) for part in parts], 1)


EXERCISES = {
    1: Exercise(
        check=_window,
        hints=(
            "take the rows in blocks of `window`; which keys can any row of one block see?",
            "a block of rows [first, last) needs the keys from first - window + 1 (not below 0) to last - 1",
            "compute the scores of the block, set those with i - j < 0 or i - j >= window to minus infinity "
            "(i and j are the numbers of query and key in the sequence), then softmax and the product with the values",
        ),
        mistakes=(_all_keys, _shifted, _no_block_before),
    ),
    2: Exercise(
        check=_share,
        hints=(
            "the pairs of a causal document of n tokens are n (n + 1) / 2",
            "four documents have 4 times the pairs of one, and each is a quarter as long",
        ),
        mistakes=(lambda: 1.0, lambda: 0.5, lambda: 0.0625),
    ),
    3: Exercise(
        check=_labels,
        hints=(
            "a label is the next token of the same document",
            "labels are shifted before the cut, so only the documents matter, and not the ranks",
        ),
        mistakes=(lambda: 4096, lambda: 4092, lambda: 4089),
    ),
}
