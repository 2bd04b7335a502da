"""Prime sizes and configs of hybrids, for the forms of their layers with a state (`forms`).

A hybrid has layers of several kinds. Each kind is traced alone, in a model whose layers are all of it but one: the
form of `qwen3_next.linear_attention` is that of a Qwen3-Next with one attention layer. The planner adds what layers
of the other kinds keep (`planner.hybrids`).

Names, besides those of `forms`: for the gated delta rule F key heads, W value heads for each, Y = W + 2 and Z = W + 1
(with both projections), O an eighth of the width of a head. For Mamba-2 F groups, X heads for each, O a sixteenth of
the width of a head and Y of the state; B what the convolution has for 16 channels of a group (X O + 2 Y), and A what
the projection has for each group (32 X O + 32 Y + X). The convolution's width is so large that tokens with those
before them are a prime too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import AutoConfig

from alstlib.measure.pruning import plausible, with_experts
from alstlib.planner.hybrids import BOTH, CONVOLUTION, FULL, LINEAR, MLP

DELTA = {"F": 67, "W": 281, "Y": 283, "Z": 47, "O": 13}
MAMBA2 = {"F": 19, "X": 41, "O": 83, "Y": 107, "B": 3617, "A": 112_361}
WIDTH = 109
"""Of convolutions."""
SCALES = {"b": 6, "Z": 6}
"""A name's prime is its value over this."""
HYBRIDS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "qwen3_next": (DELTA, (LINEAR, FULL)), "qwen3_5_text": (DELTA, (LINEAR, FULL)),
    "qwen3_5_moe_text": (DELTA, (LINEAR, FULL)), "bamba": (MAMBA2, (LINEAR, FULL)),
    "granitemoehybrid": (MAMBA2, (LINEAR, FULL)), "falcon_h1": (MAMBA2, (BOTH,)),
    "nemotron_h": (MAMBA2, (LINEAR, FULL, MLP)), "lfm2": ({"F": 19}, (CONVOLUTION, FULL)),
}  # fmt: skip
"""Hybrids that have forms: sizes of their layers with a state, and kinds of layers."""
FAMILIES = [f"{family}.{kind}" for family, (_, kinds) in HYBRIDS.items() for kind in kinds]
SPARSE = ("qwen3_next", "qwen3_5_moe_text", "granitemoehybrid")
"""Those whose layers route to experts."""


def kind_of(family: str) -> tuple[str, str]:
    """(`qwen3_next`, `linear_attention`) of `qwen3_next.linear_attention`."""
    name, _, kind = family.partition(".")
    return name, kind


def is_sparse(family: str) -> bool:
    return kind_of(family)[0] in SPARSE


def sizes_of(family: str) -> dict[str, int]:
    return HYBRIDS[kind_of(family)[0]][0]


def ways(family: str) -> Iterator[tuple[Any, ...]]:
    """What is kept, and tiled MLP, norms, loss, chunks, fine tiles, travelling hidden states (`forms.Way`): as runs
    have them that save memory, with checkpoints."""
    for keep in ("device", "host", "host+attention"):
        if keep.endswith("attention") and kind_of(family)[1] not in (FULL, BOTH):
            continue
        yield keep, True, True, True
        if is_sparse(family):  # all tokens of experts in one tile
            yield keep, False, True, True
        chunks = (keep, not is_sparse(family), False, True, True)
        yield chunks
        if keep.startswith("host"):
            yield *chunks, False, True


def points(family: str) -> Callable[[random.Random], dict[str, float]] | None:
    """Draws plausible sizes of a hybrid, to prune moments with."""
    if family not in FAMILIES:
        return None

    def draw(pick: random.Random) -> dict[str, float]:
        sizes = with_experts(pick) if is_sparse(family) else plausible(pick)
        delta = {"F": 16, "W": pick.choice([1, 2, 3, 4]), "O": 16}
        delta |= {"Y": delta["W"] + 2, "Z": delta["W"] + 1}
        mamba: dict[str, float] = {"F": pick.choice([1, 1, 8]), "O": pick.choice([4, 8]), "Y": pick.choice([8, 16])}
        mamba["X"] = 2 * sizes["H"] / 16 / mamba["O"] / mamba["F"]
        mamba |= {"B": mamba["X"] * mamba["O"] + 2 * mamba["Y"]}
        mamba |= {"A": 32 * mamba["X"] * mamba["O"] + 32 * mamba["Y"] + mamba["X"]}
        return sizes | (delta if sizes_of(family) is DELTA else mamba)

    return draw


def aliases(sizes: Mapping[str, int], tail: int) -> list[tuple[str, int]]:
    """Tokens with those that a convolution puts in front of them count as the tokens."""
    return [("R", sizes["R"] + WIDTH - 1), ("C", sizes["C"] + WIDTH - 1), ("c", tail + WIDTH - 1)]


def config_of(family: str, fields: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The config of a hybrid whose layers are of one kind but one in the middle, which attends (without one that
    does, `apply` refuses), with these fields of any decoder."""
    name, kind = kind_of(family)
    own, wide = {**fields, "pad_token_id": 0}, fields["intermediate_size"]
    layers = fields["num_hidden_layers"]
    kinds = [LINEAR if kind == MLP else kind, *[kind] * (layers - 3), FULL, kind]
    experts = {"num_experts_per_tok": sizes.get("T"), "moe_intermediate_size": wide}
    if HYBRIDS[name][0] is DELTA:
        own |= {
            "layer_types": kinds, "linear_conv_kernel_dim": WIDTH, "linear_num_key_heads": sizes["F"],
            "linear_num_value_heads": sizes["F"] * sizes["W"], "linear_key_head_dim": 8 * sizes["O"],
            "linear_value_head_dim": 8 * sizes["O"],
        }  # fmt: skip
        if name in SPARSE:
            own |= {**experts, "num_experts": sizes["E"], "shared_expert_intermediate_size": wide}
        return AutoConfig.for_model(name, **own)
    if name == "lfm2":
        return AutoConfig.for_model(name, **own, layer_types=kinds, conv_L_cache=WIDTH, block_auto_adjust_ff_dim=False)
    heads, width, state = sizes["F"] * sizes["X"], 16 * sizes["O"], 16 * sizes["Y"]
    if name == "nemotron_h":
        own |= {
            "layers_block_type": kinds, "conv_kernel": WIDTH, "mamba_num_heads": heads,
            "mamba_head_dim": width, "ssm_state_size": state, "n_groups": sizes["F"],
        }  # fmt: skip
        return AutoConfig.for_model(name, **own)
    mamba = {
        "mamba_n_heads": heads, "mamba_d_head": width, "mamba_d_state": state, "mamba_n_groups": sizes["F"],
        "mamba_d_conv": WIDTH,
    }  # fmt: skip
    if name == "falcon_h1":
        return AutoConfig.for_model(name, **own, **mamba, mamba_d_ssm=heads * width)
    if name == "granitemoehybrid":
        own |= {"num_local_experts": sizes["E"], "num_experts_per_tok": sizes["T"], "shared_intermediate_size": wide}
        own |= {"layer_types": kinds}
    else:
        own |= {"attn_layer_indices": list(range(layers)) if kind == FULL else [layers - 2]}
    config = AutoConfig.for_model(name, **own, mamba_n_heads=1)
    for field, value in {**mamba, "mamba_expand": (heads * width + 0.5) / fields["hidden_size"]}.items():
        config.__dict__[field] = value  # such an expansion is not whole, which is checked when a config is made
    return config
