"""The lessons as they are stored, and the tool that holds them to their form: each of its checks can fail."""

import copy
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time

import lessons
import nbformat
import psutil
import pytest
from cases import lines_of, make_file, unsaid
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

STORED = [*lessons.notebooks(), *lessons.twins()]


@pytest.mark.parametrize("path", STORED, ids=lambda p: f"{lessons.kind(p)}-{p.stem}")
def test_stored_notebooks_keep_the_rules(path):
    assert lessons.problems(path) == []


def test_no_lesson_is_lost():
    assert lessons.miscounted() == []
    assert lessons.stray() == []


def next_of(path):
    """The first notebook that a lesson's last words lead to."""
    return path.with_name(re.search(r"\]\((\w+\.ipynb)", lessons.Notebook(path).nb.cells[-1].source)[1])


def test_next_leads_from_the_first_notebook_through_every_lesson():
    at, seen = lessons.ROOT / "notebooks/90_minutes.ipynb", []
    while at not in seen:
        seen.append(at)
        at = next_of(at)
    assert sorted(seen) == lessons.lessons()


def test_hours_of_the_index_are_those_of_the_cards():
    """Each lesson's minutes stand in one table of paths, and the sums, the workshop and the seminar are theirs."""
    index = "\n".join(c.source for c in lessons.Notebook(lessons.ROOT / "notebooks/index.ipynb").markdown)
    cards = {path.name[:2]: minutes_of(path) for path in lessons.lessons()}

    def rows(begin, end, column):
        """The lessons of each row of a table, and their minutes, which are in this column."""
        found = []
        for line in re.findall(r"(?m)^\| (\[?\d.*) \|$", index.partition(begin)[2].partition(end)[0]):
            names, minutes = re.findall(r"\[(\d\d)", line), int(line.split(" | ")[column])
            assert not names or sum(map(cards.__getitem__, names)) == minutes, line
            found.append((names, minutes))
        return found

    def total(found):
        return sum(minutes for _, minutes in found)

    marks = ("**Ninety minutes**", "**A day**", "**The rest**", "## Plans")
    paths = [rows(begin, end, 2) for begin, end in itertools.pairwise(marks)]
    assert sorted(name for path in paths for (name,), _ in path) == sorted(cards)
    said = re.findall(r"\*\*(?:A day|The rest)\*\* \((\d+) hours and (\d+) minutes\)", index)
    sums = [60 * int(hours) + int(minutes) for hours, minutes in said]
    assert [total(path) for path in paths] == [cards["90"], *sums]
    assert total(rows("**Half-day workshop (4 hours)**", "**Two-week", 0)) == 4 * 60
    assert total(rows("**Two-week", "## All lessons", 2)) == sum(sums)
    assert f"{sum(sums) // 60} hours and {sum(sums) % 60} minutes in addition to the sessions" in index


def minutes_of(path):
    number, unit = re.search(r"(\d+|an) (minute|hour)s? of reading", lessons.Notebook(path).nb.cells[0].source).groups()
    return int(number.replace("an", "1")) * (60 if unit == "hour" else 1)


# A lesson that keeps all rules, in a repository of its own

CARD = """# A demonstration

| | |
|---|---|
| **Question** | How much is 2 and 3? |
| **You need to know** | counting |
| **Belongs to** | `alstlib/demo.py`, `tests/test_demo.py` |
| **Run time** | a second |
| **Hardware** | any |

It is computed, as [page 2](../README.md) says."""
END = """## Remember

- Numbers add up.

## Exercises

### Exercise 1

Add them."""
NEXT = "## Next\n\n[01 again](01_demo.ipynb)"
FIGURE = """display({"image/png": "iVBORw0KGgo=", "text/plain": "a figure"}, raw=True)
display({"text/markdown": "| a | b |\\n|---|---|\\n| 1 | 2 |\\n"}, raw=True)"""
CHECKS = """def judge(name, function):
    try:
        value = function()
    except NotImplementedError:
        return print("not answered yet: write it above")
    assert value == 5, f"{value} is not right"
    print("right:", value)
"""
UNWRITTEN, FIVE = (f"def mine():\n    {what}" for what in ("raise NotImplementedError", "return 5"))


