"""Fine-tuning: what the libraries alone compute in one process, checkpoints, refusals, the notebook."""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import nbformat
import pytest
import torch
import yaml
from cases import ROOT, check_refused, lines_of, make_model, run_with, values_of
from pictures import as_files, conversations, small_gemma, small_vlm, square_processor
from trainers import SETTINGS, accelerate_here
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, TrainerCallback

from alstlib.base.config import RunConfig, value_of
from alstlib.hf.loading.models import load_model
from alstlib.planner.model_shapes import read_shape
from alstlib.runs import finetune as command
from alstlib.runs import progress, results, workers
from alstlib.runs.cli import main
from alstlib.runs.corpus.image_rows import ImageRows
from alstlib.runs.corpus.reading import get_tokenizer, load_corpus
from alstlib.runs.launch import launch
from alstlib.runs.processes import WARNED
from alstlib.runs.progress import ProgressReader
from alstlib.runs.train import finetune
from alstlib.runs.train.resume import Warned
from alstlib.runs.train.worker import work
from alstlib.runs.workers import FINETUNE, planned

pytest.importorskip("trl")
SPLITS = "with packed=True, trainer={'packing_strategy': 'bfd_split'} cuts nothing off"
CUT = "were cut at 96 tokens, and with them 19.7% of the labels"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twenty-one texts of unequal lengths; the last is cut."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    texts = [f"def f_{i}(x):\n    return x * {i}\n" * (1 + i * 5 % 7) for i in range(20)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "x = 1\n" * 90]))
    return str(path)


DEFAULTS = """
options: plain
options.offload: true
options.tiles.loss: true
options.tiles.mlp: true
model.name: tiny
data.eval: 0.2
data.seq_len: 96
data.tokenizer: stdlib-bpe
engine.world_size: 2
engine.sp: 2
optim.steps: 6
optim.accumulation: 2
optim.learning_rate: 0.01
optim.trainer: {eval_steps: 3}
limits.timeout: 200
"""


def config(data, **changes):
    return run_with(DEFAULTS, {"data.name": data, **changes})


def bare(run, **attributes):
    """A fine-tuning of which only the data are looked at."""
    job = finetune.FineTune.__new__(finetune.FineTune)
    vars(job).update(run=run, notes=[], **attributes)
    return job


