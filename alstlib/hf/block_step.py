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

from alstlib.hf.block_calls import MicroBatch, without_tokens
from alstlib.hf.calls import CallAgreement, handle_of
from alstlib.hf.causal_lm_loss import (
    Loss,
    check_accumulation,
    check_batch,
    check_first_backward,
    divisor_of,
    fields_of,
    loss_of,
    share_of,
)  # fmt: skip
from alstlib.hf.handle import Handle
from alstlib.tiled.logits import Statistics
from alstlib.units import IGNORE


def block_step(
    engine: Any, batch: Mapping[str, Any], block: int = 16_384, engine_divides_by: int | None = None, *,
    last_micro_batch: bool | None = None, statistics: bool = False,
) -> Loss:  # fmt: skip
    """Run forward and backward of one micro-batch, one block of tokens through the whole model at a time.

    The gradients are those of `causal_lm_loss` followed by backward. They are added up in the precision in which the
    engine adds up gradients of micro-batches. The caller runs the optimizer's step. Hooks that the caller registered
    with `register_post_accumulate_grad_hook`, such as an optimizer that steps in backward, run once, in the last
    backward. Under `torch.no_grad()` only forward runs.

    Args:
        engine: the attached model: bare, in DDP or FSDP2, or in a DeepSpeed engine.
        batch, engine_divides_by, statistics: as `causal_lm_loss` takes them.
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
    arguments = {"block": block, "engine_divides_by": divides, "statistics": statistics}
    with CallAgreement(handle, "block_step", arguments, batch, always=True) as agreement:
        check_batch(batch, divides)
        check_accumulation(engine, batch, engine_divides_by)
        _check_block(handle, block)
        fields = {**fields_of(batch), "reduction": "sum", "statistics": Statistics() if statistics else None}
        given = agreement.read(fields, block)
        agreement.count = -(-batch["input_ids"].shape[1] // block)
    count = agreement.count  # of the rank that has most
    steps, train = _Engine(engine, last_micro_batch), torch.is_grad_enabled()
    if count == 1:
        with steps.micro_step(ends=True):
            check_first_backward(engine)
            out = loss_of(engine, given, batch, handle.ctx, divides)
            if train:
                steps.backward(out.loss)
        return replace(out, loss=out.loss.detach())
    check_first_backward(engine, reduces=False)
    if train and any(hasattr(p, "_in_backward_optimizers") for p in engine.parameters()):
        raise ValueError(
            "torch.distributed.optim._apply_optimizer_in_backward would step once for each block: call the optimizer's "
            "step after block_step, or in hooks of register_post_accumulate_grad_hook, or use causal_lm_loss"
        )
    micro = MicroBatch(handle, batch, block)
    order = [(micro, i) for i in range(micro.blocks.count)]
    order += [(without_tokens(handle, batch), 0) for _ in range(count - len(order))]
    try:
        with torch.no_grad():
            found = [Statistics() if statistics else None for _ in order]
            made = []
            for (part, i), statistic in zip(order, found):
                made.append(part.run(engine, i, making=True, found=statistic))
                if len(made) == 1 and not isinstance(made[0], FakeTensor):
                    handle.plan.handed_on(part.blocks)
            losses = torch.stack(made)
            sums = torch.stack([f.sums() for f in found if f is not None]).sum(0) if statistics else None
            total = losses.double().sum().to(losses.dtype)
            if micro.router is not None:
                total = micro.router.add_to(total, micro.labels.ne(IGNORE).sum())
        share = share_of(total, micro.labels, batch, handle.ctx, divides, sums)
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
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block={block!r} must be an integer of at least 1 token")
    if handle.chunk is not None:
        raise ValueError(
            f"the model is attached with chunk={handle.chunk}, which runs by layers, but block_step runs "
            f"the whole model by blocks: use Options(chunk=None) and block={handle.chunk}, or call "
            "causal_lm_loss"
        )
    if handle.facts.not_by_blocks:
        raise ValueError(
            f"{handle.facts.not_by_blocks}: the model cannot run by blocks; use causal_lm_loss, with more ranks or "
            "offload"
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


class _Engine:
    """What takes gradients: told of each backward whether it ends an optimizer step.

    Args:
        last: does the micro-batch end an optimizer step? None: as the engine says.
    """

    def __init__(self, engine: Any, last: bool | None) -> None:
        self.engine, self.last = engine, last
        self.deepspeed = hasattr(engine, "set_gradient_accumulation_boundary")
        managed = getattr(engine, "managed_gradient_accumulation", lambda: True)
        self.counts = self.deepspeed and managed()  # else its step() ends what backward has added up
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
