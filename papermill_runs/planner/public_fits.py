"""Write fits.json, with which the planner answers for public models at once.

It simulates what was asked of each entry anew: most take seconds, some minutes. Stopped, it goes on where it was, as
long as the sources are the same. `--add FOLDER` takes what a cache (`ALST_CACHE`) holds of public models, because
`alst plan` or `what_fits.py` asked for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alstlib.hf.loading.public_models import PUBLIC, SHAPES
from alstlib.planner import fits

PROGRESS = Path("papermill_runs/out/public_fits.json")
"""What was simulated anew, by the sources that did."""


def again(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry asked, asked again of this code."""
    from alstlib.planner.measure.answers import answer

    if asked := entry.get("facts"):
        found = [answer("facts", asked)]
    else:
        found = [answer("span", {**entry["span"], "tokens": one["to"]}) for one in entry["found"]]
    return {**entry, "found": found}


def of_public(entry: Mapping[str, Any]) -> bool:
    """Whether it is about a model whose config comes with the library."""
    name = entry["facts"]["name"] if "facts" in entry else entry["span"]["run"].get("model.name", "tiny")
    return name in PUBLIC or name in SHAPES


def write(entries: Mapping[str, Any], path: Path = fits.FILE) -> None:
    """One entry a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(_plain(entries[key]))}" for key in sorted(entries)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _plain(value: Any) -> Any:
    """Bytes without what rounding leaves of a fraction."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else round(value, 3)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", type=Path, metavar="FOLDER", help="take what this cache holds of public models")
    args = parser.parse_args()
    before = fits.public().get(fits.VERSIONS, fits.versions())
    if args.add and before != fits.versions():
        parser.error(f"those that are there were simulated with {before}; simulate all anew first")
    entries = {key: entry for key, entry in fits.public().items() if key != fits.VERSIONS}
    if args.add:
        for path in args.add.glob("*.json"):
            one = json.loads(path.read_text())
            if of_public(one):
                entries[fits.digest(one.pop("text"))] = one
    else:
        done: dict[str, Any] = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
        done = done.get(fits.sources(), {})
        for n, (key, entry) in enumerate(entries.items()):
            print(f"{n + 1} of {len(entries)}", flush=True)
            if key not in done:
                done[key] = again(entry)
                PROGRESS.parent.mkdir(parents=True, exist_ok=True)
                PROGRESS.write_text(json.dumps({fits.sources(): done}))
            entries[key] = done[key]
    write({**entries, fits.VERSIONS: fits.versions()})


if __name__ == "__main__":
    main()
