"""`alst status` says what runs, with its step and the time left; what finished, failed, is stale or never ran; and what
to type next.

A row runs while a process holds its folder's lock (`locks`): one that was killed is `interrupted`. Where it is and what
is left comes from its progress.jsonl, how it ended from its result.json.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig, flat
from alstlib.runs import launch, locks, results
from alstlib.runs.progress import ProgressReader, describe, first_failed, time_left
from alstlib.runs.sweeps import Spec, load_spec, read_record, shown, sweeps
from alstlib.tables import console, listed
from alstlib.units import format_seconds, format_tokens

FAILED = (*(s for s in results.STATUSES if s not in results.FINISHED), "interrupted", "unreadable")
"""States that `alst run --retry error` repeats."""
OPEN = ("running", "stale", "never run")
EXIT = (
    "Exit status: 0 when all rows are finished; 1 when a row failed or was interrupted; 3 when rows are running or not "
    "yet run; 2 when the command was refused."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a row stands. Its fields are what `--json` prints."""

    row: str
    folder: Path
    state: str
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
        """The log of the rank that failed first in the newest attempt. None where that attempt left none."""
        if not (self.folder / "progress.jsonl").exists():  # it ended before ranks started: the logs are older
            return None
        newest = max(self.folder.glob("logs/*/"), key=lambda folder: folder.stat().st_mtime, default=None)
        return newest and first_failed(newest)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    name: str
    folder: Path
    rows: Sequence[Row]
    spec: Spec | None = None
    holder: Mapping[str, Any] | None = None
    """What is known of the `alst run` that is at it."""
    problem: str | None = None
    """Why its spec cannot be used."""

    def named(self, *states: str) -> list[Row]:
        return [row for row in self.rows if row.state in states]

    def typed(self, verb: str, *flags: str) -> str:
        """The command that does it to this sweep: by its spec, or by its folder where that has none."""
        return self.spec.typed(verb, *flags) if self.spec else shlex.join(["alst", verb, shown(self.folder), *flags])

    def exit_status(self) -> int:
        return 1 if self.named(*FAILED) else 3 if self.named(*OPEN) else 0

    def counts(self) -> dict[str, int]:
        """Number of rows by their state."""
        return dict(Counter(row.state for row in self.rows))


def look(folder: Path, config: RunConfig | None, sweep: Mapping[str, Any] | None = None) -> Row:
    """How the row in a folder stands; `config` is what it should have run (resolved), `sweep` who runs its sweep."""
    now, running = time.time(), sweep or {}
    events = ProgressReader(folder / "progress.jsonl").read()
    last = events[-1] if events else {}
    began = float(events[0].get("time") or 0) if events else 0.0
    row = functools.partial(Row, row=folder.name, folder=folder, step=last.get("step"), steps=last.get("steps"))
    if locks.holder(folder) is not None or running.get("row") == folder.name:
        what = describe({**last, "row": ""}, now).removeprefix("run").strip()
        since = began or running.get("row_since", now)
        return row(state="running", what=what or "starting", seconds=now - since, left_seconds=time_left(last, now))
    try:
        result = results.read_result(folder / "result.json")
    except FileNotFoundError:
        begun = (folder / "config.json").exists()
        return row(state="interrupted", what=_cut_off(last, now)) if begun else row(state="never run")
    except (OSError, ValueError) as e:
        return row(state="unreadable", what=str(e))
    ended = datetime.datetime.fromisoformat(result["finished"]).timestamp()
    current = config is None or launch.finished(config, folder) is not None
    if int(began) > ended and not current:
        return row(state="interrupted", what=_cut_off(last, now))
    state, seconds = result["status"], ended - began if 0 < began <= ended else None
    if config and not current and state in results.FINISHED:
        return row(state="stale", what=f"{state} {_stale(result, config)}", seconds=seconds)
    return row(state=state, what=_ended(result), seconds=seconds)


def _cut_off(last: Mapping[str, Any], now: float) -> str:
    if not last:
        return "ended before it reported any progress"
    ago, said = format_seconds(now - last.get("time", now)), describe({**last, "eta_seconds": None})
    return f"ended without a result {ago} ago, after: {said}"


def _ended(result: Mapping[str, Any]) -> str:
    """A line: what was measured, or why it failed."""
    if result["error"]:
        return results.why(result).strip().partition("\n")[0]
    metrics, seconds = result["metrics"], results.step_seconds(result["metrics"])
    length = f"{format_tokens(metrics['seq_len'])} tokens" if metrics.get("seq_len") else ""
    return ", ".join(filter(None, [length, f"{format_seconds(seconds)} for each step" if seconds else ""]))


def _stale(result: Mapping[str, Any], config: RunConfig) -> str:
    """Why a result is not that of today."""
    then, now = flat(result["config"]), flat(config.to_dict())
    if set(result["config"]) != set(config.to_dict()):
        return "with another set of fields of RunConfig"
    changed = ", ".join(f"{n}={then.get(n)!r} (now {v!r})" for n, v in now.items() if then.get(n) != v)
    return f"with {changed}" if changed else f"at another commit, {str(result['git'].get('sha'))[:10]}"


