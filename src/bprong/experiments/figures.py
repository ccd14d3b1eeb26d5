"""The paper's four figures: training and validation loss, against iterations and against seconds.

Methods that are trained for validation (`recipes.py`) are drawn in the figures of the validation loss only.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from bprong.experiments.recipes import RECIPES
from bprong.experiments.records import (
    Point,
    Row,
    curve,
    divergence_epochs,
    label,
    method_names,
    seed_count,
    write_atomically,
)

Dashes = tuple[float, tuple[float, ...]]

INK = "#20242b"
GRID = "#dfe2e7"
LOOK: dict[str, object] = {
    "font.size": 9.5, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": GRID, "grid.linewidth": 0.7,
}  # fmt: skip
# Okabe and Ito's colours, which colour-blind readers can tell apart, darkened where they are too faint on white; each
# with its replacement on a dark page.
PALETTE = {
    "#d55e00": "#ff8c42",  # vermilion
    "#0072b2": "#5ab4f0",  # blue
    "#00866a": "#2fd0a5",  # green
    "#7a7f87": "#a7adb8",  # grey
    "#b5468b": "#ee9bce",  # purple
    "#b07a00": "#f0b93a",  # orange
    "#6a4fb3": "#b4a0f5",  # violet
    "#7a4a21": "#d8a679",  # brown
}
DASHES: dict[str, Dashes] = {
    "dash-dot-dot": (0, (5.0, 1.4, 1.2, 1.4, 1.2, 1.4)),
    "solid": (0, ()),
    "dashed": (0, (5.0, 1.6)),
    "dotted": (0, (1.2, 1.4)),
    "dash-dot": (0, (6.0, 1.6, 1.2, 1.6)),
    "long": (0, (9.0, 2.0)),
    "long-dot": (0, (9.0, 1.6, 1.2, 1.6)),
    "short": (0, (2.6, 1.2)),
}
SIZE = (4.6, 3.4)  # inches; small, so that the text stays legible on a phone
DECADE = 10.0
HEADROOM = 3.0  # times the untrained loss: the top of the figure, since a diverging curve would flatten all others
CROSS: dict[str, Any] = {"marker": "x", "markersize": 9, "markeredgewidth": 2.4, "linestyle": "none"}


@dataclass(frozen=True)
class Plot:
    """One of the figures: the name of its files, its title, the column it shows and its horizontal axis."""

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
    """How a method is drawn; the colour, the dashes or the marker alone tell it from the other known methods."""

    colour: str
    dashes: Dashes
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """The arguments of `Axes.plot` and `Line2D` for this style."""
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "marker": self.marker,
            "linewidth": 1.7,
            "markersize": 4,
        }


KNOWN = {
    "bprong": Style("#d55e00", DASHES["solid"], "o"),
    "prong": Style("#0072b2", DASHES["dashed"], "s"),
    "bn": Style("#00866a", DASHES["dash-dot"], "^"),
    "sgd": Style("#7a7f87", DASHES["dotted"], "D"),
    "bprong-fast": Style("#6a4fb3", DASHES["long"], "v"),
    "bprong-auto": Style("#b5468b", DASHES["dash-dot-dot"], ">"),
    "bprong-recipe": Style("#b07a00", DASHES["long-dot"], "*"),
    "bn-recipe": Style("#7a4a21", DASHES["short"], "<"),
}
_COLOURS = tuple(dict.fromkeys(("#b07a00", *(known.colour for known in KNOWN.values()))))
_DASHES = tuple(DASHES.values())
_MARKERS = (">", "P", "h", "<", "*")


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each method: known methods have a fixed one, the others take the next unused ones in order."""
    # With 8 colours, 8 dashes and 5 markers the first 40 other methods all look different.
    rest = {
        name: Style(_COLOURS[i % len(_COLOURS)], _DASHES[i % len(_DASHES)], _MARKERS[i % len(_MARKERS)])
        for i, name in enumerate(name for name in names if name not in KNOWN)
    }
    return {name: KNOWN.get(name) or rest[name] for name in names}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the four figures as PNG and SVG; the same rows give the same bytes."""
    images = {f"{plot.name}.{suffix}": image(rows, plot, suffix) for plot in PLOTS for suffix in ("png", "svg")}
    for name, data in images.items():
        write_atomically(folder / name, data)
    return [folder / name for name in images]


def image(rows: Sequence[Row], plot: Plot, suffix: str, text: Literal["path", "none"] = "path") -> bytes:
    """One figure as the bytes of a file; with text="none" an SVG leaves fonts and background to the page."""
    settings = {"svg.hashsalt": plot.name, "svg.fonttype": text, "savefig.transparent": text == "none"}
    return render(lambda: figure(rows, plot), suffix, settings)


def render(make: Callable[[], Figure], suffix: str, settings: dict[str, Any], dpi: int = 220) -> bytes:
    """Make a figure and save it as PNG or SVG bytes, independent of the user's matplotlib settings and of the date."""
    stream = io.BytesIO()
    with style.context(["default", LOOK | settings]):
        make().savefig(stream, format=suffix, dpi=dpi, metadata={"Date": None} if suffix == "svg" else None)
    return stream.getvalue()


