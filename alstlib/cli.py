"""`alst run | report | status | plan`: sweeps of runs, named by a YAML file and driven by papermill, one row at a time.

A spec (papermill_runs/specs/) is a mapping of

    name        of the sweep; its results go to papermill_runs/out/NAME/ROW/
    notebook    the run template that papermill executes for each row
    base        fields of RunConfig; its sections `cpu` and `cuda` apply where no GPU, or one, is found
    rows        names out of config.ROWS, or mappings with a `name` and fields of RunConfig
    parameters  optional: more parameters of the notebook
    report      optional: a notebook that is executed at the end with the parameter `results`, the sweep's folder
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alstlib import launch, plan, results
from alstlib.config import ROWS, RunConfig, check_names, row_config

FAILED = tuple(s for s in results.STATUSES if s not in results.FINISHED)
KERNEL_SECONDS = 60.0  # for an interrupted notebook: longer than the launcher's own grace


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A sweep whose names were all checked and whose rows are resolved for this machine."""

    name: str
    notebook: Path
    parameters: Mapping[str, Any]
    rows: Mapping[str, RunConfig]
    report: Path | None
    out: Path


def load_spec(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Spec:
    """Read and check a spec; `out` replaces the folder of its results.

    Raises:
        ValueError: what cannot be read, unknown names (with the nearest known one), or values RunConfig refuses.
    """
    path = Path(path).resolve()
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ValueError(f"cannot read the spec {path}: {e}") from e
    if not isinstance(spec, dict):
        raise ValueError(f"the spec {path} is not a mapping with name, notebook, base and rows")
    check_names(spec, ["name", "notebook", "base", "rows", "parameters", "report"], "field of a spec")
    name = str(spec.get("name") or path.stem)
    device = "cuda" if launch.device_count() else "cpu"
    rows: dict[str, RunConfig] = {}
    for given in spec.get("rows") or []:
        fields = dict(given) if isinstance(given, Mapping) else {"name": given}
        row = str(fields.pop("name", ""))
        for what, text in (("name", name), ("row", row)):
            if not re.fullmatch(r"\w[\w.+-]*", text):
                raise ValueError(
                    f"{what}={text!r} names a folder: letters, digits and _ . + - only, such as 'baseline'"
                )
        if row in rows:
            raise ValueError(f"row '{row}' is named twice in {path}")
        if not isinstance(given, Mapping):
            check_names({row: None}, ROWS, "row")
        base = RunConfig.from_dict(_for_device(spec.get("base") or {}, device))
        config = row_config(row, base) if row in ROWS else base.replace(row=row)
        rows[row] = launch.resolve(config.replace(**_for_device(fields, device)))
    if not rows:
        raise ValueError(f"the spec {path} names no rows")
    notebook, root = _locate(spec.get("notebook") or "notebooks/run.ipynb", path)
    report = _locate(spec["report"], path)[0] if spec.get("report") else None
    folder = Path(out).resolve() if out else root / "papermill_runs" / "out" / name
    parameters = dict(spec.get("parameters") or {})
    return Spec(name=name, notebook=notebook, parameters=parameters, rows=rows, report=report, out=folder)


def _for_device(fields: Mapping[str, Any], device: str) -> dict[str, Any]:
    """`fields` with the section of this device merged in and both sections gone."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"base={fields!r} is not a mapping of RunConfig's fields")
    plain = {k: v for k, v in fields.items() if k not in ("cpu", "cuda")}
    return {**plain, **(fields.get(device) or {})}


def _locate(name: str, spec: Path) -> tuple[Path, Path]:
    """A notebook named by a spec, relative to the spec's folder or one above it; and that folder."""
    for folder in spec.parents:
        if (folder / name).is_file():
            return folder / name, folder
    raise ValueError(f"notebook={name!r} of {spec} is in no folder above the spec")


def check_parameters(notebook: Path, names: Iterable[str]) -> None:
    """Refuse names that the notebook's parameters cell lacks (papermill itself only warns)."""
    import papermill

    known = papermill.inspect_notebook(str(notebook))
    check_names(dict.fromkeys(names), known, f"parameter of {notebook.name}")


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
                progress_bar=False, kernel_manager_class=Kernel,
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
            raise
    return raised[0] if raised else None


# Commands


def run_row(spec: Spec, row: str, *, force: bool = False) -> dict[str, Any]:
    """Execute the run template for a row and return its result, which says how it ended (also of a dead kernel)."""
    config, folder = spec.rows[row], spec.out / row
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "result.json"
    before = path.stat() if path.exists() else None
    (folder / "progress.jsonl").unlink(missing_ok=True)
    reader, show = launch.ProgressReader(folder / "progress.jsonl"), launch.progress_printer()

    def watch() -> None:
        for event in reader.read():
            show(event)

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
    watch()
    return settle("error", type(raised).__name__ if raised else "NoResult", str(raised or "no result.json")[-4000:])


def _select(spec: Spec, rows: str | None) -> list[str]:
    names = [r.strip() for r in rows.split(",") if r.strip()] if rows else list(spec.rows)
    check_names(dict.fromkeys(names), spec.rows, "row")
    return names


def _state(folder: Path) -> str:
    """A row's last status: out of its result, 'unfinished' when it began and has none, '' when it never began."""
    try:
        return results.read_result(folder / "result.json")["status"]
    except FileNotFoundError:
        return "unfinished" if (folder / "config.json").exists() else ""
    except ValueError:
        return "unreadable"


def run(args: argparse.Namespace) -> int:
    """`alst run`: 0 when every row ended `ok` or `oom`, 1 otherwise."""
    spec, bad = load_spec(args.spec, args.out), []
    names = _select(spec, args.rows)
    check_parameters(spec.notebook, [*spec.parameters, "config", "out", *(["force"] if args.force else [])])
    if spec.report:
        check_parameters(spec.report, ["results"])
    print(f"{spec.name}: {len(names)} rows, results in {spec.out}", flush=True)
    for row in names:
        config, folder = spec.rows[row], spec.out / row
        done, state = launch.finished(config, folder), _state(folder)
        if args.retry and state not in (*FAILED, "unfinished", "unreadable"):
            print(f"{row}: {state or 'never run'}, left alone by --retry")
        elif done and not args.force:
            print(f"{row}: {done['status']} already (run {done['run_id']})")
        elif args.dry_run:
            print(f"{row}: would run as {results.run_id(config)} in {folder}")
        else:
            print(f"{row}: starting run {results.run_id(config)}", flush=True)
            result = run_row(spec, row, force=args.force)
            error = result.get("error") or {}
            why = f": {error.get('type')}: {error.get('message')}" if result["status"] in FAILED else ""
            print(f"{row}: {result['status']}{why}", flush=True)
            if why:
                print(error.get("log_tail", ""), file=sys.stderr)
                bad.append(row)
                if args.fail_fast:
                    break
    if args.dry_run:
        return 0
    print(f"\n{results.to_markdown(results.table(results.collect(spec.out)))}\n")
    if spec.report and not (bad and args.fail_fast):
        output = spec.out / spec.report.name
        if raised := execute(spec.report, output, {"results": str(spec.out)}, lambda: None):
            print(f"the report failed, see {output}: {raised}", file=sys.stderr)
            bad.append("report")
        else:
            print(f"report: {output}")
    if bad:
        print(f"failed: {', '.join(bad)}; again with: alst run {args.spec} --retry error", file=sys.stderr)
    return 1 if bad else 0


def report(args: argparse.Namespace) -> int:
    """`alst report`: the table of a spec's results, or of those below a folder."""
    source = Path(args.source)
    folder = source if source.is_dir() else load_spec(source, args.out).out
    if not (found := results.collect(folder)):
        raise ValueError(f"no result.json below {folder}")
    print(results.to_markdown(results.table(found)))
    return 0


def status(args: argparse.Namespace) -> int:
    """`alst status`: each row's last status, and whether it is of the present configuration and commit."""
    spec = load_spec(args.spec, args.out)
    for row, config in spec.rows.items():
        state = _state(spec.out / row) or "never run"
        current = launch.finished(config, spec.out / row) is not None
        stale = "  (of another configuration or commit: would run again)"
        print(f"{row:24} {state}{stale if state in results.FINISHED and not current else ''}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a row failed or could not be written, 2 refused before it started, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="alst", description="Arctic Long Sequence Training: sweeps of runs.")
    commands = parser.add_subparsers(required=True, metavar="run | report | status | plan")
    p = commands.add_parser("run", help="run the rows of a spec that are not finished")
    p.add_argument("spec", type=Path, help="a YAML file, such as papermill_runs/specs/ablation.yaml")
    p.add_argument("--rows", help="only these rows, separated by commas")
    p.add_argument("--retry", choices=["error"], help="run only what failed, timed out or was interrupted")
    p.add_argument("--force", action="store_true", help="run finished rows again")
    p.add_argument("--fail-fast", action="store_true", help="stop at the first row that fails")
    p.add_argument("--dry-run", action="store_true", help="check everything and say what would run")
    p.set_defaults(command=run)
    r = commands.add_parser("report", help="print the table of results")
    r.add_argument("source", help="a spec or a folder")
    r.set_defaults(command=report)
    s = commands.add_parser("status", help="say how each row of a spec ended")
    s.add_argument("spec", type=Path)
    s.set_defaults(command=status)
    w = commands.add_parser("plan", help="say what fits on which GPUs, and how long a step takes; runs nothing")
    plan.add_arguments(w)
    w.set_defaults(command=plan.command)
    for sub in (p, r, s):
        sub.add_argument("--out", help="folder of the results, instead of papermill_runs/out/NAME")
    args = parser.parse_args(argv)
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
