"""The usual formats of training documents, read from the rows of a data set: texts, tokens, chats, prompts with
completions, instructions.

| columns | read as | loss on |
|---|---|---|
| `input_ids` (`labels`) | tokens | the labels, or every token |
| `messages` or `conversations` of `role`, `content` | a chat (OpenAI's and TRL's) | what the assistant says |
| the same of `from`, `value` (`system`) | a chat (ShareGPT) | what the assistant says |
| `prompt`, `completion`: texts | a text (TRL) | the completion |
| `prompt`, `completion`: lists of messages | a chat (TRL) | what the assistant says in the completion |
| `instruction`, `output` (`input`, `system`) | a chat, or Alpaca's text without a chat template | the output |
| `text`, or the only column of text | a text | every token |

Rows of several formats may be in one file: each row is read as the first of the formats in `FORMATS` that it has a
value of.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from alstlib.base.options import Json, Record

Messages = Sequence[Record]

FORMATS = {
    "input_ids": ("input_ids", "labels"), "messages": ("messages", "system"),
    "conversations": ("conversations", "system"), "prompt and completion": ("completion", "prompt"),
    "instruction and output": ("output", "instruction", "input", "system"), "text": ("text",),
}  # fmt: skip
"""Columns of each format, in the order in which a row is asked for them. The first column of each must have a value."""
WHOLE = {"prompt and completion": ("completion", "prompt"), "instruction and output": ("output", "instruction")}
"""Columns that a data set must have for a format, where that is more than the first."""
IMAGES = ("images", "image")
"""Columns of images beside those of a format, as TRL has them. A row that has any is read by `image_rows`."""
KNOWN = "text; messages or conversations; prompt and completion; instruction and output; input_ids"
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Role of each speaker that ShareGPT's `from` names."""
ALPACA = (
    "Below is an instruction that describes a task{also}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


def canonical_columns(corpus: Any) -> Any:
    """The columns that training uses: those of this module's table. The only column of text is named `text`.

    Raises:
        ValueError: no such column; it lists those there are.
    """
    from datasets import Dataset

    if not isinstance(corpus, Dataset):
        raise ValueError(f"the corpus is a {type(corpus).__name__}; give a Dataset of the library `datasets`")
    features = corpus.features
    keep: dict[str, None] = {}
    for kind, columns in FORMATS.items():
        if set(WHOLE.get(kind, columns[:1])) <= set(features):
            keep |= dict.fromkeys(name for name in columns if name in features)
    if keep:
        return corpus.select_columns([*keep, *(name for name in IMAGES if name in features)])
    texts = [name for name, f in features.items() if getattr(f, "dtype", "") in ("string", "large_string")]
    if len(texts) != 1:
        raise ValueError(
            f"no column that can be trained on among {list(features)}: name the columns as one of {KNOWN}; columns of "
            f"text: {texts}"
        )
    return corpus.select_columns(texts).rename_column(texts[0], "text")


def only_tokens(corpus: Any) -> bool:
    """Whether all rows of a corpus have token ids, which need no tokenizer."""
    return "input_ids" in corpus.column_names and not corpus.data.column("input_ids").null_count


def format_of(row: Record) -> str:
    """The first format in whose first column a row has a value that is not empty, or else the first of which it has any
    column that must be there; '' for none."""
    full = (kind for kind, columns in FORMATS.items() if row.get(columns[0]))
    part = (k for k, columns in FORMATS.items() if any(row.get(n) is not None for n in WHOLE.get(k, columns[:1])))
    return next(itertools.chain(full, part), "")


class Example(NamedTuple):
    """A chat, with a loss on what the assistant says from message `first` on; or a text after a prompt, with a loss on
    the text."""

    messages: Messages | None = None
    first: int = 0
    prompt: str = ""
    text: str = ""


def read_row(row: Record, chats: bool) -> Example:
    """A row with canonical columns as an example. With `chats`, instructions are read as chats.

    Raises:
        ValueError: values that are not understood.
    """
    kind, system = format_of(row), [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if kind in ("messages", "conversations"):
        return Example([*system, *map(_message, row[kind])] if row[kind] else [])
    if kind == "prompt and completion":
        prompt, completion = (row.get(name) or [] for name in ("prompt", "completion"))
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            return Example(prompt=_text(row, "prompt"), text=_text(row, "completion"))
        return Example([_message(m) for m in [*prompt, *completion]] if completion else [], len(prompt))
    if kind == "instruction and output":
        instruction, given, output = (_text(row, name) for name in ("instruction", "input", "output"))
        if not output:
            return Example()
        if chats:
            asked = "\n".join(part for part in (instruction, given) if part)
            return Example([*system, {"role": "user", "content": asked}, {"role": "assistant", "content": output}])
        also = ", paired with an input that provides further context" if given else ""
        given = f"### Input:\n{given}\n\n" if given else ""
        prompt = ALPACA.format(also=also, instruction=instruction, input=given)
        return Example(prompt=f"{row.get('system') or ''}\n\n{prompt}".lstrip(), text=output)
    return Example(text=_text(row, "text"))


def _text(row: Record, name: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"its {name} is {value!r}; it must be a text")
    return value or ""


def _message(message: Record) -> Json:
    """A message without its empty fields, ShareGPT's names turned into `role` and `content`."""
    found = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if "role" not in found and found.get("from") in SPEAKERS:
        found = {"role": SPEAKERS[found.pop("from")], "content": found.pop("value", ""), **found}
    if "role" not in found:
        raise ValueError(
            f"a message is {message!r}; it must have 'role' and 'content', or 'value' and 'from', one of "
            f"{', '.join(SPEAKERS)}"
        )
    return found


def plain_text(row: Record) -> str:
    """All words of a row with canonical columns, for training a tokenizer."""
    example = read_row(row, chats=True)
    if example.messages is None:
        return example.prompt + example.text
    return "\n".join(str(message.get("content") or "") for message in example.messages)
