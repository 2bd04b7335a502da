"""The predictions of an evaluation whose samples are divided among ranks: logits, or what a function makes of each tile
of them.

Shape legend: B samples of a micro-batch, S tokens of a sample, L tokens of one rank, t tokens of a tile, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from alstlib.base.mesh import SPContext
from alstlib.data.shard import Batch, slice_of
from alstlib.ulysses.alltoall import stripe, unstripe


class Shown:
    """What an evaluation keeps of the logits of a batch: all of them, or what a function makes of each tile.

    Args:
        labels: [B, S] of the whole batch, not shifted, as the function gets them beside the logits.
        batch: this rank's slice of it.
        function: (logits [B, t, V], labels [B, t]) -> a tensor, or several, with a result for each token.
    """

    def __init__(self, ctx: SPContext, chunk: int | None, labels: Tensor, batch: Batch, function: Any) -> None:
        self.ctx, self.chunk, self.function, self.length = ctx, chunk, function, labels.shape[1]
        tokens = batch["input_ids"]
        self.labels = slice_of(labels, ctx.sp, ctx.sp_rank).to(tokens.device)
        if chunk is not None and ctx.sp > 1 and tokens.shape[1] > chunk:  # the order in which layers have tokens
            (self.labels,) = stripe([self.labels], chunk, ctx)
        self.kept: list[Any] = []
        self.at = 0

    def __call__(self, logits: Tensor) -> None:
        rows = logits.shape[1]
        labels = self.labels[:, self.at : self.at + rows]
        kept = logits if self.function is None else self.function(logits, labels)
        if self.function is not None and not self.kept:
            self._check(kept, logits, labels)
        self.kept.append(kept)
        self.at += rows

    def _check(self, kept: Any, logits: Tensor, labels: Tensor) -> None:
        rows = logits.shape[1]
        half = (rows + 1) // 2
        again = self.function(logits[:, :half], labels[:, :half])
        for mine, other in zip(tree_leaves(kept), tree_leaves(again)):
            fits = isinstance(mine, Tensor) and mine.ndim > 1 and mine.shape[1] == rows
            if not (fits and torch.equal(mine[:, :half], other)):
                raise ValueError(
                    "preprocess_logits_for_metrics must work token by token, [B, t, V] -> [B, t, ...]: it gets the "
                    "logits in tiles; move what looks at several tokens into compute_metrics"
                )

    def whole(self) -> Any:
        """[B, S, ...] of the whole batch, on every rank of the group."""
        return tree_map(lambda *tiles: self._gather(torch.cat(tiles, 1)), *self.kept)

    def _gather(self, mine: Tensor) -> Tensor:
        if self.ctx.sp > 1:
            if self.chunk is not None:
                rows = mine.movedim(1, -1).contiguous()
                mine = unstripe(rows.flatten(0, -2), self.chunk, self.ctx).view(rows.shape).movedim(-1, 1)
            parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(self.ctx.sp)]
            dist.all_gather(parts, mine.contiguous(), group=self.ctx.sp_group)
            mine = torch.cat(parts, 1)
        return mine[:, : self.length]
