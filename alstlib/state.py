"""Training states on disk: weights, optimizer and place in the data, as safetensors and JSON. Nothing is pickled.

A state holds what DeepSpeed partitions in its whole form, fp32, by parameter name: it depends neither on the number of
ranks nor on the sequence-parallel degree or the ZeRO stage. One parameter is gathered at a time.
"""

from __future__ import annotations

import errno
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alstlib.config import RunConfig
from alstlib.engine import Told, WholeState, silent

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
SHARD_BYTES = 2 * 2**30
_DATA = ("accumulation", "batch_size", "data", "model", "packed", "seed", "seq_len", "sp", "tokenizer")
"""Fields of a run that decide, with the number of ranks, which rank reads which sample when."""


def save_state(
    engine: Any, run: RunConfig, folder: str | Path, *, step: int, loader_state: Any, told: Told = silent
) -> None:
    """Write the training state after optimizer step `step`. A collective: every rank calls it, rank 0 writes.

    It is written beside `folder` and renamed when it is whole: whatever happens, the state saved before is intact.

    Args:
        engine: a DeepSpeed engine with AdamW, at the end of an optimizer step.
        loader_state: this rank's `SPDataLoader.state_dict()`, or anything that JSON holds.
        told: called with the share that is written, 0 to 1.

    Raises:
        OSError: on every rank, when rank 0 could not write (a full disk).
    """
    whole, writer = WholeState(engine), _Writer(Path(folder), dist.get_rank() == 0)
    rng = [_bytes(get()).tobytes().hex() for get in _rng()[0]]
    ranks = _gather(json.dumps({"loader": loader_state, "rng": rng}), engine.device)
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
        "config": run.to_dict(),
        "layout": _layout(run),
        "scheduler_step": getattr(engine.lr_scheduler, "last_epoch", None),
        "parameters": {name: {"shape": shape, "step": whole.step(name)} for name, shape in whole.shapes.items()},
        "ranks": [json.loads(text) for text in ranks],
    }
    writer.finish(state)
    if error := _gather(writer.error, engine.device)[0]:
        raise OSError(f"could not save the training state in {folder}: {error}")


def load_state(engine: Any, run: RunConfig, folder: str | Path, told: Told = silent) -> dict[str, Any]:
    """Put a saved state into an engine of the same model, on any number of ranks, at any sp and under any ZeRO stage.

    A collective. Everything is checked before the engine is touched.

    Args:
        folder: what `save_state` was given, or the folder of a run, which has it in `state`.
        told: called with the share that is read, 0 to 1.

    Returns: `step` (optimizer steps done), `loader` (this rank's loader state, or None where this run reads other
        samples or spreads them otherwise) and `note` (why `loader` is None; also logged).

    Raises:
        ValueError: on every rank: no state there, one of another model, or a damaged one.
    """
    whole, device, problem = WholeState(engine), engine.device, ""
    state: dict[str, Any] = {}
    try:
        place = _find(Path(folder))
        state = _read(place, whole, thorough=dist.get_rank() == 0)
    except ValueError as e:
        problem = str(e)
    if problems := [p for p in _gather(problem, device) if p]:
        raise ValueError(f"resume_from='{folder}': {problems[0]}")
    where = {name: place / file for file, names in state["files"].items() for name in names}
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
    then, now = state["layout"], _layout(run)
    if differs := [f"{name}={then.get(name)!r} (now {now[name]!r})" for name in now if then.get(name) != now[name]]:
        note = f"the state in {folder} was saved under {', '.join(differs)}: the data begin at the first sample"
        log.log(logging.INFO if dist.get_rank() else logging.WARNING, note)
        return {"step": state["step"], "loader": None, "note": note}
    own = state["ranks"][dist.get_rank()]
    for put, saved in zip(_rng()[1], own["rng"]):
        put(torch.frombuffer(bytearray.fromhex(saved), dtype=torch.uint8))
    return {"step": state["step"], "loader": own["loader"], "note": ""}


# Files


