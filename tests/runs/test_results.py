"""`result.json`: the schema, atomic writes, operation counts and tables."""

import errno
import json
import math
import os
import subprocess
from unittest import mock

import pytest
import yaml
from cases import check_refused, lines_of

from alstlib.base.config import RunConfig
from alstlib.base.units import format_bytes, format_seconds, format_tokens, parse_quantity
from alstlib.hf.loading import models
from alstlib.runs import results

CONFIG = RunConfig(row="alst", engine={"world_size": 2, "sp": 2})


def result(status="ok", row="alst", finished="2026-01-01T00:00:00+00:00", **metrics):
    made = results.new_result(CONFIG.replace(row=row), status, metrics=metrics)
    return {**made, "finished": finished}


def test_fields_are_those_of_the_design():
    error = {"type": "ValueError", "message": "m"}
    made = results.new_result(CONFIG, "error", error=error, device="H100", device_count=2)
    assert made["error"] == {**error, "log_tail": ""}
    environment = made["environment"]
    assert {"torch", "transformers", "deepspeed", "liger", "lock_hash"} <= set(environment)
    assert (environment["device"], environment["device_count"]) == ("H100", 2)
    assert RunConfig.from_dict(made["config"]) == CONFIG


def test_git_facts(tmp_path):
    """Of the package: what lies outside of it does not count."""

    def git(*args):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *args], check=True, stdout=subprocess.DEVNULL)

    assert results.git_facts(tmp_path) == {"sha": "unknown", "dirty": None}
    git("init", "-q")
    assert results.git_facts(tmp_path)["sha"] == "unknown"  # no commit yet
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    for changed, dirty in (("report.md", False), ("pkg/a.py", True)):
        (tmp_path / changed).write_text("2")
        found = results.git_facts(package)
        assert (len(found["sha"]), found["dirty"]) == (40, dirty)


def test_what_is_written_is_plain_json(tmp_path):
    """Numbers that are not finite become null, tensors lists; what JSON cannot hold is refused."""
    import torch

    path = tmp_path / "result.json"
    results.write_result(path, result(loss=torch.tensor([1.0, math.nan]), tflops={"paper": -math.inf, "model": 2.0}))
    read = results.read_result(path)["metrics"]
    assert read == {"loss": [1.0, None], "tflops": {"paper": None, "model": 2.0}}
    results.write_result(path, result(seq_len=torch.tensor(7), where=tmp_path))
    assert results.read_result(path)["metrics"] == {"seq_len": 7, "where": str(tmp_path)}
    check_refused("cannot be written as JSON", results.write_result, path, result(loss=[print]))
    assert results.read_result(path)["metrics"]["seq_len"] == 7


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_keeps_the_previous_result(tmp_path, monkeypatch, call):
    path = tmp_path / "result.json"
    results.write_result(path, result(seq_len=1))
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"result.json: No space left on device; what was there is intact") as e:
        results.write_result(path, result(seq_len=2))
    assert e.value.errno == errno.ENOSPC
    assert results.read_result(path)["metrics"]["seq_len"] == 1
    assert os.listdir(tmp_path) == ["result.json"]


TEXTS = """
{                     -> Invalid JSON
[]                    -> should be an object
{"schema_version": 1} -> run_id=.*: Field required
"""
FIELDS = r"""
schema_version: 2  -> schema_version=2: Input should be 1
status: done       -> status='done': Input should be 'ok', 'oom'
mode: guessed      -> mode='guessed': Input should be 'real'
row: [bad]         -> row=\['bad'\]: Input should be a valid string
metrics: {loss: [{}]}                    -> metrics\.loss.*=.*: Input should be
metrics: {step_seconds: [{}]}            -> metrics\.step_seconds.*=.*: Input should be
metrics: {device_peak_bytes: 3}          -> metrics\.device_peak_bytes.*=.*: Input should be
metrics: {notes: 5}                      -> metrics\.notes.*=.*: Input should be
metrics: {predicted: {step_seconds: x}}  -> metrics\.predicted.*=.*: Input should be
metrics: {seq_len: long}                 -> metrics\.seq_len.*=.*: Input should be
metrics: {tried: 7}                      -> metrics\.tried.*=.*: Input should be
metrics: {tflops: {paper: x}}            -> metrics\.tflops.*=.*: Input should be
metrics: {tokens_per_step: x}            -> metrics\.tokens_per_step.*=.*: Input should be
metrics: {eval_steps: 7}                 -> metrics\.eval_steps.*=.*: Input should be
"""


@pytest.mark.parametrize("text, message", lines_of(TEXTS))
def test_texts_that_are_no_results_are_refused(tmp_path, text, message):
    (path := tmp_path / "result.json").write_text(text)
    check_refused(message, results.read_result, path)


