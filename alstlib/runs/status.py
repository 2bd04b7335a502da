"""`alst status` says what runs, with its step and the time left; what finished, failed, is stale or never ran; and what
to type next.

A row runs while a process holds its folder's lock (`locks`): one that was killed is `interrupted`. Where it is and what
is left comes from its progress.jsonl, how it ended from its result.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alstlib.base.config import RunConfig, flat
from alstlib.base.units import format_seconds, format_tokens
from alstlib.planner.tables import console, listed
from alstlib.runs import launch, locks, results
from alstlib.runs.progress import ProgressReader, describe, first_failed, time_left
from alstlib.runs.results import Json, differences
from alstlib.runs.sweeps import Spec, opened, shown, sweeps

FAILED = (*(s for s in results.STATUSES if s not in results.FINISHED), "interrupted", "unreadable")
"""Statuses of a row that failed."""
EXIT = (
    "Exit status: 0 when all rows are finished; 1 when a row failed or was interrupted; 3 when rows are running or not "
    "yet run; 2 when the command was refused."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a row stands. Its fields are what `--json` prints."""

    row: str
    folder: Path
    status: str
    """running, ok, oom, stale, error, timeout, cancelled, interrupted, unreadable, or never run."""
    what: str = ""
    """A line for people."""
    seconds: float | None = None
    """How long it has run, or took."""
    left_seconds: float | None = None
    step: int | None = None
    """The step of its last line of progress."""
    steps: int | None = None

    def log(self) -> Path | None:
        """The log of a row that failed: that of the rank that failed first in the newest attempt. None where that
        attempt left none."""
        attempts = sorted(self.folder.glob("logs/*/"), key=lambda folder: folder.stat().st_mtime)
        began = (self.folder / "progress.jsonl").exists()  # else it ended before ranks started: the logs are older
        return first_failed(attempts[-1]) if self.status in FAILED and began and attempts else None


def look(folder: Path, config: RunConfig | None, sweep: Json | None = None) -> Row:
    """How the row in a folder stands; `config` is what it should have run (resolved), `sweep` who runs its sweep."""
    now, running = time.time(), sweep or {}
    events = ProgressReader(folder / "progress.jsonl").read()
    last = events[-1] if events else {}
    began = events[0]["time"] if events else running.get("row_since", now)

    def row(status: str, what: str = "", **times: Any) -> Row:
        return Row(row=folder.name, folder=folder, status=status, what=what, step=last.get("step"),
                   steps=last.get("steps"), **times)  # fmt: skip

    if locks.holder(folder) is not None or running.get("row") == folder.name:
        what = describe(last, now) or "starting"
        return row("running", what, seconds=now - began, left_seconds=time_left(last, now))
    said = describe({**last, "eta_seconds": None}) or "its start"
    cut_off = row("interrupted", f"ended without a result, after: {said}")
    try:
        result = results.read_result(folder / "result.json")
    except FileNotFoundError:
        return cut_off if (folder / "config.json").exists() else row("never run")
    except (OSError, ValueError) as e:
        return row("unreadable", str(e))
    ended = datetime.datetime.fromisoformat(result["finished"]).timestamp()
    stale = config is not None and launch.finished(config, folder) is None
    if stale and events and int(began) > ended:
        return cut_off
    took = ended - began if events and began <= ended else None
    if config and stale and result["status"] in results.FINISHED:
        now_set = flat(config.to_dict())
        changed = differences(flat(result["config"]), now_set, now_set)
        why = f"with {', '.join(changed)}" if changed else f"at another commit, {result['git']['sha']:.10}"
        return row("stale", f"{result['status']} {why}", seconds=took)
    length, seconds = result["metrics"].get("seq_len"), results.step_seconds(result["metrics"])
    measured = f"{format_tokens(length)} tokens, {format_seconds(seconds)} for each step" if seconds and length else ""
    return row(result["status"], results.why(result).partition("\n")[0] or measured, seconds=took)


