"""Where the tensors that grow with the sequence are kept while layers run in chunks, and what is copied. It does not
import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from alstlib.base.config import RunConfig
from alstlib.base.sizing import kept_on_host, keys_and_values, keys_leave, keys_left, kv_needed, page_keys
from alstlib.planner.gpus import Rates
from alstlib.planner.model_shapes import Shape


@dataclass(frozen=True)
class Streaming:
    """Where what is as long as the sequence lies while layers run in chunks."""

    hidden: bool = False
    kv: bool = False
    tables: int = 0
    """Bytes of rotary tables on the host."""
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


def output_bytes(shape: Shape, tokens: int, element: int) -> int:
    """Bytes of one layer's attention output and its sums."""
    return tokens * shape.heads * (shape.value_dim * element + 4)


def host_room(run: RunConfig, room: int | None) -> int:
    """Bytes of a host that checkpoints may take, of `room`; None for plenty."""
    return run.options.host_memory if run.options.host_memory is not None else 2**62 if room is None else room


def kv_on_host(
    run: RunConfig, layers: int, size: int, output: int, keys: int, free: int | None, room: int | None, **how: Any
) -> bool:
    """Do keys and values lie on the host? `how` goes to `sizing.kept_on_host`."""
    if run.options.place("kv") != "auto" or not run.options.offload or free is None:
        return run.options.place("kv") == "host"
    room = host_room(run, room)
    needed = kept_on_host(room, layers, size, output, run.options.save_attention, **how)[2]
    return keys_left(*keys_leave(keys, free, needed - room))


def streaming_of(
    shape: Shape, run: RunConfig, ranks: int, tokens: int, element: int, free: int | None, room: int | None = None
) -> Streaming:
    """What `hf.hidden_states.travels` and `MemoryPlan` decide, with `free` bytes of a device and `room` bytes of
    a host; None for plenty."""
    assert run.chunk is not None
    hidden = bool(run.options.offload) and run.options.place("hidden") != "device" and bool(run.options.tile("loss"))
    hidden = hidden and shape.images is None
    heads = kv_needed(shape.heads, shape.kv_heads, ranks)
    keys = keys_and_values(tokens * ranks, heads, shape.head_dim + shape.value_dim, element)
    tables = 2 * tokens * shape.head_dim * element if hidden else 0
    size, output = tokens * shape.width * element, output_bytes(shape, tokens, element)
    how = {"streamed": True, "travels": hidden, "tables": tables, "pages": keys, "attending": shape.attending}
    free = free if hidden or free is None else free - 2 * size  # a layer's input and a gradient
    kv = kv_on_host(run, shape.layers, size, output, keys, free, room, **how)
    sparse = run.contrib.sparse or {}
    page = sparse.get("page") or page_keys(run.chunk * ranks, tokens * ranks)
    ends = sparse.get("first", 1) + sparse.get("last", 1)  # as in `contrib.sparse`
    seen = (ends + sparse["top"], ends + sparse["top"] * heads) if sparse else (None, None)
    return Streaming(hidden, kv, tables, keys, page / (tokens * ranks), page // (run.chunk * ranks), *seen)


def copied_bytes(
    run: RunConfig, layers: int, every: int, size: int, outputs: int, streaming: Streaming, chunks: float,
    attending: int
) -> int:  # fmt: skip
    """Bytes that a step copies between device and host, in the direction that has more in each of its phases.

    Hidden states that travel come once in forward and three times in backward (for the keys, for the recompute, and as
    a gradient), once more where a layer's input is made again. Each chunk fetches the pages that it sees before its
    own: keys and values in forward, their sums of gradients too in backward.
    """
    if not run.options.offload:
        return 0
    kept = -(-layers // every)
    copied = (layers * 4 + (layers - kept) + 6) * size if streaming.hidden else 2 * kept * size
    copied += 2 * outputs
    if streaming.kv:
        visits = streaming.visits(chunks, streaming.fetched)
        again = 1 if run.options.save_attention is True or outputs else 2
        copied += round(attending * streaming.keys * (1 + streaming.page * visits * (again / 3 + 1)))
    return copied


def least_chunk(shape: Shape, rates: Rates, ranks: int = 1) -> int:
    """Tokens of a rank in the shortest chunk with which copies of keys and values hide behind attention: a page comes
    from the host for each chunk of queries, in bf16, in backward with the sums of its gradients, which go back too."""
    pair = 2 * shape.heads * (shape.head_dim + shape.value_dim)  # FLOPs of a query and a key, of all ranks together
    per_token = kv_needed(shape.heads, shape.kv_heads, ranks) * (shape.head_dim + shape.value_dim)  # of one rank
    forward = per_token * 2 / rates.host * rates.attention_forward / pair
    backward = per_token * 6 / rates.host * rates.attention_backward / (2.5 * pair)
    return math.ceil(max(forward, backward))
