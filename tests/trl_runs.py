"""Small runs of TRL's trainers: plain, and with the mixins that spread samples over ranks, on the same data."""

import functools

import torch
from cases import VOCAB, make_model
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import dtype_of, lora_of
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


def given(what, count, folder):
    """Samples that were saved, where all ranks find what one of them keeps about them; or new ones."""
    return dataset(what, count) if folder is None else load_from_disk(f"{folder}/{what}-{count}")


def with_trl(
    engine, *, trainer, what, count = 24, lora = False,
    evaluate = False, reference = False, data = None, **settings,
):  # fmt: skip
    """What `trainers.train` is given for a run of one of TRL's trainers.

    Args:
        trainer: `SFT` or `DPO`.
        reference: DPO has a reference model, which is another one than the model.
        data: a folder that has the data (`given`).
    """
    import trl

    extra = {"processing_class": tokenizer()}
    if reference:
        extra["ref_model"] = make_model(seed=1).to(dtype_of(engine))
    if lora:
        extra["peft_config"] = lora_of(())
    classes = (
        getattr(trl, f"{trainer}Trainer"),
        getattr(trl, f"{trainer}Config"),
        alstlib.DPOTrainerMixin if trainer == "DPO" else alstlib.TrainerMixin,
    )
    return {
        "per_device_train_batch_size": 2, "max_steps": 8, "bf16": False, "seed": 7, "classes": classes, "extra": extra,
        "data": given(what, count, data), "evaluate": evaluate and given(what, 7, data), **settings,
    }  # fmt: skip
