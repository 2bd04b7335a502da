"""Lessons: executed, stored with their solutions, and held to their form.

`python notebooks/lessons.py run [NN ...]` executes lessons in fresh kernels of the running Python and stores the
outputs, and the twin of each lesson with its exercises answered in notebooks/solutions/.
`python notebooks/lessons.py check [NN ...]` executes them into memory and compares; it stores nothing.
What needs no execution is in RULES; `tests/test_lessons.py` asserts it too.

A lesson runs in one pass: its cells first, then, in the same kernel, each exercise's `metadata.solution` and its check.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import multiprocessing
import os
import posixpath
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

LESSONS = 25
"""How many there are, counted by hand, so that a lost lesson is seen (index.ipynb is none)."""
PAGES = ("index", "one_gpu")
"""Notebooks that are executed and stored as lessons are, and are none."""
SECONDS, ALL_SECONDS = 180, 450
"""Limits of one lesson, and of all when `AT_ONCE` run at a time; the environment's ALST_SLOW multiplies them. All shall
take less than 300 seconds on two quiet cores; machines differ by half, and a slow one is no defect of a lesson.
Processor time of the kernel and its ranks where that is less than what the clock says: on a busy machine."""
HANG_SECONDS = 5 * SECONDS
"""That a cell may take by the clock, and a kernel to start; multiplied likewise."""
AT_ONCE = 2
"""Notebooks that are checked at a time, each by a process of its own, whose children's processor time is theirs."""
FEW = 4
"""Notebooks that are checked with kernels of their own; the kernels of more are forked."""
IMPORTED = [
    "torch", "transformers.models.llama.modeling_llama", "alstlib.hf.attach", "alstlib.planner.question",
    "alstlib.planner.measure.simulate", "matplotlib.figure", "ipykernel.kernelapp", "nbclient",
]  # fmt: skip
"""What forked kernels have in common: it is imported once for all that a process checks."""
BYTES = 1_000_000
WORDS = 2_000
"""At most in a lesson's markdown, its card, tables and exercises included; see `words`."""
ROOT = Path(__file__).resolve().parents[1]
CARD = ("Question", "You need to know", "Belongs to", "Run time", "Hardware")
SECTIONS = ("Remember", "Exercises", "Next")
UNANSWERED, RIGHT = "not answered yet", "right"
WIDGETS = "application/vnd.jupyter.widget"


@dataclass
class Notebook:
    """A notebook file."""

    path: Path

    @property
    def root(self) -> Path:
        """The repository that it is in."""
        folder = self.path.parent
        return (folder.parent if folder.name == "solutions" else folder).parent

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nb(self) -> Any:
        return nbformat.reads(self.text, as_version=4)

    @property
    def code(self) -> list[Any]:
        return [c for c in self.nb.cells if c.cell_type == "code"]

    @property
    def markdown(self) -> list[Any]:
        return [c for c in self.nb.cells if c.cell_type == "markdown"]