def svg_text(rows: Sequence[Row], plot: Plot) -> str:
    """One figure as an <svg> element that uses the font of the page and, through CSS variables, its colours."""
    return inline_svg(image(rows, plot, "svg", text="none"), f"{plot.title} against {plot.against}")


def inline_svg(image: bytes, description: str) -> str:
    """An SVG file, saved with svg.fonttype="none", as an <svg> element with the font and the colours of the page."""
    svg = image.decode()
    svg = svg[svg.index("<svg") :]
    # The style rule would apply to the whole page, ids would occur four times, and the metadata contain web addresses.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id=\"[^\"]*\"", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    attributes = f'role="img" aria-label="{description}" style="stroke-linejoin: round"'
    svg = re.sub(r"<svg[^>]*>", lambda _: f"<svg {attributes} {view.group() if view else ''}>", svg, count=1)
    for colour in (INK, GRID, *PALETTE):
        svg = svg.replace(colour, f"var(--{colour[1:]}, {colour})")
    return svg


def figure(rows: Sequence[Row], plot: Plot) -> Figure:
    """One of the figures: the median over seeds, a band for their range, and a cross where a seed diverged."""
    rows = _drawn(rows, plot)
    chart = Figure(figsize=SIZE, layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.06))
    axes = chart.add_subplot()
    curves = {
        name: [point for point in curve(rows, name, plot.column) if math.isfinite(point.median)]
        for name in method_names(rows)
    }
    top = _upper_limit(rows, plot)
    _set_scales(axes, curves, plot, top)
    for name, how in styles(list(curves)).items():
        _draw_method(axes, curves[name], how, plot, top)
        _draw_divergences(axes, rows, name, how, plot, top)
    axes.set_ylim(top=min(top, axes.get_ylim()[1]))
    _label_axes(axes, plot)
    if not any(curves.values()):
        axes.text(0.5, 0.5, "no finite loss to draw", transform=axes.transAxes, ha="center", va="center")
    _add_legends(chart, rows, list(curves))
    return chart


def _drawn(rows: Sequence[Row], plot: Plot) -> Sequence[Row]:
    """The rows of the methods that a figure shows; all of them if there are only recipes."""
    paper = [row for row in rows if row.method not in RECIPES]
    return paper if plot.column == "train_loss" and paper else rows


def _upper_limit(rows: Sequence[Row], plot: Plot) -> float:
    untrained = [value for row in rows if row.epoch == 0 and math.isfinite(value := getattr(row, plot.column))]
    return HEADROOM * max(untrained) if untrained and max(untrained) > 0 else math.inf


def _x(point: Point | Row, plot: Plot) -> float:
    return point.step if plot.against == "iterations" else point.seconds


def _set_scales(axes: Axes, curves: dict[str, list[Point]], plot: Plot, top: float) -> None:
    """Logarithmic losses if they span a decade, logarithmic seconds if the total times of the methods do."""
    losses = [p.median for points in curves.values() for p in points if 0 < p.median <= top]
    if losses and max(losses) > DECADE * min(losses):
        log_axis(axes, "y", max(losses) / min(losses))
    ends = [end for points in curves.values() if points and (end := points[-1].seconds) > 0]
    if plot.against == "seconds" and ends and max(ends) > DECADE * min(ends):
        starts = [p.seconds for points in curves.values() for p in points if p.seconds > 0]
        log_axis(axes, "x", max(ends) / min(starts))


