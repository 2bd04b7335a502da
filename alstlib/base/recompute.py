"""What a recompute in backward must take over from the first pass: random state, precision, modes of modules, attention
outputs (`Saved`); what runs now (`Pass`); also sums of gradients in fp32, and refusals.

Everything that is recomputed in backward (tiles, checkpoints, chunks) stands on this.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from alstlib.base.mesh import accelerator
from alstlib.base.types import OutputAndLse


def own_random(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """What is drawn inside, on the CPU and on `device`, changes no random numbers outside."""
    devices = [] if accelerator(device) is None else [device]
    return torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cpu")


def random_states(device: torch.device) -> list[Tensor]:
    """What random numbers are drawn from next, on the CPU and on `device`."""
    here = accelerator(device)
    return [torch.get_rng_state(), *([] if here is None else [here.get_rng_state(device)])]


class Replay:
    """Random state, autocast and modes of a first pass, so that recomputing it draws the same dropout masks and dtypes.

    Args:
        device: whose random state is kept, besides the CPU's.
        module: whose modes (training or evaluation) are those of the first pass again.
    """

    def __init__(self, device: torch.device, module: nn.Module | None = None) -> None:
        self.device = device
        self.modes = [] if module is None else [(m, m.training) for m in module.modules()]
        self.random = random_states(device)
        kind = device.type
        self.autocast = (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            torch.is_autocast_cache_enabled(),
        )

    def has_moved(self) -> bool:
        """Whether random numbers have been drawn since."""
        now = random_states(self.device)
        with unset_fake_temporarily():  # the states are real in a simulation too
            return not all(map(torch.equal, self.random, now))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        switched = [(m, mode) for m, mode in self.modes if m.training != mode]
        with own_random(self.device), torch.autocast(*self.autocast):
            cpu, *own = self.random
            torch.set_rng_state(cpu)
            for state in own:
                torch.get_device_module(self.device).set_rng_state(state, self.device)
            for module, mode in switched:
                module.training = mode
            try:
                yield
            finally:
                for module, mode in switched:
                    module.training = not mode


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What runs now, as tiled MLPs see it: a pass over a model or over one of its layers."""

    drew: set[nn.Module] = field(default_factory=set)
    """MLPs that drew random numbers: a first pass fills it, and its recompute, which has to draw them too, reads it."""
    skip: bool = False
    """Whether nothing reads the MLPs' outputs, as in most recomputes: then tiles return zeros (`tiled.skip`)."""
    whole: bool = False
    """Whether inputs of no more tokens than a tile run as they are, and keep their intermediates."""
    followers: Mapping[Any, Any] = field(default_factory=dict)
    """`tiled.skip.Follower`s, by MLP, whose modules' work is done in the MLPs' tiles too where `skip` is set."""


_NOW: ContextVar[Pass | None] = ContextVar("now", default=None)
"""The only carrier of what runs now. A recompute may run in a thread of autograd's own, and sets it there anew."""


def now() -> Pass | None:
    """The pass that runs now; None outside of any."""
    return _NOW.get()


def begin(one: Pass | None) -> None:
    """From here on this pass runs; `entered` does so for what is inside of it."""
    _NOW.set(one)


@contextlib.contextmanager
def entered(one: Pass) -> Iterator[None]:
    """Run what is inside as this pass."""
    token = _NOW.set(one)
    try:
        yield
    finally:
        _NOW.reset(token)


