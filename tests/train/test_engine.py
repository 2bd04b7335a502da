"""The engine: what it saves is what it trained, and the fields of a run reach it."""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import zoo
from async_files import OPERATOR
from cases import by_own_names, check_refused, make_model, make_samples, run_with, same, values_of, whole_state, wrap
from deepspeed.accelerator import get_accelerator
from safetensors import safe_open
from test_state import Training
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, AutoTokenizer

import alstlib
from alstlib.base.config import RunConfig
from alstlib.data.loader import SPDataLoader
from alstlib.hf.loading.zero_config import ON_DISK, check_files, engine_config
from alstlib.hf.saving import save_model
from alstlib.planner.model_states import Sizes, model_states
from alstlib.runs.corpus.reading import get_tokenizer
from alstlib.runs.train import engine as engines
from alstlib.runs.train import operators
from alstlib.runs.train.engine import host_tensors, initialize, take_step
from alstlib.runs.train.worker import Job, files_of, work

IDS = torch.arange(24).view(1, -1) % 96


def test_layers_that_share_weights_are_refused_before_zero3_starts():
    model = zoo.build_hybrid("zamba2")
    with alstlib.apply(model), pytest.raises(ValueError, match="trains and is used in several parts of the model"):
        initialize(RunConfig(engine={"zero_stage": 3}), model, False)


def test_nothing_of_deepspeed_is_compiled(monkeypatch):
    backend = sys.modules["deepspeed.comm.torch"]
    monkeypatch.setattr(backend, "build_shm_op", lambda: pytest.fail("it is compiled"))
    muon = "deepspeed.runtime.zero.muon.original_muon"  # which every engine imports
    monkeypatch.delitem(sys.modules, muon, raising=False)
    operators.leave_out()
    assert backend.build_shm_op() is None
    assert not hasattr(sys.modules[muon].muon_update, "_torchdynamo_orig_callable")


def train_and_save(rank, world, kind, folder, tied):
    """Two optimizer steps, the attached model saved; and the logits of the trained model itself, detached and
    gathered."""
    stage = int(kind[4:]) if kind.startswith("zero") else 0
    fields = {"zero_stage": stage, "offload_optimizer": False, "learning_rate": 1e-2, "dtype": "fp32"}
    ctx, model = alstlib.SPContext.create(2), make_model(tie_word_embeddings=tied)
    handle = alstlib.apply(model, ctx, alstlib.Options(tiles={"mlp": 5, "loss": 7, "norm": True}, offload=True))
    engine = wrap(model, kind, RunConfig.from_dict(by_own_names(fields)))
    plain = None if kind.startswith("zero") else torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in SPDataLoader(make_samples(2), ctx, replicated=True):
        loss = alstlib.causal_lm_loss(engine, batch).loss
        loss.backward() if plain else engine.backward(loss)
        (plain or engine).step()
        model.zero_grad()
    save_model(handle, folder, get_tokenizer("stdlib-bpe", vocab_size=300))
    handle.detach()
    model.eval()
    with torch.no_grad():  # FSDP2's and ZeRO-3's own hooks gather the weights for this forward
        logits = (engine if kind == "zero3" else model)(input_ids=IDS, use_cache=False).logits
    if plain is None:
        engine.destroy()
    return logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
