"""How many seconds does lr="auto" take to a training loss of 0.05 on the paper's network, against tuned BN+Adam?

Three batch sizes, BN+Adam with four learning rates. All runs of a seed take turns: the one whose clock is behind trains
next. Seconds are of training alone.

    python benchmarks/auto_paper.py                5 minutes on two cores; runs what docs/auto-paper.csv lacks

If other programs use the machine, set OMP_WAIT_POLICY=PASSIVE: two threads that wait for each other by spinning can
take twenty times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from harness import figures
from harness.command_line import CommandLine
from harness.training import AUTO, Row, Run, name_of, paths_by
from matplotlib.axes import Axes
from problems.standard import paper

from bprong.experiments.bench.rows import Log
from bprong.experiments.bench.tables import each, markdown

RATES = ["1e-3", "2e-3", "4e-3", "8e-3"]  # of BN+Adam
BATCHES = [100, 500, 1000]
TARGET = 0.05


def to_target(path: Sequence[Row], column: str = "seconds") -> float:
    """Seconds or steps until the target is reached; infinity if it is not."""
    return next((float(getattr(row, column)) for row in path if row.train_loss <= TARGET), math.inf)


def fastest_first(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[list[Row]]]:
    """By method, learning rate and batch size: the paths of all seeds."""
    found = paths_by(rows, "method", "lr", "batch")
    return {
        (m, lr, b): found[m, lr, b] for m, lr, b in sorted(found, key=lambda key: median(map(to_target, found[key])))
    }


def table(rows: Sequence[Row]) -> str:
    lines = []
    best: dict[bool, float] = {}
    for (method, lr, batch), paths in fastest_first(rows).items():
        seconds = [to_target(path) for path in paths]
        best.setdefault(method == AUTO, median(seconds))
        steps = median(to_target(path, "step") for path in paths)
        lines.append([name_of(method), lr, batch, each([median(seconds)], ".2f"), each(seconds, ".2f"), each([steps])])
    text = markdown(["method", "lr", "batch", f"seconds to {TARGET}, median", "each seed", "steps, median"], lines)
    ratio = best[True] / best[False]
    return f'{text}\n\nlr="auto" {best[True]:.2f} s, the best baseline {best[False]:.2f} s: ratio {ratio:.2f}.'


def draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Loss against seconds, for each setting the seed with the median time to the target."""
    settings = fastest_first(rows)
    baseline = next(key for key in settings if key[0] != AUTO)
    for (method, lr, batch), paths in settings.items():
        middle = sorted(paths, key=to_target)[(len(paths) - 1) // 2]
        path = [row for row in middle if math.isfinite(row.train_loss)]
        how = figures.STYLES[method]
        label = None
        if method == AUTO:
            how = figures.variant(how, len(BATCHES) - 1 - BATCHES.index(batch))
            label = f'lr="auto", batch {batch:,}'
        elif (method, lr, batch) == baseline:
            label = f"{name_of(method)}, lr {float(lr):g}, batch {batch:,}"
        figures.competitor(axes, [row.seconds for row in path], [row.train_loss for row in path], how, label)
    figures.log_axis(axes, "y", 2.4 / TARGET)
    axes.set_xlim(0, 5)
    figures.target_line(axes, TARGET, f"target {TARGET:g}", above=False)
    figures.frame(axes, "The paper's network: MNIST", "training time, seconds", "training loss, nats")
    others = figures.explain("faint", "BN+Adam, other rates and batches")
    figures.legend(axes, [others], title="each line: the seed of median time")


def is_going(run: Run, limit: float) -> bool:
    return run.alive and run.rows[-1].train_loss > TARGET and run.clock.seconds < limit


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2, out=True)
    parser.setting("seeds", [0, 1, 2], [0], "seeds")
    parser.setting("batches", BATCHES, [100], "batch sizes")
    parser.setting("limit", 20.0, 0.1, "seconds of training, at most")
    parser.setting("every", 25, 10, "steps between two measurements")
    options = parser.parse(arguments)
    Run("warm-up", paper(100, 0), AUTO, "auto", 0).until(steps=20)  # the first steps of a process are slow
    log = Log(options.out / "auto-paper.csv", Row)
    entries = [(AUTO, "auto"), *(("bn-adam", lr) for lr in RATES)]
    for seed in options.seeds:
        known = log.grouped("problem", "method", "lr", "batch", "seed")
        runs = [Run("paper", paper(batch, 0), method, lr, seed) for method, lr in entries for batch in options.batches]
        runs = [run for run in runs if run.key not in known]
        for run in runs:
            run.record()
        while going := [run for run in runs if is_going(run, options.limit)]:
            run = min(going, key=lambda run: run.clock.seconds)
            run.until(steps=run.step + options.every).record()
        for run in runs:
            log.add(run.rows)
            print(run, flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
