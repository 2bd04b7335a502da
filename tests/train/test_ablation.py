"""The worker, as the launcher starts it: what a run writes, and how each kind of failure ends."""

import json
import math
import os
import re
from unittest import mock

import pytest
import torch
import yaml
from cases import READS_PROC, lines_of, listening, reads_proc, run_with
from runs_on_ranks import trained
from test_state import steps_in
from transformers import AutoModelForCausalLM, AutoTokenizer

from alstlib.base.config import RunConfig
from alstlib.base.units import GIB
from alstlib.hf.loading.models import flop_dimensions, flos, load_model
from alstlib.planner.preflight import outlook, why_not
from alstlib.planner.question import Question
from alstlib.planner.search import Trials
from alstlib.runs import results
from alstlib.runs.corpus.reading import load_corpus
from alstlib.runs.corpus.samples import make_samples
from alstlib.runs.launch import launch
from alstlib.runs.processes import WARNED
from alstlib.runs.progress import Progress, ProgressReader
from alstlib.runs.train.ablation import AblationRun
from alstlib.runs.train.worker import work

OFFLINE = {"HF_HUB_OFFLINE": "1"}


DEFAULTS = """
options: plain
options.offload: sync
options.tiles.loss: true
options.tiles.mlp: true
model.name: tiny
data.seq_len: 129
engine.world_size: 2
engine.sp: 2
optim.steps: 2
optim.learning_rate: 0.01
limits.timeout: 200
"""


def run_config(**changes):
    return run_with(DEFAULTS, changes)


# Launches of the real worker


