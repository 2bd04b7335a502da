"""Documents are tokenized, labelled and made into samples of one length: a sample is one long text, or packed
documents.

A sample is {"input_ids" [S], "labels" [S]} (int64) and, when packed, "document_lengths", a list that sums to S.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from alstlib.base.options import Record
from alstlib.base.units import IGNORE
from alstlib.runs.corpus.formats import IMAGES, Messages, canonical_columns, format_of, read_row

logger = logging.getLogger(__name__)

Passages = list[tuple[int, int]]
"""Runs of a text's characters: the first, and the one after the last."""
SHOWN = 5
"""Number of rows that are named of those that train nothing."""
_POOL = 32  # documents among which packing looks for one that fits


class Document(NamedTuple):
    """A tokenized document or a piece of one: int32 token ids and labels (-100 where there is no loss)."""

    ids: np.ndarray
    labels: np.ndarray

    def piece(self, start: int, stop: int | None = None) -> Document:
        return Document(self.ids[start:stop], self.labels[start:stop])


def _labelled(ids: Sequence[int], said: ArrayLike) -> Document:
    """Token ids, of which those that are said have labels."""
    made = np.asarray(ids, np.int32)
    return Document(made, np.where(said, made, np.int32(IGNORE)))


def said_in_chat(messages: Messages, templates: Any, first: int = 0) -> tuple[str, Passages]:
    """The text of a conversation, and the spans of its characters that the assistant says, from message `first` on.

    The spans are found by rendering the conversation message by message, which is only right if each rendering begins
    with the one before it: anything else is refused.

    Args:
        templates: the tokenizer or processor that has the chat template.
    """
    if not getattr(templates, "chat_template", None):
        raise ValueError("the corpus holds chats, but the tokenizer has no chat template: name a chat model's")

    def render(count: int, prompt: bool = False) -> str:
        if count == 0:
            return ""
        return templates.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    whole = render(len(messages))
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= first:
            before, after = render(i, prompt=True), render(i + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"the chat template renders message {i} differently when more messages follow, so that the "
                    "assistant's tokens cannot be told apart; use a template with {% generation %} marks, or give "
                    "input_ids and labels"
                )
            spans.append((len(before), len(after)))
    return whole, spans


def _chat(messages: Messages, tokenizer: Any, first: int = 0) -> Document:
    """A conversation through the tokenizer's template; labels on what the assistant says, from message `first` on: by
    the template's own marks ({% generation %}), where it has them and all messages count."""
    template = getattr(tokenizer, "chat_template", None)
    if not first and isinstance(template, str) and re.search(r"\{%-?\s*generation\s*-?%\}", template):
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return _labelled(out["input_ids"], out["assistant_masks"])
    return _labelled(*_said(*said_in_chat(messages, tokenizer, first), tokenizer, special=False))


def inside(spans: Sequence[Sequence[int]], places: Any) -> np.ndarray:
    """Which of these places of a text lie in one of the spans, which are in order and do not overlap."""
    return np.searchsorted(np.ravel(spans), places, side="right") % 2 == 1


def _said(text: str, spans: Passages, tokenizer: Any, *, special: bool) -> tuple[list[int], np.ndarray]:
    """Tokens of a text, and which of them begin in one of these spans of characters."""
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    return out["input_ids"], inside(spans, [left for left, _ in out["offset_mapping"]])


def tokenize_row(row: Record, tokenizer: Any) -> Document:
    """A row of the data set, with canonical columns, as a document; one without tokens where it has no text.

    Raises:
        ValueError: values that are not understood, or images, which would be lost.
    """
    if any(row.get(name) for name in IMAGES):
        raise ValueError(
            "the row has images, which are only read by `alst finetune`, where the training data have images too: drop "
            "the column elsewhere"
        )
    if format_of(row) == "input_ids":
        ids, labels = row["input_ids"], row.get("labels")
        if labels is not None and len(ids) != len(labels):
            raise ValueError(f"labels has {len(labels)} values for {len(ids)} input_ids; they must be as many")
        return Document(np.array(ids, np.int32), np.array(ids if labels is None else labels, np.int32))
    example = read_row(row, chats=bool(getattr(tokenizer, "chat_template", None)))
    if example.messages:
        return _chat(example.messages, tokenizer, example.first)
    if not example.text:
        return _labelled([], [])
    if example.prompt:
        whole, start = example.prompt + example.text, len(example.prompt)
        ids, said = _said(whole, [(start, len(whole))], tokenizer, special=True)
    else:
        ids = tokenizer(example.text, verbose=False)["input_ids"]
        said = np.ones(len(ids), bool)
    end = tokenizer.eos_token_id
    return _labelled(ids, said) if end in (None, *ids[-1:]) else _labelled([*ids, end], [*said, True])


