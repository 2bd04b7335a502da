"""A question to the planner: a model, a run and a machine, with the predictions that answer it, and with the other
settings and machines that would help. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from alstlib.base.config import RunConfig, value_of
from alstlib.base.units import GIB
from alstlib.hf.loading.configs import find_config, overridden, planned_config
from alstlib.hf.loading.public_models import PUBLIC, TRAINED
from alstlib.planner.fits import NotSimulated, other_versions
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape
from alstlib.planner.prediction import Prediction, longest, predict
from alstlib.planner.progress import watched
from alstlib.planner.state_ways import counted
from alstlib.planner.step_time import model_flops
from alstlib.planner.streaming import least_chunk

NOTE = (
    "layers with a state are planned with the memory of the fused kernels (flash-linear-attention, mamba-ssm, "
    "causal-conv1d), as their published source has it; no GPU has run it, and what a kernel takes for itself is not "
    "known. Without these packages transformers' PyTorch code runs, which is slower and takes more."
)


INT32 = 2**31
CHUNK = 16_384
_LAYERS = {"options.chunk": CHUNK, "block": None}
WAYS: dict[str, dict[str, Any]] = {
    "layers whole": {"options.chunk": None, "options.on_host": "auto", "block": None},
    "chunks, all on the device": {**_LAYERS, "options.on_host": "none"},
    "hidden states on the host": {**_LAYERS, "options.on_host": "hidden"},
    "keys and values too": {**_LAYERS, "options.on_host": "hidden+kv"},
    "block by block": {"options.chunk": None, "options.on_host": "hidden+kv", "block": CHUNK},
}
"""The ways to run a model as fields of RunConfig, beside tiles and checkpoints on the host."""
SPARSE = "a choice of pages (not exact)"
"""The way that a run with `sparse` asks for, which approximates attention."""


_CHECKPOINTS = {"options.checkpoint": True}
_FILES = {"engine.zero_stage": 3, "engine.offload_optimizer": "nvme"}
HELP: dict[str, dict[str, Any]] = {
    "sequence parallelism over all GPUs": {"engine.sp": 0},
    "tiled loss": {"options.tiles.loss": True},
    "tiled MLP": {"options.tiles.mlp": True},
    "tiled norms": {"options.tiles.norm": True},
    "checkpoints": _CHECKPOINTS,
    "checkpoints on the host": {**_CHECKPOINTS, "options.offload": True},
    "layers in chunks of 16K tokens, placed automatically": {
        **_CHECKPOINTS, "options.chunk": CHUNK, "options.on_host": "auto",
    },
    "attention outputs not kept": {"options.save_attention": False},
    "optimizer on the host": {"engine.offload_optimizer": True},
    "optimizer on the devices": {"engine.offload_optimizer": False},
    "ZeRO-3": {"engine.zero_stage": 3},
    "weights on the host": {"engine.zero_stage": 3, "engine.offload_params": True},
    "optimizer on the disk": _FILES, "optimizer and weights on the disk": {**_FILES, "engine.offload_params": "nvme"},
}  # fmt: skip
"""Changes that save memory, as fields of RunConfig. `WAYS` has the chunks with each place by itself."""
DRIVE = 2 * 10**12
"""Bytes of a disk that may be bought."""
LORA: dict[str, Any] = {"model.lora": {"r": 16}}
CHUNKS = {"options.chunk": CHUNK}
NEEDED: dict[str, dict[str, Any]] = {
    "": {}, "chunks": CHUNKS, "chunks, weights on the host": {**CHUNKS, **HELP["weights on the host"]},
}  # fmt: skip
"""Settings that a machine may need to hold a length, from the fastest to those that take the least memory."""


def changed(run: RunConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes that differ from the run's own fields."""
    return {name: value for name, value in changes.items() if value_of(run, name) != value}


