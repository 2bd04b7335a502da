"""Checkpoints that are moved to the host: a layer keeps only its input, on the CPU (ALST, section 3.3).

`checkpoint` runs a function without a graph and recomputes it in backward. What it keeps in between (the input and, if
asked, attention outputs) lies in a `Storage`. When that has too little room for every input, a `Segment` of
consecutive checkpoints keeps only its first one: backward then runs the segment once more without a graph, which puts
its inputs (and attention outputs) on the device, before it recomputes and back-propagates one checkpoint after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from alstlib.base.recompute import (
    Replay,
    Saved,
    Strays,
    Values,
    first_order,
    needing_gradient,
    tensors_of,
    those_that_train,
    trained,
    unchanged,
)
from alstlib.offload.host_store import HostStore
from alstlib.offload.storage import Storage


class Segment:
    """Consecutive layers of which only the first keeps its input; backward makes the others again.

    A member, a layer from its first pass to its backward, has `input(device)`, the input that the first one has kept,
    for the only time, and `again(x, device)`, its output for its input x, without a graph: the input of the next.

    Args:
        every: how many layers there may be; 1 for every input kept.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.members: list[Any] = []
        """None for those whose backward has run."""
        self.inputs: dict[int, Tensor] = {}
        """Inputs that backward has made, by the place of their layer."""
        self.end: Values | None = None
        """Values that the last layer returned; None where no other may follow."""

    def continues_with(self, x: Tensor) -> bool:
        """Whether x is what the last layer returned, and another may follow."""
        return self.end is not None and self.end.are_those_of(x)

    def add(self, member: Any, out: Tensor) -> int:
        """A layer has run; returns its place."""
        self.members.append(member)
        self.end = Values(out) if len(self.members) < self.every else None
        return len(self.members) - 1

    def take(self, index: int, device: torch.device) -> tuple[Tensor, Any]:
        """A layer's input, for its backward (the last one's comes first), and the layer, which is forgotten.

        Raises:
            RuntimeError: the layer's backward has run before.
        """
        member, first = self.members[index], self.members[0]
        if not self.inputs and first is not None:
            self.inputs[0] = first.input(device)
        if member is None or not self.inputs:
            raise RuntimeError(
                "backward ran a second time, but what it needs is freed after the first; run forward again"
            )
        for i in range(max(self.inputs), index):
            self.inputs[i + 1] = self.members[i].again(self.inputs[i], device)
        self.members[index] = None
        return self.inputs.pop(index), member


@dataclass
class _Checkpointed:
    """One checkpoint of a segment. What it keeps lies under a ticket: the input, if it is the first, and attention
    outputs."""

    run: Callable[..., Any]
    store: Storage
    saved: Saved
    module: nn.Module | None
    rest: list[Tensor] = field(default_factory=list)
    replay: Any = None
    ticket: Any = None
    kept: list[Tensor] = field(default_factory=list)  # attention outputs on the device

    def input(self, device: torch.device) -> Tensor:
        x, *self.kept = self.outputs(device)
        return x

    def again(self, x: Tensor, device: torch.device) -> Tensor:
        """Attention outputs stay for its own recompute."""
        self.saved.rewind(self.outputs(device), "again")
        with torch.no_grad(), self.replay():
            out = self.run(x, *self.rest)
        self.kept = self.saved.leave()
        return tensors_of(out)[0]

    def outputs(self, device: torch.device) -> list[Tensor]:
        """Attention outputs, on the device, for the only time."""
        if self.ticket is not None:
            self.kept, self.ticket = self.store.get(self.ticket, device), None
        kept, self.kept = self.kept, []
        return kept


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, member: _Checkpointed, segment: Segment, accept: Callable[[Any], bool],
        weights: Sequence[Tensor] | None, x: Tensor, *rest: Tensor,
    ) -> Any:  # fmt: skip
        ctx.weights, needing = weights, rest[: len(rest) - len(weights or ())]
        ctx.segment, ctx.accept, ctx.device = segment, accept, x.device
        ctx.needs = (x.requires_grad, *(t.requires_grad for t in needing))
        ctx.save_for_backward(*needing)
        member.rest, member.replay = [t.detach() for t in needing], Replay(x.device, member.module)
        store = member.store
        if not segment.members:
            member.ticket = store.ticket()
            store.put(member.ticket, x)
        with unchanged(x, member.module):
            out = member.run(x, *needing)
        if kept := member.saved.leave():
            if member.ticket is None:
                member.ticket = store.ticket(next(m.ticket for m in reversed(segment.members) if m and m.ticket))
            for t in kept:
                store.put(member.ticket, t)
        ctx.index = segment.add(member, tensors_of(out)[0])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.weights is None and not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) are not possible here: an engine (DeepSpeed, FSDP) or a "
                "hook takes each gradient of a checkpointed layer as it is made; call backward() without inputs, or "
                "use checkpoint=False"
            )
        x, member = ctx.segment.take(ctx.index, ctx.device)
        kept = member.outputs(ctx.device)
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *ctx.saved_tensors), ctx.needs)]
        del x
        out = _recompute(member, leaves, kept)
        if not ctx.accept(out):
            del out
            out = _recompute(member, leaves, kept)
        del kept
        member.saved.leave()
        outs = zip(tensors_of(out), grads)
        pairs = [(o, g) for o, g in outs if isinstance(o, Tensor) and o.requires_grad and g is not None]
        del out, outs
        roots, grads = [o for o, _ in pairs], tuple(g for _, g in pairs)
        del pairs
        if ctx.weights is None:
            torch.autograd.backward(roots, grads)
            return (*[None] * 4, *(leaf.grad for leaf in leaves))
        known = (*leaves, *those_that_train(ctx.weights, [True] * len(ctx.weights)))
        found = (strays := Strays()).gradients_of(roots, known, grads)
        del roots, grads
        strays.add()
        return (*[None] * 4, *found)


