"""Kernels that count with 32 bits get calls below 2^31 elements, or none: stand-ins for the kernels note their calls,
on fake tensors of 4M tokens, and are compared with whole calls where tensors are small."""

import functools
import importlib.metadata
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
from cases import check_refused, values_of
from operators import as_transformers_wraps, gradients, randn, worst
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from alstlib.kernels import int32
from alstlib.kernels.int32 import KERNELS, below_int32, spanned
from alstlib.linear.adapter import CONVOLUTION, takes
from alstlib.linear.adapters.gated_delta import GatedDelta

TOKENS, LIMIT = 2**22, 2**31
PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "training.md"


def stand_in(package, name, makes=lambda x, *_, **__: torch.empty_like(x)):
    """A function as a package has it, as transformers wraps it, and the calls that it got."""
    calls = []

    @functools.wraps(makes)  # transformers reads its parameters
    def kernel(*args, **kwargs):
        calls.append((spanned(*args, **kwargs), args[0].shape))
        return makes(*args, **kwargs)

    kernel.__module__, kernel.__qualname__, kernel.__name__ = f"{package}.inside", name, name
    return as_transformers_wraps(kernel), calls


def convolution(x, weight, bias=None, activation=None):
    assert activation == "silu"
    out = nn.functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    return nn.functional.silu(out[..., : x.shape[2]])


def fake(*sizes, channels_last=False):
    x = torch.empty(*sizes, dtype=torch.bfloat16)
    return x.transpose(1, 2) if channels_last else x


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("width", [8192, 40_000])
def test_a_convolution_of_4m_tokens_is_cut(channels_last, width):
    guarded, calls = stand_in("causal_conv1d", "causal_conv1d_fn")
    with FakeTensorMode():
        x = fake(1, TOKENS, width, channels_last=True) if channels_last else fake(1, width, TOKENS)
        x = x[:, :8192]  # what lies beside it in memory counts too
        out = below_int32(guarded)(x, fake(8192, 4), activation="silu")
        assert out.shape == x.shape
    assert len(calls) > 1
    assert all(most < LIMIT for most, _ in calls)
    assert sum(shape[2] for _, shape in calls) == TOKENS + 3 * (len(calls) - 1)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("elements", [16, 37, 49, 1000])
def test_a_cut_convolution_is_the_whole_one(monkeypatch, channels_last, elements):
    guarded, calls = stand_in("causal_conv1d", "causal_conv1d_fn", convolution)
    x = randn(2, 13, 3).transpose(1, 2) if channels_last else randn(2, 3, 13)
    inputs = [t.requires_grad_() for t in (x, randn(3, 4, seed=1), randn(3, seed=2))]
    monkeypatch.setattr(int32, "ELEMENTS", elements)
    upstream = randn(2, 3, 13, seed=3)
    own = gradients(lambda *t: below_int32(guarded)(*t, activation="silu"), inputs, upstream)
    assert worst(own, gradients(lambda *t: convolution(*t, activation="silu"), inputs, upstream)) < 1e-12
    assert all(most < elements for most, _ in calls)
    assert (len(calls) == 1) == (elements == 1000)


def recurrence(name, tokens):
    """Arguments of a kernel, of one whole sample."""
    if name == "mamba_chunk_scan_combined":  # its states are what is large
        x, groups = fake(1, tokens, 256, 64), fake(1, tokens, 8, 128)
        return (x, fake(1, tokens, 256), fake(256), groups, groups), {"chunk_size": 128}
    if name == "selective_scan_fn":
        x, states = fake(1, 4096, tokens), fake(1, 16, tokens)
        return (x, x, fake(4096, 16), states, states), {}
    q, v = fake(1, tokens, 16, 128), fake(1, tokens, 32, 128)
    return (q, q, v, fake(1, tokens, 32), fake(1, tokens, 32)), {}


FITS = values_of("""
mamba_ssm -> mamba_chunk_scan_combined -> 130816
mamba_ssm -> selective_scan_fn         -> 524032
fla       -> chunk_gated_delta_rule    -> 524032
fla       -> chunk_kda                 -> 524032
""")
"""Packages, their kernels, and the longest call that passes."""