def test_tokenizing_and_evaluating_give_signs_of_life(monkeypatch):
    """Each of them may take longer than the launcher waits for a sign of life."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=itertools.count(1000.0, 2.0).__next__))
    said = []
    own = {"say": lambda message, **_: said.append(message), "evaluated": 0}
    job = bare(RunConfig(), vocabulary=10, tokenizer=None, **own)
    job._tokens(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4}), "d")
    for _ in range(4):
        job.on_prediction_step(eval_dataloader=range(2))
    assert said == [
        "tokenizing 4 documents of 'd'", *(f"tokenizing 'd', {part}%" for part in (25, 50, 75, 100)),
        *["evaluating, 50%", "evaluating, 100%"] * 2,
    ]  # fmt: skip


def documents(tmp_path, rows, **how):
    """Token ids and labels of the documents that a fine-tuning on these rows (or lines) trains on or evaluates on, and
    its notes. The first line of the file is blank."""
    tokenizer = get_tokenizer("stdlib-bpe", vocab_size=512)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "d.jsonl").write_text("\n".join(["", *(r if isinstance(r, str) else json.dumps(r) for r in rows)]))
    run = config(f"{tmp_path}/d.jsonl", **{"data.tokenizer": f"{tmp_path}/tokenizer", "data.eval": None, **how})
    job = bare(run, say=mock.Mock(), vocabulary=512, corpus=load_corpus(run.data.name))
    job.tokenizer = job._tokenizer()
    return [(row["input_ids"], row["labels"]) for part in job._documents() if part for row in part], job.notes


FORMATS = [json.loads(row) for row in r"""
{"text": "What is 1+1? It's 2."}
{"messages": [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "It's 2."}]}
{"conversations": [{"from": "human", "value": "What is 1+1?"}, {"from": "gpt", "value": "It's 2."}], "system": "Add"}
{"prompt": "What is 1+1?", "completion": " It's 2."}
{"instruction": "What is 1+1?", "output": "It's 2."}
{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
{"prompt": [{"role": "user", "content": "What is 1+1?"}], "completion": [{"role": "assistant", "content": "It's 2."}]}
""".strip().splitlines()]  # fmt: skip
"""The same row in every format."""


def test_what_is_left_out_is_counted_by_format_line_and_reason(tmp_path):
    """Of a mixed file, every row of which is read by its own format."""
    good = [*FORMATS * 51, {"text": None, **FORMATS[1], "prompt": "x"}]
    alone = [documents(tmp_path, [row])[0][0] for row in FORMATS]
    asks, about = {"messages": [{"role": "user", "content": "What?"}]}, f"rows of '{tmp_path}/d.jsonl'"
    found, notes = documents(tmp_path, [*good[:4], "", asks, *good[4:]])
    counts = [found.count(one) for one in alone]
    assert counts == [51, 154, 51, 51, 154, 51, 154]  # three kinds of chats are the same one
    none = "train nothing and are left out, without a token with a loss among the first 96; the first: "
    assert notes == [f"1 of 359 {about} {none}row 5, read as messages"]
    long = {"prompt": "What is " * 200, "completion": "it?"}
    bad = [asks, {"text": ""}, {"note": "x"}, {"text": "", "instruction": "Add.", "output": ""}, *[asks] * 4, long]
    check_refused(r"(?s)9 of 367 rows.*2\.5%.*allow_dropped: true", documents, tmp_path, [*good, *bad])
    found, notes = documents(tmp_path, [*good, *bad], allow_dropped=True, **{"data.eval": 0.2})
    assert (len(found), notes) == (358, [
        f"9 of 367 {about} {none}row 359, read as messages, row 360, read as text, row 361, read as none of the known "
        "formats, row 362, read as instruction and output, row 363, read as messages"
    ])  # fmt: skip


UNREADABLE = """
{"text": 5}                          -> row 8, read as text: its text is 5; it must be a text
{"prompt": 5, "completion": 6}       -> row 8, read as prompt and completion: its prompt is 5; it must be a text
{"messages": ["hello"]}              -> row 8, read as messages: a message is 'hello'; it must have 'role' and 'content'
{"conversations": [{"from": "none"}]} -> row 8, read as conversations: a message is {'from': 'none'}
{"messages": [{"by": "a"}]}          -> row 8, read as messages: a message is {'by': 'a'}; it must have
{"input_ids": [1, 1099511627776]}    -> row 8, read as input_ids: Python integer 1099511627776 out of bounds for int32
{"input_ids": [1, 600]}              -> has token 600, but the model's vocab_size is 512
["a"]                                -> line 9, is no JSON object such as
{"text": "a                          -> line 9, is no JSON object such as
"""


@pytest.mark.parametrize("row, message", lines_of(UNREADABLE))
def test_a_row_that_cannot_be_read_is_named(tmp_path, row, message):
    with pytest.raises(ValueError) as refused:
        documents(tmp_path, [*FORMATS, row])
    assert f"d.jsonl', {message}" in str(refused.value) or message in str(refused.value).partition("d.jsonl' ")[2]


def test_token_ids_need_no_tokenizer_in_the_models_folder(tmp_path):
    make_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    rows = [{"input_ids": [1, 2, 3]}] * 4
    how = {"model.name": f"{tmp_path}/model", "data.tokenizer": "auto"}
    assert len(documents(tmp_path, rows, **how)[0]) == 4
    check_refused(r"has no tokenizer\.json", documents, tmp_path, [*rows, {"text": "a"}], **how)


def test_formats_that_begin_late_in_a_long_file(tmp_path):
    """Those that the reader of JSON does not meet in the first ten megabytes."""
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"text": "x" * 5_000_000}] * 3 + FORMATS)))
    found = load_corpus(str(path))
    assert len(found) == 10
    assert found[4]["messages"] == FORMATS[1]["messages"]


class Dies(TrainerCallback):
    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.after:
            raise KeyboardInterrupt


def tuned(rank, world, out, run, engine="ddp", dies_after=0):
    """One run of the worker, on a CPU with any engine, ended after some step without a result; what it left."""
    os.environ["TORCHELASTIC_RUN_ID"] = f"{out.name}-{time.monotonic()}"

    def job(run, out):
        made = finetune.FineTune(run, out)
        made.trainer.add_callback(Dies(dies_after))
        return made

    with accelerate_here(engine), mock.patch.object(finetune, "engine_of", return_value=engine):
        with contextlib.suppress(KeyboardInterrupt, Warned, ValueError):
            work(run, out, job)
        torch.distributed.barrier()
    return results.read_result(out / "result.json")


def trl(run, out, rows, settings, **given):
    """What TRL logs in one process, and the model that it trains."""
    from trl import SFTConfig, SFTTrainer

    parts = rows.train_test_split(test_size=run.data.eval, seed=run.optim.seed)
    own = {
        "max_steps": run.optim.steps, "bf16": False, "max_grad_norm": 0.0, "learning_rate": run.optim.learning_rate,
        "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1, "use_cpu": True, "seed": 0,
        "gradient_checkpointing": False, **settings,
    }  # fmt: skip
    with accelerate_here("ddp"):
        args = SFTConfig(str(out), **{**SETTINGS, **own})
        trainer = SFTTrainer(args=args, train_dataset=parts["train"], eval_dataset=parts["test"], **given)
        trainer.train()
        return trainer.state.log_history, trainer.model


def plain(run, out):
    """What TRL logs, which reads, tokenizes, cuts and packs the data by itself."""
    from peft import LoraConfig

    settings = {"max_length": run.data.seq_len, "packing": run.data.packed}
    return trl(
        run, out, load_corpus(run.data.name), settings, model=load_model(run, torch.float32),
        processing_class=get_tokenizer(run.data.tokenizer, vocab_size=512),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **run.model.lora) if run.model.lora else None,
    )[0]  # fmt: skip


def metrics_of(pool, out, run, *how):
    """What a run that ends well has measured."""
    found = pool(tuned, out, run, *how)[0]
    assert found["status"] == "ok", found["error"]
    return found["metrics"]


@pytest.fixture(scope="module")
def whole(ranks2, data, tmp_path_factory):
    return metrics_of(ranks2, tmp_path_factory.mktemp("whole"), config(data))


def compare(metrics, history):
    want = {name: [line[name] for line in history if name in line] for name in ("loss", "eval_loss", "learning_rate")}
    for name in ("loss", "eval_loss"):
        assert metrics[name] == pytest.approx(want[name], rel=1e-5)
    assert metrics["learning_rate"] == want["learning_rate"]
    assert (metrics["loss_steps"], metrics["eval_steps"]) == ([1, 2, 3, 4, 5, 6], [3, 6])


def test_two_ranks_are_plain_trl_in_one_process(whole, data, tmp_path):
    assert whole["predicted"] == {"unknown": workers.unpredicted(RunConfig(), FINETUNE, 0)}  # it was under DDP
    compare(whole, plain(config(data), tmp_path))
    assert whole["loss"][-1] < whole["loss"][0] - 0.2
    assert whole["parameters"] == whole["trained_parameters"] == read_shape("tiny", {}).parameters
    assert whole["notes"][:2] == [finetune.ON_CPU, f"6 of 21 rows of '{data}' {CUT}; {SPLITS}"]
    assert len(whole["device_peak_bytes"]) == len(whole["host_peak_bytes"]) == 2
    assert min(whole["host_peak_bytes"]) > 0
    assert len(whole["step_seconds"]) == 4


def test_an_adapter_with_packing(ranks2, data, tmp_path):
    from peft import PeftModel

    run = config(data, lora=LORA, packed=True, save_to=f"{tmp_path}/model", merge_lora=True)
    m = metrics_of(ranks2, tmp_path, run)
    compare(m, plain(run, tmp_path / "plain"))
    shape = read_shape("tiny", {})
    assert m["parameters"] - shape.parameters == m["trained_parameters"] == shape.adapter_parameters(LORA)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), torch.arange(20)[None]
    adapted = PeftModel.from_pretrained(load_model(run, torch.float32).eval(), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_engines_of_a_gpu(ranks2, data, tmp_path, whole, engine):
    """Their settings are taken, the losses are those of DDP, and what is saved is read."""
    run = config(data, zero_stage=3, fsdp=engine == "fsdp2", save_to=f"{tmp_path}/model")
    m = metrics_of(ranks2, tmp_path, run, engine)
    for name in ("loss", "eval_loss", "parameters"):
        assert m[name] == pytest.approx(whole[name], rel=1e-5)
    if engine == "zero3":  # weights, both moments and gradients of half the model wait on the host
        assert min(m["host_peak_bytes"]) > 4 * 4 * m["parameters"] / 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == m["parameters"]


def test_the_same_command_continues_and_another_does_not(ranks2, data, tmp_path, whole):
    run, checkpoints = config(data, checkpoint_every=2), tmp_path / "checkpoints"

    def go(run, *how):
        return ranks2(tuned, tmp_path, run, *how)[0]

    (tmp_path / WARNED).touch()  # it is told to end
    warned = go(run)
    assert (warned["status"], warned["error"]["type"]) == ("cancelled", "Warned")
    assert "told to end after step 1 of 6; the training state is saved in" in warned["error"]["message"]
    assert (checkpoints / "checkpoint-1" / "trainer_state.json").exists()
    (tmp_path / WARNED).unlink()
    go(run, "ddp", 5)
    (checkpoints / "checkpoint-5").mkdir()  # as one that was cut off
    m = go(run)["metrics"]
    for name in ("loss", "eval_loss", "loss_steps"):
        assert m[name] == pytest.approx(whole[name], rel=1e-6)
    assert "continued from checkpoint-4" in m["notes"]
    m = go(run.replace(optim={"learning_rate": 1e-3, "steps": 1}, output={"checkpoint_every": 0}))["metrics"]
    assert m["loss"] == pytest.approx(whole["loss"][:1], rel=1e-6)
    assert m["eval_steps"] == [1]  # after the last step, though it is no third one
    assert re.search(r"learning_rate=0.01 \(here 0.001\).* not continued", "\n".join(m["notes"]))
    assert (tmp_path / "checkpoints.kept1" / "checkpoint-6" / "trainer_state.json").exists()


# Images


def with_images():
    """Rows with images; the last has none."""
    return [*conversations(13), {**conversations(14)[13], "images": []}]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with a model that reads images, and one with images and JSON lines."""
    folder = tmp_path_factory.mktemp("pictures")
    small_vlm("llava").save_pretrained(folder / "model")
    square_processor().save_pretrained(folder / "model")
    as_files(with_images(), folder / "data")
    return folder


def with_pictures(folder, out, **changes):
    how = {"model.name": f"{folder}/model", "data.tokenizer": "auto", "packed": True, "save_to": f"{out}/model"}
    return config(str(folder / "data"), **{**how, **changes})


def test_a_folder_of_images_is_trained_on_as_plain_trl_does(ranks2, pictures, tmp_path):
    """All losses and every weight; what is saved has the processor too."""
    run = with_pictures(pictures, tmp_path)
    m = metrics_of(ranks2, tmp_path, run)
    history, model = trl(
        run, tmp_path / "plain", datasets.Dataset.from_list(with_images()), {"remove_unused_columns": False},
        model=AutoModelForImageTextToText.from_pretrained(run.model.name), processing_class=square_processor(),
        data_collator=ImageRows(square_processor()),
    )  # fmt: skip
    compare(m, history)
    assert finetune.NOT_PACKED in m["notes"]
    assert m["loaded_by"] == "AutoModelForImageTextToText"
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    for name, p in model.named_parameters():
        if not name.endswith("k_proj.bias"):  # whose gradient is zero but for rounding, which Adam makes large
            torch.testing.assert_close(saved.get_parameter(name), p, rtol=1e-4, atol=1e-6, msg=name)
    assert type(AutoProcessor.from_pretrained(tmp_path / "model")).__name__ == "LlavaProcessor"


def changed(before, after):
    """The weights that a training changed."""
    return [name for name, p in before.named_parameters() if not torch.equal(p, after.get_parameter(name))]


def test_the_line_of_the_page_trains_an_adapter(ranks2, pictures, tmp_path, monkeypatch):
    page = (ROOT / "notebooks" / "training.md").read_text(encoding="utf-8")
    line = re.search(r"    alst finetune (--model Qwen/Qwen2.5-VL.* --data pictures .*)", page)[1]
    words = shlex.split(line.replace("Qwen/Qwen2.5-VL-7B-Instruct", "model").replace("--data pictures", "--data data"))
    monkeypatch.chdir(pictures)
    run = run_of(*words, "--out", str(tmp_path), "--set", "optim.steps=2", "--set", "data.seq_len=96")
    metrics_of(ranks2, tmp_path, run)
    moved = changed(*map(AutoModelForImageTextToText.from_pretrained, (pictures / "model", tmp_path / "model")))
    assert {"vision_tower" in name for name in moved} == {True, False}
    assert type(AutoProcessor.from_pretrained(tmp_path / "model")).__name__ == "LlavaProcessor"


NO_PICTURES = """
{data.seq_len: 20} -> 13 of 14 rows
{data.seq_len: 5} -> give a longer data.seq_len, or smaller images
{model.name: text} -> has no processor to load
{model.name: gemma} -> Gemma3ForConditionalGeneration (gemma3) cannot read images under sequence parallelism
{data.name: lost} -> 'row 2, read as messages: its image'
"""
"""Fields, names of folders among them, and what is said of them."""


def test_images_that_cannot_be_trained_on_are_told_before_the_first_step(ranks2, pictures, tmp_path):
    make_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "text")
    square_processor().tokenizer.save_pretrained(tmp_path / "text")
    small_gemma().save_pretrained(tmp_path / "gemma")
    square_processor().save_pretrained(tmp_path / "gemma")
    as_files(conversations(4), tmp_path / "lost")
    (tmp_path / "lost" / "pictures" / "1-0.png").unlink()
    for changes, message in values_of(NO_PICTURES):
        changes = {n: f"{tmp_path}/{v}" if isinstance(v, str) else v for n, v in changes.items()}
        run = with_pictures(pictures, tmp_path, **{"data.eval": None, **changes})
        assert message in ranks2(tuned, tmp_path, run)[0]["error"]["message"]


# Refusals


WRONG = """
optim.trainer: {max_length: 4}     -> trainer={'max_length': 4} is set by alstlib: give data.seq_len instead
optim.trainer: {push_to_hub: true} -> needs output.save_to
optim.trainer: {hub_token: hf_x}   -> hub_token in optim.trainer is a secret
optim.trainer: {model_init_kwargs: {token: hf_x}} -> token in optim.trainer is a secret
optim.trainer: {push_to_hub_token: hf_x}          -> set HF_TOKEN in the environment
{model.lora: {r: 4}, output.save_to: x}           -> give output.merge_lora=True, which saves both
{engine.offload_optimizer: nvme, engine.nvme_path: x, output.checkpoint_every: 5} -> would continue such a checkpoint
search: true -> search=Search(granule=256, max=None) is a field of the worker alstlib.runs.train.ablation
{}           -> alstlib.runs.train.finetune needs gone, absent: pip install 'alstlib[train,trainer]'
"""


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("changes, message", lines_of(WRONG))
def test_wrong_fields_are_refused_before_the_start(tmp_path, monkeypatch, changes, message):
    changes = yaml.safe_load(changes)
    monkeypatch.setitem(workers.LIBRARIES, FINETUNE, ("trl", *(() if changes else ("gone", "absent"))))
    with pytest.raises(ValueError) as refused:
        launch(config("stdlib", **changes), tmp_path, worker=FINETUNE)
    assert message in str(refused.value)
    assert "hf_x" not in str(refused.value)


REFUSED = r"""
model.dtype: bf16 -> '' -> dtype='bf16' needs a GPU
optim.trainer: {lerning_rate: 1} -> '' -> unknown field of SFTConfig in optim.trainer 'lerning_rate'; did
model.lora: {rank: 4} -> '' -> unknown field of LoraConfig in model.lora 'rank'
{} -> '{"messages": [{"role": "user", "content": "a"}]}' -> the tokenizer has no chat template
{} -> '{"input_ids": [1, 2], "labels": [-100, -100]}' -> has a token with a loss
{} -> "{\"text\": \"a b c\"}\n{\"text\": \"\"}" -> 1 of 2 rows of
"""
"""Fields, rows in place of the data, and what is said of them."""


def test_what_the_ranks_refuse(ranks2, tmp_path, data):
    rows, saved = tmp_path / "rows.jsonl", tmp_path / "saved"
    for changes, lines, message in values_of(REFUSED):
        rows.write_text(lines)
        run = config(str(rows) if lines else data, save_to=str(saved), **{"data.eval": None, **changes})
        assert message in ranks2(tuned, tmp_path, run)[0]["error"]["message"]
    assert not saved.exists()


# The command


def run_of(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run_of(parser.parse_args(["--model", "tiny", *words]))


def test_the_command_trains_what_plain_transformers_loads(ranks2, tmp_path, monkeypatch, data):
    """From a folder of one's own, with relative paths: a model with its tokenizer, a text, chats."""
    monkeypatch.chdir(tmp_path)
    documents(tmp_path, [FORMATS[0]])  # leaves a tokenizer with a chat template
    make_model("llama", vocab_size=512).save_pretrained("model")
    for file in Path("tokenizer").iterdir():
        file.rename(Path("model", file.name))
    Path("data").mkdir()
    Path("data/chats.jsonl").write_text("\n".join(map(json.dumps, FORMATS * 4)))
    run = run_of("--model", "model", "--data", "data", "--lora", "r=4,lora_alpha=8", "--seq-len", "64", "--epochs", "2")
    assert (run.model.name, run.data.name) == (f"{tmp_path}/model", f"{tmp_path}/data")
    assert (run.engine.world_size, run.engine.sp, run.data.seq_len) == (2, 2, 64)
    assert len(metrics_of(ranks2, tmp_path / "tuned", run)["loss"]) % 2 == 0  # two epochs
    before, after = map(AutoModelForCausalLM.from_pretrained, ("model", tmp_path / "tuned" / "model"))
    assert before.num_parameters() == after.num_parameters()
    assert len(changed(before, after)) == 2 * 7  # the linear layers, to which the adapter was added


DESCRIBED = """
--sp 1                         -> engine.sp: 1
--lora r=16                    -> {model.lora: {r: 16}, output.merge_lora: true, optim.learning_rate: 0.0001}
--set optim.learning_rate=0.01 -> optim.learning_rate: 0.01
--set data.seq_len=8K          -> data.seq_len: 8000
--seq-len 3K                   -> data.seq_len: 3000
--set data.eval=0.1            -> {data.eval: 0.1, data.seq_len: 1024, optim.max_grad_norm: 1.0}
--set "optim.trainer={report_to: all}" -> optim.trainer: {report_to: all, num_train_epochs: 1.0, ...}
--set optim.steps=5            -> optim.trainer: {...}
"""


@pytest.mark.parametrize("words, fields", lines_of(DESCRIBED))
def test_what_the_command_describes(data, words, fields):
    run = run_of("--data", data, *shlex.split(words))
    usual = "lr_scheduler_type: cosine, packing_strategy: bfd_split, eval_steps: 0.1"
    fields = yaml.safe_load(fields.replace("...", usual))
    assert {name: value_of(run, name) for name in fields} == fields


UNUSABLE = """
--data ./nix                   -> data='./nix' does not exist; its folder . has nothing of a similar name
--data mora.jsonl              -> did you mean 'more.jsonl'?
--data more.jsonl --model ./no -> model='./no' does not exist
--data more.jsonl --model .    -> is a folder without config.json
--data more.jsonl --lora r     -> --lora r must have the form FIELD=VALUE
--data more.jsonl --sp 3       -> sp=3 does not divide
--data more.jsonl --set data.seq=5 -> did you mean
--data more.jsonl --epochs two -> could not convert string to float: 'two'
"""


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("words, message", lines_of(UNUSABLE))
def test_what_the_command_refuses_before_the_start(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("more.jsonl").write_text("{}")
    assert main(["finetune", "--model", "tiny", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not Path("tuned").exists()


# The planner, the launcher, the notebook


def test_the_planner_is_asked_about_the_engine():
    run = RunConfig(model={"name": "llama-3.1-8b"}, engine={"fsdp": True, "zero_stage": 1})
    assert planned(run, FINETUNE, 8) == run.replace(engine={"zero_stage": 3, "offload_optimizer": False})
    in_files = RunConfig(engine={"offload_optimizer": "nvme", "nvme_path": "x"})
    assert planned(run, FINETUNE, 0).engine.zero_stage == 0
    assert planned(in_files, FINETUNE, 0).engine.nvme_path is None
    assert planned(run.replace(engine={"fsdp": False}), FINETUNE, 8).engine.zero_stage == 1
    said = "not predicted: predictions are about DeepSpeed, and the engine of this run is "
    for gpus, fsdp, engine in ((8, True, "FSDP2"), (0, True, "DDP"), (8, False, "")):
        told = workers.outlook(run.replace(engine={"fsdp": fsdp, "world_size": 8, "sp": 8}), FINETUNE, gpus)
        assert (said + engine in told) == bool(engine), told


@pytest.mark.slow
def test_the_notebook(tmp_path, data):
    output = tmp_path / "out.ipynb"
    parameters = {
        "data": {"name": data, "eval": 0.2, "seq_len": 96}, "model": {"lora": {"r": 4}},
        "optim": {"steps": 4, "trainer": {"eval_steps": 2}},
        "output": {"save_to": f"{tmp_path}/model", "merge_lora": True}, "out": f"{tmp_path}/run",
    }  # fmt: skip
    command = [sys.executable, "-m", "papermill", str(ROOT / "notebooks" / "finetune.ipynb"), str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "-y", json.dumps(parameters)], env=environment, check=True)
    events = ProgressReader(tmp_path / "run" / "progress.jsonl").read()
    assert [e["step"] for e in events if e.get("loss") is not None] == [1, 2, 3, 4]
    cells = {c["id"]: str(c["outputs"]) for c in nbformat.read(output, 4)["cells"] if c["cell_type"] == "code"}
    for cell, shows in (
        ("plan", "not predicted: predictions are about DeepSpeed, and the engine of this run is DDP"),
        ("figure", "image/png"), ("table", "| 4 | "), ("load", f"{tmp_path}/model"),
    ):  # fmt: skip
        assert shows in cells[cell]
