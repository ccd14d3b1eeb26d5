"""The figures of `auto.py`: figures/auto.png, the races, and figures/generalisation.png."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from auto_results import LOSS_AIM, OURS, RIGHT_AIM, Row, Runs, duration, groups, label, race, time_to, toil
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator, PercentFormatter, StrMethodFormatter

from bprong.experiments.figures import DASH_DOT, DASHED, DOTTED, INK, LONG, LOOK, SOLID, Style, log_axis
from bprong.experiments.records import write_atomically

Group = tuple[str, str, str, int]  # problem, method, learning rate, batch
STYLES = {
    OURS: Style("#d55e00", SOLID, "o"),
    "bn-adam": Style("#00866a", DASH_DOT, "^"),
    "adam": Style("#b5468b", DASHED, "v"),
    "nesterov": Style("#7a7f87", DOTTED, "D"),
    "sgd": Style("#7a7f87", DOTTED, "D"),
    f"{OURS}, weight decay 1e-4": Style("#b07a00", DASHED, "s"),
    f"{OURS}, weight decay 1e-3": Style("#6a4fb3", DASH_DOT, "P"),
    f"{OURS}, strong damping": Style("#00795e", DASHED, "D"),
    f"{OURS}, averaged weights": Style("#0072b2", LONG, "h"),
}
SHORT = {OURS: "BPRONG-auto"}


def how(group: Group, batches: Sequence[int]) -> Style:
    """A method's own style; where it ran at several batches, all but the last have others of its colour."""
    own, others = STYLES[group[1]], [(LONG, "s"), (DOTTED, "D")]
    if group[1] != OURS or group[3] == batches[-1]:
        return own
    dashes, marker = others[batches.index(group[3]) % len(others)]
    return replace(own, dashes=dashes, marker=marker)


def name(group: Group, lr: bool = True, batch: bool = True) -> str:
    _, method, rate, size = group
    parts = [SHORT.get(method) or label(method).replace(label(OURS), SHORT[OURS])]
    parts += [f"lr {float(rate):g}"] if lr and rate != "auto" else []
    parts += [f"batch {size}"] if batch else []
    return ", ".join(parts)


def best_groups(runs: Runs, cost: Callable[[list[Row]], Any]) -> dict[Group, bool]:
    """Every group of seeds, and whether it is to be seen: ours, and of each method the one with the least median."""
    costs = {group: median(map(cost, paths)) for group, paths in groups(runs).items()}
    least: dict[str, Group] = {}
    for group, value in costs.items():
        if group[1] not in least or value < costs[least[group[1]]]:
            least[group[1]] = group
    return {group: group[1] == OURS or least[group[1]] == group for group in costs}


def plot(axes: Axes, x: list[float], y: list[float], look: Style, text: str | None) -> None:
    """A method's curve; without a text, a setting that was not its best one, in the background."""
    if text is None:
        axes.plot(x, y, color=look.colour, linewidth=0.8, alpha=0.35, zorder=1)
        return
    every = max(1, math.ceil(len(x) / 7))
    axes.plot(
        x, y, color=look.colour, linestyle=look.dashes, linewidth=1.7, label=text,
        marker=look.marker, markersize=4, markevery=every, zorder=3 if look.colour == STYLES[OURS].colour else 2,
    )  # fmt: skip


def frame(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes) -> None:
    """Below the axes, where no curve can come; what is faint has an entry of its own."""
    handles = list(axes.get_legend_handles_labels()[0])
    if any(line.get_alpha() for line in axes.get_lines()):
        handles.append(
            Line2D([], [], color=STYLES["sgd"].colour, linewidth=0.8, alpha=0.5, label="other learning rates")
        )
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2,
        frameon=False, fontsize=8.5, handlelength=3.0, columnspacing=1.2,
    )  # fmt: skip


