"""Builds the course's static site from stored outputs and checks it: `make site`, or

    python notebooks/site/builder.py [--root FOLDER] [--out FOLDER] [--lenient]

Nothing is executed and nothing is fetched; what is built opens from the disk (file://). Pages keep the places that
their sources have in the repository, so that links between them mean the same in JupyterLab and here.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import checker

HERE = Path(__file__).resolve().parent
INDEX = "notebooks/index.ipynb"
LESSONS = "notebooks/[0-9][0-9]_*.ipynb"
SOLUTIONS = "notebooks/solutions/*.ipynb"
IMAGES = "notebooks/images"
WHAT_FITS = "notebooks/what_fits.md"
TABLE = "papermill_runs/results/planner/what_fits.json"
REFERENCE = {
    "api.rst": "Public API",
    "notebooks/run.ipynb": "The run template",
    "notebooks/finetune.ipynb": "The fine-tuning template",
    "notebooks/one_gpu.ipynb": "One GPU, a million tokens",
    "README.md": "The project",
    "notebooks/training.md": "Training with this library",
    "notebooks/runs.md": "Planning and running",
    WHAT_FITS: "What fits?",
    "notebooks/silent_errors.md": "Seven silent errors",
    "env/README.md": "Environments",
    "papermill_runs/results/LOG.md": "What was tried",
}
"""The other pages, and their names in the navigation."""


def heading(page: Path) -> str:
    """A page's first heading."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    found = re.search(r"^# +(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else page.stem


def numbered(page: Path) -> str:
    """`05 Checkpoints and offload`: the number of the file and the heading up to its colon."""
    return f"{page.name[:2]} {heading(page).partition(':')[0]}"


ONLY_IN_LAB = ("check-text", "check")
"""Cells of the index that look at the reader's machine."""
LAB = (
    (r"\*\*Do this now:\*\*.*?Then read on", "Read on"),
    (r" A slider moves with the mouse.*?\(Tab\)\.", ""),
    (r" Run the answer cell and the check cell \(Shift\+Enter\)\.", " Run the answer cell and the check cell."),
    (r" \*Kernel\*, \*Restart.*?clean state, and a notebook", " A notebook"),
)
"""What pages say about JupyterLab's menus and keys, and what is said here: nothing is run on the site."""


def without_menus(text: str) -> str:
    for said, here in LAB:
        text = re.sub(said, here, text)
    return text


