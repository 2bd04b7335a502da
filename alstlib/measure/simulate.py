"""Simulate one rank of many without GPUs: the real model, exchange, tiles, checkpoints and offload run under fake
tensors.

A fake tensor has a shape, a dtype and a device and no memory, so that a laptop runs one rank's step of any model at any
length, and the byte ledger counts what would be alive. The process group is fake too. What an engine holds besides
(shards of weights, gradients and optimizer, buffers) is not run: it is a formula (`planner.model_states`). Tiles and
kernels are those of the device that is simulated; workspaces that a GPU's kernels take are not seen.

Most layers are alike, so a deep model's peaks are found from two shallow ones (`extend`), with the kinds of layers that
it ends with; a hybrid's from one, and one for each kind of its layers.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

import alstlib
from alstlib.config import RunConfig
from alstlib.hf.models import load_model, model_config
from alstlib.measure.fused_states import fused_states
from alstlib.measure.scope import CHECKPOINTS, EXCHANGE, ROOT, Places, category
from alstlib.mesh import join_fake
from alstlib.offload.ledger import Ledger
from alstlib.planner.activations import element_bytes
from alstlib.planner.model_states import Sizes, States, model_states
from alstlib.planner.moments import part_of
from alstlib.sizing import kernels_as_on
from alstlib.tiled.compute import as_on

FEW = (1, 2, 3)
"""Layers of the models that are run in place of a deep one: two, and a third where those peak at different places."""

PLENTY = 2**60
"""Host bytes where a run names none: what this machine has free says nothing about the one that is simulated."""


@dataclass(frozen=True)
class Simulated:
    """One rank's step. Bytes."""

    seq_len: int
    ranks: int
    layers: int
    device_peak: int
    """Largest number of bytes alive over the weights, without gradients, which an engine takes as they come."""
    host_peak: int
    """Of the checkpoints that wait on the host."""
    wire_bytes: int
    """Sent by this rank for attention."""
    categories: dict[str, int]
    """What the device peak consists of (`scope`); the sum is `device_peak`."""
    peak_place: str
    """The module in whose forward, recompute or backward the device peak was reached."""
    peak_operation: str
    """The operation that reached it."""
    run: RunConfig
    sizes: Sizes
    kernel: str = ""
    """Of attention (`backends.BACKENDS`)."""
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> States:
        """Model states and ZeRO's buffers of a rank, by formula: of `run.world_size` ranks, at least those of the
        sample."""
        element = element_bytes(self.run, "cuda")
        return model_states(self.run, self.sizes, max(self.ranks, self.run.engine.world_size), element)

    @property
    def device(self) -> dict[str, int]:
        """Everything on the device at its peak, by category."""
        return {**self.states.at(part_of(self.peak_place)), **self.categories}

    @property
    def host(self) -> dict[str, int]:
        """Everything on the host, by category, but the process itself."""
        return {**self.states.host, **({"checkpoints": self.host_peak} if self.host_peak else {})}


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


def simulate(run: RunConfig, ranks: int, device: str = "cuda", fake: bool = True, capability: int = 9) -> Simulated:
    """One step of one of `ranks` ranks that share a sample of `run.seq_len` tokens, with the run's model and options.

    Args:
        run: its engine is not run.
        ranks: the SP degree.
        device: whose tiles and kernels are taken, `cuda` or `cpu`.
        fake: False runs real tensors on the CPU, which must have room: to hold the simulation against.
        capability: the first number of the GPU's compute capability.

    Raises:
        ValueError: sparse pages, which are chosen by values.
    """
    if run.contrib.sparse is not None:
        raise ValueError(
            f"contrib.sparse={run.contrib.sparse} cannot be simulated: fake tensors have no values to choose pages by. "
            "`alst plan` knows what it takes; simulate without it, which takes the same memory"
        )
    dtype = torch.bfloat16 if run.bf16(device == "cuda") else torch.float32
    run = _roomy(run)
    with fake_ranks(ranks) as ctx, as_on(device):
        with torch.device("meta" if fake else "cpu"):
            model: Any = load_model(run, dtype, shape_only=True)
        kernels = kernels_as_on(device, capability) if fake else nullcontext()
        states = fused_states(model) if fake and device == "cuda" else nullcontext()
        with kernels, states, alstlib.apply(model, ctx, run.options) as handle:
            if not fake:
                drop_gradients(model)
                return step(run, model, handle, ctx)
            with FakeTensorMode(allow_non_fake_inputs=True):
                drop_gradients(model.to_empty(device="cpu"))  # which makes new weights, without hooks
                return step(run, model, handle, ctx)


