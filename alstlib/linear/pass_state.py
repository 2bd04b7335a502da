"""Layers with a state (gated delta rule, Mamba) over a sequence that is sharded over ranks.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, H heads, K and V widths of keys and values.

What a rank's slice does to the state that it gets is affine: h_out = M h_in + U, with a matrix M [K, K] for each head
(gated delta rule), one number (Mamba-2, lightning attention) or one for each entry (Mamba-1), and U [K, V]. The pair
does not grow with the slice. So there are three phases:

- summary: each rank makes the pair (M, U) of its slice, from a state of zeros;
- prefix: all ranks exchange their pairs, and the state that comes in is the composition of those of the ranks before;
- run: the slice runs once more, with that state.

Backward is the same in the other order: the gradient g of the state that goes out comes from the ranks after, as
g_in = M^T g_out + W, where W, what the slice's own outputs contribute, takes the place of U. A document begins with
zeros: where one begins in a slice, M is zero, and its run is its summary too. Documents that begin and end inside a
slice need none of this, and share calls (`documents`).

(Sequence parallelism for linear attention: LASP-2, arXiv 2502.07563; the gated delta rule: arXiv 2412.06464.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alstlib.base.recompute import GradientSums, first_order, gradients_of
from alstlib.base.types import OutputAndState
from alstlib.kernels.spans import Documents
from alstlib.linear.documents import KernelRun, runs_of
from alstlib.linear.rule import StateRule
from alstlib.ulysses.alltoall import Exchange


def pass_state(
    rule: StateRule, tokens: Sequence[Tensor], weights: Sequence[Tensor], exchange: Exchange,
    documents: Documents = None, *, start: Tensor | None = None, first: int = 0, length: int | None = None,
    known: dict[str, Tensor] | None = None,
) -> OutputAndState:  # fmt: skip
    """The layer's output [B, L, ..] for this rank's tokens, and the state after the tokens of all ranks.

    The tokens of all ranks may be a part of the sequence (a chunk): then `start` is the state before them, the same on
    all ranks, as its gradient is, and that of the state that is returned.

    Args:
        tokens: the kernel's inputs [B, L, ..] of this rank's tokens.
        weights: its further inputs, the same for all tokens.
        documents: global offsets into the flattened [B * S] batch; None makes every sample one document.
        start: None for zeros.
        first: where the part begins in the sequence.
        length: S; None: the part is all of it.
        known: what a first pass leaves for its recompute, which then makes and exchanges no pairs: M of the slice and
            the state that comes in. The recompute's state after the tokens of all ranks has no value, only a gradient.
    """
    tensors, ranks = (*tokens, *weights), exchange.ranks
    if ranks == 1 and documents is None and start is None:
        return rule.kernel(*tensors, initial_state=None)
    batch, local, *_ = tokens[0].shape
    length, first = local * ranks if length is None else length, first + exchange.rank * local
    runs = runs_of(documents, (batch, local), first, length, rule.packed is not None, tokens[0].device)
    train = torch.is_grad_enabled()
    needs = [train and t is not None and t.requires_grad for t in (*tensors, start)]
    own = _SliceCall(rule, exchange, runs, (batch, local), len(tokens), {} if known is None else known, needs)
    return _StatesPassed.apply(own, start, *tensors)


class _Ran(NamedTuple):
    """A run, with its graph where a backward follows."""

    leaves: Sequence[Tensor]
    before: Tensor | None
    out: Tensor
    after: Any
    """The state; None where no state leaves."""


@dataclass(frozen=True)
class _SliceCall:
    """What one call does with this rank's tokens."""

    rule: StateRule
    exchange: Exchange
    runs: Sequence[KernelRun]
    shape: Sequence[int]
    """[B, L]."""
    count: int
    """How many of the tensors are of tokens; the others are weights."""
    known: dict[str, Tensor]
    needs: Sequence[bool]
    """Which of the tensors and, at the end, the state before the slice need a gradient; none where no backward
    follows."""

    def of(self, run: KernelRun, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a run takes of the tensors."""
        return [*(run.of(t) for t in tensors[: self.count]), *tensors[self.count :]]

    def put(self, whole: Tensor | None, run: KernelRun, part: Tensor) -> Tensor:
        """Write what a run gives for its tokens into a tensor [B, L, ..]."""
        if len(self.runs) == 1:
            return part
        whole = part.new_zeros(*self.shape, *part.shape[2:]) if whole is None else whole
        whole[run.at] = part if run.to is None else part[run.to]
        return whole

    def run(self, run: KernelRun, tensors: Sequence[Tensor], before: Tensor | None = None) -> _Ran:
        """A run from the state before the slice, or from zeros (None)."""
        rule, keep = self.rule, any(self.needs)
        leaves = [t.detach().requires_grad_(need) for t, need in zip(self.of(run, tensors), self.needs)]
        before = None if before is None else before[run.samples].detach().requires_grad_(keep)
        with torch.set_grad_enabled(keep):
            if run.goes_on or run.last:
                out, after = rule.kernel(*leaves, initial_state=before)
                return _Ran(leaves, before, out, after)
            if run.packed is None:
                return _Ran(leaves, None, rule.from_zeros(*leaves), None)
            return _Ran(leaves, None, rule.packed(*leaves, offsets=run.packed), None)

    def summary(self, tensors: Sequence[Tensor], ran: dict[KernelRun, _Ran]) -> tuple[Tensor, Tensor]:
        """(M, U) of the slice, [B, H, ..]; `ran` has the runs that begin with zeros."""
        ms, us = [], []
        for run in (run for run in self.runs if run.last):
            inputs = self.of(run, tensors)
            u = ran[run].after.detach() if run in ran else None
            m, u = self.rule.pair(*inputs) if u is None else (self.rule.forgets(u, *inputs), u)
            ms.append(m.to(u.dtype))
            us.append(u)
        return torch.cat(ms), torch.cat(us)

    def prefix(self, m: Tensor, u: Tensor, start: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        """The state before this rank's slice, and the one after all slices: in the order of the ranks, or `back`."""
        everyone = list(self.exchange.gather(torch.cat([m.flatten(), u.to(m.dtype).flatten()])))
        states, sizes = [start], [m.numel(), u.numel()]
        with torch.autocast(start.device.type, enabled=False):
            for both in everyone[::-1] if back else everyone:
                their_m, their_u = both.split(sizes)
                states.append(self.rule.times(their_m.view_as(m), states[-1]) + their_u.view_as(u))
        return states[-2 - self.exchange.rank if back else self.exchange.rank], states[-1]


class _StatesPassed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: _SliceCall, start: Any, *tensors: Tensor) -> OutputAndState:
        runs, known, before = own.runs, own.known, start
        out: Any = None
        ran = {run: own.run(run, tensors) for run in runs if not run.goes_on}
        if own.exchange.ranks > 1:
            if known:
                end = known["before"].detach()
            else:
                m, u = own.summary(tensors, ran)
                before, end = own.prefix(m, u, torch.zeros_like(u) if start is None else start.to(u.dtype))
                known.update(m=m, before=before)
            before = known["before"]
        ran.update({run: own.run(run, tensors, before) for run in runs if run.goes_on})
        if own.exchange.ranks == 1:
            end = torch.cat([ran[run].after.detach() for run in runs if run.last])
        for run in runs:
            out = own.put(out, run, ran[run].out.detach())
        ctx.left = (own, ran) if any(own.needs) else None
        return out, end

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor, grad: Tensor) -> tuple[Any, ...]:
        if ctx.left is None:
            raise RuntimeError(
                "layer with a state: backward ran a second time, but its graph is freed by the first; run forward again"
            )
        (own, ran), ctx.left = ctx.left, None
        alone, count, runs, after = own.exchange.ranks == 1, own.count, own.runs, grad
        dstart = w = torch.zeros_like(grad)
        if not alone:
            for run, one in ran.items():
                if one.before is not None:
                    (w[run.samples],) = torch.autograd.grad(one.out, one.before, run.of(dout), retain_graph=True)
            m = own.known["m"]
            after, dstart = own.prefix(m.mT if own.rule.matrix else m, w, grad, back=True)
        wholes: list[Tensor | None] = [None] * count
        sums = GradientSums(ran[runs[0]].leaves[count:], narrow=True)
        for run in runs:
            found = _gradients(ran.pop(run), run.of(dout), after[run.samples] if run.last else None)
            if alone and found[-1] is not None:
                dstart[run.samples] = found[-1]
            for i, part in enumerate(found[:count]):
                wholes[i] = wholes[i] if part is None else own.put(wholes[i], run, part)
            sums.add(found[count:-1], last=run is runs[-1])
        return None, dstart if own.needs[-1] else None, *wholes, *sums.done()


def _gradients(ran: _Ran, dout: Tensor, dafter: Tensor | None) -> list[Tensor | None]:
    """Gradients of a run's leaves and of the state before it; None where none is needed."""
    ends = {ran.out: dout}
    if dafter is not None and ran.after.requires_grad:
        ends[ran.after] = dafter
    return gradients_of([*ends], [*ran.leaves, ran.before], [*ends.values()])
