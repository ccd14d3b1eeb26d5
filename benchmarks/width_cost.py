"""What do a step and a refresh of BPRONG cost beside a step of SGD, against width, depth and batch size?

All are timed in turns within one process, on random numbers of the network's shape; medians over rounds. A refresh is
the difference between a step that refreshes every side and one that refreshes none; its two parts are in the proportion
that `optimizer.report().time` gives. Exponents are fitted to the upper half of the sizes, and to counted operations.

    python benchmarks/width_cost.py                rows into docs/cost.csv, then as below
    python benchmarks/width_cost.py --draw         docs/figures/cost.png, and tables in Markdown
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import figures
from harness.command_line import CommandLine
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from problems.networks import PAPER, perceptron
from torch import nn
from torch.optim import SGD

import bprong
from bprong.experiments.bench.rows import columns_of, read, write
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.timing import interleaved, seconds_of

SIZES = {
    "width": [100, 200, 400, 800, 1600, 4000],
    "depth": [2, 4, 8, 16, 32],
    "batch": [16, 32, 64, 128, 256, 512, 1024, 2048],
}
QUICK_SIZES = {"width": [50, 100], "depth": [2, 4], "batch": [16, 64]}
AXES = {
    "width": "width of three hidden layers, batch 100",
    "depth": "hidden layers of width 128, batch 100",
    "batch": "batch size, the paper's network",
}
LINES = {
    "sgd": ("SGD step", figures.STYLES["sgd"]),
    "extra": ("BPRONG step, beyond SGD's", figures.STYLES["bprong"]),
    "statistics": ("refresh: statistics", figures.Style(figures.BLUE, figures.DASHED, "s")),
    "factorisation": ("refresh: factorisation", figures.Style(figures.GREEN, figures.DASHED, "^")),
}
# Random numbers have no decaying spectrum, so only exact inverses are measured: the upper end of the cost.
NO_REFRESH: dict[str, Any] = {"every": 10**9, "options": {"solver": "exact"}}  # except at the first step
EVERY_STEP: dict[str, Any] = {"every": 1, "options": {"solver": "exact"}}
TIMED = 0.03  # seconds: short steps are timed several at a time
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """Seconds of one network at one batch size, medians.

    sgd:   a whole step: forward, backward, update
    extra: what a step of BPRONG takes beyond that when no refresh is due
    statistics, factorisation: the two parts of a refresh of all layers and sides
    """

    panel: str
    size: int
    sgd: float
    extra: float
    statistics: float
    factorisation: float


def network(panel: str, size: int) -> tuple[list[int], int]:
    """Widths from input to output, and the batch size."""
    if panel == "width":
        return [784, size, size, size, 10], 100
    if panel == "depth":
        return [128] * (size + 1) + [10], 100
    return PAPER, size


def stepper(panel: str, size: int, make: Callable[[nn.Module], Any]) -> tuple[Callable[[], None], Any]:
    """A training step, which has been made twice, and its optimizer."""
    widths, batch = network(panel, size)
    model = perceptron(widths, "relu", seed=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, widths[0], generator=generator)
    y = torch.randint(widths[-1], (batch,), generator=generator)
    optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    step()
    return step, optimizer


def measure(panel: str, size: int, rounds: int, budget: float) -> Row:
    """Medians over rounds; after `budget` seconds there are no more rounds than the least."""
    lr = 1e-6  # times do not depend on it, and nothing diverges
    sgd, _ = stepper(panel, size, lambda model: SGD(model.parameters(), lr=lr))
    plain, _ = stepper(panel, size, lambda model: bprong.BPRONG(model, lr=lr, **NO_REFRESH))
    refreshing, optimizer = stepper(panel, size, lambda model: bprong.BPRONG(model, lr=lr, **EVERY_STEP))
    steps = {"sgd": sgd, "plain": plain, "refreshing": refreshing}
    counts = {name: max(1, round(TIMED / seconds_of(step))) for name, step in steps.items()}
    chunks = {name: lambda step=step, n=counts[name]: [step() for _ in range(n)] for name, step in steps.items()}
    spent = interleaved(chunks, rounds, budget, LEAST_ROUNDS)
    each = {name: [seconds / counts[name] for seconds in found] for name, found in spent.items()}
    extra = median(b - a for a, b in zip(each["sgd"], each["plain"], strict=True))
    refresh = median(b - a for a, b in zip(each["plain"], each["refreshing"], strict=True))
    time = optimizer.report().time
    part = time["statistics"] / (time["statistics"] + time["factorisation"])
    return Row(panel, size, median(each["sgd"]), extra, part * refresh, (1 - part) * refresh)


def run(options: argparse.Namespace) -> list[Row]:
    rows = []
    for panel, sizes in (QUICK_SIZES if options.quick else SIZES).items():
        for size in sizes:
            row = measure(panel, size, options.rounds, options.budget)
            rows.append(row)
            parts = ", ".join(f"{line} {1e3 * getattr(row, line):.3f}" for line in LINES)
            print(f"{panel} {size}, milliseconds: {parts}", flush=True)
    write(options.out / "cost.csv", rows, columns_of(Row))
    return rows


def operations(panel: str, size: int) -> dict[str, float]:
    """Counted operations of each line, up to a factor, with dense inverses and Cholesky factors.

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
    """Fitted to the measured seconds, and to the counted operations at the same sizes."""
    own = [row for row in rows if row.panel == panel]
    measured = exponent([(row.size, getattr(row, line)) for row in own])
    return measured, exponent([(row.size, operations(panel, row.size)[line]) for row in own])


