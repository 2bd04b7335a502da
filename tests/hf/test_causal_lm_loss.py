"""The loss over all ranks: fields, factors, and steps in which somebody has nothing to learn from."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from cases import Step, attach, batch_of, check_step, gradients, make_model, plain_step, sample_of, wrap

import alstlib
from alstlib.config import RunConfig
from alstlib.data.shard import shard_batch
from alstlib.mesh import SPContext

LENGTH = 12
OPTIONS: dict[str, Any] = {"tiles": {"mlp": 5, "loss": 7, "norm": True}, "save_attention": True}


def batch(seed: int = 0, masked: int = 0) -> dict[str, Any]:
    return batch_of(LENGTH, seed, ignored=slice(masked))


def times(factor: float, of: Step) -> Step:
    return of[0] * factor, {n: g * factor for n, g in of[1].items()}


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "shift_labels"])
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "None"])
def test_a_missing_field_is_named(name: str, absent: bool) -> None:
    data = batch()
    others = [n for n in data if n != name]
    if absent:
        del data[name]
    else:
        data[name] = None
    with (
        attach(make_model()) as handle,
        pytest.raises(ValueError, match=rf"the batch has no {name}; it has ") as e,
    ):
        alstlib.causal_lm_loss(handle.model, data)
    assert all(n in str(e.value) for n in others)
    with pytest.raises(ValueError, match="it has nothing"):
        alstlib.causal_lm_loss(None, {})


def test_a_model_that_is_not_attached_is_refused() -> None:
    """Hugging Face's models swallow fields that they do not know: their loss would be another one."""
    model = make_model()
    with pytest.raises(ValueError, match=r"alstlib\.apply first"):
        alstlib.causal_lm_loss(model, batch())
    attach(model).detach()
    for ctx in (None, SPContext()):
        with pytest.raises(ValueError, match=r"alstlib\.apply first"):
            alstlib.causal_lm_loss(model, batch(), ctx)


def test_a_stand_in_for_a_model_needs_a_context() -> None:
    def stand_in(**given: Any) -> Any:
        return SimpleNamespace(loss=torch.tensor(6.0))

    with pytest.raises(ValueError, match=r"function is not attached: attach the model with alstlib\.apply first"):
        alstlib.causal_lm_loss(stand_in, batch(masked=3))
    out = alstlib.causal_lm_loss(stand_in, batch(masked=3), SPContext(sp=2))
    assert out.loss.item() == pytest.approx(2 * 6.0 / 8)


def without_ctx(rank: int, world: int, kind: str) -> dict[str, Any]:
    """Losses of the model as `kind` wraps it, with the context given and left out; and messages for other contexts."""
    ctx, rows = SPContext.create(world), LENGTH // world
    mine = {k: v[:, rank * rows : (rank + 1) * rows] for k, v in batch(masked=3).items()}
    model: Any = make_model()
    if kind == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    handle = attach(model.get_base_model() if kind == "peft" else model, ctx, **OPTIONS)
    run = RunConfig(
        engine={"zero_stage": int(kind[4:]) if kind.startswith("zero") else 0, "offload_optimizer": False},
        model={"dtype": "fp32"},
    )
    wrapped = model if kind in ("bare", "peft") else wrap(model, kind, world, run)
    losses = [alstlib.causal_lm_loss(wrapped, mine, *given).loss.item() for given in ((ctx,), ())]
    messages = []
    for other in (SPContext(), SPContext(dp=2), SPContext(sp=2, sp_rank=1 - rank)):
        try:
            alstlib.causal_lm_loss(wrapped, mine, other)
        except ValueError as e:
            messages.append(str(e))
    if kind.startswith("zero"):
        wrapped.destroy()
    handle.detach()
    return {"losses": losses, "messages": messages}


@pytest.mark.parametrize("kind", ["bare", "peft", "ddp", "fsdp2", "zero2", "zero3"])
def test_a_context_that_is_left_out_is_that_of_the_attachment(ranks2: Any, kind: str) -> None:
    for result in ranks2(without_ctx, kind):
        given, left_out = result["losses"]
        assert given == left_out
        assert len(result["messages"]) == 3
        for message in result["messages"]:
            assert re.search(
                r"ctx=SPContext\(.*\) differs from the mesh .* attached with, SPContext\(sp=2, .*leave", message
            )


