"""Lesson 19: a score by single queries, a budget that covers all pages, and bytes that a chunk fetches."""

from collections.abc import Callable
from typing import Any

import torch

from alstlib.base.reference import relative_error
from alstlib.base.units import format_bytes

from . import Exercise


def score(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(19)
    cases = ((1, 4, 4, 8, 3, torch.float32), (2, 6, 2, 5, 7, torch.float32), (1, 4, 1, 16, 4, torch.bfloat16))
    for batch, heads, kv_heads, rows, pages, dtype in cases:
        q = torch.randn(batch, heads, rows, 9, generator=generator).to(dtype)
        means = torch.randn(batch, kv_heads, pages, 9, generator=generator)
        case, shape = f"{heads} query heads on {kv_heads}, queries in {dtype}", [batch, kv_heads, pages]
        made = function(q.clone(), means.clone())
        assert list(made.shape) == shape, f"{case}: the shape is {list(made.shape)}, not {shape}"
        assert made.dtype == means.dtype, f"{case}: the dtype is {made.dtype}, not {means.dtype}"
        want = torch.full(shape, float("-inf"))
        for head in range(heads):
            for row in range(rows):
                of = head // (heads // kv_heads)
                product = (q[:, head, row, None].float() * means[:, of]).sum(-1)
                want[:, of] = torch.maximum(want[:, of], product)
        error = relative_error(made, want)
        assert error < 1e-5, f"{case}: the scores differ by {error:.1g} from the largest products, query by query"
    q, means = torch.zeros(1, 2, 256, 8), torch.full((1, 1, 6, 8), -0.1)
    means[0, 0, 4, 0], q[0, 1, 100, 0], q[0, :, :, 1:] = 1.0, 10.0, -0.5  # one query of 512 matches page 4
    q[0, :, :, 0] -= 0.2
    assert function(q, means).argmax() == 4, "the page that matches a single query is not the best"
    return "it finds the page that matches one query of many"


def _means(q: Any, means: Any) -> Any:
    queries = q.to(means.dtype).mean(2).unflatten(1, (means.shape[1], -1)).sum(2)
    return (queries[:, :, None] * means).sum(-1)


def _other_heads(q: Any, means: Any) -> Any:
    queries = q.to(means.dtype).unflatten(1, (-1, means.shape[1])).transpose(1, 2).flatten(2, 3)
    return (queries @ means.mT).amax(2)


def _first_head(q: Any, means: Any) -> Any:
    group = q.shape[1] // means.shape[1]
    return (q[:, ::group].to(means.dtype) @ means.mT).amax(2)


def budget(answer: Callable[[], Any]) -> str:
    def complete(top: int) -> bool:
        return all(min(own, 2 + 3 + top) == own for own in range(8192 // 256))

    top = answer()
    assert complete(top), f"with top={top} the last chunk still leaves out pages"
    assert top == 0 or not complete(top - 1), f"top={top - 1} is enough too"
    return f"the last chunk sees 2 + {top} + 3 pages before its own"


def fetched(answer: Callable[[], Any]) -> str:
    given = answer()
    assert isinstance(given, tuple | list), "a pair (least, most) is wanted"
    assert len(given) == 2, "a pair (least, most) is wanted"
    page = torch.empty(2, 8, 16_384, 128, dtype=torch.bfloat16, device="meta").nbytes
    before = 4_194_304 // 16_384 - 1
    least, most = (min(before, 2 + heads * 14) * page for heads in (1, 8))
    assert given[0] == least, (
        f"{given[0]:,} is not the least: how large is a page, and how many are fetched if all heads agree?"
    )
    assert given[1] == most, f"{given[1]:,} is not the most: which pages can differ between the heads?"
    return f"{format_bytes(least)} to {format_bytes(most)}; exact attention fetches {format_bytes(before * page)}"


EXERCISES = {
    1: Exercise(
        check=score,
        hints=(
            "Each key/value head has its own query heads: give it their rows in one dimension.",
            "`unflatten(1, (K, -1))` gives each key/value head its query heads; `flatten(2, 3)` puts their rows into "
            "one dimension.",
            "Then it is one matrix product with the means for each key/value head, and a maximum over the rows. Bring "
            "`q` to the dtype of `means` first.",
        ),
        mistakes=(_means, _other_heads, _first_head),
    ),
    2: Exercise(
        check=budget,
        hints=(
            "How many pages lie before the last chunk's own?",
            "Of these, two first and three last ones are always read.",
        ),
        mistakes=(lambda: 27, lambda: 25, lambda: 0),
    ),
    3: Exercise(
        check=fetched,
        hints=(
            "A page is fetched with all heads. If all heads choose the same pages, 16 pages come.",
            "If no two heads agree, each brings 14 pages of its own; the first and the last one are the same for all.",
        ),
        mistakes=(lambda: (16, 114), lambda: (1_073_741_824, 8 * 1_073_741_824)),
    ),
}
