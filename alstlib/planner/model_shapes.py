"""The sizes of a model, from its config.json or by its hub name, without torch and transformers.

Built in are small shapes with random weights and the public shapes that the papers and most users start from, so that
a plan needs no download.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alstlib.config import nearest_path

_LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "small": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "llama-3.1-8b": _LLAMA_8B,
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
    "mistralai/Mistral-7B-v0.3": _public("mistral", 32_768, 4096, 14_336, 32, 32, 8),
}
"""Published shapes by hub name (their `-Instruct` and `-Base` variants are alike)."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Shape:
    """What the planner knows of a decoder."""

    name: str
    family: str
    """transformers' `model_type`."""
    vocab: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    """Is the head the embedding?"""

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = query + 2 * kv if self.family == "qwen2" else 0
        norms = 2 * self.width + {"qwen3": 2 * self.head_dim, "olmo2": query + kv}.get(self.family, 0)
        return self.width * (2 * query + 2 * kv + 3 * self.mlp) + biases + norms

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an untied head."""
        return self.vocab * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.embedding + self.width

    def adapter_parameters(self, lora: Mapping[str, Any]) -> int:
        """Of LoRA adapters with these fields of peft's LoraConfig. Target modules with names that Llama has not
        count as all linear modules of a layer."""
        query, kv, rank = self.heads * self.head_dim, self.kv_heads * self.head_dim, int(lora.get("r", 8))
        ends = {
            "q_proj": self.width + query, "k_proj": self.width + kv, "v_proj": self.width + kv,
            "o_proj": query + self.width, "gate_proj": self.width + self.mlp, "up_proj": self.width + self.mlp,
            "down_proj": self.mlp + self.width,
        }  # fmt: skip
        named = lora.get("target_modules")
        targets = set(named) if isinstance(named, list | tuple) and set(named) <= set(ends) else set(ends)
        return self.layers * rank * sum(ends[name] for name in targets)

    @property
    def dense_parameters(self) -> int:
        """What multiplies each token: the layers' matrices and the head (as `results.flos` counts)."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * self.width * (2 * query + 2 * kv + 3 * self.mlp) + self.embedding


def check_path(name: str) -> None:
    """Refuse a model's name that can only be a path here, and is none, or one without a config.json.

    Raises:
        ValueError: it names what is there instead.
    """
    path = Path(name).expanduser()
    if name in SHAPES or name in PUBLIC:
        return
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model='{name}' is a folder without config.json; name one that save_pretrained wrote")
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ValueError(f"model='{name}' does not exist; {nearest_path(path)}")


def check_model(name: str) -> None:
    """Refuse a model that the ranks could not load a config of: neither here, nor built in, nor had from the hub.

    Raises:
        ValueError: it names the nearest that is known.
    """
    check_path(name)
    if name in SHAPES or Path(name).expanduser().exists() or _in_cache(name) is not None:
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json")
    except Exception as e:  # of a name, a network, a login: each has a kind of its own
        near = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.7)
        hint = f"did you mean '{near[0]}'? " if near else ""
        why = str(e).strip().partition("\n")[0]
        raise ValueError(
            f"model='{name}' is not a folder here and could not be had from the hub ({hint}built-in shapes: "
            f"{', '.join(SHAPES)}); without a network, name a folder that holds it: {why}"
        ) from e


def read_shape(name: str, overrides: Mapping[str, Any] | None = None) -> Shape:
    """The shape of a built-in or public model, of a folder or config.json here, or of a model in the hub's cache.

    Raises:
        ValueError: an unknown model (with the nearest known one), or a config that lacks a size.
    """
    return shape_of(overridden(find_config(name), overrides or {}), name)


def overridden(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config with these fields in place of its own. The width of its heads follows the model's width and the number
    of heads, unless the config has heads of another width or the fields name one."""

    def even(of: Mapping[str, Any]) -> Any:
        return of["hidden_size"] // of["num_attention_heads"]

    made, width = {**config, **fields}, config.get("head_dim")
    if {"hidden_size", "num_attention_heads"} & set(fields) and width and width == even(config):
        made["head_dim"] = fields.get("head_dim", even(made))
    return made


def find_config(name: str) -> dict[str, Any]:
    """The config of a model, as its config.json has it."""
    if name in SHAPES:
        return {"model_type": "llama", **SHAPES[name]}
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ValueError(f"model='{name}': {path} is not a readable config.json ({e})") from e
        if not isinstance(found, dict):
            raise ValueError(f"model='{name}': {path} holds no object")
        return dict(found.get("text_config", found))
    if (cached := _in_cache(name)) is not None:
        return cached
    plain = {public.lower(): public for public in PUBLIC}
    for ending in ("", "-instruct", "-base"):
        stem = name.lower().removesuffix(ending)
        if stem in plain:
            return dict(PUBLIC[plain[stem]])
    known = [*SHAPES, *PUBLIC]
    last = {k.rpartition("/")[2].lower(): k for k in known}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), last, n=1, cutoff=0.5)
    hint = f"did you mean '{last[near[0]]}'? " if near else ""
    raise ValueError(
        f"model='{name}' is neither a folder with a config.json here, nor in the hub's cache, nor built in ({hint}"
        f"built in: {', '.join(known)})"
    )


def _in_cache(name: str) -> dict[str, Any] | None:
    """The newest config.json of a hub name that was downloaded before."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = sorted((hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"), key=os.path.getmtime)
    return find_config(str(found[-1])) if found else None


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a config describes.

    Raises:
        ValueError: a size that is missing or no number; experts, whose memory depends on the data; sliding windows.
    """
    family = str(config.get("model_type", ""))
    if missing := [field for field in _REQUIRED if not isinstance(config.get(field), int)]:
        raise ValueError(f"model='{name}' ({family or 'no model_type'}): its config has no {', '.join(missing)}")
    if any(config.get(field) for field in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ValueError(f"model='{name}' ({family}) routes to experts: what they take depends on the data")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ValueError(f"model='{name}' ({family}) has a sliding window, which the planner does not know")
    heads = config["num_attention_heads"]
    return Shape(
        name=name, family=family, vocab=config["vocab_size"], width=config["hidden_size"],
        mlp=config["intermediate_size"], layers=config["num_hidden_layers"], heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads, tied=bool(config.get("tie_word_embeddings")),
    )  # fmt: skip
