"""What an attached model does beside attention, MLPs and loss: numbering tokens, positions that depend on the whole
length, a router's loss, and generation."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from alstlib.calls import Call
from alstlib.routers import RouterLoss, find_routers

if TYPE_CHECKING:
    from alstlib.hf import Handle


def number_tokens(handle: Handle, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Positions count from 0; give the model those of its own counting (RoBERTa begins after its padding token).

    Raises:
        ValueError: a token that the model leaves out of its own counting, where it is not padding.
    """
    facts, positions, tokens = handle.facts, kwargs.get("position_ids"), args[0] if args else kwargs.get("input_ids")
    if positions is None:
        return
    if facts.uncounted is not None and tokens is not None:
        left_out = tokens == facts.uncounted
        if bool((left_out if call.real is None else left_out & call.real).any()):
            raise ValueError(
                f"input_ids hold the padding token {facts.uncounted} among the tokens of a sample, and "
                f"{type(handle.model).__name__} leaves it out of its positions; give an attention_mask for padding on "
                "the right, and another token elsewhere"
            )
    if facts.offset:
        kwargs["position_ids"] = positions + facts.offset


def attach_rotary(handle: Handle) -> None:
    """Frequencies that depend on the longest position (dynamic NTK, LongRoPE) must be the whole sequence's on every
    rank: the largest position of all of them is put beside a rank's own, and its row dropped."""
    if handle.ctx.sp == 1:
        return

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = args[1] if len(args) > 1 else kwargs["position_ids"]
        longest = at.max().reshape(1, 1)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=handle.ctx.sp_group)
        at = torch.cat([at, longest.expand(at.shape[0], 1)], 1)
        return ((args[0], at, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "position_ids": at})

    @torch.compiler.disable
    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return tuple(t[:, :-1] for t in out)

    for module in handle.model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if any(k == "longrope" or "dynamic" in k for k in kinds if isinstance(k, str)):
            handle.edits.hook(module, module.register_forward_pre_hook(before, with_kwargs=True))
            handle.edits.hook(module, module.register_forward_hook(after))


def attach_routers(handle: Handle) -> None:
    handle.routers = find_routers(handle.model)
    if getattr(handle.model.config.get_text_config(), "output_router_logits", False):
        _experts(handle, "config.output_router_logits")

    @torch.compiler.disable
    def see(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        call = handle._call
        if call is None or call.router is None:
            return None
        rows = None if call.piece is None else call.piece.rows
        return (out[0], call.router.see(out[0], out[1], rows), *out[2:])

    for router in handle.routers:
        handle.edits.hook(router, router.register_forward_hook(see))


def _experts(handle: Handle, name: str) -> int:
    """The number of experts of a model whose router's loss is known."""
    config = handle.model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not handle.routers or experts is None or not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"{name}=True: the router's loss of {type(handle.model).__name__} is not known here; use False"
        )
    return experts


def router_loss(handle: Handle, call: Call, kwargs: dict[str, Any]) -> RouterLoss | None:
    """The load-balancing loss of this call where it is asked for; transformers itself is told not to make it."""
    config = handle.model.config.get_text_config()
    asked = kwargs.get("output_router_logits")
    if not (getattr(config, "output_router_logits", False) if asked is None else asked):
        return None
    if not handle.routers and "output_router_logits" not in inspect.signature(handle.model.forward).parameters:
        return None  # a model without routers, that has no such loss
    experts = _experts(handle, "output_router_logits")
    if call.shift_labels is None:
        if handle.ctx.sp > 1:
            raise ValueError("output_router_logits=True needs shift_labels with sp > 1: its loss is that of all ranks")
        return None
    kwargs["output_router_logits"] = False
    weight = float(config.router_aux_loss_coef)
    return RouterLoss(experts, config.num_experts_per_tok, weight, handle.ctx.sp_group, call.real)


def attach_generation(handle: Handle) -> None:
    """`generate()` inside `apply`: the model's own attention, masks and cache, while tiles stay."""
    model: Any = handle.model
    original = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if handle._plain:
            return original(*args, **kwargs)
        if handle.ctx.sp > 1:
            raise ValueError("generate() needs the whole sequence on one rank: call it after detach(), or with sp=1")
        handle._plain = True
        try:
            return original(*args, **kwargs)
        finally:
            handle._plain = False

    handle.edits.set(model, "generate", generate)
