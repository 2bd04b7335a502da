"""Decoders that the net does not draw: attention that depends on positions (Llama 4: chunks of documents, and queries
scaled on layers without RoPE), and attention whose keys an indexer selects, in documents that are longer than what it
selects."""

import matrix
import pytest
import torch
import transformers
import yaml
from cases import attach, batch, check_attached, check_refused, sample_of
from operators import Operations
from zoo import ZOO, build

import alstlib
from alstlib.base.sizing import TILE_BYTES
from alstlib.hf.by_position import chunk_offsets
from alstlib.hf.indexed import select
from alstlib.ulysses.alltoall import Exchange

CASES = yaml.safe_load("""
- [llama4, 3x1, average, packed rows, [layers, chunks, blocks], {}]
# heads that two ranks do not divide
- [llama4, 2x1, average, whole, [kept, hidden], {hidden_size: 24, num_attention_heads: 3, num_key_value_heads: 3}]
- [llama4, 2x1, zero3, packed, [chunks, blocks], {}]
# rotary embeddings of complex numbers, whose frequencies depend on the longest position
- [llama4, 2x1, average, whole, [kept, hidden, blocks], {max_position_embeddings: 16, rope_parameters: {
   rope_type: dynamic, rope_theta: 1.0e+4, factor: 4.0}}]
- [deepseek_v32, 3x1, average, packed rows, [layers, kept], {}]
- [deepseek_v32, 2x1, zero3, whole, [kept], {}]
# a layer takes what the one before selected
- [glm_moe_dsa, 2x1, average, packed, [kept, plain], {}]
- [axk2, 3x1, average, whole, [layers], {}]
# has sinks
- [hy_v4, 3x1, average, packed, [kept], {}]
- [dots3_note, 2x1, average, packed, [layers], {}]
""")
"""The model, ranks, engine, data, ways, fields of the config."""


@pytest.mark.parametrize("name, ranks, engine, data, ways, fields", CASES)
def test_a_step_is_that_of_plain_transformers(pools, name, ranks, engine, data, ways, fields):
    if not hasattr(transformers, ZOO["APART"][name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    for way in ways:
        case = matrix.Case(name, ranks=ranks, engine=engine, data=data, way=way)
        matrix.check_on(pools, case, fields=fields)


@pytest.mark.parametrize("name", ["llama4", "deepseek_v32"])
def test_the_model_does_it_by_itself_where_it_runs_as_its_own(name):
    """It scales its queries, or selects."""
    model, tokens = build(name), sample_of(32)["input_ids"]
    want = model(tokens).logits
    with attach(model) as handle, handle.as_its_own():
        assert torch.equal(model(tokens).logits, want)
    assert torch.equal(model(tokens).logits, want)


# ----- by position


def test_chunks_are_counted_from_the_start_of_each_document():
    assert chunk_offsets(None, 2, 7, 3) == (0, 3, 6, 7, 10, 13, 14)
    assert chunk_offsets((0, 2, 9, 10), 2, 5, 4) == (0, 2, 5, 9, 10)


def test_trees_are_refused():
    with attach(model := build("llama4")):
        check_refused("chunked attention", alstlib.tree_step, model, [{"input_ids": torch.arange(3, 9)}])


# ----- indexed


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
    with Operations() as operations:
        made = select(indexer, indexer.forward, hidden, queries, (rotary, rotary), None, None, Exchange())
    assert made.shape == (1, length, 5)
    assert operations.largest < length * length


def test_chunks_and_blocks_are_refused():
    check_refused("layer 0 .* an indexer selects.*chunk=None", attach, build("deepseek_v32"), chunk=4)
    with attach(model := build("deepseek_v32")):
        check_refused("layer 0 .* an indexer selects", alstlib.block_step, model, batch(16), block=4)
