"""How far back should an average of the weights reach? Validation losses of averages, relative to the last weights.

Tables of scikit-learn with perceptrons, and networks of `bprong bench` on its tuning split; with the default steps
and with step="spectral". Losses are measured after a quarter, a half and all of the steps. In each run all averages are
taken at once: polynomial-decay averages (`bprong.optim.averaging`) and an exponential one.

    python benchmarks/weight_averages.py            six minutes on one core; prints the table of docs/averaging.md
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean, geometric_mean

import torch
from harness.command_line import CommandLine
from sklearn import datasets
from torch import Tensor, nn

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.optimizers import declared
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.workloads import WORKLOADS
from bprong.optim.averaging import AveragedWeights

ETAS = (0.0, 1.0, 2.0, 4.0, 8.0, 19.0)
DECAY = 0.99
TABLES = {
    "digits": datasets.load_digits,
    "wine": datasets.load_wine,
    "breast_cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
}
NORMALISED = "conv, Batch Normalisation"
PROBLEMS = (*TABLES, "gpt", "vit", "conv", NORMALISED)
Loss = Callable[[Tensor, Tensor], Tensor]


class Exponential(AveragedWeights):
    """w̄ₙ = 0.99 w̄ₙ₋₁ + 0.01 wₙ, whose span does not grow with the run."""

    def _weight(self) -> float:
        return 1 - DECAY if self._count else 1.0


@dataclass
class Problem:
    model: nn.Module
    loss: Loss
    source: Iterator[tuple[Tensor, Tensor]]
    validation: tuple[Tensor, Tensor]
    steps: int

    @torch.no_grad()
    def validation_loss(self) -> float:
        self.model.eval()
        x, y = self.validation
        loss = float(self.loss(self.model(x), y))
        self.model.train()
        return loss


def problem_of(name: str, seed: int) -> Problem:
    if name in TABLES:
        return table(name, seed)
    workload = WORKLOADS[name.partition(",")[0]]
    data = workload.data("tuning")
    make = workload.normalised if name == NORMALISED else workload.model
    assert make is not None
    rows = slice(workload.measured)
    source = batches(data.x, data.y, workload.batch, seed)
    return Problem(make(seed), workload.criterion(), source, (data.x_val[rows], data.y_val[rows]), workload.steps)


def table(name: str, seed: int) -> Problem:
    """Two thirds of the rows in batches of 32, unscaled; targets of the regression are standardised."""
    x, y = (torch.tensor(values) for values in TABLES[name](return_X_y=True))
    x = x.float()
    outputs = int(y.max()) + 1
    criterion: nn.Module = nn.CrossEntropyLoss()
    if name == "diabetes":
        y = ((y - y.mean()) / y.std()).float()[:, None]
        outputs = 1
        criterion = nn.MSELoss()
    torch.manual_seed(seed)
    train, val = torch.randperm(len(x)).split([2 * len(x) // 3, len(x) - 2 * len(x) // 3])
    widths = [nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)]
    return Problem(nn.Sequential(*widths), criterion, batches(x[train], y[train], 32, seed), (x[val], y[val]), 600)


def losses(name: str, step: str, seed: int, steps: int | None = None) -> list[dict[str, float]]:
    """Validation losses of the last weights and of each average, after a quarter, a half and all of the steps."""
    problem = problem_of(name, seed)
    steps = steps or problem.steps
    model = problem.model
    torch.manual_seed(seed)
    optimizer = bprong.BPRONG(model, declared(problem.loss), step=step)
    averages: dict[str, AveragedWeights] = {f"η = {eta:g}": AveragedWeights(model) for eta in ETAS}
    for average, eta in zip(averages.values(), ETAS, strict=True):
        average.eta = eta
    averages[f"exponential, {DECAY}"] = Exponential(model)
    points = []
    for t in range(1, steps + 1):
        x, y = next(problem.source)
        optimizer.zero_grad()
        problem.loss(model(x), y).backward()
        for average in averages.values():
            average.add(model.parameters())
        rule = optimizer._rule
        optimizer.step()
        if optimizer._rule is not rule:  # it has won a race
            for average in averages.values():
                average.restart()
        if t in (steps // 4, steps // 2, steps):
            contexts: dict[str, AbstractContextManager[None]] = {"last": nullcontext()}
            contexts |= {key: average.in_the_model(optimizer) for key, average in averages.items()}
            point = {}
            for key, context in contexts.items():
                with context:
                    point[key] = problem.validation_loss()
            points.append(point)
    return points


def ratios(name: str, seeds: Sequence[int], steps: int | None = None) -> dict[str, float]:
    """The mean loss of each average over seeds, relative to the last weights: geometric mean over steps and rules."""
    by_column = defaultdict(list)
    for step in ("auto", "spectral"):
        runs = [losses(name, step, seed, steps) for seed in seeds]
        for points in zip(*runs, strict=True):
            last = fmean(point["last"] for point in points)
            for column in points[0]:
                by_column[column].append(fmean(point[column] for point in points) / last)
    return {column: geometric_mean(values) for column, values in by_column.items() if column != "last"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__)
    parser.setting("seeds", [0, 1, 2, 3, 4], [0], "seeds")
    options = parser.parse(arguments)
    torch.set_num_threads(1)
    names = PROBLEMS[:1] if options.quick else PROBLEMS
    results = {name: ratios(name, options.seeds, 8 if options.quick else None) for name in names}
    columns = list(next(iter(results.values())))
    everything = {column: geometric_mean(row[column] for row in results.values()) for column in columns}
    lines = [[name, *(f"{row[c]:.2f}" for c in columns)] for name, row in {**results, "all": everything}.items()]
    assert all(math.isfinite(value) for value in everything.values())
    print(markdown(["data", *columns], lines))


if __name__ == "__main__":
    main()
