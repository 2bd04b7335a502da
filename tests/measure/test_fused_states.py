"""Stand-ins for fused kernels of layers with a state: they give what transformers' own functions give, without values,
and hold what is published."""

import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.qwen3_next import modeling_qwen3_next

from alstlib.planner.measure import fused_states
from alstlib.planner.measure.ledger import Ledger

ROWS, HEADS, KEYS = 256, 4, 16


def leaf(*shape, dtype=torch.bfloat16):
    return torch.rand(shape, dtype=dtype).requires_grad_()


def calls():
    """(transformers' function, the stand-in, tensors, what else they are given)."""
    wide = torch.float32
    mamba2 = [
        leaf(1, ROWS, HEADS, KEYS), leaf(1, ROWS, HEADS), leaf(HEADS, dtype=wide), leaf(1, ROWS, 2, 8),
        leaf(1, ROWS, 2, 8),
    ]  # fmt: skip
    mamba1 = [
        leaf(1, 32, ROWS), leaf(1, 32, ROWS), leaf(32, 8, dtype=wide), leaf(1, 8, ROWS), leaf(1, 8, ROWS),
        leaf(32, dtype=wide),
    ]  # fmt: skip
    delta = [leaf(1, ROWS, 2, KEYS), leaf(1, ROWS, 2, KEYS), leaf(1, ROWS, HEADS, KEYS)]
    gates = [leaf(1, ROWS, HEADS, dtype=wide), leaf(1, ROWS, HEADS)]
    return {
        "convolution": (
            modeling_bamba.causal_conv1d_fn, fused_states.convolution, [leaf(1, 24, ROWS), leaf(24, 4), leaf(24)],
            {"activation": "silu"},
        ),
        "gated delta rule": (
            modeling_qwen3_next.torch_chunk_gated_delta_rule, fused_states.gated_delta_rule, [*delta, *gates],
            {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
        ),
        "Mamba-2": (
            modeling_bamba.mamba2_chunk_scan, fused_states.mamba2, mamba2,
            {"chunk_size": 64, "return_final_states": True, "D": leaf(HEADS), "dt_bias": leaf(HEADS)},
        ),
        "Mamba-1": (
            modeling_jamba.mamba_selective_scan, fused_states.mamba1, mamba1,
            {"return_last_state": True, "delta_bias": leaf(32, dtype=wide), "delta_softplus": True},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(calls()))
def test_what_comes_out_has_the_shapes_of_transformers_own(name):
    theirs, ours, tensors, how = calls()[name]
    leaves = [*tensors, *(t for t in how.values() if isinstance(t, Tensor))]
    found = []
    for function in (theirs, ours):
        outs = function(*tensors, **how)
        outs = outs if isinstance(outs, tuple) else (outs,)
        grads = torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])
        found.append(([t.shape for t in outs], [(t.shape, t.dtype) for t in grads]))
        wide = name.startswith("Mamba") and function is theirs  # transformers' own scans leave their output in fp32
        assert outs[0].dtype == (torch.float32 if wide else torch.bfloat16)
    assert found[0] == found[1]


def test_the_gated_delta_rule_keeps_what_is_published():
    """Between forward and backward: normalized queries and keys with their norms, values, sums of decays, betas, the
    inverse of each block's triangle, the output and the state."""
    _, ours, (*_, g, beta), how = calls()["gated delta rule"]
    mixed = leaf(1, ROWS, (2 * 2 + HEADS) * KEYS)  # as a convolution leaves them
    with Ledger() as ledger:
        begin = ledger.device_bytes
        q, k, v = (t.unflatten(2, (-1, KEYS)) for t in mixed.split([2 * KEYS, 2 * KEYS, HEADS * KEYS], -1))
        outs = ours(q, k, v, g, beta, **how)
        kept = ledger.device_bytes - begin
    tokens = 2 * (2 * 2 * KEYS + HEADS * KEYS) + 4 * (2 + 2) + 4 * HEADS + 2 * HEADS * 64 + 2 * HEADS * KEYS
    assert kept == ROWS * tokens + 4 * HEADS * KEYS * KEYS
    assert outs[0].shape == v.shape


def test_a_model_has_its_own_functions_again():
    def functions():
        return modeling_qwen3_next.torch_chunk_gated_delta_rule, modeling_qwen3_next.causal_conv1d_fn

    before = functions()
    with torch.device("meta"):
        mixer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(modeling_qwen3_next.Qwen3NextConfig(), 0)
    with fused_states.fused_states(mixer):
        assert functions() == (fused_states.gated_delta_rule, fused_states.convolution)
    assert functions() == before
