"""The inputs of one call of an attached model, such as documents and labels, are checked before anything is computed.

Positions, not masks (ALST, section 3.4): a mask is dropped only where that is exact, and refused otherwise. Everything
here is cheap for batches of `SPDataLoader`; inputs made by hand are checked at the price of a synchronisation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.hf.arguments import check_number, check_same_documents, check_tensors, integers, packed_documents
from alstlib.hf.pass_state import Objective, PassState, StepInputs
from alstlib.hf.support import Facts
from alstlib.kernels.spans import Offsets
from alstlib.mesh import SPContext
from alstlib.tiled.logits import readable
from alstlib.ulysses.alltoall import stripe
from alstlib.units import IGNORE

OURS = (
    "labels",
    "shift_labels",
    "cu_seqlens",
    "num_items_in_batch",
    "reduction",
    "step_tokens",
    "seen_tokens",
    "accumulation",
    "row_tokens",
    "row_length",
    "dft",
    "temperature",
    "statistics",
    "label_smoothing",
    "look",
    "router_tokens",
    "agreed",
)
"""Keyword arguments that an attached model takes and its own forward does not see."""
MIXED = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "encoder_hidden_states",
    "token_type_ids",
    "mm_token_type_ids",
)
"""Inputs whose tokens may attend in both directions, or to what is not in the sequence."""


def take_call(args: tuple[Any, ...], kwargs: dict[str, Any], ctx: SPContext, chunk: int | None = None) -> PassState:
    """Take what is ours out of the `kwargs` of a model's call, check it, and set what the model must be told. Nothing
    is sent; `deal_out` does what a `chunk` needs that cuts the slices of several ranks (`StepInputs.striped`).

    Raises:
        ValueError: inputs that cannot be run exactly, with what to give instead.
    """
    if len(args) > 1:
        raise ValueError("give the model's inputs by name: input_ids=..., position_ids=..., shift_labels=...")
    ours = {name: kwargs.pop(name, None) for name in OURS}
    tokens = args[0] if args else kwargs.get("input_ids")
    check_tensors({**ours, **kwargs, "input_ids": tokens})
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise ValueError("the model needs input_ids or inputs_embeds")
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError(
            "a cache (past_key_values, use_cache) is for generation: call generate() with sp=1, or after detach()"
        )
    for name in MIXED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is not supported: tokens attend causally to tokens; leave it out")
    kwargs["use_cache"] = False
    if kwargs.get("return_dict") is False:
        raise ValueError("return_dict=False is not supported by an attached model: its loss is in out.loss")
    shape = batch, rows = tokens.shape[0], tokens.shape[1]
    labels = _labels(ours, ctx)
    if labels is not None and labels.shape != shape:
        raise ValueError(f"shift_labels {list(labels.shape)} must have the shape of input_ids {list(shape)}")
    _check_numbers(ours)
    mask = kwargs.pop("attention_mask", None)
    _check_mask(mask, labels, shape, ctx.sp)
    name, cu = _offsets(ours["cu_seqlens"], packed_documents(kwargs, batch, rows, ctx.sp), batch, rows * ctx.sp)
    documents = _documents(name, cu, kwargs.get("position_ids"), tokens, ctx, look=not ours["agreed"])
    if cu is not None and kwargs.get("position_ids") is None:  # a model would count on through them
        kwargs["position_ids"] = _positions(documents or (), batch, rows, ctx, name).to(tokens.device)
    inputs = StepInputs(
        shape=shape, device=tokens.device, documents=documents, labels=labels, divisor=ours["num_items_in_batch"],
        row_length=ours["row_length"], real=_real_tokens(ours["row_tokens"], mask, tokens, ctx),
        striped=chunk is not None and ctx.sp > 1 and rows > chunk,
    )  # fmt: skip
    if inputs.striped:
        _check_dealt(kwargs, labels)
    objective = Objective(
        reduction=ours["reduction"], dft=bool(ours["dft"]), temperature=ours["temperature"], look=ours["look"],
        statistics=ours["statistics"], label_smoothing=ours["label_smoothing"] or 0.0,
        router_tokens=ours["router_tokens"],
    )  # fmt: skip
    return PassState(inputs=inputs, objective=objective)


NUMBERS: dict[str, tuple[str, float, float]] = {
    "num_items_in_batch": ("the number of labels that the loss is divided by", 0.0, float("inf")),
    "temperature": ("a number above 0; 1.0 leaves the logits as they are", 1e-30, float("inf")),
    "label_smoothing": ("a number from 0 to 1", 0.0, 1.0),
    "router_tokens": ("a number of tokens of at least 0", 0.0, float("inf")),
}


def _check_numbers(ours: dict[str, Any]) -> None:
    for name, (works, least, most) in NUMBERS.items():
        if ours[name] is not None:
            check_number(name, ours[name], works, least, most)


def number_tokens(real: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any], facts: Facts, model: str) -> None:
    """Positions count from 0; give the model those of its own counting (RoBERTa begins after its padding token). `real`
    says which tokens are not padding (None: all).

    Raises:
        ValueError: a token that the model leaves out of its own counting, where it is not padding.
    """
    positions, tokens = kwargs.get("position_ids"), args[0] if args else kwargs.get("input_ids")
    if positions is None:
        return
    if facts.uncounted is not None and tokens is not None:
        left_out = tokens == facts.uncounted
        if bool((left_out if real is None else left_out & real).any()):
            raise ValueError(
                f"input_ids hold the padding token {facts.uncounted} among the tokens of a sample, and {model} leaves "
                "it out of its positions; give an attention_mask for padding on the right, and another token elsewhere"
            )
    if facts.offset:
        kwargs["position_ids"] = positions + facts.offset


def _check_dealt(kwargs: dict[str, Any], labels: Tensor | None) -> None:
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("chunk with sp > 1 moves tokens to other ranks: give input_ids, not inputs_embeds")
    if labels is None or kwargs.get("output_hidden_states"):
        raise ValueError(
            "chunk with sp > 1 moves tokens to other ranks, so logits and hidden states would be out of order: give "
            "shift_labels (causal_lm_loss does), or use chunk=None"
        )
    others = [n for n, t in kwargs.items() if n not in ("input_ids", "position_ids") and isinstance(t, Tensor)]
    if others:
        raise ValueError(f"chunk with sp > 1 cannot deal out {', '.join(others)}; leave it out, or use chunk=None")


def deal_out(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: StepInputs, chunk: int, ctx: SPContext
) -> StepInputs:
    """Deal tokens, positions and labels out in stripes of `chunk` tokens: then those that the model gets are all in
    `kwargs`."""
    tokens, labels = args[0] if args else kwargs["input_ids"], inputs.labels
    assert labels is not None  # `_check_dealt`
    like = tokens.dtype
    given = [tokens, kwargs["position_ids"].expand_as(tokens).to(like), labels.to(like)]
    given += [] if inputs.real is None else [inputs.real.to(like)]
    kwargs["input_ids"], kwargs["position_ids"], labels, *real = stripe(given, chunk, ctx)
    return replace(inputs, labels=labels, real=real[0].bool() if real else None, striped=True)


def _real_tokens(row_tokens: Any, mask: Any, tokens: Tensor, ctx: SPContext) -> Tensor | None:
    """Which of this rank's tokens are not padding, where some are."""
    batch, rows = tokens.shape[:2]
    if row_tokens is None:
        return None if mask is None or bool(mask.bool().all()) else mask.bool()
    lengths = torch.tensor(integers("row_tokens", row_tokens))
    if lengths.numel() != batch or not bool(((lengths >= 0) & (lengths <= rows * ctx.sp)).all()):
        raise ValueError(
            f"row_tokens={lengths.tolist()[:8]} must hold the tokens of each of {batch} micro-batch rows, 0 to "
            f"{rows * ctx.sp}"
        )
    if bool((lengths == rows * ctx.sp).all()):
        return None
    at = torch.arange(rows, device=tokens.device) + ctx.sp_rank * rows
    return at < lengths.to(tokens.device, non_blocking=True)[:, None]


