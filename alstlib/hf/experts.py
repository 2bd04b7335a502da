"""Blocks that route each token to a few experts run in tiles like a dense MLP, so that their intermediates are O(tile).

A block may run in tiles where its output for a token depends on that token alone. Most do: a router chooses experts for
each token, and their weights are the same for all. Some do not: experts of limited capacity drop what comes too late,
others choose their tokens, or a router looks at the whole batch. What a block does is found by giving it made-up tokens
(`why_untiled`), once, where its weights are whole: in its first call. A block that mixes tokens runs as it is where all
tokens are there, and is refused where a rank, a chunk or a block of the model has some of them.

The load-balancing loss is a mean over all tokens (`router_loss`): routers run inside the tiles, in forward, which adds
up, and in each tile's backward, where the loss's gradient joins in.

What tiles cost: each tile's backward makes a gradient of all experts, and these are added up in fp32, 4 bytes for each
weight of the block that trains. So the default tile makes at least as many intermediates as these sums take, and where
cutting a slice would save less than that, it is one tile, without sums. Below: device bytes, and CPU time of one core,
of forward and backward of a block like Mixtral's (width 256, 8 experts of width 896, 2 for each token; fp32, grouped
products). The time in tiles has the recompute of the block in it, the time untiled has none.

    tokens   untiled             tiles of 256        default
     1,024    53 MiB   0.10 s     57 MiB   0.17 s     55 MiB   0.14 s   one tile
     4,096   191 MiB   0.47 s     66 MiB   0.68 s     84 MiB   0.54 s   tiles of 826
    16,384   745 MiB   2.19 s    102 MiB   2.77 s    120 MiB   2.25 s   tiles of 826

The backward of transformers' eager experts makes a gradient as large as all experts for each expert, so that tiles of
them cost more: 2.67 s by default, and 1.63 s untiled, for 16,384 tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.utils import output_capturing

from alstlib.hf.handle import Handle
from alstlib.hf.inputs import Call
from alstlib.recompute import Replay
from alstlib.sizing import tile_of_sums
from alstlib.tiled.compute import TiledMLP, default_tile

log = logging.getLogger(__name__)

MIXES = "mixes tokens"
MADE_UP = 32
"""Tokens that a block is tried with: more than experts of limited capacity take of so few."""


def routes(module: nn.Module) -> bool:
    """Does a child of a layer look like a block of experts, which is not a plain MLP?"""
    return any(hasattr(module, a) for a in ("experts", "router", "gate")) and not hasattr(module, "down_proj")


def takes_more(block: nn.Module) -> bool:
    """Does the block's forward take more than its tokens (token ids for routing by hash, another router's state)?"""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.kind not in several for p in inspect.signature(block.forward).parameters.values()) > 1


class TiledExperts(TiledMLP):
    """Stands in for a block of experts and runs it in tiles, where it treats its tokens one by one.

    Args:
        block: a module mapping [B, S, E] to [B, S, E], or to a tuple that begins with that.
        tile: tokens in one tile; None chooses by `default_tile`.
        where: the block's name in messages.
    """

    narrow = True
    call: Callable[[], Call | None]
    using: Callable[[Call | None], AbstractContextManager[None]]
    some_rows: Callable[[], bool]
    """Is the call that runs now one of some of the sequence's rows?"""
    say: Callable[[str], None]

    def __init__(self, block: nn.Module, tile: int | None, where: str) -> None:
        super().__init__(block, tile)
        self.where, self.tried, self.whole = where, False, False

    def forward(self, x: Tensor) -> Any:
        if not self.tried and x.ndim == 3:
            before = _captured()
            with contextlib.nullcontext() if self.call() is None else self.using(None):
                why = why_untiled(self.inner, x)
            for seen, length in before:
                del seen[length:]
            if why == MIXES and self.some_rows():
                raise ValueError(f"{self.where} {why}: it is exact only with sp=1, chunk=None and without block_step")
            self.tried, self.whole = True, bool(why)
            if why:
                self.say(f"{self.where} {why}: left untiled")
        if self.whole:
            return self._run(x)
        before = _captured()
        out = super().forward(x)
        for seen, length in before:
            seen[length:] = _joined(seen[length:], *x.shape[:2])
        return out

    def _work(self) -> tuple[Callable[..., Any], Sequence[Tensor]]:
        """Each tile's router, now and in backward, belongs to the call that runs now, and knows the tile's padding."""
        call = self.call()
        if call is None or call.router is None:
            return self._run, ()
        own, using, real = replace(call, saved=None, piece=None, blocks=None), self.using, call.real_rows

        def run(x: Tensor, *real: Tensor) -> Any:
            with using(replace(own, real=real[0] if real else None)):
                return self._run(x)

        return run, () if real is None else (real,)

    def _default_tile(self, x: Tensor) -> int:
        """By bytes. One expert's widest intermediate, times the experts of a token, is as large as a dense MLP's; but a
        tile that is smaller than the fp32 sums of the gradients costs time and saves little (`tile_of_sums`)."""
        found = [getattr(m, name, None) for m in self.inner.modules() for name in ("top_k", "num_experts_per_tok")]
        each = max((k for k in found if isinstance(k, int)), default=1)
        shapes = {n: getattr(p, "ds_shape", p.shape) for n, p in self.inner.named_parameters()}
        listed = max([1, *(len(m) for m in self.inner.modules() if isinstance(m, nn.ModuleList))])
        widest, numbers = x.shape[-1], 0.0
        for name, shape in shapes.items():
            if len(shape) >= 2:  # a matrix for each expert, in one weight or in a list, or one for all tokens
                uses = each if len(shape) > 2 else each / listed if "experts." in name else 1
                widest, numbers = max(widest, *shape[-2:]), numbers + uses * sum(shape[-2:])
        sums = sum(4 * math.prod(shapes[n]) for n, p in self.inner.named_parameters() if p.requires_grad)
        tile = default_tile(each * widest, x.element_size(), x.device)
        return tile_of_sums(x.shape[1], tile, sums, numbers * x.element_size() * len(x))


