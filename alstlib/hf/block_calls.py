"""What an attached model needs in order to run by blocks, and the calls of the model that make up one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alstlib.hf.calls import read_call
from alstlib.hf.causal_lm_loss import fields_of
from alstlib.hf.handle import Handle
from alstlib.hf.inputs import deal_out
from alstlib.recompute import Replay
from alstlib.streaming.blocks import Blocks
from alstlib.tiled.logits import Statistics
from alstlib.units import IGNORE

STATE = "alst_state"
"""Keyword argument of a model's call that is a block: the pass that it is."""


def attach_blocks(handle: Handle) -> None:
    """Have memory planned when a micro-batch's first block comes to the first layer."""

    @torch.compiler.disable
    def first_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        blocks = None if handle.state is None else handle.state.blocks
        if blocks is not None and not blocks.pages:
            handle.plan.blockwise(args[0] if args else kwargs["hidden_states"], blocks)

    first = handle.facts.layers[0]
    handle.edits.hook(first, first.register_forward_pre_hook(first_layer, with_kwargs=True))


class MicroBatch:
    """The calls of an attached model that make up one micro-batch, block by block.

    Args:
        batch: what `causal_lm_loss` takes.
        block: tokens of this rank in a block.

    Raises:
        ValueError: inputs that cannot be run exactly, with what to give instead.
    """

    def __init__(self, handle: Handle, batch: Mapping[str, Any], block: int) -> None:
        ctx = handle.ctx
        kwargs: dict[str, Any] = {**fields_of(batch), "reduction": "sum", "agreed": True}
        state = read_call(handle, (), kwargs, block)
        inputs = state.inputs
        inputs = deal_out((), kwargs, inputs, block, ctx) if inputs.striped else replace(inputs, striped=True)
        tokens = kwargs["input_ids"]
        kwargs["position_ids"] = kwargs["position_ids"].expand_as(tokens)
        if handle.facts.by_longest:
            longest = kwargs["position_ids"].max().reshape(1, 1)
            if ctx.sp > 1:
                dist.all_reduce(longest, dist.ReduceOp.MAX, group=ctx.sp_group)
            inputs = replace(inputs, longest=longest)
        assert inputs.labels is not None  # `check_batch`
        self.handle, self.kwargs, self.labels, self.router = handle, kwargs, inputs.labels, state.objective.router
        self.blocks = Blocks(len(handle.facts.layers), tokens.shape[1], block, ctx.sp)
        self.state = replace(state, inputs=inputs, part=self.blocks)
        self.replays: dict[int, Replay] = {}

    def run(self, model: Any, index: int, making: bool, found: Statistics | None = None) -> Tensor:
        """The sum of a block's losses; with `making`, the forward that comes before all recomputes. `found` gets its
        statistics."""
        self.blocks.begin(index, making)
        rows, state = self.blocks.rows, self.state
        cut = {name: self.kwargs[name][:, rows].contiguous() for name in ("input_ids", "position_ids")}
        cut[STATE] = replace(
            state, inputs=replace(state.inputs, labels=self.labels[:, rows].contiguous()),
            objective=replace(state.objective, statistics=found, router=self.router),
        )  # fmt: skip
        if making:
            self.replays[index] = Replay(self.labels.device)
        with contextlib.nullcontext() if making else self.replays[index]():
            return model(**{**self.kwargs, **cut}).loss

    def close(self) -> None:
        """Let everything go that lies between a block and the others."""
        self.blocks.close()


def without_tokens(handle: Handle, batch: Mapping[str, Any]) -> MicroBatch:
    """A micro-batch of one token a rank, without a label: a rank that has fewer blocks than another runs it, because
    engines gather weights and reduce gradients on all ranks together."""
    like = batch["input_ids"][:1, :1]
    tokens = torch.full_like(like, int(handle.facts.uncounted == 0))
    positions = torch.full_like(like, handle.ctx.sp_rank)
    made = MicroBatch(
        handle, {"input_ids": tokens, "position_ids": positions, "shift_labels": torch.full_like(like, IGNORE)}, 1
    )  # fmt: skip
    made.router = None
    made.blocks.place()
    return made
