"""Stand-ins for fused kernels of layers with a state: they give what transformers' own functions give, without values,
and hold what is published."""

import pkgutil

import pytest
import torch
import yaml
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from alstlib.planner.measure import fused_states
from alstlib.planner.measure.ledger import Ledger

ROWS, HEADS, KEYS = 256, 4, 16
CALLS = yaml.safe_load("""
convolution:
  theirs: bamba.modeling_bamba:causal_conv1d_fn
  tensors: [1 24 256, 24 4, 24]
  how: {activation: silu}
gated_delta_rule:
  theirs: qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule
  tensors: [1 256 2 16, 1 256 2 16, 1 256 4 16, 1 256 4 wide, 1 256 4]
  how: {output_final_state: true, use_qk_l2norm_in_kernel: true}
mamba2:
  theirs: bamba.modeling_bamba:mamba2_chunk_scan
  tensors: [1 256 4 16, 1 256 4, 4 wide, 1 256 2 8, 1 256 2 8]
  how: {chunk_size: 64, return_final_states: true}
  more: {D: 4, dt_bias: 4}
mamba1:
  theirs: jamba.modeling_jamba:mamba_selective_scan
  tensors: [1 32 256, 1 32 256, 32 8 wide, 1 8 256, 1 8 256, 32 wide]
  how: {return_last_state: true, delta_softplus: true}
  more: {delta_bias: 32 wide}
""")
"""For each stand-in: transformers' function, the shapes of its tensors (wide: in fp32), what else it is given, and the
shapes of tensors that it is given by name."""


def leaf(shape):
    sizes, dtype = str(shape).removesuffix("wide").split(), torch.float32 if "wide" in str(shape) else torch.bfloat16
    return torch.rand([*map(int, sizes)], dtype=dtype).requires_grad_()


def given(name):
    """The tensors and the other arguments of a stand-in."""
    call = CALLS[name]
    return [*map(leaf, call["tensors"])], call["how"] | {n: leaf(shape) for n, shape in call.get("more", {}).items()}


@pytest.mark.parametrize("name", CALLS)
def test_what_comes_out_has_the_shapes_of_transformers_own(name):
    theirs, ours = pkgutil.resolve_name(f"transformers.models.{CALLS[name]['theirs']}"), getattr(fused_states, name)
    tensors, how = given(name)
    leaves = [*tensors, *(t for t in how.values() if isinstance(t, Tensor))]
    found = []
    for function in (theirs, ours):
        outs = function(*tensors, **how)
        outs = outs if isinstance(outs, tuple) else (outs,)
        grads = torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])
        found.append(([t.shape for t in outs], [(t.shape, t.dtype) for t in grads]))
        wide = name.startswith("mamba") and function is theirs  # transformers' own scans leave their output in fp32
        assert outs[0].dtype == (torch.float32 if wide else torch.bfloat16)
    assert found[0] == found[1]


def test_the_gated_delta_rule_keeps_what_is_published():
    """Between forward and backward: normalized queries and keys with their norms, values, sums of decays, betas, the
    inverse of each block's triangle, the output and the state."""
    (*_, g, beta), how = given("gated_delta_rule")
    mixed = leaf(f"1 {ROWS} {(2 * 2 + HEADS) * KEYS}")  # as a convolution leaves them
    with Ledger() as ledger:
        begin = ledger.device_bytes
        q, k, v = (t.unflatten(2, (-1, KEYS)) for t in mixed.split([2 * KEYS, 2 * KEYS, HEADS * KEYS], -1))
        outs = fused_states.gated_delta_rule(q, k, v, g, beta, **how)
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
