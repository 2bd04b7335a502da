"""The folder of a training state: `state.json` and a file for each rank, which are written completely or not at all,
and checked."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.storage import WriteResult

SCHEMA_VERSION = 4
CHECKSUMS = "checksums.json"
OF_DEEPSPEED = ("latest", "latest_universal", "*_states.pt", "*/*_states.pt")
"""Files of a checkpoint of DeepSpeed's own, or of a universal one."""


class OtherState(ValueError):
    """A state of another configuration, model or alstlib, or one with more steps than the run asks for."""


def before(folder: Path) -> Path:
    """Where the state before the one in `folder` is kept."""
    return folder.with_name(folder.name + ".old")


def find_state(folder: str | Path) -> Path | None:
    """The place that `load_state` would read, sound or not: `folder`, its `state`, or after a crash between two
    renamings the state before."""
    folder = Path(folder)
    places = (folder, before(folder), folder / "state", before(folder / "state"))
    return next((place for place in places if (place / "state.json").is_file()), None)


def move_aside(folder: Path) -> Path:
    """Move a folder, and the state before it, to a free name next to it, which is returned."""
    names = (folder.with_name(f"{folder.name}.kept{i}") for i in itertools.count(1))
    aside = next(name for name in names if not (name.exists() or before(name).exists()))
    for place, kept in ((before(folder), before(aside)), (folder, aside)):
        if place.exists():
            place.rename(kept)
    return aside


class Writer(checkpoint.FileSystemWriter):
    """Writes a new state's files: each rank its own, and the first rank state.json, which begins with `content` (JSON).

    A file is written to the folder `local` first, where there is one. What lies at `folder` becomes the state before.
    """

    def __init__(self, folder: Path, local: str | None, content: str) -> None:
        self.folder, self.content = folder, content
        self.new, self.old = folder.with_name(folder.name + ".tmp"), before(folder)
        self.local = Path(local, *folder.resolve().parts[1:]) if local else None  # a folder for each state's
        super().__init__(self.local or self.new, per_thread_copy_ahead=0)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The pieces as they are given: they are copies already, or the ranks wait."""
        return state_dict

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """On the first rank, before any writes."""
        if self.old.exists() and not self.folder.exists():  # a crash between the two renamings
            self.old.rename(self.folder)
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        for item in plan.items:
            if not planner.resolve_data(item).isfinite().all():  # type: ignore[union-attr]
                raise FloatingPointError(f"{item.index.fqn} is not finite")
        path = Path(self.path, f"{plan.storage_data.prefix}0.distcp")  # the one file of this rank
        try:
            written = super().write_data(plan, planner)
            written.value().append(WriteResult(meta.MetadataIndex(path.name), 0, _checksum(path)))
            if self.local:
                shutil.move(path, self.new / path.name)
                _sync(self.new / path.name)
        except RuntimeError as e:
            if isinstance(e.__context__, OSError):  # PyTorch's serializer says only that it has written too little
                raise e.__context__ from None
            raise
        finally:
            if self.local:
                path.unlink(missing_ok=True)
        return written

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        files: dict[str, str] = {}
        pieces: list[list[Any]] = []
        for result in itertools.chain(*results):
            name, where = result.index.fqn, result.storage_data
            if isinstance(where, str):  # a file's checksum
                files[name] = where
                if not (self.new / name).exists():
                    raise OSError(errno.ENOENT, "missing here: do all nodes share this folder?", str(self.new / name))
            else:
                chunk = metadata.state_dict_metadata[name].chunks[result.index.index]  # type: ignore[union-attr, index]
                pieces.append([name, *chunk.offsets, *chunk.sizes, where.relative_path, where.offset, where.length])
        state = self.new / "state.json"
        state.write_text(json.dumps({**json.loads(self.content), "pieces": pieces}))
        checksums = self.new / CHECKSUMS
        checksums.write_text(json.dumps({**files, state.name: _checksum(state)}))
        for path in (state, checksums, self.new):
            _sync(path)
        shutil.rmtree(self.old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self.old)
        self.new.rename(self.folder)
        _sync(self.folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def read_state(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The state's place, and its state.json if that is what was written.

    Raises:
        OtherState: another alstlib wrote it.
        ValueError: there is none, or it is damaged.
    """
    if (place := find_state(folder)) is None:
        raise ValueError(_nothing(Path(folder)))
    check_file(place, "state.json")
    state = json.loads((place / "state.json").read_text())
    if (version := state["schema_version"]) != SCHEMA_VERSION:
        raise OtherState(f"{place} has schema_version={version!r}; this alstlib reads {SCHEMA_VERSION}")
    return place, state


def _nothing(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder; name the folder of a run with checkpoint_every"
    if any(next(folder.glob(pattern), None) for pattern in OF_DEEPSPEED):
        return (
            "it is a checkpoint of DeepSpeed's. To read it is to unpickle it, which runs whatever is in it, and a "
            "universal one gives the settings of one group of parameters to all of them. To train on from the weights "
            "alone, turn the checkpoint that DeepSpeed saved into a model with its script zero_to_fp32.py (and "
            "--safe_serialization), put the model's config.json next to them, and give that folder as the model"
        )
    return "it has no training state (state.json); name the folder of a run with checkpoint_every"


def check_files(place: Path, state: Mapping[str, Any]) -> None:
    """Check the files of the pieces, each on one rank."""
    files = sorted({file for _, _, _, file, *_ in state["pieces"]})
    for name in files[dist.get_rank() :: dist.get_world_size()]:
        check_file(place, name)


def check_file(place: Path, name: str) -> None:
    """Raise ValueError unless a file is what was written."""
    try:
        if json.loads((place / CHECKSUMS).read_text())[name] != _checksum(place / name):
            raise ValueError("its checksum is not the one that was recorded")
    except (OSError, ValueError, LookupError, TypeError) as e:
        remedy = f"; the state saved before it is in {before(place)}" if find_state(before(place)) else ""
        why = f"{type(e).__name__}: {e}{remedy}"
        raise ValueError(f"{place / name} or {CHECKSUMS} next to it is damaged: {why}") from e
