"""Simulate deep models by shallow ones: what the layers that are not run add.

Most layers are alike, so a deep model is found from shallow ones: one with its first layer and the last one of each
kind, and one more for each kind, with another layer of it. What a layer adds to those after it is the same for all
layers of its kind.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, get_args

import torch
from torch import nn

from alstlib.base.config import RunConfig
from alstlib.base.options import TiledPart
from alstlib.base.sizing import TileRule, page_keys, tile_for
from alstlib.planner.fits import FORWARD
from alstlib.planner.measure.simulate import Simulated, decoder_layers, layer_of, roomy, run_model, small, whole_model
from alstlib.planner.measure.small import LAYERS
from alstlib.planner.progress import watched

LEAST = 64
"""Rows below which the blocks of kernels show: such steps are simulated at their length."""
SHORT = 1024
"""Rows below which a second tile that is shorter, and chunks of so few rows, are simulated at their length: it shows,
and takes no time."""
PROBE = 512
"""Rows of a step that shows which tiles there are."""
FARTHEST = 2**50
PR_SET_PDEATHSIG = 1
"""Linux's name for the signal that a process gets when its parent ends (`man 2 prctl`)."""


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
    own = set()
    for key in {key for one in seen for key in one}:
        found = [one[key] for one in seen if key in one]
        if type(found[0]) in (int, float) and len({*found}) == len(found) > 1:
            own.add(key)
    return [frozenset(item for item in one.items() if item[0] not in own) for one in seen]


def side_by_side(what: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of these calls gives, which all cores make: this process and forks of it, each its share.

    A fork that ends without an answer, because it was killed or because its calls raise, leaves its share to this
    process, which says why. With a GPU nothing is forked: autograd's threads do not live through it.
    """
    alone = sys.platform != "linux" or torch.cuda.is_available() or multiprocessing.current_process().daemon
    cores = 1 if alone else min(len(calls), len(os.sched_getaffinity(0)))
    shares = [calls[n::cores] for n in range(cores)]
    forks = list[_Fork]()
    try:
        for share in shares[1:]:
            forks.append(_Fork(share))
        with watched(what, shares[0]) as each:
            found = [[call() for call in each]]
        found += [fork.found() for fork in forks]
    finally:
        for fork in forks:
            fork.process.kill()
            fork.process.join()
    return [found[n % cores][n // cores] for n in range(len(calls))]


class _Fork:
    """A fork of this process that makes some calls."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.calls = calls
        self.told, told = context.Pipe(duplex=False)
        self.process = context.Process(target=self._run, args=(told,), daemon=True)
        self.process.start()
        told.close()

    def _run(self, told: Connection) -> None:
        # a fork that outlives its process would keep the lock of a run's folder
        self.told.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)  # the threads of a pool are not in the fork
        with suppress(Exception):
            told.send([call() for call in self.calls])

    def found(self) -> list[Any]:
        try:
            return list(self.told.recv())
        except (EOFError, OSError):  # it ended before its message, or within
            return [call() for call in self.calls]


