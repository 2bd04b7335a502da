"""A tokenizer that SFTTrainer asks for, and does not use: samples are tokens already."""

from typing import Any

from .cases import VOCAB


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {"<pad>": 2, "<bos>": 0, "<eos>": 1, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = Tokenizer(models.WordLevel(names, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
