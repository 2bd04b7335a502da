"""Decide what can be run exactly. Everything else is refused with a reason, and never run silently."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alstlib.base.mesh import ATTACHED
from alstlib.base.sizing import heads_of
from alstlib.hf.by_position import CHUNKED, attention_chunk, scales_by_position
from alstlib.hf.dry_run import MASK_WITH_WINDOW, ROWS, Keys, LayerCall, dry_run
from alstlib.hf.indexed import INDEXED, WHY_WHOLE, AnyMask, has_indexer
from alstlib.kernels.backends import choose_backend, of_user
from alstlib.linear.adapter import plain_forward
from alstlib.linear.adapters import KINDS, is_tokenwise, mixers_of
from alstlib.tiled.logits import LogitTransform


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What `apply` needs to know of a model that can be run exactly."""

    layers: Sequence[nn.Module]
    """Its decoder layers, in order."""
    calls: Sequence[LayerCall]
    """Calls of these layers in a dry run."""
    transform: LogitTransform | None
    """What the model does to the logits after its head; None where that is not known."""
    output: Keys
    """Heads of the layer with the widest attention output."""
    most: Keys
    """Heads of the layer that keeps the most keys and values by their width."""
    tokens_at: int = 1
    """The dimension of a layer's hidden states that goes with its tokens."""
    offset: int = 0
    """Position of the first token, as the model numbers its tokens."""
    keys: Sequence[Keys] = ()
    """What each layer's attention keeps of a token; widths of 0 for a layer with a state."""
    not_by_blocks: str = ""
    """Why the model cannot run block by block; empty where it can."""
    by_longest: Sequence[nn.Module] = ()
    """Modules whose frequencies of rotary embeddings depend on the longest position (dynamic NTK, LongRoPE)."""
    attention_chunk: int | None = None
    """Number of tokens in which layers with chunked attention attend together; None: there are no such layers."""
    scales_by_position: Sequence[nn.Module] = ()
    """Attention modules that scale their queries by positions that they count by themselves."""
    granule: int = 1
    """Number of tokens of which chunks should be multiples, because the attention kernel is fastest then."""
    routers: Sequence[nn.Module] = ()
    """Routers of a mixture of experts, whose load-balancing loss can be had (`output_router_logits`)."""
    shared: Sequence[tuple[str, nn.Parameter]] = ()
    """Names and weights that several parts of the model use which are recomputed one by one."""

    @functools.cached_property
    def attending(self) -> list[int]:
        """Indices of the attention layers."""
        return [i for i, keys in enumerate(self.keys) if keys.widths]


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


def check_model(model: PreTrainedModel, kernel: str | Callable[..., Any]) -> Facts:
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
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention", CHUNKED}
    kinds -= INDEXED if any(has_indexer(m) for m in model.modules()) else set()
    if other := sorted(kinds - KINDS if mixers_of(model) else kinds):
        needs = next((f"; it would need {NEEDS[kind]}" for kind in other if kind in NEEDS), "")
        raise ValueError(f"{name} mixes tokens by {', '.join(other)}, which is not exact on a sharded sequence{needs}")
    candidates = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not candidates:
        raise ValueError(f"{name} has no decoder layers that transformers can checkpoint")
    try:
        calls, transform = dry_run(model, candidates)
    except Exception as e:  # whatever code of the model it was
        _check_parts(name, candidates)  # names the part
        raise ValueError(
            f"{name} computes attention by itself, not through transformers' AttentionInterface, or needs values of "
            f"weights between its layers ({type(e).__name__}: {e})"
        ) from e
    layers = list(dict.fromkeys(call.layer for call in calls))
    _check_parts(name, layers)
    _check_calls(model, calls)
    attended = [a.keys for call in calls for a in call.attention]
    offset = _offset(model, layers[0], attends=bool(attended))
    if not attended:  # no layer attends, or none came as far
        heads, kv, width = heads_of(config) if _attends(model) else (1, 1, 0)
        attended = [Keys(heads, kv, width, width)]
    output = max(attended, key=lambda keys: keys.heads * keys.value_width)
    most = replace(max(attended, key=lambda keys: keys.kv_heads * keys.widths), window=None)
    width = max(max(keys.width, keys.value_width) for keys in attended)
    capped, parameter = getattr(config, "attn_logit_softcapping", None) is not None, next(model.parameters())
    try:
        chosen = kernel if isinstance(kernel, str) else of_user(kernel)
        backend = choose_backend(chosen, parameter.device, parameter.dtype, width, capped)
    except ValueError as e:
        raise ValueError(f"layer 0 of {name} ({type(layers[0]).__name__}): {e}") from None
    calling = Counter(call.layer for call in calls for _ in call.attention)
    last, parts = {call.layer: call for call in calls}, [m for layer in layers for m in layer.modules()]
    return Facts(
        layers=layers, calls=calls, transform=transform, output=output, most=most, offset=offset,
        tokens_at=[*calls[0].hidden.shape].index(ROWS),
        keys=[_keys(last[layer], most) for layer in layers],
        not_by_blocks=next(filter(None, (why_whole(i, layer, calling[layer]) for i, layer in enumerate(layers))), ""),
        by_longest=[m for m in model.modules() if _by_longest(m)], routers=_routers(model), granule=backend.granule,
        attention_chunk=next((size for m in parts if (size := attention_chunk(m))), None),
        scales_by_position=[m for m in parts if scales_by_position(m)],
    )  # fmt: skip


