"""JupyterLab as a user meets it: a real browser opens what `make lab` opens, runs notebooks from the menu, moves
sliders with the keyboard. Needs Chromium (Debian: `apt-get install chromium`; CHROMIUM names another one) and
Playwright's Python package; nothing is downloaded. Screenshots are left in papermill_runs/out/browser/.

`make screenshots` takes the pictures of the pages anew, and writes down what they show: a test fails when that changed.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from cases import ROOT, cells_of, text_of, wait_for
from conftest import free_port
from test_repository import program, repository_files

CHROMIUM = next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM") or "chromium", "chromium-browser"))), None)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LANDING, LESSON = "work/index.ipynb", "work/12_max_sequence_length.ipynb"
RUN = ("928f31e1", "7e01efea", "tensors", "d18d5e5f", "c036f572", "30fa5046")
"""Code cells of the lesson that are run here, up to its first slider; `make check-lessons` runs them all."""
SHOTS = ROOT / "papermill_runs" / "out" / "browser"
IMAGES = ROOT / "notebooks" / "images"
SHOWN = {LANDING: ("welcome", "check-text", "wall"), LESSON: ("d6360579", "d18d5e5f", "c036f572")}
"""Cells that the pictures of the pages show; of the last, the figure before its table."""
DECOY = {"argv": ["false"], "display_name": "not this one", "language": "python"}


def checkout(folder):
    """A copy of this checkout (a browser saves what it runs), its notebooks without outputs."""
    for path in repository_files():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for path in (folder / "notebooks").glob("*.ipynb"):
        notebook = json.loads(text_of(path))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        path.write_text(json.dumps(notebook), encoding="utf-8")


def a_users_machine(home):
    """A home with a `python3` kernel of its own, another on JUPYTER_PATH, and an active conda with its own jupyter."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "CONDA", "XDG", "ALST_"))}
    for data in (home / ".local/share/jupyter", home / "shared"):
        (data / "kernels/python3").mkdir(parents=True)
        (data / "kernels/python3/kernel.json").write_text(json.dumps(DECOY))
    conda = home / "conda/bin"
    conda.mkdir(parents=True)
    for name in ("jupyter", "jupyter-lab"):
        program(conda / name, "exit 1")
    return env | {
        "HOME": str(home), "CONDA_PREFIX": str(home / "conda"), "PATH": f"{conda}:{env['PATH']}",
        "JUPYTER_PATH": str(home / "shared"), "JUPYTER_RUNTIME_DIR": str(home / "runtime"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def make_lab(folder, args):
    """The command that `make lab` runs once .venv is there, with this environment's programs."""
    command = ["make", "-s", "-n", "lab", f"BIN={Path(sys.executable).parent}", f"ARGS={args}"]
    lines = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()
    return "\n".join(lines[lines.index("env/install.sh") + 1 :])


@contextlib.contextmanager
def jupyterlab(folder):
    """The address that `make lab` opens in a browser, and the server. At the end nothing of it is left, or it fails."""
    home = folder / "home"
    env = a_users_machine(home)
    checkout(folder / "alst")
    lesson = folder / "alst/notebooks" / Path(LESSON).name
    notebook = json.loads(text_of(lesson))
    notebook["cells"] = [c for c in notebook["cells"] if c["cell_type"] == "markdown" or c["id"] in RUN]
    lesson.write_text(json.dumps(notebook), encoding="utf-8")
    args = f"--no-browser --port={free_port()} --ServerApp.port_retries=0"
    command = make_lab(folder / "alst", args)
    with open(folder / "server.log", "w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", command], cwd=folder / "alst", env=env, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    server, opened = psutil.Process(shell.pid), home / "runtime"
    family = [server]
    try:
        opens = "jpserver-file-to-run-*-open.html"
        assert wait_for(lambda: shell.poll() is not None or [*opened.glob(opens)], 90), f"{command} opens nothing"
        assert shell.poll() is None, (folder / "server.log").read_text()[-3000:]
        time.sleep(0.5)
        (address,) = re.findall(r'href="(http[^"]+)"', next(opened.glob(opens)).read_text())
        yield address, server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            family += server.children(recursive=True)
            os.killpg(shell.pid, signal.SIGTERM)  # of the kernels each has a group of its own: the server ends them
        _, left = psutil.wait_procs(family, timeout=30)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shell.wait(10)
    assert not left, f"the server left {left}"


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def digest(content):
    return hashlib.sha256(content).hexdigest()[:16]


def shown():
    """A digest of what the pictures of the pages show: the files beside the lessons, and of some cells the source and
    the tables that are stored. Not of pixels, which differ with each browser and its fonts."""
    listed = {p.relative_to(ROOT / "notebooks").parts[0] for p in repository_files() if ROOT / "notebooks" in p.parents}
    parts = [sorted(listed)]
    for name, ids in SHOWN.items():
        for cell in [cell for cell in cells_of(ROOT / "notebooks" / Path(name).name) if cell["id"] in ids]:
            data = [o.get("data", {}) for o in cell.get("outputs", ())]
            tables = ["".join(d[kind]) for d in data for kind in ("text/html", "text/markdown") if kind in d]
            parts.append(["".join(cell["source"]), *(re.sub(r"data:image/[^\"' ]+", "", table) for table in tables)])
    return digest(json.dumps(parts).encode())


def taken(folder):
    """What a folder of pictures is of, and which they are: what `screenshots.json` in it says."""
    return {"shown": shown(), **{p.name: digest(p.read_bytes()) for p in sorted(folder.glob("lab-*.png"))}}


class Window:
    """A browser's page with JupyterLab in it."""

    def __init__(self, page, folder):
        self.page, self.folder = page, folder
        page.set_default_timeout(60_000)

    @property
    def panel(self):
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def menu(self, *names):
        dialog = self.page.locator(".jp-Dialog")
        assert not dialog.count(), f"JupyterLab asks: {dialog.first.inner_text()}"
        bar = self.page.locator("#jp-MainMenu .lm-MenuBar-item")
        bar.filter(has_text=re.compile(f"^{names[0]}$")).click()
        for name in names[1:]:
            found = self.page.locator(".lm-Menu-itemLabel").filter(has_text=re.compile(f"^{name}$"))
            found.last.click()

    def ready(self, seconds=60):
        """Waits for the notebook, and for its kernel to have nothing to do."""
        self.panel.locator(".jp-Notebook").wait_for()
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=1000 * seconds)

    def run_all(self, name, seconds=150):
        """Run, Run All Cells; the code cells as the browser saves them when they have run."""
        self.menu("Run", "Run All Cells")
        end = time.monotonic() + seconds
        while True:
            self.page.wait_for_timeout(1500)
            self.ready(seconds)
            self.menu("File", "Save Notebook")
            self.page.wait_for_timeout(500)
            cells = [c for c in cells_of(self.folder / name) if c["cell_type"] == "code"]
            errors = ["\n".join(o["traceback"]) for c in cells for o in c["outputs"] if o["output_type"] == "error"]
            assert not errors, "\n".join(errors)
            if all(c["execution_count"] for c in cells):
                return cells
            assert time.monotonic() < end, f"{name} has not run in {seconds} s"

    def slide(self, number, key, shown):
        """Presses a key on a slider; what was shown before, and after it has changed."""
        read = "e => e.innerText + [...e.querySelectorAll('img')].map(i => i.src).join()"
        handle = self.panel.locator(".widget-slider .noUi-handle, .widget-slider [role=slider]").nth(number)
        text = self.panel.locator(shown).last
        end = time.monotonic() + 300  # what a figure shows may be simulated first, on a busy machine
        while not text.evaluate("e => e.innerText"):  # JupyterLab renders what is in view, and cells above it grow
            assert time.monotonic() < end, f"slider {number} shows nothing"
            handle.evaluate("e => e.scrollIntoView({block: 'center'})")
            self.page.wait_for_timeout(100)
        before = text.evaluate(read)
        handle.focus()
        handle.press(key)
        while (after := text.evaluate(read)) == before:
            assert time.monotonic() < end, f"nothing changed after {key} on slider {number}"
            self.page.wait_for_timeout(100)
        return before, after

    def show(self, heading, scroll="e.scrollIntoView()"):
        """Scrolls a heading to the top of the window, or as `scroll` says of the heading `e`."""
        self.panel.get_by_role("heading", name=heading).first.evaluate(f"e => {scroll}")
        self.page.wait_for_timeout(400)


def visit(address, folder, shots):
    """What a new user does first; screenshots on the way. Returns what was seen."""
    from playwright.sync_api import sync_playwright

    shots.mkdir(parents=True, exist_ok=True)
    seen = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1360, "height": 850})
            window = Window(page, folder)
            page.goto(address)
            window.ready()
            page.wait_for_timeout(2000)
            seen["asked"] = page.locator(".Toastify__toast").all_inner_texts()
            seen["title"] = page.locator(".jp-NotebookPanel h1").first.inner_text()
            seen["kernel"] = window.panel.locator(".jp-KernelName").inner_text()
            seen["landing"] = window.run_all(LANDING)
            window.show("Training on very long")
            page.screenshot(path=shots / "lab-landing.png")
            seen["figure"] = window.slide(0, "ArrowRight", ".widget-html-content")
            page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()  # the figure is drawn anew
            window.panel.locator(".widget-slider").first.evaluate("e => e.scrollIntoView()")
            page.wait_for_timeout(400)
            page.screenshot(path=shots / "lab-slider.png")
            window.panel.locator(".jp-OutputArea a", has_text="12 max sequence length").first.click()
            window.panel.get_by_role("heading", name="How far can it go?").wait_for()
            page.wait_for_timeout(3000)  # the status bar turns to this notebook: a kernel that starts refuses to run
            window.ready()
            seen["lesson"] = window.run_all(LESSON)
            seen["verdict"] = window.slide(0, "ArrowRight", ".widget-html-content")
            window.show("Memory by category", "e.closest('.jp-Cell').nextElementSibling.scrollIntoView({block: 'end'})")
            page.screenshot(path=shots / "lab-lesson.png")
        except BaseException:
            with contextlib.suppress(Exception):
                page.screenshot(path=shots / "failed.png")
            raise
        finally:
            browser.close()
    return seen


