"""What the operator tests share: uninitialised memory that shows, seeded tensors, layouts, kernels, and
comparing gradients."""

import contextlib
import sys
from collections import Counter
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alstlib.base.reference import relative_error
from alstlib.kernels.attention import attention_backward, attention_forward
from alstlib.kernels.paged import HeadPart, add_sinks
from alstlib.kernels.rule import Attended
from alstlib.kernels.spans import document_spans
from alstlib.planner.measure.ledger import Ledger

EXACT = {torch.float64: 1e-12, torch.float32: 3e-6}
"""Largest relative error of an operator that computes what the oracle does, in another order."""


DTYPES = pytest.mark.parametrize("dtype", EXACT)


@contextlib.contextmanager
def nan_memory():
    """Memory that nobody wrote is NaN: an output with a forgotten row fails its comparison."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Operations(TorchDispatchMode):
    """What runs inside: how often each operation, the multiplications of all matrix products, and how many numbers the
    largest tensor has that is made."""

    def __init__(self):
        super().__init__()
        self.ran, self.multiplications, self.largest = Counter(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, name = function(*args, **kwargs or {}), str(function)
        self.ran[name] += 1
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.multiplications += left.numel() * right.shape[1]
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def randn(*shape, seed=0, dtype=torch.float64, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def strided(x):
    """The same values, the first two dimensions swapped in memory, and (of three or more) a gap after each row."""
    if x.ndim < 3:
        return x.t().contiguous().t()
    wide = x.new_empty(x.shape[1], x.shape[0], *x.shape[2:-1], x.shape[-1] + 3)
    view = wide.transpose(0, 1)[..., : x.shape[-1]]
    view.copy_(x)
    assert view.shape == x.shape
    return view


LAYOUTS = pytest.mark.parametrize("layout", [torch.Tensor.clone, strided], ids=["contiguous", "strided"])


def leaf(x, dtype=None, needs=True):
    """A leaf with x's values and strides."""
    return x.detach().to(dtype or x.dtype).requires_grad_(needs)


def gradients(fn, inputs, upstream, dtype=None):
    """fn(*inputs) and its gradient for every input that requires one, None for others; the inputs are copied."""
    own = [leaf(t, dtype, t.requires_grad) if t.is_floating_point() else t for t in inputs]
    out = fn(*own)
    out.backward(upstream.to(out.dtype))
    return (out.detach(), *(t.grad for t in own))


def of_module(module, x, upstream, *more):
    """A module's output, and its gradients for x (if it requires one) and for every weight."""
    x = leaf(x, needs=x.requires_grad)
    module.zero_grad()
    out = module(x, *more)
    out.backward(upstream)
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def randomised(module, scale=1.0):
    """The module in fp64, with weights that count."""
    for i, p in enumerate(module.parameters()):
        p.data = randn(*p.shape, seed=i, scale=scale)
    return module.double().train()


def logps_of(logits, labels):
    """The log-probability of each label; 0 where there is none."""
    return logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)


def worst(got, want, whole=None):
    """Largest relative error; shapes agree, and None belongs to None.

    `whole` is what the tensors are slices of: a slice that is zero by construction (the gradient of the first row's
    query) is measured by a thousandth of the whole's norm.
    """
    assert len(got) == len(want)
    errors = [0.0]
    for g, w, all_of_it in zip(got, want, whole or want):
        assert (g is None) == (w is None), ([t is None for t in got], [t is None for t in want])
        if g is not None and w is not None:
            assert g.shape == w.shape, (g.shape, w.shape)
            assert all_of_it is not None
            error = relative_error(g, w, floor=float(all_of_it.detach().norm()) / 1000 or 1e-12)
            errors.append(error if error == error else float("inf"))  # NaN is as wrong as can be
    return max(errors)


@contextlib.contextmanager
def counted(owner, *names):
    """Counts the calls of these functions of a module or class."""
    calls = Counter()

    def counting(name, fn):
        return lambda *args, **kwargs: (calls.update([name]), fn(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, counting(name, getattr(owner, name)))
        yield calls


def peaks(fn, *args):
    """Peak bytes of a call, and of the call with the backward of what it returns, over the bytes at its start."""
    with Ledger() as ledger:
        start = ledger.device_bytes
        out = fn(*args)
        forward = ledger.device_peak - start
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        return forward, ledger.device_peak - start


def agree(
    ours, oracle, inputs, upstream,
    dtype = torch.float64,
):  # fmt: skip
    """Check that output and gradients in this dtype are the oracle's, and that the upstream gradient is not changed;
    returns ours."""
    before = upstream.clone()
    got = gradients(ours, inputs, upstream, dtype)
    assert torch.equal(upstream, before)
    assert worst(got, gradients(oracle, inputs, upstream)) < EXACT[dtype]
    assert all(t is None or t.dtype == dtype for t in got)
    return got


def exchanged(tensors):
    """Tensors [B, H, S, D] with the same values, as they come out of an all-to-all: views of one [S, B, ..] buffer."""
    whole = torch.cat([t.permute(2, 0, 1, 3).flatten(2) for t in tensors], 2)
    parts = whole.split([t.shape[1] * t.shape[3] for t in tensors], 2)
    return [p.unflatten(2, (t.shape[1], t.shape[3])).permute(1, 2, 0, 3) for p, t in zip(parts, tensors)]


def attend(
    backend, tensors, rule, documents = None,
    sinks = None, chunk = None,
):  # fmt: skip
    """A kernel's output, logsumexp and gradients for q, k, v and the output's gradient, in one call, or as a streamed
    layer calls it: for chunks of rows from the first to the last, and back."""
    q, k, v, dout = tensors

    def forward(*qkv, **how):
        made = attention_forward(backend, *qkv, rule=rule, **how)
        add_sinks([HeadPart(slice(None), slice(None), slice(None))], *made, sinks)
        return Attended(*qkv, *made)

    if chunk is None:
        kept = forward(q, k, v, cu_seqlens=documents)
        return [*kept[3:], *attention_backward(backend, dout, kept, rule=rule, cu_seqlens=documents)]
    batch, length = q.shape[::2][:2]
    parts = []
    for lo in range(0, length, chunk):
        at, seen = ((slice(None), slice(None), slice(first, lo + chunk)) for first in (lo, 0))
        spans = document_spans(documents, batch, length, lo, min(lo + chunk, length))
        parts.append((at, seen, spans, forward(q[at], k[seen], v[seen], spans=spans)))
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    for at, seen, spans, kept in reversed(parts):
        sums = dq[at], dk[seen], dv[seen]
        attention_backward(backend, dout[at], kept, rule=rule, spans=spans, sums=sums)
    out, lse = (torch.cat(made, 2) for made in zip(*((kept.out, kept.lse) for *_, kept in parts)))
    return [out, lse, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


def as_transformers_wraps(kernel):
    """The kernel as transformers wraps what it finds in a package: in a function that names no parameter and drops
    unknown ones."""
    from transformers.models.qwen3_next.modeling_qwen3_next import use_kernel_func_from_hub_with_fallback

    package = ModuleType("a_package_of_kernels")
    package.kernel = kernel
    with mock.patch.dict(sys.modules, {package.__name__: package}):
        return use_kernel_func_from_hub_with_fallback("kernel", package.__name__)(lambda *_, **__: 1 / 0)


def error_of(fn, *args, **kwargs):
    """What a call is refused with."""
    try:
        fn(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "accepted"
