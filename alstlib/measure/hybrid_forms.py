"""Prime sizes and configs of hybrids, for the forms of their layers with a state (`forms`).

A hybrid has layers of several kinds. Each kind is traced alone, in a model whose layers are all of it but one: the
form of `qwen3_next.linear_attention` is that of a Qwen3-Next with one attention layer. The planner adds what layers
of the other kinds keep (`planner.hybrids`).

Names, besides those of `forms`: S width of what every token goes to beside experts. For the gated delta rule F key
heads of a rank, W value heads for each, Y = W + 2 and Z = W + 1 (with both projections), O an eighth of the width of a
head, Q what ranks exchange for each key head (16 O + 8 O W + W). For Mamba-2 F groups, X heads for each, O a sixteenth
of the width of a head and Y of the state; B what the convolution has for 16 channels of a group (X O + 2 Y), A what the
projection has for each group (32 X O + 32 Y + X), Q what ranks exchange of it (16 X O + 32 Y + X), and G what a head
tells other ranks (256 O Y + 1). Where ranks share the heads of Mamba-2, F are groups of a rank, or there is one group
only: then X are heads of a rank, and B and A sums over all heads. J is the width of the convolution, and t the tokens
that it needs before others; tokens with those before them are as distinct as primes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import AutoConfig

from alstlib.measure.pruning import plausible, with_experts
from alstlib.planner.hybrids import BOTH, CONVOLUTION, FULL, GROUPED, LINEAR, MLP, MOE, States
from alstlib.planner.hybrids import sizes_of as sizes_at
from alstlib.planner.moments import DENSE_GRANITE
from alstlib.planner.state_ways import Sent, StateLayer

DELTA = {"F": 67, "W": 281, "Y": 283, "Z": 47, "O": 73, "Q": 165_553}
MAMBA2 = {"F": 19, "X": 41, "O": 29, "Y": 239, "B": 1667, "A": 45_737, "Q": 26_713, "G": 1_774_337}
ONE_GROUP = {"X": 29, "O": 59, "Y": 173, "B": 12_323, "A": 389_003, "Q": 32_941}
"""Of Mamba-2 on 7 ranks."""
SHARED = {"S": 8 * 3_000_017}
WIDTH = 107
"""Of convolutions."""
TAPS = {"J": WIDTH, "t": (WIDTH - 1) // 2}
SCALES = {"b": 6, "Z": 6, "t": 2}
"""A name's prime is its value over this."""
HYBRIDS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "qwen3_next": (DELTA, (LINEAR, FULL)), "qwen3_5_text": (DELTA, (LINEAR, FULL)),
    "qwen3_5_moe_text": (DELTA, (LINEAR, FULL)), "bamba": (MAMBA2, (LINEAR, FULL)),
    "granitemoehybrid": (MAMBA2, (LINEAR, FULL)), DENSE_GRANITE: (MAMBA2, (LINEAR, FULL)),
    "falcon_h1": (MAMBA2, (BOTH,)), "nemotron_h": (MAMBA2, (LINEAR, FULL, MLP, MOE)),
    "lfm2": ({}, (CONVOLUTION, FULL)),
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
    name, kind = kind_of(family)
    return name in SPARSE or kind == MOE


def by_heads(kind: str) -> bool:
    """Can ranks share the heads of such layers?"""
    return kind in (LINEAR, BOTH)


def sizes_of(family: str, heads: bool) -> dict[str, int]:
    """Primes of a family's layers, by the way that they take over ranks."""
    name = kind_of(family)[0]
    sizes = HYBRIDS[name][0]
    one = heads and sizes is MAMBA2 and name not in GROUPED
    return (ONE_GROUP if one else sizes) | (SHARED if is_sparse(family) else {}) | TAPS


def ways(family: str) -> Iterator[tuple[Any, ...]]:
    """What is kept, and tiled MLP, norms, loss, chunks, fine tiles, travelling hidden states, states by heads, single
    tiles (`forms.Way`): as runs have them that save memory, with checkpoints."""
    kind, sparse = kind_of(family)[1], is_sparse(family)
    for keep, heads in itertools.product(("device", "host", "host+attention"), (False, True)):
        if (keep.endswith("attention") and kind not in (FULL, BOTH)) or (heads and not by_heads(kind)):
            continue
        yield keep, True, True, True, False, False, False, heads
        yield keep, True, True, True, False, False, False, heads, True
        if sparse:
            yield keep, False, True, True, False, False, False, heads
        for travels in (False, True) if keep.startswith("host") else (False,):
            yield keep, not sparse, False, True, True, False, travels, heads


