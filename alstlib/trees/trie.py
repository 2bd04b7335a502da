"""Trajectories as a tree: each node holds tokens that all trajectories below it have at the same place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alstlib.base.units import IGNORE


class Trajectory(NamedTuple):
    """The tokens of one path, with the label that each token predicts, on the CPU."""

    tokens: Tensor
    """[n] int64."""
    labels: Tensor
    """[n] int64, shifted; -100 for none."""
    weights: Tensor
    """[n] fp64, the weight of each label."""


@dataclass
class Node:
    """Tokens that are computed once. Its labels are sorted by the row that predicts them; a row may have several."""

    begin: int
    """Place of its first token on the path from the root."""
    end: int
    """Place after its last token."""
    tokens: Tensor
    """[rows] its tokens, and after those of a leaf zeros, so that all ranks have equally many rows."""
    rows: Tensor
    """[m] the row of each label, counted from the node's first."""
    labels: Tensor
    """[m] the labels; equal ones of several trajectories in a row are one."""
    first: int
    """Number of its first label among those of the tree."""
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Tree:
    """The trajectories of one replica."""

    roots: list[Node]
    places: list[Tensor]
    """For each trajectory, [n] the number of each token's label among those of the tree; -1 for none."""
    labels: int
    """Number of labels of all nodes."""

    def weights(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """fp64, for each label of the tree the sum of its weights in the trajectories that have it."""
        sums = torch.zeros(self.labels, dtype=torch.float64)
        for one, places in zip(trajectories, self.places):
            sums.index_add_(0, places[places >= 0], one.weights[places >= 0])
        return sums

    def paths(self) -> Iterator[list[Node]]:
        """The path from the root to each node."""
        left = [[root] for root in reversed(self.roots)]
        while left:
            path = left.pop()
            yield path
            left += [[*path, child] for child in reversed(path[-1].children)]


def trajectory_of(sample: Any) -> Trajectory:
    """A trajectory, of a mapping with input_ids and, if given, labels and weights, as `tree_step` takes it.

    Raises:
        ValueError: a field is missing, is not known, or has another length.
    """
    fields = ("input_ids", "labels", "weights")
    if not isinstance(sample, Mapping) or "input_ids" not in sample or not {*sample} <= {*fields}:
        known = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"a trajectory is a dict with input_ids, and may have labels and weights; this one has: {known}"
        )
    tokens = torch.as_tensor(sample["input_ids"])
    labels = tokens if sample.get("labels") is None else torch.as_tensor(sample["labels"])
    weights = torch.as_tensor(1.0 if sample.get("weights") is None else sample["weights"], dtype=torch.float64)
    if tokens.ndim != 1 or not len(tokens) or labels.shape != tokens.shape or weights.shape not in ((), tokens.shape):
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(fields, (tokens, labels, weights)))
        raise ValueError(f"a trajectory needs input_ids [n], labels [n], and weights [n] or one number; got {shapes}")
    for name, ids in (("input_ids", tokens), ("labels", labels.masked_fill(labels == IGNORE, 0))):
        if ids.is_floating_point() or bool((ids < 0).any()):
            raise ValueError(
                f"{name} of a trajectory must be whole numbers from 0 on; labels may be {IGNORE}, for none"
            )
    # a token predicts the label at the next place, whose weight is there too
    shifted = nn.functional.pad(labels[1:].to("cpu", torch.int64), (0, 1), value=IGNORE)
    of_tokens = weights.cpu().expand(len(tokens))
    return Trajectory(tokens.to("cpu", torch.int64), shifted, nn.functional.pad(of_tokens[1:], (0, 1)))


def tree_of(trajectories: Sequence[Trajectory], multiple: int = 1) -> Tree:
    """The tree of what trajectories share from their beginning on, token by token.

    Args:
        multiple: nodes but leaves have a multiple of this many tokens, so that each of as many ranks has an equal part.
            Of a shared prefix, the last (up to multiple - 1) tokens may therefore be computed once for each child.
    """
    places = [torch.full(t.tokens.shape, -1) for t in trajectories]
    width = 1 + max((int(t.labels.max().clamp(min=0)) for t in trajectories), default=0)
    roots: list[Node] = []
    count = 0
    left: list[tuple[list[Node], int, Sequence[int]]] = [(roots, 0, range(len(trajectories)))]
    while left:
        siblings, begin, members = left.pop()
        for group in _by_next(trajectories, members, begin, multiple):
            longest = trajectories[max(group, key=lambda i: len(trajectories[i].tokens))]
            end = begin + _shared([trajectories[i].tokens[begin:] for i in group], longest.tokens[begin:], multiple)
            keys, counted = [], []
            for i in group:
                labels = trajectories[i].labels[begin:end]
                counted.append((labels != IGNORE).nonzero()[:, 0])
                keys.append(counted[-1] * width + labels[counted[-1]])
            found, each = torch.cat(keys).unique(return_inverse=True)
            for i, rows, numbers in zip(group, counted, each.split([len(rows) for rows in counted])):
                places[i][begin + rows] = count + numbers
            tokens = nn.functional.pad(longest.tokens[begin:end], (0, -(end - begin) % multiple))
            node = Node(begin, end, tokens, found // width, found % width, count)
            siblings.append(node)
            count += len(found)
            left.append((node.children, end, group))
    return Tree(roots, places, count)


def _by_next(
    trajectories: Sequence[Trajectory], members: Sequence[int], begin: int, multiple: int
) -> Iterator[Sequence[int]]:
    """Those that go on at `begin`, in groups that have the next tokens in common."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in members:
        if following := tuple(trajectories[i].tokens[begin : begin + multiple].tolist()):
            groups.setdefault(following, []).append(i)
    yield from groups.values()


def _shared(rests: Sequence[Tensor], longest: Tensor, multiple: int) -> int:
    """The number of tokens up to where the first of the trajectories differs from the longest; one that ends before
    does not differ."""
    shared = len(longest)
    for rest in rests:
        n = min(len(rest), shared)
        different = (rest[:n] != longest[:n]).nonzero()
        if len(different):
            shared = int(different[0])
            shared -= shared % multiple
    return shared
