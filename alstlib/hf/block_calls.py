"""What an attached model needs in order to run by blocks, and the calls of the model that make up one micro-batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alstlib.hf.calls import read_call
from alstlib.hf.causal_lm_loss import fields_of
from alstlib.hf.dry_run import LayerCall
from alstlib.hf.handle import Handle, Keys
from alstlib.hf.inputs import deal_out
from alstlib.linear.adapters import is_tokenwise, mixers_of
from alstlib.recompute import Replay
from alstlib.streaming.blocks import Blocks
from alstlib.tiled.logits import Statistics
from alstlib.units import IGNORE


def attach_blocks(handle: Handle) -> None:
    """Note what `block_step` has to know of the layers, and why it cannot run the model, if it cannot."""
    facts = handle.facts
    handle.layer_of = {m: i for i, layer in enumerate(facts.layers) for m in layer.modules()}
    calls = {call.layer: call for call in facts.calls}
    attended = Counter(call.layer for call in facts.calls for _ in call.attention)
    for i, layer in enumerate(facts.layers):
        call = calls.get(layer)
        seen = call.attention if call is not None else []
        if not seen and (mixers_of(layer) or is_tokenwise(layer)):  # what it hands on does not grow with the sequence
            handle.keys.append(Keys(facts.heads, facts.kv_heads, 0, None))
            continue
        handle.keys.append(
            Keys(seen[0].heads, seen[0].kv_heads, seen[0].width + seen[0].value_width,
                 seen[0].kwargs.get("sliding_window"))
            if seen else Keys(facts.heads, facts.kv_heads, facts.kv_widths, None)
        )  # fmt: skip
        if call is not None and (why := _not_by_blocks(call, attended[layer])):
            handle.not_by_blocks = handle.not_by_blocks or f"layer {i} ({type(layer).__name__}) {why}"

    @torch.compiler.disable
    def first_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        blocks = None if handle.call is None else handle.call.blocks
        if blocks is not None and not blocks.planned:
            handle.plan_blocks(args[0] if args else kwargs["hidden_states"], blocks)

    first = facts.layers[0]
    handle.edits.hook(first, first.register_forward_pre_hook(first_layer, with_kwargs=True))


def _not_by_blocks(call: LayerCall, attended: int) -> str:
    """Why a layer cannot run on some of the rows, by how it was called in a dry run, and how often it attended."""
    if attended > 1:
        return "calls attention more than once"
    if call.reads:
        return "reads what other layers have left for it"
    return ""


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
        call = read_call(handle, (), kwargs, block)
        deal_out((), kwargs, call, block, ctx)
        call.striped = True
        tokens = kwargs["input_ids"]
        kwargs["position_ids"] = kwargs["position_ids"].expand_as(tokens)
        if handle.longest_matters:
            call.longest = kwargs["position_ids"].max().reshape(1, 1)
            if ctx.sp > 1:
                dist.all_reduce(call.longest, dist.ReduceOp.MAX, group=ctx.sp_group)
        self.handle, self.kwargs, self.call = handle, kwargs, call
        self.blocks = call.blocks = Blocks(len(handle.keys), tokens.shape[1], block, ctx.sp)
        self.replays: dict[int, Replay] = {}

    @property
    def labels(self) -> Tensor:
        assert self.call.shift_labels is not None
        return self.call.shift_labels

    def run(self, model: Any, index: int, making: bool, found: Statistics | None = None) -> Tensor:
        """The sum of a block's losses; with `making`, the forward that comes before all recomputes. `found` gets its
        statistics."""
        self.blocks.begin(index, making)
        handle, rows = self.handle, self.blocks.rows
        cut = {name: self.kwargs[name][:, rows].contiguous() for name in ("input_ids", "position_ids")}
        handle.next_call = replace(self.call, shift_labels=self.labels[:, rows].contiguous(), statistics=found)
        try:
            if making:
                self.replays[index] = Replay(self.labels.device)
            with contextlib.nullcontext() if making else self.replays[index]():
                return model(**{**self.kwargs, **cut}).loss
        finally:
            handle.next_call = None

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
    made.call.router, made.blocks.planned = None, True
    return made
