"""Attach to a Hugging Face model and detach from it; with `support` and `probe`, what knows transformers' internals.

`apply` uses transformers' own registration point for attention and swaps instances of modules (head, MLPs) that keep
their parameters' names; hooks on the model carry what belongs to one call (documents, labels). Nothing global is
patched, each model has its own registration, and `detach` takes all of it back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from alstlib.around import attach_generation, attach_rotary, attach_routers, number_tokens, router_loss
from alstlib.calls import Call, take_call
from alstlib.edits import Edits
from alstlib.fields import Bytes, Count, FlagOrAuto, Text, Tile, check_checkpoints, check_fields
from alstlib.groups import ATTACHED, SPContext
from alstlib.headroom import Headroom
from alstlib.layers import attach_checkpoints, stop_own_checkpointing
from alstlib.loss import IGNORE, TiledHead
from alstlib.offload import HostStore
from alstlib.probe import find_transform
from alstlib.streams import attach_streams
from alstlib.support import Facts, check_attention, check_model, check_shared, shared_weights
from alstlib.tiled import TiledMLP, TiledNorm
from alstlib.ulysses import UlyssesAttention

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `apply` attaches. Every feature works alone and with all others."""

    attention: Text = "sdpa"
    """Core attention: `sdpa` (PyTorch's best here), `auto` (flash-attn 3 or 4 if installed, else `sdpa`), or a kernel's
    name (`backends.BACKENDS`)."""
    tiled_mlp: Tile = True
    """MLPs in sequence tiles; a number is the tile in tokens."""
    tiled_norm: Tile = True
    """Norms of decoder layers in sequence tiles: they compute in fp32, several times their input; a number is the tile
    in tokens. (Streamed layers run in chunks, and a norm of an MLP's output in the MLP's tiles.)"""
    tiled_loss: Tile = True
    """Logits and loss in sequence tiles, and the norm before them; a number is the tile of the loss in tokens."""
    checkpoint: bool = True
    """Decoder layers keep only their input and are recomputed in backward."""
    offload: Literal["none", "sync", "async"] = "none"
    """Where checkpoints wait: on the device, or on the host (copied on the compute stream or beside it)."""
    save_attention: FlagOrAuto = "auto"
    """Keep attention outputs with the checkpoints, so that attention runs forward once. `auto`: where they are
    offloaded, as many as fit the host's memory; on a GPU without offload, from the second step on, as many as fit
    beside what earlier steps needed."""
    chunk: Count | None = None
    """Stream decoder layers in chunks of so many rows of this rank, with keys and values resident; None: whole."""
    host_memory: Bytes | None = None
    """Host bytes that checkpoints of this rank may take; None: what is free at each forward. When they are short,
    attention outputs go first, then the inputs of all but every k-th layer (streamed layers need every input). All
    ranks keep what the rank keeps that can keep least."""
    liger_loss: bool = False
    """Liger's fused loss on CUDA in place of our tiles; needs the package liger-kernel. Its tiles grow with the
    sequence: at the vocabulary of Llama 3 they are five times ours at 500K tokens, and ten times at 1M."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_checkpoints(self)


class Handle:
    """What `apply` returns: the attachment to one model. Use `detach()`, or `with apply(...)`."""

    def __init__(self, model: PreTrainedModel, ctx: SPContext, options: Options, facts: Facts) -> None:
        self.model, self.ctx, self.options, self.facts = model, ctx, options, facts
        self.attention = UlyssesAttention(ctx, options.attention)
        self.store = HostStore(options.offload, budget=options.host_memory)
        self.headroom = Headroom()
        self.mlps: list[TiledMLP] = []
        self.head: TiledHead | None = None
        self.notes: list[str] = []
        """What was left as it was, and why."""
        self.attention_kept: float = 0.0
        """Share of the layers whose attention output the last forward kept."""
        self.inputs_kept_every: int = 1
        """Of how many layers the last forward kept one input: more than 1 where the host has too little room."""
        self.routers: list[nn.Module] = []
        """Routers of a mixture of experts, whose load-balancing loss can be had (`output_router_logits`)."""
        self._call: Call | None = None
        self._shared: list[tuple[str, nn.Parameter]] = []
        self._plain = False
        """Does the model run as its own, in generate() or after detach()?"""
        self._segment: Any = lambda: None
        self.edits = Edits()
        self._unregister: Any = lambda: None

    def detach(self) -> PreTrainedModel:
        """Restore the model exactly; unwrap it from engines first. Safe to call twice."""
        self._plain = True
        self.edits.close()
        self._unregister()
        self.store.trim()
        return self.model

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank's attention has sent to other ranks."""
        return self.attention.exchange.bytes_sent

    @contextlib.contextmanager
    def _using(self, call: Call | None) -> Iterator[None]:
        if self._plain:
            name = type(self.model).__name__
            raise ValueError(f"backward of a graph that {name} made before detach(): call backward before detach()")
        before, self._call = self._call, call
        try:
            yield
        finally:
            self._call = before


