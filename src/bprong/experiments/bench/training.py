"""One run: a network trained by a method until both targets are reached, the budget is used up, or it diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bprong.errors import LinAlgError, WhiteningError
from bprong.experiments.bench.data import Split, batches
from bprong.experiments.bench.search import factor
from bprong.experiments.bench.targets import Target
from bprong.experiments.bench.timing import Clock
from bprong.experiments.bench.workloads import Loss, Measurement, Workload
from bprong.optim.averaging import AveragedWeights

WARMUP = 0.05  # the share of a schedule in which the rate rises
CONSTANT_WARMUP = 0.3  # a constant rate rises as in a schedule over this share of the step budget
AVERAGED = 0.05  # the share of all steps so far that a weight average spans; targets were found with this one


class Trainer(Protocol):
    """What a method makes: its parameter groups, whose "lr" the schedule sets, and a step on one batch."""

    optimizer: torch.optim.Optimizer

    @property
    def groups(self) -> list[dict[str, Any]]: ...

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on a batch and return its loss."""

    def ready(self, mode: str) -> None:
        """Prepare the weights for "train" or "eval", for methods that keep two sets of them."""


class Plain:
    """The ordinary training loop of a torch optimizer."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def ready(self, mode: str) -> None:
        getattr(self.optimizer, mode, lambda: None)()  # Schedule-Free has train() and eval()


class Point(NamedTuple):
    """A network during a run. seconds: of training alone."""

    step: int
    seconds: float
    train_loss: float
    val_loss: float


@dataclass(frozen=True)
class Outcome:
    """A run. The points are those at which losses were measured; `end` says why it ended."""

    points: list[Point]
    steps: int
    seconds: float
    end: str


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    make:   makes the trainer of a network, from the network, its loss, the settings and the step budget
    limit:  seconds of training after which a run ends, as AlgoPerf's do
    """

    workload: Workload
    make: Callable[[nn.Module, Loss, Mapping[str, Any], int], Trainer]
    settings: Mapping[str, Any]
    split: Split
    seed: int
    target: Target
    normalised: bool = False
    limit: float = math.inf


class Run:
    """A network in training. The settings "schedule" and those of the method are explained in `methods.py`."""

    def __init__(self, start: Start) -> None:
        workload = start.workload
        settings = dict(start.settings)
        schedule = settings.pop("schedule", "constant")
        self.warmup: float = settings.pop("warmup", WARMUP)
        self.start = start
        make_model = workload.normalised if start.normalised else workload.model
        assert make_model is not None
        self.model = make_model(start.seed)
        self.average = AveragedWeights(self.model) if schedule == "averaged" else None
        if self.average is not None:
            self.average.eta = 1 / AVERAGED - 1
        self.horizon = schedule * workload.steps if isinstance(schedule, float) else math.inf
        torch.manual_seed(start.seed)
        self.trainer = start.make(self.model, workload.criterion(), settings, workload.steps)
        self.rates = [group["lr"] for group in self.trainer.groups]
        own = workload.data(start.split)
        self.source = batches(own.x, own.y, workload.batch, start.seed)
        self.measure = Measurement(workload, start.split)
        self.clock = Clock()
        self.step = 0
        self.points: list[Point] = []

    def complete(self) -> Outcome:
        """Train to the end."""
        end = "step budget used up"
        self.trainer.ready("train")
        for due in self.start.workload.measured_steps():
            try:
                while self.step < due:
                    self._train_step()
                self._record()
            except (FloatingPointError, WhiteningError, LinAlgError) as error:
                end = f"diverged: {type(error).__name__}"
                break
            if reason := self._reason_to_stop():
                end = reason
                break
        return Outcome(self.points, self.step, self.clock.seconds, end)

    def _train_step(self) -> None:
        share = self._share()
        for group, rate in zip(self.trainer.groups, self.rates, strict=True):
            group["lr"] = rate * share
        x, y = next(self.source)
        with self.clock.running():
            if self.average is not None:
                self.average.add(self.model.parameters())
            loss = self.trainer.step(x, y)
            if not math.isfinite(float(loss)):
                raise FloatingPointError("the loss is not finite")
            self.step += 1

    def _share(self) -> float:
        """What the rates are multiplied by: they rise, and then stay or fall to zero along a straight line."""
        if math.isinf(self.horizon):
            rising = self.warmup * CONSTANT_WARMUP * self.start.workload.steps
            return min(1.0, (self.step + 1) / max(1.0, rising))
        steps = round(self.horizon)
        return factor("linear", self.warmup, min(self.step, steps), steps)

    def _record(self) -> None:
        self.trainer.ready("eval")
        average = nullcontext() if self.average is None else self.average.in_the_model(self.trainer.optimizer)
        with average:
            losses = self.measure(self.model)
        self.trainer.ready("train")
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError("a measured loss is not finite")
        self.points.append(Point(self.step, self.clock.seconds, *losses))

    def _reason_to_stop(self) -> str:
        if self.start.target.reached_by(self.points):
            return "both targets reached"
        if self.step >= self.horizon:
            return "learning rate fell to zero"
        if self.clock.seconds > self.start.limit:
            return "time limit"
        return ""
