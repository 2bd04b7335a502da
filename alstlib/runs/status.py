"""`alst status` says what runs, with its step and the time left; what finished, failed, is stale or never ran; and what
to type next.

A row runs while a process holds its folder's lock (`locks`): one that was killed is `interrupted`. Where it is and what
is left comes from its progress.jsonl, how it ended from its result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig, flat
from alstlib.runs import launch, locks, results
from alstlib.runs.progress import ProgressReader, describe, first_failed, time_left
from alstlib.runs.sweeps import Spec, load_spec, read_record, shown, sweeps
from alstlib.units import format_seconds, format_tokens

WIDTH = 100
FAILED = (*(s for s in results.STATUSES if s not in results.FINISHED), "interrupted", "unreadable")
"""States that `alst run --retry error` repeats."""
OPEN = ("running", "stale", "never run")
EXIT = (
    "Exit status: 0 when all rows are finished; 1 when a row failed or was interrupted; 3 when rows are running or not "
    "yet run; 2 when the command was refused."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a row stands. Seconds; `what` is a line for people."""

    name: str
    folder: Path
    state: str
    """running, ok, oom, stale, error, timeout, cancelled, interrupted, unreadable, or never run."""
    what: str = ""
    seconds: float | None = None
    """That it has run, or took."""
    left: float | None = None
    event: Mapping[str, Any] = field(default_factory=dict)
    """Its last line of progress."""

    def log(self) -> Path | None:
        """The log to look at: that of the rank that failed first in the newest attempt. None where it left none."""
        events = ProgressReader(self.folder / "progress.jsonl").read()
        if not events:  # it ended before ranks started, and logs are of earlier attempts
            return None
        logs = [log for p in (self.folder / "logs").glob("*") if p.is_dir() and (log := first_failed(p))]
        newest = max(logs, key=lambda f: f.stat().st_mtime, default=None)
        began = int(_began(events))  # some file systems have whole seconds
        return newest if newest and newest.stat().st_mtime >= began else None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    name: str
    folder: Path
    spec: Spec | None
    holder: Mapping[str, Any] | None
    """Of the `alst run` that is at it."""
    rows: Sequence[Row]
    problem: str = ""
    """Why its spec cannot be used."""

    def named(self, *states: str) -> list[Row]:
        return [row for row in self.rows if row.state in states]

    def typed(self, verb: str, *flags: str) -> str:
        """The command that does it to this sweep: by its spec, or by its folder where that has none."""
        return self.spec.typed(verb, *flags) if self.spec else shlex.join(["alst", verb, shown(self.folder), *flags])

    def exit_status(self) -> int:
        return 1 if self.named(*FAILED) else 3 if self.named(*OPEN) else 0


def look(folder: Path, config: RunConfig | None, sweep: Mapping[str, Any] | None = None) -> Row:
    """How the row in a folder stands; `config` is what it should have run (resolved), `sweep` who runs its sweep."""
    now, row, made = time.time(), folder.name, functools.partial(Row, name=folder.name, folder=folder)
    holder = locks.holder(folder)
    events = ProgressReader(folder / "progress.jsonl").read()
    began = _began(events)
    last = events[-1] if events else {}
    if holder is not None or (sweep or {}).get("row") == row:
        what = describe({**last, "row": "", "step": None, "eta_seconds": None}, now) if last else "starting"
        since = began or (sweep or {}).get("row_since")
        seconds, what = now - since if since else None, what.removeprefix("run").strip()
        return made(state="running", what=what, event=last, seconds=seconds, left=time_left(last, now))
    try:
        result = results.read_result(folder / "result.json")
    except FileNotFoundError:
        if not (folder / "config.json").exists():
            return made(state="never run")
        return made(state="interrupted", what=_cut_off(last, now), event=last)
    except (OSError, ValueError) as e:
        return made(state="unreadable", what=str(e))
    current = config is None or launch.finished(config, folder) is not None
    ended = _epoch(result.get("finished"))
    took = ended - began if began and ended >= began else None
    state = str(result["status"])
    if not current and int(began) > ended:
        return made(state="interrupted", what=_cut_off(last, now), event=last)
    if state in results.FINISHED and not current and config is not None:
        return made(state="stale", what=f"{state} {_stale(result, config)}", seconds=took)
    return made(state=state, what=_ended(result), seconds=took, event=last)


def _began(events: Sequence[Mapping[str, Any]]) -> float:
    """When an attempt began, in seconds since the epoch; 0 where it said nothing."""
    return float(events[0].get("time") or 0) if events else 0.0


