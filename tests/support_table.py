"""Writes notebooks/training.md's table of decoders from what tests measured (papermill_runs/results/support).

`python tests/support_table.py` rewrites the table; `tests/test_repository.py` holds it against the results.
"""

import json
from pathlib import Path

from zoo import MODELS, ZOO

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "papermill_runs" / "results" / "support"


def table():
    """One row a decoder: what is particular to it, and the worst errors over everything that was tried."""
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    lines = [
        "| decoder | tested with | gradient error, sp 1 | sp 2 | sp 3 | loss error | left as it was |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in MODELS:
        found = [run["models"][name] for run in runs]
        errors = [max(one["sp"][sp]["gradient"] for one in found) for sp in "123"]
        errors.append(max(one["sp"][sp]["loss"] for one in found for sp in "123"))
        notes = sorted({n for one in found for n in one["notes"]})
        cells = [name, ZOO["WHAT"][name], *(f"{error:.1e}" for error in errors), "; ".join(notes) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    versions = " and ".join(run["transformers"] for run in runs)
    ways = "tiled, in chunks with everything on the device and on the host, and block by block"
    lines += ["", f"Largest over transformers {versions}, whole and packed; {ways}."]
    return "\n".join(lines) + "\n"


def put_between(begin, end, text):
    """Write a text between two marks of notebooks/training.md."""
    page = ROOT / "notebooks" / "training.md"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + text + end + rest.partition(end)[2])


if __name__ == "__main__":
    put_between("<!-- support -->\n", "<!-- /support -->", table())
