"""The decoders that are supported: a tiny config of each, with what is particular to it switched on."""

import dataclasses

import torch
import transformers

VOCAB = 96
WINDOW = 7
"""Shorter than the samples, so that it hides keys."""
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
          "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
LAYER_TYPES = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}

MODELS = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
              "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYER_TYPES}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
              "original_max_position_embeddings": 32}}),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
                "output_router_logits": True, "router_aux_loss_coef": 0.3}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, **EXPERTS, "output_router_logits": True,
                  "router_aux_loss_coef": 0.3}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 11, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LAYER_TYPES,
               "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.4, "logits_scaling": 3.0, "residual_multiplier": 0.7,
                "embedding_multiplier": 2.0}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": WINDOW, "layer_types": LAYER_TYPES, "output_router_logits": True,
                "router_aux_loss_coef": 0.3}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5, "use_parallel_residual": True}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": True}),
    "deepseek_v3": ("DeepseekV3Config", {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
                    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4,
                    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}),
    "glm": ("GlmConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}),
}  # fmt: skip
"""transformers' config and its fields."""

MORE = {
    "llama, LongRoPE": ("LlamaConfig", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
                        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 8.0,
                        "original_max_position_embeddings": 16}}),
    "llama, dynamic NTK": ("LlamaConfig", {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic",
                           "rope_theta": 1e4, "factor": 4.0}}),
    "llama, 9 heads on 3": ("LlamaConfig", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama, 7 heads on 1": ("LlamaConfig", {"hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "gemma2, odd heads": ("Gemma2Config", {**MODELS["gemma2"][1], "hidden_size": 24, "num_attention_heads": 3,
                           "num_key_value_heads": 3}),
    "gpt_oss, odd heads": ("GptOssConfig", {**MODELS["gpt_oss"][1], "hidden_size": 24, "num_attention_heads": 6,
                           "num_key_value_heads": 2}),
}  # fmt: skip
"""Further cases of the same architectures."""

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
         "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
HYBRIDS = {
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
                   "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, **ROUTED}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS, **ROUTED, "num_experts": 4,
                    "shared_expert_intermediate_size": 24}),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**MAMBA, "layer_types": ["linear_attention", "full_attention"],
                         "num_local_experts": 0, "shared_intermediate_size": 48}),
    "granitemoehybrid, experts": ("GraniteMoeHybridConfig", {**MAMBA, **ROUTED, "num_local_experts": 4,
                                  "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"],
                                  "shared_intermediate_size": 40}),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "jamba": ("JambaConfig", {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              **ROUTED}),
    "minimax": ("MiniMaxConfig", {"layer_types": ["linear_attention", "full_attention"], "block_size": 16,
                "num_local_experts": 4, "head_dim": 8, **ROUTED}),
    "kimi_linear": ("KimiLinearConfig", {"linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4,
                    "layer_types": ["linear_attention", "full_attention"], "q_lora_rank": 12, "kv_lora_rank": 8,
                    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2}),
    "nemotron_h": ("NemotronHConfig", {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
                   "chunk_size": 16, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
                   "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
                   "moe_shared_expert_intermediate_size": 24, "num_nextn_predict_layers": 0}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"], **EXPERTS, "num_experts": 4,
                 "num_dense_layers": 1}),
}  # fmt: skip
"""Decoders with layers that carry a state."""

MORE_HYBRIDS = {
    "zamba": ("ZambaConfig", {"layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 4,
              "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16,
              "num_key_value_heads": 4}),
    "zamba2": ("Zamba2Config", {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
               "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 16,
               "num_mem_blocks": 1, "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 4,
               "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
               "tie_word_embeddings": True}),
    "mamba": ("MambaConfig", {"state_size": 4, "time_step_rank": 4}),
    "mamba2": ("Mamba2Config", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 4, "time_step_rank": 4}),
}  # fmt: skip
"""Further ones: with a mixer for each of several heads, with attention that several layers share (its weights are tied
as the embeddings are), and without any."""


def build(name, dtype=torch.float32, seed=0, **overrides):
    """A model whose every gradient counts (transformers' initial weights are near zero)."""
    kind, fields = {**MODELS, **MORE}[name]
    config = getattr(transformers, kind)(**{**COMMON, **fields, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def small(config, **fields):
    """A model of any config, as transformers initializes it."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**COMMON, **fields})
    return transformers.AutoModelForCausalLM.from_config(made).train()


def build_hybrid(name, dtype=torch.float32, **overrides):
    """A model whose every gradient counts, and whose states last."""
    kind, fields = {**HYBRIDS, **MORE_HYBRIDS}[name]
    config = getattr(transformers, kind)
    own = {f.name for f in dataclasses.fields(config)} | {*config.attribute_map}
    config = config(**{n: v for n, v in {**COMMON, **fields, **overrides}.items() if n in own or n in fields})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.uniform_(-3.0, 0.5) if n.endswith("A_log") else p.add_(torch.randn_like(p) * 0.1)
    return model.train()