def _epoch(text: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.datetime.fromisoformat(text).timestamp()
    return 0.0


def _cut_off(last: Mapping[str, Any], now: float) -> str:
    if not last:
        return "ended before it reported any progress"
    where = f"step {last['step']}/{last.get('steps')}" if last.get("step") else str(last.get("message") or "")
    return f"ended without a result {format_seconds(max(0.0, now - last.get('time', now)))} ago, after: {where}"


def _ended(result: Mapping[str, Any]) -> str:
    """A line: what was measured, or why it failed."""
    if result.get("error"):
        return next(iter(results.why(result).strip().splitlines()), "")
    metrics = result["metrics"]
    seconds = results.step_seconds(metrics)
    parts = [f"{format_tokens(metrics['seq_len'])} tokens"] if metrics.get("seq_len") else []
    return ", ".join([*parts, *([f"{format_seconds(seconds)} for each step"] if seconds else [])])


def _stale(result: Mapping[str, Any], config: RunConfig) -> str:
    """Why a result is not that of today."""
    then, now = flat(result["config"]), flat(config.to_dict())
    changed = [f"{n}={then.get(n)!r} (now {v!r})" for n, v in now.items() if n in then and then[n] != v]
    if changed or set(then) != set(now):
        return f"with {', '.join(changed)}" if changed else "with another set of fields of RunConfig"
    return f"at another commit, {str(result['git'].get('sha'))[:10]}"


# Sweeps


def of_spec(spec: Spec) -> Sweep:
    holder = locks.holder(spec.out)
    rows = [look(spec.out / name, config, holder) for name, config in spec.rows.items()]
    return Sweep(name=spec.name, folder=spec.out, spec=spec, holder=holder, rows=rows)


def of_folder(folder: Path) -> Sweep:
    """By the spec that `alst run` left named there; without one, what the folder holds: runs, or the files of one."""
    if any((folder / name).exists() for name in ("config.json", "result.json")):
        around = folder.resolve().parent
        sweep = of_folder(around) if read_record(around) else None
        if sweep and (rows := [row for row in sweep.rows if row.folder.resolve() == folder.resolve()]):
            return replace(sweep, rows=rows)
        return Sweep(name=folder.resolve().name, folder=folder, spec=None, holder=None, rows=[look(folder, None)])
    record, problem = read_record(folder), ""
    if record.get("spec"):
        try:
            return of_spec(load_spec(folder.resolve() / record["spec"], folder, as_run=True))
        except ValueError as e:
            problem = str(e)
    found = sorted(p.parent for p in folder.glob("*/config.json"))
    holder = locks.holder(folder)
    rows = [look(p, None, holder) for p in found]
    name = str(record.get("name") or folder.name)
    return Sweep(name=name, folder=folder, spec=None, holder=holder, rows=rows, problem=problem)


def following(sweep: Sweep) -> list[tuple[str, str]]:
    """Commands to type next, each with its reason."""
    failed, commands = sweep.named(*FAILED), []
    for row in failed[:1]:
        if log := row.log():
            commands.append((shlex.join(["less", shown(log)]), f"see why {row.name} failed"))
    if sweep.spec and not sweep.holder:
        if failed:
            commands.append((sweep.typed("run", "--retry", "error"), f"repeat {_names(failed)}"))
        if waiting := sweep.named("stale", "never run"):
            commands.append((sweep.typed("run"), f"run {_names([*waiting, *failed])}"))
    if sweep.named("running"):
        commands.append((shlex.join(["watch", "-n", "5", sweep.typed("status")]), "follow the progress"))
    if any((row.folder / "result.json").exists() for row in sweep.rows):
        commands.append((sweep.typed("report"), "see the table and write a page"))
    return commands


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.name for row in rows) if len(rows) <= 4 else f"{len(rows)} rows"


def as_json(sweep: Sweep) -> dict[str, Any]:
    """What programs read. Seconds, and times since the epoch."""
    return {
        "name": sweep.name, "folder": str(sweep.folder), "spec": str(sweep.spec.path) if sweep.spec else None,
        "problem": sweep.problem or None, "holder": sweep.holder,
        "counts": dict(Counter(row.state for row in sweep.rows)),
        "rows": [
            {"row": r.name, "state": r.state, "what": r.what, "seconds": r.seconds, "left_seconds": r.left,
             "step": r.event.get("step"), "steps": r.event.get("steps"), "folder": str(r.folder),
             "log": str(log) if r.state in FAILED and (log := r.log()) else None}
            for r in sweep.rows
        ],
        "next": [{"command": command, "why": why} for command, why in following(sweep)],
    }  # fmt: skip


