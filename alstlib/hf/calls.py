"""One call of an attached model: it is read, checked, and agreed on by the ranks that compute it together, before any
of them computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from alstlib.data.agreement import Agreement
from alstlib.hf.handle import Handle
from alstlib.hf.inputs import number_tokens, take_call
from alstlib.hf.pass_state import PassState
from alstlib.hf.routers import router_loss
from alstlib.mesh import ATTACHED


def handle_of(model: Any) -> Handle:
    """The attachment of a model, or of the model inside a wrapper.

    Raises:
        ValueError: it is not attached. Hugging Face's models swallow fields that they do not know, so their loss would
            be another one.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    handle = next((m.__dict__[ATTACHED]() for m in modules if ATTACHED in m.__dict__), None)
    if handle is None:
        raise ValueError(f"{type(model).__name__} is not attached: attach the model with alstlib.apply first")
    return handle


def read_call(handle: Handle, args: tuple[Any, ...], kwargs: dict[str, Any], chunk: int | None) -> PassState:
    """What a call of the model asks for, checked on this rank; `kwargs` are left as the model's forward takes them.

    Raises:
        ValueError: inputs that cannot be run exactly, with what to give instead.
    """
    state = take_call(args, kwargs, handle.ctx, chunk)
    number_tokens(state.inputs.real, args, kwargs, handle.facts, type(handle.model).__name__)
    router = router_loss(handle, state.inputs.labels, kwargs)
    if router is not None and state.objective.temperature is not None:
        raise ValueError("log-probabilities have no load-balancing loss: use output_router_logits=False")
    return replace(state, objective=replace(state.objective, router=router))


class CallAgreement(Agreement):
    """The agreement on a call of an attached model.

    Args:
        batch: the fields of the call. Without cu_seqlens their values are looked at, which waits for the device.
        always: whether the ranks are asked also where that alone waits for the device.
        own_group: only the ranks of this rank's SP group make this call, and not all replicas.
    """

    def __init__(
        self, handle: Handle, call: str, arguments: Mapping[str, Any], batch: Any, *, always: bool = False,
        own_group: bool = False,
    ) -> None:  # fmt: skip
        self.handle = handle
        ctx = handle.ctx
        looks = isinstance(batch, Mapping) and batch.get("cu_seqlens") is None
        arguments = {**arguments, "torch.is_grad_enabled()": torch.is_grad_enabled()}
        super().__init__(ctx.own_group if own_group else ctx, call, arguments, always or looks)

    def read(self, kwargs: Mapping[str, Any], chunk: int | None) -> dict[str, Any]:
        """Check what the model will be called with. Returns it, with a mark that the ranks have agreed on it."""
        if self.silent:
            return dict(kwargs)
        self.note(read_call(self.handle, (), dict(kwargs), chunk))
        return {**kwargs, "agreed": True}

    def note(self, state: PassState) -> PassState:
        """A call that every rank of an SP group must have alike."""
        (batch, rows), documents = state.inputs.shape, state.inputs.documents
        self.in_group = {"the batch size": batch, "the tokens of a rank": rows, "the documents": documents}
        return state
