"""Attention that depends on positions (Llama 4): chunks of documents, and queries scaled on layers without RoPE."""

import matrix
import pytest
import torch
from cases import attach, check_refused, make_samples
from zoo import build

import alstlib
from alstlib.hf.by_position import chunk_offsets

NAME = "llama4"
ODD = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
"""Heads that two ranks do not divide."""
CASES = [
    ("3x1", "average", "packed rows", {}, ["layers", "chunks", "blocks"]),
    ("2x1", "average", "whole", ODD, ["kept", "hidden"]),
    ("2x1", "zero3", "packed", {}, ["chunks", "blocks"]),
]
"""Ranks, engine, data, fields of the config, ways."""


@pytest.mark.parametrize("ranks, engine, data, fields, ways", CASES)
def test_a_step_is_that_of_plain_transformers(pools, ranks, engine, data, fields, ways):
    for way in ways:
        case = matrix.Case(NAME, ranks=ranks, engine=engine, data=data, way=way)
        matrix.check(pools(case.sp)(matrix.run, case, matrix.More(fields=fields)), case)


@pytest.mark.parametrize("way", ["kept", "hidden", "blocks"])
def test_rotary_embeddings_of_complex_numbers_whose_frequencies_depend_on_the_longest_position(pools, way):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    case = matrix.Case(NAME, ranks="2x1", way=way)
    more = matrix.More(fields={"max_position_embeddings": 16, "rope_parameters": rope})
    matrix.check(pools(case.sp)(matrix.run, case, more), case)


def test_chunks_are_counted_from_the_start_of_each_document():
    assert chunk_offsets(None, 2, 7, 3) == (0, 3, 6, 7, 10, 13, 14)
    assert chunk_offsets((0, 2, 9, 10), 2, 5, 4) == (0, 2, 5, 9, 10)


def test_the_model_scales_its_queries_again_where_it_runs_as_its_own():
    model = build(NAME)
    tokens = make_samples(1)[0]["input_ids"]
    want = model(tokens).logits
    with attach(model) as handle, handle.as_its_own():
        assert torch.equal(model(tokens).logits, want)
    assert torch.equal(model(tokens).logits, want)


def test_trees_are_refused():
    with attach(model := build(NAME)):
        check_refused("chunked attention", alstlib.tree_step, model, [{"input_ids": torch.arange(3, 9)}])