def tagged(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def exercises(nb: Any) -> list[tuple[Any, Any]]:
    """Answer cells, each with the cell after it, which should be its check."""
    following = [*nb.cells[1:], None]
    return [(cell, after) for cell, after in zip(nb.cells, following) if tagged(cell, "exercise")]


def solvable(nb: Any) -> list[tuple[Any, Any]]:
    """Exercises that say how they are solved: all of a lesson's, none of a twin's."""
    return [(answer, check) for answer, check in exercises(nb) if "solution" in answer.metadata]


def lessons(root: Path = ROOT) -> list[Path]:
    return sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def notebooks(root: Path = ROOT) -> list[Path]:
    """The lessons, and the pages that are no lessons, where they exist: what is executed."""
    pages = (root / "notebooks" / f"{name}.ipynb" for name in PAGES)
    return [*(p for p in pages if p.exists()), *lessons(root)]


def twins(root: Path = ROOT) -> list[Path]:
    return sorted((root / "notebooks" / "solutions").glob("*.ipynb"))


def twin_path(lesson: Path) -> Path:
    return lesson.parent / "solutions" / lesson.name


# Executing


class Failed(Exception):
    """A lesson did not run to its end, or an exercise's solution is not right; says where and why."""


@dataclass
class Pass:
    """One execution: the lesson, its twin (None for a notebook that is no lesson), and how long it took."""

    nb: Any
    twin: Any
    seconds: float


def slow() -> float:
    return float(os.environ.get("ALST_SLOW") or 1)


def kernel_environment(root: Path, ipython: str) -> dict[str, str]:
    """This environment, with figures that need no kernel, this repository's package and nobody's startup files."""
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
    fixed = {
        "ALST_STATIC": "1",
        "ALST_STRICT": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "IPYTHONDIR": ipython,
    }
    waits = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin make minutes of seconds where the cores are shared
    return {**waits, **os.environ, **fixed, "PYTHONPATH": path}


def manager() -> Any:
    """A kernel of the running Python, whatever kernels are installed beside it."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))


def execute(path: Path) -> Pass:
    """The single pass over a notebook, in memory.

    Raises:
        Failed: an error in a cell, a kernel that died, a cell over the time limit, or a solution that is not right.
    """
    source = Notebook(path)
    work = normalised(source.nb)
    count = len(work.cells)
    for answer, check in solvable(work):
        if check is None or not tagged(check, "check"):
            raise Failed(f"cell {answer.id}: the cell after it is not tagged `check`")
        work.cells += [solved(answer), copy.deepcopy(check)]
        for cell in work.cells[-2:]:
            cell.id += "-solved"
    # a lesson's own runs are kept there and would not be run again
    for folder in (source.root / "papermill_runs" / "out").glob(f"lesson-{path.name[:2]}*"):
        shutil.rmtree(folder)
    began, used = time.perf_counter(), 0.0
    if any(c.cell_type == "code" for c in work.cells):
        used = _execute(work, source.root, path.parent)
    seconds = min(time.perf_counter() - began, used)
    tail, work.cells = work.cells[count:], work.cells[:count]
    work = normalised(work, outputs=True)
    for (answer, check), done in zip(solvable(work), tail[1::2]):
        if not stdout(check).startswith(UNANSWERED):
            raise Failed(f"cell {check.id}: says {stdout(check)!r} of an exercise that is not answered")
        if not stdout(done).startswith(RIGHT):
            raise Failed(f"cell {check.id}: says {stdout(done)!r} of the solution in cell {answer.id}")
    outputs = {cell.id.removesuffix("-solved"): cell.outputs for cell in tail}
    return Pass(work, twin_of(work, path.stem, outputs) if path in lessons(source.root) else None, seconds)


def _processor_seconds(*whose: int) -> float:
    """By default of all processes that this one started and that have ended, and theirs."""
    used = [resource.getrusage(one) for one in whose or (resource.RUSAGE_CHILDREN,)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _forked(cmd: list[str], env: dict[str, str], cwd: str, stderr: Any, **_: Any) -> Any:
    """A kernel, as jupyter_client's own `launch_kernel` starts one, but forked."""
    started = multiprocessing.get_context("forkserver").Process(target=_kernel, args=(cmd[3:], env, cwd, stderr.name))
    started.start()
    pid = started.pid or 0
    with suppress(ProcessLookupError):  # it has ended
        while started.is_alive() and os.getpgid(pid) != pid:  # it gets signals with all that it starts
            time.sleep(0.01)
    return SimpleNamespace(
        pid=pid, poll=lambda: started.exitcode, wait=lambda: started.join() or started.exitcode, kill=started.kill,
        terminate=started.terminate, send_signal=lambda number: os.kill(pid, number),
        stdin=None, stdout=None, stderr=None,
    )  # fmt: skip


def _kernel(arguments: list[str], env: dict[str, str], cwd: str, log: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *env["PYTHONPATH"].split(os.pathsep)]
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(argv=[*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])
    used = _processor_seconds(resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    (Path(env["IPYTHONDIR"]) / "used").write_text(str(used))


def fork_kernels(root: Path, imported: list[str]) -> None:
    """Let the kernels of this process be forked from one that has imported this."""
    env = kernel_environment(root, "")
    os.environ.update(env, MPLBACKEND="module://matplotlib_inline.backend_inline")  # as in a kernel
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
    local_provisioner.launch_kernel = _forked


def _execute(work: Any, root: Path, folder: Path) -> float:
    """In another thread, where nbclient leaves signals alone: an interrupt ends the cell, then this program.

    Returns: the processor time of the kernel and of what it started, in seconds.
    """
    km, begun, used = manager(), ["1"], _processor_seconds()
    with tempfile.TemporaryDirectory() as ipython, open(Path(ipython) / "stderr", "w+") as log:
        client = NotebookClient(
            work, km=km, timeout=round(HANG_SECONDS * slow()), startup_timeout=max(60, round(HANG_SECONDS * slow())),
            resources={"metadata": {"path": str(folder)}},
            record_timing=False, store_widget_state=False, coalesce_streams=True,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            on_cell_start=lambda cell, cell_index: begun.append(cell.id),
        )  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            end = pool.submit(client.execute, env=kernel_environment(root, ipython), stderr=log, cleanup_kc=True)
            try:
                end.result()
            except KeyboardInterrupt:
                if km.provisioner and (pid := km.provisioner.pid):
                    os.kill(pid, signal.SIGINT)
                wait([end], SECONDS)
                raise
            except CellTimeoutError:
                raise Failed(f"cell {begun[-1]}: not done after {HANG_SECONDS * slow():.0f} s") from None
            except DeadKernelError:
                log.seek(0)
                raise Failed(f"cell {begun[-1]}: its kernel died {log.read()[-500:]}".rstrip()) from None
            except CellExecutionError:
                raise Failed(_where(work)) from None
        if local_provisioner.launch_kernel is not _forked:
            return _processor_seconds() - used
        told = Path(ipython) / "used"  # as a forked kernel writes at its end, unless it was killed
        return float(told.read_text()) if told.exists() else math.inf


def _where(work: Any) -> str:
    cell, error = next((c, o) for c in work.cells for o in c.get("outputs", []) if o.output_type == "error")
    lines = plain("\n".join(error.traceback)).splitlines()[-12:]
    return "\n".join([f"cell {cell.id}: {error.ename}: {error.evalue}", *(f"    {line}" for line in lines)])


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def stdout(cell: Any) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def normalised(nb: Any, outputs: bool = False) -> Any:
    """A copy without what an execution or an editor leaves behind; with `outputs`, these stay."""
    nb = copy.deepcopy(nb)
    nb.nbformat, nb.nbformat_minor = 4, 5
    for name in ("widgets", "papermill"):
        nb.metadata.pop(name, None)
    nb.metadata["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    nb.metadata["language_info"] = {"name": "python"}
    for cell in nb.cells:
        for name in ("execution", "ExecuteTime", "papermill", "collapsed", "scrolled"):
            cell.metadata.pop(name, None)
        if cell.cell_type == "code" and not outputs:
            cell.outputs, cell.execution_count = [], None
    return nb


# The twin with solutions

MOVE = """import os

if os.path.basename(os.getcwd()) == "solutions":
    os.chdir("..")  # the paths of a lesson start in its folder"""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def solved(answer: Any) -> Any:
    cell = copy.deepcopy(answer)
    cell.source = cell.metadata.pop("solution", "")
    return cell


def relinked(text: str) -> str:
    """Markdown of a lesson with its relative links as they are from the folder below."""

    def moved(m: re.Match[str]) -> str:
        target = m[2] if is_external(m[2]) else posixpath.normpath(posixpath.join("..", m[2]))
        return m[1] + target.removeprefix("../solutions/") + m[3]

    return LINK.sub(moved, text)


def is_external(target: str) -> bool:
    return bool(re.match(r"[a-z]+:|#", target))


def twin_of(lesson: Any, name: str, outputs: dict[str, Any] | None = None) -> Any:
    """The lesson with its answer cells answered; `outputs` are those of the answer and check cells, by id."""
    twin = copy.deepcopy(lesson)
    for i, cell in enumerate(twin.cells):
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source)
        elif tagged(cell, "exercise"):
            twin.cells[i] = solved(cell)
    note = (
        f"**Solutions.** Generated from the lesson [{name}](../{name}.ipynb) by "
        f"`python notebooks/lessons.py run {name[:2]}` (`make lessons` for all): what is changed here is lost. "
        "The same lesson, its exercises answered."
    )
    first = next(i for i, c in enumerate(twin.cells) if c.cell_type == "code")
    twin.cells.insert(first, nbformat.v4.new_code_cell(MOVE, id="where"))
    twin.cells.insert(0, nbformat.v4.new_markdown_cell(note, id="generated"))
    count = 0
    for cell in twin.cells:
        if cell.cell_type == "code":
            count += 1
            cell.outputs = copy.deepcopy((outputs or {}).get(cell.id, cell.outputs))
            cell.execution_count = count
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
    return twin


# Comparing


def tables(text: str) -> list[str]:
    """Header and number of rows of each table in Markdown or HTML."""
    found = []
    for block in re.findall(r"(?m)(?:^[ \t]*\|.*\n?)+", text):
        lines = [line.strip() for line in block.splitlines()]
        if len(lines) > 1 and re.fullmatch(r"[|\s:-]+", lines[1]):
            found.append(f"table {lines[0]} of {len(lines) - 2} rows")
    for table in re.findall(r"(?s)<table.*?</table>", text):
        head = " | ".join(re.sub(r"<[^>]+>", "", h).strip() for h in re.findall(r"(?s)<th\b[^>]*>.*?</th>", table))
        found.append(f"table <{head}> of {len(re.findall(r'<tr[ >]', table))} rows")
    return found


def structure(cell: Any) -> list[str]:
    """What kinds of outputs a cell has: not their numbers, and nothing of what went to stderr."""
    found: list[str] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            if output.name != "stderr" and found[-1:] != [output.name]:
                found.append(output.name)
        elif output.output_type == "error":
            found.append(f"error {output.ename}")
        else:
            kinds = [f"{output.output_type} of {', '.join(sorted(output.data))}"]
            for mime in ("text/markdown", "text/html"):
                kinds += tables(text_of(output.data.get(mime, "")))
            found.append("; ".join(kinds))
    return found


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else "".join(value) if isinstance(value, list) else json.dumps(value)


def wording(cell: Any) -> str:
    """What a reader reads in the outputs of a cell, without the layout: one space between words."""
    found = [stdout(cell)]
    for data in (output.get("data", {}) for output in cell.get("outputs", [])):
        kinds = ("text/markdown", "text/html", *(() if any(m.startswith("image/") for m in data) else ("text/plain",)))
        found += [text_of(data[kind]) for kind in kinds if kind in data][:1]
    text = re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^>]+>|-{3,}", " ", plain(" ".join(found)))
    return " ".join(text.split())


NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?")
RELATIVE, NOISE = 1e-3, 1e-4
"""Another CPU adds up in another order: a sum in fp32 differs by 1e-6 then, and a loss after some optimizer steps by
1e-4. Numbers below NOISE are such differences themselves, and may be ten times as large there."""


def same_number(was: str, now: str) -> bool:
    """Numbers as they are printed are equal within RELATIVE, or within a unit of the last decimal, which rounding
    may turn."""
    a, b = (float(text.replace(",", "")) for text in (was, now))
    if 0 < abs(a) < NOISE and 0 < abs(b) < NOISE:
        return a * b > 0 and 0.1 <= a / b <= 10
    return abs(a - b) <= max(RELATIVE * abs(a), RELATIVE * abs(b), *(1.001 * _unit(text) for text in (was, now)))


def _unit(text: str) -> float:
    """One unit of the last decimal of a printed number; 0 for a whole number, which counts something."""
    digits, _, power = text.partition("e")
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2])) if "." in digits or power else 0.0


