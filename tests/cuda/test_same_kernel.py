"""The simulator chooses the kernel that a run on a GPU chooses, and a rule without torch foretells it."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from cases import values_of
from fake import fake_cuda
from operators import Operations, error_of
from quick_steps import quick  # noqa: F401

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.sizing import as_on, sdpa_kernel
from alstlib.planner.activations import kernel_workspace
from alstlib.planner.gpus import GPUS, rates_of
from alstlib.planner.machine import Machine
from alstlib.planner.measure.simulate import simulate
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import predict
from alstlib.ulysses.attention import UlyssesAttention


@pytest.mark.parametrize("capability", [8, 9, 10])
def test_one_kernel_for_every_width(capability):
    """On the device, on a CPU that stands in for it, and by the rule."""
    op = UlyssesAttention(alstlib.SPContext())  # which keeps what it has chosen for a device
    widths, dtypes = (4, 8, 36, 64, 80, 128, 136, 192, 256, 512), (torch.bfloat16, torch.float32)
    with fake_cuda((capability, 0)):
        for width, dtype, softcap in itertools.product(widths, dtypes, (None, 2.0)):
            chosen = {sdpa_kernel("cuda", dtype.itemsize, width, softcap is not None, capability)}
            for device, on in (("cuda:0", nullcontext()), ("cpu", as_on("cuda", capability))):
                with on:
                    q = torch.empty(1, 2, 4, width, dtype=dtype, device=device)
                    chosen.add(op.way(q, q, q, softcap=softcap).backend.name)
            assert len(chosen) == 1, (chosen, width, dtype, softcap)


def tiny(attention, **fields):
    """A run of one layer, with all that the options turn off turned off."""
    model = {"name": "tiny", "config": {"num_hidden_layers": 1}, "dtype": "bf16", **fields}
    return RunConfig(model=model, data={"seq_len": 256}, options=alstlib.Options.plain(attention=attention))


CHOSEN = """
sdpa      -> bf16 -> {}               -> cudnn
sdpa      -> bf16 -> {capability: 8}  -> flash
sdpa      -> fp32 -> {}               -> efficient
sdpa      -> fp32 -> {capability: 8}  -> efficient
sdpa      -> bf16 -> {device: cpu}    -> cpu
cudnn     -> bf16 -> {}               -> cudnn
flash     -> bf16 -> {}               -> flash
efficient -> bf16 -> {}               -> efficient
blockwise -> bf16 -> {}               -> blockwise
eager     -> bf16 -> {}               -> eager
cudnn     -> bf16 -> {device: cpu}    -> attention='cudnn' does not run on cpu
flash     -> bf16 -> {device: cpu}    -> attention='flash' does not run on cpu
efficient -> bf16 -> {device: cpu}    -> attention='efficient' does not run on cpu
cpu       -> bf16 -> {}               -> attention='cpu' does not run on cuda
"""


@pytest.mark.parametrize("attention, dtype, how, kernel", values_of(CHOSEN))
def test_a_simulated_step_runs_it(attention, dtype, how, kernel):
    """What the GPU chooses, or what is named; or says that it does not run there."""
    run = tiny(attention, dtype=dtype)
    if " " in kernel:
        assert kernel in error_of(simulate, run, 2, **how)
    else:
        assert simulate(run, 2, **how).kernel == kernel


def test_simulated_blocks_are_multiplied_as_on_the_device():
    """A GPU sums products of bf16 in fp32 without a copy of the blocks in fp32, which a CPU needs."""
    found = {}
    for device in ("cuda", "cpu"):
        with Operations() as operations:
            assert simulate(tiny("blockwise"), 1, device).kernel == "blockwise"
        found[device] = operations.ran["aten.bmm.dtype"]
    assert found["cuda"] > 0 == found["cpu"]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype, nbytes", [("bf16", 2), ("fp32", 4)])
def test_the_planner_foretells_it(gpu, dtype, nbytes):
    """By the GPU and by the width of heads."""
    rates = rates_of(gpu)
    for width in (64, 80, 100, 128, 192, 256, 512):
        fields = {"head_dim": width, "num_hidden_layers": 2}
        run = RunConfig(model={"name": "llama-3.1-8b", "config": fields, "dtype": dtype})
        found = predict(read_shape(run.model.name, fields), run, Machine(rates=rates), 32_768).activations
        assert found.kernel == sdpa_kernel("cuda", nbytes, width, False, rates.capability)


def test_what_a_kernel_takes_for_itself():
    shape, queries = read_shape("llama-3.1-8b"), 1000 * 32 * 128
    flash = kernel_workspace(shape, "flash", 1000)
    assert flash == 2 * kernel_workspace(shape, "cudnn", 1000) == 8 * queries
    for kernel in ("flash", "cudnn"):  # which leaves documents to flash: a block of 128 rows for each 1,024 tokens
        assert kernel_workspace(shape, kernel, 1000, packed=True) == 8 * queries + 4 * queries / 8
