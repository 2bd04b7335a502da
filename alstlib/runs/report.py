"""`alst report` prints the table of results and writes a page of a sweep: one HTML file that needs no other file.

Nothing is computed here: figures are `plots` over results, the rest is what result.json says.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alstlib.config import FIELDS, RunConfig, flat
from alstlib.runs import results
from alstlib.runs.sweeps import Spec, load_spec, papermill_line, read_record, shown
from alstlib.tables import console, listed

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.j2")
NEVER = "never run"


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
    if not found and next(folder.rglob("result.json"), None):
        raise ValueError(f"no result.json below {folder} can be used: the warnings say why")
    if not found:
        raise ValueError(f"there is no result.json below {folder}; run the sweep first, or name another folder")
    show(results.table(labelled(in_order(found, folder, spec), folder)))
    page = write_page(folder, found, spec, Path(args.html) if args.html else None)
    print(f"\npage: {shown(page)}")
    return 0


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `results.table`'s rows and notes: in a terminal with room for it as a table, with a line for each row or
    else a column for each; elsewhere as Markdown."""
    heads, texts = results.cells(rows)
    lines, screen = [list(heads.values()), *texts], console()
    for head, *body in (lines, list(zip(*lines))):
        room = sum(max(map(len, column)) + 2 for column in zip(head, *body))
        if screen.is_terminal and room <= screen.width:
            screen.print(listed(head, body))
            for note in results.notes(rows):
                print(note)
            return
    print(results.with_notes(rows))


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


def in_order(found: Sequence[Mapping[str, Any]], folder: Path, spec: Spec | None) -> list[Mapping[str, Any]]:
    """The results in the order of the sweep's rows, and in their place what stands for those that have none."""
    rows = list(spec.rows if spec else read_record(folder).get("rows", ()))
    missing = [
        {"row": name, "run_id": "", "status": NEVER, "mode": "-", "metrics": {}, "folder": str(folder / name),
         "config": spec.rows[name].to_dict() if spec else {}}
        for name in rows if name not in {r["row"] for r in found}
    ]  # fmt: skip
    place = {name: i for i, name in enumerate(rows)}
    return sorted([*found, *missing], key=lambda r: place.get(r["row"], len(rows)))


