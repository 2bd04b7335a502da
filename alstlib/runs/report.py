"""`alst report` prints the table of results and writes a page of a sweep: one HTML file that needs no other file.

Nothing is computed here: figures are `plots` over results, the rest is what result.json says.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alstlib.config import FIELDS, RunConfig, flat
from alstlib.runs import results
from alstlib.runs.results import COLUMNS
from alstlib.runs.sweeps import Spec, load_spec, papermill_line, read_record, shown
from alstlib.units import format_bytes, format_tokens

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.j2")


def report(args: argparse.Namespace) -> int:
    """`alst report`: the table of a spec's results, or of those below a folder, and their page."""
    source = Path(args.source)
    if args.out and source.is_dir():
        raise ValueError(
            f"--out {args.out} needs a spec, and {source} is a folder; use --html to say where the page goes"
        )
    spec = None if source.is_dir() else load_spec(source, args.out, as_run=True)
    folder = spec.out if spec else source
    found = results.collect(folder)
    if not found:
        raise ValueError(f"there is no result.json below {folder}; run the sweep first, or name another folder")
    print(results.with_notes(results.table(labelled(in_order(found, folder, spec), folder))))
    page = write_page(folder, found, spec, Path(args.html) if args.html else None)
    print(f"\npage: {shown(page)}")
    return 0


def write_page(
    folder: Path, found: Sequence[Mapping[str, Any]], spec: Spec | None = None, page: Path | None = None
) -> Path:
    """Write the page of `results.collect(folder)` and return where it is: `folder`/report.html unless `page` says.

    Raises:
        OSError: it could not be written.
        ValueError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise ValueError("the page needs the package jinja2: pip install 'alstlib[notebooks]'") from None
    page = (page or folder / PAGE).resolve()
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = env.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(**contents(folder.resolve(), found, spec, page.parent))
    page.parent.mkdir(parents=True, exist_ok=True)
    results.replace_text(page, text)
    return page


NEVER = "never run"


def in_order(found: Sequence[Mapping[str, Any]], folder: Path, spec: Spec | None) -> list[Mapping[str, Any]]:
    """The results in the order of the sweep's rows, and in their place what stands for those that have none."""
    rows = list(spec.rows if spec else read_record(folder).get("rows", ()))
    missing = [
        {"row": name, "run_id": "", "status": NEVER, "mode": "-", "metrics": {}, "folder": str(folder / name),
         "config": spec.rows[name].to_dict() if spec else {}}
        for name in rows if name not in {r.get("row") for r in found}
    ]  # fmt: skip
    place = {name: i for i, name in enumerate(rows)}
    return sorted([*found, *missing], key=lambda r: place.get(r.get("row") or "", len(rows)))


