"""What the planner knows of hybrids, compared with transformers' own models of the same configs, without weights."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

import alstlib
from alstlib.config import RunConfig
from alstlib.hf import state_ways
from alstlib.hf.public_models import PUBLIC
from alstlib.measure import plan_table
from alstlib.measure.simulate import fake_ranks, shard_of
from alstlib.planner.command import add_arguments, as_json, read
from alstlib.planner.gpus import rates_of
from alstlib.planner.hybrids import NOTE
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape, shape_of
from alstlib.planner.prediction import predict
from alstlib.planner.rendering import describe
from alstlib.planner.state_ways import RECURRENCE, StateLayer, state_costs
from alstlib.planner.step_time import linear_flops, states_seconds

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 8},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "granitemoehybrid, dense": {"num_hidden_layers": 3, "num_local_experts": 0, "layer_types": ["mamba"] * 3},
    "falcon_h1": {"num_hidden_layers": 3, "mamba_d_ssm": 4096, "mamba_n_heads": 64},
    "nemotron_h": {"hybrid_override_pattern": "M-M*-"},
    "nemotron_h, experts": {"hybrid_override_pattern": "MEM*E"},
    "lfm2": {"num_hidden_layers": 6, "full_attn_idxs": [2, 5]},
}


@pytest.mark.parametrize("family", list(CONFIGS))
def test_parameters_are_those_of_the_model(family: str) -> None:
    config = AutoConfig.for_model(family.partition(",")[0], **CONFIGS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), family)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_parameters == max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    assert shape.states is not None
    assert len(shape.states.kinds) == shape.layers == len(model.model.layers)


def test_qwen3_next() -> None:
    """80B parameters, of which 3B and the embedding work on a token; one layer in four attends."""
    shape = read_shape("Qwen/Qwen3-Next-80B-A3B-Instruct")
    states = shape.states
    assert states is not None
    assert shape.parameters == 79_674_391_296
    assert (shape.attending, states.stateful, shape.layers) == (12, 36, 48)
    assert states.layer is not None
    assert states.layer.pair_bytes() == 4 * 32 * (128 * 128 + 128 * 128)
    assert states.tail == 3 * (2 * 2048 + 4096)
    assert sum(linear_flops(shape, 1).values()) == 2 * shape.dense_parameters


def test_what_layers_with_a_state_send_and_compute() -> None:
    """Passed states do not grow with the sequence, and each chunk sends them; heads grow with it, and compute nothing
    twice. A recompute and a backward are a forward and two."""
    shape, machine = read_shape("Qwen/Qwen3-Next-80B-A3B"), Machine(gpus=8)
    states, run = shape.states, OURS.replace(options={"linear_attention": "pass"})
    assert states is not None
    assert states.layer is not None

    def at(run: RunConfig, tokens: int, ranks: int = 8) -> tuple[float, float]:
        return states_seconds(states, run, machine, ranks, tokens, 2.0)

    wire, work = at(run, 80_000)
    each = states.layer.pair_bytes() + 2 * states.tail
    assert wire == pytest.approx(36 * 2 * 7 * each / machine.rates.link)
    assert at(run, 800_000) == (wire, pytest.approx(10 * work))
    assert at(run.replace(options={"chunk": 1000}), 80_000)[0] == pytest.approx(
        10 * 2 * wire
    )  # of three passes and a backward
    heads, once = at(run.replace(options={"linear_attention": "heads"}), 80_000)
    assert heads > wire
    assert once < work
    assert at(run.replace(options={"linear_attention": "heads"}), 800_000)[0] > 9 * heads
    wire, alone = at(run, 80_000, 1)
    assert wire == 0
    assert alone == pytest.approx(8 * once)
    flops = 36 * 80_000 * 4 * 32 * states.layer.forward_flops()
    assert alone == pytest.approx(flops / (RECURRENCE * machine.rates.matmul))


def test_kinds_of_layers_are_read_from_every_way_to_write_them() -> None:
    qwen = PUBLIC["Qwen/Qwen3-Next-80B-A3B"]
    kinds = ["linear_attention", "full_attention"] * 24
    listed = shape_of({**qwen, "layer_types": kinds}, "some")
    assert listed.states is not None
    assert listed.attending == 24
    with pytest.raises(ValueError, match="has layers of experts and layers of an MLP; both have no form"):
        shape_of(AutoConfig.for_model("nemotron_h", hybrid_override_pattern="ME*-").to_dict(), "some")
    with pytest.raises(ValueError, match="has layers of recurrent, which have no form"):
        shape_of({**PUBLIC["Qwen/Qwen3-4B"], "layer_types": ["recurrent"] * 36}, "some")


OURS = RunConfig(model={"name": "Qwen/Qwen3-Next-80B-A3B", "dtype": "bf16"}, options=alstlib.Options.plain(tiles=True))

FAMILIES = {name.partition(",")[0] for name in CONFIGS}


def committed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(plan_table.HYBRIDS_FILE.read_text())["found"]
    return found


def test_random_configurations_are_within_five_percent_of_the_simulator() -> None:
    """`python -m alstlib.measure.plan_table --hybrids` made them."""
    found = committed()
    assert [one["seed"] for one in found] == list(plan_table.HYBRIDS)
    assert {read_shape(one["options"]["model.name"]).family for one in found} >= set(FAMILIES)
    for one in found:
        assert plan_table.plan_again(one) == one
        assert abs(one["error"]) < 0.02, one["seed"]
        assert 0.98 < one["planned_host"] / max(1, one["simulated_host"]) < 1.2 or not one["simulated_host"]


@pytest.mark.parametrize("seed", [3044, 3048])
def test_some_of_them_simulated_again(seed: int) -> None:
    again, before = plan_table.compare(seed), next(one for one in committed() if one["seed"] == seed)
    assert {**again, "seconds": 0} == {**before, "seconds": 0}


def test_a_plan_says_whose_kernels_it_is_of() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    named = (parser.parse_args(["--model", name]) for name in (OURS.model.name, "Qwen/Qwen3-4B"))
    hybrid, plain = (read(args).question(rates_of("H100"), 8) for args in named)
    assert plain.notes(10_000) == []
    found = hybrid.at(100_000)
    assert hybrid.notes(100_000) == as_json(hybrid, found, found)["notes"] == [NOTE]
    assert f"\nNote: {NOTE}" in list(describe(hybrid, found, found, 0.0))


def test_longer_sequences_fit_a_hybrid_than_a_decoder_of_its_parameters_that_attends_everywhere() -> None:
    """Pages of keys and values on the host are those of its attention layers alone; and a step is shorter."""
    hybrid = read_shape(OURS.model.name)
    qwen = PUBLIC["Qwen/Qwen3-Next-80B-A3B"]
    dense = shape_of({**qwen, "layer_types": ["full_attention"] * 48}, "attends everywhere")
    machine = Machine(gpus=32, host_memory=10**13)
    run = OURS.replace(engine={"sp": 0, "offload_optimizer": True}, options={"offload": True, "chunk": 16_384})
    one, other = (predict(shape, run, machine, 2_000_000).seconds for shape in (hybrid, dense))
    assert one["attention"] < 0.3 * other["attention"]
    assert one["exchange"] < other["exchange"]


LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {}, "qwen3_5_text": {}, "bamba": {"attn_layer_indices": [1]}, "granitemoehybrid": {},
    "falcon_h1": {"mamba_d_ssm": 8192, "mamba_d_head": 64}, "nemotron_h": {"hybrid_override_pattern": "M*"},
}  # fmt: skip
"""Families with a recurrence, and fields of their configs."""


@pytest.mark.parametrize("family", list(LAYERS))
def test_the_planner_knows_the_recurrence_that_the_model_has(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So both choose the same way over ranks."""
    seen: list[StateLayer] = []

    def costs(layer: StateLayer, *args: Any, **how: Any) -> Any:
        seen.append(layer)
        return state_costs(layer, *args, **how)

    monkeypatch.setattr(state_ways, "state_costs", costs)
    fields: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 512, "pad_token_id": 0, **LAYERS[family]}
    if family in ("qwen3_next", "qwen3_5_text", "granitemoehybrid"):
        fields["layer_types"] = ["linear_attention", "full_attention"]
    fields = {n: v for n, v in fields.items() if family != "nemotron_h" or n != "num_hidden_layers"}
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    with fake_ranks(2) as ctx, alstlib.apply(model, ctx), FakeTensorMode(allow_non_fake_inputs=True):
        alstlib.causal_lm_loss(model.to_empty(device="cpu"), shard_of(ctx, 64))
    shape = shape_of(config.to_dict(), family)
    assert shape.states is not None
    assert set(seen) == {shape.states.layer}
