"""Write fits.json, with which the planner answers for public models at once: `python -m alstlib.measure.public_fits`.

It simulates what was asked of each entry anew, which takes hours for all of them; `--models` asks for more public
models as `alst plan` does, and `--add FOLDER` takes what a cache holds of them (`ALST_CACHE`). What is done is kept in
the cache, so that the next call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alstlib.config import Engine, Model, RunConfig, row_config
from alstlib.hf.public_models import PUBLIC, SHAPES
from alstlib.planner import fits
from alstlib.planner.gpus import rates_of
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import longest


def plan(name: str, gpus: int, **changes: Any) -> None:
    """Ask for the longest sequence, in whole layers, on H100s with the host that clouds have."""
    rates = rates_of("H100")
    machine = Machine(
        gpus=gpus, per_node=min(8, gpus), gpu_memory=int(rates.usable), host_memory=min(8, gpus) * rates.node_host,
        rates=rates,
    )  # fmt: skip
    run = row_config("ours", RunConfig(model=Model(name=name, dtype="bf16"), engine=Engine(sp=0)))
    longest(read_shape(name), run.replace(**{"options.chunk": None, **changes}), machine)


def again(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry asked, asked again of this code."""
    from alstlib.measure.answers import answer

    if asked := entry.get("facts"):
        found = [answer("facts", asked)]
    else:
        question = {**entry["span"], "run": RunConfig.from_dict(entry["span"]["run"]).to_dict()}
        found = [answer("span", {"question": question, "rows": one["from"]}) for one in entry["found"]]
    return {**entry, "found": found}


def of_public(entry: Mapping[str, Any]) -> bool:
    """Is it about a model whose config comes with the library?"""
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
    parser.add_argument("--models", nargs="*", help="plan these public models (all, if none is named)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8], help="on so many GPUs (default: 8)")
    parser.add_argument("--lora", action="store_true", help="with an adapter")
    parser.add_argument("--add", type=Path, metavar="FOLDER", help="take what this cache holds of public models")
    args = parser.parse_args()
    entries = dict(fits.public())
    if args.models is not None:
        for name in args.models or PUBLIC:
            for gpus in args.gpus:
                print(f"{name} on {gpus}", flush=True)
                plan(name, gpus, **({"model.lora": {"r": 16}} if args.lora else {}))
        args.add = Path(os.environ[fits.CACHE_VARIABLE])
    if args.add:
        for path in args.add.glob("*.json"):
            one = json.loads(path.read_text())
            if of_public(one):
                entries[fits.digest(one.pop("text"))] = one
    else:
        for n, (key, entry) in enumerate(entries.items()):
            print(f"{n + 1} of {len(entries)}", flush=True)
            entries[key] = again(entry)
    write(entries)


if __name__ == "__main__":
    main()
