"""What `auto.py` trains and how: the problems on which lr="auto" has to hold, the methods, a network in training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from auto_results import OURS, Row
from bars import autoencoder, bits
from layers import PROBLEMS as LAYERED
from layers import loss_of
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bprong
from bprong.experiments.data import Dataset, load, sequences_to_sort
from bprong.experiments.models import perceptron, with_batch_norm
from bprong.whitening import WhiteningError

DEEP = [64] * 30 + [10]  # thirty linear layers
NOISE = 0.1  # of the regression's targets: a mean squared error of 0.01 is all there is to reach


VARIANTS: dict[str, dict[str, float]] = {  # by what is added to our name
    "weight decay 1e-4": {"weight_decay": 1e-4},
    "weight decay 1e-3": {"weight_decay": 1e-3},
    "strong damping": {"forward_damping": 1.0, "backward_damping": 0.1},  # ε₁ε₂ = 0.1 where λ is 1e-3 at most
}


def ours(model: nn.Module, likelihood: str, **settings: Any) -> Optimizer:
    """The one setting; `settings` only where a benchmark is about them."""
    return bprong.BPRONG(model, likelihood=likelihood, lr="auto", **settings)


METHODS: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "adam": lambda model, lr: Adam(model.parameters(), lr=lr),
    "bn-adam": lambda model, lr: Adam(model.parameters(), lr=lr),  # of a network with Batch Normalisation
    "nesterov": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True),
    "sgd": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
}


# Problems -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor


@dataclass(frozen=True)
class Problem:
    """A network, its data and its loss; `evaluate`: training rows, at most, over which its loss is measured."""

    title: str
    model: Callable[[int], nn.Sequential]
    data: Callable[[], Split]
    batch: int
    steps: int
    likelihood: str = "categorical"
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    evaluate: int = 10_000


def split(data: Dataset) -> Split:
    return Split(data.x_train, data.y_train, data.x_test, data.y_test)


@cache
def mnist() -> Split:
    return split(load("mnist"))


@cache
def pixels() -> Split:
    """Images as their own targets."""
    return Split(mnist().x, mnist().x, mnist().x_val, mnist().x_val)


@cache
def digits() -> Split:
    return split(load("digits"))


def images() -> Split:
    data = digits()
    return Split(data.x.view(-1, 1, 8, 8), data.y, data.x_val.view(-1, 1, 8, 8), data.y_val)


@cache
def sequences() -> Split:
    return Split(*LAYERED["transformer"].data(), *sequences_to_sort(1024, seed=1))


@cache
def badly_scaled() -> Split:
    """20 columns with scales from 1e-4 to 1e4; targets linear in the standardised ones, with noise; 2,500 rows."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2500, 20, generator=generator)
    y = z @ torch.randn(20, 1, generator=generator) + NOISE * torch.randn(2500, 1, generator=generator)
    x = z * torch.logspace(-4, 4, 20)
    return Split(x[:2000], y[:2000], x[2000:], y[2000:])


def paper_network(seed: int) -> nn.Sequential:
    return perceptron([784, 100, 100, 100, 10], "relu", seed)


def deep(activation: str) -> Callable[[int], nn.Sequential]:
    """Thirty layers without normalisation or skip connections: tanh after Xavier's initialisation, ReLU after He's."""

    def model(seed: int) -> nn.Sequential:
        network = perceptron(DEEP, activation, seed)
        generator = torch.Generator().manual_seed(seed)
        for layer in network:
            if isinstance(layer, nn.Linear):
                if activation == "tanh":
                    nn.init.xavier_normal_(layer.weight, generator=generator)
                else:
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(layer.bias)
        return network

    return model


def paper(batch: int, steps: int) -> Problem:
    name = "full batch" if batch == 60_000 else f"batch {batch}"
    return Problem(f"paper's network, {name}", paper_network, mnist, batch, steps)


CODER = Problem("autoencoder, batch 250", autoencoder, pixels, 250, 60, "bernoulli", bits, 5000)
DEEP_MLPS = {
    "deep-tanh": Problem("30 layers, tanh", deep("tanh"), digits, 100, 300),
    "deep-relu": Problem("30 layers, ReLU", deep("relu"), digits, 100, 300),
}
REGRESSION: dict[str, Any] = {
    "data": badly_scaled, "batch": 100, "steps": 300, "likelihood": "gaussian", "loss": F.mse_loss,
}  # fmt: skip
PROBLEMS = {
    "paper-16": paper(16, 1000),
    "paper-100": paper(100, 1200),
    "paper-500": paper(500, 600),
    "paper-full": paper(60_000, 20),
    "autoencoder": CODER,
    **DEEP_MLPS,
    "conv": Problem("convolutional network", LAYERED["conv"].model, images, 64, 300),
    "transformer": Problem("transformer", LAYERED["transformer"].model, sequences, 64, 500, loss=loss_of),
    "regression-linear": Problem(
        "regression, scales 1e-4 to 1e4: linear", lambda seed: perceptron([20, 1], "relu", seed), **REGRESSION
    ),
    "regression-relu": Problem(
        "regression, scales 1e-4 to 1e4: ReLU", lambda seed: perceptron([20, 50, 1], "relu", seed), **REGRESSION
    ),
}