def test_a_saved_model_is_the_trained_one(ranks2, tmp_path, kind, tied):
    results = ranks2(train_and_save, kind, tmp_path, tied)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits, untrained = (
            model.eval()(input_ids=IDS, use_cache=False).logits
            for model in (loaded, make_model(tie_word_embeddings=tied))
        )
    assert (logits - untrained).abs().max() > 1e-2
    assert all(torch.equal(logits, trained) for trained in results)
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert {*opened.keys()} == {n for n, _ in loaded.named_parameters()}
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    config = (tmp_path / "config.json").read_text()
    assert "alst" not in config
    assert json.loads(config)["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"


def training(stage, **changes):
    """A small model on two ranks that share samples."""
    usual = "{sp: 2, offload_optimizer: false, learning_rate: 0.01}"
    return Training(run_with(usual, {"zero_stage": stage, **changes}))


def four_steps(rank, world, stage, changes):
    """Learning rates of four steps, the first step's gradient as AdamW saw it, and numbers on the host before it and at
    the end."""
    with training(stage, **changes) as trained:
        group, rates = trained.engine.optimizer.param_groups[0], []

        def hosted():
            return sum(t.numel() for t in host_tensors(trained.engine, trained.run))

        before = hosted()
        for _ in range(4):
            rates.append(group["lr"])
            trained.train(1)
            if len(rates) == 1:
                moments = [v for n, v in whole_state(trained.engine).items() if n.startswith("exp_avg.")]
        gradient = float(torch.cat(moments).norm()) / 0.1
        return {"rates": rates, "gradient": gradient, "host": (before, hosted()), "decay": group["weight_decay"]}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rates_clipping_and_decay_are_honoured(ranks2, stage):
    free = ranks2(four_steps, stage, {})[0]
    assert (free["rates"], free["decay"]) == ([1e-2] * 4, 0.0)
    assert free["gradient"] > 0.5
    bound = ranks2(four_steps, stage, {"warmup_steps": 3, "max_grad_norm": 0.01, "weight_decay": 0.1})[0]
    assert bound["rates"] == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 1e-2])
    assert (bound["gradient"], bound["decay"]) == (pytest.approx(0.01, rel=1e-3), 0.1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_is_on_the_host_before_the_first_step(ranks2, stage):
    parameters = sum(p.numel() for p in make_model().parameters())
    for result in ranks2(four_steps, stage, {"offload_optimizer": True}):
        before, after = result["host"]
        assert before >= 3 * parameters // 2  # of each of two ranks: half the weights and both moments
        assert before == after


def pinned_buffers(rank, world, stage, changes):
    """Bytes that DeepSpeed pins and keeps over two steps in bf16, where the CPU's accelerator takes note of them."""
    made, configure = [], engines.engine_config

    def pin(tensor, make_copy=True, match_shape=True):
        tensor = tensor.clone()
        made.append((tensor.nbytes, StorageWeakRef(tensor.untyped_storage())))
        return tensor

    def pinning(*about):
        config = configure(*about)
        for name in {"offload_optimizer", "offload_param"} & set(config["zero_optimization"]):
            config["zero_optimization"][name]["pin_memory"] = True
        return config

    with (
        mock.patch.object(engines, "engine_config", pinning), mock.patch.object(get_accelerator(), "pin_memory", pin),
        training(stage, dtype="bf16", offload_optimizer=True, **changes) as trained,
    ):  # fmt: skip
        trained.train(2)
        return [nbytes for nbytes, storage in made if not storage.expired()]


@pytest.mark.parametrize(
    "stage, changes", [(1, {}), (2, {}), (2, {"optim.accumulation": 2}), (3, {}), (3, {"engine.offload_params": True})]
)
def test_the_plan_knows_what_deepspeed_pins(ranks2, stage, changes):
    """All bytes of the host, and those that are lost where pinned memory has powers of two."""
    parts = list(make_model().parameters())
    embedding = max(p.numel() for p in parts)
    sizes = Sizes(parameters=sum(p.numel() for p in parts), layer=0, embedding=embedding, largest=embedding)
    run = RunConfig.from_dict({"engine.zero_stage": stage, "engine.offload_optimizer": True, **changes})
    exact, rounded = (sum(model_states(run, sizes, 2, 2, rounded=r).host.values()) for r in (False, True))
    for pinned in ranks2(pinned_buffers, stage, changes):
        assert exact - sum(pinned) == pytest.approx((12 if stage == 3 else 8) * sizes.parameters / 2, abs=4096)
        assert rounded - exact == sum((1 << (n - 1).bit_length()) - n for n in pinned[:4]) > 0  # then single gradients


def test_the_configuration_says_what_the_run_says():
    fields = {"batch_size": 3, "accumulation": 5, "max_grad_norm": 0.7, "zero_stage": 3, "offload_params": True}
    run = RunConfig.from_dict(by_own_names(fields))
    config = engine_config(run, [8_030_000_000], bf16=True)
    wanted = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "gradient_clipping": 0.7,
              "bf16": {"enabled": True}}  # fmt: skip
    assert config.items() >= wanted.items()

    def zero(run, parameters=10_000):
        return engine_config(run, [parameters], bf16=False)["zero_optimization"]

    large, prefetch = zero(run, 8_030_000_000), "stage3_prefetch_bucket_size"
    assert (large["stage"], large["offload_param"]["device"], large["offload_optimizer"]["device"]) == (3, "cpu", "cpu")
    assert (large["reduce_bucket_size"], zero(run)["reduce_bucket_size"]) == (200_000_000, 1_000_000)
    assert zero(run.replace(engine={"prefetch": False}))[prefetch] == 0 < large[prefetch]
    plain = zero(RunConfig(engine={"zero_stage": 1, "offload_optimizer": False}))
    assert not {"offload_param", "offload_optimizer", prefetch} & set(plain)


