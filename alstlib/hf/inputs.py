"""One call of an attached model: its inputs, such as documents and labels, are read, checked, and agreed on by the
ranks that compute it together, before any of them computes.

Positions, not masks (ALST, section 3.4): a mask is dropped only where that is exact, and refused otherwise. Everything
here is cheap for batches of `SPDataLoader`; inputs made by hand are checked at the price of a synchronisation.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alstlib.base.mesh import ATTACHED, SPContext
from alstlib.base.options import Record
from alstlib.base.units import IGNORE
from alstlib.data.agreement import Agreement
from alstlib.hf.by_position import chunk_offsets
from alstlib.hf.experts import router_loss
from alstlib.hf.handle import Handle
from alstlib.hf.pass_state import Objective, PassState, StepInputs
from alstlib.hf.vision import take_images
from alstlib.kernels.spans import Offsets
from alstlib.tiled.logits import readable
from alstlib.ulysses.alltoall import stripe

STATE = "alst_state"
"""Keyword argument with the pass that a call of an attached model begins, where its inputs have been read before."""
TENSORS = ("input_ids", "position_ids", "labels", "shift_labels")
"""Arguments of a call that are tensors [B, L]."""
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments by which transformers' own models are told of packed documents: offsets, and what follows from them."""
OURS = (
    "labels", "shift_labels", "cu_seqlens", "num_items_in_batch", "step_tokens", "seen_tokens", "accumulation",
    "sample_tokens", "sample_length",
)  # fmt: skip
"""Keyword arguments that an attached model takes and its own forward does not see."""
REFUSED = {
    **dict.fromkeys(
        ("input_features", "encoder_hidden_states", "token_type_ids"),
        "tokens attend causally to tokens; leave it out",
    ),
    **dict.fromkeys(("past_key_values", "use_cache"), "call generate() with sp=1, or after detach()"),
}
"""Inputs that are refused, and why. (`take_images` has taken those of images out of a call before.)"""


