"""Every supported decoder against plain transformers: loss and every gradient, at SP degrees that split its heads and
that do not, whole and packed, with everything on and streamed in chunks of rows, with hidden states, keys and
values on the device and on the host, and block by block.

`make support` writes what this measured to papermill_runs/results/support and the table in notebooks/training.md.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from cases import small_pages, worst_error

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.measure.verify import Reference, plain
from alstlib.runs.results import git_state

OPTIONS: dict[str, dict[str, Any]] = {
    "off": {"tiled_mlp": False, "tiled_norm": False, "tiled_loss": False, "checkpoint": False},
    "on": {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "offload": "async", "save_attention": True},
    "twice": {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "save_attention": False},
    "chunk": {
        "tiled_mlp": 5,
        "tiled_norm": 6,
        "tiled_loss": 7,
        "offload": "async",
        "save_attention": True,
        "chunk": 4,
        "hidden": "device",
    },
    "blocks": {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "offload": "sync", "kv": "host"},
    "host": {"tiled_mlp": 5, "tiled_loss": 7, "offload": "sync", "chunk": 3, "kv": "host", "hidden": "host"},
}
LENGTH = 26
PACKED = [3, 1, 9, 13]
"""Documents of a packed sample: one of a token, one that spans ranks."""


def sample(packed: bool) -> dict[str, Any]:
    ids = torch.randint(3, zoo.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, 15:19] = -100
    return {"input_ids": ids, "labels": labels, "document_lengths": [PACKED if packed else [LENGTH]]}


@functools.lru_cache(maxsize=4)  # the cases of a model follow each other
def reference(name: str, packed: bool) -> Reference:
    return plain(zoo.build(name), sample(packed))


def attached(rank: int, world: int, name: str, how: str, packed: bool) -> dict[str, Any]:
    """The same on this rank's shard, with gradients averaged over ranks as an engine does."""
    ctx = alstlib.SPContext.create(world)
    model, data = zoo.build(name), sample(packed)
    loss, want = reference(name, packed)
    with small_pages(), alstlib.apply(model, ctx, alstlib.Options(**OPTIONS[how])) as handle:
        for _ in range(2):  # a checkpoint knows its layer better the second time
            model.zero_grad()
            if how == "blocks":
                out = alstlib.block_step(model, shard_batch(data, world, rank), ctx, 3)
                continue
            out = alstlib.causal_lm_loss(model, shard_batch(data, world, rank), ctx)
            out.loss.backward()
        got = {}
        for n, p in model.named_parameters():
            if p.grad is None and n not in want:
                continue
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            if world > 1:
                torch.distributed.all_reduce(grad)
            got[n] = grad / world
        assert handle.kv_on_host == (how in ("host", "blocks"))
        assert (handle.store.bytes_fetched > 0) == (handle.options.offload != "none")
        model.eval()
        with torch.no_grad():
            mean = alstlib.causal_lm_loss(model, shard_batch(data, world, rank), ctx).mean.item()
    grad_error, where = worst_error(got, want)
    return {"loss": abs(out.mean.item() - loss) / loss, "evaluation": abs(mean - loss) / loss, "gradient": grad_error,
            "where": where, "notes": handle.notes, "kernel": handle.attention.backend_name}  # fmt: skip


class Outcome:
    """What was measured, by model."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Any]] = {}

    def add(self, name: str, world: int, results: list[dict[str, Any]]) -> None:
        one = self.models.setdefault(name, {"sp": {}, "notes": [], "kernel": results[0]["kernel"]})
        for key in ("loss", "gradient"):
            worst = one["sp"].setdefault(str(world), {})
            worst[key] = max(worst.get(key, 0.0), *(r[key] for r in results))
        one["notes"] = sorted({*one["notes"], *(n.split(": ", 1)[-1] for n in results[0]["notes"])})


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    made = Outcome()
    yield made
    if folder := os.environ.get("ALST_SUPPORT_OUT"):
        path = Path(folder) / f"transformers-{transformers.__version__}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "git": git_state()}
        text = {**about, "models": made.models}
        path.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")


def check(pools: Any, outcome: Outcome, world: int, name: str, how: str, packed: bool) -> None:
    results = pools(world)(attached, name, how, packed) if world > 1 else [attached(0, 1, name, how, packed)]
    for result in results:
        assert result["loss"] < 1e-6, result
        assert result["evaluation"] < 1e-6, result
        assert result["gradient"] < 1e-5, result
    outcome.add(name, world, results)


@pytest.mark.parametrize("how", ["on", "chunk", "host"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_model(pools: Any, outcome: Outcome, name: str, world: int, packed: bool, how: str) -> None:
    check(pools, outcome, world, name, how, packed)


@pytest.mark.parametrize("how", ["off", "twice"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_model_with_less(pools: Any, name: str, how: str) -> None:
    check(pools, Outcome(), 3, name, how, packed=how == "off")


@pytest.mark.parametrize("name", [*zoo.MODELS, *zoo.MORE])
def test_by_blocks(pools: Any, name: str) -> None:
    check(pools, Outcome(), 2 if name in zoo.MODELS else 3, name, "blocks", packed=name in zoo.MODELS)


@pytest.mark.parametrize("how", ["on", "chunk", "host"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", zoo.MORE)
def test_more(pools: Any, name: str, world: int, how: str) -> None:
    check(pools, Outcome(), world, name, how, packed=how == "on" and "RoPE" not in name and "NTK" not in name)
