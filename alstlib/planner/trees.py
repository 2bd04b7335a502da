"""What a step on trajectories that share prefixes takes (`trees.tree_step`): the memory of one path, and the time of
the tokens and pairs that are computed. Without torch."""

from __future__ import annotations

from dataclasses import replace

from alstlib.base.units import parse_quantity
from alstlib.planner.prediction import Prediction
from alstlib.planner.question import CHUNK, Question
from alstlib.planner.step_time import step_seconds


def cost(question: Question, tree: str) -> tuple[Prediction, dict[str, int]]:
    """The memory of one path with the seconds of all nodes; and how many tokens are computed, how many pairs of a query
    and a key (in a layer without a window), and how many leaves there are.

    Args:
        question: a block has the run's number of tokens of each rank, or 16K.
        tree: its levels from the root on: 800K,8x200K is a prefix of 800K tokens before 8 branches of 200K each, and
            800K,8x200K,4x10K has 4 leaves of 10K at the end of each branch.

    Raises:
        ValueError: the tree has another form.
    """
    ranks, levels, leaves, end = question.ranks, list[tuple[int, int, int]](), 1, 0
    for part in tree.split(","):
        branches, own = (parse_quantity(n or 1, "tree") for n in part.rpartition("x")[::2])
        if branches < 1 or own < 1:
            raise ValueError(f"tree={tree!r}: {part!r} must have a branch and a token at least, such as 8x200K")
        leaves *= branches
        levels.append((leaves, end, end := end + own))
    longest = max(end - begin for _, begin, end in levels)
    size = ranks * min(question.run.block or CHUNK, -(-longest // ranks))
    run = question.run.replace(block=size // ranks)
    tokens = pairs = blocks = once = 0
    for count, begin, end in levels:
        full, rest = divmod(end - begin, size)
        tokens += count * (end - begin)
        pairs += count * (end**2 - begin**2) // 2
        blocks += count * (full + (rest > 0))
        once = count * (rest or size)  # a leaf's last block runs with a graph at once
    found = replace(question, run=run).at(end)
    one, pages = found.activations, found.activations.copied_pages
    of = replace(
        one, attention_share=2 * pairs / tokens**2, blocks=blocks, twice=1 - once / tokens,
        copied=(one.copied - pages) * tokens // end + pages * 2 * pairs // end**2,
    )  # fmt: skip
    seconds = step_seconds(question.shape, run, question.machine, ranks, tokens, of)
    return replace(found, activations=of, seconds=seconds), {"tokens": tokens, "pairs": pairs, "leaves": leaves}
