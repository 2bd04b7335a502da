"""The timeline of one layer: its parts add up to those of a step, and nothing overlaps that takes turns."""

import contextlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import deepspeed
import pytest
import torch
import yaml
from cases import make_model, make_samples, wrap
from layer_timeline import COMPUTE, COPIES, DISK, EXCHANGE, STATES, layer_spans
from quick_steps import EIGHT_B as SHAPE
from quick_steps import OURS, quick  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

import alstlib
from alstlib.base import sizing
from alstlib.base.config import RunConfig, row_config
from alstlib.data.loader import SPDataLoader
from alstlib.data.shard import shard_batch
from alstlib.figures import step_plots
from alstlib.planner import devices, preflight
from alstlib.planner.activations import activations, kernel_of
from alstlib.planner.gpus import rates_of
from alstlib.planner.machine import Machine
from alstlib.planner.measure.simulate import fake_ranks, whole_model
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.step_time import (
    exchange_bytes,
    linear_flops,
    passes_of,
    products,
    step_seconds,
    zero_seconds,
)
from alstlib.runs import launch

RATES = rates_of("H100")
RUNS = yaml.safe_load("""
attention once: {}
attention twice: {options.save_attention: false}
without checkpoints: {options.checkpoint: false, options.offload: false, options.save_attention: false}
chunks: {options.chunk: 16384}
copies first: {options.offload: sync}
ZeRO-2: {engine.zero_stage: 2, engine.offload_optimizer: false}
one input in k: {options.host_memory: 20GiB, options.save_attention: false}
one input in k, outputs kept: {options.host_memory: 60GiB, options.save_attention: true}
a disk: {options.host_memory: 20GiB, options.save_attention: false, options.disk: /scratch}
block by block: {block: 16384}
two micro-batches of two: {data.batch_size: 2, optim.accumulation: 2}
""")


def both(run, ranks, seq_len):
    found = activations(SHAPE, run, ranks, seq_len, "cuda", disk=10**13 * (run.options.disk is not None))
    given = (SHAPE, run, Machine(gpus=ranks, rates=RATES), ranks, seq_len, found)
    return layer_spans(*given), step_seconds(*given), found


def total(spans, lane):
    return sum(span.seconds for part in spans.values() for span in part if span.lane == lane)


