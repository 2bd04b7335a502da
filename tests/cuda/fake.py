"""CUDA's branches on a machine without a GPU.

`fake_cuda` gives fake tensors that say `cuda:0`: PyTorch checks shapes, dtypes and devices of every operator, as its
kernels for CUDA have meta implementations. `Watch` sees every operation: it holds each attention kernel's arguments
against what the kernel needs, and counts cuDNN's graphs. Whether streams wait for each other is seen on the device on
a CPU (tests/device). `python_engine` is a backward pass in Python, because PyTorch's own wants a device for CUDA's
queue.
"""

import contextlib
import ctypes
from collections import Counter, defaultdict
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
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
    stream = mock.Mock(spec=torch.cuda.Stream)  # on which nothing runs

    class Slab:
        """Host memory without the registration at the driver."""

        def __init__(self, nbytes, device):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)

        def tensor(self, shape, dtype, told):
            return torch.empty(tuple(shape), dtype=dtype)

    with contextlib.ExitStack() as stack:
        for name, stand_in in {
            "get_device_capability": lambda *_: capability, "get_rng_state": lambda *_: state,
            "set_rng_state": lambda *_: None, "Stream": lambda *_: stream, "current_stream": lambda *_: stream,
            "stream": contextlib.nullcontext,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch("torch.random.fork_rng", return_value=contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(host_store, "_Slab", Slab))
        stack.enter_context(python_engine())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield watch


KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn", "_scaled_dot_product_cudnn_attention_backward": "cudnn backward",
    "_flash_attention_forward": "flash", "_flash_attention_backward": "flash backward",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_efficient_attention_backward": "efficient backward",
}  # fmt: skip
"""Operators whose calls are held against what they need, and by which names they are counted."""


class Watch(TorchDispatchMode):
    """Sees every operation under fake tensors."""

    def __init__(self):
        super().__init__()
        self.kernels = Counter()
        """Calls of each attention kernel, by the names of `KERNELS`."""
        self.graphs = defaultdict(set)
        """Of each graph that cuDNN would build (kind, thread, key): the layouts of `out` and `dout` that it was asked
        for. PyTorch keeps graphs for each thread."""
        self.uploads = 0
        """Tensors that were copied to the device."""
        self.problems = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in KERNELS:
            self.kernels[KERNELS[name]] += 1
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            named = {n.removesuffix("_"): value for n, value in {**given, **dict(zip(given, args)), **kwargs}.items()}
            self._check(KERNELS[name], SimpleNamespace(**named))
        out = func(*args, **kwargs)
        self.uploads += name == "_to_copy" and out.is_cuda and not args[0].is_cuda
        return out

    # ----- what kernels need

    def need(self, kernel, given, needs):
        """Note a problem for each of the needs (what it is called: whether it is met) that is not met, with the
        arguments that were given."""
        if not all(needs.values()):
            told = {name: _told(value) for name, value in given.items()}
            self.problems += [f"{kernel}: not {name}: {told}" for name, met in needs.items() if not met]

    def need_tensors(self, kernel, **tensors):
        for t in tensors.values():
            strides = [s * t.element_size() for s, n in zip(t.stride()[:-1], t.shape) if n > 1]
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            needs = {
                "on the device": t.is_cuda, "a contiguous last dimension": t.stride(-1) == 1,
                "strides in multiples of 16 bytes": not any(s % 16 for s in strides),
                "aligned to 16 bytes": t.storage_offset() * t.element_size() % 16 == 0,
                "as many elements as 32 bits can count": span < 2**31,
            }  # fmt: skip
            self.need(kernel, tensors, needs)
        self.need(kernel, tensors, {"one dtype": len({t.dtype for t in tensors.values()}) == 1})

    def _check(self, kernel, a):
        """`a` has the arguments by PyTorch's names."""
        kind, _, backward = kernel.partition(" ")
        q, k, v, at = a.query, a.key, a.value, 1 if kind == "flash" else 2
        self.need_tensors(kernel, q=q, k=k, v=v, **({"dout": a.grad_out, "out": a.out} if backward else {}))
        packed = kind == "flash" and a.cum_seq_q is not None
        if packed:
            q, k, v, offsets = q[None], k[None], v[None], a.cum_seq_q
            needs = {
                "offsets in int32 on the device": offsets.dtype == torch.int32 and offsets.is_cuda,
                "a longest document inside": 0 < a.max_q <= q.shape[1],
            }
            self.need(kernel, vars(a), needs)
        needs = {
            "heads over those of keys": q.shape[3 - at] % k.shape[3 - at] == 0 and v.shape[:-1] == k.shape[:-1],
            "as many rows as keys where causal": not a.is_causal or q.shape[at] == k.shape[at],
            "head widths in multiples of 8": q.shape[-1] % 8 == 0 == v.shape[-1] % 8,
        }
        lse = a.logsumexp if backward else None
        if lse is not None:
            needs["lse in fp32, contiguous"] = lse.dtype == torch.float32 and lse.is_contiguous()
        if kind == "flash":
            shape = (q.shape[0], q.shape[2], q.shape[1])[packed:]
            needs |= {
                "one head width": q.shape[-1] == v.shape[-1],
                "a head width for which backward is right": not 128 < q.shape[-1] < 192,
                "lse's shape": lse is None or tuple(lse.shape) == shape,
            }
        elif kind == "efficient":
            needs["no groups of heads"] = q.shape[1] == k.shape[1] == v.shape[1]
            if lse is not None:
                together = a.out.element_size() > 2 or a.out.transpose(1, 2)[:1].is_contiguous()
                needs |= {"lse padded": lse.shape[2] % 32 == 0, "the heads of a token of out together": together}
        else:
            needs["several keys"] = k.shape[2] > 1
            if lse is None:
                needs["asked for logsumexp"] = a.compute_log_sumexp and a.attn_bias is None
            else:
                seeded = a.philox_seed.is_cuda and a.philox_offset.is_cuda
                needs |= {"lse aligned to 16 bytes": lse.storage_offset() % 4 == 0, "a seed on the device": seeded}
            layouts = (_strides(a.out), _strides(a.grad_out)) if backward else None
            self.graphs[backward or "forward", get_ident(), _key(q, k, v, a.is_causal)].add(layouts)
        self.need(kernel, vars(a), needs)


