"""The pages of the referee's result: cells.json, referee.md and referee.html, and a reproducer for each wrong cell."""

from __future__ import annotations

import html
import json
import math
import sys
from pathlib import Path
from typing import Any

from . import reproduce, stacks
from .cases import CASES

Result = dict[str, Any]
SHORT = {"exact": "exact", "wrong": "**wrong**", "refused": "refused", "does not run": "does not run", "absent": "-"}
OUR_OWN = ("ours", "ours-trainer")
INTRO = """# Who is exact?

Each stack trains small models with random weights for a few steps on two CPU ranks (gloo). Its losses, the norm of its
gradients, every gradient of the first step, and the weights at the end are compared with plain transformers in one
process. Stacks with a loop of their own are compared with a plain loop, stacks under a Trainer with the plain Trainer.

- **exact**: every relative error is below 1e-5, or below three times the rounding error that plain transformers itself
  has in this case (fp32 against fp64; in bf16 against fp32).
- **wrong**: a quantity differs, and nothing said so. What differs first is named below.
- **refused**: the stack ended with a message that names what it cannot do.
- **does not run**: it ended with another error, or hung.
- An empty cell was not judged. A dash: the case needs a Trainer.

Cases are in the order in which users meet them. `make referee` judges again what was judged with other versions. One
cell: `python papermill_runs/referee/referee.py --again --stack NAME --case CASE`.
"""
ADD = """## Add a stack

Write a file in `papermill_runs/referee/exactness/stacks/`; `__init__.py` there has the few methods that it needs. Then
`python papermill_runs/referee/referee.py --stack NAME` judges it, and `alst verify MODEL --stack NAME` runs it on a
small copy of a model. A stack under a Trainer needs its settings only, as `accelerate_sp.py` shows.

Beside the file of a stack, a file of requirements with the same name pins the packages with which it was judged. Put
them into a folder of their own. The environment's PyTorch is kept, and its transformers too, unless the file pins it.
Without the folder, `make referee` keeps what was judged of such a stack.

    python -m pip install --no-deps --target FOLDER -r papermill_runs/referee/exactness/stacks/ms_swift.txt
    REFEREE_PATH=FOLDER python papermill_runs/referee/referee.py --again --stack ms-swift --case even
"""
FAIR = """## What we could have set up wrongly

- Each stack is set up as the pages listed with it say. A setting that makes a cell exact is welcome: the file of a
  stack is in `papermill_runs/referee/exactness/stacks/`, of at most a hundred lines.
- All runs are on CPUs with gloo. Accelerate is told of several devices, because it knows neither DeepSpeed nor FSDP on
  CPUs. Attention is PyTorch's (`sdpa`), and `eager` for sinks and soft caps. A stack may be exact with FlashAttention
  on GPUs where it is wrong here, above all for packed documents and windows: transformers' page of Ulysses warns that
  SDPA may attend across packed samples, and recommends FlashAttention.
- verl, ms-swift and Axolotl run in a loop that calls their functions as their trainers do, because these want Ray,
  templates of a hub's models, or a configuration for a GPU. Plain PyTorch stands in for FlashAttention 2 there, which
  keeps packed documents and windows apart.
- DeepSpeed's stacks run with ZeRO-3, as its tutorial does. Those that end with `zero2` show what another stage changes.
- AdamW has an epsilon of 1e-6, because rounding of gradients near zero would decide what the weights become otherwise.
- Models have two layers and random weights, so that every gradient counts: an error is larger here than in a trained
  model.
"""


def read(folder: Path) -> Result:
    """What was judged before; nothing at first."""
    path = folder / "cells.json"
    return json.loads(path.read_text()) if path.exists() else {"cells": {}}


def judged(result: Result, stack: str, case: str, versions: dict[str, str]) -> bool:
    """Whether the cell was judged with these versions."""
    cell = result["cells"].get(stack, {}).get(case)
    return cell is not None and cell["versions"] == versions


def said(cell: dict[str, Any]) -> str:
    """A cell in words."""
    kind = cell["result"]
    if kind == "exact":
        return f"exact (to {max(cell['errors'].values()):.0e})"
    if kind != "wrong":
        return f"{kind}: {cell['reason']}"
    parts = [f"{name} {percent(error)}" for name, error in cell["wrong"].items()]
    times = f"; every gradient is {cell['times']:.3g} times as large" if "times" in cell else ""
    return f"wrong by: {', '.join(parts)}{times}; first: {cell['first']}"


def percent(error: float) -> str:
    """An error in words."""
    return "nan or missing" if math.isinf(error) else f"{error:.0e}" if error < 1e-3 else f"{error:.1%}"


