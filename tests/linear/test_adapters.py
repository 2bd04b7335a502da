"""Kernels that keep packed documents apart get them in one call: with functions of flash-linear-attention's and
mamba-ssm's signatures, against loops over the whole sequence, in fp64."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cases import on_ranks
from operators import as_transformers_wraps, randn, worst
from test_pass_state import RULES, gated, gated_inputs, kimi_inputs, mamba_inputs, on_rank
from torch import nn
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from alstlib.base import reference
from alstlib.linear.adapter import takes
from alstlib.linear.adapters.gated_delta import GatedDelta
from alstlib.linear.adapters.mamba2 import Mamba2
from alstlib.linear.by_heads import by_heads
from alstlib.linear.pass_state import pass_state

LENGTH = 48
DOCUMENTS = (0, 2, 5, 7, 10, 12, 13, 15, 18, 20, 22, 25, 27, 30, 31, 33, 36, 38, 41, 42, 44, 46, 48)
"""In each eight tokens, which is the least slice of a rank and chunk: some that are cut, and several that are not."""
CALLS = []
"""How many documents each call of a kernel held."""


def delta(q, k, *others, **how):
    return gated(*(nn.functional.normalize(t, dim=-1) for t in (q, k)), *others, **how)


def delta_kernel(
    q, k, v, g, beta, scale = None,
    initial_state = None, output_final_state = False, use_qk_l2norm_in_kernel = False,
    cu_seqlens = None, cu_seqlens_cpu = None, **kwargs,
):  # fmt: skip
    assert (scale, use_qk_l2norm_in_kernel, kwargs) == (None, True, {})
    if cu_seqlens is None:
        CALLS.append(1)
        out, state = delta(q, k, v, g, beta, initial_state=initial_state)
        return out, state if output_final_state else None
    assert (len(q), initial_state, output_final_state, cu_seqlens.dtype) == (1, None, False, torch.int64)
    CALLS.append(len(cu_seqlens) - 1)
    return delta(q, k, v, g, beta, documents=cu_seqlens.tolist())[0], None


def biased_inputs(*sizes):
    tokens, weights = mamba_inputs(*sizes)
    return tokens, [*weights, randn(sizes[2], seed=6)]


def mamba(x, dt, b, c, a, d, bias, **how):
    return reference.mamba2(x, nn.functional.softplus(dt + bias), a, b, c, d, **how)


def mamba_kernel(
    x, dt, A, B, C, chunk_size, D, z = None,
    dt_bias = None, initial_states = None, seq_idx = None,
    cu_seqlens = None, dt_softplus = False,
    dt_limit = (0.0, float("inf")), return_final_states = False,
):  # fmt: skip
    assert (z, cu_seqlens, dt_softplus, chunk_size, dt_limit) == (None, None, True, 16, (0.0, float("inf")))
    if seq_idx is None:
        CALLS.append(1)
        out, state = mamba(x, dt, B, C, A, D, dt_bias, initial_state=initial_states)
        return (out, state) if return_final_states else out
    assert (initial_states, return_final_states) == (None, False)
    assert (seq_idx.shape, seq_idx.dtype, seq_idx.is_contiguous()) == (x.shape[:2], torch.int32, True)
    index = seq_idx[0].tolist()
    cuts = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1]), len(index)]
    CALLS.append(len(cuts) - 1)
    return mamba(x, dt, B, C, A, D, dt_bias, documents=cuts)[0]


PART, WEIGHT = SimpleNamespace(mix=lambda rule, *_: rule), torch.zeros(1)
DELTA = GatedDelta.mix(PART, as_transformers_wraps(delta_kernel), *[None] * 5, use_qk_l2norm_in_kernel=True)[0]
MAMBA = Mamba2.mix(
    PART, as_transformers_wraps(mamba_kernel), None, None, WEIGHT, None, None, 16, WEIGHT, WEIGHT, dt_softplus=True
)
FAMILIES = {
    "gated delta rule": (gated_inputs, delta, DELTA, (6, 1)),
    "Kimi delta attention": (kimi_inputs, delta, DELTA, (6, 6)),
    "Mamba-2": (biased_inputs, mamba, MAMBA, (6, 1)),
}
"""As `RULES`, with the rules that adapters make of these kernels."""


def packed(rank, world, name, chunks):
    """Runs `on_rank` by both ways; returns the number of documents in each call."""
    CALLS.clear()
    case, how = (1, LENGTH, DOCUMENTS), {"ways": (pass_state, by_heads), "chunk": LENGTH // world // chunks}
    with mock.patch.dict(RULES, FAMILIES):
        on_rank(rank, world, name, case, **how)
    return CALLS


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_one_call(pools, name, world, chunks):
    forwards = 2 * 2 * chunks  # two ways, each with and without a graph
    for calls in on_ranks(pools, world, packed, name, chunks):
        assert sum(count > 1 for count in calls) == forwards, calls
        assert len(calls) <= 4 * forwards, calls  # the first, the last, and a pair


def test_what_a_kernel_takes_is_seen_through_transformers():
    for name in ("cu_seqlens", "seq_idx"):
        assert not takes(modeling_qwen3_next.torch_chunk_gated_delta_rule, name)
        assert not takes(modeling_mamba2.mamba2_chunk_scan, name)
        assert not takes(as_transformers_wraps(lambda q, **kwargs: q), name)
    assert takes(as_transformers_wraps(delta_kernel), "cu_seqlens")
    assert takes(delta_kernel, "cu_seqlens")
    assert takes(as_transformers_wraps(mamba_kernel), "seq_idx")


def test_the_oracle_computes_what_transformers_does():
    """In fp32, as transformers does."""
    theirs = modeling_qwen3_next.torch_recurrent_gated_delta_rule, modeling_kimi_linear.recurrent_kimi_delta_attention
    for make, fn in zip((gated_inputs, kimi_inputs), theirs):
        q, k, v, g, beta = make(1, LENGTH, 3, 3)[0]
        found = fn(*(t.float() for t in (q, k, v)), g=g.float(), beta=beta.float(), initial_state=None,
                   output_final_state=True)  # fmt: skip
        assert worst([t.double() for t in found], reference.gated_delta_rule(q, k, v, g, beta)) < 1e-6, fn