def how(result):
    """How a run ended."""
    return result["status"], (result["error"] or {}).get("type")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Five steps of two micro-batches with a state after the third; the model is saved at the end. And what its
    processes listen on, each time that its launcher looks."""
    out, seen = tmp_path_factory.mktemp("first"), []

    def look(*_):
        seen.append(listening(out))

    look.tick = look  # where nothing happened
    run = run_config(row="alst", steps=5, accumulation=2, checkpoint_every=3, save_to=f"{out}/model", warmup_steps=2)
    return out, launch(run, out, extra_env=OFFLINE, on_progress=look if READS_PROC else None), seen


@reads_proc
def test_a_run_listens_on_the_loopback_only(first):
    """torchrun's store, gloo's sockets and whatever DeepSpeed opens, while real ranks train."""
    assert max(map(len, first[2])) >= 3, "torchrun and both ranks"
    assert {address for found in first[2] for addresses in found.values() for address in addresses} == {"127.0.0.1"}


def test_a_run_writes_a_complete_result(first):
    result = first[1]
    assert (result["status"], result["mode"], result["row"], result["error"]) == ("ok", "real", "alst", None)
    assert [result["environment"][name] for name in ("device", "device_count")] == ["cpu", 2]
    m = result["metrics"]
    assert (m["seq_len"], m["tokens_per_step"], m["valid_tokens"]) == (129, 258, [256] * 5)
    assert len(m["step_seconds"]) == 3  # the first two are watched, not timed
    assert m["loss"][0] == pytest.approx(math.log(512), rel=0.02)
    assert m["loss"][-1] < m["loss"][0] - 0.1
    for name, within in (("device_peak_bytes", 0.25), ("host_peak_bytes", 0.05)):  # on the device mostly buckets
        assert len(m[name]) == 2
        assert m["predicted"][name] == pytest.approx(max(m[name]), rel=within)
    median = sorted(m["step_seconds"])[1]
    assert m["tokens_per_second"] == pytest.approx(258 / median)
    for name in ("paper", "model"):
        assert m["flos"][name] / m["tflops"][name] / 2 / 1e12 == pytest.approx(median)
    # each rank sends the other half of 65 tokens' q, k, v and output, twice forward (recompute) and once backward, in
    # two layers of two micro-batches
    assert m["wire_bytes"] == 65 * 16 * 4 * (4 + 2 * 2 + 4) // 2 * 3 * 2 * 2
    assert m["flos"] == flos(129, 258, **flop_dimensions(load_model(run_config(), torch.float32)))


def test_progress_tells_rows_steps_and_time(first):
    events = ProgressReader(first[0] / "progress.jsonl").read()
    assert [e["event"] for e in events[:2]] == ["start", "load"]
    steps = [e for e in events if e["event"] == "step"]
    said = [[e[name] for name in ("row", "step", "steps", "seq_len", "loss")] for e in steps]
    assert said == [["alst", i, 5, 129, loss] for i, loss in enumerate(first[1]["metrics"]["loss"], 1)]
    assert all(e["tokens_per_second"] > 0 for e in steps)
    assert min(e["eta_seconds"] for e in steps) == steps[-1]["eta_seconds"] == 0


@pytest.fixture(scope="module")
def own(first, tmp_path_factory):
    """The trained model as a folder, on a local JSONL file."""
    out = tmp_path_factory.mktemp("own")
    lines = [json.dumps({"text": f"def f_{i}(x):\n    return x + {i}\n" * 8}) for i in range(60)]
    (out / "data.jsonl").write_text("\n".join(lines + ['{"text": null}'] * 60))
    run = run_config(**{"model.name": str(first[0] / "model"), "data.name": f"{out}/data.jsonl"}, steps=2, zero_stage=2)
    return out, run


@pytest.mark.slow
def test_the_trained_model_is_trained_on(ranks2, own):
    out, run = own
    m = ranks2(trained, out / "run", run)[0]["metrics"]
    model, tokenizer = (kind.from_pretrained(run.model.name) for kind in (AutoModelForCausalLM, AutoTokenizer))
    sample = make_samples(load_corpus(run.data.name), tokenizer, 129, seed=run.optim.seed, limit=2)[0]
    with torch.no_grad():
        want = float(model(input_ids=sample["input_ids"][None], labels=sample["labels"][None]).loss)
    assert m["loss"][0] == pytest.approx(want, rel=1e-5)
    assert any("rows train nothing, without a token with a loss" in note for note in m["notes"])


@pytest.mark.slow
def test_the_search_ends_at_the_budget(tmp_path):
    budget = 7_500_000
    run = run_config(
        search={"granule": 64}, device_memory=budget, seq_len=512, tiles={"mlp": 64, "loss": 64, "norm": True}
    )
    m = launch(run, tmp_path, extra_env=OFFLINE)["metrics"]  # it may start processes anew
    tried, found = {t["seq_len"]: t["device_peak_bytes"] for t in m["tried"]}, m["seq_len"]
    assert found % 64 == 0
    assert tried[found] <= budget < tried[found + 64]
    assert max(m["device_peak_bytes"]) <= budget
    assert max(m["device_peak_bytes"]) == pytest.approx(tried[found], rel=0.02)
    assert len(m["loss"]) == 2
    assert len(tried) <= 8


@pytest.mark.usefixtures("nothing_starts")
def test_a_run_that_cannot_fit_is_not_started(tmp_path):
    run = run_config(seq_len=40_000, device_memory="100MB", tiles={"mlp": True, "norm": True}, offload=False)
    result = launch(run, tmp_path)
    assert how(result) == ("oom", "WouldNotFit")
    message = result["error"]["message"]
    for text in ("40,000 tokens would take", "MiB of device memory a rank", "predicted, largest parts: loss",
                 "it would fit with", ": options.tiles.loss=True", "force=True (--force)"):  # fmt: skip
        assert text in message, message
    assert results.read_result(tmp_path / "result.json") == result


@pytest.mark.usefixtures("nothing_starts")
def test_a_cpus_memory_holds_devices_and_processes(tmp_path, monkeypatch):
    free = [23 * GIB]
    monkeypatch.setattr("alstlib.planner.machine.host_free", lambda: free[0])
    for helps in ("nearest", "longest"):  # which are asked about many lengths
        monkeypatch.setattr(Question, helps, lambda *_: None)
    run = RunConfig(model={"name": "tiny"}, engine={"world_size": 2, "sp": 2}, data={"seq_len": "20M"})
    said = r"(?s)does not fit: .*short on the host for each rank.* of 11.50 GiB; with what is on the device"
    assert re.search(said, outlook(run, 0))
    result = launch(run, tmp_path)
    assert how(result) == ("oom", "WouldNotFit")
    assert "a rank's share of the free host memory is 11.50 GiB" in result["error"]["message"]
    short = run.replace(data={"seq_len": 64})
    for free[0], message in ((2 * GIB, "None"), (GIB // 2, "process 500.00 MiB")):
        assert message in str(why_not(short, 1, 0))


# The worker's ranks in the tests' own pool: what ends a run before or in its first step


def outcome(rank, world, out, run):
    """Type and message of the error with which a run ends on this rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = f"{out.name}-{run.digest()}"
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    with pytest.raises(BaseException) as ended:
        work(run, out, AblationRun)
    return ended.typename, str(ended.value)


