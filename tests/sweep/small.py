"""A small model of every type that transformers' AutoModelForCausalLM knows: the type's own config, with small values
for the fields that are sizes, found by their names. What a type needs besides is in `ALSO`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 96
WINDOW = 7
"""Shorter than the samples, so that it hides keys."""


def _named(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, Any] = {
    **_named(VOCAB, "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    **_named(32, "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim embedding_dim lru_width"),
    **_named(32, "hidden_size_global input_embedding_size output_embedding_size attention_hidden_size d_inner"),
    **_named(48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff ffn_hidden_size d_ff"),
    **_named(48, "feed_forward_size intermediate_size_mlp dense_intermediate_size mlp_dim"),
    **_named(24, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    **_named(24, "expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_intermediate_size"),
    **_named(2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers depth"),
    **_named(2, "num_encoder_layers"),
    **_named(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_named(4, "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads attention_heads"),
    **_named(2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups"),
    **_named(8, "head_dim attention_head_size d_head dim_head kv_channels swa_head_dim global_head_dim d_kv"),
    **_named(256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    **_named(256, "max_target_positions max_source_positions"),
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group num_expert_group"),
    **_named(1, "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace"),
    **_named(1, "cross_attn_k num_dense_layers moe_layer_start_index"),
    **_named(WINDOW, "sliding_window sliding_window_size attention_window_size local_attention window_size"),
    **_named(WINDOW, "attention_chunk_size"),
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": 12,
    "v_head_dim": 6, "o_lora_rank": 8, "o_groups": 2, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "rotary_dim": 4, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "query_pre_attn_scalar": 11,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "eod_token_id": 1, "sep_token_id": 1, "mask_token_id": 3,
    "cls_token_id": 3, "decoder_start_token_id": 0, "forced_eos_token_id": None,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "mamba_n_groups": 1, "ssm_state_size": 8, "state_size": 8, "mamba_chunk_size": 4, "mamba_d_ssm": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "mamba_dt_rank": 4, "time_step_rank": 4, "adapter_rank": 4,
    "use_cache": False, "tie_word_embeddings": False, "is_decoder": True, "add_cross_attention": False,
}  # fmt: skip
"""Value of a field where a config has it."""
DROPOUTS = ("dropout", "pdrop", "layerdrop", "jitter_noise", "drop_rate", "dropout_p")
"""Ends of the names of fields that are set to 0: what is random cannot be compared."""
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
"""Lists of what each layer is: one of each kind is kept."""
TWO_EACH = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
WIDER = {"global_head_dim": 16}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
           "indexer_compress_ratio": 2, "ngram_vocab_size_base": 50}  # fmt: skip
ALSO: dict[str, dict[str, Any]] = {
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
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "nemotron_h": {"n_groups": 1},
    "reformer": {"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
    "roc_bert": {"pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": INDEXER, "qwen4_exp": {"text_config": INDEXER},
}  # fmt: skip
"""What a type needs besides: further fields, or those of a config inside its own."""


def small_config(kind: str) -> Any:
    """The config of the type with small sizes; fields that it has not are left out."""
    return _shrunk(transformers.CONFIG_MAPPING[kind], ALSO.get(kind, {}))


def _shrunk(cls: Any, also: dict[str, Any]) -> Any:
    default = cls()
    alias = dict(cls.attribute_map)

    def known(name: str) -> bool:
        return alias.get(name, name) in vars(default)

    fields = {alias.get(name, name): value for name, value in SMALL.items() if known(name)}
    if known("qk_rope_head_dim"):  # MLA: every head has keys of its own, RoPE is that of a part of them
        fields.update(head_dim=SMALL["qk_rope_head_dim"], num_key_value_heads=SMALL["num_attention_heads"])
    for name, value in vars(default).items():
        if isinstance(value, float) and (name.endswith(DROPOUTS) or "dropout" in name):
            fields[name] = 0.0
        elif isinstance(value, transformers.PreTrainedConfig):
            fields[name] = _shrunk(type(value), also.get(name, {}))
    lists = {alias.get(name, name): getattr(default, name, None) or [] for name in KINDS if known(name)}
    if kinds := {name: list(dict.fromkeys(given)) for name, given in lists.items() if given}:
        layers = max(2, *map(len, kinds.values()))
        fields.update({name: (each * layers)[:layers] for name, each in kinds.items()})
        fields[alias.get("num_hidden_layers", "num_hidden_layers")] = layers
    nested = {name for name, value in fields.items() if isinstance(value, transformers.PreTrainedConfig)}
    return cls(**{**fields, **{name: value for name, value in also.items() if name not in nested}})


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model whose every gradient counts (transformers' initial weights are near zero). Its own attention is the eager
    one in fp32; in fp64 PyTorch's, where the type has it: the eager one has its softmax in fp32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(small_config(kind), attn_implementation="eager")
    model.set_experts_implementation("eager")  # the others do not run in fp64
    model = model.to(dtype)
    if dtype == torch.float64 and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()