def _offset(model: nn.Module, layer: nn.Module, attends: bool) -> int:
    """From which number on a model numbers its tokens.

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
    numbering: list[Any] = [m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")]
    return numbering[0].padding_idx + 1 if numbering else 0


def _keys(call: LayerCall, most: Keys) -> Keys:
    """What a layer's attention keeps, by its call in a dry run; as `most` where that did not show it."""
    if call.attention:
        return call.attention[0].keys
    return replace(most, width=0, value_width=0) if _keeps_none(call.layer) else most


def _keeps_none(layer: nn.Module) -> bool:
    """Whether a layer is known to call no attention: it has states alone, which do not grow, or mixes no tokens."""
    return is_tokenwise(layer) or (bool(mixers_of(layer)) and not _attends(layer))


def layer_name(index: int | str, layer: nn.Module) -> str:
    """A layer in messages, by its place and its class."""
    return f"layer {index} ({type(layer).__name__})"


def why_whole(index: int, layer: nn.Module, attended: int) -> str:
    """Why a layer that calls attention so often cannot run on some of the tokens; empty where it can."""
    if attended > 1:
        return f"{layer_name(index, layer)} calls attention more than once"
    return f"{layer_name(index, layer)} {WHY_WHOLE}" if any(has_indexer(m) for m in layer.modules()) else ""


