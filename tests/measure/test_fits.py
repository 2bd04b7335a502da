"""Any model that `apply` takes is planned, by simulations of its own code at few lengths, once."""

import gc
import json
import random

import public_fits
import pytest
import torch
import transformers

from alstlib.base.config import RunConfig
from alstlib.hf.loading.models import load_model
from alstlib.kernels import blockwise
from alstlib.planner import fits, preflight, progress
from alstlib.planner.activations import activations
from alstlib.planner.fits import StepQuestion, lines_at
from alstlib.planner.measure import answers, simulate
from alstlib.planner.measure.deep import Deep
from alstlib.planner.measure.small import shrunk
from alstlib.planner.model_shapes import read_shape
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


@pytest.mark.parametrize("kind, layers, fields", [
    ("opt", 4, {}), ("glm4_moe", 5, {"first_k_dense_replace": 1}), ("stablelm", 4, {}), ("cohere2", 8, {}),
    ("mamba", 3, {}),
])  # fmt: skip
def test_any_model_is_planned(kind, layers, fields, tmp_path):
    """Its parameters are counted, and a plan is what the whole model takes."""
    name, tokens = folder(tmp_path, kind, layers, **fields), 2 * 320
    run = run_of(name, tiles={**TILES, "norm": 128}).replace(data={"seq_len": tokens})  # two tiles: planned by lines
    shape, whole = read_shape(name), simulate.simulate(run, 2)
    with torch.device("meta"):
        model = load_model(run, torch.bfloat16, shape_only=True)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    planned = activations(shape, run, 2, tokens, "cuda", workspace=False)
    assert (planned.peak, planned.host) == pytest.approx((whole.device_peak, whole.host_peak), rel=0.01)


@pytest.mark.parametrize("options, lengths, exact", [
    ({"tiles": {"mlp": 128, "loss": 64, "norm": 64}}, (200, 1777), 0.005),
    ({"chunk": 256, "on_host": "hidden"}, (2 * 256, 7 * 256), 0.02),
    ({"chunk": 1024, "on_host": "hidden+kv"}, (1100, 1990, 2048, 3000), 1e-6),
], ids=["tiles", "chunks", "few chunks"])  # fmt: skip
def test_lines_meet_whole_steps_between_two_tiles_and_in_chunks(options, lengths, exact):
    """One span serves all lengths between two sizes of a tile, however many layers there are; and between two numbers
    of chunks."""
    run = run_of("tiny", **options)
    for rows in lengths:
        lines = lines_at(StepQuestion(run, 2, "cuda", 9), rows)
        whole = simulate.simulate(run.replace(data={"seq_len": 2 * rows}), 2)
        assert max(sum(m.at(rows).values()) for m in lines.moments) == pytest.approx(whole.device_peak, rel=exact), rows
        assert lines.host_at(rows) == pytest.approx(whole.host_peak, rel=0.012), rows


def test_layers_of_several_kinds_are_those_of_the_whole_model(tmp_path):
    """Of each kind the last, and what the others before it keep, to the byte."""
    name = folder(tmp_path, "glm4_moe", 5, first_k_dense_replace=2)
    for fields in ({"offload": False}, {"checkpoint": False, "offload": False}, {}):
        run = run_of(name, **fields).replace(data={"seq_len": 2 * 320})
        few, whole = Deep(run, 2).at(2 * 320), simulate.simulate(run, 2)
        for what in ("device_peak", "host_peak", "wire_bytes", "categories"):
            assert getattr(few, what) == getattr(whole, what), what