def why_not():
    """Why there is no browser to test with; empty if there is one."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "Playwright's Python package is not installed"
    if CHROMIUM is None:
        return "no Chromium on the PATH (Debian: apt-get install chromium; or set CHROMIUM)"
    return "" if shutil.which("make") else "make is not installed"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The folder of a server, its address and its process."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    folder = tmp_path_factory.mktemp("lab")
    with jupyterlab(folder) as (address, server):
        yield folder, address, server


def test_the_printed_address_is_the_landing_notebooks(lab):
    """What a user opens where `make lab` finds no browser, as root or on another machine."""
    printed = re.findall(r"http://\S+/lab\S*", (lab[0] / "server.log").read_text())
    assert printed
    assert all("/lab/tree/work/index.ipynb?token=" in address for address in printed), printed


def test_the_file_browser_lists_what_a_reader_opens(lab):
    """Lessons, pages and the folder of solutions, and not what they import."""
    site, token = lab[1].split("/lab/")[0], lab[1].split("token=")[1]
    with urllib.request.urlopen(f"{site}/api/contents/work?token={token}", timeout=60) as answer:
        names = {entry["name"] for entry in json.load(answer)["content"]}
    assert names >= {"index.ipynb", "00_where_memory_goes.ipynb", "tiny_alst.py", "training.md", "solutions"}
    hidden = {"checks", "images", "step_profiles.py", "layer_timeline.py", "one_gpu.py", "needle.py", "__pycache__"}
    assert names & hidden == set()


def test_the_pictures_of_the_pages_show_what_is_there():
    made = json.loads(text_of(IMAGES / "screenshots.json"))
    assert made == taken(IMAGES), (
        "the landing notebook, lesson 12 or the lessons' names changed: run `make screenshots`"
    )
    pages = text_of("README.md") + text_of("notebooks/runs.md")
    assert set(made) - {"shown"} == set(re.findall(r"images/(lab-[\w-]+\.png)", pages))


@pytest.mark.browser
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_user_runs_the_landing_notebook_and_a_lesson_in_jupyterlab(lab):
    folder, address, server = lab
    assert "/lab/tree/work/index.ipynb?token=" in address
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.split("/lab/")[0] + "/api/contents", timeout=20)
    seen = visit(address, folder / "alst", SHOTS)
    kernels = [cmdline(p) for p in server.children(recursive=True) if "ipykernel_launcher" in cmdline(p)]
    assert len(kernels) == 2
    assert seen["asked"] == []  # such as whether one wants Jupyter's news
    log = (folder / "server.log").read_text()
    said = [noise for noise in ("encryption", "non-installed server", "websocket_ping_timeout") if noise in log]
    assert not said, log
    assert {Path(k[0]).parent for k in kernels} == {Path(sys.executable).parent}
    assert seen["title"].startswith("Training on very long sequences")
    assert "not this one" not in seen["kernel"]
    assert "**Ready.**" in json.dumps(seen["landing"])
    before, after = seen["figure"]
    assert "data:image/png" in before
    assert "data:image/png" in after
    assert before.split("data:")[0] != after.split("data:")[0], "the figure changed, its table did not"
    assert all("tokens" in text for text in seen["verdict"]), seen["verdict"]


if __name__ == "__main__":
    import tempfile

    from PIL import Image

    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory() as made, jupyterlab(Path(made)) as (where, _):
        visit(where, Path(made) / "alst", SHOTS)
    for shot in SHOTS.glob("lab-*.png"):
        Image.open(shot).convert("RGB").quantize(128).save(IMAGES / shot.name, optimize=True)
        print(shlex.quote(str(IMAGES / shot.name)), (IMAGES / shot.name).stat().st_size // 1000, "KB")
    (IMAGES / "screenshots.json").write_text(json.dumps(taken(IMAGES), indent=1) + "\n", encoding="utf-8")