def panel_rows(rows: Sequence[Row], panel: str) -> list[Row]:
    return sorted((row for row in rows if row.panel == panel), key=lambda row: row.size)


def table(rows: Sequence[Row], panel: str) -> str:
    """Milliseconds at every size, and below them the exponents."""
    lines = []
    for row in panel_rows(rows, panel):
        cells = [f"{1e3 * getattr(row, line):.3g} ms" for line in LINES]
        lines.append([f"{row.size:,}", *cells, f"{1 + row.extra / row.sgd:.2f}"])
    found = [exponents(rows, panel, line) for line in LINES]
    lines.append(["exponent, fitted", *(f"{fitted:.2f}" for fitted, _ in found), ""])
    lines.append(["exponent, counted operations", *(f"{abs(counted):.2f}" for _, counted in found), ""])
    return markdown([AXES[panel], *(name for name, _ in LINES.values()), "BPRONG step / SGD step"], lines)


def draw_panel(axes: Axes, rows: Sequence[Row], panel: str) -> None:
    own = panel_rows(rows, panel)
    for line, (_, how) in LINES.items():
        points = [(row.size, 1e3 * getattr(row, line)) for row in own if getattr(row, line) > 0]
        figures.curve(axes, [x for x, _ in points], [y for _, y in points], how, markers=99)
    figures.log_axis(axes, "y", 1e3)
    figures.log_axis(axes, "x", 1e3)
    axes.set_xticks([row.size for row in own], labels=[f"{row.size:,}" for row in own])
    axes.xaxis.set_minor_locator(NullLocator())
    figures.frame(axes, f"Cost against {panel}", AXES[panel], "milliseconds")


def label(rows: Sequence[Row], line: str) -> str:
    """The name of a line, and its exponents in every panel."""
    found = {panel: exponents(rows, panel, line) for panel in AXES}
    texts = [
        f"{panel} {abs(round(fitted, 1))} ({abs(round(counted, 1))})" for panel, (fitted, counted) in found.items()
    ]
    return f"{LINES[line][0]}\n{', '.join(texts)}"


def draw(rows: Sequence[Row], path: Path) -> None:
    with figures.drawing(path, 2, 2, 6.6) as (_, grid):
        for panel, axes in zip(AXES, grid, strict=False):
            draw_panel(axes, rows, panel)
        grid[-1].set_axis_off()
        title = "below each name: fitted exponent\n(and that of counted operations)"
        grid[-1].legend(
            handles=grid[0].get_lines(), labels=[label(rows, line) for line in LINES], title=title, loc="center",
            frameon=False, fontsize=9, title_fontsize=9, handlelength=3.0, labelspacing=1.0,
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2, out=True, draw=True)
    parser.setting("rounds", 15, 3, "rounds of timing")
    parser.setting("budget", 20.0, 0.2, "seconds for each size, beyond three rounds")
    options = parser.parse(arguments)
    rows = read(options.out / "cost.csv", Row) if options.draw else run(options)
    print("\n\n".join(table(rows, panel) for panel in AXES))
    draw(rows, options.out / "figures" / "cost.png")


if __name__ == "__main__":
    main()
