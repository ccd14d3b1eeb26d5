"""Does lr="auto" ever diverge? Eleven problems, five seeds, one setting.

A run has diverged if its loss is not finite or is above that of the untrained network.

    python benchmarks/auto_stability.py                11 minutes on one core; runs what docs/auto-hold.csv lacks
    python benchmarks/auto_stability.py --only conv transformer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from harness.command_line import CommandLine
from harness.training import AUTO, Row, Run, paths_by
from problems.standard import STANDARD

from bprong.experiments.bench.rows import Log
from bprong.experiments.bench.tables import markdown

QUICK = ["paper-100", "conv", "regression-linear"]
PARTS = 4  # a run is measured after every quarter of its steps


def diverged(rows: Sequence[Row]) -> bool:
    return not rows[-1].train_loss <= rows[0].train_loss


def table(rows: Sequence[Row]) -> str:
    """Medians over seeds, the worst seed, and how many seeds diverged."""
    lines = []
    for (problem,), paths in paths_by(rows, "problem").items():
        quarters = [[path[min(i, len(path) - 1)].train_loss for path in paths] for i in range(PARTS + 1)]
        val = [path[-1].val_loss for path in paths]
        cells = [f"{median(losses):.3g}" for losses in quarters]
        cells += [f"{max(quarters[-1]):.3g}", f"{median(val):.3g}", f"{max(val):.3g}"]
        cells += [f"{median(path[-1].seconds for path in paths):.1f}", f"{sum(map(diverged, paths))} of {len(paths)}"]
        lines.append([STANDARD[problem].title, *cells])
    titles = ["problem", "loss at the start", "¼", "½", "¾", "end", "worst end", "validation", "worst validation"]
    return markdown([*titles, "seconds", "diverged"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("seeds", [0, 1, 2, 3, 4], [0], "seeds")
    parser.add_argument("--only", nargs="+", choices=STANDARD, metavar="NAME", help=", ".join(STANDARD))
    options = parser.parse(arguments)
    log = Log(options.out / "auto-hold.csv", Row)
    for seed in options.seeds:
        for name in options.only or (QUICK if options.quick else STANDARD):
            problem = replace(STANDARD[name], steps=4) if options.quick else STANDARD[name]
            if not any((row.problem, row.seed) == (name, seed) for row in log.rows):
                run = Run(name, problem, AUTO, "auto", seed)
                for part in range(PARTS + 1):
                    run.until(steps=part * problem.steps // PARTS).record(validate=part == PARTS or not run.alive)
                log.add(run.rows)
                print(run, flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
