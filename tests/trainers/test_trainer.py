"""TrainerMixin: under every engine what the plain Trainer does in one process, and wrong use refused by name."""

import functools
import itertools
import os
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from async_files import async_files
from cases import check_refused, make_model, on_ranks, plain_step
from datasets import Dataset
from exactness.training import collate, zero
from pictures import IMAGE, document, rows_of, small_vlm
from torch.utils.data import IterableDataset
from trainers import (
    HERE,
    OPTIONS,
    SETTINGS,
    STEPS,
    accelerate_here,
    adapted,
    as_one_process,
    check_runs,
    errors,
    plain,
    run,
    samples,
    train,
    trainer_class,
)
from transformers import LlamaForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from trl_runs import mixture

import alstlib
from alstlib.hf.loading import models
from alstlib.hf.loading.models import flop_dimensions, flos
from alstlib.planner.measure.ledger import Ledger
from alstlib.trainers import trainer as trainer_module
from alstlib.trainers import trainer_checks
from alstlib.trainers.trainer import without_adapters
from alstlib.trainers.trainer_checks import check_resume

TABLE = yaml.safe_load("""
evaluated: &evaluated {evaluate: true, eval_strategy: steps, eval_steps: 5}

engines: [ddp, zero1, zero2, zero3, fsdp2, ddp with LoRA, zero3 with LoRA, fsdp2 with LoRA]

cases:
  chunks: {<<: *evaluated, options: {chunk: 5}}
  several samples, two epochs: {count: 17, per_device_train_batch_size: 2, num_train_epochs: 2, max_steps: -1,
    include_num_input_tokens_seen: non_padding}
  its own checkpointing asked for: {gradient_checkpointing: true}
  label smoothing: {<<: *evaluated, label_smoothing_factor: 0.1}
  label smoothing of a head with an adapter: {label_smoothing_factor: 0.1, lora: true, targets: [lm_head]}
  untiled: {label_smoothing_factor: 0.1, options: {tiles: {mlp: true, norm: true}}}
  a data seed: {data_seed: 5}
""")
EVALUATED = TABLE["evaluated"]


