"""`alst run | report | status | plan | verify`: sweeps of runs (`sweeps`), driven by papermill, one row at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alstlib.config import RunConfig
from alstlib.planner import command, devices, preflight
from alstlib.planner.model_shapes import check_model
from alstlib.runs import launch, locks, report, results, status, verify, workers
from alstlib.runs.progress import Printer, ProgressReader
from alstlib.runs.sweeps import Spec, check_parameters, load_spec, papermill_line, select, shown, write_record
from alstlib.units import format_seconds

KERNEL_START_SECONDS = 600  # papermill's 60 are short where many processes share the cores
KERNEL_SECONDS = 60.0  # for an interrupted notebook: longer than the launcher's own grace


# Executing a notebook


def execute(notebook: Path, output: Path, parameters: Mapping[str, Any], watch: Callable[[], None]) -> Exception | None:
    """Execute `notebook` with papermill in a kernel of the running Python; returns what it raised.

    `watch` is called about once a second meanwhile. On KeyboardInterrupt (and SIGTERM) the kernel is interrupted, so
    that the cell cleans up, and killed if it does not; then the exception goes on.
    """
    import papermill
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    check_parameters(notebook, parameters)
    kernels: list[AsyncKernelManager] = []
    raised: list[Exception] = []
    done = threading.Event()  # not Thread.join: interrupted, it takes a living thread for dead (Python < 3.13)

    class Kernel(AsyncKernelManager):
        """The kernel `python3`, always this interpreter, whatever kernel specs are installed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kernels.append(self)

        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=40"]
            env = {"PYTHONPATH": launch.import_path(os.environ.get("PYTHONPATH"))}
            return KernelSpec(argv=argv, env=env, display_name="Python 3 (ipykernel)", language="python")

    def work() -> None:
        try:
            papermill.execute_notebook(
                str(notebook), str(output), parameters=dict(parameters), kernel_name="python3", language="python",
                progress_bar=False, kernel_manager_class=Kernel, start_timeout=KERNEL_START_SECONDS,
            )  # fmt: skip
        except Exception as e:
            raised.append(e)
        finally:
            done.set()

    def signal_kernel(number: int) -> None:
        for kernel in kernels:
            if pid := getattr(kernel.provisioner, "pid", None):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    # papermill works in a thread: interrupted itself, it would leave a kernel that nobody told to clean up
    with launch.sigterm_interrupts():
        try:
            threading.Thread(target=work, daemon=True).start()
            while not done.wait(launch.POLL_SECONDS):
                watch()
        except KeyboardInterrupt:
            try:
                deadline = time.monotonic() + KERNEL_SECONDS
                while not done.is_set() and time.monotonic() < deadline:
                    signal_kernel(signal.SIGINT)
                    done.wait(KERNEL_SECONDS / 4)
            finally:
                if not done.is_set():
                    signal_kernel(signal.SIGKILL)
                    for kernel in kernels:
                        kernel.cleanup_connection_file()
            raise
    return raised[0] if raised else None


def watch_cells(notebook: Path, output: Path) -> tuple[Callable[[], None], Printer]:
    """What `execute` may call to say how many cells are done, and the printer that says it."""
    show, total = Printer(), len(_code_cells(notebook))
    began = {"event": "load", "row": "report", "time": time.time()}
    done = -1

    def watch() -> None:
        nonlocal done
        now = sum(cell["metadata"].get("papermill", {}).get("status") == "completed" for cell in _code_cells(output))
        if now != done:
            done = now
            show({**began, "message": f"{notebook.name}: {done} of {total} cells"})
        else:
            show.tick()

    return watch, show


