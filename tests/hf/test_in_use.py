"""What surrounds an attached model: half precision, autocast, generation, a router's loss, and dropout."""

import copy
import functools

import pytest
import torch
import zoo
from cases import (
    ALL_OFF,
    ALL_ON,
    attach,
    check_refused,
    check_step,
    lines_of,
    make_model,
    plain_step,
    same,
    sample_of,
    step,
)
from operators import gradients, leaf, randn

import alstlib
from alstlib.base.reference import relative_error
from alstlib.ulysses.attention import UlyssesAttention

HOW = {"on": ALL_ON, "chunk": {**ALL_ON, "chunk": 5}, "off": ALL_OFF}
LENGTH = 26
SAMPLE = sample_of(LENGTH)
IDS = SAMPLE["input_ids"]


# ----- half precision


def errors(got, exact):
    """Of the loss, and the root mean square of the relative errors of all gradients."""
    squares = [relative_error(got[1][n], exact[1][n]) ** 2 for n in exact[1]]
    return abs(got[0] - exact[0]) / exact[0], float(torch.tensor(squares).mean().sqrt())


def half(rank, world, name, dtype, autocast, how):
    """Errors against the fp32 oracle are at most 1.5 times those of plain transformers in the same precision."""
    data, model = sample_of(60), zoo.build(name)
    model.config.output_router_logits = False
    if not autocast:  # the same rounded weights in all three
        model = model.to(dtype)
    exact = plain_step(copy.deepcopy(model).float(), data)
    with torch.autocast("cpu", dtype, enabled=autocast):
        plain = plain_step(model, data)
        ctx = alstlib.SPContext.create(world)
        with attach(model, ctx, **HOW[how]):
            (loss, gradient), theirs = errors(step(model, data, ctx), exact), errors(plain, exact)
    assert gradient <= 1.5 * theirs[1], (gradient, theirs)
    assert loss <= max(1.5 * theirs[0], 1e-3), (loss, theirs)


HALVES = """
llama       -> float16  -> weights  -> on
gpt_oss     -> float16  -> autocast -> chunk
llama       -> bfloat16 -> autocast -> on
llama       -> bfloat16 -> weights  -> chunk
mistral     -> bfloat16 -> autocast -> chunk
gemma2      -> bfloat16 -> weights  -> on
gpt_oss     -> bfloat16 -> weights  -> on
deepseek_v3 -> bfloat16 -> autocast -> chunk
"""
"""Models, dtypes, what has the dtype, and how layers run."""


@pytest.mark.parametrize("name, dtype, of, how", lines_of(HALVES))
def test_half_precision_is_as_good_as_plain(pools, name, dtype, of, how):
    """On three ranks, which share rows of heads."""
    pools(3)(half, name, getattr(torch, dtype), of == "autocast", how)


# ----- generation


@pytest.mark.parametrize("how", ["on", "chunk"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
def test_generation_inside_apply_is_plain_generation(name, how):
    """With padding on the left, a cache, and windows shorter than what is generated."""
    model = zoo.build(name).eval()
    ids = sample_of(9, rows=2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 2}
    want, trained = model.generate(**given), plain_step(model, SAMPLE)
    with attach(model, **HOW[how]):
        for _ in range(2):
            assert torch.equal(model.generate(**given), want)
            check_step(step(model, SAMPLE), trained)  # training goes on
    assert torch.equal(model.generate(**given), want)
    assert "generate" not in model.__dict__


def refused_generation(rank, world):
    says = r"^generate\(\) needs the whole sequence on one rank: call it after detach\(\), or with sp=1$"
    with attach(make_model(), alstlib.SPContext.create(world)) as handle:
        check_refused(says, handle.model.generate, IDS)


def test_generation_over_ranks_is_refused(ranks2):
    ranks2(refused_generation)


# ----- a router's loss


def test_router_loss_is_in_the_output():
    """And not of a call that asks for none."""
    model = zoo.build("mixtral")

    def values():
        with_it, without = (model(**SAMPLE, output_router_logits=asked) for asked in (True, False))
        return [with_it.loss.item(), with_it.aux_loss.item(), without.loss.item()]

    want = values()
    with attach(model, **ALL_ON):
        assert values() == pytest.approx(want, rel=1e-6)


# ----- what is refused at a call


def test_a_router_loss_that_is_not_known_is_refused():
    model = zoo.small("JetMoeConfig", num_hidden_layers=1, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)
    with attach(model):
        check_refused(
            "output_router_logits=True: the router's loss of JetMoe", model, **SAMPLE, output_router_logits=True
        )


@pytest.mark.parametrize("name", ["sdpa", "blockwise"])
def test_kernels_sum_in_full_precision_under_autocast(name):
    *qkv, dout = (leaf(randn(1, n, 64, 8, seed=n), torch.bfloat16) for n in (4, 2, 2, 4))
    op, how = UlyssesAttention(alstlib.SPContext(), name), {"softcap": 30.0 if name == "blockwise" else None}
    run = functools.partial(gradients, functools.partial(op, scale=1.0, **how), qkv, dout)
    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert same(plain, run())


# ----- dropout


def dropout_notes(rank, world):
    with attach(make_model("gpt2", resid_pdrop=0.1), alstlib.SPContext.create(world), **ALL_OFF) as handle:
        return handle.notes


def test_dropout_on_ranks_is_said(ranks2):
    for (note,) in ranks2(dropout_notes):
        assert "seed each rank with seed + rank" in note
    assert dropout_notes(0, 1) == []
