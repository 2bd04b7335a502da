"""Steps block by block: the gradients of plain transformers, under every engine, in memory of a block and its pages."""

import functools
import gc
import itertools
from dataclasses import replace

import pytest
import torch
import yaml
import zoo
from cases import (
    ALL_OFF,
    attach,
    check_refused,
    check_step,
    gradients,
    growth,
    make_model,
    own_step,
    plain_step,
    sample_of,
    small_pages,
    step,
    worst_error,
)
from matrix import Case, check_on
from torch.distributed.optim import _apply_optimizer_in_backward

import alstlib
from alstlib.data.shard import shard_batch
from alstlib.offload.host_store import HostOutOfMemory

LENGTH = 21
PACKED = [3, 1, 9, 8]
"""Documents of a packed sample: one of a token, one that spans blocks and ranks."""
HOST = {"offload": "sync", "on_host": "hidden+kv"}


def whole(data):
    return shard_batch(data, 1, 0)


def sample(documents=None, rows=1):
    """From token 8 to 16 no label counts, which at some sizes is all of a block."""
    return sample_of(LENGTH, rows, documents=documents, ignored=slice(8, 17))


@pytest.mark.parametrize("options", [HOST, {**HOST, "save_attention": False}, ALL_OFF], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_plain_transformers(pools, world, options):
    """What the net has not: blocks of a token, of some and of all tokens and more, in turn."""
    case = Case("llama, 9 heads on 3", f"{world}x1", tiles="default")
    how = {"options": options, "data": [[PACKED]], "accumulation": 1, "blocks": (1, 7, 64)}
    check_on(pools, case, (1e-12, 1e-12), **how)


LENGTHS = [[[32]], [[9]], [[17]], [[40]]]
"""Of the micro-batches of two replicas, in turn: they have 4 blocks and 2, then 3 and 5."""
ENGINES = yaml.safe_load("""
[[ddp, lfm2], [ddp, llama], [fsdp2, llama], [zero0, llama], [zero1, llama], [zero2, llama], [zero3, llama],
 [zero3, qwen3_5]]
""")


@pytest.mark.parametrize("engine, model", ENGINES)
def test_engines(pools, engine, model):
    """Three optimizer steps of two micro-batches, two block by block and one whole: each gradient is reduced once and
    added to that of the micro-batch before; the engine counts micro-batches. With replicas that have fewer blocks than
    others, by two and more, also of models with layers that carry a state."""
    case = Case(model, "1x2", engine=engine, tiles="default")
    results = check_on(pools, case, (1e-5, 1e-5), options=HOST, data=LENGTHS, blocks=(8, 8, None))
    assert [r["steps"] for r in results] == [(3, 6) if engine.startswith("zero") else None] * 2


# ----- one process


@pytest.mark.parametrize("name", ["mixtral", "llama, dynamic NTK"])
def test_what_is_of_the_whole_sequence(name):
    """The routers' loss, with padding left out of it, and frequencies by the longest position; in evaluation too."""
    model, data = zoo.build(name), sample(rows=2)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 9]])
    data["attention_mask"] = real.long()
    want = own_step(model, **{**data, "labels": data["labels"].masked_fill(~real, -100)})
    with attach(model):
        for block in (None, 4):
            check_step(step(model, data, block=block), want, 3e-6, 3e-6)
        model.zero_grad()
        with torch.no_grad():
            alone = alstlib.block_step(model, whole(data), block=4)
    assert gradients(model) == {}
    assert alone.mean.item() == pytest.approx(want[0], rel=3e-6)


@pytest.mark.parametrize("save", [True, False])
def test_what_runs_how_often(save):
    """Attention over the whole sequence: once in forward; in backward once in a block's first pass, and again in its
    recompute unless the output is kept."""
    with attach(make_model(), save_attention=save) as handle:
        step(handle.model, sample(), block=5)
        assert handle.attention.forward_calls == 2 * (2 if save else 3)


def wide_states(**overrides):
    return zoo.build_hybrid("qwen3_5", linear_key_head_dim=64, linear_value_head_dim=64, **overrides)


@pytest.mark.slow
@pytest.mark.parametrize("build", [make_model, wide_states], ids=["attention", "states"])
def test_device_memory_does_not_grow(build):
    """From 3 blocks to 6, with pages and states on the host: the peak grows by the tokens, positions and labels of a
    row, of 8 bytes each."""
    assert growth(192, 384, build, block=64, **HOST) <= 3 * 8
    assert growth(192, 384, build) > 1000  # the reading can fail