def _roomy(run: RunConfig) -> RunConfig:
    return run.replace(options={"host_memory": PLENTY if run.options.host_memory is None else run.options.host_memory})


def drop_gradients(model: nn.Module) -> None:
    """Weights' gradients go as they come, as an engine takes them."""
    for p in (p for p in model.parameters() if p.requires_grad):
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def shard_of(ctx: alstlib.SPContext, rows: int) -> dict[str, Any]:
    """A rank's slice of a sample, of `rows` tokens: the token 0 everywhere."""
    first = ctx.sp_rank * rows
    ids = torch.zeros(1, rows, dtype=torch.long)
    at = torch.arange(first, first + rows)[None]
    return {"input_ids": ids, "position_ids": at, "shift_labels": ids.clone(), "cu_documents": [0, rows * ctx.sp]}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def step(run: RunConfig, model: Any, handle: alstlib.Handle, ctx: alstlib.SPContext) -> Simulated:
    """What one step of an attached model takes, whose gradients are dropped."""
    batch = shard_of(ctx, run.data.seq_len // ctx.sp)
    sizes = Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)),
        embedding=model.get_input_embeddings().weight.numel(),
        largest=max(p.numel() for p in model.parameters()),
    )
    for _ in range(2):  # a checkpoint knows its layer from the first
        gc.collect()
        sent = handle.wire_bytes
        with Places(model) as places, Ledger(stores=[handle.store], place=places.now) as ledger:
            watch(handle, places, ledger)
            start = ledger.device_bytes
            alstlib.causal_lm_loss(model, batch).loss.backward()
        categories: Counter[str] = Counter()
        for place, nbytes in ledger.peak_places.items():
            categories[category(place) if place else "before"] += nbytes
        categories["before"] -= start
        found = Simulated(
            seq_len=batch["cu_documents"][1], ranks=ctx.sp, layers=model.config.get_text_config().num_hidden_layers,
            device_peak=ledger.device_peak - start, host_peak=handle.store.peak_nbytes,
            wire_bytes=handle.wire_bytes - sent, categories={n: b for n, b in sorted(categories.items()) if b},
            peak_place=ledger.peak_place.removeprefix(f"{ROOT}."), peak_operation=ledger.peak_operation,
            run=run, sizes=sizes, kernel=handle.attention.backend_name, notes=tuple(handle.notes),
        )  # fmt: skip
    return found


def watch(handle: alstlib.Handle, places: Places, ledger: Ledger) -> None:
    """Tell apart what the exchange makes, and what checkpoints keep, from what the module makes that they run in."""
    for method in ("to_heads", "to_seq", "shared_to_heads", "shared_to_seq", "swap_unequal"):
        places.wrap(handle.attention.exchange, method, EXCHANGE)
    put = handle.store.put

    def kept(ticket: Any, x: torch.Tensor) -> None:
        put(ticket, x)
        ledger.move(x, f"<{CHECKPOINTS}>")

    handle.store.put = kept  # type: ignore[method-assign]
    places.finally_do(lambda: delattr(handle.store, "put"))


def extend(few: Simulated, more: Simulated, layers: int) -> Simulated:
    """A model with `layers` layers, from simulations of two shallower ones: each further layer adds the same.

    Raises:
        ValueError: the two are not of one length and number of ranks, or of one depth.
    """
    if (few.seq_len, few.ranks) != (more.seq_len, more.ranks) or few.layers == more.layers:
        raise ValueError("extend needs two simulations of one length on as many ranks, with unequal numbers of layers")
    further, between = layers - few.layers, more.layers - few.layers
    return _deeper(_as_last(more, layers), layers, few, [(more, further)], between)


