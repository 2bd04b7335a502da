"""The parts of a training state that each rank holds, as `torch.distributed.checkpoint` (DCP) saves and loads them.

A tensor of the state is flat. Each rank saves its pieces, at their offsets, and reads those that it holds from whatever
pieces are there, of any number of ranks and any ZeRO stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.filesystem import _StorageInfo

from alstlib.train.engine import adam_of, masters, reserve_adam_state


class Piece(Tensor):
    """One rank's part of a flattened tensor: a view of it, and where it belongs.

    The methods with double underscores are those by which DCP's planners know a DTensor, whose parts are of one size.
    """

    start: int
    """Where in the flattened tensor it begins."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    shared: bool
    """Whether every rank holds this same piece, which then is the whole tensor."""

    # what is computed from a piece is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, held: Tensor, start: int, whole: tuple[int, ...], shared: bool = False) -> Piece:
        piece = held.detach().view(-1).as_subclass(cls)
        piece.start, piece.whole, piece.shared = start, whole, shared
        return piece

    def own(self) -> Piece:
        """What this rank saves: of a shared piece an equal part, so that each element is saved by one rank."""
        if not self.shared:
            return self
        rank, world, size = dist.get_rank(), dist.get_world_size(), len(self)
        start = size * rank // world
        return Piece.of(self[start : size * (rank + 1) // world], start, self.whole)

    def copied(self) -> Piece:
        """A copy on the host, which the training does not change."""
        return Piece.of(self.to("cpu", copy=True), self.start, self.whole)

    def size(self, *_: Any) -> Size:  # type: ignore[override]
        """Size of the whole tensor, flat: DCP compares it with that of the saved one."""
        return Size([math.prod(self.whole)])

    def __create_chunk_list__(self) -> list[meta.ChunkStorageMetadata]:
        return [meta.ChunkStorageMetadata(Size([self.start]), Size([len(self)]))] if len(self) else []

    def __create_write_items__(self, name: str, _: Any) -> list[plans.WriteItem]:
        kind, properties = plans.WriteItemType.SHARD, meta.TensorProperties.create_from_tensor(self)
        return [
            plans.WriteItem(
                meta.MetadataIndex(name, chunk.offsets),
                kind,
                tensor_data=plans.TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        return self.as_subclass(Tensor)


class HeldState:
    """This rank's pieces of an engine's fp32 weights and AdamW's moments: views, to read and to set.

    A parameter X has the piece `weight.X` and, unless it is frozen, `exp_avg.X` and `exp_avg_sq.X`.
    """

    def __init__(self, engine: Any) -> None:
        reserve_adam_state(engine)
        self.zero, self.stage = engine.optimizer, engine.zero_optimization_stage()
        self.flat, self.adam = masters(engine), adam_of(engine)
        self.parameters: dict[str, Any] = dict(engine.module.named_parameters())
        self.master: dict[int, Any] = {}
        """Under stage 0, what the optimizer steps on for a parameter: itself, or an fp32 copy."""
        if self.stage == 0:
            stepped = [p for group in getattr(self.zero, "fp16_groups", [self.flat]) for p in group]
            self.master = {id(p): m for p, m in zip(stepped, self.flat)}
        elif self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()
        self.pieces = {
            f"{key}.{name}": self._piece(p, key)
            for name, p in self.parameters.items()
            for key in (("weight", "exp_avg", "exp_avg_sq") if p.requires_grad else ("weight",))
        }

    def _piece(self, p: Any, key: str) -> Piece:
        whole = tuple(getattr(p, "ds_shape", p.shape))
        if self.stage == 3:
            shard, size = p.ds_tensor.numel(), math.prod(whole)
            start = min(size, shard * dist.get_rank(p.ds_process_group))
            held = p.ds_tensor.view(-1)
            if p.requires_grad:
                group, offset, _ = self.zero.grad_position[self.zero.get_param_id(p)]
                held = self._held(self.flat[group], key)[offset:]
            return Piece.of(held[: min(shard, size - start)], start, whole)  # without the padding of the last shard
        if self.stage == 0 or not p.requires_grad:
            return Piece.of(self._held(self.master.get(id(p), p), key), 0, whole, shared=True)
        if (fragment := p._hp_mapping) is None:
            return Piece.of(p.new_empty(0), 0, whole)
        held = fragment.get_hp_fragment(None if key == "weight" else key)
        return Piece.of(held, fragment.lp_fragment_address.start, whole)

    def _held(self, master: Tensor, key: str) -> Tensor:
        return master if key == "weight" else self.adam.state[master][key]

    @torch.no_grad()
    def use(self) -> None:
        """Copy the weights, where they have been set, into those that the forward reads (a collective)."""
        if 0 < self.stage < 3:
            self.zero.update_lp_params()
            return
        for name, p in self.parameters.items():
            held = self.pieces[f"weight.{name}"]
            (p if self.stage == 0 else p.ds_tensor).view(-1)[: len(held)].copy_(held)
        # small ones, of which ZeRO-3 keeps a whole copy on every rank
        if kept_whole := getattr(self.zero, "persistent_parameters", None):
            kept_whole[0].partition(kept_whole)
            kept_whole[0].all_gather(kept_whole)

    @property
    def steps(self) -> int:
        """AdamW's count of steps. It is one for all: DeepSpeed makes zeros of gradients that a step has not."""
        return max(int(self.adam.state[master]["step"]) for master in self.flat)  # 0 of a frozen one

    @steps.setter
    def steps(self, count: int) -> None:
        for master in self.flat:
            self.adam.state[master]["step"].fill_(count)


class Reader(checkpoint.FileSystemReader):
    """Reads the pieces of state.json: each one's name, where it begins, its size, and where in which file it is."""

    def __init__(self, place: Path, pieces: Iterable[tuple[Any, ...]]) -> None:
        super().__init__(place)
        self.pieces = pieces

    def read_metadata(self, *_: Any, **__: Any) -> meta.Metadata:
        """In place of the default, which unpickles a file."""
        tensors: dict[str, Any] = {}
        stored = {}
        for name, start, size, *where in self.pieces:
            chunk = meta.ChunkStorageMetadata(Size([start]), Size([size]))
            stored[meta.MetadataIndex(name, chunk.offsets)] = _StorageInfo(*where)
            tensor = tensors.setdefault(name, meta.TensorStorageMetadata(meta.TensorProperties(), Size([0]), []))
            tensor.chunks.append(chunk)
            tensor.size = Size([tensor.size[0] + size])
        return meta.Metadata(tensors, storage_data=stored)
