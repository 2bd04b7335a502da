"""The lessons for Colab, which cannot be run here: they hold what they need and refer to nothing else."""

import re
import subprocess
import sys

import nbformat
import pytest
from cases import text_of
from test_site import SITE

import colab  # isort: skip

SOURCE = "git+https://example.org/somebody/alst.git"
PLACES = {"alstlib", "torch", "transformers", "IPython", "matplotlib", "ipywidgets", "numpy", *sys.stdlib_module_names}


def code(notebook):
    """The code of each cell, without its lines for IPython alone."""
    return [re.sub(r"(?m)^%.*$", "", c.source) for c in notebook.cells if c.cell_type == "code"]


@pytest.mark.parametrize("name", colab.NAMES)
def test_a_lesson_for_colab_needs_one_cell_more_and_no_checkout(name, tmp_path, monkeypatch):
    lesson = colab.NOTEBOOKS / f"{name}.ipynb"
    made, stored = colab.colab(lesson, SOURCE), nbformat.read(lesson, as_version=4)
    nbformat.validate(made)
    install, *cells = code(made)
    assert cells == [c.source for c in stored.cells if c.cell_type == "code"]
    assert len(made.cells) == len(stored.cells) + 1
    assert f'%pip install -q matplotlib ipywidgets "alstlib[train] @ {SOURCE}"' in next(
        c.source for c in made.cells if c.id == "install"
    )
    assert not any(c.get("outputs") for c in made.cells)
    monkeypatch.chdir(tmp_path)
    exec(install, {})
    files = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {name: text_of(colab.NOTEBOOKS / name) for name in files}
    imported = set().union(*map(colab.imports, [*cells, *files.values()]))
    assert imported <= PLACES | {p.name.removesuffix(".py") for p in tmp_path.iterdir()}, imported
    texts = "".join(c.source for c in made.cells if c.cell_type == "markdown")
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", texts) == []
    assert "../" not in "".join([install, *cells])


def test_the_source_is_named_by_who_makes_them(tmp_path):
    """This library is published nowhere: nothing is put in the place of a name that was not given."""
    command = [sys.executable, str(SITE / "colab.py")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "required: source" in refused.stderr
    subprocess.run([*command, SOURCE, "--out", str(tmp_path)], check=True)
    assert sorted(p.stem for p in tmp_path.iterdir()) == sorted(colab.NAMES)
    assert all(SOURCE in p.read_text() for p in tmp_path.iterdir())
