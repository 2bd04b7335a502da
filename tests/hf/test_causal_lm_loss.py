"""The loss over all ranks: fields, factors, and steps in which somebody has nothing to learn from."""

import pytest
import torch
from cases import (
    attach,
    batch_of,
    check_refused,
    make_model,
    on_ranks,
    plain_step,
    sample_of,
)  # fmt: skip
from matrix import Average

import alstlib
from alstlib.base.mesh import SPContext
from alstlib.data.shard import shard_batch

LENGTH = 12
OPTIONS = {"tiles": {"mlp": 5, "loss": 7, "norm": True}, "save_attention": True}


def test_a_model_that_is_not_attached_is_refused():
    """Hugging Face's models swallow fields that they do not know: their loss would be another one."""
    model = make_model()
    attach(model).detach()
    for other in (make_model(), model, torch.nn.parallel.DataParallel(model), None):
        check_refused(
            r" is not attached: attach the model with alstlib\.apply first",
            alstlib.causal_lm_loss,
            other,
            batch_of(LENGTH),
        )


def test_the_number_of_micro_batches_is_asked_of_the_engine():
    """The net of whole steps (tests/matrix.py) has DeepSpeed's engines, with the loss that they divide by it."""
    engine, data = Average(make_model()), {**batch_of(LENGTH), "accumulation": 4}
    engine.set_gradient_accumulation_boundary = engine.gradient_accumulation_steps = lambda: 2
    says = (
        "the engine accumulates gradients over 2 micro-batches, but the loader counted the tokens of 4: give "
        r"SPDataLoader\(accumulation=2\), or zero_config\(accumulation=4\)"
    )
    with attach(engine.module):
        for run in (alstlib.causal_lm_loss, alstlib.block_step):
            check_refused(says, run, engine, data)
        alstlib.causal_lm_loss(engine, data, engine_divides_by=2)


@pytest.mark.parametrize("divides", [1, 4])
def test_factors_of_one_rank(divides):
    """loss = sum / step_tokens * engine_divides_by, of any kind of number; mean and tokens are this micro-batch's.
    Without step_tokens the micro-batch is the step. Gradients are in the net of whole steps (tests/matrix.py)."""
    model, data = make_model(), batch_of(LENGTH, ignored=slice(3))
    mean, _ = plain_step(model, data)
    with attach(model, **OPTIONS):
        for tokens in (50, 50.0, torch.tensor(50), None):
            out = alstlib.causal_lm_loss(model, {**data, "step_tokens": tokens}, engine_divides_by=divides)
            share = 1 if tokens is None else 8 / 50
            assert [out.mean.item(), out.loss.item()] == pytest.approx([mean, mean * share * divides])
            assert (out.tokens.item(), out.tokens.dtype, out.mean.requires_grad) == (8, torch.int64, False)


def nothing_to_learn(rank, world, sp, tiled_loss, step_tokens):
    ctx, model = SPContext.create(sp), make_model()
    data = shard_batch(sample_of(LENGTH, ignored=slice(LENGTH)), sp, ctx.sp_rank)
    with attach(model, ctx, tiles={"mlp": 5, "loss": tiled_loss, "norm": True}, save_attention=True):
        out = alstlib.causal_lm_loss(model, {**data, "step_tokens": step_tokens}, statistics=True)
        out.loss.backward()
    got = [p.grad for p in model.parameters()]
    assert not any(t.any() for t in (out.loss, out.mean, out.tokens, out.entropy, out.accuracy, *got))


@pytest.mark.parametrize("step_tokens", [None, 0, 7])
@pytest.mark.parametrize("tiled_loss", [7, False])
@pytest.mark.parametrize("ranks, sp", [(1, 1), (2, 1), (2, 2)])
def test_no_valid_token_on_any_rank(pools, ranks, sp, tiled_loss, step_tokens):
    """A finite loss of zero and gradients of exactly zero, on every weight."""
    on_ranks(pools, ranks, nothing_to_learn, sp, tiled_loss, step_tokens)
