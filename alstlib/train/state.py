"""Training states on disk: weights, optimizer and place in the data, as safetensors and JSON. Nothing is pickled.

A state holds what DeepSpeed partitions in its whole form, fp32, by parameter name: it depends neither on the number of
ranks nor on the sequence-parallel degree or the ZeRO stage. One parameter is gathered at a time.

It belongs to a configuration (all but `FREE` of its fields must agree where it is loaded), every byte of it is under a
checksum, and the state before it is kept next to it, in `.old`.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from alstlib.config import RunConfig
from alstlib.mesh import gather_text
from alstlib.train.engine import Told, WholeState, silent

log = logging.getLogger(__name__)

SCHEMA_VERSION = 2
SHARD_BYTES = 2 * 2**30
BLOCK_BYTES = 2**24
"""How much of a file is read at a time when its checksum is checked."""
FREE = frozenset({
    "sp", "world_size", "zero_stage", "offload_optimizer", "offload_params", "prefetch",
    "attention", "tiled_loss", "tiled_mlp", "tiled_norm", "checkpoint", "offload", "save_attention", "chunk",
    "block", "kv", "hidden", "liger",
    "device_memory", "host_memory", "search", "search_granule", "search_max", "emulate", "peers",
    "row", "trust_remote_code", "steps", "save_to", "checkpoint_every", "timeout", "step_timeout", "resume",
    "resume_from", "eval_data", "lora", "merge_lora", "fsdp", "trainer",
})  # fmt: skip
"""Fields that may differ between the run that saved a state and the one that loads it: on how many ranks and how the
same numbers are computed, how many steps there are (no schedule depends on that), what has no influence on numbers, and
what only fine-tuning takes. Every other field, a new one too, belongs to the state."""


class OtherState(ValueError):
    """A state of another configuration, model or alstlib, or one with more steps than the run asks for."""


def save_state(
    engine: Any, run: RunConfig, folder: str | Path, *, step: int, loader_state: Any, history: Any = None,
    aside: Path | None = None, told: Told = silent,
) -> None:  # fmt: skip
    """Write the training state after optimizer step `step`. A collective: every rank calls it, rank 0 writes.

    It is written next to `folder` and renamed when it is whole: whatever happens, the state saved before is intact.
    That one is kept in `folder` + `.old`; the one that was there is removed.

    Args:
        engine: a DeepSpeed engine with AdamW, at the end of an optimizer step.
        loader_state: this rank's `SPDataLoader.state_dict()`, or anything that JSON holds.
        history: what a continued run wants back, such as the losses so far; anything that JSON holds.
        aside: what lies at `folder` is no state of this run: it is moved here (`place_aside`), and nothing is removed.
        told: called with the share that is written, 0 to 1.

    Raises:
        OSError: on every rank, when rank 0 could not write (a full disk).
        FloatingPointError: on every rank: a weight or a moment is not finite. The state saved before is intact.
    """
    whole, writer = WholeState(engine), _Writer(Path(folder), dist.get_rank() == 0, aside)
    rng = [_bytes(get()).tobytes().hex() for get in _rng()[0]]
    ranks = gather_text(json.dumps({"loader": loader_state, "rng": rng}), engine.device)
    written, size = 0, _elements(whole)
    for file, names in _shards(whole):
        writer.begin(file, {name: whole.shape_of(name) for name in names})
        for name in names:
            writer.add(name, whole.read(name))  # a collective: it goes on when rank 0 cannot write
            written += math.prod(whole.shape_of(name))
            told(written / size)
    state = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "config": _configuration(engine, run),
        "ranks": dist.get_world_size(),
        "history": history,
        "scheduler_step": getattr(engine.lr_scheduler, "last_epoch", None),
        "parameters": {name: {"shape": shape, "step": whole.step(name)} for name, shape in whole.shapes.items()},
        "by_rank": [json.loads(text) for text in ranks],
    }
    writer.finish(state)
    error, odd = json.loads(gather_text(json.dumps([writer.error, writer.odd]), engine.device)[0])
    if error:
        raise (FloatingPointError if odd else OSError)(f"could not save the training state in {folder}: {error}")


def load_state(
    engine: Any, run: RunConfig, folder: str | Path, told: Told = silent, *, own: bool = False
) -> dict[str, Any]:
    """Put a saved state into an engine of the same model, on any number of ranks, at any sp and under any ZeRO stage.

    A collective. Everything is checked before the engine is touched.

    Args:
        folder: what `save_state` was given, or the folder of a run, which has it in `state`.
        told: called with the share that is read, 0 to 1.
        own: the run continues itself: it must have begun from the same `resume_from`, and may be at its last step.

    Returns: `step` (optimizer steps done), `loader` (this rank's loader state, or None where the samples are spread
        over other ranks now), `note` (why `loader` is None; also logged), `history` and `place` (the state's folder).

    Raises:
        OtherState: on every rank: the state is of another configuration or model, or has more steps than the run.
        ValueError: on every rank: no state there, or a damaged one.
    """
    whole, device, problem = WholeState(engine), engine.device, ["", False]
    state: dict[str, Any] = {}
    try:
        if (place := find_state(folder)) is None:
            what = "it has no training state (state.json)" if Path(folder).exists() else "there is no such folder"
            raise ValueError(f"{what}; name the folder of a run with checkpoint_every")
        state = _read(place)
        _check_fits(state, engine, run, whole, own)
        if dist.get_rank() == 0:
            _check_files(place, state)
    except ValueError as e:
        problem = [str(e), isinstance(e, OtherState)]
    problems = [json.loads(text) for text in gather_text(json.dumps(problem), device)]
    if told_first := next((p for p in problems if p[0]), None):
        what, other = told_first
        if not own:
            raise (OtherState if other else ValueError)(f"resume_from='{folder}': {what}")
        raise OtherState(what) if other else ValueError(f"{what}; resume='never' begins at step 1 and keeps it")
    where = {name: place / file for file, about in state["files"].items() for name in about["tensors"]}
    done, size = 0, _elements(whole)
    for name in whole.names():
        value = torch.empty(whole.shape_of(name), dtype=torch.float32, device=device)
        if dist.get_rank() == 0:
            with safe_open(where[name], "pt") as shard:
                value.copy_(shard.get_tensor(name))
        dist.broadcast(value, 0)
        whole.write(name, value)
        done += value.numel()
        told(done / size)
    whole.set_steps({name: p["step"] for name, p in state["parameters"].items()})
    if engine.lr_scheduler is not None:
        saved_step = state["scheduler_step"]  # None: that run had no warm-up
        engine.lr_scheduler.last_epoch = (state["step"] if saved_step is None else saved_step) - 1
        engine.lr_scheduler.step()
    found = {"step": state["step"], "history": state["history"], "place": place}
    then = {"ranks": state["ranks"], "sp": state["config"]["sp"]}
    now = {"ranks": dist.get_world_size(), "sp": run.sp}
    if differs := [f"{name}={then[name]!r} (now {now[name]!r})" for name in now if then[name] != now[name]]:
        note = f"the state in {place} was saved under {', '.join(differs)}: the data begin at the first sample"
        log.log(logging.INFO if dist.get_rank() else logging.WARNING, note)
        return {**found, "loader": None, "note": note}
    mine = state["by_rank"][dist.get_rank()]
    for put, saved in zip(_rng()[1], mine["rng"]):
        put(torch.frombuffer(bytearray.fromhex(saved), dtype=torch.uint8))
    return {**found, "loader": mine["loader"], "note": ""}


def find_state(folder: str | Path) -> Path | None:
    """The place that `load_state` would read, sound or not: `folder`, its `state`, or after a crash between two
    renamings the state before."""
    folder = Path(folder)
    places = (folder, _old(folder), folder / "state", _old(folder / "state"))
    return next((place for place in places if (place / "state.json").is_file()), None)


def place_aside(folder: Path) -> Path:
    """A free name next to `folder`, for a state that stays there when another run saves its own."""
    places = (folder.with_name(f"{folder.name}.kept{i}") for i in itertools.count(1))
    return next(p for p in places if not (p.exists() or _old(p).exists()))


# Files


class _Writer:
    """A new state's files, on the rank that writes. The first failure is kept in `error`; what follows is skipped."""

    def __init__(self, folder: Path, active: bool, aside: Path | None) -> None:
        self.folder, self.active, self.aside, self.error, self.odd = folder, active, aside, "", False
        self.new, self.old = folder.with_name(folder.name + ".tmp"), _old(folder)
        self.files: dict[str, dict[str, Any]] = {}
        self._do(self._prepare)

    def begin(self, file: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """A safetensors file: the length of its header, its header; the tensors follow one after another."""
        header, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.file, self.files[file] = file, {"crc32": 0, "tensors": list(shapes)}
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, value: Tensor) -> None:
        if not self.active or self.error:
            return
        if not value.isfinite().all():
            self.odd = True
            self._fail(f"{name} is not finite")
        self._write(_bytes(value))

    def finish(self, state: Mapping[str, Any]) -> None:
        content = {**state, "files": self.files}
        content["crc32"] = _sum(content)
        self._do(self._append, "state.json", json.dumps(content).encode())
        self._do(self._replace)

    def _write(self, content: Any) -> None:
        self.files[self.file]["crc32"] = zlib.crc32(content, self.files[self.file]["crc32"])
        self._do(self._append, self.file, content)

    def _fail(self, why: str) -> None:
        self.error = why + ("; the state saved before is intact" if find_state(self.folder) else "")
        shutil.rmtree(self.new, ignore_errors=True)

    def _do(self, action: Callable[..., None], *args: Any) -> None:
        if not self.active or self.error:
            return
        try:
            action(*args)
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            self._fail("the disk is full" if full else f"{e.strerror or e} ({e.filename or self.new})")

    def _prepare(self) -> None:
        if self.old.exists() and not self.folder.exists():  # a crash between the two renamings
            self.old.rename(self.folder)
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(parents=True)

    def _append(self, file: str, content: Any) -> None:
        with open(self.new / file, "ab") as out:
            out.write(content)

    def _replace(self) -> None:
        for path in (*self.new.iterdir(), self.new):
            _sync(path)
        if self.aside:
            for place, kept in zip((self.old, self.folder), (_old(self.aside), self.aside)):
                if place.exists():
                    place.rename(kept)
        shutil.rmtree(self.old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self.old)
        self.new.rename(self.folder)
        _sync(self.folder.parent)


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().flatten().numpy()


def _sum(state: Mapping[str, Any]) -> int:
    """Checksum of state.json by its meaning: of everything in it but the checksum."""
    return zlib.crc32(json.dumps({**state, "crc32": None}, sort_keys=True).encode())


def _old(folder: Path) -> Path:
    """Where the state before the one in `folder` is kept."""
    return folder.with_name(folder.name + ".old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _elements(whole: WholeState) -> int:
    return max(1, sum(math.prod(whole.shape_of(name)) for name in whole.names()))


def _shards(whole: WholeState) -> Iterator[tuple[str, list[str]]]:
    """File names and their tensors: files of at most SHARD_BYTES, unless one tensor alone is larger."""
    groups: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name in whole.names():
        nbytes = 4 * math.prod(whole.shape_of(name))
        if groups[-1] and nbytes > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(name)
        room -= nbytes
    for i, names in enumerate(groups):
        yield f"state-{i + 1:05}-of-{len(groups):05}.safetensors", names


def _read(place: Path) -> dict[str, Any]:
    """state.json, if it is what was written."""
    try:
        state = json.loads((place / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise _damaged(place, "state.json", f"{type(e).__name__}: {e}") from e
    version = state.get("schema_version") if isinstance(state, dict) else None
    if version != SCHEMA_VERSION:
        raise OtherState(f"{place / 'state.json'} has schema_version={version!r}; this alstlib reads {SCHEMA_VERSION}")
    if state.get("crc32") != _sum(state):
        raise _damaged(place, "state.json", "it has not the checksum that it was saved with")
    return state


def _check_fits(state: Mapping[str, Any], engine: Any, run: RunConfig, whole: WholeState, own: bool) -> None:
    """Raise OtherState unless the state is of this configuration and model, and leaves the run a step to do."""
    then, now = state["config"], _configuration(engine, run)
    defaults = RunConfig().to_dict()  # of a field that the run which saved it did not know
    bound = [name for name in now if name not in FREE or (own and name == "resume_from")]
    if differs := [name for name in bound if then.get(name, defaults[name]) != now[name]]:
        listed = ", ".join(f"{n}={then.get(n, defaults[n])!r} (here {now[n]!r})" for n in differs)
        raise OtherState(f"its state of step {state['step']} belongs to another configuration: {listed}")
    saved = {name: tuple(p["shape"]) for name, p in state["parameters"].items()}
    if odd := sorted(n for n in saved.keys() | whole.shapes.keys() if saved.get(n) != whole.shapes.get(n)):
        was, here = saved.get(odd[0], "absent"), whole.shapes.get(odd[0], "absent")
        raise OtherState(f"it is of another model: {len(odd)} parameters differ, {odd[0]}: {was}, here {here}")
    stored = {name for about in state["files"].values() for name in about["tensors"]}
    if missing := sorted(set(whole.names()) - stored):
        raise OtherState(f"it lacks {missing[0]} and {len(missing) - 1} more: were they frozen when it was saved?")
    if state["step"] >= run.steps + own:
        raise OtherState(
            f"steps={run.steps} counts all steps, and it has done {state['step']} already; use at least "
            f"{state['step'] + (not own)}"
        )


def _check_files(place: Path, state: Mapping[str, Any]) -> None:
    """Read every file once: each must have the checksum that its bytes had when they were written."""
    for file, about in state["files"].items():
        crc = 0
        try:
            with open(place / file, "rb") as content:
                while block := content.read(BLOCK_BYTES):
                    crc = zlib.crc32(block, crc)
        except OSError as e:
            raise _damaged(place, file, f"{type(e).__name__}: {e.strerror}") from e
        if crc != about["crc32"]:
            raise _damaged(place, file, "it has not the checksum that it was saved with")


def _damaged(place: Path, file: str, why: str) -> ValueError:
    remedy = f"; the state saved before it is in {_old(place)}" if find_state(_old(place)) else ""
    return ValueError(f"{place / file} is damaged: {why}{remedy}")


# Between ranks


def _rng() -> tuple[list[Any], list[Any]]:
    """What reads and what sets the states of the random generators."""
    count = 1 + torch.cuda.is_available()
    getters: list[Any] = [torch.get_rng_state, torch.cuda.get_rng_state]
    return getters[:count], [torch.set_rng_state, torch.cuda.set_rng_state][:count]


def _configuration(engine: Any, run: RunConfig) -> dict[str, Any]:
    """The run's fields as JSON gives them back, with `auto` as it was resolved and whole paths."""
    fields = json.loads(json.dumps({**run.to_dict(), "dtype": "bf16" if engine.bfloat16_enabled() else "fp32"}))
    paths = [name for name in ("model", "data", "tokenizer", "resume_from") if os.path.exists(fields[name] or "")]
    return {**fields, **{name: os.path.abspath(fields[name]) for name in paths}}
