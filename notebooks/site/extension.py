"""What Sphinx lacks for this site: links to files of the repository, pages that show them, formulas, docstrings.

A link to a file or folder that is no page of the site (`../alstlib/base/config.py`, `../papermill_runs/specs`) leads
to a page that shows it, and so does a code span that names one (`tests/tiled/test_tiled.py`).
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from myst_parser.slugs import github_slugify
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

log = logging.getLogger(__name__)
LARGEST = 300_000
"""Bytes of a file that is shown."""
LINKED: set[str] = set()
"""Files and folders that this build's pages link to."""
NAVIGATION: dict[tuple[Any, ...], str] = {}
"""This build's navigation on pages that are not in it."""
WIDE = 8
"""Columns of a table from which on it is set smaller."""
COLON = "\ue000"
"""Stands for a colon that napoleon is not to see."""
HIDDEN = re.compile(r"(^|/)(\.[^/]+|__pycache__|out|build|dist|[^/]+\.egg-info)(/|$)")


def shown(path: Path) -> bool:
    """Is there a page for this file or folder?"""
    if path.is_dir():
        return True
    try:
        return path.is_file() and path.stat().st_size <= LARGEST and path.read_text(encoding="utf-8") is not None
    except UnicodeDecodeError:
        return False


def slug(anchor: str | None) -> str | None:
    """An anchor as it is here: JupyterLab's keep capitals and commas (`#The-papers,-one-by-one`)."""
    return github_slugify(unquote(anchor)) if anchor else None


def page_name(root: Path, name: str) -> str:
    return f"source/{name}/index" if (root / name).is_dir() else f"source/{name}"