def handle_of(model: Any) -> Handle:
    """The attachment of a model, or of the model inside a wrapper.

    Raises:
        ValueError: it is not attached. Hugging Face's models swallow fields that they do not know, so their loss would
            be another one.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    handle = next((m.__dict__[ATTACHED]() for m in modules if ATTACHED in m.__dict__), None)
    if handle is None:
        raise ValueError(f"{type(model).__name__} is not attached: attach the model with alstlib.apply first")
    return handle


def agree(
    handle: Handle, call: str, arguments: Record, batch: Any, *, always: bool = False,
    own_group: bool = False,
) -> Agreement:  # fmt: skip
    """The agreement on a call of an attached model.

    Args:
        batch: the fields of the call. Without cu_seqlens their values are looked at, which waits for the device.
        always: whether the ranks are asked also where that alone waits for the device.
        own_group: only the ranks of this rank's SP group make this call, and not all replicas.
    """
    looks = isinstance(batch, Mapping) and batch.get("cu_seqlens") is None
    arguments = {**arguments, "torch.is_grad_enabled()": torch.is_grad_enabled()}
    return Agreement(handle.ctx.own_group if own_group else handle.ctx, call, arguments, always or looks)


def read_call(
    handle: Handle, kwargs: dict[str, Any], objective: Objective, chunk: int | None, agreement: Agreement | None = None
) -> PassState:  # fmt: skip
    """The pass that a call of the model begins, checked on this rank; `kwargs` are left as the model's forward takes
    them. What of it all ranks of an SP group must have alike goes into the `agreement`.

    Raises:
        ValueError: inputs that cannot be run exactly, with what to give instead.
    """
    images = take_images(handle, kwargs)
    inputs = replace(take_call(kwargs, handle.ctx, chunk), images=images)
    if handle.facts.offset and kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = kwargs["position_ids"] + handle.facts.offset
    router = router_loss(handle, inputs.labels, kwargs)
    if router is not None and objective.temperature is not None:
        raise ValueError("log-probabilities have no load-balancing loss: use output_router_logits=False")
    if agreement is not None:
        (batch, local), documents = inputs.shape, inputs.documents
        agreement.in_group = {"the batch size": batch, "the tokens of a rank": local, "the documents": documents}
    return PassState(inputs=inputs, objective=objective, router=router)


def take_call(kwargs: dict[str, Any], ctx: SPContext, chunk: int | None = None) -> StepInputs:
    """Take what is ours out of the `kwargs` of a model's call, check it, and set what the model must be told. Nothing
    is sent; `of_all_ranks` does what a `chunk` needs that cuts the slices of several ranks (`StepInputs.striped`).

    Raises:
        ValueError: inputs that cannot be run exactly, with what to give instead.
    """
    ours = {name: kwargs.pop(name, None) for name in OURS}
    for name in TENSORS:
        value = ours[name] if name in ours else kwargs.get(name)
        if value is not None and not (isinstance(value, Tensor) and value.ndim == 2):
            raise ValueError(f"{name} {_shown(value)} must be a tensor [B, L]")
    tokens = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
    if tokens is None:
        raise ValueError("the model needs input_ids or inputs_embeds")
    for name, why in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name} is not supported: {why}")
    kwargs["use_cache"] = False
    if kwargs.get("return_dict") is False:
        raise ValueError("return_dict=False is not supported by an attached model: its loss is in out.loss")
    shape = tokens.shape[0], tokens.shape[1]
    labels = _labels(ours, ctx)
    if labels is not None and labels.shape != shape:
        raise ValueError(f"shift_labels {list(labels.shape)} must have the shape of input_ids {list(shape)}")
    if (divisor := ours["num_items_in_batch"]) is not None:
        check_number("num_items_in_batch", divisor, "the number of labels that the loss is divided by")
    mask = _checked_mask(kwargs.pop("attention_mask", None), labels, shape, ctx.sp)
    packed = {name: kwargs.pop(name, None) for name in PACKED}
    cu = packed["cu_seq_lens_q"] if ours["cu_seqlens"] is None else ours["cu_seqlens"]
    if packed["seq_idx"] is not None and cu is None and kwargs.get("position_ids") is None:
        raise ValueError("seq_idx alone does not tell where documents begin: give position_ids or cu_seqlens too")
    sample_tokens = integers("sample_tokens", ours["sample_tokens"])
    inputs = StepInputs(
        shape=shape, device=tokens.device, documents=_documents(integers("cu_seqlens", cu), kwargs, tokens, ctx),
        labels=labels, divisor=divisor, sample_length=ours["sample_length"], sample_tokens=sample_tokens,
        real=mask if sample_tokens is None else _real_tokens(sample_tokens, tokens, ctx),
        striped=chunk is not None and ctx.sp > 1 and shape[1] > chunk,
    )  # fmt: skip
    if inputs.striped:
        _check_dealt(kwargs, labels)
    return inputs


def _check_dealt(kwargs: dict[str, Any], labels: Tensor | None) -> None:
    """Refuse what cannot be dealt out to other ranks, or would be out of order (ValueError)."""
    others = [n for n, t in kwargs.items() if n not in ("input_ids", "position_ids") and isinstance(t, Tensor)]
    others += ["output_hidden_states"] if kwargs.get("output_hidden_states") else []
    if labels is None or others:
        raise ValueError(
            "chunk with sp > 1 moves tokens to other ranks: give input_ids and position_ids with shift_labels, as "
            f"causal_lm_loss does, and no other values of tokens ({', '.join(others)}), or use chunk=None"
        )


def of_all_ranks(handle: Handle, kwargs: dict[str, Any], inputs: StepInputs, chunk: int | None) -> StepInputs:
    """What the ranks of an SP group exchange before they compute: where a `chunk` cuts their slices, tokens, positions
    and labels are dealt out in stripes of so many tokens; and the longest position, where the model asks for it."""
    facts, ctx, made = handle.facts, handle.ctx, dict[str, Any]()
    several = inputs.images.get("image_positions")
    if inputs.striped:
        assert chunk is not None
        assert inputs.labels is not None  # `_check_dealt`
        tokens = kwargs["input_ids"]
        given = [tokens, kwargs["position_ids"].expand_as(tokens), inputs.labels]
        given += [] if inputs.real is None else [inputs.real]
        given += [] if several is None else several.unbind(-1)
        dealt = stripe([t.to(tokens.device, tokens.dtype) for t in given], chunk, ctx)
        kwargs["input_ids"], kwargs["position_ids"], made["labels"], *others = dealt
        if inputs.real is not None:
            made["real"] = others.pop(0).bool()
        if several is not None:
            made["images"] = {**inputs.images, "image_positions": torch.stack(others, -1)}
    positions: Any = kwargs.get("position_ids")
    batch, local = inputs.shape
    if positions is None and (facts.by_longest or facts.scales_by_position):  # the model counts by itself
        positions = torch.arange(local, device=inputs.device)[None]
    if facts.scales_by_position:
        made["positions"] = positions
    if facts.attention_chunk is not None:
        made["chunks"] = chunk_offsets(inputs.documents, batch, local * ctx.sp, facts.attention_chunk)
    if facts.by_longest:
        longest: Tensor = (positions if several is None else several).max()
        made["longest"] = longest.reshape(1, 1).to(inputs.device)
        if ctx.sp > 1:
            dist.all_reduce(made["longest"], dist.ReduceOp.MAX, group=ctx.sp_group)
    return replace(inputs, **made)


def _real_tokens(sample_tokens: list[int], tokens: Tensor, ctx: SPContext) -> Tensor | None:
    """Which of this rank's tokens are not padding, where some are."""
    batch, local = tokens.shape[:2]
    lengths = torch.tensor(sample_tokens).expand(batch)
    if bool((lengths == local * ctx.sp).all()):
        return None
    at = torch.arange(local, device=tokens.device) + ctx.sp_rank * local
    return at < lengths.to(tokens.device, non_blocking=True)[:, None]


