"""The parts of a training state that each rank holds, and how `torch.distributed.checkpoint` saves and loads them.

A tensor of the state is flat. Each rank saves its pieces, at their offsets, and reads those that it holds from whatever
pieces are there, of any number of ranks and any ZeRO stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from alstlib.hf.saving import Told
from alstlib.train.engine import adam_of, masters, reserve_adam_state


class HeldState:
    """This rank's pieces of an engine's fp32 weights and AdamW's moments: flat views, to read and to set.

    A parameter X has `weight.X` and, unless it is frozen, `exp_avg.X` and `exp_avg_sq.X`. Where ZeRO partitions a
    tensor, the ranks' pieces make up the whole; where it does not, every rank's piece is the whole.
    """

    KEYS = ("weight", "exp_avg", "exp_avg_sq")

    def __init__(self, engine: Any) -> None:
        reserve_adam_state(engine)
        self.parameters: dict[str, Any] = dict(engine.module.named_parameters())
        self.shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in self.parameters.items()}
        self.zero, self.stage = engine.optimizer, engine.zero_optimization_stage()
        self.flat, self.adam = masters(engine), adam_of(engine)
        self.master: dict[int, Any] = {}
        if self.stage == 0:  # the optimizer steps on the parameters, or on fp32 copies of them in the same order
            stepped = [p for group in getattr(self.zero, "fp16_groups", [self.flat]) for p in group]
            self.master = {id(p): m for p, m in zip(stepped, self.flat)}
        elif self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def names(self) -> list[str]:
        return [f"{key}.{n}" for n, p in self.parameters.items() for key in self.KEYS[: 3 if p.requires_grad else 1]]

    def size(self, name: str) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shapes[name.partition(".")[2]])

    def piece(self, name: str) -> tuple[int, Tensor]:
        """Where in the flattened tensor this rank's piece begins, and the piece: a flat view, empty for none."""
        key, _, parameter = name.partition(".")
        p = self.parameters[parameter]
        if self.stage == 3:  # shards are padded to one size
            shard, size = p.ds_tensor.numel(), self.size(name)
            start = min(size, shard * dist.get_rank(p.ds_process_group))
            held = p.ds_tensor.data.view(-1)
            if p.requires_grad:
                group, offset, _ = self.zero.grad_position[self.zero.get_param_id(p)]
                held = self._flat(self.flat[group], key)[offset:]
            return start, held[: min(shard, size - start)]
        if not p.requires_grad:
            return 0, p.data.view(-1)
        if self.stage == 0:
            return 0, self._flat(self.master[id(p)], key)
        if (fragment := p._hp_mapping) is None:
            return 0, p.data.new_empty(0)
        held = fragment.get_hp_fragment(None if key == "weight" else key)
        return fragment.lp_fragment_address.start, held.data

    def own(self, name: str) -> tuple[int, Tensor]:
        """`piece`, or, where every rank has the whole, a part of it: each element is one rank's."""
        start, piece = self.piece(name)
        if self.stage == 3 or (self.stage and self.parameters[name.partition(".")[2]].requires_grad):
            return start, piece
        rank, world = dist.get_rank(), dist.get_world_size()
        start = len(piece) * rank // world
        return start, piece[start : len(piece) * (rank + 1) // world]

    def _flat(self, master: Tensor, key: str) -> Tensor:
        return (master if key == "weight" else self.adam.state[master][key]).data.view(-1)

    @torch.no_grad()
    def use(self) -> None:
        """Take the weights, where they have been set, into those that the forward reads (a collective)."""
        trained = [(n, p) for n, p in self.parameters.items() if p.requires_grad]
        if self.stage == 0:
            for _, p in trained:
                p.data.copy_(self.master[id(p)].data)
        elif self.stage < 3:
            self.zero.update_lp_params()
        else:
            for name, p in trained:
                piece = self.piece(f"weight.{name}")[1]
                p.ds_tensor.data.view(-1)[: len(piece)].copy_(piece)
            if gathered := self.zero.persistent_parameters:  # small ones, which every rank keeps whole
                gathered[0].partition(gathered)
                gathered[0].all_gather(gathered)

    def step(self, parameter: str) -> int | None:
        """AdamW's count of steps for a parameter (under ZeRO one count for all); None for a frozen one."""
        p = self.parameters[parameter]
        master = self.master[id(p)] if self.stage == 0 and p.requires_grad else self.flat[0]
        return int(self.adam.state[master]["step"]) if p.requires_grad else None

    def set_steps(self, steps: Mapping[str, int | None]) -> None:
        for master in self.flat:
            self.adam.state[master]["step"].fill_(max((s for s in steps.values() if s is not None), default=0))
        for name, p in self.parameters.items():
            if self.stage == 0 and p.requires_grad:
                self.adam.state[self.master[id(p)]]["step"].fill_(steps[name] or 0)


def _chunk(start: int, size: int) -> meta.ChunkStorageMetadata:
    """A piece of a flat tensor."""
    return meta.ChunkStorageMetadata(Size([start]), Size([size]))


class SavePlanner(checkpoint.DefaultSavePlanner):
    """This rank's pieces, which begin at `starts` of flat tensors of `sizes`; `about` is its text for state.json."""

    def __init__(self, starts: Mapping[str, int], sizes: Mapping[str, int], about: str, nbytes: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.starts, self.sizes, self.about, self.nbytes, self.done = starts, sizes, about, nbytes, 0

    @property
    def share(self) -> float:
        """What is written of this rank's part."""
        return self.done / max(1, self.nbytes)

    def create_local_plan(self) -> plans.SavePlan:
        items = []
        for name, piece in self.state_dict.items():
            if len(piece):
                part, fp32 = _chunk(self.starts[name], len(piece)), meta.TensorProperties(dtype=torch.float32)
                data = plans.TensorWriteData(part, fp32, Size([self.sizes[name]]))
                index = meta.MetadataIndex(name, part.offsets)
                items.append(plans.WriteItem(index, plans.WriteItemType.SHARD, tensor_data=data))
        return plans.SavePlan(items, planner_data=self.about)

    def create_global_plan(self, all_plans: list[plans.SavePlan]) -> tuple[list[plans.SavePlan], meta.Metadata]:
        planned, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = [plan.planner_data for plan in all_plans]
        return planned, metadata

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor:
        piece = self.state_dict[name := write_item.index.fqn]
        if not piece.isfinite().all():
            raise FloatingPointError(f"{name} is not finite")
        self.done += 4 * len(piece)
        return piece.float()


class Reader(checkpoint.FileSystemReader):
    """Reads the pieces of state.json: where they begin, their sizes, and where in which file they are."""

    def __init__(self, place: Path, pieces: Mapping[str, Iterable[tuple[int, int, str, int, int]]]) -> None:
        super().__init__(place)
        self.pieces = pieces

    def read_metadata(self, *args: Any, **kwargs: Any) -> meta.Metadata:
        tensors: dict[str, Any] = {}
        stored = {}
        for name, pieces in self.pieces.items():
            chunks = []
            for start, size, file, offset, length in pieces:
                chunks.append(_chunk(start, size))
                stored[meta.MetadataIndex(name, chunks[-1].offsets)] = SimpleNamespace(
                    relative_path=file, offset=offset, length=length, transform_descriptors=None
                )
            fp32 = meta.TensorProperties(dtype=torch.float32)
            tensors[name] = meta.TensorStorageMetadata(fp32, Size([sum(size for _, size, *_ in pieces)]), chunks)
        return meta.Metadata(tensors, storage_data=stored)


class LoadPlanner(checkpoint.DefaultLoadPlanner):
    """Fills this rank's pieces, which begin at `starts`, from whatever pieces were saved."""

    def __init__(self, starts: Mapping[str, int], told: Told) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.starts, self.told, self.done = starts, told, 0

    def create_local_plan(self) -> plans.LoadPlan:
        items: list[plans.ReadItem] = []
        for name, piece in self.state_dict.items():
            if len(piece):
                saved: Any = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
                items += create_read_items_for_chunk_list(name, saved, [_chunk(self.starts[name], len(piece))])
        return plans.LoadPlan(items)

    def lookup_tensor(self, index: meta.MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]

    def commit_tensor(self, read_item: plans.ReadItem, tensor: Tensor) -> None:
        self.done += len(tensor)
        self.told(self.done / sum(map(len, self.state_dict.values())))