@pytest.mark.parametrize("case", TABLE["engines"])
def test_two_ranks_train_as_one_process(ranks2, case):
    """10 steps of two micro-batches of unequal lengths, two of them without a valid token; evaluation every 5 steps."""
    engine, *lora = case.split(" with ")
    settings = {"lora": bool(lora), **EVALUATED}
    runs = ranks2(run, "ours", engine, settings)
    check_runs(runs, plain(settings))
    assert {got["engine"] for got in runs} == {{"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(engine, "DEEPSPEED")}


def with_columns(batch):
    """What tokenizers and collators add: the plain Trainer gives it to a model that does not look at it."""
    made = collate(batch)
    return {**made, "token_type_ids": torch.zeros_like(made["input_ids"]), "page": ["a title"] * len(batch)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(43))


def pictures(count, seed=0):
    """Samples with one to three images each."""
    parts = [[4, "image", 3], [2, "image", 9, "image", 5], [11, "image", 1, "image", 2, "image", 4]]
    return [document("qwen3_vl", parts[i % 3], seed=seed + 5 * i) for i in range(count)]


def with_pictures(batch):
    """As a processor of images makes it."""
    made = rows_of(batch)
    return {**made, "mm_token_type_ids": (made["input_ids"] == IMAGE).long()}


ROUTED = {"kind": mixture(output_router_logits=True, router_aux_loss_coef=0.3)}
CASES = {
    "images": {
        "kind": functools.partial(small_vlm, "qwen3_vl", torch.float64), "data": pictures(12),
        "collator": with_pictures, **EVALUATED, "evaluate": pictures(3, seed=2), "per_device_train_batch_size": 2,
    },
    **TABLE["cases"],
    "a stream of samples": {"data": Stream()},
    "columns that the model does not take": {"collator": with_columns},
    "a mixture of experts": {**ROUTED, **EVALUATED},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_settings_of_a_trainer(ranks2, case):
    as_one_process(ranks2, CASES[case])


LABELLED = [s for s in samples(43) if max(s["labels"]) >= 0]
"""Samples with labels: the plain Trainer's mean over none is not a number."""


OWN = yaml.safe_load("""
- [ddp, out.loss, {}]
- [ddp, out.loss, {options: {tiles: {mlp: true, norm: true}, chunk: 5}, lora: true}]
- [ddp, super, {label_smoothing_factor: 0.1}]
- [zero3, 'outputs[0]', {}]
- [fsdp2, num_items_in_batch, {}]
""")


@pytest.mark.parametrize("engine, loss, more", [*OWN, ("ddp", "num_items_in_batch", ROUTED)])
def test_a_loss_of_the_users_own(ranks2, engine, loss, more):
    """A `compute_loss` that calls the model trains and evaluates as it does in the plain Trainer: samples of unequal
    lengths and numbers of labels, three micro-batches in a step."""
    steps = {"max_steps": 4, **EVALUATED, "eval_steps": 2, "gradient_accumulation_steps": 3}
    settings = {"data": LABELLED, "loss": loss, **steps, **more}
    as_one_process(ranks2, settings, engine)


def test_replicas_of_groups_train_as_one_process(pools):
    """Two replicas of two ranks and no accumulation, against one process with two micro-batches."""
    settings = {"count": 8, "include_num_input_tokens_seen": "non_padding"}
    runs, _ = as_one_process(pools(4), settings, sp=2, gradient_accumulation_steps=1)
    for got in runs:
        assert got["logs"][0]["num_input_tokens_seen"] > 0
    settings = {"data": LABELLED, "loss": "out.loss", **EVALUATED}
    want = pools(2)(run, "plain", "ddp", settings)[0]
    check_runs(pools(4)(run, "ours", "ddp", {**settings, "sp": 2}), want)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_bf16(ranks2, engine):
    """Three steps in mixed precision: near fp32, and not the same."""
    settings = {"max_steps": 3, "bf16": True, "use_cpu": True, "dtype": torch.float32}
    want = plain({"max_steps": 3})
    for got in ranks2(run, "ours", engine, settings):
        found = errors(got, want)
        assert 1e-5 < found["loss"] < 5e-3, found
        assert found["grad_norm"] < 2e-2, found


FEW = {"max_steps": 2, "gradient_accumulation_steps": 1}
"""Each of the two has another length, with which much is compiled again."""


def compiled(rank, world, engine):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run = train(rank, world, "ours", engine, torch_compile=True, torch_compile_backend="eager", **FEW)
    return run, counters["stats"]["calls_captured"]


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_torch_compile(ranks2, engine):
    for got, captured in ranks2(compiled, engine):
        check_runs([got], plain(FEW))
        assert captured > 0


def noise(rank, world, how):
    """What NEFTune adds to the embeddings of a sample of 37 tokens."""
    settings, found = {"max_steps": 1, "gradient_accumulation_steps": 1, "neftune_noise_alpha": 5.0}, []
    with accelerate_here("ddp"):
        data = [{"input_ids": [*range(37)], "labels": [*range(37)]}]
        trainer = build(trainer_class(how), settings, train_dataset=data, **({"sp": world} if how == "ours" else {}))
        embeddings = trainer.model.get_input_embeddings()
        torch.nn.init.zeros_(embeddings.weight)
        trainer.model.model.layers[0].register_forward_pre_hook(lambda module, args: found.append(args[0].detach()))
        trainer.train()
        assert not hasattr(embeddings, "neftune_noise_alpha")
        return found[0]


def test_neftune_is_as_loud_as_in_one_process(ranks2):
    """Uniform noise, whose bound is alpha / sqrt(tokens of the whole sample * width), and other noise on each rank."""
    bound = 5.0 / (37 * 32) ** 0.5
    first, second = ranks2(noise, "ours")
    for found in (noise(0, 1, "plain"), first, second):
        assert 0.98 * bound < float(found.abs().max()) <= bound * (1 + 1e-6)
        assert abs(float(found.std()) * 3**0.5 / bound - 1) < 0.05
    assert not torch.equal(first, second)


# ----- resume: in the middle of an epoch under every engine in test_sft_trainer.py


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_a_resume_with_another_degree(ranks2, tmp_path, sampling):
    settings = {"count": 9, "train_sampling_strategy": sampling, "folder": str(tmp_path)}
    whole = ranks2(run, "ours", "ddp", {**settings, "save_strategy": "steps", "save_steps": 7})
    assert sorted(line["step"] for line in whole[0]["logs"]) == list(range(1, STEPS + 1))
    alone = {"how": "plain"} if sampling == "random" else {"how": "ours", "sp": 1}  # which has an order of its own
    check_runs(whole[:1], train(0, 1, count=9, train_sampling_strategy=sampling, **alone))
    got = train(0, 1, "ours", **settings, sp=1, resume=f"{tmp_path}/checkpoint-7")
    check_runs([got], whole[0], after=7, bound=1e-6)


# ----- batches


DIFFERS = {
    "the data of rank 1 failed": {"data": [{"input_ids": [1, 2, -5], "labels": [1, 2, 3]}] * 9},
    "hold different batches": {"data": samples(9, seed=4)},
    "different values of seed": {"seed": 1},
}


def failing(rank, world, message):
    """A training ends with this message, when only rank 1 differs."""
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(rank, world, "ours", **{"data": samples(9), "seed": 0, **(DIFFERS[message] if rank else {})})


@pytest.mark.parametrize("message", DIFFERS)
def test_what_differs_on_one_rank_is_said_on_all(ranks2, message):
    ranks2(failing, message)


# ----- evaluation


def best(logits, labels):
    return logits.argmax(-1)


def accuracy(predictions):
    found, labels = predictions.predictions, predictions.label_ids
    found = found.argmax(-1) if found.ndim == 3 else found
    found, labels = found[:, :-1], labels[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def evaluated(
    rank, world, how, options, shown, sp = None, count = 7,
    loss = None,
):  # fmt: skip
    """Predictions, labels, loss and accuracy of so many samples."""
    with accelerate_here("ddp"):
        own = {"sp": sp or world, "alst": alstlib.Options(**options)} if how == "ours" else {}
        measures = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": shown}
        trainer, data = (
            build(trainer_class(how, loss), model=make_model().double(), **measures, **own),
            samples(count, 8),
        )
        out, again = trainer.predict(data), trainer.evaluate(data)
        assert trainer.preprocess_logits_for_metrics is shown
        return out.predictions, out.label_ids, out.metrics["test_loss"], again["eval_accuracy"], again["eval_loss"]


def compare(got, want):
    real = want[1] != -100
    np.testing.assert_allclose(got[0][real], want[0][real], rtol=1e-5, atol=1e-5)
    assert np.array_equal(got[1], want[1])
    assert got[2:] == pytest.approx(want[2:], rel=1e-6)


TILED = {"tiles": {"mlp": True, "loss": 3, "norm": True}}


@pytest.mark.parametrize(
    "options, shown, loss",
    [*((options, shown, None) for options in (TILED, {"tiles": {"mlp": True, "norm": True}}, {"chunk": 4, **TILED})
       for shown in (None, best)), (TILED, None, "outputs[0]")],
)  # fmt: skip
def test_predictions_are_those_of_one_process(ranks2, options, shown, loss):
    """Seven samples in batches of two, on a group of two ranks: logits or their argmax, labels, loss and accuracy."""
    want = evaluated(0, 1, "plain", {}, shown, loss=loss)
    for got in ranks2(evaluated, "ours", options, shown, None, 7, loss):
        compare(got, want)


def test_predictions_of_two_replicas(pools):
    """Against the plain Trainer in two processes, which weighs each sample's loss by its labels."""
    want = pools(2)(evaluated, "plain", {}, best, None, 8)[0]
    for got in pools(4)(evaluated, "ours", {}, best, 2, 8):
        compare(got, want)


def shifted(logits, labels):
    return logits.argmax(-1).roll(1, 1)


def peak_of_evaluation(rank, world, how):
    """Device bytes that an evaluation takes beyond the weights, of logits eight times as large as all else."""
    ids = torch.randint(0, 4096, (2048,), generator=torch.Generator().manual_seed(0)).tolist()
    tiles = alstlib.Options(tiles={"mlp": 64, "loss": 64, "norm": True})
    with accelerate_here("ddp"):
        own = {"sp": world, "alst": tiles} if how == "ours" else {}
        measures = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best}
        model = make_model(vocab_size=4096)
        trainer = build(trainer_class(how), {"per_device_eval_batch_size": 1}, model=model, **measures, **own)
        with Ledger() as ledger:
            start = ledger.device_bytes
            trainer.evaluate([{"input_ids": ids, "labels": ids}])
            return ledger.device_peak - start


def test_an_evaluation_never_holds_the_logits(ranks2):
    """Of a sample whose logits alone take 32 MiB; the argmax of each token is kept, 8 bytes each."""
    ranks2.stop()  # new ones: ranks that compiled a model before gave an answer that could not be pickled
    whole = peak_of_evaluation(0, 1, "plain")
    assert whole > 2048 * 4096 * 4
    assert max(ranks2(peak_of_evaluation, "ours")) < whole / 8


def test_what_looks_at_several_tokens_is_refused():
    check_refused(
        "must work token by token", evaluated, 0, 1, "ours", {"tiles": {"mlp": True, "loss": 6, "norm": True}}, shifted
    )


class Generates(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        self.made = continued(kwargs["model"])


def continued(model):
    ids = torch.arange(6).view(1, -1)
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)


def generating(rank, world):
    callback = Generates()
    train(rank, world, "ours", extra={"callbacks": [callback]}, max_steps=5, learning_rate=0.0, **EVALUATED)
    return callback.made


def test_a_callback_generates_from_whole_prompts(ranks2):
    want = continued(make_model().double().eval())
    assert all(torch.equal(made, want) for made in ranks2(generating))


# ----- wrong use


class SPTrainer(alstlib.TrainerMixin, Trainer):
    pass


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def build(cls=SPTrainer, settings=None, **kwargs):
    args = TrainingArguments(**{**SETTINGS, "use_cpu": True, "output_dir": "unused", **(settings or {})})
    return cls(**{"model": make_model(), "args": args, "train_dataset": samples(9), "data_collator": collate, **kwargs})


def taken_over(rank, world, sp, env):
    """The mesh that this environment gives, whether Accelerate's own parallelism is off, and what was said; or why it
    is refused."""
    with (
        mock.patch.dict(os.environ, env), accelerate_here("ddp"),
        mock.patch.object(trainer_module.log, "warning") as warning,
    ):  # fmt: skip
        try:
            trainer = build(sp=sp)
        except ValueError as e:
            return str(e)
        said = [text % tuple(args) for (text, *args), _ in warning.call_args_list]
        return (trainer.ctx.sp, trainer.get_sp_size(), trainer.get_total_train_batch_size(trainer.args)), said


OF_OLD = yaml.safe_load("""
one: &one {ACCELERATE_USE_PARALLELISM_CONFIG: 'true'}
of two: &two {<<: *one, PARALLELISM_CONFIG_SP_SIZE: '2'}
context: &context {<<: *one, PARALLELISM_CONFIG_CP_SIZE: '2'}

# sp, the environment, and what is said
taken:
- [null, *two, [
   "parallelism_config: sp_size=2 is used by alstlib, in place of DeepSpeed's sequence parallelism"]]
- [2, *two, []]
- [2, *one, []]
- [null, *context, ['parallelism_config: cp_size=2 is used by alstlib, in place of context parallelism']]
- [2, *context, []]
refused:
- [1, *two, 'sp_size=2: TrainerMixin supports cp_size and sp_size only, which must be sp=1']
- [1, *context, cp_size=2 and sp_size=1]
- [null, {<<: *one, PARALLELISM_CONFIG_TP_SIZE: '2'}, tp_size=2]
""")


def test_an_accelerate_file_of_old_is_taken_over(ranks2):
    """What `accelerate launch` tells processes of a configuration file that has a `parallelism_config`."""
    for sp, env, notes in OF_OLD["taken"]:
        assert ranks2(taken_over, sp, env) == [((2, 1, 2), notes)] * 2
    for sp, env, message in OF_OLD["refused"]:
        assert message in ranks2(taken_over, sp, env)[0]


def clock():
    """In place of `time`: two seconds pass from each look at it to the next."""
    return SimpleNamespace(perf_counter=itertools.count(1000.0, 2.0).__next__)


SWITCHES = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}, "max_steps": 3}


@HERE
def test_switches_of_the_ecosystem(monkeypatch):
    """transformers' offload is ours, and the log has the speed of the steps without an evaluation between them."""
    assert not build().alst.offload
    assert not build(settings={**SWITCHES, "gradient_checkpointing": False}).alst.offload
    assert build(settings=SWITCHES, alst=alstlib.Options(offload="sync")).alst.offload == "sync"
    monkeypatch.setattr(trainer_module, "time", clock())
    more = {"eval_strategy": "steps", "eval_steps": 1, "include_num_input_tokens_seen": "non_padding"}
    trainer = build(settings={**SWITCHES, **more}, eval_dataset=samples(2))
    assert trainer.alst.offload is True
    assert trainer.args.gradient_checkpointing_kwargs == {}
    trainer.train()
    assert trainer.handle.store is not None
    lines = [line for line in trainer.state.log_history if "loss" in line]
    tokens = [line["num_input_tokens_seen"] for line in lines]
    steps = [after - before for before, after in zip([0, *tokens], tokens)]
    speeds = [line["tokens_per_second_per_gpu"] for line in lines]
    assert len(speeds) == 3
    assert [speed * 2 for speed in speeds] == pytest.approx(steps)


LARGE = functools.partial(make_model, vocab_size=18400, hidden_size=64, num_hidden_layers=1)
"""Half of its weights are more than 1 MiB in bf16: of less DeepSpeed writes no file."""


def with_files(rank, world, folder, device, weights):
    """A training with DeepSpeed's configuration of a user, and the numbers of moments and of weights that it left in
    files."""
    away = {"device": device, "nvme_path": str(folder), "pin_memory": False}
    where = {"offload_optimizer": away, **({"offload_param": {**away, "buffer_size": 10**6}} if weights else {})}
    config = {**zero(3), "zero_optimization": {"stage": 3, **where}, "bf16": {"enabled": weights}}
    with async_files():
        settings = {"kind": LARGE, "max_steps": 3, "deepspeed": config, "bf16": weights, "use_cpu": True}
        made = run(rank, world, "ours", "zero3", settings)
    return made, [len([*folder.rglob(f"rank{rank}/{name}*.swp")]) for name in ("exp_avg", "*param")]


@pytest.mark.parametrize("weights", [False, True])
def test_optimizer_states_and_weights_in_files(ranks2, tmp_path, weights):
    """The same bits as on the host."""
    (want, none), _ = ranks2(with_files, tmp_path, "cpu", weights)
    for got, files in ranks2(with_files, tmp_path, "nvme", weights):
        assert (none, files) == ([0, 0], [2, 2 * weights])
        assert set(errors(got, want).values()) == {0.0}


def test_a_resume_from_files_is_refused():
    """DeepSpeed restores the weights of such a checkpoint, but not the moments and the number of steps."""
    files = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "."}}}
    trainer = mock.Mock()
    trainer.accelerator.state.deepspeed_plugin = plugin = SimpleNamespace(deepspeed_config=files)
    says = "resume_from_checkpoint with offload_optimizer on nvme: DeepSpeed would begin .* moments"
    check_refused(says, check_resume, trainer, "checkpoint-7")
    check_resume(trainer, None)
    plugin.deepspeed_config = {}
    check_resume(trainer, "checkpoint-7")


LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}


@HERE
def test_ligers_kernels_run_inside_the_tiles(monkeypatch):
    """With a stand-in for the package, which replaces the forwards of a model's modules as Liger does; its kernels
    themselves are in tests/cuda/test_liger.py."""
    seen, given, losses = [], {}, []

    def replace(model, **config):
        given.update(config)
        for layer in model.model.layers:
            inner = layer.mlp.forward
            # the model is looked at while it is attached
            layer.mlp.forward = lambda x, inner=inner: seen.append(trainer.handle and x.shape[1]) or inner(x)

    stand_in = ModuleType("liger_kernel.transformers")
    stand_in._apply_liger_kernel_to_instance = replace
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    for settings in ({}, LIGER):
        trainer = build(settings={"max_steps": 2, **settings}, alst=alstlib.Options(**OPTIONS))
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert given == LIGER["liger_kernel_config"]
    assert set(seen) <= {None, 1, 2, 3, 4, 5}
    assert 5 in seen
    assert losses[0] == losses[1]


def share_of_flops(rank, world, lora):
    """This rank's FLOPs by the log of two seconds, as a share of those of each sample's own tokens and pairs."""
    data = samples(4)
    gpu = SimpleNamespace(get_device_name=lambda device: "NVIDIA H100 80GB HBM3")
    with accelerate_here("ddp"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "time", clock())
        settings = {"max_steps": 1, "per_device_train_batch_size": 2}
        model = adapted(make_model(), ()) if lora else make_model()
        trainer = build(settings=settings, model=model, train_dataset=data, sp=world)
        each = flop_dimensions(without_adapters(model))
        assert (each["frozen"] > 0) == lora
        trainer.train()
        assert "mfu" not in trainer.state.log_history[0]  # on a CPU
        patch.setattr(models, "accelerator", lambda device: gpu)
        trainer.train()
        wanted = sum(flos(n, n, **each)["model"] for n in (len(sample["labels"]) for sample in data))
        return trainer.state.log_history[0]["mfu"] * 2 * 989e12 / wanted


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_the_log_has_an_mfu_where_the_gpu_is_known(pools, world, lora):
    """Without padding; of ranks that share samples each has its part of the FLOPs."""
    assert on_ranks(pools, world, share_of_flops, lora) == [pytest.approx(1 / world)] * world


