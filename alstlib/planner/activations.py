"""What one rank's step takes besides model states: where the tensors lie that a run decides on, and the largest moment
of a simulated step (`fits`). Without torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from alstlib.base.config import RunConfig
from alstlib.base.options import Options, TiledPart
from alstlib.base.sizing import Forward, Kept, kept_of_page, keys_and_values, kv_needed, sdpa_kernel
from alstlib.planner.fits import Lines, Moment, StepQuestion, element_bytes, in_layer, lines_at, part_of, tower_of
from alstlib.planner.model_shapes import Shape
from alstlib.planner.streaming import PLENTY, Streaming, copied_bytes, forward_of, keys_on_host, streaming_of

FLASH_2 = ("flash", "flash_attention_2")
"""Kernels of flash-attn 2: PyTorch's and its own."""
FLASH_2_BLOCK = 128
"""Rows by which its sum of dQ is longer for each document."""
DOCUMENT = 1024
"""Tokens that a document of a packed sample is taken to have: how many there are is known when the data are read."""


@dataclass(frozen=True)
class Activations:
    """What one rank's step takes besides model states. Bytes."""

    device: dict[str, int]
    """What is alive on the device at its peak, by category (`scope`)."""
    place: str
    """The module in which the peak is reached."""
    part: str
    """When and where that is (`fits.Moment.part`), or `end`: of an MLP's backward."""
    host: int
    """Checkpoints that wait on the host."""
    host_needed: int
    """The smallest host memory with which the run can work at all."""
    attention_kept: float
    """Share of the layers that attend whose outputs are kept."""
    inputs_kept_every: int
    kernel: str
    """The kernel of core attention (`backends.BACKENDS`)."""
    hidden_on_host: bool = False
    """Whether the hidden states of streamed layers are kept on the host."""
    copied: int = 0
    """Copied between device and host in a step, in one direction at a time."""
    attention_share: float = 1.0
    """The share of the pairs of queries and keys that attention computes: less than 1 with sparse pages."""

    disk: int = 0
    """Checkpoints that wait on a disk."""
    disk_short: bool = False
    """Whether a larger disk would take what neither host nor disk has room for."""
    copied_pages: int = 0
    """The part of `copied` that is keys and values of the blocks before: it grows with pairs of tokens."""
    blocks: int = 1
    """The number of blocks of the whole model that run one after the other."""
    twice: float = 0.0
    """The share of tokens whose block runs forward without a graph before its recompute, for the blocks after it."""

    @property
    def peak(self) -> int:
        return sum(self.device.values())