def reworded(was: str, now: str) -> str | None:
    """Where two texts differ in a word, or in a number by more than rounding; None where they do not."""
    olds, news = ([*NUMBER.finditer(text)] for text in (was, now))
    words = [re.sub(r"\s", "", part) for part in NUMBER.split(was)], [re.sub(r"\s", "", p) for p in NUMBER.split(now)]
    for i, (old, new) in enumerate(zip(*words)):
        last = i == min(len(olds), len(news))
        if old != new or (last and len(olds) != len(news)) or (not last and not same_number(olds[i][0], news[i][0])):
            shown = (
                text[max(0, (m[i - 1].start() if i else 0) - 20) : (m[i].end() + 20 if i < len(m) else len(text))][:160]
                for text, m in ((was, olds), (now, news))
            )
            return "says {!r}, stored {!r}".format(*reversed([*shown]))
    return None


def differences(stored: Any, fresh: Any) -> list[str]:
    """How two notebooks differ, in one line for each difference: the cell, what was stored, and what is now.

    Outputs are compared in their kinds; their text too, word for word, where the cell is not tagged `varies`.
    """
    old, new = ({c.id: c for c in nb.cells} for nb in (stored, fresh))
    found = [f"cell {i}: stored, and not there now" for i in old if i not in new]
    found += [f"cell {i}: there now, and not stored" for i in new if i not in old]
    if not found and list(old) != list(new):
        found.append(f"cells: stored in the order {', '.join(old)}; now {', '.join(new)}")
    for i in old:
        if i in new:
            found += [f"cell {i}: {what}" for what in _different(old[i], new[i])]
    return found


