"""The decoder layers of an attached model run through a `LayerRunner`, which takes the place of a layer's `forward`.

`Whole` runs a layer on all tokens as a checkpoint: it keeps the input, and recomputes the rest in backward. `Chunked`
runs it in chunks of its tokens (`streaming.chunked`). A model that runs block by block (`streaming.blocks`) has its
layers whole; their attention sees the block. How much is kept is planned at the first layer of each forward
(`MemoryPlan`). Another way of running a layer is another subclass here, which `attach_runners` chooses.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from alstlib.base.recompute import Saved, trained, with_gradient
from alstlib.hf.handle import Handle
from alstlib.hf.shared import Shared, apart, is_shared
from alstlib.hf.support import Facts, layer_name, why_whole
from alstlib.linear.adapters import is_tokenwise
from alstlib.offload.checkpoints import Segment, checkpoint
from alstlib.streaming.chunked import LayerChunk, Stream
from alstlib.tiled.skip import Follower, Unread, find_followers


def attach_runners(handle: Handle) -> None:
    """Layers' own `forward` is wrapped on the instance: engines' hooks stay outside, in every transformers version."""
    kind: type[LayerRunner] = Whole if handle.chunk is None else Chunked
    if handle.chunk is not None:
        _check_chunks(handle.facts)
    layers = handle.facts.layers
    chain = Chain(len(layers))
    for i, layer in enumerate(layers):
        handle.set_forward(layer, kind(handle, chain, layer, i))


def attach_blocks(handle: Handle) -> None:
    """Have memory planned when a micro-batch's first block comes to the first layer."""

    @torch.compiler.disable
    def first_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        blocks = None if handle.state is None else handle.state.blocks
        if blocks is not None and not blocks.pages:
            x = args[0] if args else kwargs["hidden_states"]
            handle.plan.blockwise(tokens_first(x, handle.facts), blocks)

    first = handle.facts.layers[0]
    handle.edits.hook(first, first.register_forward_pre_hook(first_layer, with_kwargs=True))


class Chain:
    """The segment that the layer which ran last belongs to. The next layer goes on with it where it may: it is the next
    one, gets what the last one returned (a model may do something in between), and the segment is not full."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._last: Callable[[], Segment | None] = lambda: None

    def segment(self, index: int, x: Tensor, every: int) -> Segment:
        """The segment of the layer at this place, whose input is x; a new one may have so many layers."""
        found = self._last() if index > 0 else None
        if found is None or not found.continues_with(x):
            found = Segment(every)
        if index == self.layers - 1:
            found.every = 0  # none follows
        self._last = weakref.ref(found)  # it lives as long as the graph
        return found


class LayerRunner:
    """Runs one decoder layer in the place of its own `forward`.

    Args:
        chain: the same for all layers of the model.
        index: the layer's place.
    """

    always = False
    """Whether it also runs the layer where no gradients are recorded."""
    run: Callable[[Tensor, Shared, list[Any], list[Tensor]], Any]
    """Gives what `Shared.run` does, for the layer's input x [B, L, E] and its further arguments as `apart` takes them
    apart."""

    def __init__(self, handle: Handle, chain: Chain, layer: nn.Module, index: int) -> None:
        self.handle, self.chain, self.layer, self.index = handle, chain, layer, index
        self.original = layer.forward
        self.unread = Unread(layer)
        self.looked = not self.unread.mlps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() or self.always):
            return self.original(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        shared, leaves, tensors, mappings = apart(args, kwargs)
        return shared.leave(mappings, self.run(x, shared, leaves, tensors))


class Whole(LayerRunner):
    """Runs a layer on all tokens as a checkpoint."""

    def run(self, x: Tensor, shared: Shared, leaves: list[Any], tensors: list[Tensor]) -> Any:
        handle, plan, state = self.handle, self.handle.plan, self.handle.running
        if self.index == 0 and state.blocks is None:
            plan.whole(tokens_first(x, handle.facts))
        saved, weights = Saved(keep=plan.keeps_attention(self.index)), trained(self.layer)
        state = replace(state, saved=saved, drew=set(), followers=self.unread.followers)

        def run(x: Tensor, tensors: list[Tensor], leaves: list[Any]) -> Any:
            graph = saved.stage == "graph"
            if graph and self.index == 0:
                plan.headroom.look(x.device)
            try:
                with handle.entered(replace(state, skip=self.unread.holds and graph)):
                    once = self.look if saved.stage == "first" and not self.looked else self.original
                    call = functools.partial(shared.run, functools.partial(once, x), leaves, tensors)
                    return run_whole(self.layer, x, call) if saved.stage == "again" else call()
            finally:
                for mlp, follower in self.unread.followers.items():
                    follower.expected = None
                    follower.gather_with(mlp)

        # an engine that takes gradients one by one, or (ZeRO-3, FSDP2) puts weights in place for the time of a call
        taken = any(p._post_accumulate_grad_hooks or hasattr(p, "ds_id") for p in weights)
        taken |= any(hasattr(m, "unshard") for m in self.layer.modules())
        return checkpoint(
            run, x, tensors, leaves, store=handle.store, saved=saved, accept=self.unread.accept,
            segment=self.chain.segment(self.index, x, plan.inputs_kept_every), module=self.layer,
            weights=None if taken else weights,
        )  # fmt: skip

    def look(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and find out what follows its MLPs."""
        returned: list[Any] = []
        with find_followers(self.layer, self.unread.mlps, returned) as found:
            out = self.original(x, *args, **kwargs)
            returned.append(out)
        self.looked = True
        for mlp, module in found.items():
            self.unread.followers[mlp] = Follower(module)
            self.handle.set_forward(module, self.unread.followers[mlp].forward)
        return out


