"""Configurations: units, refusals that say what would work, and rows that differ only in what they name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from alstlib.config import FEATURES, PAPER_ROWS, ROWS, RunConfig, row_config
from alstlib.options import Options
from alstlib.units import parse_quantity


@pytest.mark.parametrize(
    "text, value",
    [
        ("3.7M", 3_700_000), ("500K", 500_000), ("80GB", 80_000_000_000), ("64GiB", 64 * 2**30), ("1.5 TiB", 3 * 2**39),
        ("2_048", 2048), ("12", 12), ("12B", 12), (".5k", 500), (7, 7), (7.0, 7), ("1gb", 10**9),
    ],
)  # fmt: skip
def test_quantities(text: Any, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "many", "12 XB", "1e6", "-5", "5 5", True, "GB", 7.9, "7.9", None])
def test_what_is_no_quantity(text: Any) -> None:
    with pytest.raises(ValueError, match="seq_len="):
        parse_quantity(text, "seq_len")


def test_quantities_are_read_in_a_config() -> None:
    run = RunConfig(
        data={"seq_len": "3.7M"},
        limits={"device_memory": "80GB"},
        options=Options.plain(host_memory="1.9TB"),
        search={"max": "10M"},
        optim={"steps": "2"},
    )
    assert (run.data.seq_len, run.limits.device_memory, run.options.host_memory) == (
        3_700_000,
        80 * 10**9,
        1_900 * 10**9,
    )
    assert (run.search.max, run.optim.steps) == (10_000_000, 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seq_len": 0}, "seq_len=0 must be a whole number of at least 1, such as 2048 or 3.7M"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"steps": 2.7}, "steps=2.7 must be a whole number of at least 1"),
        ({"steps": True}, "steps=True must be a whole number of at least 1"),
        ({"steps": None}, "steps=None must be a whole number of at least 1"),
        ({"accumulation": -1}, "accumulation=-1 must be a whole number of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be a whole number of at least 0"),
        ({"checkpoint_every": -5}, "checkpoint_every=-5 must be a whole number of at least 0"),
        ({"device_memory": "much"}, "device_memory='much' must be a whole number of at least 1, such as 80GB or 64GiB"),
        ({"zero_stage": 4}, "zero_stage=4 must be one of 0, 1, 2, 3"),
        ({"zero_stage": True}, "zero_stage=True must be one of 0, 1, 2, 3"),
        ({"offload": "disk"}, "offload='disk' must be one of 'none', 'sync', 'async'"),
        ({"attention": "fast"}, "attention='fast' must be one of 'sdpa', 'auto', 'cpu'"),
        ({"dtype": "fp16"}, "dtype='fp16' must be one of"),
        ({"liger": "perhaps"}, "liger='perhaps' must be True, False, 'auto' or 'loss'"),
        ({"liger": "loss"}, "chooses its own tiles: tiled_loss=False must be True"),
        ({"liger": "loss", "tiled_loss": 4096}, "chooses its own tiles: tiled_loss=4096 must be True"),
        ({"save_attention": "some"}, "save_attention='some' must be True, False or 'auto'"),
        ({"packed": "perhaps"}, "packed='perhaps' must be True or False"),
        ({"packed": 2}, "packed=2 must be True or False"),
        ({"tiled_mlp": 0}, "tiled_mlp=0 must be True, False or a tile of at least 1 token"),
        ({"tiled_mlp": 1.5}, "tiled_mlp=1.5 must be True, False or a tile"),
        ({"tiled_loss": "big"}, "tiled_loss='big' must be"),
        ({"chunk": 0}, "chunk=0 must be a whole number of at least 1, such as 2048 or 3.7M, or None"),
        ({"chunk": 64, "checkpoint": False}, "it needs checkpoint=True"),
        ({"sparse": {"top": 4}}, "works on layers that run in chunks: give chunk too"),
        ({"sparse": {"tops": 4}, "chunk": 64}, "unknown field of sparse 'tops'; did you mean 'top'?"),
        ({"sparse": {"last": 4}, "chunk": 64}, "needs top, the number of pages chosen by their scores"),
        ({"sp": -1}, "sp=-1 must be a whole number of at least 0"),
        ({"world_size": 4, "sp": 3}, "sp=3 does not divide world_size=4"),
        ({"offload": "sync", "checkpoint": False}, "it needs checkpoint=True"),
        ({"save_attention": True, "checkpoint": False}, "it needs checkpoint=True"),
        ({"offload_params": True, "zero_stage": 2}, "needs zero_stage=3, not 2"),
        ({"offload_optimizer": True, "zero_stage": 0}, "needs zero_stage 1, 2 or 3"),
        ({"packed": True, "batch_size": 2}, "batch_size=2 must be 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a number of at least 0, such as 1e-4"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be a number of at least 0"),
        ({"learning_rate": "fast"}, "learning_rate='fast' must be a number of at least 0"),
        ({"learning_rate": True}, "learning_rate=True must be a number"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 must be a number of at least 0"),
        ({"weight_decay": float("inf")}, "weight_decay=inf must be a number of at least 0"),
        ({"timeout": -1}, "timeout=-1 must be a number of at least 0, such as 3600, or None"),
        ({"model": 7}, "model=7 must be a text"),
        ({"model": ["small"]}, "model=['small'] must be a text"),
        ({"data": None}, "data=None must be a text"),
        ({"model_config": [1]}, "model_config=[1] must be a mapping"),
        ({"peers": 5}, "peers=5 must be a list of texts"),
        ({"save_to": 5}, "save_to=5 must be a text, or None"),
        ({"row": "../../x"}, "row='../../x' must be the name of a folder: letters, digits and _ . + - only"),
        ({"row": "a/b"}, "row='a/b' must be the name of a folder"),
        ({"row": ".."}, "row='..' must be the name of a folder"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        RunConfig(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "given, field, value",
    [
        ("1e-4", "learning_rate", 1e-4), ("0.5", "max_grad_norm", 0.5), (0, "learning_rate", 0),
        ("false", "packed", False), ("no", "trust_remote_code", False), ("True", "prefetch", True), (1, "search", True),
        ("false", "tiled_loss", False), ("true", "tiled_mlp", True), (1, "tiled_mlp", 1), ("4K", "tiled_norm", 4000),
        ("auto", "liger", "auto"), ("false", "liger", False), (1, "save_attention", True), ("8", "seed", 8),
        ("2", "zero_stage", 2), ("600", "timeout", 600),
        (2.0, "steps", 2), ("16K", "chunk", 16_000), (None, "chunk", None), (Path("x"), "save_to", "x"), (2, "sp", 2),
        ("alst", "peers", ("alst",)), (["alst", "ref"], "peers", ("alst", "ref")), ("a.b+c-d", "row", "a.b+c-d"),
    ],
)  # fmt: skip
def test_values_are_converted_by_their_fields_type(given: Any, field: str, value: Any) -> None:
    found = getattr(RunConfig(**{field: given}), field)
    assert (found, type(found)) == (value, type(value))


def test_what_yaml_writes_is_read() -> None:
    text = "{learning_rate: 1e-4, packed: 'false', steps: 4, timeout: 300, chunk: 16K, tiled_mlp: true}"
    run = RunConfig.from_dict(yaml.safe_load(text))
    assert run == RunConfig(
        optim={"learning_rate": 1e-4, "steps": 4},
        data={"packed": False},
        limits={"timeout": 300},
        options=Options.plain(tiles={"mlp": True}, chunk=16_000),
    )


def test_committed_configurations_are_read_as_they_were_written() -> None:
    """A run's id is a digest of its configuration: checking it must not change it."""
    results = sorted((Path(__file__).parents[1] / "papermill_runs" / "results").rglob("result.json"))
    known = {field.name for field in dataclasses.fields(RunConfig)}
    for path in results:
        written = {n: v for n, v in json.loads(path.read_text())["config"].items() if n in known}
        read = RunConfig.from_dict(written).to_dict()
        assert json.dumps({n: read[n] for n in written}) == json.dumps(written), path
    assert len(results) > 20


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown parameter 'sequence_len'; did you mean 'seq_len'\?"):
        RunConfig.from_dict({"sequence_len": 5})
    with pytest.raises(ValueError, match="unknown parameter 'qqq'; known: row, model"):
        RunConfig.from_dict({"qqq": 5})
    with pytest.raises(ValueError, match=r"unknown row 'ulises'; did you mean 'ulysses'\?"):
        row_config("ulises")


