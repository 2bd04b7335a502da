"""The planner compared with the simulator at random configurations: `python -m alstlib.measure.plan_table`.

Writes what it found to papermill_runs/results/planner/simulated.json; tests simulate some of them again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from alstlib.config import Data, Model, RunConfig, not_default
from alstlib.hf.public_models import PUBLIC
from alstlib.options import Options
from alstlib.planner.activations import activations, heads_way
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.moments import families
from alstlib.runs.results import git_state

FILE = Path("papermill_runs/results/planner/simulated.json")
FAMILIES = Path("papermill_runs/results/planner/families.json")
HYBRIDS_FILE = Path("papermill_runs/results/planner/hybrids.json")
COUNT = 200
NEWER = range(2000, 2040)
"""Seeds of configurations of the decoders that forms were added of later, with sliding windows, soft caps, or MLPs
without a gate: `--families` compares them, and writes `FAMILIES`."""
OLDER = ("llama", "qwen2", "qwen3", "mistral")
"""Decoders that the other seeds draw, without windows."""
NEW = (
    "mistralai/Mistral-7B-v0.1", "google/gemma-2-9b", "google/gemma-2-27b", "google/gemma-3-1b", "microsoft/phi-4",
    "allenai/OLMo-2-1124-7B", "ibm-granite/granite-3.1-8b", "HuggingFaceTB/SmolLM3-3B", "CohereLabs/aya-23-8B",
    "bigcode/starcoder2-7b", "EleutherAI/pythia-6.9b",
)  # fmt: skip
"""Models that `NEWER` draws."""
HYBRIDS = range(3000, 3060)
"""Seeds of configurations of hybrids and of decoders with experts: `--hybrids` compares them, and writes
`HYBRIDS_FILE`."""
STREAMED = range(1000, 1060)
"""Seeds of configurations whose layers run in row chunks with what is as long as the sequence on the host or not."""


def draw(seed: int) -> tuple[RunConfig, int, str]:
    """A run, its ranks and its kind of device: models, lengths, options and ranks as people have them. (Widths
    from 256, for which forms were pruned; no more ranks than query heads: beyond, forms are conservative.)"""
    from alstlib.measure.forms import USUAL

    pick = random.Random(seed)
    if seed in HYBRIDS:
        return _draw_hybrid(pick)
    known = {name: fields for name, fields in PUBLIC.items() if fields["model_type"] in families()}
    older = [n for n, fields in known.items() if fields["model_type"] in OLDER and not fields.get("sliding_window")]
    models = list(NEW) if seed in NEWER else ["small", "small", *older]
    device = pick.choice(["cuda", "cuda", "cpu"])
    model = pick.choice(models)
    shape = read_shape(model)
    ranks = pick.choice([n for n in (1, 2, 3, 4, 6, 8, 16, 32) if n <= (4 if shape.softcap else shape.heads)])
    way = heads_way(shape, ranks)[0]
    rows = int(2 ** pick.uniform(8, 17 if shape.width < 1000 else 15 + ranks.bit_length() / 4))
    checkpoint = pick.random() < 0.85
    offload: Any = pick.choice([False, "sync", True]) if checkpoint else False
    chunk = max(256, rows // pick.choice([2, 5, 16])) if checkpoint and pick.random() < 0.3 else None
    device = "cuda" if seed in NEWER else device
    tokens = rows * ranks + pick.randrange(ranks)
    dtype: Any = pick.choice(["bf16", "fp32"]) if shape.family == "llama" and way in ("one", "whole") else "bf16"
    mlp, norm = pick.choice([True, True, False, 512]), pick.choice([True, True, False])
    tiles = {"mlp": mlp, "loss": pick.choice([True, True, True, False, 300]), "norm": norm}
    save = pick.choice([False, "auto", True]) if checkpoint else False
    options = Options.plain(tiles=tiles, checkpoint=checkpoint, offload=offload, save_attention=save, chunk=chunk)
    run = RunConfig(model=Model(name=model, dtype=dtype), data=Data(seq_len=tokens), options=options)
    if seed in NEWER:  # lengths as people choose them: a last tile that is shorter would count as a whole one
        rows = 2 ** pick.randint(8, 12 if shape.softcap else 15)  # capped scores are made block by block
        chunk = max(256, rows // pick.choice([2, 4, 16])) if chunk and rows > 256 else None
        mlp, norm, loss = pick.choice(USUAL)
        tiles = {"mlp": mlp and pick.choice([True, 512]), "norm": norm}
        tiles["loss"] = (loss or chunk is not None) and pick.choice([True, 256])
        run = run.replace(data={"seq_len": rows * ranks}, options={"tiles": tiles, "chunk": chunk})
    if seed in STREAMED:
        hidden = pick.choice(["host", "host", "device"])
        chunk, offload = max(256, rows // pick.choice([3, 5, 9, 16])), pick.choice(["sync", True])
        fields: dict[str, Any] = {"chunk": chunk, "checkpoint": True, "offload": offload}
        fields["on_host"] = _places(hidden, pick.choice(["device", "host", "host"]))
        tiled: dict[str, Any] = {"options.tiles.loss": run.options.tile("loss") or hidden == "host"}
        run = run.replace(**tiled).replace(options=fields)
    return run, ranks, device


def _places(hidden: str, kv: str) -> str:
    """Keys and values are on the host only together with hidden states."""
    return "none" if hidden == "device" else "hidden" if kv == "device" else "hidden+kv"


def _draw_hybrid(pick: random.Random) -> tuple[RunConfig, int, str]:
    """As runs have them that save memory: in bf16, everything tiled, with checkpoints."""
    known: dict[str, list[str]] = {}
    for name, shape in ((name, read_shape(name)) for name in PUBLIC):
        if shape.states is not None or shape.experts:
            known.setdefault(shape.family, []).append(name)
    model = pick.choice(known[pick.choice(list(known))])
    ranks = pick.choice([n for n in (1, 2, 3, 4, 8, 16) if n <= read_shape(model).heads])
    rows = 2 ** pick.randint(10, 14)
    offload: Any = pick.choice((False, "sync", True))
    chunk = max(512, rows // pick.choice([2, 3, 4])) if pick.random() < 0.5 else None
    run = RunConfig(
        model=Model(name=model, dtype="bf16"),
        data=Data(seq_len=rows * ranks),
        options=Options.plain(
            tiles=True,
            checkpoint=True,
            offload=offload,
            save_attention=pick.choice([False, "auto"]) if offload else False,
            chunk=chunk,
            linear_attention=pick.choice(("auto", "pass", "heads")),
        ),
    )
    if chunk is not None and offload:
        run = run.replace(
            options={"on_host": _places(pick.choice(("host", "device")), pick.choice(("host", "device")))}
        )
    return run, ranks, "cuda"


def compare(seed: int) -> dict[str, Any]:
    """One configuration, planned and simulated. Bytes over the weights, of the last rank."""
    from alstlib.measure.simulate import simulate_deep

    run, ranks, device = draw(seed)
    began = time.perf_counter()
    simulated = simulate_deep(run, ranks, device)
    options = not_default(run)
    return plan_again({
        "seed": seed, "ranks": ranks, "device": device, "options": options, "simulated": simulated.device_peak,
        "simulated_host": simulated.host_peak, "simulated_categories": simulated.categories,
        "simulated_place": simulated.peak_place, "seconds": round(time.perf_counter() - began, 1),
    })  # fmt: skip


def plan_again(one: dict[str, Any]) -> dict[str, Any]:
    """A configuration that was simulated, planned."""
    run, ranks, device = draw(one["seed"])
    shape = read_shape(run.model.name, run.model.config)
    planned = activations(shape, run, ranks, run.data.seq_len - run.data.seq_len % ranks, device, workspace=False)
    return one | {
        "planned": planned.peak, "error": planned.peak / one["simulated"] - 1, "planned_host": planned.host,
        "planned_categories": planned.device, "planned_place": planned.place,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, help=f"{FILE} by default")
    parser.add_argument("--families", action="store_true", help=f"the newer decoders, into {FAMILIES}")
    parser.add_argument("--hybrids", action="store_true", help=f"hybrids and experts, into {HYBRIDS_FILE}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", help="only these again; the others are kept as they are")
    parser.add_argument("--replan", action="store_true", help="simulate nothing: plan again what was simulated")
    args = parser.parse_args()
    args.out = args.out or (FAMILIES if args.families else HYBRIDS_FILE if args.hybrids else FILE)
    if args.replan:
        made = json.loads(args.out.read_text())
        made["found"] = [plan_again(one) for one in made["found"]]
        args.out.write_text(json.dumps(made, indent=1) + "\n")
        return
    seeds = args.seeds or [*range(args.first, args.first + args.count), *STREAMED]
    if (args.families or args.hybrids) and not args.seeds:
        seeds = list(HYBRIDS if args.hybrids else NEWER)
    before = json.loads(args.out.read_text())["found"] if args.seeds else []
    found = [one for one in before if one["seed"] not in seeds]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(compare, seeds):
            found.append(one)
            model = one["options"].get("model.name", "small")
            print(f"{one['seed']}: {one['error']:+.2%} {model} on {one['ranks']}, {one['seconds']} s", flush=True)
    found.sort(key=lambda one: one["seed"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"git": git_state(), "mode": "simulated", "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