def _different(old: Any, new: Any) -> Iterator[str]:
    if old.cell_type != new.cell_type:
        yield f"stored as {old.cell_type}, now {new.cell_type}"
    if old.source != new.source:
        pairs = zip([*old.source.splitlines(), ""], [*new.source.splitlines(), ""])
        line, (was, now) = next((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1])
        yield f"source differs in line {line}: stored {was!r}, now {now!r}"
    was, now = structure(old), structure(new)
    if was != now:
        yield f"outputs: stored {was or 'none'}, now {now or 'none'}"
    elif "outputs" in old and not tagged(new, "varies") and (what := reworded(wording(old), wording(new))):
        yield f"outputs: {what}"


# Rules that need no execution: each yields what is wrong


def well_formed(book: Notebook) -> Iterator[str]:
    raw = json.loads(book.text)
    if (raw["nbformat"], raw["nbformat_minor"]) != (4, 5):
        yield f"nbformat is {raw['nbformat']}.{raw['nbformat_minor']}, not 4.5"
    ids = [c.get("id", "") for c in raw["cells"]]
    odd = [i for i in ids if not re.fullmatch(r"[\w-]{1,24}", i)]
    yield from (f"cell id {i!r}: wanted 1 to 24 of a-z, A-Z, 0-9, - and _" for i in odd)
    yield from (f"cell id {i!r} is there more than once" for i in sorted({i for i in ids if ids.count(i) > 1}))
    if raw["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "kernelspec is not python3"


def small(book: Notebook) -> Iterator[str]:
    if len(book.text.encode()) >= BYTES:
        yield f"{len(book.text.encode()):,} bytes, less than {BYTES:,} wanted"


def stateless(book: Notebook) -> Iterator[str]:
    if "widgets" in book.nb.metadata:
        yield "metadata.widgets: widget state is stored"
    for cell in book.code:
        if any(WIDGETS in mime for o in cell.outputs for mime in o.get("data", {})):
            yield f"cell {cell.id}: a widget is stored: with ALST_STATIC=1 it must leave something plain"
        if "execution" in cell.metadata:
            yield f"cell {cell.id}: metadata.execution holds times of one execution"


def counted(book: Notebook) -> Iterator[str]:
    counts = [c.execution_count for c in book.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)} in order"


