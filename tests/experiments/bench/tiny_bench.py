"""A benchmark that takes a second: linear regression, three methods, and an executor that runs in this process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from bprong.experiments.bench import methods, optimizers, plan, running, summary, targets, worker, workloads
from bprong.experiments.bench.data import Data
from bprong.experiments.bench.methods import Method, space
from bprong.experiments.bench.plan import Plan
from bprong.experiments.bench.targets import Target
from bprong.experiments.bench.workloads import Workload
from bprong.experiments.workers import Here


class Inline(Here):
    """Runs a job at once; `killed_at`: the number of jobs after which it raises KeyboardInterrupt."""

    def __init__(self, killed_at: int = 10**6) -> None:
        super().__init__(worker.execute)
        self.left = killed_at

    def submit(self, job):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().submit(job)


def data(split):
    random = torch.Generator().manual_seed(int(split == "test"))
    x = torch.randn(200, 4, generator=random)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
    return Data(x[:150], y[:150], x[150:], y[150:])


def model(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 1)


LINE = Workload("a line", data, model, 50, 30, nn.MSELoss, seconds=0.2)
HARD = replace(LINE, title="a line that nobody learns")
TINY = {"line": LINE, "hard": HARD}
TARGETS = {
    "line": dict.fromkeys(("tuning", "test"), Target(0.8, 0.8)),
    "hard": dict.fromkeys(("tuning", "test"), Target(0.0, -1.0)),
}


def broken(model, loss, settings, steps):
    raise RuntimeError("this peer does not like lines")


METHODS = {
    "sgd": methods.METHODS["sgd"],
    "adamw": Method("AdamW", optimizers.adamw, space(0.05, 0.5)),
    "automatic": Method("BPRONG, or nearly so", optimizers.sgd, fixed={"lr": 0.1, "warmup": 0.0}),
    "absent": replace(methods.METHODS["adamw"], title="Absent", needs="no_such_package"),
    "broken": Method("Broken", broken, space(0.1, 0.2)),
    "bn-sgd": methods.METHODS["bn-sgd"],
}
PLAN = Plan(("line", "hard"), tuple(METHODS), trials=2, seeds=2)


@contextmanager
def installed():
    """Replace the workloads, targets and methods of the package by the tiny ones."""
    assert plan.WORKLOADS is worker.WORKLOADS is running.WORKLOADS is workloads.WORKLOADS
    assert summary.METHODS is methods.METHODS
    pairs = [(workloads.WORKLOADS, TINY), (targets.TARGETS, TARGETS), (methods.METHODS, METHODS)]
    kept = [dict(dictionary) for dictionary, _ in pairs]
    try:
        for dictionary, tiny in pairs:
            dictionary.clear()
            dictionary.update(tiny)
        yield
    finally:
        for (dictionary, _), before in zip(pairs, kept, strict=True):
            dictionary.clear()
            dictionary.update(before)
