"""A training step on trajectories that share prefixes: each shared prefix is computed once, in the memory of one path.

The tree of the trajectories (`trie`) is walked depth first. When the walk enters a node, its tokens run block by block
without a graph, and leave keys and values in pages (`streaming.blocks`), or a state. Its children's blocks see the
pages of the whole path, and begin with the state that their parent hands on. When the children are done, they have
added what they contribute to the gradients of the node's pages and of its state: the node's blocks are recomputed and
back-propagated, from the last to the first, and its pages go. So pages of one path from the root to a leaf live at a
time, and attention, convolutions and recurrences of every kind are exact, because each block runs on just the tokens
before it.

To an engine each block is a micro-batch, as in `hf.block_step`. Engines that gather weights need all ranks to run
forward and backward in one order. So the replicas tell each other the order of their walks, and where a replica's walk
does not have what another's does next, it runs one token without a label.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from alstlib.base.options import Record
from alstlib.base.recompute import Replay
from alstlib.base.units import IGNORE
from alstlib.data.agreement import everyones
from alstlib.data.shard import checksum
from alstlib.hf.block_step import MicroSteps, check_block, check_objective, slopes_of, without_tokens
from alstlib.hf.causal_lm_loss import divisor_of
from alstlib.hf.handle import Handle
from alstlib.hf.inputs import STATE, agree, check_number, handle_of, read_call
from alstlib.hf.pass_state import Objective
from alstlib.hf.support import Facts
from alstlib.hf.token_logps import TokenLogps
from alstlib.streaming.blocks import Blocks
from alstlib.tiled.logits import Statistics
from alstlib.trees.trie import Node, Tree, trajectory_of, tree_of

FORWARD, BACKWARD = 1, 2


@dataclass(frozen=True)
class TreeStep:
    """What `tree_step` returns."""

    loss: Tensor
    """The loss over all replicas, for the log: the same on every rank, detached."""
    logps: list[Tensor]
    """For each trajectory of this replica, [n] the log-probability of the label that each token predicts, in nats; 0
    where there is none. Whole on every rank, detached."""
    tokens: int
    """The number of tokens of this replica's trajectories."""
    computed: int
    """The number of tokens that were computed for them, each counted once, padding included."""


@dataclass(frozen=True)
class OfStatistics:
    """An objective that gets a `TokenLogps` of tensors [n] for each trajectory, and not log-probabilities alone."""

    loss: Callable[[list[TokenLogps]], Tensor]

    def __call__(self, found: list[TokenLogps]) -> Tensor:
        return self.loss(found)


