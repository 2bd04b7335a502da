"""Find the moments of a trace that can be a run's peak: those that are the largest at some plausible sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from alstlib.planner.moments import KERNEL, product
from alstlib.sizing import tile_for

Term = tuple[str, str]
"""(category, names): `("mlp", "M I")`. A moment is its bytes by term: coefficients of these products."""


def prune(
    found: Sequence[tuple[str, dict[Term, float]]],
    samples: int = 400,
    sizes: Callable[[random.Random], dict[str, float]] | None = None,
) -> list[tuple[str, dict[Term, float]]]:
    """The moments that are the largest at some of many plausible sizes."""
    draw = random.Random(0)
    points = [(sizes or plausible)(draw) for _ in range(samples)]
    products: dict[str, np.ndarray] = {}
    for _, terms in found:
        for _, names in terms:
            if names not in products:
                products[names] = np.array([product(names, point) for point in points])
    totals = np.array([sum(c * products[names] for (_, names), c in terms.items()) for _, terms in found])
    kernel = np.array([KERNEL in place for place, _ in found])
    best = {*totals.argmax(0).tolist()}
    if kernel.any():
        best |= {*np.where(kernel[:, None], totals, -1.0).argmax(0).tolist()}
    return [found[i] for i in sorted(best)]


def plausible(draw: random.Random) -> dict[str, float]:
    """Sizes as models and runs have them."""
    width, ranks, k = draw.choice([256, 1024, 2048, 4096, 8192]), 2 ** draw.randint(1, 6), draw.choice([1, 2, 4, 8])
    head, rows = draw.choice([64, 128, 256]), 2 ** draw.uniform(8, 20)
    heads = width / head * draw.choice([1, 1, 2])
    sizes = {
        "R": rows, "P": ranks, "H": width, "I": width * draw.uniform(1.5, 6),
        "V": draw.choice([8e3, 32e3, 128e3, 256e3]), "L": draw.choice([4, 16, 32, 80]), "d": head / 4, "k": k,
        "q": max(1.0, heads / ranks / k), "K": k, "m": ranks / k, "g": max(1.0, heads / ranks),
        "n": draw.choice([1, 2]), "C": min(rows, 2 ** draw.uniform(8, 15)),
    }  # fmt: skip
    device = draw.choice(["cuda", "cpu"])
    sizes |= {"a": sizes["q"] + 2, "b": sizes["q"] + 1}
    for name, of, element in (("M", "I", 2), ("U", "V", 4), ("N", "H", 4)):
        sizes[name] = min(rows, tile_for(int(sizes[of]), element, device))
    sizes["D"] = min(rows * ranks, tile_for(int(4 * sizes["d"] * sizes["g"]), 4, device))
    return sizes


def with_experts(draw: random.Random) -> dict[str, float]:
    """The same of decoders with experts, and of latent attention."""
    sizes = plausible(draw)
    sizes |= {"E": draw.choice([8, 32, 128, 256]), "T": draw.choice([2, 4, 8])}
    sizes["I"] = sizes["H"] * draw.choice([0.3, 0.4, 1.0, 3.5])
    sizes |= {"d": 48.0, "e": 32.0, "o": 64.0, "v": 64.0, "w": 64.0, "x": 256.0, "z": 53.3, "j": 512.0, "s": 576.0}
    sizes["y"] = 1536.0
    widest = int(sizes["T"] * max(2 * sizes["I"], sizes["H"]))
    sizes["M"] = min(sizes["R"], tile_for(widest, 2, draw.choice(["cuda", "cpu"])))
    return sizes