class _Writer:
    """A new state's files, on the rank that writes. The first failure is kept in `error`; what follows is skipped."""

    def __init__(self, folder: Path, active: bool) -> None:
        self.folder, self.active, self.error = folder, active, ""
        self.new, self.old = (folder.with_name(folder.name + suffix) for suffix in (".tmp", ".old"))
        self.sums: dict[str, dict[str, int]] = {}
        self._do(self._prepare)

    def begin(self, file: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """A safetensors file: the length of its header, its header; the tensors follow one after another."""
        header, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.file, self.sums[file] = file, {}
        self._do(self._append, file, len(text).to_bytes(8, "little") + text)

    def add(self, name: str, value: Tensor) -> None:
        if self.active and not self.error:
            content = _bytes(value)
            self.sums[self.file][name] = zlib.crc32(content)
            self._do(self._append, self.file, content)

    def finish(self, state: Mapping[str, Any]) -> None:
        self._do(self._append, "state.json", json.dumps({**state, "files": self.sums}, indent=1).encode())
        self._do(self._replace)

    def _do(self, action: Callable[..., None], *args: Any) -> None:
        if not self.active or self.error:
            return
        try:
            action(*args)
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            self.error = "the disk is full" if full else f"{e.strerror or e} ({e.filename or self.new})"
            self.error += "; the state saved before is intact" if self.folder.exists() or self.old.exists() else ""
            shutil.rmtree(self.new, ignore_errors=True)

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
        shutil.rmtree(self.old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self.old)
        self.new.rename(self.folder)
        _sync(self.folder.parent)
        shutil.rmtree(self.old, ignore_errors=True)


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().flatten().numpy()


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


def _find(folder: Path) -> Path:
    """Where a state lies: here, in a run's `state`, or beside it after a crash between two renamings."""
    places = [p.with_name(p.name + suffix) for p in (folder, folder / "state") for suffix in ("", ".old")]
    for place in places:
        if (place / "state.json").is_file():
            return place
    what = "it has no training state (state.json)" if folder.exists() else "there is no such folder"
    raise ValueError(f"{what}; name the folder of a run with checkpoint_every")


def _read(place: Path, whole: WholeState, thorough: bool) -> dict[str, Any]:
    """state.json, checked against the engine and, if `thorough`, with every tensor's checksum."""
    try:
        state = json.loads((place / "state.json").read_text())
        if state["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"it has schema_version={state['schema_version']}; this alstlib reads {SCHEMA_VERSION}")
        saved = {name: tuple(p["shape"]) for name, p in state["parameters"].items()}
        if odd := sorted(n for n in saved.keys() | whole.shapes.keys() if saved.get(n) != whole.shapes.get(n)):
            was, now = saved.get(odd[0], "absent"), whole.shapes.get(odd[0], "absent")
            raise ValueError(f"it is of another model: {len(odd)} parameters differ, {odd[0]}: {was}, here {now}")
        stored = {name for names in state["files"].values() for name in names}
        if missing := sorted(set(whole.names()) - stored):
            raise ValueError(f"it lacks {missing[0]} and {len(missing) - 1} more: were they frozen when it was saved?")
        for file, sums in state["files"].items() if thorough else ():
            with safe_open(place / file, "pt") as shard:
                for name, crc in sums.items():
                    if zlib.crc32(_bytes(shard.get_tensor(name))) != crc:
                        raise ValueError(f"{file} is damaged: {name} has not the checksum that it was saved with")
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{place} is damaged: {type(e).__name__}: {e}") from e
    return state


# Between ranks


def _rng() -> tuple[list[Any], list[Any]]:
    """What reads and what sets the states of the random generators."""
    count = 1 + torch.cuda.is_available()
    getters: list[Any] = [torch.get_rng_state, torch.cuda.get_rng_state]
    return getters[:count], [torch.set_rng_state, torch.cuda.set_rng_state][:count]


def _layout(run: RunConfig) -> dict[str, Any]:
    return {"ranks": dist.get_world_size(), **{name: getattr(run, name) for name in _DATA}}


def _gather(text: str, device: Any) -> list[str]:
    """Every rank's text, on every rank."""
    content = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device))
    padded = bytearray(content.ljust(max(1, *(int(s) for s in sizes))))
    everyone = [torch.empty(len(padded), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(everyone, torch.frombuffer(padded, dtype=torch.uint8).to(device))
    return [bytes(t.tolist()[: int(s)]).decode() for t, s in zip(everyone, sizes)]
