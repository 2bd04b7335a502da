"""Sweeps of runs, described by YAML files (papermill_runs/specs/): reading such a spec, and the record in its folder.

A spec is a mapping of

    name        of the sweep; its results go to papermill_runs/out/NAME/ROW/: of the checkout that the spec lies in, and
                for a spec elsewhere, of the folder that one stands in (`launch.default_home`)
    notebook    the run template that papermill executes for each row
    base        fields of RunConfig; its sections `cpu` and `cuda` apply where no GPU, or one, is found
    rows        names out of config.ROWS, or mappings with a `name` and fields of RunConfig; `expect` says what should
                come out (env/gpu.py reads it)
    parameters  optional: more parameters of the notebook
    report      optional: a notebook that is executed at the end with the parameter `results`, the sweep's folder

A file with none of notebook, base and rows holds the parameters of notebooks/run.ipynb, for a single run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alstlib.config import FOLDER_NAME, ROWS, RunConfig, check_names, nearest_path, row_config
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
    sets: Mapping[str, Mapping[str, Any]]
    """What each row says beyond the base."""
    seconds: Mapping[str, float]
    """What rows took where the spec was written, of those that say so: from it the rest of a sweep is estimated."""
    report: Path | None
    out: Path
    nodes: int = 1

    @property
    def worker(self) -> str:
        return str(self.parameters.get("worker", workers.ABLATION))

    def typed(self, verb: str, *flags: str, at: Path | None = None) -> str:
        """`alst VERB SPEC [--out FOLDER] FLAGS` for a shell, as typed in the folder `at`; without one, here."""
        usual = self.out.resolve() == ((at or self.home) / OUT / self.name).resolve()
        path, out = (os.path.relpath(p, at) if at else shown(p) for p in (self.path, self.out))
        return shlex.join(["alst", verb, path, *([] if usual else ["--out", out]), *flags])

    @property
    def command(self) -> str:
        """What runs it, typed in `root`."""
        return self.typed("run", at=self.root)


def load_spec(
    path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, as_run: bool = False, nodes: int = 1
) -> Spec:
    """Read and check a spec; `out` replaces the folder of its results. Its rows are resolved for so many nodes like
    this one, or with `as_run` for those that ran the sweep, where its folder says which: a login node asks about a node
    with GPUs.

    Raises:
        ValueError: what cannot be read, unknown names (with the nearest known one), or values RunConfig refuses.
    """
    given = Path(path).absolute()
    path = Path(os.path.realpath(given))  # Path.resolve fails on a link that leads back to itself
    if not path.exists():
        raise ValueError(f"the spec {shown(given)} does not exist; {nearest_path(given)}")
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ValueError(f"the spec {path} cannot be read: {e}") from e
    if not isinstance(spec, dict):
        raise ValueError(f"the spec {path} must be a mapping with the keys name, notebook, base and rows")
    names = ["name", "notebook", "base", "rows", "parameters", "report"]
    if not {"rows", "base", "notebook"} & set(spec):
        spec = _one_run(spec, path)
    check_names(spec, names, "field of a spec", "base", RunConfig.__dataclass_fields__)
    name = str(spec.get("name") or path.stem)
    notebook, root = _locate(spec.get("notebook") or "notebooks/run.ipynb", path)
    home = root if path.is_relative_to(root) else launch.default_home()
    folder = Path(out).resolve() if out else home / OUT / name
    record = read_record(folder) if as_run else {}
    gpus = record["gpus"] if isinstance(record.get("gpus"), int) else devices.device_count()
    nodes = record["nodes"] if isinstance(record.get("nodes"), int) else nodes
    device = "cuda" if gpus else "cpu"
    rows: dict[str, RunConfig] = {}
    sets: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    for given in spec.get("rows") or []:
        fields = dict(given) if isinstance(given, Mapping) else {"name": given}
        row = str(fields.pop("name", ""))
        fields.pop("expect", None)
        if (took := _for_device(fields, device).get("seconds")) is not None:
            if not isinstance(took, int | float) or isinstance(took, bool) or took <= 0:
                raise ValueError(f"row '{row}': seconds={took!r} must be a number above 0")
            seconds[row] = float(took)
        for what, text in (("name", name), ("row", row)):
            if not re.fullmatch(FOLDER_NAME, text):
                raise ValueError(
                    f"{what}={text!r} must be a folder's name, such as 'baseline': letters, digits and _ . + - only"
                )
        if row in TAKEN:
            raise ValueError(f"row '{row}' has the name of a file or folder of the sweep itself: give it another name")
        if row in rows:
            raise ValueError(f"row '{row}' is named twice in {path}")
        if not isinstance(given, Mapping):
            check_names({row: None}, ROWS, "row")
        base = RunConfig.from_dict(_for_device(spec.get("base") or {}, device))
        config = row_config(row, base) if row in ROWS else base.replace(row=row)
        fields = {n: v for n, v in _for_device(fields, device).items() if n != "seconds"}
        config, sets[row] = config.replace(**fields), {**ROWS.get(row, {}), **fields}
        rows[row] = launch.resolve(config, launch.node_count(config, nodes), gpus)
    if not rows:
        raise ValueError(f"the spec {path} has no rows; list at least one under 'rows'")
    report = _locate(spec["report"], path)[0] if spec.get("report") else None
    parameters = dict(spec.get("parameters") or {})
    return Spec(
        name=name, path=path, root=root, home=home, notebook=notebook, parameters=parameters, rows=rows, sets=sets,
        seconds=seconds, report=report, out=folder, nodes=nodes,
    )  # fmt: skip


def _one_run(parameters: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The spec of a single run, from parameters of notebooks/run.ipynb: `row`, `config`, its fields, `worker`."""
    base = {n: v for n, v in parameters.items() if n not in ("row", "config", "worker", "out", "force")}
    named = {"worker": parameters["worker"]} if "worker" in parameters else {}
    row = parameters.get("row") or {"name": "run"}
    return {"name": path.stem, "base": {**base, **(parameters.get("config") or {})}, "rows": [row], "parameters": named}


