"""How does lr="auto" do on sixty small problems, against Adam at the best of five learning rates for each problem?

All methods of a seed have the same initial weights and the same batches. The loss is that over the training set (at
most 4,000 rows), without dropout; with Batch Normalisation in the better one of its two modes. A run has diverged if
its loss is not finite or is above that of the untrained network, or if it raised an exception.

The constants of the rule were chosen with these problems in view: at first with seeds 0 and 1, later with seeds 4
and 5. --unseen runs ten other problems instead, which were not run before the rule was final, and --fresh ten further
ones, which were not run before races and units of features were.

    python benchmarks/sixty_problems.py            12 minutes on one core; runs what docs/auto-many.csv lacks
    python benchmarks/sixty_problems.py --unseen   2 minutes; the same for docs/auto-unseen.csv
    python benchmarks/sixty_problems.py --fresh    2 minutes; the same for docs/auto-fresh.csv
    python benchmarks/sixty_problems.py --only vae lstm --seeds 2,3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from harness.command_line import CommandLine
from harness.training import Run
from problems import Problem
from problems.fresh import FRESH
from problems.sixty import PROBLEMS as SIXTY
from problems.unseen import UNSEEN

from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown

PROBLEMS = SIXTY | UNSEEN | FRESH

ADAM_RATES = ["1e-3", "3e-3", "1e-2", "3e-2", "1e-1"]
WORSE = 1.2  # a loss above Adam's by more than this factor counts as worse
NEGLIGIBLE = 1e-6  # a loss of no more counts as none
EARLY = (1, 2, 3, 5, 10)  # steps after which the loss is measured, besides every twentieth of the run


@dataclass(frozen=True)
class Row:
    """A trained network. Losses are over the training set, infinite if training diverged.

    highest: the largest loss measured on the way
    undone:  updates that lr="auto" has undone
    """

    problem: str
    method: str
    lr: str
    seed: int
    start: float
    end: float
    highest: float
    undone: int
    seconds: float

    @property
    def diverged(self) -> bool:
        return not self.end <= self.start


def count_undone(optimizer: Any) -> list[bool]:
    """A list to which every undone update of lr="auto" will add an element."""
    undo_ = optimizer._rule.undo_  # internal: `report()` does not count undone updates
    undone: list[bool] = []

    def counted(*arguments: Any) -> bool:
        done = bool(undo_(*arguments))
        undone.extend([True] * done)
        return done

    optimizer._rule.undo_ = counted
    return undone


def train(name: str, problem: Problem, lr: str, seed: int) -> tuple[Row, str]:
    """One run: its row, and its exception as a text, empty if there was none."""
    method = f"{problem.optimizer.lower()}-auto" if lr == "auto" else "adam"
    run = Run(name, problem, method, lr, seed)
    undone = count_undone(run.optimizer) if lr == "auto" else []
    marks = {*EARLY, *range(0, problem.steps + 1, max(1, problem.steps // 20)), problem.steps}
    x = run.data.x[: problem.evaluated]
    y = run.data.y[: problem.evaluated]
    losses = []
    try:
        for step in sorted(mark for mark in marks if mark <= problem.steps):
            losses.append(run.until(steps=step).evaluate(run.model, x, y)[0])
    except Exception as error:  # this run has failed; the others go on
        run.alive = False
        run.error = f"{type(error).__name__}: {error}"
    if not run.alive:
        losses.append(math.inf)
    row = Row(name, method, lr, seed, losses[0], losses[-1], max(losses[1:]), len(undone), run.clock.seconds)
    return row, run.error


@dataclass(frozen=True)
class Comparison:
    """lr="auto" on one problem, and Adam at the learning rate with the least median loss over the seeds.

    ends:       the median final loss of both, above the least possible one
    ratio:      of these
    negligible: whether both are next to nothing
    """

    auto: list[Row]
    adam: list[Row]
    floor: float

    @property
    def ends(self) -> tuple[float, float]:
        auto, adam = (median(row.end for row in rows) for rows in (self.auto, self.adam))
        return max(auto - self.floor, 0.0), max(adam - self.floor, 0.0)

    @property
    def ratio(self) -> float:
        auto, adam = self.ends
        if auto == adam:
            return 1.0
        return auto / adam if adam else math.inf

    @property
    def negligible(self) -> bool:
        return max(self.ends) <= NEGLIGIBLE

    def cells(self) -> list[str]:
        auto, adam = (end + self.floor for end in self.ends)
        losses = [median(row.start for row in self.auto), auto, max(row.end for row in self.auto), adam]
        diverged = sum(row.diverged for row in self.auto)
        return [*(f"{x:.3g}" for x in losses), self.adam[0].lr, f"{self.ratio:.2g}", f"{diverged} of {len(self.auto)}"]


def compare(rows: Sequence[Row], problem: str, seeds: Sequence[int]) -> Comparison | None:
    """None if a run is missing."""
    own = [row for row in rows if row.problem == problem and row.seed in seeds]
    found = {lr: group for (lr,), group in grouped(own, "lr").items()}
    if any(len(found.get(lr, [])) < len(seeds) for lr in ("auto", *ADAM_RATES)):
        return None
    best = min((found[lr] for lr in ADAM_RATES), key=lambda group: median(row.end for row in group))
    return Comparison(found["auto"], best, PROBLEMS[problem].floor)


def table(rows: Sequence[Row], problems: Sequence[str], seeds: Sequence[int]) -> str:
    compared = {name: compare(rows, name, seeds) for name in problems}
    found = {name: comparison for name, comparison in compared.items() if comparison is not None}
    lines = [[f"`{name}`: {PROBLEMS[name].title}", *comparison.cells()] for name, comparison in found.items()]
    titles = ["problem", "start", 'lr="auto"', "worst end", "best Adam", "its lr", "ratio", "diverged"]
    return f"{markdown(titles, lines)}\n\nSeeds {', '.join(map(str, seeds))}: {summary(list(found.values()))}"


def summary(found: Sequence[Comparison]) -> str:
    below = sum(one.ratio < 1 for one in found)
    worse = [one for one in found if one.ratio > WORSE]
    negligible = sum(one.negligible for one in worse)
    runs = [row for one in found for row in one.auto]
    diverged = sum(row.diverged for row in runs)
    undone = sum(row.undone > 0 for row in runs)
    edge = sum(one.adam[0].lr in (ADAM_RATES[0], ADAM_RATES[-1]) for one in found)
    return (
        f'of {len(found)} problems, lr="auto" ends below the best Adam on {below}, above it by more than {WORSE}× on '
        f"{len(worse)} (both below {NEGLIGIBLE:g} on {negligible} of these); {diverged} of its {len(runs)} runs "
        f"diverged, {undone} undid updates. Adam's best learning rate is at an end of its grid on {edge}. Training "
        f"time divided by that of the best Adam: {time_ratios(found)}."
    )


def time_ratios(found: Sequence[Comparison]) -> str:
    """Median and range over problems of the seconds of lr="auto" divided by those of the best Adam."""
    ratios = [sum(row.seconds for row in one.auto) / sum(row.seconds for row in one.adam) for one in found]
    return f"median {median(ratios):.1f}, {min(ratios):.1f} to {max(ratios):.1f}" if ratios else "none"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("seeds", [4, 5], [4], "seeds")
    parser.add_argument("--unseen", action="store_true", help="ten other problems")
    parser.add_argument("--fresh", action="store_true", help="ten further ones")
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, metavar="NAME", help=", ".join(PROBLEMS))
    options = parser.parse(arguments)
    names = options.only or (["iris-raw", "lstm", "batch-8"] if options.quick else list(SIXTY))
    log = Log(options.out / "auto-many.csv", Row)
    if options.unseen:
        names = options.only or list(UNSEEN)
        log = Log(options.out / "auto-unseen.csv", Row)
    elif options.fresh:
        names = options.only or list(FRESH)
        log = Log(options.out / "auto-fresh.csv", Row)
    for seed in options.seeds:
        for name in names:
            problem = replace(PROBLEMS[name], steps=20) if options.quick else PROBLEMS[name]
            for lr in ("auto", *ADAM_RATES):
                if (name, lr, seed) not in log.grouped("problem", "lr", "seed"):
                    row, error = train(name, problem, lr, seed)
                    log.add([row])
                    end = f"loss {row.start:.4g} → {row.end:.4g}{', diverged' * row.diverged}"
                    print(f"{name:<22}lr {lr:<5} seed {seed}: {end} ({row.seconds:.1f} s) {error}", flush=True)
    print(table(log.rows, names, options.seeds))


if __name__ == "__main__":
    main()
