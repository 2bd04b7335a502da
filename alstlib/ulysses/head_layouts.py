"""How the heads of one attention call are divided among the ranks of an SP group: whole heads, or parts of heads too.

Shape legend: B batch, S sequence, P ranks, L = S / P, H query heads, K key/value heads, D width.

`WholeHeads` is the plain Ulysses exchange, q [B, H / P, S, D]. `SplitHeads` takes any H, K and P by a `head_split.Plan`
and stores the queries of a rank one after the other: q [1, 1, queries, D]. Whole heads are used where possible, because
split heads cost copies by index, and their keys and values travel to every rank that has a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from alstlib.base.recompute import sum_dtype
from alstlib.base.types import OutputAndLse
from alstlib.kernels.attention import attention_backward, attention_forward
from alstlib.kernels.backends import Backend
from alstlib.kernels.paged import HeadPart
from alstlib.kernels.rule import Attended, Rule
from alstlib.kernels.spans import Documents, document_spans
from alstlib.ulysses.alltoall import Exchange, whole_heads
from alstlib.ulysses.head_split import Plan, Sample


class WholeHeads:
    """Every rank has H / P query heads of all tokens: one part, of which nothing has to be put together."""

    forward = staticmethod(attention_forward)
    """(kernel, q, k, v, rule=, cu_seqlens=) -> (out, lse) of this rank's heads."""
    backward = staticmethod(attention_backward)
    """(kernel, dout, what `forward` was given and what it returned, rule=, cu_seqlens=) -> (dq, dk, dv)."""

    def __init__(self, exchange: Exchange, heads: int, kv_heads: int) -> None:
        self.exchange, self.kv_heads, self.split = exchange, kv_heads, kv_heads % exchange.ranks == 0
        each, kv = heads // exchange.ranks, max(1, kv_heads // exchange.ranks)
        mine = slice(exchange.rank * each, (exchange.rank + 1) * each)
        self.own = [HeadPart(mine, slice(0, each), slice(0, kv))]
        """The heads of this rank, as views of its tensors in head layout; without spans they see all documents."""

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        """Tensors with q's heads and tensors with k's, from sequence to head layout, in as few exchanges as
        possible."""
        if self.split or not (queries and keys):
            return self.exchange.to_heads(*queries, *keys)
        # queries first: shared keys are the larger, once they came
        return [*self.exchange.to_heads(*queries), *self.exchange.to_heads(*keys)]

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        """The way back, of one tensor with q's heads; the ranks' gradients of one key are summed in fp32."""
        if self.split or not keys:
            return self.exchange.to_seq(queries, *keys)
        return [*self.exchange.to_seq(queries), *self.exchange.to_seq(*keys, heads=self.kv_heads)]