SAID = yaml.safe_load("""
rope: &rope {rope_type: default, rope_theta: 5.0e+5}
batches:
- [*rope, [1, 32], {}, '']
- [*rope, [1, 33], {}, "trained on 32 at most .* config.rope_parameters = {'rope_type': 'yarn', 'rope_theta': 500000.0,
   'factor': 2.0, 'original_max_position_embeddings': 32}"]
- [*rope, [1, 64], {position_ids: 32}, '']
- [{<<: *rope, rope_type: yarn}, [1, 33], {}, '']
- [{}, [1, 33], {}, '']  # learned positions, which end by themselves
- [*rope, [2, 8], {attention_mask: 12}, '']
- [*rope, [2, 8], {attention_mask: 11}, 31% of a batch]
""")["batches"]
"""The parameters of RoPE, the tokens of a batch, the positions of a document or the tokens that are no padding, and
what is said."""


@pytest.mark.parametrize("rope, shape, given, message", SAID, ids=str)
def test_what_would_go_wrong_silently_is_said(rope, shape, given, message):
    config = SimpleNamespace(max_position_embeddings=32, rope_parameters=rope)
    place = torch.arange(shape[0] * shape[1]).view(shape)
    made = {n: place % at if n == "position_ids" else place < at for n, at in given.items()}
    said = trainer_checks.advice(config, {"input_ids": torch.zeros(shape), **made})
    assert bool(said) == bool(message)
    assert re.search(message.replace("{", r"\{"), "".join(said))