class Values:
    """Recognises the values that a tensor has now, also in the views of it in which engines' hooks wrap a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version

    def are_those_of(self, x: Any) -> bool:
        """Whether x is all of that memory, in the same order, and nothing has been written to it since."""
        if not isinstance(x, Tensor) or x.shape != self.tensor.shape or x.stride() != self.tensor.stride():
            return False
        here = [(t.dtype, t.untyped_storage()._cdata, t.storage_offset()) for t in (x, self.tensor)]
        return here[0] == here[1] and x._version == self.version


def parents_of(roots: Iterable[Tensor]) -> dict[Any, list[Any]]:
    """The nodes of the graph that made these tensors, each with the nodes that got something of it. Found without
    recursion: a closure that calls itself would keep the graph alive."""
    parents: dict[Any, list[Any]] = {t.grad_fn: [] for t in roots if t.grad_fn is not None}
    stack = [*parents]
    while stack:
        node = stack.pop()
        for child in (child for child, _ in node.next_functions if child is not None):
            if child not in parents:
                parents[child] = []
                stack.append(child)
            parents[child].append(node)
    return parents


def leaves_of(roots: Iterable[Tensor], known: Iterable[Tensor] = ()) -> list[Tensor]:
    """The leaves of the graph of these tensors that need a gradient, without those that are known."""
    mine = {id(t) for t in known}
    found = (getattr(node, "variable", None) for node in parents_of(roots))
    return [leaf for leaf in found if leaf is not None and id(leaf) not in mine]


def gradients_of(
    roots: Sequence[Tensor], tensors: Sequence[Tensor | None], upstream: Sequence[Tensor], keep: bool = False
) -> list[Any]:  # fmt: skip
    """The gradient of each of these tensors; None where it needs none, or the roots do not depend on it. With `keep`
    the graph stays, for others that share a part of it."""
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = torch.autograd.grad(roots, wanted, upstream, keep or None, allow_unused=True) if wanted else ()
    of = dict(zip(map(id, wanted), found))
    return [of.get(id(t)) for t in tensors]


class Strays:
    """Gradients of weights that a recomputed module uses and does not own, such as a vector that a user's hook adds.
    Its autograd function has no edge to them: what they get is added to their `grad` once, after the recomputes. In a
    backward for chosen tensors (`torch.autograd.grad`), which are others, nothing is. Which backward that is, an object
    that is made in a recompute asks then: what recomputes asks for chosen tensors itself."""

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        inside = torch._C._current_graph_task_id() != -1
        self.everywhere = torch.autograd._is_checkpoint_valid() if inside else None

    def gradients_of(
        self, roots: Sequence[Tensor], tensors: Sequence[Tensor], upstream: Sequence[Tensor]
    ) -> list[Any]:  # fmt: skip
        """The gradient of each of these tensors from one recompute, as `gradients_of` gives them."""
        everywhere = torch.autograd._is_checkpoint_valid() if self.everywhere is None else self.everywhere
        strays = leaves_of(roots, tensors) if everywhere else []
        # what a stray became before the recomputes, outside of them, is shared by all of them
        found = gradients_of(roots, [*tensors, *strays], upstream, keep=bool(strays))
        for stray in reversed(strays):
            if (grad := found.pop()) is not None:
                wide = grad.to(sum_dtype(grad))
                self.sums[stray] = self.sums[stray] + wide if stray in self.sums else wide
        return found

    def add(self) -> None:
        if self.sums:
            torch.autograd.backward([*self.sums], [total.to(stray.dtype) for stray, total in self.sums.items()])
            self.sums.clear()


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd function that has no second-order gradients: refuses `create_graph=True`."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True: alstlib computes gradients of the first order only; use create_graph=False, or "
                "detach() the model first"
            )
        return backward(ctx, *grads)

    return checked


def backward_in_this_thread() -> Callable[[], None] | None:
    """Have what this thread calls backward on run in this thread as a whole. Returns what takes that back; None where
    it was so already.

    PyTorch runs a node of the graph in the thread of the device that its outputs are on: on the CPU that is the thread
    that called backward, on another device one of the device's own. A layer whose hidden states lie on the host has its
    nodes in the one, and the accumulation of its weights' gradients in the other, and nothing orders the two. Engines
    look for the gradients in hooks of the layer: ZeRO-3 then reduces zeros in place of a gradient, and FSDP2 leaves it
    out. The collectives of both threads also meet on one communicator, in an order that differs between ranks. In one
    thread nodes run in the order of the graph, the same on all ranks, and a gradient is accumulated before the next
    node runs.
    """
    if not torch._C._is_multithreading_enabled():
        return None
    torch.autograd.set_multithreading_enabled(False)
    thread = threading.get_ident()

    def restore() -> None:
        if threading.get_ident() == thread:  # the setting is one of each thread
            torch.autograd.set_multithreading_enabled(True)

    return restore


def check_thread(device: torch.device) -> None:
    """Refuse a backward that does not run in one thread (`backward_in_this_thread`); on a CPU each does.

    Raises:
        RuntimeError: with what to call in the thread that calls backward.
    """
    if device.type != "cpu" and torch._C._is_multithreading_enabled():
        raise RuntimeError(
            "backward was called in another thread than forward, while hidden states lie on the host: engines would "
            "miss gradients. Call torch.autograd.set_multithreading_enabled(False) in that thread first, or use "
            "on_host='none'"
        )


@contextlib.contextmanager
def unchanged(x: Tensor, module: nn.Module | None) -> Iterator[None]:
    """Refuse a first pass that changes its input: the recompute would begin with what was changed.

    Raises:
        ValueError: names the module.
    """
    before = None if x.is_inference() else x._version
    yield
    if before is not None and x._version != before:
        raise ValueError(
            f"{'a function' if module is None else type(module).__name__} changes its input in place, and a recompute "
            "would begin with the changed input; leave 'mlp' or 'norm' out of Options.tiles for an MLP or a norm, and "
            "checkpoint=False with chunk=None for a layer"
        )


def those_that_train(params: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """The parameters that need a gradient, of those that were there in forward.

    Raises:
        RuntimeError: there are others now.
    """
    if len(params) != len(needs) or not all(p.requires_grad for p, need in zip(params, needs) if need):
        raise RuntimeError(
            "weights were frozen or unfrozen between a forward and its backward (such as by switching an adapter off), "
            "so that the recompute would differ; call backward() before that"
        )
    return [p for p, need in zip(params, needs) if need]


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The weights of a module that train; an engine may swap them between a forward and its backward."""
    return [p for p in module.parameters() if p.requires_grad]


