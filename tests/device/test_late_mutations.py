"""Mistakes made on purpose in what moves tensors (between a device and its host, between ranks, between passes) and in
what engines are given: each gives wrong gradients in a whole step, or an error. README.md has the same table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matrix
import pytest
import torch
from cases import make_model, slopes
from device.module import NEVER, device, late
from matrix import Case
from mutate import changed, mutated

import alstlib
from alstlib.base import recompute
from alstlib.data.loader import SPDataLoader
from alstlib.hf import block_step, causal_lm_loss, layer_runner
from alstlib.linear import adapter, convolution, pass_state
from alstlib.offload import checkpoints, courier, host_store
from alstlib.streaming import blocks, chunked, pages
from alstlib.tiled import compute
from alstlib.ulysses import alltoall, attention, head_layouts


class Mutation(NamedTuple):
    function: Any
    old: str
    """A piece of its source."""
    new: str
    shown_by: Case | str
    """A case of the net, or a way in which a model with dropout runs on the device."""


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
COURIER, TICKET, LAYER_PAGES = courier.Courier, host_store.Ticket, pages.LayerPages
PREFIX, AROUND, EXCHANGE = pass_state._SliceCall.prefix, convolution._TokensAround, alltoall.Exchange
SHARE = "ctx.world_size * engine_divides_by / step_tokens"

MUTATIONS = {
    # the courier and the store
    "fetch: the buffers may still be read": Mutation(
        COURIER.fetch, "back.wait_stream(compute)", "pass", ALONE
    ),
    "fetch: what was sent is not there yet": Mutation(COURIER.fetch, "back.wait_event(after)", "pass", ALONE),
    "fetch: compute does not wait": Mutation(COURIER.fetch, "self.compute.wait_event(done)", "pass", ALONE),
    "fetch: an event of the wrong stream": Mutation(
        COURIER.fetch, "back.record_event()", "compute.record_event()", ALONE
    ),
    "send: out does not wait": Mutation(COURIER.send, "out.wait_stream(compute)", "pass", ALONE),
    "send: x is freed": Mutation(COURIER.send, "append((x, done))", "append((None, done))", ALONE),
    "send: x is freed without a wait": Mutation(COURIER.send, "compute.wait_event(done_before)", "pass", ALONE),
    "finish: the host does not wait": Mutation(COURIER.finish, "stream.synchronize()", "pass", ALONE),
    "finish: rotary tables are not there yet": Mutation(compute._run_tiles, "courier.finish()", "pass", ALONE),
    "store: back does not wait": Mutation(TICKET.fetch, "after=self.sent", "after=None", ALONE_KEPT),
    # pages and chunks
    "pages: sums do not go to the host": Mutation(
        LAYER_PAGES._send_sums, "page.host_sums, page.sums = self._send(page, page.sums, page.host_sums), []",
        "page.sums = []", HOST,
    ),
    "pages: sums do not come back": Mutation(
        LAYER_PAGES.visit, "if page.host_sums else", "if False else", HOST
    ),
    "pages: one is fetched before it is there": Mutation(LAYER_PAGES._fetch, "after=page.sent", "after=None", HOST),
    "pages: the next is the one that is here": Mutation(
        LAYER_PAGES.visit, "self._fetch(following, sums)", "self._fetch(index, sums)", HOST
    ),
    "pages: forward lets one go as backward does": Mutation(
        LAYER_PAGES._open, "before > index", "before < index", HOST
    ),
    "pages: rows of each chunk at the beginning": Mutation(
        LAYER_PAGES.fill, "held[first : first + len(t)]", "held[: len(t)]", LARGER_PAGES
    ),
    "pages: gradients of the first rows": Mutation(
        LAYER_PAGES.own, "at : at + last - first", ": last - first", LARGER_PAGES
    ),
    "chunks: backward from the first on": Mutation(
        chunked._Streamed.backward,
        "_slices(pieces[::-1]), x, grad):\n            piece, replay = pieces.pop(), replays.pop()",
        "_slices(pieces), x, grad):\n            piece, replay = pieces.pop(0), replays.pop(0)", HOST,
    ),
    "blocks: sums of the last keys at the first": Mutation(
        pages._padded, "[sums.new_zeros(lacking, *sums.shape[1:]), sums]",
        "[sums, sums.new_zeros(lacking, *sums.shape[1:])]", BLOCKS,
    ),
    "blocks: sums go with the keys": Mutation(
        blocks.BlockPages.leave, "self.held[self.open].device = []", "self.held[self.open] = HeldPage()", BLOCKS
    ),
    # checkpoints
    "segment: every input is made from the first": Mutation(
        checkpoints.Segment.take, "again(self.inputs[i]", "again(self.inputs[0]", SEGMENTS
    ),
    "segment: in chunks, by the next layer": Mutation(
        checkpoints.Segment.take, "self.members[i]", "self.members[i + 1]", SEGMENTS_HOST
    ),
    "segment: a sharded layer runs": Mutation(
        layer_runner.run_whole, 'and hasattr(layer, "reshard")', "and False", SEGMENTS_FSDP2
    ),
    "segment: a leaf of ZeRO-3 runs": Mutation(
        layer_runner.run_whole, '"_z3_leaf", False)', '"_no_leaf", False)', SEGMENTS_ZERO3
    ),
    "saved: logsumexp for output": Mutation(
        checkpoints.Saved.rewind, "zip(tensors[::2], tensors[1::2])", "zip(tensors[1::2], tensors[::2])", SEGMENTS
    ),
    "saved: another delta": Mutation(
        attention._Attention.backward, "out = output_with(delta, dout)", "out = dout", SEGMENTS
    ),
    "dropout: other masks of the device": Mutation(
        recompute.Replay.__call__,
        "torch.get_device_module(self.device).set_rng_state(state, self.device)", "pass", "kept",
    ),
    "dropout: other masks in a checkpoint": Mutation(
        checkpoints._recompute, "with member.replay(), torch.enable_grad()", "with torch.enable_grad()", "kept"
    ),
    "dropout: other masks where an input is made again": Mutation(
        checkpoints._Checkpointed.again, "with torch.no_grad(), self.replay()", "with torch.no_grad()", "kept"
    ),
    "dropout: other masks in a chunk": Mutation(
        chunked._recompute, "with replay(), torch.enable_grad()", "with torch.enable_grad()", "host"
    ),
    # the exchange between ranks
    "exchange: heads in another order": Mutation(
        EXCHANGE.to_heads, "t.unflatten(1, (n, -1))", "t.unflatten(1, (-1, n)).transpose(1, 2)", TWO
    ),
    "exchange: tokens of another rank": Mutation(EXCHANGE._swap, "return receive", "return receive.flip(0)", TWO),
    "exchange: gradients of shared keys of one rank": Mutation(
        EXCHANGE._exchange, ".sum(1, dtype=wide)", ".select(1, 0)", FOUR
    ),
    "parts of heads: gradients of keys of one rank": Mutation(
        head_layouts.SplitHeads._move, ".add_(next(arrived)", ".copy_(next(arrived)", PARTS
    ),
    "sinks: those of the first rank's heads": Mutation(
        head_layouts.WholeHeads.__init__, "slice(exchange.rank * each, (exchange.rank + 1) * each)", "slice(0, each)",
        SINKS,
    ),
    "states: the one before another rank": Mutation(
        PREFIX, "if back else self.exchange.rank]", "if back else self.exchange.rank - 1]", STATES
    ),
    "states: gradients from the first rank on": Mutation(
        PREFIX, "everyone[::-1] if back else everyone", "everyone", STATES
    ),
    "states: gradients of shared groups of one rank": Mutation(
        EXCHANGE._exchange, ".sum(1, dtype=wide)", ".select(1, 0)", GROUPS
    ),
    "convolution: tokens before another rank": Mutation(
        AROUND.forward, "exchange.rank * ctx.given", "(exchange.ranks - 1 - exchange.rank) * ctx.given", STATES
    ),
    # what engines are given, and when
    "threads: backward runs in two": Mutation(
        recompute.backward_in_this_thread, "torch.autograd.set_multithreading_enabled(False)", "pass", THREADS
    ),
    "replicas: gradients come in two orders": Mutation(
        adapter.in_order, "[w.view_as(w) for w in weights]", "list(weights)", ZERO2
    ),
    "blocks: none ends the micro-batch": Mutation(
        block_step.block_step, "last=(part, i) == order[0]", "last=False", DDP
    ),
    "blocks: each ends the micro-batch": Mutation(
        block_step.block_step, "last=(part, i) == order[0]", "last=True", ZERO1
    ),
    "blocks: the next micro-batch ends too": Mutation(
        block_step.MicroSteps.micro_step, "after.callback(told, engine._is_gradient_accumulation_boundary)", "pass",
        ZERO1,
    ),
    "blocks: backward from the first on": Mutation(
        block_step.block_step, "in reversed(order) if train", "in order if train", DDP
    ),
    "blocks: one without tokens has a label": Mutation(
        block_step.without_tokens, "torch.full_like(like, IGNORE)", "torch.full_like(like, 5)", DDP
    ),
    "loss: replicas are not counted": Mutation(
        causal_lm_loss.share_of, f"({SHARE}", f"({SHARE}".replace("world_size", "sp"), DDP
    ),
    "loss: the mean of each micro-batch": Mutation(
        causal_lm_loss.share_of, "tokens if step_tokens is None else step_tokens", "tokens", DDP
    ),
    "loss: the engine divides it again": Mutation(
        causal_lm_loss.share_of, f"({SHARE}", f"({SHARE}".replace(" * engine_divides_by", ""), ZERO1
    ),
    "ZeRO-3: a leaf's input needs no gradient": Mutation(
        layer_runner._ensure_input_grad, "(with_gradient(args[0], layer), *args[1:]), kwargs", "args, kwargs", FROZEN
    ),
    "ZeRO-3: gradients when weights are gone": Mutation(
        layer_runner.Whole.run, "None if taken else weights", "weights", ZERO3
    ),
}  # fmt: skip


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


def by_name(shown_by):
    return {f"dropout {one}" if isinstance(one, str) else str(one): one for one in shown_by}


SHOWN_BY = by_name(mutation.shown_by for mutation in MUTATIONS.values())


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
    for name, mutation in MUTATIONS.items():
        assert f"| {name} | `{next(iter(by_name([mutation.shown_by])))}` |" in text
