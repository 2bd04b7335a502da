"""DeepSpeed's compiled operators are built once for each environment, under a lock that ends with its process.

PyTorch guards a build by a file that nobody owns: who finds one that a killed run left waits for ever. So a rank loads
what `deepspeed.initialize` would load before that does, from a folder of ours where it is built already, or builds it
there under a lock of ours. A build that is cut off leaves neither a process nor half an operator.
`python -m alstlib.train.operators` builds what is not there (`make setup` does).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alstlib.runs import locks
from alstlib.runs.processes import start
from alstlib.runs.torchrun import import_path

FOLDER_VARIABLE = "TORCH_EXTENSIONS_DIR"


def folder() -> Path:
    """Where operators are built: in this environment, or in the user's cache where it is not theirs to write and has
    none.

    `TORCH_EXTENSIONS_DIR` names another place.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    versions = f"py{sys.version_info[0]}{sys.version_info[1]}-torch{version('torch')}-deepspeed{version('deepspeed')}"
    own, made = Path(sys.prefix, "share"), Path("alst-operators", versions)
    home = own if os.access(sys.prefix, os.W_OK) or (own / made / "built").is_dir() else cache
    return Path(os.environ.get(FOLDER_VARIABLE) or home) / made


def load(told: Callable[[str], None] = lambda message: None) -> None:
    """Load what `deepspeed.initialize` takes on this device, built first where it is not; `told` hears what takes time.

    Raises:
        RuntimeError: it cannot be built; the message has the compiler's last lines.
    """
    if (builder := _builder()) is None or builder.NAME in builder._loaded_ops:
        return
    here = folder()
    try:
        here.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RuntimeError(
            f"DeepSpeed's operators cannot be built in {here} ({e.strerror}): {FOLDER_VARIABLE} names another folder"
        ) from e
    if not (built := here / "built").is_dir():
        with locks.hold(here, waiting=lambda who: told(f"waiting for {who}, which compiles DeepSpeed's operators")):
            if not built.is_dir():
                told("compiling DeepSpeed's operators, which takes a minute once")
                _build(here / f"build-{os.getpid()}", built)
    spec: Any = importlib.util.spec_from_file_location(builder.NAME, built / builder.NAME / f"{builder.NAME}.so")
    builder._loaded_ops[builder.NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _builder() -> Any:
    """DeepSpeed's builder of sums over shared memory, which its engines take between ranks on CPUs; None elsewhere."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    return builder if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False) else None


def _build(making: Path, built: Path) -> None:
    """In a process of its own, which ends with this one, and in a folder of its own, which then gets its name."""
    for left in making.parent.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)
    making.mkdir()
    log = making.parent / "build.log"
    env = {**os.environ, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH")), FOLDER_VARIABLE: str(making)}
    process = start([sys.executable, "-m", "alstlib.train.operators", "here"], env, log)
    try:
        if process.wait():
            raise RuntimeError(
                f"DeepSpeed's operators cannot be compiled (in {log}):\n{log.read_text(errors='replace')[-2000:]}"
            )
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    making.rename(built)


def _end_all(*_: Any) -> None:
    """Ends the compilers with this process: ninja ends what it started."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:  # in the folder that _build names
        signal.signal(signal.SIGTERM, _end_all)
        _builder().load()
    else:
        load(print)
