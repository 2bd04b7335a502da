"""Mistakes made on purpose in what moves tensors (between a device and its host, between ranks, between passes) and in
what engines are given: each gives wrong gradients in a whole step, or an error. README.md has the same table."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
import torch
from cases import make_model, slopes
from device.module import NEVER, device, late
from matrix import Case
from mutate import changed, mutated

import alstlib
from alstlib import recompute
from alstlib.data.loader import SPDataLoader
from alstlib.hf import block_calls, block_step, causal_lm_loss, hidden_states, layer_runner
from alstlib.linear import adapter, by_heads, convolution, pass_state
from alstlib.offload import checkpoints, courier, host_store, storage
from alstlib.streaming import blocks, chunked, pages
from alstlib.ulysses import alltoall, attention, head_layouts

ALONE = Case("llama", "1x1", way="host", device="late")
ALONE_KEPT = Case("llama", "1x1", way="kept", device="late")
HOST = Case("llama", way="host", device="late")
LARGER_PAGES = Case("llama", way="host", tiles="default", device="late")
BLOCKS = Case("mistral", way="blocks", device="late")
SEGMENTS = Case("nemotron_h", way="kept", tiles="default")
SEGMENTS_HOST = Case("nemotron_h", way="host", tiles="default")
SEGMENTS_FSDP2 = Case("llama", way="kept", tiles="default", engine="fsdp2")
SEGMENTS_ZERO3 = Case("llama", way="hidden", tiles="default", engine="zero3")
TWO, FOUR, PARTS = Case("llama"), Case("llama", "4x1"), Case("llama, 7 heads on 1", "3x1")
SINKS, STATES, GROUPS = Case("gpt_oss"), Case("bamba"), Case("bamba", "4x1", states="heads")
DDP = Case("llama", "1x2", data="lengths", way="blocks", engine="ddp")
ZERO1 = Case("llama", "1x2", data="lengths", way="blocks", engine="zero1")
ZERO2 = Case("bamba", "2x2", data="lengths", way="blocks", engine="zero2", states="heads")
ZERO3 = Case("llama", engine="zero3")
FROZEN = Case("llama", weights="frozen embeddings", way="chunks", engine="zero3")
THREADS = Case("llama", way="host", engine="ddp", device="late")
ARRIVAL, COPIES, STORE, LAYER_PAGES = courier.Arrival, storage.Copies, host_store.HostStore, pages.LayerPages
PASS_STATE, AROUND, EXCHANGE = pass_state._PassState, convolution._TokensAround, alltoall.Exchange
SHARE = "ctx.world_size * engine_divides_by / step_tokens"

CHANGES = {
    ALONE: {
        "fetch: the buffers may still be read": (COPIES.fetch, "self.back.wait_stream(compute)", "pass"),
        "fetch: what was sent is not there yet": (COPIES.fetch, "self.back.wait_event(after)", "pass"),
        "fetch: compute does not wait": (ARRIVAL.get, "copies.compute.wait_event(self.event)", "pass"),
        "fetch: an event of the wrong stream": (COPIES.fetch, "self.back.record_event()", "compute.record_event()"),
        "send: out does not wait": (COPIES.send, "self.out.wait_stream(compute)", "pass"),
        "send: x is freed": (COPIES.send, "append((x, done))", "append((None, done))"),
        "send: x is freed without a wait": (COPIES.send, "compute.wait_event(done_before)", "pass"),
        "finish: the host does not wait": (COPIES.finish, "stream.synchronize()", "pass"),
        "finish: rotary tables are not there yet": (hidden_states._rotary, "courier.finish()", "pass"),
    },
    ALONE_KEPT: {
        "put: out does not wait": (COPIES.send, "self.out.wait_stream(compute)", "pass"),
        "put: x is freed": (COPIES.send, "append((x, done))", "append((None, done))"),
        "put: x is freed without a wait": (COPIES.send, "compute.wait_event(done_before)", "pass"),
        "get: compute does not wait": (STORE.get, "copies.compute.wait_event(event)", "pass"),
        "store: back does not wait": (STORE._fetch, "hosts, ticket.sent)", "hosts, None)"),
        "store: the buffers may still be read": (COPIES.fetch, "self.back.wait_stream(compute)", "pass"),
    },
    HOST: {
        "pages: sums do not go to the host": (
            LAYER_PAGES._send_sums, "page.host_sums, page.sums = self._send(page, page.sums, page.host_sums), []",
            "page.sums = []",
        ),
        "pages: sums do not come back": (LAYER_PAGES.visit, "if page.host_sums else", "if False else"),
        "pages: one is fetched before it is there": (LAYER_PAGES._fetch, "after=page.sent", "after=None"),
        "pages: the next is the one that is here": (
            LAYER_PAGES.visit, "self._fetch(order[i + 1], sums)", "self._fetch(order[i], sums)",
        ),
        "pages: forward lets one go as backward does": (LAYER_PAGES._open, "before > index", "before < index"),
        "chunks: backward from the first on": (
            chunked._Streamed.backward,
            "_rows(pieces[::-1]), x, grad):\n            piece, replay = pieces.pop(), replays.pop()",
            "_rows(pieces), x, grad):\n            piece, replay = pieces.pop(0), replays.pop(0)",
        ),
    },
    LARGER_PAGES: {
        "pages: rows of each chunk at the beginning": (LAYER_PAGES.fill, "held[first : first + rows]", "held[:rows]"),
        "pages: gradients of the first rows": (LAYER_PAGES.own, "first - at : last - at", ": last - first"),
    },
    BLOCKS: {
        "blocks: sums of the last keys at the first": (
            pages._padded, "[sums.new_zeros(lacking, *sums.shape[1:]), sums]",
            "[sums, sums.new_zeros(lacking, *sums.shape[1:])]",
        ),
        "blocks: sums go with the keys": (
            blocks.BlockPages.leave, "self.held[self.open].device = []", "self.held[self.open] = _Page()",
        ),
    },
    SEGMENTS: {
        "segment: every input is made from the first": (
            checkpoints.Segment.take, "again(self.inputs[i]", "again(self.inputs[0]",
        ),
        "saved: logsumexp for output": (
            checkpoints.Saved.rewind, "zip(tensors[::2], tensors[1::2])", "zip(tensors[1::2], tensors[::2])",
        ),
        "saved: what another part left": (checkpoints.Saved.left_by, "(part, self._calls[part])", "(0, 1)"),
        "saved: another delta": (attention._Attention.backward, "out = output_with(delta, dout)", "out = dout"),
    },
    SEGMENTS_HOST: {
        "segment: in chunks, by the next layer": (checkpoints.Segment.take, "self.members[i]", "self.members[i + 1]"),
    },
    SEGMENTS_FSDP2: {
        "segment: a sharded layer runs": (layer_runner.run_whole, 'and hasattr(layer, "reshard")', "and False"),
    },
    SEGMENTS_ZERO3: {
        "segment: a leaf of ZeRO-3 runs": (layer_runner.run_whole, '"_z3_leaf", False)', '"_no_leaf", False)'),
    },
    "kept": {
        "dropout: other masks of the device": (
            recompute.Replay.__call__, "self.here.set_rng_state(self.device_state, self.device)", "pass",
        ),
        "dropout: other masks in a checkpoint": (
            checkpoints._recompute, "with member.replay(), torch.enable_grad()", "with torch.enable_grad()",
        ),
        "dropout: other masks where an input is made again": (
            checkpoints._Checkpointed.again, "with torch.no_grad(), self.replay()", "with torch.no_grad()",
        ),
    },
    "host": {
        "dropout: other masks in a chunk": (
            chunked._recompute, "with replay(), torch.enable_grad()", "with torch.enable_grad()",
        ),
    },
    TWO: {
        "exchange: heads in another order": (
            EXCHANGE.to_heads, "t.unflatten(1, (p, -1))", "t.unflatten(1, (-1, p)).transpose(1, 2)",
        ),
        "exchange: tokens of another rank": (EXCHANGE._swap, "return receive", "return receive.flip(0)"),
    },
    FOUR: {
        "exchange: gradients of shared keys of one rank": (
            EXCHANGE.shared_to_seq, ".sum(1, dtype=wide)", ".select(1, 0)",
        ),
    },
    PARTS: {
        "parts of heads: gradients of keys of one rank": (
            head_layouts.SplitRows.swap_back, "total[:, message.kv] += t", "total[:, message.kv] = t",
        ),
    },
    SINKS: {
        "sinks: those of the first rank's heads": (
            head_layouts.WholeHeads.__init__, "slice(exchange.rank * each, (exchange.rank + 1) * each)",
            "slice(0, each)",
        ),
    },
    STATES: {
        "states: the one before another rank": (
            PASS_STATE.forward, "states[exchange.rank]", "states[exchange.rank - 1]",
        ),
        "states: gradients from the first rank on": (
            PASS_STATE.backward, "_of_all_ranks(exchange, m, w)[::-1]", "_of_all_ranks(exchange, m, w)",
        ),
        "convolution: tokens before another rank": (
            AROUND.forward, "at = exchange.rank * given", "at = (exchange.ranks - 1 - exchange.rank) * given",
        ),
    },
    GROUPS: {
        "states: gradients of shared groups of one rank": (
            by_heads._to_tokens, "there.add_(parts[k].transpose(0, 1)) if shared",
            "there.copy_(parts[k].transpose(0, 1)) if shared",
        ),
    },
    THREADS: {
        "threads: backward runs in two": (
            recompute.backward_in_this_thread, "torch.autograd.set_multithreading_enabled(False)", "pass",
        ),
    },
    ZERO2: {
        "replicas: gradients come in two orders": (
            adapter.in_order, "[w.view_as(w) for w in weights]", "list(weights)",
        ),
    },
    DDP: {
        "blocks: none ends the micro-batch": (block_step.block_step, "last = (part, i) == order[0]", "last = False"),
        "blocks: backward from the first on": (
            block_step.block_step, "in reversed(order) if train", "in order if train",
        ),
        "blocks: one without tokens has a label": (
            block_calls.without_tokens, "torch.full_like(like, IGNORE)", "torch.full_like(like, 5)",
        ),
        "loss: replicas are not counted": (
            causal_lm_loss.share_of, f"({SHARE}", f"({SHARE}".replace("world_size", "sp"),
        ),
        "loss: the mean of each micro-batch": (
            causal_lm_loss.share_of, "tokens if step_tokens is None else step_tokens", "tokens",
        ),
    },
    ZERO1: {
        "blocks: each ends the micro-batch": (block_step.block_step, "last = (part, i) == order[0]", "last = True"),
        "blocks: the next micro-batch ends too": (
            block_step._Engine.micro_step, "engine.set_gradient_accumulation_boundary(before)", "pass",
        ),
        "loss: the engine divides it again": (
            causal_lm_loss.share_of, f"({SHARE}", f"({SHARE}".replace(" * engine_divides_by", ""),
        ),
    },
    FROZEN: {
        "ZeRO-3: a leaf's input needs no gradient": (
            layer_runner._ensure_input_grad, "(with_gradient(args[0], layer), *args[1:]), kwargs", "args, kwargs",
        ),
    },
    ZERO3: {
        "ZeRO-3: gradients when weights are gone": (layer_runner.Whole.run, "None if taken else weights", "weights"),
    },
}  # fmt: skip
"""By what shows them (a case of the net, or a way in which a model with dropout runs on the device): a function, a
piece of its source, and what is there instead."""
MUTATIONS = {name: (*change, shown_by) for shown_by, changes in CHANGES.items() for name, change in changes.items()}


def dropout(rank, world, way):
    """The relative error of a gradient's slope against a central difference, on the device, with dropout."""
    model = make_model("gpt2", dtype=torch.float64, n_layer=3, resid_pdrop=0.1, embd_pdrop=0.1).to(device())
    sample = {"input_ids": torch.arange(3, 44)[None], "labels": torch.arange(3, 44)[None]}
    chosen = alstlib.Options(**matrix.TILES["small"], **matrix.WAYS[way])
    with alstlib.apply(model, options=chosen), matrix.full_host(), late(NEVER):
        (batch,) = SPDataLoader([sample], alstlib.SPContext(), device=device())
        slope, want = slopes(model, batch)
    return abs(slope / want - 1)


