"""Liger's Triton kernels, run in Triton's interpreter on a CPU: inside our tiles and chunks they are exact."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat" / "liger"
"""Where `env/liger.sh` puts Liger and Triton, beside the environment."""
INSTALLED = (FOLDER / "triton").is_dir() or all(importlib.util.find_spec(n) for n in ("liger_kernel", "triton"))

pytestmark = pytest.mark.skipif(not INSTALLED, reason="liger-kernel and triton are not installed: run env/liger.sh")


def test_ligers_kernels_are_exact_in_tiles_and_chunks():
    """One process, in which Triton interprets, for all cases."""
    path = os.pathsep.join(p for p in (str(ROOT), str(FOLDER), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).with_name("liger_interpreted.py"))]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for name, case in found.items():
        assert case["loss"] < 1e-6, name
        assert case["gradient"] < 5e-6, name
        rows = case["rows"]
        unit = "geglu" if name.startswith("gemma2") else "swiglu"
        assert max(*rows[f"{unit}_forward"], *rows[f"{unit}_backward"]) == 7, name  # the MLP's tile
        norm = 10 if name.endswith("chunks") else 9
        assert norm in rows["rms_norm_forward"], name
        assert norm in rows["rms_norm_backward"], name
