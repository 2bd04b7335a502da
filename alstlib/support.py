"""What can be run exactly, and what is refused: silence is the one wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alstlib.alltoall import check_heads
from alstlib.groups import SPContext
from alstlib.kernels import choose_backend


def check_model(model: PreTrainedModel, ctx: SPContext, attention: str) -> Sequence[nn.Module]:
    """Refuse, before anything is attached, what cannot be run exactly; returns the decoder layers.

    Raises:
        ValueError: names the model, layer or field of its config, and what would work.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = "; give model.get_base_model(), and call either" if hasattr(model, "get_base_model") else ""
        raise ValueError(f"apply needs a transformers model before any wrapping, got {name}{hint}")
    config = model.config.get_text_config()
    if str(model.config._attn_implementation).startswith("alst_"):
        raise ValueError(f"{name} is attached already; call its handle's detach() first")
    if config.is_encoder_decoder or not getattr(config, "is_causal", True) or model.get_output_embeddings() is None:
        raise ValueError(f"{name} is not a decoder-only causal language model with a head")
    if not model._supports_attention_backend:
        raise ValueError(f"{name} computes attention by itself, not through transformers' AttentionInterface")
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(f"{name} mixes tokens by {', '.join(other)}, which is not exact on a sharded sequence")
    if not layers:
        raise ValueError(f"{name} has no decoder layers that transformers can checkpoint")
    for i, layer in enumerate(layers):
        if not any("attention" in type(m).__name__.lower() for m in layer.modules()):
            raise ValueError(f"layer {i} of {name} ({type(layer).__name__}) has no attention module")
        if any(n.endswith("sinks") for n, _ in layer.named_parameters()):
            raise ValueError(f"layer {i} of {name} has attention sinks, which are not supported yet")
    for field in ("attn_logit_softcapping", "attention_dropout", "attn_pdrop"):
        if getattr(config, field, None):
            raise ValueError(
                f"config.{field}={getattr(config, field)} is not supported in attention; set it to 0 or None"
            )
    widths = getattr(config, "qk_rope_head_dim", None), getattr(config, "v_head_dim", None)
    if None not in widths:
        raise ValueError(f"{name} has keys and values of different widths (MLA), which is not supported yet")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "config.output_router_logits=True: the router's auxiliary loss is not supported yet; use False"
        )
    heads = config.num_attention_heads
    check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, ctx.sp, name)
    parameter = next(model.parameters())
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    choose_backend(attention, parameter.device, parameter.dtype, width)
    return layers


def check_attention(module: nn.Module, length: int, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what only a call shows: `kwargs` is what the layer hands to its attention beside q, k and v."""
    where = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if mask is not None:
        raise ValueError(f"{where} got an attention mask; give position_ids and cu_documents (SPDataLoader does)")
    if dropout:
        raise ValueError(f"{where} has attention dropout {dropout}, which tiles cannot replay; set it to 0")
    window = kwargs.get("sliding_window")
    if window is not None and window < length:
        raise ValueError(
            f"{where} has a sliding window of {window}, shorter than the sequence of {length}, which is not supported "
            f"yet; use at most {window} tokens or config.sliding_window=None"
        )
    for field in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(field) is not None:
            raise ValueError(f"{where} uses {field} in attention, which is not supported yet")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{where} is not causal")
