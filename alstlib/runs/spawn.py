"""Run a function of a notebook on real ranks: processes on this machine that gloo joins, and that end when the call
returns.

What `launch` is to a whole run, this is to a lesson's or a user's own few lines: no configuration, no result.json.
Imports no torch: the ranks do. Where it is safe, they are forked from one process that has imported what the function
imports, because PyTorch and transformers take each process more than four seconds of a core.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import pickle
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from alstlib.planner import devices
from alstlib.runs.processes import die_with_parent, sigterm_interrupts, start, stop
from alstlib.runs.torchrun import environment

POLL_SECONDS = 0.05


def run_on_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """`function(*args)` on each of `ranks` CPU ranks whose default process group is gloo; what each returned, in order.

    The function travels as its source, so that one defined in a notebook's cell works: it imports what it uses, inside.
    Arguments and what it returns are pickled.

    Raises:
        ValueError: no rank at all, or a function without a source or with variables of an enclosing function.
        RuntimeError: ranks failed (with their last lines) or none was done after `timeout` seconds; all are ended.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    name = getattr(function, "__name__", "")
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as e:
        raise ValueError(f"{function!r} has no source to send ({e}); define it with def, in a cell or a module") from e
    if not name.isidentifier() or inspect.getclosurevars(function).nonlocals:
        raise ValueError(f"{function!r} must be a function of its own (def), which gets what it needs as arguments")
    run = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder, sigterm_interrupts():
        out, deadline = Path(folder), time.monotonic() + timeout
        (out / "source").write_text(source, encoding="utf-8")
        (out / "arguments").write_bytes(pickle.dumps(args))
        env = environment(run, ranks, {"TMPDIR": folder, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)})
        results = [out / f"result.{rank}" for rank in range(ranks)]
        process = start([sys.executable, "-m", "alstlib.runs.spawn", folder, name], env, out / "log")
        try:
            while (code := process.poll()) is None:
                if time.monotonic() > deadline:
                    late = [rank for rank, result in enumerate(results) if not result.exists()]
                    raise RuntimeError(f"ranks {late} were not done after timeout={timeout:g} s")
                time.sleep(POLL_SECONDS)
            if code:
                failed = [int(path.suffix[1:]) for path in sorted(out.glob("failed.*"))]
                logs = [out / f"log.{rank}" for rank in failed] or [out / "log"]
                last = [log.read_text(errors="replace")[-2000:] for log in logs]
                raise RuntimeError("\n".join([f"ranks {failed or [*range(ranks)]} failed; their last lines:", *last]))
            return [pickle.loads(result.read_bytes()) for result in results]
        finally:
            stop(process, run)


def main() -> None:
    """The process that the ranks are forked from. It ends with the first rank that fails."""
    out, name, world = Path(sys.argv[1]), sys.argv[2], int(os.environ["WORLD_SIZE"])
    source = (out / "source").read_text(encoding="utf-8")
    # to ask a GPU for anything would keep all forks from using it, and macOS's frameworks end in forks
    if world > 1 and sys.platform == "linux" and not devices.device_count():
        _import_ahead(f"import torch.distributed\n{source}")
    ranks = dict[int, int]()
    with sigterm_interrupts():
        try:
            for rank in range(world):
                if not (pid := os.fork()):
                    _rank(out, rank, world, source, name)
                ranks[pid] = rank
            while ranks:
                pid, status = os.wait()
                rank = ranks.pop(pid)
                if status:
                    (out / f"failed.{rank}").touch()
                    sys.exit(1)
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            for pid in ranks:
                os.waitpid(pid, 0)  # or they would stay in the system's table of processes where init takes none over


def _import_ahead(source: str) -> None:
    """Import what a function's source imports, and what it takes from these modules, of which some import it only then.
    What cannot be imported fails on the ranks."""
    nodes, space = [*ast.walk(ast.parse(source))], dict[str, Any]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(Exception):
                exec(ast.unparse(node), space)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            with contextlib.suppress(Exception):
                getattr(space.get(node.value.id), node.attr)


def _rank(out: Path, rank: int, world: int, source: str, name: str) -> NoReturn:
    """One rank, from its fork to its end."""
    code = 1
    try:
        with open(out / f"log.{rank}", "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        die_with_parent()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        import torch
        import torch.distributed as dist

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        args = pickle.loads((out / "arguments").read_bytes())
        dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=world)
        space: dict[str, Any] = {"__name__": "ranks"}
        exec(compile(source, f"<{name}>", "exec"), space)
        result = pickle.dumps(space[name](*args))
        dist.barrier()
        (out / f"result.{rank}").write_bytes(result)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written; threads of the libraries may abort while the interpreter is taken down


if __name__ == "__main__":
    main()
