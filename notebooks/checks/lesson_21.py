"""Lesson 21: the pair of a slice of Mamba-2, the scan of backward, and when state passing sends less."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alstlib.base import reference

from . import Exercise


def mamba2_pair(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(21)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for tokens, heads, width, states in ((1, 1, 1, 1), (2, 3, 4, 5), (13, 2, 3, 7)):
        case = f"{tokens} tokens, {heads} heads, P = {width}, N = {states}"
        x, dt, A, B = (
            made(tokens, heads, width),
            made(tokens, heads).exp() / 4,
            -made(heads).exp(),
            made(tokens, states),
        )
        m, u = function(x.clone(), dt.clone(), A.clone(), B.clone())
        for name, got, shape in (("m", m, (heads,)), ("u", u, (heads, width, states))):
            assert tuple(got.shape) == shape, f"{case}: {name} has the shape {list(got.shape)}, not {list(shape)}"
        for start, what in (
            (torch.zeros(heads, width, states, dtype=x.dtype), "zeros"),
            (made(heads, width, states), "some state"),
        ):
            group = B[None, :, None]
            want = reference.mamba2(
                x[None], dt[None], A, group, torch.zeros_like(group), torch.zeros_like(A), start[None]
            )
            error = reference.relative_error(m[:, None, None] * start + u, want[1][0])
            assert error < 1e-10, f"{case}: from {what} the state differs by {error:.1g} from the loop over tokens"
    return "one token to thirteen, from zeros and from another state"


def _no_decay_after(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    return (dt * A).sum(0).exp(), torch.einsum("sh,shp,sn->hpn", dt, x, B)


def _decays_itself(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    left = (dt * A).flip(0).cumsum(0).flip(0).exp()
    return (dt * A).sum(0).exp(), torch.einsum("sh,shp,sn->hpn", left * dt, x, B)


def _keeps_all(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(*x.shape[1:], B.shape[1], dtype=x.dtype)[None]
    group = B[None, :, None]
    u = reference.mamba2(x[None], dt[None], A, group, torch.zeros_like(group), torch.zeros_like(A), zeros)[1][0]
    return torch.ones_like(A), u


def leaving(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(22)
    for ranks, heads, keys, values in ((1, 1, 2, 3), (2, 2, 3, 3), (5, 1, 4, 2)):
        case = f"{ranks} ranks, {heads} heads, K = {keys}, V = {values}"
        ms = [torch.randn(heads, keys, keys, generator=generator, dtype=torch.float64) for _ in range(ranks)]
        ws = [torch.randn(heads, keys, values, generator=generator, dtype=torch.float64) for _ in range(ranks)]
        state = torch.zeros(heads, keys, values, dtype=torch.float64, requires_grad=True)
        states, loss = [], torch.zeros((), dtype=torch.float64)
        for m, w in zip(ms, ws):  # a loss whose gradient at each rank's incoming state is w
            loss, state = loss + (w * state).sum(), m @ state
            states.append(state)
        want = torch.autograd.grad(loss, states, allow_unused=True, materialize_grads=True)
        got = function([m.clone() for m in ms], [w.clone() for w in ws])
        assert len(got) == ranks, f"{case}: one gradient for each rank is wanted, not {len(got)}"
        assert not got[-1].any(), f"{case}: nothing follows the last rank: the gradient of its last state is zero"
        for r, (mine, right) in enumerate(zip(got[:-1], want)):
            error = reference.relative_error(mine, right)
            assert error < 1e-10, f"{case}: the gradient of the state that leaves rank {r} is off by {error:.1g}"
    return "one rank to five, with matrices that do not commute"


def _scan(ms: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
    found = [torch.zeros_like(ws[-1])]
    for m, w in reversed(list(zip(ms, ws))[1:]):
        found.insert(0, m.mT @ found[0] + w)
    return found


def _not_transposed(ms: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
    return _scan([m.mT for m in ms], ws)


def _own_rank(ms: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
    return _scan([ms[0], *ms], [ws[0], *ws])[:-1]


def _forward_order(ms: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
    return _scan(ms[::-1], ws[::-1])


def crossing(answer: Callable[[], Any]) -> str:
    def less(length: int) -> bool:
        ranks, keys, values = 16, 16 * 128, 32 * 128
        states = ranks * 32 * 128 * 256 * 4
        return states < (2 * keys + 2 * values + 64) * length / ranks * 2

    length = answer()
    assert length in [2**n for n in range(31)], f"{length} is no power of two"
    assert less(length), f"with {length:,} tokens state passing sends more"
    assert not less(length // 2), f"with {length // 2:,} tokens it sends less already"
    return f"that is {length // 16:,} tokens for each rank"


EXERCISES = {
    1: Exercise(
        check=mamba2_pair,
        hints=(
            "M is the product of all tokens' decays: one number for each head.",
            "What token s adds to the state decays at each token after s, and not at s itself.",
            "Sum over the tokens: exp(the sum of dt * A over the tokens after s) times dt times x times B. "
            "The sum over the later tokens is the total minus cumsum.",
        ),
        mistakes=(_no_decay_after, _decays_itself, _keeps_all),
    ),
    2: Exercise(
        check=leaving,
        hints=(
            "The gradient of the state that leaves rank r is that of the state that enters rank r + 1.",
            "Begin with zeros for the last rank, and go down. What you need at rank r is the pair of rank r + 1.",
            "For r from the last but one to 0: the transposed matrix of rank r + 1 times the gradient that leaves "
            "rank r + 1, plus the own part of rank r + 1.",
        ),
        mistakes=(_not_transposed, _own_rank, _forward_order),
    ),
    3: Exercise(
        check=crossing,
        hints=(
            "`mebibytes(length, P=16)` gives both numbers; try powers of two.",
            "State passing sends (P - 1) times a constant, and the exchange of heads (P - 1) / P^2 times the length.",
        ),
        mistakes=(lambda: 16384, lambda: 2**20, lambda: 30_000),
    ),
}
