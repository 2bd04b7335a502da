"""Lesson 10: what two trainings' gradients have in common."""

import numpy as np
import torch

from alstlib.config import FIELDS
from checks import Exercise


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


def check_tokens(tokens):
    for given in ((512, 2, 1, 2), (300_000, 4, 1, 1), (96, 3, 5, 7), (640, 1, 8, 1)):
        seq_len, sp, dp, accumulation = given
        ranks = [torch.arange(seq_len).chunk(sp) for _ in range(dp)]
        held = len(ranks[0][0])
        seen = sum(len(part) for _ in range(accumulation) for group in ranks for part in group)
        assert tuple(tokens(*given)) == (held, seen), (
            f"seq_len={seq_len}, sp={sp}, dp={dp}, accumulation={accumulation}: {tuple(tokens(*given))}; "
            "count the tokens of all ranks in all micro-batches, each token of a sample once"
        )
    return "sequence parallelism changes who holds a token, and not how many tokens a step sees"


def every_rank_sees_a_sample(seq_len, sp, dp, accumulation):
    return seq_len // sp, seq_len * sp * dp * accumulation


def one_rank_for_all(seq_len, sp, dp, accumulation):
    return seq_len // sp, seq_len // sp * dp * accumulation


def not_cut(seq_len, sp, dp, accumulation):
    return seq_len, seq_len * dp * accumulation


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
        check=check_compare,
        hints=(
            "Make one long vector of all parameters' gradients first. Which f makes |a - f b| smallest?",
            "Set the derivative of |a - f b|^2 with respect to f to zero: two dot products remain.",
            "f is the dot product of a and b over the dot product of b with itself; then take the norm of a - f b.",
        ),
        mistakes=(norms_only, first_parameter_only, wrong_way_round),
    ),
    2: Exercise(
        check=check_tokens,
        hints=(
            "The sp ranks of a group share one sample.",
            "In one micro-batch, each of the dp groups sees one whole sample, however many ranks the group has.",
        ),
        mistakes=(every_rank_sees_a_sample, one_rank_for_all, not_cut),
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