@functools.cache
def _kind_for(kind: type[nn.Module]) -> Any:
    """A class that is `TiledExperts`, and the block's own too: by its class (`set_z3_leaf_modules`), or by the name of
    its class (Accelerate), users say which modules DeepSpeed ZeRO-3 must take as leaves."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": TiledExperts.__doc__}
    return type(kind.__name__, (TiledExperts, kind), names)


def tiled_experts(handle: Handle, block: nn.Module, tile: int | None, where: str) -> TiledExperts:
    """A stand-in for a block of this model."""
    kind: Any = type(block)
    made: TiledExperts = _kind_for(kind)(block, tile, where)

    def some_rows() -> bool:
        return handle.ctx.sp > 1 or (handle.call is not None and handle.call.rows is not None)

    def say(note: str) -> None:
        handle.notes.append(note)
        log.warning(note)

    # functions, which a deep copy shares, and not methods, with which it would copy the handle
    made.call, made.using = lambda: handle.call, lambda call: handle.using(call)
    made.some_rows, made.say = some_rows, say
    return made


@torch.no_grad()
def why_untiled(block: nn.Module, x: Tensor) -> str:
    """Why a block cannot run in tiles, by what it does to made-up tokens like x [B, S, E]; "" where it can."""
    if isinstance(x, FakeTensor) or x.is_meta:  # has no values to look at
        return ""
    modes, buffers = [(m, m.training) for m in block.modules()], [(b, b.clone()) for b in block.buffers()]
    try:
        with Replay(x.device)():
            given = _made_up(x, 0)
            before = given.clone()
            for m, _ in modes:
                m.training = True
            made = block(given)
            if not torch.equal(before, given):
                return "changes its input in place"
            for m, _ in modes:
                m.training = False
            if not all(isinstance(t, Tensor) for t in (made if isinstance(made, tuple) else [made])):
                return "returns something that is no tensor"
            if any(not torch.equal(b, was) for b, was in buffers):
                return "keeps statistics of its tokens"
            # a close call of the router may fall differently by rounding, but not for each of three tokens
            return MIXES if all(_mixes(block, _made_up(x, seed)) for seed in range(3)) else ""
    finally:
        for m, mode in modes:
            m.training = mode
        for b, was in buffers:
            b.copy_(was)


def _made_up(x: Tensor, seed: int) -> Tensor:
    numbers = torch.randn(1, MADE_UP, x.shape[-1], generator=torch.Generator().manual_seed(seed))
    return numbers.to(x.device, x.dtype)


def _mixes(block: nn.Module, tokens: Tensor) -> bool:
    """Does a token's output depend on the others? Here it is there many times, which fills up its experts, and then at
    the beginning and at the end of different tokens."""
    among = tokens.clone()
    among[:, -1] = among[:, 0]
    crowd, mixed = (_first(block(t)) for t in (tokens[:, :1].repeat(1, MADE_UP, 1), among))
    atol = torch.finfo(crowd.dtype).eps ** 0.5 * float(crowd.abs().amax())
    alone = crowd[:, :1]
    return not all(
        torch.allclose(t, alone.expand_as(t), rtol=0, atol=atol, equal_nan=True)
        for t in (crowd, mixed[:, :1], mixed[:, -1:])
    )


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _captured() -> list[tuple[list[Any], int]]:
    """The lists in which transformers collects outputs of modules in the call that runs now, and how long they are."""
    active = getattr(output_capturing, "_active_collector", None)
    found = None if active is None else active.get()
    return [(seen, len(seen)) for seen in (found or {}).values() if isinstance(seen, list)]


def _joined(parts: list[Any], batch: int, rows: int) -> list[Any]:
    """Outputs [B * s, ...] or [B, s, ...] that were collected tile by tile, of each module as if it had run once."""
    tokens = sum(t.shape[:-1].numel() for t in parts)
    modules, rest = divmod(tokens, batch * rows)
    if rest or modules in (0, len(parts)):
        return parts
    whole = [torch.cat([t.reshape(batch, -1, t.shape[-1]) for t in parts[i::modules]], 1) for i in range(modules)]
    return [t if part.ndim > 2 else t.flatten(0, 1) for t, part in zip(whole, parts)]
