"""The planner compared with whole simulated steps at random configurations.

Models are public ones with few layers, so that most whole steps take less than `LIMIT`; what takes longer is written
down as that, and not compared. It appends to papermill_runs/results/planner/simulated.json, and goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

from alstlib.base.config import Data, Model, RunConfig, not_default
from alstlib.base.options import Options
from alstlib.hf.loading.configs import find_config
from alstlib.hf.loading.public_models import PUBLIC
from alstlib.planner.activations import activations
from alstlib.planner.measure import small
from alstlib.planner.measure.simulate import simulate
from alstlib.planner.model_shapes import read_shape

FILE = Path("papermill_runs/results/planner/simulated.json")
COUNT = 106
"""Seeds by default. With further ones, steps in chunks may be so long that the norm after the layers has many tiles."""
LAYERS = 6
LIMIT = 180
"""Seconds of a core that a whole simulated step may take."""


class TooLong(BaseException):
    """A whole step takes longer than `LIMIT`."""


def ring(*_: Any) -> None:
    raise TooLong


def shallow(name: str, layers: int = LAYERS) -> dict[str, Any]:
    """Fields of the config with which a model has so many layers, with each kind of them as far as they have some."""
    config = find_config(name)
    depth = next(config[field] for field in small.LAYERS if field in config)
    made: dict[str, Any] = {field: layers for field in small.LAYERS if field in config}
    for field, value in config.items():
        if isinstance(value, list) and len(value) == depth:
            kinds = list(dict.fromkeys(map(str, value)))
            first = {kind: list(map(str, value)).index(kind) for kind in kinds}
            made[field] = sorted(
                ([value[i] for i in first.values()] + value[1 : 1 + layers - len(first)])[:layers],
                key=lambda one: str(one) != str(value[0]),
            )
    return made


def draw(seed: int) -> tuple[RunConfig, int, str]:
    """A run, its ranks and its kind of device: models, lengths, options and ranks as people have them, more ranks than
    heads among them."""
    pick = random.Random(seed)
    name = pick.choice([name for name in PUBLIC if "Nemotron" not in name])
    ranks, rows = pick.choice([1, 2, 3, 4, 6, 8, 16, 32, 64]), int(2 ** pick.uniform(8, 15))
    checkpoint = pick.random() < 0.85
    offload: Any = pick.choice([False, True, True]) if checkpoint else False
    chunk = max(256, rows // pick.choice([2, 3, 5, 9])) if checkpoint and pick.random() < 0.4 else None
    tiles = {"mlp": pick.choice([True, True, False, 512]), "loss": True, "norm": pick.choice([True, True, False])}
    if chunk is None:
        tiles["loss"] = pick.choice([True, True, True, False, 300])
    options = Options.plain(
        tiles=tiles, checkpoint=checkpoint, offload=offload, chunk=chunk,
        save_attention=pick.choice([False, True]) if checkpoint else False,
        on_host=pick.choice(["none", "hidden", "hidden+kv"]) if chunk and offload else "auto",
    )  # fmt: skip
    model = Model(name=name, config=shallow(name), dtype="bf16", lora=pick.choice([None, None, None, {"r": 16}]))
    device = pick.choice(["cuda", "cpu"])
    if chunk and seed >= COUNT:
        rows *= 2 ** pick.randint(1, 4)
    return RunConfig(model=model, data=Data(seq_len=rows * ranks), options=options), ranks, device


def compare(seed: int) -> dict[str, Any]:
    """One configuration, planned and simulated whole. Bytes over the weights, of the last rank."""
    run, ranks, device = draw(seed)
    began = time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    whole = simulate(run, ranks, device)
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.perf_counter() - began
    shape = read_shape(run.model.name, run.model.config)
    planned = activations(shape, run, ranks, run.data.seq_len, device, workspace=False)
    return {
        "seed": seed, "ranks": ranks, "heads": shape.heads, "device": device, "options": not_default(run),
        "simulated": whole.device_peak, "planned": planned.peak, "error": planned.peak / whole.device_peak - 1,
        "simulated_host": whole.host_peak, "planned_host": planned.host, "simulated_place": whole.peak_place,
        "planned_place": planned.place, "seconds": round(seconds, 1),
        "seconds_of_plan": round(time.perf_counter() - began - seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=range(COUNT), help=f"0 to {COUNT - 1} by default")
    parser.add_argument("--to", type=Path, default=FILE, help="the file to which it appends")
    args = parser.parse_args()
    signal.signal(signal.SIGPROF, ring)
    found = {one["seed"]: one for one in json.loads(args.to.read_text())["found"]} if args.to.exists() else {}
    for seed in args.seeds:
        if seed in found:
            continue
        try:
            found[seed] = one = compare(seed)
        except ValueError as e:  # options that `apply` refuses for this model
            found[seed] = one = {"seed": seed, "refused": str(e)}
        except TooLong:
            found[seed] = one = {"seed": seed, "longer_than_seconds": LIMIT}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print({n: one.get(n) for n in ("seed", "error", "ranks", "seconds", "refused")}, flush=True)
        args.to.parent.mkdir(parents=True, exist_ok=True)
        ordered = [found[n] for n in sorted(found)]
        args.to.write_text(json.dumps({"mode": "simulated", "found": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
