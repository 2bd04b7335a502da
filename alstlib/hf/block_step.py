"""A training step that runs the whole model on one block of tokens after another, so that only pages of keys and values
grow with the sequence.

The outer loop is over blocks, and the inner loop over layers (`streaming.blocks`). The step calls the model and
backward once for each block and is not one autograd function. To an engine each block is a micro-batch of its own, of
which only the last one ends the optimizer step, so that its hooks take every gradient once and add it to what is there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from alstlib.base.options import Record
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
from alstlib.hf.inputs import STATE, agree, check_number, handle_of, of_all_ranks, read_call
from alstlib.hf.pass_state import Objective, PassState
from alstlib.hf.vision import no_images
from alstlib.streaming.blocks import Blocks
from alstlib.ulysses.alltoall import stripe, unstripe


def block_step(
    engine: Any, batch: Record, block: int = 16_384, engine_divides_by: int | None = None, *,
    last_micro_batch: bool | None = None, objective: Callable[[Tensor], Tensor] | None = None, temperature: float = 1.0,
) -> Loss:  # fmt: skip
    """Run forward and backward of one micro-batch, one block of tokens through the whole model at a time.

    The gradients are those of `causal_lm_loss` followed by backward, or those of an `objective` of the `token_logps` of
    the micro-batch. They are added up in the precision in which the
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
        objective: a loss of your own: it gets the log-probabilities [B, L] of this rank's slice, as `token_logps`
            returns them, and gives the scalar that backward would be called on; `token_logps` says how to scale it.
            It is called once a micro-batch, on all ranks, when the log-probabilities of all blocks are known. Its
            gradients for them then go back through the model block by block, so that a loss of whole sequences
            (`sequence_logps`) is exact too.
        temperature: of the log-probabilities that the `objective` gets, as `token_logps` takes it.

    Returns:
        What `causal_lm_loss` returns; its `loss` is detached, because backward has already run. With an `objective`,
        `loss` is its value, and `mean` is the mean of -log-probability over the labels.

    Raises:
        ValueError: as `causal_lm_loss`; the model is attached with `chunk`, or one of its layers cannot run on a part
            of the sequence; `block` is less than 1.
        HostOutOfMemory: on every rank, before anything is computed, where the host has no room for keys and values.
    """
    handle, divides = handle_of(engine), divisor_of(engine, engine_divides_by)
    own = objective is not None
    arguments = {"block": block, "engine_divides_by": divides, "an objective": own, "temperature": temperature}
    with agree(handle, "block_step", arguments, batch, always=True) as agreement:
        check_batch(batch, divides)
        check_accumulation(engine, batch, engine_divides_by)
        check_block(handle, block)
        check_planned(batch)
        check_objective(objective, temperature, engine_divides_by=engine_divides_by)
        if not own and temperature != 1.0:
            raise ValueError(f"temperature={temperature} is of an objective: give that too, or leave temperature out")
        asked = Objective(temperature=float(temperature)) if own else Objective(reduction="sum")
        state = read_call(handle, given := fields_of(batch), asked, block, agreement)
        agreement.count = -(-batch["input_ids"].shape[1] // block)
    count = agreement.count  # of the rank that has most
    steps, train = MicroSteps(engine, last_micro_batch), torch.is_grad_enabled()
    if count == 1:
        with steps.micro_step(ends=True):
            out = _whole(engine, given, state, batch, handle, divides, objective)
            if train:
                steps.backward(out.loss)
        return replace(out, loss=out.loss.detach())
    if train:
        steps.check_optimizer("block_step")
    micro = MicroBatch(handle, given, state, block)
    with micro.order(batch, count) as order:
        with torch.no_grad():
            made = run_forward(engine, order)
            total = torch.stack([one.double().sum() for one in made]).sum().to(made[0].dtype)
            if state.router is not None:
                total = state.router.add_to(total, micro.labels.ne(IGNORE).sum())
        factor, means = share_of(-total if own else total, micro.labels, batch, handle.ctx, divides)
        if objective is None:
            loss, micro.slopes = total * factor, factor
        else:
            loss, slopes = slopes_of(objective, micro.in_order(made))
            (micro.slopes,) = stripe([slopes], block, handle.ctx)
        for part, i in reversed(order) if train else ():
            handle.plan.renew()
            steps.backward_of(functools.partial(part.weighted, engine, i), last=(part, i) == order[0])
            part.blocks.done()
    return Loss(loss.detach(), **means)


def _whole(
    engine: Any, given: Record, state: PassState, batch: Record, handle: Handle, divides: int,
    objective: Callable[[Tensor], Tensor] | None,
) -> Loss:  # fmt: skip
    """The loss of a micro-batch that is one block."""
    if objective is None:
        return loss_of(engine, given, state, batch, handle.ctx, divides)
    logps = engine(**given, **{STATE: state}).logits
    _, means = share_of(-logps.detach().sum(), batch["shift_labels"], batch, handle.ctx, divides)
    return Loss(value_of(objective, logps), **means)


def run_forward(engine: Any, order: Sequence[tuple[MicroBatch, int]]) -> list[Tensor]:
    """The forward without a graph of the blocks of a micro-batch, in this order; the results of its own blocks."""
    made = []
    for part, i in order:
        made.append(part.run(engine, i, making=True))
        if len(made) == 1 and not isinstance(made[0], FakeTensor):
            part.handle.plan.handed_on(part.blocks)
    return made[: order[0][0].blocks.count]


def value_of(objective: Callable[..., Any], *logps: Any) -> Tensor:
    """A loss of a user's own, checked (ValueError)."""
    loss = objective(*logps)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"the objective must return a tensor of one number, the loss; it returned {found}")
    return loss.reshape(())


