"""Search spaces and quasi-random trials: what each method may tune, and the same number of draws for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.quasirandom import SobolEngine

SCRAMBLING = 15  # the seed of the scrambled Sobol points, chosen before any run
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class LogUniform:
    """A number from `low` to `high`, its logarithm evenly distributed; to three digits."""

    low: float
    high: float

    def at(self, u: float) -> float:
        return float(f"{self.low * (self.high / self.low) ** u:.3g}")

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Choice:
    """One of several values, each as likely."""

    values: Sequence[Any]

    def at(self, u: float) -> Any:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


Space = Mapping[str, LogUniform | Choice]


def trials(space: Space, count: int) -> list[dict[str, Any]]:
    """The first `count` settings of a space, from scrambled Sobol points; a space without dimensions has one.

    >>> trials({"lr": LogUniform(0.001, 0.1), "decay": Choice([0, 1])}, 2)
    [{'lr': 0.00548, 'decay': 0}, {'lr': 0.01, 'decay': 1}]
    >>> trials({}, 8)
    [{}]
    """
    if not space:
        return [{}]
    engine = SobolEngine(len(space), scramble=True, seed=SCRAMBLING)  # type: ignore[no-untyped-call]
    points = engine.draw(count, dtype=torch.float64).tolist()
    return [{name: side.at(u) for (name, side), u in zip(space.items(), point, strict=True)} for point in points]


def written(settings: Settings) -> str:
    """Settings as one line, by which a run is recognised in a file.

    >>> written({"lr": 0.01, "schedule": "cosine"})
    'lr=0.01 schedule=cosine'
    """
    return " ".join(f"{name}={_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def factor(schedule: str, warmup: float, step: int, steps: int) -> float:
    """What the learning rate is multiplied by in step 0, 1, …: a linear rise, then "constant", "cosine" or "linear".

    warmup: the share of the steps in which it rises

    >>> [round(factor("linear", 0.25, step, 8), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.833, 0.667, 0.5, 0.333, 0.167]
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return {"constant": 1.0, "cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[schedule]
