"""The planner: what it predicts against real runs, its answers against rules."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from quick_steps import quick  # noqa: F401

from alstlib.config import PAPER_ROWS, ROWS, RunConfig, row_config
from alstlib.hf.models import flos
from alstlib.options import Options
from alstlib.planner import devices
from alstlib.planner.gpus import label_bytes, rates_of
from alstlib.planner.machine import Machine, Overheads, machine_of
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import Loading, loading, longest, predict, states
from alstlib.planner.preflight import foretell, why_not
from alstlib.planner.question import Question
from alstlib.planner.step_time import attention_flops, exchange_bytes, linear_flops
from alstlib.planner.streaming import least_chunk
from alstlib.runs import results
from alstlib.runs.sweeps import load_spec
from alstlib.sizing import kv_needed
from alstlib.units import GIB

EIGHT_B = read_shape("meta-llama/Llama-3.1-8B")
OURS = row_config("ours", RunConfig(model={"name": EIGHT_B.name, "dtype": "bf16"}, engine={"sp": 0})).replace(
    options={"chunk": None}
)
EIGHT = Machine(gpus=8, host_memory=1_900_000_000_000)


# ----- model states


@pytest.mark.simulates
@pytest.mark.parametrize("row", list(ROWS))
def test_real_runs_took_what_is_predicted(row):
    """The ablation's committed results, real ranks under ZeRO-3 with the engine's buffers, near the longest lengths."""
    (found,) = [r for r in results.collect("papermill_runs/results/ablation-cpu") if r["row"] == row]
    run = RunConfig.from_dict(found["config"])
    machine = Machine(gpus=run.engine.world_size, per_node=run.engine.world_size, gpu_memory=None, device="cpu")
    metrics = found["metrics"]
    lengths = [(t["seq_len"], t["device_peak_bytes"]) for t in metrics.get("tried", [])]
    lengths.append((metrics["seq_len"], max(metrics["device_peak_bytes"])))
    for seq_len, measured in lengths:
        if seq_len >= 0.9 * metrics["seq_len"]:
            assert foretell(run, machine, seq_len)[1].device_peak == pytest.approx(measured, rel=0.025), seq_len
    host = foretell(run, machine, metrics["seq_len"])[1].host_peak
    assert host == pytest.approx(max(metrics["host_peak_bytes"]), rel=0.02)


GAINS = [
    ("baseline", "tiled_loss"), ("tiled_loss", "ulysses"), ("ulysses", "ulysses+tiled_mlp"),
    ("ulysses", "ulysses+offload"), ("ulysses+tiled_mlp", "alst"), ("ulysses+offload", "alst"),
]  # fmt: skip
"""Rows of the paper's Table 1, without a feature and with it."""


def check_gains(lengths, granule):
    """Every feature adds more than the search's granule, and 15% where it does so in the paper."""
    for without, row in GAINS:
        assert lengths[row] - lengths[without] > granule, (without, row, lengths)
        if PAPER_ROWS[row]["seq_len"] >= 1.15 * PAPER_ROWS[without]["seq_len"]:
            assert lengths[row] >= 1.15 * lengths[without], (without, row, lengths)


@pytest.mark.simulates
@pytest.mark.parametrize("name", ["ablation-quick", "ablation"])
def test_every_feature_of_the_ablation_shows(name, monkeypatch):
    """With the model and the budget of the spec, as predicted for CPUs."""
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    lengths = {}
    for row, run in load_spec(ROOT / f"papermill_runs/specs/{name}.yaml").rows.items():
        machine = Machine(
            gpus=run.engine.world_size,
            per_node=run.engine.world_size,
            gpu_memory=run.limits.device_memory,
            device="cpu",
        )
        found = longest(read_shape(run.model.name, run.model.config), run, machine, run.search.granule)
        assert found is not None
        lengths[row], granule = found.seq_len, run.search.granule
    check_gains(lengths, granule)