def run(rank, world, shown_by, name=""):
    """What a case gives, with a mistake by that name; or the error."""
    if name:
        function, old, new, _ = MUTATIONS[name]
        try:
            with mutated(function, (old, new)):
                return run(rank, world, shown_by)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return dropout(rank, world, shown_by) if isinstance(shown_by, str) else matrix.run(rank, world, shown_by)


def found(results, shown_by):
    """What is wrong with what the ranks gave; empty for nothing."""
    if errors := [result for result in results if isinstance(result, str)]:
        return errors[0]
    if isinstance(shown_by, str):
        return "" if results[0] < 1e-5 else f"an error of {results[0]}"
    try:
        matrix.check(results, shown_by)
    except AssertionError as e:
        return str(e)
    return ""


@pytest.fixture
def on_ranks(request):
    def call(shown_by, *more):
        alone = isinstance(shown_by, str)
        pools = request.getfixturevalue("late_pools" if alone or shown_by.device == "late" else "pools")
        return found(pools(1 if alone else shown_by.sp * shown_by.dp)(run, shown_by, *more), shown_by)

    return call


SHOWN_BY = {f"dropout {one}" if isinstance(one, str) else str(one): one for one in CHANGES}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_without_a_mistake_nothing_is_seen(on_ranks, name):
    assert on_ranks(SHOWN_BY[name]) == ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_seen(on_ranks, name):
    function, old, new, shown_by = MUTATIONS[name]
    changed(function, (old, new))  # raises an error here, where it counts for nothing
    assert on_ranks(shown_by, name)


def test_the_readme_has_the_table():
    text = Path(__file__).with_name("README.md").read_text()
    for shown_by, changes in zip(SHOWN_BY, CHANGES.values()):
        for name in changes:
            assert f"| {name} | `{shown_by}` |" in text
