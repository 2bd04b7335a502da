"""The copies of notebooks that `make lab` opens (notebooks/work.py)."""

import importlib.util
import json

import pytest
from test_repository import ROOT, repository_files


@pytest.fixture
def work(tmp_path):
    """The module, a folder of notebooks and the folder of their copies."""
    spec = importlib.util.spec_from_file_location("work_copies", ROOT / "notebooks" / "work.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "notebooks" / "checks").mkdir(parents=True)
    (tmp_path / "notebooks" / "checks" / "__init__.py").write_text("old")
    write(tmp_path / "notebooks" / "01_a.ipynb", "x = 1")
    return module, tmp_path / "notebooks", tmp_path / "work"


def write(path, *sources, outputs=()):
    cells = [{"cell_type": "code", "source": [text], "outputs": list(outputs)} for text in sources]
    path.write_text(json.dumps({"cells": cells, "metadata": {}}))


def sources(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


def test_a_lesson_that_was_run_keeps_its_outputs_until_a_newer_one_comes(work):
    module, notebooks, copies = work
    assert module.refresh(notebooks, copies) == []
    write(copies / "01_a.ipynb", "x = 1", outputs=["of the reader"])
    (notebooks / "checks" / "__init__.py").write_text("newer")
    assert module.refresh(notebooks, copies) == []
    assert "of the reader" in (copies / "01_a.ipynb").read_text()
    assert (copies / "checks" / "__init__.py").read_text() == "newer"
    write(notebooks / "01_a.ipynb", "x = 2")
    assert module.refresh(notebooks, copies) == []
    assert sources(copies / "01_a.ipynb") == ["x = 2"]


def test_a_newer_lesson_is_put_beside_an_edited_one_once(work):
    module, notebooks, copies = work
    module.refresh(notebooks, copies)
    write(copies / "01_a.ipynb", "x = 'an answer'")
    assert module.refresh(notebooks, copies) == []
    write(notebooks / "01_a.ipynb", "x = 2")
    (said,) = module.refresh(notebooks, copies)
    assert "new_01_a.ipynb" in said
    assert sources(copies / "01_a.ipynb") == ["x = 'an answer'"]
    assert sources(copies / "new_01_a.ipynb") == ["x = 2"]
    write(copies / "new_01_a.ipynb", "x = 'another'")
    assert module.refresh(notebooks, copies) == []  # it is known
    assert sources(copies / "new_01_a.ipynb") == ["x = 'another'"]
    write(notebooks / "01_a.ipynb", "x = 3")
    assert len(module.refresh(notebooks, copies)) == 1
    assert sources(copies / "new_01_a.ipynb") == ["x = 'another'"]
    assert sources(copies / "new_new_01_a.ipynb") == ["x = 3"]


def test_a_copy_that_is_no_notebook_any_more_is_kept(work):
    module, notebooks, copies = work
    module.refresh(notebooks, copies)
    (copies / "01_a.ipynb").write_text("half a fi")
    write(notebooks / "01_a.ipynb", "x = 2")
    assert len(module.refresh(notebooks, copies)) == 1
    assert (copies / "01_a.ipynb").read_text() == "half a fi"


def test_all_lessons_are_copied_with_what_they_import(work):
    module, _, copies = work
    module.refresh(work=copies)
    known = {p.relative_to(ROOT / "notebooks") for p in repository_files() if ROOT / "notebooks" in p.parents}
    lost = {p for p in known if not (copies / p).exists()}
    assert {p.parts[0] for p in lost} == {"lessons.py", "work.py", "site"}


def test_git_ignores_the_copies():
    assert "work/" in (ROOT / ".gitignore").read_text().splitlines()
