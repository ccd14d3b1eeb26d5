"""The paper's four figures: training and validation loss, against iterations and against seconds."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from bprong.experiments.records import Point, Row, curve, diverged, label, methods, write_atomically

Dashes = tuple[float, tuple[float, ...]]

INK, GRID = "#20242b", "#dfe2e7"
LOOK: dict[str, object] = {
    "font.size": 9.5, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": GRID, "grid.linewidth": 0.7,
}  # fmt: skip
# Okabe and Ito's colours, which colour-blind readers tell apart, darkened where white swallows them; each with the
# shade that replaces it on a dark page.
PALETTE = {
    "#d55e00": "#ff8c42",  # vermilion
    "#0072b2": "#5ab4f0",  # blue
    "#00866a": "#2fd0a5",  # green
    "#7a7f87": "#a7adb8",  # grey
    "#b5468b": "#ee9bce",  # purple
    "#b07a00": "#f0b93a",  # orange
    "#6a4fb3": "#b4a0f5",  # violet
}
SOLID: Dashes = (0, ())
DASHED, DOTTED, DASH_DOT = (0.0, (5.0, 1.6)), (0.0, (1.2, 1.4)), (0.0, (6.0, 1.6, 1.2, 1.6))
LONG, DASH_DOT_DOT = (0.0, (9.0, 2.0)), (0.0, (5.0, 1.4, 1.2, 1.4, 1.2, 1.4))
SIZE = (4.6, 3.4)  # inches: small, so that the letters stay legible at the width of a phone
DECADE = 10.0
HEADROOM = 3.0  # times the untrained loss: what lies above is on its way to infinity and would flatten all the rest


@dataclass(frozen=True)
class Plot:
    """One of the figures: the name of its files, what it shows, and against what."""

    name: str
    title: str
    column: Literal["train_loss", "val_loss"]
    against: Literal["iterations", "seconds"]


PLOTS = (
    Plot("train_loss", "Training loss", "train_loss", "iterations"),
    Plot("validation_loss", "Validation loss", "val_loss", "iterations"),
    Plot("train_loss_time", "Training loss", "train_loss", "seconds"),
    Plot("validation_loss_time", "Validation loss", "val_loss", "seconds"),
)


@dataclass(frozen=True)
class Style:
    """How a method is drawn; colour, dashes and marker each tell it apart without the others."""

    colour: str
    dashes: Dashes
    marker: str


KNOWN = {
    "bprong": Style("#d55e00", SOLID, "o"),
    "prong": Style("#0072b2", DASHED, "s"),
    "bn": Style("#00866a", DASH_DOT, "^"),
    "sgd": Style("#7a7f87", DOTTED, "D"),
    "bprong-fast": Style("#6a4fb3", LONG, "v"),
    "bprong-auto": Style("#b5468b", DASH_DOT_DOT, ">"),
}
_COLOURS = ("#b07a00", *(known.colour for known in KNOWN.values()))
_DASHES = (DASH_DOT_DOT, SOLID, DASHED, DOTTED, DASH_DOT, LONG)
_MARKERS = (">", "P", "h", "<", "*")


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each method; those of the experiment have their own, others take what is left, in their order."""
    others = [name for name in names if name not in KNOWN]
    # 7 colours, 6 dashes and 5 markers have no common divisor: the first 210 methods are all drawn differently.
    rest = {
        name: Style(_COLOURS[i % len(_COLOURS)], _DASHES[i % len(_DASHES)], _MARKERS[i % len(_MARKERS)])
        for i, name in enumerate(others)
    }
    return {name: KNOWN.get(name) or rest[name] for name in names}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the four figures as PNG and SVG; the same rows give the same bytes."""
    paths = []
    for plot in PLOTS:
        for suffix in ("png", "svg"):
            path = folder / f"{plot.name}.{suffix}"
            write_atomically(path, image(rows, plot, suffix))
            paths.append(path)
    return paths


def image(rows: Sequence[Row], plot: Plot, suffix: str, text: Literal["path", "none"] = "path") -> bytes:
    """One figure as a file's bytes; with text="none" an SVG leaves letters and background to the page."""
    settings = LOOK | {"svg.hashsalt": plot.name, "svg.fonttype": text, "savefig.transparent": text == "none"}
    stream = io.BytesIO()
    with style.context(["default", settings]):  # "default": whatever the user's matplotlibrc says
        metadata = {"Date": None} if suffix == "svg" else None
        figure(rows, plot).savefig(stream, format=suffix, dpi=220, metadata=metadata)
    return stream.getvalue()


def svg_text(rows: Sequence[Row], plot: Plot) -> str:
    """One figure as an <svg> element for a page, in the page's font and, through CSS variables, in its colours."""
    svg = image(rows, plot, "svg", text="none").decode()
    svg = svg[svg.index("<svg") :]
    # A rule for all elements would reach the page, ids would occur four times, and metadata are full of addresses.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id=\"[^\"]*\"", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    name = escape(f"{plot.title} against {plot.against}", quote=True)
    view = re.search(r'viewBox="[^"]*"', svg)
    attributes = f'role="img" aria-label="{name}" style="stroke-linejoin: round" {view.group() if view else ""}'
    svg = re.sub(r"<svg[^>]*>", lambda _: f"<svg {attributes}>", svg, count=1)
    for colour in (INK, GRID, *PALETTE):
        svg = svg.replace(colour, f"var(--{colour[1:]}, {colour})")
    return svg