def _recompute(member: _Checkpointed, leaves: list[Tensor], kept: list[Tensor]) -> Any:
    member.saved.rewind(kept)
    with member.replay(), torch.enable_grad():
        return member.run(*leaves)


def checkpoint(
    fn: Callable[..., Any],
    x: Tensor,
    *args: Any,
    store: Storage | None = None,
    saved: Saved | None = None,
    accept: Callable[[Any], bool] = lambda out: True,
    segment: Segment | None = None,
    module: nn.Module | None = None,
    weights: Sequence[Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """Run fn(x, *args, **kwargs), keep only x, and recompute the rest in backward (ALST, section 3.3).

    With `weights`, autograd returns the gradients of these weights all at once. Without, the backward of the recompute
    adds them up one by one, as in PyTorch's re-entrant checkpointing, so that an engine can take each as soon as it is
    made. Dropout and autocast are replayed exactly.

    Args:
        fn: a function that returns a tensor or a tuple of tensors.
        x: the input that is kept in `store`; other tensors in `args` and `kwargs` stay where they are.
        store: where x is kept; None keeps it on its device.
        saved: attention outputs that are kept together with x; the attention inside `fn` must get the same object.
        weights: the weights inside `fn` that train, or None.
        accept: a function of what a recompute returned, called before its backward; False makes `fn` run once more.
        segment: a segment that x continues (`continues_with`), or a new one; None: x is kept.
        module: the module that `fn` calls; a recompute runs it in the mode (training or evaluation) of the first pass.
            Where its weights train, as they may where it is None, x is made to need a gradient.

    Raises:
        RuntimeError: in backward, for chosen tensors (`torch.autograd.grad`, `backward(inputs=...)`) without `weights`.

    Returns:
        What `fn` returned. Without gradients (`no_grad`), `fn` is simply run.
    """
    if not torch.is_grad_enabled():
        return fn(x, *args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    where = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
    if not (x.requires_grad or where):
        if module is not None and not trained(module):
            return fn(x, *args, **kwargs)
        x = needing_gradient(x)
    needing = [flat[i] for i in where]
    for i in where:
        flat[i] = None  # held by autograd below

    def run(x: Tensor, *tensors: Tensor) -> Any:
        filled = list(flat)
        for i, t in zip(where, tensors):
            filled[i] = t
        a, kw = tree_unflatten(filled, spec)
        return fn(x, *a, **kw)

    member = _Checkpointed(run, store or HostStore(), saved or Saved(keep=False), module)
    return _Checkpoint.apply(member, segment or Segment(), accept, weights, x, *needing, *(weights or ()))
