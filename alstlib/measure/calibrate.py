"""Write forms.json, the closed forms that the planner evaluates: `python -m alstlib.measure.calibrate [--jobs 2]`.

It takes some 20 minutes for everything; name families (or `reference`) to do these anew and keep the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from alstlib.measure import forms, hybrid_forms, reference_forms
from alstlib.measure.pruning import Term
from alstlib.planner.moments import FILE, REFERENCE
from alstlib.runs.progress import Pace, Printer


def write(families: Iterable[str], path: Path = FILE, jobs: int = 1, chunked: bool = False) -> None:
    """Calibrate these families (`reference` for the reference stack), or only their ways in row chunks, and add them to
    a file."""
    made = json.loads(path.read_text()) if path.exists() else {"moments": [], "ways": {}, "tiles": {}}
    known = {json.dumps(m): i for i, m in enumerate(made["moments"])}
    named = list(families)
    kinds: list[tuple[Any, list[Any]]] = [
        (forms.moments, [w for w in forms.ways(n for n in named if n != REFERENCE) if w.chunk or not chunked])
    ]
    if REFERENCE in named:
        kinds.append((reference_forms.moments, reference_forms.ways()))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        show = Printer()
        for calibrate, wanted in kinds:
            pace = Pace(lambda **fields: show({"row": "calibrate", **fields}), f"{len(wanted)} ways", len(wanted))
            _add(made, known, zip(wanted, pool.map(calibrate, wanted, chunksize=4)), pace)
        show.close()
    path.write_text(json.dumps(without_unused(made), indent=0, sort_keys=True) + "\n")


def without_unused(made: dict[str, Any]) -> dict[str, Any]:
    """The same without moments that no way has any more."""
    used = sorted({i for indices in made["ways"].values() for i in indices})
    place = {old: new for new, old in enumerate(used)}
    ways = {way: [place[i] for i in indices] for way, indices in made["ways"].items()}
    return {**made, "moments": [made["moments"][i] for i in used], "ways": ways}


def _add(made: dict[str, Any], known: dict[str, int], calibrated: Iterable[Any], pace: Pace) -> None:
    for i, (way, (found, tiles)) in enumerate(calibrated):
        kind = REFERENCE if way.name.startswith(REFERENCE) else way.family
        made["tiles"].setdefault(kind, {}).update({n: f"{names} {size}" for n, (names, size) in tiles.items()})
        places = []
        for text in text_of(found):
            key = json.dumps(text)
            if key not in known:
                known[key] = len(made["moments"])
                made["moments"].append(text)
            places.append(known[key])
        made["ways"][way.name] = places
        pace(i + 1)


def text_of(found: Sequence[tuple[str, dict[Term, float]]]) -> list[Any]:
    """Moments as the file has them: [place, {category: `12 R H + 2 M I`}]."""
    return [[place, {kind: _sum(terms, kind) for kind in sorted({k for k, _ in terms})}] for place, terms in found]


def _sum(terms: dict[Term, float], kind: str) -> str:
    return " + ".join(f"{c:g} {names}".strip() for (k, names), c in sorted(terms.items()) if k == kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "families",
        nargs="*",
        default=[*forms.FAMILIES, *hybrid_forms.FAMILIES, REFERENCE],
        help="model types; all by default",
    )
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--chunked", action="store_true", help="only the ways in row chunks")
    args = parser.parse_args()
    write(args.families, args.out, args.jobs, args.chunked)


if __name__ == "__main__":
    main()
