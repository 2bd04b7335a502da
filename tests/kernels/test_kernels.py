"""Every kernel's output, logsumexp and gradients against the oracle, and how a kernel is chosen."""

import importlib.machinery
import importlib.util
import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch
import yaml
from cases import check_refused, lines_of, same
from operators import EXACT, attend, error_of, exchanged, leaf, peaks, randn, worst
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from alstlib.base import reference
from alstlib.base.options import Kernel
from alstlib.kernels import attention
from alstlib.kernels.backends import BACKENDS, PACKAGES, choose_backend
from alstlib.kernels.paged import HeadPart, sinks_backward
from alstlib.kernels.rule import Rule
from alstlib.ulysses.attention import delta_of

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

ON_CPU = ["cpu", "eager"]
KERNELS_HERE = pytest.mark.parametrize("name", ON_CPU)
# B, H, K, S, D, documents
SHAPES = yaml.safe_load("""
one token: [1, 2, 1, 1, 8, null]
mha, odd: [1, 3, 3, 37, 8, null]
gqa, odd: [1, 4, 2, 37, 8, null]
mqa, odd: [1, 4, 1, 37, 8, null]
batch 2: [2, 4, 2, 13, 8, null]
more than a block: [1, 2, 1, 531, 8, null]
one-token documents: [1, 4, 2, 37, 8, [0, 1, 6, 7, 20, 36, 37]]
documents of batch 2: [2, 4, 2, 13, 8, [0, 4, 12, 13, 14, 20, 26]]
documents at row starts: [2, 4, 2, 13, 8, [0, 13, 26]]
document over a row's end: [2, 4, 1, 13, 8, [0, 10, 16, 26]]
empty documents: [1, 2, 2, 13, 8, [0, 0, 5, 5, 13]]
""")


def make(shape, dtype, buffer=False, width=None):
    """q, k, v (of another width, if asked) and dout; as they come out of an all-to-all where they share a `buffer`."""
    b, h, kv, s, d, _ = shape
    sizes = [(h, d), (kv, d), (kv, width or d), (h, width or d)]
    made = [randn(b, n, s, wide, seed=i, dtype=dtype) for i, (n, wide) in enumerate(sizes)]
    return exchanged(made) if buffer else made


def oracle(tensors, scale, documents=None, sinks=None, **rule):
    """In fp64, whatever the dtype of the tensors."""
    leaves = [leaf(t, torch.float64, needs=True) for t in (*tensors[:3], sinks) if t is not None]
    how = dict(zip(["sinks"], leaves[3:]))
    out, lse = reference.attention(*leaves[:3], scale=scale, documents=documents, **how, **rule)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, tensors[3].double())]


def run(name, tensors, scale, documents, chunk=None):
    return attend(BACKENDS[name], tensors, Rule(scale), documents, chunk=chunk)


def check(
    name, shape, dtype = torch.float64, variant = None,
    chunk = None, buffer = False, tolerance = 0.0, device = "cpu",
):  # fmt: skip
    """A kernel is the oracle, of this attention: its window, soft cap, sinks, or width of values."""
    variant = variant or {}
    rule = {n: v for n, v in variant.items() if n in ("window", "softcap")}
    tensors, documents = [t.to(device) for t in make(shape, dtype, buffer, variant.get("width"))], shape[-1]
    sinks = randn(shape[1], seed=9, dtype=dtype).to(device) if "sinks" in variant else None
    before = [t.clone() for t in tensors]
    got = attend(BACKENDS[name], tensors, Rule(0.3, **rule), documents, sinks, chunk)
    if sinks is not None:
        heads = [HeadPart(*[slice(0, shape[1])] * 3)]
        got.append(sinks_backward(heads, delta_of(tensors[3], got[0]), got[1], sinks))
    want = oracle(tensors, 0.3, documents, sinks, **rule)
    # where queries see one key, dq and dk are zero: differences of equal numbers, which are as large as dv
    assert worst(got, want, [w if w.any() else 1000 * want[4] for w in want]) < (tolerance or EXACT[dtype])
    assert {t.dtype for t in (got[0], *got[2:5])} == {dtype}
    assert same(tensors, before), "an input was changed"


