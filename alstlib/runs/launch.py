"""Start torchrun from a notebook or a script, follow its progress, and leave no process behind.

Logs go to files, never through a notebook's kernel; `processes` says how nothing is left.
Imports neither torch nor transformers: a kernel that launches must not hold a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig
from alstlib.hf.configs import check_model
from alstlib.planner import devices
from alstlib.planner.preflight import step_limit, time_limit, why_not
from alstlib.runs import cluster, locks, results, workers
from alstlib.runs.cluster import Nodes
from alstlib.runs.node_reports import LOST, cause, failures, lost, read_reports
from alstlib.runs.processes import (
    GRACE_SECONDS,
    WARNED,
    allow_open_files,
    ask_where,
    die_with_parent,
    kills_since,
    oom_kills,
    sigterm_interrupts,
    stop,
    warnings_call,
)
from alstlib.runs.progress import Printer as progress_printer
from alstlib.runs.progress import Progress, ProgressReader, log_tail, root_cause, whereabouts
from alstlib.runs.torchrun import LAUNCHER_LOG, Attempt, bound, free_port
from alstlib.units import format_seconds

__all__ = ["Progress", "RunFailed", "die_with_parent", "finished", "launch", "progress_printer", "resolve"]

OUT = Path("papermill_runs", "out")
ONE_NODE = Nodes()
POLL_SECONDS = 1.0
SETTLE_SECONDS = 5.0
"""Seconds after one node failed, in which others may say that they failed too: the first is not always heard first."""
ASKED_SECONDS = 4.0
"""Seconds that several nodes have to say where their ranks are."""


class RunFailed(RuntimeError):
    """A run ended with status `error`, `cancelled` or `timeout`; `result` is its `result.json`."""

    def __init__(self, result: dict[str, Any], out: Path) -> None:
        error = result.get("error") or {}
        tail = f"\n{error['log_tail']}" if error.get("log_tail") else ""
        super().__init__(f"{result['status']}: {results.why(result)} (in {out}){tail}")
        self.result = result


# What a run gets


def resolve(config: RunConfig, nnodes: int | None = None, gpus: int | None = None) -> RunConfig:
    """The configuration with `world_size=0` and `sp=0` replaced by what this machine has, or one of `gpus` GPUs, on so
    many nodes; None: on those that `cluster.told` finds.

    Raises:
        ValueError: more ranks than GPUs, ranks that do not divide into nodes, or sp that does not divide the ranks.
    """
    gpus = devices.device_count() if gpus is None else gpus
    nnodes = node_count(config) if nnodes is None else nnodes
    world = config.engine.world_size or (gpus or 2) * nnodes
    if world % nnodes:
        nearest = max(1, round(world / nnodes)) * nnodes
        raise ValueError(
            f"engine.world_size={world} ranks do not divide evenly over {nnodes} nodes; nearest: {nearest}"
        )
    if gpus and world // nnodes > gpus:
        raise ValueError(
            f"engine.world_size={world} needs more GPUs than there are ({gpus} on each node); use at most "
            f"{gpus * nnodes}"
        )
    sp = config.engine.sp or world
    if world % sp:
        fitting = max(d for d in range(1, world + 1) if world % d == 0 and d <= sp)
        raise ValueError(
            f"engine.sp={sp} does not divide engine.world_size={world}; use engine.sp={fitting}, or "
            f"engine.world_size={sp}"
        )
    return config.replace(engine={"world_size": world, "sp": sp})


def node_count(config: RunConfig, nodes: int | None = None) -> int:
    """Number of nodes that a run takes, of `nodes` or else of `cluster.told`: an emulated rank takes one."""
    return 1 if config.emulate else cluster.told().count if nodes is None else nodes


def finished(config: RunConfig, out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The result in `out` if it is `ok` or `oom` and of this configuration at this commit, else None.

    A configuration that is resolved already may be that of another machine.
    """
    try:
        result = results.read_result(Path(out) / "result.json")
    except (OSError, ValueError):
        return None
    resolved = config if config.engine.world_size and config.engine.sp else resolve(config)
    same = result["run_id"] == results.run_id(resolved)
    return result if same and result["status"] in results.FINISHED else None


