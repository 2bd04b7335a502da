"""Hybrids: decoders in which some layers carry a state along the sequence. What such a layer has, by its config, and
the moments of a model with layers of several kinds. Without torch.

A layer with a state needs the same few bytes from the ranks before, however long the sequence is: its state, what it
multiplies the state by, and the tokens before its convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alstlib.planner.moments import Kinds, in_layer, moments_of
from alstlib.planner.state_ways import BLOCK

LINEAR, FULL, MLP, CONVOLUTION, BOTH = "linear_attention", "full_attention", "mlp", "conv", "hybrid"
"""Kinds of layers: with a state, with attention, with an MLP alone, with a short convolution alone, with a state and
attention."""
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Decoders whose states follow the gated delta rule; their attention has a gate."""
MAMBA2 = ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h")
HYBRIDS = (*DELTA, *MAMBA2, "lfm2")
NOTE = (
    "layers with a state are planned with the memory of the fused kernels (flash-linear-attention, mamba-ssm, "
    "causal-conv1d), as their published source has it; no GPU has run it, and what a kernel takes for itself is not "
    "known. Without these packages transformers' PyTorch code runs, which is slower and takes more. Ranks pass states "
    "(states=pass); what states=heads takes is not planned."
)


@dataclass(frozen=True, kw_only=True)
class States:
    """A hybrid's layers with a state."""

    kinds: tuple[str, ...]
    """Of each layer."""
    matrices: int
    """Elements of one layer's matrices with a state and of its convolution, which multiply tokens."""
    vectors: int
    """Elements of all that multiplies no token."""
    pair: int
    """Numbers in fp32 that a rank tells the others of a slice: the state, and what multiplies the state before."""
    tail: int
    """Numbers of the tokens that its convolution needs of the rank before."""
    flops: float
    """Of the recurrence in one forward, for each token."""
    sizes: tuple[tuple[str, float], ...]
    """By the names that they have in forms (`measure.hybrid_forms`)."""

    def count(self, *kinds: str) -> int:
        return sum(kind in kinds for kind in self.kinds)

    @property
    def stateful(self) -> int:
        """Layers with a state."""
        return self.count(LINEAR, CONVOLUTION, BOTH)

    @property
    def attending(self) -> int:
        """Layers that attend."""
        return self.count(FULL, BOTH)


def states_of(config: Mapping[str, Any], family: str, name: str) -> States | None:
    """What a config says of layers with a state; None for a decoder that has none.

    Raises:
        ValueError: layers of a kind that has no form.
    """
    if family not in HYBRIDS:
        return None
    kinds = _kinds(config, family)
    if unknown := sorted(set(kinds) - {LINEAR, FULL, MLP, CONVOLUTION, BOTH}):
        raise ValueError(f"model='{name}' ({family}) has layers of {', '.join(unknown)}, which have no form")
    if family == "granitemoehybrid" and not config.get("num_local_experts", 8):
        raise ValueError(f"model='{name}' ({family}) has no experts; only with them has it a form")
    width = config["hidden_size"]
    if family == "lfm2":
        taps = config.get("conv_L_cache", 3)
        return States(
            kinds=kinds, matrices=width * (4 * width + taps), vectors=0, pair=0, tail=width * (taps - 1), flops=0.0,
            sizes=(("F", 1.0),),
        )  # fmt: skip
    if family in DELTA:
        keys, values = config.get("linear_num_key_heads", 16), config.get("linear_num_value_heads", 32)
        key, value = config.get("linear_key_head_dim", 128), config.get("linear_value_head_dim", 128)
        taps, inner = config.get("linear_conv_kernel_dim", 4), values * value
        channels, each = 2 * keys * key + inner, values / keys
        return States(
            kinds=kinds, matrices=width * (channels + 2 * inner + 2 * values) + channels * taps,
            vectors=2 * values + value,
            pair=values * key * (key + value), tail=channels * (taps - 1),
            flops=2.0 * values * (3 * key * value + 2 * BLOCK * (key + value)),
            sizes=(("F", keys), ("W", each), ("Y", each + 2), ("Z", each + 1), ("O", max(key, value) / 8)),
        )  # fmt: skip
    return _mamba2(config, family, kinds)


