"""What one rank's step takes besides model states, from the closed forms of its moments (`moments`). Without torch, in
microseconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from alstlib.config import RunConfig
from alstlib.planner.attention_bytes import beside_form, kernel_workspace, latent_sizes
from alstlib.planner.experts import in_one_tile, tile_of_experts
from alstlib.planner.fits import StepQuestion, lines_at
from alstlib.planner.hybrids import BOTH, FULL, LINEAR, MOE, counts, mixed, sizes_of, way_of
from alstlib.planner.model_shapes import SQUARE, Shape
from alstlib.planner.moments import (
    DENSE_GRANITE,
    KERNEL,
    REFERENCE,
    SAME,
    Kinds,
    families,
    forms,
    frozen,
    in_layer,
    largest_of,
    moments_of,
    part_of,
    product,
)  # fmt: skip
from alstlib.planner.state_ways import PER_NODE
from alstlib.planner.streaming import Streaming, copied_bytes, host_room, kv_on_host, output_bytes, streaming_of
from alstlib.sizing import (
    kept_on_host,
    keys_and_values,
    kv_needed,
    reference_tiles,
    sdpa_kernel,
    tile_for,
)  # fmt: skip


def form_of(shape: Shape) -> str:
    """The decoder whose forms are those of this one."""
    if shape.family == "granitemoehybrid" and not shape.experts:
        return DENSE_GRANITE
    return SAME.get(shape.family, shape.family)


def heads_way(shape: Shape, ranks: int) -> tuple[str, dict[str, float]]:
    """How `ranks` ranks share the heads (`forms.HEADS`), with the sizes that belong to it."""
    heads, kv = shape.heads, shape.kv_heads
    if heads % ranks == 0 and kv % ranks == 0:
        k, q = kv / ranks, heads / kv
    elif heads % ranks == 0 and ranks % kv == 0:
        return "shared", {"K": kv, "m": ranks / kv, "g": heads / ranks}
    else:
        return "parts", {"K": kv, "q": heads / kv, "n": kv_needed(heads, kv, ranks)[-1]}
    return "one" if ranks == 1 else "whole", {"k": k, "q": q, "a": q + 2, "b": q + 1}


def as_whole(shape: Shape, ranks: int) -> dict[str, float]:
    """Sizes as if ranks that share heads, or have parts of heads, had whole ones: the memory is about the same."""
    most = max(kv_needed(shape.heads, shape.kv_heads, ranks))
    k = shape.heads / ranks if shape.family in SQUARE else most  # the width is that of all heads
    q = shape.heads / ranks / k
    return {"k": k, "q": q, "a": q + 2, "b": q + 1}


@dataclass(frozen=True)
class Activations:
    """What one rank's step takes besides model states. Bytes."""

    device: dict[str, int]
    """At the device peak, by category (`scope`)."""
    place: str
    """The module in which the peak is reached."""
    host: int
    """Of the checkpoints that wait on the host."""
    host_needed: int
    """The least that the host must have."""
    attention_kept: float
    """Share of the layers that attend whose outputs are kept."""
    inputs_kept_every: int
    kernel: str
    """Of core attention (`backends.BACKENDS`)."""
    hidden_on_host: bool = False
    """Do the hidden states of streamed layers lie on the host?"""
    kv_on_host: bool = False
    """Do their keys and values?"""
    copied: int = 0
    """Copied between device and host in a step, in one direction at a time."""
    attention_share: float = 1.0
    """Of the pairs of queries and keys, how many attention computes: less than 1 with sparse pages."""

    @property
    def peak(self) -> int:
        return sum(self.device.values())


