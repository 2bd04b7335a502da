"""Find the modules of a Hugging Face model that carry a state along the sequence in a known way, by what they call.

Their forward calls functions of the file that defines them, and these have the same names in all of transformers'
hybrids. A module is known where each function that it calls is; any other is refused by its name (`support`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from torch import nn

CONVOLUTION = "causal_conv1d_fn"
LIGHTNING_ATTENTION = "lightning attention"
GATED_DELTA = "torch_chunk_gated_delta_rule"
KDA = "chunk_kimi_delta_attention"
MAMBA1 = "mamba_selective_scan"
MAMBA1_FUSED = "mamba_inner_fn"
MAMBA2 = "mamba2_chunk_scan"
MAMBA2_FUSED = "mamba2_split_conv1d_scan_combined"

FAMILIES = {
    "gated delta rule": {CONVOLUTION, GATED_DELTA},
    "Kimi delta attention": {CONVOLUTION, KDA},
    "Mamba-1": {CONVOLUTION, MAMBA1},
    "Mamba-1, fused": {CONVOLUTION, MAMBA1, MAMBA1_FUSED},
    "Mamba-2": {CONVOLUTION, MAMBA2, MAMBA2_FUSED},
    "short convolution": {CONVOLUTION},
}
"""The functions by which a family of mixers mixes tokens."""
HARMLESS = {
    "apply_mask_to_padding_states",
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba_selective_state_update",
    "mamba2_selective_state_update",
}
"""Functions that work on each token by itself, or only where a cache is given."""
LIGHTNING = {"qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "slope_rate", "block_size", "head_dim"}
"""What lightning attention is made of: it calls no function for its recurrence, and is known by these."""
TOKENWISE = {"mlp", "moe"}
"""What a hybrid calls layers that hold an MLP or experts alone."""
KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", *TOKENWISE}
"""What `config.layer_types` calls layers of such mixers, and those."""


def plain_forward(module: nn.Module) -> Any:
    """The function that the module's class computes with, without what wraps it."""
    return inspect.unwrap(type(module).forward)


def called_by(forward: Any) -> set[str]:
    """Names of the functions of its own file that a function calls."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return set()
    known, names = forward.__globals__, {n for c in _codes(code) for n in c.co_names}
    return {n for n in names if callable(known.get(n)) and not isinstance(known[n], type | ModuleType)}


@functools.cache
def takes(function: Any, name: str) -> bool:
    """Does what runs for this function name this parameter? transformers wraps a package's kernel, or else its own
    function, in one that takes everything and drops what the other does not name."""
    wrapped = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(name in inspect.signature(f).parameters for f in (function, *wrapped) if inspect.isroutine(f))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def family_of(module: nn.Module) -> str | None:
    """The family of a mixer that carries a state, or None for any other module."""
    calls = called_by(plain_forward(module)) - HARMLESS
    if not calls and {*module._modules, *module._buffers, *module.__dict__}.issuperset(LIGHTNING):
        return LIGHTNING_ATTENTION
    return next((name for name, functions in FAMILIES.items() if calls == functions), None)


def is_tokenwise(layer: nn.Module) -> bool:
    """Does this layer of a hybrid mix no tokens?"""
    return getattr(layer, "block_type", None) in TOKENWISE and not mixers_of(layer)


def mixers_of(module: nn.Module) -> list[nn.Module]:
    """The mixers inside a module whose family is known."""
    return [m for m in module.modules() if family_of(m) is not None]
