"""Decide what can be run exactly. Everything else is refused with a reason, and never run silently."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alstlib.hf.dry_run import DryRun, LayerCall, dry_run
from alstlib.kernels.backends import choose_backend, of_user
from alstlib.linear.adapter import plain_forward
from alstlib.linear.adapters import KINDS, is_tokenwise, mixers_of
from alstlib.mesh import ATTACHED, SPContext


@dataclass(frozen=True)
class Keys:
    """What one layer's attention keeps of a token: key/value heads (of so many query heads), the width of a key and a
    value together, and how many keys a row sees (None: all)."""

    heads: int
    kv_heads: int
    widths: int
    window: int | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What `apply` needs to know of a model that can be run exactly."""

    layers: Sequence[nn.Module]
    """Its decoder layers, in order."""
    calls: Sequence[LayerCall]
    """How they were called in a dry run, as far as it came."""
    heads: int
    """Query heads of the layer with the widest attention output."""
    value_width: int
    """Width of the value of one of these heads."""
    kv_heads: int = 0
    kv_widths: int = 0
    """Key/value heads of the layer that has the most of them by width, and the width of a key and a value together."""
    offset: int = 0
    """The model numbers its tokens from here."""
    uncounted: int | None = None
    """A token that the model does not count when it numbers its tokens."""

    attending: Sequence[int] = ()
    """Places of the layers that attend, or whose dry run did not show that they do not."""
    keys: Sequence[Keys] = ()
    """What each layer's attention keeps of a token; widths of 0 for a layer with a state."""
    not_by_blocks: str = ""
    """Why the model cannot run block by block; empty where it can."""
    by_longest: bool = False
    """Whether frequencies of rotary embeddings depend on the longest position (dynamic NTK, LongRoPE)."""
    routers: Sequence[nn.Module] = ()
    """Routers of a mixture of experts, whose load-balancing loss can be had (`output_router_logits`)."""
    shared: Sequence[tuple[str, nn.Parameter]] = ()
    """Names and weights that several parts of the model use which are recomputed one by one."""


def _routers(model: nn.Module) -> list[nn.Module]:
    """The modules whose logits transformers records as `router_logits`, those with (logits, scores, ...) or logits
    alone as output, of a model that makes the loss that is made here."""
    if not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        return []
    recorders: list[Any] = []
    for m in model.modules():
        found = (getattr(m, "_can_record_outputs", None) or {}).get("router_logits")
        recorders += found if isinstance(found, list | tuple) else [found] if found is not None else []
    kinds = {(r.target_class, f".{r.layer_name or ''}.") for r in recorders if getattr(r, "index", None) == 0}
    named = [(f".{name}..", m) for name, m in model.named_modules()]
    return [m for name, m in named if any(isinstance(m, kind) and part in name for kind, part in kinds)]


NO_HEADS = (1, 0, 0, 1)
"""Heads, widths of keys and of values, and key/value heads of a model without attention."""