@pytest.mark.parametrize("chunk, block, when", [(None, 9, 1), (None, 9, 5), (None, 9, 8), (4, None, 9)])
def test_a_failure_leaves_a_model_that_trains_on(chunk, block, when):
    """In forward, in backward's first block, and in its last: then block by block, whole, generation and detach. And in
    the backward of layers in six chunks."""
    model, calls = make_model(), itertools.count(1)
    want = plain_step(model, sample())

    def fail(*_):
        if next(calls) == when:
            raise RuntimeError("the device is on fire")

    with small_pages(), attach(model, **HOST, chunk=chunk, tiles={"loss": True, "norm": True}) as handle:
        hook = model.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="on fire"):
            step(model, sample(), block=block)  # 3 blocks; each recompute runs the MLP twice
        hook.remove()
        gc.collect()
        assert (handle.state, handle.store.leased) == (None, 0)
        for again in {block, None}:
            check_step(step(model, sample(), block=again), want)
        assert model.generate(sample()["input_ids"][:, :3], max_new_tokens=2, do_sample=False).shape[1] == 5
    check_step(plain_step(model, sample()), want, gradient=1e-6)


def test_an_optimizer_in_backward_steps_once():
    """Hooks that step and clear gradients as soon as these are made get whole gradients, once; PyTorch's own, which
    would step after each block, is refused."""
    model, taken = make_model(), []
    want = plain_step(model, sample())[1]
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: taken.append((name, p.grad)) or setattr(p, "grad", None)
        )
    with attach(model):
        step(model, sample(), block=4)
        assert len(taken) == len(want)
        assert worst_error(dict(taken), want)[0] < 1e-5
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        check_refused("_apply_optimizer_in_backward would step once for each block", step, model, sample(), block=4)


# ----- refusals


def test_refusals():
    model, batch = make_model(), whole(sample())
    by_blocks = functools.partial(alstlib.block_step, model)
    with attach(model, chunk=6):
        check_refused(r"chunk=6, .* Options\(chunk=None\) and block=6", by_blocks, batch)
    with attach(model) as handle:
        for block in (0, 2.5, True):
            check_refused("must be an integer of at least 1 token", by_blocks, batch, block=block)
        handle.facts = replace(handle.facts, not_by_blocks="layer 1 (Odd) calls attention more than once")
        check_refused(r"layer 1 \(Odd\) .*: the model cannot run by blocks; use causal_lm_loss", by_blocks, batch)


def limited(rank, world, memory, states=False):
    """What a step says, and the host memory it takes, where the last rank has so much of it."""
    ctx, model = alstlib.SPContext.create(world), wide_states() if states else make_model()
    with attach(model, ctx, **HOST, host_memory=memory if rank else 10**6) as handle:
        try:
            alstlib.block_step(model, shard_batch(sample(), world, rank), 4)
        except HostOutOfMemory as e:
            return str(e), handle.store.peak_nbytes
        return "", handle.store.peak_nbytes


def test_a_host_without_room_is_refused_on_all_ranks_before_anything_is_taken(ranks2):
    """In each of 2 layers 2 pages of 2 x 4 rows (the last is not kept) of one head's keys and values, of width 8 in
    fp32, with their sums; and the input of the first layer, from which the second's is made again."""
    least = 2 * 2 * 8 * (8 + 8) * (4 + 4) + 4 * 32 * 4
    (other, taken), (own, taken_too) = ranks2(limited, least - 1)
    assert "needs 1 bytes of host memory more than rank 1 has left" in other
    assert f"needs {least:,} bytes of host memory for this rank" in own
    assert taken == taken_too == 0
    assert ranks2(limited, least)[1] == ("", least)


def test_states_of_blocks_count_among_what_a_host_must_have_room_for(ranks2):
    """They are known after the first block. They are most of what is taken, which differs by what is let go late."""
    (message, taken), _ = ranks2(limited, 10**6, True)
    assert (message, taken > 2 * 2 * 4 * 64 * 64) == ("", True)
    (other, _), (own, _) = ranks2(limited, taken * 3 // 4, True)
    assert "bytes of host memory more than rank 1 has left" in other
    assert "of host memory for this rank" in own