def _deeper(
    of: Simulated, layers: int, few: Simulated, more: Sequence[tuple[Simulated, int]], between: int = 1
) -> Simulated:
    """`of` with the bytes of a model with so many layers: those of `few`, and for each (simulation, n) the `between`th
    part of what it has more, n times."""

    def at(bytes_of: Callable[[Simulated], int]) -> int:
        return bytes_of(few) + sum((bytes_of(one) - bytes_of(few)) * n // between for one, n in more)

    def in_category(name: str) -> int:
        return at(lambda one: one.categories.get(name, 0))

    names = sorted({name for one in (few, *(one for one, _ in more)) for name in one.categories})
    return replace(
        of, layers=layers, device_peak=at(lambda one: one.device_peak), host_peak=at(lambda one: one.host_peak),
        wire_bytes=at(lambda one: one.wire_bytes), categories={n: b for n in names if (b := in_category(n))},
        sizes=replace(of.sizes, parameters=at(lambda one: one.sizes.parameters)),
    )  # fmt: skip


def simulate_deep(run: RunConfig, ranks: int, device: str = "cuda") -> Simulated:
    """`simulate` with only `FEW` layers run, extended to those of the model. A host budget is for all layers together:
    with one, all are run."""
    config = model_config(run.model.name, run.model.config, run.model.trust_remote_code, shape_only=True)
    whole = config.get_text_config().num_hidden_layers
    if whole <= FEW[1] or run.options.host_memory is not None:
        return simulate(run, ranks, device)

    def shallow(layers: int) -> Simulated:
        fields = {**run.model.config, "num_hidden_layers": layers, **_last_layers(config.get_text_config(), layers)}
        return simulate(run.replace(model={"config": fields}), ranks, device)

    if set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return _hybrid(run, ranks, device, config.get_text_config())
    few, more = (shallow(n) for n in FEW[:2])
    if _as_last(few, more.layers).peak_place != more.peak_place and whole > FEW[2]:
        few, more = more, shallow(FEW[2])
    found = extend(few, more, whole)
    return replace(found, run=_roomy(run), sizes=replace(found.sizes, parameters=_parameters(run)))


def _hybrid(run: RunConfig, ranks: int, device: str, config: Any) -> Simulated:
    """A model with layers of several kinds: one of each, and then those that it ends with, until each was there. Every
    further layer adds what one more of its kind does."""
    kinds = list(config.layer_types)
    ends = next(kinds[-n:] for n in range(1, len(kinds) + 1) if set(kinds[-n:]) == set(kinds))
    each = sorted(set(kinds))

    def shallow(first: Sequence[str]) -> Simulated:
        fields = {**run.model.config, **_of_kinds(config, [*first, *ends])}
        return simulate(run.replace(model={"config": fields}), ranks, device)

    few = shallow(each)
    further = [(shallow([kind, *each]), kinds.count(kind) - ends.count(kind) - 1) for kind in each]
    found, deeper = _deeper(few, len(kinds), few, further), len(kinds) - few.layers
    place = re.sub(r"(?<=\.)\d+", lambda at: str(int(at[0]) + deeper), few.peak_place, count=1)
    sizes = replace(found.sizes, parameters=_parameters(run))
    return replace(found, run=_roomy(run), sizes=sizes, peak_place=place)


def _of_kinds(config: Any, kinds: list[str]) -> dict[str, Any]:
    """The fields with which a model has layers of these kinds."""
    own = config.to_dict()
    made: dict[str, Any] = {"num_hidden_layers": len(kinds)} if "num_hidden_layers" in own else {}
    if "attn_layer_indices" in own:
        return made | {"attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "full_attention"]}
    return made | {name: kinds for name in ("layer_types", "layers_block_type") if name in own}


def _parameters(run: RunConfig) -> int:
    """Of the whole model, whose layers need not be alike."""
    with torch.device("meta"):
        return sum(p.numel() for p in load_model(run, torch.float32, shape_only=True).parameters())


def _last_layers(config: Any, layers: int) -> dict[str, Any]:
    """The fields with which a shallow model has the kinds of layers that a deep one ends with, where memory peaks."""
    kinds = getattr(config, "layer_types", None)
    found: dict[str, Any] = {} if kinds is None else {"layer_types": list(kinds[-layers:])}
    return found | ({"first_k_dense_replace": 0} if hasattr(config, "first_k_dense_replace") else {})


def _as_last(of: Simulated, layers: int) -> Simulated:
    """The simulation with its peak's place named as in a model with `layers` layers."""
    return replace(of, peak_place=of.peak_place.replace(f".{of.layers - 1}", f".{layers - 1}"))
