"""Texts whose questions need the length, and the worker that trains on them (`papermill_runs/specs/needle.yaml`).

A text is hay, random words, with pairs of a number and a name in it, such as `41 bodu`. A question, `? bodu`, is
answered by the number of that name. No name has two numbers in one text, and numbers are drawn anew for each text: the
answer stands nowhere but in front of the name. Only answers have labels.

In a text `to_learn` questions and pairs take turns, so that an early question has few names to tell apart. In a text to
`retrieve` from, all pairs come first and all questions last, so that the distances between them are spread evenly over
the length.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import alstlib
from alstlib.base.mesh import from_all
from alstlib.base.units import IGNORE
from alstlib.runs.corpus.reading import EOS
from alstlib.runs.train.ablation import AblationRun
from alstlib.runs.train.worker import run_worker

HAY = re.findall(
    r"\w+",
    """the of and to in that it was for on are with as they be at one have this from or had by hot but some what there
    we can out other were all your when up use word how said an each she which do their time if will way about many then
    them would write like so these her long make thing""",
)
NAMES = ["".join(letters) for letters in itertools.product("bdklmnrt", "aiou", "bgkz", "aiou")]
NUMBERS = [str(number) for number in range(64)]
WORDS = [EOS, "?", *HAY, *NAMES, *NUMBERS]
"""The vocabulary: each word is a token."""
HAY_AT, NAMES_AT, NUMBERS_AT = (WORDS.index(words[0]) for words in (HAY, NAMES, NUMBERS))
CHANCE = 1 / len(NUMBERS)
PAIRS = 256
"""The most pairs in a text, and the most questions."""
SHORT = 64, 128, 256, 512, 1024, 2048
"""Lengths of the texts to learn from. Half of the tokens are in the shortest, where few names are to be told apart."""
TEXTS = 8
"""Texts of an evaluation: 2,048 questions at 32K."""
EIGHTHS = 8


def text(length: int, rng: np.random.Generator, learn: bool = False) -> dict[str, np.ndarray]:
    """A text of `length` tokens, at least 64, to learn from or to retrieve from.

    Returns: `input_ids` and `labels` [length], int64; `answers`, the places of the answers in the text, and
        `distances`, the tokens from each question's name back to the same name in front of it.
    """
    count = min(length // (8 if learn else 16), PAIRS)
    if learn:
        room = length // count  # of a pair and a question
        pairs = np.arange(count) * room
        questions, room = pairs + room // 2, room // 2
        asked = rng.integers(np.arange(1, count + 1))  # a pair that the reader has met
    else:
        begin = length - 4 * count
        room = begin // count
        pairs, questions = np.arange(count) * room, begin + 4 * np.arange(count)
        asked = rng.permutation(count)
    ids = HAY_AT + rng.integers(len(HAY), size=length)
    names = NAMES_AT + rng.choice(len(NAMES), count, replace=False)
    numbers = NUMBERS_AT + rng.integers(len(NUMBERS), size=count)
    at = pairs + rng.integers(room - 1, size=count)
    ids[at], ids[at + 1] = numbers, names
    ids[questions], ids[questions + 1], ids[questions + 2] = WORDS.index("?"), names[asked], numbers[asked]
    labels = np.full(length, IGNORE)
    labels[questions + 2] = numbers[asked]
    return {
        "input_ids": ids, "labels": labels, "answers": questions + 2, "distances": questions - at[asked],
    }  # fmt: skip


def get_tokenizer() -> Any:
    """The tokenizer of these texts. `PreTrainedTokenizerFast` loads it from the base's folder; `AutoTokenizer` takes
    Qwen2's own class for that model, which reads no such vocabulary."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=EOS))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS, pad_token=EOS)


class NeedleRun(AblationRun):
    """One rank of a training on such texts: documents to learn from where the run packs documents, else texts of
    `data.seq_len` tokens to retrieve from. The result has `needle`: what the model answers before and after."""

    def read_corpus(self) -> Any:
        run = self.run
        rng = np.random.default_rng([run.optim.seed, run.data.seq_len])
        tokens = run.optim.steps * run.optim.accumulation * run.data.batch_size * run.data.seq_len
        tokens *= run.engine.world_size // run.engine.sp
        lengths = [run.data.seq_len] * (tokens // run.data.seq_len)
        if run.data.packed:
            shares = [1 / 2, *(1 / 2 / len(SHORT[1:]) for _ in SHORT[1:])]
            lengths = [length for length, share in zip(SHORT, shares) for _ in range(int(tokens * share / length) + 1)]
        made = (text(length, rng, run.data.packed) for length in lengths)
        rows = [{name: one[name].tolist() for name in ("input_ids", "labels")} for one in made]
        return datasets.Dataset.from_list(rows)

    def _tokenizer(self) -> Any:
        return get_tokenizer()

    def __call__(self) -> dict[str, Any]:
        before = self.answers()
        metrics = super().__call__()
        return {**metrics, "needle": {"chance": CHANCE, "before": before, "after": self.answers()}}

    def answers(self) -> list[dict[str, Any]]:
        """What the model answers in texts of 2K tokens, and in texts as long as its `max_position_embeddings`: other
        texts for another seed, and none that it is trained on."""
        longest = self.handle.model.config.max_position_embeddings
        return [self._answers(length) for length in sorted({SHORT[-1], longest})]

    @torch.no_grad()
    def _answers(self, length: int) -> dict[str, Any]:
        self.say(f"answering questions in texts of {length:,} tokens")
        rng, ctx, seen = np.random.default_rng([self.run.optim.seed, length, 1]), self.ctx, np.zeros((EIGHTHS, 2), int)
        for _ in range(TEXTS):
            one = text(length, rng)
            row = {name: torch.from_numpy(one[name])[None] for name in ("input_ids", "labels")}
            batch = alstlib.shard_batch(row, ctx.sp, ctx.sp_rank)
            found = self._said(batch)
            asks = batch["shift_labels"] != IGNORE
            right = dict(zip(batch["position_ids"][asks].tolist(), (found == batch["shift_labels"])[asks].tolist()))
            for answer, distance in zip(one["answers"].tolist(), one["distances"].tolist()):
                if answer - 1 in right:  # the token before says it, in this rank's slice or another's
                    seen[EIGHTHS * distance // length] += 1, right[answer - 1]
        asked, right_ones = np.sum(from_all(seen.tolist()), 0).T
        return {
            "length": length, "asked": asked.tolist(), "right": right_ones.tolist(),
            "accuracy": right_ones.sum() / asked.sum(),
        }  # fmt: skip

    def _said(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The most likely next token after each of this rank's [1, L]."""
        tiles: list[torch.Tensor] = []
        alstlib.causal_lm_loss(self.handle.model, batch, look=lambda logits: tiles.append(logits.argmax(-1)))
        return torch.cat(tiles, 1)


def main() -> None:
    run_worker(__doc__, NeedleRun)


if __name__ == "__main__":
    main()