def _told(value):
    if not isinstance(value, Tensor):
        return value
    return f"{value.dtype} {list(value.shape)} on {value.device}, {value.stride()} from {value.storage_offset()}"


def _strides(t):
    return tuple(s for s, n in zip(t.stride(), t.shape) if n > 1)


def _key(q, k, v, causal):
    """What PyTorch up to 2.13 knows a cuDNN graph by: not the layouts of `out` and `dout`."""
    return (*((tuple(t.shape), tuple(t.stride())) for t in (q, k, v)), q.dtype, causal)


# ----- a backward pass


def _add(sums, key, g):
    sums[key] = sums[key] + g if key in sums else g


def _run(outputs, grads, inputs=None):
    """Back-propagate, a node that was made later first; gradients of leaves go to `.grad`, or those of `inputs` alone
    are returned by their id."""
    pending, found = defaultdict(dict), {}
    nodes = {(i.grad_fn or i, i.output_nr): id(i) for i in inputs or ()}
    for o, g in zip(outputs, grads):
        if o.grad_fn is not None:
            _add(pending[o.grad_fn], o.output_nr, torch.ones_like(o) if g is None else g)
    while pending:
        node = max(pending, key=lambda node: node._sequence_nr())
        got = pending.pop(node)
        found.update({key: got[number] for (at, number), key in nodes.items() if at is node and number in got})
        for child, number, g in _through(node, got):
            leaf = getattr(child, "variable", None)
            if leaf is None:
                _add(pending[child], number, g)
            elif inputs is not None:
                if key := nodes.get((leaf, 0)):
                    _add(found, key, g)
            else:
                leaf.grad = g if leaf.grad is None else leaf.grad + g
                for hook in (leaf._post_accumulate_grad_hooks or {}).values():
                    hook(leaf)
    return found


def _tuple(made):
    return made if isinstance(made, tuple) else (made,)


def _through(node, got):
    """One node's backward -> (child, its output's number, gradient)."""
    given, edges = [got.get(i) for i in range(len(node._input_metadata))], node.next_functions
    with torch.no_grad():
        if hasattr(node, "_forward_cls"):  # a torch.autograd.Function
            zeros = zip(given, node._input_metadata)
            given = [torch.zeros(tuple(m.shape), dtype=m.dtype, device=m.device) if g is None else g for g, m in zeros]
            outs = _tuple(node._forward_cls.backward(node, *given))
            outs = [g for g, need in zip(outs, node.needs_input_grad) if need]
            edges = [e for e in edges if e[0] is not None]
            assert len(outs) == len(edges), (type(node).__name__, len(outs), len(edges))
        else:
            outs = _tuple(node(*given))
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
