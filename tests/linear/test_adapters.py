"""Kernels that keep packed documents apart get them in one call: with functions of flash-linear-attention's and
mamba-ssm's signatures, against loops over the whole sequence, in fp64."""

import functools
import sys
from itertools import pairwise
from types import ModuleType
from unittest import mock

import pytest
import torch
from operators import gradients, leaf, nan_memory, randn, worst
from torch import nn
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from alstlib import SPContext, reference
from alstlib.kernels.spans import Offsets
from alstlib.linear.adapter import takes
from alstlib.linear.adapters.gated_delta import GatedDelta
from alstlib.linear.adapters.mamba2 import Mamba2
from alstlib.linear.by_heads import by_heads
from alstlib.linear.pass_state import pass_state
from alstlib.ulysses.alltoall import Exchange

HEADS, KEYS, VALUES, LENGTH, TOLERANCE = 3, 2, 4, 48, 1e-11
DOCUMENTS = (0, 2, 5, 7, 10, 12, 13, 15, 18, 20, 22, 25, 27, 30, 31, 33, 36, 38, 41, 42, 44, 46, 48)
"""In each eight tokens, which is the least slice of a rank and chunk: some that are cut, and several that are not."""

Calls = list[int]
"""How many documents each call held."""


def wrapped(implementation):
    """As transformers wraps what it found: in a function that names no parameter and drops unknown ones."""
    package = ModuleType("a_package_of_kernels")
    package.kernel = implementation  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {package.__name__: package}):
        return modeling_qwen3_next.use_kernel_func_from_hub_with_fallback("kernel", package.__name__)(_torch_only)


def _torch_only(*_, **__):
    raise AssertionError("transformers found no kernel")


def delta_kernel(calls):
    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale = None,
        initial_state = None, output_final_state = False, use_qk_l2norm_in_kernel = False,
        cu_seqlens = None, cu_seqlens_cpu = None, **kwargs,
    ):  # fmt: skip
        assert (scale, kwargs) == (None, {})
        if use_qk_l2norm_in_kernel:
            q, k = (nn.functional.normalize(t, dim=-1) for t in (q, k))
        if cu_seqlens is None:
            calls.append(1)
            out, state = reference.gated_delta_rule(q, k, v, g, beta, initial_state)
            return out, state if output_final_state else None
        assert (len(q), initial_state, output_final_state, cu_seqlens.dtype) == (1, None, False, torch.int64)
        assert (int(cu_seqlens[0]), int(cu_seqlens[-1])) == (0, q.shape[1])
        calls.append(len(cu_seqlens) - 1)
        parts = [[t[:, a:b] for t in (q, k, v, g, beta)] for a, b in pairwise(cu_seqlens.tolist())]
        return torch.cat([reference.gated_delta_rule(*part)[0] for part in parts], 1), None

    return chunk_gated_delta_rule


def mamba_kernel(calls):
    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z = None,
        dt_bias = None, initial_states = None, seq_idx = None,
        cu_seqlens = None, dt_softplus = False,
        dt_limit = (0.0, float("inf")), return_final_states = False,
    ):  # fmt: skip
        assert (z, cu_seqlens, dt_softplus, chunk_size) == (None, None, True, 16)
        step = nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)
        if seq_idx is None:
            calls.append(1)
            out, state = reference.mamba2(x, step, A, B, C, D, initial_states)
            return (out, state) if return_final_states else out
        assert (initial_states, return_final_states) == (None, False)
        assert (seq_idx.shape, seq_idx.dtype, seq_idx.is_contiguous()) == (x.shape[:2], torch.int32, True)
        index = seq_idx[0].tolist()
        cuts = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1]), len(index)]
        calls.append(len(cuts) - 1)
        parts = [[x[:, a:b], step[:, a:b], A, B[:, a:b], C[:, a:b], D] for a, b in pairwise(cuts)]
        return torch.cat([reference.mamba2(*part)[0] for part in parts], 1)

    return mamba_chunk_scan_combined


