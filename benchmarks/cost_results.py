"""What `cost.py` leaves on disk and what is made of it: cost.csv, fitted exponents, a figure, a table in Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bprong.experiments.figures import DASHED, DOTTED, LOOK, SOLID, Style, log_axis
from bprong.experiments.records import write_atomically

LINES = {
    "sgd": ("SGD step", Style("#7a7f87", DOTTED, "D")),
    "extra": ("BPRONG step, beyond SGD's", Style("#d55e00", SOLID, "o")),
    "statistics": ("refresh: statistics", Style("#0072b2", DASHED, "s")),
    "factorisation": ("refresh: factorisation", Style("#00866a", DASHED, "^")),
}
AXES = {
    "width": "width of three hidden layers, batch 100",
    "depth": "hidden layers of width 128, batch 100",
    "batch": "batch, the paper's network",
}


@dataclass(frozen=True)
class Row:
    """Seconds of one network at one batch size: a median each."""

    panel: str
    size: int
    sgd: float  # a whole step: forward, backward, update
    extra: float  # what a step of BPRONG takes beyond that when no refresh is due
    statistics: float  # of a refresh of all layers and sides
    factorisation: float


COLUMNS = [field.name for field in fields(Row)]


def read(folder: Path) -> list[Row]:
    """The rows of cost.csv."""
    cells = list(csv.reader(io.StringIO((folder / "cost.csv").read_text())))[1:]
    return [Row(panel, int(size), *map(float, seconds)) for panel, size, *seconds in cells]


def write(folder: Path, rows: Sequence[Row]) -> None:
    """All of them anew: what is on disk is whole at any moment."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((row.panel, row.size, *(f"{seconds:.4g}" for seconds in astuple(row)[2:])) for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "cost.csv", text.getvalue().encode())


# What the arithmetic predicts -----------------------------------------------------------------------------------------


def network(panel: str, size: int) -> tuple[list[int], int]:
    """Widths from input to output, and the batch."""
    if panel == "width":
        return [784, size, size, size, 10], 100
    if panel == "depth":
        return [128] * (size + 1) + [10], 100
    return [784, 100, 100, 100, 10], size


def operations(panel: str, size: int) -> dict[str, float]:
    """Of each line of the figure, up to a factor: products of exact dense inverses, and a Cholesky factor of each side.

    sgd 6·B·Σ in·out;  extra Σ 2·out·in·(in+out);  statistics a pass and Σ 2·B·(in²+out²);  factorisation Σ in³+out³
    """
    widths, batch = network(panel, size)
    layers = list(pairwise(widths))
    sgd = 6.0 * batch * sum(a * b for a, b in layers)
    return {
        "sgd": sgd,
        "extra": 2.0 * sum(a * b * (a + b) for a, b in layers),
        "statistics": sgd + 2.0 * batch * sum(a**2 + b**2 for a, b in layers),
        "factorisation": float(sum(a**3 + b**3 for a, b in layers)),
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of log(y) on log(x) by least squares, over the upper half of the range.

    >>> round(exponent([(1, 5), (2, 5), (4, 16), (8, 64), (16, 256)]), 6)
    2.0
    """
    upper = sorted(points)[len(points) // 2 :] if len(points) > 2 else sorted(points)
    if len(upper) < 2 or min(y for _, y in upper) <= 0:
        return math.nan
    slope, _ = np.polyfit(np.log([x for x, _ in upper]), np.log([y for _, y in upper]), 1)
    return float(slope)


def exponents(rows: Sequence[Row], panel: str, line: str) -> tuple[float, float]:
    """Fitted to what was measured, and to the operations counted at the same sizes."""
    own = [row for row in rows if row.panel == panel]
    measured = [(float(row.size), float(getattr(row, line))) for row in own]
    return exponent(measured), exponent([(row.size, operations(panel, row.size)[line]) for row in own])


# Figure and table -----------------------------------------------------------------------------------------------------


def draw_panel(axes: Axes, rows: Sequence[Row], panel: str) -> None:
    own = sorted((row for row in rows if row.panel == panel), key=lambda row: row.size)
    for line, (name, how) in LINES.items():
        points = [(row.size, 1e3 * getattr(row, line)) for row in own if getattr(row, line) > 0]
        fitted, counted = exponents(rows, panel, line)
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=how.colour, linestyle=how.dashes, linewidth=1.7,
            marker=how.marker, markersize=4, label=f"{name}: {fitted:.1f} ({abs(counted):.1f})",
        )  # fmt: skip
    log_axis(axes, "y", 1e3)
    log_axis(axes, "x", 1e3)
    axes.set_xticks([row.size for row in own], labels=[f"{row.size:,}" for row in own])
    axes.set_xlabel(AXES[panel])
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False, handlelength=3.2,
        title="fitted exponent (and what the arithmetic predicts)", title_fontsize=9,
    )  # fmt: skip


def draw(folder: Path, rows: Sequence[Row]) -> Path:
    """Writes figures/cost.png."""
    panels = [panel for panel in AXES if any(row.panel == panel for row in rows)]
    stream, path = io.BytesIO(), folder / "figures" / "cost.png"
    with style.context(["default", LOOK]):  # "default": whatever the user's matplotlibrc says
        chart = Figure(figsize=(4.5 * len(panels), 4.8), layout="constrained")
        FigureCanvasAgg(chart)
        for panel, axes in zip(panels, chart.subplots(1, len(panels), squeeze=False)[0], strict=True):
            draw_panel(axes, rows, panel)
        chart.axes[0].set_ylabel("milliseconds")
        chart.savefig(stream, format="png", dpi=200)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, stream.getvalue())
    return path


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: milliseconds at every size, and below them the exponents."""
    for panel, axis in AXES.items():
        own = sorted((row for row in rows if row.panel == panel), key=lambda row: row.size)
        if not own:
            continue
        yield f"| {axis} | {' | '.join(name for name, _ in LINES.values())} | BPRONG step / SGD step |"
        yield f"|{'---|' * (len(LINES) + 2)}"
        for row in own:
            cells = [f"{1e3 * getattr(row, line):.3g} ms" for line in LINES]
            yield f"| {row.size:,} | {' | '.join(cells)} | {1 + row.extra / row.sgd:.2f} |"
        found = [exponents(rows, panel, line) for line in LINES]
        yield f"| exponent, fitted | {' | '.join(f'{fitted:.2f}' for fitted, _ in found)} | |"
        yield f"| exponent, of the operations | {' | '.join(f'{abs(counted):.2f}' for _, counted in found)} | |"
        yield ""
