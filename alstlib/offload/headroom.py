"""Measure in the first steps how much device memory is left for attention outputs."""

from __future__ import annotations

import math

import torch

from alstlib.base.mesh import accelerator

SHARE = 0.9
"""Share of the free memory that is counted on: allocators leave gaps."""


def device_memory(device: torch.device) -> tuple[int, int, int] | None:
    """Bytes (allocated now, at the highest so far, free for this process) of a device; None where nobody counts."""
    if (here := accelerator(device)) is None:
        return None
    allocated = here.memory_allocated(device)
    free = here.mem_get_info(device)[0] + here.memory_reserved(device) - allocated
    return allocated, here.max_memory_allocated(device), free


class Headroom:
    """Device memory left over in a training step, measured: the planner does not see engines of others.

    `begin` is called with each forward's tokens, `look` in each backward, when the first layer is recomputed: what is
    alive at a step's highest point has been alive by then. The first step keeps nothing, and later ones what the first
    had no use for; a longer sample is taken to need more in proportion. Forwards that follow each other without a
    backward are one. Whoever resets PyTorch's peak between two steps changes nothing; one that was reached earlier
    counts as needed.
    """

    def __init__(self) -> None:
        self._need, self._at = 0, 0  # bytes over those at the forward's start, and the tokens of that step
        self._begun, self._tokens, self._kept = 0, 0, 0
        self._looked = True

    def begin(self, tokens: int, memory: tuple[int, int, int]) -> int:
        """A forward of so many tokens starts. Returns the bytes that may be kept."""
        if self._looked:
            self._begun, self._tokens, self._kept, self._looked = memory[0], tokens, 0, False
        self._begun, self._tokens = min(self._begun, memory[0]), max(self._tokens, tokens)
        return max(0, math.floor(SHARE * memory[2]) - self._needed(tokens)) if self._at else 0

    def keep(self, nbytes: int) -> None:
        """So many bytes of what `begin` allowed are kept."""
        self._kept += nbytes

    def look(self, device: torch.device) -> None:
        """The backward of the forward that began last has come to the first layer."""
        if not self._tokens or (memory := device_memory(device)) is None:
            return
        self._looked = True
        need = memory[1] - self._begun - self._kept
        if not self._at or need > self._needed(self._tokens):
            self._need, self._at = need, self._tokens

    def _needed(self, tokens: int) -> int:
        return math.ceil(self._need * max(1.0, tokens / self._at))