# What people read


def columns(lines: Iterable[Sequence[str]], width: int = WIDTH) -> list[str]:
    """Cells in columns; the last takes what is left of `width` and is cut there."""
    lines = [list(line) for line in lines]
    sizes = [min(26, max(len(line[i]) for line in lines)) for i in range(len(lines[0]) - 1)]
    made = []
    for line in lines:
        cells = [_cut(cell, size).ljust(size) for cell, size in zip(line, sizes)]
        made.append(_cut("  ".join([*cells, line[-1]]).rstrip(), width))
    return made


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= width else f"{text[: width - 1]}…"


def text(sweep: Sweep) -> list[str]:
    """A table of its rows within 100 columns, and the commands that follow."""
    who = f", run by {locks.describe(sweep.holder)}" if sweep.holder else ""
    at = (sweep.holder or {}).get("row")
    who += f", at {at}" if at and at not in [row.name for row in sweep.rows] else ""
    lines = [f"{sweep.name}: {len(sweep.rows)} rows in {shown(sweep.folder)}{who}", ""]
    if sweep.problem:
        lines[1:1] = [_unusable(sweep)]
    table = [("row", "state", "step", "time", "left", "")]
    for row in sweep.rows:
        step, steps = row.event.get("step"), row.event.get("steps")
        running = row.state == "running"
        left = "" if row.left is None else format_seconds(max(0.0, row.left))
        table.append((
            row.name, row.state, f"{step}/{steps}" if step is not None and running else "",
            "" if row.seconds is None else format_seconds(row.seconds), left, row.what,
        ))  # fmt: skip
    lines += columns(table)
    if commands := following(sweep):
        lines += ["", "next:"]
        for line, why in commands:
            lines += [f"  {line}", f"      {why}"] if len(line) + len(why) > WIDTH - 6 else [f"  {line}   # {why}"]
    return lines


def _unusable(sweep: Sweep) -> str:
    return f"{sweep.name}: its spec cannot be read, so it is not known which rows are stale: {sweep.problem}"


def overview(found: Sequence[Sweep]) -> list[str]:
    """One line for each sweep, and one for each row that runs."""
    table: list[tuple[str, ...]] = [("sweep", "rows", "running", "finished", "failed", "stale", "never run", "next")]
    for sweep in found:
        counts = [
            len(sweep.named(*states)) for states in (["running"], results.FINISHED, FAILED, ["stale"], ["never run"])
        ]
        what = sweep.typed("status" if sweep.spec else "report")
        table.append((sweep.name, str(len(sweep.rows)), *(str(n or "-") for n in counts), what))
    lines = columns(table, 2 * WIDTH)  # a command that is cut cannot be typed
    for sweep in found:
        if sweep.problem:
            lines.append(_unusable(sweep))
        for row in sweep.named("running"):
            left = f", {format_seconds(max(0.0, row.left))} left" if row.left is not None else ""
            so_far = format_seconds(row.seconds or 0.0)
            lines.append(_cut(f"{sweep.name}/{row.name} has run for {so_far}{left}: {row.what}", WIDTH))
    return lines


def status(args: argparse.Namespace) -> int:
    """`alst status`: of one sweep, named by its spec or its folder, or of all below papermill_runs/out; see EXIT."""
    if args.out and (args.spec is None or args.spec.is_dir()):
        raise ValueError(f"--out {args.out} needs a spec; for the status of a folder, type: alst status {args.out}")
    if args.spec is None:
        found = [of_folder(p) for p in sweeps()]
    elif args.spec.is_dir():
        found = [of_folder(args.spec)]
        if not found[0].rows and not found[0].problem:
            raise ValueError(f"the folder {args.spec} has no runs; name a spec, or the folder of a sweep or of one run")
    else:
        found = [of_spec(load_spec(args.spec, args.out, as_run=True))]
    if args.json:
        made = [as_json(sweep) for sweep in found]
        print(json.dumps(made[0] if args.spec else made, indent=2))
    elif args.spec:
        print("\n".join(text(found[0])))
    else:
        print(
            "\n".join(
                overview(found)
                if found
                else [f"there are no runs below {launch.default_home() / launch.OUT}; start some with: alst run SPEC"]
            )
        )
    codes = {sweep.exit_status() for sweep in found}
    return next((code for code in (1, 3) if code in codes), 0)