# Sweeps


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How the rows of a sweep stand. Its fields are what `--json` prints."""

    name: str
    folder: Path
    spec: Path | None
    holder: Json | None
    """What is known of the `alst run` that is at it."""
    problem: str
    """Why its spec cannot be used."""
    counts: Mapping[str, int]
    """Number of rows by their status."""
    rows: Sequence[Row]
    next: Mapping[str, str]
    """Commands to type next, each with its reason."""


def look_at(source: Path, out: str | Path | None = None) -> Sweep:
    """A sweep by its spec or by its folder; without a spec, what the folder holds: runs, or the files of one."""
    folder, spec, problem = opened(source, out)
    holder = locks.holder(folder)
    if spec:
        rows = [look(folder / name, config, holder) for name, config in spec.rows.items()]
    else:
        rows = [look(path, None) for path in (folder, *sorted(folder.glob("*/"))) if _is_run(path)]
    return Sweep(
        name=spec.name if spec else folder.resolve().name, folder=folder, spec=spec.path if spec else None,
        holder=holder, problem=problem, counts=Counter(row.status for row in rows), rows=rows,
        next=_following(folder, spec, rows, holder),
    )  # fmt: skip


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "result.json"))


def _following(folder: Path, spec: Spec | None, rows: Sequence[Row], holder: Json | None) -> dict[str, str]:
    def typed(verb: str) -> str:
        return spec.typed(verb) if spec else shlex.join(["alst", verb, shown(folder)])

    failed, following = [row for row in rows if row.status in FAILED], {}
    if failed and (log := failed[0].log()):
        following[shlex.join(["less", shown(log)])] = "see why the first of them failed"
    if spec and not holder and any(row.status not in results.FINISHED for row in rows):
        following[typed("run")] = "run all that is not finished"
    if any((row.folder / "result.json").exists() for row in rows):
        following[typed("report")] = "see the table and write a page"
    return following


# What people read


def show(sweep: Sweep) -> None:
    """Print a table of the rows, and the commands that follow."""
    print(f"{sweep.name}: {len(sweep.rows)} rows in {shown(sweep.folder)}")
    if sweep.holder:
        print(f"run by {locks.describe(sweep.holder)}, at {sweep.holder.get('row', 'its start')}")
    print(sweep.problem)
    times = ("" if row.seconds is None else format_seconds(row.seconds) for row in sweep.rows)
    rows = [[row.row, row.status, seconds, row.what] for row, seconds in zip(sweep.rows, times)]
    console().print(listed(["row", "status", "time", ""], rows))
    for command, why in sweep.next.items():
        print(f"next: {command}   # {why}")


def status(args: argparse.Namespace) -> int:
    """`alst status`: of one sweep, named by its spec or its folder, or of all below papermill_runs/out; see EXIT."""
    if args.out and args.spec is None:
        raise ValueError(f"--out {args.out} needs a spec")
    found = [look_at(path, args.out) for path in ([args.spec] if args.spec else sweeps())]
    if args.spec and not found[0].rows and not found[0].problem:
        raise ValueError(f"the folder {args.spec} has no runs; name a spec, or the folder of a sweep or of one run")
    if args.json:
        made = [{**vars(sweep), "rows": [{**vars(row), "log": row.log()} for row in sweep.rows]} for sweep in found]
        print(json.dumps(made[0] if args.spec else made, indent=2, default=str))
    elif args.spec:
        show(found[0])
    elif found:
        rows = []
        for sweep in found:
            counts = ", ".join(f"{number} {status}" for status, number in sweep.counts.items())
            rows.append([sweep.name, counts, sweep.problem or shlex.join(["alst", "status", shown(sweep.folder)])])
        console(width=1000).print(listed(["sweep", "rows", "next"], rows))  # a command that is cut cannot be typed
    else:
        print(f"there are no runs below {launch.default_home() / launch.OUT}; start some with: alst run SPEC")
    statuses = {status for sweep in found for status in sweep.counts} - {*results.FINISHED}
    return 1 if statuses & {*FAILED} else 3 if statuses else 0
