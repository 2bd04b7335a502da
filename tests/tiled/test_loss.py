"""The tiled loss and head against the untiled cross-entropy: any tile, any labels, any upstream gradient."""

import functools

import pytest
import torch
from cases import same
from operators import (
    DTYPES,
    LAYOUTS,
    Operations,
    agree,
    error_of,
    gradients,
    leaf,
    logps_of,
    of_module,
    peaks,
    randn,
    randomised,
    strided,
    worst,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alstlib.base import reference
from alstlib.tiled.logits import LogitTransform, Statistics
from alstlib.tiled.loss import TiledHead, tiled_logits_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

WIDTH, VOCAB = 6, 11
TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.3),
    "softcap": LogitTransform(softcap=2.0),
    "both": LogitTransform(scale=3.0, softcap=2.5),
}


def labels_of(*shape):
    """Labels up to the vocabulary's last; a run of masked ones, and the last masked, as a shift leaves it."""
    labels = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(3))
    flat = labels.view(-1)
    flat[:1] = VOCAB - 1
    flat[1 : 1 + flat.numel() // 3] = -100
    flat[1:][-1:] = -100
    return labels


def inputs_of(*shape, bias=False, layout=Tensor.clone):
    """hidden, weight and, if asked, bias."""
    tensors = [layout(randn(*shape, WIDTH)), layout(randn(VOCAB, WIDTH, seed=1)), *([randn(VOCAB, seed=2)] * bias)]
    return [t.requires_grad_() for t in tensors]


LOSS = (lambda *given, **how: -reference.token_logps(*given, **how).sum(), tiled_logits_loss)
LOGPS = (reference.token_logps, functools.partial(tiled_logits_loss, temperature=1.0))
BOTH = pytest.mark.parametrize("kind", [LOSS, LOGPS], ids=["loss", "logps"])
"""The oracle and the operator: the loss, and the log-probability of each label."""
PLAIN, ALL = TRANSFORMS["plain"], TRANSFORMS["both"]
TRANSFORMED = pytest.mark.parametrize("transform", [PLAIN, ALL], ids=["plain", "both"])


def oracle(labels, transform=PLAIN, kind=LOSS):
    how = {"scale": transform.scale, "softcap": transform.softcap}
    return lambda hidden, weight, bias=None: kind[0](hidden, weight, labels, bias, **how)


def tiled(labels, tile, transform=None, kind=LOSS, **how):
    how |= {"tile": tile, "transform": transform}
    return lambda hidden, weight, bias=None: kind[1](hidden, weight, labels, bias=bias, **how)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def upstream_of(kind, labels):
    """Of the loss; or of each token, of both signs, some of them zero and some of tokens without a label."""
    if kind is LOSS:
        return number(0.25)
    upstream = randn(*labels.shape, seed=9)
    upstream.view(-1)[::3] = 0
    return upstream


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("tile", [1, 4, 12, 13, 64, None])
@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (1, 13), (2, 7), (13,)], ids=str)
@BOTH
def test_tiles_are_untiled(kind, shape, tile, layout, dtype):
    """Defects 2 and 4: in the reference the weight's gradient does not scale with the upstream one, the mean is that of
    tiles' means, and for lengths that tiles do not divide a gradient is never added."""
    labels = layout(labels_of(*shape))
    upstream, inputs = layout(upstream_of(kind, labels)), inputs_of(*shape, layout=layout)
    got = agree(tiled(labels, tile, kind=kind), oracle(labels, kind=kind), inputs, upstream, dtype)
    assert kind is LOSS or not got[0][labels == -100].any()


def test_logits_of_hundreds_do_not_overflow():
    labels, inputs = labels_of(1, 13), [leaf(t * 100) for t in inputs_of(1, 13)]
    got = gradients(tiled(labels, 4), inputs, number(1.0), torch.float32)
    assert float(got[0]) > 1e4
    assert worst(got, gradients(oracle(labels), inputs, number(1.0))) < 1e-5


@BOTH
def test_within_a_checkpoint_of_pytorch(kind):
    """Which lets what is saved be unpacked once."""
    given, labels = inputs_of(7), labels_of(7)
    plain, made = kind[1](*given, labels), checkpoint(kind[1], *given, labels, use_reentrant=False)
    assert same(*(torch.autograd.grad(out.sum(), given) for out in (made, plain)))