def apply(model: PreTrainedModel, ctx: SPContext | None = None, options: Options | None = None) -> Handle:
    """Attach sequence parallelism, tiled compute and checkpoint offload to a causal language model.

    Call it before any engine, DDP or FSDP wrapping. The model's parameters, their names, its config and its saved form
    stay as they are; a deep copy of an attached model is not attached.

    Args:
        model: a transformers causal language model whose attention goes through transformers' AttentionInterface.
        ctx: the mesh; None is one rank.
        options: what to attach; None is `Options()`.

    Raises:
        ValueError: a model or an option that cannot be run exactly, with the reason and what would work.
    """
    ctx, options = ctx or SPContext(), options or Options()
    facts = check_model(model, ctx, options.attention)
    layers, handle = facts.layers, Handle(model, ctx, options, facts)
    try:
        _attach_attention(handle)
        if options.tiled_mlp:
            _attach_mlps(handle, layers)
        if options.tiled_norm and options.chunk is None:
            _attach_norms(handle, layers)
        if options.tiled_loss:
            _attach_head(handle)
        stop_own_checkpointing(handle)
        if options.chunk is not None:
            attach_streams(handle, layers)
        elif options.checkpoint:
            attach_checkpoints(handle, layers)
        leaves = [m for m in model.modules() if getattr(m, "_z3_leaf", False)]
        handle._shared = shared_weights(model, [*(layers if options.checkpoint else []), *leaves])
        attach_rotary(handle)
        attach_routers(handle)
        _attach_calls(handle)
        attach_generation(handle)
    except BaseException:
        handle.detach()
        raise
    drops = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0})
    if drops and ctx.sp > 1:
        handle.notes.append(
            f"{', '.join(drops)}: ranks seeded alike drop the same places of their slices; seed with seed + rank"
        )
    for note in handle.notes:
        log.warning(note)
    handle.facts = replace(facts, calls=())
    return handle


# ----- attention


def _attach_attention(handle: Handle) -> None:
    name, alive = f"alst_{uuid.uuid4().hex}", weakref.ref(handle)  # weak, because the registration is global

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        handle = alive()
        if handle is None or (call := handle._call) is None:
            raise ValueError("call the model that apply() was given, not a part of it: documents and labels go with it")
        check_attention(module, attention_mask, dropout, kwargs)
        query, key, value = _one_dtype(query, key, value)
        how: dict[str, Any] = {
            "scale": scaling, "window": kwargs.get("sliding_window"), "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux"), "documents": call.documents,
        }  # fmt: skip
        if call.piece is not None:
            out = call.piece.attend(handle.attention, query, key, value, **how)
        else:
            out = handle.attention(query, key, value, saved=call.saved, release=call.release, **how)
        return out.transpose(1, 2).contiguous(), None  # as the plain kernels do: some models read it by view

    AttentionInterface.register(name, torch.compiler.disable(attend))
    handle._unregister = weakref.finalize(handle, AttentionInterface._global_mapping.pop, name, None)
    views: dict[int, PreTrainedConfig] = {}
    for module in handle.model.modules():
        configs = {n: v for n, v in module.__dict__.items() if isinstance(v, PreTrainedConfig)}
        for attribute, config in configs.items() if module is not handle.model else ():
            handle.edits.set(module, attribute, _view(handle, config, name, views))


def _view(handle: Handle, config: PreTrainedConfig, name: str, views: dict[int, PreTrainedConfig]) -> PreTrainedConfig:
    """The config as parts of the model see it: the same object in all but the attention, and so are the configs inside
    it. So the model's own config, which others read, copy and save, stays as it is."""
    if id(config) in views:
        return views[id(config)]
    kind: Any = type(config)

    def implementation(view: Any) -> str | None:
        return view._attn_implementation_internal if handle._plain else name

    fields: dict[str, Any] = {
        "__module__": kind.__module__, "__init__": kind.__init__,
        "__deepcopy__": lambda view, memo: copy.deepcopy(config, memo),
        "_attn_implementation": property(implementation, kind._attn_implementation.fset),
    }  # fmt: skip
    inside = {n: _view(handle, v, name, views) for n, v in vars(config).items() if isinstance(v, PreTrainedConfig)}
    fields.update({n: property(functools.partial(lambda n, _: inside[n], n)) for n in inside})
    made: Any = object.__new__(type(kind.__name__, (kind,), fields))
    made.__dict__ = config.__dict__
    views[id(config)] = made
    return made


