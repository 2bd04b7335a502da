"""Exercises of lesson 08: the loss from which a rank runs backward, and what two gradients have in common."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.base.config import FIELDS
from alstlib.base.reference import relative_error
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


def _mean(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=-100) / sp


def _all_ranks(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    """As for an engine that averages over all ranks."""
    return F.cross_entropy(logits, labels, reduction="sum") * sp * dp * accumulation / step_tokens


def _no_replicas(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") * accumulation / step_tokens


def _no_accumulation(logits: Tensor, labels: Tensor, step_tokens: int, sp: int, dp: int, accumulation: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") * dp / step_tokens


def _vector(grads):
    return np.concatenate([g.double().numpy().ravel() for g in grads])


def check_compare(compare):
    made = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (1, 1), (2, 3, 4)]
    base = [torch.randn(shape, generator=made) for shape in shapes]
    noise = [torch.randn(shape, generator=made) * size for shape, size in zip(shapes, (0.1, 3.0, 5.0, 0.5))]
    cases = {
        "gradients that are equal": base,
        "gradients of a quarter of the size": [g / 4 for g in base],
        "gradients of the other sign": [-g for g in base],
        "gradients with something else added to them": [g + extra for g, extra in zip(base, noise)],
        "gradients of which one parameter's is eight times too large": [8 * base[0], *base[1:]],
    }
    for what, given in cases.items():
        x, y = _vector(base), _vector(given)
        (factor,), *_ = np.linalg.lstsq(x[:, None], y, rcond=None)
        rest = np.linalg.norm(y - factor * x) / np.linalg.norm(y)
        got = compare([g.clone() for g in given], [g.clone() for g in base])
        assert isinstance(got, tuple), f"{got!r} is not a pair (factor, rest)"
        assert abs(got[0] - factor) < 1e-4 * abs(factor), f"{what}: factor {got[0]:.4f}, but {factor:.4f} is nearest"
        assert abs(got[1] - rest) < 1e-4, f"{what}: rest {got[1]:.4f}, but {rest:.4f} of them is left"
    return "a forgotten factor leaves no rest, and an error in one parameter leaves one"


def norms_only(a, b):
    x, y = (torch.cat([g.flatten() for g in grads]) for grads in (a, b))
    factor = x.norm() / y.norm()
    return float(factor), float((x - factor * y).norm() / x.norm())


def first_parameter_only(a, b):
    factor = (a[0] * b[0]).sum() / (b[0] * b[0]).sum()
    rest = sum((x - factor * y).square().sum() for x, y in zip(a, b)) / sum(x.square().sum() for x in a)
    return float(factor), float(rest.sqrt())


def wrong_way_round(a, b):
    x, y = (torch.cat([g.flatten() for g in grads]) for grads in (a, b))
    factor = x @ y / (x @ x)
    return float(factor), float((x - factor * y).norm() / x.norm())


def check_field(field_and_value):
    name, value = field_and_value()
    named = [field for field in FIELDS if name in (field, field.partition(".")[2])]  # with its group, or without
    assert named, f"RunConfig has no field {name!r}"
    own = named[0].partition(".")[2]
    paths = []
    for factor in (1.0, 4.0):
        weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
        setting = {"learning_rate": 0.1, "weight_decay": 0.0, "max_grad_norm": 0.0} | {own: value}
        adam = torch.optim.AdamW([weight], lr=setting["learning_rate"], weight_decay=setting["weight_decay"])
        for norm in (0.5, 2.0, 0.7, 1.9, 0.6, 1.1):
            weight.grad = factor * norm * torch.tensor([0.6, -0.8], dtype=torch.float64)
            if setting["max_grad_norm"]:
                torch.nn.utils.clip_grad_norm_([weight], setting["max_grad_norm"])
            adam.step()
        paths.append(weight.detach())
    apart = float((paths[1] - paths[0]).norm() / (paths[0] - 1).norm())
    assert apart > 1e-3, f"{name}={value}: the weights go the same way with one and with four times the gradient"
    return "clipping compares the gradient's norm with a number, and so its size counts"


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
        check=check_compare,
        hints=(
            "Make one long vector of all parameters' gradients first. Which f makes |a - f b| smallest?",
            "Set the derivative of |a - f b|^2 with respect to f to zero: two dot products remain.",
            "f is the dot product of a and b over the dot product of b with itself; then take the norm of a - f b.",
        ),
        mistakes=(norms_only, first_parameter_only, wrong_way_round),
    ),
    3: Exercise(
        check=check_field,
        hints=(
            "What in a training compares the size of the gradient with a number that somebody chose?",
            "Clipping. If no step is clipped, or every step of both trainings is, then nothing is seen.",
        ),
        mistakes=(
            lambda: ("optim.learning_rate", 0.01),
            lambda: ("optim.weight_decay", 0.1),
            lambda: ("optim.max_grad_norm", 100.0),
            lambda: ("max_grad_norm", 0.1),
            lambda: ("optim.clipping", 0.1),
        ),
    ),
}
