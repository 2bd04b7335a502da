"""How the heads of one attention call are divided among the ranks of an SP group: whole heads, or parts of heads too.

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D width.

`WholeHeads` is the plain Ulysses exchange, q [B, H / P, S, D]. `SplitRows` takes any H, K and P by a `head_split.Plan`
and stores the queries of a rank one after the other, as the rows of one matrix: q [1, 1, rows, D]. Whole heads are used
where they are possible, because split heads cost copies by index, and their keys and values travel to every rank that
has a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from alstlib.kernels.attention import attention_backward, attention_forward, sinks_backward
from alstlib.kernels.backends import Backend
from alstlib.kernels.paged import HeadPart
from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Documents, document_spans
from alstlib.ulysses.alltoall import Exchange, whole_heads
from alstlib.ulysses.head_split import Plan, Sample


def layout_of(
    exchange: Exchange, heads: int, kv_heads: int, sample: Sample, chunk: tuple[int, int] | None = None,
    split_rows: bool = False,
) -> Layout:  # fmt: skip
    """The layout of H query and K key/value heads, for all tokens of a sample, or for a chunk: tokens [first, last)
    that attend to keys in pages."""
    if whole_heads(heads, kv_heads, exchange.ranks) and not split_rows:
        layout: Layout = WholeHeads(exchange, heads, kv_heads)
    else:
        layout = SplitRows(exchange, Plan(heads, kv_heads, exchange.ranks, exchange.rank, sample, *chunk or ()))
    if chunk is not None:
        every = document_spans(sample.documents, sample.batch, sample.length, *chunk)
        layout.own = [replace(part, spans=part.spans or every) for part in layout.own]
    return layout


class Layout:
    """One division of heads among the ranks: the exchange into head layout, attention there, and the way back. It holds
    no documents, which hold it (`spans.Offsets`).

    Args:
        own: the heads of this rank, as views of its tensors in head layout; without spans they see all documents.
    """

    def __init__(self, exchange: Exchange, own: Sequence[HeadPart]) -> None:
        self.exchange, self.own = exchange, own

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        """Tensors with q's heads and tensors with k's, from sequence to head layout, in as few exchanges as
        possible."""
        raise NotImplementedError

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        """The way back, of one tensor with q's heads; the ranks' gradients of one key are summed in fp32."""
        raise NotImplementedError

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(kernel, q, k, v, rule=, cu_seqlens=) -> (out, lse) of this rank's heads."""
    backward: Callable[..., Sequence[Tensor]]
    """(kernel, dout, what `forward` was given and what it returned, rule=, cu_seqlens=) -> (dq, dk, dv)."""

    def sinks_backward(self, delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        """This rank's share of the gradient [H] of the sinks, from delta and lse in head layout."""
        grad = torch.zeros_like(sinks, dtype=lse.dtype)
        for part in self.own:
            grad[part.heads] += sinks_backward(part.queries_of(delta), part.queries_of(lse), sinks[part.heads])
        return grad.to(sinks.dtype)


class WholeHeads(Layout):
    """Every rank has H / P query heads of all tokens: one part, of which nothing has to be put together."""

    forward = staticmethod(attention_forward)
    backward = staticmethod(attention_backward)

    def __init__(self, exchange: Exchange, heads: int, kv_heads: int) -> None:
        each, kv = heads // exchange.ranks, max(1, kv_heads // exchange.ranks)
        mine = slice(exchange.rank * each, (exchange.rank + 1) * each)
        super().__init__(exchange, [HeadPart(mine, slice(0, each), slice(0, kv))])
        self.kv_heads, self.split = kv_heads, kv_heads % exchange.ranks == 0

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        if self.split or not (queries and keys):
            return self.exchange.to_heads(*queries, *keys)
        # queries first: shared keys are the larger, once they came
        return [*self.exchange.to_heads(*queries), *self.exchange.to_heads(*keys)]

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        if self.split or not keys:
            return self.exchange.to_seq(queries, *keys)
        return [*self.exchange.to_seq(queries), *self.exchange.to_seq(*keys, heads=self.kv_heads)]


class SplitRows(Layout):
    """Every rank has the same number of queries: those of whole heads, and a part of at most two more
    (`head_split`). Queries in head layout are [1, 1, rows, D], and keys [B, heads that this rank needs, S, D]."""

    def __init__(self, exchange: Exchange, plan: Plan) -> None:
        super().__init__(exchange, plan.parts)
        self.plan = plan

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        plan, like = self.plan, [*queries, *keys][0]
        flat = [t.reshape(-1, t.shape[-1]) for t in queries]
        kv, (b, rows) = plan.kv.stop - plan.kv.start, like.shape[::2][:2]
        arrived = self._exchange(
            [[t.index_select(0, m.sent) for t in flat] + [t[:, m.kv] for t in keys] for m in plan.messages],
            [[(m.received.numel(), t.shape[-1]) for t in queries] + [(b, kv, rows, t.shape[-1]) for t in keys]
             for m in plan.messages],
        )  # fmt: skip
        made = [like.new_empty(plan.stored, t.shape[-1]) for t in queries]
        made_keys = [like.new_empty(b, kv, plan.rows, t.shape[-1]) for t in keys]
        for r, (message, parts) in enumerate(zip(plan.messages, arrived)):
            for t, part in zip(made, parts):
                t.index_copy_(0, message.received, part)
            for t, part in zip(made_keys, parts[len(made) :]):
                t[:, :, r * rows : (r + 1) * rows] = part
        return [*(t[None, None] for t in made), *made_keys]

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        plan, b, rows, d = self.plan, self.plan.batch, self.plan.own, queries.shape[-1]
        flat = queries[0, 0]
        arrived = self._exchange(
            [[flat.index_select(0, m.received), *(t[:, :, r * rows : (r + 1) * rows] for t in keys)]
             for r, m in enumerate(plan.messages)],
            [[(m.sent.numel(), d), *((b, m.kv.stop - m.kv.start, rows, t.shape[-1]) for t in keys)]
             for m in plan.messages],
        )  # fmt: skip
        made = flat.new_empty(b * plan.heads * rows, d)
        wide = torch.promote_types(flat.dtype, torch.float32)
        sums = [torch.zeros(b, plan.kv_heads, rows, t.shape[-1], dtype=wide, device=t.device) for t in keys]
        for message, (part, *rest) in zip(plan.messages, arrived):
            made.index_copy_(0, message.sent, part)
            for total, t in zip(sums, rest):
                total[:, message.kv] += t
        return [made.view(b, plan.heads, rows, d), *(t.to(flat.dtype) for t in sums)]

    def _exchange(
        self, mine: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send these tensors to each rank, in one exchange -> from each rank tensors of these shapes."""
        parts = [t.flatten() for own in mine for t in own]
        counts = [[prod(shape) for shape in own] for own in shapes]
        sizes, sums = [sum(t.numel() for t in own) for own in mine], [sum(own) for own in counts]
        receive = self.exchange.swap_unequal(torch.cat(parts), sizes, sums)
        split = [some.split(own) for some, own in zip(receive.split(sums), counts)]
        return [[t.view(shape) for t, shape in zip(*both)] for both in zip(split, shapes)]

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule, cu_seqlens: Documents
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in self.own:
            mine = Attended(q, k, v, out, lse).part(part)
            made = attention_forward(backend, *mine[:3], rule=rule, cu_seqlens=cu_seqlens, spans=part.spans)
            mine.out.copy_(made[0])
            mine.lse.copy_(made[1])
        return out, lse

    def backward(
        self, backend: Backend, dout: Tensor, kept: Attended, *, rule: Rule, cu_seqlens: Documents
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(kept.k.dtype, torch.float32)
        dk, dv = (torch.zeros_like(t, dtype=wide) for t in (kept.k, kept.v))
        dq = torch.empty_like(kept.q)
        for part in self.own:
            mine, upstream, sums = kept.part(part), part.queries_of(dout), [part.keys_of(dk), part.keys_of(dv)]
            if part.spans:
                rows = torch.zeros_like(mine.q, dtype=wide)
                attention_backward(backend, upstream, mine, rule=rule, spans=part.spans, sums=[rows, *sums])
            else:
                rows, *grads = attention_backward(backend, upstream, mine, rule=rule, cu_seqlens=cu_seqlens)
                for total, grad in zip(sums, grads):
                    total.add_(grad)
            part.queries_of(dq).copy_(rows)
            del rows  # not beside what the next part makes
        return dq, dk.to(kept.k.dtype), dv.to(kept.v.dtype)
