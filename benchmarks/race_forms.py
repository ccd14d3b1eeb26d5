"""How soon does the default reach the targets of the benchmark, beside natural and spectral steps alone?

Steps to the training and to the validation target of each workload, with the weights averaged as in the benchmark.
Forms of the race differ in the steps at which races begin and in how long they last. A miss is infinite.

    python benchmarks/race_forms.py                                        runs what docs/races.csv lacks
    python benchmarks/race_forms.py --split test --seeds 201,202,203,204,205 --forms natural,spectral,default
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from harness.command_line import CommandLine

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.bench.training import Point, Run, Start
from bprong.experiments.bench.workloads import WORKLOADS
from bprong.optim.auto import race

ALONE = ("natural", "spectral")
FORMS: Mapping[str, Mapping[str, Any]] = {  # what differs from the default
    "default": {},
    "one race": {"starts": (0,)},
    "no early end": {"looks": {1000: 0.0}},
    "two standard errors": {"certainty": 2.0},
    "races of 20 steps": {"length": 20},
}


@dataclass(frozen=True)
class Row:
    split: str
    workload: str
    form: str
    seed: int
    train_steps: float
    val_steps: float
    chosen: str


@contextmanager
def settings(form: str) -> Iterator[None]:
    """Races are held in another form while the context is active."""
    before = race.SETTINGS
    race.SETTINGS = replace(before, **FORMS.get(form, {}))
    try:
        yield
    finally:
        race.SETTINGS = before


def run(split: Any, name: str, form: str, seed: int, quick: bool) -> Row:
    workload = WORKLOADS[name]
    if quick:
        workload = replace(workload, steps=4)
    method = METHODS["bprong-auto"]
    chosen = {**method.fixed, "step": form if form in ALONE else "auto"}
    target = TARGETS[name][split]
    with settings(form):
        training = Run(Start(workload, method.make, chosen, split, seed, target))
        points = training.complete().points
    optimizer = training.trainer.optimizer  # type: ignore[attr-defined]
    return Row(
        split, name, form, seed,
        first(points, "train_loss", target.train_loss), first(points, "val_loss", target.val_loss),
        "spectral" if "spectral" in optimizer._rule.kind else "natural",
    )  # fmt: skip


def first(points: Sequence[Point], measure: str, target: float) -> float:
    """The first measured step at which a loss is within its target."""
    return next((float(point.step) for point in points if getattr(point, measure) <= target), math.inf)


def table(rows: Sequence[Row]) -> str:
    """Medians over seeds of the steps to both targets."""
    forms = list(dict.fromkeys(row.form for row in rows))
    lines = []
    for (split, workload), group in grouped(rows, "split", "workload").items():
        cells = []
        for form in forms:
            of_form = [row for row in group if row.form == form]
            medians = [median(getattr(row, name) for row in of_form) for name in ("train_steps", "val_steps")]
            cells.append(" / ".join("–" if math.isinf(steps) else f"{steps:.0f}" for steps in medians))
        lines.append([f"{workload}, {split}", *cells])
    return markdown(["workload, split", *forms], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("workloads", ",".join(WORKLOADS), "deep", "workloads")
    parser.setting("forms", ",".join((*ALONE, *FORMS)), "spectral,default", "forms of the race, or one kind of steps")
    parser.setting("seeds", [100, 101, 102], [100], "seeds")
    parser.setting("split", "tuning", "tuning", "of the data")
    options = parser.parse(arguments)
    log = Log(options.out / "races.csv", Row)
    known = {(row.split, row.workload, row.form, row.seed) for row in log.rows}
    for name in options.workloads.split(","):
        for form in options.forms.split(","):
            for seed in options.seeds:
                if (options.split, name, form, seed) not in known:
                    log.add([run(options.split, name, form, seed, options.quick)])
                    print(log.rows[-1], flush=True)
    print(table([row for row in log.rows if row.split == options.split]))


if __name__ == "__main__":
    main()