class RepositoryLinks(SphinxTransform):
    """Relative links, and code spans that name a file, lead to pages of this site."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        root = Path(self.config.repository_root)
        here = posixpath.dirname(self.env.docname)
        for kind in (addnodes.pending_xref, addnodes.download_reference):
            for node in list(self.document.findall(kind)):
                if node.get("reftype") == "myst" and not node["reftarget"].startswith("#"):
                    self.link(node, root, here)
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext()
            inside = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)
            if (
                "/" not in name
                or name.startswith("/")  # a file of the reader's machine
                or " " in name
                or HIDDEN.search(name.rstrip("/"))
                or any(isinstance(p, inside) for p in ancestors(literal))
            ):
                continue
            name = name.rstrip("/")
            if (root / name).exists() and (new := self.reference(root, name, [literal.deepcopy()])):
                literal.replace_self(new)

        for node in self.document.findall(nodes.reference):
            if node.get("id_link"):  # within the page
                node["refuri"] = f"#{slug(node['refuri'])}"

    def link(self, node: nodes.Element, root: Path, here: str) -> None:
        if node.get("refdomain") == "doc":
            node["reftargetid"] = slug(node["reftargetid"])
            return
        path, _, anchor = node["reftarget"].partition("#")
        name = posixpath.normpath(posixpath.join(here, path))
        new = None if name.startswith("..") else self.reference(root, name, node.children, anchor)
        if new is None:
            log.warning("link to %s, which is not in the repository or cannot be shown", name, location=node)
            new = nodes.inline("", "", *node.children)
        node.replace_self(new)

    def reference(self, root: Path, name: str, children: list[nodes.Node], anchor: str = "") -> nodes.Element | None:
        docname = self.env.path2doc(str(Path(self.env.srcdir) / name))
        if docname in self.env.found_docs:
            where = {"refdomain": "doc", "reftarget": docname, "reftargetid": slug(anchor)}
            new = addnodes.pending_xref(reftype="myst", refdoc=self.env.docname, refexplicit=True, **where)
        elif shown(root / name):
            page = page_name(root, name)
            LINKED.add(name)
            uri = self.app.builder.get_relative_uri(self.env.docname, page)
            new = nodes.reference("", "", internal=True, refuri=uri + (f"#{anchor}" if anchor else ""))
        else:
            return None
        new += children
        return new


class Tables(SphinxTransform):
    """Cells such as `95.64 MiB` or `9.0e-07` stay on one line, and tables of many columns become smaller."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for table in self.document.findall(nodes.table):
            if len(list(table.findall(nodes.colspec))) >= WIDE:
                table["classes"].append("wide")
        for cell in self.document.findall(nodes.entry):
            if len(cell.astext()) <= 16:
                cell["classes"].append("short")


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that was linked, and for the folders above and below."""
    root = Path(app.config.repository_root)

    def link(page: str, other: str, text: str) -> str:
        return f'<a href="{html.escape(app.builder.get_relative_uri(page, other))}">{text}</a>'

    waiting, done = set(LINKED), set()
    while waiting:
        name = waiting.pop()
        done.add(name)
        path, page = root / name, page_name(root, name)
        if path.is_dir():
            entries = [p for p in sorted(path.iterdir()) if not HIDDEN.search(p.relative_to(root).as_posix())]
            below, items = set(), []
            for entry in entries:
                inside = entry.relative_to(root).as_posix()
                docname = app.env.path2doc(str(Path(app.srcdir) / inside))
                text = html.escape(entry.name) + "/" * entry.is_dir()
                if docname in app.env.found_docs:
                    items.append(link(page, docname, text))
                elif shown(entry):
                    below.add(inside)
                    items.append(link(page, page_name(root, inside), text))
                else:
                    items.append(f"{text} ({entry.stat().st_size:,} bytes)")
            body = f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
        else:
            below = set()
            body = show(path)
        parent = posixpath.dirname(name)
        above = {parent} if parent else set()
        waiting |= (below | above) - done
        crumbs = f"{link(page, page_name(root, parent), html.escape(parent))}/" if parent else ""
        title = f"<h1>{crumbs}{html.escape(posixpath.basename(name))}</h1>"
        yield page, {"title": name, "body": f'<section class="repository-file">{title}{body}</section>'}, "page.html"


def show(path: Path) -> str:
    """A file highlighted, with an anchor a line (#L-12)."""
    text = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    options = {"linenos": "inline", "lineanchors": "L", "anchorlinenos": True, "wrapcode": True}
    return highlight(text, lexer, HtmlFormatter(**options))


def formula(writer: Any, node: nodes.Element) -> None:
    """TeX as MathML, which needs no script."""
    try:
        writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    except MathError as error:
        log.warning("formula %r: %s", node.astext(), error, location=node)
        writer.body.append(f"<code>{html.escape(node.astext())}</code>")
    raise nodes.SkipNode


def plain_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks: stars and bars outside of these mean nothing, and what comes
    before the colon in a field's is not its type."""
    for i, line in enumerate(lines):
        parts = line.split("`")
        lines[i] = "`".join(p if j % 2 else re.sub(r"([*|])", r"\\\1", p) for j, p in enumerate(parts))
        if what in ("attribute", "property"):
            lines[i] = lines[i].replace(":", COLON)
    if what == "class" and dataclasses.is_dataclass(obj):
        documented = [f for f in dataclasses.fields(obj) if "doc" in f.metadata]
        if documented:
            lines += ["", "Fields:", ""]
        for f in documented:
            made = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            lines += [f"* ``{f.name}: {f.type}{'' if made is dataclasses.MISSING else f' = {made!r}'}``: "
                      + f.metadata["doc"].replace("*", r"\*")]  # fmt: skip


def restore_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace(COLON, ":") for line in lines]


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Where the page of a documented object's source is, from api.html."""
    if domain != "py" or not info["module"]:
        return None
    module = importlib.import_module(info["module"])
    found: Any = module
    for part in info["fullname"].split("."):
        found = getattr(found, part, None)
    found = inspect.unwrap(found.fget if isinstance(found, property) and found.fget else found)
    try:
        file, (_, line) = Path(inspect.getsourcefile(found) or ""), inspect.getsourcelines(found)
    except (TypeError, OSError):  # a field
        return None
    package = importlib.import_module(info["module"].partition(".")[0])
    name = file.relative_to(Path(package.__file__ or "").parents[1]).as_posix()
    LINKED.add(name)
    return f"source/{name}.html#L-{line}"


def share_navigation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Pages that show files stand in no navigation: it is the same on all of one depth, and made once for them."""
    if not page.startswith("source/"):
        return
    made, depth = context["toctree"], page.count("/")

    def toctree(**how: Any) -> str:
        key = depth, *sorted(how.items())
        if key not in NAVIGATION:
            NAVIGATION[key] = made(**how)
        return NAVIGATION[key]

    context["toctree"] = toctree


def finish(app: Sphinx, error: Exception | None) -> None:
    """The folder's index.html leads to the landing page; the themes' own templates are no pages."""
    page = f"{app.config.root_doc}.html"
    title = html.escape(app.config.html_title)
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="refresh" content="0; url={page}"></head>
<body><a href="{page}">{title}</a></body></html>
"""
    for template in (Path(app.outdir) / "_static").glob("*.html"):
        template.unlink()
    if error is None:
        (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("repository_root", "", "env")
    LINKED.clear()
    NAVIGATION.clear()
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.add_transform(RepositoryLinks)
    app.add_transform(Tables)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme's
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)
    app.connect("autodoc-process-docstring", restore_colons, priority=600)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
