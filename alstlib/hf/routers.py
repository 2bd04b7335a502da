"""The routers of a mixture of experts in an attached model, and the load-balancing loss of one call (`router_loss`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from alstlib.hf.handle import Handle
from alstlib.hf.router_loss import RouterLoss


def attach_routers(handle: Handle) -> None:
    if getattr(handle.model.config.get_text_config(), "output_router_logits", False):
        _experts(handle, "config.output_router_logits")

    @torch.compiler.disable
    def see(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        state = handle.state
        if state is None or state.objective.router is None:
            return None
        if isinstance(out, Tensor):  # a projection alone, as Jamba's is before transformers 5.21
            return state.objective.router.see(out, out, state.real_rows)
        return (out[0], state.objective.router.see(out[0], out[1], state.real_rows), *out[2:])

    for router in handle.facts.routers:
        handle.edits.hook(router, router.register_forward_hook(see))


def _experts(handle: Handle, name: str) -> int:
    """The number of experts of a model whose router's loss is known."""
    config = handle.model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not handle.facts.routers or experts is None or not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"{name}=True: the router's loss of {type(handle.model).__name__} is not known here; use False, which is "
            "router_aux_loss_coef=0.0 for TRL"
        )
    return experts


def router_loss(handle: Handle, labels: Tensor | None, kwargs: dict[str, Any]) -> RouterLoss | None:
    """The load-balancing loss of this call where it is asked for; transformers itself is told not to make it."""
    config = handle.model.config.get_text_config()
    asked = kwargs.get("output_router_logits")
    if not (getattr(config, "output_router_logits", False) if asked is None else asked):
        return None
    if not handle.facts.routers and "output_router_logits" not in inspect.signature(handle.model.forward).parameters:
        return None  # a model without routers, that has no such loss
    experts = _experts(handle, "output_router_logits")
    if labels is None:
        if handle.ctx.sp > 1:
            raise ValueError("output_router_logits=True needs shift_labels with sp > 1: its loss is that of all ranks")
        return None
    kwargs["output_router_logits"] = False
    weight = float(config.router_aux_loss_coef)
    return RouterLoss(experts, config.num_experts_per_tok, weight, handle.ctx.sp_group)


def refuse_lost_gradients(handle: Handle, out: Any) -> Any:
    """The output of a call without labels, where transformers itself makes the load-balancing loss: where tiles and
    recomputes kept no graph of the routers' logits, a backward through them is refused instead of leaving them out."""
    logits = getattr(out, "router_logits", None)
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in handle.model.parameters())
    if not trains or not logits or all(t.requires_grad for t in logits):
        return out
    anchor = torch.zeros((), requires_grad=True)
    loss = getattr(out, "aux_loss", None)
    more = {} if loss is None else {"aux_loss": _Refused.apply(loss, anchor)}
    return type(out)(**{**out, **more, "router_logits": tuple(_Refused.apply(t, anchor) for t in logits)})


class _Refused(torch.autograd.Function):
    """The identity on values whose gradient cannot be had."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ValueError(
            "aux_loss and router_logits have no gradient here: tiles, checkpoints and chunks keep no graph of them. "
            "Give the model labels, with which the load-balancing loss is part of its loss, or use "
            "Options(checkpoint=False) without 'mlp' in its tiles and without a chunk"
        )
