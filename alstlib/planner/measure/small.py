"""A small model of any architecture: random weights, few layers, and small sizes, found by the names of their fields.
What decides whether a step is exact is kept: the kinds of layers in their order, the numbers of heads, windows (shorter
than a sample), soft caps, RoPE, sinks, tied weights and routing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

LONGEST = 16
"""Tokens of the longest document of a packed sample. RoPE that depends on the length changes there: a whole sample is
longer."""


def named(value: Any, names: str) -> dict[str, Any]:
    """The same value for several fields."""
    return dict.fromkeys(names.split(), value)


LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "depth",
)  # fmt: skip
"""What configs call the number of layers."""
HEADS = "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads"
WIDTHS = "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim embedding_dim lru_width"
SIZES: dict[str, Any] = {
    **dict.fromkeys(LAYERS, 2), **yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text()),
}  # fmt: skip
"""The largest value of a field, by its name."""
VOCAB, WINDOW, HEAD_WIDTH = (SIZES[name] for name in ("vocab_size", "sliding_window", "head_dim"))
DROPOUTS = ("dropout", "pdrop", "layerdrop", "jitter_noise", "drop_rate", "dropout_p")
"""Ends of the names of fields that are set to 0: what is random cannot be compared."""


def shrunk(
    config: PreTrainedConfig, layers: int = 2, also: Mapping[str, Any] | None = None, *,
    sizes: Mapping[str, Any] | None = None, unset: bool = False,
) -> Any:  # fmt: skip
    """The config with small sizes and its first `layers` layers, without dropout and quantization.

    Args:
        also: fields that are set besides; of a config inside this one by its name.
        sizes: further sizes by name; None: those that keep the numbers of heads.
        unset: give a field that is None its size too, and a smaller one the same.
    """
    had, alias, also = vars(config), dict(config.attribute_map), also or {}
    layers = also.get("num_hidden_layers", layers)

    def value(name: str) -> Any:
        return had.get(alias.get(name, name))

    fields: dict[str, Any] = {}
    table = {**SIZES, **dict.fromkeys(LAYERS, layers), **(_widths(value) if sizes is None else sizes)}
    for name, most in table.items():
        if alias.get(name, name) in had and (unset or value(name) not in (None, False)):
            fields[alias.get(name, name)] = most if unset else _least(value(name), most)
    if "qk_rope_head_dim" in had:  # MLA: every head has keys of its own, RoPE is that of a part of them
        heads = alias.get("num_attention_heads", "num_attention_heads")
        fields.update(head_dim=SIZES["qk_rope_head_dim"], num_key_value_heads=fields.get(heads, had.get(heads)))
    depth = _depth(config)
    for name, was in had.items():
        if isinstance(was, float) and (name.endswith(DROPOUTS) or "dropout" in name):
            fields[name] = 0.0
        elif isinstance(was, PreTrainedConfig):
            inner = layers if was is config.get_text_config() else 2
            fields[name] = shrunk(was, inner, also.get(name), sizes=sizes, unset=unset)
        elif isinstance(was, list) and depth > layers and len(was) == depth:  # one for each layer
            fields[name] = [_least(v, table[name]) if name in table else v for v in was[:layers]]
    if rope := had.get("rope_parameters"):
        fields.update(_switch(str(rope), config.to_dict()))
        fields["rope_parameters"] = _rope(rope)
    nested = {name for name, made in fields.items() if isinstance(made, PreTrainedConfig)}
    fields.update({name: made for name, made in also.items() if name not in nested})
    made = type(config)(**{**_own(config), **fields})
    made._name_or_path = config._name_or_path  # where code that comes with a model is
    return made


def _depth(config: PreTrainedConfig) -> int:
    found = (getattr(config, name, None) for name in LAYERS)
    return next((n for n in found if isinstance(n, int)), 0)


def _least(was: Any, most: Any) -> Any:
    return min(was, most) if isinstance(was, int) and isinstance(most, int) else most


def _widths(value: Any) -> dict[str, Any]:
    """Widths that go with as many heads as the config has: as wide as all heads together, or wider if it is not so."""
    heads = next((h for h in map(value, HEADS.split()) if isinstance(h, int) and h > 0), 4)
    width = next((w for w in map(value, WIDTHS.split()) if isinstance(w, int)), 0)
    own = value("head_dim")
    square = not isinstance(own, int) or own * heads == width
    return named(HEAD_WIDTH * heads * (2 if square else 3) // 2, WIDTHS)


def _own(config: PreTrainedConfig) -> dict[str, Any]:
    """What this config says that its class does not say by default."""
    try:
        usual = type(config)().to_dict()
    except Exception:  # whatever code of the model it was
        usual = {}
    left_out = ("quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
    return {n: v for n, v in config.to_dict().items() if n not in left_out and (n not in usual or v != usual[n])}


def _switch(kinds: str, had: Mapping[str, Any]) -> dict[str, Any]:
    """Positions up to which RoPE is the original one, where it depends on the length of the sequence."""
    if "longrope" in kinds:
        fields = {"original_max_position_embeddings": LONGEST, "max_position_embeddings": 4 * LONGEST}
        return {name: value for name, value in fields.items() if name in had}
    return {"max_position_embeddings": LONGEST} if "dynamic" in kinds else {}


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE for heads of HEAD_WIDTH; by layer type in some models."""
    made: dict[str, Any] = {n: _rope(value) if isinstance(value, dict) else value for n, value in rope.items()}
    part = math.ceil(4 * (made.get("partial_rotary_factor") or 1)) / 4
    if "partial_rotary_factor" in made:
        made["partial_rotary_factor"] = part
    if "mrope_section" in made:
        made["mrope_section"] = [2, 1, 1]
    if made.get("rope_type") in ("longrope", "dynamic") and "original_max_position_embeddings" in made:
        made["original_max_position_embeddings"] = LONGEST
    pairs = int(HEAD_WIDTH * part) // 2
    for name in ("short_factor", "long_factor"):
        if name in made:
            made[name] = made[name][:: max(1, len(made[name]) // pairs)][:pairs]
    return made


def first_of_each(kinds: Sequence[Any]) -> int:
    """How many layers from the first on hold each kind, and at least two."""
    return max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])


def kinds_in_lists(config: PreTrainedConfig) -> list[Any]:
    """What the config's lists with one entry for each layer say of them."""
    depth = _depth(config)
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == depth]
    return list(zip(*(map(repr, one) for one in lists))) or [()] * depth


def build(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model whose every gradient counts (transformers' initial weights are near zero). Its own attention is the eager
    one in fp32; in fp64 PyTorch's, where the type has it: the eager one has its softmax in fp32."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    model.set_experts_implementation("eager")  # the others do not run in fp64
    model = model.to(dtype)
    if dtype == torch.float64 and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for p in model.parameters():
            wide = p.shape[-1] if p.ndim > 1 else 1  # scores of attention stay moderate
            p.add_(torch.randn_like(p) * 0.1 * min(1.0, math.sqrt(32 / wide)))
    return model.train()
