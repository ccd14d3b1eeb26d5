"""Do habits of AdamW's users do to steps without a learning rate what they do to AdamW's?

A perceptron 64-100-10 on scikit-learn's digits, batches of 100, 150 steps. Each habit is applied to lr="auto" and to
AdamW at a learning rate of 0.01. Both are compared with themselves without the habit, in steps until the loss of the
whole training set is first below a target, and in the loss at the end. Targets are those that both reach after about 45
steps, because a warm-up of 20 steps costs more of a short run: 0.05, and 0.1 for AdamW. The bar: a habit may cost
1.3 times as many steps as it costs AdamW.

    python benchmarks/adamw_habits.py            a minute; prints the table
    python benchmarks/adamw_habits.py --step spectral
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean
from typing import Any

import torch
from harness.command_line import CommandLine
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

import bprong
from bprong.experiments.bench.tables import markdown

STEPS = 150
TARGET = 0.05
ADAMW_TARGET = 0.1
BAR = 1.3
ADAMW_RATE = 0.01

Schedule = Callable[[Optimizer, float], Any]


@dataclass(frozen=True)
class Habit:
    """What somebody does who is used to AdamW.

    rate:     the lr of AdamW; ours has none, and what is written is relative to it
    groups:   learning rates of the two layers, relative to `rate`
    written:  what is written into the groups before the first step, relative to `rate`
    schedule: makes a scheduler for an optimizer, given `rate`
    """

    weight_decay: float = 0.0
    groups: tuple[float, float] | None = None
    written: float | None = None
    schedule: Schedule | None = None


def noam(optimizer: Optimizer, rate: float) -> Any:
    """As written for Transformers: the lr of the groups is 1, and a function of t multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    peak = 40
    return schedulers.LambdaLR(optimizer, lambda t: rate * min((t + 1) / peak, (peak / (t + 1)) ** 0.5))


HABITS = {
    "plain": Habit(),
    "weight_decay=0.1": Habit(weight_decay=0.1),
    "lr written by hand": Habit(written=1.0),
    "groups of 1 and 1": Habit(groups=(1.0, 1.0)),
    "groups of 0.3 and 1": Habit(groups=(0.3, 1.0)),
    "OneCycleLR": Habit(schedule=lambda o, rate: schedulers.OneCycleLR(o, rate, total_steps=STEPS)),
    "cosine": Habit(schedule=lambda o, _: schedulers.CosineAnnealingLR(o, STEPS)),
    "warm-up": Habit(schedule=lambda o, _: schedulers.LinearLR(o, 0.1, total_iters=20)),
    "ReduceLROnPlateau": Habit(schedule=lambda o, _: schedulers.ReduceLROnPlateau(o, factor=0.3, patience=10)),
    "CyclicLR": Habit(schedule=lambda o, rate: schedulers.CyclicLR(o, rate / 10, rate, step_size_up=20)),
    "Noam's schedule": Habit(schedule=noam),
}


@cache
def digits() -> tuple[Tensor, Tensor]:
    data, labels = load_digits(return_X_y=True)
    x = torch.tensor(data, dtype=torch.float32) / 16
    return x - x.mean(dim=0), torch.tensor(labels)


def optimizer_of(model: nn.Sequential, criterion: nn.Module, habit: Habit, step: str | None) -> Optimizer:
    """Ours with the kind of step, or AdamW, before a schedule is made."""
    params: Any = list(model.parameters())
    if habit.groups:
        pairs = zip((model[0], model[2]), habit.groups, strict=True)
        params = [{"params": layer.parameters(), "lr": ADAMW_RATE * part} for layer, part in pairs]
    if step is None:
        return AdamW(params, lr=ADAMW_RATE, weight_decay=habit.weight_decay)
    optimizer = bprong.BPRONG(model, criterion, step=step, params=params, weight_decay=habit.weight_decay, every=10)
    if habit.written:
        for group in optimizer.param_groups:
            group["lr"] = ADAMW_RATE * habit.written
    return optimizer


def losses(habit: Habit, step: str | None, seed: int, steps: int = STEPS) -> list[float]:
    """The loss of the whole training set after each step."""
    x, y = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = optimizer_of(model, criterion, habit, step)
    scheduler = habit.schedule(optimizer, ADAMW_RATE) if habit.schedule else None
    on_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
    generator = torch.Generator().manual_seed(seed)
    found: list[float] = []
    rows = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(rows) < 100:
            rows = torch.randperm(len(x), generator=generator)
        batch, rows = rows[:100], rows[100:]
        optimizer.zero_grad()
        loss = criterion(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step(*([loss.item()] if on_plateau else []))
        with torch.no_grad():
            found.append(float(nn.functional.cross_entropy(model(x), y)))
    return found


def steps_to(target: float, path: Sequence[float]) -> int:
    """How many steps were made until the loss was below the target; twice the steps of a run that missed it."""
    return next((t for t, loss in enumerate(path, 1) if loss < target), 2 * STEPS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__)
    parser.setting("seeds", [0, 1, 2, 3, 4], [0], "seeds")
    parser.add_argument("--step", choices=["natural", "spectral", "auto"], default="natural", help="of lr=auto")
    options = parser.parse(arguments)
    steps = 3 if options.quick else STEPS
    lines = []
    plain: dict[str | None, tuple[float, float]] = {}
    for name, habit in HABITS.items():
        cells = []
        costs = []
        for step, target in ((options.step, TARGET), (None, ADAMW_TARGET)):
            paths = [losses(habit, step, seed, steps) for seed in options.seeds]
            count = geometric_mean(steps_to(target, path) for path in paths)
            end = geometric_mean(path[-1] for path in paths)
            plain.setdefault(step, (count, end))
            costs.append(count / plain[step][0])
            cells += [f"{count:.0f}", f"{costs[-1]:.2f}", f"{end:.2g}", f"{end / plain[step][1]:.2f}"]
        lines.append([name, *cells, "yes" if costs[0] <= BAR * costs[1] else "no"])
        print(*lines[-1], flush=True)
    columns = ["steps", "× plain", "loss at the end", "× plain"]
    print(markdown(["habit", *columns, *(f"AdamW: {column}" for column in columns), "within the bar"], lines))


if __name__ == "__main__":
    main()
