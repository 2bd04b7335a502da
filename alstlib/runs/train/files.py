"""Training states on disk: `state/step-00000010` and the like below a run's folder, the last two of them.

Each has a file of every rank's pieces, which PyTorch's `torch.distributed.checkpoint` writes, and `state.json`, with
the checksums of these files and a checksum of its own in `state.checksum`. Nothing but tensors is unpickled.
"""

from __future__ import annotations

import copy
import hashlib
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

from alstlib.runs.results import Json, replace_text, write_json

SCHEMA_VERSION = 5
STATE, CHECKSUM = "state.json", "state.checksum"


class OtherState(ValueError):
    """A state of another configuration, model or alstlib, or one with more steps than the run asks for."""


def states_in(folder: Path) -> list[Path]:
    """The folders of states, sound or not, from the newest on: of a run, of its states, or this one itself."""
    places = (CHECKSUM, f"step-*/{CHECKSUM}", f"state/step-*/{CHECKSUM}")
    return sorted((file.parent for place in places for file in folder.glob(place)), reverse=True)


def move_aside(folder: Path) -> Path:
    """Move a folder to a free name next to it, which is returned."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.kept{number}")).exists():
        number += 1
    return folder.rename(aside)


class Writer(checkpoint.FileSystemWriter):
    """Writes a new state next to the folder of a run's states. It gets its place there when all of it is on disk.

    Args:
        folder: the run's states.
        common: what state.json says besides the ranks' parts.
        mine: what it says of this rank.
    """

    def __init__(self, folder: Path, common: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        self.place = folder / f"step-{common['step']:08}"
        self.common, self.mine = copy.deepcopy((common, mine))  # as they are now: the training goes on
        super().__init__(folder.with_name(f"{folder.name}.tmp"), per_thread_copy_ahead=0)

    def stage(self, state_dict: Json) -> Json:
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
        pieces = [[one.index.fqn, one.storage_data.offset, one.storage_data.length] for one in written]
        mine = {"file": path.name, "checksum": _checksum(path), "pieces": pieces, **self.mine}
        told: Any = torch.futures.Future()
        told.set_result([WriteResult(meta.MetadataIndex(path.name), 0, mine)])
        return told

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        new, by_rank = Path(self.path), [rank.storage_data for (rank,) in results]
        if not all((new / rank["file"]).exists() for rank in by_rank):
            raise OSError(f"files of other ranks are missing in {new}: do all nodes share this folder?")
        write_json(new / STATE, {**self.common, "by_rank": by_rank})
        replace_text(new / CHECKSUM, _checksum(new / STATE))
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.parent.mkdir(exist_ok=True)
        new.rename(self.place)
        for old in states_in(self.place.parent)[2:]:
            shutil.rmtree(old, ignore_errors=True)


def _checksum(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def read_state(folder: Path) -> tuple[Path, Json]:
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
    check(found[0] / STATE, (found[0] / CHECKSUM).read_text(errors="replace"))
    return found[0], json.loads((found[0] / STATE).read_text())


def check(path: Path, checksum: str) -> None:
    """Raise ValueError unless a state's file is what was written."""
    if not path.exists() or _checksum(path) != checksum:
        raise ValueError(
            f"{path} is damaged, its checksum is not the one that was recorded. output.resume='never' keeps it and "
            "begins at step 1, or where output.resume_from names the step before it"
        )
