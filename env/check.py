"""Does this environment match a lock? `python env/check.py env/cpu-py311.txt` exits 1 and says what differs if not."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path

IMPORTS = ("torch", "transformers", "datasets", "deepspeed", "papermill", "jupyterlab", "matplotlib", "trl", "peft",
           "alstlib")  # fmt: skip


def pins(lock: Path) -> dict[str, str]:
    """Name -> version of every `name==version` line."""
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def left_out() -> set[str]:
    """Packages that env/install.sh left to the torch of TORCH_INDEX_URL, which brings them for its own CUDA."""
    path = Path(sys.prefix) / ".left-out"
    return set(path.read_text().split()) if path.exists() else set()


def differences(lock: Path) -> list[str]:
    """One line for each package whose installed version is not the lock's (a build suffix such as `+cpu` is free)."""
    found, free = [], left_out()
    for name, wanted in pins(lock).items():
        if name in free:
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "nothing"
        if installed.split("+")[0] != wanted:
            found.append(f"{name}: {installed} is installed, {lock} says {wanted}")
    return found


def main(lock: str) -> int:
    wrong = differences(Path(lock))
    for name in () if wrong else IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:
            wrong.append(f"import {name} fails: {type(error).__name__}: {error}")
    print("\n".join(wrong) if wrong else f"all {len(pins(Path(lock)))} packages are at the versions of {lock}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
