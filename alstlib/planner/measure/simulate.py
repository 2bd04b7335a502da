"""Simulate one rank of many without GPUs: the real model, exchange, tiles, checkpoints and offload run under fake
tensors.

A fake tensor has a shape, a dtype and a device and no memory, so that a laptop runs one rank's step of any model at any
length, and the byte ledger counts what would be alive. The process group is fake too. What an engine holds besides
(shards of weights, gradients and optimizer, buffers) is not run: it is a formula (`planner.model_states`). Tiles and
kernels are those of the device that is simulated; workspaces that a GPU's kernels take are not seen.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.mesh import join_fake
from alstlib.base.sizing import LEAST_BUCKET, TileRule, as_on, tiles_of, zero_bucket
from alstlib.hf import attach
from alstlib.hf.loading.models import load_model
from alstlib.hf.vision import tower_modules
from alstlib.kernels import blockwise
from alstlib.linear.ways import StateLayer
from alstlib.planner.fits import FORWARD, KERNEL, in_layer
from alstlib.planner.measure.fused_states import fused_states
from alstlib.planner.measure.ledger import Ledger, _CpuInstrument
from alstlib.planner.measure.scope import CHECKPOINTS, EXCHANGE, ROOT, Places, category
from alstlib.tiled import compute, logits

PLENTY = 2**60
"""Host bytes where a run names none: what this machine has free says nothing about the one that is simulated."""


def layer_of(moment: str, outside: int) -> int:
    """The number of the layer that a moment is in."""
    found = re.search(r"\.(\d+)", moment.partition("|")[0])
    return int(found[1]) if found else outside


@dataclass(frozen=True)
class Simulated:
    """One rank's step. Bytes."""

    moments: Mapping[str, Mapping[str, int]]
    """What is alive over the weights, by category (`scope`), where memory stops growing for a while: of each moment
    (place, a bar, operation) the most. Gradients of weights are not there, which an engine takes as they come. An
    engine's states or a kernel's workspace can make another one the largest."""
    host_peak: int = 0
    """Checkpoints that wait on the host."""
    wire_bytes: int = 0
    """Sent by this rank for attention."""
    kernel: str = ""
    """The kernel of attention (`backends.BACKENDS`)."""
    recurrences: tuple[StateLayer, ...] = ()
    """The sizes of layers with a state and heads."""

    @functools.cached_property
    def peak(self) -> str:
        """The largest moment. Of some that take the same, that of the last layer, where backward begins."""
        return max(self.moments, key=lambda moment: (sum(self.moments[moment].values()), layer_of(moment, 0)))

    @property
    def categories(self) -> Mapping[str, int]:
        """What the device peak consists of."""
        return self.moments[self.peak]

    @property
    def device_peak(self) -> int:
        """The largest number of bytes alive."""
        return sum(self.categories.values())

    @property
    def peak_place(self) -> str:
        """The module in whose forward, recompute or backward the device peak was reached."""
        return self.peak.partition("|")[0].removesuffix(KERNEL)

    @property
    def peak_operation(self) -> str:
        """The operation that reached it."""
        return self.peak.partition("|")[2]


@contextmanager
def fake_ranks(ranks: int) -> Iterator[alstlib.SPContext]:
    """The last of `ranks` ranks that share a sample, over a process group that sends nothing.

    Raises:
        RuntimeError: a process group is there already.
    """
    if dist.is_initialized():
        raise RuntimeError("simulate needs a process without a process group: it makes a fake one")
    if ranks == 1:
        yield alstlib.SPContext()
        return
    join_fake(ranks)
    try:
        yield alstlib.SPContext.create(ranks)
    finally:
        dist.destroy_process_group()


def simulate(run: RunConfig, ranks: int, device: str = "cuda", *, capability: int = 9) -> Simulated:
    """One step of one of `ranks` ranks that share a sample of `run.seq_len` tokens, with the run's model and options.

    Args:
        run: its engine is not run.
        ranks: the SP degree.
        device: whose tiles and kernels are taken, `cuda` or `cpu`.
        capability: the first number of the GPU's compute capability.

    Raises:
        ValueError: sparse pages, which are chosen by values, or a model or option that `apply` refuses.
    """
    run = roomy(run)
    with torch.device("meta"):
        model = whole_model(run, device)
    return run_model(model, run, ranks, device, capability)