def test_every_field_is_documented() -> None:
    for field in dataclasses.fields(RunConfig):
        assert len(field.metadata["doc"]) > 8, field.name


def test_a_config_is_frozen_and_survives_json() -> None:
    run = RunConfig(
        model={"config": {"vocab_size": 300}}, options=Options.plain(tiles={"mlp": 64}), limits={"device_memory": "1GB"}
    )
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.data.seq_len = 5  # type: ignore[misc]
    assert run.replace(data={"seq_len": "4K"}).data.seq_len == 4000
    assert run.replace(data={"seq_len": "4K"}).replace(data={"seq_len": run.data.seq_len}) == run


def test_the_digest_names_a_config() -> None:
    run = RunConfig(model={"name": "tiny"})
    assert run.digest() == RunConfig(model={"name": "tiny"}).digest()
    assert len(run.digest()) == 12
    assert int(run.digest(), 16) >= 0
    changes = {"seq_len": 4096, "row": "alst", "seed": 1, "tiled_mlp": 64, "model_config": {"vocab_size": 300}}
    digests = {run.replace(**{k: v}).digest() for k, v in changes.items()} | {run.digest(), run.digest("commit")}
    assert len(digests) == len(changes) + 2
    assert RunConfig(data={"seq_len": "4K"}).digest() == RunConfig(data={"seq_len": 4000}).digest()