MACHINE = re.compile(
    r"(?<![\w.~}*:/-])/(?:work|root|home|Users|tmp|var|opt|mnt|srv)/\w|\b[A-Z]:\\\\?Users\b|\bat 0x[0-9a-f]{6,}"
)


def portable(book: Notebook) -> Iterator[str]:
    """No error, nothing on stderr, and nothing of one machine in what is stored."""
    for cell in book.code:
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {cell.id}: an error is stored: {output.ename}"
            if output.get("name") == "stderr":
                yield f"cell {cell.id}: stderr is stored: {plain(output.text)[:80]!r}"
            data = {mime: value for mime, value in output.get("data", {}).items() if "image/" not in mime}
            texts = [output.get("text", ""), *map(text_of, data.values())]
            for found in (m for text in texts for m in MACHINE.finditer(text)):
                yield f"cell {cell.id}: outputs name a place of one machine: {found.string[found.start() :][:60]!r}"


def has_figure(cell: Any) -> bool:
    data = [o.get("data", {}) for o in cell.get("outputs", [])]
    return any(m.startswith("image/") for d in data for m in d) or any(
        re.search(r"<(svg|img|canvas)\b", text_of(d.get("text/html", ""))) for d in data
    )


def described(book: Notebook) -> Iterator[str]:
    for cell in book.code:
        alt = cell.metadata.get("alt")
        if has_figure(cell) and not (isinstance(alt, str) and len(alt.split()) >= 4):
            yield f"cell {cell.id}: shows a figure; metadata.alt should describe it in a sentence"


