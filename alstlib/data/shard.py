"""One batch is made ready for sequence parallelism: labels are shifted, rows padded, documents found, slices cut. It
needs no process group.

Shape legend: B rows of a micro-batch, S tokens of a micro-batch row before and P after padding, L = P / sp tokens of
one rank.

Labels are shifted before they are cut, so that no shard loses its last label (ALST paper, section 4.3), and document
boundaries are found once, on the whole batch: a slice of packed positions no longer tells where its document began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from alstlib.units import IGNORE

Batch = dict[str, torch.Tensor]
KEYS = ("input_ids", "labels", "position_ids", "attention_mask", "document_lengths", "cu_seqlens")
SLICED = ("input_ids", "position_ids", "shift_labels")
"""Fields that are cut along the sequence, in the order in which they are sent."""
WHOLE = ("cu_seqlens", "row_tokens")
"""Fields that every rank of a group has whole."""


def _integers(batch: Mapping[str, Any], name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    try:
        value = torch.as_tensor(batch[name])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name} is no rectangular array of integers ({error}); pad micro-batch rows in the collate_fn"
        ) from error
    if value.dtype == torch.bool and name == "attention_mask":
        value = value.long()
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {value.dtype}; it must be an integer type, such as torch.int64")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must be input_ids' shape {list(shape)}")
    return value.long()


def _starts_from_positions(positions: torch.Tensor) -> torch.Tensor:
    """[B, S] positions -> [B, S] bool, True where a document starts; refuses what is no run of 0, 1, 2, ..."""
    starts = positions == 0
    good = starts.clone()
    good[:, 1:] |= positions[:, 1:] == positions[:, :-1] + 1
    if not good.all():
        row, column = (~good).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}]={positions[row, column].item()} must be 0, where a micro-batch row or a "
            "document starts, or one more than the position before it"
        )
    return starts


def _starts_from_offsets(offsets: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    flat, total = offsets.flatten().cpu(), rows * length
    if flat.numel() < 2 or flat[0] != 0 or flat[-1] != total or (flat.diff() <= 0).any():
        raise ValueError(f"cu_seqlens={flat.tolist()[:8]} must rise from 0 to B * S = {total}")
    starts = torch.zeros(total, dtype=torch.bool)
    starts[flat[:-1]] = True
    starts = starts.view(rows, length)
    if not starts[:, 0].all():
        raise ValueError(
            f"cu_seqlens lacks the start of a micro-batch row: every multiple of S={length} must be an offset"
        )
    return starts


def _starts_from_lengths(lengths: Any, real: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    listed = [n.tolist() if hasattr(n, "tolist") else n for n in lengths]
    if listed and not isinstance(listed[0], list | tuple):
        listed = [listed]  # the documents of the only micro-batch row
    if len(listed) != rows:
        raise ValueError(f"document_lengths has {len(listed)} rows; input_ids has {rows}")
    starts = torch.zeros(rows, length, dtype=torch.bool)
    for row, documents in enumerate(listed):
        documents = [int(n) for n in documents if n]
        if any(n < 0 for n in documents) or sum(documents) not in (length, int(real[row])):
            raise ValueError(
                f"document_lengths[{row}]={documents[:8]} must sum to the micro-batch row's {int(real[row])} tokens"
            )
        ends = torch.tensor([0, *documents]).cumsum(0)
        starts[row, ends[ends < length]] = True
    return starts


def _offsets(starts: torch.Tensor) -> torch.Tensor:
    if starts.numel() >= 2**31:
        raise ValueError(f"B * S = {starts.numel()} tokens do not fit int32 offsets; the most is {2**31 - 1}")
    flat = starts.flatten().nonzero().flatten().cpu()
    return torch.cat([flat, torch.tensor([starts.numel()])]).to(torch.int32)


def documents_from_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Document offsets of [B, S] positions that restart at 0: int32 on the CPU, 0 first, B * S last.

    Raises:
        ValueError: positions that are not runs of 0, 1, 2, ...
    """
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids has shape {list(position_ids.shape)}; it must be [B, S]")
    return _offsets(_starts_from_positions(position_ids))


