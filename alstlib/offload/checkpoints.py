"""Checkpoints that are moved to the host: a layer keeps only its input, on the CPU (ALST, section 3.3).

`checkpoint` runs a function without a graph and recomputes it in backward. What it keeps in between (the input and, if
asked, attention outputs) lies in a `Storage`. When that has too little room for every input, a `Segment` of
consecutive checkpoints keeps only its first one: backward then runs the segment once more without a graph, which puts
its inputs (and attention outputs) on the device, before it recomputes and back-propagates one checkpoint after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from alstlib.offload.host_store import HostStore
from alstlib.offload.storage import Storage
from alstlib.recompute import Replay, Values, first_order, those_that_train, unchanged


class Saved:
    """Attention outputs that a checkpoint keeps from one pass for the next: (output, logsumexp) in order of the calls,
    output in sequence layout [B, H, L, D], logsumexp [B, H / P, S] in head layout.

    Args:
        keep: the first pass leaves them here, to lie beside the input.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self.stage: Literal["first", "again", "graph"] = "first"
        """Name of the pass that runs: the first, the one that makes a segment's inputs again, or the one that makes the
        graph."""
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.replaying = False
        self.position = 0
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

    def take(self) -> tuple[Tensor, Tensor]:
        """The next call's output and logsumexp."""
        self.position += 1
        return self.tensors[self.position - 1]

    def rewind(self, tensors: list[Tensor], stage: Literal["again", "graph"] = "graph") -> None:
        """Start another pass over these tensors (output, logsumexp, output, ...); with none, attention computes."""
        self.stage, self.replaying, self.position = stage, bool(tensors), 0
        self._calls.clear()
        self.tensors = list(zip(tensors[::2], tensors[1::2]))

    def leave(self) -> list[Tensor]:
        """Give up the tensors: output, logsumexp, output, ..."""
        pairs, self.tensors, self.replaying = self.tensors, [], False
        return [t for pair in pairs for t in pair]


@dataclass
class _Member:
    """One checkpoint of a segment, until its backward."""

    run: Callable[..., Any]
    rest: list[Tensor]
    replay: Replay
    saved: Saved
    ticket: Any = None
    kept: list[Tensor] | None = None  # attention outputs on the device

    def again(self, x: Tensor) -> Tensor:
        """The next checkpoint's input, without a graph; attention outputs stay for this one's own recompute."""
        self.saved.rewind(self.kept or [], "again")
        with torch.no_grad(), self.replay():
            out = self.run(x, *self.rest)
        self.kept = self.saved.leave()
        return _first(out)


