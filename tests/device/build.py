"""Builds `device.cpp` once for each version of it and of PyTorch, in PyTorch's cache of extensions."""

import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from filelock import FileLock
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")


def why_not():
    """Why the device cannot be built here; empty where it can."""
    if sys.platform != "linux":
        return "needs Linux"
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return f"needs a C++ compiler: there is no {cpp_extension.get_cxx_compiler()}"
    return "" if cpp_extension.is_ninja_available() else "needs ninja"


def load():
    """The extension, built where there is none yet; other processes wait for the one that builds."""
    text = SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()
    name = f"latecpu_{hashlib.sha256(text).hexdigest()[:12]}"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions")) / name
    ready = folder / "ready"  # a build that was killed may leave half a library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "builds"):
        if not ready.exists():
            _build(name, folder)
            ready.touch()
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(name, folder):
    (folder / "lock").unlink(missing_ok=True)  # PyTorch's own, which a build that was killed leaves
    with mock.patch.dict(os.environ, MAX_JOBS="1"):
        cpp_extension.load(name, [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O2", "-w"])
