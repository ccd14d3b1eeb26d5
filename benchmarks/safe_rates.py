"""At which fixed learning rates do natural steps go up, with and without a bound on their length?

A physics-informed network (Poisson's equation on a square, of which the solution is known), a transformer that sorts,
and a vision transformer; 100 steps on seed 0. "worst" is the highest loss of a batch, relative to the first one.

    python benchmarks/safe_rates.py                  10 minutes on one core; runs what docs/safe-rates.csv lacks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness.command_line import CommandLine
from problems import Problem
from problems.modern import MODERN
from problems.standard import TRANSFORMER
from torch import Tensor, nn

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.rows import Log
from bprong.experiments.bench.tables import markdown

RATES = [0.001, 0.01, 0.1, 1.0]
BOUNDS: dict[str, float | None] = {"none": None, "0.1, the default": 0.1}
STEPS = 100


@dataclass(frozen=True)
class Row:
    """A run; both losses relative to the first batch's, infinite if training stopped with an error or a NaN."""

    problem: str
    lr: float
    momentum: float
    bound: str
    end: float
    worst: float


def poisson(seed: int) -> tuple[nn.Module, nn.Module, Callable[[], Tensor]]:
    """A network u(x, y) with Δu = f inside of a square and u = 0 on its border; what it is trained on, drawn anew."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    generator = torch.Generator().manual_seed(seed)
    criterion = nn.MSELoss()

    def loss() -> Tensor:
        x = torch.rand(128, 2, generator=generator, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        f = -2 * math.pi**2 * torch.sin(math.pi * x).prod(dim=1).detach()
        border = torch.rand(64, 2, generator=generator)
        sides = torch.randint(2, (2, 64), generator=generator)
        border[torch.arange(64), sides[0]] = sides[1].float()
        return criterion(sum(second), f) / 100 + criterion(model(border), torch.zeros(64, 1))

    return model, criterion, loss


def classifier(problem: Problem, seed: int) -> tuple[nn.Module, nn.Module, Callable[[], Tensor]]:
    model = problem.model(seed)
    data = problem.data()
    source = batches(data.x, data.y, problem.batch, seed)
    criterion = nn.CrossEntropyLoss()

    def loss() -> Tensor:
        x, y = next(source)
        return criterion(model(x).flatten(0, -2), y.flatten())

    return model, criterion, loss


PROBLEMS: dict[str, Callable[[], tuple[nn.Module, nn.Module, Callable[[], Tensor]]]] = {
    "physics-informed": lambda: poisson(0),
    "transformer": lambda: classifier(TRANSFORMER, 0),
    "vision transformer": lambda: classifier(MODERN["vit"], 0),
}


def run(name: str, lr: float, momentum: float, bound: str, steps: int) -> Row:
    model, criterion, loss_of = PROBLEMS[name]()
    torch.manual_seed(0)
    optimizer = bprong.BPRONG(model, criterion, lr=lr, momentum=momentum, max_step=BOUNDS[bound])
    losses = []
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    except (FloatingPointError, bprong.WhiteningError):  # raised where values are not finite
        losses.append(math.inf)
    relative = [loss / losses[0] if math.isfinite(loss) else math.inf for loss in losses]
    return Row(name, lr, momentum, bound, sum(relative[-10:]) / len(relative[-10:]), max(relative))


def table(rows: Sequence[Row]) -> str:
    found = {(row.problem, row.lr, row.momentum, row.bound): row for row in rows}
    lines = []
    for problem in PROBLEMS:
        for momentum in (0.0, 0.9):
            for bound in BOUNDS:
                cells = [found.get((problem, lr, momentum, bound)) for lr in RATES]
                shown = ["–" if row is None else f"{row.end:.2g} ({row.worst:.2g})" for row in cells]
                lines.append([problem, momentum, bound, *shown])
    return markdown(["problem", "momentum", "bound", *(f"lr = {lr:g}" for lr in RATES)], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("steps", STEPS, 3, "steps of each run")
    options = parser.parse(arguments)
    log = Log(options.out / "safe-rates.csv", Row)
    known = {(row.problem, row.lr, row.momentum, row.bound) for row in log.rows}
    for problem in PROBLEMS:
        for momentum in (0.0, 0.9):
            for bound in BOUNDS:
                for lr in RATES[:1] if options.quick else RATES:
                    if (problem, lr, momentum, bound) not in known:
                        log.add([run(problem, lr, momentum, bound, options.steps)])
                        print(log.rows[-1], flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