def check_model(model: PreTrainedModel, ctx: SPContext, attention: str | Callable[..., Any]) -> Facts:
    """Refuse, before anything is attached, what cannot be run exactly.

    Raises:
        ValueError: names the model, layer or field of its config, and what would work.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = "; give model.get_base_model()" if hasattr(model, "get_base_model") else ""
        raise ValueError(f"apply needs a transformers model that nothing wraps yet, but got {name}{hint}")
    config = model.config.get_text_config()
    if ATTACHED in model.__dict__:
        raise ValueError(f"{name} is attached already; call detach() of its handle first")
    if config.is_encoder_decoder or not getattr(config, "is_causal", True) or model.get_output_embeddings() is None:
        raise ValueError(f"{name} is not a decoder-only causal language model with a head")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    by_kind = f"{name} mixes tokens by {{}}, which is not exact on a sharded sequence"
    if other := sorted(kinds - KINDS):
        raise ValueError(by_kind.format(", ".join(other)))
    candidates = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not candidates:
        raise ValueError(f"{name} has no decoder layers that transformers can checkpoint")
    if kinds and not mixers_of(model):
        _check_parts(name, candidates, config)  # names the part
        raise ValueError(by_kind.format(", ".join(sorted(kinds))))
    run = dry_run(model, candidates)
    layers = run.layers if run.finished else candidates
    _check_parts(name, layers, config)
    _check_calls(model, run)
    offset, uncounted = _positions(model, layers[0], attends=bool(run.attention))
    attended = [(a.heads, a.width, a.value_width, a.kv_heads) for a in run.attention]
    if not attended:  # the dry run ended early, or no layer attends
        some = _attends(model)
        attended = [(config.num_attention_heads, *[_head_width(config)] * 2, heads_of(config)[1]) if some else NO_HEADS]
    heads, _, value_width, _ = max(attended, key=lambda sizes: sizes[0] * sizes[2])
    width = max(max(sizes[1:3]) for sizes in attended)
    kv_heads, kv_widths = max(((kv, k + v) for _, k, v, kv in attended), key=lambda sizes: sizes[0] * sizes[1])
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    parameter = next(model.parameters())
    try:
        kernel = attention if isinstance(attention, str) else of_user(attention)
        choose_backend(kernel, parameter.device, parameter.dtype, width, capped)
    except ValueError as e:
        raise ValueError(f"layer 0 of {name} ({type(layers[0]).__name__}): {e}") from None
    without = {call.layer for call in run.calls if call.finished and not call.attention}
    calls = {call.layer: call for call in run.calls}
    widest = Keys(heads, kv_heads, kv_widths, None)
    return Facts(
        layers=layers, calls=run.calls, heads=heads, value_width=value_width, kv_heads=kv_heads, kv_widths=kv_widths,
        offset=offset, uncounted=uncounted,
        attending=[i for i, layer in enumerate(layers) if layer not in without],
        keys=[_keys(layer, calls.get(layer), widest) for layer in layers], not_by_blocks=_not_by_blocks(layers, run),
        by_longest=any(by_longest(m) for m in model.modules()), routers=_routers(model),
    )  # fmt: skip


def _positions(model: nn.Module, layer: nn.Module, attends: bool) -> tuple[int, int | None]:
    """How a model numbers its tokens: from which number on, and which token it does not count.

    RoBERTa and its kin begin after their padding token, in a function that has the same name in all of them. (Equal to
    what forwards with other positions and tokens show, in all types of transformers 5.17 and 5.23 that attend.)

    Raises:
        ValueError: no part of the model around this layer takes position_ids.
    """
    around = [m for m in model.modules() if m is not layer and any(layer is inside for inside in m.modules())]
    if attends and not any("position_ids" in inspect.signature(m.forward).parameters for m in around):
        raise ValueError(
            f"{type(model).__name__} numbers its tokens by itself, without position_ids: every slice would begin at 0"
        )
    for m in model.modules():
        if hasattr(m, "create_position_ids_from_input_ids"):
            padding: Any = m.padding_idx
            return padding + 1, padding
    return 0, None


def _keys(layer: nn.Module, call: LayerCall | None, widest: Keys) -> Keys:
    """What a layer's attention keeps, by its call in a dry run; `widest` where that did not show it."""
    if call is not None and call.attention:
        seen = call.attention[0]
        return Keys(seen.heads, seen.kv_heads, seen.width + seen.value_width, seen.kwargs.get("sliding_window"))
    stateful = bool(mixers_of(layer)) or is_tokenwise(layer)  # what it hands on does not grow with the sequence
    return replace(widest, widths=0) if stateful else widest


def _not_by_blocks(layers: Sequence[nn.Module], run: DryRun) -> str:
    """Why a layer cannot run on some of the rows, by its calls in a dry run; empty where all can."""
    attended = Counter(call.layer for call in run.calls for _ in call.attention)
    reads = {call.layer for call in run.calls if call.attention and call.reads}
    for i, layer in enumerate(layers):
        if attended[layer] > 1:
            return f"layer {i} ({type(layer).__name__}) calls attention more than once"
        if layer in reads:
            return f"layer {i} ({type(layer).__name__}) reads what other layers have left for it"
    return ""


def by_longest(module: nn.Module) -> bool:
    """Whether a module makes rotary embeddings whose frequencies depend on the longest position."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(k == "longrope" or "dynamic" in k for k in kinds if isinstance(k, str))


def _check_parts(name: str, layers: Sequence[nn.Module], config: Any) -> None:
    """Refuse a layer by the modules that it is made of."""
    for i, layer in enumerate(layers):
        where = f"layer {i} of {name} ({type(layer).__name__})"
        mixers = mixers_of(layer)
        known = {m for mixer in mixers for m in mixer.modules()}
        for part, m in layer.named_modules():
            if m not in known and not mixers_of(m) and (why := _mixes_tokens(m)):
                which = f"{where}: {part} ({type(m).__name__})" if part else where
                raise ValueError(f"{which} {why}, which is not exact on a sharded sequence")
        if not mixers and not _attends(layer) and not is_tokenwise(layer):
            raise ValueError(f"{where} has no attention module, and no part with a state that is known")
        crosses = any("crossattention" in n for n, _ in layer.named_modules())
        if crosses or getattr(config, "add_cross_attention", False):
            raise ValueError(f"{where} has cross-attention; only decoders that attend to themselves are supported")


def _check_calls(model: PreTrainedModel, run: DryRun) -> None:
    """Refuse a model by what its layers did in a dry run."""
    name, config = type(model).__name__, model.config.get_text_config()
    silent = [call for call in run.calls if not (call.attention or mixers_of(call.layer) or is_tokenwise(call.layer))]
    unknown = not run.finished or any(not call.finished for call in silent)
    if any(call.finished for call in silent) or (unknown and not model._supports_attention_backend):
        raise ValueError(f"{name} computes attention by itself, not through transformers' AttentionInterface")
    for a in run.attention:
        if a.mask is not None:
            raise ValueError(
                f"layer {getattr(a.module, 'layer_idx', '?')} of {name} ({type(a.module).__name__}) makes an attention "
                "mask by itself, and masks of the whole sequence are not supported"
            )
        if not a.dropout:
            check_attention(a.module, None, 0.0, a.kwargs)
    for field in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, field, None) and (unknown or any(a.dropout for a in run.attention)):
            raise ValueError(
                f"config.{field}={getattr(config, field)} is not supported in attention; set it to 0 or None"
            )
    for a in run.attention:
        check_attention(a.module, None, a.dropout, a.kwargs)


SLIDING = ("sliding_attention", "hybrid_sliding")
"""What `config.layer_types` calls layers whose attention has a window."""
MIXERS = ("mamba", "rwkv", "lstm", "deltanet", "recurrent", "shortconv", "retention", "linearattention", "lightning")
"""Names of modules, in part, that carry a state along the sequence."""


def shared_weights(model: nn.Module, parts: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """(name, weight) of the weights of these parts of the model that another part uses too."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    inside = [Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False)) for part in parts]
    return [(n, p) for n, p in model.named_parameters() if any(0 < c[id(p)] < uses[id(p)] for c in inside)]