@pytest.mark.parametrize("kind", [int, float, torch.tensor], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("divides", [1, 4])
def test_factors_of_one_rank(kind: Any, divides: int) -> None:
    """loss = sum / step_tokens * engine_divides_by; mean and tokens are this micro-batch's."""
    model, data = make_model(), batch(masked=3)
    want = plain_step(model, data)
    with attach(model, **OPTIONS):
        out = alstlib.causal_lm_loss(model, {**data, "step_tokens": kind(50)}, engine_divides_by=divides)
        out.loss.backward()
    check_step((out.loss.item(), gradients(model)), times(8 * divides / 50, want))
    assert out.mean.item() == pytest.approx(want[0], rel=1e-6)
    assert (out.tokens.item(), out.tokens.dtype) == (8, torch.int64)
    assert not out.mean.requires_grad


def test_without_step_tokens_the_micro_batch_is_the_step() -> None:
    model, data = make_model(), batch(masked=3)
    with attach(model, **OPTIONS):
        out = alstlib.causal_lm_loss(model, data)
    assert out.loss.item() == pytest.approx(out.mean.item(), rel=1e-6)


@pytest.mark.parametrize("step_tokens", [None, 0, 7])
@pytest.mark.parametrize("tiled_loss", [7, False])
def test_no_valid_token_anywhere(tiled_loss: int | bool, step_tokens: int | None) -> None:
    """A finite loss of zero and gradients of exactly zero, on every weight."""
    model = make_model()
    with attach(model, tiles={"mlp": 5, "loss": tiled_loss, "norm": True}):
        out = alstlib.causal_lm_loss(model, {**batch(masked=LENGTH), "step_tokens": step_tokens})
        out.loss.backward()
    got = gradients(model)
    assert (out.loss.item(), out.mean.item(), out.tokens.item()) == (0, 0, 0)
    assert len(got) == len(list(model.parameters()))
    assert not any(g.any() for g in got.values())


# ----- over ranks


def nothing_to_learn(rank: int, world: int, sp: int) -> None:
    ctx, model = SPContext.create(sp), make_model()
    with attach(model, ctx, **OPTIONS):
        out = alstlib.causal_lm_loss(model, shard_batch(sample_of(LENGTH, ignored=slice(LENGTH)), sp, ctx.sp_rank), ctx)
        out.loss.backward()
    assert (out.loss.item(), out.mean.item(), out.tokens.item()) == (0, 0, 0)
    assert not any(g.any() for g in gradients(model, world).values())


@pytest.mark.parametrize("sp", [1, 2])
def test_no_valid_token_on_any_rank(ranks2: Any, sp: int) -> None:
    ranks2(nothing_to_learn, sp)


def alone_with_labels(rank: int, world: int) -> tuple[float, float]:
    """Loss and mean of a sample whose only labels count on the last rank, in a step of more labels."""
    ctx, model = SPContext.create(world), make_model()
    data = sample_of(LENGTH, ignored=slice(LENGTH - 2))
    want = plain_step(model, data)
    with attach(model, ctx, **OPTIONS):
        batch = {**shard_batch(data, world, rank), "step_tokens": 40}
        out = alstlib.causal_lm_loss(model, batch, ctx, engine_divides_by=3)
        out.loss.backward()
    check_step((out.mean.item(), times(40 / 2 / 3, (0, gradients(model, world)))[1]), want)
    return out.loss.item(), out.mean.item()


def test_a_rank_without_labels_contributes_zero(ranks2: Any) -> None:
    """The mean is that of all ranks, and the average of their losses that of the step."""
    (nothing, mean), (loss, same) = ranks2(alone_with_labels)
    assert (nothing, mean) == (0, same)
    assert loss / 2 == pytest.approx(mean * 2 / 40 * 3, rel=1e-6)
