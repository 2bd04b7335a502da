"""What the planner knows of hybrids, compared with transformers' own models of the same configs, without weights."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alstlib.config import RunConfig
from alstlib.planner.activations import activations
from alstlib.planner.command import add_arguments, as_json, describe, read
from alstlib.planner.hybrids import NOTE
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape, shape_of
from alstlib.planner.prediction import predict
from alstlib.planner.public_models import PUBLIC
from alstlib.planner.step_time import linear_flops, states_bytes

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 8},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "falcon_h1": {"num_hidden_layers": 3, "mamba_d_ssm": 4096, "mamba_n_heads": 64},
    "nemotron_h": {"hybrid_override_pattern": "M-M*-"},
    "lfm2": {"num_hidden_layers": 6, "full_attn_idxs": [2, 5]},
}


@pytest.mark.parametrize("family", list(CONFIGS))
def test_parameters_are_those_of_the_model(family: str) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family])
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
    assert states.pair == 32 * (128 * 128 + 128 * 128)
    assert states.tail == 3 * (2 * 2048 + 4096)
    assert sum(linear_flops(shape, 1).values()) == 2 * shape.dense_parameters
    each = 4 * states.pair + 2 * states.tail
    assert states_bytes(shape, 8, 1, 2) == 2 * 7 * 36 * each
    assert states_bytes(shape, 1, 1, 2) == 0


def test_kinds_of_layers_are_read_from_every_way_to_write_them() -> None:
    qwen = PUBLIC["Qwen/Qwen3-Next-80B-A3B"]
    kinds = ["linear_attention", "full_attention"] * 24
    listed = shape_of({**qwen, "layer_types": kinds}, "some")
    assert listed.states is not None
    assert listed.attending == 24
    with pytest.raises(ValueError, match="has layers of moe, which have no form"):
        shape_of(AutoConfig.for_model("nemotron_h", hybrid_override_pattern="ME*").to_dict(), "some")
    with pytest.raises(ValueError, match="has layers of recurrent, which have no form"):
        shape_of({**PUBLIC["Qwen/Qwen3-4B"], "layer_types": ["recurrent"] * 36}, "some")


OURS = RunConfig(model="Qwen/Qwen3-Next-80B-A3B", dtype="bf16", tiled_mlp=True, tiled_norm=True, tiled_loss=True)
SIMULATED = [
    ({"offload": "async"}, 7689), ({"offload": "async", "chunk": 4096}, 10_571), ({"offload": "none"}, 10_633),
]  # fmt: skip
"""MiB of one of four ranks with 16,384 tokens each, by `simulate_deep`."""


@pytest.mark.parametrize(("how", "simulated"), SIMULATED, ids=str)
def test_memory_is_that_of_the_simulator(how: dict[str, Any], simulated: int) -> None:
    """Most is in a layer with a state that routes to experts; what all layers keep is counted for each kind."""
    shape, run = read_shape(OURS.model), OURS.replace(**how)
    found = activations(shape, run, 4, 65_536, "cuda", workspace=False)
    assert found.peak / 2**20 == pytest.approx(simulated, rel=0.015)
    assert found.place == "model.layers.46.mlp.experts"
    row = 16_384 * 2048 * 2
    assert found.device.get("checkpoints", 0) == (0 if run.offload == "async" else 48 * row)


def test_a_plan_says_whose_kernels_it_is_of() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    hybrid, plain = (read(parser.parse_args(["--model", name])) for name in (OURS.model, "Qwen/Qwen3-4B"))
    assert plain.notes == []
    assert hybrid.notes == [NOTE]
    found = hybrid.at(100_000)
    assert describe(hybrid, found, found, [])[-1] == f"Note: {NOTE}"
    assert as_json(hybrid, found, found, [])["notes"] == [NOTE]


def test_longer_sequences_fit_a_hybrid_than_a_decoder_of_its_parameters_that_attends_everywhere() -> None:
    """Pages of keys and values on the host are those of its attention layers alone; and a step is shorter."""
    hybrid = read_shape(OURS.model)
    qwen = PUBLIC["Qwen/Qwen3-Next-80B-A3B"]
    dense = shape_of({**qwen, "layer_types": ["full_attention"] * 48}, "attends everywhere")
    machine = Machine(gpus=32, host_memory=10**13)
    run = OURS.replace(sp=0, offload="async", chunk=16_384, offload_optimizer=True)
    one, other = (predict(shape, run, machine, 2_000_000).seconds for shape in (hybrid, dense))
    assert one["attention"] < 0.3 * other["attention"]
    assert one["exchange"] < other["exchange"]
