"""An extension of griffe: docstrings of this package as Markdown.

They are plain text: paragraphs, indented formulas, doctests, and lists whose explanations are aligned in a column, such
as those of arguments. Formulas and doctests become blocks of code, and lists become definition lists.
"""

import re
from typing import Any

from griffe import Docstring, Extension, Object

ENTRY = re.compile(r"(\S.*?\S|\S):? {2,}(\S.*)")  # a name and its explanation, in columns
NAMES = re.compile(r"[\w, …]+:?")  # names alone; their explanation begins in the next line
PAGE = re.compile(r"docs/(\w+)\.md")
LONGEST = re.compile(r"(\w[\w, ]*): (\S.*)")  # the longest name of a list, which leaves room for one space only


def markdown(text: str) -> str:
    """A docstring as Markdown.

    >>> print(markdown("Adds.\\n\\na   the first\\n    number\\nb   the second"))
    Adds.
    <BLANKLINE>
    `a`
    :   the first number
    <BLANKLINE>
    `b`
    :   the second
    """
    return PAGE.sub(r"[\g<0>](../\1.html)", "\n\n".join(_block(lines) for lines in _paragraphs(text)))


def _paragraphs(text: str) -> list[list[str]]:
    return [part.splitlines() for part in re.split(r"\n\s*\n", text.strip("\n"))]


def _block(lines: list[str]) -> str:
    if lines[0].startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if lines[0].startswith("    "):
        return "\n".join(["```text", *(line.removeprefix("    ") for line in lines), "```"])
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    entries = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    pairs = [_entry(entry, ENTRY) for entry in entries]
    if any(pair is not None for pair in pairs):
        pairs = [pair or _entry(entry, LONGEST) for pair, entry in zip(pairs, entries, strict=True)]
    if all(pair is not None for pair in pairs):
        return "\n\n".join(f"{names}\n:   {explanation}" for names, explanation in filter(None, pairs))
    return "\n".join(lines)


def _entry(lines: list[str], form: re.Pattern[str]) -> tuple[str, str] | None:
    """Names and their explanation; None: this is no entry of a list."""
    found = form.fullmatch(lines[0])
    if found is None:
        if len(lines) == 1 or not NAMES.fullmatch(lines[0]):
            return None
        names, first = lines[0], ""
    else:
        names, first = found.groups()
    explanation = " ".join([first, *(line.strip() for line in lines[1:])]).strip()
    code = ", ".join(f"`{name}`" for name in names.rstrip(":").split(", "))
    return code, re.sub(r" {2,}", ": ", explanation)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring = Docstring(markdown(obj.docstring.value), parent=obj)
