"""Layers with a state (gated delta rule, Mamba) over a sequence that is sharded over ranks.

Shape legend: B batch, S sequence, P ranks, L = S / P tokens of this rank, H heads, K and V widths of keys and values.

What a rank's slice does to the state that it gets is affine: h_out = M h_in + U, with a matrix M [K, K] for each head
(gated delta rule), one number (Mamba-2, lightning attention) or one for each entry (Mamba-1), and U [K, V]. The pair
does not grow with the slice. So each rank makes its pair, from a state of zeros; all ranks exchange their pairs; the
state that comes in is the composition of the pairs of the ranks before; and the slice runs once more, with it. Backward
is the same in the other order: the gradient g of the state that goes out comes from the ranks after, as g_in = M^T
g_out + W, where W is what the slice's own outputs contribute. A document begins with zeros: where one begins in a
slice, M is zero. Documents that begin and end inside a slice need none of this, and share calls (`documents`).

(Sequence parallelism for linear attention: LASP-2, arXiv 2502.07563; the gated delta rule: arXiv 2412.06464.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.spans import Documents
from alstlib.linear.documents import Run, runs_of
from alstlib.linear.rule import StateRule
from alstlib.recompute import GradientSums, first_order
from alstlib.ulysses.alltoall import Exchange


def over_ranks(
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
    train, where = torch.is_grad_enabled(), (documents, first, length)
    return _OverRanks.apply(rule, exchange, where, train, len(tokens), known, start, *tokens, *weights)


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rule: StateRule, exchange: Exchange, where: tuple[Documents, int, int | None], train: bool,
        count: int, known: dict[str, Tensor] | None, start: Tensor | None, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        keep, needs = train and any(ctx.needs_input_grad), ctx.needs_input_grad[7:]
        batch, rows = tensors[0].shape[:2]
        documents, first, length = where
        runs = runs_of(
            documents, (batch, rows), first + exchange.rank * rows, rows * exchange.ranks if length is None else length,
            rule.packed is not None, tensors[0].device,
        )  # fmt: skip

        def of(run: Run) -> list[Tensor]:
            return [run.tokens.of(t) if i < count else t for i, t in enumerate(tensors)]

        def second_pass(run: Run, before: Tensor | None) -> None:
            leaves = [t.detach().requires_grad_(keep and need) for t, need in zip(of(run), needs)]
            run.before = None if before is None else before.detach().requires_grad_(keep)
            with torch.set_grad_enabled(keep):
                if run.inside:
                    run.out = rule.whole(*leaves, documents=run.tokens.packed)
                else:
                    run.out, run.after = rule.kernel(*leaves, initial_state=run.before)
            run.leaves = leaves if keep else ()

        pairs: list[tuple[Tensor, Tensor]] = []
        alone, again = exchange.ranks == 1, bool(known)
        for run in runs:
            if not run.goes_on:
                second_pass(run, None)
            if run.last and not alone and not again:
                pairs.append(rule.pair(*of(run)) if run.goes_on else (rule.forgets(*of(run)), _there(run.after)))
        m, before, state = None, start, None
        if again and known is not None:
            m, before = known["m"], known["before"]
            state = before.detach()
        elif not alone:
            u = torch.cat([u.detach() for _, u in pairs])
            m = torch.cat([m.to(u.dtype) for m, _ in pairs])
            state, states = torch.zeros_like(u) if start is None else start.to(u.dtype), []
            with torch.autocast(u.device.type, enabled=False):
                for their_m, their_u in _pairs(exchange, m, u):
                    states.append(state)
                    state = rule.times(their_m, state) + their_u
            before = states[exchange.rank]
            if known is not None:
                known |= {"m": m, "before": before}
        for run in runs:
            if run.goes_on:
                second_pass(run, _there(before)[run.rows])
        if state is None:
            state = torch.cat([_there(run.after).detach() for run in runs if run.last])
        out = _there(runs[0].out).detach()
        if len(runs) > 1:
            out = out.new_empty(batch, rows, *out.shape[2:])
            for run in runs:
                run.tokens.into(out, _there(run.out).detach())
        if keep:
            ctx.rule, ctx.exchange, ctx.needs, ctx.count, ctx.runs, ctx.m = rule, exchange, needs, count, runs, m
            # shapes and dtypes alone: what a node holds of tensors itself lives as long as somebody holds the loss
            ctx.like = [torch.empty_like(t, device="meta") for t in tensors]
            ctx.start = None if start is None else start.dtype
        return out, state

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor, grad: Tensor) -> tuple[Any, ...]:
        if ctx.runs is None:
            raise RuntimeError(
                "layer with a state: backward ran a second time, but its graph is freed by the first; run forward again"
            )
        (rule, exchange, count), runs, ctx.runs = (ctx.rule, ctx.exchange, ctx.count), ctx.runs, None
        alone, grads, w = exchange.ranks == 1, [grad], torch.zeros_like(grad)
        if not alone:
            for run in runs:
                if run.before is not None:
                    (w[run.rows],) = torch.autograd.grad(run.out, run.before, run.tokens.of(dout), retain_graph=True)
            with torch.autocast(w.device.type, enabled=False):
                for their_m, their_w in reversed(_pairs(exchange, ctx.m, w)):
                    grads.append(rule.transposed(their_m, grads[-1]) + their_w)
        after, grad = grads[exchange.ranks - 1 - exchange.rank], w if alone else grads[-1]
        wholes = [
            torch.zeros_like(t, device=dout.device) if need and len(runs) > 1 else None
            for t, need in zip(ctx.like[:count], ctx.needs)
        ]
        sums = GradientSums(ctx.like[count:], narrow=True)
        for run in runs:
            outs, ups = [run.out], [run.tokens.of(dout)]
            if run.last and run.after.requires_grad:
                outs, ups = [run.out, run.after], [ups[0], after[run.rows]]
            wanted = [i for i, leaf in enumerate(run.leaves) if leaf.requires_grad]
            leaves = [run.leaves[i] for i in wanted]
            if alone and run.before is not None:
                leaves.append(run.before)
            found = torch.autograd.grad(outs, leaves, ups, allow_unused=True) if leaves else ()
            if alone and run.before is not None:
                w[run.rows] = found[-1]
            of = dict(zip(wanted, found))
            for i, whole in enumerate(wholes):
                if whole is None:
                    wholes[i] = of.get(i)
                elif of[i] is not None:
                    run.tokens.into(whole, of[i])
            sums.add([of.get(i) for i in range(count, len(ctx.like))], last=run is runs[-1])
            run.leaves, run.before, run.out, run.after = (), None, None, None
        into = None if ctx.start is None else grad.to(ctx.start)
        return (None, None, None, None, None, None, into, *wholes, *sums.done())


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _pairs(exchange: Exchange, m: Tensor, u: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Every rank's (M, U), in rank order."""
    everyone = exchange.gather(torch.cat([m.flatten(), u.to(m.dtype).flatten()]))
    return [(row[: m.numel()].view_as(m), row[m.numel() :].view_as(u)) for row in everyone]