PLACE = re.compile(r"`((?:alstlib|tests|notebooks|env|papermill_runs/(?:specs|results))/[\w./-]+)`")


def linked(book: Notebook) -> Iterator[str]:
    """Links, and files of the repository named in backquotes."""
    for cell in book.markdown:
        for target in (m[2] for m in LINK.finditer(cell.source)):
            if not is_external(target) and not (book.path.parent / target.partition("#")[0]).exists():
                yield f"cell {cell.id}: link to {target}, which does not exist"
        for name in PLACE.findall(cell.source):
            if not (book.root / name).exists():
                yield f"cell {cell.id}: names {name}, which does not exist"


def carded(book: Notebook) -> Iterator[str]:
    first = book.nb.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "the first cell is not a title (# ...)"
    rows = re.findall(r"(?m)^\| \*\*(.+?)\*\* \| *(.*?) *\|$", first.source)
    if tuple(name for name, _ in rows) != CARD:
        yield f"the card's rows are {[name for name, _ in rows]}, not {list(CARD)}"
    yield from (f"the card says nothing under {name!r}" for name, text in rows if not text)
    named = re.findall(r"`(\w+)/[\w/]+\.py`", dict(rows).get("Belongs to", ""))
    if not {"alstlib", "papermill_runs"} & {*named}:
        yield "'Belongs to' names no `alstlib/...py`"
    if "tests" not in named:
        yield "'Belongs to' names no `tests/...py`"
    # that they exist is `linked`'s


def parametrized(book: Notebook) -> Iterator[str]:
    found = [i for i, c in enumerate(book.code) if tagged(c, "parameters")]
    if found != [1]:
        yield f"code cells tagged `parameters`: {found}; wanted the second one, after the imports"
    if not book.code or not re.match(r"(?:#.*\n)*(?:import|from) ", book.code[0].source):
        yield "the first code cell does not begin with the imports"


def headings(book: Notebook) -> list[str]:
    return [m[1].strip() for c in book.markdown for m in re.finditer(r"(?m)^## (.+)$", c.source)]


def words(book: Notebook) -> int:
    """Of the markdown, as a reader meets them: a word has a letter, a formula is one, a link's target is none."""
    text = LINK.sub(lambda m: m[1] + m[3], "\n".join(c.source for c in book.markdown))
    text = re.sub(r"(?s)\$\$.*?\$\$|\$[^$\n]*\$", " formula ", text)
    return sum(bool(re.search(r"[^\W\d_]", part)) for part in text.split())


def brief(book: Notebook) -> Iterator[str]:
    if (found := words(book)) > WORDS:
        yield f"{found:,} words, at most {WORDS:,} wanted"


def sectioned(book: Notebook) -> Iterator[str]:
    found = headings(book)
    if tuple(found[-3:]) != SECTIONS:
        yield f"the last sections are {found[-3:]}, not {list(SECTIONS)}"
    if not re.match(r"## Next\n[^#]*?\]\([^)]+\.ipynb", book.nb.cells[-1].source):
        yield "the last cell is not '## Next' with a link to a notebook"


def drilled(book: Notebook) -> Iterator[str]:
    """Exercises: task, answer, check, in this order and last; unanswered as stored."""
    pairs, cells = exercises(book.nb), book.nb.cells
    if not pairs:
        yield "there is no exercise"
    for number, (answer, check) in enumerate(pairs, 1):
        task = cells[cells.index(answer) - 1]
        if task.cell_type != "markdown" or f"### Exercise {number}\n" not in task.source:
            yield f"cell {answer.id}: the cell before it is not the task, with the heading '### Exercise {number}'"
        if check is None or not tagged(check, "check"):
            yield f"cell {answer.id}: the cell after it is not tagged `check`"
        elif not stdout(check).startswith(UNANSWERED):
            yield f"cell {check.id}: as stored it says {stdout(check)[:60]!r}, not {UNANSWERED!r}"
        yield from _unsolved(answer)
    known = {c.id for pair in pairs for c in pair if c is not None}
    starts = [i for i, c in enumerate(cells) if c.cell_type == "markdown" and "## Exercises" in c.source.splitlines()]
    ends = [i for i, c in enumerate(cells) if c.cell_type == "markdown" and "## Remember" in c.source.splitlines()]
    after = [c for c in (cells[ends[0] :] if ends else []) if c.cell_type == "code" and c.id not in known]
    yield from (f"cell {c.id}: comes after '## Remember' and is no exercise" for c in after)
    if starts and any(cells.index(answer) < starts[0] for answer, _ in pairs):
        yield "an exercise comes before '## Exercises'"