def activations(
    shape: Shape, run: RunConfig, ranks: int, seq_len: int, device: str, room: int | None = None,
    workspace: bool = True, capability: int = 9, free: int | None = None,
    held: Callable[[str], float] = lambda part: 0.0, disk: int = 0,
) -> Activations:  # fmt: skip
    """Device and host memory of one of `ranks` ranks that share each sample of `seq_len` tokens.

    Args:
        device: whose tiles and dtype are taken, `cuda` or `cpu`.
        room: host bytes for this rank's checkpoints, where the run names no `host_memory`; None for plenty.
        workspace: count what a GPU's attention kernel takes for itself, which a simulation does not see.
        capability: the GPU's compute capability, its first number.
        free: device bytes before the first layer, of which `on_host="auto"` leaves keys and values a part; None: it
            leaves them the device.
        held: bytes of model states in a part of the model (`Moment.part`): the peak is the largest sum of both.
        disk: bytes of a disk under the host for this rank.

    Raises:
        ValueError: a model or an option that `apply` refuses.
    """
    run = run.for_width(shape.width)
    room = run.options.host_memory or (PLENTY if room is None else room)
    if run.chunk is not None:  # samples are side by side: as one that is as long as all
        run = run.replace(options={"chunk": run.chunk * run.data.batch_size})
    unknown = "" if run.options.experts_by_token else shape.unknown_experts
    if run.block is not None and (shape.not_by_blocks or unknown or run.options.disk is not None):
        why = shape.not_by_blocks or unknown or "block_step keeps no checkpoints on a disk (options.disk)"
        raise ValueError(f"block={run.block}: the model cannot run by blocks: {why}")
    if run.block is not None and run.block * ranks < seq_len:
        one = functools.partial(
            activations, _of_block(shape, run.block * ranks, seq_len),
            run.replace(block=None, options={"on_host": "auto", "host_memory": None}), ranks, run.block * ranks, device,
            workspace=workspace, capability=capability, held=held,
        )  # fmt: skip
        return _by_blocks(one, shape, run, ranks, seq_len, device, free, room, workspace and device == "cuda")
    element, tokens = element_bytes(run, device), -(-seq_len // ranks) * run.data.batch_size
    chunk = min(tokens, run.chunk or tokens)
    tower, seen, on_host = _tower(shape, run, ranks, device, element)
    room = max(0, room - on_host)
    streaming = streaming_of(shape, run, ranks, tokens, element, free, room) if chunk < tokens else Streaming()
    forward = forward_of(shape, run, tokens, element, streaming.hidden, streaming.keys * streaming.kv)
    saved, host, needed, away, short = _kept(forward, run, room, disk)
    every, outputs = saved.every, saved.outputs
    kernel, gpu = kernel_of(shape, run, device, capability), workspace and device == "cuda"
    taken = kernel_workspace(shape, kernel, chunk, run.data.packed) if gpu else 0.0
    pages = streaming.keys * streaming.ahead if gpu and streaming.kv else 0.0
    kept = [True] * (outputs > 0) + [False] * (outputs < max(1, shape.attending))
    lines = [lines_at(_asked(shape, run, ranks, device, capability, streaming, save), tokens) for save in kept]
    lines += [*tower, AFTER]
    if every == len(kept) == 1 and not away:  # all layers are alike, as they were simulated
        needed, host = needed + lines[0].host_at(tokens) - host, lines[0].host_at(tokens)

    def beside(place: str, kernels: bool, found: dict[str, float]) -> None:
        if place != TOWER and seen:
            found[TOWER] = seen
        if kernels:
            found["kernel workspace"] = taken
        if "attention" in found:
            found["attention"] += pages
        if run.model.bits and in_layer(place):  # of the module that computes
            unpacked = shape.mlp if part_of(place) == "mlp" else shape.heads * shape.head_dim
            found["unpacked weights"] = element * shape.width * unpacked
        if streaming.hidden and gpu and in_layer(place):  # chunks on their way
            found["hidden states"] = found.get("hidden states", 0.0) + 2 * element * chunk * shape.width

    best, place, part = _largest(lines, tokens, held, beside)
    if every > 1 and not streaming.hidden:  # a segment's inputs, made again, are on the device, with their outputs
        best["checkpoints"] = best.get("checkpoints", 0.0) + (every - 1) * (forward.input_bytes + sum(forward.outputs))
    chunks = tokens / chunk
    return Activations(
        _bytes(best), place, part, host + on_host, needed + on_host, outputs / max(1, shape.attending), every, kernel,
        streaming.hidden, 2 * on_host + copied_bytes(run, forward, saved, streaming, chunks),
        streaming.attention_share(chunks), away, short,
    )  # fmt: skip


AFTER = Lines([Moment("the optimizer's step", False, {}, "after")], (0.0, 0.0))
"""What a step takes after backward, besides model states."""
TOWER = "vision tower"
"""The category of all that a model makes of images before its decoder has them, and the place of its moments."""


def _of_block(shape: Shape, tokens: int, seq_len: int) -> Shape:
    """The shape with the images of one block of so many tokens: an image across a border is in both blocks."""
    if (of := shape.images) is None:
        return shape
    return replace(shape, images=replace(of, count=min(of.count, -(-of.count * tokens // seq_len) + 1)))


def _tower(shape: Shape, run: RunConfig, ranks: int, device: str, element: int) -> tuple[list[Lines], float, int]:
    """Of a rank's images: the largest moment of the tower, beside which the embeddings (in backward their gradient)
    wait; what it keeps on the device between its forward and its backward; and its checkpoints on the host."""
    if shape.images is None:
        return [], 0.0, 0
    images, found = shape.images.of_rank(ranks, run.data.batch_size), tower_of(run, device, shape.images.asked)
    peak, kept, host = (base + each * images for base, each in (found[name] for name in ("peak", "kept", "host")))
    moment = Moment(TOWER, False, {TOWER: (peak, 0.0), "hidden states": (0.0, float(element * shape.width))})
    return [Lines([moment], (0.0, 0.0))], max(0.0, kept), round(host)


def reference_activations(
    shape: Shape, run: RunConfig, ranks: int, seq_len: int, held: Callable[[str], float] = lambda part: 0.0
) -> Activations:
    """The same of the reference stack (DeepSpeed's ALST with Liger's kernels and flash-attn 2, always checkpointed, in
    bf16), which is simulated too (`papermill_runs/referee/reference_stack.py`).

    Raises:
        ValueError: heads that the reference cannot share, or a decoder that it cannot run.
    """
    if not shared_by_reference(shape, ranks):
        raise ValueError(f"preset 'paper' cannot share {shape.heads}/{shape.kv_heads} heads over sp={ranks} ranks")
    if shape.family not in REFERENCE:
        raise ValueError(f"preset 'paper' is not known for model='{shape.name}', a {shape.family}: use preset 'ours'")
    tokens = -(-seq_len // ranks) * run.data.batch_size
    tiles = {part: bool(run.options.tile(part)) for part in ("mlp", "loss")}
    options = {"tiles": {**tiles, "norm": False}, "offload": bool(run.options.offload)}
    own = RunConfig(model=run.model, options=Options.plain(checkpoint=True, **options))
    best, place, part = _largest([lines_at(StepQuestion(own, ranks, "cuda", preset="paper"), tokens)], tokens, held)
    host = shape.layers * tokens * shape.width * 2 if run.options.offload else 0
    return Activations(_bytes(best), place, part, host, host, 0.0, 1, "flash_attention_2", copied=2 * host)


REFERENCE = ("llama", "mistral", "qwen3")
"""Decoders that the reference is simulated with: its kernels are Liger's for these."""


def shared_by_reference(shape: Shape, ranks: int) -> bool:
    """Whether the reference can share these heads over so many ranks."""
    return shape.heads % ranks == 0 and max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks) == 0


def _largest(
    lines: Sequence[Lines], tokens: int, held: Callable[[str], float],
    beside: Callable[[str, bool, dict[str, float]], None] = lambda *_: None,
) -> tuple[dict[str, float], str, str]:  # fmt: skip
    """(bytes by category, place, part) of the largest moment, each with what a simulation does not see."""
    best, where, most = dict[str, float](), ("", ""), -1.0
    for moment in (moment for one in lines for moment in one.moments):
        found = moment.at(tokens)
        beside(moment.place, moment.kernel, found)
        # a layer's own moment with bytes of its MLP is at the end of the MLP's backward, whose weights are released
        part = "end" if moment.part == "layer" and moment.place[-1].isdigit() and "mlp" in found else moment.part
        if (total := sum(found.values()) + held(part)) > most:
            best, where, most = found, (moment.place, part), total
    return best, *where


def _bytes(found: dict[str, float]) -> dict[str, int]:
    return {kind: round(nbytes) for kind, nbytes in found.items() if nbytes >= 0.5}


def _asked(
    shape: Shape, run: RunConfig, ranks: int, device: str, capability: int, streaming: Streaming, save: bool
) -> StepQuestion:
    """The question with what a run decides from its memory decided, and without what a simulated step does not see."""
    options, layer = run.options, shape.recurrence and shape.recurrence.layer
    away = streaming.kv and (streaming.hidden or shape.images is not None)
    place = "hidden+kv" if away else "hidden" if streaming.hidden else "none"
    asked, alike = str(options.attention), {"cudnn", "flash"}  # which take alike, but for their workspaces
    # flash-attn's packages may not be here; what `apply` refuses is left for it to say
    auto = asked.startswith(("sdpa", "flash_attention")) or (asked in alike and device == "cuda" and not shape.softcap)
    decided: dict[str, Any] = {
        "tiles": {part: options.tile(part) for part in get_args(TiledPart)}, "checkpoint": options.checkpoint,
        "save_attention": save and options.checkpoint, "offload": bool(options.offload), "chunk": run.chunk,
        "on_host": place if run.chunk is not None else "auto",
        "linear_attention": layer.way(options.linear_attention, ranks) if layer else options.linear_attention,
        "attention": "auto" if auto else asked, "experts_by_token": options.experts_by_token,
    }  # fmt: skip
    kernels = {kernel_of(shape, run, device, of) for of in (capability, 9)}
    return StepQuestion(
        RunConfig(model=run.model, options=Options.plain(**decided)), ranks, device,
        9 if kernels <= alike else capability, images=shape.images is not None and streaming.kv,
    )  # fmt: skip


def _by_blocks(
    one: Callable[..., Activations], shape: Shape, run: RunConfig, ranks: int, seq_len: int, device: str,
    free: int | None, room: int, gpu: bool,
) -> Activations:  # fmt: skip
    """A model that runs block by block (`MemoryPlan.blockwise`): `one` block is a sample of its own, in the host's room
    that pages of all layers' keys leave."""
    assert run.block is not None
    length, tokens, element = run.block * ranks, run.block * run.data.batch_size, element_bytes(run, device)
    heads, blocks = kv_needed(shape.heads, shape.kv_heads, ranks), -(-seq_len // length)
    kinds = {None: shape.attending - shape.windowed, shape.window: shape.windowed}
    page = {
        window: keys_and_values(
            kept_of_page(length, window) * run.data.batch_size, heads, shape.head_dim + shape.value_dim, element
        )
        for window, layers in kinds.items() if layers
    }  # fmt: skip
    pages = (blocks - 1) * sum(kinds[window] * nbytes for window, nbytes in page.items())  # the last block keeps none
    kv = keys_on_host(run, forward_of(shape, run, tokens, element, pages=pages), free, room)
    host = pages * kv
    found, ahead = one(room=max(0, room - host)), 5 / 3 if gpu else 0
    taken = dict(found.device)
    here = round(max(page.values(), default=0) * (1 + ahead)) if kv else pages
    taken["attention"] = taken.get("attention", 0) + here
    copied = {  # of the blocks before, for a forward, a recompute and a backward, with the sums
        window: kv * round(
            kinds[window] * nbytes * Streaming().visits(blocks, window and -(-(window - 1) // length)) * (2 / 3 + 1)
        )
        for window, nbytes in page.items()
    }  # fmt: skip
    return replace(
        found, device=taken, host=found.host + host, host_needed=found.host_needed + host, blocks=blocks,
        copied=found.copied * blocks + sum(copied.values()), copied_pages=copied.get(None, 0), twice=1.0,
    )  # fmt: skip


def _kept(forward: Forward, run: RunConfig, room: int, disk: int) -> tuple[Kept, int, int, int, bool]:
    """What `MemoryPlan` decides: what is kept, its bytes on the host, the least host bytes that would do, bytes on the
    disk, and whether that is too small. What `auto` keeps on a GPU, where only room is taken that nothing else needs,
    is not foretold."""
    if not run.options.offload:
        return Kept(1, len(forward.attending) * (run.options.checkpoint and forward.save is True), 0), 0, 0, 0, False
    kept = forward.kept(room, disk)
    host, _, away, _ = forward.sent(kept, room)
    if kept.staged:
        return kept, host, host, away, False
    return kept, host, forward.kept(0).needed, 0, bool(disk) and forward.kept(room, PLENTY).staged


def kernel_of(shape: Shape, run: RunConfig, device: str, capability: int = 9) -> str:
    """The kernel of core attention (`backends.BACKENDS`), as `backends.choose_backend` chooses it. `auto` counts as
    `sdpa`: what is installed is not known.

    Raises:
        ValueError: a kernel for comparison, or of the user's own.
    """
    if (asked := run.options.attention) not in ("sdpa", "auto"):
        if asked == "eager":
            raise ValueError("attention='eager' is for comparison, and is not planned")
        if not isinstance(asked, str):
            raise ValueError("attention of your own is not planned, because what it takes is not known")
        return asked
    width = max(shape.head_dim, shape.value_dim)
    return sdpa_kernel(device, element_bytes(run, device), width, shape.softcap, capability)


def kernel_workspace(shape: Shape, kernel: str, tokens: float, packed: bool = False) -> float:
    """Bytes that a GPU's attention backward takes for itself: dQ summed in fp32 (flash-attn and cuDNN both), and with
    flash-attn 2 the gradients of keys and values of each query head, before they are summed. cuDNN leaves the documents
    of `packed` samples to flash-attn 2, whose dQ is longer by a block for each document."""
    if kernel == "blockwise":
        return 0.0
    queries = tokens * shape.heads * shape.head_dim
    documents = packed and kernel in ("cudnn", *FLASH_2)
    expanded = (kernel in FLASH_2 or documents or shape.windowed) and shape.kv_heads < shape.heads
    more = FLASH_2_BLOCK / DOCUMENT * queries if documents else 0
    return 4 * (queries + more) + (2 * 2 * queries if expanded else 0)