def lesson():
    return new_notebook(cells=[
        new_markdown_cell(CARD, id="card"),
        new_code_cell("import os\n\nfrom checks import judge", id="imports"),
        new_code_cell("two = 2", id="parameters", metadata={"tags": ["parameters"]}),
        new_code_cell("print(two, 'is not', two + 1)", id="said"),
        new_markdown_cell("**What to see:** a point.", id="see"),
        new_code_cell(FIGURE, id="figure", metadata={"alt": "A point in an empty plane."}),
        new_markdown_cell(END, id="end"),
        new_code_cell(UNWRITTEN, id="answer", metadata={"tags": ["exercise"], "solution": FIVE}),
        new_code_cell('judge("01.1", mine)', id="check", metadata={"tags": ["check"]}),
        new_markdown_cell(NEXT, id="next"),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """In a repository, executed and stored by the tool."""
    folder = tmp_path_factory.mktemp("good")
    path = folder / "notebooks/01_demo.ipynb"
    for name in ("README.md", "alstlib/demo.py", "tests/test_demo.py", "notebooks/checks.py"):
        make_file(folder / name, CHECKS)
    nbformat.write(lesson(), path)
    assert lessons.run(root=folder) == 0
    return path


@pytest.fixture
def demo(good, tmp_path):
    shutil.copytree(good.parent.parent, tmp_path / "copy")
    return tmp_path / "copy/notebooks/01_demo.ipynb"


def edit(notebook, change):
    """Run a line of code that changes the notebook `nb`, in which each cell has its name."""
    before = copy.deepcopy(notebook)
    exec(change, {**globals(), **{c.id: c for c in notebook.cells}, "nb": notebook})
    assert notebook != before


def changed(path, change):
    notebook = nbformat.read(path, as_version=4)
    edit(notebook, change)
    path.write_text(json.dumps(notebook), encoding="utf-8")  # nbformat would mend it
    return path


def cell(notebook, name):
    return next(c for c in notebook.cells if c.id == name)


def test_run_stores_the_lesson_and_its_twin(good):
    book, twin = lessons.Notebook(good), lessons.Notebook(lessons.twin_path(good))
    assert lessons.problems(good) == lessons.problems(twin.path) == []
    assert [c.execution_count for c in book.code] == [1, 2, 3, 4, 5, 6]
    said = [lessons.stdout(cell(nb, name)) for nb, name in ((book.nb, "said"), (book.nb, "check"), (twin.nb, "check"))]
    assert said == ["2 is not 3\n", "not answered yet: write it above\n", "right: 5\n"]
    assert cell(book.nb, "answer").source == UNWRITTEN
    assert "by `python notebooks/lessons.py run 01`" in twin.nb.cells[0].source
    assert cell(twin.nb, "answer").source == FIVE
    assert "solution" not in cell(twin.nb, "answer").metadata
    assert "(../../README.md)" in cell(twin.nb, "card").source
    assert "(../01_demo.ipynb)" in cell(twin.nb, "next").source


def text(content, stream="stdout"):
    return new_output("stream", name=stream, text=content)


ERROR = new_output("error", ename="KeyError", evalue="", traceback=[])
WIDGET = new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}})
BROKEN = r"""
well_formed  -> said.id = "a-very-long-name-for-a-small-cell"
well_formed  -> said.id = "imports"
well_formed  -> nb.metadata.kernelspec.name = "julia"
well_formed  -> nb.nbformat_minor = 6
small        -> said.outputs.append(text("x" * lessons.BYTES))
stateless    -> nb.metadata.widgets = {}
stateless    -> said.outputs.append(WIDGET)
stateless    -> said.metadata.execution = {}
counted      -> said.execution_count = 7
portable     -> said.outputs.append(ERROR)
portable     -> said.outputs.append(text("a warning", "stderr"))
portable     -> said.outputs.append(text("written to " + "/".join(["", "home", "me", "out"])))
described    -> figure.metadata.alt = "a figure"
described    -> said.outputs.append(new_output("display_data", {"text/html": "<svg></svg>"}))
linked       -> next.source = next.source.replace("01_demo.ipynb", "02_demo.ipynb")
linked       -> card.source = card.source.replace("tests/test_demo.py", "tests/test_lost.py")
carded       -> card.source = card.source.replace("# A demonstration", "A demonstration")
carded       -> card.source = card.source.replace("| **Hardware** | any |", "| **Hardware** | |")
carded       -> card.source = card.source.replace("`alstlib/demo.py`", "a module")
parametrized -> said.metadata.tags = ["parameters"]
parametrized -> imports.source = "one = 1"
brief        -> card.source += " word" * 1980
sectioned    -> end.source = end.source.replace("## Exercises", "## Questions")
sectioned    -> next.source = next.source.replace("[01 again](01_demo.ipynb)", "Nothing.")
sectioned    -> nb.cells.insert(1, nb.cells.pop())
drilled      -> del answer.metadata["tags"]
drilled      -> del answer.metadata["solution"]
drilled      -> answer.metadata.solution = "mine ="
drilled      -> answer.metadata.solution = "yours = 5"
drilled      -> del check.metadata["tags"]
drilled      -> nb.cells.pop(-2)
drilled      -> end.source = end.source.replace("### Exercise 1", "### Exercise 2")
drilled      -> nb.cells.append(new_code_cell("three = 3", id="more"))
judged       -> answer.source = "mine = None"
judged       -> check.source = 'judge("01.2", mine)'
judged       -> check.source = 'judge("01.1", mine)\nassert mine() == 5'
announced    -> see.source = "A point."
twinned      -> said.source = "print(2)"
twinned      -> answer.metadata.solution = "def mine():\n    return two + 3"
"""
"""Each rule, and what breaks it."""