def _by_longest(module: nn.Module) -> bool:
    """Whether a module makes rotary embeddings whose frequencies depend on the longest position."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(k == "longrope" or "dynamic" in k for k in kinds if isinstance(k, str))


def _check_parts(name: str, layers: Sequence[nn.Module]) -> None:
    """Refuse a layer by the modules that it is made of."""
    for i, layer in enumerate(layers):
        where = f"layer {i} of {name} ({type(layer).__name__})"
        known = {m for mixer in mixers_of(layer) for m in mixer.modules()}
        for part, m in layer.named_modules():
            if m not in known and not mixers_of(m) and _mixes_tokens(m):
                raise ValueError(
                    f"{where}: {part or 'it'} ({type(m).__name__}) mixes tokens in another way than attention and the "
                    "states that are known, which is not exact on a sharded sequence"
                )
        if not _keeps_none(layer) and not _attends(layer):
            raise ValueError(f"{where} has no attention module, and no part with a state that is known")


def _check_calls(model: PreTrainedModel, calls: Sequence[LayerCall]) -> None:
    """Refuse a model by what its layers did in a dry run."""
    for call in calls:
        silent = not call.attention and not _keeps_none(call.layer)
        if silent and (call.finished or not model._supports_attention_backend):
            name = type(model).__name__
            raise ValueError(f"{name} computes attention by itself, not through transformers' AttentionInterface")
        for a in call.attention:
            check_attention(a.module, a.mask, a.dropout, a.kwargs)


SLIDING = ("sliding_attention", "hybrid_sliding")
"""What `config.layer_types` calls layers whose attention has a window."""
_POOLED = "keys that are pooled from tokens of several ranks, and kept apart by documents"
NEEDS = {
    "compressed_sparse_attention": _POOLED, "heavily_compressed_attention": _POOLED,
    **dict.fromkeys(["qwen_sparse_attention", "indexed_attention"], f"{_POOLED}, and n-grams over borders of ranks"),
}  # fmt: skip
"""What kinds of layers would need that are refused."""
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


def check_adapter(module: nn.Module) -> None:
    """Refuse PEFT's activated LoRA (`alora_invocation_tokens`).

    Raises:
        ValueError: this module is one of its layers.
    """
    if any(type(v).__name__ == "ALoraLinearVariant" for v in (getattr(module, "lora_variant", None) or {}).values()):
        raise ValueError(
            "activated LoRA (alora_invocation_tokens) counts from the end of the tokens that a layer is called with, "
            "which may be a slice, a tile or a chunk, and is off in recomputes: use LoRA without invocation tokens"
        )


def _attends(module: nn.Module) -> bool:
    """Whether a module has attention, as far as names and code tell. Some mixers with a state are called attention."""
    return any(
        _calls_attention(m) or ("attention" in type(m).__name__.lower() and not mixers_of(m)) for m in module.modules()
    )


def _calls_attention(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention by itself, whatever its name is (LongCat's is MLA)."""
    code = getattr(plain_forward(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _mixes_tokens(module: nn.Module) -> bool:
    """Whether a module of a layer, other than attention, mixes tokens, as far as its kind tells."""
    kind = type(module).__name__.lower()
    if _calls_attention(module):
        return False
    named = any(m in kind for m in MIXERS) and not kind.endswith("norm")  # a norm has its model's name
    by_statistics = isinstance(module, nn.modules.batchnorm._NormBase)  # of the tokens of a call, while it trains
    over_tokens = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
    return named or by_statistics or over_tokens or isinstance(module, nn.RNNBase)


def check_attention(module: nn.Module, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what only a call shows: `kwargs` is what the layer hands to its attention besides q, k and v."""
    index = getattr(module, "layer_idx", None)
    where = layer_name("?" if index is None else index, module)
    if mask is not None and not isinstance(mask, AnyMask):
        raise ValueError(
            f"{where} makes an attention mask by itself, and masks of the whole sequence are not supported"
        )
    if dropout:
        raise ValueError(
            f"{where} has attention dropout {dropout}, which tiles cannot replay; set the config's attention_dropout, "
            "attn_pdrop or attention_probs_dropout_prob to 0"
        )
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{where} adds a position_bias to its scores, which would need a kernel with its gradient")
    if kwargs.get("indices") is not None and (kwargs.get("sliding_window") or kwargs.get("softcap")):
        raise ValueError(f"{where} selects keys and has a window or a soft cap too, which is not supported")
    config, told = getattr(module, "config", None), kwargs.get("sliding_window")
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    files = {sys.modules[kind.__module__] for kind in type(module).__mro__}
    makes_masks = any(hasattr(file, MASK_WITH_WINDOW) for file in files)
    if told is not None and not makes_masks:
        raise ValueError(
            f"{where} gives its attention the window {told}, but its model makes no mask with a window, so that "
            "transformers' sdpa and eager attention ignore it: set config.sliding_window to None"
        )
    if kinds:
        slides = index is not None and kinds[index] in SLIDING and told is None
    else:
        used = window is not None and getattr(config, "use_sliding_window", True)
        slides = used and makes_masks and "sliding_window" not in kwargs
    if slides:
        raise ValueError(
            f"{where} may slide by config.sliding_window={window}, but its attention does not say its window; set it "
            "to None if no layer slides"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{where} is not causal")
