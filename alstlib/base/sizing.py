"""The rules by which a run chooses its tiles, its buckets and its share of the host; the planner uses the same rules.
This module does not import torch."""

from __future__ import annotations

import contextlib
import functools
import os
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

TILE_BYTES = {"cuda": 512 * 2**20, "cpu": 2**20}
"""Target for one intermediate of a tile: large enough for efficient matrix products, small compared with the model."""


def tokens_in_tile(token_bytes: int, device: str) -> int:
    """Tokens of so many bytes each that take about `TILE_BYTES` of a device (`cuda`, `cpu`); at least one."""
    return max(1, TILE_BYTES.get(device, TILE_BYTES["cpu"]) // max(1, token_bytes))


def tile_for(width: int, element_bytes: int, device: str) -> int:
    """Tile in tokens whose widest intermediate [tile, width] takes about `TILE_BYTES` of a device (`cuda`, `cpu`): a
    power of two, at least 256."""
    return max(256, 1 << tokens_in_tile(width * element_bytes, device).bit_length() - 1)


def tiles_of(tokens: int, tile: int, samples: int = 1) -> list[slice]:
    """Slices that cover all `tokens`, in each of which so many samples have `tile` tokens together; one empty slice for
    no tokens."""
    tile = max(1, tile // max(1, samples))
    return [slice(lo, min(lo + tile, tokens)) for lo in range(0, max(tokens, 1), tile)]


TileRule = Callable[[int, int], int]
_SIMULATED: ContextVar[tuple[str, int, TileRule] | None] = ContextVar("simulated", default=None)


@contextlib.contextmanager
def as_on(device: str, capability: int = 9, tiles: TileRule | None = None) -> Iterator[None]:
    """Choose kernels and tiles as on this kind of device (`cuda`, `cpu`) and compute capability, wherever tensors are;
    or tiles by a rule of the caller's, of the width and the bytes of an element: for a simulation."""
    token = _SIMULATED.set((device, capability, tiles or functools.partial(tile_for, device=device)))
    try:
        yield
    finally:
        _SIMULATED.reset(token)


def kernel_device(device: str) -> tuple[str, int | None]:
    """The kind of device that kernels are chosen for where tensors are on this one, and, in a simulation only, its
    compute capability."""
    simulated = _SIMULATED.get()
    return (device, None) if simulated is None else simulated[:2]


def default_tile(width: int, element_bytes: int, device: Any) -> int:
    """The tile in tokens for which the widest intermediate [tile, width] takes about `TILE_BYTES`: a power of two of at
    least 256.

    The paper uses sequence / width tiles, which are very small for a narrow model.
    """
    simulated = _SIMULATED.get()
    return tile_for(width, element_bytes, device.type) if simulated is None else simulated[2](width, element_bytes)


def tile_of_sums(tokens: int, tile: int, sums: float, made: float) -> int:
    """Tokens in a tile of `tokens`, where tiles add up gradients: at least `tile`, and as many as make intermediates of
    the size of these sums. Where cutting them would save less than that, they are one tile.

    Args:
        sums: bytes that the sums of the gradients take.
        made: bytes that one token makes.
    """
    worth = int(sums / made) if made else 0
    tile = max(tile, worth)
    return max(tokens, 1) if tokens <= tile + worth else tile


def causal_pairs(tokens: int, window: int = 0) -> float:
    """Pairs of a query and a key that a layer's causal attention computes in a document: half of the square, or what
    lies in a sliding window of so many keys (0: no window)."""
    return window * (tokens - window / 2) if 0 < window < tokens else tokens**2 / 2


ON_DISK = 100_000_000
"""Elements that an optimizer with its states on a disk steps on at a time (or one tensor's): four buffers of these in
fp32 are pinned on the host. DeepSpeed's default, 1e9, would pin 16 GB for each rank."""
FP32_ON_DISK = (
    "offload_param on nvme needs bf16 or fp16: where an engine of DeepSpeed 0.19.8 divides fp32 weights on a CPU, its "
    "buffers hold 16 bits, and round them; elsewhere fp32 was not tested"
)
"""Why weights in fp32 stay in memory."""


LEAST_BUCKET = 1_000_000
"""Elements of ZeRO's buckets for models of less than 16M weights, of which they hold a large part."""


def zero_bucket(parameters: int) -> int:
    """Elements of ZeRO's buckets as our runs set them: a sixteenth of the model, between 1M and 200M."""
    return max(LEAST_BUCKET, min(200_000_000, parameters // 16))


def sdpa_kernel(device: str, element_bytes: int, width: int, softcap: bool = False, capability: int = 9) -> str:
    """The kernel (`backends.BACKENDS`) that `attention="sdpa"` chooses on a device (`cuda`, `cpu`): for numbers of so
    many bytes, for heads of this width, on a GPU of this compute capability (its first number)."""
    if softcap or (device == "cuda" and element_bytes == 8):
        return "blockwise"
    if device != "cuda":
        return "cpu"
    if element_bytes == 4 or width > 256:
        return "efficient"
    # backward of cuDNN (of its versions since 9.10) takes heads of up to 256 on Hopper alone
    return "cudnn" if capability >= 9 and width <= (256 if capability == 9 else 128) and width % 8 == 0 else "flash"


def ranks_here() -> int:
    """Ranks on this machine, as the launcher says (LOCAL_WORLD_SIZE)."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_free() -> int:
    """Bytes of this machine's memory that are free, or what the job and the process's control groups leave of them."""
    return max(0, min([psutil.virtual_memory().available, *_groups_leave(), *_job_has(os.environ)]))


def _groups_leave(process: Path = Path("/proc/self/cgroup"), top: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each limit leaves of a process's control group and of those around it (versions 2 and 1). Pages of files
    that were read do not count, because the kernel drops them."""
    with contextlib.suppress(OSError):
        for line in process.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0":
                mount, limit, used, cached = top, "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                mount, limit, used = top / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cached = "total_inactive_file"
            else:
                continue
            group = mount / name.lstrip("/")
            for folder in (group, *(p for p in group.parents if p.is_relative_to(mount))):
                with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or a group that is not mounted here
                    left = int((folder / limit).read_text()) - int((folder / used).read_text())
                    stat = (folder / "memory.stat").read_text().split() if (folder / "memory.stat").exists() else []
                    yield left + int(dict(zip(stat[::2], stat[1::2])).get(cached, 0))


def _job_has(env: Mapping[str, str]) -> Iterator[int]:
    """Memory of a node that Slurm gave the job, in bytes; nothing where it is all of it."""
    for name, times in (("NODE", ""), ("CPU", "SLURM_CPUS_ON_NODE"), ("GPU", "SLURM_GPUS_ON_NODE")):
        each, many = env.get(f"SLURM_MEM_PER_{name}", ""), env.get(times, "") if times else "1"
        if each.isdigit() and many.isdigit() and int(each):
            yield int(each) * int(many) * 2**20


STAGED = 3
"""Layers whose checkpoints are on the host on their way to a disk or back: one that is read by backward, and two ahead
of it."""


class Kept(NamedTuple):
    """What a forward keeps on the host, or on host and disk."""

    every: int
    """The input of one layer in so many."""
    outputs: int
    """Layers whose attention outputs are kept."""
    needed: int
    """Bytes of what must be there: all but outputs that `auto` keeps."""
    staged: bool = False
    """Whether the disk is used."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What the layers of a rank's forward make that their backward needs, in bytes: what of it is kept where."""

    layers: int
    input_bytes: int
    """Bytes of one layer's input."""
    outputs: Sequence[int]
    """Bytes of one layer's attention output, and of its logsumexp."""
    attending: Sequence[int]
    """The layers that have attention outputs, by their places."""
    save: bool | str
    """`Options.save_attention`."""
    chunks: int = 0
    """How many the layers run in; 0: they run whole."""
    travels: bool = False
    """Whether hidden states of chunks lie on the host."""
    tables: int = 0
    """Bytes for all layers beside hidden states that travel."""
    pages: int = 0
    """Bytes of keys and values, with the sums of their gradients: one layer's with chunks, all layers' with blocks."""

    def keys_on_host(
        self, place: str, free: int | None, room: int, largest: Callable[[Sequence[int]], list[int]] = list
    ) -> bool:
        """Whether keys and values lie on the host: with the place `auto` where they would take more than their share of
        the device, and either the host has room for them or the device has not.

        Args:
            free: the device's bytes that are free; None: not known, or it shall not matter.
            room: bytes of the host for all that is kept.
            largest: what makes ranks agree: it gives the largest of each number.
        """
        if place != "auto" or free is None:
            return place == "host"
        numbers = self.pages - int(KV_SHARE * free), self.kept(room).needed - room, self.pages - free
        short, lacking, over = largest(numbers)
        return short > 0 and (lacking <= 0 or over > 0)

    def kept(self, room: int, disk: int = 0) -> Kept:
        """How the forward uses `room` bytes of host memory, with so many bytes of a `disk` under the host, which take
        what the host has no room for.

        The disk is used where every layer's input then finds room, and the host has room for what is on its way.
        Otherwise the host keeps what it can by itself: inputs every k layers, k the smallest that fits (where nothing
        fits, the k that needs least); attention outputs of all layers with `save` True, of none with False, and with
        `auto` of as many as fit beside the inputs.
        """
        alone, output = self._alone(room), sum(self.outputs)
        wanted = len(self.attending) if self.save else 0
        if not disk or (alone.every == 1 and alone.outputs >= wanted and alone.needed <= room):
            return alone
        for save in ("auto", False) if self.save == "auto" else (self.save,):
            staged = STAGED * (self.input_bytes + output * bool(save))
            both = room - staged + disk
            found = replace(self, save=save)._alone(both)
            stays = found.needed - self.layers * self.input_bytes - output * wanted * (save is True)
            better = alone.needed > room or (found.every, -found.outputs) < (alone.every, -alone.outputs)
            if better and found.every == 1 and found.needed <= both and stays + staged <= room:
                return found._replace(staged=True)
        return alone

    def _alone(self, room: int) -> Kept:
        """`kept` without a disk.

        Where hidden states of chunks lie on the host, three tensors of an input's size are there beside the inputs at
        the loss (the last output, the norm's and a gradient), and in a layer's backward the k - 1 inputs that are made
        again, two gradients and the pages.
        """
        size, many = self.input_bytes, len(self.attending)
        outputs = many if self.save is True else 0

        def needed(k: int) -> int:
            inputs, kept = -(-self.layers // k), outputs * sum(self.outputs)
            if self.travels:
                return max((inputs + 3) * size, (inputs + k + 1) * size + self.pages) + self.tables + kept
            return inputs * size + self.pages + kept

        ways = range(1, self.layers + 1)
        every = next((k for k in ways if needed(k) <= room), min(ways, key=needed))
        if self.chunks and not self.travels and every > 1:  # layers whose inputs lie on the device
            return Kept(1, outputs, needed(1))
        needs = needed(every)
        if self.save == "auto":
            outputs = max(0, min(many, (room - needs) // sum(self.outputs)))
        return Kept(every, outputs, needs)

    def sent(self, kept: Kept, room: int) -> tuple[int, Spread, int, int]:
        """(bytes of the host that the forward may take, what says of each tensor whether it stays there, bytes on the
        disk, host bytes that are on their way at most)."""
        outputs = kept.outputs * sum(self.outputs)
        needed = kept.needed + outputs * (self.save == "auto")
        if not kept.staged:
            return needed, Spread(0, 1), 0, 0
        others, saved = needed - self.layers * self.input_bytes - outputs, self.attending[: kept.outputs]
        spread, away, moving = sent_away(room, others, self.layers, self.input_bytes, self.outputs, saved, self.chunks)
        return needed - away + moving, spread, away, moving


PAGE = 4096
"""Bytes to which memory, lengths and places in a file are aligned: direct access to a disk wants it."""


def padded(nbytes: int) -> int:
    """Bytes of the pages that so many bytes lie in."""
    return -(-nbytes // PAGE) * PAGE


class Spread:
    """Which tensors stay on the host of those that come one after the other, of whose `movable` bytes so many go `away`
    to a disk: as many stay, evenly spread, as is their share of the bytes."""

    def __init__(self, away: int, movable: int) -> None:
        self.away, self.movable, self._due = away, movable, 0

    def stays(self, nbytes: int) -> bool:
        """Whether the next tensor, of so many bytes, stays."""
        self._due += (self.movable - self.away) * nbytes
        if self.away and self._due < self.movable * nbytes:
            return False
        self._due -= self.movable * nbytes
        return True


MANY = 8
"""Pieces of a layer's attention output that are told apart; with more chunks one of them may be on its way besides."""
STEPS = 2**12
"""Shares of the checkpoints that may go to a disk."""


def sent_away(
    room: int, others: int, layers: int, input_bytes: int, outputs: Sequence[int], kept: Container[int], chunks: int = 0
) -> tuple[Spread, int, int]:
    """The least that a forward sends to a disk, so that the host's `room` holds the rest and what is on its way: the
    share of it of three layers.

    Args:
        others: bytes that must stay on the host.
        outputs: bytes of each tensor of a layer's attention output.
        kept: the layers whose outputs are kept, by their places.
        chunks: how many a layer runs in, each of which keeps its part; 0: layers run whole.

    Returns:
        (what says it of each tensor, bytes on the disk, host bytes that are on their way at most). Where nothing makes
        room enough, all is sent, and the room that is left has to do.
    """
    pieces = max(1, min(chunks, MANY))
    # rounded up: the caller's sum, of whole tensors, is not more than this one's
    each = [[-(-nbytes // pieces) for nbytes in outputs] * pieces * (i in kept) for i in range(layers)]
    tensors = [[*of, input_bytes] if chunks else [input_bytes, *of] for of in each]
    movable = sum(map(sum, tensors))
    finer = padded(max(outputs, default=0) // pieces) if chunks > MANY and any(each) else 0

    def sent(step: int) -> tuple[Spread, int, int]:
        away = step * movable // STEPS
        spread = Spread(away, movable)
        gone = [[nbytes for nbytes in layer if not spread.stays(nbytes)] for layer in tensors]
        moving = [sum(map(padded, layer)) for layer in gone]
        most = max(sum(moving[i : i + STAGED]) for i in range(layers)) + finer
        return Spread(away, movable), sum(map(sum, gone)), most

    def fits(step: int) -> bool:
        _, gone, moving = sent(step)
        return others + movable - gone + moving <= room

    spread, gone, moving = sent(bisect_left(range(STEPS), True, key=fits))
    return spread, gone, min(moving, max(0, room - others - movable + gone))


def page_keys(chunk: int, length: int) -> int:
    """Keys of a page, where chunks of `chunk` tokens of all ranks attend to sequences of `length`: a whole number of
    chunks, one that is large enough for a kernel or a few that are."""
    keys = min(keys_of_a_call(chunk, length, KEYS_PER_QUERY), max(LEAST_KEYS, chunk))
    return min(-(-length // chunk), -(-keys // chunk)) * chunk


def kept_of_page(tokens: int, window: int | None) -> int:
    """Tokens at most of a page of so many that tokens after it see, in a layer with a window of so many keys."""
    return tokens if window is None else min(tokens, window - 1)


KEYS_PER_QUERY = 4
"""Keys in one call of a backward over chunks, for each of its queries; also of a forward by a kernel that is built for
each shape, so that it meets few."""
LEAST_KEYS, LEAST_PAIRS = 16_384, 2**18
"""A full piece is not cut into fewer keys, unless with its queries they are so many pairs: few queries behind many keys
would make calls without end."""


def keys_of_a_call(queries: int, keys: int, keys_per_query: int | None) -> int:
    """Keys in one call of a kernel on a full piece of so many queries and keys, of which a query gets `keys_per_query`;
    None for all of them."""
    least = max(1, min(LEAST_KEYS, LEAST_PAIRS // queries))
    return max(least, keys if keys_per_query is None else keys_per_query * queries)


def keys_and_values(tokens: int, kv_heads: int, widths: int, element_bytes: int) -> int:
    """Bytes of one layer's keys and values of so many tokens on a rank that needs `kv_heads` of their heads, whose
    widths of keys and values add up to `widths`, and of the sums of their gradients in fp32 (or wider)."""
    return tokens * kv_heads * widths * (element_bytes + max(4, element_bytes))


def kv_of(heads: int, kv_heads: int, ranks: int, rank: int) -> slice:
    """The key/value heads that a rank needs, where ranks have parts of heads."""
    group = heads // kv_heads
    return slice(heads * rank // ranks // group, (-(-heads * (rank + 1) // ranks) - 1) // group + 1)


def kv_needed(heads: int, kv_heads: int, ranks: int) -> int:
    """The number of key/value heads that the rank needs that needs most."""
    each = [kv_of(heads, kv_heads, ranks, rank) for rank in range(ranks)]
    return max(kv.stop - kv.start for kv in each)


KV_SHARE = 0.5
"""The share of a device's free memory that keys and values of a layer may take there with `on_host="auto"`."""


def heads_of(config: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and the width of a head, as a transformers config has them; zeros without any."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0, 0, 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width
