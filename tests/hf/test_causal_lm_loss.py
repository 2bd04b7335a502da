"""The loss over all ranks: fields, factors, and steps in which somebody has nothing to learn from."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from cases import VOCAB, make_model, wrap
from torch import Tensor, nn

import alstlib
from alstlib.config import RunConfig
from alstlib.mesh import SPContext
from alstlib.reference import relative_error, shift

LENGTH = 12
OPTIONS = alstlib.Options(tiled_mlp=5, tiled_loss=7, save_attention=True)


def batch(seed: int = 0, masked: int = 0, length: int = LENGTH, rows: int = 1) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = shift(ids)
    labels[:, :masked] = -100
    return {"input_ids": ids, "position_ids": torch.arange(length)[None], "shift_labels": labels}


def plain_sum(model: nn.Module, data: dict[str, Any]) -> Tensor:
    logits = model(data["input_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), data["shift_labels"].flatten(), reduction="sum")


def grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


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
        alstlib.apply(make_model()) as handle,
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
    alstlib.apply(model).detach()
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
    handle = alstlib.apply(model.get_base_model() if kind == "peft" else model, ctx, OPTIONS)
    run = RunConfig(zero_stage=int(kind[4:]) if kind.startswith("zero") else 0, offload_optimizer=False, dtype="fp32")
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
    total = plain_sum(model, data)
    want = grads(model, total * divides / 50)
    with alstlib.apply(model, None, OPTIONS):
        out = alstlib.causal_lm_loss(model, {**data, "step_tokens": kind(50)}, engine_divides_by=divides)
        got = grads(model, out.loss)
    assert out.loss.item() == pytest.approx(total.item() * divides / 50, rel=1e-6)
    assert out.mean.item() == pytest.approx(total.item() / 8, rel=1e-6)
    assert (out.tokens.item(), out.tokens.dtype) == (8, torch.int64)
    assert not out.mean.requires_grad
    assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want))


def test_without_step_tokens_the_micro_batch_is_the_step() -> None:
    model, data = make_model(), batch(masked=3)
    with alstlib.apply(model, None, OPTIONS):
        out = alstlib.causal_lm_loss(model, data)
    assert out.loss.item() == pytest.approx(out.mean.item(), rel=1e-6)


@pytest.mark.parametrize("step_tokens", [None, 0, 7])
@pytest.mark.parametrize("tiled_loss", [7, False])
def test_no_valid_token_anywhere(tiled_loss: int | bool, step_tokens: int | None) -> None:
    """A finite loss of zero and gradients of exactly zero, on every weight."""
    model = make_model()
    with alstlib.apply(model, None, alstlib.Options(tiled_mlp=5, tiled_loss=tiled_loss)):
        out = alstlib.causal_lm_loss(model, {**batch(masked=LENGTH), "step_tokens": step_tokens})
        got = grads(model, out.loss)
    assert (out.loss.item(), out.mean.item(), out.tokens.item()) == (0, 0, 0)
    assert len(got) == len(list(model.parameters()))
    assert not any(g.any() for g in got)


# ----- over ranks


def run_ranks(rank: int, world: int, sp: int, masked: int, step_tokens: int | None, divides: int) -> dict[str, Any]:
    """Each replica has a sample of its own, whose first `masked` tokens have no label; averaged gradients."""
    ctx = SPContext.create(sp)
    whole, rows = batch(ctx.dp_rank, masked), LENGTH // sp
    mine = {k: v[:, ctx.sp_rank * rows : (ctx.sp_rank + 1) * rows] for k, v in whole.items()}
    model = make_model()
    with alstlib.apply(model, ctx, OPTIONS):
        out = alstlib.causal_lm_loss(model, {**mine, "step_tokens": step_tokens}, ctx, engine_divides_by=divides)
        got = grads(model, out.loss / divides)
    for g in got:
        torch.distributed.all_reduce(g)
        g /= world
    return {"mean": out.mean.item(), "tokens": out.tokens.item(), "loss": out.loss.item(), "grads": got}


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("masked, step_tokens, divides", [(3, None, 1), (9, 40, 3)])
def test_mean_is_global_and_the_same_on_all_ranks(
    ranks2: Any, sp: int, masked: int, step_tokens: int | None, divides: int
) -> None:
    """With 9 tokens of 12 masked, the first rank of two has none: it takes part and contributes zero."""
    model = make_model()
    samples = [batch(i, masked) for i in range(2 // sp)]
    total = sum((plain_sum(model, s) for s in samples), torch.zeros(()))
    tokens = sum(int(s["shift_labels"].ne(-100).sum()) for s in samples)
    want = grads(model, total / (step_tokens or tokens))
    results = ranks2(run_ranks, sp, masked, step_tokens, divides)
    assert len({r["mean"] for r in results}) == 1
    assert results[0]["mean"] == pytest.approx(total.item() / tokens, rel=1e-6)
    assert sum(r["loss"] for r in results) / 2 / divides == pytest.approx(
        total.item() / (step_tokens or tokens), rel=1e-6
    )
    if sp == 2 and masked == 9:
        assert results[0]["loss"] == 0
    for result in results:
        assert result["tokens"] == tokens
        assert all(relative_error(g, w) < 1e-5 for g, w in zip(result["grads"], want))


@pytest.mark.parametrize("sp", [1, 2])
def test_no_valid_token_on_any_rank(ranks2: Any, sp: int) -> None:
    for result in ranks2(run_ranks, sp, LENGTH, None, 1):
        assert (result["loss"], result["mean"], result["tokens"]) == (0, 0, 0)
        assert not any(g.any() for g in result["grads"])
