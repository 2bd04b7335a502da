"""CUDA's branches on a machine without a GPU.

`fake_cuda` gives fake tensors that say `cuda:0`: PyTorch checks shapes, dtypes and devices of every operator, as its
kernels for CUDA have meta implementations. `Watch` sees every operation: it holds each attention kernel's arguments
against what the kernel needs, and counts cuDNN's graphs. Whether streams wait for each other is seen on the device on
a CPU (tests/device). `python_engine` is a backward pass in Python, because PyTorch's own wants a device for CUDA's
queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import heapq
from collections import Counter, defaultdict
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# ----- a device


def _lend_device_guard():
    """A CPU build has no device guard of CUDA, which indexing asks for: lend it that of `meta`, which does nothing."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    registry = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10/core/DeviceType.h
    if registry[cuda] is None:
        registry[cuda] = registry[meta]


@contextlib.contextmanager
def fake_cuda(capability=(9, 0)):
    """Fake tensors may be on `cuda:0`, a GPU of this compute capability."""
    from alstlib.offload import host_store

    _lend_device_guard()
    watch, state = Watch(), torch.zeros(16, dtype=torch.uint8)

    class Slab:
        """Host memory without the registration at the driver."""

        def __init__(self, nbytes, pin):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)

        view = host_store._Slab.view

        def tensor(self, shape, dtype, told):
            return torch.empty(tuple(shape), dtype=dtype)

    with contextlib.ExitStack() as stack:
        for name, stand_in in {
            "get_device_capability": lambda *_: capability, "get_rng_state": lambda *_: state,
            "set_rng_state": lambda *_: None, "Stream": Stream, "current_stream": Stream,
            "stream": contextlib.nullcontext,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch("torch.random.fork_rng", return_value=contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(host_store, "_Slab", Slab))
        stack.enter_context(python_engine())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield watch


class Stream:
    """A stream on which nothing runs."""

    def __init__(self, device=None):
        pass

    def synchronize(self):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self):
        return object()


KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn", "_scaled_dot_product_cudnn_attention_backward": "cudnn backward",
    "_flash_attention_forward": "flash", "_flash_attention_backward": "flash backward",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_efficient_attention_backward": "efficient backward",
}  # fmt: skip
"""Operators whose calls are held against what they need, and what problems call them."""


class Watch(TorchDispatchMode):
    """Sees every operation under fake tensors."""

    def __init__(self):
        super().__init__()
        self.kernels: Counter[str] = Counter()
        """Calls of each attention kernel."""
        self.graphs: dict[Any, set[Any]] = defaultdict(set)
        """Of each graph that cuDNN would build (kind, thread, key): the layouts of `out` and `dout` that it was asked
        for. PyTorch keeps graphs for each thread."""
        self.uploads = 0
        """Tensors that were copied to the device."""
        self.problems: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in KERNELS:
            self.kernels[name] += 1
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            named = {n.removesuffix("_"): value for n, value in {**given, **dict(zip(given, args)), **kwargs}.items()}
            self._check(KERNELS[name], SimpleNamespace(**named))
        out = func(*args, **kwargs)
        self.uploads += name == "_to_copy" and out.is_cuda and not args[0].is_cuda
        return out

    # ----- what kernels need

    def _need(self, holds, kernel, message):
        if not holds:
            self.problems.append(f"{kernel}: {message}")

    def _tensors(self, kernel, **tensors):
        for name, t in tensors.items():
            layout = f"{name} {list(t.shape)} with strides {t.stride()} from {t.storage_offset()}"
            self._need(t.is_cuda, kernel, f"{name} is on {t.device}")
            self._need(t.stride(-1) == 1, kernel, f"{layout}: the last dimension is not contiguous")
            sixteen = [s * t.element_size() % 16 for s, n in zip(t.stride()[:-1], t.shape) if n > 1]
            self._need(not any(sixteen), kernel, f"{layout}: strides are not multiples of 16 bytes")
            self._need(t.storage_offset() * t.element_size() % 16 == 0, kernel, f"{layout}: not aligned to 16 bytes")
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            self._need(span < 2**31, kernel, f"{layout}: it spans {span:,} elements, which 32 bits cannot count")
        kinds = {n: t.dtype for n, t in tensors.items() if t.dtype != torch.float32 or n != "lse"}
        kinds.pop("lse", None)
        self._need(len(set(kinds.values())) == 1, kernel, f"dtypes differ: {kinds}")

    def _heads(self, kernel, q, k, v, causal, at):
        rows, keys, heads, kv = q.shape[at], k.shape[at], q.shape[3 - at], k.shape[3 - at]
        self._need(heads % kv == 0 and v.shape[:-1] == k.shape[:-1], kernel, f"{heads} heads over {kv}")
        self._need(not causal or rows == keys, kernel, f"causal with {rows} rows over {keys} keys")
        self._need(q.shape[-1] % 8 == 0 == v.shape[-1] % 8, kernel, f"head widths of {q.shape[-1]}, {v.shape[-1]}")

    def _check(self, kernel, a):
        """`a` has the arguments by PyTorch's names."""
        need, (kind, _, backward) = functools.partial(self._need, kernel=kernel), kernel.partition(" ")
        q, k, v = a.query, a.key, a.value
        self._tensors(kernel, q=q, k=k, v=v, **({"dout": a.grad_out, "out": a.out} if backward else {}))
        packed = kind == "flash" and a.cum_seq_q is not None
        if packed:
            q, k, v, offsets = q[None], k[None], v[None], a.cum_seq_q
            right = offsets.dtype == torch.int32 and offsets.is_cuda
            need(right, message=f"offsets {offsets.dtype} {offsets.device}")
            need(0 < a.max_q <= q.shape[1], message=f"the longest document is {a.max_q} of {q.shape[1]}")
        self._heads(kernel, q, k, v, a.is_causal, 1 if kind == "flash" else 2)
        if backward:
            lse = a.logsumexp
            need(lse.dtype == torch.float32 and lse.is_contiguous(), message="lse is not fp32, contiguous")
        if kind == "flash":
            need(q.shape[-1] == v.shape[-1], message=f"head widths of {q.shape[-1]} and {v.shape[-1]}")
            need(not 128 < q.shape[-1] < 192, message=f"a head width of {q.shape[-1]}, for which backward is wrong")
            shape = (q.shape[0], q.shape[2], q.shape[1])[packed:]
            need(not backward or tuple(a.logsumexp.shape) == shape, message=f"lse is not {list(shape)}")
        elif kind == "efficient":
            need(q.shape[1] == k.shape[1] == v.shape[1], message="it takes no groups of heads")
            need(not a.is_causal or q.shape[2] == k.shape[2], message="causal and not square")
            if backward:
                need(a.logsumexp.shape[2] % 32 == 0, message="lse is not padded")
                rows = a.out.transpose(1, 2)[:1]
                need(
                    a.out.element_size() > 2 or rows.is_contiguous(),
                    message=f"out with strides {a.out.stride()}: the kernel takes a token's heads to lie together",
                )
        else:
            need(k.shape[2] > 1, message="a single key")
            need(backward or (a.compute_log_sumexp and a.attn_bias is None), message="no logsumexp is asked for")
            if backward:
                need(a.logsumexp.storage_offset() % 4 == 0, message="lse is not aligned to 16 bytes")
                need(a.philox_seed.is_cuda and a.philox_offset.is_cuda, message="the seed is not on the device")
            layouts = (_strides(a.out), _strides(a.grad_out)) if backward else None
            self.graphs[backward or "forward", get_ident(), _key(q, k, v, a.is_causal)].add(layouts)


