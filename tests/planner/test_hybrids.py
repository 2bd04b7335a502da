"""What the planner knows of hybrids, compared with transformers' own models of the same configs, without weights."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from quick_steps import question, quick  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

import alstlib
from alstlib.base.config import RunConfig
from alstlib.planner.command import as_json
from alstlib.planner.machine import Machine
from alstlib.planner.measure.simulate import fake_ranks, shard_of
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import predict
from alstlib.planner.question import NOTE
from alstlib.planner.rendering import describe
from alstlib.planner.state_ways import RECURRENCE, counted, forward_flops, pair_bytes
from alstlib.planner.step_time import linear_flops, passes_of, states_seconds


def test_qwen3_next():
    """80B parameters, of which 3B and the embedding work on a token; one layer in four attends."""
    shape = read_shape("Qwen/Qwen3-Next-80B-A3B-Instruct")
    states = shape.recurrence
    assert shape.parameters == 79_674_391_296
    assert (shape.attending, states.layers, shape.layers) == (12, 36, 48)
    assert pair_bytes(states.layer) == 4 * 32 * (128 * 128 + 128 * 128)
    assert states.tail == 3 * (2 * 2048 + 4096)
    assert sum(linear_flops(shape, 1).values()) == 2 * shape.dense_parameters


def test_what_layers_with_a_state_send_and_compute():
    """Passed states do not grow with the sequence, and each chunk sends them; heads grow with it, and compute nothing
    twice. A recompute and a backward are a forward and two."""
    shape, machine = read_shape("Qwen/Qwen3-Next-80B-A3B"), Machine(gpus=8)
    states, found = shape.recurrence, SimpleNamespace(inputs_kept_every=1, attention_kept=0.0, twice=0.0)

    def at(tokens, ranks=8, **options):
        run = OURS.replace(options={"linear_attention": "pass", **options})
        passes = passes_of(shape, run, found, tokens // ranks)
        return states_seconds(states, run, machine, ranks, tokens, passes)

    wire, work = at(80_000)
    each = pair_bytes(states.layer) + 2 * states.tail
    assert wire == pytest.approx(36 * 2 * 7 * each / machine.rates.link)
    assert at(800_000) == (wire, pytest.approx(10 * work))
    assert at(80_000, chunk=10_000) == (wire, work)  # a chunk that holds the slice
    assert at(80_000, chunk=1000)[0] == pytest.approx((9 * 4 + 3) / 2 * wire)  # states are made again, but the last
    heads, once = at(80_000, linear_attention="heads")
    assert heads > wire
    assert once < work
    assert at(800_000, linear_attention="heads")[0] > 9 * heads
    nothing, alone = at(80_000, 1)
    assert (nothing, alone) == (0, pytest.approx(8 * once))
    assert at(80_000, 1, chunk=1000)[1] == pytest.approx(alone * (4 + 79 / 80) / 4)
    flops = 36 * 80_000 * 4 * 32 * forward_flops(states.layer)
    assert alone == pytest.approx(flops / (RECURRENCE * machine.rates.matmul))


OURS = RunConfig(model={"name": "Qwen/Qwen3-Next-80B-A3B", "dtype": "bf16"}, options=alstlib.Options.plain(tiles=True))


def test_a_plan_says_whose_kernels_it_is_of():
    hybrid = question(f"--gpus 8 --model {OURS.model.name}")
    assert question("--gpus 8 --model Qwen/Qwen3-4B").notes(10_000) == []
    found = hybrid.at(100_000)
    assert hybrid.notes(100_000) == as_json(hybrid, found, found)["notes"] == [NOTE]
    assert f"\nNote: {NOTE}" in list(describe(hybrid, found, found))


def test_a_plan_says_which_kernel_would_refuse_a_call():
    """32 value heads of 128: 2^19 tokens of a rank are 2^31 elements, which is where `kernels.int32` refuses them."""
    hybrid = question(f"--gpus 8 --model {OURS.model.name} --set options.chunk=null")
    assert hybrid.refusals(8 * (2**19 - 1)) == []
    (refusal,) = hybrid.refusals(8 * 2**19)
    assert refusal in hybrid.notes(8 * 2**19)
    assert "a call of 524,288 tokens of each rank has 2,147,483,648: the step is refused" in refusal
    assert "Chunks of 524,287 tokens pass" in refusal
    assert hybrid.with_changes({"options.chunk": 2**18}).refusals(8 * 2**19) == []
    assert counted(replace(hybrid.shape.recurrence.layer, matrix=False, chunk_size=64), 1000) == 1000 * 32 * 256


def test_longer_sequences_fit_a_hybrid_than_a_decoder_of_its_parameters_that_attends_everywhere():
    """Pages of keys and values on the host are those of its attention layers alone; and a step is shorter."""
    hybrid = read_shape(OURS.model.name)
    dense = replace(hybrid, attending=48, recurrence=None)
    machine = Machine(gpus=32, host_memory=10**13)
    run = OURS.replace(engine={"sp": 0, "offload_optimizer": True}, options={"offload": True, "chunk": 16_384})
    one, other = (predict(shape, run, machine, 2_000_000).seconds for shape in (hybrid, dense))
    assert one["attention"] < 0.3 * other["attention"]
    assert one["exchange"] < other["exchange"]


LAYERS = yaml.safe_load("""
qwen3_next: &kinds {num_hidden_layers: 2, layer_types: [linear_attention, full_attention]}
qwen3_5_text: *kinds
granitemoehybrid: *kinds
bamba: {num_hidden_layers: 2, attn_layer_indices: [1]}
falcon_h1: {num_hidden_layers: 2, mamba_d_ssm: 8192, mamba_d_head: 64}
nemotron_h: {hybrid_override_pattern: "M*"}
""")
"""Families with a recurrence, and fields of their configs."""


@pytest.mark.parametrize("family", LAYERS)
def test_the_planner_knows_the_recurrence_that_the_model_has(family, tmp_path):
    """So both choose the same way over ranks."""
    config = AutoConfig.for_model(family, vocab_size=512, pad_token_id=0, **LAYERS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    config.save_pretrained(tmp_path)
    with fake_ranks(2) as ctx, alstlib.apply(model, ctx) as handle, FakeTensorMode(allow_non_fake_inputs=True):
        alstlib.causal_lm_loss(model.to_empty(device="cpu"), shard_of(ctx, 64))
    assert set(handle.recurrences) == {read_shape(str(tmp_path)).recurrence.layer}
