"""Causal attention inside documents, with its logsumexp and its gradients, over any kernel of `backends`.

Shape legend: B batch, S queries, N keys, H query heads, K key/value heads (H a multiple of K), D key width, V value
width. q, dout [B, H, S, D]; k [B, K, N, D]; v [B, K, N, V]; out [B, H, S, V]; lse [B, H, S] (logsumexp of the scores,
fp32). Nothing of shape [S, S] is made (except by the kernel `eager`, which is there for checking).

Documents are offsets into the flattened [B * S] batch (0 first, B * S last); None makes every sample one document.
They are attended one after the other: exact for every kernel, and the cost of a document is its own square. On CUDA one
call of a kernel for variable lengths takes them all. Queries may be the last tokens of the keys.

What one call of a kernel cannot do is put together from calls that it can (`spans.Piece`), merged by their logsumexps:

- Its only mask is the causal square. Documents, windows and queries behind earlier keys are cut into such squares, and
  into rectangles without a mask.
- Kernels count elements in 32 bits, so no tensor of a call may have 2^31 of them, which 600K tokens of 32 heads of 128
  do.
- A kernel that is built for each shape (`Backend.granule`) gets few shapes: of a long sequence whose length is ragged
  it gets the largest part that is not, and another kernel gets the last tokens.

Attention sinks are a further key of each head that has a score and no value: exp(sink) more in the sum. They change the
logsumexp, and with it scale the output (`paged.add_sinks`); a kernel's backward, which reads both, is right as it is.

Keeping the logsumexp is what lets a backward run without a second forward (DistFlashAttn, arXiv 2310.03294).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from alstlib.base.recompute import sum_dtype
from alstlib.base.sizing import KEYS_PER_QUERY, kernel_device, tile_for, tiles_of
from alstlib.base.types import OutputAndLse
from alstlib.kernels.backends import BACKENDS, LONG, Backend
from alstlib.kernels.rule import Attended, Packed, Rule
from alstlib.kernels.spans import Documents, Piece, Span, document_spans, once, pieces

ELEMENTS = 2**31
"""Number of elements in memory that no tensor of a call may span."""


def attention_forward(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule, cu_seqlens: Documents = None,
    spans: Sequence[Span] = (), kind: str = "causal",
) -> OutputAndLse:  # fmt: skip
    """Causal attention inside documents -> (out [B, H, S, V], lse [B, H, S] in fp32). Without autocast, which would
    take back the precision in which kernels sum.

    Args:
        k, v: with N >= S keys: the queries are the last S of N tokens.
        cu_seqlens: offsets of the documents into the flattened [B * N] batch.
        spans: instead of the offsets, which queries see which keys; they hold every query once.
        kind: `causal`, or what a `spans.Piece` is, without documents.
    """
    if kind == "upper":  # backwards, this triangle is a causal one
        out, lse = attention_forward(backend, q.flip(2), k.flip(2), v.flip(2), rule=rule)
        return out.flip(2), lse.flip(2)
    kernel, how, cut, _ = _calls(backend, rule, kind, cu_seqlens, spans, q, k, v)
    if cut:
        out = _room(q, v.shape[-1], q.dtype)
        lse = q.new_empty(q.shape[:3], dtype=sum_dtype(q))
        add_pieces(backend, cut, Attended(q, k, v, out, lse), rule)
        return out, lse
    out, lse = kernel.forward(*padded(kernel, q, k, v), scale=rule.scale, causal=kind == "causal", **how)
    return out[..., : v.shape[-1]], lse


def attention_backward(
    backend: Backend, dout: Tensor, kept: Attended, *, rule: Rule, cu_seqlens: Documents = None,
    spans: Sequence[Span] = (), kind: str = "causal", sums: Sequence[Tensor] = (),
) -> Sequence[Tensor]:  # fmt: skip
    """Gradients of `attention_forward` -> (dq, dk, dv).

    Args:
        kept: what `attention_forward` was given and what it returned. `out` and `lse` may be those over more keys than
            are here: with them each set of keys gives its own share of the gradients, exactly (FlashAttention-2,
            section 3.1.2).
        cu_seqlens, spans, kind: as they were given to `attention_forward`.
        sums: tensors (fp32) like q, k and v to which the gradients are added, which are then returned.
    """
    q, k, v, out, lse = kept
    if kind == "upper":
        turned = Attended(*(t.flip(2) for t in kept))
        return [g.flip(2) for g in attention_backward(backend, dout.flip(2), turned, rule=rule)]
    kernel, how, cut, dtype = _calls(backend, rule, kind, cu_seqlens, spans, q, k, v, out, dout)
    if cut:
        made = add_gradients(backend, cut, dout, kept, rule, sums, dtype)
        return made if sums else [g.to(q.dtype) for g in made]
    dout, q, k, v, out = padded(kernel, dout, q, k, v, out)
    made = kernel.backward(
        dout, Attended(q, k, v, out, lse), scale=rule.scale, causal=kind == "causal", **how
    )  # fmt: skip
    grads = tuple(g[..., : t.shape[-1]] for g, t in zip(made, kept))
    return [total.add_(g) for total, g in zip(sums, grads)] if sums else grads


def add_pieces(backend: Backend, cut: Iterable[Piece], call: Attended, rule: Rule) -> None:
    """Compute pieces, and put them together in the call's output and logsumexp."""
    for piece in cut:
        mine = call.part(piece)
        out, lse = attention_forward(backend, *mine[:3], rule=rule, kind=piece.kind)
        if piece.first:
            mine.out.copy_(out)
        else:
            lse = merge(mine.out, mine.lse, out, lse)[1]
        mine.lse.copy_(lse)
        del out, lse  # not beside what the next piece makes