def _strides(t):
    return tuple(s for s, n in zip(t.stride(), t.shape) if n > 1)


def _key(q, k, v, causal):
    """What PyTorch up to 2.13 knows a cuDNN graph by: not the layouts of `out` and `dout`."""
    return (*((tuple(t.shape), tuple(t.stride())) for t in (q, k, v)), q.dtype, causal)


# ----- a backward pass


def _run(outputs, grads, inputs=None):
    """Back-propagate, a node that was made later first; gradients of leaves go to `.grad`, or those of `inputs` alone
    are returned by their id."""
    pending = {}
    order = []
    nodes = {(i.grad_fn or i, i.output_nr): id(i) for i in inputs or ()}
    found = {}

    def give(node, number, g):
        if node not in pending:
            pending[node] = {}
            heapq.heappush(order, (-node._sequence_nr(), id(node), node))
        slots = pending[node]
        slots[number] = g if number not in slots else slots[number] + g

    for o, g in zip(outputs, grads):
        if o.grad_fn is not None:
            give(o.grad_fn, o.output_nr, torch.ones_like(o) if g is None else g)
    while order:
        *_, node = heapq.heappop(order)
        got = pending.pop(node)
        found.update({key: got[number] for (at, number), key in nodes.items() if at is node and number in got})
        for child, number, g in _through(node, got):
            leaf = getattr(child, "variable", None)
            if leaf is None:
                give(child, number, g)
            elif inputs is not None:
                if key := nodes.get((leaf, 0)):
                    found[key] = g if key not in found else found[key] + g
            else:
                leaf.grad = g if leaf.grad is None else leaf.grad + g
                for hook in (leaf._post_accumulate_grad_hooks or {}).values():
                    hook(leaf)
    return found


def _through(node, got):
    """One node's backward -> (child, its output's number, gradient)."""
    metadata = getattr(node, "_input_metadata", None)
    given = [got.get(i) for i in range(len(metadata) if metadata else max(got) + 1)]
    edges = list(node.next_functions)
    with torch.no_grad():
        if hasattr(node, "_forward_cls"):  # a torch.autograd.Function
            zeros = zip(given, metadata)
            given = [torch.zeros(tuple(m.shape), dtype=m.dtype, device=m.device) if g is None else g for g, m in zeros]
            outs = node._forward_cls.backward(node, *given)
            outs = outs if isinstance(outs, tuple) else (outs,)
            outs = [g for g, need in zip(outs, node.needs_input_grad) if need]
            edges = [e for e in edges if e[0] is not None]
            assert len(outs) == len(edges), (type(node).__name__, len(outs), len(edges))
        else:
            outs = node(*given)
            outs = outs if isinstance(outs, tuple) else (outs,)
    made = []
    for (child, number), g in zip(edges, outs):
        if child is None or g is None:
            continue
        like = child.variable if type(child).__name__ == "AccumulateGrad" else child._input_metadata[number]
        g = g if tuple(g.shape) == tuple(like.shape) else g.sum_to_size(tuple(like.shape))
        made.append((child, number, g if g.dtype == like.dtype else g.to(like.dtype)))
    return made


def _grad(outputs, inputs, grads=None, *_, **__):
    tensors, leaves, given = ([x] if isinstance(x, Tensor) else list(x or ()) for x in (outputs, inputs, grads))
    found = _run(tensors, given or [None] * len(tensors), leaves or None)
    return tuple(found.get(id(i)) for i in leaves)


def _backward(tensors, grads=None, *_, **__):
    _grad(tensors, None, grads)


@contextlib.contextmanager
def python_engine():
    """Backward passes in Python, instead of PyTorch's engine."""
    with (
        mock.patch("torch.autograd.backward", _backward),
        mock.patch("torch.autograd.grad", _grad),
        mock.patch.object(Tensor, "backward", lambda self, g=None, **_: _backward([self], [g])),
    ):
        yield
