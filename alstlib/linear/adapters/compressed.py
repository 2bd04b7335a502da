"""Projections that mix a token with the few before it into queries, keys and values (Zaya's compressed convolutional
attention, arXiv 2510.04476): two convolutions, and values half of which are the previous token's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alstlib.linear.adapter import Adapter, LayerPart, plain_forward
from alstlib.linear.convolution import causal_convolution


class CompressedConvolution(Adapter):
    family = "compressed convolutional attention"

    @classmethod
    def knows(cls, mixer: Any, calls: set[str]) -> bool:
        """Without a bias: a projection of the zeros before a document is then zero, as the mixer's own padding is."""
        return hasattr(mixer, "conv_qk_grouped") and calls == {"repeat_kv"} and not mixer.config.attention_bias

    @classmethod
    def forward(cls, mixer: Any, part: Callable[[str], LayerPart]) -> Callable[..., Any]:
        own, convolution = plain_forward(mixer), part("convolution")

        def forward(hidden_states: Tensor, *_: Any) -> tuple[Tensor, ...]:
            shapes: list[torch.Size] = []

            def convolve(x: Tensor) -> Tensor:
                made = own(mixer, x.transpose(1, 2), None)
                shapes[:] = [t.shape[2:] for t in made]
                return torch.cat([t.flatten(2) for t in made], 2).transpose(1, 2)

            x, width = hidden_states.transpose(1, 2), max(1, mixer.conv_kernel_size) + 1  # the delayed value has one
            out = convolution.run((hidden_states,), functools.partial(causal_convolution, convolve, x, width))
            parts = out.transpose(1, 2).contiguous().split([shape.numel() for shape in shapes], 2)
            return tuple(t.unflatten(2, shape) for t, shape in zip(parts, shapes))

        return forward
