"""The course's site: nothing is executed, everything it links to or shows is there, and the check finds what is not."""

import base64
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest
import yaml
from cases import ROOT, cells_of, lines_of, make_file, text_of
from nbformat.v4 import new_code_cell as code
from nbformat.v4 import new_markdown_cell as prose
from nbformat.v4 import new_notebook, new_output
from test_lab import CHROMIUM, FLAGS

import alstlib

SITE = ROOT / "notebooks/site"
sys.path.insert(0, str(SITE))
import builder  # noqa: E402
import checker  # noqa: E402

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="


needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("myst_nb") is None or importlib.util.find_spec("sphinx_book_theme") is None,
    reason="Sphinx is not installed (`make site` installs it)",
)


# The check


BODIES = """
<a href="b.html#here">b</a> <a href="#top">up</a><p id="top"></p> <a href="mailto:a@b">m</a>
<a href="https://example.org/nowhere">counted, not fetched</a>
<img src="i%20j.png" alt="a dot"><img src="data:image/png;base64,AA==" alt="a dot">
<svg><use href="#symbol"/></svg><p id="symbol"></p>
<script>const page = 'https://example.org/docs'</script>
<a href="c.html">c</a>                                      -> c.html does not exist
<a href="sub">a folder</a>                                  -> sub does not exist
<a href="b.html#there">b</a>                                -> b.html#there has no such anchor
<a href="#there">b</a>                                      -> #there has no such anchor
<img src="k.png" alt="a dot">                               -> loads k.png, which does not exist
<img src="i%20j.png">                                       -> i%20j.png has no alternative text
<img src="i%20j.png" alt="i%20j.png">                       -> i%20j.png has no alternative text
<img srcset="https://example.org/i.png 2x" alt="x">         -> loads https://example.org/i.png from elsewhere
<script src="https://example.org/a.js"></script>            -> loads https://example.org/a.js from elsewhere
<script>load('https://example.org/a.js')</script>           -> loads https://example.org/a.js from elsewhere
<link rel="stylesheet" href="https://example.org/a.css">    -> loads https://example.org/a.css from elsewhere
<style>@import 'https://example.org/a.css';</style>         -> loads https://example.org/a.css from elsewhere
<p style="background: url(https://example.org/i.png)"></p>  -> loads https://example.org/i.png from elsewhere
"""


@pytest.mark.parametrize("body, problem", [(*line, "")[:2] for line in lines_of(BODIES)])
def test_the_check_finds(tmp_path, body, problem):
    for name, text in {
        "a.html": "outside of the site", "site/i j.png": "", "site/sub/c.png": "", "site/b.html": '<p id="here"></p>',
        "site/a.html": f"<html><body>\n{body}</body></html>",
    }.items():  # fmt: skip
        make_file(tmp_path / name, text)
    found = checker.check(tmp_path / "site").problems
    assert len(found) == bool(problem)
    assert problem in "".join(found)
    assert all(line.startswith("a.html:2: ") for line in found)


def test_the_check_reads_style_sheets(tmp_path):
    text = "a {src: url('https://example.org/f.woff2')}\nb {background: url(here.png), url(gone.png), url(data:x)}"
    (tmp_path / "a.css").write_text(text)
    (tmp_path / "here.png").touch()
    assert checker.check(tmp_path).problems == [
        "a.css:1: loads https://example.org/f.woff2 from elsewhere",
        "a.css:2: loads gone.png, which does not exist",
    ]


# A small site


def shown(kind, content):
    return [new_output("execute_result", {kind: content})]


def write(path, *cells):
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    make_file(path, nbformat.writes(new_notebook(cells=cells, metadata=kernel)))


def repository(root, *links):
    """Two lessons, one solution; a cell that would write `root / executed`."""
    lessons = root / "notebooks"
    more = ", ".join(f"[{link}]({link})" for link in ("02_second.ipynb", *links))
    write(lessons / "index.ipynb", prose("# Course\n\n[start](01_first.ipynb), [README](../README.md)"))
    write(
        lessons / "01_first.ipynb",
        prose(f"# First: a lesson\n\nBelongs to `alst/x.py`. {more}, [folder](../alst), [code](../alst/x.py)"),
        code(f"open('{root}/executed', 'w')"),
        code("figure", outputs=shown("image/png", PNG), metadata={"alt": 'One dark dot, and "quotes"'}),
        code("table", outputs=shown("text/markdown", "| a | b |\n|---|---|\n| 1 MiB | $2 and $3 |")),
        prose(
            "## Remember\n\nThat. [All](.), [up](#Remember), [next](02_second.ipynb#Two,-or-more)\n\n$$x^2 \\cdot 3$$"
        ),
        code("folded = 1", metadata={"jupyter": {"source_hidden": True}}),
    )
    write(lessons / "02_second.ipynb", prose("# Second\n\n[back](01_first.ipynb#Remember)\n\n## Two, or more"))
    write(lessons / "solutions/01_first.ipynb", prose("# First: a lesson\n\n[lesson](../01_first.ipynb)"))
    make_file(root / "alst/x.py", '"""A <module>."""\n')
    make_file(root / "alst/deep/y.json", "{}\n")
    make_file(root / "README.md", "# Read me\n\n[a lesson](notebooks/02_second.ipynb)\n")
    (root / "alst/z.bin").write_bytes(b"\xff\x00")
    return root