def ends(pool, out, run):
    """The result of a run that fails in the same way on every rank."""
    answers = pool(outcome, out, run)
    assert len({kind for kind, _ in answers}) == 1, answers
    result = results.read_result(out / "result.json")
    assert (result["error"]["type"], result["error"]["message"]) in answers
    return result


BAD = """
model.config: {attention_dropout: 0.1} -> ValueError -> has attention dropout 0.1, which tiles
data.name: nowhere.jsonl               -> ValueError -> data='nowhere.jsonl' does not exist
data.name: [{input_ids: [1, 9999, 2]}] -> ValueError -> has token 9999, but the model's vocab_size
data.name: [{messages: [{role: user, content: a}]}] -> ValueError -> the tokenizer has no chat template
search: true                           -> ValueError -> search=True needs limits.device_memory
output.resume_from: nowhere            -> ValueError -> the training state in nowhere: there is no training state
output.save_to: /dev/null/model        -> OSError -> save_to='/dev/null/model' cannot be written to
optim.learning_rate: 1.0e+15           -> FloatingPointError -> step 2 at 129 tokens: its loss is nan
options.host_memory: 10_000            -> HostOutOfMemory -> 10,000
{data.seq_len: 4096, limits.device_memory: 7.5MB} -> DeviceOutOfMemory -> go beyond the budget of 7,500,000 bytes
"""
"""In the last, the model alone fits."""


@pytest.mark.parametrize("changes, kind, message", lines_of(BAD))
def test_bad_input_is_an_error_on_every_rank(ranks2, tmp_path, changes, kind, message):
    changes = yaml.safe_load(changes)
    if isinstance(rows := changes.get("data.name"), list):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 100)))
        changes = {"data.name": f"{tmp_path}/rows.jsonl"}
    result = ends(ranks2, tmp_path, run_config(**changes))
    assert (how(result), result["metrics"]) == (("oom" if "Memory" in kind else "error", kind), {})
    assert message in result["error"]["message"]