class Chunked(LayerRunner):
    """Runs a layer in chunks. To ZeRO-3 it is a leaf: gathered once a pass, not once a chunk."""

    always = True

    def __init__(self, handle: Handle, chain: Chain, layer: nn.Module, index: int) -> None:
        super().__init__(handle, chain, layer, index)
        self.tokenwise = is_tokenwise(layer)
        handle.edits.hook(layer, layer.register_forward_pre_hook(_ensure_input_grad, with_kwargs=True))
        handle.edits.set(layer, "_z3_leaf", True)

    def run(self, x: Tensor, shared: Shared, leaves: list[Any], tensors: list[Tensor]) -> Any:
        handle, plan, state = self.handle, self.handle.plan, self.handle.running
        if state.travels:
            x = x.cpu()  # the embeddings of a caller may come from a device
        x = tokens_first(x, facts := handle.facts)
        if self.index == 0:
            plan.chunked(x, state.inputs.device, state.travels, train=torch.is_grad_enabled())
        state = replace(state, drew=set(), whole=True)
        cuts = [_token_dimension(t, x.shape[1], self.layer) for t in leaves]
        trained = {i: t for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad}
        for i in trained:  # held by autograd below
            leaves[i] = cuts[i] = None
        nothing: list[Any] = []  # what the layer returns beside its output: None, or nothing

        def run(part: Tensor, piece: LayerChunk, *beside: Tensor) -> Tensor:
            mine = [t if at is None else t[(slice(None),) * at + (piece.tokens,)] for t, at in zip(leaves, cuts)]
            if state.travels:  # what is made for all layers may lie on the host too
                mine = [t.to(part.device, non_blocking=True) if isinstance(t, Tensor) else t for t in mine]
            for i, t in zip(trained, beside):
                mine[i] = t
            again = piece.graph
            if again and self.index == 0:
                plan.headroom.look(part.device)
            with handle.entered(replace(state, part=piece, skip=self.unread.holds and again)):
                layer = functools.partial(self.original, as_given(part, facts))
                out, *more = shared.run(layer, mine, [t.transpose(1, 2) for t in beside[len(trained) :]])
            nothing[:] = more[: len(more) - shared.left]
            if any(one is not None for one in nothing):
                raise ValueError(f"{layer_name(self.index, self.layer)} {RETURNS_MORE}")
            piece.left = [t.transpose(1, 2) for t in more[len(nothing) :]]
            return tokens_first(out, facts)

        assert handle.chunk is not None
        stream = Stream(
            run=run, chunk=handle.chunk, ranks=handle.ctx.sp, store=handle.store,
            keep=plan.keeps_attention(self.index), accept=self.unread.accept, module=self.layer,
            device=state.inputs.device, travels=state.travels, kv_on_host=plan.kv_on_host,
            tokenwise=self.tokenwise, whole=run_whole, choices=handle.page_chooser(),
        )  # fmt: skip
        beside = [*trained.values(), *(t.transpose(1, 2) for t in tensors)]
        out, *left = stream(x, self.chain.segment(self.index, x, plan.inputs_kept_every), beside)
        return as_given(out, facts), *nothing, *(t.transpose(1, 2) for t in left)


