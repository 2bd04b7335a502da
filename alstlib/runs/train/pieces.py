"""The parts of a training state that each rank holds: flat pieces of fp32 weights and AdamW's moments, by name.

Each rank saves its pieces, and takes what it holds from whatever pieces are there, of any number of ranks and any ZeRO
stage.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.runs.train.engine import adam_of, masters, on_disk, reserve_adam_state


class StatePiece(NamedTuple):
    """One rank's part of a flattened tensor, and where it belongs."""

    held: Tensor
    """A flat view of what the engine has."""
    start: int
    """Where in the flattened tensor it begins."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    shared: bool
    """Whether every rank holds this same piece, which then is the whole tensor."""


class HeldState:
    """This rank's pieces of an engine's fp32 weights and AdamW's moments: views, to read and to set.

    A parameter X has the piece `weight.X` and, unless it is frozen, `exp_avg.X` and `exp_avg_sq.X`. What DeepSpeed has
    in files is a view of the file: its pages are read as they are needed, and take no memory of their own.
    """

    def __init__(self, engine: Any) -> None:
        reserve_adam_state(engine)
        self.zero, self.stage = engine.optimizer, engine.zero_optimization_stage()
        self.flat, self.adam = masters(engine), adam_of(engine)
        self.files = {group for group in range(len(self.flat)) if on_disk(self.zero, group)}
        """Groups that are in files: they must be read before the next step, which writes them anew."""
        self.maps: dict[str, Tensor] = {}
        self.parameters = dict(engine.module.named_parameters())
        # under stage 0 the optimizer steps on a parameter itself, or on an fp32 copy
        stepped = [p for group in getattr(self.zero, "fp16_groups", [self.flat]) for p in group]
        self.master = {id(p): master for p, master in zip(stepped, self.flat)}
        self.pieces = {
            f"{key}.{name}": self._piece(p, key)
            for name, p in self.parameters.items()
            for key in (("weight", "exp_avg", "exp_avg_sq") if p.requires_grad else ("weight",))
        }
        self.steps = max(int(self.adam.state[master]["step"]) for master in self.flat)  # 0 of a frozen one
        """AdamW's count of steps. It is one for all: DeepSpeed makes zeros of gradients that a step has not."""
        self.shapes = {name: list(piece.whole) for name, piece in self.pieces.items()}

    def _piece(self, p: Any, key: str) -> StatePiece:
        whole = tuple(getattr(p, "ds_shape", p.shape))
        size = here = math.prod(whole)
        master, offset, start, group = self.flat[0], 0, 0, -1
        shared = self.stage == 0 or (self.stage < 3 and not p.requires_grad)
        if shared:
            master = self.master.get(id(p), p)
        elif self.stage == 3:
            master, shard = p.ds_tensor, p.ds_tensor.ds_numel
            start = min(size, shard * dist.get_rank(p.ds_process_group))
            here = min(shard, size - start)  # without the padding of the last shard
            if p.requires_grad:
                group, offset, _ = self.zero.grad_position[self.zero.get_param_id(p)]
                master = self.flat[group]
        elif (fragment := p._hp_mapping) is None:
            here = 0
        else:
            master, start = self.flat[fragment.param_group_index], fragment.lp_fragment_address.start
            offset, here = fragment.hp_fragment_address.start, fragment.hp_fragment_address.numel
        if group in self.files:
            held = self._file(master, key)
        else:
            held = master if key == "weight" else self.adam.state[master][key]
        return StatePiece(held.detach().view(-1)[offset : offset + here], start, whole, shared)

    def _file(self, master: Any, key: str) -> Tensor:
        """A group's file, as a tensor."""
        swapper, kind = self.zero.optimizer_swapper, "" if key == "weight" else f"{key}-"
        path = f"{swapper.swap_folder}/{kind}{master.ds_id}.tensor.swp"
        if path not in self.maps:
            size = swapper.swap_params_info[master.ds_id].numel()
            self.maps[path] = torch.from_file(path, shared=True, size=size, dtype=torch.float32)
        return self.maps[path]

    def own(self) -> dict[str, Tensor]:
        """What this rank saves, by `name@start@size`: each element is saved by one rank, and of shared pieces they take
        turns."""
        rank, world = dist.get_rank(), dist.get_world_size()
        return {
            f"{name}@{piece.start}@{len(piece.held)}": piece.held
            for number, (name, piece) in enumerate(self.pieces.items())
            if len(piece.held) and (not piece.shared or number % world == rank)
        }

    @torch.no_grad()
    def load(self, place: Path, state: Mapping[str, Any]) -> None:
        """Take from a state's files what this rank holds, and set what the forward reads (a collective)."""
        for rank in state["by_rank"]:
            with open(place / rank["file"], "rb") as file:
                for key, offset, length in rank["pieces"]:
                    name, *span = key.split("@")
                    piece, (start, size) = self.pieces[name], map(int, span)
                    first, end = max(start, piece.start), min(start + size, piece.start + len(piece.held))
                    if first < end:
                        file.seek(offset)
                        saved = torch.load(io.BytesIO(file.read(length)), weights_only=True)
                        piece.held[first - piece.start : end - piece.start].copy_(saved[first - start : end - start])
        for master in self.flat:
            self.adam.state[master]["step"].fill_(state["adam_steps"])
        if 0 < self.stage < 3:
            self.zero.update_lp_params()
            return
        if self.files:
            self.zero.reset_swap_buffers()  # of all groups, those in memory too
        for name, p in () if self.files else self.parameters.items():
            held = self.pieces[f"weight.{name}"].held
            (p if self.stage == 0 else p.ds_tensor).view(-1)[: len(held)].copy_(held)
        # small ones, of which ZeRO-3 keeps a whole copy on every rank
        if kept_whole := getattr(self.zero, "persistent_parameters", None):
            kept_whole[0].partition(kept_whole)
            kept_whole[0].all_gather(kept_whole)
