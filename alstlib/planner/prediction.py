"""Predict the device and host memory of a run, the longest sequence that fits, and what would help, before anything is
started.

Activations come from simulated steps (`activations`), model states from DeepSpeed ZeRO's rules, step time from rates
(`step_time`); what none of these sees (CUDA context, NCCL, fragments) are named terms (`Overheads`) that can be set.
What was simulated before is answered in milliseconds, without torch and transformers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from alstlib.base.config import RunConfig
from alstlib.base.sizing import FP32_ON_DISK
from alstlib.base.units import format_bytes
from alstlib.planner.activations import Activations, activations, reference_activations, shared_by_reference
from alstlib.planner.devices import pins_exactly
from alstlib.planner.fits import element_bytes
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.model_states import WEIGHTS, ZERO_DEFAULT, Sizes, States, model_states
from alstlib.planner.step_time import step_seconds

Side = tuple[str, int, int | None]
"""A memory (`device`, `host` or `disk`), the bytes that it needs, and those that are there (None for no limit)."""


def first_beyond(sides: Iterable[Side], times: float = 1.0) -> tuple[str, int, int] | None:
    """The first side that needs more than `times` times what is there."""
    return next(((where, n, has) for where, n, has in sides if has is not None and n > times * has), None)


def missing(sides: Iterable[Side]) -> dict[str, int]:
    """Bytes that each side needs beyond what is there."""
    return {where: needs - has for where, needs, has in sides if has is not None and needs > has}


@dataclass(frozen=True)
class Loading:
    """Peaks while the model is loaded (`loading.ranks`), before any step and for every length the same. Bytes."""

    device: int = 0
    """A rank's part of the weights, and under ZeRO-3 one whole tensor."""
    device_limit: int | None = None
    host: int = 0
    """On the first node, where rank 0 has all weights, and every rank its process."""
    host_limit: int | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        return ("loading: device", self.device, self.device_limit), ("loading: host", self.host, self.host_limit)

    @property
    def why(self) -> str:
        """A sentence on what is beyond its limit; nothing where the model can be loaded."""
        if (over := first_beyond(self.sides)) is None:
            return ""
        where, needs, has = over
        whose = "a device's" if where.endswith("device") else "the first node's host"
        return f"loading the model would take {format_bytes(needs)} of {whose} memory, and {format_bytes(has)} is there"


@dataclass(frozen=True)
class Prediction:
    """What one length takes on one machine. Bytes of the device, the host and the disk are those of one rank."""

    seq_len: int
    device: dict[str, int]
    """What is alive on the device at its peak, by category."""
    device_limit: int | None
    host: dict[str, int]
    host_limit: int | None
    host_needed: int
    """The least that this rank needs of the host: on a CPU with what is on its device."""
    activations: Activations
    seconds: dict[str, float]
    """The parts of one optimizer step; `step` is the time that passes."""
    loading: Loading
    """What loading the model takes, before the first step."""
    disk: dict[str, int] = field(default_factory=dict)
    """What lies on a disk: states, and checkpoints that the host has no room for."""
    disk_limit: int | None = None
    """This rank's share of it."""
    written: int = 0
    """Bytes that one optimizer step writes to it."""

    @property
    def device_peak(self) -> int:
        return sum(self.device.values())

    @property
    def host_peak(self) -> int:
        return sum(self.host.values())

    @property
    def disk_peak(self) -> int:
        return sum(self.disk.values())

    @property
    def sides(self) -> tuple[Side, ...]:
        """The device, the host, and the disk where there is one."""
        memory = ("device", self.device_peak, self.device_limit), ("host", self.host_needed, self.host_limit)
        disk = ("disk", self.disk_peak, self.disk_limit)
        return (*memory, disk) if self.disk or self.disk_limit is not None else memory

    @property
    def limit(self) -> str:
        """What this length goes beyond: `device`, `host` or `disk` in a step, `loading: device` or `loading: host`
        before the first, or nothing."""
        return (first_beyond([*reversed(self.sides), *self.loading.sides]) or ("",))[0]

    @property
    def fits(self) -> bool:
        return not self.limit

    @property
    def reason(self) -> str:
        """`limit`, or `disk` where a larger one would do, or `host` where the device's memory is exceeded because the
        host is full: it keeps one layer's input in k (`activations.inputs_kept_every`), and during backward the device
        holds the others."""
        if self.limit in ("device", "host") and self.activations.disk_short:
            return "disk"
        full = self.activations.inputs_kept_every > 1 and not self.activations.hidden_on_host
        over = self.device_peak - (self.device_limit or 0)
        return "host" if self.limit == "device" and full and over <= self.device.get("checkpoints", 0) else self.limit

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that are missing in a step: of the `device`, and of this rank's share of the `host`."""
        return missing(self.sides)

    @property
    def shortfall(self) -> int:
        """Bytes that are missing in a step and while the model is loaded."""
        return sum(missing([*self.sides, *self.loading.sides]).values())

    def to_dict(self) -> dict[str, Any]:
        """For programs: bytes of one rank, tokens, seconds."""
        kept = self.activations
        return {
            "seq_len": self.seq_len, "fits": self.fits, "limit": self.reason,
            "device": {"peak": self.device_peak, "limit": self.device_limit, "by_category": self.device,
                       "peak_place": kept.place},
            "host": {"peak": self.host_peak, "limit": self.host_limit, "by_category": self.host,
                     "attention_kept": kept.attention_kept, "inputs_kept_every": kept.inputs_kept_every},
            "disk": {"peak": self.disk_peak, "limit": self.disk_limit, "by_category": self.disk,
                     "written": self.written},
            "kernel": kept.kernel, "step_seconds": self.seconds,
            "loading": {**asdict(self.loading), "why": self.loading.why},
        }  # fmt: skip


