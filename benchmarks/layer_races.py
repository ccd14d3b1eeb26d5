"""Does BPRONG train convolutions and attention faster than tuned SGD and Adam, at an equal number of steps?

A small convolutional network on scikit-learn's digits, and a small transformer that sorts sequences. Every method has
seven learning rates, a third of a decade apart, judged on seed 0 by the loss over the whole training set after the last
step; a run that diverges counts as infinity. If the best rate is at an edge, the grid of that method is extended and
every other method gets as many more trials. The best rate is then run on fresh seeds. All methods of a seed have the
same initial weights and the same batches.

    python benchmarks/layer_races.py                             runs what docs/layers.csv lacks, then draws
    python benchmarks/layer_races.py --draw                      docs/figures/layers.png, and a table in Markdown
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from harness import figures
from harness.command_line import CommandLine
from harness.training import Row, Run, name_of
from matplotlib.axes import Axes
from problems import Problem
from problems.standard import CONVOLUTIONS, TRANSFORMER

from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown, median_and_range

COLUMNS = ["problem", "method", "lr", "seed", "step", "train_loss", "accuracy"]
PROBLEMS = {"conv": CONVOLUTIONS, "transformer": TRANSFORMER}
TITLES = {"conv": "Convolutions: digits", "transformer": "Transformer: sorting"}
METHODS = ["sgd", "adam", "bprong"]
BPRONG_SETTINGS: dict[str, Any] = {"momentum": 0.9, "max_step": 0.1}  # everything else at its default
LEAST_RATES = {  # k of each method's least learning rate 10^(k/3)
    "conv": {"sgd": -7, "adam": -9, "bprong": -12},
    "transformer": {"sgd": -6, "adam": -11, "bprong": -12},
}
TRIALS = 7
MORE_TRIALS = 6  # at most, if the best rate stays at an edge
SELECTION_SEED = 0
EVALUATE_EVERY = 25


def rate(k: int) -> float:
    """The learning rate 10^(k/3), to three digits."""
    return float(f"{10 ** (k / 3):.3g}")


def tried(rows: Sequence[Row], problem: str, method: str) -> dict[int, float]:
    """The final loss on the selection seed by k, the learning rate being 10^(k/3)."""
    own = [row for row in rows if (row.problem, row.method, row.seed) == (problem, method, SELECTION_SEED)]
    return dict(sorted({round(3 * math.log10(float(row.lr))): row.train_loss for row in own}.items()))


def best(losses: dict[int, float]) -> int:
    """The k of the least loss. Among equals the least k, so that a grid that always diverges is extended downwards."""
    return min(losses, key=lambda k: (losses[k], k))


def at_edge(losses: dict[int, float]) -> bool:
    return best(losses) in (min(losses), max(losses))


def next_trial(losses: dict[int, float], grid: range, least: int, most: int) -> int | None:
    """The next k to try: the rest of the grid, then beyond the end that is nearer to the best. None: no more trials.

    There are at least `least` trials, and at most `most` if the best rate stays at an edge.
    """
    missing = [k for k in grid if k not in losses]
    if missing:
        return missing[0]
    if len(losses) >= least and not (at_edge(losses) and len(losses) < most):
        return None
    low = min(losses)
    high = max(losses)
    return low - 1 if best(losses) - low <= high - best(losses) else high + 1


def chosen(rows: Sequence[Row], problem: str, method: str) -> list[list[Row]]:
    """The runs with the best learning rate on fresh seeds; if there are none yet, the run that selected it."""
    lr = rate(best(tried(rows, problem, method)))
    own = [row for row in rows if (row.problem, row.method, float(row.lr)) == (problem, method, lr)]
    fresh = [row for row in own if row.seed != SELECTION_SEED]
    return list(grouped(fresh or own, "seed").values())


class Races:
    """Runs what is missing in the CSV file."""

    def __init__(self, log: Log[Row], options: argparse.Namespace) -> None:
        self.log = log
        self.options = options

    def problem(self, name: str) -> Problem:
        return replace(PROBLEMS[name], steps=5) if self.options.quick else PROBLEMS[name]

    def run(self, problem: str, method: str, k: int, seed: int) -> None:
        """One run, unless the file has it."""
        known = {(row.problem, row.method, float(row.lr), row.seed) for row in self.log.rows}
        if (problem, method, rate(k), seed) in known:
            return
        settings = BPRONG_SETTINGS if method == "bprong" else {}
        run = Run(problem, self.problem(problem), method, f"{rate(k):g}", seed, **settings)
        run.record()
        while run.alive and run.step < run.problem.steps:
            run.until(steps=min(run.step + EVALUATE_EVERY, run.problem.steps)).record()
        self.log.add(run.rows)
        print(run, flush=True)

    def select(self, problem: str) -> None:
        """Runs the grids on the selection seed until no best rate is at an edge and all had as many trials."""
        size = self.options.trials
        most = size if self.options.quick else size + MORE_TRIALS
        going = True
        while going:
            going = False
            least = max(size, *(len(tried(self.log.rows, problem, method)) for method in METHODS))
            for method in METHODS:
                first = LEAST_RATES[problem][method]
                k = next_trial(tried(self.log.rows, problem, method), range(first, first + size), least, most)
                if k is not None:
                    self.run(problem, method, k, SELECTION_SEED)
                    going = True

    def run_all(self) -> None:
        for problem in PROBLEMS:
            self.select(problem)
            for seed in self.options.seeds:
                for method in METHODS:
                    self.run(problem, method, best(tried(self.log.rows, problem, method)), seed)


def table(rows: Sequence[Row]) -> str:
    lines = []
    for problem in PROBLEMS:
        for method in METHODS:
            losses = tried(rows, problem, method)
            ends = [path[-1] for path in chosen(rows, problem, method)]
            lr = f"{rate(best(losses)):g}{' (at the edge)' if at_edge(losses) else ''}"
            span = median_and_range([row.train_loss for row in ends])
            right = f"{100 * median(row.accuracy for row in ends):.1f} %"
            seeds = ", ".join(str(row.seed) for row in ends)
            lines.append([problem, name_of(method), len(losses), lr, span, right, seeds])
    return markdown(
        ["problem", "method", "trials", "best lr", "final training loss (range)", "accuracy", "seeds"], lines
    )


def draw_paths(axes: Axes, paths: list[list[Row]], how: figures.Style) -> None:
    """Loss against steps, as far as no seed has diverged."""
    points = [rows for rows in zip(*paths, strict=False) if all(math.isfinite(row.train_loss) for row in rows)]
    losses = [[rows[i].train_loss for rows in points] for i in range(len(paths))]
    figures.band(axes, [rows[0].step for rows in points], losses, how)


def draw_tuning(axes: Axes, losses: dict[int, float], how: figures.Style, label: str) -> None:
    """Final loss against learning rate."""
    finite = {rate(k): loss for k, loss in losses.items() if math.isfinite(loss)}
    figures.curve(axes, list(finite), list(finite.values()), how, label, markers=99)
    if finite:
        figures.ring(axes, rate(best(losses)), losses[best(losses)], how)
    for k, loss in losses.items():
        if not math.isfinite(loss):
            figures.cross(axes, rate(k), how)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A column per problem: loss against steps, and below it the tuning curves."""
    with figures.drawing(path, 2, 2, 6.6) as (chart, grid):
        for column, problem in enumerate(PROBLEMS):
            above = grid[column]
            below = grid[2 + column]
            for method in METHODS:
                draw_paths(above, chosen(rows, problem, method), figures.STYLES[method])
                draw_tuning(below, tried(rows, problem, method), figures.STYLES[method], name_of(method))
            for axes in (above, below):
                low, high = axes.dataLim.intervaly
                figures.log_axis(axes, "y", high / low)
            figures.log_axis(below, "x", 1e3)
            figures.frame(above, TITLES[problem], "steps", "training loss, nats")
            figures.frame(below, f"Tuning on seed {SELECTION_SEED}", "learning rate", "final training loss, nats")
        seeds = ", ".join(str(path[0].seed) for path in chosen(rows, "conv", "sgd"))
        extra = [
            figures.explain("band", f"least to greatest of seeds {seeds} (line: median)"),
            figures.explain("ring", "learning rate used above"),
            figures.explain("cross", "diverged"),
        ]
        figures.legend(chart, extra, columns=3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.setting("seeds", [1, 2, 3], [1], "fresh seeds")
    parser.setting("trials", TRIALS, 2, "learning rates of each method")
    options = parser.parse(arguments)
    log = Log(options.out / "layers.csv", Row, COLUMNS)
    if not options.draw:
        Races(log, options).run_all()
    print(table(log.rows))
    draw(log.rows, options.out / "figures" / "layers.png")


if __name__ == "__main__":
    main()
