"""Small runs of Hugging Face's Trainer and TRL's SFTTrainer, plain and with TrainerMixin, on the same data."""

import contextlib
import gc
import os
import tempfile

import pytest
import torch
from cases import VOCAB, make_model
from exactness.training import collate, several_devices, zero
from transformers import AutoModelForCausalLM, Trainer

import alstlib
from alstlib.base.reference import relative_error
from alstlib.hf.saving import full_weights
from alstlib.runs.train import operators

HERE = pytest.mark.usefixtures("here")
"""A Trainer in the test's own process."""
STEPS = 10
SETTINGS = {
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
    "max_steps": STEPS, "logging_steps": 1, "learning_rate": 2e-3, "save_strategy": "no", "report_to": [],
    "disable_tqdm": True, "log_level": "error",
}  # fmt: skip
OPTIONS = {"tiles": {"mlp": 5, "loss": 7, "norm": True}, "offload": True}


def samples(count=20, seed=3):
    """Samples of unequal lengths and numbers of labels; two have none at all."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(6, 40, (1,), generator=g))
        ids = torch.randint(0, VOCAB, (length,), generator=g).tolist()
        first = length if i in (5, 17) else 3 * i % (length - 2)
        made.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return made


@contextlib.contextmanager
def accelerate_here(engine):
    """Accelerate's state as in a new process, which is told of several devices unless the engine is DDP
    (`training.on_cpu_ranks`)."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    with pytest.MonkeyPatch.context() as patch:
        if engine != "ddp":
            patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
            patch.setattr(PartialState, "_prepare_backend", several_devices)
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
                os.environ.pop(name)
            gc.collect()


def engine_settings(engine):
    if engine == "ddp":
        return {"use_cpu": True}
    if engine == "fsdp2":
        return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    operators.leave_out()
    return {"deepspeed": zero(int(engine[4:]))}


def made_of(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    model.set_experts_implementation("eager")  # the others do not run in fp64
    return model


def lora_of(targets):
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "down_proj", *targets])


def adapted(model, targets):
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, lora_of(targets))


def dtype_of(engine):
    return torch.float64 if engine == "ddp" else torch.float32


