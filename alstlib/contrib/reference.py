"""The plain version of what this folder adds to the core, as `alstlib.base.reference` has it for the core: the tests
compare with it.

Shape legend: B batch, S sequence, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alstlib.base.reference import causal_mask


def seen_pages(
    q: Tensor, k: Tensor, *, chunk: int, page: int, top: int, first: int, last: int,
    documents: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Boolean [B, K, S, S]: the keys that sparse attention over pages shows to each query and key/value head.

    Each chunk of queries sees its own page, and of the earlier pages that it would see the first, the last, and the
    `top` others with the best product of mean queries (summed over the heads of a key/value head) and mean keys.
    """
    q, k = q.detach(), k.detach()
    (batch, heads, length, _), kv_heads = q.shape, k.shape[1]
    allowed, seen = (
        causal_mask(batch, length, documents),
        torch.zeros(batch, kv_heads, length, length, dtype=torch.bool),
    )
    group = heads // kv_heads
    for b in range(batch):
        for lo in range(0, length, chunk):
            hi = min(lo + chunk, length)
            own = (hi - 1) // page
            pages = sorted({int(j) // page for j in allowed[b, lo:hi].any(0).nonzero()} - {own})
            always = [own, *pages[:first], *pages[max(0, len(pages) - last) :]]
            for h in range(kv_heads):
                query = q[b, h * group : (h + 1) * group, lo:hi].mean(1).sum(0)
                score = {p: float(query @ k[b, h, p * page : (p + 1) * page].mean(0)) for p in pages if p not in always}
                for p in [*always, *sorted(score, key=score.__getitem__)[max(0, len(score) - top) :]]:
                    seen[b, h, lo:hi, p * page : (p + 1) * page] = True
    return seen
