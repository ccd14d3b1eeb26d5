"""How fast does lr="auto" train the deep autoencoder, against tuned Adam, BN+Adam and SGD with Nesterov's momentum?

Forty seconds of training each. All runs take turns of two seconds; after ten seconds only the best two learning rates
of each baseline go on. Baselines are then trained on to as many steps as lr="auto" has made. Two long runs give L*, the
least loss reached.

    python benchmarks/auto_autoencoder.py          11 minutes on two cores; runs what docs/auto-autoencoder.csv lacks

If other programs use the machine, set OMP_WAIT_POLICY=PASSIVE: two threads that wait for each other by spinning can
take twenty times as long.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from harness import figures
from harness.command_line import CommandLine
from harness.training import AUTO, Row, Run, name_of, paths_by
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator
from problems import Problem
from problems.standard import coder

from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown

RACE = "autoencoder"
LONG = "autoencoder-long"
RATES = {
    "adam": ["3e-4", "1e-3", "2e-3", "4e-3", "8e-3"],
    "bn-adam": ["3e-4", "1e-3", "2e-3", "4e-3", "8e-3"],
    "nesterov": ["1e-3", "3e-3", "1e-2", "3e-2"],
}
KEPT = 2  # learning rates of each baseline that go on after the screening
LONG_RATE = 2e-3  # of BN+Adam's long run; it falls linearly to 0
BATCH = 500
SMALL_BATCH = 250  # of lr="auto" alone, which also runs at BATCH


def race(problem: Problem, options: argparse.Namespace, seed: int) -> list[Run]:
    """All runs of one seed."""
    entries = [(AUTO, "auto", SMALL_BATCH), (AUTO, "auto", BATCH)]
    entries += [(method, lr, BATCH) for method, rates in RATES.items() for lr in rates]
    runs = [Run(RACE, problem, method, lr, seed, batch) for method, lr, batch in entries]
    for run in runs:
        run.record()
    take_turns(runs, 0.0, options.screen, options.turn)
    going = [run for method in (AUTO, *RATES) for run in best_of(runs, method)]
    take_turns(going, options.screen, options.seconds, options.turn)
    most = max(run.step for run in going if run.method == AUTO)
    for run in going:
        if run.method != AUTO and run.step < most:
            run.until(steps=most).record()
            print(run, flush=True)
    return runs


def take_turns(runs: Sequence[Run], start: float, end: float, turn: float) -> None:
    """Trains every run from second `start` to second `end` of its clock, `turn` seconds at a time."""
    while start < end:
        start = min(start + turn, end)
        for run in runs:
            if run.alive:
                run.until(seconds=start).record()
                print(run, flush=True)


def best_of(runs: Sequence[Run], method: str) -> list[Run]:
    """The runs that go on after the screening."""
    own = [run for run in runs if run.method == method and run.alive]
    return own if method == AUTO else sorted(own, key=lambda run: run.rows[-1].train_loss)[:KEPT]


def long_runs(problem: Problem, seconds: float, parts: int) -> Iterator[Run]:
    """lr="auto", and BN+Adam with a learning rate that falls to 0."""
    for method, lr in (("bn-adam", f"{LONG_RATE:g}"), (AUTO, "auto")):
        run = Run(LONG, problem, method, lr, 0)
        for part in range(parts):
            if method != AUTO:
                run.optimizer.param_groups[0]["lr"] = LONG_RATE * (1 - part / parts)
            run.until(seconds=seconds * (part + 1) / parts).record()
        yield run


def raced(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.problem == RACE]


def duration(rows: Sequence[Row]) -> float:
    """Whole seconds that lr="auto" trained."""
    ends = grouped((row for row in raced(rows) if row.method == AUTO), "batch", "seed").values()
    return float(int(min(path[-1].seconds for path in ends)))


def loss_at(rows: Sequence[Row], column: str, at: float) -> float:
    """The training loss at some second or step, log-linear between two rows; NaN beyond the last row."""
    for before, after in pairwise(rows):
        low = getattr(before, column)
        high = getattr(after, column)
        if low <= at <= high and high > low:
            if not math.isfinite(after.train_loss):
                return after.train_loss
            share = (at - low) / (high - low)
            return math.exp((1 - share) * math.log(before.train_loss) + share * math.log(after.train_loss))
    return math.inf if math.isinf(rows[-1].train_loss) else math.nan


def steps_by(rows: Sequence[Row], seconds: float) -> int:
    """Steps made by some second. The last step may have begun before it and ended after it."""
    return next((row.step for row in rows if row.seconds >= seconds), rows[-1].step)


def number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def table(rows: Sequence[Row]) -> str:
    """Losses at equal seconds, and L − L* at the number of steps that lr="auto" has made; medians over seeds."""
    least = min(row.train_loss for row in rows)
    seconds = duration(rows)
    runs = paths_by(raced(rows), "method", "lr", "batch")
    made = {key: median(steps_by(path, seconds) for path in paths) for key, paths in runs.items()}
    marks = {key: steps for key, steps in made.items() if key[0] == AUTO}
    lines = {}
    gaps = {}
    for key, paths in runs.items():
        half = median(loss_at(path, "seconds", seconds / 2) for path in paths)
        end = median(loss_at(path, "seconds", seconds) for path in paths)
        gaps[key] = [median(loss_at(path, "step", steps) for path in paths) - least for steps in marks.values()]
        cells = [number(half), number(end), f"{made[key]:.0f}", *map(number, gaps[key])]
        lines[key] = (math.inf if math.isnan(end) else end, [name_of(key[0]), *key[1:], *cells])
    titles = [
        "method",
        "lr",
        "batch",
        f"loss at {seconds / 2:g} s",
        f"loss at {seconds:g} s",
        f"steps by {seconds:g} s",
    ]
    titles += [f"loss − L* at {steps:.0f} steps" for steps in marks.values()]
    text = markdown(titles, [cells for _, cells in sorted(lines.values(), key=lambda line: line[0])])
    text += f"\n\nL* = {least:.2f}. Empty: not trained that long, as other rates of the method were better."
    for i, (key, steps) in enumerate(marks.items()):
        mine = gaps[key][i]
        best = min(gap[i] for other, gap in gaps.items() if other[0] != AUTO and not math.isnan(gap[i]))
        text += f'\nlr="auto" at batch {key[2]}, {steps:.0f} steps: {mine:.2f} above L*, the best baseline {best:.2f}: '
        text += f"ratio {mine / best:.2f}."
    return text


def draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Loss against seconds of the first seed, from the end of the first turn on."""
    seed = min(row.seed for row in rows)
    end = duration(rows)
    paths = grouped((row for row in raced(rows) if row.seed == seed), "method", "lr", "batch")
    labels = {key: f'lr="auto", batch {key[2]}' for key in paths if key[0] == AUTO}
    for method in RATES:
        ends = {key: path[-1] for key, path in paths.items() if key[0] == method}
        best = min(ends, key=lambda key: (ends[key].seconds < 0.9 * end, ends[key].train_loss))
        labels[best] = f"{name_of(method)}, lr {float(best[1]):g}"
    for key, path in paths.items():
        points = [row for row in path if 0 < row.seconds <= 1.05 * end and math.isfinite(row.train_loss)]
        how = figures.variant(figures.STYLES[key[0]], key[2] == SMALL_BATCH)
        losses = [row.train_loss for row in points]
        figures.competitor(axes, [row.seconds for row in points], losses, how, labels.get(key))
    figures.log_axis(axes, "y", 10)
    axes.yaxis.set_major_locator(FixedLocator([50, 60, 70, 80, 100, 120, 150, 200, 300, 400, 500]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlim=(0, 1.02 * end), ylim=(0.95 * min(row.train_loss for row in raced(rows)), 230))
    figures.frame(axes, "Autoencoder: MNIST", "training time, seconds", "training loss, nats per image")
    others = figures.explain_faint("other rates (some stopped at 10 s)")
    figures.legend(axes, [others], title=f"seed {seed}, baselines at batch {BATCH}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2, out=True)
    parser.setting("seeds", [0], [0], "seeds")
    parser.setting("seconds", 40.0, 0.4, "seconds of training")
    parser.setting("screen", 10.0, 0.2, f"seconds after which only {KEPT} learning rates of a baseline go on")
    parser.setting("turn", 2.0, 0.1, "seconds of training in one turn")
    parser.setting("long", 120.0, 0.2, "seconds of each of the two long runs")
    options = parser.parse(arguments)
    problem = replace(coder(BATCH, 0), evaluated=200 if options.quick else 5000)
    Run("warm-up", problem, "adam", "1e-3", 0).until(steps=5)  # the first steps of a process are slow
    log = Log(options.out / "auto-autoencoder.csv", Row)
    for seed in options.seeds:
        if not any((row.problem, row.seed) == (RACE, seed) for row in log.rows):
            for run in race(problem, options, seed):
                log.add(run.rows)
    if not any(row.problem == LONG for row in log.rows):
        for run in long_runs(problem, options.long, 2 if options.quick else 50):
            log.add(run.rows)
            print(run, flush=True)
    print(table(log.rows))
    with figures.drawing(options.out / "figures" / "auto.png", 1, 1, 4.4) as (_, (axes,)):
        draw_panel(axes, log.rows)


if __name__ == "__main__":
    main()
