"""`alst report` prints the table of results and writes a page of a sweep: one HTML file that needs no other file.

Nothing is computed here: figures are `plots` over results, the rest is what result.json says.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alstlib.base.config import ROWS, RunConfig, flat
from alstlib.planner.tables import console, listed
from alstlib.runs import results
from alstlib.runs.results import Json
from alstlib.runs.sweeps import Spec, opened, shown

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.j2")

Rows = Sequence[Json]


def report(args: argparse.Namespace) -> int:
    """`alst report`: the table of a spec's results, or of those below a folder, and their page."""
    folder, spec, problem = opened(args.source, args.out)
    if problem:
        print(problem)
    tell(folder, spec, args.html)
    return 0


def tell(folder: Path, spec: Spec | None = None, page: Path | None = None) -> None:
    """Print the table of the results below a folder and write their page, `folder`/report.html unless `page` says.

    Raises:
        OSError: it could not be written.
        ValueError: there are no results, or jinja2 is not installed.
    """
    if not (rows := results.collect(folder, spec.rows if spec else ROWS)):
        raise ValueError(f"there is no result.json below {folder} that can be used; run the sweep first")
    show(results.table(rows))
    page = page or folder / PAGE
    write_page(rows, folder, page, spec)
    print(f"\npage: {shown(page)}")


def show(rows: Rows) -> None:
    """Print `results.table`'s rows and notes: as Markdown, or in a terminal as a table with a column for each row."""
    heads, texts = results.cells(rows)
    if not (screen := console()).is_terminal:
        print(results.with_notes(rows))
        return
    first, *lines = zip(heads.values(), *texts)
    screen.print(listed(first, lines), *results.notes(rows), sep="\n")


def write_page(rows: Rows, folder: Path, page: Path, spec: Spec | None = None) -> None:
    """Write the page of the results below a folder."""
    try:
        import jinja2
    except ImportError:
        raise ValueError("the page needs the package jinja2: pip install 'alstlib[notebooks]'") from None
    base = page.resolve().parent
    heads, texts = results.cells(results.table(rows))
    about = {
        "title": spec.name if spec else folder.resolve().name,
        "written": datetime.datetime.now().astimezone().isoformat(" ", timespec="minutes"),
        "command": spec and spec.typed("run"),
        "counts": Counter(row["status"] for row in rows), "heads": heads, "table": list(zip(rows, texts)),
        "figures": list(figures(rows)), "rows": [_about(row, spec) for row in rows],
        "notebooks": sorted(folder.glob("*.ipynb")),
        "link": lambda path: Path(os.path.relpath(path.resolve(), base)).as_posix(),
    }  # fmt: skip
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = env.from_string(TEMPLATE.read_text(encoding="utf-8"))
    base.mkdir(parents=True, exist_ok=True)
    results.replace_text(page, template.render(**about))


def _about(result: Json, spec: Spec | None) -> Json:
    """One result, with why it failed, what lies in its folder, and the command that repeats it alone."""
    default, row = flat(RunConfig().to_dict()), result["row"]
    return {
        **result,
        "why": results.why(result),
        "fields": {n: value for n, value in flat(result["config"]).items() if value != default.get(n)},
        "files": [*sorted(result["folder"].glob("*.ipynb")), result["folder"] / "result.json"],
        "command": spec and row in spec.rows and spec.typed("run", "--rows", row, "--force"),
    }


# Figures

Drawn = tuple[Any, str] | None
"""A figure, and what to see in it."""


def figures(found: Rows) -> Iterator[dict[str, str]]:
    """The figures that these results allow, as data URIs, each with what to see.

    One that fails says so in place of its picture (`source` is empty): a finished sweep is not lost by its page.
    Without matplotlib there are none.
    """
    try:
        from alstlib.figures import plots
    except ImportError:
        return
    rows = [{**row, **result} for row, result in zip(results.table(found), found)]
    for title, draw in FIGURES.items():
        try:
            if made := draw(plots, rows):
                figure, what = made
                yield {"title": title, "what": what, "source": plots.data_uri(figure, 110)}
        except Exception as e:
            yield {"title": title, "what": f"It could not be drawn: {type(e).__name__}: {e}", "source": ""}


def _over(column: str, ylabel: str, unit: float, plots: Any, rows: Rows) -> Drawn:
    """A column of the table over the field in which the rows differ, where that is one and its values are numbers."""
    fields = results.swept(rows)
    points = {flat(row["config"]).get(fields[0]): row[column] for row in rows if fields}
    points = {x: y / unit for x, y in points.items() if isinstance(x, int | float) and y is not None}
    if len(fields) != 1 or len(points) < 2:
        return None
    what = f"The rows differ in {fields[0]} only. Rows in which it is no number are not in the figure."
    return plots.versus({"": dict(sorted(points.items()))}, fields[0], ylabel), what


def _losses(plots: Any, rows: Rows) -> Drawn:
    curves, evaluation = (
        {row["label"]: points for row in rows if len(points := by_step(row["metrics"], losses, steps)) >= least}
        for losses, steps, least in (("loss", "loss_steps", 3), ("eval_loss", "eval_steps", 1))
    )
    what = (
        "The loss of each optimizer step. Dashed lines, where there are some, show the loss on documents that the "
        "model is not trained on: where it rises, training has gone on too long."
    )
    return (plots.training(curves, evaluation=evaluation), what) if curves else None


def by_step(metrics: Json, losses: str, steps: str) -> dict[int, float]:
    """Losses by optimizer step; the worker of the ablation has one a step."""
    found = [float("nan") if loss is None else loss for loss in metrics.get(losses) or ()]
    return dict(zip(metrics.get(steps) or range(1, len(found) + 1), found))


FIGURES: dict[str, Callable[[Any, Rows], Drawn]] = {
    "Step over the swept field": functools.partial(_over, "step_seconds", "time of a step [s]", 1),
    "Device peak over the swept field": functools.partial(_over, "device_peak_bytes", "device peak [MiB]", 2**20),
    "Last loss over the swept field": functools.partial(_over, "loss", "loss of the last step", 1),
    "Losses": _losses,
}
"""The figures of a page, by their titles; each is drawn of rows of the table with their results, where these allow."""
