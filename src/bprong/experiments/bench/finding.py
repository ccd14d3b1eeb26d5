"""How the targets of `targets.py` are found: what AdamW, NAdam and SGD with momentum reach in 3/4 of the step budget.

Each has twelve quasi-random trials on the tuning split with seed 0. For the training loss, and again for the validation
loss, the best of the 36 trials is rerun on seeds 1, 2 and 3 of both splits; the target is the median. A loss of a run
is the lowest one that it measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, Literal

from bprong.experiments.bench import optimizers
from bprong.experiments.bench.data import SPLITS, Split
from bprong.experiments.bench.methods import BETAS, COUPLED, DECAY, Make
from bprong.experiments.bench.search import Choice, LogUniform, Space, trials, written
from bprong.experiments.bench.targets import NONE, Target
from bprong.experiments.bench.training import Outcome, Run, Start
from bprong.experiments.bench.workloads import Workload

Measure = Literal["train_loss", "val_loss"]
SHARE = 0.75  # of the step budget, as AlgoPerf has it
TRIALS = 12
SEEDS = (1, 2, 3)
SCHEDULE = Choice(["averaged", 1.0])
STANDARD: dict[str, tuple[Make, Space]] = {
    "adamw": (
        optimizers.adamw,
        {"lr": LogUniform(3e-4, 3e-2), "schedule": SCHEDULE, "weight_decay": DECAY, "betas": BETAS},
    ),
    "nadam": (
        optimizers.nadam,
        {"lr": LogUniform(3e-4, 3e-2), "schedule": SCHEDULE, "weight_decay": DECAY, "betas": BETAS},
    ),
    "sgd": (
        optimizers.sgd,
        {"lr": LogUniform(1e-3, 1.0), "schedule": SCHEDULE, "weight_decay": COUPLED, "momentum": Choice([0.9, 0.95])},
    ),
}
Trial = tuple[str, Mapping[str, Any]]


def find_targets(
    workload: Workload, log: Callable[[str], None], count: int = TRIALS, seeds: tuple[int, ...] = SEEDS
) -> dict[Split, Target]:
    """The targets of both splits."""
    shorter = replace(workload, steps=round(SHARE * workload.steps))
    every = [(name, settings) for name, (_, space) in STANDARD.items() for settings in trials(space, count)]
    results = []
    for trial in every:
        results.append(run(shorter, trial, "tuning", 0))
        lowest = ", ".join(f"{best(results[-1], measure):.5g}" for measure in ("train_loss", "val_loss"))
        log(f"  {trial[0]} {written(trial[1])}: {lowest}")
    found: dict[Measure, dict[Split, float]] = {}
    measures: tuple[Measure, Measure] = ("train_loss", "val_loss")
    for measure in measures:
        chosen = min(range(len(every)), key=lambda i: best(results[i], measure))
        log(f"  {measure}: {every[chosen][0]} {written(every[chosen][1])}")
        found[measure] = {
            split: median(best(run(shorter, every[chosen], split, seed), measure) for seed in seeds) for split in SPLITS
        }
    return {split: Target(found["train_loss"][split], found["val_loss"][split]) for split in SPLITS}


def run(workload: Workload, trial: Trial, split: Split, seed: int) -> Outcome:
    name, settings = trial
    return Run(Start(workload, STANDARD[name][0], settings, split, seed, NONE)).complete()


def best(outcome: Outcome, measure: Measure) -> float:
    """The lowest loss that a run measured; infinite if it measured none."""
    return min((float(getattr(point, measure)) for point in outcome.points), default=float("inf"))
