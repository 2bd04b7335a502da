"""SPContext over processes that nothing has joined yet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import free_port

import alstlib

RANK = """
import alstlib, torch.distributed as dist
ctx = alstlib.SPContext.create(sp=2)
print(dist.get_backend(), ctx.sp, ctx.dp, ctx.sp_rank)
"""


def test_ranks_of_torchrun_join_by_themselves() -> None:
    """As in the loop of notebooks/training.md, which calls nothing else before."""
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env={**given, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE
        )
        for r in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0].decode().split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == [["gloo", "2", "1", "0"], ["gloo", "2", "1", "1"]]


def test_one_process_has_no_sequence_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert alstlib.SPContext.create() == alstlib.SPContext()
    with pytest.raises(
        ValueError,
        match="sp=2 needs at least 2 processes, but there is one: start the script with torchrun --nproc-per-node 2",
    ):
        alstlib.SPContext.create(2)
