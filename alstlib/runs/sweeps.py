"""Sweeps of runs, described by YAML files (papermill_runs/specs/): reading such a spec, and the record in its folder.

A spec is a mapping of

    name        of the sweep; its results go to papermill_runs/out/NAME/ROW/: of the checkout that the spec lies in, and
                for a spec elsewhere, of the folder that one stands in (`launch.default_home`)
    notebook    the run template that papermill executes for each row
    base        groups of RunConfig with their fields; its sections `cpu` and `cuda` apply where no GPU, or one, is
                found
    rows        names out of config.ROWS, or mappings with a `name` and such groups, whose fields change those of the
                base; `expect` says what should come out (env/gpu.py reads it)
    parameters  optional: more parameters of the notebook
    report      optional: a notebook that is executed at the end with the parameter `results`, the sweep's folder
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from alstlib.base.config import FIELDS, ROWS, RunConfig, merged, nearest_path, row_config
from alstlib.base.options import Fields, Name, Settings, Text, Works, check_names
from alstlib.planner import devices
from alstlib.runs import launch, locks, results, workers
from alstlib.runs.launch import OUT
from alstlib.runs.notebooks import load_papermill
from alstlib.runs.results import Json

RECORD = "sweep.json"
"""Left in a sweep's folder by `alst run`: which spec it is of, and what its rows were resolved for."""

SHARED = Path(os.path.realpath(sys.prefix), "share", "alst")
"""Where an installed wheel puts notebooks/ (the run templates) and papermill_runs/specs/."""

Rows = Annotated[
    list[str | Fields], Field(min_length=1), Works("a list of at least one row: names, or mappings with a name")
]


class SpecFile(Settings):
    """What a spec may say."""

    name: Name = ""
    notebook: Text = "notebooks/run.ipynb"
    base: Fields | None = None
    rows: Rows
    parameters: Fields | None = None
    report: Text | None = None

    @classmethod
    def called(cls) -> str:
        return "field of a spec"

    @classmethod
    def elsewhere(cls) -> dict[str, str]:
        return {name.split(".")[-1]: f"base: {{{name}: ...}}" for name in FIELDS}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A sweep whose names were all checked and whose rows are resolved for a machine."""

    name: str
    path: Path
    home: Path
    """The folder with papermill_runs/out, where its results go if nothing else is said."""
    notebook: Path
    parameters: Json
    rows: Mapping[str, RunConfig]
    report: Path | None
    out: Path
    nodes: int
    changes: Json
    """What `--set` changed in every row."""

    @property
    def worker(self) -> str:
        return str(self.parameters.get("worker", workers.ABLATION))

    def typed(self, verb: str, *flags: str) -> str:
        """`alst VERB SPEC [--out FOLDER] FLAGS` for a shell, as typed here. `run` gets the `--set` of this sweep again;
        the other commands read it in the folder."""
        words = ["alst", verb, shown(self.path)]
        if self.out.resolve() != (self.home / OUT / self.name).resolve():
            words += ["--out", shown(self.out)]
        for name, value in self.changes.items() if verb == "run" else ():
            words += ["--set", f"{name}={_yaml(value)}"]
        return shlex.join([*words, *flags])


def load_spec(
    path: Path, out: str | Path | None = None, *, as_run: bool = False, nodes: int = 1,
    changes: Json | None = None,
) -> Spec:  # fmt: skip
    """Read and check a spec.

    Args:
        out: a folder for its results, in place of the usual one.
        as_run: resolve the rows for the nodes that ran the sweep and with the changes that it ran with, where its
            folder says which: a login node asks about a node with GPUs. Else for `nodes` nodes like this one.
        changes: fields of every row that have other values (`RunConfig.replace`).

    Raises:
        ValueError: what cannot be read, unknown names (with the nearest known one), or values RunConfig refuses.
    """
    if not path.exists() and (built_in := SHARED / path).is_file():
        path = built_in
    path = Path(os.path.realpath(path))  # Path.resolve fails on a link that leads back to itself
    given = _read(path)
    name = given.name or path.stem
    notebook, root = _locate("notebook", given.notebook, path)
    home = root if path.is_relative_to(root) and root != SHARED else launch.default_home()
    folder = Path(out).resolve() if out else home / OUT / name
    ran: Json = {"gpus": devices.device_count(), "nodes": nodes, "changes": changes or {}}
    ran |= read_record(folder) if as_run else {}
    device = "cuda" if ran["gpus"] else "cpu"
    base = RunConfig.from_dict(_for_device(given.base or {}, device))
    rows: dict[str, RunConfig] = {}
    for one in given.rows:
        fields = _for_device({"name": one} if isinstance(one, str) else one, device)
        row = str(fields.pop("name", ""))
        fields.pop("expect", None)
        if row in rows or not row:
            raise ValueError(f"row '{row}' of {path} must have a name that no other row has")
        if isinstance(one, str):
            check_names([row], ROWS, "row")
        config = row_config(row, base) if row in ROWS else base.replace(row=row)
        config = config.replace(**fields).replace(**ran["changes"])
        rows[row] = launch.resolve(config, launch.node_count(config, ran["nodes"]), ran["gpus"])
    parameters = dict(given.parameters or {})
    report = given.report if root != SHARED else None  # a lesson, which needs a checkout
    if str(worker := parameters.get("worker", "")).endswith(".py"):
        parameters["worker"] = str(_locate("worker", worker, path)[0])
    return Spec(
        name=name, path=path, home=home, notebook=notebook, parameters=parameters, rows=rows,
        report=_locate("report", report, path)[0] if report else None, out=folder, nodes=ran["nodes"],
        changes=ran["changes"],
    )  # fmt: skip


def _read(path: Path) -> SpecFile:
    """What is in a spec."""
    if not path.exists():
        raise ValueError(f"the spec {shown(path)} does not exist; {nearest_path(path)}")
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise ValueError(f"the spec {path} cannot be read: {e}") from e
    if not isinstance(spec, dict):
        raise ValueError(f"the spec {path} must be a mapping with the keys name, notebook, base and rows")
    return SpecFile(**spec)


def _for_device(fields: Json, device: str) -> Json:
    """`fields` with the section of this device merged in and both sections gone."""
    plain = {name: value for name, value in fields.items() if name not in ("cpu", "cuda")}
    return merged(plain, fields.get(device) or {})


def _locate(what: str, name: str, spec: Path) -> tuple[Path, Path]:
    """A file named by a spec, relative to the spec's folder, one above it or the clone of this package; and that
    folder."""
    clone = Path(__file__).resolve().parents[2]
    for folder in (*spec.parents, clone, SHARED):
        if (folder / name).is_file():
            return folder / name, folder
    raise ValueError(
        f"{what}={name!r} of {spec} was found neither in a folder above the spec nor in {clone} nor in {SHARED}; give "
        "its whole path"
    )


def check_parameters(notebook: Path, names: Iterable[str]) -> None:
    """Refuse names that the notebook's parameters cell lacks (papermill itself only warns)."""
    known = load_papermill().inspect_notebook(str(notebook))
    check_names(names, known, f"parameter of {notebook.name}", RunConfig.elsewhere())


