"""The exchange of Ulysses: slices of the sequence become whole sequences of some heads, and
these become slices (ALST,
section 3.2).

Shape legend: B batch, S sequence, P sequence-parallel degree, L = S / P, H heads, h = H / P, D width.
Sequence layout [B, H, L, D]: all heads of this rank's tokens. Head layout [B, h, S, D]: this rank's heads of all
tokens.

Key/value heads are split like query heads when P divides them. When they are fewer than the ranks (K < P, K divides P),
P / K neighbouring ranks need the same head: it is sent to each of them straight from one buffer, never replicated
first, and each rank receives just the one head it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from alstlib.base.mesh import SPContext, striped
from alstlib.base.recompute import first_order, sum_dtype

GLOO_TAKES_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def emulated(group: Any) -> bool:
    """Whether the other ranks of this group are not there (`mesh.join_fake`), so that nothing arrives from them."""
    return dist.get_backend(group) == "fake"


def _all_to_all(
    receive: Tensor, send: Tensor, group: Any, from_ranks: list[int] | None = None, to_ranks: list[int] | None = None
) -> Tensor:
    """`all_to_all_single` into `receive`, which it returns. From emulated ranks comes what this rank sends, over and
    over: kernels run at another speed on zeros, or on whatever lies in memory, than on numbers of a model."""
    dist.all_to_all_single(receive, send, from_ranks, to_ranks, group=group)
    if emulated(group) and len(send):
        for part in receive.split(len(send)):
            part.copy_(send[: len(part)])
    return receive


class Exchange:
    """All-to-alls over one SP group, with a count of the bytes that this rank has sent to others.

    Args:
        group: process group of the P ranks; None for P = 1, where everything is the identity.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.bytes_sent = 0
        """Bytes that this rank has sent to other ranks since the exchange was made."""

    def _count(self, sent: Tensor) -> None:
        """Count equal parts for all other ranks, of which `sent` is one."""
        self.bytes_sent += sent.nbytes * (self.ranks - 1)

    def _swap(self, send: Tensor) -> Tensor:
        """send [P, ...] contiguous: part p goes to rank p -> parts by source rank, the same shape."""
        receive = _all_to_all(torch.empty_like(send), send, self.group)
        self._count(send[0])
        return receive

    def swap_unequal(self, send: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
        """send [sum of to_ranks], the parts for each rank in order -> [sum of from_ranks], those from each rank."""
        receive = _all_to_all(send.new_empty(sum(from_ranks)), send, self.group, list(from_ranks), list(to_ranks))
        self.bytes_sent += (send.numel() - to_ranks[self.rank]) * send.element_size()
        return receive

    def gather(self, x: Tensor) -> Tensor:
        """The x of every rank, [P, *x.shape], in rank order."""
        if self.ranks == 1:
            return x[None]
        everyone = x.new_empty(self.ranks, *x.shape)
        dist.all_gather(list(everyone), x.contiguous(), group=self.group)
        self._count(x)
        return everyone.copy_(x.expand_as(everyone)) if emulated(self.group) else everyone

    def sum_parts(self, x: Tensor) -> Tensor:
        """x [P, ...], a part for each rank -> the sum over ranks of the parts for this one."""
        return x[0] if self.ranks == 1 else self._swap(x.contiguous()).sum(0)

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors [B, H, L, D], each with its own H (divisible by P) -> views [B, H / P, S, D] of one buffer.

        Or all with K heads, K < P and P a multiple of K -> [B, 1, S, D]: the one head that this rank needs.
        """
        if self.ranks == 1:
            return list(tensors)
        n = min(tensors[0].shape[1], self.ranks)
        return self._exchange([t.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4) for t in tensors], back=False)

    def to_seq(self, *tensors: Tensor, heads: int | None = None) -> list[Tensor]:
        """The way back: tensors [B, h, S, D] -> [B, P * h, L, D] (stored as [B, L, H, D]).

        Gradients of `heads` that ranks share [B, 1, S, D] -> [B, K, L, D], summed in fp32 over those ranks.
        """
        if self.ranks == 1:
            return list(tensors)
        by_rank = [t.unflatten(2, (self.ranks, -1)).permute(2, 3, 0, 1, 4) for t in tensors]
        return self._exchange(by_rank, back=True, shared=heads)

    def _exchange(self, tensors: Sequence[Tensor], back: bool, shared: int | None = None) -> list[Tensor]:
        """Exchange tensors [n, L, B, h, D] in one buffer; part i of n goes to rank i, or to P / n ranks. Gradients of
        `shared` heads are summed over the ranks that they come from."""
        widths = [t.shape[3] * t.shape[4] for t in tensors]
        if len(tensors) == 1:
            send = tensors[0].contiguous().flatten(3)  # no copy for B = 1 and kernels that store [B, S, h, D]
        else:
            send = tensors[0].new_empty(*tensors[0].shape[:3], sum(widths))
            for part, t in zip(send.split(widths, 3), tensors):
                part.unflatten(3, t.shape[3:]).copy_(t)
        whole = self._swap(send) if len(send) == self.ranks else self._share(send)
        if shared is not None:
            wide = sum_dtype(whole)
            whole = whole.unflatten(0, (shared, -1)).sum(1, dtype=wide).to(whole.dtype)
        parts = [part.unflatten(3, t.shape[3:]) for part, t in zip(whole.split(widths, 3), tensors)]
        if back:  # heads of all ranks, in order
            return [part.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2) for part in parts]
        return [part.flatten(0, 1).permute(1, 2, 0, 3) for part in parts]  # tokens of all ranks, in order

    def _share(self, send: Tensor) -> Tensor:
        """send [K, ...], each part for P / K neighbouring ranks -> those of all ranks [P, ...]."""
        p = self.ranks
        receive, sent = send.new_empty(p, *send.shape[1:]), [send[r * len(send) // p] for r in range(p)]
        if GLOO_TAKES_LISTS or "gloo" not in dist.get_backend_config(self.group):
            dist.all_to_all(list(receive), sent, group=self.group)
        else:
            dist.all_to_all_single(receive, torch.stack(sent), group=self.group)
        if emulated(self.group):
            for part, given in zip(receive, sent):
                part.copy_(given)
        self._count(send[0])
        return receive


def stripe(tensors: Sequence[Tensor], chunk: int, ctx: SPContext) -> list[Tensor]:
    """Deal tokens out in stripes: from this rank's slice of the sequence to its tokens of each chunk.

    Chunk i of all P ranks together is tokens [i P C, (i + 1) P C) of the sequence, and rank r has the r-th of P equal
    parts of it; the last chunk has the remaining tokens. Attention of a chunk then needs the keys of this chunk and of
    earlier ones only (FPDT, section 4).

    Args:
        tensors: integers [B, L] of this rank's slice (tokens, positions, labels), of one shape and dtype.
        chunk: C, the tokens of one rank in a chunk.
    """
    if ctx.sp == 1 or tensors[0].shape[1] <= chunk:
        return list(tensors)
    striped = _deal(torch.stack(list(tensors)).permute(2, 0, 1), chunk, ctx)
    return [t.contiguous() for t in striped.permute(1, 2, 0)]


def unstripe(x: Tensor, chunk: int, ctx: SPContext) -> Tensor:
    """The way back of `stripe`, differentiable: from this rank's tokens [B, L] of each chunk to its slice."""
    if ctx.sp == 1 or x.shape[1] <= chunk:
        return x

    def to_slice(x: Tensor) -> list[Tensor]:
        return [_deal(x.T, chunk, ctx, back=True).T.contiguous()]

    return Moved.apply(to_slice, lambda grad: stripe([grad], chunk, ctx), x)[0]


def _deal(x: Tensor, chunk: int, ctx: SPContext, back: bool = False) -> Tensor:
    """x [L, ...] of this rank's slice -> of its tokens of each chunk, or back."""
    tokens, ranks, rank = len(x), ctx.sp, ctx.sp_rank
    with unset_fake_temporarily():  # a simulation must know too how many tokens go to which rank
        at = torch.arange(tokens)
        begin = at - at % chunk
        to, *_ = striped(rank * tokens + at, tokens, chunk, ranks)
        come_from = (ranks * begin + rank * (tokens - begin).clamp(max=chunk) + at - begin) // tokens
        to_ranks, from_ranks = (torch.bincount(of, minlength=ranks).tolist() for of in (to, come_from))
        order = torch.argsort(to, stable=True)
        order = torch.argsort(order) if back else order
    order = order.to(x.device)
    if back:
        send = x.contiguous()
        return _all_to_all(torch.empty_like(send), send, ctx.sp_group, to_ranks, from_ranks)[order]
    send = x[order].contiguous()
    return _all_to_all(torch.empty_like(send), send, ctx.sp_group, from_ranks, to_ranks)


class Moved(torch.autograd.Function):
    """Tensors that `there` moves between ranks; `back` moves their gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, there: Callable[..., Sequence[Tensor]], back: Callable[..., Sequence[Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(there(*tensors))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(*grads)


def swap(exchange: Exchange, to_heads: bool, *tensors: Tensor) -> Sequence[Tensor]:
    """`Exchange.to_heads` or `to_seq` of tensors that go in one buffer, differentiable."""
    if not to_heads:
        return Moved.apply(exchange.to_seq, exchange.to_heads, *tensors)
    heads = tensors[0].shape[1]
    back = functools.partial(exchange.to_seq, heads=heads if heads < exchange.ranks else None)
    return Moved.apply(exchange.to_heads, back, *tensors)


def whole_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether every rank can have the same number of whole heads, with key/value heads split or shared evenly."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def whole_head_degrees(heads: int, kv_heads: int) -> list[int]:
    """The SP degrees at which every rank has whole heads; at others, ranks share the tokens of a head
    (`head_split`)."""
    return [p for p in range(1, heads + 1) if whole_heads(heads, kv_heads, p)]


def seq_to_heads(x: Tensor, group: Any | Exchange = None) -> Tensor:
    """Differentiable exchange: [B, H, L, D] -> [B, H / P, S, D] (or [B, 1, S, D] where P / H ranks share a head).

    Args:
        x: this rank's tokens of all heads; every rank of the group gives the same shape.
        group: a process group, an `Exchange` over one (which counts bytes), or None for one rank.

    Raises:
        ValueError: the heads neither split nor share evenly over the ranks.
    """
    exchange = group if isinstance(group, Exchange) else Exchange(group)
    heads, ranks = x.shape[1], exchange.ranks
    if heads % ranks and ranks % heads:
        raise ValueError(f"{heads} heads neither divide over {ranks} ranks nor are shared evenly by them")
    return swap(exchange, True, x)[0]


def heads_to_seq(x: Tensor, group: Any | Exchange = None) -> Tensor:
    """Differentiable exchange back: [B, h, S, D] -> [B, P * h, L, D].

    Raises:
        ValueError: S does not divide by the ranks, with the nearest length that does.
    """
    exchange = group if isinstance(group, Exchange) else Exchange(group)
    size, ranks = x.shape[2], exchange.ranks
    if size % ranks:
        raise ValueError(f"a sequence of {size} does not divide over {ranks} ranks; {size + -size % ranks} does")
    return swap(exchange, False, x)[0]