def run(root, *args):
    command = [sys.executable, str(SITE / "builder.py"), "--root", str(root), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A small site, built strictly."""
    root = repository(tmp_path_factory.mktemp("repository"))
    done = run(root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 problems" in done.stdout
    return root / "build/site"


@needs_sphinx
def test_stored_outputs_are_shown_and_no_cell_is_executed(site):
    page = (site / "notebooks/01_first.html").read_text()
    ((alt, source),) = re.findall(r'<img alt="([^"]*)" src="([^"]*)"', page)
    assert alt == "One dark dot, and &quot;quotes&quot;"
    assert (site / "notebooks" / source).read_bytes() == base64.b64decode(PNG)
    assert re.search(r"<td[^>]*><p>1 MiB</p></td>", page)
    assert len(re.findall(r"<details[^>]*hide", page)) == 1
    assert "<math" in page
    assert "mathjax" not in page.lower()
    assert "executed" in page
    assert not (site.parents[1] / "executed").exists()


MENU = """
Lessons   |                         |
          | 01_first.html           | 01 First
          | 02_second.html          | 02 Second
Reference |                         |
          | ../README.html          | The project
Solutions |                         |
          | solutions/01_first.html | Solutions of 01
"""


@needs_sphinx
def test_navigation_is_in_the_order_of_the_lessons(site):
    page = (site / "notebooks/index.html").read_text()
    (menu,) = re.findall(r'<nav class="bd-links.*?</nav>', page, re.DOTALL)
    assert re.findall(r'caption-text">([^<]*)<|href="([^"#]*)">([^<]*)</a>', menu) == lines_of(MENU, "|")
    assert "<h1>Solutions: First: a lesson<" in (site / "notebooks/solutions/01_first.html").read_text()
    assert "url=notebooks/index.html" in (site / "index.html").read_text()


@needs_sphinx
def test_files_of_the_repository_are_pages_and_lessons_can_be_searched(site):
    page, source = (site / "notebooks/01_first.html").read_text(), site / "source"
    assert page.count('href="../source/alst/x.py.html"') == 2  # the link and the code span
    assert "A &lt;module&gt;." in (source / "alst/x.py.html").read_text()
    for folder, says in (
        ("alst", 'href="deep/index.html"'), ("alst", "z.bin (2 bytes)"),
        ("notebooks", 'href="../../notebooks/01_first.html"'),
    ):  # fmt: skip
        assert says in (source / folder / "index.html").read_text()
    assert (source / "alst/deep/y.json.html").exists()
    assert not (source / "notebooks/01_first.ipynb.html").exists()
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert "notebooks/01_first" in index
    assert "source/alst" not in index


@needs_sphinx
def test_broken_links_fail_the_build(tmp_path):
    """And where something else than a site would be replaced, nothing is built."""
    broken = {
        "09_none.ipynb": "notebooks/09_none.ipynb",
        "../alst/none.py": "alst/none.py",
        "../alst/z.bin": "alst/z.bin",
        "../..": "..",
        "02_second.ipynb#Nowhere": "'nowhere'",
    }
    root = repository(tmp_path, *broken)
    done = run(root)
    assert done.returncode == 1
    for link in broken.values():
        assert re.search(rf"WARNING: .*{re.escape(link)}[ ,]", done.stderr), link
    assert done.stderr.count("WARNING: ") == len(broken)
    assert run(root, "--lenient").returncode == 0
    assert (root / "build/site/notebooks/01_first.html").exists()
    assert "not a site" in run(root, "--lenient", "--out", str(root / "alst")).stderr
    assert (root / "alst/x.py").exists()


def test_a_lesson_stored_without_its_figures_is_found(tmp_path):
    page = tmp_path / "01_first.ipynb"
    write(page, code("figure", outputs=shown("image/png", PNG), metadata={"alt": "One dot"}))
    assert builder.without_figures(page) == []
    write(page, code("figure", metadata={"alt": "One dot"}))
    (problem,) = builder.without_figures(page)
    assert "no stored image" in problem


@pytest.mark.parametrize("ends", [KeyboardInterrupt, 2, 0])
def test_a_build_that_is_interrupted_leaves_the_old_site_whole(tmp_path, monkeypatch, ends):
    root, old = repository(tmp_path), [".buildinfo", "index.html", "old.html"]
    out = root / "build/site"

    def put(folder, names, text):
        for name in names:
            make_file(folder / name, text)

    def sphinx(arguments):
        put(Path(arguments[-1]), old[: 1 if ends else 2], "new")
        assert sorted(p.name for p in out.iterdir()) == old
        if ends is KeyboardInterrupt:
            raise KeyboardInterrupt
        return ends

    put(out, old, "old")
    monkeypatch.setitem(sys.modules, "sphinx.cmd.build", types.SimpleNamespace(main=sphinx))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises((SystemExit, KeyboardInterrupt)) if ends else contextlib.nullcontext():
        assert builder.build(root, out) == 0
    assert (out / "index.html").read_text() == ("old" if ends else "new")
    assert (out / "old.html").exists() == bool(ends)
    assert [p.name for p in out.parent.iterdir()] == ["site"]


# The page that says what fits


TABLE = yaml.safe_load("""
about:
  version: 7.8.9
  command: "alst plan --model {model} --gpu {gpu} --gpus {gpus} --host-memory {host}"
  trained: {all: "", LoRA: " --set 'model.lora={r: 16}'"}
  chunks: " --set options.chunk=4"
  ways: [whole, chunks]
  hosts: [half, usual]
  longest: {a/b: 900}
  gpus: {H100: [79.1, 8], GH200: [95.0, 1]}
  memory: {H100: [[1GB, 2GB], [1GB, 2GB], [1GB, 2GB], [4GB, 8GB]], GH200: [[3GB, 6GB]]}
a/b on 4:
  H100: &rows
  - - &fits
      - [1000, "0:01:00", 5.5, device]
      - [2000000, "0:07:00", 1.5, "host, k=4", hidden states on the host]
    - [[0, "2 GiB </script><b> are missing"], null]
  - [*fits, why it is refused]
  GH200: *rows
""")


def page_that_says_what_fits(folder):
    page, data = folder / "page.html", folder / "table.json"
    page.write_text("<h1>before</h1>\n<!-- table -->\nwithout a site\n<!-- /table -->\n<p>after</p>")
    data.write_text(json.dumps(TABLE))
    builder.with_table(page, data)
    return page


def test_the_page_holds_the_form_and_the_table(tmp_path):
    text = page_that_says_what_fits(tmp_path).read_text()
    assert re.fullmatch(r"(?s)<h1>before</h1>\n````{raw} html\n<form.*</script>\n````\n\n<p>after</p>", text)
    assert "without a site" not in text
    (held,) = re.findall(r'(?s)type="application/json"[^>]*>(.*?)</script>', text)
    assert json.loads(held) == TABLE
    labels = re.findall(r'<label for="([^"]*)">', text)
    assert labels == re.findall(r'<select id="([^"]*)"', text)
    assert len(labels) == 5


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian: apt-get install chromium)")
def test_a_browser_shows_the_machine_of_the_address(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    page_of = page_that_says_what_fits(tmp_path).as_uri()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page, errors = browser.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))

        expect, now = playwright.expect, page.get_by_label

        def says(*texts):
            for text in texts:
                expect(page.locator("#what-fits-answer")).to_contain_text(text, use_inner_text=True)

        page.goto(f"{page_of}#model=a/b&gpu=GH200&gpus=4&host=0&trained=0")
        says("a/b on 4 GH200, 4 nodes of 3GB, all", "whole 1,000 device 0:01:00 5.5")
        says("chunks, hidden states on the host 2,000,000 host, k=4 0:07:00", "trained on up to 900 tokens")
        says(".venv/bin/alst plan --model a/b --gpu GH200 --gpus 4 --host-memory 3GB --set options.chunk=4")
        now("What is trained").select_option("LoRA")
        says("whole none 2 GiB </script><b> are missing chunks not planned yet")
        now("Host memory of a node").select_option("1")
        says("refused. why it is refused")
        assert page.url.endswith("#model=a%2Fb&gpu=GH200&gpus=4&host=1&trained=1")
        page.locator("#what-fits-all a").first.press("Enter")
        says("on 4 H100, one node of 8GB, LoRA", "--host-memory 8GB --set 'model.lora={r: 16}'")
        assert now("GPU", exact=True).input_value() == "H100"
        expect(page.locator("#what-fits-all [aria-current]")).to_be_focused()
        assert not errors
        browser.close()


# The real one


def test_no_page_speaks_of_menus_or_keys(tmp_path):
    """Which the site has not; the index in JupyterLab does."""
    builder.stage(ROOT, tmp_path)
    spoken = re.compile(r"\*(Run|Kernel|File)\*|Run All|Restart Kernel|\bmenu\b|Shift\+|\(Tab\)")
    assert spoken.search(text_of(builder.INDEX))
    pages = sorted((tmp_path / "notebooks").rglob("*.ipynb"))
    assert len(pages) > 40
    said = {p.name: spoken.search(json.dumps(cells_of(p))) for p in pages}
    assert {name: found[0] for name, found in said.items() if found} == {}


def test_the_public_face_is_documented():
    named = re.findall(r"(?m)alstlib\.(?:base\.config\.)?(\w+)$", (SITE / "api.rst").read_text())
    assert set(alstlib.__all__) <= set(named)
