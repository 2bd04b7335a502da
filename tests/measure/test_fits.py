"""Any model that `apply` takes is planned, by simulations of its own code at few lengths, once."""

import gc
import json
import os
import random
from pathlib import Path

import plan_table
import public_fits
import pytest
import torch
import transformers

from alstlib.base.config import RunConfig, not_default
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


def test_a_tile_after_the_layers_may_be_longer_than_chunks():
    """A line that is drawn where the norm is one tile does not hold where it has several."""
    run = run_of("tiny", chunk=1024, on_host="hidden+kv", tiles={**TILES, "norm": 5 * 1024})
    deep = Deep(run, 16)
    assert deep.lengths(4500) == ((4096, 5120), 4096, 5119)
    assert deep.lengths(6000) == ((5120, 6144), 5120, 10_239)
    assert deep.lengths(20_000) == deep.lengths(10**6) == ((10_240, 11_264), 10_240, 2**50)


def test_steps_that_were_compared_are_drawn_again_and_further_ones_are_longer():
    table = json.loads((Path(plan_table.__file__).parents[1] / "results/planner/simulated.json").read_text())["found"]
    for one in table:
        run, ranks, device = plan_table.draw(one["seed"])
        drawn = {"options": not_default(run), "ranks": ranks, "device": device}
        assert "options" not in one or {field: one[field] for field in drawn} == drawn
    further = [plan_table.draw(plan_table.COUNT + n)[:2] for n in range(50)]
    assert max(run.data.seq_len // ranks for run, ranks in further if run.chunk) > 2**17
    assert max(run.data.seq_len // ranks for run, ranks in further if not run.chunk) <= 2**15


def remote(at, layers):
    """A model whose code comes with it, and makes so many layers."""
    config = transformers.AutoConfig.for_model("llama")
    name = at / "coded"
    shrunk(config, 1, {}).save_pretrained(name)
    known = json.loads((name / "config.json").read_text())
    (name / "config.json").write_text(json.dumps({**known, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}))
    (name / "modeling_own.py").write_text(CODE.format(layers))
    return run_of(str(name)).replace(**{"model.trust_remote_code": True})


CODE = """
from transformers import LlamaForCausalLM


class Own(LlamaForCausalLM):
    def __init__(self, config):
        config.num_hidden_layers = {}
        super().__init__(config)
"""


def test_code_that_comes_with_a_model_is_read_again_where_it_changed(tmp_path):
    parameters, host = [], []
    for layers in (1, 3):
        run = remote(tmp_path, layers)
        parameters.append(read_shape(run.model.name, trust_remote_code=True).parameters)
        host.append(lines_at(StepQuestion(run, 1, "cuda"), 300).host_at(300))
    assert parameters[0] < parameters[1]
    assert host[0] < host[1]


def test_an_adapter_is_simulated_by_peft(monkeypatch):
    """Another version of it makes other answers, and only of adapters."""
    plain, adapted = (
        StepQuestion(run_of("tiny").replace(model={"lora": lora}), 1, "cuda") for lora in (None, {"r": 4})
    )
    before = [fits._file(one.text) for one in (plain, adapted)]
    monkeypatch.setattr(fits.metadata, "distributions", lambda name: [])  # as where it is not installed
    after = [fits._file(one.text) for one in (plain, adapted)]
    assert [a == b for a, b in zip(after, before)] == [True, False]


def test_modules_of_an_adapter_may_be_a_set(cache):
    """A set has no order, and JSON has none."""
    names = ["q_proj", "v_proj", "up_proj"]
    texts = set()
    for given in (set(names), names[::-1], frozenset(names)):
        question = StepQuestion(run_of("tiny").replace(model={"lora": {"r": 4, "target_modules": given}}), 1, "cuda")
        texts.add(question.text)
        lines_at(question, 300)
    assert len(texts) == 2, "a list stays as it is"
    assert len([*cache.iterdir()]) == 2


def test_what_another_process_wrote_meanwhile_stays(cache, monkeypatch):
    """And everybody may read it who may read other files."""
    question = StepQuestion(run_of("tiny"), 1, "cuda")
    with monkeypatch.context() as patch:
        for tokens in (30, 40):
            patch.setattr(fits, "_known", lambda text, own=[]: own)
            lines_at(question, tokens)
    monkeypatch.setattr(answers, "answer", lambda *_: pytest.fail("it was simulated again"))
    assert lines_at(question, 30) != lines_at(question, 40)
    os.umask(umask := os.umask(0o22))
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


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
