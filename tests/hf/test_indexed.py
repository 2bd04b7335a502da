"""Attention whose keys an indexer selects, in documents that are longer than what it selects."""

import matrix
import pytest
import torch
import transformers
import yaml
from cases import attach, batch, check_attached, check_refused, sample_of
from operators import largest
from zoo import ZOO, build

import alstlib
from alstlib.base.sizing import TILE_BYTES
from alstlib.hf.indexed import select
from alstlib.ulysses.alltoall import Exchange

CASES = yaml.safe_load("""
- [deepseek_v32, 3x1, average, packed rows, [layers, kept]]
- [deepseek_v32, 2x1, zero3, whole, [kept]]
- [glm_moe_dsa, 2x1, average, packed, [kept, plain]]
- [axk2, 3x1, average, whole, [layers]]
- [hy_v4, 3x1, average, packed, [kept]]
- [dots3_note, 2x1, average, packed, [layers]]
""")
"""The model, ranks, engine, data, ways. hy_v4 has sinks; a layer of glm_moe_dsa takes what the one before selected."""


@pytest.mark.parametrize("name, ranks, engine, data, ways", CASES)
def test_a_step_is_that_of_plain_transformers(pools, name, ranks, engine, data, ways):
    if not hasattr(transformers, ZOO["APART"][name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    for way in ways:
        case = matrix.Case(name, ranks=ranks, engine=engine, data=data, way=way)
        matrix.check(pools(case.sp)(matrix.run, case), case)


def test_tiles_of_few_rows_select_the_same(monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 200)
    model = build("deepseek_v32", torch.float64)
    model.set_experts_implementation("eager")
    with matrix.in_full():
        check_attached(model, sample_of(33, documents=[20, 12, 1]))


def test_nothing_has_the_square_of_the_sequence(monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 200)
    indexer, length = build("deepseek_v32").model.layers[0].self_attn.indexer, 128
    hidden, queries, rotary = (torch.randn(1, length, width) for width in (32, 12, 4))
    with largest() as found:
        made = select(indexer, indexer.forward, hidden, queries, (rotary, rotary), None, None, Exchange())
    assert made.shape == (1, length, 5)
    assert found() < length * length


def test_chunks_and_blocks_are_refused():
    check_refused("layer 0 .* an indexer selects.*chunk=None", attach, build("deepseek_v32"), chunk=4)
    with attach(model := build("deepseek_v32")):
        check_refused("layer 0 .* an indexer selects", alstlib.block_step, model, batch(16), block=4)


def test_the_model_selects_by_itself_where_it_runs_as_its_own():
    model, tokens = build("deepseek_v32"), sample_of(20)["input_ids"]
    want = model(tokens).logits
    with attach(model) as handle, handle.as_its_own():
        assert torch.equal(model(tokens).logits, want)
