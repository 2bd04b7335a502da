"""The command `alst run | report | status | finetune | plan | verify | check`. A sweep's runs are executed by
papermill, one after another."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from alstlib.base.config import not_default
from alstlib.base.options import check_names
from alstlib.planner import command, devices
from alstlib.planner.command import fields_of
from alstlib.runs import (
    check,
    cluster,
    finetune,
    launch,
    locks,
    report,
    results,
    status,
    torchrun,
    verify,
    workers,
)
from alstlib.runs.notebooks import execute
from alstlib.runs.processes import WARNED, warnings_call
from alstlib.runs.progress import Plain, Printer, ProgressReader
from alstlib.runs.results import Json
from alstlib.runs.sweeps import Spec, check_parameters, load_spec, shown, write_record

# Commands


def run_row(spec: Spec, row: str, *, force: bool = False, warned: Callable[[], bool] = lambda: False) -> Json:
    """Execute the run template for a row and return its result, which says how it ended (also of a dead kernel). When
    `warned` says so, the run is told to save its state and end.

    Raises:
        ValueError: another process runs in the row's folder; nothing there was touched.
    """
    config, folder = spec.rows[row], spec.out / row
    folder.mkdir(parents=True, exist_ok=True)
    if (about := locks.holder(folder)) is not None:
        raise ValueError(f"row {row} was not run: its folder is in use by {locks.describe(about)}; wait for it to end")
    path, progress = folder / "result.json", folder / "progress.jsonl"
    before = results.version(path)
    progress.unlink(missing_ok=True)
    reader, show = ProgressReader(progress), Printer()
    show({"event": "load", "row": row, "time": time.time(), "message": "starting the notebook"})

    def watch() -> None:
        if warned():
            (folder / WARNED).touch()
        for event in reader.read():
            show(event)
        show.tick()

    def running() -> bool:
        return locks.holder(folder) is not None

    ended, error = "cancelled", {"type": "KeyboardInterrupt"}  # what an interrupted notebook did not write itself
    try:
        output = folder / spec.notebook.name
        raised = execute(spec.notebook, output, _parameters(spec, row, force), watch, running)
        ended, error = "error", {"type": type(raised).__name__, "message": str(raised or "no result.json")[-4000:]}
    finally:
        watch()
        show.close()
        if results.version(path) in (None, before):
            results.write_result(path, results.new_result(config, ended, error=error))
    return results.read_result(path)


def _parameters(spec: Spec, row: str, force: bool) -> Json:
    """What the notebook of a row is given."""
    given = {**spec.parameters, "config": spec.rows[row].to_dict(), "out": str(spec.out / row)}
    return {**given, "force": True} if force else given


def run(args: argparse.Namespace) -> int:
    """`alst run`: 0 when every row ended `ok` or `oom`, `cluster.AGAIN` when the time was up first, 1 otherwise."""
    nodes = cluster.here(args.nodes, args.launcher, args.head)
    if nodes.launcher:
        torchrun.free_port(nodes.head)  # refuses an address that other nodes cannot reach
    spec = load_spec(args.spec, args.out, nodes=nodes.count, changes=fields_of(args.set, "--set"))
    names = args.rows.split(",") if args.rows else list(spec.rows)
    check_names(names, spec.rows, "row")
    check_parameters(spec.notebook, _parameters(spec, names[0], args.force))
    if spec.report:
        check_parameters(spec.report, ["results"])
    for row in names:
        workers.check(spec.rows[row], spec.worker)
    print(f"{spec.name}: {len(names)} rows, results in {shown(spec.out)}", flush=True)
    if args.dry_run:
        for row in names:
            print(_left_alone(spec, row, args) or _would(spec, row), flush=True)
        return 0
    os.environ.update(nodes.variables())  # for the kernels of the notebooks, which start the ranks
    with locks.hold(spec.out) as note:
        write_record(spec)
        return _run_rows(spec, names, args, note)


def _left_alone(spec: Spec, row: str, args: argparse.Namespace) -> str:
    """Why a row is not run; empty when it is."""
    ended = status.look(spec.out / row, spec.rows[row]).status
    finished = ended in results.FINISHED and not args.force
    return f"{row}: it finished already: {ended}; --force runs it again" if finished else ""


def _run_rows(spec: Spec, names: Sequence[str], args: argparse.Namespace, note: Callable[..., None]) -> int:
    bad: list[str] = []
    told, ran = threading.Event(), 0  # told that the time is nearly up: by SIGUSR1, or by SIGTERM with --grace

    def ends_soon() -> bool:
        return told.is_set() or cluster.job_end() - time.time() < 2 * cluster.MARGIN_SECONDS

    with warnings_call(told.set, args.grace):
        for row in names:
            if why := _left_alone(spec, row, args):
                print(why)
                continue
            if told.is_set() or (ran and ends_soon()):
                return _again(spec, row)
            ran, before = ran + 1, _saved(spec.out / row)
            print(f"{row}: starting run {results.run_id(spec.rows[row])}", flush=True)
            note(row=row, row_since=time.time())
            try:
                result = run_row(spec, row, force=args.force, warned=told.is_set)
            except ValueError as e:
                print(f"alst: {e}", file=sys.stderr)
                bad.append(row)
                continue
            print(": ".join(filter(None, (row, result["status"], results.why(result)))), flush=True)
            if result["status"] in results.FINISHED:
                continue
            saved = _saved(spec.out / row) > before
            if ends_soon() and result["status"] in ("timeout", "cancelled") and (saved or ran > 1):
                return _again(spec, row)
            bad.append(row)
            error = result["error"] or {"log_tail": "", "type": ""}
            print(error["log_tail"], file=sys.stderr)
            if args.fail_fast or error["type"] == "LauncherFailed":
                break
        return _report(spec, bad, args, note)


def _saved(folder: Path) -> float:
    """When a run last saved a state. An attempt that saved none came no further, and would not the next time."""
    saved = (*folder.glob("state/*"), *folder.glob("checkpoints/checkpoint-*"))
    return max((path.stat().st_mtime for path in saved), default=0.0)


def _again(spec: Spec, row: str) -> int:
    print(f"{row}: the time is up; this command continues it: {spec.typed('run')}", flush=True)
    return cluster.AGAIN


def _report(spec: Spec, bad: list[str], args: argparse.Namespace, note: Callable[..., None]) -> int:
    """The end of a sweep: the report notebook, the table, the page, and what failed."""
    note(row="the report", row_since=time.time())
    again = spec.typed("run", "--rows", ",".join(bad))
    if spec.report and not (bad and args.fail_fast):
        output = spec.out / spec.report.name
        print(f"report: running {shown(output)}", flush=True)
        # where a reader would run it, because it may import and read what lies there
        if raised := execute(spec.report, output, {"results": str(spec.out.resolve())}, folder=spec.report.parent):
            print(f"the report notebook failed: {raised}", file=sys.stderr)
            bad.append("report")
    try:
        report.tell(spec.out, spec)
    except (ValueError, OSError) as e:  # the results are there
        print(f"the page of the report was not written: {e}", file=sys.stderr)
    if bad:
        print(f"failed: {', '.join(bad)}; repeat them with: {again}", file=sys.stderr)
    return 1 if bad else 0


def _would(spec: Spec, row: str) -> str:
    """What `--dry-run` says of a row: its fields, what the planner expects, and its folder."""
    config = spec.rows[row]
    fields, count = not_default(config), launch.node_count(config, spec.nodes)
    return "\n".join([
        f"{row}: would run as {results.run_id(config)}",
        f"  sets       {', '.join(f'{name}={value}' for name, value in fields.items())}",
        f"  predicted  {workers.outlook(config, spec.worker, devices.device_count(), count)}",
        f"  folder     {shown(spec.out / row)}",
    ])  # fmt: skip


def _run_options(parser: argparse.ArgumentParser) -> None:
    add, env = parser.add_argument, os.environ
    add("spec", type=Path, help="the YAML file of the sweep, such as papermill_runs/specs/ablation.yaml")
    add("--rows", metavar="NAMES", help="run only the rows with these names, separated by commas")
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="change a field of every row, such as options.chunk=16384; may be given several times",
    )  # fmt: skip
    switches = {
        "--force": "run finished rows again, rows that are predicted not to fit, and many more ranks than cores",
        "--fail-fast": "stop at the first row that fails",
        "--dry-run": "print the fields and the prediction of each row, and start nothing",
    }
    for name, text in switches.items():
        add(name, action="store_true", help=text)
    add = parser.add_argument_group("several nodes (env/README.md explains them)").add_argument
    add(
        "--nodes", type=int, default=env.get(cluster.NODES_VARIABLE),
        help="the number of nodes (default: those of the Slurm job, or one)",
    )  # fmt: skip
    add(
        "--launcher", default=env.get(cluster.LAUNCHER_VARIABLE, ""), metavar="CMD",
        help="the command that starts another command once on each node (default: srun, in a Slurm job)",
    )  # fmt: skip
    add(
        "--head", default=env.get(cluster.HEAD_VARIABLE, ""), metavar="HOST",
        help="the name or address of this node, as the other nodes reach it",
    )  # fmt: skip
    add(
        "--grace", type=float, default=env.get("ALST_GRACE", "0"), metavar="SECONDS",
        help="the time from SIGTERM to the end of the job, in which a run with checkpoint_every saves its state; with "
        "0, SIGTERM ends the run at once (default: 0)",
    )  # fmt: skip


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a spec, or a folder with results")
    parser.add_argument(
        "--html", type=Path, metavar="PATH",
        help="write the page to this file, instead of report.html in the folder of the results",
    )  # fmt: skip


def _status_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", type=Path, nargs="?",
        help="a spec, or the folder of a sweep or of one run (default: all sweeps below papermill_runs/out)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


RESULTS = ("run", "report", "status")
"""Commands that know the folder of a spec's results."""
COMMANDS: dict[str, tuple[Callable[[Any], int], Callable[[argparse.ArgumentParser], None], str, str]] = {
    "run": (run, _run_options, "run every row of a spec that is not finished", ""),
    "report": (report.report, _report_options, "print the table of results, and write a page with figures", ""),
    "status": (
        status.status, _status_options, "say which rows run, finished or failed, and what to type next", status.EXIT
    ),
    "finetune": (finetune.finetune, finetune.add_arguments, finetune.HELP, finetune.EXIT),
    "plan": (
        command.command, command.add_arguments,
        "predict which length fits on which GPUs and how long a step takes; run nothing", command.EXIT,
    ),
    "verify": (verify.verify, verify.add_arguments, verify.HELP, verify.EXIT),
    "check": (check.check, check.add_arguments, check.HELP, check.EXIT),
}  # fmt: skip
"""The commands: what each does, what adds its options, and what `--help` says of it before and after them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a row failed or could not be written, 2 refused before it started, 75 the time was up and
    the same command continues, 130 interrupted; of `status`, `plan`, `verify` and `check`: their EXIT."""
    parser = argparse.ArgumentParser(
        prog="alst",
        description="Train on very long sequences (Arctic Long Sequence Training, ALST). A YAML file, the spec, "
        "describes a sweep: a list of runs, which are its rows. `alst COMMAND --help` explains each command.",
    )
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    for name, (does, add_options, text, exits) in COMMANDS.items():
        one = commands.add_parser(name, help=text, epilog=exits, allow_abbrev=False)
        add_options(one)
        one.set_defaults(command=does)
        if name in RESULTS:
            one.add_argument(
                "--out", metavar="FOLDER",
                help="the folder of the spec's results (default: papermill_runs/out/NAME, with the name in the spec, "
                "in the checkout that the spec lies in, or else in the folder you stand in)",
            )  # fmt: skip
    args = parser.parse_args(argv)
    out, err = cast(Any, Plain(sys.stdout)), cast(Any, Plain(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return args.command(args)
        except (ValueError, OSError) as e:
            print(f"alst: {e}", file=sys.stderr)
            return 2 if isinstance(e, ValueError) else 1
        except KeyboardInterrupt:
            print("\nalst: interrupted; run the same command again to go on", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
