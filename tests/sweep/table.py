"""Writes the table of the sweep from what was kept (papermill_runs/results/support/sweep-*.jsonl): one row for each
type of causal language model, its result with the oldest and the newest transformers, and the reason of a refusal.

`python -m tests.sweep.table` rewrites it, and the page of types that read images; `tests/sweep/test_sweep.py` holds
both against the results.
"""

import json
import re
from collections import Counter
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "papermill_runs" / "results" / "support"
TABLE = RESULTS / "sweep.md"
WAYS = ("chunks", "blocks")
"""Ways of running the layers that have a column of their own."""
REFUSED = re.compile(r"(?:^|; )([a-z, ]+) refused: ")
"""The options of which a reason says that they are refused."""
ABOUT = """# Every causal language model of transformers

Each type is built from a small config and trained for a step on 1 to 3 ranks, on a whole sample and on packed
documents, with the default options, small tiles with states by heads, row chunks with states that are passed, row
chunks with hidden states, keys and values on the host, blocks with keys and values on the host, and without
checkpoints. `exact`: loss and every gradient are those of plain transformers (documents one by one), to 1e-6 and 1e-4
in fp32, or 1e-9 in fp64. `refused`: `apply` says why. `not built`: plain transformers does not run the type from such a
config. The columns `chunks` and `blocks` say whether an exact type runs in chunks, and block by block. `make sweep`
measures it anew.

"""


ABOUT_IMAGES = """# Every model of transformers that reads images and text

Each type of AutoModelForImageTextToText is built from a small config and trained for a step on the ranks that are
named: on text alone, and on samples with images of several sizes, which cross borders of slices, chunks and blocks,
whole and packed, with layers whole, in chunks, and in blocks. `exact`: loss and every gradient, also of the vision
tower, are those of plain transformers (documents one by one), to 1e-6 and 1e-4 in fp32, or 1e-9 in fp64. `text`: text
alone is exact, and images are refused. `refused`: `apply` says why. `not built`: plain transformers does not run the
type from such a config here. `python -m tests.sweep.drive --images --keep` measures it anew, and
`python -m tests.sweep.table` writes this page.

"""
PAGES = {"sweep": (TABLE, ABOUT), "images": (RESULTS / "images.md", ABOUT_IMAGES)}


def stored(path):
    """What is in a file, where there is one."""
    return map(json.loads, path.read_text().splitlines() if path.exists() else ())


def summary(lines):
    """A type's outcome over all of its cases: the result, the reasons (where only some options are refused, with their
    names), and the largest errors of what is exact."""
    results = {line["result"] for line in lines}
    result = next(one for one in ("crash", "wrong", "not built", "exact", "refused") if one in results)
    of_images = [line for line in lines if "images" in line["case"]]
    told = [line for line in lines if line["result"] == ("refused" if result == "exact" else result)]
    if result == "exact" and {line["result"] for line in of_images} == {"refused"}:
        result, told = "text", of_images
    reasons = {}
    for line in told:
        reasons.setdefault(line["reason"], []).append(line["case"].partition(", ")[2])
    whys = sorted(reasons)[:1]
    if result == "exact":
        whys = [f"{', '.join(dict.fromkeys(options))} refused: {why}" for why, options in sorted(reasons.items())]
    exact = [line for line in lines if line["result"] == "exact"]
    errors = {
        f"{error}, {dtype}": max(line[error] for line in exact if line["dtype"] == f"torch.{dtype}")
        for error in ("loss", "gradient")
        for dtype in sorted({line["dtype"].partition(".")[2] for line in exact})
    }
    about = {"type": lines[0]["type"], "result": result, "reason": "; ".join(whys)}
    return {**about, "ranks": sorted({line["sp"] for line in lines}), **errors}


def ways(found):
    """For each of `WAYS`, whether a type runs in it, with every transformers: `exact`, `refused`, or a dash where it
    does not run at all."""
    if not any(one["result"] == "exact" for one in found):
        return ["-"] * len(WAYS)
    refused = " ".join(options for one in found for options in REFUSED.findall(one["reason"]))
    return ["refused" if way in refused else "exact" for way in WAYS]


def table(of="sweep"):
    runs = {
        path.stem.removeprefix(f"{of}-"): {one["type"]: one for one in stored(path)}
        for path in sorted(RESULTS.glob(f"{of}-*.jsonl"))
    }
    everywhere = {
        version: sorted({sp for one in by_type.values() for sp in one["ranks"]}) for version, by_type in runs.items()
    }
    heads = [*runs, *(WAYS if of == "sweep" else ())]
    rows = [f"| type | {' | '.join(heads)} | reason |", "| --- |" + " --- |" * (len(heads) + 1)]
    for kind in sorted({kind for found in runs.values() for kind in found}):
        found = [by_type.get(kind, {"result": "-", "reason": ""}) for by_type in runs.values()]
        reasons = dict.fromkeys(one["reason"].replace("|", "/") for one in found if one["reason"])
        shown = [_result(one, everywhere[version]) for one, version in zip(found, runs)]
        shown += ways(found) if of == "sweep" else []
        rows.append(f"| {kind} | {' | '.join(shown)} | {' / '.join(reasons)} |")
    totals = []
    for version, by_type in runs.items():
        counts = Counter(one["result"] for one in by_type.values())
        on = _on(everywhere[version])
        listed = ", ".join(f"{n} {result}" for result, n in counts.most_common())
        totals.append(f"transformers {version}, on {on}: {listed}")
    return PAGES[of][1] + "\n\n".join(totals) + "\n\n" + "\n".join(rows) + "\n"


def _on(ranks):
    return f"{' and '.join(map(str, ranks))} rank{'s' * (ranks != [1])}"


def _result(one, everywhere):
    """A type's result, and where it was run if that is not on all ranks that others were run on."""
    fewer = one.get("ranks", everywhere) != everywhere
    return f"{one['result']} ({_on(one['ranks'])})" if fewer else one["result"]


if __name__ == "__main__":
    for name, (page, _) in PAGES.items():
        page.write_text(table(name))
