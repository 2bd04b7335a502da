"""`result.json`, the only record of a run's result: how it is written, read, collected and put into a table.

Imports neither torch nor transformers, so that a launcher or a report starts at once.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import to_json

from alstlib.base.config import FIELDS, PAPER_ROWS, ROWS, RunConfig, flat
from alstlib.base.options import Json
from alstlib.base.units import format_bytes, format_seconds, format_tokens

SCHEMA_VERSION = 1
Status = Literal["ok", "oom", "timeout", "cancelled", "error"]
STATUSES: tuple[str, ...] = get_args(Status)
FINISHED = ("ok", "oom")
"""Statuses that say something about the configuration, not about the attempt: such a run is not repeated."""


def differences(then: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """In words, under which of these names the two say different things."""
    return [f"{n}={then.get(n)!r} (here {now.get(n)!r})" for n in names if then.get(n) != now.get(n)]


# Strict JSON, written atomically


def as_json(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON: tensors become lists, NaN and infinities null.

    Raises:
        ValueError: it holds something that JSON cannot.
    """
    return to_json(value, indent=indent, inf_nan_mode="null", fallback=_plain).decode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return value.tolist()
    raise ValueError(f"{value!r} ({type(value).__name__}) cannot be written as JSON")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value`, as `replace_text` does."""
    replace_text(path, f"{as_json(value, 1)}\n")


def replace_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader sees the old file or the new one, and a failure keeps the old.

    Raises:
        OSError: with the errno of the failure (ENOSPC on a full disk); the temporary file is gone by then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise OSError(e.errno, f"could not write {path.name}: {e.strerror}; what was there is intact", str(path)) from e


# One result


def new_result(
    config: RunConfig, status: str, *, mode: str = "real", metrics: Json | None = None,
    error: Json | None = None, device: str | None = None, device_count: int | None = None,
) -> Json:  # fmt: skip
    """A complete `result.json` as a dictionary.

    `metrics` holds seq_len, tokens_per_step, step_seconds[], loss[], device_peak_bytes[] and host_peak_bytes[] (one a
    rank), wire_bytes (a step), flos {paper, model} (a step, all ranks), tflops {paper, model} (a rank) and mfu.
    `error` holds type, message and log_tail, and `rank` where the error is that of one rank. `device` is the device's
    name.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id(config),
        "row": config.row or None,
        "status": status,
        "mode": mode,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config.to_dict(),
        "git": git_facts(),
        "environment": environment(device, device_count),
        "metrics": dict(metrics or {}),
        "error": {"type": "", "message": "", "log_tail": "", **error} if error else None,
    }


def why(result: Json) -> str:
    """What a result says went wrong: the error's type, whose rank it is, and its message; empty without an error."""
    if not (error := result["error"]):
        return ""
    whose = f" on rank {error['rank']}" if "rank" in error else ""
    return f"{error['type']}{whose}: {error['message']}".removesuffix(": ")


# What a result.json may hold. JSON has no infinities and no NaN: they are null.
Number = float | None
Numbers = list[Number] | None


class Predicted(BaseModel, strict=True):
    """What the planner said, in bytes of a rank and seconds; `unknown` says why it said nothing."""

    step_seconds: Number = None
    device_peak_bytes: Number = None
    host_peak_bytes: Number = None


class Metrics(BaseModel, strict=True):
    """What tables and figures take of the metrics; there are more."""

    seq_len: Number = None
    tokens_per_step: Number = None
    step_seconds: Numbers = None
    loss: Numbers = None
    loss_steps: Numbers = None
    eval_loss: Numbers = None
    eval_steps: Numbers = None
    device_peak_bytes: Numbers = None
    host_peak_bytes: Numbers = None
    tflops: dict[str, Number] | None = None
    predicted: Predicted | None = None
    notes: list[Any] | None = None
    tried: list[Json] | None = None


class Result(BaseModel, strict=True):
    """A result.json."""

    schema_version: Literal[1]
    run_id: str
    row: str | None
    status: Status
    mode: Literal["real", "simulated", "emulated"]
    finished: Annotated[str, AfterValidator(datetime.datetime.fromisoformat)]
    config: Json
    git: Json
    environment: Json
    metrics: Metrics
    error: Json | None


def check(text: str | bytes, source: str) -> None:
    """Raise ValueError unless `text` is a result.json of this version; it names `source` and the first wrong field."""
    try:
        Result.model_validate_json(text)
    except ValidationError as e:
        wrong = e.errors()[0]
        found = f"{'.'.join(map(str, wrong['loc']))}={wrong['input']!r:.60}"
        raise ValueError(f"{source} is no result that this alstlib reads: {found}: {wrong['msg']}") from None


def write_result(path: str | Path, result: Json) -> None:
    """Write `result.json` atomically. NaN and infinities become null.

    Raises:
        ValueError: the result lacks a field or holds something JSON cannot.
        OSError: the disk is full or not writable; an earlier result at `path` is intact.
    """
    check(as_json(result), "this")
    write_json(Path(path), result)


def read_result(path: str | Path) -> Json:
    """Read and check a `result.json`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON, another schema version, or a field that no run writes.
    """
    text = Path(path).read_bytes()
    check(text, str(path))
    return json.loads(text)


def version(path: Path) -> tuple[int, int] | None:
    """Time and inode of a file, which differ once it is replaced; None where there is no file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns, path.stat().st_ino
    return None


def run_id(config: RunConfig) -> str:
    """12 hexadecimal digits that name a resolved configuration at the package's commit."""
    return config.digest(git_facts()["sha"])


def git_facts(folder: str | Path | None = None) -> Json:
    """`{"sha", "dirty"}` of the commit that `folder` (default: this package) is at; sha 'unknown' outside git.

    Only changes below `folder` make it dirty, so that a sweep that writes reports does not.
    """

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder or Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {"sha": "unknown", "dirty": None}


@functools.cache
def _installed() -> dict[str, str]:
    """The version of every installed distribution: `d.name` and `d.version` would each read its file."""
    found = (d.metadata for d in importlib.metadata.distributions())
    return {of["Name"].lower().replace("_", "-"): of["Version"] for of in found if of["Name"]}


def environment(device: str | None = None, device_count: int | None = None) -> Json:
    """Versions of what decides a run. `lock_hash` covers every installed distribution and its version."""
    found = _installed()
    lock = json.dumps(found, sort_keys=True).encode()
    return {
        "python": platform.python_version(), "torch": found.get("torch"), "transformers": found.get("transformers"),
        "deepspeed": found.get("deepspeed"), "liger": found.get("liger-kernel"), "device": device,
        "device_count": device_count, "lock_hash": hashlib.sha256(lock).hexdigest()[:12],
    }  # fmt: skip


# Many results


def collect(folder: str | Path, order: Iterable[str] = ROWS) -> list[Json]:
    """Every result below `folder`, in this order of their rows, each with its `folder` and its `label`: the path below
    `folder`, which no other has. Unreadable ones are left out with a warning."""
    found = []
    for path in sorted(Path(folder).rglob("result.json")):
        try:
            result = read_result(path)
        except (OSError, ValueError) as e:
            warnings.warn(f"left out: {e}", stacklevel=2)
            continue
        label = path.parent.relative_to(folder).as_posix()
        label = label if label != "." else result["row"] or result["run_id"]
        found.append({**result, "folder": path.parent, "label": label})
    place = {row: i for i, row in enumerate(order)}
    return sorted(found, key=lambda result: place.get(result["row"], len(place)))


SWEPT = 6
"""Runs that differ in more fields than these are not shown as a sweep over them."""


def swept(results: Sequence[Json]) -> list[str]:
    """The fields of RunConfig in which results differ; none where their rows are those of the ablation, whose names say
    it, or where they differ in too many."""
    configs = [flat(r["config"]) for r in results if r["config"]]
    names = [n for n in FIELDS if n != "row" and len({str(config.get(n)) for config in configs}) > 1]
    return [] if len(names) > SWEPT or all(r["row"] in ROWS for r in results) else names


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seq_len": ("length", format_tokens), "loss": ("last loss", "{:.4g}".format),
    "step_seconds": ("step", format_seconds), "predicted_step_seconds": ("predicted step", format_seconds),
    "tokens_per_second": ("tokens/s", _number),
    "device_peak_bytes": ("device peak", format_bytes),
    "predicted_device_peak_bytes": ("predicted device peak", format_bytes),
    "host_peak_bytes": ("host peak, all ranks", format_bytes),
    "predicted_host_peak_bytes": ("predicted host peak, all ranks", format_bytes),
    "tflops_paper": ("TFLOPS, paper's FLOS", _number), "tflops_model": ("TFLOPS, model FLOS", _number),
    "paper_seq_len": ("paper: length", format_tokens), "paper_step_seconds": ("paper: step", format_seconds),
    "paper_tflops": ("paper: TFLOPS", _number),
}  # fmt: skip
"""Heading and format of each column of `table` that has not its name for a heading."""


def table(results: Iterable[Json]) -> list[Json]:
    """One dictionary for each result, in the order of a table's columns: the fields in which the results differ, what
    was measured (bytes, seconds, tokens, TFLOPS of a rank), what was predicted, and the paper's row; and `notes`.

    `loss` is that of the last step, `device_peak_bytes` that of the fullest rank, `host_peak_bytes` the sum over the
    ranks. `row` is the result's `label` where it has one.
    """
    results = list(results)
    fields = [name for name in swept(results) if name != "data.seq_len"]
    made = []
    for result in results:
        config = flat(result["config"])
        row = result.get("label") or result["row"] or result["run_id"]
        paper = {f"paper_{name}": value for name, value in PAPER_ROWS.get(result["row"], {}).items()}
        known = {**paper, **_measured(result["metrics"], config.get("engine.world_size") or 1)}
        made.append({
            "row": row, "status": result["status"], "mode": result["mode"],
            **{name: config.get(name) for name in fields}, **{name: known.get(name) for name in COLUMNS},
            "notes": result["metrics"].get("notes") or [],
        })  # fmt: skip
    return made


def _measured(metrics: Json, ranks: int) -> Json:
    """A row's numbers, by the names of the columns. What is predicted of host memory is of one of the `ranks`."""
    device, host, losses = (
        [x for x in metrics.get(name) or () if x is not None]
        for name in ("device_peak_bytes", "host_peak_bytes", "loss")
    )
    seconds, tokens = step_seconds(metrics), metrics.get("tokens_per_step")
    predicted = metrics.get("predicted") or {}
    if (host_peak := predicted.get("host_peak_bytes")) is not None:
        predicted = {**predicted, "host_peak_bytes": host_peak * ranks}
    return {
        "seq_len": metrics.get("seq_len"),
        "loss": losses[-1] if losses else None,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens and seconds else None,
        "device_peak_bytes": max(device, default=None),
        "host_peak_bytes": sum(host) or None,
        **{f"predicted_{name}": value for name, value in predicted.items()},
        **{f"tflops_{name}": value for name, value in (metrics.get("tflops") or {}).items()},
    }


def step_seconds(metrics: Json) -> float | None:
    """Median seconds of an optimizer step (the worker leaves out those whose memory is watched)."""
    times = [x for x in metrics.get("step_seconds") or () if x is not None]
    return statistics.median(times) if times else None


def cells(rows: Sequence[Json], columns: Iterable[str] | None = None) -> tuple[dict[str, str], list[list[str]]]:
    """The heading of each column of `table`'s rows, by its name, and the texts of each row. What was not measured is
    `-`, and columns that are all so are left out."""
    names = columns or [n for n in rows[0] if n != "notes" and any(row[n] is not None for row in rows)]
    known = {name: COLUMNS.get(name, (name, str)) for name in names}
    texts = [["-" if row[n] is None else show(row[n]) for n, (_, show) in known.items()] for row in rows]
    return {name: heading for name, (heading, _) in known.items()}, texts


def to_markdown(rows: Sequence[Json], columns: Iterable[str] | None = None) -> str:
    """`table`'s rows as a Markdown table; see `cells`."""
    heads, texts = cells(rows, columns)
    lines = [[*heads.values()], ["---"] * len(heads), *([text.replace("|", "\\|") for text in row] for row in texts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def notes(rows: Iterable[Json]) -> list[str]:
    """A line of Markdown for each thing that must be known of `table`'s rows, such as data that were repeated."""
    return [f"- {row['row']}: {note}" for row in rows for note in row["notes"]]


def with_notes(rows: Sequence[Json]) -> str:
    """`to_markdown` of `table`'s rows, and their `notes` below it."""
    return "\n".join([to_markdown(rows), "", *notes(rows)]).rstrip("\n")
