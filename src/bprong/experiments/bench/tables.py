"""Tables in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median


def markdown(titles: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table: its column titles and its lines.

    >>> print(markdown(["size", "ms"], [[100, 1.5]]))
    | size | ms |
    |---|---|
    | 100 | 1.5 |
    """
    rows = [titles, *lines]
    written = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join([written[0], f"|{'---|' * len(titles)}", *written[1:]])


def median_and_range(values: Sequence[float]) -> str:
    """
    >>> median_and_range([3.0, 1.0, 2.0])
    '2 (1 to 3)'
    """
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def each(values: Iterable[float], form: str = "g") -> str:
    """All values, "never" for an infinite one.

    >>> each([1.5, float("inf")], ".2f")
    '1.50, never'
    """
    return ", ".join(f"{value:{form}}" if math.isfinite(value) else "never" for value in values)
