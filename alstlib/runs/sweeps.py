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

A file with none of notebook, base and rows holds the parameters of notebooks/run.ipynb, for a single run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alstlib.config import FIELDS, ROWS, RunConfig, flat, merged, nearest_path, row_config
from alstlib.options import FOLDER_NAME, check_names
from alstlib.planner import devices
from alstlib.runs import launch, locks, results, workers
from alstlib.runs.launch import OUT

RECORD = "sweep.json"
"""Left in a sweep's folder by `alst run`: which spec it is of, its rows, and how many GPUs the machine had."""
TAKEN = (RECORD, "report.html", "logs")
"""Names in a sweep's folder that no row may have."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A sweep whose names were all checked and whose rows are resolved for a machine."""

    name: str
    path: Path
    root: Path
    """The folder that its notebook's name begins at: the repository, for a spec outside of it too."""
    home: Path
    """The folder with papermill_runs/out, where its results go if nothing else is said."""
    notebook: Path
    parameters: Mapping[str, Any]
    rows: Mapping[str, RunConfig]
    sets: Mapping[str, frozenset[str]]
    """Names of the fields that each row sets, beyond the base."""
    seconds: Mapping[str, float]
    """What rows took where the spec was written, of those that say so: from it the rest of a sweep is estimated."""
    report: Path | None
    out: Path
    nodes: int = 1
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What `--set` changed in every row."""

    @property
    def worker(self) -> str:
        return str(self.parameters.get("worker", workers.ABLATION))

    def typed(self, verb: str, *flags: str, at: Path | None = None) -> str:
        """`alst VERB SPEC [--out FOLDER] FLAGS` for a shell, as typed in the folder `at`; without one, here. `run` gets
        the `--set` of this sweep again; the other commands read it in the folder."""
        usual = self.out.resolve() == ((at or self.home) / OUT / self.name).resolve()
        path, out = (os.path.relpath(p, at) if at else shown(p) for p in (self.path, self.out))
        sets = [word for name, value in self.changes.items() for word in ("--set", f"{name}={_yaml(value)}")]
        where = [] if usual else ["--out", out]
        return shlex.join(["alst", verb, path, *where, *(sets if verb == "run" else []), *flags])

    @property
    def command(self) -> str:
        """What runs it, typed in `root`."""
        return self.typed("run", at=self.root)


def load_spec(
    path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, as_run: bool = False, nodes: int = 1,
    changes: Mapping[str, Any] | None = None,
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
    path, spec = _read(path)
    name = str(spec.get("name") or path.stem)
    _check_folder_name("name", name)
    notebook, root = _locate(spec.get("notebook") or "notebooks/run.ipynb", path)
    home = root if path.is_relative_to(root) else launch.default_home()
    folder = Path(out).resolve() if out else home / OUT / name
    record = read_record(folder) if as_run else {}
    gpus = record["gpus"] if isinstance(record.get("gpus"), int) else devices.device_count()
    nodes = record["nodes"] if isinstance(record.get("nodes"), int) else nodes
    changes = record["changes"] if isinstance(record.get("changes"), dict) else changes or {}
    device = "cuda" if gpus else "cpu"
    base = RunConfig.from_dict(_for_device(spec.get("base") or {}, device))
    rows: dict[str, RunConfig] = {}
    sets: dict[str, frozenset[str]] = {}
    of_base = flat(base.to_dict())
    seconds: dict[str, float] = {}
    for given in spec.get("rows") or []:
        row, fields = _row(given)
        if row in rows:
            raise ValueError(f"row '{row}' is named twice in {path}")
        fields = _for_device(fields, device)
        if (took := fields.pop("seconds", None)) is not None:
            if not isinstance(took, int | float) or isinstance(took, bool) or took <= 0:
                raise ValueError(f"row '{row}': seconds={took!r} must be a number above 0")
            seconds[row] = float(took)
        config = row_config(row, base) if row in ROWS else base.replace(row=row)
        config = config.replace(**fields).replace(**changes)
        changed = {name for name, value in flat(config.to_dict()).items() if of_base.get(name, ...) != value}
        sets[row] = frozenset(changed | set(flat(merged({}, fields))))
        rows[row] = launch.resolve(config, launch.node_count(config, nodes), gpus)
    if not rows:
        raise ValueError(f"the spec {path} has no rows; list at least one under 'rows'")
    report = _locate(spec["report"], path)[0] if spec.get("report") else None
    parameters = dict(spec.get("parameters") or {})
    return Spec(
        name=name, path=path, root=root, home=home, notebook=notebook, parameters=parameters, rows=rows, sets=sets,
        seconds=seconds, report=report, out=folder, nodes=nodes, changes=changes,
    )  # fmt: skip


def _read(given: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The whole path of a spec and what is in it, or in the parameters of a single run."""
    path = Path(os.path.realpath(Path(given).absolute()))  # Path.resolve fails on a link that leads back to itself
    if not path.exists():
        asked = Path(given).absolute()
        raise ValueError(f"the spec {shown(asked)} does not exist; {nearest_path(asked)}")
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ValueError(f"the spec {path} cannot be read: {e}") from e
    if not isinstance(spec, dict):
        raise ValueError(f"the spec {path} must be a mapping with the keys name, notebook, base and rows")
    if not {"rows", "base", "notebook"} & set(spec):
        spec = _one_run(spec, path)
    known = ["name", "notebook", "base", "rows", "parameters", "report"]
    check_names(spec, known, "field of a spec", {name.split(".")[-1]: f"base: {{{name}: ...}}" for name in FIELDS})
    return path, spec


