"""The verdict on a cell: exact, or wrong by how much, and the first module that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.planner.measure.verify import errors_of, last_run, of_first_pass

EXACT = 1e-5
"""Largest relative error in fp32."""
ROUNDING = 3.0
"""A larger error is rounding if it is at most this many times that of plain transformers: of its fp32 against fp64, of
its bf16 against fp32."""
PEFT = "base_model.model."
"""What comes before the names of a model with adapters."""
NUMBERS = {"loss": "loss", "eval_loss": "evaluation loss", "grad_norm": "gradient norm"}
Found = Mapping[str, Any]


def errors(got: Found, want: Found) -> dict[str, float]:
    """The largest relative error of each quantity that both have."""
    found: dict[str, float] = {}
    for name, title in NUMBERS.items():
        mine, theirs = got.get(name) or [], want.get(name) or []
        if theirs and None not in mine:
            found[title] = max((apart(a, b) for a, b in zip(mine, theirs)), default=math.inf)
            found[title] = found[title] if len(mine) == len(theirs) else math.inf
    if want["gradients"]:
        found["gradient"] = max(gradient_errors(got, want).values())
    found["weights"] = math.inf
    if want["weights"].keys() <= got["weights"].keys():
        mine, theirs = (torch.cat([x["weights"][n].double().flatten() for n in want["weights"]]) for x in (got, want))
        found["weights"] = float((mine - theirs).norm() / theirs.norm())
    return {name: math.inf if math.isnan(error) else error for name, error in found.items()}


def apart(got: float, want: float) -> float:
    """The relative error; infinite if there is no number."""
    return math.inf if math.isnan(got) else abs(got - want) / max(abs(want), 1e-9)


def gradient_errors(got: Found, want: Found) -> dict[str, float]:
    zeros = {n: torch.zeros_like(g) for n, g in want["gradients"].items()}
    return errors_of({**zeros, **got["gradients"]}, want["gradients"])


def verdict(ranks: Sequence[Found], want: Found, allowed: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What a stack's ranks found, against plain transformers.

    Args:
        allowed: how large an error of a quantity may be; None: EXACT.
    """
    by_rank = [errors(rank, want) for rank in ranks]
    worst = {name: max(one.get(name, 0.0) for one in by_rank) for name in by_rank[0]}
    wrong = {n: e for n, e in worst.items() if not e <= max(EXACT, (allowed or {}).get(n, 0.0))}
    if not wrong:
        return {"result": "exact", "errors": worst}
    return {"result": "wrong", "errors": worst, "wrong": wrong, **first(ranks, want), **_scale(ranks[0], want)}


def _scale(got: Found, want: Found) -> dict[str, Any]:
    """The number by which all gradients are too large, if there is one."""
    pairs = [(got["gradients"][n], w) for n, w in want["gradients"].items() if n in got["gradients"] and w.any()]
    if not pairs:
        return {}
    factor = _factor([g for g, _ in pairs], [w for _, w in pairs])
    apart = max(float((g - factor * w).norm() / w.norm()) for g, w in pairs) / max(abs(factor), 1e-9)
    return {"times": factor} if apart < 1e-3 and abs(factor - 1) > 1e-3 else {}


def _factor(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    g, w = (torch.cat([t.double().flatten() for t in some]) for some in (got, want))
    return float(g @ w / (w @ w).clamp_min(1e-60))


# ----- what differs first


def first(ranks: Sequence[Found], want: Found) -> dict[str, str]:
    """What differs first: what goes into a module or comes out of it; or the gradient of that, in the order of
    backward; or the gradient of a weight, whose module is the last to run of those with wrong ones.

    Ranks may see every gradient times a common number, which their engine puts right: only the proportions count."""
    seen = _Slices(ranks, want)
    for name in want["values"]:
        pair = seen.pair("values", name)
        if pair and _error(*pair) > _rounding(pair[0], 10 * EXACT):
            return {"first": name}
    factor = None
    for name in reversed(want["values"]):
        pair = seen.pair("value_gradients", name)
        if not pair or not pair[1].any():
            continue
        before = "the loss: " if factor is None else ""
        factor = _factor(*([t] for t in pair)) if factor is None else factor
        if not factor or _error(pair[0] / factor, pair[1]) > _rounding(pair[0], 100 * EXACT):
            return {"first": f"{before}the gradient of {name}"}
    wrong = [n for n, e in gradient_errors(ranks[0], want).items() if e > EXACT] if want["gradients"] else []
    if wrong and len(wrong) < len(want["gradients"]):
        done = (n.removeprefix("the output of ") for n in want["values"] if n.startswith("the output of "))
        order = {name: place for place, name in enumerate(done)}
        return {"first": f"the gradient of {last_run((n.removeprefix(PEFT) for n in wrong), order)}"}
    return {"first": "no module: how gradients are summed over ranks or batches, or what is reported"}


def _rounding(t: Tensor, in_fp32: float) -> float:
    """An error that rounding may have. In bf16, which has 8 bits, roundings of all layers add up to some percent, and a
    module that is less wrong is found by the same case in fp32."""
    return 0.05 if t.dtype == torch.bfloat16 else in_fp32


def _error(got: Tensor | None, want: Tensor) -> float:
    if got is None or got.shape != want.shape:
        return math.inf
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


class _Slices:
    """Puts the rows of all ranks together, in the order in which the embedding's are those of plain transformers."""

    def __init__(self, ranks: Sequence[Found], want: Found) -> None:
        self.ranks, self.want = ranks, want
        embedded = next(name for name in want["values"] if name.startswith("the output of"))
        self.length = want.get("tokens") or len(want["values"][embedded][0])
        self.rows = [len(rank["values"].get(embedded, [[]])[0]) for rank in ranks]
        wanted: Any = of_first_pass(want["values"][embedded], self.length)
        self.order = min((_in_slices, _head_and_tail), key=lambda order: _error(self._of_all(embedded, order), wanted))

    def _of_all(self, name: str, order: Any, what: str = "values") -> Any:
        parts = [of_first_pass(rank[what].get(name, []), rows) for rank, rows in zip(self.ranks, self.rows)]
        if any(part is None for part in parts):
            return None
        whole: Any = order(parts) if self.rows[0] < self.length else parts[0]
        return whole[: self.length]

    def pair(self, what: str, name: str) -> tuple[Tensor, Tensor] | None:
        """A module's rows in the stack and in plain transformers, where they can be compared."""
        wanted = of_first_pass(self.want[what].get(name, []), self.length)
        if what == "value_gradients" and any(len(rank[what].get(name, ())) > 1 for rank in self.ranks):
            return None  # tiles, in the order of their recompute
        got = None if wanted is None else self._of_all(name, self.order, what)
        return (got, wanted) if got is not None and wanted is not None and got.shape == wanted.shape else None


def _in_slices(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


def _head_and_tail(parts: list[Tensor]) -> Tensor:
    halves = [part.chunk(2) for part in parts]
    return torch.cat([*(head for head, *_ in halves), *(tail for *_, tail in reversed(halves))])
