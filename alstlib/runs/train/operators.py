"""DeepSpeed's compiled operators, of which training needs none."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def leave_out() -> None:
    """Keep DeepSpeed from compiling sums over shared memory, which its engines ask for on CPUs and which only inference
    calls. That takes a minute, and a build that is killed leaves a file for which all later ones wait.

    Its engines import Muon, too, whatever the optimizer is. Muon's functions stay as they are written: to mark them for
    PyTorch's compiler imports all of that, which costs every rank seconds.

    A CPU's nodes are asked for once. ZeRO-3 asks for each bucket of gradients, and starts a process each time (50 in
    five steps of four layers), after which Python prints every warning anew."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute, the name is PyTorch itself
    backend.build_shm_op = lambda: None
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    own, compiler.compile = compiler.compile, lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = own
    numa: Any = importlib.import_module("deepspeed.utils.numa")
    if not hasattr(numa.get_numa_cores, "cache_info"):
        numa.get_numa_cores = functools.cache(numa.get_numa_cores)
