"""One run of a recipe: an optimizer, a schedule, a warm-up and averaged weights, for a given number of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from harness.methods import Method
from problems import Problem
from torch import Tensor, nn

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.search import factor

AVERAGED = 8  # an average begins this many of its spans before the end: what came earlier would have no weight in it


@dataclass(frozen=True)
class Outcome:
    """A trained network. Losses are infinite if training diverged: not finite, or above the untrained network's."""

    train_loss: float
    val_loss: float
    accuracy: float


class Training:
    """One network in training by a method with its settings, over `steps` steps.

    recent: the losses of all batches so far
    """

    def __init__(self, problem: Problem, method: Method, settings: Mapping[str, Any], steps: int, seed: int) -> None:
        own = {**settings, **method.fixed}
        self.problem = problem
        self.steps = steps
        self.data = problem.data()
        self.model = problem.model(seed)
        self.schedule = own.pop("schedule", "constant")
        self.warmup = own.pop("warmup", 0.0)
        self.span = own.pop("average", 0.0) * steps
        self.average = problem.model(seed) if self.span else None
        self.first_averaged = min(steps - 1, max(0, steps - round(AVERAGED * self.span)))
        self.criterion = nn.CrossEntropyLoss()
        torch.manual_seed(seed)
        self.optimizer = method.make(self.model, self.criterion, own, steps)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.source = batches(self.data.x, self.data.y, problem.batch, seed)
        self.recent: list[float] = []
        self._ready("train")

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.criterion(output.flatten(0, -2), y.flatten())

    def step(self) -> None:
        done = len(self.recent)
        share = factor(self.schedule, self.warmup, done, self.steps) if done < self.steps else 0.0
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        x, y = next(self.source)
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.recent.append(float(loss.detach()))
        if self.average is not None and done >= self.first_averaged:
            self._average(self.average, 1.0 if done == self.first_averaged else 1 / max(1.0, self.span))

    @torch.no_grad()
    def _average(self, average: nn.Module, weight: float) -> None:
        """Moves the average towards the model. Statistics of Batch Normalisation are averaged like weights."""
        current = self.model.state_dict()
        for name, value in average.state_dict().items():
            if value.is_floating_point():
                value.lerp_(current[name], weight)

    def run(self) -> Outcome:
        """Trains to the end and measures the network, or its average where the recipe has one."""
        try:
            while len(self.recent) < self.steps:
                self.step()
                if not math.isfinite(self.recent[-1]):
                    return DIVERGED
        except (FloatingPointError, bprong.WhiteningError):  # raised where values are not finite
            return DIVERGED
        return self.measure()

    def measure(self) -> Outcome:
        self._ready("eval")
        model = self.model if self.average is None else self.average
        data = self.data
        if data.y.ndim > 1:  # a text, too long to measure: the mean over the last twentieth of the steps
            last = self.recent[-max(1, self.steps // 20) :]
            train_loss = sum(last) / len(last)
        else:
            train_loss = self.evaluate(model, data.x, data.y)[0]
        val_loss = accuracy = math.nan
        if data.x_val is not None and data.y_val is not None:
            val_loss, accuracy = self.evaluate(model, data.x_val, data.y_val)
        self._ready("train")
        bad = not math.isfinite(train_loss) or train_loss > self.recent[0]
        return DIVERGED if bad else Outcome(train_loss, val_loss, accuracy)

    def _ready(self, mode: str) -> None:
        """Tells optimizers that keep two sets of weights (Schedule-Free) which of them the model should have."""
        getattr(self.optimizer, mode, lambda: None)()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy over all rows, in evaluation mode."""
        model.eval()
        loss = right = 0.0
        for inputs, targets in zip(x.split(self.problem.batch), y.split(self.problem.batch), strict=True):
            output = model(inputs)
            loss += float(self.loss(output, targets)) * len(inputs)
            right += float((output.argmax(-1) == targets).float().mean()) * len(inputs)
        model.train()
        return loss / len(x), right / len(x)


DIVERGED = Outcome(math.inf, math.inf, 0.0)