def test_a_config_may_name_more_kinds_than_there_are_layers():
    """As where a user changed the number of layers alone."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 512, "head_dim": 16}
    run = RunConfig(model={"name": "openai/gpt-oss-20b", "dtype": "bf16", "config": {**small, "num_hidden_layers": 5}})
    whole, deep = simulate.simulate(run.replace(data={"seq_len": 500}), 1), Deep(run, 1)
    assert len(deep.model.config.layer_types) > len(deep.layers) > len(deep.chosen)
    gc.freeze()
    assert deep.at(500).device_peak == whole.device_peak
    assert gc.get_freeze_count() > 1000, "a plan thaws what the program around it has frozen"


def test_an_answer_does_not_depend_on_what_was_asked_before():
    """Kept outputs have a tile that steps without them have not."""

    def lengths(save):
        deep = answers._deep_of(StepQuestion(run_of("tiny", tiles=True, save_attention=save), 2, "cuda"))
        return deep.lengths(2**24)

    asked = []
    for order in ((True, False), (False, True)):
        answers._deep.cache_clear()
        asked.append({save: lengths(save) for save in order})
    assert asked[0] == asked[1]
    assert asked[0][True] != asked[0][False]


def test_a_line_for_one_chunk_says_nothing_of_two():
    deep = Deep(run_of("tiny", chunk=1024, on_host="hidden"), 1)
    assert deep.lengths(1024) == ((1024,), 1024, 1024)
    assert deep.lengths(1900) == ((1280, 1792), 1025, 2047)


def test_a_second_answer_simulates_nothing(cache, monkeypatch, capsys):
    """From this process, from the user's cache, and not where the code is another. What is simulated is shown."""
    question = StepQuestion(run_of("tiny"), 1, "cuda", 9)
    monkeypatch.setattr(progress, "EVERY", 0)
    first = lines_at(question, 700)
    shown = capsys.readouterr().err
    assert "alst: simulating steps of tiny, sp=1; steps of a few layers: 1 of " in shown
    assert len(list(cache.glob("*.json"))) == 1
    monkeypatch.setattr(answers, "answer", lambda *_: pytest.fail("it was simulated again"))
    assert lines_at(question, 701) == first
    fits._known.cache_clear()
    again, before = (json.dumps([m.line for m in found.moments]) for found in (lines_at(question, 700), first))
    assert again == before
    fits._known.cache_clear()
    monkeypatch.setattr(fits, "sources", lambda: "other code")
    with pytest.raises(pytest.fail.Exception, match="again"):
        lines_at(question, 700)


def test_a_cache_that_cannot_be_read_or_written_is_no_matter(cache):
    cache.write_text("a file where the folder should be")
    assert lines_at(StepQuestion(run_of("tiny"), 1, "cuda", 9), 300)


@pytest.fixture
def alone(tmp_path):
    """A run on one CPU rank."""
    return run_of(folder(tmp_path, "stablelm", 2)).replace(data={"seq_len": 640}, engine={"sp": 1, "world_size": 1})


def test_the_start_of_a_short_run_on_a_cpu_does_not_wait_for_a_simulation(alone, monkeypatch):
    """It is started without a prediction; a dry run waits for one."""
    with monkeypatch.context() as patch:
        patch.setattr(answers, "answer", lambda *_: pytest.fail("it was simulated"))
        assert preflight.why_not(alone, 1, 0) is None
        assert preflight.limits(alone, 1, 0) == (preflight.DAY, preflight.DAY)
    assert preflight.outlook(alone, 0).startswith("fits")


def test_a_long_run_on_a_cpu_is_simulated_before_it_starts(alone, monkeypatch):
    """It would not fit, and is not started."""
    for helps in ("nearest", "longest"):  # which are asked about many lengths
        monkeypatch.setattr(Question, helps, lambda *_: None)
    run = alone.replace(data={"seq_len": 200_000}, limits={"device_memory": "16MiB"})
    assert "200,000 tokens would take" in str(preflight.why_not(run, 1, 0))


def test_what_comes_with_the_library_is_what_is_simulated_today():
    """Two answers for public models, drawn anew each time."""
    draw = random.Random()
    for entry in draw.sample([e for key, e in fits.public().items() if key != fits.VERSIONS], 2):
        found = draw.choice(entry["found"])
        (fresh,) = public_fits.again({**entry, "found": [found]})["found"]
        assert json.loads(json.dumps(public_fits._plain(fresh))) == found, entry


def test_what_is_alike_is_not_all_run(tmp_path, monkeypatch):
    """Soft caps run block by block: some blocks, and some tiles, take as much as all."""
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 2**19)  # blocks of 128 to 256 tokens
    run = run_of(folder(tmp_path, "gemma2", 2), attention="blockwise").replace(data={"seq_len": 2400})
    some = simulate.simulate(run, 1)
    monkeypatch.setattr(simulate, "ENDS", 10**6)
    whole = simulate.simulate(run, 1)
    assert (some.device_peak, some.moments) == (whole.device_peak, whole.moments)
