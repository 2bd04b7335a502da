"""The command `alst run | report | status | plan | verify | check`. A sweep's runs are executed by papermill, one after
another."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from alstlib.config import not_default
from alstlib.hf.configs import check_model
from alstlib.planner import command, devices, preflight
from alstlib.planner.command import fields_of
from alstlib.runs import (
    check,
    cluster,
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
from alstlib.runs.sweeps import Spec, check_parameters, load_spec, papermill_line, select, shown, write_record
from alstlib.units import format_seconds

# Commands


class Rest:
    """Time left for the rows of a sweep: the seconds that the spec states for them, times how much longer than stated
    the rows took that have ended."""

    def __init__(self, spec: Spec, names: Sequence[str]) -> None:
        self.seconds, self.rows = spec.seconds, list(names)
        self.took = self.said = 0.0
        self.since = time.monotonic()

    def begin(self) -> None:
        self.since = time.monotonic()

    def end(self, row: str) -> None:
        self.rows.remove(row)
        self.took += time.monotonic() - self.since
        self.said += self.seconds.get(row, 0.0)

    def __str__(self) -> str:
        if not all(row in self.seconds for row in self.rows) or len(self.rows) == 1:
            return ""
        pace = self.took / self.said if self.said else 1.0
        left = pace * sum(self.seconds[row] for row in self.rows) - (time.monotonic() - self.since)
        return f"all rows: about {format_seconds(max(1.0, left))} left"


def run_row(
    spec: Spec, row: str, *, force: bool = False, also: Callable[[], str] = lambda: "",
    warned: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:  # fmt: skip
    """Execute the run template for a row and return its result, which says how it ended (also of a dead kernel). What
    `also` gives is said in each line of progress. When `warned` says so, the run is told to save its state and end.

    Raises:
        ValueError: another process runs in the row's folder; nothing there was touched.
    """
    config, folder = spec.rows[row], spec.out / row
    folder.mkdir(parents=True, exist_ok=True)
    if (about := locks.holder(folder)) is not None:
        raise ValueError(f"row {row} was not run: its folder is in use by {locks.describe(about)}; wait for it to end")
    path = folder / "result.json"
    before = results.version(path)
    (folder / "progress.jsonl").unlink(missing_ok=True)
    reader, show = ProgressReader(folder / "progress.jsonl"), Printer(also)
    show({"event": "load", "row": row, "time": time.time(), "message": "starting the notebook"})

    def watch() -> None:
        if warned():
            (folder / WARNED).touch()
        for event in (events := reader.read()):
            show(event)
        if not events:
            show.tick()

    def settle(status: str, kind: str, message: str) -> dict[str, Any]:
        if results.version(path) not in (None, before):
            return results.read_result(path)
        error = {"type": kind, "message": message}
        results.write_result(path, result := results.new_result(config, status, error=error))
        return result

    parameters = {**spec.parameters, "config": config.to_dict(), "out": str(folder)}
    if force:
        parameters["force"] = True
    try:
        raised = execute(spec.notebook, folder / spec.notebook.name, parameters, watch)
    except KeyboardInterrupt:
        settle("cancelled", "KeyboardInterrupt", "")
        raise
    finally:
        watch()
        show.close()
    return settle("error", type(raised).__name__ if raised else "NoResult", str(raised or "no result.json")[-4000:])


def run(args: argparse.Namespace) -> int:
    """`alst run`: 0 when every row ended `ok` or `oom`, `cluster.AGAIN` when the time was up first, 1 otherwise."""
    elsewhere = args.launcher or os.environ.get(cluster.LAUNCHER_VARIABLE) or "SLURM_JOB_ID" in os.environ
    submits = (args.nodes or 1) > 1 and not elsewhere
    nodes = cluster.Nodes(count=args.nodes) if submits else cluster.here(args.nodes, args.launcher, args.head)
    if nodes.launcher:
        torchrun.free_port(nodes.head)  # refuses an address that other nodes cannot reach
    changes: dict[str, Any] = {"changes": fields_of(args.set, "--set")} if args.set else {}
    spec = load_spec(args.spec, args.out, nodes=nodes.count, **changes)
    names = select(spec, args.rows)
    if args.allow_dropped:
        rows = {row: config.replace(data={"allow_dropped": True}) for row, config in spec.rows.items()}
        spec = dataclasses.replace(spec, rows=rows)
    _check(spec, names, args.force, submits)
    print(f"{spec.name}: {len(names)} row{'s' * (len(names) != 1)}, results in {shown(spec.out)}", flush=True)
    if args.dry_run:
        for row in names:
            print("\n".join(_would(spec, row, args, nodes)), flush=True)
        return 0
    if submits:
        return _submit(spec, args)
    os.environ.update(nodes.variables())  # for the kernels of the notebooks, which start the ranks
    with locks.hold(spec.out) as note:
        write_record(spec)
        return _run_rows(spec, names, args, note)


def _check(spec: Spec, names: Sequence[str], force: bool, elsewhere: bool) -> None:
    """Refuse a spec whose rows cannot run; those that run elsewhere may have more ranks than this machine has cores."""
    check_parameters(spec.notebook, [*spec.parameters, "config", "out", *(["force"] if force else [])])
    if spec.report:
        check_parameters(spec.report, ["results"])
    for row in names:
        workers.check(spec.rows[row], spec.worker)
    if spec.worker in workers.TRAINING:
        for model in {spec.rows[row].model.name for row in names}:
            check_model(model)
    for row in () if force or elsewhere else names:
        count = launch.node_count(spec.rows[row], spec.nodes)
        workers.check_ranks(spec.rows[row].engine.world_size, count, devices.device_count())


def _submit(spec: Spec, args: argparse.Namespace) -> int:
    """Submit a job with the same command, without the options that are about the job."""
    about_job = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _job_options(about_job)
    job = cluster.submit(about_job.parse_known_args(args.words)[1], spec.out, args.nodes, args.sbatch)
    log = shlex.quote(shown(spec.out / f"slurm-{job}.log"))
    lines = (f"see its log    tail -F {log}", f"see its state  {spec.typed('status')}", f"end it         scancel {job}")
    print("\n  ".join([f"submitted job {job} on {args.nodes} nodes", *lines]))
    return 0


def _left_alone(spec: Spec, row: str, args: argparse.Namespace) -> str:
    """Why a row is not run; empty when it is."""
    stands = status.look(spec.out / row, spec.rows[row])
    if args.retry and stands.state not in status.FAILED:
        return f"its state is {stands.state!r}, which --retry error does not repeat"
    done = launch.finished(spec.rows[row], spec.out / row)
    if not done or args.force:
        return ""
    return f"it finished already: {done['status']} (run {done['run_id']}); --force runs it again"


class TimeIsUp:
    """Called when the time is nearly up (SIGUSR1, or SIGTERM with --grace); true after that, and near the job's end."""

    told = False

    def __call__(self) -> None:
        self.told = True

    def __bool__(self) -> bool:
        end = cluster.job_end()
        return self.told or (end is not None and end - time.time() < 2 * cluster.MARGIN_SECONDS)


