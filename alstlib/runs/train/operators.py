"""DeepSpeed's compiled operators, of which training needs none."""

from __future__ import annotations

import importlib
from typing import Any


def leave_out() -> None:
    """Keep DeepSpeed from compiling sums over shared memory, which its engines ask for on CPUs and which only inference
    calls. That takes a minute, and a build that is killed leaves a file for which all later ones wait."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute, the name is PyTorch itself
    backend.build_shm_op = lambda: None