def log_axis(axes: Axes, which: Literal["x", "y"], span: float) -> None:
    """Make an axis logarithmic, with plain numbers, also between the powers of ten if the axis spans few of them."""
    axis: Axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log", nonpositive="clip")
    few = span < DECADE**2.5
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_method(axes: Axes, points: list[Point], how: Style, plot: Plot, top: float) -> None:
    shown = [p for p in points if axes.get_xscale() == "linear" or _x(p, plot) > 0]
    x = [_x(p, plot) for p in shown]
    edge = 2 * top  # a curve that leaves the figure is drawn only up to here
    if any(p.seeds > 1 for p in shown):
        axes.fill_between(
            x, [min(p.low, edge) for p in shown], [min(p.high, edge) for p in shown],
            where=[math.isfinite(p.high) for p in shown], color=how.colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
    every = max(1, math.ceil(len(shown) / 8))
    axes.plot(x, [min(p.median, edge) for p in shown], markevery=every, **how.line)


def _draw_divergences(axes: Axes, rows: Sequence[Row], name: str, how: Style, plot: Plot, top: float) -> None:
    """A cross at the last finite loss of each seed that diverged."""
    for seed in divergence_epochs(rows, name):
        own = [row for row in rows if (row.method, row.seed) == (name, seed) and math.isfinite(row.train_loss)]
        own = [row for row in own if math.isfinite(getattr(row, plot.column))]
        # A logarithmic axis has no place for second 0, where a seed stands that diverged in its first epoch.
        for last in sorted(own, key=lambda row: row.epoch)[-1:]:
            if _x(last, plot) > 0 or axes.get_xscale() == "linear":
                loss = min(getattr(last, plot.column), top)
                axes.plot([_x(last, plot)], [loss], color=how.colour, clip_on=False, zorder=5, **CROSS)


def _label_axes(axes: Axes, plot: Plot) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True)
    axes.set_axisbelow(True)
    x = {"iterations": "iterations (minibatch updates)", "seconds": "training time (seconds)"}
    axes.set(xlabel=x[plot.against], ylabel=f"{plot.title.lower()} (cross-entropy, nats)")
    if plot.against == "iterations":
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _add_legends(chart: Figure, rows: Sequence[Row], names: Sequence[str]) -> None:
    """The methods above the axes and, below them, the meaning of bands and crosses if there are any."""
    marks: dict[str, Any] = {}
    if (seeds := seed_count(rows)) > 1:
        band = Patch(color=INK, alpha=0.2, linewidth=0)
        marks[f"median and range over {seeds} seeds"] = (band, Line2D([], [], color=INK, linewidth=1.7))
    if any(divergence_epochs(rows, name) for name in names):
        marks["last loss before divergence"] = Line2D([], [], color=INK, **CROSS)
    lines = [Line2D([], [], **how.line) for how in styles(names).values()]
    texts = [label(name) + _divergence_note(rows, name) for name in names]
    height = _add_legend(chart, lines, texts, "upper") + _add_legend(chart, marks.values(), list(marks), "lower")
    chart.set_figheight(SIZE[1] + 0.19 * max(0, height - 1))


def _add_legend(
    chart: Figure, handles: Iterable[Artist], texts: Sequence[str], where: Literal["upper", "lower"]
) -> int:
    """Add a legend with as many columns as the longest text allows; return the number of its lines."""
    if not texts:
        return 0
    room = int(SIZE[0] * 72 / (46 + 5 * max(map(len, texts))))  # in points: the sample with its gaps, and 5 per letter
    columns = max(1, min(len(texts), room))
    legend = chart.legend(
        handles, ["."] * len(texts), loc="outside upper center" if where == "upper" else "outside lower center",
        ncols=columns, frameon=False, handlelength=3.2, columnspacing=1.4,
    )  # fmt: skip
    # Set the texts afterwards: matplotlib would leave out a label with a leading _ and read $…$ as mathematics.
    for item, text in zip(legend.get_texts(), texts, strict=True):
        item.set_parse_math(False)
        item.set_text(text)
    return math.ceil(len(texts) / columns)


def _divergence_note(rows: Sequence[Row], name: str) -> str:
    ends = len(divergence_epochs(rows, name))
    seeds = seed_count(row for row in rows if row.method == name)
    share = "" if ends == seeds else f"{ends} of {seeds} "
    return f" ({share}diverged)" if ends else ""
