"""Figures: one width, one style per method, and legends that explain every line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from bprong.experiments.figures import INK, LOOK, Style, log_axis, styles  # noqa: F401 (log_axis is for the scripts)

WIDTH = 8.0  # inches: on a page 800 pixels wide, letters of 9 points are then 12 pixels high
DPI = 200
SOLID = (0.0, ())
DASHED = (0.0, (5.0, 1.6))
DOTTED = (0.0, (1.2, 1.4))
LONG = (0.0, (9.0, 2.0))
VERMILION = "#d55e00"
BLUE = "#0072b2"
OCHRE = "#b07a00"
GREEN = "#00866a"
PURPLE = "#b5468b"
VIOLET = "#6a4fb3"
KNOWN = styles(["bprong", "bprong-auto", "bn", "sgd"])  # as in the figures of the experiment
STYLES = {
    **KNOWN,
    "bprong-auto": replace(KNOWN["bprong-auto"], dashes=SOLID),
    "adam": Style(OCHRE, DASHED, "v"),
    "bn-adam": KNOWN["bn"],
    "nesterov": KNOWN["sgd"],
}


@contextmanager
def drawing(path: Path, rows: int, columns: int, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its axes, row by row; it is saved as PNG at the end."""
    with style.context(["default", LOOK]):  # "default" replaces the settings of the user's matplotlibrc
        chart = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.07))
        yield chart, list(chart.subplots(rows, columns, squeeze=False).flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.savefig(path, dpi=DPI)
    print(path)


def frame(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels and grid."""
    axes.set_title(title, fontsize=10.5)
    axes.set(xlabel=x, ylabel=y, axisbelow=True)
    axes.grid(True)
    axes.spines[["top", "right"]].set_visible(False)


def curve(axes: Axes, x: Sequence[float], y: Sequence[float], how: Style, label: str = "", markers: int = 7) -> None:
    """A line with about `markers` markers."""
    every = max(1, math.ceil(len(x) / markers))
    look: dict[str, Any] = {"color": how.colour, "linestyle": how.dashes, "linewidth": 1.7, "label": label}
    axes.plot(x, y, marker=how.marker, markersize=4, markevery=every, **look)


def competitor(axes: Axes, x: Sequence[float], y: Sequence[float], how: Style, label: str | None) -> None:
    """A curve with a label; without one, a thin line in the background."""
    if label is None:
        axes.plot(x, y, color=how.colour, linewidth=0.8, alpha=0.35, zorder=1)
    else:
        curve(axes, x, y, how, label)


def variant(how: Style, number: int) -> Style:
    """The same colour with other dashes and another marker, for a method that was run in several settings."""
    dashes, marker = [(how.dashes, how.marker), (LONG, "s"), (DOTTED, "D")][number % 3]
    return replace(how, dashes=dashes, marker=marker)


def explain_faint(text: str) -> Artist:
    """A legend entry for the thin lines in the background."""
    return Line2D([], [], color=INK, linewidth=0.8, alpha=0.4, label=text)


def legend(where: Axes | Figure, extra: Sequence[Artist], columns: int = 1, title: str | None = None) -> None:
    """A legend below the axes, or below the figure with the entries of its last axes; `extra` entries come last."""
    axes = where.axes[-1] if isinstance(where, Figure) else where
    options: dict[str, Any] = {"handles": [*axes.get_legend_handles_labels()[0], *extra], "ncols": columns}
    options |= {"title": title, "frameon": False, "handlelength": 3.0, "fontsize": 9, "title_fontsize": 9}
    if isinstance(where, Figure):
        where.legend(loc="outside lower center", **options)
    else:
        where.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), **options)