# A sweep's folder


def shown(path: Path) -> str:
    """A path as one would type it here: relative to the working folder where it lies in it."""
    return os.fspath(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _yaml(value: Any) -> str:
    """A value as one types it after `--set NAME=`."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").rstrip("\n")


def write_record(spec: Spec) -> None:
    """Say in the sweep's folder which spec it is of, for how many GPUs its rows are resolved and what `--set` changed
    in them, so that a report or `alst status` finds it and judges its rows as they were run. The spec is relative to
    the folder behind symlinks."""
    path = os.path.relpath(spec.path, spec.out.resolve())
    about = {"spec": path, "gpus": devices.device_count(), "nodes": spec.nodes, "changes": spec.changes}
    results.write_json(spec.out / RECORD, about)


def read_record(folder: Path) -> Json:
    """What `write_record` left in a folder; empty where it left nothing."""
    return locks.read_object(folder / RECORD) or {}


def opened(source: Path, out: str | Path | None) -> tuple[Path, Spec | None, str]:
    """A sweep that ran, by its spec or by its folder: the folder, the spec, where `alst run` left it named, and why it
    cannot be used.

    Raises:
        ValueError: a spec that cannot be used, or `out` beside a folder.
    """
    if not source.is_dir():
        spec = load_spec(source, out, as_run=True)
        return spec.out, spec, ""
    if out:
        raise ValueError(f"--out {out} needs a spec, and {source} is a folder")
    if (name := read_record(source).get("spec")) is None:
        return source, None, ""
    try:
        return source, load_spec(source.resolve() / name, source, as_run=True), ""
    except ValueError as e:
        return source, None, f"its spec cannot be read, so it is not known which rows are stale: {e}"


def sweeps() -> list[Path]:
    """Folders with runs below papermill_runs/out, of the folder that one stands in (`launch.default_home`)."""
    found = (launch.default_home() / OUT).glob("*")
    return sorted(p for p in found if (p / RECORD).exists() or any(p.glob("*/config.json")))