def _run_rows(spec: Spec, names: Sequence[str], args: argparse.Namespace, note: Callable[..., None]) -> int:
    bad: list[str] = []
    alone = {row: why for row in names if (why := _left_alone(spec, row, args))}
    rest, warning, ran = Rest(spec, [row for row in names if row not in alone]), TimeIsUp(), 0
    with warnings_call(warning, args.grace):
        for i, row in enumerate(names):
            if row in alone:
                print(f"{row}: {alone[row]}")
                continue
            if warning and (ran or warning.told):
                return _again(spec, row)
            rest.begin()
            ran, before = ran + 1, _saved(spec.out / row)
            print(f"{row}: starting run {results.run_id(spec.rows[row])}, row {i + 1} of {len(names)}", flush=True)
            note(row=row, row_since=time.time())
            try:
                result = run_row(spec, row, force=args.force, also=lambda: str(rest), warned=lambda: warning.told)
            except ValueError as e:
                print(f"alst: {e}", file=sys.stderr)
                bad.append(row)
                continue
            finally:
                rest.end(row)
            error = result.get("error") or {}
            print(": ".join(part for part in (row, result["status"], results.why(result)) if part), flush=True)
            if result["status"] in status.FAILED:
                saved = _saved(spec.out / row) > before
                if warning and result["status"] in ("timeout", "cancelled") and (saved or ran > 1):
                    return _again(spec, row)
                print(error.get("log_tail", ""), file=sys.stderr)
                bad.append(row)
                if args.fail_fast or error.get("type") == "LauncherFailed":
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
    """The end of a sweep: the table, the report, the page, and what failed."""
    note(row="the report", row_since=time.time())
    found = results.collect(spec.out)
    print()
    report.show(results.table(report.in_order(found, spec.out, spec)))
    print()
    if spec.report and not (bad and args.fail_fast):
        output = spec.out / spec.report.name
        show = Printer()
        show({"event": "load", "row": "report", "time": time.time(), "message": f"running {spec.report.name}"})
        # where a reader would run it, because it may import and read what lies there
        raised = execute(spec.report, output, {"results": str(spec.out.resolve())}, show.tick, spec.report.parent)
        show.close()
        if raised:
            print(f"the report notebook failed (it is in {shown(output)}): {raised}", file=sys.stderr)
            bad.append("report")
        else:
            print(f"report: {shown(output)}")
    try:
        if found:
            print(f"page: {shown(report.write_page(spec.out, found, spec))}")
    except (ValueError, OSError) as e:  # the results are there
        print(f"the page of the report was not written: {e}", file=sys.stderr)
    if bad:
        print(f"failed: {', '.join(bad)}; repeat them with: {spec.typed('run', '--retry', 'error')}", file=sys.stderr)
    return 1 if bad else 0


