"""Copies of the notebooks to read, run and change, in the folder work/ that git ignores: `make lab` opens these.

Running a lesson changes its file, and a `git pull` refuses to overwrite changed files. So the notebooks that git knows
stay as they are. A copy in which no cell was edited is replaced when its lesson changes; beside one that was edited,
the newer lesson is put as new_NAME.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent
WORK = NOTEBOOKS.parent / "work"
COPIED = ("*.ipynb", "solutions/*.ipynb", "*.md", "*.py", "checks/*.py", "images/*")
"""The notebooks, and what they import and link to."""
NOT_COPIED = ("lessons.py", "work.py")
RECORD = ".copied.json"


def digests(path: Path) -> list[str]:
    """Of a notebook, a digest of its cells without outputs and metadata; and a digest of the bytes of any file."""
    content = path.read_bytes()
    cells = content
    with contextlib.suppress(ValueError, KeyError, TypeError):
        parts = [["".join(cell["source"]), cell["cell_type"]] for cell in json.loads(content)["cells"]]
        cells = json.dumps(parts).encode()
    return [hashlib.sha256(of).hexdigest() for of in (cells, content)]


def refresh(notebooks: Path = NOTEBOOKS, work: Path = WORK) -> list[str]:
    """Bring `work` up to date. Returns a sentence for each copy that its reader has run or edited, and that is older
    than its lesson."""
    record, copied, said = work / RECORD, {}, []
    with contextlib.suppress(OSError, ValueError):  # without it, copies that differ count as edited
        copied = json.loads(record.read_text(encoding="utf-8"))
    for path in sorted({path for pattern in COPIED for path in notebooks.glob(pattern)}):
        name, now = path.relative_to(notebooks).as_posix(), digests(path)
        mine, was = work / name, copied.get(name)
        if path.name in NOT_COPIED or (mine.exists() and now == was):
            continue
        copied[name] = now
        if mine.exists() and (found := digests(mine)) != was:
            if found[0] == now[0]:  # the lesson's stored outputs changed, or nothing: these are the reader's
                continue
            if was and found[0] == was[0]:
                said.append(f"{name} has changed: your copy, of which you had edited no cell, was replaced")
            else:
                while mine.exists() and digests(mine) != was:
                    mine = mine.with_name(f"new_{mine.name}")
                said.append(f"{name} has changed, and you edited your copy: the newer one is beside it, {mine.name}")
        mine.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, mine)
    written = record.with_suffix(".tmp")
    written.write_text(json.dumps(copied, indent=1), encoding="utf-8")
    written.replace(record)
    return said


if __name__ == "__main__":
    for sentence in refresh():
        print(sentence)
