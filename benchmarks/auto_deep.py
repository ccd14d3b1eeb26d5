"""How many steps does lr="auto" take to 95 % training accuracy through thirty layers, against tuned SGD?

No normalisation, no skip connections, 8×8 digits; tanh and ReLU. SGD with momentum 0.9 has nine learning rates on the
first seed, and the best of these on the others.

    python benchmarks/auto_deep.py                 5 minutes on one core; runs what docs/auto-deep.csv lacks
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from harness import figures
from harness.command_line import CommandLine
from harness.training import AUTO, Row, Run, name_of, paths_by
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from problems.standard import DEEP

from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import each, markdown

RATES = ["1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "0.1", "0.3", "1"]  # of SGD
TARGET = 0.95


def steps_to_target(path: Sequence[Row]) -> float:
    """Steps until the target is reached; infinity if it is not."""
    return next((row.step for row in path if row.accuracy >= TARGET), math.inf)


def effort(path: Sequence[Row]) -> float:
    """Steps to the target. Runs that never reach it come after all that do, ordered by their best accuracy."""
    steps = steps_to_target(path)
    return steps if math.isfinite(steps) else 1e9 - max(row.accuracy for row in path)


def train(run: Run, most: int) -> list[Row]:
    """Trains until the target is reached. Rows: every ten steps up to step 200, then every fifty, and the last."""
    run.record()
    while run.alive and run.step < most and run.rows[-1].accuracy < TARGET:
        run.until(steps=run.step + 10).record()
    return [row for row in run.rows if row.step < 200 or row.step % 50 == 0 or row is run.rows[-1]]


def best_rates(rows: Sequence[Row], problem: str, seed: int) -> list[str]:
    """SGD's learning rates, the best on this seed first."""
    own = [row for row in rows if (row.problem, row.method, row.seed) == (problem, "sgd", seed)]
    paths = {lr: path for (lr,), path in grouped(own, "lr").items()}
    return sorted(paths, key=lambda lr: effort(paths[lr]))


def table(rows: Sequence[Row]) -> str:
    lines = []
    best: dict[tuple[str, bool], float] = {}
    for (problem, method, lr), paths in paths_by(rows, "problem", "method", "lr").items():
        steps = [steps_to_target(path) for path in paths]
        accuracy = f"{median(max(row.accuracy for row in path) for path in paths):.3f}"
        lines.append([DEEP[problem].title, name_of(method), lr, each([median(steps)]), each(steps), accuracy])
        key = (problem, method == AUTO)
        best[key] = min(best.get(key, math.inf), median(steps))
    text = markdown(["network", "method", "lr", "steps to 95 %, median", "each seed", "best accuracy"], lines)
    for problem in dict.fromkeys(row.problem for row in rows):
        mine = best[problem, True]
        theirs = best[problem, False]
        ratio = f", ratio {mine / theirs:.2f}" if math.isfinite(mine / theirs) else ""
        text += f'\n\n{DEEP[problem].title}: lr="auto" {each([mine])} steps, the best SGD {each([theirs])}{ratio}.'
    return text


def draw_panel(axes: Axes, rows: Sequence[Row], problem: str) -> None:
    """Accuracy against steps, for each setting the seed with the median number of steps."""
    settings = paths_by((row for row in rows if row.problem == problem), "method", "lr")
    best = min((key for key in settings if key[0] != AUTO), key=lambda key: median(map(effort, settings[key])))
    labels = {(AUTO, "auto"): 'lr="auto"', best: f"{name_of(best[0])}, lr {float(best[1]):g}"}
    for key, paths in settings.items():
        path = [row for row in sorted(paths, key=effort)[len(paths) // 2] if row.step > 0]
        x = [row.step for row in path]
        figures.competitor(axes, x, [row.accuracy for row in path], figures.STYLES[key[0]], labels.get(key))
    figures.log_axis(axes, "x", 200)
    axes.xaxis.set_major_locator(FixedLocator([10, 30, 100, 300, 1000]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_ylim(0, 1.05)
    figures.target_line(axes, TARGET, f"target {100 * TARGET:g} %")
    figures.frame(axes, f"{DEEP[problem].title}: digits", "steps", "training accuracy")
    others = figures.explain("faint", "SGD, other rates")
    figures.legend(axes, [others], title="each line: the seed of median steps")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("seeds", [0, 1, 2], [0, 1], "seeds")
    parser.setting("most", 2000, 20, "steps, at most")
    parser.setting("kept", 4, 2, "learning rates, the best on the first seed, that are run on the others")
    options = parser.parse(arguments)
    log = Log(options.out / "auto-deep.csv", Row)
    for name, problem in DEEP.items():
        rates = RATES[3:6] if options.quick else RATES
        for seed in options.seeds:
            for method, lr in [(AUTO, "auto"), *(("sgd", lr) for lr in rates)]:
                if (name, method, lr, seed) not in log.grouped("problem", "method", "lr", "seed"):
                    run = Run(name, problem, method, lr, seed)
                    log.add(train(run, options.most))
                    print(run, flush=True)
            rates = best_rates(log.rows, name, options.seeds[0])[: options.kept]
    print(table(log.rows))


if __name__ == "__main__":
    main()
