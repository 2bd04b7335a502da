"""What fits: device and host memory of a run, its longest sequence and its step time, before anything is started.

Closed forms, in microseconds, without torch: activations from `forms.json`, which the simulator read off the real code;
model states from DeepSpeed ZeRO's rules; what neither sees (CUDA context, NCCL, fragments, a kernel's workspace) as
named terms (`Overheads`) that can be set. Step time from FLOPs and rates (`rates`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig
from alstlib.rules import share_host, tile_for
from alstlib.shapes import Shape

GIB = 2**30
KERNEL = "#kernel"


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Device memory that no tensor of ours takes. Each is a round figure with a reason, none is fitted to a result."""

    context: int = GIB
    """Bytes of a CUDA context with its kernels ("typically around 1 GiB per GPU", ALST, section 2.1)."""
    nccl: int = 2 * GIB
    """Bytes of NCCL's buffers where there is more than one GPU ("multiple gigabytes", ALST, section 2.1)."""
    fragmentation: float = 0.03
    """Share of the device that the allocator cannot use: with expandable segments, the unused ends of its blocks."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run is to run on."""

    gpus: int = 8
    per_node: int = 8
    gpu_memory: int | None = 80 * 10**9
    """Bytes of a GPU, None for no limit. `80GB` is a vendor's label (`label_bytes`)."""
    host_memory: int | None = None
    """Bytes of a node's memory; None for no limit."""
    gpu: str = "H100"
    """Whose rates are taken (`rates.GPUS`)."""
    device: str = "cuda"
    overheads: Overheads = field(default_factory=Overheads)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def host_share(self) -> int | None:
        """Host bytes for each rank of a full node."""
        return None if self.host_memory is None else self.host_memory // min(self.gpus, self.per_node)

    @property
    def device_budget(self) -> int | None:
        """Device bytes that tensors may take."""
        if self.gpu_memory is None or self.device == "cpu":
            return self.gpu_memory
        rest = self.gpu_memory - self.overheads.context - (self.overheads.nccl if self.gpus > 1 else 0)
        return int(rest - self.overheads.fragmentation * self.gpu_memory)


@functools.cache
def _factors(names: str) -> tuple[tuple[str, int], ...]:
    parts = (name.partition("^") for name in names.split())
    return tuple((name, int(power or 1)) for name, _, power in parts)


def product(names: str, sizes: Mapping[str, float]) -> float:
    """The product of these names' sizes: `R H`, `d^2 k`."""
    result = 1.0
    for name, power in _factors(names):
        result *= sizes[name] ** power
    return result


@functools.cache
def _forms() -> dict[str, Any]:
    """forms.json, with each moment as (place, {category: [(coefficient, names)]})."""
    found = json.loads(Path(__file__).with_name("forms.json").read_text())

    def terms(text: str) -> list[tuple[float, str]]:
        parts = (part.partition(" ") for part in text.split(" + "))
        return [(float(number), names) for number, _, names in parts]

    found["moments"] = [(place, {kind: terms(t) for kind, t in kinds.items()}) for place, kinds in found["moments"]]
    return found


def families() -> list[str]:
    """Decoders that have a form."""
    return sorted(_forms()["tiles"])


def heads_way(shape: Shape, ranks: int) -> tuple[str, dict[str, float]]:
    """How so many ranks share the heads (`forms.HEADS`), with the sizes that belong to it."""
    heads, kv = shape.heads, shape.kv_heads
    if heads % ranks == 0 and kv % ranks == 0:
        k, q = kv / ranks, heads / kv
    elif heads % ranks == 0 and ranks % kv == 0:
        return "shared", {"K": kv, "m": ranks / kv, "g": heads / ranks}
    else:  # parts of heads: as many rows of queries, and all keys and values of the heads that they belong to
        k = max(kv_needed(heads, kv, ranks))
        q = heads / ranks / k
    return "one" if ranks == 1 else "whole", {"k": k, "q": q, "a": q + 2, "b": q + 1}


