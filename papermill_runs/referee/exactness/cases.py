"""The cases, in the order in which users meet them: a small model with random weights, data, and settings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB, LENGTH, IGNORE = 96, 40, -100
WIDTHS = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MLA = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": 12,
    "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "three heads": {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 7},
    "gpt_oss": {
        "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {
        "sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 8,
    },
    "deepseek_v3": {
        **MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    },
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
}  # fmt: skip
"""What the config of a small model has besides WIDTHS; its type is the name, unless it says another."""


EAGER = ("gpt_oss", "gemma2", "gemma3_text")
"""Types whose sinks or soft caps PyTorch's attention (`sdpa`) does not have."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    title: str
    model: str = "llama"
    """A key of MODELS; with `config`, its type."""
    config: Any = None
    """The config of the model in place of one of MODELS."""
    data: str = "even"
    """A function below that makes the samples."""
    steps: int = 3
    accumulation: int = 1
    clip: float = 0.0
    """Largest norm of the gradients; 0: none."""
    scale: float = 1.0
    """What the loss is multiplied by before backward."""
    dtype: str = "float32"
    lora: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TrainingArguments. A case that has some runs under a Trainer only."""
    evaluate: int = 0
    """Samples in a batch of the evaluation, which is of three; 0: none."""
    resume: int = 0
    """The step at which a first run is left, and a second goes on."""

    @property
    def only_under_trainer(self) -> bool:
        return bool(self.arguments) or bool(self.evaluate or self.resume)


CASES = {
    "even": Case(title="samples of one length, every token with a label"),
    "uneven": Case(title="samples of unequal lengths", data="uneven"),
    "prompts": Case(title="prompts without labels", data="prompts"),
    "accumulation": Case(title="accumulation, unequal numbers of labels", data="prompts", accumulation=2),
    "packed": Case(title="packed documents, cut by ranks", data="packed"),
    "window": Case(title="sliding window", model="mistral"),
    "evaluation": Case(title="evaluation", evaluate=1),
    "eval batch": Case(title="evaluation, 3 samples in batches of 8", evaluate=8),
    "lora": Case(title="LoRA", lora=True),
    "clipping": Case(title="clipping of gradients", clip=0.5),
    "bf16": Case(title="weights in bf16", dtype="bfloat16", steps=1),
    "sinks": Case(title="attention sinks, windows (gpt-oss)", model="gpt_oss"),
    "caps": Case(title="soft caps, windows (gemma2)", model="gemma2"),
    "experts": Case(title="experts with the loss of their router", model="qwen3_moe"),
    "mixtral": Case(title="experts with the loss of their router (mixtral)", model="mixtral"),
    "heads": Case(title="heads that ranks do not divide", model="three heads"),
    "tied": Case(title="tied embeddings", model="tied"),
    "one rank": Case(title="a sample without labels on one rank", data="first_half"),
    "no labels": Case(title="a micro-batch without labels", data="some_without", accumulation=2),
    "resume": Case(title="resume in the middle of an epoch", steps=6, resume=3),
    "smoothing": Case(title="label smoothing", arguments={"label_smoothing_factor": 0.1}),
    "mla": Case(title="latent attention (deepseek_v3)", model="deepseek_v3"),
    "hybrid": Case(title="linear and full attention (qwen3_next)", model="qwen3_next"),
    "scaled": Case(title="the loss times 4", scale=4.0),
}

Sample = dict[str, list[int]]


def even(count: int = 43, length: int = LENGTH, seed: int = 1) -> list[Sample]:
    """Every token has a label."""
    draw = random.Random(seed)
    rows = [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]
    return [{"input_ids": ids, "labels": list(ids)} for ids in rows]


def uneven(count: int = 43) -> list[Sample]:
    """Samples of 9 to 40 tokens."""
    draw = random.Random(2)
    lengths = [draw.randrange(9, LENGTH + 1) for _ in range(count)]
    return [{name: ids[:keep] for name, ids in sample.items()} for sample, keep in zip(even(count), lengths)]


def prompts(count: int = 43) -> list[Sample]:
    """The first 1 to 36 tokens have no label."""
    return [_unlabelled(sample, 0, 1 + 5 * i % 36) for i, sample in enumerate(even(count))]


def first_half(count: int = 43) -> list[Sample]:
    """The second half has no label."""
    return [_unlabelled(sample, LENGTH // 2, LENGTH) for sample in even(count)]


def some_without(count: int = 43) -> list[Sample]:
    """Every third sample has no label at all."""
    return [_unlabelled(sample, 0, LENGTH if i % 3 == 0 else 4) for i, sample in enumerate(even(count))]


def packed(count: int = 43) -> list[Sample]:
    """Documents of 9, 24 and 7 tokens in each sample, of which the second lies on both of two ranks."""
    positions = [*range(9), *range(24), *range(7)]
    labels_of = ([IGNORE if at == 0 else token for at, token in zip(positions, s["input_ids"])] for s in even(count))
    return [{**s, "labels": labels, "position_ids": positions} for s, labels in zip(even(count), labels_of)]


def _unlabelled(sample: Sample, start: int, end: int) -> Sample:
    labels = sample["labels"]
    return {**sample, "labels": labels[:start] + [IGNORE] * (end - start) + labels[end:]}


DATA = {make.__name__: make for make in (even, uneven, prompts, first_half, some_without, packed)}