def _labels(ours: dict[str, Any], ctx: SPContext) -> Tensor | None:
    labels, shifted = ours["labels"], ours["shift_labels"]
    if labels is None or shifted is not None:
        return shifted
    if ctx.sp > 1:
        raise ValueError(
            "labels must be shifted before the sequence is sharded, or each slice loses its last one: use SPDataLoader "
            "and causal_lm_loss, or give shift_labels"
        )
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def _checked_mask(mask: Any, labels: Tensor | None, shape: tuple[int, int], sp: int) -> Tensor | None:
    """Which tokens are not padding; None: all. A mask is dropped only where causal attention needs none: all ones, or
    padding on the right without loss."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != shape:
        raise ValueError(
            f"attention_mask {_shown(mask)} must have the shape of input_ids {list(shape)}; packed documents are given "
            "as position_ids and cu_seqlens"
        )
    keep = mask.bool()
    if bool(keep.all()):
        return None
    right = bool((keep[:, 1:] <= keep[:, :-1]).all())
    if sp > 1 or not right or (labels is not None and bool((labels.ne(IGNORE) & ~keep).any())):
        raise ValueError(
            "attention_mask has zeros that cannot be dropped exactly: pad on the right with labels -100 (SPDataLoader "
            "takes such masks), and give packed documents as cu_seqlens"
        )
    return keep


def _documents(cu: list[int] | None, kwargs: dict[str, Any], tokens: Tensor, ctx: SPContext) -> Offsets | None:
    """Global document offsets of this call, or None where every sample is one document. Where offsets alone
    are given, the model gets positions too, because it would count on through them."""
    (batch, local), positions = tokens.shape[:2], kwargs.get("position_ids")
    whole, total = local * ctx.sp, batch * local * ctx.sp
    if positions is None and ctx.sp > 1:
        raise ValueError("position_ids are missing: each rank must give the positions of its own tokens")
    if positions is not None and (positions.shape[1] != local or positions.shape[0] not in (1, batch)):
        raise ValueError(f"position_ids {list(positions.shape)} do not belong to inputs of {batch} x {local} tokens")
    if positions is None and cu is None:
        return None
    if cu is not None:
        name, offsets = "cu_seqlens", Offsets(cu)
    elif ctx.sp > 1:
        name, offsets = "whole samples", Offsets(range(0, total + 1, whole))
    else:
        starts = (kwargs["position_ids"].expand(batch, -1) == 0).flatten().nonzero().flatten().tolist()
        name, offsets = "documents that begin with 0", Offsets(sorted({0, *starts, total}))
    if not offsets or offsets[0] != 0 or offsets[-1] != total or list(offsets) != sorted(offsets):
        raise ValueError(
            f"{name}={list(offsets[:8])}, which end at {offsets[-1] if offsets else None}, must rise from 0 to "
            f"{total}, for {batch} x {local} tokens on each of {ctx.sp} ranks: the ranks' shapes disagree, or the "
            "offsets are not global"
        )
    if positions is not None and cu is not None and not readable(positions):
        return offsets  # the look would wait for a GPU
    expected = _positions(offsets, batch, local, ctx).to((tokens if positions is None else positions).device)
    if positions is None:
        kwargs["position_ids"] = expected
        return offsets
    _check_positions(positions.expand(batch, -1), expected, ctx, name, padded=cu is not None)
    return None if cu is None and ctx.sp > 1 else offsets


def _check_positions(positions: Tensor, expected: Tensor, ctx: SPContext, name: str, padded: bool) -> None:
    """Positions [B, L] must be those that are expected; where offsets tell documents apart, padding may stay at 0."""
    wrong = positions != expected
    if padded:
        wrong &= positions != 0
    if bool(wrong.any()):
        b, i = (int(n) for n in wrong.nonzero()[0])
        raise ValueError(
            f"position_ids of rank {ctx.sp_rank} do not fit {name}: sample {b}, token {i} has position "
            f"{int(positions[b, i])} where its document is at {int(expected[b, i])}; for packed documents or padding "
            "give cu_seqlens too"
        )


def _positions(offsets: tuple[int, ...], batch: int, local: int, ctx: SPContext) -> Tensor:
    """[B, L] positions of this rank's tokens, counted from the start of each document."""
    whole = local * ctx.sp
    # documents begin at their offsets and with each sample
    starts = torch.tensor(sorted({*offsets[:-1], *range(0, batch * whole, whole)}))
    place = places_of(batch, local, ctx, starts.device)
    return place - starts[torch.searchsorted(starts, place, right=True) - 1]


def places_of(batch: int, local: int, ctx: SPContext, device: torch.device) -> Tensor:
    """[B, L] places of this rank's tokens in the flattened batch [B * S] of all ranks."""
    first = (torch.arange(batch, device=device) * ctx.sp + ctx.sp_rank)[:, None] * local
    return first + torch.arange(local, device=device)


# ----- types, shapes and ranges


def _shown(value: Any) -> str:
    return f"of shape {list(value.shape)}, {value.dtype}," if isinstance(value, Tensor) else repr(value)[:80]


def check_number(name: str, value: Any, works: str, least: float = 0.0, most: float = 1e300) -> None:
    """Refuse what is not a number between these (ValueError). A tensor on a GPU is not looked at: that would wait for
    it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if not readable(value):
            return
        value = value.item()
    right = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not right or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be {works}")


def integers(name: str, value: Any) -> list[int] | None:
    """A list of whole numbers, of a list, a tensor or an array [n]; None of None.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return None
    try:
        return [operator.index(n) for n in (value.tolist() if hasattr(value, "tolist") else value)]
    except TypeError:
        raise ValueError(f"{name} {_shown(value)} must be one row of whole numbers, such as [0, 5, 12]") from None