def kv_needed(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """Key/value heads that each rank needs, where ranks have parts of heads."""
    group = heads // kv_heads
    firsts = [heads * r // ranks // group for r in range(ranks)]
    lasts = [(-(-heads * (r + 1) // ranks) - 1) // group for r in range(ranks)]
    return [last - first + 1 for first, last in zip(firsts, lasts)]


@dataclass(frozen=True)
class Activations:
    """What one rank's step takes besides model states. Bytes."""

    device: dict[str, int]
    """At the device peak, by category (`places`)."""
    place: str
    """The module in which the peak is reached."""
    host: int
    """Of the checkpoints that wait on the host."""
    host_needed: int
    """The least that the host must have."""
    attention_kept: float
    """Share of the layers whose attention outputs are kept."""
    inputs_kept_every: int

    @property
    def peak(self) -> int:
        return sum(self.device.values())


def activations(shape: Shape, run: RunConfig, ranks: int, seq_len: int, machine: Machine) -> Activations:
    """Device and host memory of one of `ranks` ranks that share each sample of `seq_len` tokens.

    Raises:
        ValueError: a decoder that has no form.
    """
    made = _forms()
    if shape.family not in made["tiles"]:
        raise ValueError(
            f"model='{shape.name}' is a {shape.family or 'decoder of no model_type'}, which has no form; there are "
            f"forms of {', '.join(families())}. Add it to alstlib/forms.py and run python -m alstlib.forms"
        )
    element = element_bytes(run, machine)
    rows = -(-seq_len // ranks) * run.batch_size
    heads, sizes = heads_way(shape, ranks)
    sizes |= {"R": rows, "P": ranks, "H": shape.width, "I": shape.mlp, "V": shape.vocab, "L": shape.layers}
    sizes |= {"d": shape.head_dim / 4, "C": min(rows, run.chunk or rows)}
    for name, (of, size) in {n: t.rsplit(" ", 1) for n, t in made["tiles"][shape.family].items()}.items():
        number, _, names = of.partition(" ")
        width = float(number) * product(names, sizes) if name != "D" else shape.head_dim * shape.heads / ranks
        wide = element if name == "M" else int(size)
        given = {"M": run.tiled_mlp, "U": run.tiled_loss, "N": run.tiled_norm}.get(name, True)
        tile = tile_for(int(max(width, shape.width) if name == "M" else width), wide, machine.device)
        sizes[name] = min(rows, tile if isinstance(given, bool) else given)
    chunked = run.chunk is not None and run.chunk < rows
    row, output = rows * shape.width * element, rows * shape.heads * (shape.head_dim * element + 4)
    every, outputs = _kept(run, shape.layers, row, output, machine)
    keeps = _keeps(run, shape.layers, outputs)
    switches = {"mlp": run.tiled_mlp, "norm": run.tiled_norm and not chunked, "loss": run.tiled_loss, "chunk": chunked}
    on = "+".join(name for name, value in switches.items() if value)
    best: dict[str, float] = {}
    where = ""
    workspace = kernel_workspace(shape, run, sizes["C"] if chunked else rows, machine)
    for keep in keeps:
        for index in made["ways"]["/".join([shape.family, _dtype(run, machine), heads, keep, on])]:
            place, kinds = made["moments"][index]
            found = {kind: sum(c * product(n, sizes) for c, n in terms) for kind, terms in kinds.items()}
            if KERNEL in place:
                found["kernel workspace"] = workspace
            if sum(found.values()) > sum(best.values()):
                best, where = found, place.removesuffix(KERNEL)
    if every > 1:  # a segment's inputs, made again, wait on the device, with their attention outputs
        best["checkpoints"] = best.get("checkpoints", 0.0) + (every - 1) * (row + output)
    host = 0 if run.offload == "none" else -(-shape.layers // every) * row + outputs * output
    needed = 0 if run.offload == "none" else _least_host(run, shape.layers, row, output)
    device = {kind: round(nbytes) for kind, nbytes in best.items() if nbytes >= 0.5}
    last = where.replace(".3.", f".{shape.layers - 1}.")
    return Activations(device, last, host, needed, outputs / shape.layers, every)


def _dtype(run: RunConfig, machine: Machine) -> str:
    return run.dtype if run.dtype != "auto" else "bf16" if machine.device == "cuda" else "fp32"


def element_bytes(run: RunConfig, machine: Machine) -> int:
    """Of a weight and an activation."""
    return 2 if _dtype(run, machine) == "bf16" else 4


def _kept(run: RunConfig, layers: int, row: int, output: int, machine: Machine) -> tuple[int, int]:
    """(of how many layers one input is kept, layers whose attention outputs are), as `layers.plan` decides."""
    if not run.checkpoint:
        return 1, 0
    if run.offload == "none":
        return 1, layers if run.save_attention is True else 0
    room = run.host_memory if run.host_memory is not None else machine.host_share
    every, outputs = share_host(2**62 if room is None else room, layers, row, output, run.save_attention)
    if run.chunk is not None and every > 1:  # streamed layers need every input
        every, outputs = 1, outputs if run.save_attention is True else 0
    return every, outputs


def _least_host(run: RunConfig, layers: int, row: int, output: int) -> int:
    outputs = layers * output if run.save_attention is True else 0
    return (layers if run.chunk is not None else 1) * row + outputs


def _keeps(run: RunConfig, layers: int, outputs: int) -> list[str]:
    """Forms that apply: a share of the layers may keep its outputs, and another not."""
    if not run.checkpoint:
        return ["all"]
    where = "device" if run.offload == "none" else "host"
    return [where] * (outputs < layers) + [f"{where}+attention"] * (outputs > 0)


def kernel_workspace(shape: Shape, run: RunConfig, rows: float, machine: Machine) -> float:
    """Bytes that a GPU's attention backward takes for itself: dQ summed in fp32 (flash-attn and cuDNN both), and with
    flash-attn 2 the gradients of keys and values of each query head, before they are summed."""
    if machine.device == "cpu":
        return 0.0
    queries = rows * shape.heads * shape.head_dim
    expanded = run.attention in ("flash", "flash_attention_2") and shape.kv_heads < shape.heads
    return 4 * queries + (2 * 2 * queries if expanded else 0)
