"""Simulate one rank of many without GPUs: the real model, exchange, tiles, checkpoints and offload run under fake
tensors.

A fake tensor has a shape, a dtype and a device and no memory, so that a laptop runs one rank's step of any model at any
length, and the byte ledger counts what would be alive. The process group is fake too. What an engine holds besides
(shards of weights, gradients and optimizer, buffers) is not run: it is a formula (`planner.model_states`). Tiles and
kernels are those of the device that is simulated; workspaces that a GPU's kernels take are not seen.

Most layers are alike, so a deep model is found from shallow ones (`simulate_deep`): one with its first layer and the
last one of each kind, and one more for each kind, with another layer of it. What a layer adds to those after it is the
same for all layers of its kind.
"""

from __future__ import annotations

import copy
import functools
import gc
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

import alstlib
from alstlib.config import RunConfig
from alstlib.hf.models import load_model
from alstlib.kernels import blockwise
from alstlib.measure.fused_states import fused_states
from alstlib.measure.scope import CHECKPOINTS, EXCHANGE, ROOT, Places, category
from alstlib.mesh import join_fake
from alstlib.offload.ledger import Ledger, _CpuInstrument
from alstlib.options import Part
from alstlib.planner.fits import KERNEL, element_bytes, part_of
from alstlib.planner.model_states import Sizes, States, model_states
from alstlib.planner.state_ways import StateLayer
from alstlib.sizing import kernels_as_on, page_rows, tile_for
from alstlib.tiled import compute, logits
from alstlib.tiled.compute import TileRule, as_on

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
    recurrences: tuple[StateLayer, ...] = ()
    """What layers with a state compute, where ranks choose a way for them."""
    moments: Mapping[str, Mapping[str, int]] = field(default_factory=dict, compare=False, repr=False)
    """What is alive, by category, where memory stops growing for a while: of each place and operation the most. The
    largest of them is the device peak; an engine's states or a kernel's workspace can make another one the largest."""

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
        ValueError: sparse pages, which are chosen by values, or a model or option that `apply` refuses.
    """
    run = _roomy(run)
    with torch.device("meta" if fake else "cpu"):
        model = whole_model(run, device)
    return run_model(model, run, ranks, device, fake, capability)


def whole_model(run: RunConfig, device: str) -> Any:
    """The run's model with the weights that train, made on the device of the context."""
    if run.contrib.sparse is not None:
        raise ValueError(
            f"contrib.sparse={run.contrib.sparse} cannot be simulated: fake tensors have no values to choose pages by. "
            "`alst plan` knows what it takes; simulate without it, which takes the same memory"
        )
    with torch.random.fork_rng(devices=[]):  # a plan in a notebook changes no random numbers of it
        model = load_model(run, torch.bfloat16 if run.bf16(device == "cuda") else torch.float32, shape_only=True)
    if run.model.lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        fields = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **run.model.lora}
        inject_adapter_in_model(LoraConfig(**fields), model)
    return model


def run_model(
    model: Any, run: RunConfig, ranks: int, device: str, fake: bool, capability: int, tiles: TileRule | None = None
) -> Simulated:
    """A step of a model on meta (or, not `fake`, with real weights), with tiles as on the device, or by a rule."""
    with fake_ranks(ranks) as ctx, as_on(tiles or device):
        kernels = kernels_as_on(device, capability) if fake else nullcontext()
        alike = some_of_many() if fake else nullcontext()
        states = fused_states(model) if fake and device == "cuda" else nullcontext()
        with kernels, alike, states, alstlib.apply(model, ctx, run.options) as handle:
            if not fake:
                drop_gradients(model)
                return step(run, model, handle, ctx)
            with FakeTensorMode(allow_non_fake_inputs=True):
                drop_gradients(model.to_empty(device="cpu"))  # which makes new weights, without hooks
                return step(run, model, handle, ctx)


