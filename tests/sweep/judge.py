"""One type judged on one rank: loss and every gradient against plain transformers, for whole and packed samples and for
every set of options; or the refusal."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import small
import torch
from cases import worst_error
from torch import Tensor

import alstlib
from alstlib.data.shard import shard_batch

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tiles": {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "offload": "async", "save_attention": True},
    "chunks": {"tiled_mlp": 5, "tiled_norm": 6, "tiled_loss": 7, "chunk": 4},
    "no checkpoints": {"tiled_mlp": False, "tiled_norm": False, "tiled_loss": False, "checkpoint": False},
}
LENGTH = 32
DOCUMENTS = {"whole": [LENGTH], "packed": [3, 1, 10, 18]}
"""Of a packed sample one has a single token, and one lies on several ranks."""
CASES = [f"{data}, {how}" for data in DOCUMENTS for how in OPTIONS]
REFUSALS = (ValueError, NotImplementedError)
EXACT = {torch.float32: (1e-6, 1e-4), torch.float64: (1e-9, 1e-9)}
"""Largest relative error of the loss and of a gradient. Gradients that are not exact in
fp32, where the loss is, are judged again in fp64: some are zero but for rounding (that of a key's bias)."""

Reference = tuple[float, dict[str, Tensor]]


@contextlib.contextmanager
def _in_full() -> Iterator[None]:
    """Keep fp64 where a model's own code asks for fp32, in norms and softmax; also in what backward recomputes."""

    def keep(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args[0].dtype != torch.float32:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in kwargs.items()}
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Tensor, "float", lambda x: x.to(torch.float32)))
        for owner, name in ((Tensor, "to"), (torch, "sum"), (torch.nn.functional, "softmax")):
            patches.enter_context(mock.patch.object(owner, name, keep(getattr(owner, name))))
        yield


def sample() -> dict[str, Any]:
    ids = torch.randint(4, small.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, 19:23] = -100
    return {"input_ids": ids, "labels": labels}


def plain(model: Any, lengths: list[int]) -> Reference:
    """Plain transformers, documents one by one, each a sample of its own: the mean over all labels, and gradients."""
    model, data = copy.deepcopy(model), sample()
    shifted = [torch.nn.functional.pad(y[:, 1:], (0, 1), value=-100) for y in data["labels"].split(lengths, 1)]
    tokens = sum(int((y != -100).sum()) for y in shifted)
    total: Any = 0.0
    for ids, y in zip(data["input_ids"].split(lengths, 1), shifted):
        mask = torch.ones_like(ids)  # as a collator gives it: eager Moshi of transformers 5.17 is not causal without
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / tokens
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def judge(rank: int, world: int, kind: str, cases: list[str], references: str) -> list[dict[str, Any]]:
    """The outcome of each case of this type: exact, refused, wrong or crash, with the errors or the reason.

    Args:
        references: folder in which the first rank to need plain transformers' result leaves it for all others.
    """
    try:
        model = small.build(kind)
    except Exception as e:
        return [{"result": "not built", "reason": reason(e)} for _ in cases]
    ctx, outcomes = alstlib.SPContext.create(world), {}
    outcomes = {case: _one(ctx, model, case, Path(references) / kind) for case in cases}
    rounded = [case for case, outcome in outcomes.items() if outcome["result"] == "wrong" and outcome["loss"] < 1e-6]
    if rounded:
        with _in_full():
            wide = {
                case: _one(ctx, small.build(kind, torch.float64), case, Path(references) / kind) for case in rounded
            }
        outcomes.update({case: outcome for case, outcome in wide.items() if outcome["result"] == "exact"})
    return list(outcomes.values())


def _one(ctx: Any, model: Any, case: str, path: Path) -> dict[str, Any]:
    (data, how), state = case.split(", "), copy.deepcopy(model.state_dict())
    try:
        handle = alstlib.apply(model, ctx, alstlib.Options(**OPTIONS[how]))
    except REFUSALS as e:
        return {"result": "refused", "reason": reason(e)}
    except Exception as e:
        return {"result": "crash", "reason": f"apply: {reason(e)}"}
    try:
        with handle:
            model.zero_grad()
            batch = shard_batch({**sample(), "document_lengths": [DOCUMENTS[data]]}, ctx.sp, ctx.sp_rank)
            out = alstlib.causal_lm_loss(model, batch, ctx)
            out.loss.backward()
    except Exception as e:
        return {"result": "crash", "reason": reason(e)}
    try:
        loss, want = _reference(model, path.with_name(f"{path.name} {data} {model.dtype}"), DOCUMENTS[data])
    except Exception as e:
        return {"result": "not built", "reason": f"plain transformers: {reason(e)}"}
    got = {}
    for n, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if ctx.sp > 1:
            torch.distributed.all_reduce(grad)
        if n in want or bool(grad.any()):
            got[n] = grad / ctx.sp
    strange = set(got) - set(want)
    loss_error = abs(out.mean.item() - loss) / abs(loss)
    error, where = (float("inf"), min(strange)) if strange else worst_error(got, want)
    changed = next((n for n, t in model.state_dict().items() if not torch.equal(t, state[n])), None)
    exact = loss_error < EXACT[model.dtype][0] and error < EXACT[model.dtype][1] and changed is None
    made = {"dtype": str(model.dtype), "loss": loss_error, "gradient": error, "notes": handle.notes}
    if exact:
        return {"result": "exact", "reason": "", **made}
    return {"result": "wrong", "reason": f"{changed} has changed" if changed else f"gradient of {where}", **made}


def _reference(model: Any, path: Path, lengths: list[int]) -> Reference:
    if path.exists():
        return torch.load(path)
    made = plain(model, lengths)
    part = path.with_name(f"{path.name} {os.getpid()}")
    torch.save(made, part)
    part.rename(path)
    return made
