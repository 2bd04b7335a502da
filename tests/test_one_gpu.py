"""The page on one GPU: what it stores is planned now too. That smaller runs take what is planned of them is asserted by
the page itself, which `make check-lessons` runs."""

import json
import random

import one_gpu
import pytest
from cases import check_refused, lines_of

from alstlib.base.config import RunConfig
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.model_states import GATHERED, WEIGHTS
from alstlib.planner.prediction import frozen_weights, states
from alstlib.runs import workers

COMPARED = """
device       -> by_category
host         -> by_category
device       -> peak
host         -> peak
disk         -> peak
step_seconds -> step
"""
STORED = json.loads(one_gpu.FILE.read_text())["claims"]


def test_its_claims_are_stored_and_fit():
    assert {name: claim["command"] for name, claim in STORED.items()} == one_gpu.CLAIMS
    for claim in STORED.values():
        assert claim["plan"]["fits"]
        assert claim["plan"]["disk"]["peak"] > 10**11


@pytest.mark.simulates
def test_a_stored_plan_is_what_its_command_says():
    """One of them, drawn anew each time: an answer takes half a minute of processor time."""
    name = random.choice([*one_gpu.CLAIMS])
    question, tokens = one_gpu.asked(one_gpu.CLAIMS[name])
    found, stored = question.at(tokens).to_dict(), STORED[name]["plan"]
    for part, what in lines_of(COMPARED):
        assert found[part][what] == pytest.approx(stored[part][what], rel=0.01), (name, part, what)


def test_weights_of_4_bits():
    shape, lora = read_shape("Qwen/Qwen3-8B"), {"r": 16}
    run = RunConfig(
        model={"name": shape.name, "dtype": "bf16", "lora": lora, "bits": 4},
        engine={"zero_stage": 0, "offload_optimizer": False},
    )
    linear = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    assert shape.linear_parameters == linear
    plain = run.replace(model={"bits": None})
    whole = frozen_weights(shape, plain, 2)
    assert whole == 2 * shape.parameters
    constants = linear / 64 + 4 * linear / 64 / 256  # scales, and the scales of these
    packed = frozen_weights(shape, run, 2)
    assert packed == round(whole - 2 * linear + linear / 2 + constants)
    adapter = 2 * shape.adapter_parameters(lora)
    for one, base in ((run, packed), (plain, whole)):
        assert states(shape, one, Machine(gpus=1)).device[WEIGHTS] == base + adapter
    many = states(shape, run.replace(engine={"zero_stage": 3, "offload_params": True}), Machine(gpus=8))
    assert not {GATHERED, WEIGHTS} & many.host.keys()  # whole on each device, and nowhere else
    assert many.device[WEIGHTS] == packed + adapter
    assert not any(of.get(GATHERED) for of in (many.device, *many.others.values()))
    check_refused("is for weights that are not trained", RunConfig, model={"bits": 4})
    with pytest.raises(ValueError, match="linear modules"):
        read_shape("Qwen/Qwen3-30B-A3B").linear_parameters  # noqa: B018
    check_refused("planned only", workers.check, run, workers.FINETUNE)
