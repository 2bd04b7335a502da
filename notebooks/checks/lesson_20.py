"""Lesson 20: a loss whose words are divided among ranks, and the length from which Megatron sends more."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from . import Exercise, Largest

IGNORED = -100


def divided_loss(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(20)
    for words, tokens, large in (([8], 5, 1), ([6, 6], 9, 1), ([5, 1, 9], 7, 1), ([3, 4, 2, 8], 11, 300)):
        logits = large * torch.randn(tokens, sum(words), generator=generator, dtype=torch.float64)
        labels = torch.randint(0, sum(words), (tokens,), generator=generator)
        labels[::3] = IGNORED
        case = f"{len(words)} ranks with {words} words, labels {labels.tolist()}"
        case += ", large logits" if large > 1 else ""
        want = cross_entropy(logits, labels, ignore_index=IGNORED)
        parts = list(logits.split(words, 1))
        with Largest() as largest:
            got = function(parts, labels.clone())
        assert isinstance(got, torch.Tensor), f"{case}: a tensor is wanted, not {got!r}"
        assert got.numel() == 1, f"{case}: one number is wanted, not {got.numel()}"
        assert got.isfinite(), f"{case}: the loss is {got.item()}: do exponentials overflow?"
        error = abs(got.item() / want.item() - 1)
        assert error < 1e-10, f"{case}: the loss differs from cross_entropy of all words by {error:.1g}"
        assert largest.elements <= tokens * max(words), (
            f"{case}: there was a tensor of {largest.elements} numbers, more than the logits of any rank: "
            "do not put the parts together"
        )
    return "one rank to four, with different numbers of words, ignored labels and large logits"


def _of_its_own_words(parts: list[Any], labels: Any) -> Any:
    losses, first = [], 0
    for part in parts:
        here = (labels >= first) & (labels < first + part.shape[1])
        losses.append(cross_entropy(part[here], labels[here] - first, reduction="sum"))
        first += part.shape[1]
    return sum(losses) / (labels != IGNORED).sum()


def _put_together(parts: list[Any], labels: Any) -> Any:
    return cross_entropy(torch.cat(parts, 1), labels, ignore_index=IGNORED)


def _over_all_tokens(parts: list[Any], labels: Any) -> Any:
    return cross_entropy(torch.cat(parts, 1), labels, ignore_index=IGNORED, reduction="sum") / len(labels)


def _overflow(parts: list[Any], labels: Any) -> Any:
    logits, keep = torch.cat(parts, 1), labels != IGNORED
    own = logits[keep].gather(1, labels[keep][:, None])[:, 0]
    return (sum(p.exp().sum(-1) for p in parts).log()[keep] - own).mean()


def crossing(answer: Callable[[], Any]) -> str:
    from alstlib.planner.model_shapes import read_shape

    llama, p = read_shape("meta-llama/Llama-3.1-8B"), 8

    def sent(tokens: float) -> tuple[float, float]:
        rows = tokens / p
        exchanged = 2 * (2 * llama.heads + 2 * llama.kv_heads) * llama.head_dim * rows * (p - 1) / p
        return 10 * llama.width * rows * (p - 1), exchanged + 3 * llama.layer_parameters * (p - 1) / p

    tokens = answer()
    assert sent(0.99 * tokens)[0] < sent(0.99 * tokens)[1], f"below {tokens:,} tokens Megatron already sends more"
    assert sent(1.01 * tokens)[0] > sent(1.01 * tokens)[1], f"above {tokens:,} tokens Megatron still sends less"
    return f"about {round(tokens, -2):,} tokens"


EXERCISES = {
    1: Exercise(
        check=divided_loss,
        hints=(
            "The loss of a token is the logsumexp of all its logits, minus the logit of its label. Which of the two "
            "can a rank compute alone, and from what of each rank can the other be put together?",
            "The logsumexp over all words is the logsumexp of the ranks' logsumexps. Only one rank has the logit of "
            "the label; let every other rank contribute 0 to a sum.",
            "A rank whose words start at `first` has the label if first <= label < first + its number of words. "
            "Clamp the word number before `gather`, multiply by whether it is here, and leave out labels of -100.",
        ),
        mistakes=(_put_together, _of_its_own_words, _over_all_tokens, _overflow),
    ),
    2: Exercise(
        check=crossing,
        hints=(
            "Both are straight lines in the tokens: Megatron's starts at 0, and that of Ulysses at ZeRO-3's weights.",
            "Divide the bytes of the weights by the difference of the two bytes for each token.",
        ),
        mistakes=(lambda: 8_000, lambda: 32_000),
    ),
}
