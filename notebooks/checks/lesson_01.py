"""Checks of lesson 01, the tiled loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alstlib.base.reference import relative_error
from alstlib.base.units import format_bytes
from alstlib.planner.measure.ledger import Ledger
from alstlib.tiled.loss import tiled_logits_loss
from checks import Exercise

Found = tuple[Tensor, Tensor, Tensor]


class Logits(TorchDispatchMode):
    """Notes the most rows of any tensor [rows, columns] or [columns, rows], but for the head's weight."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.columns, self.width, self.rows = columns, width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and self.columns in out.shape
            and (rows := out.numel() // self.columns) != self.width
        ):
            self.rows = max(self.rows, rows)
        return out


def check_z_loss(tiled_z_loss: Callable[..., Found]) -> str:
    cases = ((7, 5, 11, 0.1, 3), (12, 6, 10, 0.0, 5), (9, 4, 13, 1e-2, 16), (23, 8, 17, 0.5, 1))
    for case, (tokens, width, words, c, tile) in enumerate(cases):
        generator = torch.Generator().manual_seed(case)
        hidden, weight = (
            torch.randn(n, width, generator=generator, dtype=torch.float64, requires_grad=True) for n in (tokens, words)
        )
        labels = torch.randint(0, words, (tokens,), generator=generator)
        labels[: tokens // 3] = -100  # whole tiles without a label among them
        valid = labels != -100
        z = hidden[valid] @ weight.T
        token = torch.nn.functional.cross_entropy(z, labels[valid], reduction="none") + c * z.logsumexp(-1) ** 2
        want = (token.sum().detach(), *torch.autograd.grad(token.sum(), (hidden, weight)))
        inputs = f"{tokens} tokens, width {width}, {words} words, c={c}, tile={tile}"
        with torch.no_grad(), Logits(words, width) as largest:
            got = tiled_z_loss(hidden.detach().clone(), weight.detach().clone(), labels, c, tile)
        for name, mine, right in zip(("loss", "gradient of hidden", "gradient of weight"), got, want):
            mine = torch.as_tensor(mine, dtype=torch.float64)
            assert mine.shape == right.shape, f"the {name} has the shape {list(mine.shape)} ({inputs})"
            error = relative_error(mine, right)
            assert error < 1e-9, f"the {name} is off by {error:.1%} ({inputs})"
        assert largest.rows <= tile, f"there were logits of {largest.rows} tokens at once ({inputs})"
    return f"{len(cases)} cases, loss and gradients, and never more logits than those of a tile"


def _z_loss(hidden: Tensor, weight: Tensor, labels: Tensor, c: float) -> Found:
    """All logits at once, by autograd."""
    with torch.enable_grad():
        hidden, weight, valid = hidden.requires_grad_(), weight.requires_grad_(), labels != -100
        z = (hidden @ weight.T)[valid]
        loss = (z.logsumexp(-1) - z.gather(1, labels[valid][:, None])[:, 0] + c * z.logsumexp(-1) ** 2).sum()
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def all_at_once(hidden: Tensor, weight: Tensor, labels: Tensor, c: float, tile: int) -> Found:
    return _z_loss(hidden, weight, labels, c)


def turned_over(hidden: Tensor, weight: Tensor, labels: Tensor, c: float, tile: int) -> Found:
    """All logits at once, [vocabulary, tokens]."""
    weight @ hidden.T
    return by_tiles(hidden, weight, labels, c, tile)


def by_tiles(
    hidden: Tensor, weight: Tensor, labels: Tensor, c: float, tile: int, mean: bool = False, last: bool = True
) -> Found:
    loss, grads, total = torch.zeros((), dtype=hidden.dtype), torch.zeros_like(hidden), torch.zeros_like(weight)
    for lo in range(0, len(hidden) if last else len(hidden) // tile * tile, tile):
        rows = slice(lo, lo + tile)
        one, grads[rows], more = _z_loss(hidden[rows].clone(), weight.clone(), labels[rows], c)
        count = max(1, int((labels[rows] != -100).sum())) if mean else 1
        loss, total = loss + one / count, total + more
    return loss, grads, total


def means_of_tiles(hidden: Tensor, weight: Tensor, labels: Tensor, c: float, tile: int) -> Found:
    return by_tiles(hidden, weight, labels, c, tile, mean=True)


def without_the_tail(hidden: Tensor, weight: Tensor, labels: Tensor, c: float, tile: int) -> Found:
    return by_tiles(hidden, weight, labels, c, tile, last=False)


def without_the_square(hidden: Tensor, weight: Tensor, labels: Tensor, c: float, tile: int) -> Found:
    """The gradient of plain cross-entropy."""
    return by_tiles(hidden, weight, labels, c, tile)[0], *by_tiles(hidden, weight, labels, 0.0, tile)[1:]


def check_tile(answer: Callable[[], int]) -> str:
    tile, words, width = answer(), 8192, 256
    assert tile & (tile - 1) == 0, f"{tile} is no power of two"
    limit = 1.4 * words * width * 4
    x, labels = torch.randn(2048, width, requires_grad=True), torch.arange(2048)
    weight = torch.randn(words, width, requires_grad=True)

    def peak(size: int) -> int:
        x.grad = weight.grad = None
        with Ledger("cpu") as ledger:
            start = ledger.device_bytes
            tiled_logits_loss(x, weight, labels, tile=size).backward()
            return ledger.device_peak - start

    at, twice = peak(tile), peak(2 * tile)
    assert at <= limit, f"tiles of {tile} tokens peak at {format_bytes(at)}: at most {format_bytes(limit)} is wanted"
    assert twice > limit, f"larger tiles than {tile} tokens would work as well"
    return f"{format_bytes(at)}, and twice the tile takes {format_bytes(twice)}"


def check_tokens(answer: Callable[[], int]) -> str:
    row, tokens = torch.empty(1, 128_256, device="meta").nbytes, answer()
    assert tokens == int(tokens), f"{tokens} is no whole number of tokens"
    assert tokens * row <= 2**30, f"the logits of {tokens:,} tokens are more than 1 GiB"
    assert (tokens + 1) * row > 2**30, f"more than {tokens:,} tokens fit"
    return f"{tokens:,} tokens, {format_bytes(tokens * row)}, for samples of any length"


EXERCISES = {
    1: Exercise(
        check=check_z_loss,
        hints=(
            "the loop over tiles is that of the lesson; only the loss of a token and the derivative g change",
            "by the chain rule the derivative of lse^2 by z is 2 lse times that of lse, and the derivative of lse by z "
            "is a function that you know",
            "so softmax(z) gets a factor for each row, one plus 2 c lse; the label still gets minus one; rows without "
            "a label have no gradient at all",
        ),
        mistakes=(all_at_once, turned_over, means_of_tiles, without_the_tail, without_the_square),
    ),
    2: Exercise(
        check=check_tile,
        hints=(
            "two gradients exist in full, whatever the tile is: the weight's and the hidden states'",
            "the hidden states' gradient takes 2 MiB; how much is left for the logits of one tile?",
        ),
        mistakes=(lambda: 64, lambda: 16, lambda: 48),
    ),
    3: Exercise(
        check=check_tokens,
        hints=("the logits of one token take 4 bytes for each word", "divide 2**30 by that and round down"),
        mistakes=(lambda: 2093, lambda: 2091, lambda: 8371),
    ),
}