def figure(rows: Sequence[Row], plot: Plot) -> Figure:
    """One of the figures: the median over seeds, a band from the least to the greatest, × where a seed diverged."""
    chart = Figure(figsize=SIZE, layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.06))
    FigureCanvasAgg(chart)
    axes = chart.add_subplot()
    curves = {name: _drawable(rows, name, plot) for name in methods(rows)}
    top = _ceiling(rows, plot)
    _scale(axes, curves, plot, top)
    for name, how in styles(list(curves)).items():
        _draw_method(axes, curves[name], how, plot, top)
        _draw_ends(axes, rows, name, how, plot, top)
    axes.set_ylim(top=min(top, axes.get_ylim()[1]))
    _frame(axes, plot)
    if not any(curves.values()):
        axes.text(0.5, 0.5, "no finite loss to draw", transform=axes.transAxes, ha="center", va="center")
    _legend(chart, rows, list(curves))
    return chart


def _drawable(rows: Sequence[Row], name: str, plot: Plot) -> list[Point]:
    return [point for point in curve(rows, name, plot.column) if math.isfinite(point.median)]


def _ceiling(rows: Sequence[Row], plot: Plot) -> float:
    untrained = [value for row in rows if row.epoch == 0 and math.isfinite(value := getattr(row, plot.column))]
    return HEADROOM * max(untrained) if untrained and max(untrained) > 0 else math.inf


def _x(point: Point | Row, plot: Plot) -> float:
    return point.step if plot.against == "iterations" else point.seconds


def _scale(axes: Axes, curves: dict[str, list[Point]], plot: Plot, top: float) -> None:
    """Logarithmic losses if they span a decade, logarithmic seconds if the methods' totals do."""
    losses = [p.median for points in curves.values() for p in points if 0 < p.median <= top]
    if losses and max(losses) > DECADE * min(losses):
        log_axis(axes, "y", max(losses) / min(losses))
    ends = [end for points in curves.values() if points and (end := points[-1].seconds) > 0]
    if plot.against == "seconds" and ends and max(ends) > DECADE * min(ends):
        starts = [p.seconds for points in curves.values() for p in points if p.seconds > 0]
        log_axis(axes, "x", max(ends) / min(starts))


def log_axis(axes: Axes, which: Literal["x", "y"], span: float) -> None:
    """A logarithmic axis whose numbers are written out, also between the powers of ten if there are few of them."""
    axis: Axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log", nonpositive="clip")
    few = span < DECADE**2.5
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_method(axes: Axes, points: list[Point], how: Style, plot: Plot, top: float) -> None:
    shown = [p for p in points if axes.get_xscale() == "linear" or _x(p, plot) > 0]
    x, y = [_x(p, plot) for p in shown], [min(p.median, 2 * top) for p in shown]  # above the frame, not miles above
    if any(p.seeds > 1 for p in shown):
        low, high = [min(p.low, 2 * top) for p in shown], [min(p.high, 2 * top) for p in shown]
        axes.fill_between(
            x, low, high, where=[math.isfinite(p.high) for p in shown], color=how.colour, alpha=0.2, linewidth=0
        )
    axes.plot(
        x, y, color=how.colour, linestyle=how.dashes, linewidth=1.7,
        marker=how.marker, markersize=4, markevery=max(1, math.ceil(len(shown) / 8)),
    )  # fmt: skip


def _draw_ends(axes: Axes, rows: Sequence[Row], name: str, how: Style, plot: Plot, top: float) -> None:
    """An × at the last finite loss of each seed that diverged."""
    for seed in diverged(rows).get(name, {}):
        own = [row for row in rows if (row.method, row.seed) == (name, seed) and math.isfinite(row.train_loss)]
        own = [row for row in own if math.isfinite(getattr(row, plot.column))]
        if own:
            last = max(own, key=lambda row: row.epoch)
            x, loss = _x(last, plot), min(getattr(last, plot.column), top)
            if x <= 0 and axes.get_xscale() == "log":
                continue  # it diverged in its first epoch, and such an axis has no place for second 0
            axes.plot(
                [x], [loss], color=how.colour, marker="x", markersize=9, markeredgewidth=2.4,
                linestyle="none", clip_on=False, zorder=5,
            )  # fmt: skip


def _frame(axes: Axes, plot: Plot) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.set_ylabel(plot.title.lower())
    axes.set_xlabel(plot.against)
    if plot.against == "iterations":
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _legend(chart: Figure, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Above the axes, where no curve can come; as many columns as the longest label leaves room for."""
    if not names:
        return
    texts = [label(name) + _fate(rows, name) for name in names]
    handles = [
        Line2D([], [], color=how.colour, linestyle=how.dashes, linewidth=1.7, marker=how.marker, markersize=4)
        for how in styles(names).values()
    ]
    room = int(SIZE[0] * 72 / (46 + 5 * max(map(len, texts))))  # points: the line with its gaps, and 5 a letter
    columns = max(1, min(len(names), room))
    chart.set_figheight(SIZE[1] + 0.19 * (math.ceil(len(names) / columns) - 1))
    legend = chart.legend(
        handles, ["."] * len(names), loc="outside upper center", ncols=columns,
        frameon=False, handlelength=3.2, columnspacing=1.4,
    )  # fmt: skip
    # Only now, and as they are: matplotlib would leave out a label with a leading _ and read $…$ as mathematics.
    for item, text in zip(legend.get_texts(), texts, strict=True):
        item.set_parse_math(False)
        item.set_text(text)


def _fate(rows: Sequence[Row], name: str) -> str:
    ends, seeds = diverged(rows).get(name, {}), {row.seed for row in rows if row.method == name}
    if not ends:
        return ""
    return " (diverged)" if len(ends) == len(seeds) else f" ({len(ends)} of {len(seeds)} diverged)"