class Deep:
    """Simulates shallow models at any length, and gives what the whole model takes.

    A moment inside a layer also holds what the layers before it keep for their backward; one outside the layers, what
    all of them keep. The last layer of a kind has the most before it, so that no layer between can take more.
    """

    def __init__(
        self, run: RunConfig, ranks: int, device: str = "cuda", capability: int = 9, images: bool = False
    ) -> None:  # fmt: skip
        self.run, self.ranks, self.device, self.capability, self.images = roomy(run), ranks, device, capability, images
        with torch.device("meta"):
            self.model = self.whole()
        self.layers = decoder_layers(self.model)
        lists = (name for name, m in self.model.named_modules() if isinstance(m, nn.ModuleList) and [*m] == self.layers)
        self.holder = next(lists, None)
        kinds = kinds_of_layers(self.layers)
        last = {kind: i for i, kind in enumerate(kinds)}
        self.chosen = sorted({0, *last.values()})
        """Layers of the shallowest model."""
        self.left = [(i, kind) for i, kind in enumerate(kinds) if i not in self.chosen]
        self.further = {kind: i for i, kind in reversed(self.left)}
        """One layer of each kind that the whole model has more layers of."""
        if self.holder is None:  # layers in several lists: all are run
            self.chosen, self.further, self.left = list(range(len(self.layers))), {}, []
        self.width = self.model.get_input_embeddings().weight.shape[1]
        self._tiles: dict[bool, set[int]] = {}

    def whole(self) -> Any:
        """The model that trains."""
        return whole_model(self.run, self.device)

    def run_step(self, model: Any, run: RunConfig, tiles: TileRule | None) -> Simulated:
        """A step of a shallow model."""
        return run_model(model, run, self.ranks, self.device, self.capability, tiles, self.images)

    def at(self, seq_len: int) -> Simulated:
        """The whole model at this length."""
        return self.each([seq_len])[0]

    def each(self, lengths: Iterable[int]) -> list[Simulated]:
        """The whole model at each of these lengths."""
        first, *rest = self.chosen
        models = [self.chosen, *([first, i, *rest] for i in self.further.values())]
        steps = [functools.partial(self.shallow, layers, seq_len) for seq_len in lengths for layers in models]
        found = side_by_side("steps of a few layers", steps)
        return [self._extended(*found[i : i + len(models)]) for i in range(0, len(steps), len(models))]

    def _extended(self, few: Simulated, *others: Simulated) -> Simulated:
        """The whole model, from the shallowest one and those with one layer more of a kind."""
        more = dict(zip(self.further, others))
        moments: dict[str, dict[str, int]] = {}
        for key, base in few.moments.items():
            before = layer_of(key, len(self.layers))
            here: Counter[str] = Counter(base)
            for kind, one in more.items():
                count = sum(k == kind and i < before for i, k in self.left)
                for name in {*base, *one.moments.get(key, {})} if count and key in one.moments else ():
                    here[name] += count * (one.moments[key].get(name, 0) - base.get(name, 0))
            moments[key] = {name: nbytes for name, nbytes in sorted(here.items()) if nbytes}

        def deeper(name: str) -> int:
            own = getattr(few, name)
            return own + sum(
                (getattr(one, name) - own) * sum(k == kind for _, k in self.left) for kind, one in more.items()
            )

        return replace(few, moments=moments, host_peak=deeper("host_peak"), wire_bytes=deeper("wire_bytes"))

    @property
    def tiles(self) -> set[int]:
        """Sizes of the tiles that a step of the shallowest model asks for: kept outputs of attention add one."""
        if (known := self._tiles.get(kept := bool(self.run.options.save_attention))) is not None:
            return known
        found = {size for part in get_args(TiledPart) if (size := self.run.options.tile(part)) and size is not True}

        whole = tile_for(self.width, 2, self.device)

        def rule(width: int, element: int) -> int:
            tile = tile_for(width, element, self.device)
            if tile < 8 * whole:  # what is that narrow takes nothing, and twice its tile is long to simulate
                found.add(tile)
            return tile

        self.shallow(self.chosen, min(PROBE, self.run.chunk or PROBE) * self.ranks, rule)
        self._tiles[kept] = found
        return found

    def lengths(self, tokens: int) -> tuple[Sequence[int], int, int]:
        """(lengths to simulate, from, to): the tokens whose memory is a line through these lengths, with `tokens` among
        them; one length where it holds for itself alone.

        In chunks a line holds from about four of them on. Below that one holds between two numbers of whole chunks,
        which stand for themselves, as all lengths do where a chunk is short; the host's bytes are off by up to 1.2%
        there, because which slabs serve again depends on their sizes. In whole layers a line holds between two sizes
        of a tile, from twice the smaller one on; so it does in chunks, where tiles after the layers are longer.
        """
        chunk = self.run.chunk
        if chunk is not None and tokens >= chunk:
            page = page_keys(chunk * self.ranks, 2**40) // self.ranks
            few = page * max(3, 4 * chunk // page)
            # outside layers nothing is narrower than the norm, which computes in fp32
            asked = self.run.options.tile
            longest = max(tile_for(self.width, 4, self.device), asked("norm"), asked("loss"))
            tiles = {tile for tile in self.tiles if tile <= longest}
            edges = {*range(chunk, few, chunk), few, FARTHEST + 1, *tiles, *(2 * tile for tile in tiles)}
            low, high = max(e for e in edges if e <= tokens), min(e for e in edges if e > tokens)
            first = -(-low // page) * page
            lengths = (first, first + page) if low >= few else ((3 * low + high) // 4, (low + 3 * high) // 4)
            if low == tokens < few or high - low < SHORT or lengths[1] > high:
                return (tokens,), tokens, tokens
            return lengths, low + (low < few), high - 1
        tiles = self.tiles | ({chunk} if chunk else set())
        low = max((tile for tile in tiles if tile <= tokens), default=0)
        high = min((tile for tile in tiles if tile > low), default=FARTHEST)
        if tokens < LEAST or tokens < min(2 * low, SHORT):
            return (tokens,), tokens, tokens
        if low < LEAST:
            return _between(LEAST, high)
        # up to twice a tile the second one is shorter
        return _between(low, min(high, 2 * low)) if tokens < 2 * low else _between(2 * low, high)

    def shallow(self, which: Sequence[int], seq_len: int, tiles: TileRule | None = None) -> Simulated:
        """A model with these layers of the whole one. Its moments name layers as the whole one does; those of a layer
        beside the chosen are left out."""
        run = self.run.replace(data={"seq_len": seq_len})
        thawed = not gc.get_freeze_count()  # what the program around has frozen stays so
        if thawed:
            gc.freeze()  # what is there already is not searched for tensors again: half of the time of an 8B's step
        try:
            found = self.run_step(self._with(which), run, tiles)
        finally:
            gc.collect()  # the step's fake tensors, which a search of an hour would let grow to gigabytes
            if thawed:
                gc.unfreeze()

        def named(key: str) -> str:
            place, bar, operation = key.partition("|")
            return re.sub(r"(?<=\.)\d+", lambda at: str(which[int(at[0])]), place, count=1) + bar + operation

        moments = {named(key): at for key, at in found.moments.items()}
        kept = {key: at for key, at in moments.items() if layer_of(key, self.chosen[0]) in self.chosen}
        if not small(self.model):  # as a shallow one may be
            kept = {key: at for key, at in kept.items() if FORWARD not in key}
        return replace(found, moments=kept)

    def _with(self, which: Sequence[int]) -> Any:
        if self.holder is None:
            return copy.deepcopy(self.model)
        depth = len(self.layers)
        self.model.set_submodule(self.holder, nn.ModuleList([self.layers[i] for i in which]))
        try:
            model = copy.deepcopy(self.model)
        finally:
            self.model.set_submodule(self.holder, nn.ModuleList(self.layers))
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        for config in [*configs.values(), model.config.get_text_config()]:
            for name, value in list(vars(config).items()):
                # one for each layer; of a model made shallow there may be more kinds than layers
                longer = name == "layer_types" and value is not None and len(value) > depth
                if longer or (isinstance(value, list | tuple) and len(value) == depth):
                    setattr(config, name, [value[i] for i in which])
                elif name in LAYERS and value == depth:
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
