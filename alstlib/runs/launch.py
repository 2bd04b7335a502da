"""Start torchrun from a notebook or a script, follow its progress, and leave no process behind.

Logs go to files, never through a notebook's kernel; `processes` says how nothing is left.
Imports neither torch nor transformers: a kernel that launches must not hold a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from alstlib.base.config import RunConfig
from alstlib.base.units import format_seconds
from alstlib.planner import devices
from alstlib.planner.preflight import step_limit, time_limit, why_not
from alstlib.runs import cluster, locks, results, workers
from alstlib.runs.cluster import Nodes
from alstlib.runs.processes import (
    GRACE_SECONDS,
    WARNED,
    sigterm_interrupts,
    stop,
    warnings_call,
)
from alstlib.runs.progress import Printer as progress_printer
from alstlib.runs.progress import Progress, ProgressReader, log_tail, whereabouts
from alstlib.runs.results import Json
from alstlib.runs.torchrun import LOST, Attempt, cause, failures, lost, read_reports

__all__ = ["RunFailed", "finished", "launch", "progress_printer", "resolve"]

OUT = Path("papermill_runs", "out")
ONE_NODE = Nodes()
POLL_SECONDS = 1.0
SETTLE_SECONDS = 5.0
"""Seconds after one node failed, in which others may say that they failed too: the first is not always heard first."""
ASKED_SECONDS = 4.0
"""Seconds that the nodes have to say where their ranks are."""

Limit = tuple[float, str]
"""Seconds, and which limit this is."""


class RunFailed(RuntimeError):
    """A run ended with status `error`, `cancelled` or `timeout`; `result` is its `result.json`."""

    def __init__(self, result: Json, out: Path) -> None:
        tail = result["error"]["log_tail"]
        super().__init__(f"{result['status']}: {results.why(result)} (in {out})\n{tail}".rstrip())
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
    if world % nnodes or (gpus and world > gpus * nnodes):
        each = min(max(1, round(world / nnodes)), gpus or world)
        raise ValueError(
            f"engine.world_size={world} ranks do not divide evenly over {nnodes} nodes with "
            f"{gpus or 'no'} GPUs each; nearest: {each * nnodes}"
        )
    return config.replace(engine={"world_size": world, "sp": config.engine.sp or world})


def node_count(config: RunConfig, nodes: int | None = None) -> int:
    """Number of nodes that a run takes, of `nodes` or else of `cluster.told`: an emulated rank takes one."""
    return 1 if config.emulate else cluster.told().count if nodes is None else nodes


def finished(config: RunConfig, out: str | Path) -> Json | None:
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
        self, config: RunConfig, out: Path, worker: str, on_progress: Callable[..., None] | None, nodes: Nodes,
        env: Mapping[str, str] | None, limit: Limit,
    ) -> None:  # fmt: skip
        self.config, self.out, self.launcher, self.limit = config, out, nodes.launcher, limit
        self.on_progress = on_progress or (lambda event: None)
        self.attempt = Attempt(
            id=f"{results.run_id(config)}-{uuid.uuid4().hex[:8]}", ranks=config.engine.world_size // nodes.count,
            out=str(out), worker=worker, nodes=nodes.count, head=nodes.head, env=env or {},
            deadline=time.time() + limit[0],
        )  # fmt: skip
        self.agent: subprocess.Popen[bytes] | None = None
        """The agent of one node; on several nodes the launcher, such as srun."""
        self.lost = 0
        self.reader = ProgressReader(out / "progress.jsonl")
        self.before = results.version(out / "result.json")
        results.write_json(out / "config.json", config.to_dict())
        for old in (self.reader.path, out / WARNED, *out.glob("failed.*")):
            old.unlink(missing_ok=True)
        ranks = f"starting {config.engine.world_size} ranks on {nodes.count} nodes; {limit[1]}"
        Progress(self.reader.path).emit("start", row=config.row, message=ranks, run_id=self.attempt.id)

    def reports(self) -> list[Json]:
        """What the agents of the nodes said."""
        return read_reports(self.attempt.launcher_log)

    def follow(self, *more: Json) -> bool:
        """Hand on what the ranks said, or that time passes to a callback that has `tick`; whether they
        said something."""
        events = [*self.reader.read(), *more]
        for event in events:
            self.on_progress(event)
        if not events and (tick := getattr(self.on_progress, "tick", None)):
            tick()
        return bool(events)

    def stop(self) -> None:
        """End the ranks of every node. SIGTERM would have srun kill them at once; SIGUSR2 it hands on, and the agents
        take it for SIGTERM. Launchers that do not know this signal end by it, and then their agents end too."""
        try:
            if self.launcher and self.agent is not None and self.agent.poll() is None:
                self.agent.send_signal(signal.SIGUSR2)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.agent.wait(GRACE_SECONDS)
        finally:
            stop(self.agent, self.attempt.id)

    def outcome(self, step_limit: Limit) -> tuple[str, str, str]:
        """Start the ranks and wait for their end; returns the status, and the kind and the words of the error where the
        worker wrote no result."""
        attempt, heard = self.attempt, time.monotonic()
        self.agent = agent = attempt.begin(self.launcher, self.config.to_dict())
        while agent.poll() is None and not failures(self.reports()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(POLL_SECONDS)
            now = time.monotonic()
            heard = now if self.follow() else heard
            if time.time() > attempt.deadline:
                return "timeout", "Timeout", f"the run took longer than {self.limit[1]}: {self.whereabouts(agent)}"
            if now > heard + step_limit[0]:
                return "timeout", "Stalled", f"no step ended for {step_limit[1]}: {self.whereabouts(agent)}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(SETTLE_SECONDS)
        self.follow()
        program = self.launcher[0] if self.launcher else "torchrun"
        reports, code = self.reports(), agent.returncode or 0
        failed = failures(reports)
        if code == 0 and not failed:
            return "ok", "NoResult", f"{attempt.worker} ended without writing result.json"
        if code < 0 or (code > 128 and not failed and not lost(reports)):
            return "cancelled", "Cancelled", f"{program} was ended by signal {code - 128 if code > 0 else -code}"
        ended = "" if agent.returncode is None else f"{program} ended with exit status {code}"
        return "error", *cause(attempt.launcher_log, attempt.nodes, ended)

    def whereabouts(self, agent: subprocess.Popen[bytes]) -> str:
        """Where all ranks are: they are asked to write it down."""
        agent.send_signal(signal.SIGUSR1)  # srun and mpirun hand it on
        time.sleep(ASKED_SECONDS)
        return whereabouts(self.reader.path, self.attempt.logs())

    def searches_on(self) -> bool:
        """Whether ranks ended because memory ran out at a new length of a search: new ones go on with shorter ones."""
        tried = [event for event in ProgressReader(self.reader.path).read() if event["event"] == "tried"]
        lost = len({event["seq_len"] for event in tried if event["peak"] is None})
        if not self.config.search or lost == self.lost:
            return False
        self.lost, self.before = lost, results.version(self.out / "result.json")
        self.attempt = dataclasses.replace(self.attempt, id=f"{self.attempt.id.partition('.')[0]}.{lost}")
        return True

    def end(self, status: str, kind: str = "", message: str = "") -> Json:
        """The worker's result. Where it wrote none, or `ok` and something failed after it, or an error because the run
        was ended (ranks that lose each other): one that says so. An error gets the end of the logs.
        """
        path, result = self.out / "result.json", None
        with contextlib.suppress(OSError, ValueError):
            open(path).close()  # a shared file system asks its server at an open, and not before
            if results.version(path) != self.before:
                result = results.read_result(path)
        if kind in LOST and result and result["error"]:
            message += f"; after that, {results.why(result)}"
        overruled = ("ok",) if status == "error" and kind not in LOST else ("ok", "error")
        if result is None or (status != "ok" and result["status"] in overruled):
            status, metrics = "error" if status == "ok" else status, result and result["metrics"]
            error = {"type": kind, "message": message}
            result = results.new_result(self.config, status, error=error, metrics=metrics)
        if result["status"] not in results.FINISHED:
            result["error"] = {**(result["error"] or {}), "log_tail": log_tail(self.attempt.logs())}
        if result["status"] != "ok":
            results.write_result(path, result)
        self.follow({"time": time.time(), "event": "end", "row": self.config.row, "status": result["status"]})
        return result


def launch(
    config: RunConfig, out: str | Path, *, on_progress: Callable[[Json], None] | None = None,
    force: bool = False, worker: str = workers.ABLATION, extra_env: Mapping[str, str] | None = None,
) -> Json:  # fmt: skip
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
    workers.check(config, worker)
    trains, gpus = worker in workers.TRAINING, devices.device_count()
    if not force:
        workers.check_ranks(config.engine.world_size, nodes.count, gpus)
    foreseen = workers.planned(config, worker, gpus)
    with locks.hold(out), warnings_call((out / WARNED).touch), sigterm_interrupts():
        limit = time_limit(foreseen, nodes.count, gpus, trains)
        if (rest := cluster.job_seconds()) < limit[0]:
            limit = rest, f"its job allows, {format_seconds(rest)}"
        run = _Run(config, out, worker, on_progress, nodes, extra_env, limit)
        try:
            if not force and trains and (why := why_not(foreseen, nodes.count, gpus)):
                return run.end("oom", "WouldNotFit", why)
            step = step_limit(foreseen, nodes.count, gpus, trains)
            ended = run.outcome(step)
            while ended[0] == "error" and run.searches_on():
                run.stop()
                ended = run.outcome(step)
        except BaseException as e:
            with contextlib.suppress(OSError):  # the result first: a kernel that shuts down gives little time
                run.end("cancelled" if isinstance(e, KeyboardInterrupt) else "error", type(e).__name__, str(e))
            raise
        finally:
            run.stop()
        result = run.end(*ended)
    if result["status"] not in results.FINISHED:
        raise RunFailed(result, out)
    return result
