"""The table of supported decoders: each against plain transformers at SP degrees that split its heads and that do not,
with everything on, streamed in chunks of rows, with hidden states, keys and values on the host, and block by block.

`make test-compat` runs all of it with two versions of transformers, and writes what was measured to
papermill_runs/results/support and the table in notebooks/training.md. Without it a few of these run: the net of whole
steps (tests/matrix.py) has every decoder at these degrees and in these ways.
"""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from cases import ALL_ON, on_ranks, sample_of, small_pages

import alstlib
from alstlib.planner.measure import verify
from alstlib.runs.results import git_facts

TILES = {"tiles": {"mlp": 5, "loss": 7, "norm": 6}}
OPTIONS = {
    "on": ALL_ON,
    "chunk": {**ALL_ON, "chunk": 4, "on_host": "none"},
    "host": {**TILES, "offload": "sync", "chunk": 3, "on_host": "hidden+kv"},
    "blocks": {**TILES, "offload": "sync", "on_host": "hidden+kv", "block": 3},
}
OUT = os.environ.get("ALST_SUPPORT_OUT", "")
LENGTH = 26
PACKED = [3, 1, 9, 13]
"""Documents of a packed sample: one of a token, one that spans ranks."""


def sample(packed):
    return sample_of(LENGTH, documents=PACKED if packed else [LENGTH], ignored=slice(15, 19))


@functools.lru_cache(maxsize=2)  # the cases of a model follow each other
def reference(name, packed):
    return verify.plain(zoo.build(name), sample(packed))


def attached(rank, world, name, how, packed):
    """`alst verify`'s comparison, on this rank's slice."""
    chosen, ctx = dict(OPTIONS[how]), alstlib.SPContext.create(world)
    block, want = chosen.pop("block", None), reference(name, packed)
    with small_pages():
        options = alstlib.Options(**chosen)
        return verify.compare(zoo.build(name), ctx, options, sample(packed), lambda model: want, block=block)


def add(models, name, world, results):
    """What was measured, to that of the model."""
    one = models.setdefault(name, {"sp": {}, "notes": []})
    worst = one["sp"].setdefault(str(world), {"loss": 0.0, "gradient": 0.0})
    for key in worst:
        worst[key] = max(worst[key], *(r[key] for r in results))
    one["notes"] = sorted({*one["notes"], *(n.split(": ", 1)[-1] for n in results[0]["notes"])})


@pytest.fixture(scope="module")
def models():
    made = {}
    yield made
    if OUT:
        path = Path(OUT) / f"transformers-{transformers.__version__}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "git": git_facts()}
        path.write_text(json.dumps({**about, "models": made}, indent=1, sort_keys=True) + "\n")


CASES = [
    (name, world, (world + i) % 2 == 1, how)
    for i, name in enumerate(zoo.MODELS)
    for world, how in [*((world, [*OPTIONS][(world + i) % 3]) for world in (1, 2, 3)), (2 + i % 2, "blocks")]
]


@pytest.mark.parametrize("name, world, packed, how", CASES if OUT else CASES[:: len(CASES) // 4])
def test_model(pools, models, name, world, packed, how):
    results = on_ranks(pools, world, attached, name, how, packed)
    assert {result["result"] for result in results} == {"exact"}, results
    add(models, name, world, results)
