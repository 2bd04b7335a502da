"""How the heads of one attention call are divided among the ranks of an SP group: whole heads, or parts of heads too.

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D width.

Both layouts have the same methods: exchange into head layout, attention there and its gradients, exchange back.
`WholeHeads` is the plain Ulysses exchange, q [B, H / P, S, D]. `SplitRows` takes any H, K and P by a `head_split.Plan`
and stores the queries of a rank one after the other, as the rows of one matrix: q [1, 1, rows, D]. Whole heads are used
where they are possible, because split heads cost copies by index, and their keys and values travel to every rank that
has a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alstlib.kernels.attention import attention_backward, attention_backward_rows, attention_forward, sinks_backward
from alstlib.kernels.backends import Backend
from alstlib.kernels.paged import Part
from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Documents, document_spans
from alstlib.ulysses.alltoall import Exchange, whole_heads
from alstlib.ulysses.head_split import Group, Plan, Sample


class WholeHeads:
    """Every rank has H / P query heads of all tokens."""

    def __init__(self, exchange: Exchange, kv_heads: int, documents: Documents, length: int) -> None:
        self.exchange, self.documents, self.length = exchange, documents, length
        self.kv_heads, self.split = kv_heads, kv_heads % exchange.ranks == 0

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
        """q, k, v and tensors with q's heads, from sequence to head layout, in as few exchanges as possible."""
        if self.split:
            return self.exchange.to_heads(q, k, v, *more)
        q, *rest = self.exchange.to_heads(q, *more)
        return [q, *self.exchange.shared_to_heads(k, v), *rest]

    def queries_to_heads(self, *tensors: Tensor) -> list[Tensor]:
        return self.exchange.to_heads(*tensors)

    def keys_to_heads(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return self.exchange.to_heads(k, v) if self.split else self.exchange.shared_to_heads(k, v)

    def to_seq(self, out: Tensor) -> Tensor:
        return self.exchange.to_seq(out)[0]

    def grads_to_seq(self, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        if self.split:
            return self.exchange.to_seq(dq, dk, dv)
        return [*self.exchange.to_seq(dq), *self.exchange.shared_to_seq(self.kv_heads, dk, dv)]

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of this rank's heads -> (out, lse); the queries belong to the last of the keys' tokens."""
        own = None if sinks is None else sinks[self._own(q)]
        return attention_forward(backend, q, k, v, rule=rule, documents=self.documents, length=self.length, sinks=own)

    def backward(self, backend: Backend, dout: Tensor, kept: Attended, rule: Rule) -> tuple[Tensor, ...]:
        return attention_backward(backend, dout, kept, rule=rule, documents=self.documents)

    def parts(self, q: Tensor, first: int, last: int) -> list[Part]:
        """What this rank attends with when queries are rows [first, last) over pages of keys."""
        spans = document_spans(self.documents, q.shape[0], self.length, first, last)
        return [Part(_as_it_is, _as_it_is, spans, self._own(q))]

    def sinks_backward(self, delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        """This rank's share of the gradient [H] of the sinks, from delta and lse [B, H / P, S]."""
        grad = torch.zeros_like(sinks, dtype=lse.dtype)
        own = self._own(lse)
        grad[own] = sinks_backward(delta, lse, sinks[own])
        return grad.to(sinks.dtype)

    def _own(self, q: Tensor) -> slice:
        """This rank's heads."""
        return slice(self.exchange.rank * q.shape[1], (self.exchange.rank + 1) * q.shape[1])


class SplitRows:
    """Every rank has the same number of queries: those of whole heads, and a part of at most two more
    (`head_split`)."""

    def __init__(self, exchange: Exchange, plan: Plan, documents: Documents, length: int) -> None:
        self.exchange, self.plan, self.documents, self.length = exchange, plan, documents, length

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
        """q and tensors with q's heads -> [1, 1, rows, D]; k and v -> [B, heads that this rank needs, S, D]."""
        return self._swap((q, *more), (k, v), 1)

    def queries_to_heads(self, *tensors: Tensor) -> list[Tensor]:
        return self._swap(tensors, (), 0)

    def keys_to_heads(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return self._swap((), (k, v), 0)

    def _swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor], at: int) -> list[Tensor]:
        """All in one exchange; the results in order, those of `keys` after the first `at`."""
        plan, like = self.plan, [*queries, *keys][0]
        flat = [t.reshape(-1, t.shape[-1]) for t in queries]
        parts, sizes = [], []
        for message in plan.messages:
            own = [t.index_select(0, message.sent) for t in flat] + [t[:, message.kv] for t in keys]
            parts += [t.flatten() for t in own]
            sizes.append(sum(t.numel() for t in own))
        kv, (b, rows) = plan.kv.stop - plan.kv.start, like.shape[::2][:2]
        key_sizes = [b * kv * rows * t.shape[-1] for t in keys]
        counts = [[m.received.numel() * t.shape[-1] for t in queries] + key_sizes for m in plan.messages]
        receive = self.exchange.swap_unequal(torch.cat(parts), sizes, [sum(c) for c in counts])
        del parts
        made = [like.new_empty(plan.stored, t.shape[-1]) for t in queries]
        made_keys = [like.new_empty(b, kv, plan.rows, t.shape[-1]) for t in keys]
        for r, (message, some) in enumerate(zip(plan.messages, receive.split([sum(c) for c in counts]))):
            arrived = some.split(counts[r])
            for t, part in zip(made, arrived):
                t.index_copy_(0, message.received, part.view(-1, t.shape[-1]))
            for t, part in zip(made_keys, arrived[len(made) :]):
                t[:, :, r * rows : (r + 1) * rows] = part.view(b, kv, rows, -1)
        stored = [t[None, None] for t in made]
        return [*stored[:at], *made_keys, *stored[at:]]

    def to_seq(self, out: Tensor) -> Tensor:
        return self._swap_back(out)[0]

    def grads_to_seq(self, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        return self._swap_back(dq, dk, dv)

    def _swap_back(self, stored: Tensor, *keys: Tensor) -> list[Tensor]:
        """Queries go back to the ranks that they came from; the ranks' gradients of one key are summed in fp32."""
        plan, b, rows = self.plan, self.plan.batch, self.plan.own
        flat, d = stored[0, 0], stored.shape[-1]
        parts, sizes = [], []
        for r, message in enumerate(plan.messages):
            own = [flat.index_select(0, message.received)] + [t[:, :, r * rows : (r + 1) * rows] for t in keys]
            parts += [t.flatten() for t in own]
            sizes.append(sum(t.numel() for t in own))
        counts = [
            [m.sent.numel() * d] + [b * (m.kv.stop - m.kv.start) * rows * t.shape[-1] for t in keys]
            for m in plan.messages
        ]
        receive = self.exchange.swap_unequal(torch.cat(parts), sizes, [sum(c) for c in counts])
        del parts
        made = flat.new_empty(b * plan.heads * rows, d)
        wide = torch.promote_types(flat.dtype, torch.float32)
        sums = [torch.zeros(b, plan.kv_heads, rows, t.shape[-1], dtype=wide, device=t.device) for t in keys]
        for message, some, count in zip(plan.messages, receive.split([sum(c) for c in counts]), counts):
            part, *rest = some.split(count)
            made.index_copy_(0, message.sent, part.view(-1, d))
            for total, t in zip(sums, rest):
                total[:, message.kv] += t.view(b, message.kv.stop - message.kv.start, rows, -1)
        return [made.view(b, plan.heads, rows, d), *(t.to(flat.dtype) for t in sums)]

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for group in self.plan.groups:
            view, keys, seen = self._views(group)
            own = None if sinks is None else sinks[group.first_head : group.first_head + group.heads]
            part, part_lse = attention_forward(
                backend, view(q), keys(k), keys(v), rule=rule, documents=seen, length=self.length, sinks=own
            )
            view(out).copy_(part)
            view(lse).copy_(part_lse)
        return out, lse

    def backward(self, backend: Backend, dout: Tensor, kept: Attended, rule: Rule) -> tuple[Tensor, ...]:
        _, k, v, _, _ = kept
        wide = torch.promote_types(k.dtype, torch.float32)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        dq = torch.empty_like(kept.q)
        for group in self.plan.groups:
            view, keys, seen = self._views(group)
            mine = Attended(view(kept.q), keys(k), keys(v), view(kept.out), view(kept.lse))
            if group.spans is None:
                grads = attention_backward(backend, view(dout), mine, rule=rule, documents=seen)
                view(dq).copy_(grads[0])
                keys(dk).add_(grads[1])
                keys(dv).add_(grads[2])
            else:
                sums = keys(dk), keys(dv)
                view(dq).copy_(attention_backward_rows(backend, view(dout), mine, sums, rule=rule, documents=seen))
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def parts(self, q: Tensor, first: int, last: int) -> list[Part]:
        """What this rank attends with when queries are rows [first, last) over pages of keys."""
        found = []
        for group in self.plan.groups:
            view, keys, seen = self._views(group)
            if group.spans is None:
                seen = document_spans(self.documents, self.plan.batch, self.length, first, last)
            found.append(Part(view, keys, seen, slice(group.first_head, group.first_head + group.heads)))
        return found

    def sinks_backward(self, delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        grad = torch.zeros_like(sinks, dtype=lse.dtype)
        for group in self.plan.groups:
            view, _, _ = self._views(group)
            own = slice(group.first_head, group.first_head + group.heads)
            grad[own] += sinks_backward(view(delta), view(lse), sinks[own])
        return grad.to(sinks.dtype)

    def _views(self, group: Group) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Any]:
        """(view of a group's queries [1, 1, rows, ...] as [B, heads, S, ...], view of its keys, which queries attend to
        which)."""
        batch = self.plan.batch if group.spans is None else 1

        def view(x: Tensor) -> Tensor:
            mine = x[0, 0, group.at : group.at + group.heads * group.rows]
            return mine.view(group.heads, batch, -1, *x.shape[3:]).transpose(0, 1)

        def keys(x: Tensor) -> Tensor:
            return x[:, group.kv : group.kv + 1]

        return view, keys, self.documents if group.spans is None else group.spans


def _as_it_is(x: Tensor) -> Tensor:
    return x


Layout = WholeHeads | SplitRows


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
            return WholeHeads(self.exchange, kv, documents, length)
        offsets = documents if documents is None or isinstance(documents, tuple) else tuple(documents)
        sample = Sample(batch, length, offsets, q.device)
        if sample != self._sample:
            self._sample = sample
            self._plans.clear()
        key = (heads, kv, first, last)
        if key not in self._plans:
            self._plans[key] = Plan(heads, kv, ranks, self.exchange.rank, sample, first, last)
        return SplitRows(self.exchange, self._plans[key], documents, length)
