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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]

FORMATS = {
    "input_ids": ("input_ids", "labels"), "messages": ("messages", "system"),
    "conversations": ("conversations", "system"), "prompt and completion": ("completion", "prompt"),
    "instruction and output": ("output", "instruction", "input", "system"), "text": ("text",),
}  # fmt: skip
"""Columns of each format, in the order in which a row is asked for them. The first column of each must have a value."""
WHOLE = {"prompt and completion": ("completion", "prompt"), "instruction and output": ("output", "instruction")}
"""Columns that a data set must have for a format, where that is more than the first."""
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


def canonical_columns(corpus: Any, text_column: str | None = None) -> Any:
    """The columns that training uses: those of this module's table. The only column of text is named `text`.

    `text_column` names the one column that is read, as `text`. Where all rows have `input_ids`, no other is kept.

    Raises:
        ValueError: no such column; it lists those there are.
    """
    if not hasattr(corpus, "select_columns"):
        raise ValueError(f"the corpus is a {type(corpus).__name__}; give a dataset of the `datasets` library")
    features = corpus.features
    if features is None:  # a stream tells its columns with its first row
        first = next(iter(corpus), None)
        if first is None:
            raise ValueError("the corpus is empty")
        strings = [name for name, value in first.items() if isinstance(value, str)]
        names = list(first)
    else:  # a column of mixed types is one of JSON
        kinds = {name: getattr(f, "dtype", type(f).__name__) for name, f in features.items()}
        strings = [name for name, kind in kinds.items() if kind in ("string", "large_string", "Json")]
        names = list(features)
    keep: dict[str, str] = {}
    if text_column is not None:
        if text_column not in strings:
            raise ValueError(f"text_column='{text_column}' is no column of text; columns: {names}, of text: {strings}")
        keep = {text_column: "text"}
    else:
        for kind, columns in FORMATS.items():
            if set(WHOLE.get(kind, columns[:1])) <= set(names) and (kind != "text" or "text" in strings):
                keep |= {name: name for name in columns if name in names and (name != "system" or name in strings)}
            if kind == "input_ids" and keep and hasattr(corpus, "data") and not corpus.data.column(kind).null_count:
                break
        if not keep and len(strings) == 1:
            keep = {strings[0]: "text"}
    if not keep:
        empty = [name for name, f in (features or {}).items() if getattr(f, "dtype", None) == "null"]
        why = f" ({', '.join(empty)}: no row has a value)" if empty else ""
        raise ValueError(
            f"no column that can be trained on among {names}{why}: name the columns as one of {KNOWN}; columns of "
            f"text: {strings} (in Python, load_corpus takes one as text_column)"
        )
    if list(keep) == names and list(keep) == list(keep.values()):
        return corpus
    corpus = corpus.select_columns(list(keep))
    renamed = {old: new for old, new in keep.items() if old != new}
    return corpus.rename_columns(renamed) if renamed else corpus


def only_tokens(corpus: Any) -> bool:
    """Whether the rows of a corpus with canonical columns are all token ids, which need no tokenizer."""
    return set(corpus.column_names or ("text",)) <= set(FORMATS["input_ids"])


def format_of(row: Mapping[str, Any]) -> str:
    """The first format in whose first column a row has a value that is not empty; one of whose columns it has an empty
    value or another part; '' for none."""

    def there(value: Any) -> bool:
        return value is not None and (not hasattr(value, "__len__") or len(value) > 0)

    whole = (kind for kind, columns in FORMATS.items() if there(row.get(columns[0])))
    part = (k for k, columns in FORMATS.items() if any(there(row.get(n)) for n in WHOLE.get(k, columns[:1])))
    empty = (kind for kind, columns in FORMATS.items() if row.get(columns[0]) is not None)
    return next((kind for kinds in (whole, part, empty) for kind in kinds), "")


class Example(NamedTuple):
    """A chat, with a loss on what the assistant says from message `first` on; or a text after a prompt, with a loss on
    the text."""

    messages: Messages | None = None
    first: int = 0
    prompt: str = ""
    text: str = ""


def read_row(row: Mapping[str, Any], chats: bool) -> Example:
    """A row with canonical columns as an example. With `chats`, instructions are read as chats.

    Raises:
        ValueError: values that are not understood.
    """
    kind, system = format_of(row), [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if kind in ("messages", "conversations"):
        return Example([*system, *map(_message, row[kind])] if row[kind] else [])
    if kind == "prompt and completion":
        prompt, completion = row.get("prompt") or "", row.get("completion")
        if not completion:
            return Example()
        if isinstance(completion, str) and isinstance(prompt, str):
            return Example(prompt=prompt, text=completion)
        if not (isinstance(completion, list) and isinstance(prompt or [], list)):
            raise ValueError("a row's prompt and completion must both be texts, or both lists of messages")
        return Example([_message(m) for m in [*prompt, *completion]], len(prompt))
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


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"its {name} is {value!r}; it must be a text")
    return value or ""


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its empty fields, ShareGPT's names turned into `role` and `content`."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {message!r}; it must have 'role' and 'content', or 'from' and 'value'")
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        if speaker not in SPEAKERS:
            raise ValueError(f"a message is from '{speaker}'; known: {', '.join(SPEAKERS)}")
        found = {"role": SPEAKERS[speaker], "content": found.pop("value", ""), **found}
    if "role" not in found:
        keys = sorted(found)
        raise ValueError(f"a message has the keys {keys}; it must have 'role' and 'content', or 'from' and 'value'")
    return found


def plain_text(row: Mapping[str, Any]) -> str:
    """All words of a row with canonical columns, for training a tokenizer."""
    example = read_row(row, chats=True)
    if example.messages is None:
        return example.prompt + example.text
    return "\n".join(str(message.get("content") or "") for message in example.messages)
