"""The rooms of `alstlib/`: imports go down, nothing is hidden, and what needs no torch imports none."""

import ast
import graphlib
import itertools
import re
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from cases import ROOT, text_of

import alstlib

PACKAGE = ROOT / "alstlib"
REFEREE = ROOT / "papermill_runs" / "referee"


LAYERS = yaml.safe_load("""
- runs  # programs, and the workers that they start
- planner  # on paper: what is simulated, measured and predicted
- trainers trees contrib
- figures
- hf  # the core
- streaming linear
- ulysses data tiled offload kernels
- base  # the ground
""")
"""The layers of the package, from the top down, and their rooms. A room imports from its own layer (in the order of the
README) and from those below."""

ABOVE = {
    "runs": ("alstlib.runs.train", "alstlib.runs.corpus"), "planner": ("alstlib.planner.measure",),
    "hf": ("alstlib.hf.loading",),
}  # fmt: skip
"""Folders in a room of which the rest of it imports nothing. In runs and planner the rest imports no torch."""


def modules():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, known):
    """Every module of ours that a file names in an import: at its top, in a function, or for types alone."""
    taken = set()
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            taken |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            taken |= inside or {node.module}
    return taken


def imported():
    """What each module imports."""
    known = modules()
    return {name: imports(path, known) for name, path in known.items()}


def room(module):
    """`hf` of alstlib.hf.attach."""
    return module.split(".")[1] if "." in module else module


def floors():
    """The rooms as the README lists them, from the top down."""
    tree = text_of("README.md").partition("    alstlib/ ")[2].partition("    notebooks/ ")[0]
    return re.findall(r"^ {6}(\w+)(?:/|\.py) ", tree, re.MULTILINE)


def layer_of(name):
    return next(i for i, rooms in enumerate(LAYERS) if name in rooms.split())


def test_the_readme_lists_every_room():
    """From the top layer down."""
    known = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert sorted(floors()) == sorted(known - {"__init__"})
    places = [layer_of(name) for name in floors()]
    assert places == sorted(places)


def test_imports_go_downward_without_a_circle():
    graph = imported()
    order = {name: i for i, name in enumerate(floors())}
    upward = {
        f"{name} -> {one}"
        for name, taken in graph.items()
        for one in taken
        if room(name) in order and order.get(room(one), 99) < order[room(name)]
    }
    assert upward == set()
    for name, above in ABOVE.items():
        below = [one for one in graph if room(one) == name and not one.startswith(above)]
        assert [one for one in below if any(taken.startswith(above) for taken in graph[one])] == []
    inside = {name: taken - {"alstlib"} for name, taken in graph.items()}
    graphlib.TopologicalSorter(inside).prepare()  # raises with the circle


def test_seven_rooms_stand_on_one_another():
    """The programs' is the seventh, so that the notebooks are on the eighth floor."""
    below = {}
    for name, taken in imported().items():
        below.setdefault(room(name), set()).update({room(one) for one in taken} - {room(name), "alstlib"})
    del below["alstlib"]  # the face of the package
    floor = {}
    for one in graphlib.TopologicalSorter(below).static_order():
        floor[one] = 1 + max((floor[other] for other in below[one]), default=0)
    assert max(floor.values()) == 7, floor


def test_every_class_has_a_name_of_its_own():
    trees = [ast.parse(text_of(path)) for path in [*PACKAGE.rglob("*.py"), *REFEREE.glob("*.py")]]
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    names = Counter(node.name.lstrip("_") for node in classes)
    assert [name for name, count in names.items() if count > 1] == []


def test_what_an_attribute_is_can_be_read_without_the_line_before():
    """No fragment such as "Of a rank.", and no question."""
    trees = [ast.parse(text_of(path)) for path in modules().values()]
    bodies = (node.body for tree in trees for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    pairs = (pair for body in bodies for pair in itertools.pairwise(body))
    texts = [
        after.value.value
        for before, after in pairs
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr)
        if isinstance(after.value, ast.Constant)
    ]
    assert len(texts) > 500
    assert [text for text in texts if re.match(r"(Of|As|At|Whose|Those) |[^.]*\?", text)] == []


def test_the_check_of_imports_sees_those_that_hide(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from alstlib.hf import handle\n"
        "def f():\n    import alstlib.base.mesh\n    from alstlib.tiled.loss import TiledHead\n"
    )
    assert imports(path, modules()) == {"alstlib.hf.handle", "alstlib.base.mesh", "alstlib.tiled.loss"}


def loaded(statement):
    heavy = {"torch", "transformers", "deepspeed", "papermill", "rfc3987_syntax"}
    code = f"import sys; {statement}; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_public_face_loads_on_first_use():
    assert loaded("import alstlib, alstlib.hf, alstlib.tiled; alstlib.RunConfig; dir(alstlib)") == set()
    assert all(getattr(alstlib, name) is not None for name in alstlib.__all__)
    with pytest.raises(AttributeError, match="No alstlib attribute gone"):
        alstlib.gone  # noqa: B018


def test_papermill_comes_without_a_grammar_of_addresses():
    assert loaded("from alstlib.runs.notebooks import load_papermill; load_papermill()") == {"papermill"}


@pytest.mark.parametrize("name", ["runs", "planner"])
def test_these_rooms_import_no_torch(name):
    here = [module for module in modules() if room(module) == name]
    inside = [module for module in here if not module.startswith(ABOVE[name])]
    assert loaded(f"import {', '.join(inside)}") == set()