RETURNS_MORE = "returns more than its output, so it cannot run in chunks; use chunk=None"
CACHES = {"past_key_values", "past_key_value", "layer_past", "cache_params"}
"""What layers call a cache. One that takes none may need all tokens at once."""


def _check_chunks(facts: Facts) -> None:
    """Refuse a model whose layers cannot run in chunks (ValueError)."""
    for i, call in enumerate(facts.calls):
        where, tokens = layer_name(i, call.layer), call.hidden.shape[facts.tokens_at]
        if not CACHES & set(inspect.signature(call.layer.forward).parameters):
            raise ValueError(f"{where} takes no cache, so it cannot run in chunks; use chunk=None")
        others = tree_flatten(call.others)[0]
        for value in others:
            _token_dimension(value, tokens, call.layer)
        for t in tree_flatten([dict(mapping) for mapping in others if is_shared(mapping)])[0]:
            if t.ndim != 4 or t.shape[2] != tokens:
                raise ValueError(f"{where} shares a tensor {list(t.shape)} that is no keys or values; use chunk=None")
        if call.more:
            raise ValueError(f"{where} {RETURNS_MORE}")
        if why := why_whole(i, call.layer, len(call.attention)):
            raise ValueError(f"{why}, so it cannot run in chunks; use chunk=None")


def tokens_first(x: Tensor, facts: Facts) -> Tensor:
    """A layer's hidden states with their tokens in dimension 1: [A, B, L, E], where it has A of each token, becomes
    [B, L, A, E]; [B, L, E] stays."""
    return x if facts.tokens_at == 1 else x.movedim(0, facts.tokens_at)


def as_given(x: Tensor, facts: Facts) -> Tensor:
    """Hidden states as a layer gets and returns them, of [B, L, ..., E]."""
    return x if facts.tokens_at == 1 else x.movedim(facts.tokens_at, 0)


def _ensure_input_grad(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (with_gradient(args[0], layer), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": with_gradient(kwargs["hidden_states"], layer)}


def _token_dimension(value: Any, tokens: int, layer: nn.Module) -> int | None:
    """The dimension of a layer's further argument that goes with its tokens; None for none.

    Raises:
        ValueError: an argument that a chunk cannot be cut out of.
    """
    if not isinstance(value, Tensor) or (value.ndim == 0 and not value.requires_grad):
        return None
    if value.requires_grad and value.ndim < 2:
        raise ValueError(
            f"{type(layer).__name__} takes an input {list(value.shape)} with a gradient, which has no dimension of "
            "tokens to be cut into chunks; use chunk=None"
        )
    at = 0 if value.ndim == 1 else 1
    if value.ndim == 3 and value.shape[2] == tokens != value.shape[1] and not value.is_floating_point():
        return 2  # positions of several dimensions, [3, B, L]
    if value.shape[at] != tokens and (value.requires_grad or tokens in value.shape or (at == 1 and value.shape[1] > 1)):
        raise ValueError(
            f"{type(layer).__name__} takes an input {list(value.shape)} that cannot be cut into chunks; use chunk=None"
        )
    return at if value.shape[at] == tokens else None


def run_whole(layer: Any, x: Tensor, run: Callable[[], Any]) -> Any:
    """What `run` makes of a layer and its input x in another layer's backward, when engines have put its weights away.

    FSDP2 has functions that put them together. ZeRO-3 gathers those of a leaf in the hooks of a call, and others when
    the layer's submodules are called.
    """
    if hasattr(layer, "unshard") and hasattr(layer, "reshard"):
        layer.unshard()
        try:
            return run()
        finally:
            layer.reshard()
    if not getattr(layer, "_z3_leaf", False) or not any(hasattr(p, "ds_id") for p in layer.parameters()):
        return run()
    # DeepSpeed also counts calls, to know when their backward has ended: this one has none
    own = layer.__dict__
    before = {
        name: own[name] for name in ("forward", "ds_grads_remaining", "applied_pre_backward_ref_cnt") if name in own
    }
    own["forward"] = lambda _: run()
    try:
        return layer(x)
    finally:
        own.update(before)
