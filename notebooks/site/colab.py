"""The first lessons for Colab: each is one file that needs no checkout.

    python notebooks/site/colab.py SOURCE [--out FOLDER]

SOURCE is where pip finds this library: `git+https://...` of a repository, or the address of a wheel. This library is
published nowhere, so there is no default. A file is a lesson with one cell more, which installs SOURCE and writes the
modules beside the lessons that this one imports.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell

NOTEBOOKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(NOTEBOOKS))
import lessons  # noqa: E402

WORDS = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
NAMES = ("90_minutes", "00_where_memory_goes", "01_tiled_loss", "02_tiled_mlp")
INSTALL = """# Takes a minute or two. Colab may ask to restart the session: run all cells again then.
%pip install -q matplotlib ipywidgets "alstlib[train] @ {source}"

from pathlib import Path

for name, text in {files!r}.items():
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)"""


def beside(name: str, texts: list[str]) -> dict[str, str]:
    """The checks of lesson `name`, and the modules of notebooks/ that these, the texts or each other import."""
    files = {"checks/__init__.py", f"checks/lesson_{name[:2]}.py"}
    found: dict[str, str] = {}
    while files:
        file = files.pop()
        found[file] = (NOTEBOOKS / file).read_text(encoding="utf-8")
        texts.append(found[file])
        imported = {module for text in texts for module in imports(text)}
        files |= {f"{m}.py" for m in imported if (NOTEBOOKS / f"{m}.py").exists()} - set(found)
    return dict(sorted(found.items()))


def imports(text: str) -> set[str]:
    """The names before the first dot of all modules that a text imports."""
    nodes = [*ast.walk(ast.parse(text))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def colab(lesson: Path, source: str) -> Any:
    """The notebook of a lesson for Colab, without outputs; links to other files of the repository are words there."""
    nb = lessons.normalised(lessons.Notebook(lesson).nb)
    files = beside(lesson.name, [c.source for c in nb.cells if c.cell_type == "code"])
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = WORDS.sub(lambda m: m[0] if lessons.is_external(m[2]) else m[1], cell.source)
        else:
            cell.metadata.pop("solution", None)
    first = next(i for i, cell in enumerate(nb.cells) if cell.cell_type == "code")
    nb.cells.insert(first, new_code_cell(INSTALL.format(source=source, files=files), id="install"))
    return nb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="what pip installs: git+https://..., or the address of a wheel")
    parser.add_argument("--out", type=Path, default=NOTEBOOKS.parent / "build" / "colab", help="default: build/colab")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        nbformat.write(colab(NOTEBOOKS / f"{name}.ipynb", args.source), args.out / f"{name}.ipynb")
        print(args.out / f"{name}.ipynb")


if __name__ == "__main__":
    main()
