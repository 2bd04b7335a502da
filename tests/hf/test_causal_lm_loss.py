"""The loss over all ranks: fields, factors, and steps in which somebody has nothing to learn from."""

import pytest
import torch
from cases import (
    attach,
    batch_of,
    by_own_names,
    check_step,
    gradients,
    make_model,
    make_samples,
    plain_step,
    sample_of,
    wrap,
)  # fmt: skip
from operators import error_of

import alstlib
from alstlib.config import RunConfig
from alstlib.data.shard import shard_batch
from alstlib.mesh import SPContext

LENGTH = 12
OPTIONS = {"tiles": {"mlp": 5, "loss": 7, "norm": True}, "save_attention": True}


def batch(seed=0, masked=0):
    return batch_of(LENGTH, seed, ignored=slice(masked))


def times(factor, of):
    return of[0] * factor, {n: g * factor for n, g in of[1].items()}


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "shift_labels"])
def test_a_missing_field_is_named(name):
    others = {n: t for n, t in batch().items() if n != name}
    with attach(make_model()) as handle:
        for data, has in ((others, ", ".join(others)), ({**others, name: None}, ", ".join(others)), ({}, "nothing")):
            with pytest.raises(ValueError, match=rf"the batch has no \w+; it has {has}"):
                alstlib.causal_lm_loss(handle.model, data)


def test_a_model_that_is_not_attached_is_refused():
    """Hugging Face's models swallow fields that they do not know: their loss would be another one."""
    model = make_model()
    attach(model).detach()
    for other in (make_model(), model, torch.nn.parallel.DataParallel(model), None):
        with pytest.raises(ValueError, match=r" is not attached: attach the model with alstlib\.apply first"):
            alstlib.causal_lm_loss(other, batch())


def accumulated(rank, world, stage):
    """What is said where the loader and the engine are told different numbers of micro-batches; and sums of losses as
    the engine divides them, and without a division."""
    ctx, model, samples = SPContext.create(world), make_model(), make_samples(4)
    attach(model, ctx, **OPTIONS)
    fields = {"zero_stage": stage, "offload_optimizer": False, "dtype": "fp32", "accumulation": 2}
    engine = wrap(model, f"zero{stage}", world, RunConfig.from_dict(by_own_names(fields)))
    steps = engine.gradient_accumulation_steps()
    wrong = next(iter(alstlib.SPDataLoader(samples, ctx, accumulation=4, replicated=True)))
    said = [error_of(alstlib.causal_lm_loss, engine, wrong), error_of(alstlib.block_step, engine, wrong, 4)]
    loader = alstlib.SPDataLoader(samples, ctx, accumulation=steps, replicated=True)
    share = [float(alstlib.causal_lm_loss(engine, b).loss) * int(b["step_tokens"]) / steps for b in loader]
    once = [float(alstlib.causal_lm_loss(engine, b, engine_divides_by=1).loss) * int(b["step_tokens"]) for b in loader]
    engine.destroy()
    return [said, share, once]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_number_of_micro_batches_is_asked_of_the_engine(ranks2, stage):
    message = (
        "the engine accumulates gradients over 2 micro-batches, but the loader counted the tokens of 4: give "
        "SPDataLoader(accumulation=2), or zero_config(accumulation=4)"
    )
    for said, share, once in ranks2(accumulated, stage):
        assert said == [message] * 2
        assert share == pytest.approx(once, rel=1e-6)


@pytest.mark.parametrize("kind", [int, float, torch.tensor], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("divides", [1, 4])
def test_factors_of_one_rank(kind, divides):
    """loss = sum / step_tokens * engine_divides_by; mean and tokens are this micro-batch's. Without step_tokens the
    micro-batch is the step."""
    model, data = make_model(), batch(masked=3)
    want = plain_step(model, data)
    with attach(model, **OPTIONS):
        out = alstlib.causal_lm_loss(model, {**data, "step_tokens": kind(50)}, engine_divides_by=divides)
        out.loss.backward()
        alone = alstlib.causal_lm_loss(model, {**data, "step_tokens": None}).loss.item()
    check_step((out.loss.item(), gradients(model)), times(8 * divides / 50, want))
    assert [out.mean.item(), alone] == pytest.approx([want[0]] * 2, rel=1e-6)
    assert (out.tokens.item(), out.tokens.dtype, out.mean.requires_grad) == (8, torch.int64, False)


@pytest.mark.parametrize("step_tokens", [None, 0, 7])
@pytest.mark.parametrize("tiled_loss", [7, False])
def test_no_valid_token_anywhere(tiled_loss, step_tokens):
    """A finite loss of zero and gradients of exactly zero, on every weight."""
    model = make_model()
    with attach(model, tiles={"mlp": 5, "loss": tiled_loss, "norm": True}):
        data = {**batch(masked=LENGTH), "step_tokens": step_tokens}
        out = alstlib.causal_lm_loss(model, data, statistics=True)
        out.loss.backward()
    got = gradients(model)
    assert (out.loss.item(), out.mean.item(), out.tokens.item()) == (0, 0, 0)
    assert (out.entropy.item(), out.accuracy.item()) == (0, 0)
    assert len(got) == len(list(model.parameters()))
    assert not any(g.any() for g in got.values())


# ----- over ranks


def nothing_to_learn(rank, world, sp):
    ctx, model = SPContext.create(sp), make_model()
    with attach(model, ctx, **OPTIONS):
        out = alstlib.causal_lm_loss(model, shard_batch(sample_of(LENGTH, ignored=slice(LENGTH)), sp, ctx.sp_rank))
        out.loss.backward()
    assert (out.loss.item(), out.mean.item(), out.tokens.item()) == (0, 0, 0)
    assert not any(g.any() for g in gradients(model, world).values())


@pytest.mark.parametrize("sp", [1, 2])
def test_no_valid_token_on_any_rank(ranks2, sp):
    ranks2(nothing_to_learn, sp)
