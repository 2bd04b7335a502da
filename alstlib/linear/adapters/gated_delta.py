"""The gated delta rule (Qwen3-Next, arXiv 2412.06464), and Kimi delta attention (arXiv 2510.26692)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alstlib.base.recompute import sum_dtype
from alstlib.linear.adapter import Adapter, LayerPart, takes
from alstlib.linear.rule import StateRule


class GatedDeltaRule(StateRule):
    """A matrix M [K, K] for each head. Its kernel takes q, k, v, g and beta as `reference.gated_delta_rule` does."""

    matrix = True

    def pair(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """One pass makes both: each column of the state has its own values, and those of M are zeros."""
        q, k, v, *gates = tensors
        width, keys, wide = v.shape[3], k.shape[3], sum_dtype(v)
        start = torch.eye(width + keys, dtype=wide, device=v.device)[width:].expand(len(v), v.shape[2], -1, -1)
        both = self.kernel(q, k, F.pad(v, (0, keys)), *gates, initial_state=start)[1]
        return both[..., width:], both[..., :width]


class GatedDelta(Adapter):
    family = "gated delta rule"
    recurrence = "torch_chunk_gated_delta_rule"

    @staticmethod
    def mix(
        part: LayerPart, theirs: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        run = functools.partial(theirs, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

        def kernel(*tensors: Tensor, initial_state: Tensor | None) -> Any:
            return run(*tensors, initial_state=initial_state, output_final_state=True)

        def packed(*tensors: Tensor, offsets: Tensor) -> Tensor:
            return run(*tensors, cu_seqlens=offsets)[0]

        rule = GatedDeltaRule(kernel, packed=packed if takes(theirs, "cu_seqlens") else None)
        return part.mix(rule, (query, key, value, g, beta), (), key, value), None


class KimiDelta(Adapter):
    family = "Kimi delta attention"
    recurrence = "chunk_kimi_delta_attention"
    mix = GatedDelta.mix