@contextmanager
def some_of_many() -> Iterator[None]:
    """Of many tiles, and of many blocks of blockwise attention, run the first and the last: those between take as much.
    A step of an 8B with 98K rows takes 0.9 s instead of 1.9 s; 500K keys of two heads are 65,000 blocks."""
    tiles, blocks = compute.tiles_of, blockwise._blocks

    def ends(of: list[Any]) -> list[Any]:
        return of if len(of) < 2 * ENDS else [*of[:ENDS], *of[-ENDS:]]

    def some_tiles(rows: int, tile: int) -> list[slice]:
        return ends(tiles(rows, tile))

    def some_blocks(*how: Any) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
        return ((at, ends(parts)) for at, parts in ends(list(blocks(*how))))

    with ExitStack() as stack:
        for module in (compute, logits):
            stack.enter_context(mock.patch.object(module, "tiles_of", some_tiles))
        stack.enter_context(mock.patch.object(blockwise, "_blocks", some_blocks))
        yield


ENDS = 2
"""Of tiles and blocks that are run, at each end: the second one meets what the first one leaves."""


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


INDICES = "aten.cat.default"
"""What makes the indices of a plan (`ulysses.head_split.Plan`), which have values in a simulation too."""


class _Recorder(_CpuInstrument):
    """Keeps what is alive where memory stops growing for a while, and after each attention's backward."""

    def __init__(self, budget: int | None, record: bool) -> None:
        super().__init__(budget, record)
        self.moments: dict[str, tuple[int, dict[str, int]]] = {}
        self.rising = ""
        self.fake = detect_fake_mode() is not None

    def note(self, key: str) -> None:
        if self.bytes > self.moments.get(key, (0,))[0]:
            self.moments[key] = (self.bytes, dict(self.places))

    def see(self, tensor: torch.Tensor, operation: str = "") -> None:
        if self.fake and operation == INDICES and not isinstance(tensor, FakeTensor):
            return  # the copy on the device counts
        before = self.bytes
        super().see(tensor, operation)
        if self.place is not None and self.bytes > before:
            self.rising = f"{self.place()}|{operation}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.place is not None and "attention" in str(func) and "backward" in str(func):
            self.note(f"{self.place()}{KERNEL}|{func}")
        return out

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
    gc.collect()
    sent = handle.wire_bytes
    with Places(model) as places, Recording(stores=[handle.store], place=places.now) as ledger:
        watch(handle, places, ledger)
        start = ledger.device_bytes
        alstlib.causal_lm_loss(model, batch).loss.backward()
    return of_step(
        run, model, ctx, ledger, start, host_peak=handle.store.peak_nbytes, wire_bytes=handle.wire_bytes - sent,
        kernel=handle.attention.backend_name, notes=tuple(handle.notes), recurrences=tuple(handle.recurrences),
    )  # fmt: skip


def of_step(
    run: RunConfig, model: Any, ctx: alstlib.SPContext, ledger: Ledger, start: int, host_peak: int = 0,
    wire_bytes: int = 0, **more: Any,
) -> Simulated:  # fmt: skip
    """What a ledger recorded of a step that began with so many bytes."""
    recorder: Any = ledger._cpu
    return Simulated(
        seq_len=run.data.seq_len // ctx.sp * ctx.sp, ranks=ctx.sp, layers=len(decoder_layers(model)),
        device_peak=ledger.device_peak - start, host_peak=host_peak, wire_bytes=wire_bytes,
        categories=_by_category(ledger.peak_places, start), peak_place=ledger.peak_place.removeprefix(f"{ROOT}."),
        peak_operation=ledger.peak_operation, run=run, sizes=sizes_of(model),
        moments={key.removeprefix(f"{ROOT}."): _by_category(at, start) for key, (_, at) in recorder.moments.items()},
        **more,
    )  # fmt: skip


def sizes_of(model: Any) -> Sizes:
    """Elements of a model."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    return Sizes(
        parameters=parameters, layer=max(sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)),
        embedding=model.get_input_embeddings().weight.numel(),
        largest=max(p.numel() for p in model.parameters()) if trained == parameters else 0,
        trainable=None if trained == parameters else trained,
    )  # fmt: skip


def _by_category(places: Mapping[str, int], start: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for place, nbytes in places.items():
        found[category(place) if place else "before"] += nbytes
    found["before"] -= start
    return {name: nbytes for name, nbytes in sorted(found.items()) if nbytes}


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


# Deep models from shallow ones

LEAST = 64
"""Rows below which the blocks of kernels show: such steps are simulated at their length."""
SHORT = 1024
"""Rows below which a second tile that is shorter is simulated at its length too: it shows, and takes no time."""
PROBE = 512
"""Rows of a step that shows which tiles there are."""
FARTHEST = 2**50
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configs call the number of layers."""


