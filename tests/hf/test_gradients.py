"""The gradient contract under every engine, where the net of whole steps (tests/matrix.py) draws no such values."""

import functools

import pytest
import yaml
from cases import decoder_layers, mlp_tokens
from matrix import Case, check_on


@pytest.mark.parametrize("engine", ["average", "ddp", "zero1", "zero3"])
@pytest.mark.parametrize("way", ["kept", "chunks, kept"])
def test_the_head_alone_trains(pools, engine, way):
    check_on(pools, Case("llama", weights="head alone", way=way, engine=engine))


@pytest.mark.parametrize("model", ["qwen3_next", "bamba", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe"])
def test_layers_with_a_state_where_heads_do_not_divide(pools, model):
    """Three heads on four ranks, in attention and, where the model has as many there, in the state."""
    heads = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    check_on(pools, Case(model, "4x1", way="chunks, kept", states="auto"), fields=heads, data=[[[3, 21, 1, 12]]])


def counted(model):
    tokens = mlp_tokens(model)
    return lambda: tokens


@pytest.mark.parametrize("ranks", ["1x2", "2x1"])
@pytest.mark.parametrize("engine", ["fsdp2", "zero0", "zero2", "zero3"])
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_engines_run_the_mlp_twice(pools, model, engine, ranks):
    """With their hooks in the graph too, and where a norm follows the MLP: its weight is then used in the MLP's tiles.
    Four micro-batches: by then ZeRO-3 prefetches in the order that it has recorded."""
    case = Case(model, ranks, way="kept", engine=engine)
    for result in check_on(pools, case, data=[[[32]]], accumulation=4, prepare=counted):
        assert result["seen"] == [4 * 32 * (case.dp + 2 // case.sp)] * 2  # and the plain model once, on all samples


UNEVEN = yaml.safe_load("[[[1]], [[9, 10, 10, 9, 10]], [[7]], [[2, 3]], [[10, 10, 10], [10, 10, 10]], [[64]]]")
"""Of two replicas in turn: rows, lengths and documents differ."""
FIVE = {"options": {"save_attention": "auto"}, "fields": {"num_hidden_layers": 5}}
ROOMS = yaml.safe_load("""
- [fsdp2, [9000, 20000]]
- [fsdp2, [25000, null]]
- [zero3, [null, null]]
- [zero3, [200000, 16000]]
- [zero3, [1000000, 10000, 1000000, 1000000]]
""")
"""On the host of each rank: of two replicas, and of two with two ranks each."""


@pytest.mark.slow
@pytest.mark.parametrize("engine, room", ROOMS)
def test_replicas_in_which_all_that_is_local_differs(pools, engine, room):
    """Rows, lengths, documents and room on the host, from replica to replica and from micro-batch to micro-batch: the
    engine gathers weights, so all replicas must run the same layers in the same order. With two ranks in each replica
    the first has one token a rank in its first sample."""
    case = Case("gemma2", f"{len(room) // 2}x2", way="kept", engine=engine)
    host = tuple(n and n * case.dtype.itemsize // 4 for n in room)
    data = UNEVEN if case.sp == 1 else [[[2]], *UNEVEN[1:]]
    kept = {(r["every"], r["kept"]) for r in check_on(pools, case, **FIVE, data=data, accumulation=3, host_memory=host)}
    assert len(kept) == 1
    assert min(kept)[0] > 1 or not any(room)


@pytest.mark.parametrize("bucket", [1, 100_000])
@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3"])
def test_tied_embeddings(pools, engine, bucket):
    """The embedding, 3,072 elements, is above DeepSpeed's thresholds or below: a bucket that is not full is not sent
    before backward ends, and hides what arrives too late."""
    check_on(pools, Case("llama", weights="tied", way="kept", engine=engine), bucket=bucket)


def shared(name, model):
    """Gives the second layer the first one's module, or weight of a module."""
    here, _, attribute = name.rpartition(".")
    first, second = (layer.get_submodule(here) for layer in decoder_layers(model))
    setattr(second, attribute, getattr(first, attribute))
    return lambda: None


@pytest.mark.parametrize("name", ["mlp", "input_layernorm.weight"])
def test_weights_that_layers_share(pools, name):
    """Each layer's recompute has a gradient of its own for them, of which ZeRO-3 keeps one."""
    share = functools.partial(check_on, pools, prepare=functools.partial(shared, name), bucket=1)
    for way in ("kept", "chunks, kept"):
        share(case=Case("llama", way=way, engine="zero1"))
    with pytest.raises(AssertionError, match=rf"layers.0.{name}.* trains and is used in several parts"):
        share(case=Case("llama", way="kept", engine="zero3"))
    share(case=Case("llama", way="kept", engine="zero3", weights="frozen MLPs and norms"))
