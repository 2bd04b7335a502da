"""The folder of a training state: `state.json` and a file for each rank, which are written completely or not at all,
and checked."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.storage import WriteResult

SCHEMA_VERSION = 3
BLOCK_BYTES = 2**24
"""How much of a file is read at a time when its checksum is taken."""


class OtherState(ValueError):
    """A state of another configuration, model or alstlib, or one with more steps than the run asks for."""


def find_state(folder: str | Path) -> Path | None:
    """The place that `load_state` would read, sound or not: `folder`, its `state`, or after a crash between two
    renamings the state before."""
    folder = Path(folder)
    places = (folder, before(folder), folder / "state", before(folder / "state"))
    return next((place for place in places if (place / "state.json").is_file()), None)


def place_aside(folder: Path) -> Path:
    """A free name next to `folder`, for a state that stays there when another run saves its own."""
    places = (folder.with_name(f"{folder.name}.kept{i}") for i in itertools.count(1))
    return next(p for p in places if not (p.exists() or before(p).exists()))


class Writer(checkpoint.FileSystemWriter):
    """A new state's files: each rank's, and from the first rank state.json, which begins with `content`."""

    def __init__(self, folder: Path, local: str | None, content: str, aside: Path | None, copies: bool) -> None:
        self.folder, self.content, self.aside, self.copies = folder, content, aside, copies
        self.new, self.old = folder.with_name(folder.name + ".tmp"), before(folder)
        self.local = Path(local) / f"state-{zlib.crc32(os.fsencode(folder.resolve())):08x}" if local else None
        super().__init__(self.local or self.new, per_thread_copy_ahead=0)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The pieces on the host, apart from those that the training changes; the pieces themselves without room."""
        if not self.copies:
            return state_dict
        return {name: piece.to("cpu", torch.float32, copy=True) for name, piece in state_dict.items()}

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """On the first rank, before any writes."""
        if self.old.exists() and not self.folder.exists():  # a crash between the two renamings
            self.old.rename(self.folder)
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        place = Path(self.path)
        try:
            place.mkdir(parents=True, exist_ok=True)
            results = list(super().write_data(plan, planner).value())
            for file in {result.storage_data.relative_path for result in results}:
                results.append(WriteResult(meta.MetadataIndex(file), (place / file).stat().st_size, _crc(place / file)))
                if self.local:
                    shutil.copyfile(place / file, self.new / file)
                    _sync(self.new / file)
        except RuntimeError as e:
            if isinstance(e.__context__, OSError):  # PyTorch's serializer says only that it has written too little
                raise e.__context__ from None
            raise
        finally:
            for file in self.local.glob(f"__{self.rank}_*") if self.local else ():
                file.unlink()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        pieces: dict[str, list[list[Any]]] = {}
        files: dict[str, int] = {}
        for result in itertools.chain(*results):
            index, where = result.index, result.storage_data
            if index.offset is None:
                files[index.fqn], path = where, self.new / index.fqn
                if not path.exists() or path.stat().st_size != result.size_in_bytes:
                    raise OSError(
                        errno.EIO,
                        "missing here, or of another size than its rank wrote: do all nodes share this folder?",
                        str(path),
                    )
                continue
            chunk: Any = metadata.state_dict_metadata[index.fqn]
            size = chunk.chunks[index.index].sizes[0]
            piece = [index.offset[0], size, where.relative_path, where.offset, where.length]
            pieces.setdefault(index.fqn, []).append(piece)
        state = {**json.loads(self.content), "by_rank": [json.loads(about) for about in metadata.planner_data or ()]}
        state |= {"files": files, "pieces": pieces}
        (self.new / "state.json").write_text(json.dumps({**state, "crc32": _sum(state)}))
        for path in (self.new / "state.json", self.new):
            _sync(path)
        if self.aside:
            for place, kept in zip((self.old, self.folder), (before(self.aside), self.aside)):
                if place.exists():
                    place.rename(kept)
        shutil.rmtree(self.old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self.old)
        self.new.rename(self.folder)
        _sync(self.folder.parent)


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as content:
        while block := content.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _sum(state: Mapping[str, Any]) -> int:
    """Checksum of state.json by its meaning: of everything in it but the checksum."""
    return zlib.crc32(json.dumps({**state, "crc32": None}, sort_keys=True).encode())


def before(folder: Path) -> Path:
    """Where the state before the one in `folder` is kept."""
    return folder.with_name(folder.name + ".old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(place: Path) -> dict[str, Any]:
    """state.json, if it is what was written."""
    try:
        state = json.loads((place / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise damaged(place, "state.json", f"{type(e).__name__}: {e}") from e
    version = state.get("schema_version") if isinstance(state, dict) else None
    if version != SCHEMA_VERSION:
        raise OtherState(f"{place / 'state.json'} has schema_version={version!r}; this alstlib reads {SCHEMA_VERSION}")
    if state.get("crc32") != _sum(state):
        raise damaged(place, "state.json", "its checksum is not the one that was recorded when it was saved")
    return state


def check_files(place: Path, state: Mapping[str, Any]) -> None:
    """Read every file once, each on one rank: it must have the checksum that it had when it was written."""
    for file in sorted(state["files"])[dist.get_rank() :: dist.get_world_size()]:
        try:
            crc = _crc(place / file)
        except OSError as e:
            raise damaged(place, file, f"{type(e).__name__}: {e.strerror}") from e
        if crc != state["files"][file]:
            raise damaged(place, file, "its checksum is not the one that was recorded when it was saved")


def damaged(place: Path, file: str, why: str) -> ValueError:
    remedy = f"; the state saved before it is in {before(place)}" if find_state(before(place)) else ""
    return ValueError(f"{place / file} is damaged: {why}{remedy}")
