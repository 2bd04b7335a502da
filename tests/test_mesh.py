"""SPContext over processes that nothing has joined yet, and from meshes."""

import contextlib
import functools
import os
import subprocess
import sys
from unittest import mock

import matrix
import torch.distributed as dist
from cases import check_refused
from conftest import free_port
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trainers import accelerate_here

import alstlib

RANK = """
import alstlib, torch.distributed as dist
ctx = alstlib.SPContext.create(sp=2)
print(dist.get_backend(), ctx.sp, ctx.dp, ctx.sp_rank)
"""


def test_ranks_of_torchrun_join_by_themselves():
    """As in the loop of notebooks/training.md, which calls nothing else before."""
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    start = functools.partial(subprocess.Popen, [sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(start(env={**given, "RANK": r, "LOCAL_RANK": r})) for r in "01"]
        for rank in ranks:
            stack.callback(rank.kill)
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert said == ["gloo 2 1 0\n", "gloo 2 1 1\n"]


def test_one_process_has_no_sequence_parallelism(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert alstlib.SPContext.create() == alstlib.SPContext()
    says = (
        r"sp=2 does not divide the world size 1: use one of \[1\], or start the script with torchrun --nproc-per-node 2"
    )
    check_refused(says, alstlib.SPContext.create, 2)


def members(group):
    return None if group is None else dist.get_process_group_ranks(group)


def from_meshes(rank, world):
    made = alstlib.SPContext.create(2)
    assert (made.mesh.mesh_dim_names, tuple(made.mesh.shape)) == (("dp", "sp"), (2, 2))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "cp"))
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    for ctx in (made, *map(alstlib.SPContext.from_mesh, (two, two["sp"], three["cp"], made.mesh))):
        assert ctx == made
        groups = (ctx.sp_group, ctx.world_group, ctx.own_group.world_group)
        assert [*map(members, groups)] == [pair, [0, 1, 2, 3], pair]
    whole = alstlib.SPContext.from_mesh(init_device_mesh("cpu", (4,)))
    assert whole == alstlib.SPContext.create(4) == alstlib.SPContext(sp=4, sp_rank=rank)
    assert whole.sp_group is whole.world_group is dist.group.WORLD
    alone = alstlib.SPContext.from_mesh(three["shard"])
    assert alone == alstlib.SPContext.create(1) == alstlib.SPContext(dp=4, dp_rank=rank)
    assert (alone.sp_group, members(alone.world_group)) == (None, [0, 1, 2, 3])
    for mesh, refused in (
        (init_device_mesh("cpu", (2, 2)), "has the dimensions 2, and none is named 'sp': give"),
        (three["replicate", "cp"], r"has the dimensions \('replicate', 'cp'\), and none is named 'sp': give the one"),
        (DeviceMesh("cpu", [0, 2, 3]), r"the mesh lacks the ranks \[1\]: it must hold all 4 ranks"),
    ):
        check_refused(refused, alstlib.SPContext.from_mesh, mesh)


def test_a_mesh_of_any_layout_gives_the_ranks(ranks4):
    ranks4(from_meshes)


def from_accelerate(rank, world):
    """The ranks of a sample in the mesh that Accelerate makes; with `sp_size` it makes none."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    with accelerate_here("fsdp2"):
        parallel, shards = ParallelismConfig(dp_shard_size=2, cp_size=2), FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(parallelism_config=parallel, fsdp_plugin=shards)
        assert alstlib.SPContext.from_mesh(accelerator.torch_device_mesh["cp"]) == alstlib.SPContext.create(2)
    assert ParallelismConfig(sp_size=2).get_device_mesh("cpu") is None


def test_the_mesh_of_accelerate_gives_the_ranks(ranks4):
    ranks4(from_accelerate)


CASE = matrix.Case("llama", "2x2")


def step_on_columns(rank, world):
    """One step where a group's ranks are not neighbours: ranks 0 and 2 share a sample, and ranks 1 and 3."""
    ctx = alstlib.SPContext.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp")))
    assert (ctx.sp_rank, ctx.dp_rank) == (rank // 2, rank % 2)
    with mock.patch.object(alstlib.SPContext, "create", return_value=ctx):
        return matrix.run(rank, world, CASE)


def test_ranks_of_a_group_need_not_be_neighbours(ranks4):
    matrix.check(ranks4(step_on_columns), CASE)