WRONG = yaml.safe_load("""
- [{settings: {use_liger_kernel: true}}, &fused "replaces the model's forward with Liger's fused loss: write
    .*'fused_linear_cross_entropy': False"]
- [{settings: {use_liger_kernel: true, liger_kernel_config: {rope: true}}}, *fused]
- [{settings: {use_liger_kernel: true, liger_kernel_config: {fused_linear_cross_entropy: true}}}, *fused]
- [{sp: 2}, 'sp=2 does not divide the world size 1: .* start the script with torchrun --nproc-per-node 2']
- [{sp: 0}, sp=0 must be a whole number of at least 1]
- [{alst: {offload: true}}, must be an alstlib.Options]
- [{compute_loss_func: a function},
  'use label_smoothing_factor, or override compute_loss .* alstlib.token_logps']
- [{settings: {accelerator_config: {dispatch_batches: true}}}, dispatch_batches=True cannot be used]
""")


@pytest.mark.parametrize(
    "wrong, message",
    [*WRONG, ({"cls": type("Mine", (alstlib.TrainerMixin, OwnLoss), {})}, "OwnLoss has its own compute_loss")],
)
@HERE
def test_wrong_use_is_refused_before_training(wrong, message):
    check_refused(message, build, **wrong)


def _pops(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())