@BOTH
def test_a_second_backward(kind):
    """The graph of log-probabilities, which keeps no logits, can be walked twice; that of a loss holds its gradients
    once."""
    labels, inputs = labels_of(2, 13), inputs_of(2, 13)
    out = tiled(labels, 4, kind=kind)(*inputs)
    upstream = torch.ones_like(out)
    out.backward(upstream, retain_graph=True)
    if kind is LOSS:
        with pytest.raises(RuntimeError, match="backward ran a second time, but its gradients are freed"):
            out.backward(upstream)
    else:
        once = [t.grad.clone() for t in inputs]
        out.backward(upstream)
        assert worst([t.grad for t in inputs], [2 * g for g in once]) < 1e-12


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("autocast", [False, True])
@TRANSFORMED
@BOTH
def test_bf16_does_not_lose_with_the_number_of_tiles(kind, transform, autocast, device):
    """The weight's gradient over 64 tiles is as good as that of one product. Under autocast weights are in fp32 and
    products in bf16, in backward too, where autocast is off; gradients come back in fp32."""
    rows, dtype = 1024, torch.float32 if autocast else torch.bfloat16
    labels = labels_of(1, rows).to(device)
    inputs = [leaf(t.to(device), dtype) for t in inputs_of(1, rows, bias=True)]
    upstream, theirs = upstream_of(kind, labels).to(device), oracle(labels, transform, kind)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        got = gradients(tiled(labels, rows // 64, transform, kind), inputs, upstream)
        untiled = gradients(theirs, inputs, upstream)
    assert [g.dtype for g in got] == [torch.float32, *[dtype] * 3]
    for i, (g, u, w) in enumerate(zip(got, untiled, gradients(theirs, inputs, upstream, torch.float64))):
        assert worst([g], [w]) <= (2e-3 if kind is LOSS and i == 0 else 1.5 * worst([u], [w])), i
    assert not autocast or torch.equal(got[1], got[1].bfloat16().float()), "a product ran in fp32"


@pytest.mark.gpu
@TRANSFORMED
@BOTH
def test_gpu_bf16(kind, transform):
    test_bf16_does_not_lose_with_the_number_of_tiles(kind, transform, False, "cuda")


@BOTH
def test_no_logits_of_the_whole_sequence(kind):
    """Neither forward nor backward makes anything of [tokens, V], but a few tiles of it; the untiled loss shows
    that the reading can tell."""
    rows, vocab, tile = 512, 1000, 16
    labels, one = torch.arange(rows) % vocab, 4 * tile * vocab
    inputs = [leaf(randn(n, 8, seed=n), torch.float32) for n in (rows, vocab)]
    for transform, copies in zip(TRANSFORMS.values(), (1, 2, 4, 4)):
        forward, both = peaks(tiled(labels, tile, transform, kind), *inputs)
        assert kind is LOSS or forward < (copies + 0.1) * one
        copies = 8 if kind is LOSS else copies + 0.2
        assert both < sum(t.nbytes for t in inputs) + copies * one < 4 * rows * vocab / 2
        for t in inputs:
            t.grad = None
    assert peaks(oracle(labels, kind=kind), *inputs)[1] > 2 * 4 * rows * vocab


@BOTH
def test_refusals(kind):
    inputs, labels = inputs_of(2, 13), labels_of(2, 13)

    def said(labels, tile=4, **how):
        return error_of(tiled(labels, tile, kind=kind, **how), *inputs)

    assert "labels [2, 12] must have hidden's shape [2, 13]" in said(labels[:, 1:])
    for tile in (0, 2.5, True):
        assert "must be a whole number of tokens of at least 1" in said(labels, tile)
    for temperature in (0.0, -1.0) if kind is LOGPS else ():
        assert "must be above 0; 1" in said(labels, temperature=temperature)
    for label in (VOCAB, VOCAB + 5, -1, -99):
        labels[1, 3] = label
        assert f"label {label} is neither in the head's vocabulary of {VOCAB} nor -100" in said(labels)


# ----- TiledHead


def linear(bias=False):
    return randomised(nn.Linear(WIDTH, VOCAB, bias=bias))


class Deep(nn.Module):
    """A head that is more than a Linear."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCAB)
        randomised(self)

    def forward(self, hidden):
        return self.decoder(self.norm(torch.tanh(self.dense(hidden))))


def lora():
    from peft import LoraConfig, inject_adapter_in_model

    parent = nn.ModuleDict({"head": nn.Linear(WIDTH, VOCAB, bias=False)})
    return randomised(inject_adapter_in_model(LoraConfig(r=2, target_modules=["head"]), parent)["head"])


class PlainHead(nn.Module):
    def __init__(self, head, transform):
        super().__init__()
        self.head, self.transform = head, transform

    def forward(self, hidden, labels, temperature=None):
        logps = logps_of(self.transform(self.head(hidden)) / (temperature or 1.0), labels)
        return -logps.sum() if temperature is None else logps


HEADS = {"linear": linear, "linear with bias": lambda: linear(True), "deep": Deep, "lora": lora}
ANY_HEAD = pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("frozen", ["", "body", "head"])
@pytest.mark.parametrize("tile", [1, 4, None])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@ANY_HEAD
def test_head_is_untiled(make, transform, tile, frozen, temperature):
    """The loss or log-probabilities of any head, and its statistics, which change nothing. Of a LoRA head, too, each
    trained weight gets its gradient, and the frozen ones get none (defect 5). A frozen body (hidden needs no gradient)
    with a trainable head raises in the reference (defect 3)."""
    hidden, labels = randn(2, 13, WIDTH).requires_grad_(frozen != "body"), strided(labels_of(2, 13))
    found = Statistics()
    plain, head = make(), make()
    for module in (plain, head) if frozen == "head" else ():
        module.requires_grad_(False)
    upstream = upstream_of(LOGPS if temperature else LOSS, labels)
    want = of_module(PlainHead(plain, transform), hidden, upstream, labels, temperature)
    for statistics in (None, found):
        more = (labels, temperature, statistics)
        assert worst(of_module(TiledHead(head, tile, transform), hidden, upstream, *more), want) < 1e-12
    assert (want[1] is None) is (frozen == "body")
    logits = transform(plain(hidden.detach())) / (temperature or 1.0)
    entropy, correct, mean = reference.head_statistics(logits, labels)
    assert worst([found.entropy, found.mean], [entropy, mean]) < 1e-12
    assert torch.equal(found.correct, correct)


@ANY_HEAD
def test_head_without_labels_gives_logits(make):
    head, hidden = make(), randn(2, 13, WIDTH)
    assert torch.equal(TiledHead(head, 4, ALL)(hidden), head(hidden))  # the transform is the model's, which still runs


def test_evaluation_makes_no_gradients():
    """Autograd reports inputs that require a gradient under no_grad too: the loss must not take its word for it."""
    inputs = [randn(n, 8).requires_grad_() for n in (150, 600)]
    ours, found = tiled(torch.zeros(150, dtype=torch.long), 10), []
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            found.append((peaks(ours, *inputs)[0], float(ours(*inputs))))
    (peak, loss), (peak_of_training, loss_of_training) = found
    assert loss == loss_of_training
    assert peak_of_training - peak >= sum(t.nbytes for t in inputs)


# ----- statistics of each token, whose values `test_head_is_untiled` has


def test_of_equal_logits_the_first_is_the_largest():
    """As argmax has it: many logits in bf16 are equal."""
    found = Statistics().of(torch.zeros(3, VOCAB), torch.tensor([0, 1, -100]))
    assert found.correct.tolist() == [True, False, False]


def test_statistics_take_no_product_and_less_than_a_tile():
    """And nothing where nobody asks: the same calls as without them."""
    rows, vocab, tile = 512, 1000, 64
    labels = torch.arange(rows) % vocab
    hidden, weight = (leaf(randn(n, 8, seed=n), torch.float32) for n in (rows, vocab))

    def run(found):
        loss = functools.partial(tiled_logits_loss, hidden, weight, labels, tile=tile, statistics=found)
        with Operations() as operations:
            loss()
        return operations.multiplications, peaks(loss)[0]

    (products, without), (products_too, peak) = run(None), run(Statistics())
    assert products == products_too > 0
    assert peak - without < 4 * tile * vocab / 2


@pytest.mark.parametrize("change", ["hook", "forward"])
def test_a_head_that_a_user_has_changed_is_called(change):
    """A hook that changes the logits, or the input, counts, and so does another forward of this one module."""
    head, labels = nn.Linear(WIDTH, VOCAB, dtype=torch.float64), labels_of(2, 7)
    if change == "hook":
        head.register_forward_hook(lambda module, args, out: out * 3.0)
        head.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    else:
        head.forward = lambda x: nn.functional.linear(x + 0.5, head.weight, head.bias) * 3.0
    x = randn(2, 7, WIDTH).requires_grad_()
    losses = (made(x, labels) for made in (TiledHead(head, 3), PlainHead(head, PLAIN)))
    assert worst(*([loss, *torch.autograd.grad(loss, [x, *head.parameters()])] for loss in losses)) < 1e-12
