"""What the rows of a benchmark say: times to targets, the best trial, performance profiles, and a one-sided test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from bprong.experiments.bench.records import Row

Goal = Literal["train", "val"]
Unit = Literal["steps", "seconds"]
Race = tuple[str, Goal]  # a workload and which of its targets is raced to
GOALS: tuple[Goal, Goal] = ("train", "val")
GREATEST_RATIO = 4.0  # performance profiles are integrated from 1 to this ratio, as AlgoPerf does
MISSED = 4.0  # a missed target counts as this many step budgets in the choice of the best trial
SIGNIFICANT = 0.05


def time_to(row: Row, goal: Goal, unit: Unit) -> float:
    """Steps or seconds to a target; infinite if it was missed."""
    return float(getattr(row, f"{goal}_{unit}"))


def badness(row: Row, budget: int) -> tuple[float, float]:
    """How bad a trial is: the mean logarithm of its steps to both targets, then that of its lowest losses.

    Steps decide, not seconds, so that the choice does not depend on what else the machine does.
    """
    steps = [min(time_to(row, goal, "steps"), MISSED * budget) for goal in GOALS]
    losses = [max(row.train_loss, 1e-30), max(row.val_loss, 1e-30)]
    return sum(map(math.log, steps)), sum(map(math.log, losses))


def reached_any(row: Row) -> bool:
    return any(math.isfinite(time_to(row, goal, "steps")) for goal in GOALS)


class Times:
    """Times to targets on fresh seeds, by race and method. A method that was not rerun has missed on every seed."""

    def __init__(self, rows: Iterable[Row], unit: Unit) -> None:
        self.unit = unit
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self.methods: list[str] = []
        self.workloads: list[str] = []
        for row in rows:
            self._note(row)

    def _note(self, row: Row) -> None:
        if row.method not in self.methods:
            self.methods.append(row.method)
        if row.workload not in self.workloads:
            self.workloads.append(row.workload)
        if row.stage == "test":
            self._rows.setdefault((row.workload, row.method), []).append(row)

    def races(self, goals: Sequence[Goal] = GOALS) -> list[Race]:
        return [(workload, goal) for workload in self.workloads for goal in goals]

    def of(self, race: Race, method: str) -> list[float]:
        """The times of all seeds; empty if there are none."""
        workload, goal = race
        return [time_to(row, goal, self.unit) for row in self._rows.get((workload, method), [])]

    def typical(self, race: Race, method: str) -> float:
        """The median over seeds; infinite if the method missed the target on half of them, or was not run."""
        own = self.of(race, method)
        return median(own) if own else math.inf

    def ranking(self, race: Race, methods: Sequence[str] | None = None) -> list[str]:
        """The methods that reach the target, the fastest first."""
        known = self.methods if methods is None else methods
        times = {method: self.typical(race, method) for method in known}
        return sorted((method for method in known if math.isfinite(times[method])), key=lambda m: times[m])


def ratios(times: Times, races: Sequence[Race], methods: Sequence[str]) -> dict[str, list[float]]:
    """By method: its time divided by the shortest, in each race; infinite where it missed or nobody arrived."""
    found: dict[str, list[float]] = {method: [] for method in methods}
    for race in races:
        own = {method: times.typical(race, method) for method in methods}
        least = min(own.values(), default=math.inf)
        for method, time in own.items():
            found[method].append(time / least if math.isfinite(time) else math.inf)
    return found


def profile(own: Sequence[float], ratio: float) -> float:
    """The share of races that a method finished within `ratio` times the shortest time.

    >>> profile([1.0, 2.0, math.inf], 2.0)
    0.6666666666666666
    """
    return sum(each <= ratio for each in own) / len(own) if own else 0.0


def profile_score(own: Sequence[float], greatest: float = GREATEST_RATIO) -> float:
    """The mean of `profile` over ratios from 1 to `greatest`: 1 for a method that is the fastest in every race.

    The profile is a step function, so the integral is exact: a ratio r counts for (greatest − r) / (greatest − 1).

    >>> profile_score([1.0, 2.5, math.inf, 4.0])
    0.375
    """
    parts = [max(0.0, greatest - each) / (greatest - 1) for each in own]
    return sum(parts) / len(parts) if parts else 0.0


def scores(times: Times, races: Sequence[Race], methods: Sequence[str]) -> dict[str, float]:
    """By method, the score of its performance profile."""
    return {method: profile_score(own) for method, own in ratios(times, races, methods).items()}


def chance_of(first: Sequence[float], second: Sequence[float]) -> float:
    """The one-sided p-value of "first is faster than second": the exact rank-sum test (Mann–Whitney), ties averaged.

    Infinite times, of targets that were missed, are the slowest and equal to each other. No samples: 1.

    >>> chance_of([1, 2, 3], [4, 5, 6])
    0.05
    """
    both = [*first, *second]
    if not first or not second:
        return 1.0
    ranks = [sum(b < a for b in both) + (sum(b == a for b in both) + 1) / 2 for a in both]
    observed = sum(ranks[: len(first)])
    sums = [sum(chosen) for chosen in combinations(ranks, len(first))]
    return sum(each <= observed + 1e-9 for each in sums) / len(sums)


@dataclass(frozen=True)
class Lead:
    """The fastest of some methods in a race, the next one, how many times longer that takes, and the p-value.

    first, second: empty if there is none
    """

    race: Race
    first: str
    second: str
    factor: float
    chance: float

    @property
    def significant(self) -> bool:
        return self.chance < SIGNIFICANT


def lead(times: Times, race: Race, methods: Sequence[str], others: Sequence[str]) -> Lead:
    """How far the fastest of `methods` is before the fastest of `others`; a factor below 1 if it is behind."""
    first = next(iter(times.ranking(race, methods)), "")
    second = next(iter(times.ranking(race, others)), "")
    if not first:
        return Lead(race, "", second, 0.0, 1.0)
    if not second:
        return Lead(race, first, "", math.inf, 1.0)
    factor = times.typical(race, second) / times.typical(race, first)
    ahead = (first, second) if factor >= 1 else (second, first)
    chance = chance_of(times.of(race, ahead[0]), times.of(race, ahead[1]))
    return Lead(race, first, second, factor, chance)


def memory(rows: Iterable[Row]) -> Mapping[tuple[str, str], float]:
    """By workload and method, the median peak memory of fresh seeds, in megabytes."""
    return _medians(rows, lambda row: row.megabytes)


def step_price(rows: Iterable[Row]) -> Mapping[tuple[str, str], float]:
    """By workload and method, the median time of a step on fresh seeds, in milliseconds."""
    return _medians(rows, lambda row: 1000 * row.seconds / row.steps if row.steps else math.nan)


def _medians(rows: Iterable[Row], value: Callable[[Row], float]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.stage == "test" and math.isfinite(own := value(row)):
            found.setdefault((row.workload, row.method), []).append(own)
    return {key: median(values) for key, values in found.items()}
