"""Documents are tokenized, labelled and made into samples of one length: a sample is one long text, or packed
documents.

A sample is {"input_ids" [S], "labels" [S]} (int64) and, when packed, "document_lengths", a list that sums to S.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from alstlib.data.account import Account
from alstlib.data.formats import Messages, canonical_columns, format_of, read_row
from alstlib.units import IGNORE

logger = logging.getLogger(__name__)

_POOL = 32  # documents among which packing looks for one that fits


class Document(NamedTuple):
    """A tokenized document or a piece of one: int32 token ids and labels (-100 where there is no loss)."""

    ids: np.ndarray
    labels: np.ndarray

    def piece(self, start: int, stop: int | None = None) -> Document:
        return Document(self.ids[start:stop], self.labels[start:stop])


def _document(ids: Sequence[int], labels: Sequence[int]) -> Document:
    if len(ids) != len(labels):
        raise ValueError(f"labels has {len(labels)} values for {len(ids)} input_ids; they must be as many")
    return Document(_whole_numbers(ids), _whole_numbers(labels))


def _whole_numbers(values: Sequence[int]) -> np.ndarray:
    given = np.asarray(values)
    made = given.astype(np.int32) if given.dtype.kind in "iu" or not given.size else None
    if made is None or made.ndim != 1 or (made != given).any():
        raise ValueError("input_ids and labels must be lists of whole numbers of at most 32 bits")
    return made


def _chat(messages: Messages, tokenizer: Any, first: int = 0) -> Document:
    """A conversation through the tokenizer's template; labels on what the assistant says, from message `first` on.

    Where the template does not mark it ({% generation %}), and where only later messages count, it is found by
    rendering the conversation message by message, which is only right if each rendering begins with the one before it:
    anything else is refused.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError("the corpus holds chats, but the tokenizer has no chat template: name a chat model's")
    try:
        if not first and isinstance(template, str) and re.search(r"\{%-?\s*generation\s*-?%\}", template):
            out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = out["input_ids"], out["assistant_masks"]
        else:
            ids, mask = _by_rendering(messages, tokenizer, first)
    except ValueError:
        raise
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"the chat template fails on a conversation: {type(error).__name__}: {error}") from error
    return _document(ids, [token if said else IGNORE for token, said in zip(ids, mask)])


def _by_rendering(messages: Messages, tokenizer: Any, first: int) -> tuple[list[int], list[bool]]:
    def render(count: int, prompt: bool = False) -> str:
        if count == 0:
            return ""
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

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
    return _said(whole, spans, tokenizer, "a template without {% generation %} marks", special=False)


def _said(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Any, what: str, *, special: bool
) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and which of them begin in one of these spans of characters."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{what} needs a fast tokenizer, which tells offsets")
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    mask = [any(start <= left < stop for start, stop in spans) for left, _ in out["offset_mapping"]]
    return out["input_ids"], mask


def tokenize_row(row: Mapping[str, Any], tokenizer: Any) -> Document:
    """A row of the data set, with canonical columns, as a document; one without tokens where it has no text."""
    if format_of(row) == "input_ids":
        return _document(row["input_ids"], row["labels"] if row.get("labels") is not None else row["input_ids"])
    example = read_row(row, chats=bool(getattr(tokenizer, "chat_template", None)))
    if example.messages is not None:
        return _chat(example.messages, tokenizer, example.first) if example.messages else _document([], [])
    if not example.text:
        return _document([], [])
    if example.prompt:
        whole, start = example.prompt + example.text, len(example.prompt)
        ids, said = _said(whole, [(start, len(whole))], tokenizer, "a prompt with a completion", special=True)
    else:
        ids = tokenizer(example.text, verbose=False)["input_ids"]
        said = [True] * len(ids)
    if ids and tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids, said = [*ids, tokenizer.eos_token_id], [*said, True]
    return _document(ids, [token if one else IGNORE for token, one in zip(ids, said)])


def _join(pieces: Sequence[Document]) -> Document:
    return Document(np.concatenate([p.ids for p in pieces]), np.concatenate([p.labels for p in pieces]))


def _one_text(documents: Iterable[Document], seq_len: int) -> Iterator[list[Document]]:
    """Long documents alone, as many samples as they fill; the rest one after another as one text."""
    held: list[Document] = []
    for document in documents:
        whole = len(document.ids) // seq_len * seq_len
        for start in range(0, whole, seq_len):
            yield [document.piece(start, start + seq_len)]
        held.append(document.piece(whole))
        if sum(len(d.ids) for d in held) >= seq_len:
            joined = _join(held)
            yield [joined.piece(0, seq_len)]
            held = [joined.piece(seq_len)]