def whole_model(run: RunConfig, device: str, images: bool = False) -> Any:
    """The run's model with the weights that train, made on the device of the context; with `images` it is to read
    images (`loading.models.auto_class`)."""
    if run.contrib.sparse is not None:
        raise ValueError(
            f"contrib.sparse={run.contrib.sparse} cannot be simulated: fake tensors have no values to choose pages by. "
            "`alst plan` knows what it takes; simulate without it, which takes the same memory"
        )
    dtype = torch.bfloat16 if run.bf16(device == "cuda") else torch.float32
    with torch.random.fork_rng(devices=[]):  # a plan in a notebook changes no random numbers of it
        model = load_model(run, dtype, shape_only=True, images=images)
    if run.model.lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        fields = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **run.model.lora}
        try:
            adapter = LoraConfig(**fields)
        except TypeError as e:
            raise ValueError(f"model.lora: peft's {e}") from e
        inject_adapter_in_model(adapter, model)
        for p in model.parameters():
            if p.requires_grad:  # peft makes an adapter in fp32, and DeepSpeed trains it in its own dtype
                p.data = p.data.to(dtype)
    return model


def run_model(
    model: Any, run: RunConfig, ranks: int, device: str, capability: int, tiles: TileRule | None = None,
    images: bool = False,
) -> Simulated:  # fmt: skip
    """A step of a model on meta, with tiles as on the device, or by a rule; with `images`, hidden states stay on the
    device as if there were some."""
    states = fused_states(model) if device == "cuda" else nullcontext()
    stay: Any = mock.patch.object(attach, "travels", return_value=False) if images else nullcontext()
    with some_of_many(), states, stay, attached(model, run, ranks, device, capability, tiles) as handle:
        return step(run, model, handle, handle.ctx)


@contextmanager
def attached(
    model: Any, run: RunConfig, ranks: int, device: str, capability: int = 9, tiles: TileRule | None = None
) -> Iterator[alstlib.Handle]:
    """A model on meta with fake weights, attached on one of so many ranks, with kernels and tiles as on a device."""
    attention = run.options.attention
    options = run.options.replace(attention="sdpa" if attention == "auto" else attention)  # whatever is installed here
    with (
        fake_ranks(ranks) as ctx, as_on(device, capability, tiles),
        alstlib.apply(model, ctx, options) as handle, FakeTensorMode(allow_non_fake_inputs=True),
    ):  # fmt: skip
        drop_gradients(model.to_empty(device="cpu"))  # which makes new weights, without hooks
        yield handle


@contextmanager
def some_of_many() -> Iterator[None]:
    """Run the first and the last of many tiles, and of many blocks of blockwise attention: those between take as much.
    A step of an 8B with 98K tokens takes 0.9 s instead of 1.9 s; 500K keys of two heads are 65,000 blocks."""
    with ExitStack() as stack:
        for module in (compute, logits, blockwise):
            stack.enter_context(mock.patch.object(module, "tiles_of", _ends))
        yield


def _ends(tokens: int, size: int, samples: int = 1) -> list[slice]:
    of = tiles_of(tokens, size, samples)
    return of if len(of) < 2 * ENDS else [*of[:ENDS], *of[-ENDS:]]


ENDS = 2
"""Tiles and blocks that are run at each end: the second one meets what the first one leaves."""


def small(model: nn.Module) -> bool:
    """Whether a model has less than 16M weights, so that `LEAST_BUCKET` is a large part of it and forward may take the
    most."""
    return zero_bucket(sum(p.numel() for p in model.parameters())) == LEAST_BUCKET


def roomy(run: RunConfig) -> RunConfig:
    return run.replace(options={"host_memory": PLENTY if run.options.host_memory is None else run.options.host_memory})


def drop_gradients(model: nn.Module) -> None:
    """Weights' gradients go as they come, as an engine takes them."""
    for p in (p for p in model.parameters() if p.requires_grad):
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def shard_of(ctx: alstlib.SPContext, tokens: int) -> dict[str, Any]:
    """A rank's slice of a sample, of `tokens` tokens: the token 0 everywhere."""
    first = ctx.sp_rank * tokens
    ids = torch.zeros(1, tokens, dtype=torch.long)
    at = torch.arange(first, first + tokens)[None]
    return {"input_ids": ids, "position_ids": at, "shift_labels": ids.clone(), "cu_seqlens": [0, tokens * ctx.sp]}


