"""How the heads of one attention call are divided among the ranks of an SP group: whole heads, or parts of heads too.

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D width.

`WholeHeads` is the plain Ulysses exchange, q [B, H / P, S, D]. `SplitRows` takes any H, K and P by a `head_split.Plan`
and stores the queries of a rank one after the other, as the rows of one matrix: q [1, 1, rows, D]. Whole heads are used
where they are possible, because split heads cost copies by index, and their keys and values travel to every rank that
has a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.attention import (
    attention_backward,
    attention_backward_rows,
    attention_forward,
    sinks_backward,
    with_sinks,
)
from alstlib.kernels.backends import Backend
from alstlib.kernels.paged import HeadPart
from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Documents, document_spans
from alstlib.ulysses.alltoall import Exchange, whole_heads
from alstlib.ulysses.head_split import Group, Plan, Sample


class Layout:
    """One division of heads among the ranks: the exchange into head layout, attention there, and the way back.

    Args:
        documents: offsets into the flattened batch, as `spans.document_spans` takes them.
        batch, length: micro-batch rows, and tokens of each, of all ranks.
        own: the heads of this rank, as views of its tensors in head layout; without spans they see all documents.
    """

    def __init__(
        self, exchange: Exchange, documents: Documents, batch: int, length: int, own: Sequence[HeadPart]
    ) -> None:
        self.exchange, self.documents, self.batch, self.length, self.own = exchange, documents, batch, length, own

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with q's heads and tensors with k's, from sequence to head layout, in as few exchanges as
        possible."""
        raise NotImplementedError

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        """The way back, of one tensor with q's heads; the ranks' gradients of one key are summed."""
        raise NotImplementedError

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
        """q, k, v and tensors with q's heads, in head layout."""
        q, *made, k, v = self.swap((q, *more), (k, v))
        return [q, k, v, *made]

    def queries_to_heads(self, *tensors: Tensor) -> list[Tensor]:
        return self.swap(tensors, ())

    def keys_to_heads(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return self.swap((), (k, v))

    def to_seq(self, out: Tensor) -> Tensor:
        return self.swap_back(out)[0]

    def grads_to_seq(self, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        return self.swap_back(dq, dk, dv)

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of this rank's heads -> (out, lse); the queries belong to the last of the keys' tokens."""
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in self.own:
            mine = part.call(q, k, v, out, lse)
            made = self._attend(backend, part, mine.q, mine.k, mine.v, rule, sinks)
            mine.out.copy_(made[0])
            mine.lse.copy_(made[1])
        return out, lse

    def _attend(
        self, backend: Backend, part: HeadPart, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of a part, whose tensors these are."""
        how: Any = {"cu_seqlens": self.documents, "spans": part.spans, "length": self.length}
        out, lse = attention_forward(backend, q, k, v, rule=rule, **how)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks[part.heads])

    def backward(self, backend: Backend, dout: Tensor, kept: Attended, rule: Rule) -> tuple[Tensor, ...]:
        """Gradients of `forward` -> (dq, dk, dv)."""
        wide = torch.promote_types(kept.k.dtype, torch.float32)
        dk, dv = (torch.zeros_like(t, dtype=wide) for t in (kept.k, kept.v))
        dq = torch.empty_like(kept.q)
        for part in self.own:
            mine, upstream, sums = part.call(*kept), part.queries(dout), (part.keys(dk), part.keys(dv))
            if part.spans:
                rows = attention_backward_rows(backend, upstream, mine, sums, rule=rule, spans=part.spans)
                part.queries(dq).copy_(rows)
                del rows  # not beside what the next part makes
            else:
                made, *grads = attention_backward(backend, upstream, mine, rule=rule, cu_seqlens=self.documents)
                part.queries(dq).copy_(made)
                for total, grad in zip(sums, grads):
                    total.add_(grad)
        return dq, dk.to(kept.k.dtype), dv.to(kept.v.dtype)

    def parts(self, q: Tensor, first: int, last: int) -> list[HeadPart]:
        """What this rank attends with when queries are rows [first, last) over pages of keys."""
        every = document_spans(self.documents, self.batch, self.length, first, last)
        return [replace(part, spans=part.spans or every) for part in self.own]

    def sinks_backward(self, delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        """This rank's share of the gradient [H] of the sinks, from delta and lse in head layout."""
        grad = torch.zeros_like(sinks, dtype=lse.dtype)
        for part in self.own:
            grad[part.heads] += sinks_backward(part.queries(delta), part.queries(lse), sinks[part.heads])
        return grad.to(sinks.dtype)


class WholeHeads(Layout):
    """Every rank has H / P query heads of all tokens."""

    def __init__(
        self, exchange: Exchange, heads: int, kv_heads: int, documents: Documents, batch: int, length: int
    ) -> None:
        each = heads // exchange.ranks
        mine = slice(exchange.rank * each, (exchange.rank + 1) * each)
        super().__init__(exchange, documents, batch, length, [HeadPart(_as_it_is, _as_it_is, (), mine)])
        self.kv_heads, self.split = kv_heads, kv_heads % exchange.ranks == 0

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        if self.split or not keys:
            return self.exchange.to_heads(*queries, *keys)
        made = self.exchange.to_heads(*queries) if queries else []  # first: shared keys are the larger, once they came
        return [*made, *self.exchange.shared_to_heads(*keys)]

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        if self.split or not keys:
            return self.exchange.to_seq(queries, *keys)
        return [*self.exchange.to_seq(queries), *self.exchange.shared_to_seq(self.kv_heads, *keys)]

    # one part, which is all there is: nothing has to be put together

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._attend(backend, self.own[0], q, k, v, rule, sinks)

    def backward(self, backend: Backend, dout: Tensor, kept: Attended, rule: Rule) -> tuple[Tensor, ...]:
        return attention_backward(backend, dout, kept, rule=rule, cu_seqlens=self.documents)


class SplitRows(Layout):
    """Every rank has the same number of queries: those of whole heads, and a part of at most two more
    (`head_split`). Queries in head layout are [1, 1, rows, D], and keys [B, heads that this rank needs, S, D]."""

    def __init__(self, exchange: Exchange, plan: Plan, documents: Documents, length: int) -> None:
        super().__init__(exchange, documents, plan.batch, length, [_part(g, plan.batch) for g in plan.groups])
        self.plan = plan

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        plan, like = self.plan, [*queries, *keys][0]
        flat = [t.reshape(-1, t.shape[-1]) for t in queries]
        mine = ([t.index_select(0, m.sent) for t in flat] + [t[:, m.kv] for t in keys] for m in plan.messages)
        kv, (b, rows) = plan.kv.stop - plan.kv.start, like.shape[::2][:2]
        of_keys = [b * kv * rows * t.shape[-1] for t in keys]
        counts = [[m.received.numel() * t.shape[-1] for t in queries] + of_keys for m in plan.messages]
        arrived = self._exchange(mine, counts)
        made = [like.new_empty(plan.stored, t.shape[-1]) for t in queries]
        made_keys = [like.new_empty(b, kv, plan.rows, t.shape[-1]) for t in keys]
        for r, (message, parts) in enumerate(zip(plan.messages, arrived)):
            for t, part in zip(made, parts):
                t.index_copy_(0, message.received, part.view(-1, t.shape[-1]))
            for t, part in zip(made_keys, parts[len(made) :]):
                t[:, :, r * rows : (r + 1) * rows] = part.view(b, kv, rows, -1)
        return [*(t[None, None] for t in made), *made_keys]

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        """Queries go back to the ranks that they came from; the ranks' gradients of one key are summed in fp32."""
        plan, b, rows = self.plan, self.plan.batch, self.plan.own
        flat, d = queries[0, 0], queries.shape[-1]
        mine = (
            [flat.index_select(0, message.received), *(t[:, :, r * rows : (r + 1) * rows] for t in keys)]
            for r, message in enumerate(plan.messages)
        )
        counts = [
            [m.sent.numel() * d] + [b * (m.kv.stop - m.kv.start) * rows * t.shape[-1] for t in keys]
            for m in plan.messages
        ]
        arrived = self._exchange(mine, counts)
        made = flat.new_empty(b * plan.heads * rows, d)
        wide = torch.promote_types(flat.dtype, torch.float32)
        sums = [torch.zeros(b, plan.kv_heads, rows, t.shape[-1], dtype=wide, device=t.device) for t in keys]
        for message, (part, *rest) in zip(plan.messages, arrived):
            made.index_copy_(0, message.sent, part.view(-1, d))
            for total, t in zip(sums, rest):
                total[:, message.kv] += t.view(b, message.kv.stop - message.kv.start, rows, -1)
        return [made.view(b, plan.heads, rows, d), *(t.to(flat.dtype) for t in sums)]

    def _exchange(self, mine: Iterable[Sequence[Tensor]], counts: Sequence[Sequence[int]]) -> list[Sequence[Tensor]]:
        """Send these tensors to each rank, in one exchange -> from each rank tensors of so many elements."""
        parts, sizes = [], []
        for own in mine:
            parts += [t.flatten() for t in own]
            sizes.append(sum(t.numel() for t in own))
        sums = [sum(c) for c in counts]
        receive = self.exchange.swap_unequal(torch.cat(parts), sizes, sums)
        return [some.split(count) for some, count in zip(receive.split(sums), counts)]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _part(group: Group, batch: int) -> HeadPart:
    """A group of heads of the stored queries [1, 1, rows, ...], as views [B, heads, S, ...], and of the keys."""
    rows = 1 if group.spans else batch

    def queries(x: Tensor) -> Tensor:
        mine = x[0, 0, group.at : group.at + group.heads * group.rows]
        return mine.view(group.heads, rows, -1, *x.shape[3:]).transpose(0, 1)

    heads = slice(group.first_head, group.first_head + group.heads)
    return HeadPart(queries, lambda x: x[:, group.kv : group.kv + 1], group.spans or (), heads)


class Layouts:
    """The layouts of an operator's calls; plans are kept while shapes and documents stay the same (all layers and
    chunks of a step)."""

    def __init__(self, exchange: Exchange, split_rows: bool = False) -> None:
        self.exchange, self.split_rows = exchange, split_rows
        self._sample: Any = None
        self._plans: dict[Any, Plan] = {}

    def of(
        self, q: Tensor, k: Tensor, documents: Documents, first: int = 0, last: int | None = None,
        length: int | None = None,
    ) -> Layout:  # fmt: skip
        """The layout of q [B, H, L, D] and k [B, K, L, D]: tokens [first, last) of sequences of `length`; None: all of
        them."""
        (batch, heads, rows, _), kv, ranks = q.shape, k.shape[1], self.exchange.ranks
        length = rows * ranks if length is None else length
        if whole_heads(heads, kv, ranks) and not self.split_rows:
            return WholeHeads(self.exchange, heads, kv, documents, batch, length)
        offsets = documents if documents is None or isinstance(documents, tuple) else tuple(documents)
        sample = Sample(batch, length, offsets, q.device)
        if sample != self._sample:
            self._sample = sample
            self._plans.clear()
        key = (heads, kv, first, last)
        if key not in self._plans:
            self._plans[key] = Plan(heads, kv, ranks, self.exchange.rank, sample, first, last)
        return SplitRows(self.exchange, self._plans[key], documents, length)