class SplitHeads:
    """Every rank has the same number of queries: those of whole heads, and a part of at most two more
    (`head_split`). Queries in head layout are [1, 1, queries, D], and keys [B, heads that this rank needs, S, D]. Its
    methods do what those of `WholeHeads` do."""

    def __init__(self, exchange: Exchange, plan: Plan) -> None:
        self.exchange, self.plan, self.own = exchange, plan, plan.parts

    def swap(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        made, made_keys = self._move([t.reshape(-1, t.shape[-1]) for t in queries], keys, back=False)
        return [*(t[None, None] for t in made), *made_keys]

    def swap_back(self, queries: Tensor, *keys: Tensor) -> list[Tensor]:
        (made,), made_keys = self._move([queries[0, 0]], keys, back=True)
        return [made.view(self.plan.batch, self.plan.heads, self.plan.own, -1), *made_keys]

    def _move(self, queries: Sequence[Tensor], keys: Sequence[Tensor], back: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Queries and keys, from one layout to the other, in one exchange."""
        plan, batch, own, like = self.plan, self.plan.batch, self.plan.own, [*queries, *keys][0]

        def shared(t: Tensor, rank: int, whole: bool) -> Tensor:
            """The keys that pass between a rank and this one: its tokens of whole sequences, or its heads of slices."""
            return t[:, :, rank * own : (rank + 1) * own] if whole else t[:, plan.messages[rank].kv]

        parts: list[list[Tensor]] = []
        sizes: list[list[int]] = []
        for r, m in enumerate(plan.messages):
            mine, theirs, kv = (m.received, m.sent, m.kv) if back else (m.sent, m.received, plan.kv)
            parts.append([t.index_select(0, mine) for t in queries] + [shared(t, r, back).flatten() for t in keys])
            tokens = batch * (kv.stop - kv.start) * own
            sizes.append([len(theirs) * t.shape[-1] for t in queries] + [tokens * t.shape[-1] for t in keys])
        to_ranks, from_ranks = [sum(t.numel() for t in some) for some in parts], [*map(sum, sizes)]
        sent = torch.cat([t.flatten() for some in parts for t in some])
        receive = self.exchange.swap_unequal(sent, to_ranks, from_ranks)
        del parts, sent
        arrived = iter(receive.split([size for some in sizes for size in some]))
        needs = plan.kv.stop - plan.kv.start
        count, size = (batch * plan.heads * own, (plan.kv_heads, own)) if back else (plan.stored, (needs, plan.length))
        wide = sum_dtype(like) if back else like.dtype  # in which gradients are summed
        made = [like.new_empty(count, t.shape[-1]) for t in queries]
        made_keys = [like.new_zeros(batch, *size, t.shape[-1], dtype=wide) for t in keys]
        for r, m in enumerate(plan.messages):
            for t in made:
                t.index_copy_(0, m.sent if back else m.received, next(arrived).view(-1, t.shape[1]))
            for t in made_keys:
                here = shared(t, r, not back)
                here.add_(next(arrived).view(here.shape))
        return made, [t.to(like.dtype) for t in made_keys]

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule, cu_seqlens: Documents
    ) -> OutputAndLse:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=sum_dtype(q))
        for part in self.own:
            mine = Attended(q, k, v, out, lse).part(part)
            made = attention_forward(backend, *mine[:3], rule=rule, cu_seqlens=cu_seqlens, spans=part.spans)
            mine.out.copy_(made[0])
            mine.lse.copy_(made[1])
        return out, lse

    def backward(
        self, backend: Backend, dout: Tensor, kept: Attended, *, rule: Rule, cu_seqlens: Documents
    ) -> tuple[Tensor, ...]:
        wide = sum_dtype(kept.k)
        dk, dv = (torch.zeros_like(t, dtype=wide) for t in (kept.k, kept.v))
        dq = torch.empty_like(kept.q)
        for part in self.own:
            mine, upstream, sums = kept.part(part), part.queries_of(dout), [part.keys_of(dk), part.keys_of(dv)]
            if part.spans:
                dq_part = torch.zeros_like(mine.q, dtype=wide)
                attention_backward(backend, upstream, mine, rule=rule, spans=part.spans, sums=[dq_part, *sums])
            else:
                dq_part, *grads = attention_backward(backend, upstream, mine, rule=rule, cu_seqlens=cu_seqlens)
                for total, grad in zip(sums, grads):
                    total.add_(grad)
            part.queries_of(dq).copy_(dq_part)
            del dq_part  # not beside what the next part makes
        return dq, dk.to(kept.k.dtype), dv.to(kept.v.dtype)


Layout = WholeHeads | SplitHeads
"""One division of heads among the ranks: the exchange into head layout, attention there, and the way back. It holds no
documents, which hold it (`spans.Offsets`)."""


def layout_of(
    exchange: Exchange, heads: int, kv_heads: int, sample: Sample, chunk: tuple[int, int] | None = None,
    split_heads: bool = False,
) -> Layout:  # fmt: skip
    """The layout of H query and K key/value heads, for all tokens of a sample, or for a chunk: tokens [first, last)
    that attend to keys in pages."""
    if whole_heads(heads, kv_heads, exchange.ranks) and not split_heads:
        layout: Layout = WholeHeads(exchange, heads, kv_heads)
    else:
        layout = SplitHeads(exchange, Plan(heads, kv_heads, exchange.ranks, exchange.rank, sample, *chunk or ()))
    if chunk is not None:
        every = document_spans(sample.documents, sample.batch, sample.length, *chunk)
        layout.own = [replace(part, spans=part.spans or every) for part in layout.own]
    return layout
