"""Hidden states, keys and values of row chunks on the host: the same bits, no byte in vain, nothing left behind."""

import functools
from concurrent.futures import ThreadPoolExecutor

import matrix
import pytest
import torch
import yaml
import zoo
from cases import attach, batch, check_step, growth, make_model, plain_step, same, small_pages, step, train, with_lora

import alstlib
from alstlib.base.recompute import check_thread
from alstlib.base.sizing import Forward
from alstlib.offload import headroom
from alstlib.offload.host_store import HostOutOfMemory

LENGTH, CHUNK, LAYERS, WIDTH = 22, 4, 4, 32
ROW = LENGTH * WIDTH * 4
"""Bytes of one layer's input."""


HOST = {
    "tiles": {"mlp": True, "loss": 8, "norm": True},
    "offload": "sync",
    "save_attention": False,
    "chunk": CHUNK,
    "on_host": "hidden+kv",
}


def streamed(model, **how):
    return attach(model, **{**HOST, **how})


UNUSUAL = yaml.safe_load("""
[[1x1, 1, hidden], [1x1, 64, hidden+kv], [2x1, 1, hidden+kv], [2x1, 100, none], [3x1, 1, none], [3x1, 64, hidden],
 [3x1, 100, hidden+kv]]
""")


@pytest.mark.parametrize("ranks, chunk, on_host", UNUSUAL)
def test_gradients_of_plain_transformers(pools, ranks, chunk, on_host):
    """What the net has not: chunks of a token, of almost all and of more than all tokens."""
    case = matrix.Case("llama", ranks, "lengths" if ranks == "1x1" else "packed rows")
    more = {"offload": "sync", "save_attention": False, "chunk": chunk, "on_host": on_host}
    matrix.check_on(pools, case, (1e-12, 1e-12), options=more)


def test_backward_runs_in_one_thread():
    """Else engines look for gradients that are not there yet, on a device that has an autograd thread of its own."""
    model, many = make_model(), torch._C._is_multithreading_enabled
    with streamed(model, on_host="none"):
        step(model, batch(LENGTH))
        assert many()
    with streamed(model):
        with torch.no_grad():
            alstlib.causal_lm_loss(model, batch(LENGTH))
        assert many()
        step(model, batch(LENGTH))
        assert not many()
        check_thread(torch.device("meta"))
        with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="called in another thread than forward"):
            other.submit(check_thread, torch.device("meta")).result()
    assert many()