def copy(source: Path, target: Path, title: str = "") -> None:
    """A page as Sphinx reads it: a cell's `metadata.alt` becomes the alternative text of the images that it shows, and
    code that is folded in JupyterLab is folded here. `title` is put before its heading."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".ipynb":
        shutil.copyfile(source, target)
        return
    notebook = json.loads(source.read_text(encoding="utf-8"))
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] not in ONLY_IN_LAB]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = without_menus("".join(cell["source"]))
        if alt := cell["metadata"].get("alt"):
            cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})["alt"] = alt
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
        if title and cell["cell_type"] == "markdown":
            text = re.sub(r"^# +", f"# {title}", "".join(cell["source"]), count=1, flags=re.MULTILINE)
            title, cell["source"] = "" if text != "".join(cell["source"]) else title, text
    target.write_text(json.dumps(notebook), encoding="utf-8")


FIGURE = re.compile(r"\"image/|<(svg|img|canvas)\b")


def with_table(page: Path, table: Path) -> None:
    """Put the form and the table that it reads in the place of what the page says without a site."""
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- table -->")
    form = (HERE / "what_fits.html").read_text(encoding="utf-8")
    form = form.replace("TABLE", table.read_text(encoding="utf-8").replace("</", "<\\/"))
    after = rest.partition("<!-- /table -->")[2]
    page.write_text(f"{before}````{{raw}} html\n{form}````\n{after}", encoding="utf-8")


def without_figures(page: Path) -> list[str]:
    """Cells that have an alternative text and no stored image: the lesson was not run before it was stored."""
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    bare = [c for c in cells if c["metadata"].get("alt") and not FIGURE.search(json.dumps(c.get("outputs")))]
    return [f"{page}: cell {c['id']} has an alternative text and no stored image: run the lesson" for c in bare]


def toctree(caption: str, entries: list[tuple[str, str]]) -> str:
    lines = "\n".join(f"{title} </{name.rsplit('.', 1)[0]}>" for title, name in entries)
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n" if entries else ""


def stage(root: Path, work: Path) -> None:
    """Copy the pages of the repository at `root` to `work`, and give the landing page the navigation."""
    lessons, solutions = ([*sorted(root.glob(pattern))] for pattern in (LESSONS, SOLUTIONS))
    others = [name for name in REFERENCE if name != "api.rst" and (root / name).exists()]
    if (root / IMAGES).is_dir():
        shutil.copytree(root / IMAGES, work / IMAGES)
    for page in (*lessons, *solutions, *(root / name for name in others)):
        copy(page, work / page.relative_to(root), "Solutions: " * (page in solutions))
    if WHAT_FITS in others:
        with_table(work / WHAT_FITS, root / TABLE)
    if (root / "alstlib").is_dir():
        copy(HERE / "api.rst", work / "api.rst")
        others.insert(0, "api.rst")
    trees = [
        toctree("Lessons", [(numbered(p), p.relative_to(root).as_posix()) for p in lessons]),
        toctree("Reference", [(REFERENCE[name], name) for name in others]),
        toctree("Solutions", [(f"Solutions of {p.name[:2]}", p.relative_to(root).as_posix()) for p in solutions]),
    ]
    index = work / INDEX
    if (root / INDEX).exists():
        copy(root / INDEX, index)
        notebook = json.loads(index.read_text(encoding="utf-8"))
        notebook["cells"].append({"cell_type": "markdown", "id": "site", "metadata": {}, "source": "\n".join(trees)})
        index.write_text(json.dumps(notebook), encoding="utf-8")
    else:
        links = "\n".join(f"- [{numbered(p)}]({p.name})" for p in lessons)
        index = index.with_suffix(".md")
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text("\n\n".join(["# Train on very long sequences", links, *trees]), encoding="utf-8")


def build(root: Path, out: Path, lenient: bool = False) -> int:
    """Build the site and put it in the place of the one before; one that gave no page, or was interrupted, leaves that
    as it was. Returns Sphinx's exit status; its warnings are errors, unless `lenient`.

    Raises:
        SystemExit: no page was built, or `out` holds something else than a site.
    """
    from sphinx.cmd.build import main as sphinx

    sys.path.insert(0, str(root))  # this repository's alstlib is the one that is documented
    if out.is_dir() and any(out.iterdir()) and not (out / ".buildinfo").exists():
        raise SystemExit(f"{out} is not empty and not a site: name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="site-", dir=out.parent) as folder:
        work, site = Path(folder).resolve() / "pages", Path(folder).resolve() / "site"
        stage(root, work)
        options = ["-q", "-E", "-b", "html", "-c", str(HERE), "-d", str(work / ".doctrees")]
        options += ["-D", f"repository_root={root}", *([] if lenient else ["-W", "--keep-going"])]
        status = sphinx([*options, str(work), str(site)])
        if not (site / "index.html").exists():
            raise SystemExit(f"no page was built; {out} is as it was")
        if out.exists():
            out.rename(site.with_name("before"))
        site.rename(out)
        return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the repository")
    parser.add_argument("--out", type=Path, help="where the site goes; default: build/site of the repository")
    parser.add_argument("--lenient", action="store_true", help="build although pages or alternative texts are missing")
    args = parser.parse_args()
    start = time.monotonic()
    root = args.root.resolve()
    out = (args.out or root / "build" / "site").resolve()
    print(
        f"building {out / 'index.html'}: this takes a minute or more, and nothing is replaced before its end",
        flush=True,
    )
    status = build(root, out, args.lenient)
    report = checker.check(out)
    for pattern in (INDEX, LESSONS, SOLUTIONS):
        report.problems += [problem for page in sorted(root.glob(pattern)) for problem in without_figures(page)]
    print("\n".join(report.problems), file=sys.stderr)
    print(f"{out / 'index.html'}: {report.summary()}; {time.monotonic() - start:.0f} s")
    return 0 if args.lenient else int(bool(status or report.problems))


if __name__ == "__main__":
    sys.exit(main())
