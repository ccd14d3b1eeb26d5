"""A hook of mkdocs: formulas and figures of a page, when the site is built.

Formulas in $…$ and $$…$$ become MathML, so that the site needs no script for them. A figure links to its file, and on a
narrow screen a wide one scrolls sideways, as tables do. The long names of tests may be broken between their words, and
numbers in tables may not.
"""

import html
import re
import struct
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
CAPITALS = re.compile(r"<mi>(&#x0039[1-9A-F];|&#x003A[0-9];)</mi>")  # Greek ones, upright in mathematics
TEST = re.compile(r"<code>([\w/]+\.py::\w+)</code>")
BETWEEN_WORDS = re.compile(r"(?<=/)|(?<=::)|(?<=_)")
FIGURE = re.compile(r'<img [^>]*src="([^":]+)"[^>]*>')
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
LONGEST_NUMBER = 20  # letters of a cell that counts as a number, such as 0.0717 / 0.105
WIDE = 1100  # pixels of a PNG


def mathml(latex: str, display: str) -> str:
    """The formula as MathML; its LaTeX is the label for screen readers."""
    latex = " ".join(html.unescape(latex).split())
    found = CAPITALS.sub(r'<mi mathvariant="normal">\1</mi>', convert(latex, display=display))
    found = found.replace("<mover>", '<mover accent="true">')  # or accents would be as small as superscripts
    return found.replace("<math ", f'<math aria-label="{html.escape(latex, quote=True)}" ', 1)


def figure(found: re.Match[str], folder: Path) -> str:
    """An image as a link to itself, with the class of its width."""
    kind = "figure wide" if width(folder / found[1]) > WIDE else "figure"
    return f'<span class="{kind}"><a href="{found[1]}">{found[0]}</a></span>'


def cell(found: re.Match[str]) -> str:
    """A cell of a table, which must not be broken if it is a number."""
    words = html.unescape(TAG.sub("", found[2]))
    is_number = len(words) <= LONGEST_NUMBER and words[:1].isdigit()
    return f'<td class="number"{found[1]}>{found[2]}</td>' if is_number else found[0]


def width(path: Path) -> int:
    """The pixels of a PNG from left to right; 0 for other files."""
    start = path.read_bytes()[:24]
    return int(struct.unpack(">I", start[16:20])[0]) if start.startswith(b"\x89PNG") else 0


def on_page_content(content: str, page: Any, config: Any, **_: Any) -> str:
    content = INLINE.sub(lambda found: mathml(found[1], "inline"), content)
    content = DISPLAY.sub(lambda found: f'<div class="formula">{mathml(found[1], "block")}</div>', content)
    content = CELL.sub(cell, content)
    content = TEST.sub(lambda found: f'<code class="test">{BETWEEN_WORDS.sub("<wbr>", found[1])}</code>', content)
    folder = (Path(config.site_dir) / page.file.dest_uri).parent
    source = Path(config.docs_dir) / folder.relative_to(config.site_dir)
    return FIGURE.sub(lambda found: figure(found, source), content)
