"""Start torchrun from a notebook or a script, follow it, and leave no process behind.

Logs go to files, never through a notebook's kernel; `processes` says how nothing is left.
Imports neither torch nor transformers: a kernel that launches must not hold a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig
from alstlib.planner import devices
from alstlib.planner.model_shapes import check_model
from alstlib.planner.preflight import step_limit, time_limit, why_not
from alstlib.runs import locks, results, workers
from alstlib.runs.processes import (
    DEADLINE_VARIABLE,
    RUN_ID_VARIABLE,
    ask_where,
    die_with_parent,
    oom_kills,
    sigterm_interrupts,
    start,
    stop,
)
from alstlib.runs.progress import Printer as progress_printer
from alstlib.runs.progress import Progress, ProgressReader, log_tail, root_cause, whereabouts
from alstlib.units import format_seconds

__all__ = ["Nodes", "Progress", "RunFailed", "die_with_parent", "finished", "launch", "progress_printer", "resolve"]

POLL_SECONDS = 1.0

_INHERITED = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|NODE_RANK|MASTER_\w+|TORCHELASTIC_\w+|PET_\w+"
    r"|MPLBACKEND"  # a notebook's inline backend does not exist in a rank
)


class RunFailed(RuntimeError):
    """A run ended with status `error`, `cancelled` or `timeout`; `result` is its `result.json`."""

    def __init__(self, result: dict[str, Any], out: Path) -> None:
        error = result.get("error") or {}
        tail = f"\n{error['log_tail']}" if error.get("log_tail") else ""
        super().__init__(f"{result['status']}: {results.why(result)} (in {out}){tail}")
        self.result = result


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, seen from one of them."""

    count: int = 1
    rank: int = 0
    endpoint: str | None = None
    """`host:port` on the first node, the same on every node; needed for more than one."""


ONE_NODE = Nodes()


# What a run gets


def resolve(config: RunConfig, nnodes: int = 1, gpus: int | None = None) -> RunConfig:
    """The configuration with `world_size=0` and `sp=0` replaced by what this machine has, or one of `gpus` GPUs.

    Raises:
        ValueError: more ranks than GPUs, ranks that do not divide into nodes, or sp that does not divide the ranks.
    """
    gpus = devices.device_count() if gpus is None else gpus
    world = config.world_size or (gpus or 2) * nnodes
    if world % nnodes:
        nearest = max(1, round(world / nnodes)) * nnodes
        raise ValueError(f"world_size={world} does not divide into nnodes={nnodes}; nearest: {nearest}")
    if gpus and world // nnodes > gpus:
        raise ValueError(f"world_size={world} needs more GPUs than the {gpus} of a node; at most {gpus * nnodes}")
    sp = config.sp or world
    if world % sp:
        fitting = max(d for d in range(1, world + 1) if world % d == 0 and d <= sp)
        raise ValueError(f"sp={sp} does not divide world_size={world}; nearest: sp={fitting}, or world_size={sp}")
    return config.replace(world_size=world, sp=sp)


def import_path(inherited: str | None = None) -> str:
    """PYTHONPATH under which another process imports this very package, `inherited` after it."""
    root = str(Path(__file__).resolve().parents[2])
    installed = root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return os.pathsep.join(p for p in ("" if installed else root, inherited or "") if p)


def environment(run: str, ranks: int, extra: Mapping[str, str] | None = None, nnodes: int = 1) -> dict[str, str]:
    """Environment of torchrun: this one without what another launcher left, plus what the ranks need.

    Sets only what is not set: threads of each rank, the allocator on CUDA, and DeepSpeed's accelerator without CUDA. On
    one node gloo and NCCL use the loopback, whatever is set for several: nobody else has to reach them.
    """
    env = {k: v for k, v in os.environ.items() if not _INHERITED.fullmatch(k)}
    if nnodes == 1:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    env.update(extra or {})
    env["PYTHONPATH"] = import_path(env.get("PYTHONPATH"))
    env[RUN_ID_VARIABLE] = run
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not devices.device_count():
        defaults["DS_ACCELERATOR"] = "cpu"
    elif not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env):
        defaults |= dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    return {**defaults, **env}


