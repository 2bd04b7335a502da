"""A simulated rank takes the same bytes, device, host and wire, as the same rank with real tensors."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from cases import on_ranks, run_with

import alstlib
from alstlib.base.config import ROWS, RunConfig, row_config
from alstlib.base.sizing import as_on
from alstlib.hf.loading.models import load_model
from alstlib.kernels import backends
from alstlib.planner.measure.deep import Deep
from alstlib.planner.measure.simulate import drop_gradients, fake_ranks, roomy, simulate, step, whole_model

RUN = """
options: plain
options.tiles.loss: true
options.tiles.mlp: true
model.name: tiny
model.dtype: fp32
data.seq_len: 512
"""
OPTIONS = yaml.safe_load("""
tiled: {}
untiled: {tiles: false}
tiles of a size: {tiles: {mlp: 100, loss: 60}}
no checkpoints: {checkpoint: false}
attention kept: {save_attention: true}
offload: {offload: true, save_attention: auto}
chunk: {offload: true, save_attention: auto, chunk: 128}
some inputs: {offload: sync, save_attention: auto, host_memory: 60000}
half precision: {model.dtype: bf16, options.offload: true}
9 heads on 3: &nine {model.config: {hidden_size: 72, num_attention_heads: 9, num_key_value_heads: 3}}
9 heads on 3, chunk: {<<: *nine, options.chunk: 130}
""")


def run_of(layers=2, **changes):
    shape = {"num_hidden_layers": layers, **changes.pop("model.config", {})}
    return run_with(RUN, {**changes, "model.config": shape})


def same(one, other):
    """The same peak, of the same parts, and the same of all but the smaller moments."""
    peaks = [(s.device_peak, s.categories, s.peak_place, s.peak_operation) for s in (one, other)]
    return peaks[0] == peaks[1] and replace(one, moments={}) == replace(other, moments={})


def with_real_tensors(run, ranks):
    """The same step of the same rank, over a process group that sends nothing."""
    run = roomy(run)
    model = whole_model(run, "cpu")
    drop_gradients(model)
    with fake_ranks(ranks) as ctx, as_on("cpu"), alstlib.apply(model, ctx, run.options) as handle:
        return step(run, model, handle, ctx)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_simulated_rank_is_a_real_one(options, ranks):
    """To the byte."""
    run = run_of(**options, seq_len=160 * ranks)
    fake, real = simulate(run, ranks, "cpu"), with_real_tensors(run, ranks)
    assert same(fake, real)
    assert fake.device_peak > 0
    assert set(fake.categories) <= {"attention", "checkpoints", "exchange", "hidden states", "loss", "mlp"}
    assert fake.peak_place
    assert (fake.host_peak > 0) == any("offload" in name for name in options)
    assert (fake.wire_bytes > 0) == (ranks > 1)
    assert not dist.is_initialized()


def real_step(rank, world, run):
    """A step over real ranks, without an engine. Of several ranks the middle one of five: gloo's threads may hold what
    was sent a moment longer than the exchange lasts, which raises a step's peak, or lowers that of the step in which it
    is let go."""
    ctx, model = alstlib.SPContext.create(world), load_model(run, torch.float32)
    drop_gradients(model)
    with alstlib.apply(model, ctx, run.options) as handle:
        steps = [step(run, model, handle, ctx) for _ in range(5 if world > 1 else 1)]
        return sorted(steps, key=lambda s: s.device_peak)[len(steps) // 2]


@pytest.mark.parametrize("row, sp", [(row, sp) for row in ROWS for sp in ((1, 2, 4) if "sp" in ROWS[row] else (1,))])
def test_rows_of_the_ablation_on_real_ranks(row, sp, pools):
    """Over a real process group, whose ranks send and receive: within 2%. Rows without SP have one rank."""
    options, model = alstlib.Options.plain(host_memory=2**40), {"name": "tiny", "dtype": "fp32"}
    run = row_config(row, RunConfig(model=model, data={"seq_len": 1024}, options=options)).replace(engine={"sp": sp})
    found = simulate(run, sp, "cpu")
    real = max(on_ranks(pools, sp, real_step, run), key=lambda s: s.device_peak)
    assert real.device_peak == pytest.approx(found.device_peak, rel=0.02)
    assert (real.host_peak, real.wire_bytes) == (found.host_peak, found.wire_bytes)


@pytest.mark.parametrize("options", [o for n, o in OPTIONS.items() if n != "some inputs"], ids=str)
def test_few_layers_tell_of_many(options):
    assert same(Deep(run_of(4, **options), 4, "cpu").at(512), simulate(run_of(4, **options), 4, "cpu"))


def test_the_peak_says_what_it_is_made_of():
    """Untiled logits, the intermediates of an untiled MLP, and checkpoints that stay on the device."""
    wide = {"model.config": {"vocab_size": 32_768}}
    logits = simulate(run_of(**wide, tiles={"mlp": True}), 2, "cpu")
    assert logits.categories["loss"] > max(0.9 * logits.device_peak, 2 * 256 * 32_768 * 4)
    mlp = simulate(run_of(**{"model.config": {"intermediate_size": 4096}}, tiles={"loss": True}), 2, "cpu")
    assert mlp.peak_place.startswith("model.layers.1.mlp")
    assert mlp.categories["mlp"] > 3 * 256 * 4096 * 4
    assert simulate(run_of(8), 2, "cpu").categories["checkpoints"] == 8 * 256 * 64 * 4


def test_what_the_exchange_takes_is_told_apart():
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "intermediate_size": 64}
    assert simulate(run_of(**{"model.config": heads}, tiles={"mlp": True}), 4, "cpu").categories.get("exchange", 0) > 0
    assert "exchange" not in simulate(run_of(**{"model.config": heads}), 1, "cpu").categories


def test_tiles_are_those_of_the_device_that_is_simulated():
    """A GPU's tiles are larger; and this laptop's free memory does not count."""
    run = run_of(seq_len=8192)
    assert simulate(run, 1, "cuda").device_peak > 1.2 * simulate(run, 1, "cpu").device_peak


def test_an_adapter_is_in_the_dtype_in_which_deepspeed_trains_it():
    """In fp32, as peft makes it, each adapter's input would be copied in fp32 too: 2.2 GB more for an 8B in chunks."""
    with torch.device("meta"):
        model = whole_model(run_of(**{"model.dtype": "bf16", "model.lora": {"r": 4}}), "cuda")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_is_installed_here_is_not_simulated(monkeypatch):
    """A plan is kept, and asked for where other packages are."""
    run = run_with(RUN, {"model.dtype": "bf16", "options.attention": "auto"})
    before = simulate(run, 1, "cuda")
    monkeypatch.setattr(backends, "_installed", lambda module: True)
    assert simulate(run, 1, "cuda") == before


def test_a_field_that_peft_does_not_know_is_refused():
    run = RunConfig().replace(model={"lora": {"rank": 16}})
    with pytest.raises(ValueError, match="argument 'rank'"):
        simulate(run, 1)
