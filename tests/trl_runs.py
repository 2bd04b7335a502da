"""Small runs of TRL's trainers: plain, and with the mixins that spread samples over ranks, on the same data."""

import functools

import torch
import torch.distributed as dist
from cases import VOCAB, make_model
from datasets import Dataset, load_from_disk
from pictures import conversations, processor, small_vlm
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import SETTINGS, dtype_of, lora_of
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
    """Samples of unequal lengths: `text`, `prompt`, `completion`, `chat`, `pairs`, or `images`."""
    if what == "images":
        return Dataset.from_list(conversations(count))
    g = torch.Generator().manual_seed(3)

    def text():
        length = int(torch.randint(3, 15, (1,), generator=g))
        return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=g))

    make = {
        "text": lambda: {"text": text()},
        "prompt": lambda: {"prompt": text()},
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


def built(cls, arguments, what, settings=None, **given):
    """A trainer of this class on four samples, in this process."""
    usual = {**SETTINGS, "use_cpu": True, "bf16": False, "output_dir": "unused"}
    made = {"model": make_model(), "train_dataset": dataset(what, 4), "processing_class": tokenizer()}
    return cls(**{**made, "args": arguments(**{**usual, **(settings or {})}), **given})


def given(what, count, folder):
    """Samples that were saved, where all ranks find what one of them keeps about them; or new ones."""
    return dataset(what, count) if folder is None else load_from_disk(f"{folder}/{what}-{count}")


def places(prompts):
    """The places of a process's prompts in the batch of all of them."""
    first = dist.get_rank() * len(prompts) if dist.is_initialized() else 0
    return range(first, first + len(prompts))


def turns(prompts, trainer):
    """What a user's rollout function returns: completions in which some tokens are an environment's."""
    made = []
    for i in places(prompts):
        g = torch.Generator().manual_seed(100 * trainer.state.global_step + i)
        length = int(torch.randint(2, 11, (1,), generator=g))
        ids = torch.randint(24, 60, (length,), generator=g).tolist()
        made.append((ids, [1, *torch.randint(0, 2, (length - 1,), generator=g).tolist()]))
    ids, masks = zip(*made)
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    return {"prompt_ids": prompt_ids, "completion_ids": list(ids), "logprobs": None, "env_mask": list(masks)}


ENDS = tuple(range(6, 24))
"""Tokens that end a completion, so many that completions of a model with random weights have many lengths."""


class Reproducible:
    """Before one of TRL's trainers that generate: a completion depends on the step and on its place in the batch, and
    not on which process generates it, nor on what else it generates."""

    def _generate_single_turn(self, prompts, *more):
        made = []
        for i, prompt in zip(places(prompts), prompts):
            torch.manual_seed(1000 * self.state.global_step + 2 * i + self.model.training)
            one = super()._generate_single_turn([prompt], *more)
            made += one[0] if isinstance(one, tuple) else one
        return (made, None) if isinstance(one, tuple) else made

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        torch.manual_seed(self.state.global_step)  # TRL shuffles what was made
        return made


def small_tokens(completion_ids, **_):
    """A reward: the share of tokens from the lower half of the vocabulary."""
    return [sum(i < VOCAB // 2 for i in ids) / len(ids) for ids in completion_ids]


def kinds(completion_ids, log_metric, **_):
    """A reward: how many different tokens a completion has; none for a completion of one token."""
    log_metric("tokens", sum(map(len, completion_ids)) / len(completion_ids))
    return [None if len(ids) == 1 else len(set(ids)) / 8 for ids in completion_ids]


def policy(kind="gqa", folder=None, dtype=torch.float64):
    """A model whose completions end early, and, in a folder, the model that TRL takes for its reference."""
    model = make_model(kind).to(dtype)
    model.generation_config.eos_token_id = list(ENDS)
    model.config._name_or_path = "" if folder is None else folder
    return model


ONLINE = {
    "num_generations": 4, "max_completion_length": 10, "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4, "beta": 0.0, "max_steps": 4,
    "generation_kwargs": {"min_new_tokens": 1},
}  # fmt: skip
OFFLINE = {"per_device_train_batch_size": 2, "max_steps": 8}


def with_trl(
    engine, *, trainer, what, count = 24, lora = False,
    evaluate = False, reference = False, data = None, **settings,
):  # fmt: skip
    """What `trainers.train` is given for a run of one of TRL's trainers.

    Args:
        trainer: `SFT`, `DPO`, `GRPO` or `RLOO`.
        reference: DPO has a reference model, which is another one than the model; of GRPO and RLOO, the folder that
            has it.
        data: a folder that has the data (`given`).
        settings: of the trainer's arguments; `rollout` is what generates in place of the trainer, and `trees` is the
            mixin's.
    """
    import trl

    online, base = trainer in ("GRPO", "RLOO"), getattr(trl, f"{trainer}Trainer")
    mixins = {"SFT": alstlib.TrainerMixin, "DPO": alstlib.DPOTrainerMixin}
    mixin = mixins.get(trainer, alstlib.GRPOTrainerMixin)
    usual = {**(ONLINE if online else OFFLINE), "bf16": False, "seed": 7}
    extra = {"processing_class": processor() if what == "images" else tokenizer()}
    if trees := settings.pop("trees", None):
        extra["trees"] = trees
    if lora:
        extra["peft_config"] = lora_of(())
    if online:
        base, mixin = (type(f"Reproducible{one.__name__}", (Reproducible, one), {}) for one in (base, mixin))
        extra["reward_funcs"] = [small_tokens, kinds]
        if rollout := settings.pop("rollout", None):
            extra["rollout_func"] = rollout
        usual["kind"] = functools.partial(policy, folder=reference or None, dtype=dtype_of(engine))
    elif reference:
        extra["ref_model"] = make_model(seed=1).to(dtype_of(engine))
    elif what == "images":
        usual["kind"] = functools.partial(small_vlm, "qwen2_vl", dtype_of(engine))
    return {
        **usual, "classes": (base, getattr(trl, f"{trainer}Config"), mixin), "extra": extra,
        "data": given(what, count, data), "evaluate": evaluate and given(what, 4 if online else 7, data), **settings,
    }  # fmt: skip
