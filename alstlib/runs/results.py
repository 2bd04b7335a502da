"""`result.json`, the only record of a run's result: how it is written, read, collected and put into a table.

Imports neither torch nor transformers, so that a launcher or a report starts at once.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alstlib.config import FIELDS, PAPER_ROWS, ROWS, RunConfig, flat
from alstlib.runs.processes import MORE_FILES
from alstlib.units import format_bytes, format_seconds, format_tokens

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "timeout", "cancelled", "error")
MODES = ("real", "simulated", "emulated")
FINISHED = ("ok", "oom")
"""Statuses that say something about the configuration, not about the attempt: such a run is not repeated."""


# Strict JSON, written atomically


def strict(value: Any, nonfinite: list[str], path: str = "") -> Any:
    """`value` as plain JSON types. NaN and infinities become None and their paths are appended to `nonfinite`.

    Raises:
        ValueError: a value that JSON cannot hold (the path says where).
    """
    if isinstance(value, Mapping):
        return {str(k): strict(v, nonfinite, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v, nonfinite, f"{path}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return strict(value.tolist(), nonfinite, path)
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(path)
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"{path or 'value'}={value!r} ({type(value).__name__}) cannot be written as JSON")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value`, as `replace_text` does."""
    replace_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


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
        why = "the disk is full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else e.strerror
        kept = "; the previous file is intact" if path.exists() else ""
        raise OSError(e.errno, f"could not write {path.name}: {why}{kept}", str(path)) from e


# One result