@pytest.mark.parametrize("search", [True, False])
def test_any_rank_notes_the_length_of_a_search_at_which_memory_ran_out(tmp_path, search):
    job, full = object.__new__(AblationRun), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
    run = RunConfig(search=search, data={"seq_len": 1024})
    vars(job).update(
        run=run, progress=Progress(tmp_path / "p", 1), known=Trials([]), budget=100, ledger=mock.MagicMock(),
        ctx=mock.Mock(sp=1), engine=None, loader=mock.Mock(), _trial=mock.Mock(side_effect=[None, full]),
        measure=mock.Mock(side_effect=full),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        job()
    job.known = Trials(ProgressReader(tmp_path / "p").read())  # of the next process
    assert job.known.lost == ({256} if search else set())
    assert not search or job.peaks(256) > 100  # it does not run


# What a run continues from, in the tests' own pool


def resumable(**changes):
    return run_config(
        **{"optim.steps": 4, "output.checkpoint_every": 1, "engine.zero_stage": 2, "optim.accumulation": 2, **changes}
    )


def go(pool, out, *how, **changes):
    """The result of a run that may be continued."""
    return pool(trained, out, resumable(**changes), *how)[0]


@pytest.fixture(scope="module")
def whole(ranks2, tmp_path_factory):
    """The losses of the run that is not interrupted."""
    return go(ranks2, tmp_path_factory.mktemp("whole"))["metrics"]["loss"]


@pytest.mark.slow
def test_the_same_command_continues_by_itself(ranks2, tmp_path, whole):
    assert go(ranks2, tmp_path, 2)["status"] == "error"
    assert steps_in(tmp_path) == [2, 1]
    m = go(ranks2, tmp_path)["metrics"]
    assert f"continued after step 2 from {tmp_path / 'state' / 'step-00000002'}" in m["notes"]
    assert m["loss"] == pytest.approx(whole, rel=1e-6)
    assert steps_in(tmp_path) == [4, 3]

    again = go(ranks2, tmp_path)["metrics"]  # finished: repeated, and its states with it
    assert again["loss"] == pytest.approx(whole, rel=1e-6)
    assert not any("continued" in note for note in again["notes"])
    assert [p.name for p in tmp_path.glob("state*")] == ["state"]
    more = go(ranks2, tmp_path, steps=5, sp=1)["metrics"]  # more steps are another matter
    assert (more["loss"][:4], len(more["loss"])) == (again["loss"], 5)
    longer = go(ranks2, tmp_path, steps=8)["metrics"]["loss"]  # with smaller steps: more samples
    assert (longer[:5], len(longer)) == (more["loss"], 8)


def test_other_ranks_go_on_with_the_same_losses(pools, tmp_path, whole):
    """Two ranks share each sample under ZeRO-1, one has it alone under ZeRO-3, then two elsewhere under ZeRO-2."""
    first, then = tmp_path / "first", tmp_path / "then"
    go(pools(2), first, 1, zero_stage=1)
    go(pools(1), first, 3, zero_stage=3, sp=1, world_size=1)
    metrics = go(pools(2), then, resume_from=str(first))["metrics"]
    assert metrics["loss"] == pytest.approx(whole, rel=1e-6)
    assert [len(set(metrics["loss"])), len(metrics["step_seconds"])] == [4, 1]
    notes = "\n".join(metrics["notes"])
    assert f"continued after step 3 from {first / 'state' / 'step-00000003'}" in notes
    assert "engine.world_size=1 (here 2), engine.sp=1 (here 2): the data go on" in notes
    events = ProgressReader(then / "progress.jsonl").read()
    assert [e["step"] for e in events if e["event"] == "step"] == [4]


def test_a_run_that_ended_after_its_last_step_has_no_step_to_do(ranks2, tmp_path, whole):
    save_to = f"{tmp_path}/model"
    go(ranks2, tmp_path, 4, save_to=save_to)
    m = go(ranks2, tmp_path, save_to=save_to)["metrics"]
    assert m["loss"] == pytest.approx(whole, rel=1e-6)
    assert any("no step was left to do" in note for note in m["notes"])
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_state_of_another_configuration_is_kept(ranks2, tmp_path):
    go(ranks2, tmp_path, 3)
    assert go(ranks2, tmp_path, 2, learning_rate=1e-3)["status"] == "error"
    assert steps_in(tmp_path / "state.kept1") == [3, 2]
    m = go(ranks2, tmp_path, learning_rate=1e-3, resume="never", steps=2)["metrics"]
    assert len(m["loss"]) == 2
    assert f"what was in {tmp_path / 'state'} is now in {tmp_path / 'state.kept2'}" in m["notes"]
    assert steps_in(tmp_path / "state.kept2") == [2, 1]
    notes = go(ranks2, tmp_path, learning_rate=1e-4, steps=1, checkpoint_every=0)["metrics"]["notes"]
    (note,) = [n for n in notes if "not continued" in n]
    assert "belongs to another configuration: optim.learning_rate=0.001 (here 0.0001)" in note
    assert steps_in(tmp_path) == [2, 1]  # nothing was saved: it stays


def test_a_run_whose_time_is_up_saves_its_state_first(ranks2, tmp_path, whole):
    """By its own clock; then it is told to end; then it goes on to its end."""

    def ends_early(seconds, *ending):
        result = go(ranks2, tmp_path, 0, seconds, checkpoint_every=3)
        assert how(result) == ending
        return result["error"]["message"]

    said = ends_early(1.0, "timeout", "Timeout")
    assert "leaves no time for a step after step 1 of 4; the training state is saved" in said
    assert steps_in(tmp_path) == [1]
    (tmp_path / WARNED).touch()
    said = ends_early(1e6, "cancelled", "Warned")
    assert "the run was told to end after step 2 of 4; the training state is saved" in said
    (tmp_path / WARNED).unlink()
    losses = go(ranks2, tmp_path, 0, 1e6, checkpoint_every=3)["metrics"]["loss"]
    assert losses == pytest.approx(whole, rel=1e-6)


def save_fails(rank, world, out, run):
    with mock.patch("alstlib.runs.train.ablation.save_model", side_effect=OSError(28, "No space left on device")):
        return trained(rank, world, out, run)


def test_a_model_that_cannot_be_saved_leaves_the_metrics(ranks2, tmp_path):
    result = ranks2(save_fails, tmp_path, run_config(save_to=f"{tmp_path}/model", zero_stage=2))[0]
    assert (result["status"], result["error"]["message"]) == ("error", "[Errno 28] No space left on device")
    assert len(result["metrics"]["loss"]) == 2
