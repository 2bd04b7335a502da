"""Attach to a Hugging Face model and detach from it. This module, `support` and `dry_run` know transformers' internals.

`apply` uses transformers' own registration point for attention and swaps instances of modules (head, MLPs) that keep
their parameters' names; hooks on the model carry what belongs to one call (documents, labels). Nothing global stays
patched, each model has its own registration, and `detach` takes all of it back.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alstlib.base.mesh import ATTACHED, SPContext
from alstlib.base.options import Options
from alstlib.base.recompute import begin, now, sum_dtype
from alstlib.base.units import IGNORE
from alstlib.data.agreement import Agreement
from alstlib.hf.attention import attach_attention, attach_rotary
from alstlib.hf.experts import MLPS, attach_routers, routes, tiled_kind, unknown_experts, why_untiled
from alstlib.hf.handle import Handle
from alstlib.hf.hidden_states import attach_hidden_states, outside_layers, travels
from alstlib.hf.inputs import STATE, agree, of_all_ranks, read_call
from alstlib.hf.layer_runner import attach_blocks, attach_runners
from alstlib.hf.logits import NoLogits
from alstlib.hf.pass_state import Objective, PassState
from alstlib.hf.support import check_adapter, check_model, check_shared, layer_name, shared_weights
from alstlib.hf.token_logps import OverRanks
from alstlib.hf.vision import attach_vision, give_images, image_layout
from alstlib.linear.adapters import adapter_of, attach_states, is_tokenwise
from alstlib.offload.disk_store import check_disk
from alstlib.tiled.compute import TiledMLP, TiledNorm, is_norm
from alstlib.tiled.loss import TiledHead, loss_of_logits
from alstlib.ulysses.alltoall import unstripe

log = logging.getLogger(__name__)


def apply(model: PreTrainedModel, ctx: SPContext | None = None, options: Options | None = None) -> Handle:
    """Attach sequence parallelism, tiled compute and checkpoint offload to a causal language model.

    Call it before DeepSpeed, DDP or FSDP wraps the model, on every rank with the same options. The model's parameters,
    their names, its config and what it saves stay as they are. A deep copy of an attached model is not attached.

    Args:
        model: a causal language model of transformers, whose attention goes through transformers' AttentionInterface.
        ctx: the mesh of ranks (`SPContext.create(sp)`); None is one rank.
        options: what to attach; None is `Options()`.

    Returns:
        The `Handle`. Its `notes` say what was left untiled; its `detach()` restores the model.

    Raises:
        ValueError: the model or an option cannot be run exactly; the message has the reason, and what would work.
    """
    ctx, options = ctx or SPContext(), options or Options()
    mine = {f"Options.{name}": value for name, value in vars(options).items() if name != "host_memory"}  # of each host
    mine["Options.disk"] = options.disk is not None
    if not isinstance(options.attention, str):  # an instance says its class: the address in its text is each rank's own
        mine["Options.attention"] = getattr(options.attention, "__name__", type(options.attention).__name__)
    with Agreement(ctx, "apply", mine, waits=True):
        notes = [note] if options.disk is not None and (note := check_disk(options.disk)) else []
        facts = check_model(model, options.attention)
        unknown = "" if options.experts_by_token else unknown_experts(facts.layers)
        if unknown and (ctx.sp > 1 or options.chunk is not None):
            raise ValueError(unknown)
        facts = replace(facts, not_by_blocks=facts.not_by_blocks or unknown)
    handle = Handle(model, ctx, options, facts)
    handle.images = image_layout(model)
    handle.notes += notes
    try:
        attach_attention(handle)
        attach_states(handle)
        if options.tile("mlp"):
            _attach_mlps(handle)
        if options.tile("norm") and options.chunk is None:
            _attach_norms(handle)
        if options.tile("loss"):
            _attach_head(handle)
        _look_at_modules(handle)
        if options.checkpoint or options.chunk is not None:
            attach_runners(handle)
        leaves = [m for m in model.modules() if getattr(m, "_z3_leaf", False)]
        shared = shared_weights(model, [*(facts.layers if options.checkpoint else []), *leaves])
        check_shared(shared)
        handle.facts = replace(facts, shared=shared)
        attach_blocks(handle)
        attach_rotary(handle)
        attach_hidden_states(handle)
        attach_routers(handle)
        attach_vision(handle)
        _attach_calls(handle)
        _attach_generation(handle)
    except BaseException:
        handle.detach()
        raise
    drops = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0})
    if drops and ctx.sp > 1:
        handle.notes.append(
            f"the model has {', '.join(drops)}: ranks with the same seed drop the same positions of their slices; seed "
            "each rank with seed + rank"
        )
    if lacking := -(handle.chunk or 0) % facts.granule:
        handle.notes.append(
            f"chunk={handle.chunk:,}: cuDNN's attention takes multiples of {facts.granule} tokens, such as "
            f"{(handle.chunk or 0) + lacking:,}; this one is left to a kernel of about half its speed"
        )
    for note in handle.notes:
        log.warning(note)
    handle.facts = replace(handle.facts, calls=())
    return handle


# ----- tiled MLP and head


def _attach_mlps(handle: Handle) -> None:
    tile = handle.tile("mlp")
    for i, layer in enumerate(handle.facts.layers):
        children = dict(layer.named_children())
        mlps = {*MLPS, *(["mixer"] if is_tokenwise(layer) else [])} & set(children)
        # in attention, and in a mixer with a state, there is nothing to tile
        others = [m for m in children.values() if not is_norm(m) and adapter_of(m) is None]
        if not mlps and not all(type(m).__name__.endswith("Attention") for m in others):
            handle.notes.append(f"{layer_name(i, layer)} has no MLP module: left untiled")
        for name, m in children.items() if mlps else ():
            if name not in mlps:
                why = "is not inside its MLP" if name == "experts" or hasattr(m, "experts") else ""
            elif not (why := why_untiled(m, handle.options.experts_by_token)):
                kind: Any = type(m)
                handle.swap(m, (tiled_kind(kind) if routes(m) else TiledMLP)(m, tile))
            if why:
                handle.notes.append(f"layer {i}: {name} ({type(m).__name__}) {why}: left untiled")


def _attach_norms(handle: Handle) -> None:
    tile = handle.tile("norm")
    for layer in handle.facts.layers:
        for name, norm in list(layer.named_children()):
            if is_norm(norm) and not name.startswith(("post_feedforward", "post_mlp")):
                handle.swap(norm, TiledNorm(norm, tile))


_TINY = 2.0**-40
"""The tiled head returns the loss in the place of logits, times this factor: a model then scales and caps it as it does
with logits, and of so small a number a soft cap is the identity. The loss cannot go past what the head returns: ZeRO-3
gathers the head's weight for backward in a hook on that, and without it backward meets a weight of no elements
(`test_the_head_alone_trains`)."""


def _attach_head(handle: Handle) -> None:
    head, transform = handle.model.get_output_embeddings(), handle.facts.transform
    if transform is None:
        handle.notes.append(f"{type(handle.model).__name__} transforms its logits in an unknown way: loss left untiled")
        return
    tile = handle.tile("loss")
    tiled = TiledHead(head, tile, transform)
    factor = 1.0 if transform.is_identity else _TINY

    def labels_of_call(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if (state := handle.state) is None or state.inputs.labels is None:
            return args[:1]
        asked, seen = state.objective, state.inputs.seen
        hidden = args[0] if seen is None else args[0][:, seen]
        return hidden, state.inputs.labels, asked.by_token, asked.statistics, asked.label_smoothing, asked.look

    def shrink(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out * factor if len(args) > 1 else out

    tiled.register_forward_pre_hook(labels_of_call)  # copies of the head that an adapter makes have the hooks too
    tiled.register_forward_hook(shrink)
    tiled.unshrink = 1.0 / (factor * transform.scale)
    handle.swap(head, tiled)
    for norm in [m for m in outside_layers(handle) if is_norm(m)]:
        handle.swap(norm, TiledNorm(norm, handle.tile("norm") or None))


def _look_at_modules(handle: Handle) -> None:
    """Now and at each call: switch transformers' own checkpointing off, until detach, because ours takes its place, and
    refuse adapters that cannot be run exactly.

    Raises:
        ValueError: now or at a call; also where there is no checkpointing of ours.
    """

    @torch.compiler.disable
    def look(*_: Any) -> None:
        for module in handle.model.modules():
            check_adapter(module)
            if not getattr(module, "gradient_checkpointing", False):
                continue
            if not handle.options.checkpoint and handle.model.training:
                raise ValueError(
                    "gradient_checkpointing_enable() does not work with checkpoint=False, because transformers would "
                    "recompute layers without alstlib's settings of the call; use Options(checkpoint=True), which does "
                    "the same, or gradient_checkpointing_disable()"
                )
            handle.edits.set(module, "gradient_checkpointing", False)

    look()
    handle.edits.hook(handle.model, handle.model.register_forward_pre_hook(look))


# ----- one call


def _attach_calls(handle: Handle) -> None:
    """Hooks of the model begin and end the pass of each call."""
    model = handle.model

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handle.plain:
            return None
        if torch.is_grad_enabled():
            check_shared(handle.facts.shared)
        state = kwargs.pop(STATE, None)
        if args:
            kwargs["input_ids"] = args[0]
        if state is None:
            with agree(handle, "a call of the model", {}, kwargs, own_group=True) as agreement:
                if len(args) > 1:
                    raise ValueError("give the model's inputs by name: input_ids=..., shift_labels=...")
                state = read_call(handle, kwargs, Objective(), handle.chunk, agreement)
        if state.blocks is None:  # `block_step` has exchanged those of the whole batch
            inputs = of_all_ranks(handle, kwargs, state.inputs, handle.chunk)
            state = replace(state, inputs=inputs, travels=travels(handle, inputs, kwargs))
        give_images(handle, kwargs, state)
        begin(replace(state, outer=now()))
        return (), kwargs

    @torch.compiler.disable
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if (state := handle.state) is not None:
            begin(state.outer)
        if out is None or state is None or state.inputs.labels is None:  # no output: the call failed
            return out
        return _output(handle, state, out)

    handle.edits.hook(model, model.register_forward_pre_hook(before, with_kwargs=True))
    handle.edits.hook(model, model.register_forward_hook(after, with_kwargs=True, always_call=True))
    handle.edits.set(model, ATTACHED, weakref.ref(handle))


def _output(handle: Handle, state: PassState, out: Any) -> Any:
    """What a call with labels returns, of what the model's own forward did."""
    inputs, asked, labels, ctx = state.inputs, state.objective, state.inputs.labels, handle.ctx
    assert labels is not None
    if handle.head is not None:
        total = out.logits * handle.head.unshrink
    else:
        total = _untiled(out.logits if inputs.seen is None else out.logits[:, inputs.seen], labels, asked)
    if asked.dft:
        total = -(total * total.detach().exp()).sum()
    logits = out.logits if handle.head is None and not inputs.striped else NoLogits()
    if asked.temperature is not None:
        return type(out)(logits=_in_order(handle, state, total))
    tokens, more = (labels != IGNORE).sum(), {}
    if state.router is not None and not (state.blocks is not None and state.blocks.making):
        given = inputs.divisor if asked.router_tokens is None else asked.router_tokens
        share = tokens if given is None else torch.as_tensor(given / ctx.sp, device=total.device)
        total = state.router.add_to(total, share)
        more["aux_loss"] = state.router.value
    if asked.reduction != "sum":
        if ctx.sp > 1:  # the same on all ranks of a group: that of their whole samples, as if one rank had them
            both = OverRanks.apply(torch.stack([total.double(), tokens.double()]), ctx)
            total, tokens = both[0].to(total.dtype), both[1].detach()
        total = total / (tokens.clamp_min(1) if inputs.divisor is None else inputs.divisor)
    return type(out)(**{**out, **more, "logits": logits, "loss": total})


