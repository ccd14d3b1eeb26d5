"""What an optimizer tells about itself: per layer and in time. Plain data underneath, a table when printed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report", "Stopwatch", "table"]

COLUMNS = {
    "layer": "layer",
    "forward_rank": "rank z",
    "backward_rank": "rank δ",
    "forward_damping": "ε z",
    "backward_damping": "ε δ",
    "forward_age": "age z",
    "backward_age": "age δ",
    "forward_from_white": "z off white",
    "backward_from_white": "δ off white",
    "step_norm": "step",
}
LETTERS = {"alpha": "α", "mu": "μ", "lambda": "λ", "ratio": "actual/predicted"}


class Stopwatch:
    """Seconds by what they were spent on, and since the first of them."""

    def __init__(self) -> None:
        self.seconds = {"statistics": 0.0, "factorisation": 0.0, "step": 0.0}
        self._start: float | None = None

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        self._start = start if self._start is None else self._start
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start

    def shares(self) -> dict[str, float]:
        """Of all time since the first step, the user's own part of it included."""
        if self._start is None:
            return dict.fromkeys(self.seconds, 0.0)
        total = time.perf_counter() - self._start
        return {what: seconds / total for what, seconds in self.seconds.items()}


@dataclass(frozen=True)
class Report:
    """steps: taken so far; layers: a row per covered layer; fallback: parameters that follow Adam's rule instead, with
    the reason; time: the shares of all time that statistics, factorisation and steps took; auto: under lr="auto", the
    last coefficients alpha and mu of the whitened direction and of the last update, the damping lambda, and the ratio
    of the actual to the predicted decrease, None before there is one."""

    steps: int
    layers: list[dict[str, Any]]
    fallback: dict[str, str]
    time: dict[str, float] = field(default_factory=dict)
    auto: dict[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [[_cell(row.get(key)) for key in COLUMNS] for row in self.layers]
        lines = [f"{self.steps} steps", table(list(COLUMNS.values()), rows)]
        lines += [f"by Adam's rule: {name} ({reason})" for name, reason in self.fallback.items()]
        if self.auto:
            told = ", ".join(f"{LETTERS[key]} {_cell(value)}" for key, value in self.auto.items())
            lines.append(f"step: {told}")
        shares = ", ".join(f"{what} {share:.1%}" for what, share in self.time.items())
        return "\n".join([*lines, f"share of time: {shares}"])


def table(header: list[str], rows: list[list[str]], left: Collection[int] = ()) -> str:
    """Columns of equal width, those numbered in `left` aligned to the left.

    >>> print(table(["a", "size"], [["long", "1"]], left=[0]))
    a     size
    long     1
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    aligned = [f"{{:{'<' if i in left else '>'}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(aligned).format(*row).rstrip() for row in [header, *rows])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