class Segment:
    """Consecutive checkpoints of which only the first keeps its input.

    Args:
        store: where it is kept.
        every: how many checkpoints there may be; 1 for every input kept.
    """

    def __init__(self, store: Storage, every: int = 1) -> None:
        self.store, self.every = store, every
        self.members: list[_Member | None] = []
        self.inputs: dict[int, Tensor] = {}
        self.end: Values | None = None
        """Values that the last checkpoint returned; None where no other may follow."""

    def continues_with(self, x: Tensor) -> bool:
        """Whether x is what the last checkpoint returned, and another may follow."""
        return self.end is not None and self.end.are_those_of(x)

    def first_pass(self, run: Callable[..., Any], saved: Saved, replay: Replay, x: Tensor, rest: list[Tensor]) -> Any:
        """Run a checkpoint without a graph, and keep what backward cannot make."""
        member = _Member(run, [t.detach() for t in rest], replay, saved)
        if not self.members:
            member.ticket = self.store.ticket()
            self.store.put(member.ticket, x)
        self.members.append(member)
        out = run(x, *rest)
        if kept := saved.leave():
            if member.ticket is None:
                member.ticket = self.store.ticket(next(m.ticket for m in reversed(self.members) if m and m.ticket))
            for t in kept:
                self.store.put(member.ticket, t)
        self.end = Values(_first(out)) if len(self.members) < self.every else None
        return out

    def take(self, index: int, device: torch.device) -> tuple[Tensor, list[Tensor], _Member]:
        """A checkpoint's input and attention outputs, on the device, for its backward."""
        member = self.members[index]
        if member is not None and index not in self.inputs:
            self._make_inputs(index, device)
        if member is None or index not in self.inputs:
            raise RuntimeError(
                "checkpoint: backward ran a second time, but what it needs is freed after the first; run forward again"
            )
        self._fetch(member, device)
        self.members[index] = None
        kept, member.kept = member.kept or [], None
        return self.inputs.pop(index), kept, member

    def _make_inputs(self, last: int, device: torch.device) -> None:
        """From the input kept, those of all checkpoints up to `last`."""
        if (head := self.members[0]) is None or head.ticket is None:
            return
        self.inputs[0], *head.kept = self.store.get(head.ticket, device)
        head.ticket = None
        for i, member in enumerate(self.members[:last]):
            assert member is not None
            self._fetch(member, device)
            self.inputs[i + 1] = member.again(self.inputs[i])

    def _fetch(self, member: _Member, device: torch.device) -> None:
        if member.ticket is not None:
            member.kept, member.ticket = self.store.get(member.ticket, device), None


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Any],
        segment: Segment,
        saved: Saved,
        accept: Callable[[Any], bool],
        module: nn.Module | None,
        weights: Sequence[Tensor] | None,
        x: Tensor,
        *rest: Tensor,
    ) -> Any:
        ctx.weights, needing = weights, rest[: len(rest) - len(weights or ())]
        ctx.segment, ctx.index, ctx.accept, ctx.device = segment, len(segment.members), accept, x.device
        ctx.needs = (x.requires_grad, *(t.requires_grad for t in needing))
        ctx.save_for_backward(*needing)
        with unchanged(x, module):
            return segment.first_pass(run, saved, Replay(x.device, module), x, list(needing))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        everywhere = torch.autograd._is_checkpoint_valid()  # not for chosen tensors, as torch.autograd.grad
        if ctx.weights is None and not everywhere:
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) are not possible here: an engine (DeepSpeed, FSDP) or a "
                "hook takes each gradient of a checkpointed layer as it is made; call backward() without inputs, or "
                "use checkpoint=False"
            )
        x, kept, member = ctx.segment.take(ctx.index, ctx.device)
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *ctx.saved_tensors), ctx.needs)]
        del x
        out = _recompute(member, leaves, kept)
        if not ctx.accept(out):
            del out
            out = _recompute(member, leaves, kept)
        del kept
        member.saved.leave()
        outs = (out,) if isinstance(out, Tensor) else out
        pairs = [(o, g) for o, g in zip(outs, grads) if isinstance(o, Tensor) and o.requires_grad and g is not None]
        del out, outs
        roots, grads = [o for o, _ in pairs], tuple(g for _, g in pairs)
        del pairs
        if ctx.weights is None:
            torch.autograd.backward(roots, grads)
            return (*[None] * 6, *(leaf.grad for leaf in leaves))
        known = [t for t in (*leaves, *those_that_train(ctx.weights, [True] * len(ctx.weights))) if t.requires_grad]
        strays = _leaves(roots, known) if everywhere else []
        found = torch.autograd.grad(roots, [*known, *strays], grads, allow_unused=True) if known or strays else []
        del roots, grads
        if strays:  # weights that the module uses and does not own
            torch.autograd.backward(strays, found[len(known) :])
        of = {id(t): g for t, g in zip(known, found)}
        return (*[None] * 6, *(of.get(id(t)) for t in (*leaves, *ctx.weights)))


def _leaves(roots: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of the graph that need a gradient, without those that are known."""
    mine, found, stack = {id(t) for t in known}, [], [t.grad_fn for t in roots]
    seen = set(stack)
    while stack:
        node: Any = stack.pop()
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in mine:
            found.append(leaf)
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        stack += new
    return found


def _recompute(member: _Member, leaves: list[Tensor], kept: list[Tensor]) -> Any:
    member.saved.rewind(kept)
    with member.replay(), torch.enable_grad():
        return member.run(*leaves)


def checkpoint(
    fn: Callable[..., Any],
    x: Tensor,
    *args: Any,
    store: Storage | None = None,
    saved: Saved | None = None,
    trains: bool = True,
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
        trains: whether `fn` has weights that train; then x is made to need a gradient where it does not.
        weights: the weights inside `fn` that train, or None.
        accept: a function of what a recompute returned, called before its backward; False makes `fn` run once more.
        segment: a segment that x continues (`continues_with`), or a new one, in place of `store`.
        module: the module that `fn` calls; a recompute runs it in the mode (training or evaluation) of the first pass.

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
        if not trains:
            return fn(x, *args, **kwargs)
        x = x.detach().requires_grad_()
    needing = [flat[i] for i in where]
    for i in where:
        flat[i] = None  # held by autograd below

    def run(x: Tensor, *tensors: Tensor) -> Any:
        filled = list(flat)
        for i, t in zip(where, tensors):
            filled[i] = t
        a, kw = tree_unflatten(filled, spec)
        return fn(x, *a, **kw)

    segment = segment or Segment(store or HostStore())
    return _Checkpoint.apply(
        run, segment, saved or Saved(keep=False), accept, module, weights, x, *needing, *(weights or ())
    )