def _unsolved(answer: Any) -> Iterator[str]:
    solution = answer.metadata.get("solution")
    if not isinstance(solution, str) or not solution.strip():
        yield f"cell {answer.id}: metadata.solution is no source"
        return
    try:
        missing = _bound(answer.source) - _bound(solution)
    except SyntaxError as error:
        yield f"cell {answer.id}: {error}"
        return
    if missing:
        yield f"cell {answer.id}: its solution does not set {', '.join(sorted(missing))}"


def _bound(source: str) -> set[str]:
    tree = ast.parse(source)
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def judged(book: Notebook) -> Iterator[str]:
    """An exercise asks for code, and no check shows an answer: each is one call of `judge`, by the exercise's name."""
    lesson, pairs = book.path.name[:2], exercises(book.nb)
    if not any(re.search(r"(?s)\bdef .*raise NotImplementedError", answer.source) for answer, _ in pairs):
        yield "no exercise asks for code: an answer cell with a function whose body is `raise NotImplementedError`"
    for number, check in ((i, check) for i, (_, check) in enumerate(pairs, 1) if check is not None):
        if not re.fullmatch(rf'judge\("{lesson}\.{number}", (\w+|lambda: [^\n]+)\)', check.source.strip()):
            yield f'cell {check.id}: is more than `judge("{lesson}.{number}", ...)`'


def announced(book: Notebook) -> Iterator[str]:
    """Before each figure: what to see."""
    said = False
    for cell in book.nb.cells:
        said = said or (cell.cell_type == "markdown" and "**What to see:**" in cell.source)
        if has_figure(cell):
            if not said:
                yield f"cell {cell.id}: shows a figure without a '**What to see:** ...' before it"
            said = False


def twinned(book: Notebook) -> Iterator[str]:
    """The twin says what the lesson says."""
    path, again = twin_path(book.path), f"run `python notebooks/lessons.py run {book.path.name[:2]}`"
    if not path.exists():
        yield f"there is no solutions/{path.name}: {again}"
        return
    stored, wanted = Notebook(path).nb, twin_of(normalised(book.nb), book.path.stem)
    for nb in (stored, wanted):
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.outputs = []
    yield from (f"solutions/{path.name}: {what}: {again}" for what in differences(stored, wanted))


def answered(book: Notebook) -> Iterator[str]:
    if not (book.path.parent.parent / book.path.name).exists():
        yield "there is no lesson of this name"
    for cell in book.code:
        if tagged(cell, "check") and not stdout(cell).startswith(RIGHT):
            yield f"cell {cell.id}: says {stdout(cell)[:60]!r}, not {RIGHT!r}"


EVERY: tuple[Callable[[Notebook], Iterable[str]], ...] = (
    well_formed, small, stateless, counted, portable, described, linked,
)  # fmt: skip
RULES = {
    "lesson": (*EVERY, carded, parametrized, brief, sectioned, drilled, judged, announced, twinned),
    "twin": (*EVERY, answered),
    "index": EVERY,
}


def kind(path: Path) -> str:
    return "twin" if path.parent.name == "solutions" else "lesson" if path.name[:2].isdigit() else "index"


def problems(path: Path) -> list[str]:
    """What is wrong with a notebook as it is stored."""
    book = Notebook(path)
    return [f"{rule.__name__}: {what}" for rule in RULES[kind(path)] for what in rule(book)]


def miscounted(root: Path = ROOT) -> list[str]:
    found = len(lessons(root))
    return [] if found == LESSONS else [f"{found} lessons, and LESSONS in notebooks/lessons.py says {LESSONS}"]


# The two commands