def _row(given: Any) -> tuple[str, dict[str, Any]]:
    """The name of a row, and the fields that it sets."""
    fields = dict(given) if isinstance(given, Mapping) else {"name": given}
    row = str(fields.pop("name", ""))
    fields.pop("expect", None)
    _check_folder_name("row", row)
    if row in TAKEN:
        raise ValueError(f"row '{row}' has the name of a file or folder of the sweep itself: give it another name")
    if not isinstance(given, Mapping):
        check_names([row], ROWS, "row")
    return row, fields


def _check_folder_name(what: str, text: str) -> None:
    if not re.fullmatch(FOLDER_NAME, text):
        raise ValueError(
            f"{what}={text!r} must be a folder's name, such as 'baseline': letters, digits and _ . + - only"
        )


def _one_run(parameters: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The spec of a single run, from parameters of notebooks/run.ipynb: `row`, the run's groups, `config`, `worker`.
    As in the notebook, what is given wins over what the row turns on, and `config` over all."""
    own = {n: v for n, v in parameters.items() if n not in ("row", "worker", "out", "force", "config")}
    named = {"worker": parameters["worker"]} if "worker" in parameters else {}
    if parameters.get("row"):
        check_names([str(parameters["row"])], ROWS, "row")
    row = {"name": parameters.get("row") or "run", **merged(merged({}, own), parameters.get("config") or {})}
    return {"name": path.stem, "rows": [row], "parameters": named}


def _for_device(fields: Mapping[str, Any], device: str) -> dict[str, Any]:
    """`fields` with the section of this device merged in and both sections gone."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"base={fields!r} must be a mapping of RunConfig's fields to values")
    plain = {k: v for k, v in fields.items() if k not in ("cpu", "cuda")}
    return merged(plain, fields.get(device) or {})


def _locate(name: str, spec: Path) -> tuple[Path, Path]:
    """A notebook named by a spec, relative to the spec's folder, one above it or the clone of this package; and that
    folder."""
    clone = Path(__file__).resolve().parents[2]
    for folder in (*spec.parents, clone):
        if (folder / name).is_file():
            return folder / name, folder
    raise ValueError(
        f"notebook={name!r} of {spec} was found neither in a folder above the spec nor in {clone}; give its whole path"
    )


def papermill_line(notebook: str, output: str, parameters: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """What runs a row by itself, for a shell: the template with a sweep's parameters, and with these fields of a
    run, by their names with the group. They go under `config`: the parameter `row` is a row of the ablation only."""
    given = json.dumps({**parameters, "config": merged({}, fields)}, default=str)
    return shlex.join(["papermill", notebook, output, "-y", given])


def check_parameters(notebook: Path, names: Iterable[str]) -> None:
    """Refuse names that the notebook's parameters cell lacks (papermill itself only warns)."""
    import papermill

    try:
        known = papermill.inspect_notebook(str(notebook))
    except Exception:  # of whatever file it is; its text is nobody's here
        raise ValueError(f"notebook={str(notebook)!r} is not a Jupyter notebook that can be read") from None
    elsewhere = {n.split(".")[-1]: n for n in FIELDS if n.split(".")[0] in known}
    check_names(names, known, f"parameter of {notebook.name}", elsewhere)


def select(spec: Spec, rows: str | None) -> list[str]:
    """The rows named in a list with commas; all without one."""
    names = [r.strip() for r in rows.split(",") if r.strip()] if rows else list(spec.rows)
    check_names(names, spec.rows, "row")
    return names


# A sweep's folder


def shown(path: Path) -> str:
    """A path as one would type it here: relative to the working folder where it lies in it."""
    try:
        return os.fspath(path.relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)


def _yaml(value: Any) -> str:
    """A value as one types it after `--set NAME=`."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").rstrip("\n")


def write_record(spec: Spec) -> None:
    """Say in the sweep's folder which spec it is of, for how many GPUs its rows are resolved and what `--set` changed
    in them, so that a report or `alst status` finds it and judges its rows as they were run. The spec is relative to
    the folder behind symlinks."""
    results.write_json(
        spec.out / RECORD,
        {"name": spec.name, "spec": os.path.relpath(spec.path, spec.out.resolve()), "rows": list(spec.rows),
         "command": spec.command,
         "notebook": Path(os.path.relpath(spec.notebook, spec.root)).as_posix(),
         "parameters": results.strict(spec.parameters),
         "gpus": devices.device_count(), "nodes": spec.nodes, "changes": results.strict(spec.changes)},
    )  # fmt: skip


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` left in a folder; empty where it left nothing."""
    return locks.read_object(folder / RECORD) or {}


def sweeps() -> list[Path]:
    """Folders with runs below papermill_runs/out, of the folder that one stands in (`launch.default_home`)."""
    found = (launch.default_home() / OUT).glob("*")
    return sorted(p for p in found if (p / RECORD).exists() or any(p.glob("*/config.json")))