def labelled(found: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The results, each with a `label` that no other has: its row or run id; where sweeps share it, its folder."""
    names = [str(r.get("row") or r["run_id"]) for r in found]
    paths = [_link(Path(r["folder"]).resolve(), folder.resolve()) for r in found]
    made = [path if names.count(name) > 1 else name for name, path in zip(names, paths)]
    made = made if len(set(made)) == len(made) else paths
    return [{**r, "label": label} for r, label in zip(found, made)]


def contents(folder: Path, found: Sequence[Mapping[str, Any]], spec: Spec | None, base: Path) -> dict[str, Any]:
    """What the template shows; links are relative to `base`."""
    record = read_record(folder)
    found = labelled(in_order(found, folder, spec), folder)
    table = results.table(found)
    heads, texts = results.cells(table)
    kinds = [_kind(n) for n in heads]
    body = [
        {"status": r["status"], "cells": list(zip(cells, kinds)), "anchor": "" if r["status"] == NEVER else _anchor(r)}
        for r, cells in zip(found, texts)
    ]
    never = sum(r["status"] == NEVER for r in found)
    found, table = zip(*((r, row) for r, row in zip(found, table) if r["status"] != NEVER))
    times = sorted(str(r["finished"]) for r in found if r.get("finished"))
    return {
        "title": (spec.name if spec else record.get("name")) or folder.name,
        "first": _when(times[0]) if times else "", "last": _when(times[-1]) if times else "",
        "written": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "counts": [
            *((s, n) for s in results.STATUSES if (n := sum(r["status"] == s for r in found))),
            *([(NEVER, never)] if never else []),
        ],
        "modes": sorted({str(r["mode"]) for r in found}), "head": list(zip(heads.values(), kinds)), "body": body,
        "predicted": any("predicted" in n for n in heads), "paper": any(n.startswith("paper_") for n in heads),
        "figures": list(figures(found, table)), "environments": environments(found),
        "command": spec.command if spec else str(record.get("command") or ""),
        "notebooks": [(p.name, _link(p, base)) for p in sorted(folder.glob("*.ipynb"))],
        "rows": [_row(r, base, spec) for r in found],
    }  # fmt: skip


def _kind(name: str) -> str:
    """The class of a column: of whom its numbers are."""
    whose = "predicted" if name.startswith("predicted_") else "paper" if name.startswith("paper_") else ""
    return f"{whose} {'number' if name in COLUMNS and name not in ('row', 'status', 'mode') else 'text'}".strip()


def _anchor(result: Mapping[str, Any]) -> str:
    return "row-" + re.sub(r"\s", "_", result["label"])


def _when(text: str) -> str:
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return text


def _link(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def _row(result: Mapping[str, Any], base: Path, spec: Spec | None) -> dict[str, Any]:
    """One result: its error, its configuration, what lies in its folder, and the command that repeats it alone."""
    folder = Path(result["folder"]).resolve()
    files = [*sorted(folder.glob("*.ipynb")), folder / "result.json"]
    default = flat(RunConfig().to_dict())
    fields = {n: v for n, v in flat(result["config"]).items() if n in FIELDS and v != default.get(n, ...)}
    error = result.get("error") or {}
    its_sweep = read_record(folder.parent)
    notebook = _link(spec.notebook, spec.root) if spec else its_sweep.get("notebook") or "notebooks/run.ipynb"
    parameters = spec.parameters if spec else its_sweep.get("parameters") or {}
    return {
        "anchor": _anchor(result), "name": result["label"], "status": result["status"],
        "mode": result["mode"], "run_id": result["run_id"], "finished": _when(str(result.get("finished") or "")),
        "why": results.why(result),
        "log_tail": error.get("log_tail") or "", "fields": fields,
        "notes": [str(n) for n in result["metrics"].get("notes") or []],
        "links": [(f.name, _link(f, base)) for f in files if f.exists()],
        "command": papermill_line(notebook, "out.ipynb", parameters, fields),
    }  # fmt: skip


def environments(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the results were made: each environment and commit once, with its rows."""
    made: dict[str, dict[str, Any]] = {}
    for result in found:
        git = result["git"]
        dirty = {True: "yes", False: "no"}.get(git.get("dirty"), "unknown")
        facts = {**result["environment"], "git commit": git.get("sha"), "git: uncommitted changes": dirty}
        one = made.setdefault(json.dumps(facts, sort_keys=True, default=str), {"rows": []})
        one["facts"] = {n.replace("_", " "): "-" if v is None else v for n, v in facts.items()}
        one["rows"].append(result["label"])
    return list(made.values())


# Figures

Results = Sequence[Mapping[str, Any]]


def figures(found: Results, table: Results) -> Iterator[dict[str, str]]:
    """Those that these results allow, as data URIs, each with what to see and an alternative text.

    One that fails says so in place of its picture (`source` is empty): a finished sweep is not lost by its page.
    Without matplotlib there are none.
    """
    try:
        from alstlib.figures import plots
    except ImportError:
        return
    kinds: dict[str, Callable[[Any, Results, Results], tuple[Any, str, str] | None]] = {
        "Longest sequence that fits": _longest, "Trials of the search": _trials,
        "Step over the swept field": functools.partial(_over, {"step_seconds": ""}, "time of a step [s]", 1),
        "Device peak over the swept field": functools.partial(
            _over, {"device_peak_bytes": "measured", "predicted_device_peak_bytes": "predicted"},
            "device peak of the fullest rank [MiB]", 2**20,
        ),
        "Last loss over the swept field": functools.partial(_over, {"loss": ""}, "loss of the last step", 1),
        "Device peak, measured and predicted": _predicted, "Losses": _losses,
    }  # fmt: skip
    for title, draw in kinds.items():
        try:
            if made := draw(plots, found, table):
                figure, what, alt = made
                yield {"title": title, "what": what, "alt": alt, "source": plots.data_uri(figure, 110)}
        except Exception as e:
            yield {"title": title, "what": f"It could not be drawn: {type(e).__name__}: {e}", "alt": "", "source": ""}


def _searched(found: Results) -> list[Mapping[str, Any]]:
    return [r for r in found if r.get("row") and r["metrics"].get("tried")]


def _reached(found: Results, table: Results) -> str:
    return ", ".join(
        f"{row['row']} {format_tokens(row['seq_len'])}"
        for result, row in zip(found, table) if result in _searched(found) and row.get("seq_len")
    )  # fmt: skip


def _longest(plots: Any, found: Results, table: Results) -> tuple[Any, str, str] | None:
    rows = [row for result, row in zip(found, table) if result in _searched(found)]
    if not any(row.get("paper_seq_len") for row in rows):
        return None
    return (
        plots.ablation(rows),
        "The longest sequence of each ablation row: here (left), and in the paper's Table 1 on the paper's machine "
        "(right).",
        f"Bars of the longest sequence of each row: {_reached(found, table)}.",
    )


def _trials(plots: Any, found: Results, table: Results) -> tuple[Any, str, str] | None:
    points = {}
    for result in _searched(found):
        known = [t for t in result["metrics"]["tried"] if t.get("device_peak_bytes") is not None]
        if known:
            points[result["label"]] = sorted((t["seq_len"], t["device_peak_bytes"]) for t in known)
    if not points:
        return None
    budgets = {flat(r["config"]).get("limits.device_memory") for r in _searched(found)}
    return (
        plots.peaks(points, next(iter(budgets)) if len(budgets) == 1 else None),
        "The device peak of each length that a search tried. The search ends where the peak reaches the budget.",
        f"Lines of device peak against sequence length, rising to the budget: {_reached(found, table)}.",
    )


def _over(
    columns: Mapping[str, str], ylabel: str, unit: float, plots: Any, found: Results, table: Results
) -> tuple[Any, str, str] | None:
    """Columns of the table over the field in which the rows differ, where that is one; of rows whose value is a
    number."""
    fields = results.swept(found)
    at = [flat(r["config"]).get(fields[0]) if len(fields) == 1 else None for r in found]
    numbers = [(x, row) for x, row in zip(at, table) if isinstance(x, int | float) and not isinstance(x, bool)]
    points = {
        name: {x: row[column] / unit for x, row in sorted(numbers, key=lambda pair: pair[0]) if row[column] is not None}
        for column, name in columns.items()
    }
    series = {name: line for name, line in points.items() if len(line) > 1}
    if not series:
        return None
    said = "; ".join(", ".join(f"{x:g} {y:.4g}" for x, y in line.items()) for line in series.values())
    others = [f"{row['row']} ({x})" for x, row in zip(at, table) if not any(row is one for _, one in numbers)]
    what = f"The rows differ in {fields[0]} only."
    what += f" Not in the figure, because their value is no number: {', '.join(others)}." if others else ""
    return plots.versus(series, fields[0], ylabel), what, f"Lines of the {ylabel} over {fields[0]}: {said}."


def _predicted(plots: Any, found: Results, table: Results) -> tuple[Any, str, str] | None:
    both = {
        str(row["row"]): (row["device_peak_bytes"], row["predicted_device_peak_bytes"])
        for row in table if row.get("device_peak_bytes") and row.get("predicted_device_peak_bytes")
    }  # fmt: skip
    if not both:
        return None
    pairs = ", ".join(f"{n} {format_bytes(a)} measured and {format_bytes(b)} predicted" for n, (a, b) in both.items())
    unit, size = ("GiB", 2**30) if max(max(pair) for pair in both.values()) >= 2**31 else ("MiB", 2**20)
    figure = plots.paired(
        {n: (a / size, b / size) for n, (a, b) in both.items()}, ("measured", "predicted"),
        f"device peak of the fullest rank [{unit}]", log=False, show="{:,.1f}".format,
    )  # fmt: skip
    what = "The two bars of a row match where the prediction is right."
    return figure, what, f"Pairs of bars of the device peak: {pairs}."


def _losses(plots: Any, found: Results, table: Results) -> tuple[Any, str, str] | None:
    """Losses by step: overlaid with their differences where runs took the same tokens, else just drawn."""
    losses = {r["label"]: r for r in found if len(r["metrics"].get("loss") or []) >= 3}
    curves = {n: [float("nan") if x is None else x for x in r["metrics"]["loss"]] for n, r in losses.items()}
    if not curves:
        return None
    ends = ", ".join(f"{n} {curve[0]:.3f} to {curve[-1]:.3f}" for n, curve in curves.items())
    found_by_step = {n: _by_step(r["metrics"], "eval") for n, r in losses.items()}
    evaluation = {n: points for n, points in found_by_step.items() if points}
    same = ("seq_len", "tokens_per_step"), ("model", "data", "optim")
    kinds = {
        json.dumps([[r["metrics"].get(n) for n in same[0]], [r["config"].get(n) for n in same[1]]], default=str)
        for r in losses.values()
    }
    alike = not evaluation and 1 < len(curves) <= 7 and len(kinds) == 1 and len({len(c) for c in curves.values()}) == 1
    same_data = (
        "These runs have the same data and settings. Above: their losses. Below: how far each loss is from the first's."
    )
    what = same_data if alike else "The loss of each optimizer step."
    if evaluation:
        what += (
            " Dashed lines show the loss on documents that the model is not trained on. Where it rises, training has "
            "gone on too long."
        )
        ends += "; of the evaluation, " + ", ".join(f"{n} {list(p.values())[-1]:.3f}" for n, p in evaluation.items())
    by_step = {n: _by_step(r["metrics"], "") for n, r in losses.items()}
    figure = plots.parity(curves) if alike else plots.training(by_step, evaluation=evaluation)
    return figure, what, f"Lines of the loss against the optimizer step: {ends}."


def _by_step(metrics: Mapping[str, Any], kind: str) -> dict[int, float]:
    """Losses of training ("") or evaluation ("eval") by optimizer step; the worker of the ablation has one a step."""
    losses = metrics.get(f"{kind}_loss" if kind else "loss") or []
    steps = metrics.get(f"{kind or 'loss'}_steps") or range(1, len(losses) + 1)
    return {step: float("nan") if loss is None else loss for step, loss in zip(steps, losses)}