def _code_cells(notebook: Path) -> list[dict[str, Any]]:
    try:
        return [c for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    except (OSError, ValueError, KeyError):  # half of it is written
        return []


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


def run_row(spec: Spec, row: str, *, force: bool = False, also: Callable[[], str] = lambda: "") -> dict[str, Any]:
    """Execute the run template for a row and return its result, which says how it ended (also of a dead kernel). What
    `also` gives is said in each line of progress.

    Raises:
        ValueError: another process runs in the row's folder; nothing there was touched.
    """
    config, folder = spec.rows[row], spec.out / row
    folder.mkdir(parents=True, exist_ok=True)
    if (about := locks.holder(folder)) is not None:
        raise ValueError(f"{row}: its folder is in use by {locks.describe(about)}")
    path = folder / "result.json"
    before = path.stat() if path.exists() else None
    (folder / "progress.jsonl").unlink(missing_ok=True)
    reader, show = ProgressReader(folder / "progress.jsonl"), Printer(also)
    show({"event": "load", "row": row, "time": time.time(), "message": "starting the notebook"})

    def watch() -> None:
        for event in (events := reader.read()):
            show(event)
        if not events:
            show.tick()

    def settle(status: str, kind: str, message: str) -> dict[str, Any]:
        after = path.stat() if path.exists() else None
        if after and (before is None or (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns)):
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
    """`alst run`: 0 when every row ended `ok` or `oom`, 1 otherwise."""
    spec = load_spec(args.spec, args.out)
    names = select(spec, args.rows)
    check_parameters(spec.notebook, [*spec.parameters, "config", "out", *(["force"] if args.force else [])])
    if spec.report:
        check_parameters(spec.report, ["results"])
    for row in names:
        workers.check(spec.rows[row], spec.worker)
    if spec.worker in workers.TRAINING:
        for model in {spec.rows[row].model for row in names}:
            check_model(model)
    print(f"{spec.name}: {len(names)} rows, results in {shown(spec.out)}", flush=True)
    if args.dry_run:
        for row in names:
            print("\n".join(_would(spec, row, args)), flush=True)
        return 0
    with locks.hold(spec.out) as note:
        write_record(spec)
        return _run_rows(spec, names, args, note)


def _left_alone(spec: Spec, row: str, args: argparse.Namespace) -> str:
    """Why a row is not run; empty when it is."""
    stands = status.look(spec.out / row, spec.rows[row])
    if args.retry and stands.state not in status.FAILED:
        return f"{stands.state}, left alone by --retry"
    done = launch.finished(spec.rows[row], spec.out / row)
    return f"{done['status']} already (run {done['run_id']})" if done and not args.force else ""


def _run_rows(spec: Spec, names: Sequence[str], args: argparse.Namespace, note: Callable[..., None]) -> int:
    bad = []
    alone = {row: why for row in names if (why := _left_alone(spec, row, args))}
    rest = Rest(spec, [row for row in names if row not in alone])
    for i, row in enumerate(names):
        if row in alone:
            print(f"{row}: {alone[row]}")
            continue
        rest.begin()
        print(f"{row}: starting run {results.run_id(spec.rows[row])}, row {i + 1} of {len(names)}", flush=True)
        note(row=row, row_since=time.time())
        try:
            result = run_row(spec, row, force=args.force, also=lambda: str(rest))
        except ValueError as e:
            print(f"alst: {e}", file=sys.stderr)
            bad.append(row)
            continue
        finally:
            rest.end(row)
        error = result.get("error") or {}
        why = f": {results.why(result)}" if result["status"] in status.FAILED else ""
        print(f"{row}: {result['status']}{why}", flush=True)
        if why:
            print(error.get("log_tail", ""), file=sys.stderr)
            bad.append(row)
            if args.fail_fast:
                break
    note(row="the report", row_since=time.time())
    found = results.collect(spec.out)
    print(f"\n{results.with_notes(results.table(found))}\n")
    if spec.report and not (bad and args.fail_fast):
        output = spec.out / spec.report.name
        watch, show = watch_cells(spec.report, output)
        raised = execute(spec.report, output, {"results": str(spec.out)}, watch)
        show.close()
        if raised:
            print(f"the report failed, see {shown(output)}: {raised}", file=sys.stderr)
            bad.append("report")
        else:
            print(f"report: {shown(output)}")
    try:
        if found:
            print(f"page: {shown(report.write_page(spec.out, found, spec))}")
    except (ValueError, OSError) as e:  # the results are there
        print(f"no page: {e}", file=sys.stderr)
    if bad:
        print(f"failed: {', '.join(bad)}; again with: {spec.typed('run', '--retry', 'error')}", file=sys.stderr)
    return 1 if bad else 0


def _would(spec: Spec, row: str, args: argparse.Namespace) -> list[str]:
    """What `--dry-run` says of a row: its fields, what the planner expects, its folder, the command that runs it by
    itself, and the one that the launcher would start in turn."""
    config, folder = spec.rows[row], spec.out / row
    if why := _left_alone(spec, row, args):
        return [f"{row}: {why}"]
    default, sets = RunConfig(), spec.sets[row]
    fields = {n: v for n, v in config.to_dict().items() if n != "row"}
    of_row = {n: fields[n] for n in sets if n in fields}
    others = {n: v for n, v in fields.items() if n not in of_row and v != default.to_dict()[n]}
    gpus = devices.device_count()
    ours, foreseen = spec.worker in workers.TRAINING, workers.planned(config, spec.worker, gpus)
    expected = preflight.outlook(foreseen, gpus) if ours else f"not predicted: the worker is {spec.worker}"
    logs = folder / "logs" / results.run_id(config)
    parameters = {**spec.parameters, "out": str(folder), **({"force": True} if args.force else {})}
    where, output = shlex.join(["mkdir", "-p", shown(folder)]), shown(folder / spec.notebook.name)
    alone = papermill_line(shown(spec.notebook), output, parameters, config.to_dict())
    argv = launch.command(config, folder, logs, sys.executable, spec.worker, launch.meeting(config))
    return [
        f"{row}: would run as {results.run_id(config)}",
        f"  the row sets  {_fields(of_row)}",
        f"  the base sets {_fields(others)}",
        f"  predicted     {expected}",
        f"  ends after    {preflight.time_limit(foreseen, 1, gpus, ours)[1]}",
        f"  folder        {shown(folder)}",
        f"  by itself     {where} && {alone}",
        f"  which starts  {shlex.join(argv)}",
    ]


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items()) or "nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a row failed or could not be written, 2 refused before it started, 130 interrupted; of
    `status` and `verify`: their EXIT."""
    parser = argparse.ArgumentParser(prog="alst", description="Arctic Long Sequence Training: sweeps of runs.")
    commands = parser.add_subparsers(required=True, metavar="run | report | status | plan | verify")
    p = commands.add_parser("run", help="run the rows of a spec that are not finished")
    p.add_argument("spec", type=Path, help="a YAML file, such as papermill_runs/specs/ablation.yaml")
    p.add_argument("--rows", help="only these rows, separated by commas")
    p.add_argument("--retry", choices=["error"], help="run only what failed, timed out or was interrupted")
    p.add_argument("--force", action="store_true", help="run finished rows again")
    p.add_argument("--fail-fast", action="store_true", help="stop at the first row that fails")
    p.add_argument(
        "--dry-run", action="store_true", help="say what would run: fields, prediction, command; start nothing"
    )
    p.set_defaults(command=run)
    r = commands.add_parser("report", help="print the table of results and write their page")
    r.add_argument("source", help="a spec or a folder")
    r.add_argument("--html", metavar="PATH", help="where the page goes, instead of report.html in the results' folder")
    r.set_defaults(command=report.report)
    s = commands.add_parser("status", help="say what runs, what finished and what to type next", epilog=status.EXIT)
    s.add_argument(
        "spec",
        type=Path,
        nargs="?",
        help="a spec, or the folder of a sweep or a run; without it, all sweeps below papermill_runs/out",
    )
    s.add_argument("--json", action="store_true", help="for programs")
    s.set_defaults(command=status.status)
    w = commands.add_parser("plan", help="say what fits on which GPUs, and how long a step takes; runs nothing")
    command.add_arguments(w)
    w.set_defaults(command=command.command)
    v = commands.add_parser("verify", help=verify.HELP, epilog=verify.EXIT)
    verify.add_arguments(v)
    v.set_defaults(command=verify.verify)
    for sub in (p, r, s):
        sub.add_argument("--out", help="folder of a spec's results, instead of papermill_runs/out/NAME")
    args = parser.parse_args(argv)
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