class _Needing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def needing_gradient(x: Tensor) -> Tensor:
    """x, which needs no gradient, as a tensor that needs one. It is no leaf: autograd would keep that, which is as long
    as the sequence, on its device until its backward."""
    return _Needing.apply(x, x.new_empty(0).requires_grad_())


def with_gradient(x: Tensor, module: nn.Module) -> Tensor:
    """x, which needs a gradient where a weight of the module does: an input that needs none makes ZeRO-3's hooks of a
    leaf fire before backward."""
    return x if x.requires_grad or not torch.is_grad_enabled() or not trained(module) else needing_gradient(x)


def tensors_of(made: Any) -> tuple[Any, ...]:
    """What a module or a function returned, as a tuple: a single tensor as one of one."""
    return (made,) if isinstance(made, Tensor) else tuple(made)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The precision in which numbers like x are summed: fp32, or their own where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class GradientSums:
    """Sums of gradients of `params` over tiles or chunks, in fp32.

    Args:
        narrow: a gradient that is the only one stays in its own precision.
    """

    def __init__(self, params: Sequence[Tensor], narrow: bool = False) -> None:
        self.params, self.narrow = params, narrow
        self.sums: list[Tensor | None] = [None] * len(params)

    def add(self, grads: Sequence[Tensor | None], last: bool) -> None:
        """Add the gradients of one tile, in the order of `params`; `last` says that no other tile follows."""
        for i, g in enumerate(grads):
            if g is None:
                continue
            total = self.sums[i]
            if total is None and last and self.narrow:
                self.sums[i] = g
                continue
            wide = sum_dtype(g)
            # copied before anything is added to it: a gradient may be a view of the caller's or of another
            self.sums[i] = g.to(wide, copy=not last) if total is None else total.add_(g)

    def done(self, needs: Sequence[bool] = ()) -> list[Tensor | None]:
        """The sums, in the precision of the parameters; None for a parameter that has got no gradient, and for those
        that need none, where `needs` says so of all."""
        sums = iter([s if s is None else s.to(p.dtype) for s, p in zip(self.sums, self.params)])
        self.sums = []
        return [next(sums) if need else None for need in needs] or list(sums)


class Saved:
    """Attention outputs that a checkpoint keeps from one pass for the next: (output, logsumexp) in order of the calls,
    output in sequence layout [B, H, L, D], logsumexp [B, H / P, S] in head layout.

    Args:
        keep: whether the first pass leaves its outputs here, to be kept with the checkpoint's input.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self.stage: Literal["first", "again", "graph"] = "first"
        """Name of the pass that runs: the first, the one that makes a segment's inputs again, or the one that makes the
        graph."""
        self.tensors: list[OutputAndLse] = []
        self.replaying = False
        self._left: dict[tuple[Hashable, int], dict[str, Any]] = {}
        self._calls = Counter[Hashable]()

    @property
    def active(self) -> bool:
        """Whether this pass's attentions leave outputs here, or find them."""
        return self.replaying or self.stage == "again" or (self.stage == "first" and self.keep)

    def left_by(self, part: Hashable) -> dict[str, Any]:
        """What this call of a part with a state leaves from the first pass, of constant size: its recompute exchanges
        nothing with other ranks before its backward. A pass may call a part several times."""
        self._calls[part] += 1
        return self._left.setdefault((part, self._calls[part]), {})

    def take(self) -> OutputAndLse:
        """The next call's output and logsumexp, which then are the last ones."""
        self.tensors.append(self.tensors.pop(0))
        return self.tensors[-1]

    def rewind(self, tensors: list[Tensor], stage: Literal["again", "graph"] = "graph") -> None:
        """Start another pass over these tensors (output, logsumexp, output, ...); with none, attention computes."""
        self.stage, self.replaying = stage, bool(tensors)
        self._calls.clear()
        self.tensors = list(zip(tensors[::2], tensors[1::2]))

    def leave(self) -> list[Tensor]:
        """Give up the tensors: output, logsumexp, output, ..."""
        pairs, self.tensors, self.replaying = self.tensors, [], False
        return [t for pair in pairs for t in pair]
