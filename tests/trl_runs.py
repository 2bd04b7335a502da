"""Small runs of TRL's trainers: plain, and with the mixins that spread samples over ranks, on the same data."""

import functools
import json
import tempfile

import torch
from cases import VOCAB, make_model
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import SETTINGS, accelerate_here, check_runs, engine_settings, made_of, outcome, spread
from transformers import MixtralConfig, PreTrainedTokenizerFast

import alstlib

WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}U: {{ m['content'] }}{% endif %} . {% endfor %}"
)


@functools.cache
def tokenizer():
    """One token for each word."""
    names = ["<pad>", "<eos>", "<unk>", "A:", "U:", ".", *WORDS]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )


def dataset(what, count):
    """Samples of unequal lengths: `text`, `completion`, `chat` or `pairs`."""
    g = torch.Generator().manual_seed(3)

    def text():
        length = int(torch.randint(3, 15, (1,), generator=g))
        return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=g))

    make = {
        "text": lambda: {"text": text()},
        "completion": lambda: {"prompt": text(), "completion": " " + text()},
        "chat": lambda: {
            "messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}] * 2
        },
        "pairs": lambda: {"prompt": text(), "chosen": " " + text(), "rejected": " " + text()},
    }
    return Dataset.from_list([make[what]() for _ in range(count)])


def mixture(**settings):
    """A small mixture of experts, whose routers have a load-balancing loss."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralConfig(vocab_size=VOCAB, **sizes, **experts, **settings)


def model_of(kind, seed=0):
    return made_of(mixture()) if kind == "mixture" else make_model(kind, seed)


def given(what, count, folder):
    """Samples that were saved, where all ranks find what one of them keeps about them; or new ones."""
    return dataset(what, count) if folder is None else load_from_disk(f"{folder}/{what}-{count}")


def train(
    rank, world, how, trainer, engine = "ddp", *, what, kind = "gqa",
    lora = False, count = 24, sp = None, options = None,
    evaluate = False, reference = False, folder = None, resume = None,
    **settings,
):  # fmt: skip
    """One run: all that it logs by step, and the trained weights.

    Args:
        how: `plain`, or `ours`.
        trainer: `SFT` or `DPO`.
        kind: `mixture`, or as `make_model` takes it.
        reference: DPO has a reference model, which is another one than the model.
        folder: has the data (`given`).
    """
    import trl

    with accelerate_here(engine), tempfile.TemporaryDirectory() as scratch:
        dtype = torch.float64 if engine == "ddp" else torch.float32
        model, base = model_of(kind).to(dtype), getattr(trl, f"{trainer}Trainer")
        own, cls = {"ref_model": make_model(seed=1).to(dtype)} if reference else {}, base
        if how == "ours":
            mixin = alstlib.TrainerMixin if trainer == "SFT" else alstlib.DPOTrainerMixin
            cls, own = type("SPTrainer", (mixin, base), {}), own | spread(world, sp, options)
        if lora:
            from peft import LoraConfig

            own["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        defaults = {**SETTINGS, "per_device_train_batch_size": 2, "max_steps": 8, "bf16": False, "seed": 7}
        args = getattr(trl, f"{trainer}Config")(
            **{**defaults, **engine_settings(engine), "output_dir": scratch, **settings}
        )
        made = cls(
            model=model, args=args, train_dataset=given(what, count, folder), processing_class=tokenizer(),
            eval_dataset=given(what, 7, folder) if evaluate else None, **own,
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return outcome(made, how)


def run(rank, world, how, trainer, engine, settings):
    return train(rank, world, how, trainer, engine, **settings)


@functools.cache
def plain(trainer, settings):
    """One process, once for each choice of settings, which are JSON."""
    return run(0, 1, "plain", trainer, "ddp", json.loads(settings))


def as_one_process(pool, trainer, settings, engine="ddp", without=(), **ours):
    """Trains on a pool as the plain trainer does in one process; returns the names of what was compared."""
    runs = pool(run, "ours", trainer, engine, {**settings, **ours})
    return check_runs(runs, plain(trainer, json.dumps(settings)), 0, without)