ROOT = Path(__file__).resolve().parents[2]
REAL = sorted((ROOT / "papermill_runs/results/planner/real").glob("*/result.json"))


@pytest.mark.simulates
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.parent.name)
def test_real_ranks_took_what_is_predicted(path):
    """Real runs on 1, 2 and 4 ranks with the engine, so small that its buffers are up to half of what they take. Where
    weights are gathered ahead, how many of them wait in two places at the peak is known to a tenth."""
    found = results.read_result(path)
    ahead = found["row"].startswith(("few-weights", "many-layers"))
    run, metrics = RunConfig.from_dict(found["config"]), found["metrics"]
    machine = Machine(gpus=run.engine.world_size, per_node=run.engine.world_size, gpu_memory=None, device="cpu")
    predicted = foretell(run, machine, metrics["seq_len"])[1]
    assert predicted.device_peak == pytest.approx(max(metrics["device_peak_bytes"]), rel=0.1 if ahead else 0.025)
    assert predicted.host_peak == pytest.approx(max(metrics["host_peak_bytes"]), rel=0.001)


def test_there_are_real_runs():
    assert len(REAL) == 14


def test_states_follow_the_stage():
    parameters, world = EIGHT_B.parameters, 8
    bare = Machine(gpus=world)
    for stage, bytes_each in ((0, 16), (1, 2 + 2 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        run = OURS.replace(engine={"zero_stage": stage, "offload_optimizer": False})
        found = states(EIGHT_B, run, bare)
        device = found.device
        held = sum(device.get(name, 0) for name in ("weights", "gradients", "optimizer"))
        assert held == pytest.approx(bytes_each * parameters, rel=1e-6), stage
        assert found.host == {}
    found = states(EIGHT_B, OURS.replace(engine={"offload_params": True}), bare)
    assert not {"weights", "optimizer"} & set(found.device)
    assert sum(found.host.values()) == pytest.approx((2 + 12 + 2 + 4) * parameters / 8, rel=1e-6)


# ----- answers


def test_the_longest_fits_and_a_longer_one_does_not():
    best = longest(EIGHT_B, OURS, EIGHT)
    assert best is not None
    assert best.fits
    assert not predict(EIGHT_B, OURS, EIGHT, int(1.02 * best.seq_len)).fits
    assert str(best.seq_len).rstrip("0") == str(best.seq_len // 10 ** (len(str(best.seq_len)) - 3)).rstrip("0")


def test_more_gpus_and_more_memory_never_fit_less():
    lengths = [longest(EIGHT_B, OURS, Machine(gpus=n)) for n in (8, 16, 32)]
    assert all(a and b and a.seq_len < b.seq_len for a, b in itertools.pairwise(lengths))
    small, large = (longest(EIGHT_B, OURS, Machine(gpus=8, gpu_memory=n * GIB)) for n in (60, 100))
    assert small is not None
    assert large is not None
    assert small.seq_len < large.seq_len


def test_what_auto_chooses_for_keys_fits_no_less_than_either_place():
    """Also where the host has room for the hidden states, and not for one layer's keys and values beside them."""
    run = OURS.replace(options={"chunk": 16_384})
    for gpus, memory in itertools.product((1, 8, 16, 32), (400, 1900)):
        machine = Machine(gpus=gpus, host_memory=memory * 10**9)
        found = {
            where: longest(EIGHT_B, run.replace(options={"on_host": where}), machine)
            for where in ("auto", "hidden", "hidden+kv")
        }
        auto, *fixed = (one.seq_len if one else 0 for one in found.values())
        assert auto >= max(fixed), (gpus, memory)
        assert auto > 0 or gpus == 1


def test_what_limits_is_named():
    poor = Machine(gpus=8, host_memory=200 * 10**9)
    assert predict(EIGHT_B, OURS.replace(options={"save_attention": True}), poor, 3_000_000).limit == "host"
    assert predict(EIGHT_B, OURS, EIGHT, 30_000_000).limit == "device"
    assert predict(EIGHT_B, OURS, EIGHT, 100_000).limit == ""
    assert longest(EIGHT_B, OURS, Machine(gpus=1, gpu_memory=10 * GIB)) is None


def test_the_host_gives_up_outputs_before_inputs():
    rich, short, poor = (
        predict(EIGHT_B, OURS, Machine(gpus=8, host_memory=n * 10**12), 2_000_000) for n in (9, 1, 0.6)
    )
    assert rich.activations.attention_kept == 1
    assert 0 < short.activations.attention_kept < 1
    assert poor.activations.attention_kept < short.activations.attention_kept
    assert all(p.host_peak <= (p.host_limit or 0) for p in (rich, short, poor))


def test_advice_helps_and_says_what_it_costs():
    plain = row_config("baseline", RunConfig(model={"name": EIGHT_B.name, "dtype": "bf16"}))
    now = longest(EIGHT_B, plain, EIGHT)
    helps = Question(EIGHT_B, plain, EIGHT).advice()
    assert now is not None
    assert helps[0].what == "sequence parallelism over all GPUs"
    assert "tiled loss" in [h.what for h in helps]
    for one in helps:
        then = longest(EIGHT_B, plain.replace(**one.changes), EIGHT)
        assert then is not None
        assert then.seq_len == one.longest > now.seq_len
    assert [h.longest for h in helps] == sorted((h.longest for h in helps), reverse=True)


def test_the_nearest_configuration_fits():
    plain = row_config("ulysses", RunConfig(model={"name": EIGHT_B.name, "dtype": "bf16"}))
    assert not predict(EIGHT_B, plain, EIGHT, 3_000_000).fits
    question = Question(EIGHT_B, plain, EIGHT)
    found = question.nearest(3_000_000)
    assert found is not None
    assert found[2].at(3_000_000).fits
    assert found[2].run == plain.replace(**found[1])
    assert question.nearest(10**10) is None


def test_overheads_are_named_and_can_be_set():
    none = Overheads(context=0, nccl=0, fragmentation=0.0)
    bare, full = (predict(EIGHT_B, OURS, Machine(gpus=8, overheads=o), 10**6) for o in (none, Overheads()))
    named = {name: full.device[name] for name in ("CUDA context", "NCCL", "fragments")}
    assert full.device_peak - bare.device_peak == sum(named.values())
    assert predict(EIGHT_B, OURS, Machine(gpus=1), 10**4).device["NCCL"] == 0


def test_labels_are_not_bytes():
    assert label_bytes("80GB") == int(79.1 * GIB)
    assert label_bytes("79.5GiB") == int(79.5 * GIB)
    assert label_bytes("16GB") == pytest.approx(0.988 * 16 * GIB)
    assert label_bytes(10**9) == 10**9
    with pytest.raises(ValueError, match="did you mean 'H100'"):
        rates_of("H10")


# ----- time


def test_flops_are_those_of_a_result():
    """The closed counts beside `flos`: model convention, three times forward."""
    made = flos(10**6, 10**6, EIGHT_B.dense_parameters, 32, 128, 32)["model"]
    linear = sum(linear_flops(EIGHT_B, 10**6).values())
    assert 3 * (linear + attention_flops(EIGHT_B, 10**6)) == pytest.approx(made)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("how", [{"save_attention": True}, {"save_attention": False}, {"checkpoint": False}], ids=str)
def test_the_exchange_is_that_of_a_simulated_step(how, ranks):
    from alstlib.measure.simulate import simulate

    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "num_hidden_layers": 2}
    run = RunConfig(
        model={"name": "tiny", "config": heads, "dtype": "bf16"}, data={"seq_len": 1600}, options=Options.plain(**how)
    )
    shape = read_shape("tiny", heads)
    wire = simulate(run, ranks).wire_bytes
    kept = float(how.get("save_attention", False))
    assert exchange_bytes(shape, ranks, 1600, 2, 2.0 if run.options.checkpoint else 1.0, kept) == pytest.approx(
        wire, rel=1e-6
    )


def test_a_step_gets_longer_with_less_help():
    at = 1_000_000
    ours = predict(EIGHT_B, OURS, EIGHT, at).seconds["step"]
    assert predict(EIGHT_B, OURS.replace(options={"save_attention": False}), EIGHT, at).seconds["step"] > 1.1 * ours
    assert predict(EIGHT_B, OURS.replace(options={"offload": "sync"}), EIGHT, at).seconds["step"] > ours
    assert predict(EIGHT_B, OURS, Machine(gpus=16, host_memory=10**13), at).seconds["step"] < ours
    rich = Machine(gpus=8)
    four_times = predict(EIGHT_B, OURS, rich, 4 * at).seconds["attention"]
    assert four_times == pytest.approx(16 * predict(EIGHT_B, OURS, rich, at).seconds["attention"])


def test_frozen_weights_have_no_gradients():
    """With an adapter, backward makes inputs' gradients alone."""
    run, rows = OURS.replace(options={"save_attention": False}), 8192
    linear = linear_flops(EIGHT_B, 8 * rows)
    for how, products, head in ((run, 4, 3), (run.replace(model={"lora": {"r": 8}}), 3, 2)):
        seconds = predict(EIGHT_B, how, EIGHT, 8 * rows).seconds["matrix products"]
        assert seconds * EIGHT.rates.matmul * 8 == pytest.approx(
            products * (linear["projections"] + linear["mlp"]) + head * linear["head"]
        )
    shared = predict(
        EIGHT_B,
        run.replace(model={"lora": {"r": 8}}),
        Machine(gpus=8, rates=replace(EIGHT.rates, link=1e6)),
        1000,
    )
    full = predict(EIGHT_B, run, Machine(gpus=8, rates=replace(EIGHT.rates, link=1e6)), 1000)
    waits = [one.seconds["waiting for memory and network"] for one in (shared, full)]
    assert waits[0] / waits[1] == pytest.approx(2 / 3, rel=0.01)  # two gathers, and no reduction


@pytest.mark.parametrize("ranks", [1, 4, 8, 16, 32, 12, 64])
def test_the_least_chunk_hides_the_copies_of_a_page(ranks):
    """Attention of a chunk's queries over a page takes as long as the page of the rank's own key/value heads, of which
    each rank has at least one."""
    rates, heads, widths = rates_of("H100"), max(kv_needed(32, 8, ranks)), 2 * 128
    pairs = 2 * 32 / ranks * widths * ranks * least_chunk(EIGHT_B, rates, ranks)  # FLOPs of a key with the chunk
    copies = {"forward": heads * widths * 2 / rates.host, "backward": heads * widths * 6 / rates.host}
    seconds = {"forward": pairs / rates.attention_forward, "backward": 2.5 * pairs / rates.attention_backward}
    assert all(seconds[part] >= copies[part] for part in copies)
    fewer = pairs * (1 - 1 / least_chunk(EIGHT_B, rates, ranks))
    assert (
        fewer / rates.attention_forward < copies["forward"]
        or 2.5 * fewer / rates.attention_backward < copies["backward"]
    )


def test_ranks_with_parts_of_heads_need_whole_keys():
    assert kv_needed(9, 3, 8) == [1, 1, 2, 1, 1, 2, 1, 1]
    assert kv_needed(32, 8, 8) == [1] * 8
    assert kv_needed(40, 8, 16)[:4] == [1, 1, 1, 1]


def test_a_model_that_cannot_be_loaded_is_refused(monkeypatch):
    """Of 64 GPUs the steps fit each node's host, but rank 0 has all weights before it sends them."""
    monkeypatch.setattr("alstlib.planner.devices.first_gpu", lambda: ("NVIDIA H100 80GB HBM3", 80 * GIB))
    run = OURS.replace(
        model={"name": "meta-llama/Llama-3.1-70B"},
        engine={"world_size": 64, "sp": 64, "offload_optimizer": False},
        data={"seq_len": 65_536},
    )
    weights, embedding = 2 * 70_553_706_496, 2 * 128_256 * 8192
    for host, fits in ((120 * 10**9, False), (300 * 10**9, True)):
        monkeypatch.setattr("alstlib.planner.machine.host_free", lambda host=host: host)
        machine = machine_of(run, 8, 8)
        shape, found = foretell(run, machine)
        assert found.host_needed < (found.host_limit or 0)
        assert found.device_peak < (found.device_limit or 0)
        assert found.loading.host == weights + embedding + 8 * 4 * GIB
        assert found.loading.device == weights // 64 + embedding + sum(machine.overhead().values())
        assert found.loading.device < found.device_peak
        assert (found.fits, found.limit) == (fits, "" if fits else "loading: host")
        assert (longest(shape, run, machine) is None) == (not fits)
        assert (why_not(run, 8, 8) is None) == fits
    whole = foretell(run.replace(engine={"zero_stage": 2}), machine)[1]  # which takes a tensor's place as it comes
    assert whole.loading.device - found.loading.device == weights - weights // 64 - embedding
    assert whole.limit == "device"  # in a step too, which is said first
    assert whole.loading.beyond() == "device"
    monkeypatch.setattr("alstlib.planner.machine.host_free", lambda: 120 * 10**9)
    why = "loading the model would take 165.37 GiB of the first node's host memory, and 111.76 GiB is there"
    assert why in str(why_not(run, 8, 8))


def test_the_nearest_thing_that_loads_a_model_is_named():
    shape, run = read_shape("meta-llama/Llama-3.1-70B"), OURS.replace(engine={"offload_optimizer": False})
    many = Machine(gpus=64, host_memory=160 * 10**9)
    small = Machine(gpus=1, gpu_memory=40 * GIB)
    for machine, options, near in (
        (many, {}, "on 32 nodes of 2 GPUs each"),
        (replace(many, host_memory=120 * 10**9), {}, "with 166 GiB on the first node's host"),
        (
            replace(many, host_memory=120 * 10**9),
            {"engine.zero_stage": 2},
            "with weights on the host (engine.zero_stage=3, engine.offload_params=True) and 166 GiB on the first "
            "node's host",
        ),
        (small, {"engine.zero_stage": 2}, "with weights on the host (engine.zero_stage=3, engine.offload_params=True)"),
        (replace(small, gpus=8), {"engine.zero_stage": 2}, "with ZeRO-3 (engine.zero_stage=3)"),
        (
            replace(small, gpus=2, gpu_memory=4 * GIB),
            {},
            "with weights on the host (engine.zero_stage=3, engine.offload_params=True) and 6 GiB on a device",
        ),
    ):
        asked = run.replace(**options)
        assert loading(shape, asked, machine).beyond()
        assert Question(shape, asked, machine).loads_with() == near
    assert not loading(shape, run, replace(many, per_node=2)).beyond()
    assert loading(shape, run, replace(many, per_node=4)).beyond() == "host"
    assert loading(shape, run, replace(many, host_memory=166 * GIB)).beyond() == ""


def test_of_the_papers_loading_nothing_is_said():
    machine = Machine(gpus=64, host_memory=120 * 10**9)
    run = row_config(
        "alst",
        RunConfig(
            model={"name": "meta-llama/Llama-3.1-70B", "dtype": "bf16"},
            engine={"offload_optimizer": False, "sp": 0},
        ),
    )
    found = predict(read_shape(run.model.name), run, machine, 65_536, "paper")
    assert found.loading == Loading()
    assert found.fits
