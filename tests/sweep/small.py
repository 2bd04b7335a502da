"""A small model of every type that transformers' AutoModelForCausalLM knows: the type's own config, shrunk as `alst
verify` does (`alstlib.planner.measure.small`), with few heads. What a type needs besides is in `ALSO`."""

from pathlib import Path

import torch
import transformers
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from alstlib.planner.measure.small import HEADS, WIDTHS, build, first_of_each, kinds_in_lists, named, shrunk

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SIZES = {
    **named(32, f"{WIDTHS} hidden_size_global input_embedding_size output_embedding_size attention_hidden_size "
                "d_inner"),
    **named(4, f"{HEADS} encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
               "swa_num_attention_heads linear_num_value_heads n_mamba_heads mamba_chunk_size"),
    **named(2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups mamba_n_groups "
               "mamba_ngroups linear_num_key_heads"),
    **named(1, "first_k_dense_replace num_dense_layers moe_layer_start_index"), "linear_value_head_dim": 6,
    "tie_word_embeddings": False, "is_decoder": True, "add_cross_attention": False,
}  # fmt: skip
"""Value of a field where a config has it, besides those of `alst verify`."""
ALSO = yaml.safe_load(Path(__file__).with_name("also.yaml").read_text())
"""What a type needs besides: further fields, or those of a config inside its own."""


def small_config(kind, also=ALSO, sizes=SIZES):
    """The config of the type with small sizes; fields that it has not are left out."""
    default = transformers.CONFIG_MAPPING[kind]()
    layers = first_of_each(kinds_in_lists(default.get_text_config()))
    return shrunk(default, layers, also.get(kind), sizes=sizes, unset=True)


def small_model(kind, dtype=torch.float32):
    """The type's small model; the states of its layers last for several tokens, so that what ranks hand on counts."""
    model = build(small_config(kind), dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-3.0, 0.5)
    return model