def with_folder(run: RunConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, with a folder for states in files where they need one, and without where nothing is in files."""
    engine, disk = run.engine, run.options.disk
    where = [changes.get(f"engine.{name}", getattr(engine, name)) for name in ("offload_optimizer", "offload_params")]
    folder = (engine.nvme_path or (disk.folder if disk else "/scratch")) if "nvme" in where else None
    return changes if folder == engine.nvme_path else {**changes, "engine.nvme_path": folder}


def settings(changes: dict[str, Any]) -> str:
    """`options.chunk=16384, options.offload=True`."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


@dataclass(frozen=True)
class Question:
    """What is asked about: a model, a run, a machine, and whose stack it is."""

    shape: Shape
    run: RunConfig
    machine: Machine
    preset: str = "ours"
    understood: dict[str, str] = field(default_factory=dict)
    """Quantities as they were understood."""
    assumed: dict[str, str] = field(default_factory=dict)
    """What was not given, by the option that gives it."""

    @property
    def ranks(self) -> int:
        """GPUs that share a sample."""
        return self.run.engine.sp or self.machine.gpus

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sample that is tried."""
        return max(8 * self.ranks, self.image_tokens)

    @property
    def image_tokens(self) -> int:
        """Tokens of a sample that images take."""
        return self.shape.images.tokens if self.shape.images else 0

    def at(self, seq_len: int) -> Prediction:
        """The prediction for samples of so many tokens."""
        return predict(self.shape, self.run, self.machine, seq_len, self.preset)

    def longest(self) -> Prediction | None:
        """The prediction for the longest sample that fits, with its images; None where none does."""
        found = longest(self.shape, self.run, self.machine, preset=self.preset)
        return None if found is None or found.seq_len < self.image_tokens else found

    def beyond(self, best: Prediction | None) -> Prediction:
        """A length that is a little longer than the longest that fits."""
        return self.at(int(1.02 * best.seq_len) + self.shortest if best else self.shortest)

    def with_changes(self, changes: dict[str, Any]) -> Question:
        """The same question with other fields of the run.

        Raises:
            ValueError: a value that does not fit, or files on a machine without a disk.
        """
        if changes.get("engine.nvme_path") and self.machine.disk is None and not self.run.engine.nvme_path:
            raise ValueError("states in files need a disk: --disk says how large it is")
        return replace(self, run=self.run.replace(**changes))

    def on(self, **fields: Any) -> Question:
        """The same question on a machine with other fields."""
        return replace(self, machine=replace(self.machine, **fields))

    def advice(self) -> list[Variant]:
        """Single changes that let longer sequences fit, the most helpful first; each at the longest that fits now. Of
        ours: the reference's options are those of its paper."""
        if self.preset != "ours":
            return []
        now, found = self.longest(), []
        helps = {what: with_folder(self.run, of) for what, of in HELP.items() if changed(self.run, of)}
        with watched("what would help", helps) as each:
            for what in each:
                with suppress(ValueError):  # options that exclude each other, that `apply` refuses, or not simulated
                    other = self.with_changes(helps[what])
                    best = other.longest()
                    if best is not None and best.seq_len > 1.01 * (now.seq_len if now else 0):
                        other.beyond(best)  # its `limit` is known from now on
                        found.append(Variant(what, helps[what], other, best, other.at(now.seq_len) if now else best))
        return sorted(found, key=lambda one: -one.longest)

    def ways(self, seq_len: int | None = None) -> list[Variant]:
        """Every way to run the model with the run's other options: how far it reaches, and what a step takes at
        `seq_len` (by default the longest length that every way reaches that reaches any), where this fits. Of ours."""
        if self.preset != "ours":
            return []
        ways, run = dict(WAYS), self.run
        if run.contrib.sparse:
            ways[SPARSE] = {**WAYS["keys and values too"], "contrib.sparse": run.contrib.sparse}
        if run.options.disk is not None:
            ways["block by block"] = {**ways["block by block"], "options.disk": None}
        asked = run.options.chunk if run.options.chunk != "auto" else None
        size = asked or run.block or max(CHUNK, least_chunk(self.shape, self.machine.rates, self.ranks))
        tiles = {"options.tiles.loss": run.options.tile("loss") or True}
        needed = {"options.checkpoint": True, "options.offload": True, "contrib.sparse": None, **tiles}
        found = []
        with watched("ways to run the model", ways) as each:
            for what in each:
                own = {name: size if value == CHUNK else value for name, value in ways[what].items()}
                with suppress(ValueError):  # not simulated, or refused by `apply`, as chunks are by some models
                    other = self.with_changes({**needed, **own})
                    one = Variant(what, own, other, other.longest())
                    other.beyond(one.best)  # its `limit` is known from now on
                    found.append(one)
        length = seq_len or min((one.longest for one in found if one.best), default=0)
        for i, one in enumerate(found):
            with suppress(NotSimulated):
                if one.best and length and (here := one.question.at(length)).fits:
                    found[i] = replace(one, at=here)
        return found

    def remedies(self, seq_len: int | None) -> Iterator[Variant]:
        """What lets this length fit that does not; where no length fits (None), what lets some fit. The nearest things
        that do so: other options, a disk, an adapter, more host memory, more nodes. Of ours."""
        length = seq_len or self.shortest
        with suppress(NotSimulated):
            for one in self._remedies(length) if self.preset == "ours" else ():
                if (at := one.question.at(length)).fits and (found := at if seq_len else one.question.longest()):
                    yield replace(one, at=found)

    def _remedies(self, seq_len: int) -> Iterator[Variant]:
        """What may let it fit."""
        found, now = self.at(seq_len), self.machine
        if near := self.nearest(seq_len):
            yield near
        elif now.disk is None and (near := self.on(disk=DRIVE).nearest(seq_len)):
            yield replace(near, what=f"a disk of {DRIVE / 1e12:g} TB on each node and {near.what}")
        if now.disk is not None and (short := found.missing.get("disk")):
            disk = -(-(now.disk + short * now.ranks_of_node) // 10**9)
            yield Variant(f"a disk of {disk:,} GB on each node", {}, self.on(disk=disk * 10**9))
        if self.run.model.lora is None and self.shape.images is None:
            with suppress(ValueError):  # an adapter is refused, or was not simulated
                adapter = Variant("LoRA", LORA, self.with_changes(LORA))
                if adapter.question.at(seq_len).fits:
                    yield adapter
                elif near := adapter.question.nearest(seq_len):
                    yield Variant(f"LoRA and {near.what}", LORA | near.changes, near.question)
        host = -(-max(found.host_needed * now.ranks_of_node, found.loading.host) // GIB)
        if now.host_memory is not None and host * GIB > now.host_memory:
            yield Variant(f"{host:,} GiB of host memory on each node", {}, self.on(host_memory=host * GIB))
        more = (self.on(gpus=n * now.gpus, per_node=now.ranks_of_node) for n in (2, 4, 8, 16, 32, 64))
        if others := next((one for one in more if one.at(seq_len).fits), None):
            yield Variant(f"{others.machine.nodes} nodes", {}, others)

    def nearest(self, seq_len: int) -> Variant | None:
        """The fewest changes (three at most) after which this length fits, cheapest first; None where none do."""
        now, seen, changes = self, list[str](), dict[str, Any]()
        for _ in range(3):
            options = []
            with watched("changes of the run", HELP) as each:
                for what in each:
                    with suppress(ValueError):
                        other = now.with_changes(with_folder(now.run, HELP[what]))
                        found = other.at(seq_len)
                        cost = found.seconds["step"] if found.fits else found.device_peak
                        if other != now:
                            options.append((found.shortfall, cost, what, other))
            if not options:
                return None
            short, _, what, now = min(options, key=lambda option: option[:2])
            seen.append(what)
            changes = with_folder(self.run, changes | HELP[what])
            if not short:
                return Variant(" and ".join(seen), changed(self.run, changes), now)
        return None

    def tokens_per_second(self, found: Prediction) -> float:
        """Tokens a second of each GPU."""
        samples = self.run.data.batch_size * self.run.optim.accumulation
        return samples * found.seq_len / self.ranks / found.seconds["step"]

    def mfu(self, found: Prediction) -> float | None:
        """The model's FLOPs as a share of the GPUs' peak; None where the peak is not known."""
        if not self.machine.rates.peak:
            return None
        flops = model_flops(self.shape, self.run, found.seq_len) / self.ranks
        return flops / found.seconds["step"] / self.machine.rates.peak

    def speed(self, found: Prediction) -> str:
        share = self.mfu(found)
        return f"{self.tokens_per_second(found):,.0f} tokens/s for each GPU" + (f", MFU {share:.0%}" if share else "")

    def written(self, found: Prediction) -> int:
        """Bytes that a step writes to a node's disk."""
        return found.written * self.machine.ranks_of_node

    def days_of_disk(self, found: Prediction) -> float | None:
        """Days of training after which a node's disk has been written what it may be; None where that is not known."""
        life, written = self.machine.disk_life, self.written(found)
        return life / written * found.seconds["step"] / 86400 if life and written else None

    @property
    def name(self) -> str:
        return f"{self.machine.gpus} x {self.machine.rates.name}"

    def notes(self, seq_len: int | None = None) -> list[str]:
        """What else to know of this plan, and of this length."""
        made = [NOTE] if self.shape.recurrence and self.machine.device != "cpu" else []
        if planned_config(self.run.model.name) in PUBLIC.values() and (remark := other_versions()):
            made.append(remark)
        made += self.refusals(seq_len) if seq_len and self.machine.device != "cpu" else []
        trained = trained_length(self.run)
        if seq_len and trained and seq_len > trained:
            made.append(
                f"the model was trained on up to {trained:,} tokens, and {seq_len:,} are {seq_len / trained:.1f} times "
                "as many; memory and time are as planned, but positions beyond need scaling and training."
            )
        return made

    def refusals(self, seq_len: int) -> list[str]:
        """What a step of this length would refuse because a kernel counts elements with 32 bits (`kernels.int32`)."""
        layer = self.shape.recurrence and self.shape.recurrence.layer
        if not layer or self.shape.family.startswith("minimax"):  # whose recurrence is transformers' PyTorch code
            return []
        rows = -(-seq_len // self.ranks)
        piece, batch = min(rows, self.run.chunk or rows, self.run.block or rows), self.run.data.batch_size
        if (most := counted(layer, piece, batch)) < INT32:
            return []
        kernel = "flash-linear-attention before fla-core 0.6.0" if layer.matrix else "mamba-ssm"
        return [
            f"the kernel of the recurrence in {kernel} counts elements with 32 bits, and a call of {piece:,} tokens of "
            f"each rank has {most:,}: the step is refused. Chunks of {(INT32 - 1) * piece // most:,} tokens pass "
            "(options.chunk)."
        ]


@dataclass(frozen=True)
class Variant:
    """A question with other settings or on another machine."""

    what: str
    changes: dict[str, Any]
    """The fields of the run that differ, with their values."""
    question: Question
    best: Prediction | None = None
    """The longest sequence that fits; None where none does, or where one length was asked about."""
    at: Prediction | None = None
    """The prediction at a length that was asked about."""

    @property
    def found(self) -> Prediction:
        """The prediction at the length that was asked about, or at the longest that fits, or at the shortest, which
        does not fit."""
        return self.at or self.best or self.question.at(self.question.shortest)

    @property
    def longest(self) -> int:
        return self.best.seq_len if self.best else 0

    @property
    def limit(self) -> str:
        """What stops a longer sequence: the device's memory or the host's."""
        return self.question.beyond(self.best).reason if self.best else ""

    def to_dict(self) -> dict[str, Any]:
        """For programs: how far it reaches, unless one length was asked about alone, and its step there; and its step
        at the length that was asked about."""
        machine, best, at = self.question.machine, self.best, self.at
        longest = {"longest_sequence": self.longest, "longest_step_seconds": best.seconds["step"] if best else None}
        return {
            "what": self.what, "changes": self.changes, "gpus": machine.gpus, "nodes": machine.nodes,
            "host_memory": machine.host_memory, "disk": machine.disk, **(longest if best or not at else {}),
            "seq_len": at.seq_len if at else None, "step_seconds": at.seconds["step"] if at else None,
        }  # fmt: skip


def trained_length(run: RunConfig) -> int | None:
    """Tokens of the longest sequence that the model was trained for, as its config says (with its scaling of rotary
    positions); None where it does not say."""
    found = find_config(run.model.name)
    public = next((name for name, config in PUBLIC.items() if config == found), "")
    config = overridden(found, run.model.config)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 0)
    length = config.get("max_position_embeddings") or config.get("n_positions") or TRAINED.get(public, 0)
    return int(max(length, scaled)) or None