@pytest.mark.filterwarnings("ignore")  # nbformat's, of what is broken on purpose
@pytest.mark.parametrize("rule, change", lines_of(BROKEN))
def test_each_rule_can_fail(demo, rule, change):
    assert {rule.__name__ for rule in lessons.RULES["lesson"]} == {rule for rule, _ in lines_of(BROKEN)}
    found = lessons.problems(changed(demo, change))
    assert any(line.startswith(f"{rule}: ") for line in found), found


def test_twins_are_looked_at(demo, monkeypatch):
    """A lost lesson, a twin that is not answered, a lost one and a stray one are seen."""
    root = demo.parent.parent
    monkeypatch.setattr(lessons, "LESSONS", 1)
    assert lessons.miscounted(root) == lessons.stray(root) == []
    twin = changed(lessons.twin_path(demo), "check.outputs = []")
    assert lessons.problems(twin) == ["answered: cell check: says '', not 'right'"]
    twin.unlink()
    assert any(line.startswith("twinned: there is no") for line in lessons.problems(demo))
    stray = twin.with_name("02_gone.ipynb")
    shutil.copy(demo, stray)
    assert lessons.stray(root) == [stray]
    assert any(line.startswith("answered: there is no lesson") for line in lessons.problems(stray))
    demo.unlink()
    assert lessons.miscounted(root) != []


# Executing and comparing