@dataclass
class Account:
    """Reads rows as documents, and counts those that train nothing.

    Args:
        read: makes a row a document, as `tokenize_row` does.
        of: how the data are called in messages, with a space before it.
        limit: the number of tokens of a row that are trained on; None: all.
    """

    read: Callable[[Record], Document]
    of: str = ""
    limit: int | None = None
    rows: int = 0
    useless: list[tuple[int, str]] = field(default_factory=list)
    """Numbers of the rows that train nothing, counted from 1, and their formats."""

    def __call__(self, row: Record, number: int) -> Document:
        """The document of a row, whose number counts from 0.

        Raises:
            ValueError: a row that cannot be read; it says which.
        """
        kind = format_of(row) or "none of the known formats"
        try:
            document = self.read(row)
        except Exception as e:  # a chat template raises what it likes
            raise ValueError(f"data{self.of or ' of the corpus'}, row {number + 1}, read as {kind}: {e}") from e
        self.rows += 1
        if not self.trains(document):
            self.useless.append((number + 1, kind))
        return document

    def trains(self, document: Document) -> bool:
        """Whether a document has a token with a loss: the first token is no other's next."""
        return bool((document.labels[1 : self.limit] != IGNORE).any())

    def refuse_useless(self) -> None:
        """Refuse data of which no row trains."""
        if len(self.useless) == self.rows:
            raise ValueError(
                f"none of {self.rows} rows{self.of} has a token with a loss: chats need a message of the assistant, "
                "prompts a completion, and labels a value besides -100"
            )

    def note(self, fate: str = "") -> str:
        """A sentence about the rows that train nothing; `fate` says what becomes of them."""
        among = f" among the first {self.limit:,}" if self.limit else ""
        shown = ", ".join(f"row {number}, read as {kind}" for number, kind in sorted(self.useless)[:SHOWN])
        of = f"{len(self.useless)} of {self.rows} rows{self.of}"
        return f"{of} train nothing{fate}, without a token with a loss{among}; the first: {shown}"


def _join(pieces: Sequence[Document]) -> Document:
    return Document(np.concatenate([p.ids for p in pieces]), np.concatenate([p.labels for p in pieces]))


def _tokens(documents: Iterable[Document]) -> int:
    return sum(len(document.ids) for document in documents)


def _one_text(documents: Iterable[Document], seq_len: int) -> Iterator[list[Document]]:
    """Long documents alone, as many samples as they fill; the rest one after another as one text."""
    held: list[Document] = []
    for document in documents:
        whole = len(document.ids) // seq_len * seq_len
        for start in range(0, whole, seq_len):
            yield [document.piece(start, start + seq_len)]
        held.append(document.piece(whole))
        if _tokens(held) >= seq_len:
            joined = _join(held)
            yield [joined.piece(0, seq_len)]
            held = [joined.piece(seq_len)]


def _pack(documents: Iterable[Document], seq_len: int) -> Iterator[list[Document]]:
    """Samples of whole documents, chosen among those that wait: two samples of tokens, or `_POOL` documents."""
    pool: list[Document] = []
    for document in documents:
        if len(document.ids):
            pool.append(document)
        while (waiting := _tokens(pool)) >= 2 * seq_len or (waiting >= seq_len and len(pool) >= _POOL):
            yield _fill(pool, seq_len)
    while _tokens(pool) >= seq_len:
        yield _fill(pool, seq_len)


def _fill(pool: list[Document], seq_len: int) -> list[Document]:
    """The oldest document and the longest others that still fit; the rest is filled with a piece of the oldest."""
    sample: list[Document] = []
    space = seq_len
    while space:
        fits = [i for i, d in enumerate(pool) if len(d.ids) <= space]
        best = max(fits, key=lambda i: len(pool[i].ids)) if sample and fits else 0
        chosen = pool.pop(best)
        if len(chosen.ids) > space:
            pool.insert(0, chosen.piece(space))
            chosen = chosen.piece(0, space)
        sample.append(chosen)
        space -= len(chosen.ids)
    return sample


