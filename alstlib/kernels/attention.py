"""Causal attention inside documents, with its logsumexp and its gradients, over any kernel of `backends`.

Shape legend: B batch, S query rows, N keys, H query heads, K key/value heads (H a multiple of K), D key width, V value
width. q [B, H, S, D]; k [B, K, N, D]; v [B, K, N, V]; out [B, H, S, V]; lse [B, H, S] (logsumexp of the scores, fp32).
Nothing of shape [S, S] is made (except by the kernel `eager`, which is there for checking).

Documents are offsets into the flattened [B * S] batch (0 first, B * S last); None makes every batch row one document.
They are attended one after the other: exact for every kernel, and the cost of a document is its own square. On CUDA one
call of a kernel for variable lengths takes them all. Queries may be the last rows of the keys. What a kernel's mask
cannot say (those, and sliding windows) is put together from calls that it can (`spans`); `calls` makes each of them.

Attention sinks are a further key of each head that has a score and no value: exp(sink) more in the sum. They change the
logsumexp, and with it scale the output (`with_sinks`); a kernel's backward, which reads both, is right as it is.

Keeping the logsumexp is what lets a backward run without a second forward (DistFlashAttn, arXiv 2310.03294).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from alstlib.kernels import calls
from alstlib.kernels.backends import BACKENDS, Backend
from alstlib.kernels.calls import merge, most_rows, padded, row_tiles
from alstlib.kernels.rule import Attended, Packed, Rule
from alstlib.kernels.spans import Documents, Offsets, Piece, Span, document_spans, pieces
from alstlib.sizing import KEYS_PER_QUERY, keys_of_a_call

P = ParamSpec("P")
R = TypeVar("R")


def in_full(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` without autocast, which would take back the precision in which kernels sum."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        (device,) = {a.device.type for a in args if isinstance(a, Tensor)}
        with torch.autocast(device, enabled=False):
            return fn(*args, **kwargs)

    return run


def _keys_per_query(backend: Backend) -> int | None:
    """Most keys of a forward's calls for each query; None for all."""
    return KEYS_PER_QUERY if backend.granule > 1 else None


def _whole(spans: Sequence[Span], q: Tensor, k: Tensor, window: int | None) -> bool:
    """Whether every batch row is one span of all its queries and keys, without a window that hides any. (Queries of
    some batch rows, stored as one, have keys of more batch rows than they see.)"""
    rows, keys = q.shape[2], k.shape[2]
    return (
        len(spans) == q.shape[0] == k.shape[0]
        and all((s.begin, s.end, s.rows, s.batch, s.q_batch) == (0, keys, rows, i, i) for i, s in enumerate(spans))
        and (window is None or window >= keys)
    )


def _packed(
    backend: Backend, rule: Rule, cu_seqlens: Documents, spans: Sequence[Span], q: Tensor, k: Tensor, *more: Tensor
) -> tuple[Backend, Packed] | None:
    """The kernel that takes all documents (and a window) of whole sequences in one call, and how it is told of them;
    None where there is none, or its tensors are too large for it."""
    kernel = BACKENDS.get(backend.packed_by)
    if kernel is None or (rule.softcap is not None and not kernel.softcap) or q.shape[2:] != k.shape[2:]:
        return None
    batch, length = q.shape[::2][:2]
    if batch * length > most_rows(kernel, (q, k, *more)):
        return None
    if cu_seqlens is None:
        return kernel, Packed(
            torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device), length, rule.window
        )
    known = cu_seqlens if isinstance(cu_seqlens, Offsets) else Offsets()
    if (key := (length, q.device)) not in known.uploaded:  # they go to the device once for each sample
        offsets = torch.tensor([0, *(s.batch * length + s.end for s in spans)], dtype=torch.int32)
        known.uploaded[key] = offsets.to(q.device, non_blocking=True), max(s.rows for s in spans)
    return kernel, Packed(*known.uploaded[key], rule.window)


def _spans(cu_seqlens: Documents, q: Tensor, k: Tensor, length: int | None) -> Sequence[Span]:
    rows, keys = q.shape[2], k.shape[2]
    return document_spans(cu_seqlens, q.shape[0], length or keys, keys - rows, keys)


@in_full
def attention_forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: Rule,
    cu_seqlens: Documents = None,
    spans: Sequence[Span] | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents -> (out [B, H, S, V], lse [B, H, S] in fp32).

    Args:
        k, v: with N >= S keys: the queries are the last S of N rows.
        cu_seqlens: offsets of the documents into the flattened [B * length] batch.
        spans: instead of the offsets, which queries see which keys; they hold every query once.
        length: rows of a whole batch row where k and v hold only its first N; None: they hold it whole.
    """
    found = spans or _spans(cu_seqlens, q, k, length)
    if _whole(found, q, k, rule.window):
        return _causal_forward(backend, q, k, v, rule)
    if not spans and (one := _packed(backend, rule, cu_seqlens, found, q, k, v)):
        kernel, packed = one
        out, lse = kernel.forward(*padded(kernel, q, k, v), rule.scale, True, packed=packed, **rule.given)
        return out[..., : v.shape[-1]], lse
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    cut = _keys_per_query(backend)
    for span in found:
        for piece in pieces(span, rule.window, bottom_right=backend.bottom_right, keys_per_query=cut):
            add_piece(backend, piece, span, Attended(q, k, v, out, lse), rule)
    return out, lse


def _causal_forward(backend: Backend, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Queries are the last rows of the keys: everything before them, and their own triangle."""
    before = k.shape[2] - q.shape[2]
    if before == 0 or backend.bottom_right:
        return calls.forward(backend, q, k, v, rule, "causal")
    out, lse = calls.forward(backend, q, k[:, :, before:], v[:, :, before:], rule, "causal")
    step = keys_of_a_call(q.shape[2], before, _keys_per_query(backend))
    for lo in range(0, before, step):
        at = (slice(None), slice(None), slice(lo, min(lo + step, before)))
        out, lse = merge(out, lse, *calls.forward(backend, q, k[at], v[at], rule, "full"))
    return out, lse