def _would(spec: Spec, row: str, args: argparse.Namespace, nodes: cluster.Nodes) -> list[str]:
    """What `--dry-run` says of a row: its fields, what the planner expects, its folder, the command that runs it by
    itself, and the one that the launcher would start in turn."""
    config, folder = spec.rows[row], spec.out / row
    if why := _left_alone(spec, row, args):
        return [f"{row}: {why}"]
    fields, sets = not_default(config), spec.sets[row]
    of_row = {n: v for n, v in fields.items() if n in sets and n != "row"}
    others = {n: v for n, v in fields.items() if n not in sets and n != "row"}
    gpus, count = devices.device_count(), launch.node_count(config, spec.nodes)
    ours, foreseen = spec.worker in workers.TRAINING, workers.planned(config, spec.worker, gpus)
    expected = workers.outlook(config, spec.worker, gpus, count)
    parameters = {**spec.parameters, "out": str(folder), **({"force": True} if args.force else {})}
    where, output = shlex.join(["mkdir", "-p", shown(folder)]), shown(folder / spec.notebook.name)
    alone = papermill_line(shown(spec.notebook), output, parameters, fields)
    attempt = torchrun.Attempt(
        id=results.run_id(config), config=config.to_dict(), out=str(folder), worker=spec.worker, nodes=count,
        head=nodes.head,
    )  # fmt: skip
    launcher = nodes.launcher if count > 1 else ()
    return [
        f"{row}: would run as {results.run_id(config)}",
        f"  the row sets  {_fields(of_row)}",
        f"  the base sets {_fields(others)}",
        f"  predicted     {expected}",
        f"  ends after    {preflight.time_limit(foreseen, count, gpus, ours)[1]}",
        f"  folder        {shown(folder)}",
        f"  by itself     {where} && {alone}",
        f"  which starts  {shlex.join([*launcher, *attempt.command()])}",
    ]


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items()) or "nothing"


def _job_options(parser: argparse._ActionsContainer) -> None:
    """The options of `alst run` that the job which it submits does not get."""
    parser.add_argument(
        "--nodes", type=int, default=os.environ.get(cluster.NODES_VARIABLE),
        help="the number of nodes; with Slurm, outside of a job, submit a job on them",
    )  # fmt: skip
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS",
        help='options of the submitted job, such as --sbatch="--partition=gpu --time=4:00:00"',
    )  # fmt: skip


def _run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("spec", type=Path, help="the YAML file of the sweep, such as papermill_runs/specs/ablation.yaml")
    add("--rows", metavar="NAMES", help="run only the rows with these names, separated by commas")
    add("--retry", choices=["error"], help="run only the rows that failed, timed out or were interrupted")
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="change a field of every row, such as options.chunk=16384; may be given several times",
    )  # fmt: skip
    switches = {
        "--force": "run finished rows again, rows that are predicted not to fit, and many more ranks than cores",
        "--allow-dropped": "fine-tune though more than 1%% of the rows of the data are left out",
        "--fail-fast": "stop at the first row that fails",
        "--dry-run": "print the fields, the prediction and the command of each row, and start nothing",
    }
    for name, text in switches.items():
        add(name, action="store_true", help=text)
    group = parser.add_argument_group("several nodes (env/README.md explains them)")
    _job_options(group)
    group.add_argument(
        "--launcher", default="", metavar="CMD",
        help="the command that starts another command once on each node (default: srun, in a Slurm job)",
    )  # fmt: skip
    group.add_argument(
        "--head", default="", metavar="HOST", help="the name or address of this node, as the other nodes reach it"
    )
    group.add_argument(
        "--grace", type=float, default=os.environ.get("ALST_GRACE", "0"), metavar="SECONDS",
        help="the time from SIGTERM to the end of the job, in which a run with checkpoint_every saves its state; with "
        "0, SIGTERM ends the run at once (default: 0)",
    )  # fmt: skip


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a spec, or a folder with results")
    parser.add_argument(
        "--html", metavar="PATH",
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
    "plan": (
        command.command, command.add_arguments,
        "predict which length fits on which GPUs and how long a step takes; run nothing", "",
    ),
    "verify": (verify.verify, verify.add_arguments, verify.HELP, verify.EXIT),
    "check": (check.check, check.add_arguments, check.HELP, check.EXIT),
}  # fmt: skip
"""For each command: what it does, what adds its options, and what `--help` says of it before and after them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a row failed or could not be written, 2 refused before it started, 75 the time was up and
    the same command continues, 130 interrupted; of `status`, `verify` and `check`: their EXIT."""
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
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.words = argv[1:]
    out, err = cast(Any, Plain(sys.stdout)), cast(Any, Plain(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return _command(args)


def _command(args: argparse.Namespace) -> int:
    try:
        return args.command(args)
    except BrokenPipeError:  # such as `alst status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as e:
        print(f"alst: {e}", file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    except KeyboardInterrupt:
        print("\nalst: interrupted; run the same command again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
