"""Hybrids: decoders in which some layers carry a state along the sequence. What such a layer has, by its config, and
the moments of a model with layers of several kinds. Without torch.

A layer with a state needs the same few bytes from the ranks before, however long the sequence is: its state, what it
multiplies the state by, and the tokens before its convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alstlib.config import RunConfig
from alstlib.planner.gpus import Rates
from alstlib.planner.moments import Kinds, in_layer, moments_of
from alstlib.planner.state_ways import Cost, Sent, StateLayer, cheapest, passes_of, state_costs

LINEAR, FULL, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
CONVOLUTION, BOTH = "conv", "hybrid"
"""Kinds of layers: with a state, with attention, with an MLP or experts alone; with a short convolution alone, with a
state and attention."""
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Decoders whose states follow the gated delta rule; their attention has a gate."""
MAMBA2 = ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h")
GROUPED = ("nemotron_h",)
"""Those with as many groups of heads as ranks, or more."""
HYBRIDS = (*DELTA, *MAMBA2, "lfm2")
NOTE = (
    "layers with a state are planned with the memory of the fused kernels (flash-linear-attention, mamba-ssm, "
    "causal-conv1d), as their published source has it; no GPU has run it, and what a kernel takes for itself is not "
    "known. Without these packages transformers' PyTorch code runs, which is slower and takes more."
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
    tail: int
    """Numbers of the tokens that its convolution needs of the rank before."""
    layer: StateLayer | None = None
    """Its recurrence, in bf16; None for a convolution alone."""
    groups: int = 1
    """Of heads: key heads of a delta rule, and those that share B and C of Mamba-2."""
    taps: int = 4
    """Of its convolution."""

    @property
    def flops(self) -> float:
        """Of the recurrence of one layer in one forward, for each token."""
        return self.layer.heads * self.layer.forward_flops() if self.layer else 0.0

    def count(self, *kinds: str) -> int:
        return sum(kind in kinds for kind in self.kinds)

    @property
    def stateful(self) -> int:
        """Layers with a state."""
        return self.count(LINEAR, CONVOLUTION, BOTH)

    @property
    def alone(self) -> bool:
        """Is each layer either a mixer or an MLP?"""
        return not {MLP, MOE}.isdisjoint(self.kinds)

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
    if unknown := sorted(set(kinds) - {LINEAR, FULL, MLP, MOE, CONVOLUTION, BOTH}):
        raise ValueError(f"model='{name}' ({family}) has layers of {', '.join(unknown)}, which have no form")
    if {MLP, MOE} <= set(kinds):
        raise ValueError(f"model='{name}' ({family}) has layers of experts and layers of an MLP; both have no form")
    width = config["hidden_size"]
    if family == "lfm2":
        taps = config.get("conv_L_cache", 3)
        return States(
            kinds=kinds, matrices=width * (4 * width + taps), vectors=0, tail=width * (taps - 1), taps=taps,
        )  # fmt: skip
    if family in DELTA:
        keys, values = config.get("linear_num_key_heads", 16), config.get("linear_num_value_heads", 32)
        key, value = config.get("linear_key_head_dim", 128), config.get("linear_value_head_dim", 128)
        taps, inner = config.get("linear_conv_kernel_dim", 4), values * value
        channels = 2 * keys * key + inner
        passed = (Sent(keys, key, 2), Sent(keys, key, 2), Sent(values, value, 2), Sent(values, 1, 4))
        return States(
            kinds=kinds, matrices=width * (channels + 2 * inner + 2 * values) + channels * taps,
            vectors=2 * values + value, tail=channels * (taps - 1), groups=keys, taps=taps,
            layer=StateLayer(
                keys=key, values=value, inputs=(*passed, Sent(values, 1, 2)), output=Sent(values, value, 2)
            ),
        )  # fmt: skip
    return _mamba2(config, family, kinds)


def completed(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """A hybrid's config with what its other fields decide: layers of a list of kinds, an MLP's width."""
    made = dict(config)
    if family == "nemotron_h":  # transformers counts the list
        made["num_hidden_layers"] = len(_named(config) or ())
    if family == "lfm2" and made.get("block_auto_adjust_ff_dim", True):
        times, unit = made.get("block_ffn_dim_multiplier", 1.0) or 1.0, made.get("block_multiple_of", 256)
        made["intermediate_size"] = -(-int(times * int(2 * made["intermediate_size"] / 3)) // unit) * unit
    if family == "granitemoehybrid" and not made.get("num_local_experts", 8):
        made["intermediate_size"] = made.get("shared_intermediate_size", 1024)
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
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    norm = 0 if family == "falcon_h1" and not config.get("mamba_rms_norm") else inner
    shared = Sent(groups, state, 2)
    return States(
        kinds=kinds, matrices=width * (projected + inner) + channels * taps, vectors=channels + 3 * heads + norm,
        tail=channels * (taps - 1), groups=groups, taps=taps,
        layer=StateLayer(
            keys=state, values=each, inputs=(Sent(heads, each, 2), Sent(heads, 1, 2), shared, shared),
            output=Sent(heads, each, 2), matrix=False, block=block,
        ),
    )  # fmt: skip


_SAME = {"mamba": LINEAR, "attention": FULL, "M": LINEAR, "*": FULL, "-": MLP, "E": MOE}


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
    layers, with what layers of the other kinds keep. In a layer it is the last of its kind.

    Args:
        way: (kind, keep) -> the name of the form.
        keeps: what layers may keep.
    """
    kinds = sorted(set(states.kinds))
    for keep in keeps:
        kept = {kind: _of_each_layer(way(kind, keep)) for kind in kinds}
        for kind in kinds:
            for place, alive in moments_of(way(kind, keep)):
                last = f":{kind}" if in_layer(place) else ""
                found = {c: [(n, _of(f"{kind}{last}", names)) for n, names in terms] for c, terms in alive.items()}
                if not last or ".3" in place:
                    for other in kinds:
                        for category, terms in kept[other].items() if other != kind else ():
                            more = [(n, _of(f"{other}{last}", names)) for n, names in terms]
                            found[category] = [*found.get(category, []), *more]
                yield place.replace(".3", f".{_last(states, kind)}"), found


def counts(states: States) -> dict[str, float]:
    """Layers of each kind, by the names that they have in `mixed`: all, and those up to the last one of a kind."""
    kinds = set(states.kinds)
    found: dict[str, float] = {f"L:{kind}": states.count(kind) for kind in kinds}
    for kind in kinds:
        before = states.kinds[: _last(states, kind) + 1]
        found |= {f"L:{other}:{kind}": before.count(other) for other in kinds}
    return found


def _last(states: States, kind: str) -> int:
    return len(states.kinds) - 1 - states.kinds[::-1].index(kind)


def way_of(
    states: States, run: RunConfig, ranks: int, rows: int, rates: Rates | None = None, nodes: bool = False
) -> str:
    """The way that layers with a state take over ranks, as `hf.state_ways` chooses it: `pass` or `heads`.

    Args:
        rows: of the sequence, on each rank.
    """
    return added(states, run, ranks, rows, rates, nodes)[0]


def added(
    states: States, run: RunConfig, ranks: int, rows: int, rates: Rates | None = None, nodes: bool = False
) -> tuple[str, Cost]:
    """The way, and what it adds to a layer in a chunk, or in a block, or in a step (`state_costs`)."""
    if states.layer is None:
        return "pass", Cost(0.0, 0.0)
    chunks = run.chunk is not None and run.chunk < rows
    blocks = run.block is not None and run.block < rows
    rows = min(rows, run.block or rows, run.chunk or rows)
    forwards, pairs = passes_of(run.options.checkpoint, chunks=chunks, blocks=blocks)
    costs = state_costs(
        states.layer, rows, ranks, batch=run.data.batch_size, forwards=forwards, pairs=pairs, rates=rates, nodes=nodes
    )  # fmt: skip
    way = cheapest(costs) if run.options.linear_attention == "auto" else run.options.linear_attention
    way = way if way in costs and ranks > 1 else "pass"  # heads of fewer than ranks are not shared
    return way, costs[way]


def sizes_of(family: str, states: States, ranks: int, by_heads: bool) -> dict[str, float]:
    """Sizes of a layer's recurrence by the names that they have in forms (`measure.hybrid_forms`).

    Args:
        by_heads: do the ranks share the heads? Those of the rank that has most count for all.
    """
    taps = {"J": float(states.taps), "t": states.taps - 1.0}
    if (layer := states.layer) is None:
        return taps
    groups, heads = states.groups, layer.heads
    if layer.matrix:
        own = groups / ranks if ranks <= groups else 1.0
        each = heads / groups if ranks <= groups else heads / ranks
        wide = max(layer.keys, layer.values) / 8
        sums = {"Y": each + 2, "Z": each + 1, "Q": 16 * wide + 8 * wide * each + each}
        return {"F": own, "W": each, "O": wide, **sums, **taps}
    wide, deep = layer.values / 16, layer.keys / 16
    if by_heads and family not in GROUPED:  # traced with one group: B and A are sums over all groups
        of_rank, own = float(-(-heads // ranks)), 0.0
        both = heads * wide + groups * deep
        sums = {"B": both + groups * deep, "A": 32 * both + heads}
    else:
        own = max(1.0, groups / ranks) if by_heads else groups
        of_rank = (-(-heads // ranks) if by_heads else heads) / own
        both = of_rank * wide + deep
        sums = {"B": both + deep, "A": 32 * both + of_rank}
    sums["Q"] = 16 * of_rank * wide + 32 * deep + of_rank
    return {"F": own, "X": of_rank, "O": wide, "Y": deep, "G": 256 * wide * deep + 1, **sums, **taps}


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
