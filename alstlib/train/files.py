"""Training states on disk: `state/step-00000010` and the like below a run's folder, the last two of them.

Each has a file of every rank's pieces, which PyTorch's `torch.distributed.checkpoint` writes, and `state.json`, with
the checksums of these files and a checksum of its own in `state.checksum`. Nothing but tensors is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.storage import WriteResult

from alstlib.runs.results import replace_text, write_json

SCHEMA_VERSION = 5
STATE, CHECKSUM = "state.json", "state.checksum"


class OtherState(ValueError):
    """A state of another configuration, model or alstlib, or one with more steps than the run asks for."""


def states_in(folder: Path) -> list[Path]:
    """The folders of states, sound or not, from the newest on: of a run, of its states, or this one itself."""
    places = (STATE, f"step-*/{STATE}", f"state/step-*/{STATE}")
    return sorted((file.parent for place in places for file in folder.glob(place)), reverse=True)


def move_aside(folder: Path) -> Path:
    """Move a folder to a free name next to it, which is returned."""
    names = (folder.with_name(f"{folder.name}.kept{i}") for i in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))


class Writer(checkpoint.FileSystemWriter):
    """Writes a new state next to the folder of a run's states. It gets its place there when all of it is on disk.

    Args:
        folder: the run's states.
        common: what state.json says besides the ranks' parts.
        mine: what it says of this rank.
    """

    def __init__(self, folder: Path, common: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        self.place = folder / f"step-{common['step']:08}"
        self.common, self.mine = json.dumps(common), json.dumps(mine)  # as they are now: the training goes on
        super().__init__(folder.with_name(f"{folder.name}.tmp"), per_thread_copy_ahead=0)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors as they are given: they are copies already, or this rank waits."""
        return state_dict

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        for item in plan.items:
            if not planner.resolve_data(item).isfinite().all():  # type: ignore[union-attr]
                raise FloatingPointError(f"{item.index.fqn.partition('@')[0]} is not finite")
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as e:
            if isinstance(e.__context__, OSError):  # PyTorch's serializer says only that it has written too little
                raise e.__context__ from None
            raise
        path = Path(self.path, f"{plan.storage_data.prefix}0.distcp")  # the one file of this rank
        pieces = []
        for one in written:
            (name, start, size), where = one.index.fqn.split("@"), one.storage_data
            pieces.append([name, int(start), int(size), where.offset, where.length])
        mine = {"file": path.name, "checksum": _checksum(path), "pieces": pieces, **json.loads(self.mine)}
        told = torch.futures.Future[list[WriteResult]]()
        told.set_result([WriteResult(meta.MetadataIndex(path.name), 0, mine)])
        return told

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        new, by_rank = Path(self.path), [rank.storage_data for (rank,) in results]
        if gone := [rank["file"] for rank in by_rank if not (new / rank["file"]).exists()]:
            raise OSError(errno.ENOENT, "missing here: do all nodes share this folder?", str(new / gone[0]))
        write_json(new / STATE, {**json.loads(self.common), "by_rank": by_rank})
        replace_text(new / CHECKSUM, _checksum(new / STATE))
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.parent.mkdir(exist_ok=True)
        new.rename(self.place)
        for old in states_in(self.place.parent)[2:]:
            shutil.rmtree(old, ignore_errors=True)


def _checksum(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def read_state(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the newest state, and its state.json.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if not (found := states_in(folder)):
        raise ValueError(
            "there is no training state (state.json); name the folder of a run with checkpoint_every. A checkpoint of "
            "DeepSpeed's is not read, because that is to unpickle it: turn it into a model with its script "
            "zero_to_fp32.py (and --safe_serialization) and the model's config.json, and give that folder as the model"
        )
    checksum = found[0] / CHECKSUM
    check(found[0] / STATE, checksum.read_text(errors="replace") if checksum.exists() else "")
    return found[0], json.loads((found[0] / STATE).read_text())


def check(path: Path, checksum: str) -> None:
    """Raise ValueError unless a state's file is what was written."""
    if not path.exists() or _checksum(path) != checksum:
        raise ValueError(
            f"{path} is damaged, its checksum is not the one that was recorded. output.resume='never' keeps it and "
            "begins at step 1, or where output.resume_from names the step before it"
        )
