"""The sizes of a model, from its config.json or by its hub name, without torch and transformers.

Where configs are found: `configs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alstlib.hf.configs import find_config, overridden
from alstlib.planner.fits import facts_of
from alstlib.planner.hybrids import BOTH, DELTA, HYBRIDS, MLP, MOE, States, completed, states_of
from alstlib.planner.moments import families

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
    gated: bool = True
    """Has an MLP three matrices, and not two?"""
    vectors: int = 0
    """Elements of a layer that multiply no token, such as biases and norms' weights; without those of experts."""
    ends: int = 0
    """Elements of the last norm, and of learned positions."""
    window: int = 0
    """Keys that a query of a layer with a sliding window attends to."""
    windowed: int = 0
    """Layers that have it."""
    softcap: bool = False
    """Are scores capped?"""
    experts: int = 0
    """Of a layer that routes; 0: none does."""
    routed: int = 0
    """Experts that a token goes to."""
    expert_mlp: int = 0
    """Width of one."""
    shared_mlp: int = 0
    """Width of what every token goes to beside them."""
    expert_vectors: int = 0
    """Biases of one expert."""
    dense: int = 0
    """Layers that do not route, in a model that has experts."""
    latent: Latent | None = None
    """Of multi-head latent attention."""
    states: States | None = None
    """Of a hybrid."""
    shared_gates: int = 0
    """Elements that gate what every token goes to beside experts."""

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return self.states.attending if self.states else self.layers

    @property
    def sparse(self) -> int:
        """Layers that route to experts."""
        return self.layers - self.dense if self.experts else 0

    @property
    def plain(self) -> int:
        """Layers with an MLP and no experts."""
        if self.states is not None and self.states.alone:
            return self.states.count(MLP)
        return self.layers - self.sparse

    @property
    def value_dim(self) -> int:
        return self.latent.values if self.latent else self.head_dim

    @property
    def projections(self) -> int:
        """Elements of the matrices of one layer's attention."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is None:
            gate = query if self.family in DELTA else 0
            return self.width * (2 * query + 2 * kv + gate)
        return self.latent.matrices(self.width, self.heads, self.head_dim)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.width * width

    @property
    def expert(self) -> int:
        """Elements of one expert's matrices."""
        return self._mlp(self.expert_mlp)

    @property
    def mlp_of_token(self) -> int:
        """Elements of MLPs and routers of all layers that multiply one token: of experts, those that it is sent to."""
        routing = self.width * self.experts + self.routed * self.expert + self._mlp(self.shared_mlp)
        return self.sparse * (routing + self.shared_gates) + self.plain * self._mlp(self.mlp)

    @property
    def mixing(self) -> int:
        """Elements of the matrices of all layers that mix tokens, or are before and after what does."""
        return self.attending * self.projections + (self.states.stateful * self.states.matrices if self.states else 0)

    @property
    def _mixer(self) -> int:
        """Elements of the largest layer's."""
        if self.states is None:
            return self.projections
        own = self.states.matrices + self.states.vectors
        return own + self.projections if BOTH in self.states.kinds else max(own, self.projections)

    @property
    def _routing(self) -> int:
        experts = self.experts * (self.expert + self.expert_vectors)
        return self.width * self.experts + experts + self._mlp(self.shared_mlp) + self.shared_gates

    @property
    def layer_parameters(self) -> int:
        """Of the largest decoder layer, with all its experts."""
        second = self._routing if self.experts else self._mlp(self.mlp)
        alone = self.states is not None and self.states.alone
        return self.vectors + (max(self._mixer, second) if alone else self._mixer + second)

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest: an embedding or a matrix, which may be that of all experts together."""
        together = self.experts * self.width * self.expert_mlp * (2 if self.gated else 1)
        return max(self.embedding, self.width * self.mlp, together)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an untied head."""
        return self.vocab * self.width

    @property
    def parameters(self) -> int:
        small = self.layers * self.vectors + (self.states.stateful * self.states.vectors if self.states else 0)
        small += self.attending * 2 * self.head_dim * (self.family in (*DELTA, "lfm2"))  # norms of queries and keys
        mlps = self.plain * self._mlp(self.mlp) + self.sparse * self._routing
        return self.mixing + mlps + small + (1 if self.tied else 2) * self.embedding + self.ends

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
        """What multiplies each token: the layers' matrices and the head (as `hf.models.flos` counts)."""
        return self.mixing + self.mlp_of_token + self.embedding

    def pairs(self, seq_len: int) -> float:
        """Pairs of a query and a key that attention computes in a sample, all layers: a causal half, or what lies in
        the window."""
        whole = seq_len**2 / 2
        inside = whole if not self.window or self.window >= seq_len else self.window * (seq_len - self.window / 2)
        return (self.attending - self.windowed) * whole + self.windowed * inside


@dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (DeepSeek-V2): queries, and keys with values, come from vectors of these
    ranks, and a part of each key without a latent carries the position."""

    queries: int
    """0: queries come from the hidden states."""
    keys: int
    positions: int
    values: int

    def matrices(self, width: int, heads: int, head_dim: int) -> int:
        """Elements for heads whose keys are this wide."""
        query = heads * head_dim
        made = width * self.queries + self.queries * query if self.queries else width * query
        apart = self.keys * heads * (head_dim - self.positions + self.values)
        return made + width * (self.keys + self.positions) + apart + heads * self.values * width


@dataclass(frozen=True, kw_only=True)
class CountedShape(Shape):
    """A model that no formula here knows: its elements are counted on the model itself (`simulate.count`)."""

    counted: Mapping[str, Any]
    """`model_states.Sizes` by name."""
    attend: int
    values: int
    mixing_of_token: int
    mlps_of_token: int
    linear: Mapping[str, int]
    """Widths of what goes into linear modules and comes out of them, all together, by the modules' names."""

    def adapter_parameters(self, lora: Mapping[str, Any]) -> int:
        targets = lora.get("target_modules")
        named = set(targets) if isinstance(targets, list | tuple) else set(self.linear)
        return int(lora.get("r", 8)) * sum(widths for name, widths in self.linear.items() if name in named)

    @property
    def attending(self) -> int:
        return self.attend

    @property
    def value_dim(self) -> int:
        return self.values

    @property
    def mixing(self) -> int:
        return self.mixing_of_token

    @property
    def mlp_of_token(self) -> int:
        return self.mlps_of_token

    @property
    def layer_parameters(self) -> int:
        return int(self.counted["layer"])

    @property
    def largest_tensor(self) -> int:
        return int(self.counted["largest"])

    @property
    def parameters(self) -> int:
        return int(self.counted["parameters"])


