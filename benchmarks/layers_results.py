"""What `layers.py` leaves on disk and what is made of it: layers.csv, a figure, a table in Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bprong.experiments.figures import LOOK, Style, log_axis, styles
from bprong.experiments.records import label, write_atomically

SELECTION_SEED = 0


@dataclass(frozen=True)
class Row:
    """A network after some steps: loss and accuracy over the whole training set. Infinite: diverged, its last row."""

    problem: str
    method: str
    lr: float
    seed: int
    step: int
    train_loss: float
    accuracy: float


COLUMNS = [field.name for field in fields(Row)]
Runs = dict[tuple[str, str, float, int], list[Row]]


def read(folder: Path) -> Runs:
    """The runs so far, by problem, method, learning rate and seed."""
    runs: Runs = defaultdict(list)
    if (path := folder / "layers.csv").exists():
        for problem, method, lr, seed, step, loss, accuracy in list(csv.reader(io.StringIO(path.read_text())))[1:]:
            row = Row(problem, method, float(lr), int(seed), int(step), float(loss), float(accuracy))
            runs[problem, method, row.lr, row.seed].append(row)
    return dict(runs)


def write(folder: Path, runs: Runs) -> None:
    """All of them, after each run anew: what is on disk is whole at any moment."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rows in runs.values():
        writer.writerows((*astuple(row)[:-2], f"{row.train_loss:.6g}", f"{row.accuracy:.6g}") for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "layers.csv", text.getvalue().encode())


def rate(k: int) -> float:
    """The learning rate 10^(k/3), to three digits."""
    return float(f"{10 ** (k / 3):.3g}")


def tried(runs: Runs, problem: str, method: str) -> dict[int, float]:
    """The final loss on the seed of selection, by k."""
    own = {key[2]: rows for key, rows in runs.items() if (key[0], key[1], key[3]) == (problem, method, SELECTION_SEED)}
    return {round(3 * math.log10(lr)): rows[-1].train_loss for lr, rows in sorted(own.items())}


def best(losses: dict[int, float]) -> int:
    """Of the k with the least loss the least, so that a grid which diverges everywhere is extended downwards."""
    return min(losses, key=lambda k: (losses[k], k))


def at_edge(losses: dict[int, float]) -> bool:
    return best(losses) in (min(losses), max(losses))


def chosen(runs: Runs, problem: str, method: str) -> list[list[Row]]:
    """The runs of the best learning rate on fresh seeds; if there are none yet, the one that selected it."""
    lr = rate(best(tried(runs, problem, method)))
    own = {key[3]: rows for key, rows in runs.items() if key[:3] == (problem, method, lr)}
    return [rows for seed, rows in own.items() if seed != SELECTION_SEED] or list(own.values())


def draw_paths(axes: Axes, paths: list[list[Row]], how: Style, name: str) -> None:
    """The median over seeds with a band from least to greatest, as far as no seed has diverged."""
    points = [rows for rows in zip(*paths, strict=False) if all(math.isfinite(row.train_loss) for row in rows)]
    steps, losses = [rows[0].step for rows in points], [[row.train_loss for row in rows] for rows in points]
    axes.fill_between(steps, list(map(min, losses)), list(map(max, losses)), color=how.colour, alpha=0.2, linewidth=0)
    axes.plot(
        steps, list(map(median, losses)), color=how.colour, linestyle=how.dashes, linewidth=1.7,
        marker=how.marker, markersize=4, markevery=3, label=label(name),
    )  # fmt: skip


def draw_tuning(axes: Axes, losses: dict[int, float], how: Style) -> None:
    """The final loss against the learning rate, the best one ringed; × at the top where a run diverged."""
    finite = {rate(k): loss for k, loss in sorted(losses.items()) if math.isfinite(loss)}
    axes.plot(
        list(finite), list(finite.values()), color=how.colour, linestyle=how.dashes, linewidth=1.7,
        marker=how.marker, markersize=4,
    )  # fmt: skip
    if finite:
        axes.plot(
            [rate(best(losses))], [losses[best(losses)]], linestyle="none", marker="o", markersize=11,
            markerfacecolor="none", markeredgecolor=how.colour, markeredgewidth=1.4,
        )  # fmt: skip
    for k, loss in losses.items():
        if not math.isfinite(loss):
            axes.plot(
                [rate(k)], [0.97], color=how.colour, marker="x", markeredgewidth=2, linestyle="none",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip


def figure(runs: Runs, titles: Mapping[str, str], methods: Sequence[str]) -> Figure:
    """A column per problem: loss against steps, and below it the tuning curve."""
    chart = Figure(figsize=(4.4 * len(titles), 6.2), layout="constrained")
    FigureCanvasAgg(chart)
    grid = chart.subplots(2, len(titles), squeeze=False)
    for column, (problem, title) in enumerate(titles.items()):
        above, below = grid[:, column]
        for name, how in styles(methods).items():
            if losses := tried(runs, problem, name):
                draw_paths(above, chosen(runs, problem, name), how, name)
                draw_tuning(below, losses, how)
        for axes in (above, below):
            low, high = axes.dataLim.intervaly
            log_axis(axes, "y", high / low)
            axes.grid(True)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        log_axis(below, "x", 1e3)
        above.set_title(title, fontsize=11)
        above.set_xlabel("steps")
        below.set_xlabel("learning rate")
    grid[0, 0].set_ylabel("training loss")
    grid[1, 0].set_ylabel(f"final training loss, seed {SELECTION_SEED}")
    known = {text: handle for axes in grid[0] for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    chart.legend(
        list(known.values()), list(known), loc="outside upper center", ncols=min(4, len(known)),
        frameon=False, handlelength=3.2,
    )  # fmt: skip
    return chart


def table(runs: Runs, problems: Iterable[str], methods: Sequence[str]) -> Iterator[str]:
    """Markdown: medians over the fresh seeds, ranges in brackets."""
    yield "| problem | method | trials | best lr | final training loss | accuracy | seeds |"
    yield "|---|---|---|---|---|---|---|"
    for problem in problems:
        for method in methods:
            if losses := tried(runs, problem, method):
                ends = [rows[-1] for rows in chosen(runs, problem, method)]
                loss, right = [row.train_loss for row in ends], [row.accuracy for row in ends]
                lr = f"{rate(best(losses)):g}{' (at the edge)' if at_edge(losses) else ''}"
                span = f"{median(loss):.3g} ({min(loss):.3g} to {max(loss):.3g})"
                seeds = ", ".join(str(row.seed) for row in ends)
                cells = [problem, label(method), str(len(losses)), lr, span, f"{100 * median(right):.1f} %", seeds]
                yield f"| {' | '.join(cells)} |"


def draw(folder: Path, runs: Runs, titles: Mapping[str, str], methods: Sequence[str]) -> Path:
    """Writes figures/layers.png."""
    stream, path = io.BytesIO(), folder / "figures" / "layers.png"
    with style.context(["default", LOOK]):  # "default": whatever the user's matplotlibrc says
        figure(runs, titles, methods).savefig(stream, format="png", dpi=200)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, stream.getvalue())
    return path
