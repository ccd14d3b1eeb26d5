"""The figures of a benchmark: losses against seconds and steps with the targets, and performance profiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median_low

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.records import Record
from bprong.experiments.bench.scores import GREATEST_RATIO, Goal, Unit, profile, profile_score, ratios, time_to
from bprong.experiments.bench.summary import WORDS, Summary, title
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.figures import DASHES, INK, Style, inline_svg, log_axis, render
from bprong.experiments.records import write_atomically

WIDTH = 8.0  # inches: on a page 800 pixels wide, letters of 9 points are then 12 pixels high
FAINT = "#a7adb8"
STYLES = {  # the methods that have a colour; all others are drawn in grey
    "bprong": Style("#d55e00", DASHES["solid"], "o"),
    "bprong-spectral": Style("#d55e00", DASHES["dashed"], "s"),
    "bprong-auto": Style("#0072b2", DASHES["solid"], "^"),
    "bprong-auto-spectral": Style("#0072b2", DASHES["dashed"], "v"),
    "adamw": Style("#20242b", DASHES["dotted"], "x"),
    "soap": Style("#b5468b", DASHES["dash-dot"], "D"),
    "muon": Style("#00866a", DASHES["dash-dot"], "P"),
    "kfac": Style("#b07a00", DASHES["long"], "h"),
    "prodigy": Style("#6a4fb3", DASHES["short"], "<"),
    "schedule-free": Style("#6a4fb3", DASHES["dotted"], ">"),
    "bn-sgd": Style("#7a4a21", DASHES["dash-dot"], "*"),
    "bn-adamw": Style("#7a4a21", DASHES["dotted"], "+"),
}
Records = Sequence[Record]


def draw(summary: Summary, records: Records, folder: Path) -> dict[str, str]:
    """Write all figures as PNG and SVG to a folder; return them as <svg> elements for a page, by name."""
    pages = {}
    for name, (make, description) in _figures(summary, records).items():
        for suffix in ("png", "svg"):
            settings = {"svg.hashsalt": name}
            write_atomically(folder / f"{name}.{suffix}", render(make, suffix, settings, dpi=150))
        plain = {"svg.hashsalt": name, "svg.fonttype": "none", "savefig.transparent": True}
        pages[name] = inline_svg(render(make, "svg", plain), description)
    return pages


def _figures(summary: Summary, records: Records) -> dict[str, tuple[Callable[[], Figure], str]]:
    found: dict[str, tuple[Callable[[], Figure], str]] = {
        "profiles": (lambda: profiles(summary), "Performance profiles in steps and in seconds")
    }
    goals: tuple[Goal, Goal] = ("val", "train")
    units: tuple[Unit, Unit] = ("seconds", "steps")
    for goal in goals:
        for unit in units:
            text = f"{WORDS[goal].capitalize()} loss against {unit}"
            found[f"{WORDS[goal]}_{unit}"] = (_races_figure(summary, records, goal, unit), text)
    return found


def _races_figure(summary: Summary, records: Records, goal: Goal, unit: Unit) -> Callable[[], Figure]:
    return lambda: races(summary, records, goal, unit)


# Losses ---------------------------------------------------------------------------------------------------------------


def races(summary: Summary, records: Records, goal: Goal, unit: Unit) -> Figure:
    """One panel for each workload: the loss of each method's run with the median time, and the target."""
    workloads = summary.steps.workloads
    columns = min(2, len(workloads))
    rows = math.ceil(len(workloads) / columns)
    chart, panels = _panels(rows, columns, 2.5 * rows + 1.1)
    chosen = median_runs(records, goal)
    for axes, workload in zip(panels, workloads, strict=False):
        runs = {method: record for (name, method), record in chosen.items() if name == workload}
        if runs:
            draw_race(axes, workload, runs, goal, unit)
        else:
            axes.text(0.5, 0.5, f"{workload}: no run on fresh seeds", transform=axes.transAxes, ha="center")
    for axes in panels[len(workloads) :]:
        axes.set_visible(False)
    shown = [name for name in STYLES if any(method == name for _, method in chosen)]
    handles = [Line2D([], [], label=title(name), **STYLES[name].line) for name in shown]
    if any(method not in STYLES for _, method in chosen):
        handles.append(Line2D([], [], color=FAINT, linewidth=1, label="other methods"))
    handles.append(Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label="target"))
    if handles:
        chart.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, handlelength=3.2, fontsize=9)
    return chart


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    chart = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.06))
    return chart, list(chart.subplots(max(1, rows), max(1, columns), squeeze=False).flat)


