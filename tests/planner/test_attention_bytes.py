"""Sliding windows, soft caps and the other decoders: the planner compared with the simulator, and its rules."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from alstlib.config import RunConfig, row_config
from alstlib.measure import plan_table
from alstlib.options import Options
from alstlib.planner.activations import kernel_of
from alstlib.planner.attention_bytes import beside_form
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.moments import families
from alstlib.planner.prediction import longest, predict
from alstlib.planner.step_time import attention_flops

EIGHT = Machine(gpus=8, host_memory=1_900_000_000_000)


def committed() -> list[dict[str, Any]]:
    return json.loads(plan_table.FAMILIES.read_text())["found"]


def test_the_committed_comparison_of_newer_decoders_is_within_its_bounds() -> None:
    """`python -m alstlib.measure.plan_table --families` made it. Seeds 2009 and 2021 have ranks with parts of heads in
    a decoder whose width is that of all heads together: it is no wider for the rank that has most of them."""
    found = committed()
    assert [one["seed"] for one in found] == list(plan_table.NEWER)
    assert len({one["options"]["model.name"] for one in found}) > 8
    for one in found:
        assert abs(one["error"]) <= 0.025, one["seed"]
        assert one["planned_host"] == pytest.approx(one["simulated_host"], rel=0.02)
        assert plan_table.plan_again(one) == one


@pytest.mark.parametrize("seed", [2000, 2006])
def test_newer_configurations_drawn_again(seed: int) -> None:
    """What is committed is what comes out today."""
    again, before = plan_table.compare(seed), next(one for one in committed() if one["seed"] == seed)
    for name in ("planned", "simulated", "options", "planned_host", "simulated_host"):
        assert again[name] == before[name], name


@pytest.mark.parametrize("name", plan_table.NEW)
def test_every_new_model_has_a_plan(name: str) -> None:
    """With our options, those of the paper's baseline, and in row chunks."""
    shape = read_shape(name)
    assert shape.family in families()
    ours = row_config("ours", RunConfig(model={"name": name, "dtype": "bf16"})).replace(options={"chunk": None})
    plain = row_config("baseline", ours)
    reached = [longest(shape, run, EIGHT) for run in (plain, ours, ours.replace(options={"chunk": 16_384}))]
    assert all(best is not None for best in reached[1:])
    assert (reached[0].seq_len if reached[0] else 0) < reached[1].seq_len  # type: ignore[union-attr]


def test_a_window_saves_time_and_no_memory() -> None:
    """Queries, keys and values stay as long as they are. flash-attn takes windows itself; put together from pieces they
    take copies, but in chunks no more than those of a chunk."""
    shape = read_shape("mistralai/Mistral-7B-v0.1")
    plain = replace(shape, window=0, windowed=0)
    run = RunConfig(
        model={"name": shape.name, "dtype": "bf16"},
        engine={"sp": 8},
        options=Options.plain(tiles={"mlp": True, "loss": True}, offload=True),
    )
    length = 2**20
    one, other = (predict(of, run, EIGHT, length) for of in (shape, plain))
    assert one.activations.device["hidden states"] == other.activations.device["hidden states"]
    assert one.activations.host == other.activations.host
    assert one.seconds["attention"] == pytest.approx(other.seconds["attention"] * 2 * 4096 / length, rel=0.01)
    sizes = (8, length, length / 8)
    assert beside_form(shape, "cudnn", *sizes, None, 2) == 0
    assert beside_form(shape, "cpu", *sizes, None, 2) > 0
    in_chunks = beside_form(shape, "cudnn", *sizes, 1024.0, 2)
    assert 0 < in_chunks == beside_form(shape, "cudnn", 8, 2 * length, length / 4, 1024.0, 2)
    assert beside_form(shape, "cpu", 8, 4096, 512, None, 2) == 0  # the window hides nothing


def test_capped_scores_are_slow_and_told_so() -> None:
    """Gemma 2 runs no fused kernel without flash-attn's packages."""
    shape = read_shape("google/gemma-2-9b")
    run = RunConfig(
        model={"name": shape.name, "dtype": "bf16"},
        engine={"sp": 8},
        options=Options.plain(tiles={"mlp": True, "loss": True}, offload=True),
    )
    assert kernel_of(shape, run, "cuda") == "blockwise"
    found = predict(shape, run, EIGHT, 2**17)
    free = predict(replace(shape, softcap=False), run, EIGHT, 2**17)
    assert found.seconds["attention"] > 5 * free.seconds["attention"]
    sizes = (8, 4096, 512, None, 2)  # the window hides nothing
    assert beside_form(shape, "blockwise", *sizes) > 0 == beside_form(shape, "flash_attention_3", *sizes)


def test_pairs_of_full_and_sliding_layers() -> None:
    """One layer in two of Gemma 2 sees everything."""
    shape = read_shape("google/gemma-2-9b")
    assert (shape.windowed, shape.layers) == (21, 42)
    whole = attention_flops(replace(shape, windowed=0), 10**6)
    assert attention_flops(shape, 10**6) == pytest.approx(whole / 2 + whole / 2 * 2 * 4096 / 10**6, rel=0.01)
    assert attention_flops(shape, 10**6, 0.5) == pytest.approx(whole / 4 + whole / 2 * 2 * 4096 / 10**6, rel=0.01)