def write(folder: Path, result: Result) -> None:
    """All files of the result."""
    names = [*OUR_OWN, *(name for name in stacks.known() if name not in OUR_OWN)]
    cells = {
        n: {c: result["cells"][n][c] for c in CASES if c in result["cells"][n]} for n in names if n in result["cells"]
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cells.json").write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    (folder / "referee.md").write_text(markdown(cells))
    (folder / "referee.html").write_text(page(cells))
    reproduce.write(folder / "reproducers", cells, said)


def rows(cells: dict[str, dict[str, Any]]) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """The title of each case that was judged, and its cells."""
    return [(CASES[c].title, [cells[n].get(c) for n in cells]) for c in CASES if any(c in cells[n] for n in cells)]


def markdown(cells: dict[str, dict[str, Any]]) -> str:
    """Table, and what each cell that is not exact says."""
    lines = [INTRO, f"| case | {' | '.join(cells)} |", f"| --- |{' --- |' * len(cells)}"]
    lines += [f"| {t} | {' | '.join(SHORT[c['result']] if c else '' for c in some)} |" for t, some in rows(cells)]
    for name, judged_cells in cells.items():
        lines += ["", f"## {name}", "", *_about(name, judged_cells), ""]
        lines += [f"- {CASES[c].title}: {said(cell)}{_link(name, c, cell)}" for c, cell in judged_cells.items()
                  if cell["result"] not in ("exact", "absent")]  # fmt: skip
    return "\n".join([*lines, "", FAIR, ADD])


def _about(name: str, cells: dict[str, Any]) -> list[str]:
    stack = stacks.load(name)
    versions = {(", ".join(f"{n} {v}" for n, v in cell["versions"].items()), cell["date"]) for cell in cells.values()}
    told = "; ".join(f"{v} ({date})" for v, date in sorted(versions))
    return [f"{_doc(stack)} Set up after {', '.join(stack.sources)}. Versions: {told}.",
            *([f"Note: {stack.note}."] if stack.note else [])]  # fmt: skip


def _doc(stack: Any) -> str:
    return (sys.modules[type(stack).__module__].__doc__ or "").partition("\n")[0]


def _link(stack: str, case: str, cell: dict[str, Any]) -> str:
    if not reproduce.writable(stack, CASES[case], cell):
        return ""
    shows = f", which shows: {cell['reproduced']}" if "reproduced" in cell else ", not run"
    return f" ([reproducer](reproducers/{reproduce.file_of(stack, case)}){shows})"


TABLES = {
    "notebooks/training.md": ("trainer", ("even", "uneven", "prompts", "accumulation", "no labels", "packed", "window",
                              "evaluation", "eval batch", "lora", "smoothing", "resume"),
                              {"ours-trainer": "TrainerMixin", "accelerate-sp": "sequence parallelism",
                               "accelerate-sp-zero2": "the same with ZeRO-2", "accelerate-cp": "context parallelism"}),
    "README.md": ("referee", ("even", "uneven", "accumulation", "packed", "window"),
                  {"ours-trainer": "TrainerMixin", "accelerate-sp": "Accelerate's sequence parallelism",
                   "accelerate-sp-zero2": "the same with ZeRO-2"}),
}  # fmt: skip
"""Tables of other pages: the mark around each, its cases, and its columns."""


def table_of(path: str, result: Result) -> str:
    """A table of another page: what differs is said by its largest relative error."""
    _, cases, columns = TABLES[path]
    found = {name: result["cells"].get(name, {}) for name in columns}
    lines = [f"| case | {' | '.join(columns.values())} |", f"| --- |{' --- |' * len(columns)}"]
    for case in cases:
        if any(case in some for some in found.values()):
            words = (in_short(some[case]) if case in some else "" for some in found.values())
            lines.append(f"| {CASES[case].title} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def in_short(cell: dict[str, Any]) -> str:
    """A cell of such a table."""
    if cell["result"] != "wrong":
        return f"exact, {max(cell['errors'].values()):.0e}" if cell["result"] == "exact" else cell["result"]
    return "off: " + ", ".join(f"{name} {percent(error)}" for name, error in cell["wrong"].items())


def put_tables(root: Path, result: Result) -> None:
    """Write the tables of other pages between their marks."""
    for path, (mark, *_) in TABLES.items():
        before, begin, rest = (root / path).read_text().partition(f"<!-- {mark} -->\n")
        end = f"<!-- /{mark} -->"
        (root / path).write_text(before + begin + table_of(path, result) + end + rest.partition(end)[2])


def page(cells: dict[str, dict[str, Any]]) -> str:
    """The same table as a web page; a cell shows its words under the pointer."""
    colours = {
        "exact": "#d8f0dc",
        "wrong": "#f6c9c4",
        "refused": "#fbeec2",
        "does not run": "#e6e6e6",
        "absent": "#fff",
    }
    body = []
    for title, some in rows(cells):
        made = [f'<td style="background:{colours[c["result"]]}" title="{html.escape(said(c))}">{c["result"]}</td>'
                if c else "<td></td>" for c in some]  # fmt: skip
        body.append(f"<tr><th>{html.escape(title)}</th>{''.join(made)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in cells)
    style = "body{font-family:sans-serif}td,th{padding:4px 8px;border:1px solid #ccc;text-align:left}"
    intro = "".join(f"<p>{html.escape(part)}</p>" for part in INTRO.split("\n\n")[1:2])
    return (
        f"<!doctype html><meta charset=utf-8><title>Who is exact?</title><style>{style}</style><h1>Who is exact?</h1>"
        f"{intro}<table><tr><th>case</th>{head}</tr>{''.join(body)}</table>"
        '<p>What each cell says, the versions and the sources: <a href="referee.md">referee.md</a>.</p>\n'
    )