# The run


def default_home() -> Path:
    """The folder with papermill_runs/out, where results go: the working folder or the first one above it that has a
    papermill_runs; where none has, the working folder."""
    here = Path.cwd()
    return next((p for p in (here, *here.parents) if (p / OUT.parent).is_dir()), here)


def default_folder(config: RunConfig) -> Path:
    """Where a single run goes that was given no folder."""
    return default_home() / OUT / "single" / f"{config.row or 'run'}-{results.run_id(resolve(config))}"


class _Run:
    """One run: what was in the folder before it, its attempts, and what came of it."""

    def __init__(
        self, config: RunConfig, out: Path, on_progress: Callable[..., None] | None, nodes: Nodes = ONE_NODE,
        limit: float = math.inf, patience: float = math.inf,
    ) -> None:  # fmt: skip
        self.config, self.out, self.on_progress, self.nodes = config, out, on_progress, nodes
        self.deadline, self.patience, self.lost = time.monotonic() + limit, patience, 0
        self.heard, self.stalled, self.stopped = time.monotonic(), False, list[int]()
        self.oom_kills = oom_kills()
        self.agent: subprocess.Popen[bytes] | None = None
        """torchrun on one node; on several nodes the launcher, such as srun."""
        self.program = nodes.launcher[0] if nodes.launcher else "torchrun"
        self.over = ""
        """How it ended by itself; empty where it did not."""
        self.whole_id = self.id = f"{results.run_id(config)}-{uuid.uuid4().hex[:8]}"
        self.reader = ProgressReader(out / "progress.jsonl")
        self.before = results.version(out / "result.json")
        self.logs.mkdir(parents=True, exist_ok=True)
        results.write_json(out / "config.json", config.to_dict())
        for old in (self.reader.path, out / WARNED, *out.glob("failed.*")):
            old.unlink(missing_ok=True)
        ranks = f"{config.engine.world_size} rank{'s' if config.engine.world_size > 1 else ''}"
        on = f" on {nodes.count} nodes" if nodes.count > 1 else ""
        ends = f"; the time limit is {format_seconds(limit)}" if limit < math.inf else ""
        self.say("start", f"starting {ranks}{on}{ends}", run_id=self.id)

    def say(self, event: str, message: str, **fields: Any) -> None:
        Progress(self.reader.path).emit(event, row=self.config.row, message=message, **fields)

    @property
    def logs(self) -> Path:
        """Log folder of the newest attempt."""
        return self.out / "logs" / self.id

    @property
    def launcher_log(self) -> Path:
        """What the launcher of several nodes and their agents said; no file on one node."""
        return self.logs / LAUNCHER_LOG

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

    def begin(self, worker: str, temporary: str, env: Mapping[str, str]) -> None:
        """Start an attempt on every node; what is left of the one before is ended."""
        self.stop()
        attempt = Attempt(
            id=self.id, config=self.config.to_dict(), out=str(self.out), worker=worker, nodes=self.nodes.count,
            head=self.nodes.head, port=free_port(self.nodes.head) if self.nodes.launcher else 0,
            deadline=time.time() + self.deadline - time.monotonic(), env=env,
        )  # fmt: skip
        self.agent = attempt.begin(self.nodes.launcher, temporary)

    def stop(self) -> None:
        """End the ranks of every node. SIGTERM would have srun kill them at once; SIGUSR2 it hands on, and the agents
        take it for SIGTERM. Launchers that do not know this signal end by it, and then their agents end too."""
        try:
            if self.nodes.launcher and self.agent is not None and self.agent.poll() is None:
                self.agent.send_signal(signal.SIGUSR2)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.agent.wait(GRACE_SECONDS)
        finally:
            stop(self.agent, self.id)

    def wait(self) -> int | None:
        """The exit status of torchrun, or of the launcher; 1 where a node failed, and the launcher waits for others.
        None when the time limit came first, or that of a step."""
        assert self.agent is not None
        self.heard, self.over, settled = time.monotonic(), "", math.inf
        while True:
            left = min(self.deadline, self.heard + self.patience, settled) - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(max(0.01, min(POLL_SECONDS, left)))
            self.follow()
            failed = bool(failures(read_reports(self.launcher_log)))
            if (code := self.agent.returncode) is not None:
                self.over = f"{self.program} ended with exit status {code}"
                return code or int(failed)
            if failed:
                if left <= 0 and settled < math.inf:
                    return 1
                settled = min(settled, time.monotonic() + SETTLE_SECONDS)
            elif left <= 0:
                self.stalled = time.monotonic() < self.deadline
                self.stopped = self.ask_where(self.agent)
                return None

    def ask_where(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """Have all ranks write down where they are; returns those that are stopped."""
        if not self.nodes.launcher:
            return ask_where(agent.pid, self.id)
        agent.send_signal(signal.SIGUSR1)  # srun and mpirun hand it on
        time.sleep(ASKED_SECONDS)
        return sorted(rank for report in read_reports(self.launcher_log) for rank in report.get("stopped", ()))

    def late(self, limit: str, step_limit: str) -> dict[str, Any]:
        """The result of a run for which `wait` gave None."""
        where = whereabouts(self.reader.path, self.logs, self.stopped)
        if self.stalled:
            return self.end("timeout", "Stalled", f"no step ended for {step_limit}: {where}")
        return self.end("timeout", "Timeout", f"the run took longer than {limit}: {where}")

    def ended(self, code: int, worker: str) -> dict[str, Any]:
        """The result of a run whose agent or launcher ended with this exit status."""
        reports = read_reports(self.launcher_log)
        if code == 0:
            return self.end("ok", "NoResult", f"{worker} ended without writing result.json")
        if code < 0 or (code > 128 and not failures(reports) and not lost(reports)):
            number = -code if code < 0 else code - 128
            return self.end("cancelled", "Cancelled", f"{self.program} was ended by signal {number}")
        if self.nodes.launcher:
            return self.end("error", *cause(self.launcher_log, self.nodes.count, self.over))
        kind, why = root_cause(self.logs, kills_since(self.oom_kills))
        return self.end("error", kind, why or f"torchrun ended with exit status {code}")

    def searches_on(self, code: int | None) -> bool:
        """Whether ranks ended because memory ran out at a new length of a search: new ones go on with shorter ones."""
        if not self.config.search or code != 1:
            return False
        tried = [event for event in ProgressReader(self.reader.path).read() if event.get("event") == "tried"]
        lost = {event["seq_len"] for event in tried if event.get("peak") is None}
        new, self.lost = len(lost) > self.lost, len(lost)
        if new:
            self.stop()
            self.before, self.id = results.version(self.out / "result.json"), f"{self.whole_id}.{len(lost)}"
            self.logs.mkdir(parents=True, exist_ok=True)
        return new

    def end(self, status: str, kind: str = "", message: str = "") -> dict[str, Any]:
        """The worker's result. Where it wrote none, or `ok` and something failed after it, or an error because the run
        was ended (ranks that lose each other): one that says so.

        An error that the worker wrote gets the end of the logs.
        """
        result: Any = None
        written = None
        with contextlib.suppress(OSError, ValueError):
            open(self.out / "result.json").close()  # a shared file system asks its server at an open, and not before
            if results.version(self.out / "result.json") != self.before:
                result = written = results.read_result(self.out / "result.json")
        alone = status == "error" and kind not in LOST
        ended = () if status == "ok" else ("ok",) if alone else ("ok", "error")
        if result is None or result["status"] in ended:
            if kind in LOST and result and result["error"]:
                message += f"; after that, {results.why(result)}"
            error = {"type": kind, "message": message, "log_tail": log_tail(self.logs)}
            status = "error" if status == "ok" else status
            result = results.new_result(self.config, status, error=error, metrics=result and result["metrics"])
        elif result["status"] == "error" and not (result["error"] or {}).get("log_tail"):
            result = {**result, "error": {**(result["error"] or {}), "log_tail": log_tail(self.logs)}}
        if result is not written:
            results.write_result(self.out / "result.json", result)
        self.follow({"time": time.time(), "event": "end", "row": self.config.row, "status": result["status"]})
        return result


def launch(
    config: RunConfig, out: str | os.PathLike[str], *, on_progress: Callable[[dict[str, Any]], None] | None = None,
    force: bool = False, worker: str = workers.ABLATION, extra_env: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `config` under torchrun in the folder `out` and return its result (`ok` or `oom`).

    `out` gets config.json, progress.jsonl, logs/ and result.json. The worker writes result.json; where it could not,
    this function does. A run that cannot fit (`preflight.why_not`) is not started: its result is `oom` and says what
    would fit; `force` starts it, and many more ranks than cores. A finished run of the same configuration at the same
    commit is returned at once, unless `force`. Where `alst run` or variables name a launcher (`cluster.told`), the
    ranks are on several nodes.

    SIGUSR1 says that the time is nearly up: a run with `checkpoint_every` saves its state after the step that runs.

    Raises:
        RunFailed: the run ended with status `error`, `cancelled` (torchrun was ended from outside) or `timeout`.
        KeyboardInterrupt: an interrupt or SIGTERM of this process; the result says `cancelled`.
        ValueError: a configuration that this machine cannot run, or a folder in use; nothing was started.
        OSError: a file in `out` could not be written; an earlier result there is intact.
    """
    nodes = ONE_NODE if config.emulate else cluster.told()
    out, config = Path(out).resolve(), resolve(config, nodes.count)
    if not force and (done := finished(config, out)):
        return done
    allow_open_files()
    workers.check(config, worker)
    if trains := worker in workers.TRAINING:
        check_model(config.model.name)
    gpus = devices.device_count()
    if not force:
        workers.check_ranks(config.engine.world_size, nodes.count, gpus)
    foreseen = workers.planned(config, worker, gpus)
    with locks.hold(out), warnings_call((out / WARNED).touch), sigterm_interrupts():
        limit, which = time_limit(foreseen, nodes.count, gpus, trains)
        if (rest := cluster.job_seconds()) is not None and rest < limit:
            nothing = (
                ""
                if config.output.checkpoint_every or not trains
                else " (without output.checkpoint_every no state is saved)"
            )
            limit, which = rest, f"its job allows, {format_seconds(rest)}{nothing}"
        patience, which_step = step_limit(foreseen, nodes.count, gpus, trains)
        run = _Run(config, out, on_progress, nodes, limit, patience)
        code = None
        # ranks end without tidying up, or are killed
        with tempfile.TemporaryDirectory(prefix="alst-", ignore_cleanup_errors=True) as temporary:
            try:
                if not force and trains and (why := why_not(foreseen, nodes.count, gpus)):
                    return run.end("oom", "WouldNotFit", why)
                if why := bound(config.engine.world_size // nodes.count):
                    run.say("load", why)
                while run.agent is None or run.searches_on(code):
                    run.begin(worker, temporary, extra_env or {})
                    code = run.wait()
            except BaseException as e:
                with contextlib.suppress(OSError):  # the result first: a kernel that shuts down gives little time
                    run.end("cancelled" if isinstance(e, KeyboardInterrupt) else "error", type(e).__name__, str(e))
                raise
            finally:
                run.stop()
        result = run.late(which, which_step) if code is None else run.ended(code, worker)
    if result["status"] not in results.FINISHED:
        raise RunFailed(result, out)
    return result
