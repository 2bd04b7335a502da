"""Tiled log-probabilities, and what a head finds of each token, against the whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from operators import EXACT, gradients, leaf, randn, strided, worst
from test_loss import HEADS, TRANSFORMS, VOCAB, WIDTH, inputs_of, labels_of, linear
from torch import Tensor, nn

from alstlib import reference
from alstlib.offload.ledger import Ledger
from alstlib.tiled.logits import LogitTransform, Statistics
from alstlib.tiled.logps import tiled_token_logps
from alstlib.tiled.loss import TiledHead, tiled_logits_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def oracle(labels: Tensor, transform: LogitTransform = TRANSFORMS["plain"], t: float = 1.0) -> Callable[..., Tensor]:
    return lambda hidden, weight, bias=None: reference.token_logps(
        hidden, weight, labels, bias, scale=transform.scale, softcap=transform.softcap, temperature=t
    )


def tiled(
    labels: Tensor, tile: int | None, transform: LogitTransform | None = None, t: float = 1.0
) -> Callable[..., Tensor]:
    return lambda hidden, weight, bias=None: tiled_token_logps(
        hidden, weight, labels, bias=bias, tile=tile, transform=transform, temperature=t
    )


def weights_of(labels: Tensor) -> Tensor:
    """An upstream gradient for each token, of both signs, some of them zero and some of tokens without a label."""
    upstream = randn(*labels.shape, seed=9)
    upstream.view(-1)[::3] = 0
    return upstream


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [Tensor.clone, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("tile", [1, 4, 12, 13, None])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (13,)], ids=str)
def test_logps_are_untiled(shape: tuple[int, ...], tile: int | None, layout: Any, dtype: torch.dtype) -> None:
    labels, inputs = layout(labels_of(*shape)), inputs_of(*shape, layout=layout)
    got = gradients(tiled(labels, tile), inputs, layout(weights_of(labels)), dtype)
    assert worst(got, gradients(oracle(labels), inputs, weights_of(labels))) < EXACT[dtype]
    assert all(t.dtype == dtype for t in got)
    assert not got[0][labels == -100].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_bias_scale_softcap_and_temperature(transform: LogitTransform, temperature: float) -> None:
    labels, inputs = labels_of(2, 13), inputs_of(2, 13, bias=True)
    want = gradients(oracle(labels, transform, temperature), inputs, weights_of(labels))
    got = gradients(tiled(labels, 5, transform, temperature), inputs, weights_of(labels))
    assert worst(got, want) < 1e-12


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_frozen_parts(frozen: tuple[int, ...]) -> None:
    labels, inputs = labels_of(2, 13), inputs_of(2, 13, bias=True)
    inputs = [leaf(t, needs=i not in frozen) for i, t in enumerate(inputs)]
    got = gradients(tiled(labels, 4, TRANSFORMS["both"]), inputs, weights_of(labels))
    assert worst(got, gradients(oracle(labels, TRANSFORMS["both"]), inputs, weights_of(labels))) < 1e-12
    assert [i for i, g in enumerate(got[1:]) if g is None] == list(frozen)


def test_two_stacked_layers_a_tied_weight_and_a_second_backward() -> None:
    """The head's weight is the body's too; the graph, which keeps no logits, can be walked twice."""
    labels = labels_of(2, 13)

    def net(logps: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: logps(torch.tanh(torch.tanh(x @ w.T) @ w), w)

    inputs = inputs_of(2, 13)
    want = gradients(net(oracle(labels)), inputs, weights_of(labels))
    assert worst(gradients(net(tiled(labels, 4)), inputs, weights_of(labels)), want) < 1e-12
    own = [leaf(t) for t in inputs]
    out = net(tiled(labels, 4))(*own)
    out.backward(weights_of(labels), retain_graph=True)
    out.backward(weights_of(labels))
    assert worst([t.grad for t in own], [2 * g for g in want[1:]]) < 1e-12


def test_bf16_does_not_lose_with_the_number_of_tiles() -> None:
    rows, transform = 512, TRANSFORMS["both"]
    labels = labels_of(1, rows)
    inputs = [leaf(t, torch.bfloat16) for t in inputs_of(1, rows, bias=True)]
    want = gradients(oracle(labels, transform), inputs, weights_of(labels), torch.float64)
    untiled = gradients(oracle(labels, transform), inputs, weights_of(labels))
    got = gradients(tiled(labels, rows // 64, transform), inputs, weights_of(labels))
    assert got[0].dtype == torch.float32
    for g, u, w in zip(got, untiled, want):
        assert g.dtype == u.dtype
        assert worst([g], [w]) <= 1.5 * worst([u], [w])


def test_autocast() -> None:
    """Products in bf16 in backward too, where autocast is off; gradients come back in fp32."""
    labels, inputs = labels_of(2, 13), [leaf(t, torch.float32) for t in inputs_of(2, 13, bias=True)]
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(tiled(labels, 4), inputs, weights_of(labels))
        theirs = gradients(oracle(labels), inputs, weights_of(labels))
    want = gradients(oracle(labels), inputs, weights_of(labels), torch.float64)
    for g, t, w in zip(got, theirs, want):
        assert g.dtype == torch.float32
        assert worst([g], [w]) <= 1.5 * worst([t], [w])
    assert torch.equal(got[1], got[1].bfloat16().float()), "a product ran in fp32"


def growth(fn: Callable[[], Tensor]) -> tuple[int, int]:
    """Peak bytes of forward, and of forward and backward."""
    with Ledger() as ledger:
        start = ledger.device_bytes
        out = fn()
        forward = ledger.device_peak - start
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        return forward, ledger.device_peak - start


def test_no_logits_of_more_than_a_tile() -> None:
    """In forward and in backward; a soft cap takes more of them, of the same tile."""
    rows, vocab, tile = 512, 1000, 16
    labels, logits = torch.arange(rows) % vocab, 4 * 512 * 1000
    hidden, weight = (leaf(randn(n, 8, seed=n), torch.float32) for n in (rows, vocab))
    for transform, copies in zip(TRANSFORMS.values(), (1, 2, 4, 4)):
        logps = lambda: tiled_token_logps(hidden, weight, labels, tile=tile, transform=transform)  # noqa: B023, E731
        forward, both = growth(logps)
        assert forward < (copies + 0.1) * 4 * tile * vocab
        assert both < 4 * (hidden.numel() + weight.numel()) + (copies + 0.2) * 4 * tile * vocab < logits / 2
        hidden.grad = weight.grad = None
    assert growth(lambda: oracle(labels)(hidden, weight))[1] > 2 * logits


def test_refusals() -> None:
    labels, inputs = labels_of(2, 13), inputs_of(2, 13)
    with pytest.raises(ValueError, match=r"labels \[2, 12\] must have hidden's shape"):
        tiled(labels_of(2, 12), 4)(*inputs)
    labels[1, 3] = VOCAB
    with pytest.raises(ValueError, match=f"label {VOCAB} is neither in the head's vocabulary"):
        tiled(labels, 4)(*inputs)
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match="must be above 0; 1"):
            tiled(labels_of(2, 13), 4, t=temperature)(*inputs)


# ----- statistics


def statistics_of(inputs: Sequence[Tensor], labels: Tensor, transform: LogitTransform) -> tuple[Tensor, ...]:
    return reference.head_statistics(transform(nn.functional.linear(*inputs)), labels)


def correct_for_some(labels: Tensor, inputs: Sequence[Tensor], transform: LogitTransform) -> Tensor:
    """Every other label is the largest logit."""
    best = transform(nn.functional.linear(*inputs)).argmax(-1)
    return torch.where((labels != -100) & (torch.arange(labels.numel()).view(labels.shape) % 2 == 0), best, labels)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("transform", [TRANSFORMS["plain"], TRANSFORMS["both"]], ids=["plain", "both"])
@pytest.mark.parametrize("tile", [1, 4, None])
@pytest.mark.parametrize("fn", [tiled_logits_loss, tiled_token_logps])
def test_statistics_of_each_token(fn: Any, tile: int | None, transform: LogitTransform, train: bool) -> None:
    inputs = [strided(t) for t in inputs_of(2, 13, bias=True)[:2]] + [randn(VOCAB, seed=2)]
    inputs[0] = inputs[0] * torch.linspace(0, 300, 13)[:, None].double()  # from even to all on one
    inputs = [leaf(t, needs=train) for t in inputs]
    labels = strided(correct_for_some(labels_of(2, 13), inputs, transform))
    found, plain = Statistics(), Statistics()
    out = fn(inputs[0], inputs[1], labels, bias=inputs[2], tile=tile, transform=transform, statistics=found)
    entropy, correct, mean = statistics_of(inputs, labels, transform)
    assert 0 < int(correct.sum()) < int((labels != -100).sum())
    assert worst([found.entropy, found.mean], [entropy, mean]) < 1e-12
    assert torch.equal(found.correct, correct)
    assert not found.entropy.requires_grad
    plain.of(transform(nn.functional.linear(*inputs)), labels)
    assert worst([plain.entropy, plain.mean], [entropy, mean]) < 1e-12
    assert torch.equal(plain.correct, correct)
    assert torch.equal(out, fn(*inputs[:2], labels, bias=inputs[2], tile=tile, transform=transform))


def test_of_equal_logits_the_first_is_the_largest() -> None:
    """As argmax has it: many logits in bf16 are equal."""
    found = Statistics().of(torch.zeros(3, VOCAB), torch.tensor([0, 1, -100]))
    assert found.correct.tolist() == [True, False, False]


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_heads(make: Any, temperature: float | None) -> None:
    """Log-probabilities of any head, its statistics, and its gradients, which they do not change."""
    hidden, labels, transform = randn(2, 13, WIDTH), labels_of(2, 13), TRANSFORMS["both"]
    results = []
    for tile in (4, None):
        head, x, found = make(), leaf(hidden, needs=True), Statistics() if tile else None
        if tile:
            out = TiledHead(head, tile, transform)(x, labels, temperature, found)
        else:
            logits = transform(head(x)) / (temperature or 1.0)
            want = reference.head_statistics(logits.detach(), labels)
            out = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)
            out = -out.sum() if temperature is None else out
        out.backward(weights_of(labels) if out.ndim else None)
        results.append([out, x.grad, *(p.grad for p in head.parameters())])
        if found is not None:
            entropy, correct, mean = found.entropy, found.correct, found.mean
    assert worst(*results) < 1e-12
    assert worst([entropy, mean], [want[0], want[2]]) < 1e-12
    assert torch.equal(correct, want[1])


def test_statistics_take_no_product_and_less_than_a_tile() -> None:
    """And nothing where nobody asks: the same calls as without them."""
    rows, vocab, tile = 512, 1000, 64
    labels = torch.arange(rows) % vocab
    hidden, weight = (leaf(randn(n, 8, seed=n), torch.float32) for n in (rows, vocab))

    def run(found: Statistics | None) -> tuple[int, int]:
        with torch.profiler.profile() as profile:
            tiled_logits_loss(hidden, weight, labels, tile=tile, statistics=found)
        products = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm"))
        return products, growth(lambda: tiled_logits_loss(hidden, weight, labels, tile=tile, statistics=found))[0]

    (products, without), (products_too, peak) = run(None), run(Statistics())
    assert products == products_too > 0
    assert peak - without < 4 * tile * vocab / 2


def test_a_fused_loss_has_none() -> None:
    with pytest.raises(ValueError, match="Liger's fused loss has no statistics: use liger_loss=False"):
        tiled_logits_loss(*inputs_of(2, 13), labels_of(2, 13), liger=True, statistics=Statistics())
    assert TiledHead(linear(), liger=True)(randn(2, 13, WIDTH), labels_of(2, 13), None, Statistics()).ndim == 0