def activations(
    shape: Shape, run: RunConfig, ranks: int, seq_len: int, device: str, room: int | None = None,
    workspace: bool = True, capability: int = 9, free: int | None = None,
    held: Callable[[str], float] = lambda part: 0.0,
) -> Activations:  # fmt: skip
    """Device and host memory of one of `ranks` ranks that share each sample of `seq_len` tokens.

    Most simulated peaks are met to the byte, for widths from 256; a last tile that is shorter than the others counts as
    a whole one. With more ranks than query heads, what attention takes is overestimated by up to three quarters.

    Args:
        device: whose tiles and dtype are taken, `cuda` or `cpu`.
        room: host bytes for this rank's checkpoints, where the run names no `host_memory`; None for plenty.
        workspace: count what a GPU's attention kernel takes for itself, which a simulation does not see.
        capability: the GPU's compute capability, its first number.
        free: device bytes before the first layer, of which `on_host="auto"` leaves keys and values a part; None: it
            leaves them the device.
        held: bytes of model states in a part of the model (`part_of`): the peak is the largest sum of both.

    Raises:
        ValueError: a decoder that has no form.
    """
    run = run.for_width(shape.width)
    if run.block is not None and run.block * ranks < seq_len:
        return _by_blocks(shape, run, ranks, seq_len, device, room, workspace, capability, free, held)
    if shape.family not in families():
        return _simulated(shape, run, ranks, seq_len, device, room, workspace, capability, free, held)
    made = forms()
    family = form_of(shape)
    element = element_bytes(run, device)
    rows = -(-seq_len // ranks) * run.data.batch_size
    chunk = min(rows, run.chunk or rows)
    chunked = chunk < rows
    dtype = "bf16" if run.bf16(device == "cuda") else "fp32"
    heads, sizes = heads_way(shape, ranks)
    if shape.states or (heads in ("shared", "parts") and not _traced(family, dtype, heads, chunked)):
        heads, sizes = "whole", as_whole(shape, ranks)
    sizes |= {"R": rows, "P": ranks, "H": shape.width, "I": shape.mlp, "V": shape.vocab, "L": shape.layers}
    sizes |= {"d": shape.head_dim / 4, "C": chunk, **latent_sizes(shape)}
    sizes |= {"E": shape.experts, "T": shape.routed, "I": shape.expert_mlp} if shape.experts else {}
    sizes |= {"S": shape.shared_mlp} if shape.shared_mlp else {}
    mlp = (
        tile_of_experts(shape, run, rows, element, device)
        if shape.experts and run.options.tile("mlp")
        else run.options.tile("mlp")
    )
    if shape.states:
        by_heads = way_of(shape.states, run, ranks, rows // run.data.batch_size, nodes=ranks > PER_NODE) == "heads"
        sizes |= sizes_of(family, shape.states, ranks, by_heads) | counts(shape.states)
    for name, (of, size) in {n: t.rsplit(" ", 1) for n, t in tiles_of(family).items()}.items():
        number, _, names = of.partition(" ")
        width = float(number) * product(names, sizes) if name != "D" else shape.value_dim * shape.heads / ranks
        wide = element if name == "M" else int(size)
        given = {"M": mlp, "U": run.options.tile("loss"), "N": run.options.tile("norm")}.get(name, True)
        tile = tile_for(int(max(width, shape.width) if name == "M" else width), wide, device)
        sizes[name] = min(rows, tile if isinstance(given, bool) else given)
    row, output = rows * shape.width * element, output_bytes(shape, rows, element)
    streaming = streaming_of(shape, run, ranks, rows, element, free, room) if chunked else Streaming()
    every, outputs, host, needed = _kept(run, shape, row, output, room, streaming)
    keeps = _keeps(run, shape.attending, outputs)
    switches = {
        "mlp": mlp, "norm": run.options.tile("norm") and not chunked, "loss": run.options.tile("loss"),
        "chunk": chunked,
        "fine": chunked and mlp and sizes["M"] < sizes["C"] and not shape.states, "travels": streaming.hidden,
    }  # fmt: skip
    on = "+".join(name for name, value in switches.items() if value)
    single = run.options.tile("mlp") and not chunked and (not mlp if shape.experts else sizes["M"] >= rows)
    once = mlp and dtype == "fp32" and sizes["M"] >= rows and not chunked
    kernel = kernel_of(shape, run, device, capability)
    called = sizes["C"] if chunked else rows
    taken = kernel_workspace(shape, kernel, called, run.data.packed) if workspace and device == "cuda" else 0.0
    beside = beside_form(shape, kernel, ranks, rows * ranks, rows, sizes["C"] if chunked else None, element)

    def adjust(place: str, kinds: Kinds, found: dict[str, float]) -> None:
        if once:
            found["mlp"] = found.get("mlp", 0.0) - _sums(kinds) * product("H I", sizes)
        if place.endswith(".norm") and sizes["N"] == rows and not streaming.hidden:  # a single tile is no copy
            found["loss"] -= element * product("H N", sizes)
        if (
            shape.experts
            and run.options.tile("mlp")
            and not mlp
            and not chunked
            and "mlp" in found
            and not shape.states
        ):
            found["mlp"] += in_one_tile((names for _, names in kinds["mlp"]), sizes, element)
        if KERNEL in place:
            found["kernel workspace"] = taken
            found["attention"] = found.get("attention", 0.0) + streaming.longer_pages(sizes["C"]) + beside
        if "attention" in found and streaming.kv:
            keys = sum(c * product(n, sizes) for c, n in kinds["attention"] if "R" in n.split())
            found["attention"] -= keys * (1 - streaming.on_device(workspace and device == "cuda"))
        if streaming.hidden and workspace and device == "cuda" and in_layer(place):  # chunks on their way
            found["hidden states"] += 2 * 2 * product("C H", sizes)

    if states := shape.states:
        keeps = [keep if keep in ("device", "host", "host+attention") else keep.partition("+")[0] for keep in keeps]

        def way(kind: str, keep: str) -> str:
            keep = keep if kind in (FULL, BOTH) else keep.partition("+")[0]
            tiled = "mlp+" if single or (MOE in states.kinds and kind != MOE) else ""
            shares = by_heads and kind in (LINEAR, BOTH)
            how = tiled + on.removeprefix(tiled) + shares * "+by_heads" + single * "+single"
            return "/".join([f"{family}.{kind}", dtype, heads, keep, how])

        ways = [way(kind, keep) for kind in states.kinds for keep in keeps]
    else:
        ways = ["/".join([family, dtype, heads, keep, on]) for keep in keeps]
    if not all(way in made["ways"] for way in ways) and not chunked and not shape.states:
        ways = ["/".join([family, dtype, heads, keep, ""]) for keep in keeps]
    if not all(way in made["ways"] for way in ways):
        return _simulated(shape, run, ranks, seq_len, device, room, workspace, capability, free, held)
    moments: Iterable[tuple[str, Kinds]] = (moment for one in ways for moment in moments_of(one))
    if shape.states:
        moments = mixed(way, keeps, shape.states)
    moments = ((place, kinds if run.model.lora is None else frozen(kinds)) for place, kinds in moments)
    best, where = largest_of(moments, sizes, adjust, held)
    norm = 32 * product("H N", sizes) + 24 * sizes["N"] + 8 * sizes["H"]
    largest = sum(best.values()) + held(part_of(where))
    if streaming.hidden and dtype == "fp32" and norm + held("outside") > largest:  # a tile as long as the slice
        best, where = {"loss": norm}, "model.norm"
    kept = (every, outputs, host, needed)
    last = _last_layer(where, shape)
    return _found(shape, run, best, last, kept, (row, output), kernel, streaming, rows / sizes["C"])


def _simulated(
    shape: Shape, run: RunConfig, ranks: int, seq_len: int, device: str, room: int | None, workspace: bool,
    capability: int, free: int | None, held: Callable[[str], float],
) -> Activations:  # fmt: skip
    """A step as the real code takes it (`fits`): where there is no form."""
    element, rows = element_bytes(run, device), -(-seq_len // ranks) * run.data.batch_size
    chunk = min(rows, run.chunk or rows)
    row, output = rows * shape.width * element, output_bytes(shape, rows, element)
    streaming = streaming_of(shape, run, ranks, rows, element, free, room) if chunk < rows else Streaming()
    every, outputs, host, needed = _kept(run, shape, row, output, room, streaming)
    kernel, gpu = kernel_of(shape, run, device, capability), workspace and device == "cuda"
    taken = kernel_workspace(shape, kernel, chunk, run.data.packed) if gpu else 0.0
    ahead = gpu and streaming.kv  # copies run ahead of the computation
    pages = streaming.keys * (streaming.on_device(True) - streaming.on_device(False)) if ahead else 0.0
    # a last chunk that is shorter counts as a whole one
    whole = -(-rows // chunk) * chunk if rows > 3 * chunk else rows
    kept = [True] * (outputs > 0) + [False] * (outputs < max(1, shape.attending))
    lines = [lines_at(_asked(run, ranks, device, capability, streaming, save), whole) for save in kept]
    if every == len(lines) == 1:  # all layers are alike, as they were simulated
        needed, host = needed + lines[0].host_at(whole) - host, lines[0].host_at(whole)
    best, where, most = dict[str, float](), "", 0.0
    for moment in (moment for one in lines for moment in one.moments):
        found = moment.at(whole)
        if moment.kernel:
            found["kernel workspace"] = taken
        if "attention" in found:
            found["attention"] += pages
        if streaming.hidden and gpu and in_layer(moment.place):  # chunks on their way
            found["hidden states"] = found.get("hidden states", 0.0) + 2 * element * chunk * shape.width
        if (total := sum(found.values()) + held(part_of(moment.place))) > most:
            best, where, most = found, moment.place, total
    decided = (every, outputs, host, needed)
    return _found(shape, run, best, where, decided, (row, output), kernel, streaming, rows / chunk)


def _found(
    shape: Shape, run: RunConfig, best: dict[str, float], where: str, kept: tuple[int, int, int, int],
    sizes: tuple[int, int], kernel: str, streaming: Streaming, chunks: float,
) -> Activations:  # fmt: skip
    """The largest moment, with what it leaves open. `kept` is as `_kept` gives it; `sizes` are the bytes of a layer's
    input and of its attention output."""
    (every, outputs, host, needed), (row, output) = kept, sizes
    if every > 1 and not streaming.hidden:  # a segment's inputs, made again, are on the device, with their outputs
        best["checkpoints"] = best.get("checkpoints", 0.0) + (every - 1) * (row + output)
    return Activations(
        {kind: round(nbytes) for kind, nbytes in best.items() if nbytes >= 0.5}, where, host, needed,
        outputs / max(1, shape.attending), every, kernel, streaming.hidden, streaming.kv,
        copied_bytes(run, shape.layers, every, row, outputs * output, streaming, chunks, shape.attending),
        streaming.attention_share(chunks) if run.contrib.sparse and chunks > 1 else 1.0,
    )  # fmt: skip


def _asked(run: RunConfig, ranks: int, device: str, capability: int, streaming: Streaming, save: bool) -> StepQuestion:
    """The question with what a run decides from its memory decided, and without what a simulated step does not see."""
    options = run.options
    place = "none" if not streaming.hidden else "hidden+kv" if streaming.kv else "hidden"
    decided = {
        "save_attention": save and options.checkpoint, "offload": bool(options.offload), "host_memory": None,
        "on_host": place if run.chunk is not None else "auto",
        "attention": options.attention if options.attention in ("blockwise", "efficient") else "auto",
        "chunk": run.chunk,
    }  # fmt: skip
    own = RunConfig(model=run.model, options=options.replace(**decided))
    return StepQuestion(own, ranks, device, capability)


def tiles_of(family: str) -> dict[str, str]:
    """What decides the tiles of a decoder, or of all layers of a hybrid."""
    made = forms()["tiles"]
    found: dict[str, str] = {}
    for name in made:
        if name.partition(".")[0] == family:
            found |= made[name]
    return found


def _traced(family: str, dtype: str, heads: str, chunked: bool) -> bool:
    """Is there a form of this way to share heads?"""
    some = f"{family}/{dtype}/{heads}/{'device/mlp+loss+chunk' if chunked else 'device/mlp+norm+loss'}"
    return some in forms()["ways"]


def _by_blocks(
    shape: Shape, run: RunConfig, ranks: int, seq_len: int, device: str, room: int | None, workspace: bool,
    capability: int, free: int | None, held: Callable[[str], float],
) -> Activations:  # fmt: skip
    """A model that runs block by block: one block as a sample of its own, and pages of all layers' keys and values."""
    assert run.block is not None
    length = run.block * ranks
    one = activations(
        shape, run.replace(block=None, options={"on_host": "auto"}), ranks, length, device, room, workspace, capability,
        held=held,
    )  # fmt: skip
    element, heads = element_bytes(run, device), max(kv_needed(shape.heads, shape.kv_heads, ranks))
    page = keys_and_values(length * run.data.batch_size, heads, shape.head_dim + shape.value_dim, element)
    blocks = -(-seq_len // length)
    pages = shape.attending * page * (blocks - 1)  # the last block's are never kept
    rows = run.block * run.data.batch_size
    row, output = rows * shape.width * element, output_bytes(shape, rows, element)
    kv = kv_on_host(run, shape.layers, row, output, pages, free, room, pages=pages)
    ahead = 5 / 3 if workspace and device == "cuda" else 0
    taken = dict(one.device)
    taken["attention"] = taken.get("attention", 0) + (round(page * (1 + ahead)) if kv else pages)
    copied = one.copied * blocks
    if kv:  # keys and values of the blocks before, for a forward, a recompute and a backward, with the sums
        visits = blocks * (blocks - 1) // 2
        copied += round(shape.attending * page * visits * (2 / 3 + 1))
    host = pages * kv
    return replace(
        one, device=taken, host=one.host + host, host_needed=one.host_needed + host, kv_on_host=kv, copied=copied
    )  # fmt: skip


def reference_activations(
    shape: Shape, run: RunConfig, ranks: int, seq_len: int, held: Callable[[str], float] = lambda part: 0.0
) -> Activations:
    """The same of the reference stack (DeepSpeed's ALST with Liger's kernels and flash-attn 2, always checkpointed, in
    bf16), whose code was traced too (`reference_forms`).

    Raises:
        ValueError: heads that the reference cannot share, or a decoder that it was not traced with.
    """
    made = forms()
    heads, sizes = heads_way(shape, ranks)
    if heads == "parts":
        raise ValueError(f"preset 'paper' cannot share {shape.heads}/{shape.kv_heads} heads over sp={ranks} ranks")
    rows = -(-seq_len // ranks) * run.data.batch_size
    sizes |= {"R": rows, "P": ranks, "H": shape.width, "I": shape.mlp, "V": shape.vocab, "L": shape.layers}
    sizes |= {"d": shape.head_dim / 4, **reference_tiles(rows, shape.width, shape.vocab)}
    on = "+".join(
        name for name, value in (("mlp", run.options.tile("mlp")), ("loss", run.options.tile("loss"))) if value
    )
    where = "device" if not run.options.offload else "host"
    way = "/".join([REFERENCE, shape.family, "bf16", heads, where, on])
    if way not in made["ways"]:
        raise ValueError(f"preset 'paper' is not known for model='{shape.name}', a {shape.family}: use preset 'ours'")
    best, place = largest_of((made["moments"][i] for i in made["ways"][way]), sizes, held=held)
    row = rows * shape.width * 2
    host = shape.layers * row if where == "host" else 0
    peak = {kind: round(nbytes) for kind, nbytes in best.items() if nbytes >= 0.5}
    return Activations(peak, _last_layer(place, shape), host, host, 0.0, 1, "flash_attention_2", copied=2 * host)


def _sums(kinds: Kinds) -> float:
    """Bytes a weight that a moment has for summing an MLP's gradients over tiles: in fp32 a single tile's are used as
    they are (up to 4 of each of three matrices)."""
    return min(12.0, sum(c for c, names in kinds.get("mlp", []) if names == "H I"))


def _last_layer(place: str, shape: Shape) -> str:
    """The path of the last layer that was traced, as that of the model's last."""
    return re.sub(r"\.3(?=\.|<|$)", f".{shape.layers - 1}", place)


def element_bytes(run: RunConfig, device: str) -> int:
    """Of a weight and an activation."""
    return 2 if run.bf16(device == "cuda") else 4


def _kept(
    run: RunConfig, shape: Shape, row: int, output: int, free: int | None, streaming: Streaming
) -> tuple[int, int, int, int]:
    """As `Handle.plan` decides: of how many layers one input is kept, layers whose attention outputs are kept, host
    bytes of both, and the least host bytes that would do. What `auto` keeps on a GPU, where only room is taken that
    nothing else needs, is not foretold."""
    layers, save = shape.layers, run.options.save_attention
    if not run.options.checkpoint:
        return 1, 0, 0, 0
    if not run.options.offload:
        return 1, shape.attending if save is True else 0, 0, 0
    room = host_room(run, free)
    how: dict[str, Any] = {
        "streamed": run.chunk is not None, "travels": streaming.hidden, "tables": streaming.tables,
        "pages": streaming.keys * streaming.kv, "attending": shape.attending,
    }  # fmt: skip
    every, outputs, needs = kept_on_host(room, layers, row, output, save, **how)
    least = kept_on_host(0, layers, row, output, save, **how)[2]
    return every, outputs, needs + (outputs * output if save == "auto" else 0), least


def _keeps(run: RunConfig, layers: int, outputs: int) -> list[str]:
    """Forms that apply: a share of the layers may keep its outputs, and another not."""
    if not run.options.checkpoint:
        return ["all"]
    where = "device" if not run.options.offload else "host"
    return [where] * (outputs < layers) + [f"{where}+attention"] * (outputs > 0)


def kernel_of(shape: Shape, run: RunConfig, device: str, capability: int = 9) -> str:
    """The kernel of core attention (`backends.BACKENDS`), as `backends.choose_backend` chooses it. `auto` counts as
    `sdpa`: what is installed is not known."""
    if run.options.attention not in ("sdpa", "auto"):
        return str(run.options.attention)
    width = max(shape.head_dim, shape.value_dim)
    return sdpa_kernel(device, element_bytes(run, device) == 2, width, shape.softcap, capability)