def _one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values in autocast's precision, as PyTorch's own attention takes them; else in the values'."""
    kind, dtype = tensors[0].device.type, tensors[-1].dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) for t in tensors]


# ----- tiled MLP and head


def _swap(handle: Handle, old: nn.Module, new: nn.Module) -> None:
    """Put `new` where `old` is, everywhere in the model, until detach; torch.compile leaves it as it is."""
    handle.edits.set(new, "forward", torch.compiler.disable(new.forward))
    for parent in list(handle.model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                handle.edits.swap(parent, name, new)


def _attach_mlps(handle: Handle, layers: Sequence[nn.Module]) -> None:
    tile = None if handle.options.tiled_mlp is True else int(handle.options.tiled_mlp)
    for i, layer in enumerate(layers):
        found = [(n, m) for n, m in layer.named_children() if n in ("mlp", "feed_forward", "ffn")]
        if not found:
            handle.notes.append(f"layer {i} ({type(layer).__name__}) has no MLP module: left untiled")
            continue
        for name, mlp in found:
            if any(hasattr(mlp, a) for a in ("experts", "router", "gate")) and not hasattr(mlp, "down_proj"):
                handle.notes.append(f"layer {i}: {name} ({type(mlp).__name__}) routes to experts: left untiled")
                continue
            tiled = TiledMLP(mlp, tile)
            _swap(handle, mlp, tiled)
            handle.mlps.append(tiled)


def _attach_norms(handle: Handle, layers: Sequence[nn.Module]) -> None:
    tile = None if handle.options.tiled_norm is True else int(handle.options.tiled_norm)
    for layer in layers:
        for name, norm in list(layer.named_children()):
            if _is_norm(norm) and not name.startswith(("post_feedforward", "post_mlp")):
                _swap(handle, norm, TiledNorm(norm, tile))


def _is_norm(module: nn.Module) -> bool:
    """Of the names that norms over the width have, token by token."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


_TINY = 2.0**-40
"""Loss handed through a model's own transformation of its logits: so small that a soft cap is the identity on it."""


def _attach_head(handle: Handle) -> None:
    head = handle.model.get_output_embeddings()
    transform = find_transform(handle.model)
    if transform is None:
        handle.notes.append(f"{type(handle.model).__name__} transforms its logits in an unknown way: loss left untiled")
        return
    tile = None if handle.options.tiled_loss is True else int(handle.options.tiled_loss)
    handle.head = TiledHead(head, tile, transform, handle.options.liger_loss)
    factor = 1.0 if transform.is_identity else _TINY

    def labels_of_call(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        labels = handle._call.shift_labels if handle._call is not None else None
        return (args[0], labels)

    def shrink(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out * factor if factor != 1.0 and out.ndim == 0 else out

    handle.head.register_forward_pre_hook(labels_of_call)
    handle.head.register_forward_hook(shrink)
    handle.head.unshrink = 1.0 / (factor * transform.scale)
    _swap(handle, head, handle.head)
    for norm in handle.model.base_model.children():
        if _is_norm(norm):
            _swap(handle, norm, TiledNorm(norm))


# ----- one call


def _attach_calls(handle: Handle) -> None:
    model = handle.model

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handle._plain:
            return None
        if torch.is_grad_enabled():
            check_shared(handle._shared)
        call = take_call(args, kwargs, handle.ctx, handle.options.chunk)
        number_tokens(handle, call, args, kwargs)
        call.router = router_loss(handle, call, kwargs)
        handle._call = call
        return () if call.striped else args, kwargs

    @torch.compiler.disable
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        call, handle._call = handle._call, None
        if out is None or call is None or call.shift_labels is None:  # no output: the call failed
            return out
        labels = call.shift_labels
        if handle.head is not None:
            total, logits = out.logits * handle.head.unshrink, None
        else:
            logits = None if call.striped else out.logits
            wide = torch.promote_types(out.logits.dtype, torch.float32)
            total = nn.functional.cross_entropy(
                out.logits.to(wide).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE
            )
        tokens = (labels != IGNORE).sum()
        more = {}
        if call.router is not None:
            total = call.router.add_to(total, tokens)
            more["aux_loss"] = call.router.value
        divisor = tokens.clamp_min(1) if call.divisor is None else call.divisor
        return type(out)(**{**out, **more, "logits": logits, "loss": total / divisor})

    handle.edits.hook(model, model.register_forward_pre_hook(before, with_kwargs=True))
    handle.edits.hook(model, model.register_forward_hook(after, with_kwargs=True, always_call=True))
    handle.edits.set(model, ATTACHED, weakref.ref(handle))
