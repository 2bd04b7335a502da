"""The (dp, sp) mesh of ranks, `SPContext`: every distributed operator gets its process groups as an argument.

`SPContext.create` lays ranks out with the sequence-parallel (SP) dimension innermost, so that the all-to-all stays
inside a node, and data parallel (DP) replicas lie across nodes (ALST paper, section 3.2). `SPContext.from_mesh` takes
the layout of a PyTorch DeviceMesh.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def accelerator(device: torch.device) -> Any:
    """PyTorch's module of a device that has streams, pinned memory, random numbers and an allocator of its own
    (`torch.cuda` of CUDA); None for the CPU. Whatever is asked of a device is asked of this module."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def own_device() -> torch.device:
    """The device of this rank: of PyTorch's accelerator, where one is there, that with the launcher's LOCAL_RANK; or
    the CPU, also where the accelerator is Apple's, which has no streams and no process group."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))


def take_device() -> torch.device:
    """Make `own_device` the current one of its kind; returns it."""
    device = own_device()
    if (here := accelerator(device)) is not None:
        here.set_device(device)
    return device


@dataclass(frozen=True, kw_only=True)
class SPContext:
    """One rank's place on the mesh of dp * sp ranks. `SPContext.create` makes it from the default process group, and
    `SPContext.from_mesh` from a DeviceMesh."""

    sp: int = 1
    """Sequence-parallel degree: the number of ranks that share one sample, each with a slice of it (an SP group)."""
    dp: int = 1
    """Data-parallel degree: the number of SP groups, each with samples of its own."""
    sp_rank: int = 0
    """This rank's place in its SP group, from 0 to sp - 1: which slice of the sample it holds."""
    dp_rank: int = 0
    """Which SP group this rank is in, from 0 to dp - 1."""
    mesh: Any = field(default=None, repr=False, compare=False)
    """The DeviceMesh of this rank's SP group, of one dimension or with a dimension `sp`; None when sp = 1."""

    @property
    def sp_group(self) -> Any:
        """The process group of the ranks that share this rank's sample; None when sp = 1."""
        if self.mesh is None:
            return None
        return self.mesh.get_group("sp" if self.mesh.ndim > 1 else 0)

    @property
    def world_group(self) -> Any:
        """The process group of all dp * sp ranks; None when there is one rank."""
        return dist.group.WORLD if self.dp > 1 else self.sp_group

    @property
    def world_size(self) -> int:
        return self.dp * self.sp

    @property
    def rank(self) -> int:
        """This rank's place among all dp * sp ranks; with a mesh of another layout it is not the global rank."""
        return self.dp_rank * self.sp + self.sp_rank

    @property
    def wire(self) -> torch.device:
        """The device of small tensors that all ranks exchange: the CPU, or the current device of the kind from which
        alone the process group can send (`cuda` with NCCL)."""
        if self.world_size == 1:
            return torch.device("cpu")
        kinds = _kinds(self.world_group)
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    @property
    def own_group(self) -> SPContext:
        """This rank's SP group as a mesh of its own."""
        return replace(self, dp=1, dp_rank=0)

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """For each of the numbers, the largest over all ranks. Collective: every rank calls it."""
        if self.world_size == 1:
            return list(numbers)
        table = torch.tensor(numbers, dtype=torch.int64, device=self.wire)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=self.world_group)
        return table.tolist()

    @classmethod
    def create(cls, sp: int = 1) -> SPContext:
        """The (dp, sp) mesh over the default process group. Collective: every rank calls it with the same `sp`.

        Under torchrun (or a launcher that sets the same variables) it first creates the process group if there is none,
        with the backend that PyTorch has for this rank's device (`own_device`): NCCL for CUDA, gloo for the CPU. A
        single process works with `sp=1` only.

        Raises:
            ValueError: `sp` is not a whole number of at least 1, or does not divide the number of processes.
        """
        if not isinstance(sp, int) or sp < 1:
            raise ValueError(f"sp={sp!r} must be a whole number of at least 1")
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
            dist.init_process_group(dist.get_default_backend_for_device(take_device()))
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if world % sp:
            degrees = [d for d in range(1, world + 1) if world % d == 0]
            raise ValueError(
                f"sp={sp} does not divide the world size {world}: use one of {degrees}, or start the script with "
                f"torchrun --nproc-per-node {sp}"
            )
        if sp == 1:
            return cls(dp=world, dp_rank=rank)
        kinds, own = _kinds(dist.group.WORLD), own_device().type
        # a dimension of size 1 would make a process group for each rank
        shape, names = ((sp,), ("sp",)) if sp == world else ((world // sp, sp), ("dp", "sp"))
        mesh = init_device_mesh(own if own in kinds else kinds[0], shape, mesh_dim_names=names)
        return cls(sp=sp, dp=world // sp, sp_rank=rank % sp, dp_rank=rank // sp, mesh=mesh)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> SPContext:
        """The ranks of your own mesh: of a slice of one dimension, `SPContext.from_mesh(mesh["cp"])`, or of a mesh with
        a dimension `sp`. Ranks that differ in other dimensions are data parallel replicas.

        Collective: every rank of the default process group calls it, and each must be in the mesh.

        Raises:
            ValueError: it has several dimensions and none is named `sp`, or lacks ranks.
        """
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and "sp" not in names:
            raise ValueError(
                f"the mesh has the dimensions {names or mesh.ndim}, and none is named 'sp': give the one whose ranks "
                "share a sample, such as SPContext.from_mesh(mesh['cp'])"
            )
        place = mesh.get_coordinate()
        group = None if place is None else mesh.get_group("sp" if mesh.ndim > 1 else 0)
        first = -1 if group is None else dist.get_process_group_ranks(group)[0]
        firsts = from_all(first)
        if lacking := [rank for rank, found in enumerate(firsts) if found < 0]:
            raise ValueError(f"the mesh lacks the ranks {lacking}: it must hold all {len(firsts)} ranks")
        replicas = sorted(set(firsts))  # an SP group is known by its first rank
        sp, sp_rank = dist.get_world_size(group), dist.get_rank(group)
        where = {"sp": sp, "sp_rank": sp_rank, "dp": len(replicas), "dp_rank": replicas.index(first)}
        return cls(**where, mesh=mesh if sp > 1 else None)


def _kinds(group: Any) -> list[str]:
    """The kinds of devices from which a process group can send."""
    return [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]


ATTACHED = "_alst_handle"
"""Attribute of an attached model: a weak reference to its `Handle`."""


def from_all(value: Any, group: Any = None) -> list[Any]:
    """What every rank of a group (None: of all) gives, in the order of ranks, on every rank of it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def striped(places: Tensor, each: int, chunk: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens at these places of a sequence of which each rank has so many: the rank that has each in stripes, its
    place there, and its stripe."""
    index = places // (chunk * ranks)
    first = index * chunk
    size = (each - first).clamp(max=chunk)  # the last stripe has the remaining tokens
    inside = places - first * ranks
    return inside // size, first + inside % size, index


def join_fake(ranks: int) -> None:
    """Make this process the last of `ranks` ranks of a default process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
