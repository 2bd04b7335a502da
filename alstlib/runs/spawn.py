"""Run a function of a notebook on real ranks: processes on this machine that gloo joins, and that end when the call
returns.

What `launch` is to a whole run, this is to a lesson's or a user's own few lines: no configuration, no result.json.
Imports no torch: the ranks do.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alstlib.runs.processes import sigterm_interrupts, start, stop
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
    run, started = uuid.uuid4().hex, list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder, sigterm_interrupts():
        out, deadline = Path(folder), time.monotonic() + timeout
        (out / "job").write_bytes(pickle.dumps((source, name, args)))
        env = environment(run, ranks, {"TMPDIR": folder, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)})
        try:
            for rank in map(str, range(ranks)):
                command = [sys.executable, "-m", "alstlib.runs.spawn", folder]
                started.append(start(command, {**env, "RANK": rank, "LOCAL_RANK": rank}, out / f"log.{rank}"))
            while None in (codes := [process.poll() for process in started]) and not any(codes):
                if time.monotonic() > deadline:
                    late = [rank for rank, code in enumerate(codes) if code is None]
                    raise RuntimeError(f"ranks {late} were not done after timeout={timeout:g} s")
                time.sleep(POLL_SECONDS)
            if failed := [rank for rank, code in enumerate(codes) if code]:
                logs = [(out / f"log.{rank}").read_text(errors="replace")[-2000:] for rank in failed]
                raise RuntimeError("\n".join([f"ranks {failed} failed; their last lines:", *logs]))
            return [pickle.loads((out / f"result.{rank}").read_bytes()) for rank in range(ranks)]
        finally:
            for process in started:
                stop(process, run)


def main() -> None:
    import torch
    import torch.distributed as dist

    out, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    source, name, args = pickle.loads((out / "job").read_bytes())
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=world)
    space: dict[str, Any] = {"__name__": "ranks"}
    exec(compile(source, f"<{name}>", "exec"), space)
    result = pickle.dumps(space[name](*args))
    dist.barrier()
    (out / f"result.{rank}").write_bytes(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written; threads of the libraries may abort while the interpreter is taken down


if __name__ == "__main__":
    main()