def chosen(names: Sequence[str], root: Path) -> list[Path]:
    """Notebooks by number or name (05, 5, index); all of them without any."""
    everything = notebooks(root)
    if not names:
        return everything
    found = []
    for name in names:
        wanted = [p for p in everything if p.stem == name or (name.isdigit() and p.name[:2] == name.zfill(2))]
        if not wanted:
            raise SystemExit(f"no lesson {name!r}; there are: {' '.join(p.stem for p in everything)}")
        found += wanted
    return found


def say(path: Path, seconds: float | None, wrong: Sequence[str]) -> None:
    took = "" if seconds is None else f"{seconds:7.1f} s"
    print(f"{path.stem:28s}{took:>10s}  {'ok' if not wrong else ''}".rstrip(), flush=True)
    for line in wrong:
        print(f"    {line}", flush=True)


def run(names: Sequence[str] = (), root: Path = ROOT) -> int:
    """Executes and stores. A lesson that fails is left as it was. Returns the number of problems."""
    bad, total = 0, 0.0
    for path in chosen(names, root):
        try:
            done = execute(path)
        except Failed as error:
            say(path, None, [str(error)])
            bad += 1
            continue
        nbformat.write(done.nb, path)
        wrong = []
        if done.twin is not None:
            twin_path(path).parent.mkdir(exist_ok=True)
            nbformat.write(done.twin, twin_path(path))
            wrong = [f"solutions: {what}" for what in problems(twin_path(path))]
        wrong = [*problems(path), *wrong]
        total += done.seconds
        bad += len(wrong)
        say(path, done.seconds, wrong)
    print(f"{'all':28s}{total:8.1f} s" + (f"  {bad} problems" if bad else ""))
    return bad


def checked(path: Path) -> tuple[float | None, list[str]]:
    """How long a notebook takes (None where it fails), and what is wrong with it."""
    wrong = problems(path)
    if twin_path(path).exists():
        wrong += [f"solutions: {what}" for what in problems(twin_path(path))]
    try:
        done = execute(path)
    except Failed as error:
        return None, [*wrong, str(error)]
    seconds = done.seconds
    wrong += differences(Notebook(path).nb, done.nb)
    if done.twin is not None and twin_path(path).exists():
        wrong += [f"solutions: {what}" for what in differences(Notebook(twin_path(path)).nb, done.twin)]
    if seconds > SECONDS * slow():
        wrong.append(f"takes {seconds:.0f} s, at most {SECONDS * slow():.0f} s wanted")
    return seconds, wrong


def check(names: Sequence[str] = (), root: Path = ROOT) -> int:
    """Executes into memory, `AT_ONCE` notebooks at a time, and compares with what is stored. Returns the number of
    problems."""
    bad, total, paths = 0, 0.0, chosen(names, root)
    new = multiprocessing.get_context("spawn")  # a fork of a process with threads may wait for ever
    forked = {"initializer": fork_kernels, "initargs": (root, IMPORTED)} if len(paths) > FEW else {}
    with ProcessPoolExecutor(AT_ONCE, new, **forked) if len(paths) > 1 else nullcontext() as pool:
        for path, (seconds, wrong) in zip(paths, (pool.map if pool else map)(checked, paths)):
            total += seconds or 0.0
            bad += len(wrong)
            say(path, seconds, wrong)
    whole = [] if names else [*miscounted(root), *(f"{p.name}: no lesson of this name" for p in stray(root))]
    by_clock = total / (AT_ONCE if pool else 1)
    if by_clock > ALL_SECONDS * slow():
        whole.append(f"all together take {by_clock:.0f} s, at most {ALL_SECONDS * slow():.0f} s wanted")
    bad += len(whole)
    print(f"{'all':28s}{total:8.1f} s" + (f"  {bad} problems" if bad else ""))
    for line in whole:
        print(f"    {line}")
    return bad


def stray(root: Path = ROOT) -> list[Path]:
    """Twins without a lesson."""
    return [p for p in twins(root) if not (p.parent.parent / p.name).exists()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python notebooks/lessons.py", description="Execute the lessons.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("run", "execute and store"), ("check", "execute and compare with what is stored")):
        command = commands.add_parser(name, help=what)
        command.add_argument("lessons", nargs="*", metavar="NN", help="a number such as 05, or index; all without any")
    given = parser.parse_args(argv)
    return int(bool({"run": run, "check": check}[given.command](given.lessons)))


if __name__ == "__main__":
    sys.exit(main())