class Part:
    """What a layer's function does over ranks and chunks, by one way."""

    hands_on = True

    def __init__(self, way, exchange, chunk):
        self.way, self.exchange, self.chunk, self.state = way, exchange, chunk, None

    def mix(self, rule, tokens, weights, *_):
        outs, (rows, ranks) = [], self.chunk
        for lo in range(0, LENGTH // ranks, rows):
            part = [t[:, lo : lo + rows] for t in tokens]
            how = {"start": self.state, "first": lo * ranks, "length": LENGTH}
            out, self.state = self.way(rule, part, weights, self.exchange, Offsets(DOCUMENTS), **how)
            outs.append(out)
        return torch.cat(outs, 1)


def delta_inputs(kimi):
    shapes = [(KEYS,), (KEYS,), (VALUES,), (KEYS,) if kimi else (), ()]
    q, k, v, g, beta = (randn(1, LENGTH, HEADS, *shape, seed=i) for i, shape in enumerate(shapes))
    return [q, k, v, -nn.functional.softplus(g), beta.sigmoid()]


def delta(part, kernel, *tensors):
    q, k, v, g, beta = tensors
    return GatedDelta.mix(part, kernel, q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def plain_delta(q, k, *others):
    q, k = (nn.functional.normalize(t, dim=-1) for t in (q, k))
    return reference.gated_delta_rule(q, k, *others, documents=DOCUMENTS)[0]


def mamba_inputs():
    shapes = [(HEADS, VALUES), (HEADS,), (1, KEYS), (1, KEYS)]
    tokens = [randn(1, LENGTH, *shape, seed=i) for i, shape in enumerate(shapes)]
    return [*tokens, -randn(HEADS, seed=4).exp(), randn(HEADS, seed=5), randn(HEADS, seed=6)]


def mamba(part, kernel, *tensors):
    x, dt, b, c, a, d, bias = tensors
    return Mamba2.mix(part, kernel, x, dt, a, b, c, chunk_size=16, D=d, dt_bias=bias, dt_softplus=True)


def plain_mamba(*tensors):
    x, dt, b, c, a, d, bias = tensors
    return reference.mamba2(x, nn.functional.softplus(dt + bias), a, b, c, d, documents=DOCUMENTS)[0]


FAMILIES = {
    "gated delta rule": (functools.partial(delta_inputs, False), delta, plain_delta, delta_kernel, 5),
    "Kimi delta attention": (functools.partial(delta_inputs, True), delta, plain_delta, delta_kernel, 5),
    "Mamba-2": (mamba_inputs, mamba, plain_mamba, mamba_kernel, 4),
}


def over(rank, world, name, heads, chunks):
    (make, run, plain, kernel, count), calls = FAMILIES[name], []
    own = torch.arange(LENGTH).view(chunks, world, -1)[:, rank].flatten()
    part = Part(by_heads if heads else pass_state, Exchange(SPContext.create(world).sp_group), (0, world))
    part.chunk = (len(own) // chunks, world)
    whole = [leaf(t) for t in make()]
    dout = randn(1, LENGTH, HEADS, VALUES, seed=9)
    want = gradients(plain, whole, dout)
    mine = [leaf(t[:, own]) for t in whole[:count]] + whole[count:]
    with nan_memory():
        got = gradients(functools.partial(run, part, wrapped(kernel(calls))), mine, dout[:, own])
    end = count + 1
    return {
        "error": worst(got[:end], [t[:, own] for t in want[:end]], want[:end]), "calls": calls,
        "weights": list(got[end:]), "want": list(want[end:]),
    }  # fmt: skip


@pytest.mark.parametrize("heads, chunks", [(False, 1), (False, 2), (True, 1), (True, 2)], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_one_call(pools, name, world, heads, chunks):
    results = [over(0, 1, name, heads, chunks)] if world == 1 else pools(world)(over, name, heads, chunks)
    for rank, result in enumerate(results):
        assert result["error"] < TOLERANCE, (rank, result)
        packed = [count for count in result["calls"] if count > 1]
        assert len(packed) == chunks, (rank, result["calls"])
        assert len(result["calls"]) <= 4 * chunks, (rank, result["calls"])  # the first, the last, and a pair
    for i, want in enumerate(results[0]["want"]):
        assert worst([sum(result["weights"][i] for result in results)], [want]) < TOLERANCE, i


def test_what_a_kernel_takes_is_seen_through_transformers():
    for name in ("cu_seqlens", "seq_idx"):
        assert not takes(modeling_qwen3_next.torch_chunk_gated_delta_rule, name)
        assert not takes(modeling_mamba2.mamba2_chunk_scan, name)
        assert not takes(wrapped(lambda q, **kwargs: q), name)
    assert takes(wrapped(delta_kernel([])), "cu_seqlens")
    assert takes(delta_kernel([]), "cu_seqlens")
    assert takes(wrapped(mamba_kernel([])), "seq_idx")


def test_the_oracle_computes_what_transformers_does():
    """In fp32, as transformers does."""
    theirs = modeling_qwen3_next.torch_recurrent_gated_delta_rule, modeling_kimi_linear.recurrent_kimi_delta_attention
    for kimi, fn in enumerate(theirs):
        q, k, v, g, beta = delta_inputs(bool(kimi))
        k = nn.functional.normalize(k, dim=-1)
        found = fn(q.float(), k.float(), v.float(), g=g.float(), beta=beta.float(), initial_state=None,
                   output_final_state=True)  # fmt: skip
        assert worst([t.double() for t in found], reference.gated_delta_rule(q, k, v, g, beta)) < 1e-6, fn
