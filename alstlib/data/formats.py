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

Rows of several formats may be in one file: a row is the first of these that it has a value of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]

KNOWN = "text; messages or conversations; prompt and completion; instruction and output; input_ids"
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Roles of ShareGPT's `from`."""
ALPACA = (
    "Below is an instruction that describes a task{also}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


def canonical_columns(corpus: Any, text_column: str | None = None) -> Any:
    """The columns that training uses: those of this module's table, with chats as `messages` and a text as `text`.

    `text_column` names the one column that is read, as `text`.

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
    else:
        strings = [name for name, f in features.items() if getattr(f, "dtype", None) in ("string", "large_string")]
        names = list(features)
    if text_column is not None:
        if text_column not in strings:
            raise ValueError(f"text_column='{text_column}' is no column of text; columns: {names}, of text: {strings}")
        keep = {text_column: "text"}
    elif "input_ids" in names:
        keep = {name: name for name in ("input_ids", "labels") if name in names}
    else:
        chat = next((name for name in ("messages", "conversations") if name in names), None)
        keep = {chat: "messages"} if chat else {}
        for needed, optional in ((("prompt", "completion"), ()), (("instruction", "output"), ("input",))):
            if set(needed) <= set(names):
                keep |= {name: name for name in (*needed, *optional) if name in names}
        keep |= {"system": "system"} if "system" in strings and (chat or "instruction" in keep) else {}
        if "text" in strings:
            keep["text"] = "text"
        elif not keep and len(strings) == 1:
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
        ValueError: messages that are not understood, or a row of none of the formats.
    """
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if row.get("messages") is not None:
        return Example([*system, *map(_message, row["messages"])])
    prompt, completion = row.get("prompt"), row.get("completion")
    if completion is not None:
        if isinstance(completion, str) != isinstance(prompt or "", str):
            raise ValueError("a row's prompt and completion must both be texts, or both lists of messages")
        if isinstance(completion, str):
            return Example(prompt=prompt or "", text=completion)
        return Example([_message(m) for m in [*(prompt or []), *completion]], len(prompt or []))
    if row.get("instruction") is not None:
        instruction, given, output = (row.get(name) or "" for name in ("instruction", "input", "output"))
        if not output:
            return Example()
        if chats:
            asked = "\n".join(part for part in (instruction, given) if part)
            return Example([*system, {"role": "user", "content": asked}, {"role": "assistant", "content": output}])
        also = ", paired with an input that provides further context" if given else ""
        given = f"### Input:\n{given}\n\n" if given else ""
        prompt = ALPACA.format(also=also, instruction=instruction, input=given)
        return Example(prompt=f"{row.get('system') or ''}\n\n{prompt}".lstrip(), text=output)
    return Example(text=row.get("text") or "")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its empty fields, ShareGPT's names turned into `role` and `content`."""
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