# Sweeps


def of_spec(spec: Spec) -> Sweep:
    holder = locks.holder(spec.out)
    rows = [look(spec.out / name, config, holder) for name, config in spec.rows.items()]
    return Sweep(name=spec.name, folder=spec.out, rows=rows, spec=spec, holder=holder)


def of_folder(folder: Path) -> Sweep:
    """By the spec that `alst run` left named there; without one, what the folder holds: runs, or the files of one."""
    record, problem = read_record(folder), None
    if record.get("spec"):
        try:
            return of_spec(load_spec(folder.resolve() / record["spec"], folder, as_run=True))
        except ValueError as e:
            problem = f"its spec cannot be read, so it is not known which rows are stale: {e}"
    runs = [folder] if _is_run(folder) else filter(_is_run, sorted(folder.glob("*/")))
    rows = [look(path, None) for path in runs]
    name = record.get("name") or folder.resolve().name
    return Sweep(name=name, folder=folder, rows=rows, holder=locks.holder(folder), problem=problem)


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "result.json"))


def following(sweep: Sweep) -> list[tuple[str, str]]:
    """Commands to type next, each with its reason."""
    failed, waiting, commands = sweep.named(*FAILED), sweep.named("stale", "never run"), []
    if failed and (log := failed[0].log()):
        commands.append((shlex.join(["less", shown(log)]), f"see why {failed[0].row} failed"))
    if sweep.spec and not sweep.holder:
        if failed:
            commands.append((sweep.typed("run", "--retry", "error"), f"repeat {_names(failed)}"))
        if waiting:
            commands.append((sweep.typed("run"), f"run {_names([*waiting, *failed])}"))
    if sweep.named("running"):
        commands.append((shlex.join(["watch", "-n", "5", sweep.typed("status")]), "follow the progress"))
    if any((row.folder / "result.json").exists() for row in sweep.rows):
        commands.append((sweep.typed("report"), "see the table and write a page"))
    return commands


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.row for row in rows) if len(rows) <= 4 else f"{len(rows)} rows"


def as_json(sweep: Sweep) -> dict[str, Any]:
    """What programs read. Seconds, and times since the epoch."""
    return {
        **vars(sweep), "spec": sweep.spec and sweep.spec.path, "counts": sweep.counts(),
        "rows": [{**vars(row), "log": row.log() if row.state in FAILED else None} for row in sweep.rows],
        "next": [{"command": command, "why": why} for command, why in following(sweep)],
    }  # fmt: skip


# What people read


def show(sweep: Sweep) -> None:
    """Print a table of the rows, and the commands that follow."""
    print(f"{sweep.name}: {len(sweep.rows)} row{'s' * (len(sweep.rows) != 1)} in {shown(sweep.folder)}")
    if sweep.holder:
        at = sweep.holder.get("row")
        print(f"run by {locks.describe(sweep.holder)}{f', at {at}' if at else ''}")
    if sweep.problem:
        print(sweep.problem)
    times = ["" if row.seconds is None else format_seconds(row.seconds) for row in sweep.rows]
    rows = [[row.row, row.state, seconds, row.what] for row, seconds in zip(sweep.rows, times)]
    print()
    console().print(listed(["row", "state", "time", ""], rows))
    if commands := following(sweep):
        print("\nnext:")
    for command, why in commands:
        print(f"  {command}   # {why}")


def overview(found: Sequence[Sweep]) -> None:
    """Print one line for each sweep, and the rows of those that run or whose spec cannot be used."""
    rows = []
    for sweep in found:
        counts = ", ".join(f"{number} {state}" for state, number in sweep.counts().items())
        rows.append([sweep.name, counts, sweep.typed("status" if sweep.spec else "report")])
    console(width=1000).print(listed(["sweep", "rows", "next"], rows))  # a command that is cut cannot be typed
    for sweep in found:
        if sweep.problem or sweep.named("running"):
            print()
            show(sweep)


def status(args: argparse.Namespace) -> int:
    """`alst status`: of one sweep, named by its spec or its folder, or of all below papermill_runs/out; see EXIT."""
    if args.out and (args.spec is None or args.spec.is_dir()):
        raise ValueError(f"--out {args.out} needs a spec; for the status of a folder, type: alst status {args.out}")
    if args.spec is None:
        found = [of_folder(path) for path in sweeps()]
    elif args.spec.is_dir():
        found = [of_folder(args.spec)]
    else:
        found = [of_spec(load_spec(args.spec, args.out, as_run=True))]
    if args.spec and not found[0].rows and not found[0].problem:
        raise ValueError(f"the folder {args.spec} has no runs; name a spec, or the folder of a sweep or of one run")
    if args.json:
        made = [as_json(sweep) for sweep in found]
        print(json.dumps(made[0] if args.spec else made, indent=2, default=str))
    elif args.spec:
        show(found[0])
    elif found:
        overview(found)
    else:
        print(f"there are no runs below {launch.default_home() / launch.OUT}; start some with: alst run SPEC")
    codes = {sweep.exit_status() for sweep in found}
    return next((code for code in (1, 3) if code in codes), 0)