def _untiled(logits: Tensor, labels: Tensor, asked: Objective) -> Tensor:
    """What a tiled head returns, of logits [B, L, V]."""
    logits = logits.to(sum_dtype(logits))
    if asked.temperature not in (None, 1.0):
        logits = logits / asked.temperature
    if asked.statistics is not None:
        asked.statistics.of(logits, labels)
    if asked.look is not None:
        asked.look(logits)
    return loss_of_logits(logits, labels, asked.label_smoothing, by_token=asked.by_token is not None)


def _in_order(handle: Handle, state: PassState, logps: Tensor) -> Tensor:
    """Log-probabilities [B, L], and statistics, in the order of the tokens of this rank's slice."""
    chunk, found, ctx = handle.chunk, state.objective.statistics, handle.ctx
    if not state.inputs.striped or chunk is None:
        return logps
    for name, t in {} if found is None else vars(found).items():
        wide = t if t.is_floating_point() else t.to(torch.uint8)
        setattr(found, name, unstripe(wide, chunk, ctx).to(t.dtype))
    return unstripe(logps, chunk, ctx)


def _attach_generation(handle: Handle) -> None:
    """`generate()` inside `apply`: the model's own attention, masks and cache, while tiles stay."""
    model: Any = handle.model
    original = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if handle.plain:
            return original(*args, **kwargs)
        if not handle.generates:
            raise ValueError("generate() needs the whole sequence on one rank: call it after detach(), or with sp=1")
        with handle.as_its_own():
            return original(*args, **kwargs)

    handle.edits.set(model, "generate", generate)