# Training -------------------------------------------------------------------------------------------------------------


def batches(x: Tensor, y: Tensor, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches of every epoch's own shuffle, without end; the same for all methods of a seed."""
    generator = torch.Generator().manual_seed(seed)
    while batch >= len(x):
        yield x, y
    while True:
        for chosen in torch.randperm(len(x), generator=generator).split(batch):
            if len(chosen) == batch:
                yield x[chosen], y[chosen]


class Run:
    """A network in training: its optimizer, its clock, which only training moves, and its rows.

    The clock is the wall's, except that a step counts no more than its processor time: the seconds in which another
    program held all cores are nobody's.
    """

    def __init__(
        self, name: str, problem: Problem, method: str, lr: str, seed: int, batch: int = 0, averaged: bool = False
    ) -> None:
        self.problem, self.data, self.batch = problem, problem.data(), batch or problem.batch
        self.key = (name, method, lr, self.batch, seed)
        self.model: nn.Module = problem.model(seed)
        if method.startswith("bn-"):
            self.model = with_batch_norm(self.model)  # type: ignore[arg-type]
        average = get_ema_multi_avg_fn(0.99)
        self.average = AveragedModel(self.model, multi_avg_fn=average) if averaged else None
        torch.manual_seed(seed)
        if method.startswith(OURS):
            self.optimizer = ours(self.model, problem.likelihood, **VARIANTS.get(method.partition(", ")[2], {}))
        else:
            self.optimizer = METHODS[method](self.model, float(lr))
        self.source = batches(self.data.x, self.data.y, self.batch, seed)
        self.rows: list[Row] = []
        self.step, self.seconds, self.alive = 0, 0.0, True

    def until(self, *, seconds: float = math.inf, steps: float = math.inf) -> Run:
        """Trains until its clock or its number of steps has come so far."""
        while self.alive and self.seconds < seconds and self.step < steps:
            wall, processor = time.perf_counter(), time.process_time()
            self._step()
            self.seconds += min(time.perf_counter() - wall, time.process_time() - processor)
            self.step += 1
        return self

    def _step(self) -> None:
        x, y = next(self.source)
        self.optimizer.zero_grad()
        self.problem.loss(self.model(x), y).backward()
        try:
            self.optimizer.step()
        except (FloatingPointError, WhiteningError):  # BPRONG does not go on from what is not finite
            self.alive = False
        if self.average is not None:
            self.average.update_parameters(self.model)

    def record(self, validate: bool = False) -> Row:
        """A row more: how the network does by now; infinite losses are those of a network that diverged."""
        row = self._row(self.model, self.key, validate)
        self.alive = math.isfinite(row.train_loss)
        self.rows.append(row)
        return row

    def record_average(self, method: str) -> Row:
        """The averaged weights as they do by now, under a name of their own; not among the run's rows."""
        assert self.average is not None
        return self._row(self.average, (self.key[0], method, *self.key[2:]), True)

    def _row(self, model: nn.Module, key: tuple[str, str, str, int, int], validate: bool) -> Row:
        count, data = self.problem.evaluate, self.data
        loss, accuracy = self._measure(model, data.x[:count], data.y[:count])
        val = self._measure(model, data.x_val[:count], data.y_val[:count])[0] if validate else math.nan
        if not (self.alive and math.isfinite(loss)):
            loss, val = math.inf, math.inf if validate else math.nan
        return Row(*key, self.step, self.seconds, loss, val, accuracy)

    def _measure(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss, and accuracy where there are classes; with Batch Normalisation the better one of its two modes."""
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
        for norm in norms:
            norm.momentum = 0.0  # running statistics stay as they are
        found = [self._evaluate(model.train(mode), x, y) for mode in ([False, True] if norms else [False])]
        for norm in norms:
            norm.momentum = 0.1
        model.train()
        return min(found)

    def _evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            output = model(x)
            loss = float(self.problem.loss(output, y))
        right = self.problem.likelihood == "categorical"
        return loss, float((output.argmax(-1) == y).sum() / (y >= 0).sum()) if right else math.nan
