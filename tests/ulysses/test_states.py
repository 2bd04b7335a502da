"""Convolution and recurrences over ranks against loops over the tokens of the whole sequence, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from operators import gradients, leaf, nan_memory, randn, worst
from torch import Tensor, nn

from alstlib import SPContext, reference
from alstlib.kernels.spans import Offsets
from alstlib.ulysses.alltoall import Exchange
from alstlib.ulysses.convolution import causal_convolution
from alstlib.ulysses.states import GatedDeltaRule, Recurrence, SelectiveScan, decayed_attention, over_ranks

HEADS, KEYS, VALUES, WIDTH = 2, 3, 4, 4
TOLERANCE = 1e-11

Case = tuple[int, int, Sequence[int] | None]
"""Micro-batch rows, tokens of each, and offsets of documents."""
CASES: dict[str, Case] = {
    "whole": (2, 18, None),
    "documents inside, at and across the cuts": (1, 18, (0, 2, 6, 7, 17, 18)),
    "a document for each rank": (1, 18, (0, 6, 9, 12, 18)),
    "other documents in each row": (2, 12, (0, 1, 9, 12, 13, 17, 24)),
    "slices shorter than the convolution": (1, 6, (0, 1, 6)),
    "slices of one or two tokens, whole": (2, 6, None),
    "documents of four and five tokens, side by side": (
        2, 42, (0, 4, 9, 13, 16, 21, 25, 27, 30, 34, 39, 41, 42, 47, 52, 56, 60, 65, 70, 74, 78, 83, 84),
    ),
}  # fmt: skip


def gated_inputs(batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    q, k, v = (randn(batch, length, HEADS, d, seed=i) for i, d in enumerate((KEYS, KEYS, VALUES)))
    g, beta = (randn(batch, length, HEADS, seed=i) for i in (3, 4))
    return [q, nn.functional.normalize(k, dim=-1), v, -nn.functional.softplus(g), beta.sigmoid()], []


def gated(tokens: Sequence[Tensor], weights: Sequence[Tensor], **how: Any) -> Any:
    return reference.gated_delta_rule(*tokens, **how)


def mamba_inputs(batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    x, dt = randn(batch, length, HEADS, VALUES, seed=0), nn.functional.softplus(randn(batch, length, HEADS, seed=1))
    b, c = (randn(batch, length, 1, KEYS, seed=i) for i in (2, 3))
    return [x, dt, b, c], [-randn(HEADS, seed=4).exp(), randn(HEADS, seed=5)]


def mamba(tokens: Sequence[Tensor], weights: Sequence[Tensor], **how: Any) -> Any:
    x, dt, b, c = tokens
    a, d = weights
    return reference.mamba2(x, dt, a, b, c, d, **how)


CHANNELS = HEADS * VALUES


def mamba1_inputs(batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    x, dt = (randn(batch, length, CHANNELS, seed=i) for i in (0, 1))
    b, c = (randn(batch, length, KEYS, seed=i) for i in (2, 3))
    return [x, dt, b, c], [-randn(CHANNELS, KEYS, seed=4).exp(), randn(CHANNELS, seed=5), randn(CHANNELS, seed=6)]


def mamba1(tokens: Sequence[Tensor], weights: Sequence[Tensor], **how: Any) -> Any:
    x, dt, b, c = tokens
    a, d, bias = weights
    return reference.mamba1(x, nn.functional.softplus(dt + bias), a, b, c, d, **how)


SLOPES = torch.tensor([0.1, 0.7], dtype=torch.float64)


def lightning_inputs(batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    return [randn(batch, length, HEADS, d, seed=i) for i, d in enumerate((KEYS, KEYS, VALUES))], []


def lightning(tokens: Sequence[Tensor], weights: Sequence[Tensor], **how: Any) -> Any:
    return reference.lightning(*tokens, SLOPES, **how)


RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "gated delta rule": (gated_inputs, gated, 5), "Mamba-1": (mamba1_inputs, mamba1, 4),
    "Mamba-2": (mamba_inputs, mamba, 4), "lightning attention": (lightning_inputs, lightning, 3),
}  # fmt: skip


def upstream(name: str, batch: int, length: int) -> Tensor:
    return randn(batch, length, *([CHANNELS] if name == "Mamba-1" else [HEADS, VALUES]), seed=9)


def rule_of(name: str) -> Recurrence:
    _, plain, count = RULES[name]

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, state = plain(tensors[:count], tensors[count:])
        return out, state.detach()  # as the backward of mamba-ssm's kernel takes it

    def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
        return plain(tensors[:count], tensors[count:], initial_state=initial_state)

    if name == "lightning attention":
        return Recurrence(
            lambda q, k, v, initial_state: decayed_attention(q, k, v, SLOPES, 4, initial_state),
            lambda q, k, v: (-SLOPES * q.shape[1]).expand(q.shape[0], -1)[..., None, None],
        )
    if name == "Mamba-1":
        return SelectiveScan(scan, softplus=True)
    return (
        GatedDeltaRule(kernel)
        if name == "gated delta rule"
        else Recurrence(kernel, lambda x, dt, b, c, a, d: (dt * a).sum(1)[..., None, None])
    )


def recurrence(rank: int, world: int, name: str, case: Case, needs: Sequence[bool] | None = None) -> dict[str, Any]:
    """This rank's part against the oracle's on the whole sequence."""
    (batch, length, documents), (make, plain, count) = case, RULES[name]
    tokens, weights = make(batch, length)
    needs = needs or [True] * len([*tokens, *weights])
    whole = [leaf(t, needs=need) for t, need in zip([*tokens, *weights], needs)]
    dout = upstream(name, batch, length)
    want = gradients(lambda *ts: plain(ts[:count], ts[count:], documents=documents)[0], whole, dout)

    rows = slice(rank * length // world, (rank + 1) * length // world)
    exchange = Exchange(SPContext.create(world).sp_group)
    offsets = None if documents is None else Offsets(documents)
    own = [leaf(t[:, rows], needs=need) for t, need in zip(tokens, needs)] + whole[count:]
    with nan_memory():
        with torch.no_grad():
            first = over_ranks(rule_of(name), own[:count], own[count:], exchange, offsets)[0]
        sent = exchange.bytes_sent
        got = gradients(
            lambda *ts: over_ranks(rule_of(name), ts[:count], ts[count:], exchange, offsets)[0], own, dout[:, rows]
        )
    oracle = [None if t is None else t[:, rows] for t in want[: count + 1]]
    return {
        "error": worst(got[: count + 1], oracle, want[: count + 1]), "first": worst([first], [got[0]]),
        "weights": [None if t is None else t for t in got[count + 1 :]], "want": list(want[count + 1 :]), "sent": sent,
    }  # fmt: skip


def on_ranks(pools: Callable[[int], Any], world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [fn(0, 1, *args)] if world == 1 else pools(world)(fn, *args)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", RULES)
def test_a_state_goes_through_all_ranks(pools: Callable[[int], Any], name: str, case: Case, world: int) -> None:
    results = on_ranks(pools, world, recurrence, name, case)
    for rank, result in enumerate(results):
        assert result["error"] < TOLERANCE, (rank, result)
        assert result["first"] < TOLERANCE, (rank, result)
    for i, want in enumerate(results[0]["want"]):
        total = sum(result["weights"][i] for result in results)
        assert worst([total], [want]) < TOLERANCE, i


@pytest.mark.parametrize("name", RULES)
def test_gradients_that_nobody_needs_are_not_made(pools: Callable[[int], Any], name: str) -> None:
    for frozen in range(3):
        needs = [i != frozen for i in range(RULES[name][2] + len(RULES[name][0](1, 1)[1]))]
        for result in pools(3)(recurrence, name, CASES["documents inside, at and across the cuts"], needs):
            assert result["error"] < TOLERANCE, (frozen, result)


@pytest.mark.parametrize("name", RULES)
def test_what_ranks_send_does_not_grow_with_the_sequence(pools: Callable[[int], Any], name: str) -> None:
    short, long = (pools(2)(recurrence, name, (2, length, None))[0]["sent"] for length in (8, 48))
    matrix = {"gated delta rule": KEYS * KEYS, "Mamba-1": KEYS * VALUES}.get(name, 1)
    assert short == long == 2 * HEADS * (matrix + KEYS * VALUES) * 8


def convolution(rank: int, world: int, case: Case, width: int) -> dict[str, Any]:
    batch, length, documents = case
    x, weight, bias = (leaf(t) for t in (randn(batch, 5, length), randn(5, width, seed=1), randn(5, seed=2)))
    dout = randn(batch, 5, length, seed=3)
    want = gradients(lambda *ts: reference.causal_convolution(*ts, documents=documents), [x, weight, bias], dout)
    exchange = Exchange(SPContext.create(world).sp_group)
    offsets = None if documents is None else Offsets(documents)

    def over(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def convolve(x: Tensor) -> Tensor:
            out = nn.functional.conv1d(x, weight[:, None], bias, padding=width - 1, groups=5)
            return out[..., : x.shape[-1]]

        return causal_convolution(convolve, x, width, exchange, offsets)[0]

    rows = slice(rank * length // world, (rank + 1) * length // world)
    with nan_memory():
        got = gradients(over, [leaf(x[..., rows]), weight, bias], dout[..., rows])
    oracle, whole = [want[0][..., rows], want[1][..., rows]], list(want[:2])
    return {"error": worst(got[:2], oracle, whole), "weights": list(got[2:]), "want": list(want[2:])}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_convolution_sees_the_tokens_of_earlier_ranks(
    pools: Callable[[int], Any], case: Case, width: int, world: int
) -> None:
    results = on_ranks(pools, world, convolution, case, width)
    for rank, result in enumerate(results):
        assert result["error"] < TOLERANCE, (rank, result)
    for i, want in enumerate(results[0]["want"]):
        assert worst([sum(result["weights"][i] for result in results)], [want]) < TOLERANCE, i


CHUNKED: dict[str, Case] = {
    "whole": (2, 24, None),
    "packed": (1, 24, (0, 2, 6, 7, 17, 24)),
    "rows of their own": (2, 24, (0, 1, 24, 30, 47, 48)),
}


IN_CHUNKS = {
    **{f"{name}-{chunk}": (case, chunk) for name, case in CHUNKED.items() for chunk in (2, 4)},
    "side by side-12": ((1, 72, (0, 2, 6, 11, 15, 20, 25, 29, 33, 38, 42, 47, 49, 53, 58, 62, 67, 71, 72)), 12),
}


def in_chunks(rank: int, world: int, name: str, case: Case, chunk: int) -> dict[str, float]:
    """A recurrence, and a convolution of its first input, of this rank's rows of each chunk, one after the other."""
    (batch, length, documents), (make, plain, count) = case, RULES[name]
    tokens, weights = make(batch, length)
    size, width, dout = tokens[0][0, 0].numel(), 4, upstream(name, batch, length)
    filters = leaf(randn(size, width, seed=8))
    offsets, exchange = None if documents is None else Offsets(documents), Exchange(SPContext.create(world).sp_group)

    def uncut(filters: Tensor, *ts: Tensor) -> Tensor:
        x = ts[0].flatten(2).transpose(1, 2)
        x = reference.causal_convolution(x, filters, documents=documents).transpose(1, 2).view_as(ts[0])
        return plain((x, *ts[1:count]), ts[count:], documents=documents)[0]

    def over(filters: Tensor, *ts: Tensor) -> Tensor:
        def convolve(x: Tensor) -> Tensor:
            return nn.functional.conv1d(x, filters[:, None], padding=width - 1, groups=size)[..., : x.shape[-1]]

        outs, state, before = [], None, None
        for lo in range(0, ts[0].shape[1], chunk):
            part = [t[:, lo : lo + chunk] for t in ts[:count]]
            how: dict[str, Any] = {"first": lo * world, "length": length}
            x = part[0].flatten(2).transpose(1, 2)
            x, before = causal_convolution(convolve, x, width, exchange, offsets, start=before, **how)
            part[0] = x.transpose(1, 2).reshape_as(part[0])
            out, state = over_ranks(rule_of(name), part, ts[count:], exchange, offsets, start=state, **how)
            outs.append(out)
        return torch.cat(outs, 1)

    own = torch.cat(
        [torch.arange(length)[lo : lo + world * chunk].chunk(world)[rank] for lo in range(0, length, world * chunk)]
    )
    whole = [filters, *(leaf(t) for t in (*tokens, *weights))]
    want = gradients(uncut, whole, dout)
    with nan_memory():
        got = gradients(over, [filters, *(leaf(t[:, own]) for t in tokens), *whole[count + 1 :]], dout[:, own])
    sliced = slice(2, count + 2)
    return {
        "output": worst([got[0]], [want[0][:, own]], [want[0]]),
        "tokens": worst(got[sliced], [t[:, own] for t in want[sliced]], want[sliced]),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case, chunk", IN_CHUNKS.values(), ids=IN_CHUNKS)
@pytest.mark.parametrize("name", RULES)
def test_a_state_goes_from_chunk_to_chunk(
    pools: Callable[[int], Any], name: str, case: Case, chunk: int, world: int
) -> None:
    for rank, errors in enumerate(on_ranks(pools, world, in_chunks, name, case, chunk)):
        assert max(errors.values()) < TOLERANCE, (rank, errors)


def recomputed(rank: int, world: int, name: str, case: Case) -> dict[str, Any]:
    """Gradients of a recompute that knows what the first pass left, and what both have sent."""
    (batch, length, documents), (make, _, count) = case, RULES[name]
    tokens, weights = make(batch, length)
    offsets, exchange = None if documents is None else Offsets(documents), Exchange(SPContext.create(world).sp_group)
    rows, size = slice(rank * length // world, (rank + 1) * length // world), tokens[0][0, 0].numel()
    filters, dout = leaf(randn(size, WIDTH, seed=8)), upstream(name, batch, length)[:, rows]
    left: list[dict[str, Tensor]] = [{}, {}]

    def over(known: Sequence[dict[str, Tensor] | None], filters: Tensor, *ts: Tensor) -> Tensor:
        def convolve(x: Tensor) -> Tensor:
            return nn.functional.conv1d(x, filters[:, None], padding=WIDTH - 1, groups=size)[..., : x.shape[-1]]

        x = ts[0].flatten(2).transpose(1, 2)
        x = causal_convolution(convolve, x, WIDTH, exchange, offsets, known=known[0])[0].transpose(1, 2)
        tokens = (x.reshape_as(ts[0]), *ts[1:count])
        return over_ranks(rule_of(name), tokens, ts[count:], exchange, offsets, known=known[1])[0]

    inputs = [filters, *(leaf(t[:, rows]) for t in tokens), *(leaf(t) for t in weights)]
    want = gradients(lambda *ts: over([None, None], *ts), inputs, dout)
    plainly = exchange.bytes_sent
    with torch.no_grad():
        over(left, *inputs)
    sent = exchange.bytes_sent
    got = gradients(lambda *ts: over(left, *ts), inputs, dout)
    return {"error": worst(got, want), "first": sent - plainly, "again": exchange.bytes_sent - sent, "plain": plainly}


@pytest.mark.parametrize("case", ["whole", "documents inside, at and across the cuts"])
@pytest.mark.parametrize("name", RULES)
def test_a_recompute_exchanges_only_gradients(pools: Callable[[int], Any], name: str, case: str) -> None:
    for result in pools(3)(recomputed, name, CASES[case]):
        # Mamba-1's first pass scans no tokens that read its state: softplus of a longer tensor may round otherwise
        assert result["error"] <= (2e-15 if name == "Mamba-1" else 0.0), result
        assert result["first"] + result["again"] == result["plain"], result
        assert 0 < result["again"] <= result["first"]


def test_gradients_of_weights_are_summed_over_documents_in_fp32() -> None:
    """1,024 documents of one token, of which each contributes 1: a sum in bf16 ends at 256."""
    count = 1024
    x, step, b, c = (torch.ones(1, count, *shape, dtype=torch.bfloat16) for shape in ((1, 1), (1,), (1, 1), (1, 1)))
    a, d = leaf(-torch.ones(1, dtype=torch.bfloat16)), leaf(torch.zeros(1, dtype=torch.bfloat16))
    out, _ = over_ranks(rule_of("Mamba-2"), (x, step, b, c), (a, d), Exchange(), Offsets(range(count + 1)))
    out.sum().backward()
    torch.testing.assert_close(d.grad, d.new_full((1,), count), rtol=0, atol=0)


def test_a_second_backward_is_refused() -> None:
    tokens, _ = gated_inputs(1, 4)
    out, _ = over_ranks(rule_of("gated delta rule"), [leaf(t) for t in tokens], (), Exchange(), Offsets((0, 2, 4)))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()