PACKED = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: each 64 have a scale of a byte, and each 256 scales one in fp32."""


def frozen_weights(shape: Shape, run: RunConfig, element: int) -> int:
    """Bytes of a whole model's weights without an adapter: those of linear modules in 4 bits with `model.bits`. The
    embedding, the head and norms keep their dtype (peft's `prepare_model_for_kbit_training` would make them fp32)."""
    packed = shape.linear_parameters if run.model.bits else 0
    return round(PACKED * packed) + element * (shape.parameters - packed)


def states(shape: Shape, run: RunConfig, machine: Machine, preset: str = "ours") -> States:
    """A rank's model states, and ZeRO's buffers. The reference's buckets are DeepSpeed's default, and it tells the
    engine of its sequence parallelism, whose gradients are then reduced in fp32 by default."""
    adapter = None if run.model.lora is None else shape.adapter_parameters(run.model.lora)
    element = element_bytes(run, machine.device)
    sizes = Sizes(
        parameters=shape.parameters + (adapter or 0), layer=shape.layer_parameters, embedding=shape.embedding,
        trainable=adapter, largest=shape.largest_tensor if adapter is None else 0, tensor=shape.largest_tensor,
        packed=frozen_weights(shape, run, element) + element * (adapter or 0) if run.model.bits else 0,
    )  # fmt: skip
    of = {"reduced": element if machine.device == "cpu" else None}
    if preset == "paper":
        of = {"bucket": ZERO_DEFAULT, "reduced": 4 if (run.engine.sp or machine.gpus) > 1 else element}
    rounded = machine.device == "cuda" and not pins_exactly()
    return model_states(run, sizes, machine.gpus, element, rounded=rounded, **of)


def loading(shape: Shape, run: RunConfig, machine: Machine) -> Loading:
    """What it takes to load our run's model; of the reference's loading nothing is predicted."""
    element, ranks = element_bytes(run, machine.device), machine.ranks_of_node
    whole, tensor = element * shape.parameters, element * shape.largest_tensor
    part = frozen_weights(shape, run, element) + (tensor if run.model.bits else 0)
    if run.engine.zero_stage == 3 and not run.model.bits:
        part = tensor + (0 if run.engine.offload_params else whole // machine.gpus)
    processes = machine.overheads.process if machine.host_memory is not None else 0
    beside = tensor  # rank 0's weights
    if machine.device == "cpu":  # whose ranks have theirs on the host
        beside = ranks * tensor if run.engine.zero_stage == 3 else (ranks - 1) * whole
    host = whole + beside + ranks * processes
    return Loading(sum(machine.overhead().values()) + part, machine.gpu_memory, host, machine.host_memory)


def predict(shape: Shape, run: RunConfig, machine: Machine, seq_len: int, preset: str = "ours") -> Prediction:
    """What a run of this length takes. The preset `paper` is the reference stack as the ALST paper ran it.

    Raises:
        ValueError: a model or an option that `apply` refuses, an SP degree that does not divide the GPUs, or fp32
            weights in files.
    """
    ranks = run.engine.sp or machine.gpus
    if machine.gpus % ranks:
        raise ValueError(f"sp={ranks} does not divide {machine.gpus} GPUs")
    if run.engine.offload_params == "nvme" and element_bytes(run, machine.device) == 4:
        raise ValueError(FP32_ON_DISK)
    run = run.for_width(shape.width)
    held = states(shape, run, machine, preset)
    host, limit = held.host, None
    if machine.host_memory is not None:
        limit = machine.host_memory // machine.ranks_of_node
        host = {**host, "process": machine.overheads.process}
    room = None if limit is None else max(0, limit - sum(host.values()))
    in_files = sum(held.disk.values())
    disk = None if machine.disk is None else machine.disk // machine.ranks_of_node
    if disk is not None and run.options.disk is not None and run.options.disk.bytes is not None:
        disk = min(disk, run.options.disk.bytes + in_files)
    free_disk = max(0, disk - in_files) if disk and machine.checkpoints_on_disk else 0

    def of_states(part: str) -> int:
        return sum(held.at(part).values())

    if preset == "paper":
        found = reference_activations(shape, run, ranks, seq_len, of_states)
    else:
        free = None
        if machine.device != "cpu" and machine.gpu_memory is not None:
            free = max(0, machine.gpu_memory - sum(machine.overhead().values()) - of_states("layer"))
        found = activations(
            shape, run, ranks, seq_len, machine.device, room, capability=machine.rates.capability, free=free,
            held=of_states, disk=free_disk,
        )  # fmt: skip
    device = {**machine.overhead(), **held.at(found.part), **found.device}
    needed = sum(host.values()) + found.host_needed + (sum(device.values()) if machine.device == "cpu" else 0)
    frozen = held.disk.get(WEIGHTS, 0) if run.model.lora else 0
    if found.host:
        host = {**host, "checkpoints": found.host}
    return Prediction(
        seq_len=seq_len, device=device,
        device_limit=machine.gpu_memory, host=host, host_limit=limit, host_needed=needed, activations=found,
        seconds=step_seconds(shape, run, machine, ranks, seq_len, found, preset),
        loading=Loading() if preset == "paper" else loading(shape, run, machine),
        disk={**held.disk, "checkpoints": found.disk} if found.disk else held.disk, disk_limit=disk,
        written=found.disk * run.optim.accumulation + in_files - frozen,
    )  # fmt: skip


LONGEST = 2**40
"""No search goes further."""


def longest(
    shape: Shape, run: RunConfig, machine: Machine, granule: int | None = None, preset: str = "ours"
) -> Prediction | None:
    """The longest sequence that fits, to three digits (or a multiple of `granule`); None where not even the shortest
    does."""
    ranks = run.engine.sp or machine.gpus
    step = granule or ranks * 8
    held = sum(states(shape, run, machine, preset).host.values()) * machine.ranks_of_node
    if machine.host_memory is not None and held > machine.host_memory:  # nothing fits, which no step need say
        return None

    @functools.cache
    def fits(seq_len: int) -> bool:
        return predict(shape, run, machine, seq_len, preset).fits

    # ours from the long end: a line holds for all lengths beyond the largest tile; the reference's tiles double
    low = step << ((LONGEST if preset == "ours" else 8192 * ranks) // step).bit_length() - 1
    while low > step and not fits(low):
        low //= 2
    if not fits(low):
        return None
    while low < LONGEST and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(step, 0 if granule else low // 2000):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    if granule is None and low > 1000:
        unit = 10 ** (int(math.log10(low)) - 2)
        low = low // unit * unit
    return predict(shape, run, machine, low, preset)


def with_degree(shape: Shape, run: RunConfig, machine: Machine, preset: str = "ours") -> RunConfig:
    """The run with its sequence parallel degree; where it names none, with the largest that its heads can be shared
    over and that divides the GPUs (0 where that is all of them): ours over any number of ranks."""
    if run.engine.sp or preset == "ours":
        return run
    divides = (n for n in range(machine.gpus, 0, -1) if machine.gpus % n == 0)
    ranks = next(n for n in divides if shared_by_reference(shape, n))
    return run.replace(engine={"sp": 0 if ranks == machine.gpus else ranks})
