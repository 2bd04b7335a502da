"""Lesson 17: pages merged at once, rows that hide a copy, and what longer chunks fetch."""

from collections.abc import Callable
from typing import Any

import torch

from alstlib.base.reference import relative_error

from . import Exercise


def merged(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(17)
    cases = ((1, 2, 3, False), (2, 3, 9, False), (5, 1, 7, False), (2, 2, 5, True), (6, 4, 11, True))
    for count, heads, rows, gaps in cases:
        scores = 8 * torch.randn(heads, rows, count, 4, generator=generator, dtype=torch.float64)
        values = torch.randn(heads, count, 4, 5, generator=generator, dtype=torch.float64)
        if gaps:
            hidden = torch.rand(heads, rows, count, generator=generator) < 0.5
            hidden[..., 0] &= ~hidden.all(-1)
            scores = scores.masked_fill(hidden[..., None], float("-inf"))
        case = f"{count} pages, {heads} heads, {rows} rows" + (", some of which see nothing of a page" if gaps else "")
        want = scores.flatten(2).softmax(-1) @ values.flatten(1, 2), scores.flatten(2).logsumexp(-1)
        outs = torch.stack([scores[:, :, i].softmax(-1) @ values[:, i] for i in range(count)])  # nan: nothing is seen
        lses = torch.stack([scores[:, :, i].logsumexp(-1) for i in range(count)])
        made = function(outs.clone(), lses.clone())
        assert isinstance(made, tuple), f"{case}: a pair (out, lse) is wanted"
        for got, right, what in zip(made, want, ("output", "logsumexp")):
            assert got.shape == right.shape, f"{case}: the {what} is {list(got.shape)}, not {list(right.shape)}"
            assert not got.isnan().any(), f"{case}: the {what} has nan"
            error = relative_error(got, right)
            assert error < 1e-12, f"{case}: the {what} differs by {error:.1g} from attention over all keys"
    return "one page or many, with rows that see nothing of some"


def _nan_stays(outs: Any, lses: Any) -> Any:
    return (lses.softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)


def _mean(outs: Any, lses: Any) -> Any:
    return outs.nan_to_num().mean(0), lses.logsumexp(0)


def _largest(outs: Any, lses: Any) -> Any:
    return (lses.softmax(0)[..., None] * outs.nan_to_num()).sum(0), lses.amax(0)


def hidden_rows(answer: Callable[[], Any]) -> str:
    mine, copy = answer(), 2 * 2 * 10 / 24e9  # seconds for a key and a value of all heads, for each element of a head

    def hides(rows: float) -> bool:
        return copy <= 2 * 2 * rows * 40 / 150e12

    assert hides(1.01 * mine), f"with {mine:,.0f} rows the copy still takes longer than attention"
    assert not hides(0.99 * mine), f"fewer than {mine:,.0f} rows are enough"
    return f"about {mine:,.0f} rows"


def _fetched(tokens: int, chunk: int) -> int:
    """Elements that come to the device in backward: the lesson's model, chunk by chunk and page by page."""
    from alstlib.base.sizing import page_keys

    layers, width, heads, pair, page = 2, 128, 4, 128, page_keys(chunk, tokens)
    came = 3 * width * tokens  # around the layers
    for _ in range(layers):
        came += (tokens - chunk) * width  # to make the keys and values again
        summed: set[int] = set()
        opened = tokens // page - 1
        for first in reversed(range(0, tokens, chunk)):
            came += chunk * (2 * width + width + heads)
            if (own := first // page) != opened:  # with its sums
                opened, came = own, came + 2 * pair * page
            for visited in range(own):
                came += pair * page * (2 if visited in summed else 1)
                summed.add(visited)
    return came


def factor(answer: Callable[[], Any]) -> str:
    mine, before, after = answer(), _fetched(8192, 256), _fetched(8192, 512)
    assert abs(mine / (before / after) - 1) < 0.01, (
        f"it is not {mine:.3f}: count pages and visits again; hidden states travel as before"
    )
    return f"{4 * before / 2**20:.0f} MiB before, {4 * after / 2**20:.0f} MiB now"


EXERCISES = {
    1: Exercise(
        check=merged,
        hints=(
            "The share of a page in the merged output is exp(its logsumexp - the logsumexp of all). Which function of "
            "PyTorch gives all these shares at once?",
            "0 times nan is nan. Replace the outputs that are not defined before you multiply.",
            "The shares are a softmax of `lses` over the pages. Where a share is 0, fill the output with 0.",
        ),
        mistakes=(_nan_stays, _mean, _largest),
    ),
    2: Exercise(
        check=hidden_rows,
        hints=(
            "Put K, H, F and B into the inequality of the section on whether copies hide.",
            "For forward it is c >= (K / H) (F / B).",
        ),
        mistakes=(lambda: 6250, lambda: 1800),
    ),
    3: Exercise(
        check=factor,
        hints=(
            "Half as many pages, each twice as long, and half as many chunks: what becomes of the visits?",
            "`moved(S, chunk, page_keys(chunk, S))` gives the elements for each token, sent and fetched in each pass.",
        ),
        mistakes=(lambda: 2, lambda: 2.33, lambda: 4),
    ),
}