def test_heads_whose_numbers_do_not_lie_side_by_side():
    """As after a convolution, which has tokens last."""
    tensors = [randn(1, 2, 8, 8, seed=i, dtype=torch.float64) for i in range(4)]
    strided = [t.mT.contiguous().mT for t in tensors]
    assert same(*(attend(BACKENDS["cpu"], each, Rule(0.3)) for each in (tensors, strided)))


@pytest.mark.parametrize(
    "dtype, chunk, buffer",
    [(torch.float64, None, False), (torch.float32, None, True), (torch.float64, 1, True), (torch.float32, 5, True),
     (torch.float64, 12, True), (torch.float64, 600, True)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@KERNELS_HERE
def test_kernel_is_the_oracle(name, shape, dtype, chunk, buffer):
    """In one call and in chunks of rows."""
    chunk = 97 if chunk in (1, 5) and shape[3] > 100 else chunk
    check(name, shape, dtype, chunk=chunk, buffer=buffer)


@pytest.mark.parametrize("buffer", [False, True], ids=["contiguous", "exchanged"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("shape", ["gqa, odd", "batch 2", "documents of batch 2"])
@pytest.mark.parametrize("name", [*ON_CPU, "blockwise"])
def test_calls_that_are_cut_are_the_oracle(monkeypatch, name, shape, rows, buffer):
    """So that no tensor has more elements than a kernel can count. In one piece and in chunks of rows."""
    b, h, kv, _, d, _ = SHAPES[shape]
    elements = rows * (b * (2 * h + 2 * kv) if buffer else h) * d + 1
    monkeypatch.setattr(attention, "ELEMENTS", elements)
    backend, seen = BACKENDS[name], []

    def watched(fn):
        def call(*args, **kwargs):
            given = [t for a in args for t in (a if isinstance(a, tuple) else [a]) if isinstance(t, Tensor)]
            seen.extend(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) for t in given if t.ndim == 4)
            return fn(*args, **kwargs)

        return call

    own = replace(backend, forward=watched(backend.forward), backward=watched(backend.backward))
    monkeypatch.setitem(BACKENDS, name, own)
    for chunk, window in ((None, None), (20, None), (None, 5), (None, 17)):
        check(name, SHAPES[shape], variant={"window": window}, chunk=chunk, buffer=buffer)
    assert 0 < max(seen) < elements


def test_rows_of_a_batch_share_a_call_that_is_cut(monkeypatch):
    """Blocks of a window are a batch of thousands: not each becomes a call."""
    monkeypatch.setattr(attention, "ELEMENTS", 100 * 4 * 8 * 8 + 1)
    q = torch.empty(1000, 4, 8, 8)
    cut = attention._parts(BACKENDS["cpu"], "causal", (q, q, q))
    assert [piece.batch.stop - piece.batch.start for piece in cut] == [100] * 10


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [128, 129, 160, 191])
def test_a_ragged_length_of_a_kernel_that_is_built_for_each_shape_is_the_oracle(monkeypatch, length, batch):
    """The kernel gets a length that many share, and another kernel the last rows."""
    seen, forward = [], BACKENDS["cpu"].forward

    def built(q, k, *rest, **how):
        seen.extend((q.shape[2], k.shape[2]))
        return forward(q, k, *rest, **how)

    monkeypatch.setattr(attention, "LONG", 64)
    monkeypatch.setitem(BACKENDS, "built", replace(BACKENDS["cpu"], forward=built, granule=32, packed_by="cpu"))
    check("built", (batch, 4, 2, length, 8, None), buffer=True)
    assert seen == [length - length % 32] * 2


@KERNELS_HERE
def test_scores_of_hundreds_do_not_overflow(name):
    tensors = make(SHAPES["gqa, odd"], torch.float32)
    tensors[0] *= 100
    want = oracle(tensors, 1.0)
    assert float(want[1].max()) > 200  # its exponential is beyond fp32
    assert worst(run(name, tensors, 1.0, None), want) < 1e-4


@KERNELS_HERE
def test_nothing_of_sequence_times_sequence(name):
    """The oracle shows that the reading can fail: it makes the scores."""
    tensors = make((1, 1, 1, 1024, 8, None), torch.float32)
    taken, _ = peaks(lambda: run(name, tensors, 0.3, [0, 100, 1024])[0])
    assert (taken > 4 * 900 * 900) == (name == "eager")


@pytest.mark.parametrize("documents", [[1, 26], [0, 25], [0, 27], [0, 20, 10, 26], [0], []], ids=str)
def test_bad_documents(documents):
    tensors = make((2, 2, 1, 13, 8, None), torch.float32)
    assert "must rise from 0 to batch * sequence = 26" in error_of(run, "cpu", tensors, 0.3, documents)


CHOICES = """
sdpa      |  0 | float32  |  64 |     |       | cpu
eager     |  0 | float64  |  64 |     |       | eager
auto      |  0 | float32  | 128 |     | cute  | cpu
fast      |  0 | bfloat16 |  64 |     |       | attention='fast' is unknown; known: sdpa, auto, cpu, cudnn
cudnn     |  0 | bfloat16 |  64 |     |       | 'cudnn' does not run on cpu; attention='sdpa'
flash     |  0 | bfloat16 |  64 |     |       | 'flash' does not run on cpu; attention='sdpa'
efficient |  0 | bfloat16 |  64 |     |       | 'efficient' does not run on cpu; attention='sdpa'
cpu       |  9 | bfloat16 |  64 |     |       | 'cpu' does not run on cuda
sdpa      |  9 | bfloat16 | 128 |     |       | cudnn
sdpa      |  9 | bfloat16 | 256 |     |       | cudnn
sdpa      | 10 | bfloat16 | 136 |     |       | flash
sdpa      |  8 | bfloat16 | 256 |     |       | flash
sdpa      |  9 | bfloat16 | 252 |     |       | flash
sdpa      | 12 | bfloat16 | 256 |     |       | flash
sdpa      |  9 | bfloat16 |  36 |     |       | flash
sdpa      |  9 | float32  | 128 |     |       | efficient
sdpa      |  9 | bfloat16 | 512 |     |       | efficient
sdpa      |  9 | float64  |  64 |     |       | blockwise
auto      |  9 | bfloat16 | 512 |     |       | efficient
auto      |  9 | bfloat16 | 128 |     | cute  | flash_attention_4
auto      |  8 | bfloat16 | 128 |     | flash | flash
auto      |  8 | bfloat16 | 192 |     | flash | flash
auto      |  8 | bfloat16 | 256 |     | flash | flash
auto      |  8 | bfloat16 | 128 | cap | flash | blockwise
auto      |  8 | bfloat16 | 256 | cap | flash | blockwise
auto      |  9 | bfloat16 | 128 |     | flash | flash_attention_3
auto      |  9 | bfloat16 | 192 |     | flash | flash_attention_3
auto      |  9 | bfloat16 | 256 |     | flash | flash_attention_3
auto      |  9 | bfloat16 | 128 | cap | flash | flash_attention_3
auto      |  9 | bfloat16 | 256 | cap | flash | flash_attention_3
auto      | 10 | bfloat16 | 128 |     | flash | flash_attention_4
auto      | 10 | bfloat16 | 192 |     | flash | flash
auto      | 10 | bfloat16 | 256 |     | flash | flash_attention_4
auto      | 10 | bfloat16 | 128 | cap | flash | flash_attention_4
auto      | 10 | bfloat16 | 256 | cap | flash | blockwise
sdpa      |  8 | bfloat16 | 128 | cap | flash | blockwise
sdpa      |  9 | bfloat16 | 128 | cap | flash | blockwise
sdpa      | 10 | bfloat16 | 128 | cap | flash | blockwise
"""
"""Asked for, compute capability (0: a CPU), dtype, head width, whether scores are capped, installed packages, and what
is chosen or said."""
OF_PACKAGES = [
    (name, least - less, dtype, width, "", package, says)
    for name, (_, _, least, _) in PACKAGES.items()
    for less, dtype, width, package, says in (
        (0, "bfloat16", 64, "", "needs the package flash-attn.*; attention='sdpa' chooses what runs"),
        (0, "bfloat16", 64, "flash", name),
        (0, "float32", 64, "flash", rf"fp16 or bf16, and .*, not cuda {least}, torch\.float32 and 64;"),
        (least, "bfloat16", 64, "flash", "not cpu 0, "),
        (0, "bfloat16", 36, "flash", "width up to 256 that divides by 8.*, not cuda .* and 36;"),
        (1, "bfloat16", 64, "flash", f"CUDA of compute capability {least} .*, not cuda {least - 1}, "),
    )
]


@pytest.mark.parametrize("name, capability, dtype, width, cap, package, found", [*lines_of(CHOICES, "|"), *OF_PACKAGES])
def test_choice_of_a_kernel(monkeypatch, name, capability, dtype, width, cap, package, found):
    spec = importlib.machinery.ModuleSpec("flash_attn", None)
    capability, given = int(capability), (getattr(torch, dtype), int(width), bool(cap))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: spec if package and package in n else None)
    device = torch.device("cuda" if capability else "cpu")
    if found in BACKENDS:
        assert choose_backend(name, device, *given).name == found
    else:
        check_refused(found, choose_backend, name, device, *given)


def test_options_name_every_kernel():
    assert set(get_args(Kernel)) == {"sdpa", "auto", *BACKENDS}


# ----- against torch's own attention in the same precision


def compare(got, theirs, want):
    for i, (g, t, w) in enumerate(zip(got, theirs, want)):
        floor = torch.finfo(g.dtype).eps / 4
        assert reference.relative_error(g, w) <= 1.5 * max(reference.relative_error(t, w), floor), i


BF16 = torch.bfloat16
HALF = [
    *itertools.product(("cudnn", "flash", "efficient"), (BF16, torch.float16)),
    ("efficient", torch.float32),
    *((f"flash_attention_{version}", BF16) for version in (2, 3, 4)),
]


BATCHES = pytest.mark.parametrize(
    "kv, documents", list(itertools.product([4, 2, 1], [None, [0, 1, 130, 257, 258, 300, 514]]))
)


def as_good_as_torchs(name, dtype, kv, documents):
    """The error is at most 1.5 times that of PyTorch's own; and, in chunks of rows, that of one call."""
    device = torch.device("cpu" if name == "cpu" else "cuda")
    try:
        choose_backend(name, device, dtype, 64)
    except ValueError as e:
        pytest.skip(str(e))
    given = make((2, 4, kv, 257, 64, None), dtype, True)
    tensors, want = [t.to(device) for t in given], oracle(given, 0.125, documents)
    whole, *parts = ([t.cpu() for t in run(name, tensors, 0.125, documents, chunk)] for chunk in (None, 100, 64))
    assert whole[1].dtype == torch.float32
    if documents is None:
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        each = (t.repeat_interleave(4 // kv, 1) for t in (k, v))  # fp32 with fewer heads is another kernel on CUDA
        out = scaled_dot_product_attention(q, *each, is_causal=True, scale=0.125)
        theirs = [out.detach(), *torch.autograd.grad(out, [q, k, v], tensors[3])]
        compare([whole[0], *whole[2:]], [t.cpu() for t in theirs], [want[0], *want[2:]])
    assert worst(whole, want) < (1e-4 if dtype == torch.float32 else 0.02)
    assert worst(whole[1:2], want[1:2]) < 1e-3
    for part in parts:
        compare(part, whole, want)


@BATCHES
def test_half_precision_is_as_good_as_torchs(kv, documents):
    as_good_as_torchs("cpu", BF16, kv, documents)


@pytest.mark.gpu
@BATCHES
@pytest.mark.parametrize("name, dtype", HALF)
def test_gpu_kernel_is_as_good_as_torchs(name, dtype, kv, documents):
    as_good_as_torchs(name, dtype, kv, documents)
