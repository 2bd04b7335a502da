"""Mamba-2 (arXiv 2405.21060): a number for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.linear.adapter import Adapter, LayerPart, in_order, takes
from alstlib.linear.rule import StateRule


class Mamba2(Adapter):
    family, recurrence = "Mamba-2", "mamba2_chunk_scan"

    @staticmethod
    def mix(
        part: LayerPart, theirs: Callable[..., Any], hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        chunk_size: int, D: Tensor, dt_bias: Tensor, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
    ) -> Tensor:  # fmt: skip
        def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, **how: Any) -> Any:
            return theirs(
                x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
                dt_limit=dt_limit, **how,
            )  # fmt: skip

        def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
            return run(*tensors, initial_states=initial_state, return_final_states=True)

        def packed(*tensors: Tensor, offsets: Tensor) -> Tensor:
            length = tensors[0].shape[1]
            document = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
            return run(*tensors, seq_idx=document.repeat_interleave(offsets.diff(), output_size=length)[None])

        def decay(*tensors: Tensor) -> Tensor:
            _, dt, _, _, A, _, dt_bias = tensors
            step = dt + dt_bias.to(dt.dtype)
            step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
            return (step.to(torch.promote_types(step.dtype, A.dtype)) * A).sum(1)[..., None, None]

        tokens, weights = (hidden_states, dt, B, C), in_order((A, D, dt_bias))
        rule = StateRule(kernel, decay, packed if takes(theirs, "seq_idx") else None)
        return part.mix(rule, tokens, weights, B, hidden_states, chunk_size)
