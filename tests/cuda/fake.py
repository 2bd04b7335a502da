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
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# ----- a device


def _lend_device_guard() -> None:
    """A CPU build has no device guard of CUDA, which indexing asks for: lend it that of `meta`, which does nothing."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    registry = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10/core/DeviceType.h
    if registry[cuda] is None:
        registry[cuda] = registry[meta]


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[Watch]:
    """Fake tensors may be on `cuda:0`, a GPU of this compute capability."""
    from alstlib.offload import host_store

    _lend_device_guard()
    watch, state = Watch(), torch.zeros(16, dtype=torch.uint8)

    class Slab:
        """Host memory without the registration at the driver."""

        def __init__(self, nbytes: int, pin: torch.device | None) -> None:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)

        view = host_store._Slab.view

        def tensor(self, shape: Any, dtype: torch.dtype, told: Any) -> Tensor:
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

    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> object:
        return object()


class Watch(TorchDispatchMode):
    """Sees every operation under fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        """Calls of each attention kernel."""
        self.graphs: dict[Any, set[Any]] = defaultdict(set)
        """Of each graph that cuDNN would build (kind, thread, key): the layouts of `out` and `dout` that it was asked
        for. PyTorch keeps graphs for each thread."""
        self.uploads = 0
        """Tensors that were copied to the device."""
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if (check := getattr(self, f"_check{name}", None)) is not None:
            self.kernels[name] += 1
            check(*args, **kwargs)
        out = func(*args, **kwargs)
        self.uploads += name == "_to_copy" and out.is_cuda and not args[0].is_cuda
        return out

    # ----- what kernels need

    def _need(self, holds: bool, kernel: str, message: str) -> None:
        if not holds:
            self.problems.append(f"{kernel}: {message}")

    def _tensors(self, kernel: str, **tensors: Tensor) -> None:
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

    def _heads(self, kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, at: int) -> None:
        rows, keys, heads, kv = q.shape[at], k.shape[at], q.shape[3 - at], k.shape[3 - at]
        self._need(heads % kv == 0 and v.shape[:-1] == k.shape[:-1], kernel, f"{heads} heads over {kv}")
        self._need(not causal or rows == keys, kernel, f"causal with {rows} rows over {keys} keys")
        self._need(q.shape[-1] % 8 == 0 == v.shape[-1] % 8, kernel, f"head widths of {q.shape[-1]}, {v.shape[-1]}")

    def _check_scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, dropout: float = 0.0, causal: bool = False,
        debug: bool = False, *, scale: float | None = None,
    ) -> None:  # fmt: skip
        self._tensors("cudnn", q=q, k=k, v=v)
        self._heads("cudnn", q, k, v, causal, 2)
        self._need(k.shape[2] > 1, "cudnn", "a single key")
        self._need(lse and bias is None, "cudnn", "no logsumexp is asked for")
        self.graphs["forward", get_ident(), _key(q, k, v, causal)].add(None)

    def _check_scaled_dot_product_cudnn_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: Any, cu_q: Any, cu_k: Any, rows: int, keys: int, dropout: float, causal: bool, *,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        self._tensors("cudnn backward", dout=dout, q=q, k=k, v=v, out=out)
        self._heads("cudnn backward", q, k, v, causal, 2)
        self._need(k.shape[2] > 1, "cudnn backward", "a single key")
        self._need(lse.dtype == torch.float32 and lse.is_contiguous(), "cudnn backward", "lse is not fp32, contiguous")
        self._need(lse.storage_offset() % 4 == 0, "cudnn backward", "lse is not aligned to 16 bytes")
        self._need(seed.is_cuda and offset.is_cuda, "cudnn backward", "the seed is not on the device")
        self.graphs["backward", get_ident(), _key(q, k, v, causal)].add((_strides(out), _strides(dout)))

    def _check_flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, longest: int, longest_k: int,
        dropout: float, causal: bool, debug: bool, *, scale: float | None = None, **window: Any,
    ) -> None:  # fmt: skip
        self._flash("flash", cu_q, longest, causal, q=q, k=k, v=v)

    def _check_flash_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
        cu_k: Tensor | None, longest: int, longest_k: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor,
        *, scale: float | None = None, **window: Any,
    ) -> None:  # fmt: skip
        self._flash("flash backward", cu_q, longest, causal, dout=dout, q=q, k=k, v=v, out=out)
        self._need(lse.dtype == torch.float32 and lse.is_contiguous(), "flash backward", "lse is not fp32, contiguous")
        tokens = q.shape[:-2] if cu_q is None else q.shape[:1]
        shape = (tokens[0], q.shape[-2], *tokens[1:]) if cu_q is None else (q.shape[1], *tokens)
        self._need(tuple(lse.shape) == shape, "flash backward", f"lse {list(lse.shape)} is not {list(shape)}")

    def _flash(self, kernel: str, offsets: Tensor | None, longest: int, causal: bool, **tensors: Tensor) -> None:
        self._tensors(kernel, **tensors)
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        self._need(q.shape[-1] == v.shape[-1], kernel, f"head widths of {q.shape[-1]} and {v.shape[-1]}")
        self._need(not 128 < q.shape[-1] < 192, kernel, f"a head width of {q.shape[-1]}, for which backward is wrong")
        if offsets is None:
            self._heads(kernel, q, k, v, causal, 1)
            return
        self._heads(kernel, q[None], k[None], v[None], causal, 1)
        right = offsets.dtype == torch.int32 and offsets.is_cuda
        self._need(right, kernel, f"offsets {offsets.dtype} {offsets.device}")
        self._need(0 < longest <= q.shape[0], kernel, f"the longest document is {longest} of {q.shape[0]}")

    def _check_scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, dropout: float = 0.0, causal: bool = False, *,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        self._tensors("efficient", q=q, k=k, v=v)
        self._need(q.shape[1] == k.shape[1] == v.shape[1], "efficient", "it takes no groups of heads")
        self._need(not causal or q.shape[2] == k.shape[2], "efficient", "causal and not square")


