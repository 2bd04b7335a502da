"""The processes of a cell: new ones for each, because stacks replace transformers' functions for a whole process."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
    "transformers.trainer", "transformers.integrations.deepspeed", "accelerate", "peft",
    "deepspeed.runtime.sequence_parallel.ulysses_sp", "exactness.training", "alstlib.hf.attach",
    "alstlib.trainers.trainer",
]  # fmt: skip
"""What one server imports, from which all ranks are forked."""
REFUSALS = (ValueError, NotImplementedError)
AFTER_ONE = 10.0
"""Seconds that the others have when one rank has failed."""
SHOWN = re.compile(r"(loss|norm|grad_norm|eval_loss)'?:? (\d[\d.]*(?:e[+-]?\d+)?|nan|inf)")
"""A number that a reproducer prints, and its name; those that the Trainer prints are in quotes."""
FOLDERS = re.compile(r"(?<![\w:/])/\S*/")
"""Folders of this machine in a message."""
Cell = dict[str, Any]


def _on_rank(rank: int, ranks: int, port: int, folder: str, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    out = Path(folder)
    log = os.open(out / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if ranks > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        torch.save(work(ranks, folder, *given), out / f"part.{rank}")
        os.replace(out / f"part.{rank}", out / f"found.{rank}")
    except BaseException as e:
        traceback.print_exc()
        kind = "refused" if isinstance(e, REFUSALS) else "does not run"
        (out / f"error.{rank}").write_text(f"{kind}\n{type(e).__name__}: {e}")
    os._exit(0)  # threads of the libraries may abort while the interpreter is taken down


def _train(ranks: int, folder: str, module: str, stack: str, case: Any, resume: bool) -> Any:
    import importlib

    from . import training

    return training.run(importlib.import_module(module).load(stack), case, ranks, folder, resume)


def _run_script(ranks: int, folder: str, path: str, stand_in: bool) -> dict[str, list[float]]:
    """The numbers that a reproducer prints, by their names: losses and norms of the gradients."""
    import contextlib
    import io
    import runpy
    import sys

    if stand_in and ranks > 1:
        from . import ring, training

        training.on_cpu_ranks()
        ring.stand_in()
    os.chdir(folder)
    sys.argv, printed = [path, *(["plain"] if ranks == 1 else [])], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    print(printed.getvalue())
    found: dict[str, list[float]] = {}
    for name, number in SHOWN.findall(printed.getvalue()):
        found.setdefault(name, []).append(float(number))
    return found


class Processes:
    """Runs a stack on its ranks.

    Args:
        module: has `load(name)`, which gives the stack.
        seconds: after which ranks that gave no answer are ended.
    """

    def __init__(self, module: str = "exactness.stacks", seconds: float = 180.0) -> None:
        self.module, self.seconds = module, seconds
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def run(self, stack: str, case: Any, ranks: int) -> list[Cell] | Cell:
        """What each rank found; or how it ended: `result` is refused or does not run, with a `reason`."""
        with tempfile.TemporaryDirectory() as folder:
            for resume in (False, True) if case.resume else (False,):
                found = self._once(ranks, folder, _train, self.module, stack, case, resume)
                if isinstance(found, dict):
                    return found
            return found

    def script(self, path: Path, ranks: int, stand_in: bool) -> list[Any] | Cell:
        """What each rank of a reproducer prints (`_run_script`); or how it ended. One rank: plain transformers.

        Args:
            stand_in: plain PyTorch stands in for CUDA's attention operators beneath PyTorch's ring.
        """
        with tempfile.TemporaryDirectory() as folder:
            return self._once(ranks, folder, _run_script, str(path), stand_in)

    def _once(self, ranks: int, folder: str, work: Callable[..., Any], *given: Any) -> list[Any] | Cell:
        import torch

        out = Path(folder)
        for old in [*out.glob("found.*"), *out.glob("error.*")]:
            old.unlink()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        processes = [
            self.context.Process(target=_on_rank, args=(r, ranks, port, folder, work, given), daemon=True)
            for r in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline, failed = time.monotonic() + self.seconds, False
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if not failed and any(out.glob("error.*")):
                failed, deadline = True, min(deadline, time.monotonic() + AFTER_ONE)
            time.sleep(0.05)
        late = [r for r, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        if keep := os.environ.get("REFEREE_LOGS"):
            shutil.copytree(out, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint*"))
        errors = sorted(out.glob("error.*"))
        if errors:
            told = [error.read_text().partition("\n")[::2] for error in errors]
            kind, reason = min(told, key=lambda one: one[0] != "refused")
            return {"result": kind, "reason": FOLDERS.sub("", " ".join(reason.split()))[:300].strip()}
        if late:
            return {"result": "does not run", "reason": f"hangs: ranks {late} gave no answer in {self.seconds:g} s"}
        if len(list(out.glob("found.*"))) < ranks:
            return {"result": "does not run", "reason": f"exit codes {[p.exitcode for p in processes]}"}
        return [torch.load(out / f"found.{r}", weights_only=False) for r in range(ranks)]