def tree_step(
    engine: Any, trajectories: Sequence[Record], block: int = 16_384, engine_divides_by: int | None = None,
    *, divisor: float | None = None, objective: Callable[[list[Any]], Tensor] | None = None,
    temperature: float = 1.0, last_micro_batch: bool | None = None,
) -> TreeStep:  # fmt: skip
    """Run forward and backward of trajectories that may share prefixes, each shared prefix once.

    The gradients are those of the trajectories one by one: of the sum over all trajectories of all replicas, and over
    their labels, of weight * -log-probability, divided by the `divisor`; or of an `objective`. Memory is that of one
    path from the root of the tree to a leaf: one block, and keys and values (on the host, if `Options` say so) of the
    path. Under `torch.no_grad()` only forward runs, for the log-probabilities. The caller runs the optimizer's step.

    Tokens of a prefix are shared up to a multiple of the ranks of the SP group. A block without labels is not seen by
    the head.

    Args:
        engine: the attached model: bare, in DDP or FSDP2, or in a DeepSpeed engine.
        trajectories: this replica's, the same on all ranks of its SP group; none is allowed where another replica has
            some. Each is a dict with input_ids [n]; labels [n], which are the input_ids if they are not given, and -100
            where a token is not predicted; and weights, a number or [n] of them, one for each label (an advantage, say;
            1 if they are not given).
        block: the number of this rank's tokens in one block.
        engine_divides_by: as `causal_lm_loss` takes it.
        divisor: None: the number of labels of all trajectories of all replicas.
        objective: a loss of your own in the place of this sum: it gets the log-probabilities of all trajectories, as
            `TreeStep.logps` has them, and gives a scalar, the same on all ranks of the SP group. After an engine has
            averaged over ranks, the gradients are those of its mean over replicas. A forward over the tree comes before
            it, so that the tree is computed forward once more.
        temperature: the number by which logits are divided.
        last_micro_batch: as `block_step` takes it.

    Raises:
        ValueError: as `block_step`; a trajectory lacks a field or has one that is not known; no replica has any; the
            model's rotary frequencies depend on the longest position; the config of a mixture of experts asks for its
            load-balancing loss.
    """
    handle, divides = handle_of(engine), divisor_of(engine, engine_divides_by)
    ctx, own = handle.ctx, objective is not None
    arguments = {
        "block": block, "engine_divides_by": divides, "divisor": divisor, "an objective": own,
        "temperature": temperature,
    }  # fmt: skip
    with agree(handle, "tree_step", arguments, None, always=True) as agreement:
        check_block(handle, block)
        check_objective(objective, temperature, divisor=divisor, engine_divides_by=engine_divides_by)
        check_number("engine_divides_by", divides, "a number of at least 1", 1)
        if divisor is not None:
            check_number("divisor", divisor, "a number above 0, such as that of all labels", 1e-30)
        _check_positions(handle.facts)
        mine = [trajectory_of(one) for one in trajectories]
        agreement.in_group = {"the trajectories": checksum(t for one in mine for t in one)}
        tree = tree_of(mine, ctx.sp)
        walk = _Walk(engine, handle, tree, block, temperature, isinstance(objective, OfStatistics))
        agreement.count = len(mine)
    if agreement.count == 0:
        raise ValueError("no replica has a trajectory: leave the step out")
    weights = tree.weights(mine).to(walk.slopes.device)
    if divisor is None:
        labels = everyones(ctx, [sum(int((p >= 0).sum()) for p in tree.places)], 1)
        divisor = max(1, sum(count for (count,) in labels[:: ctx.sp]))

    steps, train = MicroSteps(engine, last_micro_batch), torch.is_grad_enabled()
    loss: Tensor | None = None
    if train:
        steps.check_optimizer("tree_step")
    try:
        if own or not train:
            walk.run(None)
        if objective is not None:
            loss, slopes = slopes_of(functools.partial(walk.value, objective), walk.whole(walk.logps))
            walk.slopes, loss = slopes * ctx.sp, loss.double() / ctx.dp
        else:
            walk.slopes = (-weights * (ctx.world_size * divides / divisor)).to(walk.slopes)
        if train:
            walk.run(steps)
    finally:
        walk.close()
    logps = walk.whole(walk.logps)
    if loss is None:
        loss = -(weights * logps).sum() / divisor
    if ctx.dp > 1:
        loss = loss / ctx.sp  # all ranks of a group have the same
        dist.all_reduce(loss, group=ctx.world_group)
    tokens = sum(len(one.tokens) for one in mine)
    return TreeStep(loss, _of_each(tree, logps), tokens, sum(len(path[-1].tokens) for path in tree.paths()))


def _check_positions(facts: Facts) -> None:
    """Refuse a model whose layers need more of positions than a path of a tree has (ValueError)."""
    if facts.by_longest:
        raise ValueError(
            "the model's rotary frequencies depend on the longest position, which differs between trajectories "
            "that share a prefix: call block_step with one trajectory at a time"
        )
    if facts.attention_chunk is not None or facts.scales_by_position:
        raise ValueError(
            "the model has chunked attention, or queries that are scaled by position, which paths of a tree do not "
            "have: call block_step with one trajectory at a time"
        )


def _of_each(tree: Tree, values: Tensor) -> list[Tensor]:
    """For each trajectory, what its tokens have of the values of all labels of the tree; 0 for a token without one."""
    values = torch.cat([values, values.new_zeros(1)])  # the zero is that of -1
    return [values[places.to(values.device)] for places in tree.places]


class _Part(NamedTuple):
    """A block of a node."""

    node: Node
    at: int
    """Number of the block on its path."""
    starts: Sequence[int]
    """Places on the path at which the node's blocks begin, and its end."""
    number: int
    """Number of the block in the node."""
    seen: bool
    """Whether blocks follow it, in the node or its children."""


