"""Races of tuned methods: equal trials on one seed, the best trial on fresh seeds, the shortest run to a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from harness.methods import METHODS
from harness.recipes import Training
from problems import Problem

from bprong.experiments.bench.rows import Log, read
from bprong.experiments.bench.search import Settings, trials, written

SELECTION_SEED = 0
FACTORS = [10 ** (k / 4) for k in range(-4, 5)]  # of the best learning rate: two decades around it
HORIZONS = [40, 45, 50, 56, 63, 71, 80, 90, 100, 112, 125, 140, 160, 180, 200, 225, 250, 280, 320, 360, 400, 450, 500,
            560, 640, 720, 800]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The end of one run. `settings` as `harness.search.written` gives them."""

    study: str
    method: str
    settings: str
    steps: int
    seed: int
    train_loss: float
    val_loss: float
    accuracy: float


@dataclass(frozen=True)
class Study:
    """A problem, what is compared, and over how many steps.

    measure:   the column that decides
    steps:     the reference's horizon, which is everybody's if there is no race to a target
    methods:   in the order in which they are run
    reference: the method whose median over fresh seeds is the target; empty if nobody races to one
    tuned_at:  the horizon at which a method has its trials; by default half of `steps`
    """

    title: str
    measure: str
    steps: int
    methods: Sequence[str]
    problem: Problem
    reference: str = ""
    tuned_at: dict[str, int] = field(default_factory=dict)

    def horizon(self, method: str) -> int:
        """The horizon of a method's trials."""
        alone = not self.reference or method == self.reference
        return self.steps if alone else self.tuned_at.get(method, self.steps // 2)

    @property
    def horizons(self) -> list[int]:
        return sorted({h for h in HORIZONS if h < self.steps} | {self.steps, self.steps // 2, *self.tuned_at.values()})


class Records:
    """What the rows say about one study, with `count` trials of every method and these fresh seeds."""

    def __init__(self, name: str, study: Study, rows: Sequence[Row], count: int, seeds: Sequence[int]) -> None:
        self.name = name
        self.study = study
        self.rows = [row for row in rows if row.study == name]
        self.count = count
        self.seeds = seeds

    def find(self, method: str, settings: Settings, steps: int, seed: int) -> Row | None:
        key = (method, written(settings), steps, seed)
        return next((row for row in self.rows if (row.method, row.settings, row.steps, row.seed) == key), None)

    def value(self, row: Row) -> float:
        found: float = getattr(row, self.study.measure)
        return found if math.isfinite(found) else math.inf

    def tried(self, method: str) -> list[tuple[Settings, Row]]:
        """The trials that have been run."""
        steps = self.study.horizon(method)
        known = [(each, self.find(method, each, steps, SELECTION_SEED)) for each in self.trials(method)]
        return [(settings, row) for settings, row in known if row is not None]

    def trials(self, method: str) -> list[dict[str, object]]:
        return trials(METHODS[method].space, self.count)

    def best(self, method: str) -> Settings | None:
        """The settings of the best trial; None unless all trials have been run."""
        found = self.tried(method)
        if len(found) < len(self.trials(method)):
            return None
        return min(found, key=lambda pair: self.value(pair[1]))[0]

    def fresh(self, method: str, steps: int) -> list[Row]:
        """The runs of the best trial's settings on fresh seeds; an empty list unless there are all of them."""
        settings = self.best(method)
        if settings is None:
            return []
        found = [self.find(method, settings, steps, seed) for seed in self.seeds]
        return [row for row in found if row is not None] if all(found) else []

    def typical(self, method: str, steps: int) -> float:
        """The median over the fresh seeds; NaN if they have not been run."""
        rows = self.fresh(method, steps)
        return median(self.value(row) for row in rows) if rows else math.nan

    def rates(self, method: str) -> list[tuple[float, Settings]]:
        """The best trial's settings with other learning rates, within two decades around the best one."""
        best = self.best(method)
        if best is None or "lr" not in best:
            return []
        others = [{**best, "lr": float(f"{best['lr'] * factor:.3g}")} for factor in FACTORS]
        return [(factor, best if factor == 1 else other) for factor, other in zip(FACTORS, others, strict=True)]

    @property
    def target(self) -> float:
        return self.typical(self.study.reference, self.study.steps) if self.study.reference else math.nan

    def shortest(self, method: str) -> int | None:
        """The shortest horizon whose median reaches the target; None if there is none among what has been run."""
        if method == self.study.reference:
            return self.study.steps
        reached = [steps for steps in self.study.horizons if self.typical(method, steps) <= self.target]
        return min(reached, default=None)

    def between(self, method: str) -> float:
        """Where the medians cross the target, straight in the logarithm of the steps between two neighbours; or NaN."""
        found = self.shortest(method)
        shorter = [h for h in self.study.horizons if h < (found or 0) and self.typical(method, h) > self.target]
        if found is None or not shorter:
            return math.nan
        above = self.typical(method, max(shorter))
        share = (above - self.target) / (above - self.typical(method, found))
        return float(max(shorter) * (found / max(shorter)) ** share) if math.isfinite(above) else float(found)


class Races(Records):
    """Runs what is missing in a CSV file, which is read again before a row is added, as other processes may add too."""

    def __init__(self, name: str, study: Study, path: Path, count: int, seeds: Sequence[int]) -> None:
        super().__init__(name, study, read(path, Row), count, seeds)
        self.path = path

    def run(self, method: str, settings: Settings, steps: int, seed: int) -> float:
        """What one run gives, from the file if it has it."""
        row = self.find(method, settings, steps, seed)
        if row is None:
            end = Training(self.study.problem, METHODS[method], settings, steps, seed).run()
            row = Row(self.name, method, written(settings), steps, seed, end.train_loss, end.val_loss, end.accuracy)
            self.rows.append(row)
            Log(self.path, Row).add([row])
            print(f"{self.name} {method} {row.settings} steps={steps} seed={seed}: {self.value(row):.4f}", flush=True)
        return self.value(row)

    def rerun(self, method: str, settings: Settings, steps: int) -> float:
        """The median over the fresh seeds."""
        return median(self.run(method, settings, steps, seed) for seed in self.seeds)

    def compete(self, method: str) -> None:
        """The trials of a method, then its fresh seeds: at its horizon, or at the shortest that reaches the target."""
        for settings in self.trials(method):
            self.run(method, settings, self.study.horizon(method), SELECTION_SEED)
        best = self.best(method)
        assert best is not None
        if not self.study.reference or method == self.study.reference:
            self.rerun(method, best, self.study.steps)
        elif math.isnan(self.target):
            print(f"{self.name} {method}: no target yet, {self.study.reference} has to run first", flush=True)
        else:
            self.shorten(method, best)

    def sweep(self, method: str) -> None:
        """Runs the rates around the best one, at the horizon of the trials and on their seed."""
        for _, settings in self.rates(method):
            self.run(method, settings, self.study.horizon(method), SELECTION_SEED)

    def shorten(self, method: str, settings: Settings) -> None:
        """Seeks the shortest horizon on the selection seed, then on fresh seeds from there on, up or down."""
        horizons = self.study.horizons
        place = self._on_selection_seed(method, settings)
        while self.rerun(method, settings, horizons[place]) > self.target:
            if place == len(horizons) - 1:
                return
            place += 1
        while place > 0 and self.rerun(method, settings, horizons[place - 1]) <= self.target:
            place -= 1

    def _on_selection_seed(self, method: str, settings: Settings) -> int:
        """The place in `horizons` of the shortest one that reaches the target on the selection seed, by bisection."""
        horizons = self.study.horizons
        low = 0
        high = len(horizons) - 1
        middle = horizons.index(self.study.horizon(method))
        while low < high:
            if self.run(method, settings, horizons[middle], SELECTION_SEED) <= self.target:
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return low
