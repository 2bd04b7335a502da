"""Checks a built site without a network: links, anchors, images and their alternative texts, nothing from elsewhere.

`python notebooks/site/checker.py build/site` prints what is wrong and exits 1 if anything is.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    **dict.fromkeys(("script", "iframe", "embed", "audio", "input"), ("src",)),
    **dict.fromkeys(("img", "source"), ("src", "srcset")),
    **dict.fromkeys(("use", "image"), ("href", "xlink:href")),
    "video": ("src", "poster"),
    "object": ("data",),
    "link": ("href",),
}
"""What a browser loads by itself, by tag."""
CSS_URL = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
COLOURED = re.compile(r'<span( class="[^"]*")?>|</span>')
"""Most tags of a page that shows a file; there is nothing to check about them."""
SCRIPT_LOADS = re.compile(r"""["'`]((?:https?:)?//[\w.-]+\.\w+/[^"'`\s]*\.(?:m?js|css|json|wasm|woff2?))["'`]""")


class Page(HTMLParser):
    """The ids, links and loaded files of one page, with the lines they are on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[int, str]] = []
        self.loads: list[tuple[int, str]] = []
        self.alts: list[tuple[int, str, str]] = []
        self._inside = ""
        self.feed(COLOURED.sub("", path.read_text(encoding="utf-8")))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        self._inside = tag if tag in ("script", "style") else ""
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag in ("a", "area") and "href" in given:
            self.links.append((line, given["href"]))
        for name in LOADS.get(tag, ()):
            if name in given:
                urls = [u.split()[0] for u in given[name].split(",")] if name == "srcset" else [given[name]]
                self.loads += [(line, url) for url in urls]
        self.loads += [(line, url) for url in css_urls(given.get("style", ""))]
        if tag == "img":
            self.alts.append((line, given.get("src", ""), given.get("alt", "").strip()))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        found = {"script": script_urls, "style": css_urls}.get(self._inside)
        if found:
            self.loads += [(self.getpos()[0], url) for url in found(data)]


def css_urls(text: str) -> list[str]:
    return [m[1] or m[2] for m in CSS_URL.finditer(text)]


def script_urls(text: str) -> list[str]:
    """Files elsewhere that a script names."""
    return SCRIPT_LOADS.findall(text)


@dataclass
class Report:
    """What is wrong with a site, and how much was looked at."""

    problems: list[str]
    counts: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        return ", ".join([*(f"{n:,} {what}" for what, n in self.counts.items()), f"{len(self.problems)} problems"])


def elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc) or url.startswith(("http:", "https:"))


def check(site: Path) -> Report:
    """Look at every page and style sheet below `site`."""
    site = site.resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    sheets = sorted(site.rglob("*.css"))
    problems: list[str] = []
    counts = dict.fromkeys(("pages", "internal links", "images", "loaded files", "external links (not fetched)"), 0)
    counts["pages"] = len(pages)

    @functools.cache
    def place(folder: Path, name: str) -> tuple[Path, bool]:
        """Where a name leads from a folder, as most pages of one folder name it, and whether a file is there."""
        path = (folder / unquote(name)).resolve()
        return path, path.is_file()

    def target(owner: Path, url: str) -> tuple[Path, bool, str]:
        parts = urlsplit(url)
        return *(place(owner.parent, parts.path) if parts.path else (owner, True)), unquote(parts.fragment)

    def loaded(owner: Path, line: int, url: str) -> None:
        where = f"{owner.relative_to(site)}:{line}"
        if url.startswith(("data:", "#")):
            return
        counts["loaded files"] += 1
        if elsewhere(url):
            problems.append(f"{where}: loads {url} from elsewhere")
        elif not target(owner, url)[1]:
            problems.append(f"{where}: loads {url}, which does not exist")

    for owner, page in pages.items():
        for line, url in page.links:
            where = f"{owner.relative_to(site)}:{line}"
            if elsewhere(url):
                counts["external links (not fetched)"] += 1
                continue
            if urlsplit(url).scheme in ("mailto", "data", "javascript"):
                continue
            counts["internal links"] += 1
            path, there, anchor = target(owner, url)
            if not there or not path.is_relative_to(site):
                problems.append(f"{where}: {url} does not exist")
            elif anchor and path in pages and anchor not in pages[path].ids:
                problems.append(f"{where}: {url} has no such anchor")
        for line, url in page.loads:
            loaded(owner, line, url)
        for line, url, alt in page.alts:
            counts["images"] += 1
            if not alt or alt == url:  # docutils' stand-in is the address
                problems.append(f"{owner.relative_to(site)}:{line}: {url[:80]} has no alternative text")
    for sheet in sheets:
        for number, text in enumerate(sheet.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            for url in css_urls(text):
                loaded(sheet, number, url)
    return Report(problems, counts)


if __name__ == "__main__":
    report = check(Path(sys.argv[1]))
    print("\n".join([*report.problems, report.summary()]))
    sys.exit(bool(report.problems))