def simulate_deep(run: RunConfig, ranks: int, device: str = "cuda", capability: int = 9) -> Simulated:
    """`simulate` with only some of the layers run, and what the others add (`Deep`). A host budget is for all layers
    together: with one, all are run."""
    if run.options.host_memory is not None:
        return simulate(run, ranks, device, capability=capability)
    return Deep(run, ranks, device, capability).at(run.data.seq_len)


def kinds_of_layers(layers: Sequence[nn.Module]) -> list[Any]:
    """What each decoder layer is, in order: the classes and the settings of its modules. Numbers that differ from layer
    to layer throughout, such as the layer's own, are not counted."""
    seen: list[dict[tuple[str, str], Any]] = [
        {
            (path, name): value
            for path, m in layer.named_modules()
            for name, value in [("class", type(m).__name__), *vars(m).items()]
            if isinstance(value, bool | int | float | str | None) and not name.startswith("_")
        }
        for layer in layers
    ]
    values: dict[tuple[str, str], list[Any]] = {}
    for one in seen:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    own = {key for key, found in values.items() if type(found[0]) in (int, float) and len({*found}) == len(found) > 1}
    return [frozenset(item for item in one.items() if item[0] not in own) for one in seen]


class Deep:
    """Simulates shallow models at any length, and gives what the whole model takes.

    A moment inside a layer also holds what the layers before it keep for their backward; one outside the layers, what
    all of them keep. The last layer of a kind has the most before it, so that no layer between can take more.
    """

    def __init__(self, run: RunConfig, ranks: int, device: str = "cuda", capability: int = 9) -> None:
        self.run, self.ranks, self.device, self.capability = _roomy(run), ranks, device, capability
        with torch.device("meta"):
            self.model = self.whole()
        self.layers = decoder_layers(self.model)
        self.holder = next(
            (
                (parent, name)
                for parent in self.model.modules()
                for name, m in parent.named_children()
                if isinstance(m, nn.ModuleList) and list(m) == self.layers
            ),
            None,
        )
        kinds = kinds_of_layers(self.layers)
        last = {kind: i for i, kind in enumerate(kinds)}
        self.chosen = sorted({0, *last.values()})
        """Layers of the shallowest model."""
        left = [(i, kind) for i, kind in enumerate(kinds) if i not in self.chosen]
        self.further = [(kind, next(i for i, k in left if k == kind)) for kind in {kind for _, kind in left}]
        """For each kind that the whole model has more layers of: one of them."""
        self.left = left
        if self.holder is None:  # layers in several lists: all are run
            self.chosen, self.further, self.left = list(range(len(self.layers))), [], []

    def whole(self) -> Any:
        """The model that trains."""
        return whole_model(self.run, self.device)

    def run_step(self, model: Any, run: RunConfig, tiles: TileRule | None) -> Simulated:
        """A step of a shallow model."""
        return run_model(model, run, self.ranks, self.device, True, self.capability, tiles)

    def at(self, seq_len: int) -> Simulated:
        """The whole model at this length."""
        few = self.shallow(self.chosen, seq_len)
        more = {}
        for kind, i in self.further:
            first, *rest = self.chosen
            more[kind] = self.shallow([first, i, *rest], seq_len)
        moments: dict[str, dict[str, int]] = {}
        for key, base in few.moments.items():
            before = _layer_of(key, len(self.layers))
            here: Counter[str] = Counter(base)
            for kind, one in more.items():
                count = sum(k == kind and i < before for i, k in self.left)
                for name in {*base, *one.moments.get(key, {})} if count and key in one.moments else ():
                    here[name] += count * (one.moments[key].get(name, 0) - base.get(name, 0))
            moments[key] = {name: nbytes for name, nbytes in sorted(here.items()) if nbytes}
        # of moments that take the same the first is in the last layer, where backward begins
        place = max(moments, key=lambda key: (sum(moments[key].values()), _layer_of(key, 0)))

        def deeper(name: str) -> int:
            own = getattr(few, name)
            return own + sum(
                (getattr(one, name) - own) * sum(k == kind for _, k in self.left) for kind, one in more.items()
            )

        where, _, operation = place.partition("|")
        return replace(
            few, layers=len(self.layers), device_peak=sum(moments[place].values()), host_peak=deeper("host_peak"),
            wire_bytes=deeper("wire_bytes"), categories=moments[place], peak_place=where.removesuffix(KERNEL),
            peak_operation=operation, sizes=sizes_of(self.model), moments=moments,
        )  # fmt: skip

    @functools.cached_property
    def tiles(self) -> set[int]:
        """Sizes of the tiles that a step of the shallowest model asks for."""
        found = {size for part in get_args(Part) if (size := self.run.options.tile(part)) and size is not True}

        whole = tile_for(self.model.get_input_embeddings().weight.shape[1], 2, self.device)

        def rule(width: int, element: int) -> int:
            tile = tile_for(width, element, self.device)
            if tile < 8 * whole:  # what is that narrow takes nothing, and twice its tile is long to simulate
                found.add(tile)
            return tile

        self.shallow(self.chosen, min(PROBE, self.run.chunk or PROBE) * self.ranks, rule)
        return found

    def lengths(self, rows: int) -> tuple[Sequence[int], int, int]:
        """(lengths to simulate, from, to): the rows whose memory is a line through these lengths, with `rows` among
        them; one length where it holds for itself alone.

        In row chunks it is one from four chunks on, and else between two sizes of a tile, from twice the smaller one
        on.
        """
        chunk = self.run.chunk
        if chunk is not None and rows > chunk:
            page = page_rows(chunk * self.ranks, 2**40) // self.ranks
            first = page * max(3, 4 * chunk // page)
            return ((rows,), rows, rows) if rows < first else ((first, first + page), first, FARTHEST)
        tiles = self.tiles | ({chunk} if chunk else set())
        low = max((tile for tile in tiles if tile <= rows), default=0)
        high = min((tile for tile in tiles if tile > low), default=FARTHEST)
        if rows < LEAST or rows < min(2 * low, SHORT):
            return (rows,), rows, rows
        if low < LEAST:
            return _between(LEAST, high)
        # up to twice a tile the second one is shorter
        return _between(low, min(high, 2 * low)) if rows < 2 * low else _between(2 * low, high)

    def shallow(self, which: Sequence[int], seq_len: int, tiles: TileRule | None = None) -> Simulated:
        """A model with these layers of the whole one. Its moments name layers as the whole one does; those of a layer
        beside the chosen are left out."""
        run = self.run.replace(data={"seq_len": seq_len})
        gc.collect()
        gc.freeze()  # what is there already is not searched for tensors again: half of the time of an 8B's step
        try:
            found = self.run_step(self._with(which), run, tiles)
        finally:
            gc.unfreeze()

        def named(key: str) -> str:
            place, bar, operation = key.partition("|")
            return re.sub(r"(?<=\.)\d+", lambda at: str(which[int(at[0])]), place, count=1) + bar + operation

        moments = {named(key): at for key, at in found.moments.items()}
        kept = {key: at for key, at in moments.items() if _layer_of(key, self.chosen[0]) in self.chosen}
        return replace(found, moments=kept)

    def _with(self, which: Sequence[int]) -> Any:
        if self.holder is None:
            return copy.deepcopy(self.model)
        (parent, held), depth = self.holder, len(self.layers)
        setattr(parent, held, nn.ModuleList([self.layers[i] for i in which]))
        try:
            model = copy.deepcopy(self.model)
        finally:
            setattr(parent, held, nn.ModuleList(self.layers))
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        for config in [*configs.values(), model.config.get_text_config()]:
            for name, value in list(vars(config).items()):
                if isinstance(value, list | tuple) and len(value) == depth:  # one for each layer
                    setattr(config, name, [value[i] for i in which])
                elif name in DEPTHS and value == depth:
                    setattr(config, name, len(which))
        for i, layer in enumerate(decoder_layers(model)):
            for m in layer.modules():
                if isinstance(vars(m).get("layer_idx"), int):
                    vars(m)["layer_idx"] = i
        return model


def _between(low: int, high: int) -> tuple[tuple[int, int], int, int]:
    """Two lengths from `low` on, and before `high`; the shorter ones are simulated faster."""
    part = min(low, (high - low) // 3)
    return (low + part // 2, low + part // 2 + part), low, high - 1


def _layer_of(key: str, outside: int) -> int:
    """The number of the layer that a moment is in."""
    found = re.search(r"\.(\d+)", key.partition("|")[0])
    return int(found[1]) if found else outside
