"""A live view of an optimizer's report in the terminal, for long runs.

from bprong.experiments.live import LiveReport

with LiveReport(optimizer) as live:
    for x, y in loader:
        ...                                     # your step
        live.update(loss=loss.item())           # numbers of your own, shown as curves
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from bprong.experiments.extras import install_command
from bprong.optim.optimizer import BPRONG
from bprong.optim.report import COLUMNS, Report, cell
from bprong.whitening.layer import SIDES

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing.name} is not installed: {install_command('experiments')}") from missing

BARS = "▁▂▃▄▅▆▇█"
CURVE = 48  # points of a curve, each a character
MOST_SHARE = 0.01  # of run time for drawing
OTHER_LINES = 11  # of the view, beside the rows of layers
DIGITS = 2


class LiveReport:
    """Shows `optimizer.report()` while a model is trained, and numbers of your own as curves.

    optimizer  the optimizer to report on
    seconds    time between two drawings; longer where a drawing would take more than 1 % of it
    console    a rich.console.Console; by default that of the terminal
    """

    def __init__(self, optimizer: BPRONG, seconds: float = 1.0, console: Console | None = None) -> None:
        self._optimizer = optimizer
        self._seconds = seconds
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._curves: dict[str, Curve] = {}
        self._start = time.perf_counter()
        self._steps_before = 0
        self._next = self._start  # when to draw again

    def update(self, **numbers: float) -> None:
        """Notes numbers of this step, such as loss=0.1, and draws the view if it is time to."""
        for name, value in numbers.items():
            self._curves.setdefault(name, Curve()).add(float(value))
        now = time.perf_counter()
        if now >= self._next:
            self._draw()
            end = time.perf_counter()
            self._next = end + max(self._seconds, (end - now) / MOST_SHARE)

    def __enter__(self) -> LiveReport:
        self._live.start()
        self._start = self._next = time.perf_counter()
        self._steps_before = self._optimizer.report().steps
        return self

    def __exit__(self, *error: object) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        report = self._optimizer.report()
        elapsed = time.perf_counter() - self._start
        speed = (report.steps - self._steps_before) / elapsed
        title = f"step {report.steps:,} · {speed:.3g} steps/s · {timedelta(seconds=round(elapsed))}"
        rows = max(2, self._console.height - OTHER_LINES - len(self._curves))
        self._live.update(view(report, title, self._curves, rows), refresh=True)


class Curve:
    """The means of a number over equal numbers of updates; when there are too many points, pairs of them are merged."""

    def __init__(self) -> None:
        self.last = math.nan
        self._points: list[float] = []
        self._width = 1  # updates behind each point
        self._open: list[float] = []  # updates of the next point

    def add(self, value: float) -> None:
        self.last = value
        self._open.append(value)
        if len(self._open) < self._width:
            return
        self._points.append(sum(self._open) / self._width)
        self._open = []
        if len(self._points) > CURVE:
            del self._points[CURVE:]
            self._points = [(a + b) / 2 for a, b in zip(self._points[::2], self._points[1::2], strict=True)]
            self._width *= 2

    def __str__(self) -> str:
        """Bars from the lowest to the highest point, on a logarithmic scale if all are positive.

        >>> curve = Curve()
        >>> for value in (100, 10, 1, float("nan")):
        ...     curve.add(value)
        >>> str(curve)
        '█▄▁ '
        """
        shown = [value if math.isfinite(value) else None for value in self._points]
        finite = [value for value in shown if value is not None]
        if not finite:
            return ""
        scale = math.log if min(finite) > 0 else float
        low = scale(min(finite))
        size = (scale(max(finite)) - low) or 1.0
        last = len(BARS) - 1
        return "".join(" " if v is None else BARS[int(last * (scale(v) - low) / size)] for v in shown)


def view(report: Report, title: str, curves: Mapping[str, Curve], rows: int) -> Panel:
    """A report as a panel with at most `rows` rows for the sides of layers."""
    parts: list[Any] = [_curves(curves)] if curves else []
    shown = _most_drifted(report.layers, max(1, rows // len(SIDES)))
    parts.append(_layers(shown))
    parts.append(_numbers(report, len(shown)))
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1), expand=False)


def _curves(curves: Mapping[str, Curve]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, curve in curves.items():
        table.add_row(name, Text(f"{curve.last:.4g}", "bold"), Text(str(curve), "cyan"))
    return table


def _most_drifted(layers: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """As many layers as fit, those whose statistics have drifted most, in the order of the model."""

    def drift(row: dict[str, Any]) -> float:
        return max(row.get(f"{side}_drift") or 0.0 for side in SIDES)

    kept = sorted(layers, key=drift, reverse=True)[:count]
    return [row for row in layers if any(row is one for one in kept)]


def _layers(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for the inputs z and one for the errors δ of each layer."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("layer", no_wrap=True, overflow="ellipsis")
    for heading in ("side", *(heading for heading, _ in COLUMNS.values()), "step"):
        table.add_column(heading, justify="left" if heading in ("side", "factor") else "right", no_wrap=True)
    for row in rows:
        for side, letter in zip(SIDES, "zδ", strict=True):
            if f"{side}_factor" not in row:
                continue
            first = side == SIDES[0]
            cells = [cell(row[f"{side}_{key}"], DIGITS) for key in COLUMNS]
            step = cell(row["step_norm"], DIGITS) if first else ""
            table.add_row(row["layer"] if first else "", letter, *cells, step)
    return table


def _numbers(report: Report, shown: int) -> Text:
    """What concerns no single layer: the step rule, parameters that are not whitened, and shares of time."""
    lines = []
    if hidden := len(report.layers) - shown:
        lines.append(f"and {hidden} more layers, whose statistics have drifted less")
    if report.rule:
        lines.append("step rule     " + "   ".join(report.rule_numbers(DIGITS)))
    if report.fallback:
        lines.append(f"not whitened  {len(report.fallback)} parameters (Adam): {', '.join(report.fallback)}")
    shares = "   ".join(f"{purpose} {share:.0%}" for purpose, share in report.time.items())
    lines.append(f"time          {shares}   your code {max(0.0, 1 - sum(report.time.values())):.0%}")
    lines.append(f"judgement     {report.judgement}")
    return Text("\n".join(["", *lines]), no_wrap=True, overflow="ellipsis")
