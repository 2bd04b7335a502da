"""Whole training steps through the branches for CUDA, at the width of real models: every kernel is called as it wants
to be called, and cuDNN builds few graphs."""

import random

import pytest
import yaml
import zoo
from cases import small_pages, values_of
from steps import GEMMA, steps

ROWS = 3072
DOCUMENTS = [0, 1, 700, 1724, 1725, 2600, ROWS]
WAYS = yaml.safe_load("""
whole: {}
whole, async: {offload: true, kept: 0.5}
whole, sync, attention kept: {offload: sync, save_attention: true}
chunks: {chunk: 0}
chunks, async: {chunk: 0, offload: true, kept: 0.5, on_host: none}
chunks, host: {offload: true, chunk: 0, on_host: hidden+kv}
chunks, host, sync: {offload: sync, save_attention: true, chunk: 0, on_host: hidden+kv}
""")
"""`chunk` 0 stands for a third of a rank's rows."""
FEW = ["whole", "chunks, async", "chunks, host"]
CASES = [
    (model, sp, kernel, way)
    for model, sp, kernel, ways in values_of("""
llama-3.1-8b            -> 8  -> cudnn     -> all
llama-3.1-8b            -> 32 -> cudnn     -> few
Qwen/Qwen2.5-7B         -> 8  -> cudnn     -> few
llama-3.1-8b            -> 1  -> cudnn     -> few
google/gemma-2-9b       -> 1  -> blockwise -> ["chunks, async"]
google/gemma-2-9b       -> 8  -> blockwise -> ["whole, sync, attention kept", "chunks, host"]
""")
    for way in {"all": WAYS, "few": FEW}.get(str(ways), ways)
]  # fmt: skip
GRAPHS = 20
"""The most that cuDNN builds, at half a second each, however many batches follow."""


def options_of(way, sp):
    options = dict(WAYS[way])
    if "chunk" in options:
        options["chunk"] = ROWS // sp // 3
    return options


def run(step, **how):
    """A whole sample and a packed one: no kernel has a problem, and nothing stays on the host."""
    for documents in (None, DOCUMENTS):
        step(documents, **how)
    assert step.watch.problems == []
    assert all(len(layouts) == 1 for layouts in step.watch.graphs.values())
    assert len(step.watch.graphs) <= GRAPHS
    assert step.handle.store.leased == 0


@pytest.mark.parametrize("model, sp, kernel, way", CASES)
def test_steps(model, sp, kernel, way):
    options = options_of(way, sp)
    with small_pages(), steps(model, ROWS, sp, **options) as step:  # or all chunks would be in one page
        run(step)
        assert step.handle.attention.backend_name == kernel
        assert any("backward" in name for name in step.watch.kernels) == (kernel == "cudnn")
        if "kept" in options:
            assert step.handle.plan.attention_kept == 0.5


@pytest.mark.parametrize("model, sp", [("llama-3.1-8b", 1), (GEMMA, 8)])
def test_steps_block_by_block(model, sp):
    with steps(model, ROWS, sp, offload=True, on_host="hidden+kv") as step:
        run(step, block=-(-ROWS // sp // 3))
        assert step.handle.plan.kv_on_host


@pytest.mark.parametrize("way", ["whole, async", "chunks, host"])
def test_log_probabilities(way):
    with steps(GEMMA, ROWS, 8, **options_of(way, 8)) as step:
        run(step, logps=True)


@pytest.mark.parametrize("chunk", [None, 1024], ids=["whole", "chunks"])
def test_batches_with_other_documents_build_no_more_graphs(chunk):
    generator = random.Random(0)
    with steps("llama-3.1-8b", ROWS, 1, layers=1, chunk=chunk) as step:
        for _ in range(4):
            step([0, *sorted(generator.sample(range(1, ROWS), 7)), ROWS])
        assert step.watch.problems == []
        assert len(step.watch.graphs) <= 4


def test_offsets_of_documents_go_to_the_device_once_for_a_batch():
    """Not in every layer, nor in every pass."""
    uploads = []
    for layers in (1, 3):
        with steps("llama-3.1-8b", ROWS, 8, layers=layers) as step:
            step(DOCUMENTS)
            uploads.append(step.watch.uploads)
    assert uploads[0] == uploads[1] > 0


@pytest.mark.parametrize("name", zoo.MODELS)
def test_hidden_states_on_the_host_meet_no_tensor_of_the_device(name):
    """In whatever a decoder does before, between and after its layers."""
    with steps(name, 48, 1, chunk=16, offload=True, on_host="hidden+kv") as step:
        step([0, 20, 48])
        assert step.handle.store.bytes_fetched > 0
