"""The attention of an attached model runs through transformers' own registration point; its rotary embeddings are
attached too."""

from __future__ import annotations

import copy
import functools
import uuid
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, PreTrainedConfig

from alstlib.hf.by_position import attention_chunk, scaled_queries
from alstlib.hf.handle import Handle
from alstlib.hf.indexed import AnyMask, has_indexer, select
from alstlib.hf.support import check_attention
from alstlib.hf.vision import tower_modules
from alstlib.ulysses.selected import selected_attention


def attach_attention(handle: Handle) -> None:
    name, alive = f"alst_{uuid.uuid4().hex}", weakref.ref(handle)  # weak, because the registration is global
    layer_of = weakref.WeakKeyDictionary(
        {m: i for i, layer in enumerate(handle.facts.layers) for m in layer.modules()}
    )  # fmt: skip
    told = weakref.WeakKeyDictionary({
        a.module: {"sliding_window": a.kwargs["sliding_window"]}
        for call in handle.facts.calls for a in call.attention if "sliding_window" in a.kwargs
    })  # fmt: skip
    scaled = weakref.WeakSet(handle.facts.scales_by_position)

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
        assert handle is not None  # hooks of the model hold it
        state = handle.running
        kwargs = {**told.get(module, {}), **kwargs}  # a window that only the model's mask has
        check_attention(module, attention_mask, dropout, kwargs)
        inputs = state.inputs
        if module in scaled:
            assert inputs.positions is not None
            tokens = slice(None) if state.part is None else state.part.tokens
            query = scaled_queries(module, query, inputs.positions[:, tokens])
        query, key, value = _one_dtype(query, key, value)
        how: dict[str, Any] = {
            "scale": scaling, "window": kwargs.get("sliding_window"), "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux"), "saved": state.saved,
            "documents": inputs.documents if attention_chunk(module) is None else inputs.chunks,
        }  # fmt: skip
        if (indices := kwargs.get("indices")) is not None:
            how = {"scale": scaling or query.shape[-1] ** -0.5, "sinks": how["sinks"], "saved": state.saved}
            out = selected_attention(query, key, value, indices, handle.attention.exchange, **how)
        elif state.part is None:
            out = handle.attention(query, key, value, **how)
        else:
            out = state.part.attend(handle.attention, query, key, value, layer=layer_of[module], **how)
        return out.transpose(1, 2).contiguous(), None  # as the plain kernels do: some models read it by view

    _leave_scales_out(handle)
    _attach_indexers(handle)
    AttentionInterface.register(name, torch.compiler.disable(attend))
    handle.ends.callback(weakref.finalize(handle, AttentionInterface._global_mapping.pop, name, None))
    views: dict[int, PreTrainedConfig] = {}
    for module in {*handle.model.modules()} - {handle.model, *tower_modules(handle.model)}:
        for attribute, config in [*vars(module).items()]:
            if isinstance(config, PreTrainedConfig):
                handle.edits.set(module, attribute, _view(handle, config, name, views))


def _leave_scales_out(handle: Handle) -> None:
    """Tell the modules that scale queries by position to leave it out."""

    def without_scale(module: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        module.attn_temperature_tuning = False
        try:
            return original(*args, **kwargs)
        finally:
            module.attn_temperature_tuning = True

    for module in handle.facts.scales_by_position:
        handle.set_forward(module, functools.partial(without_scale, module, module.forward))


def _attach_indexers(handle: Handle) -> None:
    """Let indexers select keys of the whole sequence for this rank's tokens."""

    def with_mask(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "attention_mask": AnyMask()})

    def selecting(
        indexer: Any, original: Any, hidden_states: Tensor, q_resid: Tensor, position_embeddings: Any, *_: Any,
        **__: Any,
    ) -> Tensor:  # fmt: skip
        inputs, exchange = handle.running.inputs, handle.attention.exchange
        given = hidden_states, q_resid, position_embeddings, inputs.documents, inputs.sample_tokens
        return select(indexer, original, *given, exchange)

    for module in [m for layer in handle.facts.layers for m in layer.modules() if has_indexer(m)]:
        indexer: Any = module.indexer
        handle.set_forward(module, functools.partial(with_mask, module.forward))
        handle.set_forward(indexer, functools.partial(selecting, indexer, indexer.forward))


def _view(handle: Handle, config: PreTrainedConfig, name: str, views: dict[int, PreTrainedConfig]) -> PreTrainedConfig:
    """The config as parts of the model see it: the same object in all but the attention, and so are the configs inside
    it. So the model's own config, which others read, copy and save, stays as it is."""
    if id(config) in views:
        return views[id(config)]
    kind: Any = type(config)

    def implementation(view: Any) -> str | None:
        return view._attn_implementation_internal if handle.plain else name

    fields: dict[str, Any] = {
        "__module__": kind.__module__, "__init__": kind.__init__,
        "__deepcopy__": lambda view, memo: copy.deepcopy(config, memo),
        "_attn_implementation": property(implementation, kind._attn_implementation.fset),
    }  # fmt: skip
    inside = {n: _view(handle, v, name, views) for n, v in vars(config).items() if isinstance(v, PreTrainedConfig)}
    fields.update({n: property(functools.partial(lambda one, _: one, one)) for n, one in inside.items()})
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


def attach_rotary(handle: Handle) -> None:
    """Frequencies that depend on the longest position (dynamic NTK, LongRoPE) must be the whole sequence's on every
    rank, in every tile and in every block: the largest position of the sequence (`inputs.of_all_ranks`) is added to the
    positions at hand, and what comes out for it is dropped."""

    def with_longest(original: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        longest = None if handle.state is None else handle.state.inputs.longest
        if longest is None:
            return original(x, position_ids, *args, **kwargs)
        at = torch.cat([position_ids, longest.expand(*position_ids.shape[:-1], 1)], -1)
        made = original(x, at, *args, **kwargs)
        along = 1 if position_ids.ndim == 2 else -2  # [B, L, W], or with several kinds of positions [.., B, L, W]
        # cosines and sines, or one tensor of complex numbers (Llama 4, DeepSeek-V2)
        return tree_map_only(Tensor, lambda t: t.narrow(along, 0, t.shape[along] - 1), made)

    for module in handle.facts.by_longest:
        handle.set_forward(module, functools.partial(with_longest, module.forward))
