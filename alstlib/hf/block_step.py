"""A training step that runs the whole model on one block of tokens after another, so that only pages of keys and values
grow with the sequence.

The outer loop is over blocks, and the inner loop over layers (`streaming.blocks`). The step calls the model and
backward once for each block and is not one autograd function. To an engine each block is a micro-batch of its own, of
which only the last one ends the optimizer step, so that its hooks take every gradient once and add it to what is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from alstlib.base.recompute import Replay
from alstlib.base.units import IGNORE
from alstlib.hf.causal_lm_loss import (
    Loss,
    check_accumulation,
    check_batch,
    divisor_of,
    fields_of,
    loss_of,
    share_of,
)  # fmt: skip
from alstlib.hf.handle import Handle
from alstlib.hf.inputs import STATE, agree, handle_of, of_all_ranks, read_call
from alstlib.hf.pass_state import Objective, PassState
from alstlib.streaming.blocks import Blocks


def block_step(
    engine: Any, batch: Mapping[str, Any], block: int = 16_384, engine_divides_by: int | None = None, *,
    last_micro_batch: bool | None = None,
) -> Loss:  # fmt: skip
    """Run forward and backward of one micro-batch, one block of tokens through the whole model at a time.

    The gradients are those of `causal_lm_loss` followed by backward. They are added up in the precision in which the
    engine adds up gradients of micro-batches. The caller runs the optimizer's step. Hooks that the caller registered
    with `register_post_accumulate_grad_hook`, such as an optimizer that steps in backward, run once, in the last
    backward. Under `torch.no_grad()` only forward runs.

    Args:
        engine: the attached model: bare, in DDP or FSDP2, or in a DeepSpeed engine.
        batch, engine_divides_by: as `causal_lm_loss` takes them.
        block: the number of this rank's tokens in one block; the blocks of all ranks together are one piece of the
            sequence.
        last_micro_batch: whether the micro-batch ends the optimizer step, so that gradients are reduced over ranks.
            None: as the engine says (DeepSpeed counts micro-batches, DDP knows `no_sync()`), and True where no engine
            says it.

    Returns:
        What `causal_lm_loss` returns; its `loss` is detached, because backward has already run.

    Raises:
        ValueError: as `causal_lm_loss`; the model is attached with `chunk`, or one of its layers cannot run on a part
            of the sequence; `block` is less than 1.
        HostOutOfMemory: on every rank, before anything is computed, where the host has no room for keys and values.
    """
    handle, divides = handle_of(engine), divisor_of(engine, engine_divides_by)
    arguments = {"block": block, "engine_divides_by": divides}
    with agree(handle, "block_step", arguments, batch, always=True) as agreement:
        check_batch(batch, divides)
        check_accumulation(engine, batch, engine_divides_by)
        _check_block(handle, block)
        state = read_call(handle, given := fields_of(batch), Objective(reduction="sum"), block, agreement)
        if state.inputs.images:
            raise ValueError("block_step does not take images: use causal_lm_loss")
        agreement.count = -(-batch["input_ids"].shape[1] // block)
    count = agreement.count  # of the rank that has most
    steps, train = _Engine(engine, last_micro_batch), torch.is_grad_enabled()
    if count == 1:
        with steps.micro_step(ends=True):
            out = loss_of(engine, given, state, batch, handle.ctx, divides)
            if train:
                steps.backward(out.loss)
        return replace(out, loss=out.loss.detach())
    if train and any(hasattr(p, "_in_backward_optimizers") for p in engine.parameters()):
        raise ValueError(
            "torch.distributed.optim._apply_optimizer_in_backward would step once for each block: call the optimizer's "
            "step after block_step, or in hooks of register_post_accumulate_grad_hook, or use causal_lm_loss"
        )
    micro = MicroBatch(handle, given, state, block)
    order = [(micro, i) for i in range(micro.blocks.count)]
    order += [(without_tokens(handle, batch), 0) for _ in range(count - len(order))]
    try:
        with torch.no_grad():
            made = []
            for part, i in order:
                made.append(part.run(engine, i, making=True))
                if len(made) == 1 and not isinstance(made[0], FakeTensor):
                    handle.plan.handed_on(part.blocks)
            losses = torch.stack(made)
            total = losses.double().sum().to(losses.dtype)
            if micro.router is not None:
                total = micro.router.add_to(total, micro.labels.ne(IGNORE).sum())
        share = share_of(total, micro.labels, batch, handle.ctx, divides)
        for part, i in reversed(order) if train else ():
            handle.plan.renew()
            last = (part, i) == order[0]
            with steps.micro_step(ends=last), _hooks_wait(engine, wait=not last and not steps.deepspeed):
                steps.backward(part.run(engine, i, making=False) * share.factor)
            part.blocks.done()
    finally:
        for part, _ in order:
            part.close()
    return share.of((total * share.factor).detach())


def _check_block(handle: Handle, block: Any) -> None:
    if type(block) is not int or block < 1:
        raise ValueError(f"block={block!r} must be an integer of at least 1 token")
    if handle.chunk is not None:
        raise ValueError(
            f"the model is attached with chunk={handle.chunk}, which runs by layers, but block_step runs by blocks: "
            f"use Options(chunk=None) and block={handle.chunk}, or call causal_lm_loss"
        )
    if why := handle.facts.not_by_blocks:
        raise ValueError(f"{why}: the model cannot run by blocks; use causal_lm_loss, with more ranks or offload")


@contextlib.contextmanager
def _hooks_wait(model: nn.Module, wait: bool) -> Iterator[None]:
    """Inside, if asked to `wait`, no hook runs that takes a weight's whole gradient, such as an optimizer's step in
    backward: one block has a part of it. (DeepSpeed's own hooks add up the parts.)"""
    hooks = [found for p in model.parameters() if wait and (found := p._post_accumulate_grad_hooks)]
    kept = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    try:
        yield
    finally:
        for found, own in zip(hooks, kept):
            found.update(own)


class _Engine:
    """What takes gradients: told of each backward whether it ends an optimizer step.

    Args:
        last: whether the micro-batch ends an optimizer step; None: as the engine says.
    """

    def __init__(self, engine: Any, last: bool | None) -> None:
        self.engine, self.last = engine, last
        self.deepspeed = hasattr(engine, "set_gradient_accumulation_boundary")
        # without it, its step() ends what backward has added up
        self.counts = self.deepspeed and engine.managed_gradient_accumulation()
        if self.counts and last is None:
            self.last = engine.is_gradient_accumulation_boundary()

    @contextlib.contextmanager
    def micro_step(self, ends: bool) -> Iterator[None]:
        """A forward and its backward; `ends` says that it is the micro-batch's last."""
        engine, ends = self.engine, ends and self.last is not False
        if self.counts:
            before = engine._is_gradient_accumulation_boundary
            engine.set_gradient_accumulation_boundary(ends)
            try:
                yield
            finally:
                engine.set_gradient_accumulation_boundary(before)
        elif hasattr(engine, "set_requires_gradient_sync"):  # FSDP2
            self._fsdp2(ends)
            try:
                yield
            finally:
                self._fsdp2(True)
        else:
            with engine.no_sync() if not ends and hasattr(engine, "no_sync") else contextlib.nullcontext():
                yield

    def _fsdp2(self, ends: bool) -> None:
        self.engine.set_requires_gradient_sync(ends)
        self.engine.set_is_last_backward(ends)

    def backward(self, loss: Tensor) -> None:
        if self.deepspeed:
            self.engine.backward(loss)
        else:
            loss.backward()


class MicroBatch:
    """The calls of an attached model that make up one micro-batch, block by block.

    Args:
        kwargs: what the model's forward takes of the whole micro-batch.
        state: the pass over it, as `read_call` reads it.
        block: tokens of this rank in a block.
    """

    def __init__(self, handle: Handle, kwargs: dict[str, Any], state: PassState, block: int) -> None:
        inputs = replace(of_all_ranks(kwargs, state.inputs, block, handle.facts, handle.ctx), striped=True)
        tokens = kwargs["input_ids"]
        kwargs["position_ids"] = kwargs["position_ids"].expand_as(tokens)
        assert inputs.labels is not None  # `check_batch`
        self.kwargs, self.labels, self.router = kwargs, inputs.labels, state.router
        self.blocks = Blocks(len(handle.facts.layers), tokens.shape[1], block, handle.ctx.sp)
        self.state = replace(state, inputs=inputs, part=self.blocks)
        self.replays: dict[int, Replay] = {}

    def run(self, model: Any, index: int, making: bool) -> Tensor:
        """The sum of a block's losses; with `making`, the forward that comes before all recomputes."""
        self.blocks.begin(index, making)
        rows, inputs = self.blocks.rows, self.state.inputs
        cut = {name: self.kwargs[name][:, rows].contiguous() for name in ("input_ids", "position_ids")}
        cut[STATE] = replace(self.state, inputs=replace(inputs, labels=self.labels[:, rows].contiguous()))
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
    positions = torch.full_like(like, handle.ctx.sp_rank)
    kwargs = {"input_ids": like, "position_ids": positions, "shift_labels": torch.full_like(like, IGNORE)}
    state = read_call(handle, kwargs, Objective(reduction="sum"), 1)
    made = MicroBatch(handle, kwargs, replace(state, router=None), 1)
    made.blocks.place()
    return made
