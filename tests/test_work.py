"""The copies of notebooks that `make lab` opens (notebooks/work.py)."""

import functools
import json

import pytest
import work
from cases import ROOT, cells_of, make_file
from test_repository import repository_files


@pytest.fixture
def folders(tmp_path):
    """A folder of notebooks, the folder of their copies, and what brings these up to date."""
    notebooks, copies = tmp_path / "notebooks", tmp_path / "work"
    make_file(notebooks / "checks/__init__.py", "old")
    write(notebooks / "01_a.ipynb", "x = 1")
    refresh = functools.partial(work.refresh, notebooks, copies)
    assert refresh() == []
    return notebooks, copies, refresh


def write(path, *sources, outputs=()):
    cells = [{"cell_type": "code", "source": [text], "outputs": list(outputs)} for text in sources]
    path.write_text(json.dumps({"cells": cells, "metadata": {}}))


def sources(path):
    return ["".join(cell["source"]) for cell in cells_of(path)]


def test_a_lesson_that_was_run_keeps_its_outputs_until_its_cells_change(folders):
    notebooks, copies, refresh = folders
    write(copies / "01_a.ipynb", "x = 1", outputs=["of the reader"])
    write(notebooks / "01_a.ipynb", "x = 1", outputs=["measured anew"])
    assert refresh() == []
    assert "of the reader" in (copies / "01_a.ipynb").read_text()
    write(notebooks / "01_a.ipynb", "x = 2")
    (said,) = refresh()
    assert "was replaced" in said
    assert sources(copies / "01_a.ipynb") == ["x = 2"]


def test_a_copy_that_was_not_run_gets_newer_outputs(folders):
    notebooks, copies, refresh = folders
    write(notebooks / "01_a.ipynb", "x = 1", outputs=["measured anew"])
    (notebooks / "checks" / "__init__.py").write_text("newer")
    assert refresh() == []
    assert "measured anew" in (copies / "01_a.ipynb").read_text()
    assert (copies / "checks" / "__init__.py").read_text() == "newer"


@pytest.mark.parametrize("name", ["01_a.ipynb", "tiny.py"])
def test_a_newer_file_is_put_beside_an_edited_one_once(folders, name):
    notebooks, copies, refresh = folders
    write(notebooks / name, "x = 0")
    refresh()
    write(copies / name, "x = 1")
    assert refresh() == []
    write(notebooks / name, "x = 2")
    (said,) = refresh()
    assert f"new_{name}" in said
    assert sources(copies / name) == ["x = 1"]
    assert sources(copies / f"new_{name}") == ["x = 2"]
    write(copies / f"new_{name}", "x = 'another'")
    assert refresh() == []  # it is known
    write(notebooks / name, "x = 3")
    assert len(refresh()) == 1
    assert sources(copies / f"new_{name}") == ["x = 'another'"]
    assert sources(copies / f"new_new_{name}") == ["x = 3"]


def test_a_lost_record_loses_no_edit(folders):
    notebooks, copies, refresh = folders
    (copies / work.RECORD).write_text('{"01_a')
    (copies / "01_a.ipynb").write_text("half a fi")
    write(notebooks / "01_a.ipynb", "x = 2")
    assert len(refresh()) == 1
    assert (copies / "01_a.ipynb").read_text() == "half a fi"


def test_all_lessons_are_copied_with_what_they_import(tmp_path):
    work.refresh(work=tmp_path)
    known = {p.relative_to(ROOT / "notebooks") for p in repository_files() if ROOT / "notebooks" in p.parents}
    lost = {p for p in known if not (tmp_path / p).exists()}
    assert {p.parts[0] for p in lost} == {"lessons.py", "work.py", "site"}


def test_git_ignores_the_copies():
    assert "work/" in (ROOT / ".gitignore").read_text().splitlines()