def read_shape(name: str, overrides: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False) -> Shape:
    """The shape of a built-in or public model, of a folder or config.json here, or of a model in the hub's cache. One
    that no formula knows is counted on the model itself.

    Raises:
        ValueError: an unknown model (with the nearest known one), or one that `apply` refuses.
    """
    config = overridden(find_config(name), overrides or {})
    if config.get("model_type") in (None, *families()):
        with contextlib.suppress(ValueError):
            return shape_of(config, name)
    if not config.get("model_type"):
        return shape_of(config, name)  # which says what is missing
    return CountedShape(**facts_of(name, overrides or {}, trust_remote_code))


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a config describes.

    Raises:
        ValueError: a size that is missing or no number, layers of a kind that the planner does not know.
    """
    family = str(config.get("model_type", ""))
    config = {**config, **{ours: config[theirs] for theirs, ours in _OTHER_NAMES.items() if theirs in config}}
    if config.get("intermediate_size") is None and "n_embd" in config:
        config["intermediate_size"] = 4 * config["hidden_size"]
    config = completed(config, family)
    if missing := [field for field in _REQUIRED if not isinstance(config.get(field), int)]:
        raise ValueError(f"model='{name}' ({family or 'no model_type'}): its config has no {', '.join(missing)}")
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds and family not in HYBRIDS:
        raise ValueError(f"model='{name}' ({family}) has layers of {', '.join(sorted(kinds))}, which have no form")
    layers, heads, width = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    config = {**config, "head_dim": None, "num_key_value_heads": None} if family in SQUARE else config
    kv_heads = config.get("num_key_value_heads") or heads
    window = _windows(config, family)
    made: dict[str, Any] = {
        "name": name, "family": family, "vocab": config["vocab_size"], "width": width,
        "mlp": config["intermediate_size"], "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "head_dim": config.get("head_dim") or width // heads, "window": window[0], "windowed": window[1],
        "tied": bool(config.get("tie_word_embeddings", family in _TIED)), "gated": family not in _TWO_MATRICES,
        "softcap": family == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None,
    }  # fmt: skip
    if family in LATENT:
        made["head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        made["latent"] = Latent(
            config.get("q_lora_rank") or 0, config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
        )
    states = states_of(config, family, name)
    routes = states is None or not states.alone or MOE in states.kinds
    made |= {"states": states} | (_experts(config, family, name) if routes else {})
    if states is not None and MOE in states.kinds:
        made["dense"] = layers - states.count(MOE)
    return Shape(**{**made, **_vectors(config, Shape(**made))})


_OTHER_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}  # fmt: skip
"""Of GPT-2's config."""
_TIED = ("gemma2", "gemma3_text", "gpt2", "cohere", "starcoder2", "smollm3")
"""Whose head is the embedding where the config does not say."""
SQUARE = ("gpt_neox", "gpt2")
"""Whose heads, with keys and values of their own, are together as wide as the model."""
_BIASED = ("starcoder2", "gpt_neox", "gpt2")
"""Whose norms have biases."""
_TWO_MATRICES = (*_BIASED, "nemotron_h")
"""Whose MLP has no gate."""
LATENT = ("deepseek_v3",)
_WINDOWS = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096, "gpt_oss": 128}
"""transformers' sliding windows where a config has none."""
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""One layer in so many has no window, where the config does not say which."""


def _windows(config: Mapping[str, Any], family: str) -> tuple[int, int]:
    """A sliding window, and how many layers have it."""
    window = config.get("sliding_window", _WINDOWS.get(family))
    if not window or not config.get("use_sliding_window", family not in ("qwen2", "qwen3", "smollm3")):
        return 0, 0
    layers = config["num_hidden_layers"]
    every = config.get("sliding_window_pattern") or _FULL_EVERY.get(family, 0)
    if kinds := config.get("layer_types"):
        windowed = list(kinds).count("sliding_attention")
    elif "max_window_layers" in config and family in ("qwen2", "qwen3"):
        windowed = max(0, layers - config["max_window_layers"])
    else:
        windowed = layers - layers // every if every else layers
    return (window, windowed) if windowed else (0, 0)


def _experts(config: Mapping[str, Any], family: str, name: str) -> dict[str, Any]:
    """What a config says of experts.

    Raises:
        ValueError: experts of a decoder that the planner does not know.
    """
    fields = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((config[field] for field in fields if config.get(field)), 0)
    if not experts:
        return {}
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    if family not in EXPERTS:
        raise ValueError(f"model='{name}' ({family}) routes to experts, and has no form; {', '.join(EXPERTS)} have one")
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    plain = config.get("first_k_dense_replace", 0) if family == "deepseek_v3" else 0
    if family in ("qwen3_moe", *DELTA):
        plain = sum(i in dense or (i + 1) % step > 0 for i in range(layers))
    wide = config.get("moe_intermediate_size") or config["intermediate_size"]
    biases, field = family == "gpt_oss", SHARED.get(family, "")
    shared = wide * config.get("n_shared_experts", 0) if family == "deepseek_v3" else config.get(field, 0)
    return {
        "experts": experts, "routed": config["num_experts_per_tok"], "expert_mlp": wide, "dense": plain,
        "shared_mlp": shared, "shared_gates": width if family in DELTA else 0,
        "expert_vectors": (1 + 2 * wide + width) if biases else 0,
    }  # fmt: skip


SHARED = {
    "qwen3_next": "shared_expert_intermediate_size", "qwen3_5_moe_text": "shared_expert_intermediate_size",
    "granitemoehybrid": "shared_intermediate_size", "nemotron_h": "moe_shared_expert_intermediate_size",
}  # fmt: skip
"""The width of what every token goes to beside experts, where it is not that of experts."""
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", *SHARED)
"""Decoders with experts that have a form."""


def _vectors(config: Mapping[str, Any], shape: Shape) -> dict[str, int]:
    """Elements of a decoder's vectors: `Shape.vectors` and `Shape.ends`."""
    family, width, dim = shape.family, shape.width, shape.head_dim
    query, kv = shape.heads * dim, shape.kv_heads * dim
    norm = 2 * width if family in _BIASED else width
    of_heads = {"qwen3": 2 * dim, "qwen3_moe": 2 * dim, "gemma3_text": 2 * dim, "olmo2": query + kv}
    norms = {"cohere": 1, "gemma2": 4, "gemma3_text": 4, "nemotron_h": 1}.get(family, 2) * norm + of_heads.get(
        family, 0
    )
    if family == "cohere" and config.get("use_qk_norm"):
        norms += query + kv
    three, out = query + 2 * kv, width
    biases = three + out if config.get("attention_bias", family in ("gpt_neox", "gpt_oss", "gpt2")) else 0
    biases = {"qwen2": three, "glm": min(biases, three), "phi3": 0}.get(family, biases)
    if family == "starcoder2":
        biases = three + out if config.get("use_bias", True) else 0
    if family in ("gpt_neox", "gpt2") or (family == "starcoder2" and biases):
        biases += shape.mlp + width
    elif config.get("mlp_bias"):
        biases += 2 * shape.mlp + width
    if family == "gpt_oss":
        biases += shape.heads  # sinks
    if shape.latent:
        small = shape.latent.queries + shape.latent.keys
        norms += small
        biases = small + shape.latent.positions + width if config.get("attention_bias") else 0
    positions = width * config.get("n_positions", 1024) if family == "gpt2" else 0
    return {"vectors": norms + biases, "ends": norm + positions}
