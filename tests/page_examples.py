"""Examples in Markdown pages: their code, and what it prints."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Output is a block of text, or indented lines, directly after the code.
EXAMPLE = re.compile(r"```python\n(.*?)```\n+(?:```text\n(.*?)```|((?:    [^\n]*\n)*))", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A piece of code in a page; printed: the lines that it must print, or none if that is left open."""

    page: Path
    line: int
    code: str
    printed: tuple[str, ...]

    def run(self, names: dict[str, Any], output: Callable[[], str]) -> None:
        """Runs the code with the names of the examples before it; output: what was printed since it was last asked."""
        exec(compile("\n" * self.line + self.code, str(self.page), "exec"), names)
        found = tuple(line.rstrip() for line in output().splitlines())
        if self.printed:
            assert found == self.printed, f"{self.page.name}, line {self.line}"


def examples_of(page: Path) -> list[Example]:
    text = page.read_text(encoding="utf-8")
    found = []
    for example in EXAMPLE.finditer(text):
        code, block, indented = example.groups()
        lines = (block or "").splitlines() or [line.removeprefix("    ") for line in (indented or "").splitlines()]
        printed = tuple(line.rstrip() for line in lines)
        found.append(Example(page, text.count("\n", 0, example.start()) + 1, code, printed))
    return found
