"""Where the tensors that grow with the sequence are kept while layers run in chunks, and what is copied. It does not
import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from alstlib.base.config import RunConfig
from alstlib.base.sizing import Forward, Kept, keys_and_values, kv_needed, page_keys
from alstlib.planner.gpus import Rates
from alstlib.planner.model_shapes import Shape

PLENTY = 2**62
"""Bytes of a memory whose size is not told."""


@dataclass(frozen=True)
class Streaming:
    """Where what is as long as the sequence lies while layers run in chunks."""

    hidden: bool = False
    kv: bool = False
    keys: int = 0
    """Bytes of one layer's keys and values, with the sums of their gradients."""
    page: float = 0.0
    """Share of a page in the sequence."""
    chunks_of_page: int = 1
    pages_of_head: int | None = None
    """How many of the pages before its own each key/value head of a chunk sees at most; None: all."""
    fetched: int | None = None
    """How many all heads of a rank together see at most, if no two choose the same page."""

    def visits(self, chunks: float, most: int | None) -> int:
        """Pages before their own that so many chunks see, each at most `most` of them."""
        m, n = self.chunks_of_page, math.ceil(chunks)
        pages, rest = n // m, n % m
        few = pages if most is None else min(most, pages)
        return m * (few * (few - 1) // 2 + few * (pages - few)) + rest * few

    def attention_share(self, chunks: float) -> float:
        """Share of the pairs of queries and keys that attention computes."""
        m, n = self.chunks_of_page, math.ceil(chunks)
        own = n // m * m * m / 2 + (n % m) ** 2 / 2
        return (m * self.visits(n, self.pages_of_head) + own) / (m * self.visits(n, None) + own)

    @property
    def ahead(self) -> float:
        """Share of keys, values and their gradient sums that is on the device because copies run ahead of the
        computation: the next page, and sums on their way, beside the open page and the one that is visited."""
        return min(1.0, self.page * (2 + 5 / 3)) - min(1.0, self.page * 2)


def forward_of(
    shape: Shape, run: RunConfig, tokens: int, element: int, travels: bool = False, pages: int = 0
) -> Forward:  # fmt: skip
    """What the layers make of so many tokens of a rank, as `MemoryPlan` counts it."""
    many, layers = shape.attending, shape.layers
    return Forward(
        layers=layers, attending=[round((i + 0.5) * layers / many - 0.5) for i in range(many)],
        save=run.options.save_attention, input_bytes=tokens * shape.width * element,
        outputs=(tokens * shape.heads * shape.value_dim * element, 4 * tokens * shape.heads),
        chunks=-(-tokens // run.chunk) if run.chunk else 0, travels=travels,
        tables=2 * tokens * shape.head_dim * element, pages=pages,
    )  # fmt: skip


def keys_on_host(run: RunConfig, forward: Forward, free: int | None, room: int) -> bool:
    """Whether keys and values lie on the host."""
    return forward.keys_on_host(run.options.place("kv"), free if run.options.offload else None, room)


def streaming_of(
    shape: Shape, run: RunConfig, ranks: int, tokens: int, element: int, free: int | None, room: int = PLENTY
) -> Streaming:
    """What `hf.hidden_states.travels` and `MemoryPlan` decide, with `free` bytes of a device (None for plenty) and
    `room` bytes of a host."""
    assert run.chunk is not None
    hidden = bool(run.options.offload) and run.options.place("hidden") != "device" and bool(run.options.tile("loss"))
    hidden = hidden and shape.images is None
    heads = kv_needed(shape.heads, shape.kv_heads, ranks)
    keys = keys_and_values(tokens * ranks, heads, shape.head_dim + shape.value_dim, element)
    forward = forward_of(shape, run, tokens, element, hidden, keys)
    free = free if hidden or free is None else free - 2 * forward.input_bytes  # a layer's input and a gradient
    kv = keys_on_host(run, forward, free, room)
    sparse = run.contrib.sparse or {}
    batch = run.data.batch_size  # which run.chunk and tokens count, and a page of the run does not
    page = batch * (sparse.get("page") or page_keys(run.chunk // batch * ranks, tokens // batch * ranks))
    ends = sparse.get("first", 1) + sparse.get("last", 1)  # as in `contrib.sparse`
    seen = (ends + sparse["top"], ends + sparse["top"] * heads) if sparse else (None, None)
    return Streaming(hidden, kv, keys, page / (tokens * ranks), page // (run.chunk * ranks), *seen)


def copied_bytes(run: RunConfig, forward: Forward, kept: Kept, streaming: Streaming, chunks: float) -> int:
    """Bytes that a step copies between device and host, in the direction that has more in each of its phases.

    Hidden states that travel come once in forward and three times in backward (for the keys, for the recompute, and as
    a gradient), once more where a layer's input is made again. Each chunk fetches the pages that it sees before its
    own: keys and values in forward, their sums of gradients too in backward.
    """
    if not run.options.offload:
        return 0
    layers, size = forward.layers, forward.input_bytes
    inputs = -(-layers // kept.every)
    copied = (layers * 4 + (layers - inputs) + 6) * size if streaming.hidden else 2 * inputs * size
    copied += 2 * kept.outputs * sum(forward.outputs)
    if streaming.kv:
        visits = streaming.visits(chunks, streaming.fetched)
        again = 1 if forward.save is True or kept.outputs else 2
        copied += round(len(forward.attending) * streaming.keys * (1 + streaming.page * visits * (again / 3 + 1)))
    return copied


def least_chunk(shape: Shape, rates: Rates, ranks: int = 1) -> int:
    """Tokens of a rank in the shortest chunk with which copies of keys and values hide behind attention: a page comes
    from the host for each chunk of queries, in bf16, in backward with the sums of its gradients, which go back too."""
    pair = 2 * shape.heads * (shape.head_dim + shape.value_dim)  # FLOPs of a query and a key, of all ranks together
    per_token = kv_needed(shape.heads, shape.kv_heads, ranks) * (shape.head_dim + shape.value_dim)  # of one rank
    forward = per_token * 2 / rates.host * rates.attention_forward / pair
    backward = per_token * 6 / rates.host * rates.attention_backward / (2.5 * pair)
    return math.ceil(max(forward, backward))