def labelled(found: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The results, each with a `label` that no other has: its row or run id; of several sweeps, its folder."""
    paths = [_link(Path(r["folder"]).resolve(), folder.resolve()) for r in found]
    several = len({Path(path).parent for path in paths}) > 1
    return [{**r, "label": path if several else r["row"] or r["run_id"]} for r, path in zip(found, paths)]


def contents(folder: Path, found: Sequence[Mapping[str, Any]], spec: Spec | None, base: Path) -> dict[str, Any]:
    """What the template shows; links are relative to `base`."""
    record, link = read_record(folder), functools.partial(_link, base=base)
    every = labelled(in_order(found, folder, spec), folder)
    heads, texts = results.cells(results.table(every))
    ran = [r for r in every if r["status"] != NEVER]
    return {
        "title": spec.name if spec else record.get("name") or folder.name,
        "command": spec.command if spec else record.get("command"),
        "written": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        "finished": sorted(r["finished"] for r in ran), "counts": Counter(r["status"] for r in every),
        "modes": sorted({r["mode"] for r in ran}), "heads": heads, "table": list(zip(every, texts)),
        "figures": list(figures(ran)), "rows": [_row(r, spec) for r in ran],
        "notebooks": sorted(folder.glob("*.ipynb")), "link": link, "never": NEVER,
    }  # fmt: skip


def _link(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def _row(result: Mapping[str, Any], spec: Spec | None) -> dict[str, Any]:
    """One result, with why it failed, what lies in its folder, and the command that repeats it alone."""
    folder, default = Path(result["folder"]).resolve(), flat(RunConfig().to_dict())
    fields = {n: v for n, v in flat(result["config"]).items() if n in FIELDS and v != default.get(n, ...)}
    record = read_record(folder.parent)
    notebook = _link(spec.notebook, spec.root) if spec else record.get("notebook") or "notebooks/run.ipynb"
    parameters = spec.parameters if spec else record.get("parameters") or {}
    return {
        **result,
        "why": results.why(result),
        "fields": fields,
        "files": [*sorted(folder.glob("*.ipynb")), folder / "result.json"],
        "command": papermill_line(notebook, "out.ipynb", parameters, fields),
    }


# Figures

Rows = Sequence[Mapping[str, Any]]
Drawn = tuple[Any, str, Mapping[str, Any]] | None
"""A figure, what to see in it, and its rows by their names."""


def figures(found: Rows) -> Iterator[dict[str, str]]:
    """Those that these results (`labelled`) allow, as data URIs, each with what to see and an alternative text.

    One that fails says so in place of its picture (`source` is empty): a finished sweep is not lost by its page.
    Without matplotlib there are none.
    """
    try:
        from alstlib.figures import plots
    except ImportError:
        return
    peaks = {"device_peak_bytes": "measured", "predicted_device_peak_bytes": "predicted"}
    kinds: dict[str, Callable[[Any, Rows], Drawn]] = {
        "Longest sequence that fits": _longest, "Trials of the search": _trials,
        "Step over the swept field": functools.partial(_over, {"step_seconds": ""}, "time of a step [s]", 1),
        "Device peak over the swept field": functools.partial(
            _over, peaks, "device peak of the fullest rank [MiB]", 2**20
        ),
        "Last loss over the swept field": functools.partial(_over, {"loss": ""}, "loss of the last step", 1),
        "Device peak, measured and predicted": _predicted, "Losses": _losses,
    }  # fmt: skip
    rows = [{**row, **result} for row, result in zip(results.table(found), found)]
    for title, draw in kinds.items():
        try:
            if made := draw(plots, rows):
                figure, what, drawn = made
                alt = f"{title}, of {', '.join(drawn)}. The table has the numbers."
                yield {"title": title, "what": what, "alt": alt, "source": plots.data_uri(figure, 110)}
        except Exception as e:
            yield {"title": title, "what": f"It could not be drawn: {type(e).__name__}: {e}", "alt": "", "source": ""}


def _longest(plots: Any, rows: Rows) -> Drawn:
    searched = {row["label"]: {**row, "row": row["label"]} for row in rows if row["metrics"].get("tried")}
    if not any(row["paper_seq_len"] for row in searched.values()):
        return None
    what = "The longest sequence of each ablation row: here (left), and in the paper's Table 1 on its machine (right)."
    return plots.ablation(list(searched.values())), what, searched


def _trials(plots: Any, rows: Rows) -> Drawn:
    points, budgets = {}, set()
    for row in rows:
        tried = row["metrics"].get("tried") or []
        known = [(t["seq_len"], t["device_peak_bytes"]) for t in tried if t.get("device_peak_bytes") is not None]
        if known:
            points[row["label"]] = sorted(known)
            budgets.add(flat(row["config"]).get("limits.device_memory"))
    if not points:
        return None
    what = "The device peak of each length that a search tried. The search ends where the peak reaches the budget."
    return plots.peaks(points, budgets.pop() if len(budgets) == 1 else None), what, points


def _over(columns: Mapping[str, str], ylabel: str, unit: float, plots: Any, rows: Rows) -> Drawn:
    """Columns of the table over the field in which the rows differ, where that is one; of rows whose value is a
    number."""
    fields = results.swept(rows)
    if len(fields) != 1:
        return None
    at = {row["label"]: flat(row["config"]).get(fields[0]) for row in rows}
    numbers = {label: x for label, x in at.items() if isinstance(x, int | float) and not isinstance(x, bool)}
    drawn = sorted((row for row in rows if row["label"] in numbers), key=lambda row: numbers[row["label"]])
    series = {}
    for column, name in columns.items():
        line = {numbers[row["label"]]: row[column] / unit for row in drawn if row[column] is not None}
        if len(line) > 1:
            series[name] = line
    others = ", ".join(f"{label} ({x})" for label, x in at.items() if label not in numbers)
    what = f"The rows differ in {fields[0]} only."
    what += f" Not in the figure, because their value is no number: {others}." if others else ""
    return (plots.versus(series, fields[0], ylabel), what, numbers) if series else None


def _predicted(plots: Any, rows: Rows) -> Drawn:
    pairs = {row["label"]: (row["device_peak_bytes"], row["predicted_device_peak_bytes"]) for row in rows}
    pairs = {name: pair for name, pair in pairs.items() if all(pair)}
    if not pairs:
        return None
    unit, size = ("GiB", 2**30) if max(map(max, pairs.values())) >= 2**31 else ("MiB", 2**20)
    figure = plots.paired(
        {name: (measured / size, predicted / size) for name, (measured, predicted) in pairs.items()},
        ("measured", "predicted"), f"device peak of the fullest rank [{unit}]", log=False, show="{:,.1f}".format,
    )  # fmt: skip
    return figure, "The two bars of a row match where the prediction is right.", pairs


SAME = ("model.name", "model.config", "data.name", "optim.seed", "optim.steps", "optim.learning_rate")
"""Fields in which runs agree that are drawn with the differences of their losses."""


def _losses(plots: Any, rows: Rows) -> Drawn:
    """Losses by step: overlaid with their differences where runs took the same tokens, else just drawn."""
    rows = [row for row in rows if len(row["metrics"].get("loss") or []) >= 3]
    curves = {row["label"]: _by_step(row["metrics"], "loss", "loss_steps") for row in rows}
    evaluation = {row["label"]: _by_step(row["metrics"], "eval_loss", "eval_steps") for row in rows}
    evaluation = {name: points for name, points in evaluation.items() if points}
    alike = {
        json.dumps([row["seq_len"], row["metrics"].get("tokens_per_step"), *(flat(row["config"]).get(n) for n in SAME)])
        for row in rows
    }
    lengths = {len(points) for points in curves.values()}
    if not curves:
        return None
    if 1 < len(curves) <= 7 and len(alike) == len(lengths) == 1 and not evaluation:
        what = "These runs have the same data and settings. Above: their losses. Below: how far each loss is from the "
        return plots.parity({n: list(points.values()) for n, points in curves.items()}), f"{what}first's.", curves
    what = "The loss of each optimizer step."
    if evaluation:
        what += (
            " Dashed lines show the loss on documents that the model is not trained on. Where it rises, training has "
            "gone on too long."
        )
    return plots.training(curves, evaluation=evaluation), what, curves


def _by_step(metrics: Mapping[str, Any], losses: str, steps: str) -> dict[int, float]:
    """Losses by optimizer step; the worker of the ablation has one a step."""
    found = metrics.get(losses) or []
    at = metrics.get(steps) or range(1, len(found) + 1)
    return {step: float("nan") if loss is None else loss for step, loss in zip(at, found)}