def aim(axes: Axes, at: float, text: str, above: bool = True) -> None:
    axes.axhline(at, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    axes.annotate(
        text, (1, at), xycoords=("axes fraction", "data"), xytext=(0, 3 if above else -3), textcoords="offset points",
        ha="right", va="bottom" if above else "top", fontsize=8,
    )  # fmt: skip


# figures/auto.png -----------------------------------------------------------------------------------------------------


def draw_autoencoder(axes: Axes, runs: Runs) -> None:
    """Loss against seconds of the first seed, from the first turn on; what the screening left behind is faint."""
    runs = race(runs)
    seed = min(key[4] for key in runs)
    runs = {key: rows for key, rows in runs.items() if key[4] == seed}
    end = duration(runs)
    seen = best_groups(runs, lambda rows: (rows[-1].seconds < 0.9 * end, rows[-1].train_loss))
    batches = sorted({key[3] for key in runs if key[1] == OURS})
    for group, best in seen.items():
        rows = [row for row in runs[(*group, seed)] if 0 < row.seconds <= 1.05 * end and math.isfinite(row.train_loss)]
        text = name(group, batch=group[1] == OURS) if best else None
        plot(axes, [r.seconds for r in rows], [r.train_loss for r in rows], how(group, batches), text)
    shown = [line.get_ydata() for line in axes.get_lines() if len(line.get_ydata()) and not line.get_alpha()]
    log_axis(axes, "y", 10)
    axes.yaxis.set_major_locator(FixedLocator([50, 60, 70, 80, 100, 120, 150, 200, 300, 400, 500]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0.95 * min(map(min, shown)), 1.1 * max(map(max, shown)))
    axes.set_xlim(0, 1.02 * end)
    frame(axes, "Autoencoder: MNIST", "seconds of training; baselines at batch 500", "training cross-entropy")
    legend(axes)


def draw_paper(axes: Axes, runs: Runs) -> None:
    """Loss against seconds: of each setting the seed of median time to the aim."""
    batches = sorted({key[3] for key in runs if key[1] == OURS})
    longest = 0.0
    for group, best in best_groups(runs, time_to).items():
        paths = sorted(groups(runs)[group], key=time_to)
        rows = [row for row in paths[(len(paths) - 1) // 2] if math.isfinite(row.train_loss)]
        longest = max(longest, rows[-1].seconds) if best else longest
        text = name(group) if best else None
        plot(axes, [r.seconds for r in rows], [r.train_loss for r in rows], how(group, batches), text)
    log_axis(axes, "y", 2.4 / LOSS_AIM)
    axes.set_xlim(0, 1.6 * longest)
    aim(axes, LOSS_AIM, f"{LOSS_AIM:g}", above=False)
    frame(axes, "The paper's network: MNIST", "seconds of training", "training loss")
    legend(axes)


def draw_deep(axes: Axes, runs: Runs, title: str) -> None:
    """Accuracy against steps, of each setting the seed in the middle."""
    for group, best in best_groups(runs, toil).items():
        paths = sorted(groups(runs)[group], key=toil)
        rows = [row for row in paths[len(paths) // 2] if row.step > 0]
        text = name(group, batch=False) if best else None
        plot(axes, [r.step for r in rows], [r.accuracy for r in rows], STYLES[group[1]], text)
    log_axis(axes, "x", max(rows[-1].step for rows in runs.values()) / 10)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_ylim(0, 1.05)
    aim(axes, RIGHT_AIM, f"{100 * RIGHT_AIM:g} %")
    frame(axes, f"{title}: digits", "steps", "training accuracy")
    legend(axes)


def draw_auto(folder: Path, runs: Mapping[str, Runs], titles: Mapping[str, str]) -> Iterator[Path]:
    """Of what there is: a panel for each race."""
    panels: list[Callable[[Axes], None]] = []
    panels += [lambda axes: draw_autoencoder(axes, runs["autoencoder"])] if race(runs["autoencoder"]) else []
    panels += [lambda axes: draw_paper(axes, runs["paper"])] if runs["paper"] else []
    for problem in dict.fromkeys(key[0] for key in runs["deep"]):
        own = {key: rows for key, rows in runs["deep"].items() if key[0] == problem}
        panels.append(lambda axes, own=own, problem=problem: draw_deep(axes, own, titles[problem]))
    if panels:
        yield save(folder, "auto", panels)


def save(folder: Path, file: str, panels: Sequence[Callable[[Axes], None]], shared: bool = False) -> Path:
    """Two panels a row; if their curves are the same, one legend for all."""
    stream, path = io.BytesIO(), folder / "figures" / f"{file}.png"
    with style.context(["default", LOOK]):  # "default": whatever the user's matplotlibrc says
        rows, columns = math.ceil(len(panels) / 2), min(2, len(panels))
        chart = Figure(figsize=(4.8 * columns, 3.9 * rows), layout="constrained")
        FigureCanvasAgg(chart)
        chart.get_layout_engine().set(w_pad=0.09, h_pad=0.09)
        grid = chart.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            panel(axes)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if shared:
            how_many = {"ncols": 3, "frameon": False, "handlelength": 3.2}
            chart.legend(*grid[-1].get_legend_handles_labels(), loc="outside lower center", **how_many)
        chart.savefig(stream, format="png", dpi=200)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, stream.getvalue())
    return path


# figures/generalisation.png -------------------------------------------------------------------------------------------


def draw_general(folder: Path, runs: Runs) -> Iterator[Path]:
    if runs:
        panels = [lambda axes: by_epoch(axes, runs), lambda axes: by_training(axes, runs)]
        yield save(folder, "generalisation", panels, shared=True)


def medians(paths: list[list[Row]]) -> list[tuple[int, float, float]]:
    """Epoch, training and validation loss, medians over seeds, the untrained network left out."""
    points = list(enumerate(zip(*paths, strict=False)))[1:]
    return [(i, median(r.train_loss for r in rows), median(r.val_loss for r in rows)) for i, rows in points]


def by_epoch(axes: Axes, runs: Runs) -> None:
    for group, paths in groups(runs).items():
        points, look = medians(paths), STYLES[group[1]]
        plot(axes, [p[0] for p in points], [p[2] for p in points], look, name(group, batch=False))
        spans = [[rows[i].val_loss for rows in paths] for i, _, _ in points]
        epochs = [p[0] for p in points]
        axes.fill_between(epochs, [*map(min, spans)], [*map(max, spans)], color=look.colour, alpha=0.08, linewidth=0)
    axes.xaxis.set_major_locator(MultipleLocator(1))
    frame(axes, "Validation loss, epoch by epoch", "epochs", "validation loss")


def by_training(axes: Axes, runs: Runs) -> None:
    """A point per epoch, training goes to the right: what lies above the dotted line does not carry over."""
    for group, paths in groups(runs).items():
        points = medians(paths)
        plot(axes, [p[1] for p in points], [p[2] for p in points], STYLES[group[1]], name(group, batch=False))
    log_axis(axes, "x", 100)
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    equal = [low * (high / low) ** (i / 100) for i in range(101)]
    axes.plot(equal, equal, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label="validation = training")
    axes.set_xlim(high, low)  # training goes to the right
    axes.set_ylim(bottom, top)
    frame(axes, "The same against the training loss", "training loss", "validation loss")