PAPER = {
    "baseline": set(),
    "tiled_loss": {"tiled_loss"},
    "ulysses": {"tiled_loss", "sp"},
    "ulysses+tiled_mlp": {"tiled_loss", "sp", "tiled_mlp"},
    "ulysses+offload": {"tiled_loss", "sp", "offload"},
    "alst": {"tiled_loss", "sp", "tiled_mlp", "offload"},
    "ours": {"tiled_loss", "sp", "tiled_mlp", "tiled_norm", "offload", "save_attention", "chunk"},
}
"""Table 1 of the paper: the boxes that each row ticks; and ours."""


@pytest.mark.parametrize("row", PAPER)
def test_a_row_differs_from_the_baseline_only_in_the_features_it_names(row: str) -> None:
    for base in (
        RunConfig(),
        RunConfig(
            model={"name": "tiny"},
            options=Options.plain(tiles={"mlp": 5}, offload=True, save_attention=True),
            engine={"sp": 2},
        ),
    ):
        plain, featured = row_config("baseline", base).to_dict(), row_config(row, base).to_dict()
        changed = {name for name in plain if plain[name] != featured[name]}
        assert changed - {"row"} == PAPER[row] == set(ROWS[row])
        assert featured["row"] == row
        assert featured["model"] == base.model.name
        off = {
            "tiled_loss": False,
            "tiled_mlp": False,
            "tiled_norm": False,
            "offload": "none",
            "save_attention": False,
            "chunk": None,
        }
        assert {name: plain[name] for name in off} == off
        assert plain["sp"] == 1


def test_rows_are_those_of_the_paper_and_ours() -> None:
    assert list(ROWS) == list(PAPER) == [*PAPER_ROWS, "ours"]
    assert set().union(*PAPER.values()) - {"save_attention", "tiled_norm", "chunk"} == set(FEATURES)
    for row in PAPER_ROWS:  # the paper's options
        run = row_config(row)
        assert run.options.save_attention is False
        assert run.options.chunk is None
        assert run.options.offload in ("none", "sync")
        assert run.options.checkpoint
        assert run.engine.zero_stage == 3
        assert run.engine.offload_optimizer
    lengths = [PAPER_ROWS[row]["seq_len"] for row in PAPER_ROWS]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (32_000, 3_700_000)