def _pack(documents: Iterable[Document], seq_len: int) -> Iterator[list[Document]]:
    """The oldest document and the longest others that still fit; the rest is filled with a piece of the oldest."""
    source, ended = iter(documents), False
    pool: list[Document] = []
    while True:
        while not ended:
            waiting = sum(len(d.ids) for d in pool)
            if waiting >= 2 * seq_len or (waiting >= seq_len and len(pool) >= _POOL):
                break
            document = next(source, None)
            ended = document is None
            if document is not None and len(document.ids):
                pool.append(document)
        if sum(len(d.ids) for d in pool) < seq_len:
            return
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
        yield sample


class Samples(Dataset):
    """A map-style dataset of samples, tokenized as far as they are asked for; made by `make_samples`."""

    def __init__(
        self, corpus: Any, tokenizer: Any, seq_len: int, *, packed: bool, seed: int, limit: int | None, repeat: bool,
        pace: Callable[[int], Callable[[int], None]] | None = None,
    ) -> None:  # fmt: skip
        self.pace = pace
        self._told: Callable[[int], None] | None = None
        self.corpus, self.tokenizer, self.seq_len = canonical_columns(corpus), tokenizer, seq_len
        self.packed, self.seed, self.limit, self.repeat = packed, seed, limit, repeat
        self.passes = 0
        """Number of passes over the corpus that were begun."""
        self.tokens = 0
        """Number of tokens that the first pass has read so far."""
        self.account = self._account()
        """Account of the rows that the first pass has read."""
        self._seen = 0  # tokens of all passes
        self._made: list[list[Document]] = []
        self._source: Iterator[list[Document]] | None = None
        if limit is not None and repeat:
            self._make(1)  # an unusable corpus is told at once
            self.length = limit
        else:
            self._make(limit)
            self.length = len(self._made)
        self._refuse_unlabelled()

    def __getstate__(self) -> dict[str, Any]:
        # a worker process makes the samples again, for a generator cannot be sent to it
        begun = {"passes": 0, "tokens": 0, "account": self._account(), "_made": []}
        return {**self.__dict__, **begun, **dict.fromkeys(("_source", "pace", "_told"))}

    def _account(self) -> Account:
        return Account(functools.partial(tokenize_row, tokenizer=self.tokenizer))

    def _rows(self, epoch: int) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
        """Rows in the order of a pass, with their numbers where they have some."""
        if not hasattr(self.corpus, "__len__"):
            for row in self.corpus.shuffle(seed=self.seed + epoch, buffer_size=256):
                yield None, row
            return
        for i in np.random.default_rng([self.seed, epoch]).permutation(len(self.corpus)).tolist():
            yield i, self.corpus[i]

    def _documents(self) -> Iterator[Document]:
        for epoch in itertools.count():
            self.passes = epoch + 1
            account = self.account if epoch == 0 else self._account()
            for number, row in self._rows(epoch):
                document = account(row, number)
                self.tokens += len(document.ids) if epoch == 0 else 0
                self._seen += len(document.ids)
                if self._told:
                    self._told(self._seen)
                yield document
            enough = self.limit is None and self.tokens >= self.seq_len
            if not self.repeat or self.tokens == 0 or enough:
                return
            if epoch == 0:
                logger.warning(
                    f"one pass over the corpus is {self.tokens} tokens: its documents are repeated, in another order"
                )

    def notes(self) -> list[str]:
        """What whoever reads a result must know of its data."""
        made = self.account.notes()
        if self.tokenizer is not None and self.tokenizer.eos_token_id is None:
            made.append("the tokenizer has no end-of-text token, so that no document is ended by one")
        if self.tokenizer is not None and self.tokenizer.pad_token_id is None:
            made.append("the tokenizer has no padding token, which generation in batches needs")
        if self.passes > 1:
            made.append(f"the corpus of {self.tokens:,} tokens was read {self.passes} times")
        return made

    def _refuse_unlabelled(self) -> None:
        """Make samples until one has a token with a loss: a corpus that has none trains nothing."""

        def trains(sample: list[Document]) -> bool:  # the first token is no other's next
            return any((d.labels[1:] != IGNORE).any() for d in (sample if self.packed else [_join(sample)]))

        while not any(map(trains, self._made)):
            if len(self._made) >= (self.limit or 0) or self.passes > 1:
                raise ValueError(
                    f"none of {self.tokens:,} tokens in {self.account.rows} rows has a loss: chats need a message of "
                    "the assistant, prompts a completion, and labels a value besides -100"
                )
            self._make(len(self._made) + 1)

    def _make(self, count: int | None) -> None:
        """Samples up to `count`; None: those of one pass (or one sample, repeating)."""
        wanted, before = (0 if count is None else count - len(self._made)) * self.seq_len, self._seen
        if self.pace and wanted > 0:
            tell = self.pace(wanted)
            self._told = lambda seen: tell(min(seen - before, wanted))
        if self._source is None:
            self._source = (_pack if self.packed else _one_text)(self._documents(), self.seq_len)
        while count is None or len(self._made) < count:
            sample = next(self._source, None)
            if sample is None:
                break
            self._made.append(sample)
            if count is None and self.passes > 1:
                break
        if not self._made:
            hint = "give more text, a shorter seq_len or repeat=True" if self.tokens else "it is empty"
            raise ValueError(
                f"the corpus has {self.tokens} tokens, but one sample needs seq_len={self.seq_len}: {hint}"
            )

    def __len__(self) -> int:
        return self.length

    def lengthen(self, count: int) -> None:
        """Be at least `count` samples, where `limit` says how many: those that there are stay the same."""
        if self.limit is not None and self.repeat:
            self.limit = self.length = max(self.length, count)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -self.length <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        index %= self.length
        self._make(index + 1)
        pieces = self._made[index]
        ids, labels = _join(pieces)
        sample: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "labels": torch.from_numpy(labels.astype(np.int64)),
        }
        if self.packed:
            sample["document_lengths"] = [len(p.ids) for p in pieces]
        return sample