def _strides(t: Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(t.stride(), t.shape) if n > 1)


def _key(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    """What PyTorch up to 2.13 knows a cuDNN graph by: not the layouts of `out` and `dout`."""
    return (*((tuple(t.shape), tuple(t.stride())) for t in (q, k, v)), q.dtype, causal)


# ----- a backward pass


def _run(outputs: list[Tensor], grads: list[Any], inputs: list[Tensor] | None = None) -> dict[int, Tensor]:
    """Back-propagate; gradients of leaves go to `.grad`, or those of `inputs` alone are returned by their id."""
    pending: dict[Any, dict[int, Tensor]] = {}
    wanted = {id(i) for i in inputs or ()}
    nodes = {(i.grad_fn, i.output_nr): id(i) for i in inputs or () if i.grad_fn is not None}
    found: dict[int, Tensor] = {}

    def give(node: Any, number: int, g: Tensor) -> None:
        slots = pending.setdefault(node, {})
        slots[number] = g if number not in slots else slots[number] + g

    roots = []
    for o, g in zip(outputs, grads):
        if o.grad_fn is not None:
            give(o.grad_fn, o.output_nr, torch.ones_like(o) if g is None else g)
            roots.append(o.grad_fn)
    count: Counter[Any] = Counter()
    seen, stack = set(roots), list(dict.fromkeys(roots))
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None:
                count[child] += 1
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
    ready = [n for n in seen if not count[n]]
    while ready:
        node = ready.pop()
        got = pending.pop(node, {})
        for (at, number), key in nodes.items():
            if at is node and number in got:
                found[key] = got[number]
        for child, number, g in _through(node, got, wanted if inputs is not None else None, found):
            give(child, number, g)
        for child, _ in node.next_functions:
            if child is not None:
                count[child] -= 1
                if not count[child]:
                    ready.append(child)
    return found


def _through(node: Any, got: dict[int, Tensor], wanted: set[int] | None, found: dict[int, Tensor]) -> list[Any]:
    """One node's backward -> (child, its output's number, gradient)."""
    if not got:
        return []
    if type(node).__name__ == "AccumulateGrad":
        leaf, g = node.variable, got[0]
        assert (g.shape, g.device) == (leaf.shape, leaf.device)
        if wanted is None:
            leaf.grad = g if leaf.grad is None else leaf.grad + g
            for hook in (leaf._post_accumulate_grad_hooks or {}).values():
                hook(leaf)
        elif id(leaf) in wanted:
            found[id(leaf)] = g if id(leaf) not in found else found[id(leaf)] + g
        return []
    metadata = getattr(node, "_input_metadata", None)
    given: list[Any] = [got.get(i) for i in range(len(metadata) if metadata else max(got) + 1)]
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


def _backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    _run(tensors, [None] * len(tensors) if grad_tensors is None else list(grad_tensors))


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *_: Any, **__: Any) -> tuple[Any, ...]:
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    grads = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [None] * len(outputs))
    found = _run(outputs, grads, inputs)
    return tuple(found.get(id(i)) for i in inputs)


@contextlib.contextmanager
def python_engine() -> Iterator[None]:
    """Backward passes in Python, instead of PyTorch's engine."""
    with (
        mock.patch("torch.autograd.backward", _backward),
        mock.patch("torch.autograd.grad", _grad),
        mock.patch.object(Tensor, "backward", lambda self, g=None, **_: _backward([self], [g])),
    ):
        yield
