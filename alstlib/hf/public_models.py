"""Shapes of models for which a plan needs no download: small ones with random weights, and published ones."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "small": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
"""Shapes of Llama models with random weights. `small` shows every row's effect on a laptop's CPU."""


def _public(family: str, vocab: int, width: int, mlp: int, layers: int, heads: int, kv: int, **more: Any) -> Any:
    return {
        "model_type": family, "vocab_size": vocab, "hidden_size": width, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_HEAD: dict[str, Any] = {"head_dim": 128}
_GEMMA: dict[str, Any] = {"head_dim": 256, **_TIED}
_QWEN_EXPERTS: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_GPT_OSS: dict[str, Any] = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_DELTA: dict[str, Any] = {"head_dim": 256, "linear_num_key_heads": 16}


def _granite(heads: int) -> dict[str, Any]:
    """The layers of a Granite 4, of which one in ten attends."""
    kinds = ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)]
    return {
        **_TIED, "layer_types": kinds, "mamba_n_heads": heads, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1,
    }  # fmt: skip


def _nemotron(pattern: str, heads: int) -> dict[str, Any]:
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return {
        **_HEAD, "layers_block_type": [names[kind] for kind in pattern], "mamba_num_heads": heads,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    }  # fmt: skip


PUBLIC: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": _public("llama", 128_256, 4096, 14_336, 32, 32, 8),
    "meta-llama/Llama-3.1-70B": _public("llama", 128_256, 8192, 28_672, 80, 64, 8),
    "meta-llama/Llama-3.2-1B": _public("llama", 128_256, 2048, 8192, 16, 32, 8, head_dim=64, **_TIED),
    "meta-llama/Llama-3.2-3B": _public("llama", 128_256, 3072, 8192, 28, 24, 8, **_HEAD, **_TIED),
    "Qwen/Qwen3-4B": _public("qwen3", 151_936, 2560, 9728, 36, 32, 8, **_HEAD, **_TIED),
    "Qwen/Qwen3-8B": _public("qwen3", 151_936, 4096, 12_288, 36, 32, 8, **_HEAD),
    "Qwen/Qwen3-32B": _public("qwen3", 151_936, 5120, 25_600, 64, 64, 8, **_HEAD),
    "Qwen/Qwen2.5-7B": _public("qwen2", 152_064, 3584, 18_944, 28, 28, 4),
    "Qwen/Qwen2.5-32B": _public("qwen2", 152_064, 5120, 27_648, 64, 40, 8),
    "mistralai/Mistral-7B-v0.3": _public("mistral", 32_768, 4096, 14_336, 32, 32, 8, sliding_window=None),
    "mistralai/Mistral-7B-v0.1": _public("mistral", 32_000, 4096, 14_336, 32, 32, 8, sliding_window=4096),
    "mistralai/Mixtral-8x7B-v0.1": _public(
        "mixtral", 32_000, 4096, 14_336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "Qwen/Qwen3-Next-80B-A3B": _public(
        "qwen3_next", 151_936, 2048, 5120, 48, 16, 2, head_dim=256, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
    "Qwen/Qwen3.5-9B": _public(
        "qwen3_5_text", 248_320, 4096, 12_288, 32, 16, 4, **_DELTA, linear_num_value_heads=32
    ),
    "Qwen/Qwen3.5-27B": _public(
        "qwen3_5_text", 248_320, 5120, 17_408, 64, 24, 4, **_DELTA, linear_num_value_heads=48
    ),
    "Qwen/Qwen3.5-35B-A3B": _public(
        "qwen3_5_moe_text", 248_320, 2048, 512, 40, 16, 2, **_DELTA, linear_num_value_heads=32, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "ibm-ai-platform/Bamba-9B-v2": _public(
        "bamba", 128_256, 4096, 14_336, 32, 32, 8, attn_layer_indices=[9, 18, 27], mamba_n_heads=128, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1,
    ),
    "ibm-granite/granite-4.0-h-micro": _public(
        "granitemoehybrid", 100_352, 2048, 8192, 40, 32, 8, **_granite(64), num_local_experts=0,
        shared_intermediate_size=8192,
    ),
    "ibm-granite/granite-4.0-h-tiny": _public(
        "granitemoehybrid", 100_352, 1536, 512, 40, 12, 4, **_granite(48), num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024,
    ),
    "ibm-granite/granite-4.0-h-small": _public(
        "granitemoehybrid", 100_352, 4096, 768, 40, 32, 8, **_granite(128), num_local_experts=72,
        num_experts_per_tok=10, shared_intermediate_size=1536,
    ),
    "tiiuae/Falcon-H1-7B": _public(
        "falcon_h1", 130_049, 3072, 12_288, 44, 12, 2, **_HEAD, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128,
        mamba_d_state=256, mamba_n_groups=1,
    ),
    "nvidia/Nemotron-H-8B": _public(
        "nemotron_h", 131_072, 4096, 21_504, 52, 32, 8, **_nemotron("M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-", 128)
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": _public(
        "nemotron_h", 131_072, 2688, 1856, 52, 32, 2, **_nemotron("MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*EMEMEMEME", 64),
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, n_shared_experts=1,
        moe_shared_expert_intermediate_size=3712,
    ),
    "LiquidAI/LFM2-1.2B": _public(
        "lfm2", 65_536, 2048, 12_288, 16, 32, 8, **_TIED,
        layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    ),
    "Qwen/Qwen3-30B-A3B": _public("qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, **_HEAD, **_QWEN_EXPERTS),
    "Qwen/Qwen3-235B-A22B": _public(
        "qwen3_moe", 151_936, 4096, 12_288, 94, 64, 4, **_HEAD, **{**_QWEN_EXPERTS, "moe_intermediate_size": 1536}
    ),
    "openai/gpt-oss-20b": _public("gpt_oss", 201_088, 2880, 2880, 24, 64, 8, num_local_experts=32, **_GPT_OSS),
    "openai/gpt-oss-120b": _public("gpt_oss", 201_088, 2880, 2880, 36, 64, 8, num_local_experts=128, **_GPT_OSS),
    "deepseek-ai/DeepSeek-V3": _public(
        "deepseek_v3", 129_280, 7168, 18_432, 61, 128, 128, moe_intermediate_size=2048, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, n_group=8, topk_group=4,
    ),
    "google/gemma-2-9b": _public("gemma2", 256_000, 3584, 14_336, 42, 16, 8, **_GEMMA, sliding_window=4096),
    "google/gemma-2-27b": _public("gemma2", 256_000, 4608, 36_864, 46, 32, 16, **_HEAD, **_TIED, sliding_window=4096),
    "google/gemma-3-1b": _public("gemma3_text", 262_144, 1152, 6912, 26, 4, 1, **_GEMMA, sliding_window=512),
    "microsoft/phi-4": _public("phi3", 100_352, 5120, 17_920, 40, 40, 10, pad_token_id=0, sliding_window=None),
    "allenai/OLMo-2-1124-7B": _public("olmo2", 100_352, 4096, 11_008, 32, 32, 32),
    "ibm-granite/granite-3.1-8b": _public(
        "granite", 49_152, 4096, 12_800, 40, 32, 8, **_TIED, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=16.0, attention_multiplier=0.0078125,
    ),
    "HuggingFaceTB/SmolLM3-3B": _public("smollm3", 128_256, 2048, 11_008, 36, 16, 4, pad_token_id=0, **_TIED),
    "CohereLabs/aya-23-8B": _public("cohere", 256_000, 4096, 14_336, 32, 32, 8, logit_scale=0.0625, **_TIED),
    "bigcode/starcoder2-7b": _public("starcoder2", 49_152, 4608, 18_432, 32, 36, 4, sliding_window=4096, **_TIED),
    "zai-org/glm-4-9b-hf": _public(
        "glm", 151_552, 4096, 13_696, 40, 32, 2, **_HEAD, attention_bias=True, pad_token_id=0
    ),
    "EleutherAI/pythia-6.9b": _public("gpt_neox", 50_432, 4096, 16_384, 32, 32, 32, rotary_pct=0.25),
    "openai-community/gpt2-xl": _public("gpt2", 50_257, 1600, 6400, 48, 25, 25, n_positions=1024, **_TIED),
}  # fmt: skip
"""Published shapes by hub name (their variants for instructions are alike)."""

TRAINED: dict[str, int] = {
    **dict.fromkeys(("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.2-1B",
                     "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B", "openai/gpt-oss-20b",
                     "openai/gpt-oss-120b", "ibm-granite/granite-3.1-8b"), 131_072),
    **dict.fromkeys(("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B",
                     "Qwen/Qwen3-235B-A22B"), 40_960),
    **dict.fromkeys(("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1",
                     "google/gemma-3-1b"), 32_768),
    **dict.fromkeys(("google/gemma-2-9b", "google/gemma-2-27b", "CohereLabs/aya-23-8B"), 8192),
    "Qwen/Qwen3-Next-80B-A3B": 262_144, "deepseek-ai/DeepSeek-V3": 163_840, "HuggingFaceTB/SmolLM3-3B": 65_536,
    "microsoft/phi-4": 16_384, "bigcode/starcoder2-7b": 16_384, "allenai/OLMo-2-1124-7B": 4096,
    "EleutherAI/pythia-6.9b": 2048,
}  # fmt: skip
"""`max_position_embeddings` of published models, as their configs have it: a shape does not depend on it."""
