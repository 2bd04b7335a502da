"""What runs now of an attached model: `PassState`, in one context variable (`recompute.now`).

The model's call begins one, with what it was given (`StepInputs`) and what is computed of it (`Objective`). Each layer
goes on with a copy that says which pass it is in and which tokens it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alstlib.base.options import Record
from alstlib.base.recompute import Pass, Saved, now
from alstlib.hf.router_loss import RouterLoss
from alstlib.kernels.spans import Offsets
from alstlib.streaming.blocks import Blocks
from alstlib.streaming.chunked import LayerChunk
from alstlib.tiled.logits import Statistics
from alstlib.tiled.loss import Look


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What one call of the model is given, and is not among the arguments of its forward. B: samples of the
    micro-batch; L: tokens of this rank's slice of each."""

    shape: tuple[int, int]
    """Micro-batch and tokens of this rank's slice: [B, L]."""
    device: torch.device
    """Where the tokens are."""
    documents: Offsets | None = None
    """Global offsets of the packed documents; None: each sample is one document."""
    labels: Tensor | None = None
    """[B, L] the label of each token, shifted; None: the call returns logits."""
    divisor: Any = None
    """What the sum of the losses is divided by; None: the number of the group's tokens with a label."""
    sample_length: Any = None
    """Tokens of a whole sample, before it was padded for the ranks; None: not told."""
    chunks: Offsets | None = None
    """Global offsets of the chunks of documents, for layers with chunked attention (`Facts.attention_chunk`)."""
    positions: Tensor | None = None
    """[B, L] positions of this rank's tokens, where the model asks for them (`Facts.scales_by_position`)."""
    sample_tokens: Sequence[int] | None = None
    """Tokens of each sample that are not padding; None: not told."""
    longest: Tensor | None = None
    """[1, 1] the largest position of the whole sequence, where the model asks for it (`Facts.by_longest`)."""
    real: Tensor | None = None
    """[B, L] which tokens are not padding; None: all."""
    images: Record = field(default_factory=dict)
    """What the call is given of images, by the names of `data.images.DEALT`; empty: nothing."""
    seen: Tensor | None = None
    """[n] the tokens of a block that the head sees, one for each of n labels; None: each token once."""
    striped: bool = False
    """Whether tokens are dealt out in stripes. Then logits are not in the order of the tokens."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What one call of the model computes of its logits: a loss, or log-probabilities of the labels."""

    reduction: str | None = None
    """`sum`: the loss is the sum over this rank's tokens; None: a mean over those of its SP group."""
    temperature: float | None = None
    """The temperature of the log-probabilities, where these are asked for; None: the loss."""
    dft: bool = False
    """Whether each token's loss is multiplied by its probability."""
    label_smoothing: float = 0.0
    """The share of each label that goes to all tokens alike, as in PyTorch's cross_entropy."""
    statistics: Statistics | None = None
    """Where the head notes what it finds of each token, if that is asked for."""
    look: Look | None = None
    """An evaluation's function that gets the logits [B, t, V] tile by tile, in the order in which layers had them."""
    router_tokens: float | None = None
    """The number of tokens that the load-balancing loss weighs as much as; None: those of the group with a label."""

    @property
    def by_token(self) -> float | None:
        """The temperature of the log-probabilities that the head computes; None: it computes the sum of losses."""
        return 1.0 if self.dft else self.temperature


@dataclass(frozen=True, kw_only=True)
class PassState(Pass):
    """A pass over the model, or over one of its layers."""

    inputs: StepInputs
    objective: Objective = field(default_factory=Objective)
    router: RouterLoss | None = None
    """The load-balancing loss, if it is asked for."""
    travels: bool = False
    """Whether hidden states lie on the host, from where chunks of them visit the device."""
    part: LayerChunk | Blocks | None = None
    """The chunk of a layer, or the block of the model, whose tokens run; None: all tokens of the slice."""
    saved: Saved | None = None
    """What a checkpointed layer keeps for its recompute; None: nothing is kept."""
    outer: Pass | None = None
    """What ran when the model was called, and runs on after it."""

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of a micro-batch that runs block by block."""
        return self.part if isinstance(self.part, Blocks) else None

    @property
    def real_tokens(self) -> Tensor | None:
        """[B, s] which of the tokens that run are not padding; None: all."""
        real = self.inputs.real
        return real if real is None or self.part is None else real[:, self.part.tokens]


def state_now() -> PassState | None:
    """The pass of an attached model that runs now; None outside of its calls and recomputes."""
    state = now()
    return state if isinstance(state, PassState) else None
