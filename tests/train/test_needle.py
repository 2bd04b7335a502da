"""The texts whose questions need the length, and the worker that trains on them."""

import itertools
import json
from pathlib import Path

import needle
import numpy as np
import pytest
from cases import run_with
from test_ablation import trained
from transformers import PreTrainedTokenizerFast

from alstlib.base.config import RunConfig
from alstlib.base.units import IGNORE
from alstlib.runs import results
from alstlib.runs.corpus.samples import make_samples

ROOT = Path(__file__).resolve().parents[2]
BASE, RESULTS = ROOT / "papermill_runs/needle/base", ROOT / "papermill_runs/results"


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("length", [64, 100, 2048, 32768])
def test_an_answer_stands_before_the_only_other_place_of_its_name(length, learn):
    if learn and length > needle.SHORT[-1]:
        pytest.skip("texts to learn from are short")
    made = needle.text(length, np.random.default_rng(length), learn)
    ids, labels = made["input_ids"], made["labels"]
    words = [needle.WORDS[i] for i in ids]
    assert len(words) == length == len(labels)
    answers = np.flatnonzero(labels != IGNORE)
    assert sorted(made["answers"]) == answers.tolist()
    assert (labels == ids)[answers].all()
    for answer, distance in zip(made["answers"], made["distances"]):
        at, (question, name, number) = answer - 1 - distance, words[answer - 2 : answer + 1]
        assert question == "?"
        assert name in needle.NAMES
        assert number in needle.NUMBERS
        assert words[at - 1 : at + 1] == [number, name]
        # the name stands there, in this question, and perhaps in others with the same answer, but with no other number
        assert {before for before, word in itertools.pairwise(words) if word == name} <= {number, "?"}


def test_distances_are_spread_over_the_length():
    found = [needle.text(32768, np.random.default_rng(i))["distances"] for i in range(8)]
    counts, _ = np.histogram(np.concatenate(found), needle.EIGHTHS, (0, 32768))
    assert counts.min() > 0.8 * 256
    assert np.concatenate(found).max() > 31000


def test_words_are_tokens_and_come_back():
    assert len(set(needle.WORDS)) == len(needle.WORDS)
    ids = needle.text(64, np.random.default_rng(0))["input_ids"].tolist()
    for tokenizer in (needle.get_tokenizer(), PreTrainedTokenizerFast.from_pretrained(BASE)):
        assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids


def rows_of(**fields):
    """The corpus of a rank whose run has these fields, without a process group."""
    worker = needle.NeedleRun.__new__(needle.NeedleRun)
    worker.run = RunConfig().replace(engine={"world_size": 2, "sp": 2}, optim={"steps": 3}, **fields)
    return worker.read_corpus()


def test_a_run_has_a_text_for_each_of_its_samples():
    long = rows_of(**{"data.seq_len": 512, "optim.accumulation": 2})
    assert [len(row["input_ids"]) for row in long] == [512] * 6
    samples = make_samples(long, None, 512, limit=6)
    assert len({tuple(samples[i]["input_ids"].tolist()) for i in range(6)}) == 6
    assert samples.passes == 1
    packed = rows_of(**{"data.seq_len": 2048, "data.packed": True, "optim.steps": 40})
    sizes = np.array([len(row["input_ids"]) for row in packed])
    assert {*sizes.tolist()} == {*needle.SHORT}
    assert sizes[sizes == 64].sum() / sizes.sum() == pytest.approx(0.5, abs=0.05)
    assert sizes.sum() >= 40 * 2048


def test_a_run_says_what_was_answered_before_and_after(ranks2, tmp_path):
    """The committed base answers texts of its own length, on two ranks that share them."""
    run = run_with(f"""
    model.name: {BASE}
    model.config: {{max_position_embeddings: 1024}}
    data.seq_len: 512
    engine: {{world_size: 2, sp: 2, zero_stage: 1, offload_optimizer: false}}
    optim.steps: 1
    optim.learning_rate: 0
    limits.timeout: 200
    """, {})  # fmt: skip
    found = ranks2(trained, tmp_path, run, 0, 0, needle.NeedleRun)[0]["metrics"]["needle"]
    assert found["before"] == found["after"]
    assert [one["length"] for one in found["after"]] == [1024, 2048]
    for one in found["after"]:
        assert sum(one["asked"]) == needle.TEXTS * one["length"] // 16
        assert one["accuracy"] == sum(one["right"]) / sum(one["asked"])
        assert one["accuracy"] > 0.9
        assert min(one["asked"][:7]) > 0


def committed(sweep, row):
    return results.read_result(RESULTS / sweep / row / "result.json")["metrics"]["needle"]


def test_the_committed_base_is_small_and_right_at_2k():
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 2_000_000
    (after,) = committed("needle-base", "2K")["after"]
    assert json.loads((BASE / "config.json").read_text())["max_position_embeddings"] == after["length"] == 2048
    assert after["accuracy"] > 0.95


def test_the_committed_runs_say_what_the_lesson_says():
    """With three seeds: right at every distance after long texts; after as many tokens in short ones, only near."""
    for seed in range(3):
        for kind in ("32K", "2K"):
            found = committed("needle", f"{kind}-{seed}")
            (_, before), (short, after) = found["before"], found["after"]
            far_before, far = (one["right"][-1] / one["asked"][-1] for one in (before, after))
            assert (short["length"], after["length"], sum(after["asked"])) == (2048, 32768, 2048)
            assert short["accuracy"] > 0.95
            assert far_before < 0.06
            if kind == "32K":
                assert after["accuracy"] > 0.95
                assert far > 0.9
            else:
                assert after["accuracy"] < 0.6
                assert far < 0.06