@pytest.mark.parametrize("fields, message", lines_of(FIELDS))
def test_results_with_a_wrong_field_are_refused(tmp_path, fields, message):
    """By the one who writes them too. One whose metrics no run writes took the table, the page and the listing of all
    sweeps with it."""
    path, bad = tmp_path / "result.json", {**result(), **yaml.safe_load(fields)}
    check_refused(message, results.write_result, path, bad)
    path.write_text(json.dumps(bad))
    check_refused(message, results.read_result, path)


LLAMA_8B = {"dense_params": 7_504_924_672, "heads": 32, "head_dim": 128, "layers": 32}


def test_flos_meet_the_paper():
    """500K on one H100: 548.1 TFLOPS at 16:50, 2.19e17 model FLOS. Of Table 1 the row without SP, where 8 replicas each
    take one sample; those with SP are in lesson 14."""
    one = models.flos(500_000, 500_000, **LLAMA_8B)
    assert one["paper"] / 1010 / 1e12 == pytest.approx(548.8, rel=1e-3)
    assert one["model"] == pytest.approx(2.19e17, rel=2e-3)
    length, seconds, tflops = results.PAPER_ROWS["tiled_loss"].values()
    found = models.flos(length, 8 * length, **LLAMA_8B)["paper"]
    assert found / seconds / 8 / 1e12 == pytest.approx(tflops, rel=5e-3)


def test_collect_takes_all_that_can_be_read_in_the_order_of_the_ablation(tmp_path):
    for folder, row, length in (("a/ours", "ours", 2), ("a/base", "baseline", 1), ("b/base", "baseline", 4)):
        (tmp_path / folder).mkdir(parents=True)
        results.write_result(tmp_path / folder / "result.json", result(row=row, seq_len=length))
    (tmp_path / "a/half").mkdir()
    (tmp_path / "a/half/result.json").write_text("{")
    with pytest.warns(UserWarning, match=r"left out: .*a/half/result.json is no result .*Invalid JSON"):
        found = results.collect(tmp_path)
    lengths = [(r["row"], r["metrics"]["seq_len"]) for r in found]
    assert lengths == [("baseline", 1), ("baseline", 4), ("ours", 2)]
    assert [(one["folder"], one["label"]) for one in found[:2]] == [
        (tmp_path / "a/base", "a/base"), (tmp_path / "b/base", "b/base")
    ]  # fmt: skip


def test_table_and_markdown():
    """The first step, which warms up, does not count; nor what is no number; predictions are shown where there are."""
    metrics = {
        "seq_len": 4096, "tokens_per_step": 8192, "step_seconds": [9.0, 1.0, 2.0], "host_peak_bytes": [2**20, 2**20],
        "device_peak_bytes": [2**30, 3 * 2**29], "tflops": {"paper": 2.0, "model": 1.0}, "loss": [9.0, 8.12345, None],
    }  # fmt: skip
    rows = results.table([result(**metrics), result("oom", row="mine")])
    lines = results.to_markdown(rows).splitlines()
    figures = "4,096 | 8.123 | 2.0 s | 4,096 | 1.50 GiB | 2.00 MiB | 2 | 1"
    assert lines[2] == f"| alst | ok | real | {figures} | 3.7M | 1:47:35 | 590.6 |"
    assert lines[3].startswith("| mine | oom | real | - | - |")
    assert len({line.count("|") for line in lines}) == 1
    assert results.with_notes(rows) == "\n".join(lines)
    predicted = {"device_peak_bytes": 2**30, "host_peak_bytes": 2**20, "step_seconds": None}
    (row,) = results.table([result(**metrics, predicted=predicted, notes=["its data were read 3 times"])])
    assert (row["predicted_device_peak_bytes"], row["predicted_host_peak_bytes"]) == (2**30, 2**21)  # of 2 ranks
    heading, *_, empty, note = results.with_notes([row]).splitlines()
    assert (empty, note) == ("", "- alst: its data were read 3 times")
    assert "| device peak | predicted device peak |" in heading
    assert "predicted step" not in heading


@pytest.mark.parametrize("n", [1, 999, 1000, 1500, 2048, 131_072, 999_999, 1_050_000, 123_456_000, 1_234_567_000])
def test_token_counts_survive_formatting(n):
    assert parse_quantity(format_tokens(n).replace(",", "")) == n


def test_formats():
    assert [format_tokens(n) for n in (500_000, 3_700_000, 2048, 1500)] == ["500K", "3.7M", "2,048", "1.5K"]
    assert [format_bytes(n) for n in (512, 3 * 2**29, 384 * 2**20)] == ["512 B", "1.50 GiB", "384.00 MiB"]
    assert [format_seconds(s) for s in (0.35, 12.34, 59.96, 1010, 200_000)] == [
        "350 ms", "12.3 s", "0:01:00", "0:16:50", "55:33:20",
    ]  # fmt: skip
