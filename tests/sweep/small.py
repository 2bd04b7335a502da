"""A small model of every type that transformers' AutoModelForCausalLM knows: the type's own config, shrunk as `alst
verify` does (`alstlib.measure.small`), with few heads. What a type needs besides is in `ALSO`."""

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from alstlib.measure.small import HEADS, WIDTHS, build, first_of_each, kinds_in_lists, named, shrunk

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SIZES = {
    **named(32, f"{WIDTHS} hidden_size_global input_embedding_size output_embedding_size"),
    **named(32, "attention_hidden_size d_inner"),
    **named(4, f"{HEADS} encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    **named(4, "swa_num_attention_heads"),
    **named(2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups"),
    **named(2, "mamba_n_groups mamba_ngroups linear_num_key_heads"), **named(4, "linear_num_value_heads n_mamba_heads"),
    **named(4, "mamba_chunk_size"), "linear_value_head_dim": 6,
    **named(1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    "tie_word_embeddings": False, "is_decoder": True, "add_cross_attention": False,
}  # fmt: skip
"""Value of a field where a config has it, besides those of `alst verify`."""
TWO_EACH = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
ONE_EACH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
CONVOLUTIONS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
WIDER = {"global_head_dim": 16}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
           "indexer_compress_ratio": 2, "ngram_vocab_size_base": 50}  # fmt: skip
ALSO = {
    "bailing_hybrid": {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"],
                       "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default",
                            "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0}},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {**TWO_EACH, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0] * 2},
    "gemma4_text": WIDER, "gemma4_unified_text": WIDER, "gemma4": {"text_config": WIDER},
    "gemma4_unified": {"text_config": WIDER},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": ONE_EACH,
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {**CONVOLUTIONS, "block_multiple_of": 8}, "lfm2_moe": CONVOLUTIONS,
    "mamba2": {"head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "minimax": {"block_size": 4},
    "nemotron_h": {"n_groups": 2, "chunk_size": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64, "n_mamba_heads": 2},
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64, "chunk_size": 4},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": INDEXER, "qwen4_exp": {"text_config": INDEXER},
}  # fmt: skip
"""What a type needs besides: further fields, or those of a config inside its own."""


def small_config(kind):
    """The config of the type with small sizes; fields that it has not are left out."""
    default = transformers.CONFIG_MAPPING[kind]()
    layers = first_of_each(kinds_in_lists(default.get_text_config()))
    return shrunk(default, layers, ALSO.get(kind), sizes=SIZES, unset=True)


def small_model(kind, dtype=torch.float32):
    """The type's small model; the states of its layers last for several tokens, so that what ranks hand on counts."""
    model = build(small_config(kind), dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-3.0, 0.5)
    return model
