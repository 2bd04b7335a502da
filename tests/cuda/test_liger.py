"""Liger's Triton kernels, run in Triton's interpreter on a CPU: inside our tiles and chunks they are exact."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat" / "liger"
"""Where `env/liger.sh` puts Liger and Triton, beside the environment."""
INSTALLED = (FOLDER / "triton").is_dir() or all(importlib.util.find_spec(n) for n in ("liger_kernel", "triton"))


@pytest.mark.skipif(not INSTALLED, reason="liger-kernel and triton are not installed: run env/liger.sh")
def test_ligers_kernels_are_exact_in_tiles_and_chunks():
    """One process, in which Triton interprets, for all cases."""
    folders = (ROOT, ROOT / "tests", ROOT / "papermill_runs/referee", FOLDER, os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).with_name("liger_interpreted.py"))]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
