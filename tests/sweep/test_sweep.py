"""A sample of the sweep: types that are in no other test, refused ones too, on one rank and on two; and its table."""

import re

import drive
import judge
import judge_images
import pytest
import small
import stock
import table
import yaml
from cases import ROOT

EXACT = yaml.safe_load("""
[gemma4_text, gemma3n_text, phimoe, longcat_flash, zaya, deepseek_v2, mllama, afmoe, jetmoe, opt, roberta, stablelm,
 hrm_text, whisper, cohere2, diffllama, mamba]
""")
REFUSED = yaml.safe_load("""
bart: numbers its tokens by itself
bloom: computes attention by itself
doge: makes an attention mask
inkling_text: adds a position_bias
deepseek_v4: keys that are pooled
recurrent_gemma: mixes tokens by linear_attention
rwkv: (RwkvBlock) mixes tokens in another way than attention and the states that are known
xlstm: (xLSTMBlock) mixes tokens in another way than attention and the states that are known
""")
PARTLY = yaml.safe_load("""
diffllama: [chunks, blocks]
longcat_flash: [chunks, blocks]
hrm_text: [blocks]
zaya: [chunks]
""")
"""Ways of running a layer that are refused."""
KINDS = yaml.safe_load("""
linear_attention full_attention: bailing_hybrid bamba granitemoehybrid jamba kimi_linear minimax olmo_hybrid
  qwen3_5_moe_text qwen3_5_text qwen3_next
linear_attention hybrid: zamba zamba2
hybrid: falcon_h1
conv full_attention: lfm2 lfm2_moe
conv full_attention sliding_attention: lfm3
linear_attention moe full_attention mlp: nemotron_h
""")
"""The kinds of layers of hybrids."""


def check(kind, outcomes):
    for case, outcome in zip(judge.CASES, outcomes):
        partly = any(how in case for how in PARTLY.get(kind, ()))
        want = "refused" if kind in REFUSED or partly else "exact"
        assert outcome["result"] == want, (case, outcome)
        assert REFUSED.get(kind, "") in outcome["reason"]


@pytest.mark.parametrize("kind", [*PARTLY, *REFUSED])
def test_on_one_rank(kind):
    check(kind, judge.judge(0, 1, kind, judge.CASES))


@pytest.mark.parametrize("kind", EXACT)
def test_on_two_ranks(pools, kind):
    check(kind, drive.judged({2: pools(2)}, 2, kind))


IMAGES_REFUSED = {"gemma3": "in both directions", "llava_next": "cannot read images", "mllama": "cannot read images"}


def check_images(kind, outcomes):
    said = IMAGES_REFUSED.get(kind)
    for case, outcome in zip(judge_images.CASES, outcomes):
        refused = said is not None and "images" in case
        assert outcome["result"] == ("refused" if refused else "exact"), (case, outcome)
        assert not refused or said in outcome["reason"]


@pytest.mark.parametrize("kind", IMAGES_REFUSED)
def test_text_alone_is_exact_where_images_are_refused(kind):
    check_images(kind, judge_images.judge(0, 1, kind, judge_images.CASES))


@pytest.mark.parametrize("kind", ["aya_vision", "glm_ocr", "lighton_ocr"])
def test_types_that_read_images_on_two_ranks(pools, kind):
    """Those that no other test has, of each way in which images come."""
    check_images(kind, drive.judged({2: pools(2)}, 2, kind, "images"))


def test_a_sweep_that_was_stopped_goes_on(monkeypatch, tmp_path, capsys):
    """With what is not judged yet, and with what was not as it should be."""
    results = {"llama": "exact", "bart": "refused", "opt": "wrong"}
    by_kind = {kind: [{"result": result, "reason": "a reason"}] * len(judge.CASES) for kind, result in results.items()}
    monkeypatch.setattr(drive, "judged", lambda pools, sp, kind, of: by_kind[kind])
    path = tmp_path / "sweep.jsonl"
    drive.sweep(["llama", "opt"], [1], path)
    assert "[2/2" in capsys.readouterr().out
    found = drive.sweep(list(results), [1], path)
    shown = capsys.readouterr().out
    assert "sp 1 llama" not in shown
    assert "a reason" in shown
    assert {key[0]: line["result"] for key, line in found.items()} == results
    assert len(path.read_text().splitlines()) == 4 * len(judge.CASES)


def test_small_hybrids_have_every_kind_of_layer():
    assert len(small.TYPES) > 170
    for layers, kinds in KINDS.items():
        for kind in set(kinds.split()) & set(small.TYPES):
            assert set(small.small_config(kind).layer_types) == set(layers.split()), kind


def test_what_is_kept_of_other_types_stays(tmp_path):
    path = tmp_path / "kept.jsonl"

    def outcome(kind, result):
        return {(kind, 1, "whole, tiles"): {"type": kind, "sp": 1, "case": "", "result": result, "reason": ""}}

    drive.keep({**outcome("opt", "refused"), **outcome("bart", "refused")}, path)
    drive.keep({**outcome("opt", "not built"), **outcome("llama", "refused")}, path)
    kept = [(one["type"], one["result"]) for one in table.stored(path)]
    assert kept == [("bart", "refused"), ("llama", "refused"), ("opt", "not built")]


def test_a_type_says_in_which_ways_it_runs():
    exact, refused = {"result": "exact", "reason": ""}, {"result": "refused", "reason": "ValueError: blocks; no chunks"}
    partly = {
        "result": "exact",
        "reason": "chunks, chunks, host refused: ValueError: a; b; blocks refused: ValueError: c",
    }
    assert table.ways([exact]) == ["exact", "exact"]
    assert table.ways([refused]) == ["-", "-"]
    assert table.ways([partly, exact]) == ["refused", "refused"]
    assert table.ways([{**exact, "reason": "blocks refused: ValueError: no chunks"}]) == ["exact", "refused"]


def test_the_types_that_the_readme_names_are_refused_by_the_stock_route_and_exact_here():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"\((\w+)\)", re.search(r"Ten families of models.*?\n\n", text, re.S).group())
    refused = {one["type"] for one in table.stored(stock.PATH)}
    exact = {one["type"] for one in table.stored(table.RESULTS / "sweep-5.23.0.jsonl") if one["result"] == "exact"}
    assert len(named) == 10
    assert set(named) <= refused & exact
    assert stock.refused("qwen3_next")
    assert not stock.refused("llama")


@pytest.mark.parametrize("of", table.PAGES)
def test_the_table_is_what_was_measured(of):
    assert table.PAGES[of][0].read_text() == table.table(of)
    for path in table.RESULTS.glob(f"{of}-*.jsonl"):
        assert {line["result"] for line in table.stored(path)} <= {*drive.GOOD, "text"}, path.name
