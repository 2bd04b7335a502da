"""A notebook's function on real ranks: answers in order, failures with their traceback, nothing left behind."""

import linecache
import time
from pathlib import Path

import pytest
from cases import check_refused

from alstlib.runs.spawn import run_on_ranks


def total(values, scale):
    import torch
    import torch.distributed as dist

    mine = torch.tensor(values[dist.get_rank()] * scale)
    dist.all_reduce(mine)
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), mine.item()


def hangs(folder, fails):
    import os
    import time
    from pathlib import Path

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    Path(folder, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank in fails:
        raise KeyError("gone")
    time.sleep(600)


def left(folder):
    """Processes of the ranks that still live."""
    return [path.name for path in folder.iterdir() if Path(f"/proc/{path.read_text()}").exists()]


def test_every_rank_answers():
    assert run_on_ranks(total, 2, [1.0, 2.0], 10) == [(0, 2, "gloo", 30.0), (1, 2, "gloo", 30.0)]


def test_a_cells_function_travels():
    """One that exists only where IPython keeps the source of cells."""
    source = "def of_a_cell(x):\n    return x + 1\n"
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
    space = {}
    exec(compile(source, "<cell>", "exec"), space)
    assert run_on_ranks(space["of_a_cell"], 1, 1) == [2]


def test_a_failure_names_its_rank_and_nothing_is_left(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)ranks \[1\] failed; .*KeyError: 'gone'"):
        run_on_ranks(hangs, 2, str(tmp_path), [1])
    assert left(tmp_path) == []


@pytest.mark.slow
def test_too_late(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] were not done after timeout=12 s"):
        run_on_ranks(hangs, 2, str(tmp_path), [], timeout=12)
    assert time.monotonic() - began < 60
    assert left(tmp_path) == []


def test_what_cannot_travel():
    outside = 1

    def closure():
        return outside

    for function in (closure, lambda: 1, len):
        check_refused(r"must be a function of its own|no source to send", run_on_ranks, function, 1)
    check_refused("ranks=0", run_on_ranks, total, 0)