class Path(Blocks):
    """The pages and states of the path from the root to the node that the walk is at.

    Args:
        rows: this rank's, of the longest path.
        count: the number of blocks of the path that has most.
    """

    def __init__(self, layers: int, rows: int, count: int, ranks: int) -> None:
        super().__init__(layers, rows, rows, ranks)
        self.count, self.starts[:] = count, [0]

    def kept_tokens(self, window: int | None) -> int:
        rows = self.length * self.ranks
        return rows if window is None else min(rows, self.count * (window - 1))

    def enter(self, at: int, starts: Sequence[int]) -> None:
        """A node begins, as the `at`-th block of the path; what lies there of another path goes."""
        for first in self.starts[at + 1 :]:
            self.carried.drop(first)
        for pages in self.pages:
            del pages.held[at:]
        self.starts[at:] = starts


class _Walk:
    """The walks of one replica over its tree."""

    def __init__(
        self, engine: Any, handle: Handle, tree: Tree, block: int, temperature: float, statistics: bool
    ) -> None:  # fmt: skip
        self.engine, self.handle, self.tree = engine, handle, tree
        weight: Any = handle.model.get_input_embeddings().weight
        device, ctx, width = weight.device, handle.ctx, handle.model.config.get_text_config().hidden_size
        self.slopes = torch.zeros(tree.labels, device=device, dtype=torch.promote_types(weight.dtype, torch.float32))
        """What backward multiplies the log-probability of each label by."""
        self.logps = torch.zeros_like(self.slopes)
        """The log-probabilities of the labels that this rank's rows predict."""
        self.statistics = Statistics() if statistics else None
        self.found = self.logps.new_zeros(3, tree.labels)
        """Entropies, correctness and mean logits of these labels, where statistics are asked for."""
        self.parts: dict[int, list[_Part]] = {}
        rows = longest = most = 1
        for path in tree.paths():
            node, size = path[-1], block * ctx.sp
            before = sum(len(self.parts[id(one)]) for one in path[:-1])
            starts = [*range(node.begin, node.begin + len(node.tokens), size), node.begin + len(node.tokens)]
            last = len(starts) - 2
            self.parts[id(node)] = [
                _Part(node, before + i, starts, i, i < last or bool(node.children)) for i in range(last + 1)
            ]
            most, longest = max(most, before + last + 1), max(longest, starts[-1] // ctx.sp)
            rows = max(rows, min(block, len(node.tokens) // ctx.sp))
        self.path = Path(len(handle.facts.layers), longest, most, ctx.sp)
        self.first_input = torch.empty(1, dtype=weight.dtype, device=device).expand(1, rows, width)
        like = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.kwargs = {
            "input_ids": like, "position_ids": like + ctx.sp_rank, "shift_labels": torch.full_like(like, IGNORE)
        }  # fmt: skip
        asked = Objective(temperature=float(temperature), statistics=self.statistics)
        self.state = read_call(handle, self.kwargs, asked, 1)
        self.inputs = replace(self.state.inputs, documents=None, striped=True)
        self.idle = without_tokens(handle, {"input_ids": like})
        self.idle.replays[0] = Replay(device)
        self.replays: dict[tuple[int, int], Replay] = {}

    def order(self, train: bool) -> Iterator[tuple[int, _Part]]:
        """The blocks in the order of the walk. A leaf's last block, which nobody sees, runs with a graph at once."""
        left = [(root, False) for root in reversed(self.tree.roots)]
        while left:
            node, leaving = left.pop()
            parts = self.parts[id(node)]
            if leaving:
                yield from ((BACKWARD, part) for part in reversed(parts))
                continue
            yield from ((FORWARD, part) for part in parts if part.seen or not train)
            left += [(node, True)] if train else []
            left += [(child, False) for child in reversed(node.children)]

    def run(self, steps: MicroSteps | None) -> None:
        """One walk, together with those of the other replicas: with backward, whose gradients `steps` takes, or forward
        alone (None). Collective."""
        plan, own = self.handle.plan, list(self.order(steps is not None))
        merged = _merged(self.handle, [kind for kind, _ in own])
        own.reverse()
        plan.blockwise(self.first_input, self.path)
        with torch.set_grad_enabled(steps is not None):
            for number, (kind, takes_part) in enumerate(merged):
                part = own.pop()[1] if takes_part else None
                if kind == FORWARD:
                    with torch.no_grad():
                        self.forward(part)
                    if number == 0:
                        plan.handed_on(self.path)
                else:
                    assert steps is not None
                    plan.renew()
                    steps.backward_of(functools.partial(self.weighted, part), last=number == len(merged) - 1)
                    (self.idle.blocks if part is None else self.path).done()
        self.path.enter(0, [0])

    def forward(self, part: _Part | None) -> None:
        if part is None:
            self.idle.run(self.engine, 0, making=True)
            return
        self.replays[id(part.node), part.number] = Replay(self.slopes.device)
        logps, at = self.block(part, making=True)
        self.logps[at] = logps
        if (found := self.statistics) is not None:
            three = torch.stack([found.entropy, found.correct.to(found.entropy), found.mean])
            self.found[:, at] = three[:, 0, : len(logps)].to(self.found)

    def weighted(self, part: _Part | None) -> Tensor:
        """What backward of a block is called on."""
        if part is None:
            return self.idle.weighted(self.engine, 0)
        replay = self.replays.pop((id(part.node), part.number), None)
        with contextlib.nullcontext() if replay is None else replay():
            logps, at = self.block(part, making=False)
        self.logps[at] = logps.detach()
        return (logps * self.slopes[at]).sum()

    def block(self, part: _Part, making: bool) -> tuple[Tensor, slice]:
        """The log-probabilities of the labels of this rank's rows of a block, and which of the tree's labels these
        are."""
        path, node, ctx, device = self.path, part.node, self.handle.ctx, self.slopes.device
        if part.number == 0 and (making or not part.seen):
            path.enter(part.at, part.starts)
        path.begin(part.at, making, part.seen)
        rows = path.tokens.stop - path.tokens.start
        first = path.first - node.begin + ctx.sp_rank * rows
        begin, end = torch.searchsorted(node.rows, torch.tensor([first, first + rows])).tolist()
        # one row at least, so that the head is part of every rank's graph
        seen, labels = node.rows[begin:end] - first, node.labels[begin:end]
        if begin == end:
            seen, labels = torch.tensor([0]), torch.tensor([IGNORE])
        positions = torch.arange(first, first + rows).clamp(max=node.end - node.begin - 1) + node.begin
        given = [node.tokens[first : first + rows], positions + self.handle.facts.offset, labels]
        tokens, positions, labels = (t[None].to(device) for t in given)
        inputs = replace(self.inputs, shape=(1, rows), labels=labels, seen=seen.to(device))
        cut = {"input_ids": tokens, "position_ids": positions, STATE: replace(self.state, inputs=inputs, part=path)}
        logps = self.engine(**{**self.kwargs, **cut}).logits[0]
        return logps[: end - begin], slice(node.first + begin, node.first + end)

    def value(self, objective: Callable[[list[Any]], Tensor], values: Tensor) -> Tensor:
        """An objective of the log-probabilities of all labels of the tree."""
        logps = _of_each(self.tree, values)
        if self.statistics is None:
            return objective(logps)
        entropy, correct, mean = (_of_each(self.tree, found) for found in self.whole(self.found))
        return objective([TokenLogps(a, b, c.bool(), d) for a, b, c, d in zip(logps, entropy, correct, mean)])

    def whole(self, own: Tensor) -> Tensor:
        """What all ranks have of the tree's labels [..., labels], of what this rank has."""
        found = own.clone()
        if self.handle.ctx.sp > 1:
            dist.all_reduce(found, group=self.handle.ctx.sp_group)
        return found

    def close(self) -> None:
        self.path.close()
        self.idle.blocks.close()


def _merged(handle: Handle, own: Sequence[int]) -> list[tuple[int, bool]]:
    """One order for all replicas: forward or backward, and whether this replica's walk has it next. Collective."""
    ctx = handle.ctx
    (most,) = ctx.largest([len(own)])
    left = [[kind for kind in reversed(row) if kind] for row in everyones(ctx, list(own), most)[:: ctx.sp]]
    merged = []
    while any(left):
        following = [row[-1] if row else 0 for row in left]
        kind = FORWARD if FORWARD in following else BACKWARD
        merged.append((kind, following[ctx.dp_rank] == kind))
        for row, wanted in zip(left, following):
            if wanted == kind:
                row.pop()
    return merged