def slopes_of(objective: Callable[[Tensor], Any], logps: Tensor) -> tuple[Tensor, Tensor]:
    """The value of an objective for log-probabilities, and its gradient for them, of their shape; under
    `torch.no_grad()` zeros."""
    leaf, slopes = logps.detach().requires_grad_(torch.is_grad_enabled()), None
    loss = value_of(objective, leaf)
    if loss.requires_grad:
        (slopes,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return loss.detach(), torch.zeros_like(logps) if slopes is None else slopes


def check_objective(objective: Any, temperature: Any, **divisors: Any) -> None:
    """Refuse what is no loss of a user's own, a temperature for it that is not above 0, and numbers that divide another
    loss (ValueError)."""
    check_temperature(temperature)
    given = any(divisor is not None for divisor in divisors.values())
    if objective is not None and (given or not callable(objective)):
        raise ValueError(
            f"objective={objective!r} must be a function of log-probabilities, which divides by itself: leave "
            f"{' and '.join(divisors)} out"
        )


def check_temperature(temperature: Any) -> None:
    check_number("temperature", temperature, "a number above 0; 1.0 leaves the logits as they are", 1e-30)


def check_block(handle: Handle, block: Any) -> None:
    if type(block) is not int or block < 1:
        raise ValueError(f"block={block!r} must be an integer of at least 1 token")
    if handle.chunk is not None:
        raise ValueError(
            f"the model is attached with chunk={handle.chunk}, which runs by layers, but block_step runs by blocks: "
            f"use Options(chunk=None) and block={handle.chunk}, or call causal_lm_loss"
        )
    if handle.options.disk is not None:
        raise ValueError(
            "disk takes checkpoints, which are read once: the keys and values of all layers that block_step keeps are "
            "read once for each block; use disk=None, or chunk='auto' and causal_lm_loss"
        )
    if why := handle.facts.not_by_blocks:
        raise ValueError(f"{why}: the model cannot run by blocks; use causal_lm_loss, with more ranks or offload")


def check_planned(batch: Record) -> None:
    """Refuse images of which it is not known where their tokens are (ValueError)."""
    if batch.get("pixel_values") is not None and "image_plan" not in batch:
        raise ValueError(
            "pixel_values without a plan cannot be cut into blocks: give a batch of SPDataLoader or shard_batch with "
            "images=handle.images"
        )


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


class MicroSteps:
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
        with contextlib.ExitStack() as after:
            if self.counts:
                told = engine.set_gradient_accumulation_boundary
                after.callback(told, engine._is_gradient_accumulation_boundary)
                told(ends)
            elif hasattr(engine, "set_requires_gradient_sync"):  # FSDP2
                for told in (engine.set_requires_gradient_sync, engine.set_is_last_backward):
                    after.callback(told, True)
                    told(ends)
            elif not ends and hasattr(engine, "no_sync"):
                after.enter_context(engine.no_sync())
            yield

    def backward(self, loss: Tensor) -> None:
        if self.deepspeed:
            self.engine.backward(loss)
        else:
            loss.backward()

    def backward_of(self, forward: Callable[[], Tensor], last: bool) -> None:
        """Forward and backward of a block, of which all but the last one leave a part of each gradient."""
        with self.micro_step(ends=last), _hooks_wait(self.engine, wait=not last and not self.deepspeed):
            self.backward(forward())

    def check_optimizer(self, call: str) -> None:
        """Refuse an optimizer that would step in each of several backwards (ValueError)."""
        if any(hasattr(p, "_in_backward_optimizers") for p in self.engine.parameters()):
            raise ValueError(
                "torch.distributed.optim._apply_optimizer_in_backward would step once for each block: call the "
                f"optimizer's step after {call}, or in hooks of register_post_accumulate_grad_hook, or use "
                "causal_lm_loss"
            )


class MicroBatch:
    """The calls of an attached model that make up one micro-batch, block by block.

    Args:
        kwargs: what the model's forward takes of the whole micro-batch.
        state: the pass over it, as `read_call` reads it.
        block: tokens of this rank in a block.
    """

    def __init__(self, handle: Handle, kwargs: dict[str, Any], state: PassState, block: int) -> None:
        inputs = replace(of_all_ranks(handle, kwargs, state.inputs, block), striped=True)
        tokens = kwargs["input_ids"]
        kwargs["position_ids"] = kwargs["position_ids"].expand_as(tokens)
        assert inputs.labels is not None  # `check_batch`
        self.handle, self.kwargs, self.labels = handle, kwargs, inputs.labels
        self.blocks = Blocks(len(handle.facts.layers), tokens.shape[1], block, handle.ctx.sp)
        self.state = replace(state, inputs=inputs, part=self.blocks)
        self.replays: dict[int, Replay] = {}
        self.slopes: Any = 1.0
        """What backward multiplies the losses by; of log-probabilities [B, L], one number for each."""

    @contextlib.contextmanager
    def order(self, batch: Record, count: int) -> Iterator[list[tuple[MicroBatch, int]]]:
        """Its blocks, and as many without tokens after them that they are `count`; their pages go in the end."""
        order = [(self, i) for i in range(self.blocks.count)]
        order += [(without_tokens(self.handle, batch), 0) for _ in range(count - len(order))]
        try:
            yield order
        finally:
            for part, _ in order:
                part.blocks.close()

    def run(self, model: Any, index: int, making: bool) -> Tensor:
        """The sum of a block's losses, or its log-probabilities [B, C], and with statistics [4, B, C] (`TokenLogps`);
        with `making`, the forward that comes before all recomputes."""
        self.blocks.begin(index, making)
        tokens, inputs = self.blocks.tokens, self.state.inputs
        cut = {name: self.kwargs[name][:, tokens].contiguous() for name in ("input_ids", "position_ids")}
        cut[STATE] = replace(self.state, inputs=replace(inputs, labels=self.labels[:, tokens].contiguous()))
        if making:
            self.replays[index] = Replay(self.labels.device)
        with contextlib.nullcontext() if making else self.replays[index]():
            out, asked = model(**{**self.kwargs, **cut}), self.state.objective
        if asked.temperature is None:
            return out.loss
        if (found := asked.statistics) is None:
            return out.logits
        return torch.stack([out.logits, found.entropy, found.correct.to(found.entropy), found.mean])

    def weighted(self, model: Any, index: int) -> Tensor:
        """What backward of a block is called on."""
        made = self.run(model, index, making=False)
        return (made * (self.slopes[:, self.blocks.tokens] if made.ndim else self.slopes)).sum()

    def in_order(self, made: Sequence[Tensor]) -> Tensor:
        """What `run` made of all blocks [.., B, L], in the order of the tokens of this rank's slice."""
        whole = torch.cat([*made], -1)
        return unstripe(whole.flatten(0, -2), self.blocks.block, self.handle.ctx).view(whole.shape)


def without_tokens(handle: Handle, batch: Record) -> MicroBatch:
    """A micro-batch of one token a rank, without a label: a rank that has fewer blocks than another runs it, because
    engines gather weights and reduce gradients on all ranks together."""
    like = batch["input_ids"][:1, :1]
    positions = torch.full_like(like, handle.ctx.sp_rank)
    kwargs = {"input_ids": like, "position_ids": positions, "shift_labels": torch.full_like(like, IGNORE)}
    kwargs |= no_images(handle, positions) if "image_plan" in batch else {}
    state = read_call(handle, kwargs, Objective(reduction="sum"), 1)
    made = MicroBatch(handle, kwargs, replace(state, router=None), 1)
    made.blocks.place()
    return made
