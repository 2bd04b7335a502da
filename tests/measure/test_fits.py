"""Any model that `apply` takes is planned, by simulations of its own code at few lengths, once."""

import json
import random
from pathlib import Path

import public_fits
import pytest
import torch
import transformers

from alstlib.config import RunConfig
from alstlib.measure import answers, simulate
from alstlib.measure.deep import Deep
from alstlib.measure.small import shrunk
from alstlib.planner import fits, preflight
from alstlib.planner.activations import activations
from alstlib.planner.fits import StepQuestion, lines_at
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import longest, predict
from alstlib.planner.question import Question

TILES = {"mlp": 128, "loss": 64, "norm": 256}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(fits.CACHE_VARIABLE, str(tmp_path / "cache"))
    fits._known.cache_clear()
    return tmp_path / "cache"


def folder(at, kind, layers, **fields):
    """A small model's config."""
    config = transformers.AutoConfig.for_model(kind).get_text_config()
    shrunk(config, layers, {"num_hidden_layers": layers, **fields}).save_pretrained(at / kind)
    return str(at / kind)


def run_of(name, **options):
    fields = {"tiles": TILES, "offload": True, "save_attention": False, **options}
    return RunConfig(model={"name": name, "dtype": "bf16"}, options=fields)


KINDS = {
    "opt": (4, {}), "glm4_moe": (5, {"first_k_dense_replace": 1}), "stablelm": (4, {}),
    "cohere2": (8, {}), "mamba": (3, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_is_planned(kind, tmp_path):
    """Its parameters are counted, and a plan is what the whole model takes."""
    layers, fields = KINDS[kind]
    name = folder(tmp_path, kind, layers, **fields)
    shape = read_shape(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(name))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    run = run_of(name).replace(data={"seq_len": 2 * 1500})
    planned = activations(shape, run, 2, 2 * 1500, "cuda", workspace=False)
    whole = simulate.simulate(run, 2)
    assert planned.peak == pytest.approx(whole.device_peak, rel=0.01)
    assert planned.host == pytest.approx(whole.host_peak, rel=0.01)


def test_lines_meet_whole_steps_between_two_tiles():
    """One span serves all lengths between two sizes of a tile, however many layers there are."""
    run = run_of("tiny", tiles={"mlp": 128, "loss": 64, "norm": 64})
    question = StepQuestion(run, 2, "cuda", 9)
    for rows in (200, 1777):
        found = max(lines_at(question, rows).moments, key=lambda m: sum(m.at(rows).values()))
        whole = simulate.simulate(run.replace(data={"seq_len": 2 * rows}), 2)
        assert sum(found.at(rows).values()) == pytest.approx(whole.device_peak, rel=0.005), rows


def test_chunks_are_a_line_from_four_chunks_on(tmp_path):
    run = run_of("tiny", chunk=256, on_host="hidden")
    question = StepQuestion(run, 2, "cuda", 9)
    for rows in (2 * 256, 7 * 256):
        found = max(lines_at(question, rows).moments, key=lambda m: sum(m.at(rows).values()))
        whole = simulate.simulate(run.replace(data={"seq_len": 2 * rows}), 2)
        assert sum(found.at(rows).values()) == pytest.approx(whole.device_peak, rel=0.02), rows


def test_layers_of_several_kinds_are_those_of_the_whole_model(tmp_path):
    """Of each kind the last, and what the others before it keep, to the byte."""
    name = folder(tmp_path, "glm4_moe", 6, first_k_dense_replace=2)
    for fields in ({"offload": False}, {"checkpoint": False, "offload": False}, {}):
        run = run_of(name, **fields).replace(data={"seq_len": 2 * 640})
        few, whole = Deep(run, 2).at(2 * 640), simulate.simulate(run, 2)
        assert (few.device_peak, few.host_peak, few.wire_bytes) == (
            whole.device_peak,
            whole.host_peak,
            whole.wire_bytes,
        )
        assert few.categories == whole.categories


def test_a_config_may_name_more_kinds_than_there_are_layers():
    """As where a user changed the number of layers alone."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 512, "head_dim": 16}
    run = RunConfig(model={"name": "openai/gpt-oss-20b", "dtype": "bf16", "config": {**small, "num_hidden_layers": 5}})
    whole, deep = simulate.simulate(run.replace(data={"seq_len": 500}), 1), Deep(run, 1)
    assert len(deep.model.config.layer_types) > len(deep.layers) > len(deep.chosen)
    assert deep.at(500).device_peak == whole.device_peak


def test_a_second_answer_simulates_nothing(cache, monkeypatch):
    """From this process, from the user's cache, and not where the code is another."""
    question = StepQuestion(run_of("tiny"), 1, "cuda", 9)
    first = lines_at(question, 700)
    assert len(list(cache.glob("*.json"))) == 1

    def refuse(*_):
        raise AssertionError("it was simulated again")

    monkeypatch.setattr(answers, "answer", refuse)
    assert lines_at(question, 701) == first
    fits._known.cache_clear()
    assert json.dumps([m.line for m in lines_at(question, 700).moments]) == json.dumps([m.line for m in first.moments])
    fits._known.cache_clear()
    monkeypatch.setattr(fits, "sources", lambda: "other code")
    with pytest.raises(AssertionError, match="again"):
        lines_at(question, 700)


def test_a_cache_that_cannot_be_read_or_written_is_no_matter(cache):
    question = StepQuestion(run_of("tiny"), 1, "cuda", 9)
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    assert lines_at(question, 300)


def test_what_apply_refuses_the_planner_refuses(tmp_path):
    name = folder(tmp_path, "opt", 2, attention_dropout=0.0)
    config = json.loads((Path(name) / "config.json").read_text())
    (Path(name) / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1 is not supported"):
        read_shape(name)


def test_the_start_of_a_short_run_on_a_cpu_does_not_wait_for_a_simulation(tmp_path, monkeypatch):
    """It is started without a prediction; a dry run waits for one."""
    name = folder(tmp_path, "stablelm", 2)
    run = run_of(name).replace(data={"seq_len": 640}, engine={"sp": 1, "world_size": 1})
    with monkeypatch.context() as patch:
        patch.setattr(answers, "answer", lambda *_: pytest.fail("it was simulated"))
        assert preflight.why_not(run, 1, 0) is None
        assert preflight.limits(run, 1, 0) == (preflight.DAY, preflight.DAY)
    assert preflight.outlook(run, 0).startswith("fits")


def test_a_long_run_on_a_cpu_is_simulated_before_it_starts(tmp_path, monkeypatch):
    """It would not fit, and is not started."""
    for helps in ("nearest", "longest"):  # which are asked about many lengths
        monkeypatch.setattr(Question, helps, lambda *_: None)
    name = folder(tmp_path, "stablelm", 2)
    run = run_of(name).replace(
        data={"seq_len": 200_000}, engine={"sp": 1, "world_size": 1}, limits={"device_memory": "16MiB"}
    )
    assert "200,000 tokens would take" in str(preflight.why_not(run, 1, 0))


def test_adapters_train_what_they_add(tmp_path):
    """As peft makes them."""
    name = folder(tmp_path, "stablelm", 2)
    lora = run_of(name).replace(model={"lora": {"r": 4}})
    with torch.device("meta"):
        weights = simulate.whole_model(lora, "cuda").parameters()
    assert read_shape(name).adapter_parameters({"r": 4}) == sum(p.numel() for p in weights if p.requires_grad)


def test_the_longest_of_an_own_model(tmp_path):
    name = folder(tmp_path, "stablelm", 2)
    shape, run = read_shape(name), run_of(name).replace(engine={"sp": 2})
    machine = Machine(gpus=2, gpu_memory=6 * 2**30, host_memory=2**36)
    best = longest(shape, run, machine)
    assert best is not None
    assert best.fits
    assert not predict(shape, run, machine, round(1.02 * best.seq_len)).fits


def test_what_comes_with_the_library_is_what_is_simulated_today():
    """Two answers for public models, drawn anew each time."""
    for entry in random.Random().sample([e for key, e in fits.public().items() if key != fits.VERSIONS], 2):
        found = random.Random().choice(entry["found"])
        (fresh,) = public_fits.again({**entry, "found": [found]})["found"]
        assert json.loads(json.dumps(public_fits._plain(fresh))) == found, entry


def test_blocks_and_tiles_that_are_alike_are_not_all_run(tmp_path, monkeypatch):
    """Soft caps run block by block: some of the blocks, and of the tiles, take as much as all."""
    name = folder(tmp_path, "gemma2", 2)
    run = run_of(name, attention="blockwise").replace(data={"seq_len": 6000})
    some = simulate.simulate(run, 1)
    monkeypatch.setattr(simulate, "ENDS", 10**6)
    whole = simulate.simulate(run, 1)
    assert (some.device_peak, some.categories) == (whole.device_peak, whole.categories)
    assert some.moments == whole.moments