@pytest.mark.parametrize("ranks", [1, 8, 32])
@pytest.mark.parametrize("name", RUNS)
def test_all_layers_together_are_the_step(name, ranks):
    """And computing and the exchange take turns."""
    run = OURS.replace(**RUNS[name])
    spans, step, found = both(run, ranks, 512_000)
    batches = run.optim.accumulation
    head = (3 + found.twice) * linear_flops(SHAPE, 512_000 * run.data.batch_size)["head"] / RATES.matmul / ranks
    for lane, seconds in (
        (COMPUTE, step["matrix products"] - head * batches + step["attention"]), (EXCHANGE, step["exchange"]),
        (COPIES, found.copied / RATES.host * batches), (DISK, 2 * found.disk * min(ranks, 8) / 5e9 * batches),
    ):  # fmt: skip
        assert total(spans, lane) * SHAPE.layers * batches == pytest.approx(seconds, rel=1e-9)
    made_again = 1 - -(-SHAPE.layers // found.inputs_kept_every) / SHAPE.layers
    assert (made_again > 0) == ("input in k" in name and ranks == 1)  # more ranks have more hosts
    assert (found.disk > 0) == (name == "a disk" and ranks == 1)
    assert (found.blocks > 1) == (name == "block by block" and ranks < 32)
    if not found.hidden_on_host and found.blocks == 1 and not found.disk:  # it leaves once and comes back once
        assert found.copied == (2 * found.host if run.options.offload else 0)
    if ranks == 8 and run.engine.zero_stage == 3:  # gathered twice and reduced once, over NVLink; each block once more
        want = (3 + made_again + found.twice) * found.blocks * SHAPE.layer_parameters * 2 * 7 / 8 / RATES.link
        assert total(spans, STATES) == pytest.approx(want, rel=1e-9)
    for part in spans.values():
        turns, copies = ([s for s in part if s.lane in lanes] for lanes in ((COMPUTE, EXCHANGE), (COPIES,)))
        for a, b in itertools.pairwise(turns):
            assert b.start == pytest.approx(a.end)
        if run.options.offload == "sync":
            assert turns[0].start == pytest.approx(copies[0].end)
        else:
            assert {span.start for span in [turns[0], *copies]} == {0}


class Products(TorchDispatchMode):
    """Adds up the operations of matrix products by the first of these sizes that a dimension has."""

    def __init__(self, **sizes):
        super().__init__()
        self.sizes, self.operations = sizes, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm"):
            a, b = args[-2:]
            part = next((name for name, n in self.sizes.items() if n in (*a.shape, *b.shape)), None)
            self.operations[part] += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


STEPS = yaml.safe_load("""
tiles, and a checkpoint: {}
tiles alone: {options.checkpoint: false}
a checkpoint alone: {options.tiles: false}
neither: {options.tiles: false, options.checkpoint: false}
chunks of two tiles: {options.chunk: 32}
chunks of a tile: {options.chunk: 16}
chunks of which the last is shorter: {options.chunk: 40}
a chunk that is longer than the slice: {options.chunk: 100}
a tile that is longer than the slice: {options.tiles: {mlp: 80}}
a chunk and a tile that are longer: {options.chunk: 100, options.tiles: {mlp: 80}}
an adapter: {model.lora: {r: 2, target_modules: [q_proj]}}
block by block: {block: 16}
blocks without tiles: {block: 16, options.tiles: false}
""")


@pytest.mark.parametrize("name", STEPS)
def test_products_and_the_exchange_are_those_of_a_real_step(name):
    """Of two ranks, whose group sends nothing. A tile that runs again leaves its last product out. Keys are made again
    but those of the last chunk, and without attention's output projection."""
    config = {"hidden_size": 40, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    run = RunConfig(model={"name": "tiny", "config": config, "dtype": "fp32"}, options={"tiles": {"mlp": 16}})
    run = run.replace(**{"options.save_attention": False, **STEPS[name]})
    shape, ids = read_shape("tiny", config), torch.zeros(1, 128, dtype=torch.long)
    with fake_ranks(2) as ctx, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "LEAST_KEYS", 1)
        model = whole_model(run, "cpu")
        sizes = {"adapter": 2, "head": shape.vocab, "mlp": 112, "projections": 40}
        with alstlib.apply(model, ctx, run.options) as handle, Products(**sizes) as counted:
            batch = shard_batch({"input_ids": ids, "labels": ids}, 2, 1)
            if run.block:
                alstlib.block_step(model, batch, run.block)
            else:
                alstlib.causal_lm_loss(model, batch).loss.backward()
    found = SimpleNamespace(inputs_kept_every=1, attention_kept=0.0, twice=float(run.block is not None))
    passes, forward = passes_of(shape, run, found, 64), linear_flops(shape, 64)
    for part, times in products(shape, run, passes).items():
        assert counted.operations[part] == pytest.approx(times * forward[part]), part
    if run.chunk is None:
        assert handle.wire_bytes == exchange_bytes(shape, 2, 128, 4, passes.sends, passes.served)


def test_a_block_is_exchanged_once_more():
    """For the blocks after it, which `test_products_and_the_exchange_are_those_of_a_real_step` meets."""
    run = OURS.replace(block=16_384, options={"save_attention": False})
    sent = exchange_bytes(SHAPE, 8, 512_000, 2, 3, 0)
    assert both(run, 8, 512_000)[1]["exchange"] == pytest.approx(sent / RATES.link)


@pytest.mark.parametrize("k", [2, 3, 32])
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_inputs_that_are_made_again_cost_a_forward(k, kept):
    """Of the layers whose input is not kept, what its backward sends instead where outputs are not kept, and one more
    gathering of their weights. Their products are those of `test_all_layers_together_are_the_step`."""
    run, tokens = OURS.replace(**RUNS["attention twice"]), 512_000
    once = replace(both(run, 8, tokens)[2], attention_kept=kept)

    def more(rates):
        """Seconds for each layer's share of every part."""
        given = (SHAPE, run, Machine(gpus=8, rates=rates), 8, tokens)
        before, after = (step_seconds(*given, replace(once, inputs_kept_every=every)) for every in (1, k))
        return {part: (after[part] - before[part]) / (1 - -(-32 // k) / 32) for part in after}

    more_sent = exchange_bytes(SHAPE, 8, tokens, 2, 3, 1) - exchange_bytes(SHAPE, 8, tokens, 2, 2, 0)
    assert more(RATES)["exchange"] == pytest.approx((1 - kept) * more_sent / RATES.link)
    assert more(RATES)["attention"] == 0  # what it returns then serves the recompute
    late = more(replace(RATES, link=1e6))
    gathered = SHAPE.parameters * 2 * 7 / 8 / 1e6 - late["matrix products"] - late["attention"]
    assert late["waiting for memory and network"] == pytest.approx(gathered)


def sent_by_zero(rank, world, stage, block):
    """Numbers that DeepSpeed sends in a step of two micro-batches, as `zero_seconds` counts them, and what it says."""
    model, ctx = make_model(), alstlib.SPContext.create(2)
    engine_fields = {"zero_stage": stage, "offload_optimizer": False}
    run = RunConfig(engine=engine_fields, optim={"accumulation": 2}, block=block, model={"dtype": "fp32"})
    shape, sent = SimpleNamespace(parameters=sum(p.numel() for p in model.parameters())), []

    def counted(name, times, original):
        def call(tensor, *args, **kwargs):
            if tensor.numel() > 100:  # and not a norm of gradients, nor a loss
                sent.append(times * tensor.numel() * (world - 1) / world)
            return original(tensor, *args, **kwargs)

        return mock.patch.object(deepspeed.comm, name, call)

    with alstlib.apply(model, ctx, alstlib.Options.plain()):
        engine = wrap(model, f"zero{stage}", run)
        with contextlib.ExitStack() as stack:
            for name, times in (("all_reduce", 2), ("all_gather_into_tensor", 1)):
                stack.enter_context(counted(name, times, getattr(deepspeed.comm, name)))
            for batch in itertools.islice(SPDataLoader(make_samples(2), ctx, replicated=True, accumulation=2), 2):
                alstlib.block_step(engine, batch, block)
                engine.step()
            blocks = -(-batch["input_ids"].shape[1] // block)
        engine.destroy()
    machine = Machine(gpus=world, rates=replace(RATES, link=4.0))  # bytes of a number
    passes = SimpleNamespace(forward=2.0 if blocks > 1 else 1.0, remade=0.0)
    return sum(sent), sum(zero_seconds(shape, run, machine, passes, blocks)), blocks


@pytest.mark.parametrize("block", [8, 1000])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_zero_sends_is_what_deepspeed_sends(ranks2, stage, block):
    for sent, said, blocks in ranks2(sent_by_zero, stage, block):
        assert (blocks > 1) == (block == 8)
        assert sent == pytest.approx(said, rel=0.01)  # DeepSpeed pads


def test_the_figure_has_each_lane_and_pass():
    spans = both(OURS, 8, 512_000)[0]
    figure = step_plots.timeline({n: [(s.lane, s.what, s.start, s.seconds) for s in p] for n, p in spans.items()})
    assert [axes.get_title("left") for axes in figure.axes] == ["forward", "backward"]
    first = figure.axes[0]
    assert {t.get_text() for t in first.get_yticklabels()} == {COMPUTE, EXCHANGE, COPIES, STATES}
    assert "attention" in {text.get_text() for text in first.texts}


def test_the_optimizer_steps_on_what_is_trained():
    """An adapter's step takes as much less time as the adapter has fewer parameters."""
    whole, adapter = both(OURS, 8, 512_000)[1], both(OURS.replace(model={"lora": {"r": 16}}), 8, 512_000)[1]
    trained = SHAPE.adapter_parameters({"r": 16})
    assert adapter["optimizer"] == pytest.approx(whole["optimizer"] * trained / SHAPE.parameters, rel=1e-9)


def test_capped_scores_are_slow_and_told_so():
    """Gemma 2 runs no fused kernel without flash-attn's packages."""
    shape = read_shape("google/gemma-2-9b")
    run = OURS.replace(model={"name": shape.name})
    found = activations(shape, run, 8, 2**17, "cuda")
    assert kernel_of(shape, run, "cuda") == found.kernel == "blockwise"
    given = (shape, run, Machine(gpus=8), 8, 2**17)
    slow, fast = (step_seconds(*given, one)["attention"] for one in (found, replace(found, kernel="cudnn")))
    assert slow > 5 * fast


def test_the_longest_row_of_the_paper_ends_within_its_time_limit(monkeypatch):
    """Its step takes 6,455 s."""
    monkeypatch.setattr(devices, "first_gpu", lambda: ("NVIDIA H100 80GB HBM3", 80 * 2**30))
    fields = {"model.name": "llama-3.1-8b", "data.seq_len": "3.7M", "optim.steps": 3, "output.checkpoint_every": 1}
    run = launch.resolve(row_config("alst", RunConfig.from_dict(fields)), gpus=8)

    def limit(**changes):
        return preflight.time_limit(run.replace(**changes), 1, 8)

    seconds, which = limit()
    assert 5 * 3 * 6455 < seconds < 7 * 86400
    assert preflight.limits(run, 1, 8)[1] > 5 * 6455
    assert "(10 times the prediction; limits.timeout=SECONDS sets another, 0 none)" in which
    assert limit(search=True)[0] > 2 * seconds
    short = limit(data={"seq_len": 1024}, output={"checkpoint_every": 0})
    assert "the time limit of 1:00:00 (the shortest default" in short[1]
    assert limit(limits={"timeout": 0}) == (math.inf, "no time limit (limits.timeout=0)")
    assert limit(limits={"timeout": 300}) == (300, "limits.timeout=300 s")
    on_cpus = preflight.time_limit(RunConfig(engine={"world_size": 2, "sp": 2}), 1, 0)
    assert on_cpus[1].partition("24:00:00 (")[2].startswith("no time is predicted")
