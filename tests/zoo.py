"""The decoders that are supported: a tiny config of each, with what is particular to it switched on (zoo.yaml)."""

import dataclasses
from pathlib import Path

import torch
import transformers
import yaml

VOCAB = 96
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
          "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
LAYER_TYPES = ["sliding_attention", "full_attention"]
ZOO = yaml.safe_load(Path(__file__).with_name("zoo.yaml").read_text())
MODELS, MORE, HYBRIDS, MORE_HYBRIDS, APART = (
    ZOO[name] for name in ("MODELS", "MORE", "HYBRIDS", "MORE_HYBRIDS", "APART")
)
"""transformers' config and its fields: of decoders whose layers all attend, of those with layers that carry a state,
and of those that the net does not draw."""


def trainable(config, dtype, seed=0, auto=transformers.AutoModelForCausalLM, **how):
    """A model whose every gradient counts (transformers' initial weights are near zero), and whose states last."""
    torch.manual_seed(seed)
    model = auto.from_config(config, **how).to(dtype)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.uniform_(-3.0, 0.5) if n.endswith("A_log") else p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def build(name, dtype=torch.float32, seed=0, **overrides):
    kind, fields = {**MODELS, **MORE, **APART}[name]
    config = getattr(transformers, kind)(**{**COMMON, **fields, **overrides})
    return trainable(config, dtype, seed, attn_implementation="eager")


def small(config, **fields):
    """A model of any config, as transformers initializes it."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**COMMON, **fields})
    return transformers.AutoModelForCausalLM.from_config(made).train()


def build_hybrid(name, dtype=torch.float32, **overrides):
    kind, fields = {**HYBRIDS, **MORE_HYBRIDS}[name]
    config = getattr(transformers, kind)
    own = {f.name for f in dataclasses.fields(config)} | {*config.attribute_map}
    config = config(**{n: v for n, v in {**COMMON, **fields, **overrides}.items() if n in own or n in fields})
    return trainable(config, dtype, attn_implementation="eager")
