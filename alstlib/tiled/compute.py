"""Tiled compute: token-wise functions run tile by tile, so that intermediates are O(tile) (ALST, section 3.1).

Shape legend: B batch, S tokens of this rank, E model width.

Forward runs the tiles without a graph; backward recomputes them one by one and adds up the weights' gradients in fp32.
These arrive once, through autograd, as the function's own gradients: data-parallel hooks see one gradient a weight, and
scaling the loss scales them. Under DeepSpeed ZeRO-3 the weights are gathered once around forward and once around
backward, because `TiledMLP` is marked as a leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.base.recompute import (
    GradientSums,
    Pass,
    Replay,
    Strays,
    first_order,
    now,
    tensors_of,
    those_that_train,
    trained,
    unchanged,
    with_gradient,
)
from alstlib.base.sizing import default_tile, tiles_of
from alstlib.offload.courier import Courier, Travel, parts_of, put_part, room_like
from alstlib.tiled.last_product import LastProduct


def check_tile(tile: int) -> int:
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile={tile!r} must be a whole number of tokens of at least 1")
    return tile


@dataclass(frozen=True)
class _Work:
    """What `tiled_compute` was asked, besides its tensors."""

    fn: Callable[..., Any]
    again: Callable[..., Any]
    params: Callable[[], Sequence[Tensor]]
    tile: int
    skip: bool
    module: nn.Module | None
    travel: Travel | None
    narrow: bool

    def couriers(self) -> tuple[Courier | None, Courier | None, Courier | None]:
        """The couriers of x, of the whole work and of the output; None where the tensor lies on the device."""
        if self.travel is None:
            return None, None, None
        courier = self.travel.courier()
        return courier if self.travel.x else None, courier, courier if self.travel.out else None


class _TiledCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, along: Sequence[Tensor], x: Tensor, *_: Tensor) -> Any:
        ctx.work, ctx.replay = work, Replay(work.travel.device if work.travel else x.device, work.module)
        ctx.strays = Strays()
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, *along)
        with unchanged(x, work.module):
            return x.new_zeros(()).expand_as(x) if work.skip else _run_tiles(work, x, along)

    @staticmethod
    @first_order
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        (x, *along), work = ctx.saved_tensors, ctx.work
        which = [i for i, grad in enumerate(given) if grad is not None]
        need_x, needs = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        params = those_that_train(work.params(), needs)
        sums, strays, tiles = GradientSums(params, work.narrow), ctx.strays, tiles_of(x.shape[1], work.tile, len(x))
        xs, courier, out = work.couriers()
        grad_x = room_like(xs, x) if need_x else None
        with ctx.replay(), torch.enable_grad():
            by_token = [_by_token(grad, x, i > 0) for i, grad in enumerate(given) if grad is not None]
            for at, (part,), upstream in zip(tiles, parts_of(xs, tiles, x), parts_of(out, tiles, *by_token)):
                leaf = part.contiguous().detach().requires_grad_(need_x)
                y = tensors_of(work.again(leaf, *(t[:, at] for t in along)))
                made = [(y[i], grad.reshape_as(y[i])) for i, grad in zip(which, upstream) if y[i].requires_grad]
                del y, part, upstream
                roots, above = zip(*made)
                first, *grads = strays.gradients_of(roots, [leaf, *params], above)
                del made, roots, above
                if grad_x is not None:
                    put_part(xs, grad_x, at, torch.zeros_like(leaf) if first is None else first)
                sums.add(grads, last=at is tiles[-1])
                grads = grads[-1:]  # alive during the next tile
        strays.add()
        if courier is not None:
            courier.finish()
        return None, None, grad_x, *sums.done(needs)


def _by_token(made: Tensor, x: Tensor, further: bool) -> Tensor:
    """An output of a function of x [B, S, ...], as [B, S, ...]: a `further` one may be [B * S, ...]."""
    if made.ndim >= 2 and made.shape[:2] == x.shape[:2]:
        return made
    if not further or made.ndim < 1 or made.shape[0] != x.shape[0] * x.shape[1]:
        raise ValueError(
            f"a token-wise function must keep the shape [B, S, ...], but made {list(made.shape)} of {list(x.shape)}"
        )
    return made.unflatten(0, x.shape[:2])


def _run_tiles(work: _Work, x: Tensor, along: Sequence[Tensor]) -> Any:
    """Run tiles of dimension 1, writing each result into one output; where the function returns several, into as
    many."""
    outs: list[Tensor] = []
    flat: list[bool] = []
    (xs, courier, to), tiles = work.couriers(), tiles_of(x.shape[1], work.tile, len(x))
    for at, (own,) in zip(tiles, parts_of(xs, tiles, x)):
        made = work.fn(own.contiguous(), *(t[:, at] for t in along))
        alone, parts = isinstance(made, Tensor), list(tensors_of(made))
        shaped = [_by_token(part, own, i > 0) for i, part in enumerate(parts)]
        if to is None and len(tiles) == 1:
            return made if alone else tuple(parts)
        if not outs:
            flat = [part.shape != one.shape for part, one in zip(parts, shaped)]
            shapes = [(one.shape[0], x.shape[1], *one.shape[2:]) for one in shaped]
            for shape, one in zip(shapes, parts):
                outs.append(one.new_empty(shape) if to is None else to.empty(shape, one.dtype))
                del one
        del own, made, parts
        for out in outs:
            put_part(to, out, at, shaped.pop(0))
    if courier is not None:
        courier.finish()
    return outs[0] if alone else tuple(out.flatten(0, 1) if is_flat else out for out, is_flat in zip(outs, flat))


def tiled_compute(
    fn: Callable[..., Tensor],
    x: Tensor,
    params: Sequence[Tensor] | Callable[[], Sequence[Tensor]] | None = None,
    *,
    tile: int,
    along: Sequence[Tensor] = (),
    skip: bool = False,
    module: nn.Module | None = None,
    travel: Travel | None = None,
    narrow: bool = False,
    again: Callable[..., Tensor] | None = None,
) -> Any:
    """Apply a token-wise function to x [B, S, ...] in tiles of `tile` tokens (ALST, section 3.1).

    Token-wise means that the output of a token depends on no other token.

    Args:
        fn: (x [B, s, ...], *along [B, s, ...]) -> [B, s, ...] for any s. It may return a tuple of such outputs, of
            which all but the first may be [B * s, ...]. It may use dropout, which is replayed exactly.
        x: the input; its last tile may be shorter.
        params: the tensors inside `fn` that get a gradient, or a function that returns them. The function is called
            again in backward, for weights that an engine swaps between forward and backward. None: the weights of the
            `module` that train.
        tile: the number of tokens in one tile.
        along: further inputs [B, S, ...], such as labels; they are cut into the same tiles and get no gradient.
        skip: return zeros of x's shape in place of the only or first output. This is for a recompute whose outputs
            nobody reads; backward runs the tiles anyway (see `alstlib.tiled.skip`).
        module: the module that `fn` calls; backward runs it in the mode (training or evaluation) of this call.
        travel: says that x or the output is on the host, from where tiles are copied to the device; None: neither is.
        narrow: whether the gradients of a single tile stay in the weights' dtype; sums over tiles are always in fp32.
        again: what backward runs in place of `fn`; only the graph and the shape of what it returns have to be right.

    Returns:
        fn(x, *along), with the same gradients for x and `params` as without tiles.

    Raises:
        ValueError: `tile` is less than 1, or `fn` does not keep the shape [B, S, ...].
    """
    given = ([] if module is None else functools.partial(trained, module)) if params is None else params
    get = given if callable(given) else lambda: given
    work, weights = _Work(fn, again or fn, get, check_tile(tile), skip, module, travel, narrow), get()
    if not any(t.requires_grad for t in (x, *weights)):  # with a graph of what else in the module needs a gradient
        with unchanged(x, module):
            return _run_tiles(work, x, along)
    return _TiledCompute.apply(work, tuple(along), x, *weights)


class TiledModule(nn.Module):
    """Base of modules that stand in for another and run it tile by tile. `inner` is the original.

    A stand-in owns what the original owns, under the same names: parameter names, state dicts and wrappers stay as they
    were. The dictionaries are shared, so that a weight replaced in one is replaced in the other.
    """

    inner: nn.Module
    travel: Callable[[], Travel | None] = staticmethod(lambda: None)
    """Function that says how the input of the running call is kept on the host; None: it is on the device."""

    def __init__(self, inner: nn.Module, tile: int | None = None) -> None:
        nn.Module.__init__(self)  # a class of ours may be one of the original's too, which needs more
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = inner.__dict__[name]
        self.__dict__["inner"] = inner  # not a child: its children are ours already
        # DeepSpeed ZeRO-3 gathers the weights of a leaf once around forward and once around backward. A module without
        # children is gathered so anyway, and a leaf's gradients are sent when its own backward ends, which is too early
        # for a weight that another module uses too
        self._z3_leaf = bool(self._modules)
        self.tile = None if tile is None else check_tile(tile)
        self.register_forward_pre_hook(self._ensure_input_grad)

    @staticmethod
    def _ensure_input_grad(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (with_gradient(args[0], module), *args[1:])

    @property
    def training(self) -> bool:
        """The mode of the original, which its own forward reads."""
        return self.inner.training if "inner" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "inner" in self.__dict__:
            self.inner.training = mode

    def forward(self, x: Tensor) -> Any:
        if x.ndim > 2:
            return self.tiled(x)
        first, *further = tensors_of(self.forward(x[None]))  # [B * S, E]
        return (first[0], *further) if further else first[0]

    def tiled(self, x: Tensor) -> Any:
        """What the module makes of x [B, S, E]."""
        raise NotImplementedError


class TiledMLP(TiledModule):
    """Replaces a token-wise MLP and runs it tile by tile; it may be gated, and may have LoRA layers or dropout inside.

    Args:
        mlp: a module that maps [B, S, E] to [B, S, E] token by token.
        tile: the number of tokens in one tile; None chooses it by `default_tile`.
    """

    narrow = False
    """Whether the gradients of a single tile stay in the weights' precision. A dense MLP's are small."""
    further = 0
    """Number of outputs besides the first, as the last forward had them."""
    further_unread = False
    """Whether the layer was seen to do nothing with its further outputs (`skip.find_followers`)."""

    def __init__(self, inner: nn.Module, tile: int | None = None) -> None:
        super().__init__(inner, tile)
        self.product = LastProduct(inner)

    def tiled(self, x: Tensor) -> Any:
        tile, asked = self.tile or self._default_tile(x), now() or Pass()
        if asked.whole and x.shape[:2].numel() <= tile:
            return self._run(x)
        (run, along), params, again = self._work(), None, None
        skip = asked.skip and self not in asked.drew and (self.further_unread or not self.further)
        then: Any = asked.followers.get(self) if skip else None
        if follows := then is not None and then.ready():
            run, params = then.after(run, self.inner)
        elif run is self.inner:
            run, again = self.product.first, self.product.again
        before = Replay(x.device)
        out = tiled_compute(
            run, x, params, tile=tile, along=along, skip=skip, module=self.inner, narrow=self.narrow, again=again
        )  # fmt: skip
        if skip:
            out = then.expect(out) if follows else out
            return (out, *[None] * self.further) if self.further else out
        if before.has_moved():
            asked.drew.add(self)
        self.further = len(tensors_of(out)) - 1
        return out

    def _run(self, x: Tensor) -> Any:
        return self.inner(x)

    def _work(self) -> tuple[Callable[..., Any], Sequence[Tensor]]:
        """What runs on each tile of the call that begins, and what is cut along with its input."""
        return self.inner, ()

    def _default_tile(self, x: Tensor) -> int:
        widest = max([x.shape[-1], *(max(p.shape, default=0) for p in self.inner.parameters() if p.ndim == 2)])
        return default_tile(widest, x.element_size(), x.device)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the width, which works token by token, as far as its name tells."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


class TiledNorm(TiledModule):
    """Stands in for a norm over the width and runs it in tiles: a norm computes in fp32, and untiled its intermediates
    are several times the hidden states.

    Args:
        norm: a module mapping [B, S, E] to [B, S, E], token by token.
        tile: tokens in one tile; None chooses by `default_tile`.
    """

    def tiled(self, x: Tensor) -> Tensor:
        travel = self.travel()
        tile = self.tile or default_tile(x.shape[-1], 4, travel.device if travel else x.device)
        return tiled_compute(self.inner, x, tile=tile, module=self.inner, travel=travel)