def make_samples(
    corpus: Any, tokenizer: Any, seq_len: int, *, packed: bool = False, seed: int = 0, limit: int | None = None,
    repeat: bool = True, pace: Callable[[int], Callable[[int], None]] | None = None,
) -> Samples:  # fmt: skip
    """A map-style dataset of samples of exactly `seq_len` tokens. Its documents are shuffled by `seed`.

    Args:
        corpus: what `load_corpus` returns, or any dataset of `datasets` in a format that `alstlib.data.formats` lists.
        tokenizer: what `get_tokenizer` returns, or another tokenizer of transformers.
        seq_len: the number of tokens in each sample.
        packed: False: each sample is one text with positions 0 to S - 1: a part of a long document, or short documents
            one after another, each ended by the end-of-text token. True: each sample is packed with whole documents and
            has `document_lengths`; only the last document may be cut, and its rest begins the next sample.
        limit: the number of samples, which are tokenized when they are asked for; None: the samples of one pass over
            the corpus, which are tokenized at once.
        repeat: whether the corpus begins again, in another order and with a warning, when it is too short for `limit`
            samples (without `limit`: for one sample). False: there are only the samples of one pass.
        pace: a function that reports progress: it is called with the number of tokens to make, and returns a function
            that is called with the number of tokens made so far.

    Raises:
        ValueError: the corpus has fewer tokens than one sample needs, no usable column, or a chat that cannot be
            labelled.
    """
    for name, value in (("seq_len", seq_len), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if limit is None and not hasattr(corpus, "__len__"):
        raise ValueError("a streamed corpus has no known end: give limit, the number of samples")
    return Samples(corpus, tokenizer, seq_len, packed=packed, seed=seed, limit=limit, repeat=repeat, pace=pace)


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples of any length as one batch: int64 input_ids and labels [B, S], padded on the right (labels -100).

    With padding there is an `attention_mask`; where a sample has them, `document_lengths` is a list for each
    micro-batch row.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch: dict[str, Any] = {}
    for name, fill in (("input_ids", 0), ("labels", IGNORE), ("position_ids", 0)):
        rows = [torch.as_tensor(sample[name], dtype=torch.int64) for sample in samples if name in sample]
        if len(rows) not in (0, len(samples)):
            raise ValueError(f"{len(rows)} of {len(samples)} samples of a batch have '{name}': all or none must")
        if rows:
            batch[name] = torch.stack([torch.nn.functional.pad(r, (0, longest - len(r)), value=fill) for r in rows])
    lengths = [len(sample["input_ids"]) for sample in samples]
    if min(lengths) < longest:
        batch["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    if any("document_lengths" in sample for sample in samples):
        batch["document_lengths"] = [list(s.get("document_lengths", [n])) for s, n in zip(samples, lengths)]
    return batch