def completed(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """A hybrid's config with what its other fields decide: layers of a list of kinds, an MLP's width."""
    made = dict(config)
    if family == "nemotron_h" and not isinstance(made.get("num_hidden_layers"), int):
        made["num_hidden_layers"] = len(_named(config) or ())
    if family == "lfm2" and made.get("block_auto_adjust_ff_dim", True):
        times, unit = made.get("block_ffn_dim_multiplier", 1.0) or 1.0, made.get("block_multiple_of", 256)
        made["intermediate_size"] = -(-int(times * int(2 * made["intermediate_size"] / 3)) // unit) * unit
    if family in HYBRIDS and "intermediate_size" not in made and "moe_intermediate_size" in made:
        made["intermediate_size"] = made["moe_intermediate_size"]
    return made


def _mamba2(config: Mapping[str, Any], family: str, kinds: tuple[str, ...]) -> States:
    def field(*names: str, default: int) -> int:
        return next((config[n] for n in names if isinstance(config.get(n), int)), default)

    width, nemotron = config["hidden_size"], family == "nemotron_h"
    heads = field("mamba_n_heads", "mamba_num_heads", default=128)
    inner = field("mamba_d_ssm", default=config.get("mamba_expand", 2) * width)
    each = field("mamba_head_dim", "mamba_d_head", default=64 if nemotron else inner // heads)
    inner, state = heads * each, field("mamba_d_state", "ssm_state_size", default=128 if nemotron else 256)
    groups = field("mamba_n_groups", "n_groups", default=8 if nemotron else 1)
    taps = field("mamba_d_conv", "conv_kernel", default=4)
    block = field("mamba_chunk_size", "chunk_size", default=128 if nemotron else 256)
    channels, shared = inner + 2 * groups * state, heads / groups
    projected = inner + channels + heads
    wide, deep = each / 16, state / 16
    norm = 0 if family == "falcon_h1" and not config.get("mamba_rms_norm") else inner
    return States(
        kinds=kinds, matrices=width * (projected + inner) + channels * taps, vectors=channels + 3 * heads + norm,
        pair=heads * (each * state + 1), tail=channels * (taps - 1),
        flops=2.0 * heads * each * (2 * state + block) + 2.0 * groups * state * block,
        sizes=(
            ("F", groups), ("X", shared), ("O", wide), ("Y", deep), ("B", shared * wide + 2 * deep),
            ("A", 32 * shared * wide + 32 * deep + shared),
        ),
    )  # fmt: skip


_SAME = {"mamba": LINEAR, "attention": FULL, "M": LINEAR, "*": FULL, "-": MLP, "E": "moe"}


def _named(config: Mapping[str, Any]) -> Sequence[str] | None:
    fields = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    return next((config[field] for field in fields if config.get(field)), None)


def _kinds(config: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """The kind of each layer, which older configs say in other ways."""
    layers = config["num_hidden_layers"]
    if family == "falcon_h1":
        return (BOTH,) * layers
    if named := _named(config):
        return tuple(_SAME.get(kind, kind) for kind in named)
    if family == "bamba":
        attend: Sequence[int] = config.get("attn_layer_indices") or ()
        return tuple(FULL if i in attend else LINEAR for i in range(layers))
    if family == "lfm2":
        attend = config.get("full_attn_idxs") or range(layers)
        return tuple(FULL if i in attend else CONVOLUTION for i in range(layers))
    every = config.get("full_attention_interval", 4) if family in DELTA else 0
    return tuple(FULL if every and (i + 1) % every == 0 else LINEAR for i in range(layers))


def mixed(way: Callable[[str, str], str], keeps: Sequence[str], states: States) -> Iterator[tuple[str, Kinds]]:
    """(place, what is alive) at the moments of a hybrid: those of each kind of its
    layers, with what all layers of the other kinds keep.

    Args:
        way: (kind, keep) -> the name of the form.
        keeps: what layers may keep.
    """
    kinds = sorted(set(states.kinds))
    for keep in keeps:
        kept = {kind: _of_each_layer(way(kind, keep)) for kind in kinds}
        for kind in kinds:
            last = len(states.kinds) - 1 - states.kinds[::-1].index(kind)
            for place, alive in moments_of(way(kind, keep)):
                found = {category: [(c, _of(kind, names)) for c, names in terms] for category, terms in alive.items()}
                if not in_layer(place) or ".3" in place:
                    for other in kinds:
                        for category, terms in kept[other].items() if other != kind else ():
                            more = [(c, _of(other, names)) for c, names in terms]
                            found[category] = [*found.get(category, []), *more]
                yield place.replace(".3", f".{last}"), found


def counts(states: States) -> dict[str, float]:
    """Layers of each kind, by the names that they have in `mixed`."""
    return {f"L:{kind}": states.count(kind) for kind in set(states.kinds)}


def _of(kind: str, names: str) -> str:
    return " ".join(f"L:{kind}" if name == "L" else name for name in names.split())


def _of_each_layer(way: str) -> Kinds:
    """What one more layer of a kind keeps until its backward."""
    most: Kinds = {}
    for place, alive in moments_of(way):
        found = {c: [t for t in terms if "L" in t[1].split()] for c, terms in alive.items()}
        found = {category: terms for category, terms in found.items() if terms}
        if not in_layer(place) and len(found) >= len(most):
            most = found
    return most