@dataclass(eq=False)
class Samples(Dataset):
    """A map-style dataset of samples of exactly `seq_len` tokens. Its documents are shuffled by `seed`.

    Args:
        corpus: what `load_corpus` returns, or any dataset of `datasets` in a format that `formats` lists.
        tokenizer: what `get_tokenizer` returns, or another tokenizer of transformers.
        seq_len: the number of tokens in each sample.
        packed: False: each sample is one text with positions 0 to S - 1: a part of a long document, or short documents
            one after another, each ended by the end-of-text token. True: each sample is packed with whole documents and
            has `document_lengths`; only the last document may be cut, and its rest begins the next sample.
        limit: the number of samples, which are tokenized when they are asked for. The corpus begins again, in another
            order and with a warning, when it is too short for them. None: the samples of one pass over the corpus,
            which are tokenized at once.
        pace: a function that reports progress: it is called with the number of tokens to make, and returns a function
            that is called with the number of tokens made so far.

    Raises:
        ValueError: the corpus has fewer tokens than one sample needs, no usable column, no token with a loss, or a chat
            that cannot be labelled.
    """

    corpus: Any
    tokenizer: Any
    seq_len: int
    packed: bool = False
    seed: int = 0
    limit: int | None = None
    pace: Callable[[int], Callable[[int], None]] | None = None

    def __post_init__(self) -> None:
        if 0 in (self.seq_len, self.limit):
            raise ValueError(f"seq_len={self.seq_len} and limit={self.limit} must be at least 1")
        self.corpus = canonical_columns(self.corpus)
        self.passes = 0
        """Number of passes over the corpus that were begun."""
        self.tokens = 0
        """Number of tokens that all passes have read so far."""
        self.in_one_pass = 0
        """Number of tokens of a whole pass; 0 during the first."""
        self.account = Account(self.read)
        """Account of the rows that the first pass has read."""
        self._tell: Callable[[int], None] = lambda tokens: None
        self._made: list[list[Document]] = []
        self._source = (_pack if self.packed else _one_text)(self._documents(), self.seq_len)
        first = Account(self.read)
        if not any(first.trains(first(row, number)) for number, row in enumerate(self.corpus)):
            first.refuse_useless()
        self._make(1 if self.limit else None)  # an unusable corpus is told at once

    def __reduce__(self) -> Any:
        # a worker process makes the samples again, for a generator cannot be sent to it
        return Samples, (self.corpus, self.tokenizer, self.seq_len, self.packed, self.seed, self.limit)

    def read(self, row: Record) -> Document:
        return tokenize_row(row, self.tokenizer)

    def _documents(self) -> Iterator[Document]:
        while self.limit or not self.passes:
            account = Account(self.read) if self.passes else self.account
            order = np.random.default_rng([self.seed, self.passes]).permutation(len(self.corpus))
            self.passes += 1
            for number in order.tolist():
                document = account(self.corpus[number], number)
                self.tokens += len(document.ids)
                self._tell(self.tokens)
                yield document
            if self.passes == 1 and self.limit:
                logger.warning(
                    f"one pass over the corpus is {self.tokens} tokens: its documents are repeated, in another order"
                )
            self.in_one_pass = self.in_one_pass or self.tokens

    def notes(self) -> list[str]:
        """Notes about the data that are stored with a result."""
        made = [self.account.note()] if self.account.useless else []
        if self.tokenizer is not None and self.tokenizer.eos_token_id is None:
            made.append("the tokenizer has no end-of-text token, so that no document is ended by one")
        if self.passes > 1:
            made.append(f"the corpus of {self.in_one_pass:,} tokens was read {self.passes} times")
        return made

    def _make(self, count: int | None) -> None:
        """Samples up to `count`; None: those of one pass."""
        if self.pace and count is not None and count > len(self._made):
            tell, before = self.pace((count - len(self._made)) * self.seq_len), self.tokens
            self._tell = lambda tokens: tell(tokens - before)
        while count is None or len(self._made) < count:
            sample = next(self._source, None)
            if sample is None:
                break
            self._made.append(sample)
        if not self._made:
            raise ValueError(
                f"the corpus has {self.tokens} tokens, but one sample needs seq_len={self.seq_len}: give more text, a "
                "shorter seq_len, or the number of samples (limit), for which documents are repeated"
            )

    def __len__(self) -> int:
        return self.limit or len(self._made)

    def lengthen(self, count: int) -> None:
        """Be at least `count` samples, where `limit` says how many: those that there are stay the same."""
        self.limit = max(len(self), count)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        self._make(index + 1)
        whole = _join(self._made[index])
        sample: dict[str, Any] = {n: torch.from_numpy(part).long() for n, part in zip(("input_ids", "labels"), whole)}
        if self.packed:
            sample["document_lengths"] = [len(piece.ids) for piece in self._made[index]]
        return sample


make_samples = Samples


def collate(samples: Sequence[Record]) -> dict[str, Any]:
    """Samples of any length as one batch: int64 input_ids and labels [B, S], padded on the right (labels -100).

    With padding there is an `attention_mask`; where the samples have them, `document_lengths` is a list for each
    sample.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch: dict[str, Any] = {}
    for name, fill in (("input_ids", 0), ("labels", IGNORE)):
        batch[name] = pad_sequence([torch.as_tensor(sample[name]) for sample in samples], True, fill)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    if not mask.all():
        batch["attention_mask"] = mask.long()
    if "document_lengths" in samples[0]:
        batch["document_lengths"] = [list(sample["document_lengths"]) for sample in samples]
    return batch
