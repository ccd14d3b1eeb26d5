"""Networks in training: one optimizer, one clock and one row per measurement."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from problems import Problem
from problems.networks import with_batch_norm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.rows import grouped
from bprong.experiments.bench.timing import Clock

AUTO = "bprong-auto"
NAMES = {
    "bprong-auto": 'BPRONG, lr="auto"',
    "bprong": "BPRONG",
    "bn-adam": "BN+Adam",
    "adam": "Adam",
    "nesterov": "SGD+Nesterov",
    "sgd": "SGD, momentum",
}


@dataclass(frozen=True)
class Row:
    """A network after some steps. Losses are infinite if training diverged, NaN if not measured.

    seconds: of training alone
    """

    problem: str
    method: str
    lr: str
    batch: int = 0
    seed: int = 0
    step: int = 0
    seconds: float = math.nan
    train_loss: float = math.nan
    val_loss: float = math.nan
    accuracy: float = math.nan


def name_of(method: str) -> str:
    """A method's name in tables and figures.

    >>> name_of("bprong-auto, weight decay 1e-4")
    'BPRONG, lr="auto", weight decay 1e-4'
    """
    family = next((known for known in NAMES if method.startswith(known)), method)
    return NAMES.get(family, family) + method.removeprefix(family)


def optimizer_for(model: nn.Module, problem: Problem, method: str, lr: str, **settings: Any) -> Optimizer:
    """The optimizer that a method's name stands for; `settings` are those of BPRONG or PRONG."""
    decay = problem.weight_decay
    family = re.split("[-,]", method)[0]
    if family in ("bprong", "prong"):
        kind = getattr(bprong, family.upper())
        rate = lr if lr == "auto" else float(lr)
        optimizer: Optimizer = kind(model, **{"lr": rate, "loss": problem.declared, "weight_decay": decay} | settings)
        return optimizer
    if method in ("adam", "bn-adam"):
        return Adam(model.parameters(), lr=float(lr), weight_decay=decay)
    return SGD(model.parameters(), lr=float(lr), momentum=0.9, nesterov=method == "nesterov", weight_decay=decay)


class Run:
    """One network in training.

    key:     problem, method, learning rate, batch size and seed: what its rows begin with
    rows:    what `record` has measured
    alive:   whether training can go on
    """

    def __init__(
        self, name: str, problem: Problem, method: str, lr: str, seed: int, batch: int = 0,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.problem = problem
        self.data = problem.data()
        self.key = (name, method, lr, batch or problem.batch, seed)
        model = problem.model(seed)
        self.model = with_batch_norm(model) if method.startswith("bn-") else model
        torch.manual_seed(seed)
        self.optimizer = optimizer_for(self.model, problem, method, lr, **settings)
        self.scheduler = CosineAnnealingLR(self.optimizer, problem.steps) if problem.cosine else None
        self.source = batches(self.data.x, self.data.y, batch or problem.batch, seed)
        self.clock = Clock()
        self.rows: list[Row] = []
        self.step = 0
        self.alive = True
        self.error = ""

    @property
    def method(self) -> str:
        return self.key[1]

    def until(self, *, seconds: float = math.inf, steps: float = math.inf) -> Run:
        """Trains until the clock shows `seconds` or `steps` steps have been made, whichever comes first."""
        while self.alive and self.clock.seconds < seconds and self.step < steps:
            with self.clock.running():
                self._train_step()
            self.step += 1
        return self

    def _train_step(self) -> None:
        x, y = next(self.source)
        self.optimizer.zero_grad()
        self._loss(self.model, x, y)[0].backward()
        if self.problem.clip:
            clip_grad_norm_(self.model.parameters(), self.problem.clip)
        try:
            self.optimizer.step()
        except (FloatingPointError, bprong.WhiteningError) as error:  # raised where values are not finite
            self.alive = False
            self.error = f"{type(error).__name__}: {error}"
        if self.scheduler is not None:
            self.scheduler.step()

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x)
        loss = self.problem.loss(output, y)
        return loss if self.problem.penalty is None else loss + self.problem.penalty(model), output

    def record(self, validate: bool = False) -> Row:
        """Measures the network and keeps the row. A run whose loss is not finite has diverged and ends."""
        row = self._row(self.model, self.key, validate)
        self.alive = math.isfinite(row.train_loss)
        self.rows.append(row)
        return row

    def _row(self, model: nn.Module, key: tuple[str, str, str, int, int], validate: bool) -> Row:
        count = self.problem.evaluated
        data = self.data
        loss, accuracy = self.evaluate(model, data.x[:count], data.y[:count])
        val_loss = math.nan
        if validate and data.x_val is not None and data.y_val is not None:
            val_loss = self.evaluate(model, data.x_val[:count], data.y_val[:count])[0]
        if not (self.alive and math.isfinite(loss)):
            loss = math.inf
            accuracy = 0.0
            val_loss = math.inf if validate else math.nan
        return Row(*key, self.step, self.clock.seconds, loss, val_loss, accuracy)

    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy (NaN without classes), in evaluation mode; with Batch Normalisation in the better mode.

        Training goes on as if nothing had been measured. A loss that is not finite is infinite.
        """
        normalised = any(isinstance(module, _BatchNorm) for module in model.modules())
        found = [self._evaluate(model.train(mode), x, y) for mode in ([False, True] if normalised else [False])]
        model.train()
        return min((pair for pair in found if math.isfinite(pair[0])), default=(math.inf, 0.0))

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss, output = self._loss(model, x, y)
        for buffer, before in kept:
            buffer.copy_(before)
        accuracy = math.nan
        if not y.is_floating_point() and output.ndim == y.ndim + 1:
            accuracy = float((output.argmax(-1) == y).sum() / (y >= 0).sum())
        return float(loss) / len(x) if self.problem.summed else float(loss), accuracy

    def __str__(self) -> str:
        name, method, lr, batch, seed = self.key
        end = f"loss {self.rows[-1].train_loss:.4g}" if self.alive else "diverged"
        run = f"{name:<18}{method:<30} lr {lr:<9}batch {batch:<6}seed {seed}"
        return f"{run}: {end} at step {self.step} ({self.clock.seconds:.1f} s)"


def paths_by(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[list[Row]]]:
    """By the values in some columns: the rows of every seed, as one list per seed."""
    return {key: list(grouped(own, "seed").values()) for key, own in grouped(rows, *columns).items()}
