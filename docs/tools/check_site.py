"""Checks a built site: it loads nothing from elsewhere, and every file that it names exists.

python docs/tools/check_site.py site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {  # what a browser loads without being asked, by tag
    **dict.fromkeys(("script", "img", "iframe", "embed", "source", "track", "video", "audio", "input"), ("src",)),
    "link": ("href",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
FETCHED_BY_SCRIPT = ("mermaid",)  # classes of elements for which the theme's script loads something from elsewhere
CSS_ADDRESS = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")


class Addresses(HTMLParser):
    """The addresses in a page: `loaded` by the browser, and `linked`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.loaded += [given[name] for name in LOADED.get(tag, ()) if name in given]
        self.loaded += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self.loaded += in_css(given.get("style", ""))
        if tag == "a" and "href" in given:
            self.linked.append(given["href"])
        if set(given.get("class", "").split()) & set(FETCHED_BY_SCRIPT):
            self.loaded.append(f"https://elsewhere/{given['class']}")


def in_css(text: str) -> list[str]:
    """The addresses in a stylesheet.

    >>> in_css("@import 'a.css'; p { background: url(b.png) }")
    ['a.css', 'b.png']
    """
    return [first or second for first, second in CSS_ADDRESS.findall(text)]


def is_elsewhere(address: str) -> bool:
    """
    >>> [is_elsewhere(address) for address in ("https://a.b/c.js", "//a.b/c.js", "c.js", "#top", "data:image/png,")]
    [True, True, False, False, False]
    """
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "ftp")


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a site, one line each."""
    for page in sorted(site.rglob("*.html")):
        found = Addresses(page.read_text(encoding="utf-8"))
        yield from _of_file(site, page, found.loaded, found.linked)
    for sheet in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        text = sheet.read_text(encoding="utf-8")
        loaded = in_css(text) if sheet.suffix == ".css" else [*in_css(text), *Addresses(text).loaded]
        yield from _of_file(site, sheet, loaded, [])


def _of_file(site: Path, file: Path, loaded: list[str], linked: list[str]) -> Iterator[str]:
    name = file.relative_to(site)
    yield from (f"{name} loads {address}" for address in loaded if is_elsewhere(address))
    for address in (*loaded, *linked):
        parts = urlsplit(address)
        if parts.scheme or parts.netloc or not parts.path:
            continue
        start = site if parts.path.startswith("/") else file.parent
        if not (start / unquote(parts.path).lstrip("/")).exists():
            yield f"{name} names {address}, which does not exist"


def main() -> None:
    site = Path(sys.argv[1])
    found = list(faults(site))
    pages = len(list(site.rglob("*.html")))
    sys.exit("\n".join(found) if found else print(f"{pages} pages load nothing from elsewhere; all links have a file"))


if __name__ == "__main__":
    main()
