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
from cases import ALL_ON, attach, on_ranks, sample_of, small_pages, step, step_errors

import alstlib
from alstlib.planner.measure.verify import plain
from alstlib.runs.results import git_state

OPTIONS = {
    "on": ALL_ON,
    "chunk": {**ALL_ON, "chunk": 4, "on_host": "none"},
    "host": {"tiles": {"mlp": 5, "loss": 7, "norm": True}, "offload": "sync", "chunk": 3, "on_host": "hidden+kv"},
    "blocks": {"tiles": {"mlp": 5, "loss": 7, "norm": 6}, "offload": "sync", "on_host": "hidden+kv"},
}
OUT = os.environ.get("ALST_SUPPORT_OUT", "")
LENGTH = 26
PACKED = [3, 1, 9, 13]
"""Documents of a packed sample: one of a token, one that spans ranks."""


def sample(packed):
    return sample_of(LENGTH, documents=PACKED if packed else [LENGTH], ignored=slice(15, 19))


@functools.lru_cache(maxsize=2)  # the cases of a model follow each other
def reference(name, packed):
    return plain(zoo.build(name), sample(packed))


def attached(rank, world, name, how, packed):
    """The same on this rank's shard, with gradients averaged over ranks as an engine does."""
    ctx = alstlib.SPContext.create(world)
    model, data = zoo.build(name), sample(packed)
    want = reference(name, packed)
    with small_pages(), attach(model, ctx, **OPTIONS[how]) as handle:
        for _ in range(2):  # a checkpoint knows its layer better the second time
            got = step(model, data, ctx, block=3 if how == "blocks" else None)
        assert handle.plan.kv_on_host == (how in ("host", "blocks"))
        assert handle.store.bytes_fetched > 0
    loss, gradient, where = step_errors(got, want)
    return {"loss": loss, "gradient": gradient, "where": where,
            "notes": handle.notes, "kernel": handle.attention.backend_name}  # fmt: skip


def add(models, name, world, results):
    """What was measured, to that of the model."""
    one = models.setdefault(name, {"sp": {}, "notes": [], "kernel": results[0]["kernel"]})
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
        about = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "git": git_state()}
        path.write_text(json.dumps({**about, "models": made}, indent=1, sort_keys=True) + "\n")


CASES = [
    (name, world, (world + i) % 2 == 1, how)
    for i, name in enumerate(zoo.MODELS)
    for world, how in [*((world, [*OPTIONS][(world + i) % 3]) for world in (1, 2, 3)), (2 + i % 2, "blocks")]
]


@pytest.mark.parametrize("name, world, packed, how", CASES if OUT else CASES[:: len(CASES) // 4])
def test_model(pools, models, name, world, packed, how):
    results = on_ranks(pools, world, attached, name, how, packed)
    for result in results:
        assert result["loss"] < 1e-6, result
        assert result["gradient"] < 1e-5, result
    add(models, name, world, results)
