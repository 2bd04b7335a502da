"""Which GPUs this machine has, found without torch and without using a device."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it fails or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return ""


@functools.cache
def _installed_gpus() -> int:
    if not shutil.which("nvidia-smi"):  # a container may have GPUs without it
        return sum(os.access(node, os.R_OK | os.W_OK) for node in Path("/dev").glob("nvidia[0-9]*"))
    return sum(line.startswith("GPU ") for line in _nvidia_smi("-L").splitlines())


@functools.cache
def torch_version() -> str:
    """The version of torch that is installed; empty without one. It is read from a long file, and each step of a search
    asks for it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return ""


def device_count() -> int:
    """CUDA devices that ranks could use on this machine."""
    if "+cpu" in torch_version():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    found = _installed_gpus()
    if visible is None or not found:
        return found
    names = [name.strip() for name in visible.split(",")]
    return names.index("-1") if "-1" in names else len(names)


def first_gpu() -> tuple[str, int | None]:
    """Name of the first GPU and its bytes."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    first = first if first.isdigit() else "0"
    out = _nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "-i", first)
    name, _, mebibytes = out.partition("\n")[0].rpartition(",")
    return (name.strip(), int(mebibytes) * 2**20) if mebibytes.strip().isdigit() else ("", None)


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with the settings of PyTorch's allocators."""
EXACT = "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
"""Settings (of torch since 2.13) by which pinned memory of more than 1 MiB has the size that was asked for, and not the
next power of two. Both, because the allocator takes all blocks that it keeps for ones that it has rounded."""


def pins_exactly() -> bool:
    """Whether the ranks' pinned memory is not rounded: torch knows the settings, and no others were given."""
    given = [os.environ[name] for name in ALLOCATOR if name in os.environ]
    if not (version := torch_version()):
        return True
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13) and all(EXACT in settings for settings in given)