def prepare(batch: Mapping[str, Any], multiple: int) -> Batch:
    """Check a batch, shift its labels and pad its micro-batch rows to a `multiple` of tokens: `shard_batch` before the
    cut.

    Returns: int64 [B, P] input_ids, position_ids, shift_labels; int32 cu_seqlens and row_tokens on the CPU.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"the loader yields {type(batch).__name__}; it must yield dicts with input_ids and labels")
    for name in ("input_ids", "labels"):
        if batch.get(name) is None:
            raise ValueError(f"the batch has no '{name}', only {sorted(map(str, batch))}; every batch needs it")
    if unknown := [str(key) for key in batch if key not in KEYS]:
        raise ValueError(f"keys {unknown} cannot be sharded; drop them in the collate_fn (known: {', '.join(KEYS)})")
    given = {key: value for key, value in batch.items() if value is not None}
    ids = _integers(given, "input_ids")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"input_ids has shape {list(ids.shape)}; it must be [B, S] with at least one token")
    rows, length = ids.shape
    labels = _integers(given, "labels", (rows, length)).to(ids.device)
    if (lowest := int(ids.min())) < 0:
        raise ValueError(f"input_ids holds {lowest}; tokens are 0 or more (only labels may be {IGNORE})")
    if (wrong := labels[(labels < 0) & (labels != IGNORE)]).numel():
        raise ValueError(f"labels hold {int(wrong[0])}; a label that is to be ignored is {IGNORE}")

    real = torch.full((rows,), length, device=ids.device)  # tokens of each micro-batch row that are not padding
    if "attention_mask" in given:
        mask = _integers(given, "attention_mask", (rows, length)).to(ids.device)
        if ((mask != 0) & (mask != 1)).any() or (mask.diff(dim=1) > 0).any():
            raise ValueError(
                "attention_mask must be ones, with zeros only as padding on the right of a micro-batch row"
            )
        real = mask.sum(1)
    tail = torch.arange(length, device=ids.device) >= real[:, None]

    found: dict[str, torch.Tensor] = {}
    if "position_ids" in given:
        positions = _integers(given, "position_ids", (rows, length)).to(ids.device)
        found["position_ids"] = _starts_from_positions(positions.masked_fill(tail, 0))
    if "document_lengths" in given:
        found["document_lengths"] = _starts_from_lengths(given["document_lengths"], real, rows, length)
    if "cu_seqlens" in given:
        found["cu_seqlens"] = _starts_from_offsets(_integers(given, "cu_seqlens"), rows, length)
    starts = torch.zeros_like(tail)
    for i, (name, marks) in enumerate(found.items()):
        marks = marks.to(ids.device) & ~tail
        if i and not torch.equal(starts, marks):
            raise ValueError(f"{next(iter(found))} and {name} disagree about where documents start")
        starts = marks
    packed = bool(starts[:, 1:].any())
    starts[:, 0] = True

    labels = labels.masked_fill(tail, IGNORE)
    shifted = labels[:, 1:].masked_fill(starts[:, 1:], IGNORE)  # no loss across a document's end
    extra = -length % multiple
    starts, tail = F.pad(starts, (0, extra)), F.pad(tail, (0, extra), value=True)
    column = torch.arange(length + extra, device=ids.device).expand(rows, -1)
    if packed:  # padding is a document of its own, so that no real document grows
        starts |= column == real[:, None]
    first = torch.where(starts, column, 0).cummax(1).values
    return {
        "input_ids": F.pad(ids, (0, extra)),
        "position_ids": (column - first).masked_fill(tail, 0),
        "shift_labels": F.pad(shifted, (0, extra + 1), value=IGNORE),
        "cu_seqlens": _offsets(starts),
        "row_tokens": real.to("cpu", torch.int32),
    }


def slice_of(rows: torch.Tensor, sp: int, sp_rank: int) -> torch.Tensor:
    """[B, L] of one rank, of rows [B, S] that get -100 on the right up to a multiple of sp; a copy."""
    return F.pad(rows, (0, -rows.shape[1] % sp), value=IGNORE).chunk(sp, 1)[sp_rank].clone()


def cut(whole: Batch, sp: int, sp_rank: int) -> Batch:
    """The slices of `prepare`'s batch for one rank; copies, so that the whole batch is not kept alive."""
    local = {name: slice_of(whole[name], sp, sp_rank) for name in SLICED}
    return {**local, **{name: whole[name] for name in WHOLE}}


def valid_tokens(whole: Batch) -> int:
    return int((whole["shift_labels"] != IGNORE).sum())


def check_pad_to(sp: int, pad_to: int | None) -> None:
    if pad_to is not None and (pad_to < 1 or pad_to % sp):
        raise ValueError(f"pad_to={pad_to} must be a multiple of sp={sp}; use {max(round(pad_to / sp), 1) * sp}")


def shard_batch(batch: Mapping[str, Any], sp: int, sp_rank: int, pad_to: int | None = None) -> Batch:
    """One rank's slice of a batch that every rank of its group holds, as `SPDataLoader` yields it. No process group is
    needed.

    `step_tokens` counts this batch alone. Where an optimizer step has several micro-batches or replicas, replace it by
    the sum over all of them: the loss is the mean over the whole step.

    B: rows of the micro-batch; S: tokens of a row, P after padding; L = P / sp: tokens of one rank.

    Args:
        batch: input_ids and labels [B, S] (any integer type), and optionally position_ids [B, S] (0, 1, 2, ..., which
            begin at 0 with each packed document), document_lengths (the tokens of each document, a list for each row),
            cu_seqlens (offsets of documents in the flattened batch), and attention_mask [B, S] (zeros only as padding
            on the right, whose labels become -100).
        sp: the number of ranks that share the batch.
        sp_rank: the rank whose slice is returned, from 0 to sp - 1.
        pad_to: rows are padded on the right to a multiple of this many tokens, itself a multiple of `sp` (default: sp).
            In a row of fewer tokens than ranks some ranks have nothing but padding.

    Returns:
        input_ids, position_ids and shift_labels, int64 [B, L]; cu_seqlens, int32 on the CPU: the offsets from 0 to
        B * P of the documents in the padded batch, with the start of each row; row_tokens, int32 [B] on the CPU: the
        tokens of each row that are not padding; step_tokens, an int64 scalar on the CPU: the valid labels of the whole
        batch. Padding has token 0, position 0 and label -100. In a packed batch it is a document of its own.

    Raises:
        ValueError: keys are missing or unknown, shapes or dtypes do not fit, or positions or masks cannot be written as
            document boundaries.
    """
    if not 0 <= sp_rank < sp:
        raise ValueError(f"sp_rank={sp_rank} must be from 0 to {sp - 1}, because sp={sp}")
    check_pad_to(sp, pad_to)
    whole = prepare(batch, pad_to or sp)
    return {**cut(whole, sp, sp_rank), "step_tokens": torch.tensor(valid_tokens(whole))}


def fingerprint(whole: Batch) -> int:
    """A number below 2**61 that differs when batches do, cheap enough for every step."""
    total = 0
    for name in (*SLICED, "cu_seqlens"):
        flat = whole[name].flatten().to(torch.int64)
        weight = torch.arange(flat.numel(), device=flat.device) % 65521 + 1
        total = (total * 1_000_003 + int((flat * weight).sum()) + math.prod(whole[name].shape)) % (2**61 - 1)
    return total