def check_shared(shared: Iterable[tuple[str, nn.Parameter]], zero3: bool = False) -> None:
    """Refuse weights under DeepSpeed ZeRO-3 whose gradient arrives in several pieces, of which it takes one. `zero3`
    says that DeepSpeed will shard them; else those are refused that it has sharded.

    Raises:
        ValueError: names the weight, and what works.
    """
    for name, p in shared:
        if p.requires_grad and (zero3 or hasattr(p, "ds_id")):
            raise ValueError(
                f"{name} trains and is used in several parts of the model that are recomputed one by one, and ZeRO-3 "
                "keeps the gradient of one of them: use zero_stage 0 or 1, or freeze it"
            )


def _attends(module: nn.Module) -> bool:
    return any("attention" in type(m).__name__.lower() for m in module.modules())


def _mixes_tokens(module: nn.Module) -> str | None:
    """Why a module of a layer, other than attention, mixes tokens, as far as its kind tells."""
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        return f"is a convolution over {module.kernel_size[0]} tokens"
    if isinstance(module, nn.RNNBase):
        return "is recurrent"
    kind = type(module).__name__.lower()
    code = getattr(plain_forward(module), "__code__", None)
    if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:  # attention, whatever the model's name is
        return None
    named = any(m in kind for m in MIXERS) and not kind.endswith("norm")  # a norm has its model's name
    return "mixes tokens in another way than attention and the states that are known" if named else None


def check_recompute(facts: Facts) -> None:
    """Refuse layers that hand each other more than their outputs: a recompute could not give the rest a gradient."""
    for i, call in enumerate(facts.calls):
        known = call.finished or call.attention
        if any(isinstance(v, MutableMapping) for v in call.others) and (call.reads or not known):
            raise ValueError(
                f"layer {i} ({type(call.layer).__name__}) shares state with other layers (such as keys and values) in "
                "a mapping: recomputed, it would lose their gradients; use checkpoint=False and chunk=None"
            )


def heads_of(config: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and the width of a head, as a transformers config has them; zeros without any."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0, 0, 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def _head_width(config: Any) -> int:
    """The widest of a head's keys and values."""
    width = heads_of(config)[2]
    if getattr(config, "qk_nope_head_dim", None) is not None:  # MLA
        return max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return int(width)


def check_attention(module: nn.Module, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what only a call shows: `kwargs` is what the layer hands to its attention besides q, k and v."""
    index = getattr(module, "layer_idx", None)
    where = f"layer {'?' if index is None else index} ({type(module).__name__})"
    if mask is not None:
        raise ValueError(f"{where} got an attention mask; give position_ids and cu_seqlens (SPDataLoader does)")
    if dropout:
        raise ValueError(f"{where} has attention dropout {dropout}, which tiles cannot replay; set it to 0")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{where} adds a position_bias to its scores, which is not supported")
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and index is not None and kinds[index] in SLIDING and kwargs.get("sliding_window") is None:
        raise ValueError(f"{where} has a sliding window by config.layer_types, but does not tell it to its attention")
    window = getattr(config, "sliding_window", None)
    files = {sys.modules[kind.__module__] for kind in type(module).__mro__}
    makes_masks = any(hasattr(file, "create_sliding_window_causal_mask") for file in files)
    if kwargs.get("sliding_window") is not None and not makes_masks:
        raise ValueError(
            f"{where} gives its attention the window {kwargs['sliding_window']}, but its model makes no mask with a "
            "window, so that transformers' sdpa and eager attention ignore it: set config.sliding_window to None"
        )
    slides = window is not None and getattr(config, "use_sliding_window", True) and makes_masks
    if slides and not kinds and "sliding_window" not in kwargs:
        raise ValueError(
            f"{where} may slide by config.sliding_window={window}, but its attention does not say its "
            "window; set it to None if no layer slides"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{where} is not causal")
