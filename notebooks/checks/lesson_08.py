"""Exercises of lesson 08: the loss from which a rank runs backward, for several engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import alstlib
from alstlib.hf.causal_lm_loss import share_of
from alstlib.reference import relative_error
from checks import Exercise


def _samples(count: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """(inputs [S, 6], labels [S]) of samples whose numbers of labels differ; the first slices have none."""
    found = []
    for i in range(count):
        generator = torch.Generator().manual_seed(100 * count + i)
        x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 5, (length,), generator=generator)
        y[: length * (i % 3 + 1) // 4] = -100
        found.append((x, y))
    return found


def _loss(mine: Callable[..., Tensor]) -> str:
    for sp, dp, accumulation in ((1, 1, 1), (4, 1, 1), (2, 3, 1), (1, 2, 3), (4, 2, 3)):
        where = f"sp={sp}, dp={dp}, accumulation={accumulation}"
        samples = _samples(dp * accumulation, 4 * 7)
        torch.manual_seed(0)
        weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
        x, y = torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])
        (want,) = torch.autograd.grad(F.cross_entropy(x @ weight, y), weight)
        total = int((y != -100).sum())
        replicas: list[Tensor] = []
        for replica in range(dp):
            added = torch.zeros_like(weight)
            for x, y in samples[replica::dp]:
                for part, own in zip(x.chunk(sp), y.chunk(sp)):
                    loss = mine(part @ weight, own.clone(), total, sp, dp, accumulation)
                    assert loss.ndim == 0, f"the loss has shape {list(loss.shape)}; a scalar is wanted"
                    (grad,) = torch.autograd.grad(loss, weight, allow_unused=True)
                    assert grad is not None, f"{where}: the loss of a slice has no graph"
                    assert not grad.isnan().any(), f"{where}: the gradient of a slice without labels is nan"
                    added += grad / accumulation
            replicas.append(added)
        got = torch.stack(replicas).mean(0)
        size = float(got.norm() / want.norm())
        assert relative_error(got, want) < 1e-9, (
            f"{where}: the gradient is {size:.3g} times as long as it should be"
            + ("" if relative_error(got / size, want) < 1e-6 else ", and points elsewhere: the weights differ")
        )
    return "the engine's gradient is the unsharded one, also with replicas, micro-batches and slices without labels"


def _recipe(answer: Callable[[], Callable[[list[Tensor], list[int]], Sequence[Tensor]]]) -> str:
    mine = answer()
    ((x, y),) = _samples(1, 24)
    for ranks in (2, 3, 8):
        weight = torch.ones(6, 5, dtype=torch.float64).tril().requires_grad_()
        (want,) = torch.autograd.grad(F.cross_entropy(x @ weight, y), weight)
        sums, counts = [], []
        for part, own in zip((x @ weight).chunk(ranks), y.chunk(ranks)):
            sums.append(F.cross_entropy(part, own, reduction="sum"))
            counts.append(int((own != -100).sum()))
        losses = mine(sums, counts)
        assert len(losses) == ranks, f"{len(losses)} losses for {ranks} ranks"
        (got,) = torch.autograd.grad(torch.stack(list(losses)).sum(), weight)
        error = relative_error(got, want)
        assert error < 1e-9, f"on {ranks} ranks the relative error of the gradient is {error:.2g}"
    return "the gradient is the unsharded one on 2, 3 and 8 ranks"


def _number(answer: Callable[[], float]) -> str:
    mine, total, labels = answer(), torch.tensor(120.0), torch.zeros(1, 4, dtype=torch.int64)
    share = share_of(total, labels, {"step_tokens": 6000}, alstlib.SPContext(sp=4, dp=2), engine_divides_by=3)
    want = float(total * share.factor)
    assert abs(mine - want) < 1e-6, f"yours is {mine / want:.3g} times what is right"
    return "the engine averages over the replicas as well"


def _mean(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=-100) / sp


def _all_ranks(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    """As for an engine that averages over all ranks."""
    return F.cross_entropy(logits, labels, reduction="sum") * sp * dp * accumulation / step_tokens


def _no_replicas(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") * accumulation / step_tokens


def _no_accumulation(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") * dp / step_tokens


EXERCISES = {
    1: Exercise(
        check=_loss,
        hints=(
            "write down what the gradient of one token is multiplied by on its way: your factor, then the engine's",
            "every valid token must arrive with the weight 1 / step_tokens; the engine divides by the replicas and "
            "by the accumulation steps, and not by the ranks that share a sample",
            "take the sum of the slice's losses (a sum over no token is 0, a mean over none is nan), and multiply it "
            "by all that the engine divides by",
        ),
        mistakes=(_mean, _all_ranks, _no_replicas, _no_accumulation),
    ),
    2: Exercise(
        check=_recipe,
        hints=(
            "the sum of the ranks' losses should be the mean over all valid tokens",
            "divide each sum by the same number, so that nothing has to be cancelled",
        ),
        mistakes=(
            lambda: lambda sums, counts: [s / max(1, n) / len(sums) for s, n in zip(sums, counts)],
            lambda: lambda sums, counts: [s * len(sums) / sum(counts) for s in sums],
            lambda: lambda sums, counts: [sum(sums) / sum(counts)] * len(sums),
        ),
    ),
    3: Exercise(
        check=_number,
        hints=(
            "the formula is in the section on the library",
            "the world size counts all ranks, and the engine's own division has to be cancelled too",
        ),
        mistakes=(lambda: 120 / 6000 * 4 * 3, lambda: 120 / 6000 * 8, lambda: 120 / 6000),
    ),
}