def median_runs(records: Records, goal: Goal) -> dict[tuple[str, str], Record]:
    """By workload and method: of the runs on fresh seeds, that with the median number of steps to the target."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.row.stage == "test" and record.points:
            found.setdefault((record.row.workload, record.row.method), []).append(record)
    return {key: _median_run(own, goal) for key, own in found.items()}


def _median_run(own: Sequence[Record], goal: Goal) -> Record:
    steps = median_low(time_to(record.row, goal, "steps") for record in own)
    return next(record for record in own if time_to(record.row, goal, "steps") == steps)


def draw_race(axes: Axes, workload: str, runs: Mapping[str, Record], goal: Goal, unit: Unit) -> None:
    column = f"{goal}_loss"
    target = getattr(TARGETS[workload]["test"], column)
    values = [getattr(point, column) for record in runs.values() for point in record.points]
    first = max((getattr(record.points[0], column) for record in runs.values()), default=1.0)
    for method, record in sorted(runs.items(), key=lambda pair: pair[0] in STYLES):
        x = [getattr(point, "step" if unit == "steps" else unit) for point in record.points]
        y = [getattr(point, column) for point in record.points]
        if (how := STYLES.get(method)) is None:
            axes.plot(x, y, color=FAINT, linewidth=0.8, zorder=1)
        else:
            axes.plot(x, y, markevery=max(1, math.ceil(len(x) / 6)), **how.line)
    axes.axhline(target, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    span = max(values, default=1.0) / max(1e-12, min([*values, target]))
    places = [getattr(point, "step" if unit == "steps" else unit) for own in runs.values() for point in own.points]
    log_axis(axes, "x", max(places, default=1.0) / max(1e-3, min(places, default=1.0)))
    log_axis(axes, "y", span)
    axes.set_ylim(min([*values, target], default=target) * 0.8, first * 1.3)
    _frame(axes, workload, f"{unit}{' of training' if unit == 'seconds' else ''}", f"{WORDS[goal]} loss")


def _frame(axes: Axes, heading: str, x: str, y: str) -> None:
    axes.set_title(heading, fontsize=10.5)
    axes.set(xlabel=x, ylabel=y, axisbelow=True)
    axes.grid(True)
    axes.spines[["top", "right"]].set_visible(False)


# Profiles -------------------------------------------------------------------------------------------------------------


def profiles(summary: Summary) -> Figure:
    """The share of races that each method finishes within τ times the shortest time, in steps and in seconds."""
    chart, panels = _panels(1, 2, 4.6)
    units: tuple[Unit, Unit] = ("steps", "seconds")
    found = {}
    for axes, unit in zip(panels, units, strict=True):
        times = summary.times(unit)
        own = ratios(times, times.races(), summary.methods)
        found[unit] = {method: profile_score(each) for method, each in own.items()}
        for method in sorted(own, key=lambda name: name in STYLES):
            draw_profile(axes, own[method], STYLES.get(method))
        axes.set(xlim=(1, GREATEST_RATIO), ylim=(-0.02, 1.02))
        _frame(axes, f"in {unit}", "τ: times the shortest", "share of the targets reached")
    shown = sorted((name for name in STYLES if name in summary.methods), key=lambda name: -found["steps"][name])
    handles = [
        Line2D([], [], label=f"{title(m)}: {found['steps'][m]:.2f}, {found['seconds'][m]:.2f}", **STYLES[m].line)
        for m in shown
    ]
    if any(name not in STYLES for name in METHODS if name in summary.methods):
        handles.append(Line2D([], [], color=FAINT, linewidth=1, label="other methods"))
    if handles:
        chart.legend(
            handles=handles, loc="outside lower center", ncols=2, frameon=False, handlelength=3.2, fontsize=9,
            title="mean height of the curve in steps, in seconds", title_fontsize=9,
        )  # fmt: skip
    return chart


def draw_profile(axes: Axes, own: Sequence[float], how: Style | None) -> None:
    corners = sorted({1.0, GREATEST_RATIO, *(each for each in own if each <= GREATEST_RATIO)})
    heights = [profile(own, corner) for corner in corners]
    if how is None:
        axes.step(corners, heights, where="post", color=FAINT, linewidth=0.8, zorder=1)
    else:
        axes.step(corners, heights, where="post", markevery=max(1, len(corners) // 4), **how.line)
