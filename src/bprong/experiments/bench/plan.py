"""What a benchmark runs: trials on the tuning split, then the best of them on fresh seeds of the test split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bprong.experiments.bench.methods import METHODS, Method
from bprong.experiments.bench.search import trials
from bprong.experiments.bench.workloads import WORKLOADS, Workload
from bprong.experiments.progress import duration

Stage = Literal["tuning", "test"]
TRIALS = 5
SEEDS = 5
AUTOMATIC_RUNS = 3  # of an automatic method on the tuning split, where it has nothing to choose
TUNING_SEED = 0
FRESH_SEED = 101  # the first of the fresh seeds, none of which was used while workloads and search spaces were chosen
LIMIT = 5.0  # times the seconds of an AdamW run over the whole step budget: no run trains longer
SHARE = 0.7  # of the step budget that a run takes on average, as it ends when both targets are reached
STEPS_DOWN = ((5, 5), (4, 5), (4, 4), (3, 4), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1))  # trials and seeds of a budget


@dataclass(frozen=True)
class Job:
    """One run of a method on a workload."""

    workload: str
    method: str
    stage: Stage
    trial: int
    seed: int
    settings: Mapping[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.workload}.{self.method}.{self.stage}.{self.trial}.{self.seed}"

    def __str__(self) -> str:
        what = f"trial {self.trial + 1}" if self.stage == "tuning" else f"seed {self.seed}"
        return f"{self.workload}, {METHODS[self.method].title}, {what}"


@dataclass(frozen=True)
class Plan:
    """The workloads and methods to run, and the number of trials and fresh seeds."""

    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    trials: int = TRIALS
    seeds: int = SEEDS

    def present(self, workload: str) -> list[str]:
        """The methods that can train a workload here."""
        return [name for name in self.methods if not METHODS[name].missing(WORKLOADS[workload])]

    def tuning(self, workload: str) -> list[Job]:
        """The trials of all methods, which take turns. An automatic method has runs on several seeds instead."""
        jobs = []
        for i in range(self.trials):
            for name in self.present(workload):
                method = METHODS[name]
                if not method.automatic:
                    chosen = {**trials(method.space, self.trials)[i], **method.fixed}
                    jobs.append(Job(workload, name, "tuning", i, TUNING_SEED, chosen))
                elif i < AUTOMATIC_RUNS:
                    jobs.append(Job(workload, name, "tuning", i, TUNING_SEED + i, dict(method.fixed)))
        return jobs

    def test(self, workload: str, best: Mapping[str, Job]) -> list[Job]:
        """The runs of the best trials on fresh seeds; methods take turns, each seed with another one first."""
        jobs = []
        names = [name for name in self.methods if name in best]
        for seed in range(FRESH_SEED, FRESH_SEED + self.seeds):
            first = seed % max(1, len(names))
            for name in names[first:] + names[:first]:
                chosen = best[name]
                jobs.append(Job(workload, name, "test", chosen.trial, seed, chosen.settings))
        return jobs

    @property
    def runs(self) -> int:
        """The number of runs, if every method is rerun on fresh seeds."""
        count = 0
        for workload in self.workloads:
            for name in self.present(workload):
                tuning = min(self.trials, AUTOMATIC_RUNS) if METHODS[name].automatic else self.trials
                count += tuning + self.seeds
        return count


def limit(workload: Workload) -> float:
    """Seconds of training after which a run ends."""
    return LIMIT * workload.seconds


def estimated_seconds(plan: Plan, jobs: int) -> float:
    """About how long a plan takes with so many processes."""
    total = 0.0
    for name in plan.workloads:
        workload = WORKLOADS[name]
        for method in (METHODS[each] for each in plan.present(name)):
            count = (min(plan.trials, AUTOMATIC_RUNS) if method.automatic else plan.trials) + plan.seeds
            total += count * run_seconds(workload, method)
    return total / jobs


def run_seconds(workload: Workload, method: Method) -> float:
    """About how long a run takes."""
    return min(limit(workload), SHARE * method.price * workload.seconds)


def within(plan: Plan, budget: float, jobs: int) -> Plan:
    """The plan with the most trials and seeds that fits a budget of seconds; at least one trial and one seed."""
    for count, seeds in STEPS_DOWN:
        smaller = Plan(plan.workloads, plan.methods, min(count, plan.trials), min(seeds, plan.seeds))
        if estimated_seconds(smaller, jobs) <= budget:
            break
    return smaller


def cut(full: Plan, plan: Plan, jobs: int, budget: float) -> str:
    """What a budget left out, in words; empty if nothing."""
    parts = []
    if plan.trials < full.trials:
        parts.append(f"{plan.trials} of {full.trials} trials")
    if plan.seeds < full.seeds:
        parts.append(f"{plan.seeds} of {full.seeds} fresh seeds")
    needed = estimated_seconds(plan, jobs)
    late = f"; even this takes about {duration(needed)}" if needed > budget else ""
    whole = duration(estimated_seconds(full, jobs))
    return f"cut to {' and '.join(parts)}: all would take about {whole}{late}" if parts else ""


def parse_duration(text: str) -> float:
    """Seconds of a duration such as "90s", "10m", "1.5h" or "1h30m".

    >>> parse_duration("1h30m"), parse_duration("90s"), parse_duration("10m")
    (5400.0, 90.0, 600.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration; write 90s, 10m, 2h or 1h30m")
    return sum(float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def names_in(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """The names in a list separated by commas, in the order of `known`; ValueError for one that is unknown."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; choose from {', '.join(known)}")
    return tuple(name for name in known if name in given)