def _reads(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return model(**inputs).get("logits").float().mean()


@pytest.mark.parametrize(
    "loss, message",
    [(_pops, "have no labels, only .*token_logps"), (_reads, "keeps none. Use out.loss, .*token_logps")],
)
@HERE
def test_a_loss_that_reads_logits_is_told_what_to_write(loss, message):
    check_refused(message, build(type("Mine", (SPTrainer,), {"compute_loss": loss})).train)


@HERE
def test_columns_that_are_not_exact_are_refused():
    def shifted_too(batch):
        return {**collate(batch), "shift_labels": collate(batch)["labels"].roll(-1)}

    for kind, collator, name in (("gpt2", with_columns, "token_type_ids"), ("gqa", shifted_too, "shift_labels")):
        trainer = build(settings={"max_steps": 1}, model=make_model(kind), data_collator=collator)
        check_refused(rf"would read {name} of the batch, .* drop them in the collate_fn", trainer.train)


@HERE
def test_ranks_on_a_machine_without_a_gpu_need_use_cpu(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_refused("use_cpu=True", build, settings={"use_cpu": False})


@HERE
def test_columns_of_documents_reach_the_loss():
    """Packed samples by `document_lengths`, which no model's forward takes: a column that the Trainer keeps."""
    row = {"input_ids": [*range(1, 13)], "labels": [*range(1, 13)], "document_lengths": [5, 7]}

    def documents(batch):
        return {**collate(batch), "document_lengths": [row["document_lengths"] for row in batch]}

    settings = {"max_steps": 1, "gradient_accumulation_steps": 1}
    trainer = build(settings=settings, train_dataset=Dataset.from_list([row] * 4), data_collator=documents)
    trainer.train()
    ids = torch.tensor([row["input_ids"]])
    want, _ = plain_step(make_model(), {"input_ids": ids, "labels": ids, "document_lengths": [[5, 7]]})
    assert trainer.state.log_history[0]["loss"] == pytest.approx(want, rel=1e-4)


@HERE
def test_a_model_without_a_head_is_refused_with_the_reason():
    trainer = build(model=LlamaForSequenceClassification(make_model().config))
    check_refused("is not a decoder-only causal language model", trainer.train)