def finished(config: RunConfig, out: str | os.PathLike[str], nnodes: int = 1) -> dict[str, Any] | None:
    """The result in `out` if it is `ok` or `oom` and of this configuration at this commit, else None.

    A configuration that is resolved already may be that of another machine.
    """
    try:
        result = results.read_result(Path(out) / "result.json")
    except (OSError, ValueError):
        return None
    resolved = config if config.world_size and config.sp else resolve(config, nnodes)
    same = result["run_id"] == results.run_id(resolved)
    return result if same and result["status"] in results.FINISHED else None


# The run


def default_home() -> Path:
    """papermill_runs of the clone that this package is in (which is not there where it was installed)."""
    return Path(__file__).resolve().parents[2] / "papermill_runs"


def default_folder(config: RunConfig) -> Path:
    """Where a single run goes that was given no folder: below papermill_runs/out in a clone, else below ./alst_runs."""
    root = default_home()
    name = f"{config.row or 'run'}-{results.run_id(resolve(config))}"
    return (root / "out" / "single" if root.is_dir() else Path.cwd() / "alst_runs") / name


def command(config: RunConfig, out: Path, logs: Path, python: str, worker: str, rendezvous: list[str]) -> list[str]:
    """torchrun (`agent`) for a resolved configuration, as a list."""
    nnodes = int(rendezvous[rendezvous.index("--nnodes") + 1])
    per_node = ["--nproc-per-node", str(config.world_size // nnodes), "--max-restarts", "0"]
    files = ["--log-dir", str(logs), "--redirects", "3"]
    run = ["-m", worker, "--config", str(out / "config.json"), "--out", str(out)]
    return [python, "-m", "alstlib.train.agent", *rendezvous, *per_node, *files, *run]


def meeting(config: RunConfig, nodes: Nodes = ONE_NODE) -> list[str]:
    """torchrun's flags that say where its nodes meet: on one node at a free port of the loopback.

    Raises:
        ValueError: several nodes without `endpoint`, a host (or address) and port on the first node.
    """
    if nodes.count > 1 and not re.fullmatch(r".+:\d+", nodes.endpoint or ""):
        raise ValueError(
            f"{nodes.count} nodes need an endpoint, such as 'first-node:29500', the same on every node, not "
            f"{nodes.endpoint!r}"
        )
    where = nodes.endpoint if nodes.count > 1 and nodes.endpoint else "127.0.0.1:0"
    return [
        "--nnodes", str(nodes.count), "--rdzv-endpoint", where, "--rdzv-id", results.run_id(config),
        "--rdzv-conf", f"rank={nodes.rank}",
    ]  # fmt: skip


def _version(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns, path.stat().st_ino
    return None


def _ran_out(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "tried" and event.get("peak") is None


class _Run:
    """One attempt: what was in the folder before it, and what came of it."""

    def __init__(
        self, config: RunConfig, out: Path, writes: bool, on_progress: Callable[..., None] | None,
        limit: float = math.inf, patience: float = math.inf,
    ) -> None:  # fmt: skip
        self.config, self.out, self.writes, self.on_progress = config, out, writes, on_progress
        self.deadline, self.patience, self.lost = time.monotonic() + limit, patience, 0
        self.heard, self.stalled, self.stopped = time.monotonic(), False, list[int]()
        self.oom_kills = oom_kills()
        self.id = f"{results.run_id(config)}-{uuid.uuid4().hex[:8]}"
        self.logs = out / "logs" / self.id
        self.reader = ProgressReader(out / "progress.jsonl")
        self.before = _version(out / "result.json")
        self.logs.mkdir(parents=True, exist_ok=True)
        if writes:
            results.write_json(out / "config.json", config.to_dict())
            for old in (self.reader.path, *out.glob("failed.*")):
                old.unlink(missing_ok=True)
            ranks = f"{config.world_size} rank{'s' if config.world_size > 1 else ''}"
            ends = f"; it may take {format_seconds(limit)}" if limit < math.inf else ""
            Progress(self.reader.path).emit("start", row=config.row, run_id=self.id, message=f"starting {ranks}{ends}")

    def follow(self, *more: dict[str, Any]) -> None:
        """Hand on what the ranks said, or that time passes to a callback that has `tick`. One that fails is not worth a
        run: it is dropped with a warning."""
        events = [*self.reader.read(), *more]
        self.heard = time.monotonic() if events else self.heard
        try:
            for event in events if self.on_progress else ():
                self.on_progress(event)  # type: ignore[misc]
            if not events and (tick := getattr(self.on_progress, "tick", None)):
                tick()
        except Exception as e:
            warnings.warn(f"on_progress failed and is not called again: {e!r}", stacklevel=2)
            self.on_progress = None

    def wait(self, agent: subprocess.Popen[bytes]) -> int | None:
        """torchrun's exit status, or None when the time limit came first, or that of a step."""
        self.heard = time.monotonic()
        while (left := min(self.deadline, self.heard + self.patience) - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(min(POLL_SECONDS, max(0.01, left)))
            self.follow()
            if agent.returncode is not None:
                return agent.returncode
        self.stalled, self.stopped = time.monotonic() < self.deadline, ask_where(agent.pid, self.id)
        return None

    def late(self, limit: str, step_limit: str) -> dict[str, Any]:
        """The result of a run for which `wait` gave None."""
        where = whereabouts(self.reader.path, self.logs, self.stopped)
        if self.stalled:
            return self.end("timeout", "Stalled", f"no step ended for {step_limit}: {where}")
        return self.end("timeout", "Timeout", f"the run took longer than {limit}: {where}")

    def failed(self, code: int) -> dict[str, Any]:
        """The result of a run whose agent ended with this exit status because a rank failed."""
        before, now = self.oom_kills, oom_kills()
        kind, why = root_cause(self.logs, None if before is None or now is None else now - before)
        return self.end("error", kind, why or f"torchrun ended with exit status {code}")

    def searches_on(self, code: int | None) -> bool:
        """Whether ranks ended because memory ran out at a new length of a search: new ones go on with shorter ones."""
        if not self.config.search or code != 1:
            return False
        lost = {e["seq_len"] for e in ProgressReader(self.reader.path).read() if _ran_out(e)}
        new, self.lost = len(lost) > self.lost, len(lost)
        if new:
            self.before, self.logs = _version(self.out / "result.json"), self.logs.with_name(f"{self.id}.{len(lost)}")
            self.logs.mkdir(parents=True, exist_ok=True)
            for old in self.out.glob("failed.*") if self.writes else ():
                old.unlink(missing_ok=True)
        return new

    def end(self, status: str, kind: str = "", message: str = "") -> dict[str, Any]:
        """The worker's result. Where it wrote none, or `ok` and something failed after it, or an error because the run
        was ended (ranks that lose each other): one that says so.

        An error that the worker wrote gets the end of the logs.
        """
        result = None
        with contextlib.suppress(OSError, ValueError):
            if _version(self.out / "result.json") != self.before:
                result = results.read_result(self.out / "result.json")
        written = result
        alone = status == "error" and kind != "RankKilled"
        ended = () if status == "ok" else ("ok",) if alone else ("ok", "error")
        if result is None or result["status"] in ended:
            if kind == "RankKilled" and result and result["error"]:
                message += f"; after that, {results.why(result)}"
            error = {"type": kind, "message": message, "log_tail": log_tail(self.logs)}
            status = "error" if status == "ok" else status
            result = results.new_result(self.config, status, error=error, metrics=result and result["metrics"])
        elif result["status"] == "error" and not (result["error"] or {}).get("log_tail"):
            result = {**result, "error": {**(result["error"] or {}), "log_tail": log_tail(self.logs)}}
        if self.writes and result is not written:
            results.write_result(self.out / "result.json", result)
        self.follow({"time": time.time(), "event": "end", "row": self.config.row, "status": result["status"]})
        return result


def launch(
    config: RunConfig, out: str | os.PathLike[str], *, on_progress: Callable[[dict[str, Any]], None] | None = None,
    force: bool = False, python: str = sys.executable, nodes: Nodes = ONE_NODE, worker: str = workers.ABLATION,
    extra_env: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `config` under torchrun in the folder `out` and return its result (`ok` or `oom`).

    `out` gets config.json, progress.jsonl, logs/ and result.json. The worker writes result.json; where it could not,
    this function does. A run that cannot fit (`preflight.why_not`) is not started: its result is `oom` and says what
    would fit; `force` starts it. A finished run of the same configuration at the same commit is returned at once,
    unless `force`. With several nodes, call it once on each of them, with `out` on a file system that they share.

    Raises:
        RunFailed: the run ended with status `error`, `cancelled` (torchrun was ended from outside) or `timeout`.
        KeyboardInterrupt: an interrupt or SIGTERM of this process; the result says `cancelled`.
        ValueError: a configuration that this machine cannot run, or a folder in use; nothing was started.
        OSError: a file in `out` could not be written; an earlier result there is intact.
    """
    nnodes = nodes.count
    out, config = Path(out).resolve(), resolve(config, nnodes)
    rendezvous = meeting(config, nodes)
    if not force and (done := finished(config, out, nnodes)):
        return done
    workers.check(config, worker)
    if worker in workers.TRAINING:
        check_model(config.model)
    gpus = devices.device_count()
    foreseen = workers.planned(config, worker, gpus)
    first = nodes.rank == 0
    with locks.hold(out) if first else contextlib.nullcontext(), sigterm_interrupts():
        limit, which = time_limit(foreseen, nnodes, gpus, worker in workers.TRAINING)
        patience, which_step = step_limit(foreseen, nnodes, gpus, worker in workers.TRAINING)
        run = _Run(config, out, first, on_progress, limit, patience if first else math.inf)  # one node judges
        agent = code = None
        if not force and worker in workers.TRAINING and (why := why_not(foreseen, nnodes, gpus)):
            return run.end("oom", "WouldNotFit", why)
        # ranks end without tidying up, or are killed
        with tempfile.TemporaryDirectory(prefix="alst-", ignore_cleanup_errors=True) as temporary:
            extra = {"TMPDIR": temporary, DEADLINE_VARIABLE: str(time.time() + limit), **(extra_env or {})}
            env = environment(run.id, config.world_size // nnodes, extra, nnodes)
            try:
                while agent is None or run.searches_on(code):
                    stop(agent, run.id)  # what is left of ranks whose memory ran out
                    argv = command(config, out, run.logs, python, worker, rendezvous)
                    agent = start(argv, env, run.logs / "agent.log")
                    code = run.wait(agent)
            except BaseException as e:
                with contextlib.suppress(OSError):  # the result first: a kernel that shuts down gives little time
                    run.end("cancelled" if isinstance(e, KeyboardInterrupt) else "error", type(e).__name__, str(e))
                raise
            finally:
                stop(agent, run.id)
        if code is None:
            result = run.late(which, which_step)
        elif code == 0:
            result = run.end("ok", "NoResult", f"{worker} ended without writing result.json")
        elif code < 0 or code > 128:
            number = -code if code < 0 else code - 128
            result = run.end("cancelled", "Cancelled", f"torchrun was ended by signal {number}")
        else:
            result = run.failed(code)
    if result["status"] not in results.FINISHED:
        raise RunFailed(result, out)
    return result