def add_piece(backend: Backend, piece: Piece, span: Span, call: Attended, rule: Rule) -> None:
    """Compute a piece and merge it into what its queries have; causal pieces come first and are written."""
    mine, to, to_lse = (piece.queries_of(t, span.q_batch) for t in (call.q, call.out, call.lse))
    keys, values = (piece.keys_of(t, span.batch) for t in (call.k, call.v))
    part, part_lse = calls.forward(backend, mine, keys, values, rule, piece.kind)
    if piece.kind == "causal":
        to.copy_(part)
        to_lse.copy_(part_lse)
    else:
        to_lse.copy_(merge(to, to_lse, part, part_lse)[1])


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output (in place) and logsumexp with a further key of each head that has a score and no value."""
    score = sinks.to(lse.dtype)[None, :, None]
    share = torch.sigmoid(lse - score)[..., None]
    for rows in row_tiles(out):
        out[rows] = out[rows] * share[rows]
    return out, torch.logaddexp(lse, score)


def sinks_backward(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient [H] of the sinks (fp32), from delta = rowsum(dout * out) and lse [B, H, S] that holds them."""
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(share * delta).sum((0, 2))


@in_full
def attention_backward(
    backend: Backend,
    dout: Tensor,
    kept: Attended,
    *,
    rule: Rule,
    cu_seqlens: Documents = None,
    spans: Sequence[Span] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of `attention_forward` over a whole sequence -> (dq, dk, dv).

    Args:
        kept: what `attention_forward` was given and what it returned.
        cu_seqlens, spans: as they were given to `attention_forward`.
    """
    q, k, v, out, lse = kept
    found = spans or _spans(cu_seqlens, q, k, None)
    if _whole(found, q, k, rule.window):
        return calls.backward(backend, dout, kept, rule, "causal")
    if not spans and (one := _packed(backend, rule, cu_seqlens, found, q, k, v, dout, out)):
        kernel, packed = one
        dout, *given = padded(kernel, dout, q, k, v, out)
        grads = kernel.backward(dout, Attended._make([*given, lse]), rule.scale, True, packed=packed, **rule.given)
        return tuple(g[..., : t.shape[-1]] for g, t in zip(grads, (q, k, v)))
    if not spans and (rule.window is None or all(s.rows <= rule.window for s in found)):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for span in found:  # each key belongs to one call: nothing is summed
            at = (slice(span.batch, span.batch + 1), slice(None), slice(span.begin, span.end))
            dq[at], dk[at], dv[at] = calls.backward(backend, dout[at], Attended(*(t[at] for t in kept)), rule, "causal")
        return dq, dk, dv
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    dq = attention_backward_rows(backend, dout, kept, sums, rule=rule, spans=found)
    return dq, sums[0].to(k.dtype), sums[1].to(v.dtype)


@in_full
def attention_backward_rows(
    backend: Backend,
    dout: Tensor,
    kept: Attended,
    sums: tuple[Tensor, Tensor],
    *,
    rule: Rule,
    cu_seqlens: Documents = None,
    spans: Sequence[Span] | None = None,
    length: int | None = None,
) -> Tensor:
    """Gradient of `attention_forward` for queries that are the last rows of the keys -> dq [B, H, S, D].

    What these rows contribute to the gradients of the keys and values they saw is added to `sums`, [B, K, N, D] and
    [B, K, N, V] (fp32: a key collects from many calls). `out` and `lse` are over all keys of a row: with them each set
    of keys gives its own share of the gradients, exactly (FlashAttention-2, section 3.1.2).
    """
    q = kept.q
    dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    for span in spans or _spans(cu_seqlens, q, kept.k, length):
        for piece in pieces(span, rule.window, keys_per_query=KEYS_PER_QUERY):
            backward_of_piece(backend, piece, span, dout, kept, dq, sums, rule)
    return dq.to(q.dtype)


def backward_of_piece(
    backend: Backend, piece: Piece, span: Span, dout: Tensor, kept: Attended, dq: Tensor, sums: tuple[Tensor, Tensor],
    rule: Rule,
) -> None:  # fmt: skip
    """Add a piece's share to dq and to the sums of its keys' and values' gradients, all in fp32."""
    q, k, v, out, lse = kept
    grad, mine, part, norm = (piece.queries_of(t, span.q_batch) for t in (dout, q, out, lse))
    seen, values = (piece.keys_of(t, span.batch) for t in (k, v))
    grads = calls.backward(backend, grad, Attended(mine, seen, values, part, norm), rule, piece.kind)
    piece.queries_of(dq, span.q_batch).add_(grads[0])
    for total, share in zip(sums, grads[1:]):
        piece.keys_of(total, span.batch).add_(share)
