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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alstlib.kernels.spans import Documents
from alstlib.linear.documents import Run, runs_of
from alstlib.linear.rule import StateRule
from alstlib.recompute import GradientSums, first_order
from alstlib.ulysses.alltoall import Exchange


def pass_state(
    rule: StateRule, tokens: Sequence[Tensor], weights: Sequence[Tensor], exchange: Exchange,
    documents: Documents = None, *, start: Tensor | None = None, first: int = 0, length: int | None = None,
    known: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The layer's output [B, L, ..] for this rank's tokens, and the state after the tokens of all ranks.

    The tokens of all ranks may be a part of the sequence (a chunk): then `start` is the state before them, the same on
    all ranks, as its gradient is, and that of the state that is returned.

    Args:
        tokens: the kernel's inputs [B, L, ..] of this rank's tokens.
        weights: its further inputs, the same for all tokens.
        documents: global offsets into the flattened [B * S] batch; None makes every micro-batch row one document.
        start: None for zeros.
        first: where the part begins in the sequence.
        length: S; None: the part is all of it.
        known: what a first pass leaves for its recompute, which then makes and exchanges no pairs: M of the slice and
            the state that comes in. The recompute's state after the tokens of all ranks has no value, only a gradient.
    """
    if exchange.ranks == 1 and documents is None and start is None:
        return rule.kernel(*tokens, *weights, initial_state=None)
    batch, rows = tokens[0].shape[:2]
    runs = runs_of(
        documents, (batch, rows), first + exchange.rank * rows, rows * exchange.ranks if length is None else length,
        rule.packed is not None, tokens[0].device,
    )  # fmt: skip
    tensors, train = (*tokens, *weights), torch.is_grad_enabled()
    needs = [train and t.requires_grad for t in tensors]
    keep = any(needs) or (train and start is not None and start.requires_grad)
    return _PassState.apply(_Slice(rule, exchange, runs, len(tokens), known, needs, keep), start, *tensors)


@dataclass(frozen=True)
class _Slice:
    """What one call does with this rank's tokens."""

    rule: StateRule
    exchange: Exchange
    runs: Sequence[Run]
    count: int
    """How many of the tensors are of tokens; the others are weights."""
    known: dict[str, Tensor] | None
    needs: Sequence[bool]
    """Which of the tensors need a gradient."""
    keep: bool
    """Whether a backward follows."""

    def of(self, run: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a run takes of the tensors."""
        return [run.of(t) if i < self.count else t for i, t in enumerate(tensors)]


class _Ran(NamedTuple):
    """A run, with its graph where a backward follows."""

    leaves: Sequence[Tensor]
    before: Tensor | None
    out: Tensor
    after: Any
    """The state; None where no state leaves."""


def summary(own: _Slice, tensors: Sequence[Tensor], ran: dict[Run, _Ran]) -> tuple[Tensor, Tensor]:
    """(M, U) of this rank's slice, [B, H, ..]; `ran` has the runs that begin with zeros."""
    pairs = []
    for run in (run for run in own.runs if run.last):
        inputs = own.of(run, tensors)
        pairs.append((own.rule.forgets(*inputs), ran[run].after) if run in ran else own.rule.pair(*inputs))
    u = torch.cat([u.detach() for _, u in pairs])
    return torch.cat([m.to(u.dtype) for m, _ in pairs]), u


def prefix(
    pairs: Sequence[tuple[Tensor, Tensor]], times: Callable[[Tensor, Tensor], Tensor], start: Tensor
) -> list[Tensor]:
    """The state before each slice, in the order of the pairs, and after the last one."""
    states = [start]
    with torch.autocast(start.device.type, enabled=False):
        for m, u in pairs:
            states.append(times(m, states[-1]) + u)
    return states


def _of_all_ranks(exchange: Exchange, m: Tensor, u: Tensor) -> list[tuple[Tensor, Tensor]]:
    everyone = exchange.gather(torch.cat([m.flatten(), u.to(m.dtype).flatten()]))
    return [(row[: m.numel()].view_as(m), row[m.numel() :].view_as(u)) for row in everyone]


def run_from(own: _Slice, run: Run, tensors: Sequence[Tensor], before: Tensor | None) -> _Ran:
    """A run from the state before it, or from zeros (None)."""
    leaves = [t.detach().requires_grad_(need) for t, need in zip(own.of(run, tensors), own.needs)]
    before = None if before is None else before.detach().requires_grad_(own.keep)
    with torch.set_grad_enabled(own.keep):
        if run.goes_on or run.last:
            out, after = own.rule.kernel(*leaves, initial_state=before)
        elif run.packed is not None and own.rule.packed is not None:
            out, after = own.rule.packed(*leaves, documents=run.packed), None
        else:
            out, after = own.rule.from_zeros(*leaves), None
    return _Ran(leaves if own.keep else (), before, out, after)


def run_back(
    ran: _Ran, dout: Tensor, dafter: Tensor | None, to_before: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of a run's leaves and, if wanted, of the state before it."""
    outs, ups = [ran.out], [dout]
    if dafter is not None and ran.after.requires_grad:
        outs, ups = [ran.out, ran.after], [dout, dafter]
    wanted = [leaf for leaf in ran.leaves if leaf.requires_grad]
    if to_before and ran.before is not None:
        wanted.append(ran.before)
    found = iter(torch.autograd.grad(outs, wanted, ups, allow_unused=True) if wanted else ())
    return [next(found) if leaf.requires_grad else None for leaf in ran.leaves], next(found, None)


class _PassState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: _Slice, start: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        exchange, runs = own.exchange, own.runs
        ran = {run: run_from(own, run, tensors, None) for run in runs if not run.goes_on}
        m, before, end = None, start, None
        if exchange.ranks > 1 and own.known:
            m, before = own.known["m"], own.known["before"]
            end = before.detach()
        elif exchange.ranks > 1:
            m, u = summary(own, tensors, ran)
            begin = torch.zeros_like(u) if start is None else start.to(u.dtype)
            states = prefix(_of_all_ranks(exchange, m, u), own.rule.times, begin)
            before, end = states[exchange.rank], states[-1]
            if own.known is not None:
                own.known.update(m=m, before=before)
        for run in (run for run in runs if run.goes_on):
            assert before is not None
            ran[run] = run_from(own, run, tensors, before[run.rows])
        if end is None:
            end = torch.cat([ran[run].after.detach() for run in runs if run.last])
        out = ran[runs[0]].out.detach()
        if len(runs) > 1:
            out = out.new_empty(*tensors[0].shape[:2], *out.shape[2:])
            for run in runs:
                run.into(out, ran[run].out.detach())
        if own.keep:
            ctx.left = own, ran, m
            # shapes and dtypes alone: what a node holds of tensors itself lives as long as somebody holds the loss
            ctx.like = [torch.empty_like(t, device="meta") for t in tensors]
            ctx.start = None if start is None else start.dtype
        return out, end

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor, grad: Tensor) -> tuple[Any, ...]:
        if ctx.left is None:
            raise RuntimeError(
                "layer with a state: backward ran a second time, but its graph is freed by the first; run forward again"
            )
        (own, ran, m), ctx.left = ctx.left, None
        exchange, runs, count, w, grads = own.exchange, own.runs, own.count, torch.zeros_like(grad), [grad]
        alone = exchange.ranks == 1
        if not alone:
            for run, one in ran.items():
                if one.before is not None:
                    (w[run.rows],) = torch.autograd.grad(one.out, one.before, run.of(dout), retain_graph=True)
            grads = prefix(_of_all_ranks(exchange, m, w)[::-1], own.rule.transposed, grad)
        after = grads[exchange.ranks - 1 - exchange.rank]
        wholes = [
            torch.zeros_like(t, device=dout.device) if need and len(runs) > 1 else None
            for t, need in zip(ctx.like[:count], own.needs)
        ]
        sums = GradientSums(ctx.like[count:], narrow=True)
        for run in runs:
            one = ran.pop(run)
            dleaves, dbefore = run_back(one, run.of(dout), after[run.rows] if run.last else None, alone)
            if dbefore is not None:
                w[run.rows] = dbefore
            for i, (whole, part) in enumerate(zip(wholes, dleaves)):
                if whole is None:
                    wholes[i] = part
                elif part is not None:
                    run.into(whole, part)
            sums.add(dleaves[count:], last=run is runs[-1])
        into = None if ctx.start is None else (w if alone else grads[-1]).to(ctx.start)
        return None, into, *wholes, *sums.done()