def add_gradients(
    backend: Backend, cut: Iterable[Piece], dout: Tensor, kept: Attended, rule: Rule, sums: Sequence[Tensor] = (),
    dtype: torch.dtype | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Add what pieces contribute to the gradients of q, k and v; without `sums`, to new ones of this dtype."""
    for piece in cut:
        grads = attention_backward(backend, piece.queries_of(dout), kept.part(piece), rule=rule, kind=piece.kind)
        # when the kernel's own memory is free again
        sums = sums or [_room(t, t.shape[-1], dtype).zero_() for t in kept[:3]]
        for total, of, grad in zip(sums, (piece.queries_of, piece.keys_of, piece.keys_of), grads):
            of(total).add_(grad)
        del grads, grad  # not beside what the next piece makes
    return sums


def _calls(
    backend: Backend, rule: Rule, kind: str, cu_seqlens: Documents, spans: Sequence[Span], *tensors: Tensor
) -> tuple[Backend, dict[str, Any], Sequence[Piece], torch.dtype]:
    """How attention is computed: the kernel that takes it in one call, what that is given besides the scale; or the
    pieces that it is cut into, and the dtype in which their gradients are summed.

    Args:
        tensors: q and k, and all others of the call.
    """
    q, k = tensors[:2]
    (batch, _, queries, _), keys, how = q.shape, k.shape[2], {} if rule.softcap is None else {"softcap": rule.softcap}
    windowed = (rule.window or keys) < keys
    if kind == "causal" and (cu_seqlens is not None or spans or queries != keys or windowed):
        found = spans or document_spans(cu_seqlens, batch, keys, keys - queries, keys)
        whole = [(0, keys, b, b) for b in range(k.shape[0])]  # every sample one document
        many = windowed or len(found) != len(whole)
        if many or [(s.begin, s.queries, s.batch, s.q_batch) for s in found] != whole:
            # for all documents, and a window, of whole sequences
            kernel = None if spans or queries != keys else BACKENDS.get(backend.packed_by)
            if kernel and (rule.softcap is None or kernel.softcap) and batch * keys <= most_tokens(kernel, tensors):
                return kernel, {**how, "packed": _packed(cu_seqlens, found, rule, q)}, (), q.dtype
            most = KEYS_PER_QUERY if backend.granule > 1 or len(tensors) > 3 else None  # more than 3: a backward
            cut = [piece for span in found for piece in pieces(span, rule.window, most)]
            once_each = all(piece.kind == "causal" for piece in cut)  # each key belongs to one call
            return backend, how, cut, q.dtype if once_each else sum_dtype(q)
    assert batch == k.shape[0]  # not every kernel looks
    ragged = queries % backend.granule or keys % backend.granule
    # the parts of a call that is too large are few: their gradients are summed in the tensors' dtype
    return BACKENDS[backend.packed_by] if ragged else backend, how, _parts(backend, kind, tensors), q.dtype


def _packed(cu_seqlens: Documents, spans: Sequence[Span], rule: Rule, q: Tensor) -> Packed:
    batch, length = q.shape[::2][:2]

    def upload() -> tuple[Tensor, int]:
        ends = torch.tensor([0, *(s.batch * length + s.end for s in spans)], dtype=torch.int32)
        return ends.to(q.device, non_blocking=True), max(s.queries for s in spans)

    if cu_seqlens is None:  # every sample is one document: nothing is uploaded
        offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
        return Packed(offsets, length, rule.window)
    return Packed(*once(cu_seqlens, ("uploaded", length, q.device), upload), rule.window)


def most_tokens(backend: Backend, tensors: Sequence[Tensor]) -> int:
    """Tokens of a call, of the whole batch, whose tensors [B, heads, tokens, width] stay below `ELEMENTS`. A kernel may
    have a key and a value for each query head, and a token's numbers may lie between those of other tensors."""
    heads, width = tensors[0].shape[1], max(t.shape[-1] for t in tensors)
    each = max(heads * backend.width(width), *(t.stride(2) for t in tensors if t.shape[2] > 1), 1)
    most = max(1, (ELEMENTS - 1) // each)
    return most - most % backend.granule or most


def _parts(backend: Backend, kind: str, tensors: Sequence[Tensor]) -> list[Piece]:
    """What a call `causal` or `full` is cut into, in order; empty where it stays whole."""
    (batch, _, queries, _), keys, most = tensors[0].shape, tensors[1].shape[2], most_tokens(backend, tensors)
    tail = 0
    if kind == "causal" and queries >= LONG and queries % backend.granule:
        # 64 shapes for each doubling of the length
        tail = queries % max(backend.granule, 1 << (queries.bit_length() - 7))
    if batch * max(queries, keys) <= most and not tail:
        return []
    whole = queries - tail
    step = -(-whole // -(-whole // most))  # equal parts: few shapes
    bounds = [*range(0, whole, min(most, step + -step % backend.granule)), whole, *([queries] if tail else [])]
    found, many = [], max(1, most // max(queries, keys))  # runs of a window are a batch of thousands
    for b in range(0, batch, many):
        samples = (slice(b, min(b + many, batch)),) * 2
        for lo, hi in pairwise(bounds):
            before = keys if kind == "full" else lo
            if kind == "causal":
                found.append(Piece("causal", lo, hi - lo, lo, hi - lo, *samples, first=True))
            for at in range(0, before, most):
                first = kind == "full" and at == 0
                found.append(Piece("full", lo, hi - lo, at, min(most, before - at), *samples, first=first))
    return found


def padded(backend: Backend, *tensors: Tensor) -> list[Tensor]:
    """The tensors as a kernel takes them: with zeros beside heads that are narrower, where it knows one width, or only
    some; and a copy of one that spans too many elements, most of which are not its own."""
    widest, found = max(t.shape[-1] for t in tensors), []
    for t in tensors:
        if 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) >= ELEMENTS:
            t = t.transpose(1, 2).contiguous().transpose(1, 2)
        lacking = backend.width(t.shape[-1] if backend.widths else widest) - t.shape[-1]
        found.append(pad(t, (0, lacking)) if lacking else t)
    return found


def _room(x: Tensor, width: int, dtype: torch.dtype | None) -> Tensor:
    """A tensor like x [B, H, S, D] with heads of this width, not yet written; the heads of a token lie together, so
    that a part of the tokens does not span the others."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width, dtype=dtype).transpose(1, 2)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> OutputAndLse:
    """Attention of the same queries over two disjoint sets of keys -> over both; `out` is overwritten.

    out and other [..., S, V], lse and other_lse [..., S] in fp32. A set without any key has a logsumexp of -inf.
    """
    share = torch.sigmoid(other_lse - lse)[..., None]  # of the other set in the sum of both
    for at in query_tiles(out):
        out[at] = out[at].to(share.dtype).lerp_(other[at].to(share.dtype), share[at])
    return out, torch.logaddexp(lse, other_lse)


def query_tiles(x: Tensor, step: int | None = None) -> list[tuple[EllipsisType, slice, slice]]:
    """Slices of x [..., S, D] that cut S, so that fp32 intermediates are small: `step` queries each, or as many as
    `sizing.TILE_BYTES` hold."""
    step = step or tile_for(prod(x.shape[:-2]) * x.shape[-1], 4, kernel_device(x.device.type)[0])
    return [(..., at, slice(None)) for at in tiles_of(x.shape[-2], step)]