def points(family: str, heads: bool) -> Callable[[random.Random], dict[str, float]] | None:
    """Draws plausible sizes of a hybrid, to prune moments with."""
    if family not in FAMILIES:
        return None
    name = kind_of(family)[0]

    def layer(pick: random.Random, width: float) -> States:
        taps: Any = {"kinds": (), "matrices": 0, "vectors": 0, "tail": 0}
        if HYBRIDS[name][0] is DELTA:
            keys, each = pick.choice([4, 16, 32]), pick.choice([1, 2, 3, 4])
            return States(**taps, groups=keys, layer=_layer(keys * each, 128, 128, True))
        if HYBRIDS[name][0] is MAMBA2:
            each = pick.choice([64, 64, 128])
            many = max(8, int(width * pick.choice([1, 2, 2]) / each))
            return States(
                **taps, groups=pick.choice([1, 1, 8]), layer=_layer(many, pick.choice([128, 256]), each, False)
            )
        return States(**taps)

    def draw(pick: random.Random) -> dict[str, float]:
        sizes = with_experts(pick) if is_sparse(family) else plausible(pick)
        more = {"S": sizes["I"] * pick.choice([1, 1, 2])}
        return sizes | more | sizes_at(name, layer(pick, sizes["H"]), int(sizes["P"]), heads)

    return draw


def _layer(heads: int, keys: int, values: int, matrix: bool) -> StateLayer:
    return StateLayer(keys=keys, values=values, inputs=(), output=Sent(heads, values, 2), matrix=matrix)


def aliases(sizes: Mapping[str, int], tail: int) -> list[tuple[str, int]]:
    """Tokens with those that a convolution puts in front of them, and one behind, count as the tokens."""
    rows = [("R", sizes["R"]), ("C", sizes["C"]), ("c", tail)]
    return [(name, n + WIDTH - more) for name, n in rows for more in (1, 0)]


def config_of(family: str, fields: Mapping[str, Any], sizes: Mapping[str, int], ranks: int, heads: bool) -> Any:
    """The config of a hybrid whose layers are of one kind but one in the middle, which attends (without one that
    does, `apply` refuses), with these fields of any decoder. Ranks pass states, or share the heads."""
    name, kind = kind_of(family)
    own, wide = {**fields, "pad_token_id": 0}, fields["intermediate_size"]
    layers = fields["num_hidden_layers"]
    kinds = [LINEAR if kind in (MLP, MOE) else kind, *[kind] * (layers - 3), FULL, kind]
    experts = {"num_experts_per_tok": sizes.get("T"), "moe_intermediate_size": wide}
    if HYBRIDS[name][0] is DELTA:
        keys = sizes["F"] * ranks
        own |= {
            "layer_types": kinds, "linear_conv_kernel_dim": WIDTH, "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * sizes["W"], "linear_key_head_dim": 8 * sizes["O"],
            "linear_value_head_dim": 8 * sizes["O"],
        }  # fmt: skip
        if name in SPARSE:
            own |= {**experts, "num_experts": sizes["E"], "shared_expert_intermediate_size": sizes["S"]}
        return AutoConfig.for_model(name, **own)
    if name == "lfm2":
        return AutoConfig.for_model(name, **own, layer_types=kinds, conv_L_cache=WIDTH, block_auto_adjust_ff_dim=False)
    groups = sizes.get("F", 1) * (ranks if heads and "F" in sizes else 1)
    each = sizes["X"] * (1 if "F" in sizes else ranks)
    many, width, state = groups * each, 16 * sizes["O"], 16 * sizes["Y"]
    if name == "nemotron_h":
        own |= {
            "layers_block_type": kinds, "conv_kernel": WIDTH, "mamba_num_heads": many,
            "mamba_head_dim": width, "ssm_state_size": state, "n_groups": groups,
        }  # fmt: skip
        if kind == MOE:
            own |= {**experts, "n_routed_experts": sizes["E"], "moe_shared_expert_intermediate_size": sizes["S"]}
        return AutoConfig.for_model(name, **own)
    mamba = {
        "mamba_n_heads": many, "mamba_d_head": width, "mamba_d_state": state, "mamba_n_groups": groups,
        "mamba_d_conv": WIDTH,
    }  # fmt: skip
    if name == "falcon_h1":
        return AutoConfig.for_model(name, **own, **mamba, mamba_d_ssm=many * width)
    if name == "bamba":
        own |= {"attn_layer_indices": list(range(layers)) if kind == FULL else [layers - 2]}
    else:
        own |= {
            "layer_types": kinds, "num_local_experts": sizes.get("E", 0), "num_experts_per_tok": sizes.get("T", 0),
            "shared_intermediate_size": sizes.get("S", wide),
        }  # fmt: skip
    config = AutoConfig.for_model("bamba" if name == "bamba" else "granitemoehybrid", **own, mamba_n_heads=1)
    for field, value in {**mamba, "mamba_expand": (many * width + 0.5) / fields["hidden_size"]}.items():
        config.__dict__[field] = value  # such an expansion is not whole, which is checked when a config is made
    return config