def _labels(ours: dict[str, Any], ctx: SPContext) -> Tensor | None:
    labels, shifted = ours["labels"], ours["shift_labels"]
    if labels is None or shifted is not None:
        return shifted
    if ctx.sp > 1:
        raise ValueError(
            "labels must be shifted before the sequence is sharded, or each shard loses its last one: use SPDataLoader "
            "and causal_lm_loss, or give shift_labels"
        )
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def _check_mask(mask: Any, labels: Tensor | None, shape: tuple[int, int], sp: int) -> None:
    """A mask is dropped only where causal attention needs none: all ones, or padding on the right without loss."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        kind = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask {kind} is not supported; give position_ids and cu_seqlens instead")
    if mask.shape != shape:
        raise ValueError(f"attention_mask {list(mask.shape)} must have the shape of input_ids {list(shape)}")
    keep = mask.bool()
    if bool(keep.all()):
        return
    right = bool((keep[:, 1:] <= keep[:, :-1]).all())
    if sp > 1 or not right or (labels is not None and bool((labels.ne(IGNORE) & ~keep).any())):
        raise ValueError(
            "attention_mask has zeros that cannot be dropped exactly: pad on the right with labels -100 (SPDataLoader "
            "takes such masks), and give packed documents as cu_seqlens"
        )


def _offsets(
    cu: Any, packed: tuple[str, list[int]] | None, batch: int, whole: int
) -> tuple[str, list[int] | None]:  # fmt: skip
    """The offsets of documents that are given, and their name."""
    if cu is None:
        return packed or ("cu_seqlens", None)
    offsets = integers("cu_seqlens", cu)
    if packed is not None:
        check_same_documents("cu_seqlens", offsets, *packed, batch, whole)
    return "cu_seqlens", offsets


def _documents(
    name: str, cu: list[int] | None, positions: Any, tokens: Tensor, ctx: SPContext, look: bool
) -> Offsets | None:  # fmt: skip
    """Global document offsets of this call, or None where every micro-batch row is one document. Without `look`
    positions of a slice have been looked at before."""
    batch, rows = tokens.shape[:2]
    if positions is not None and (positions.shape[1] != rows or positions.shape[0] not in (1, batch)):
        raise ValueError(f"position_ids {list(positions.shape)} do not belong to inputs of {batch} x {rows} tokens")
    if cu is not None:
        offsets = Offsets(cu)
        if not offsets or offsets[-1] != batch * rows * ctx.sp:
            raise ValueError(
                f"{name} ends at {offsets[-1] if offsets else None}, but {batch} x {rows} tokens on each of "
                f"{ctx.sp} ranks are {batch * rows * ctx.sp}: the ranks' shapes disagree, or the offsets are not global"
            )
        if positions is None and ctx.sp > 1:
            raise ValueError("position_ids are missing: each rank must give the positions of its own tokens")
        if positions is not None and readable(positions):  # on a GPU the look would cost a synchronisation
            _check_positions(positions.expand(batch, -1), offsets, ctx, name)
        return offsets
    if ctx.sp > 1:
        if positions is None:
            raise ValueError("position_ids are missing: each rank must give the positions of its own tokens")
        own = torch.arange(rows, device=positions.device) + ctx.sp_rank * rows
        if look and not bool((positions == own).all()):
            raise ValueError(
                f"position_ids of rank {ctx.sp_rank} do not run from {ctx.sp_rank * rows} to "
                f"{(ctx.sp_rank + 1) * rows - 1}: for packed documents or padding give cu_seqlens too"
            )
        return None
    if positions is None:
        return None
    positions = positions.expand(batch, -1)
    starts = torch.nonzero((positions == 0).flatten()).flatten().tolist()
    expected = positions.new_zeros(positions.shape)
    expected[:, 1:] = torch.where(positions[:, 1:] == 0, 0, positions[:, :-1] + 1)
    if not torch.equal(positions, expected):
        raise ValueError("position_ids must count from 0, starting again at 0 with each document")
    return Offsets((*starts, batch * rows))


def _positions(offsets: tuple[int, ...], batch: int, rows: int, ctx: SPContext, name: str) -> Tensor:
    """[B, L] positions of this rank's tokens, counted from the start of each document."""
    if offsets[0] != 0 or list(offsets) != sorted(offsets):
        raise ValueError(f"{name}={list(offsets[:8])} must rise from 0")
    whole = rows * ctx.sp
    # documents begin at their offsets and with each micro-batch row
    starts = torch.tensor(sorted({*offsets[:-1], *range(0, batch * whole, whole)}))
    first = (torch.arange(batch) * ctx.sp + ctx.sp_rank)[:, None] * rows
    row = first + torch.arange(rows)
    return row - starts[torch.searchsorted(starts, row, right=True) - 1]


def _check_positions(positions: Tensor, offsets: tuple[int, ...], ctx: SPContext, name: str) -> None:
    """Positions must count from the start of each document; padding (all zeros at the end of a micro-batch row) may
    stay at 0."""
    expected = _positions(offsets, positions.shape[0], positions.shape[1], ctx, name)
    wrong = (positions != expected) & (positions != 0)
    if bool(wrong.any()):
        b, i = (int(n) for n in wrong.nonzero()[0])
        raise ValueError(
            f"position_ids of rank {ctx.sp_rank} do not fit {name}: micro-batch row {b}, token {i} has position "
            f"{int(positions[b, i])} where its document is at {int(expected[b, i])}"
        )