FAILS = r"""
said  -> 1 / 0                       -> cell said: ZeroDivisionError: division by zero
check -> print('right')              -> of an exercise that is not answered
check -> print('not answered yet')   -> says 'not answered yet\n' of the solution in cell answer
said  -> os._exit(1)                 -> cell said: its kernel died
said  -> import time; time.sleep(60) -> cell said: not done after 5 s
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, source, says", lines_of(FAILS))
def test_a_lesson_that_fails_is_not_stored(demo, name, source, says, capsys, monkeypatch):
    monkeypatch.setenv("ALST_SLOW", str(5 / lessons.HANG_SECONDS))
    before = changed(demo, f"{name}.source = {source!r}").read_text()
    assert lessons.run(root=demo.parent.parent) == 1
    assert says in capsys.readouterr().out
    assert demo.read_text() == before


def kernels():
    return [p for p in psutil.Process().children(recursive=True) if "ipykernel" in " ".join(p.cmdline())]


def test_no_kernel_is_left_behind(demo, monkeypatch):
    lessons.execute(demo)
    assert kernels() == []
    changed(demo, "said.source = 'import time; time.sleep(600)'")
    began = time.monotonic()
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        lessons.run(root=demo.parent.parent)
    assert time.monotonic() - began < 300
    assert kernels() == []


def test_check_compares_and_writes_nothing(demo, capsys, monkeypatch):
    """With kernels that are forked, as of many lessons; and with one that is not."""
    monkeypatch.setattr(lessons, "LESSONS", 2)
    monkeypatch.setattr(lessons, "FEW", 1)
    monkeypatch.setattr(lessons, "IMPORTED", ["ipykernel.kernelapp", "nbclient"])
    root = demo.parent.parent
    for path in (demo, lessons.twin_path(demo)):
        again = re.sub(r"01(?=\.1|`)", "02", path.read_text()).replace("01_demo", "02_second")
        path.with_name("02_second.ipynb").write_text(again)
    out = root / "papermill_runs/out/lesson-01"
    out.mkdir(parents=True)
    assert lessons.check(root=root) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["01_demo", "02_second", "all"]
    assert not out.exists(), "a run of before would have been taken for a new one"
    changed(demo, r"said.outputs = [text('2 is not 4\n')]")  # a claim that does not hold
    changed(demo, "figure.outputs.pop()")
    before = demo.read_text()
    assert lessons.check(["1"], root=root) == 2
    said = capsys.readouterr().out
    expected = """