def test_one_input_in_two_where_the_host_is_short():
    """Gradients of such steps are compared in the net, by tiles that are not small."""
    model, tables = make_model(num_hidden_layers=LAYERS), 2 * LENGTH * 8 * 4
    for every, rows in ((1, LAYERS + 3), (2, LAYERS // 2 + 3)):  # what is there of a layer's input at once
        budget = rows * ROW + tables
        rule = Forward(
            layers=LAYERS, attending=range(LAYERS), save=False, input_bytes=ROW, outputs=(1,), chunks=2, travels=True,
            tables=tables,
        )  # fmt: skip
        assert rule.kept(budget) == (every, 0, budget, False)
        with small_pages(), streamed(model, host_memory=budget, on_host="hidden") as handle:
            step(model, batch(LENGTH))
            assert handle.plan.inputs_kept_every == every
            assert any("one in 2 is kept" in note for note in handle.notes) == (every > 1)
            assert handle.store.peak_nbytes <= budget


@pytest.mark.parametrize("save", [True, False])
def test_no_byte_travels_in_vain(save):
    """Bytes sent and fetched in a step, by the formula; nothing is left on the host."""
    model, sample = make_model(num_hidden_layers=LAYERS), batch(LENGTH)
    with small_pages(), streamed(model, save_attention=save) as handle:
        step(model, sample)
        store = handle.store
        assert store.leased == 0
        before = store.bytes_sent, store.bytes_fetched
        out = train(model, sample)  # noqa: F841 (a training loop holds it until the next one)
        sent, fetched = store.bytes_sent - before[0], store.bytes_fetched - before[1]
        assert store.leased == 0
    chunks = -(-LENGTH // CHUNK)
    last = LENGTH - (chunks - 1) * CHUNK  # rows of the last chunk, whose page stays on the device
    visits = chunks * (chunks - 1) // 2  # of the pages before a chunk's own, in one pass over all chunks
    page = (
        2 * CHUNK * 2 * 8 * 4
    )  # keys and values of a chunk, two heads of width 8; sums of their gradients are as large
    outputs = save * LENGTH * 4 * (8 * 4 + 4)  # with their logsumexps
    # a layer sends its output and its input's gradient, and all pages but the last, in forward and for backward; each
    # visit in backward sends the sums back
    layer = 2 * ROW + outputs + page * (2 * (chunks - 1) + visits)
    assert sent == LAYERS * layer + 4 * ROW + 2 * LENGTH * 8 * 4  # embeddings, norm and loss; rotary tables
    # it fetches its input in forward, but for the last chunk for its keys, and with its output's gradient to be
    # recomputed. Passes over the pages: forward, recompute where outputs are not kept, backward; all pages but the last
    # are opened once. Sums are made of zeros at the first visit, by the last chunk
    passes = 2 if save else 3
    layer = 3 * ROW + (ROW - last * WIDTH * 4) + outputs + page * (passes * visits + chunks - 1) + page * visits
    assert fetched == LAYERS * layer + 5 * ROW


@pytest.mark.parametrize("block", [None, CHUNK])
def test_the_same_bits_wherever_tensors_lie(block):
    """In chunks of each layer, and in blocks of the model, which have keys and values to place."""
    model, found = make_model(), []
    for on_host in ("none", "hidden+kv") if block else ("none", "hidden", "hidden+kv"):
        how = {"on_host": on_host, "save_attention": True, "chunk": None if block else CHUNK}
        with small_pages(), streamed(model, **how):
            found.append(step(model, batch(LENGTH, (3, 1, 18)), block=block)[1])
    assert all(same(found[0], other) for other in found[1:])


def test_embeddings_with_an_adapter_travel_as_a_whole():
    """On a GPU one part on the host and one on the device could not be added."""
    adapted = with_lora(make_model(num_hidden_layers=LAYERS), ["embed_tokens"])
    model, want = adapted.get_base_model(), plain_step(adapted, batch(LENGTH))
    for where in ("none", "hidden+kv"):
        with small_pages(), streamed(model, on_host=where):
            embeddings = model.get_input_embeddings()
            assert ("forward" in embeddings.__dict__) == (where != "none")
            assert not any("forward" in m.__dict__ for m in embeddings.modules() if m is not embeddings)
            check_step(step(adapted, batch(LENGTH)), want)


def test_a_host_that_is_too_small_is_refused_before_anything_starts():
    model, runs = make_model(num_hidden_layers=LAYERS), []
    with streamed(model, host_memory=5 * ROW):
        model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
        with pytest.raises(HostOutOfMemory, match="use a shorter sequence, more ranks"):
            step(model, batch(LENGTH))
    assert not runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, most",
    [(functools.partial(make_model, num_hidden_layers=3), 24), (functools.partial(zoo.build_hybrid, "qwen3_5"), 80)],
    ids=["attention", "states"],
)
def test_the_device_peak_does_not_grow(build, most):
    """From 256 to 512 tokens it grows by positions and labels, and by what each chunk of a layer with a state begins
    with (1,440 bytes for 64 tokens)."""
    how = {"tiles": {"mlp": True, "loss": 32, "norm": 32}, "save_attention": False, "build": build}
    with small_pages():
        assert growth(256, 512, offload="sync", chunk=64, on_host="hidden+kv", **how) < most
        assert growth(256, 512, **how) > 1000  # the reading can fail


@pytest.mark.parametrize("free, host, leaves", [(3.5, 99.0, True), (5.0, 99.0, False), (3.5, 5.9, False)])
def test_keys_leave_a_device_that_is_short_for_a_host_that_has_room(monkeypatch, free, host, leaves):
    """Keys, values and their sums take as much as two of a layer's inputs. A host with room for almost six
    of these holds the least that layers keep there, and not the keys besides."""
    monkeypatch.setattr(headroom, "device_memory", lambda device: (0, 0, int(free * ROW)))
    model = make_model(layers=LAYERS)
    with streamed(model, host_memory=int(host * ROW), on_host="auto") as handle:
        step(model, batch(LENGTH))
        assert handle.plan._pages(torch.empty(1, LENGTH, WIDTH), LENGTH, handle.facts.keys[0]) == 2 * ROW
        assert handle.plan.kv_on_host == leaves
