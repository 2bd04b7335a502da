"""Copies of the notebooks to read, run and change, in the folder work/ that git ignores: `make lab` opens these.

Running a lesson changes its file, and a `git pull` refuses to overwrite changed files. So the notebooks that git knows
stay as they are. A copy in which no cell was edited is replaced when its lesson changes; beside one that was edited,
the newer lesson is put as new_NAME.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent
WORK = NOTEBOOKS.parent / "work"
HELPERS = ("*.md", "*.py", "checks/*.py", "images/*")
"""What lessons read and link to: always replaced."""
NOT_COPIED = ("lessons.py", "work.py")
RECORD = ".copied.json"


def cells_of(path: Path) -> str:
    """A digest of a notebook's cells without outputs and metadata; of a file that is no notebook, of its bytes."""
    content = path.read_bytes()
    try:
        cells = [["".join(cell["source"]), cell["cell_type"]] for cell in json.loads(content)["cells"]]
    except (ValueError, KeyError, TypeError):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def refresh(notebooks: Path = NOTEBOOKS, work: Path = WORK) -> list[str]:
    """Bring `work` up to date. Returns a sentence for each newer lesson that was put beside an edited copy."""
    for pattern in HELPERS:
        for path in notebooks.glob(pattern):
            if path.name not in NOT_COPIED:
                _copy(path, work / path.relative_to(notebooks))
    record, said = work / RECORD, []
    copied = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for path in [*notebooks.glob("*.ipynb"), *notebooks.glob("solutions/*.ipynb")]:
        name, now = path.relative_to(notebooks).as_posix(), cells_of(path)
        mine = work / name
        if mine.exists() and now == copied.get(name):
            continue
        while mine.exists() and cells_of(mine) not in (copied.get(name), now):
            mine = mine.with_name(f"new_{mine.name}")
        if not mine.exists() or cells_of(mine) != now:
            _copy(path, mine)
            if mine.name != path.name:
                said.append(f"{name} has changed, and you edited your copy: the newer one is beside it, {mine.name}")
        copied[name] = now
    record.write_text(json.dumps(copied, indent=1), encoding="utf-8")
    return said


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


if __name__ == "__main__":
    print("\n".join(refresh()), end="")