def new_result(
    config: RunConfig, status: str, *, mode: str = "real", metrics: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None, device: str | None = None, device_count: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A complete `result.json` as a dictionary.

    `metrics` holds seq_len, tokens_per_step, step_seconds[], loss[], device_peak_bytes[] and host_peak_bytes[] (one a
    rank), wire_bytes (a step), flos {paper, model} (a step, all ranks), tflops {paper, model} (a rank) and mfu.
    `error` holds type, message and log_tail, and `rank` where the error is that of one rank. `device` is the device's
    name.
    """
    if error and os.strerror(errno.EMFILE) in str(error.get("message")):
        error = {**error, "message": f"{error['message']}: {MORE_FILES}"}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id(config),
        "row": config.row or None,
        "status": status,
        "mode": mode,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config.to_dict(),
        "git": git_state(),
        "environment": environment(device, device_count),
        "metrics": dict(metrics or {}),
        "error": {"type": "", "message": "", "log_tail": "", **error} if error else None,
    }


def why(result: Mapping[str, Any]) -> str:
    """What a result says went wrong: the error's type, whose rank it is, and its message; empty without an error."""
    error = result.get("error") or {}
    whose = f" on rank {error['rank']}" if error.get("rank") is not None else ""
    return ": ".join(part for part in (f"{error.get('type') or ''}{whose}", str(error.get("message") or "")) if part)


def check_result(result: Mapping[str, Any], source: str = "result") -> None:
    """Raise ValueError unless `result` has this version's schema, a known status and a known mode."""
    if not isinstance(result, Mapping) or "schema_version" not in result:
        raise ValueError(f"{source} is not a result.json: it has no schema_version")
    if result["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"{source} has schema_version={result['schema_version']}; this alstlib reads {SCHEMA_VERSION}")
    for name in ("run_id", "config", "git", "environment", "metrics"):
        if name not in result:
            raise ValueError(f"{source} has no '{name}'")
    for name in ("config", "git", "environment", "metrics", "error"):
        if not isinstance(result.get(name), Mapping) and (name != "error" or result.get(name) is not None):
            raise ValueError(f"{source} has {name}={result[name]!r:.60}, which is not a mapping")
    for name, known in (("status", STATUSES), ("mode", MODES)):
        if result.get(name) not in known:
            raise ValueError(f"{source} has {name}={result.get(name)!r}, not one of {', '.join(known)}")


METRICS: dict[str, Any] = {
    **dict.fromkeys(("step_seconds", "loss", "loss_steps", "eval_loss", "eval_steps", "notes", "tried"), list),
    **dict.fromkeys(("device_peak_bytes", "host_peak_bytes"), list),
    **dict.fromkeys(("flos", "tflops", "predicted"), dict),
    **dict.fromkeys(("seq_len", "tokens_per_step"), int | float),
}  # fmt: skip
"""The JSON types of what tables and figures take of the metrics."""
MORE: dict[str, Any] = {"notes": object, "tried": object, "predicted": int | float | dict | None}
"""What is in those that hold other things than numbers."""


def write_result(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write `result.json` atomically. NaN and infinities become null; `metrics.nonfinite` lists where they were.

    Raises:
        ValueError: the result lacks a field or holds something JSON cannot.
        OSError: the disk is full or not writable; an earlier result at `path` is intact.
    """
    check_result(result)
    nonfinite: list[str] = []
    plain = strict(result, nonfinite)
    if nonfinite:
        plain["metrics"]["nonfinite"] = nonfinite
    write_json(Path(path), plain)


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a `result.json`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON, another schema version, or an unknown status or mode.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    check_result(result, str(path))
    for name in METRICS.keys() & result["metrics"]:
        value, known = result["metrics"][name], MORE.get(name, int | float | None)
        parts = value if isinstance(value, list) else ()
        if isinstance(value, dict):  # `unknown` says why nothing is predicted
            parts = [part for key, part in value.items() if key != "unknown"]
        if not isinstance(value, METRICS[name] | None) or not all(isinstance(part, known) for part in parts):
            raise ValueError(f"{path} has metrics.{name}={value!r:.60}, which no run writes")
    if not isinstance(result.get("row"), str | None):
        raise ValueError(f"{path} has row={result['row']!r:.60}, which is not a name")
    return result


def version(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced; None where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns, path.stat().st_ino
    return None


def run_id(config: RunConfig) -> str:
    """12 hexadecimal digits that name a resolved configuration at the package's commit."""
    return config.digest(git_state()["sha"])


def git_state(folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
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
def _installed() -> tuple[dict[str, str], str]:
    found = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions() if d.name}
    lines = "\n".join(f"{name}=={version}" for name, version in sorted(found.items()))
    return found, hashlib.sha256(lines.encode()).hexdigest()[:12]


def environment(device: str | None = None, device_count: int | None = None) -> dict[str, Any]:
    """Versions of what decides a run. `lock_hash` covers every installed distribution and its version."""
    found, lock_hash = _installed()
    return {
        "python": platform.python_version(),
        **{name: found.get(name) for name in ("torch", "transformers", "deepspeed")},
        "liger": found.get("liger-kernel"),
        "device": device,
        "device_count": device_count,
        "lock_hash": lock_hash,
    }


# Many results


def collect(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every result below `folder`, in the order of the ablation, each with its `folder`.

    Of several results of a row (or, without a row, of a run id) in neighbouring folders, only the newest is taken.
    Unreadable ones are left out with a warning.
    """
    newest: dict[tuple[Path, str], dict[str, Any]] = {}
    for path in sorted(Path(folder).rglob("result.json")):
        try:
            result = {**read_result(path), "folder": str(path.parent)}
        except (OSError, ValueError) as e:
            warnings.warn(f"left out: {e}", stacklevel=2)
            continue
        key = (path.parent.parent, result.get("row") or result["run_id"])
        if key not in newest or result.get("finished", "") >= newest[key].get("finished", ""):
            newest[key] = result
    order = list(ROWS)
    place = {row: i for i, row in enumerate(order)}
    return sorted(newest.values(), key=lambda r: (place.get(r.get("row") or "", len(order)), r.get("row") or ""))


def step_seconds(metrics: Mapping[str, Any]) -> float | None:
    """Median seconds of an optimizer step (the worker leaves out those whose memory is watched)."""
    times = [t for t in metrics.get("step_seconds") or [] if t is not None]
    return statistics.median(times) if times else None


SWEPT = 6
"""Runs that differ in more fields than these are not shown as a sweep over them."""


def swept(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """The fields of RunConfig in which results differ; none where their rows are those of the ablation, whose names say
    it, or where they differ in too many."""
    results = [r for r in results if r["config"]]
    if all(r.get("row") in ROWS for r in results):
        return []
    configs = [flat(r["config"]) for r in results]
    names = [name for name in FIELDS if name != "row"]
    values = {n: {json.dumps(c.get(n), sort_keys=True, default=str) for c in configs} for n in names}
    names = [n for n, different in values.items() if len(different) > 1]
    return names if len(names) <= SWEPT else []


def _setting(value: Any) -> str:
    """A field's value in a table."""
    return ", ".join(f"{n}={v}" for n, v in value.items()) if isinstance(value, Mapping) else str(value)


def table(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One dictionary for each result: what was measured (bytes, seconds, tokens, TFLOPS of a rank), what was predicted,
    and the paper's row.

    `loss` is that of the last step, `device_peak_bytes` that of the fullest rank, `host_peak_bytes` the sum over the
    ranks. `row` is the result's `label` where it was given one. `fields` are those in which the results differ.
    """
    rows, results = [], list(results)
    fields = swept(results)
    for result in results:
        m, row, config = result["metrics"], result.get("row") or "", flat(result["config"])
        seconds = step_seconds(m)
        paper = PAPER_ROWS.get(row, {})
        device, host = (
            [b for b in m.get(name) or [] if b is not None] for name in ("device_peak_bytes", "host_peak_bytes")
        )
        ranks = config.get("engine.world_size") or len(device) or 1
        tflops = m.get("tflops") or {}
        if seconds and not tflops:
            tflops = {k: v / seconds / ranks / 1e12 for k, v in (m.get("flos") or {}).items()}
        tokens = m.get("tokens_per_step")
        predicted = m.get("predicted") or {}
        its_host = predicted.get("host_peak_bytes")
        rows.append({
            "row": result.get("label") or row or result["run_id"],
            "status": result["status"],
            "mode": result["mode"],
            "fields": {n: _setting(config.get(n)) for n in fields if n != "data.seq_len"},
            "seq_len": m.get("seq_len"),
            "loss": next((x for x in reversed(m.get("loss") or []) if x is not None), None),
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds if tokens and seconds else None,
            "device_peak_bytes": max(device, default=None),
            "host_peak_bytes": sum(host) if host else None,
            "predicted_step_seconds": predicted.get("step_seconds"),
            "predicted_device_peak_bytes": predicted.get("device_peak_bytes"),
            "predicted_host_peak_bytes": None if its_host is None else its_host * ranks,
            "tflops_paper": tflops.get("paper"),
            "tflops_model": tflops.get("model"),
            "paper_seq_len": paper.get("seq_len"),
            "paper_step_seconds": paper.get("step_seconds"),
            "paper_tflops": paper.get("tflops"),
            "notes": [str(note) for note in m.get("notes") or []],
        })  # fmt: skip
    return rows


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "row": ("row", str), "status": ("status", str), "mode": ("mode", str),
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
"""Heading and format of each column of `table`."""


def cells(
    rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None
) -> tuple[dict[str, str], list[list[str]]]:
    """Of `table`'s rows: the heading of each column, by its name, and the texts of each row. What was not measured is
    `-`, and columns that are all so are left out. Without `columns`, the fields in which the rows differ come after the
    mode."""
    names = list(columns) if columns else [n for n in COLUMNS if any(row.get(n) is not None for row in rows)]
    fields = [] if columns or not rows else list(rows[0]["fields"])
    at = names.index("mode") + 1 if fields else 0
    names[at:at] = fields
    texts = [
        [row["fields"][n] if n in fields else "-" if row.get(n) is None else COLUMNS[n][1](row[n]) for n in names]
        for row in rows
    ]
    return {n: n if n in fields else COLUMNS[n][0] for n in names}, texts


def to_markdown(rows: Iterable[Mapping[str, Any]], columns: Iterable[str] | None = None) -> str:
    """`table`'s rows as a Markdown table; see `cells`."""
    heads, texts = cells(list(rows), columns)
    lines = [[*heads.values()], ["---"] * len(heads), *([text.replace("|", "\\|") for text in row] for row in texts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_notes(rows: Iterable[Mapping[str, Any]]) -> str:
    """`to_markdown` of `table`'s rows, and below it what must be known of each, such as data that were repeated."""
    rows = list(rows)
    notes = [f"- {row['row']}: {note}" for row in rows for note in row["notes"]]
    return "\n".join([to_markdown(rows), *([""] if notes else []), *notes])