@pytest.mark.parametrize("package, name, fits", FITS)
def test_a_recurrence_of_4m_tokens_is_refused(package, name, fits):
    kernel, calls = stand_in(package, name)
    says = rf"{name} counts elements with 32 bits .* A call of {fits:,} tokens passes: use a smaller options.chunk"
    with FakeTensorMode():
        for tokens in (TOKENS, fits + 512):
            args, more = recurrence(name, tokens)
            check_refused(says, below_int32(kernel), *args, **more)
        assert calls == []
        args, more = recurrence(name, fits)
        below_int32(kernel)(*args, **more)
    assert len(calls) == 1


def test_a_mixer_runs_guarded_kernels(monkeypatch):
    delta, _ = stand_in("fla", "chunk_gated_delta_rule")
    convolve, calls = stand_in("causal_conv1d", "causal_conv1d_fn")
    monkeypatch.setattr(modeling_qwen3_next, GatedDelta.recurrence, delta)
    monkeypatch.setattr(modeling_qwen3_next, CONVOLUTION, convolve)
    config = Qwen3NextConfig(hidden_size=8, linear_num_key_heads=1, linear_num_value_heads=1)
    with torch.device("meta"):
        mixer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    space = GatedDelta.forward(mixer, lambda name: SimpleNamespace()).func.__globals__
    with FakeTensorMode():
        args, _ = recurrence("", TOKENS)
        check_refused("fla-core: chunk_gated_delta_rule", space[GatedDelta.recurrence].args[1], *args)
        space[CONVOLUTION].args[1](fake(1, TOKENS, 8192, channels_last=True), fake(8192, 4))
    assert len(calls) > 1


@pytest.mark.parametrize(("installed", "guards"), [("0.5.1", True), ("0.6.0", False), ("0.10.0.post1", False)])
def test_a_mended_version_runs_as_it_is(monkeypatch, installed, guards):
    monkeypatch.setattr(importlib.metadata, "version", {"fla-core": installed}.__getitem__)
    kernel, _ = stand_in("fla", "chunk_kda")
    assert (below_int32(kernel) is not kernel) == guards


def test_functions_of_others_are_left_alone():
    for function in (stand_in("a_package", "causal_conv1d_fn")[0], stand_in("fla", "another")[0], convolution, len):
        assert below_int32(function) is function


def in_the_hubs_module(function, name):
    """As `use_kernel_forward_from_hub` of the package `kernels` (0.17) makes a function a module."""

    class Func(nn.Module):
        kernel_layer_name = name

        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Func()


def test_a_kernel_of_the_hub_is_one_of_any_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"fla-core": "0.6.0"}.__getitem__)
    module = in_the_hubs_module(stand_in("fla", "chunk_kda")[0], "chunk_kda")
    with FakeTensorMode():
        args, _ = recurrence("", TOKENS)
        below_int32(module)(*args)  # that of the package, which counts with 64 bits
        module.forward = MethodType(lambda self, q, k, v, g, beta: torch.empty_like(v), module)  # as `kernelize` does
        check_refused(r"a kernel of the hub for .* chunk_kda counts .* or more ranks$", below_int32(module), *args)
        args, _ = recurrence("", 2**18)
        assert below_int32(module)(*args).shape == args[2].shape


def test_functions_stay_known_where_the_package_of_the_hub_is_installed():
    kernel, _ = stand_in("fla", "chunk_gated_delta_rule", lambda q, k, v, g, beta, cu_seqlens=None: v)
    guarded = below_int32(in_the_hubs_module(kernel, "chunk_gated_delta_rule"))
    assert takes(guarded, "cu_seqlens")
    with FakeTensorMode():
        check_refused("fla-core: chunk_gated_delta_rule", guarded, *recurrence("", TOKENS)[0])
    own = in_the_hubs_module(convolution, "causal_conv1d_fn")  # transformers' plain function
    assert below_int32(own) is convolution


def test_what_a_kernel_takes_is_still_known():
    def packed(q, cu_seqlens=None):
        return q

    packed.__module__, packed.__qualname__ = "fla.ops", "chunk_kda"
    assert takes(below_int32(packed), "cu_seqlens")
    assert not takes(below_int32(packed), "seq_idx")


def test_the_page_has_the_table():
    page = PAGE.read_text(encoding="utf-8")
    for kernel in (k for kernels in KERNELS.values() for k in kernels):
        names = ", ".join(f"`{name}`" for name in kernel.names)
        how = "cut" if kernel.split else "refused"
        row = f"| {kernel.package} | {names} | {kernel.counts} | {kernel.checked} | {kernel.mended or 'none'} | {how} |"
        assert row in page