def test_states_in_files_are_configured(tmp_path, monkeypatch):
    """In pieces that take little of the host."""
    monkeypatch.setattr(OPERATOR, "is_compatible", lambda self, verbose=False: True)
    found = alstlib.zero_config(make_model(), nvme_path=tmp_path, offload_optimizer="nvme")["zero_optimization"]
    assert found["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    assert (found["stage"], found["sub_group_size"], "offload_param" in found) == (3, ON_DISK, False)
    assert "sub_group_size" not in alstlib.zero_config(make_model(), offload_optimizer=True)["zero_optimization"]


NO_FILES = """
2 -> ''   -> true  -> true  -> "on nvme needs ZeRO-3: DeepSpeed's stage 2 keeps it in the host's memory"
3 -> null -> true  -> true  -> nvme_path=None of offload_.* must be a folder on a local disk that is there
3 -> gone -> true  -> true  -> gone' of offload_.* must be a folder
3 -> ''   -> false -> true  -> needs DeepSpeed's operator async_io, which cannot be compiled here. install libaio's
3 -> ''   -> true  -> true  -> null
3 -> ''   -> true  -> false -> offload_param on nvme needs bf16 or fp16. .* its buffers hold 16 bits, and round them
"""


@pytest.mark.parametrize("stage, path, compiles, bf16, says", values_of(NO_FILES))
@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
def test_files_that_deepspeed_would_not_write_are_refused(
    monkeypatch, tmp_path, stage, path, compiles, bf16, says, what
):
    monkeypatch.setattr(OPERATOR, "is_compatible", lambda self, verbose=False: compiles)
    folder = None if path is None else str(tmp_path / path)
    zero = {"stage": stage, what: {"device": "nvme", "nvme_path": folder}}
    config = {"zero_optimization": zero, "bf16": {"enabled": bf16}}
    if says is None or (what == "offload_optimizer" and not bf16):
        check_files(config)
    else:
        check_refused(says, check_files, config)
    for other in ({}, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}):
        check_files(other)


class Files(Job):
    """A run that has files, and ends well or not."""

    def __call__(self):
        self.folder = Path(self.with_files().engine.nvme_path)
        (self.folder / "a.swp").write_text("of an attempt that is killed")
        assert Path(self.with_files().engine.nvme_path) == self.folder
        assert [*self.folder.iterdir()] == []
        (self.folder / "b.swp").write_text("")
        if self.run.row:
            raise RuntimeError(f"with {self.folder}")
        return {"folder": str(self.folder)}


@pytest.mark.parametrize("row", ["", "fails"])
def test_a_runs_files_are_its_own_and_end_with_it(tmp_path, monkeypatch, row):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    disk, out = tmp_path / "disk", tmp_path / "out"
    engine = {"world_size": 1, "offload_optimizer": "nvme", "nvme_path": str(disk)}
    run = RunConfig(row=row, emulate=2, engine=engine)
    out.mkdir()
    check_refused("disk' is no folder on this node", Files(run, out).with_files)
    (disk / "alst-of-another").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=str(disk)) if row else contextlib.nullcontext():
        work(run, out, Files)
    result = json.loads((out / "result.json").read_text())
    assert str(disk / "alst-") in (result["error"]["message"] if row else result["metrics"]["folder"])
    assert [*disk.iterdir()] == [disk / "alst-of-another"]
    assert files_of(run, out, 0) != files_of(run, tmp_path, 0) != files_of(run, tmp_path, 1)
    assert files_of(RunConfig(), out, 0) is None


def test_a_users_own_loop_gets_the_configuration_of_our_runs():
    model, optim = make_model(), {"learning_rate": 1e-5, "accumulation": 4}
    given = alstlib.zero_config(model, **optim)
    run = RunConfig(optim=optim, engine={"offload_optimizer": False})
    assert given == engine_config(run, [p.numel() for p in model.parameters()], bf16=False)
    assert given["optimizer"]["params"]["fused"]
    assert alstlib.zero_config(model.bfloat16())["bf16"] == {"enabled": True}
    unknown = "unknown field of zero_config 'learning_rat'; did you mean 'learning_rate'"
    check_refused(unknown, alstlib.zero_config, model, learning_rat=1e-5)


def step_on_nan(rank, world, stage, dtype):
    """A step whose last micro-batch gives one rank a gradient that is not finite, while every loss is: whether losses
    are finite, whether steps were taken, and whether weights and moments stayed."""
    poison, finite, taken = [1.0], [], []
    with training(stage, dtype=dtype, accumulation=2) as trained:
        engine, before = trained.engine, whole_state(trained.engine)
        engine.module.model.norm.weight.register_hook(lambda grad: grad * poison[0])  # in place of a bad kernel
        for i in range(2):
            poison[0] = float("nan") if rank == 1 and i == 1 else 1.0
            out = alstlib.causal_lm_loss(engine, next(trained.batches))
            finite.append(bool(out.mean.isfinite()))
            engine.backward(out.loss)
            taken.append(take_step(engine))
        return finite, taken, same(before, whole_state(engine))


@pytest.mark.parametrize("stage, dtype", [(0, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16")])
def test_a_gradient_that_is_not_finite_never_enters_the_weights(ranks2, stage, dtype):
    assert ranks2(step_on_nan, stage, dtype) == [([True, True], [True, False], True)] * 2