def decoder_layers(model: Any) -> list[nn.Module]:
    tower = {*tower_modules(model)}
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m not in tower]


INDICES = "aten.cat.default"
"""What makes the indices of a plan (`ulysses.head_split.Plan`), which have values in a simulation too."""


class _Recorder(_CpuInstrument):
    """Keeps what is alive where memory stops growing for a while, and after each attention's backward. While `forward`
    is true, each moment in a layer is also kept under a name with `FORWARD`."""

    def __init__(self, budget: int | None, record: bool) -> None:
        super().__init__(budget, record)
        self.moments: dict[str, tuple[int, dict[str, int]]] = {}
        self.rising = ""
        self.fake = detect_fake_mode() is not None
        self.forward = False

    def note(self, key: str) -> None:
        if self.bytes > self.moments.get(key, (0,))[0]:
            self.moments[key] = (self.bytes, dict(self.places))
        if self.forward and in_layer(key.partition("|")[0]) and FORWARD not in key:
            self.note(key.replace("|", f"{FORWARD}|", 1))

    def see(self, tensor: torch.Tensor, operation: str = "") -> None:
        if self.fake and operation == INDICES and not isinstance(tensor, FakeTensor):
            return  # the copy on the device counts
        before = self.bytes
        super().see(tensor, operation)
        if self.place is not None and self.bytes > before:
            self.rising = f"{self.place()}|{operation}"

    def ran(self, operation: str) -> None:
        if self.place is not None and "attention" in operation and "backward" in operation:
            self.note(f"{self.place()}{KERNEL}|{operation}")

    def _drop(self, key: int) -> None:
        if self.rising:
            self.note(self.rising)
            self.rising = ""
        super()._drop(key)


class Recording(Ledger):
    instrument = _Recorder


def step(run: RunConfig, model: Any, handle: alstlib.Handle, ctx: alstlib.SPContext) -> Simulated:
    """What one step of an attached model takes, whose gradients are dropped."""
    batch = shard_of(ctx, run.data.seq_len // ctx.sp)
    sent = handle.wire_bytes
    with recorded(model, handle) as (ledger, start):
        recorder: Any = ledger._cpu
        recorder.forward = small(model)
        loss = alstlib.causal_lm_loss(model, batch).loss
        recorder.forward = False
        loss.backward()
    return Simulated(
        moments_of(ledger, start), handle.store.peak_nbytes, handle.wire_bytes - sent, handle.attention.backend_name,
        tuple(handle.recurrences),
    )  # fmt: skip


@contextmanager
def recorded(model: nn.Module, handle: alstlib.Handle) -> Iterator[tuple[Ledger, int]]:
    """Records what is alive, by place, over the bytes that are there at first."""
    with Places(model) as places, Recording(stores=[handle.store], place=places.now) as ledger:
        watch(handle, places, ledger)
        yield ledger, ledger.device_bytes


def moments_of(ledger: Ledger, start: int) -> dict[str, dict[str, int]]:
    """The moments that a ledger recorded of a step that began with so many bytes."""
    recorder: Any = ledger._cpu
    moments = {}
    for key, (_, places) in recorder.moments.items():
        found = Counter({"before": -start})
        for place, nbytes in places.items():
            found[category(place) if place else "before"] += nbytes
        moments[key.removeprefix(f"{ROOT}.")] = {name: nbytes for name, nbytes in sorted(found.items()) if nbytes}
    return moments


def watch(handle: alstlib.Handle, places: Places, ledger: Ledger) -> None:
    """Tell apart what the exchange makes, and what checkpoints keep, from what the module makes that they run in."""
    for method in ("to_heads", "to_seq", "swap_unequal"):
        places.wrap(handle.attention.exchange, method, EXCHANGE)
    put = handle.store.put

    def kept(ticket: Any, x: torch.Tensor) -> None:
        put(ticket, x)
        ledger.move(x, f"<{CHECKPOINTS}>")

    places.enter_context(mock.patch.object(handle.store, "put", kept))