cell said: outputs: says '2 is not 3', stored '2 is not 4'
cell figure: outputs: stored ['display_data of image/png, text/plain'], now [
'display_data of text/markdown; table | a | b | of 1 rows'
"""
    assert unsaid(said, expected) == []
    assert demo.read_text() == before


@pytest.mark.slow
def test_time_is_the_processors_where_the_clocks_is_more(demo):
    """As on a busy machine, where a lesson's processes wait for their turn: this one sleeps."""
    changed(demo, "said.source = 'import time; time.sleep(4)'")
    began = time.monotonic()
    assert lessons.execute(demo).seconds < time.monotonic() - began - 2


@pytest.mark.parametrize("setting, says", [("SECONDS", "takes "), ("ALL_SECONDS", "all together take ")])
def test_check_holds_the_time(demo, capsys, monkeypatch, setting, says):
    done = lessons.Pass(lessons.Notebook(demo).nb, None, 200.0)
    monkeypatch.setattr(lessons, "execute", lambda path: done)
    monkeypatch.setattr(lessons, "LESSONS", 1)
    monkeypatch.setenv("ALST_SLOW", "1.5")
    assert lessons.check(root=demo.parent.parent) == 0
    monkeypatch.setattr(lessons, setting, 100)
    assert lessons.check(root=demo.parent.parent) == 1
    assert says in capsys.readouterr().out


DIFFERENT = r"""
nb.cells.pop(3)                                     -> cell said: stored, and not there now
nb.cells.append(new_code_cell("1", id="more"))      -> cell more: there now, and not stored
nb.cells.insert(0, nb.cells.pop(3))                 -> cells: stored in the order card, imports
imports.source = "import re"                        -> source differs in line 1: stored 'import os', now 'import re'
said.outputs = [text("2 is not 4\n")]               -> '2 is not 4', stored '2 is not 3'
said.outputs.append(ERROR)                          -> now ['stdout', 'error KeyError']
figure.outputs[0].data["text/html"] = ""            -> image/png, text/html, text/plain
figure.outputs[1].data["text/markdown"] = "| a | c |\n|---|---|\n| 1 | 2 |" -> table | a | c | of 1 rows
imports.outputs.append(text("a warning", "stderr"))
said.outputs = [text("2 is  not\n3\n")]
said.outputs = [text("9")]; said.metadata.tags = ["varies"]
"""
"""What changed, and what is said of it: nothing of the last three."""


@pytest.mark.parametrize("change, says", [(*line, "")[:2] for line in lines_of(DIFFERENT)])
def test_differences_say_where_and_what(good, change, says):
    stored = lessons.Notebook(good).nb
    fresh = copy.deepcopy(stored)
    edit(fresh, change)
    found = lessons.differences(stored, fresh)
    assert len(found) == bool(says), found
    assert says in "".join(found)


TEXTS = """
1,000 tokens  -> 1,001 tokens    -> same
1,000 tokens  -> 1,002 tokens
2 ranks       -> 3 ranks
0.12 s        -> 0.13 s          -> same
0.12 s        -> 0.14 s
error 1.1e-06 -> error 7.0e-06   -> same
error 1.1e-06 -> error 1.2e-05
error 1.1e-06 -> error -1.1e-06
error 1.1e-06 -> error 0
error 0.5     -> error -0.5
fits          -> does not fit
Qwen3 has 2   -> Qwen4 has 2
1 and 2       -> 1 and 2 and 3
and           -> and 1
| 1 |  2 |    -> |   1 | 2 |     -> same
17            -> 17              -> same
"""
"""The same: a thousandth, one of the last decimal, which rounding turns, and errors that are both rounding errors. Not:
a count, which has no rounding, and the digit of a name."""


@pytest.mark.parametrize("was, now, same", [(*line, "")[:3] for line in lines_of(TEXTS)])
def test_texts_are_equal_word_for_word_and_numbers_up_to_rounding(was, now, same):
    assert (lessons.reworded(was, now) is None) == (lessons.reworded(now, was) is None) == bool(same)


def test_tables_in_html_are_compared_by_header_and_rows():
    html = "<b>fits</b><table class=x><tr><th>device</th><th>GiB</th></tr><tr><td>a</td><td>1</td></tr></table>"
    assert lessons.tables(html) == ["table <device | GiB> of 2 rows"]


def test_what_is_read_has_no_markup_and_nothing_of_a_figure():
    html = "<style>td {color: red}</style><table><tr><td>3</td>\n<td>GiB</td></tr></table>"
    outputs = [
        text("a\n"),
        text("noise", "stderr"),
        new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 880x418>"}),
        new_output("display_data", {"text/html": html, "text/plain": "an object"}),
        new_output("execute_result", {"text/plain": "4.5"}),
    ]
    assert lessons.wording(new_code_cell("1", outputs=outputs)) == "a 3 GiB 4.5"


LINKS = """
[3](03_x.ipynb)                               -> [3](../03_x.ipynb)
[r](../README.md#use)                         -> [r](../../README.md#use)
[s](solutions/01_x.ipynb)                     -> [s](01_x.ipynb)
[p](https://example.org/a) and [h](#remember) -> [p](https://example.org/a) and [h](#remember)
"""


@pytest.mark.parametrize("before, after", lines_of(LINKS))
def test_links_of_a_twin_lead_where_those_of_the_lesson_lead(before, after):
    assert lessons.relinked(before) == after


def test_lessons_are_chosen_by_number(good):
    for names in ([], ["01"], ["1"], ["01_demo"]):
        assert lessons.chosen(names, good.parent.parent) == [good]
    with pytest.raises(SystemExit, match="no lesson '7'"):
        lessons.chosen(["7"], good.parent.parent)