def train(
    rank, world, how, engine = "ddp", *, kind = "gqa",
    lora = False, count = 20, sp = None, resume = None,
    options = None, folder = None,
    data = None, evaluate = False, targets = (), extra = None,
    dtype = None, collator = None, loss = None, classes = None, **settings,
):  # fmt: skip
    """One run: its logged losses, gradient norms and evaluations by step, and the trained weights.

    Args:
        loss: the `compute_loss` of the Trainer's class, one of OVERRIDES; None: its own.
        kind: as `make_model` takes it, a config, or what makes the model.
        how: `plain`, or `ours` (a mixin; all ranks share a sample, unless `sp` says how many do).
        evaluate: whether some samples are for evaluation, or these samples.
        extra: further arguments of the trainer.
        classes: the trainer, its arguments and its mixin; None: those of transformers' Trainer.
    """
    with accelerate_here(engine), tempfile.TemporaryDirectory() as scratch:
        from transformers import TrainingArguments

        base, arguments, mixin = classes or (Trainer, TrainingArguments, alstlib.TrainerMixin)
        model = kind() if callable(kind) else make_model(kind) if isinstance(kind, str) else made_of(kind)
        if not callable(kind):
            model = model.to(dtype or dtype_of(engine))
        model = adapted(model, targets) if lora else model
        own = extra or {}
        if how == "ours":
            own = {**own, "sp": sp or world, "alst": alstlib.Options(**{**OPTIONS, **(options or {})})}
        args = arguments(**{**SETTINGS, **engine_settings(engine), "output_dir": folder or scratch, **settings})
        if base is Trainer:
            own = {"data_collator": collator or collate, **own}
        trainer = trainer_class(how, loss, base, mixin)(
            model=model, args=args, train_dataset=samples(count) if data is None else data,
            eval_dataset=samples(7, seed=8) if evaluate is True else evaluate or None, **own,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return outcome(trainer, how)


def outcome(trainer, how):
    """What a Trainer has logged by step, the trained weights, and the engine."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    found = {name: weight.clone() for name, weight in full_weights(model)}
    if how == "ours":
        assert not hasattr(trainer.detach(), "_orig_mod")  # the wrapper of torch.compile
    return {
        "logs": [line for line in trainer.state.log_history if "train_loss" not in line], "weights": found,
        "engine": str(trainer.accelerator.distributed_type).rpartition(".")[2],
    }  # fmt: skip


def _override(loss_of, items=False):
    """A `compute_loss` that takes the loss of `loss_of(outputs)`; `items`: the model is told their number."""

    def compute_loss(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, **({"num_items_in_batch": num_items_in_batch} if items else {}))
        return (loss_of(outputs), outputs) if return_outputs else loss_of(outputs)

    return compute_loss


def _super(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return super(type(trainer), trainer).compute_loss(model, inputs, return_outputs)


def trainer_class(how, loss=None, base=Trainer, mixin=alstlib.TrainerMixin):
    bases = (mixin, base) if how == "ours" else (base,)
    return type("SPTrainer", bases, {} if loss is None else {"compute_loss": OVERRIDES[loss]})


OVERRIDES = {
    "out.loss": _override(lambda out: out.loss),
    "num_items_in_batch": _override(lambda out: out["loss"], items=True), "super": _super,
    # one of its own, with another gradient for each value
    "outputs[0]": _override(lambda out: out[0] ** 2 / 2 + out[0]),
}  # fmt: skip
"""`compute_loss` as users write it, after Hugging Face's documentation."""


KNOWN = {}


def plain(settings):
    """The plain trainer in one process; once for each choice of settings."""
    key = str(settings)
    if key not in KNOWN:
        KNOWN[key] = run(0, 1, "plain", "ddp", settings)
    return KNOWN[key]


def run(rank, world, how, engine, settings):
    """A run as `train` makes it; of one of TRL's trainers where the settings name one (`trl_runs.with_trl`)."""
    if "trainer" in settings:
        from trl_runs import with_trl

        settings = with_trl(engine, **settings)
    return train(rank, world, how, engine, **settings)


def check_runs(runs, want, after=0, without=(), bound=1e-5, near_zero=()):
    """Every rank's run is the other one after a step; returns the names of what was compared."""
    names = set()
    for got in runs:
        found = {name: error for name, error in errors(got, want, after, near_zero).items() if name not in without}
        assert max(found.values()) < bound, found
        names = set(found)
    return names


def as_one_process(pool, settings, engine="ddp", without=(), near_zero=(), **ours):
    """Trains on a pool as the plain trainer does in one process; returns the runs of its ranks, and the names of what
    was compared."""
    runs = pool(run, "ours", engine, {**settings, **ours})
    return runs, check_runs(runs, plain(settings), without=without, near_zero=near_zero)


NOT_COMPARED = ("_runtime", "_per_second", "_per_second_per_gpu", "step_time", "learning_rate", "epoch")


def errors(got, want, after=0, near_zero=()):
    """Largest relative error of each number that is logged after a step, and of all weights together. Rewards and mean
    logits are small differences of numbers above 1, which TRL computes in fp32: their errors are absolute. Numbers
    `near_zero` are sums of terms that cancel: errors of those below 0.01 are relative to that."""
    mine, theirs = (
        {(line["step"], "eval_loss" in line): line for line in run["logs"] if line["step"] > after}
        for run in (got, want)
    )
    assert mine.keys() == theirs.keys() != set()
    found = {}
    for at, line in theirs.items():
        for name in (n for n in line if not n.endswith(NOT_COMPARED)):
            least = 0.01 if name.removeprefix("eval_") in near_zero else 1e-9
            least = 1.0 if "rewards/" in name or "logits/" in name else least
            found[name] = max(found.get(name, 0.0), abs(mine[at][name] - line[name]) / max(abs(line[name]), least))
    assert got["weights"].keys() == want["weights"].keys()
    mine, theirs = (torch.cat([run["weights"][n].double().flatten() for n in want["weights"]]) for run in (got, want))
    return {**found, "weights": relative_error(mine, theirs)}