def _for_device(fields: Mapping[str, Any], device: str) -> dict[str, Any]:
    """`fields` with the section of this device merged in and both sections gone."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"base={fields!r} must be a mapping of RunConfig's fields to values")
    plain = {k: v for k, v in fields.items() if k not in ("cpu", "cuda")}
    return {**plain, **(fields.get(device) or {})}


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


def papermill_line(notebook: str, output: str, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What runs a row by itself, for a shell: the template with a sweep's parameters, and with those fields of `config`
    that are not the default."""
    default = RunConfig().to_dict()
    fields = {n: v for n, v in config.items() if n in default and v != default[n]}
    return shlex.join(["papermill", notebook, output, "-y", json.dumps({**parameters, "config": fields}, default=str)])


def check_parameters(notebook: Path, names: Iterable[str]) -> None:
    """Refuse names that the notebook's parameters cell lacks (papermill itself only warns)."""
    import papermill

    try:
        known = papermill.inspect_notebook(str(notebook))
    except Exception:  # of whatever file it is; its text is nobody's here
        raise ValueError(f"notebook={str(notebook)!r} is not a Jupyter notebook that can be read") from None
    inside = RunConfig.__dataclass_fields__ if "config" in known else ()
    check_names(dict.fromkeys(names), known, f"parameter of {notebook.name}", "config", inside)


def select(spec: Spec, rows: str | None) -> list[str]:
    """The rows named in a list with commas; all without one."""
    names = [r.strip() for r in rows.split(",") if r.strip()] if rows else list(spec.rows)
    check_names(dict.fromkeys(names), spec.rows, "row")
    return names


# A sweep's folder


def shown(path: Path) -> str:
    """A path as one would type it here: relative to the working folder where it lies in it."""
    try:
        return os.fspath(path.relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)


def write_record(spec: Spec) -> None:
    """Say in the sweep's folder which spec it is of and for how many GPUs its rows are resolved, so that a report or
    `alst status` finds it and judges its rows as they were run. The spec is relative to the folder behind symlinks."""
    results.write_json(
        spec.out / RECORD,
        {"name": spec.name, "spec": os.path.relpath(spec.path, spec.out.resolve()), "rows": list(spec.rows),
         "command": spec.command,
         "notebook": Path(os.path.relpath(spec.notebook, spec.root)).as_posix(),
         "parameters": results.strict(spec.parameters),
         "gpus": devices.device_count(), "nodes": spec.nodes},
    )  # fmt: skip


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` left in a folder; empty where it left nothing."""
    return locks.read_object(folder / RECORD) or {}


def sweeps() -> list[Path]:
    """Folders with runs below papermill_runs/out, of the folder that one stands in (`launch.default_home`)."""
    found = (launch.default_home() / OUT).glob("*")
    return sorted(p for p in found if (p / RECORD).exists() or any(p.glob("*/config.json")))
