"""What several operators take or give, in one word each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Documents = Sequence[int] | None
"""Offsets of the documents into the flattened [B * S] batch; None makes every sample one document."""
OutputAndLse = tuple[Tensor, Tensor]
"""What attention gives: its output, and the logsumexp of the scores [B, H, S] in fp32 or wider."""
OutputAndState = tuple[Tensor, Tensor]
"""What a layer with a state gives: its output, and the state after the last token."""
